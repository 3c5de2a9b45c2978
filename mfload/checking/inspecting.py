"""The headers of a checkpoint with all that is wrong in them, not the first of it alone."""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from mfload import errors
from mfload.formats import discovery, safetensors, surroundings
from mfload.formats.discovery import Found, Path
from mfload.formats.strict_json import brief
from mfload.index import TensorInfo
from mfload.sources.local import LocalFile

_ALIGNED = 64  # Bytes that every framework takes without a copy.
_DIRECT = 4096  # Bytes that suit O_DIRECT everywhere.


class Problem(NamedTuple):
    """Something that is not as it should be.

    Attributes:
        what: In words.
        file: Path of the file concerned.
        tensor: Name of the tensor concerned.
        expected: What should have been there.
        found: What was there.
    """

    what: str
    file: str | None = None
    tensor: str | None = None
    expected: object = None
    found: object = None

    @staticmethod
    def of(error: errors.MfloadError) -> Problem:
        """An error as a finding."""
        return Problem(error.message, error.file, error.tensor, error.expected, error.found)

    def __str__(self) -> str:
        fields = self._asdict()
        return str(errors.MfloadError(fields.pop("what"), **fields))


@dataclass(slots=True)
class Inspected:
    """What the headers say.

    Attributes:
        files: Paths of all files, in the order in which they are read.
        sources: Those whose header holds; pieces refer to them by number.
        rows: The tensors of each source, in file order.
        problems: All that is wrong.
        notes: What is worth a word and is not wrong.
        name: What stands for the whole checkpoint, None for a list of files.
        indexed: Whether an index says which file holds what.
    """

    files: list[str]
    sources: list[LocalFile] = field(default_factory=list[LocalFile])
    rows: list[list[TensorInfo]] = field(default_factory=list[list[TensorInfo]])
    problems: list[Problem] = field(default_factory=list[Problem])
    notes: list[str] = field(default_factory=list[str])
    name: str | None = None
    indexed: bool = False

    @property
    def tensors(self) -> dict[str, TensorInfo]:
        """The tensors by name; of two by one name, the first."""
        found: dict[str, TensorInfo] = {}
        for row in itertools.chain.from_iterable(self.rows):
            found.setdefault(row.name, row)
        return found

    def file_of(self, info: TensorInfo) -> str:
        """The file that holds a tensor."""
        return self.sources[info.pieces[0].source].path


def inspect(path: Path | Sequence[Path]) -> Inspected:
    """Reads the headers of a checkpoint and checks them, and the index against them.

    Raises:
        UsageError: It is no path.
        SourceError: There is nothing there.
        CheckpointError: Several checkpoints lie side by side.
    """
    try:
        return _inspect(path)
    except errors.SourceNotFoundError as error:
        raise surroundings.explain(error, path) from None


def _inspect(path: Path | Sequence[Path]) -> Inspected:
    try:
        found = discovery.find(path, partial=True)
    except errors.FormatError as error:
        # An index that is broken is a finding. That nobody can tell which checkpoint is meant
        # is not, nor is a path without one.
        if error.file is None or os.path.isdir(error.file):
            raise
        problems = [Problem.of(error), *map(Problem, error.problems)]
        return Inspected([], problems=problems, name=error.file, indexed=True)
    seen = Inspected(found.files, name=found.name, indexed=found.placed is not None)
    seen.problems += [Problem(line, file=found.name) for line in found.missing]
    for file in found.files:
        _read(seen, file)
    _check_twice(seen)
    if found.placed is not None:
        _check_index(seen, found, found.placed)
    _note_dtypes(seen)
    _note_alignment(seen)
    return seen


def _read(seen: Inspected, file: str) -> None:
    try:
        source = LocalFile(file)
        rows, _ = safetensors.read(source, len(seen.sources))
    except errors.SourceNotFoundError:
        if len(seen.files) == 1 and not seen.problems:
            raise
        seen.problems.append(Problem("the file is not there", file))
    except (errors.SourceError, errors.FormatError) as error:
        seen.problems.append(Problem.of(error))
    except MemoryError:
        raise errors.MemoryLimitError("the headers do not fit in memory", file=file) from None
    else:
        seen.sources.append(source)
        seen.rows.append(rows)


def _check_twice(seen: Inspected) -> None:
    first = seen.tensors
    for row in itertools.chain.from_iterable(seen.rows):
        if first[row.name] is not row:
            holders = f"{seen.file_of(first[row.name])} and {seen.file_of(row)}"
            seen.problems.append(
                Problem("two files hold the tensor", None, row.name, None, holders)
            )


def _check_index(seen: Inspected, found: Found, placed: Mapping[str, str]) -> None:
    tensors = seen.tensors
    whole = {source.path for source in seen.sources}
    for name, file in placed.items():
        row = tensors.get(name)
        if row is None and file in whole:
            seen.problems.append(Problem("the index names a tensor that is not there", file, name))
        elif row is not None and file in whole and seen.file_of(row) != file:
            what, other = "the tensor is not where the index says", seen.file_of(row)
            seen.problems.append(Problem(what, found.name, name, file, other))
    if found.missing:
        return  # What the index says of these is not known here.
    for name, row in tensors.items():
        if name not in placed:
            what = "the index does not name the tensor"
            seen.problems.append(Problem(what, seen.file_of(row), name))
    if found.total is not None and len(whole) == len(seen.files):
        total = sum(row.nbytes for row in tensors.values())
        if found.total != total:
            what = "metadata.total_size of the index is not the size of its tensors"
            seen.problems.append(Problem(what, found.name, None, total, brief(found.total)))
    _note_others(seen, found)


def _note_others(seen: Inspected, found: Found) -> None:
    directory = os.path.dirname(found.name or "")
    named = {os.path.basename(file) for file in seen.files}
    try:
        others = {name for name in os.listdir(directory) if name.endswith(discovery.SUFFIX)} - named
    except OSError:
        return
    if others:
        seen.notes.append(
            f"{len(others)} files lie beside the index that it does not name: "
            + ", ".join(sorted(others)[:3])
        )


def _note_dtypes(seen: Inspected) -> None:
    unknown = Counter(row.dtype.name for row in seen.tensors.values() if not row.dtype.known)
    for name, count in unknown.items():
        seen.notes.append(f"{count} tensors have a dtype that mfload does not know: {brief(name)}")


def _note_alignment(seen: Inspected) -> None:
    held = [row for rows in seen.rows for row in rows if row.nbytes]
    if not held:
        return
    aligned = sum(row.pieces[0].offset % _ALIGNED == 0 for row in held)
    starts = [rows[0].pieces[0].offset for rows in seen.rows if rows]
    suited = sum(start % _DIRECT == 0 for start in starts)
    note = (
        f"{aligned} of {len(held)} tensors begin on a multiple of {_ALIGNED} bytes, "
        f"and the data of {suited} of {len(starts)} files on one of {_DIRECT}"
    )
    # Sizes that are no multiples leave the next tensor where they end, whoever lays them out.
    better = [row for row in held if row.nbytes % _ALIGNED == 0 and row.pieces[0].offset % _ALIGNED]
    if better or suited < len(starts):
        note += "; `mfload align` rewrites them for zero-copy and direct reads"
    seen.notes.append(note)
