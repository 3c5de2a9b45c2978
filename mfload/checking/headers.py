"""The headers of a checkpoint with all that is wrong in them, where a load stops at the first."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from mfload import errors
from mfload.formats import discovery, hints, safetensors
from mfload.formats.discovery import CheckpointFiles, Path
from mfload.formats.strict_json import brief
from mfload.index import TensorInfo
from mfload.sources.local import LocalFile

_ALIGNED = 64  # Bytes that every framework takes without a copy.
_DIRECT = 4096  # Bytes that suit O_DIRECT everywhere.


class Problem(NamedTuple):
    """Something that is wrong with a checkpoint."""

    what: str
    file: str | None = None
    tensor: str | None = None
    expected: object = None
    found: object = None

    @staticmethod
    def of(error: errors.MfloadError) -> Problem:
        """An error as a problem."""
        return Problem(error.message, error.file, error.tensor, error.expected, error.found)

    def __str__(self) -> str:
        what, file, tensor, expected, found = self
        told = errors.MfloadError(what, file=file, tensor=tensor, expected=expected, found=found)
        return str(told)


@dataclass(slots=True)
class Inspection:
    """What the headers of a checkpoint say.

    Attributes:
        files: Paths of all files, in the order in which they are read.
        index: Path of the index; None if there is none.
        sources: Files whose header is sound; pieces of tensors refer to them by number.
        rows: The tensors of each source, in file order.
        tensors: The tensors by name; of two with one name, the first.
    """

    files: list[str]
    index: str | None = None
    sources: list[LocalFile] = field(default_factory=list[LocalFile])
    rows: list[list[TensorInfo]] = field(default_factory=list[list[TensorInfo]])
    tensors: dict[str, TensorInfo] = field(default_factory=dict[str, TensorInfo])
    problems: list[Problem] = field(default_factory=list[Problem])
    notes: list[str] = field(default_factory=list[str])

    def file_of(self, info: TensorInfo) -> str:
        """The file that holds a tensor."""
        return self.sources[info.pieces[0].source].path

    def add(
        self, what: str, info: TensorInfo, expected: object = None, found: object = None
    ) -> None:
        """Adds a problem of a tensor."""
        self.problems.append(Problem(what, self.file_of(info), info.name, expected, found))


def inspect(path: Path | Sequence[Path]) -> Inspection:
    """Reads the headers of a checkpoint and checks them, and the index against them.

    Raises if nothing is there, or several checkpoints lie side by side.
    """
    try:
        found = discovery.find(path, partial=True)
        seen = Inspection(found.files, None if found.placed is None else found.name)
        seen.problems += [Problem(line, file=found.name) for line in found.missing]
        for file in found.files:
            _read(seen, file)
    except errors.SourceNotFoundError as error:
        raise hints.explain_path(error, path) from None
    except errors.FormatError as error:
        # A broken index is a problem; not to know which checkpoint is meant is an error.
        if error.file is None or os.path.isdir(error.file):
            raise
        problems = [Problem.of(error), *map(Problem, error.problems)]
        return Inspection([], error.file, problems=problems)
    if found.placed is not None:
        _check_index(seen, found, found.placed)
    unknown = Counter(row.dtype.name for row in seen.tensors.values() if not row.dtype.known)
    for name, count in unknown.items():
        seen.notes.append(f"{count} tensors have a dtype that mfload does not know: {brief(name)}")
    seen.notes += _alignment(seen.rows)
    return seen


def _read(seen: Inspection, file: str) -> None:
    try:
        source = LocalFile(file)
        rows, _ = safetensors.read(source, len(seen.sources))
    except errors.SourceNotFoundError:
        if len(seen.files) == 1 and not seen.problems:
            raise
        seen.problems.append(Problem("the file is missing", file))
        return
    except (errors.SourceError, errors.FormatError) as error:
        seen.problems.append(Problem.of(error))
        return
    except MemoryError:
        raise errors.MemoryLimitError("the headers do not fit in memory", file=file) from None
    seen.sources.append(source)
    seen.rows.append(rows)
    for row in rows:
        first = seen.tensors.setdefault(row.name, row)
        if first is not row:
            found = f"{seen.file_of(first)} and {file}"
            seen.problems.append(Problem("two files hold the tensor", None, row.name, None, found))


def _check_index(seen: Inspection, found: CheckpointFiles, placed: Mapping[str, str]) -> None:
    sound = {source.path for source in seen.sources}
    for name, file in placed.items():
        row = seen.tensors.get(name)
        if row is None and file in sound:
            what = "the index names a tensor that the file does not hold"
            seen.problems.append(Problem(what, file, name))
        elif row is not None and file in sound and seen.file_of(row) != file:
            what, other = "the tensor is not where the index says", seen.file_of(row)
            seen.problems.append(Problem(what, found.name, name, file, other))
    if found.missing:
        return  # What the index says of the missing files can't be checked.
    for name, row in seen.tensors.items():
        if name not in placed:
            seen.add("the index does not name the tensor", row)
    total = sum(row.nbytes for row in seen.tensors.values())
    if found.total is not None and found.total != total and len(sound) == len(seen.files):
        # Off in many published checkpoints, and no loader goes by it.
        seen.notes.append(
            f"metadata.total_size of the index is {brief(found.total)}, its tensors take {total} "
            "bytes; loaders ignore it"
        )
    try:
        there = os.listdir(os.path.dirname(found.name or ""))
    except OSError:
        return
    named = {os.path.basename(file) for file in seen.files}
    others = sorted({name for name in there if name.endswith(discovery.SUFFIX)} - named)
    if others:
        some = ", ".join(others[:3])
        seen.notes.append(f"{len(others)} files beside the index are not named by it: {some}")


def _alignment(rows: Sequence[Sequence[TensorInfo]]) -> Iterator[str]:
    held = [(row.pieces[0].offset, row.nbytes) for some in rows for row in some if row.nbytes]
    if not held:
        return
    aligned = sum(offset % _ALIGNED == 0 for offset, _ in held)
    starts = [some[0].pieces[0].offset for some in rows if some]
    suited = sum(start % _DIRECT == 0 for start in starts)
    note = (
        f"{aligned} of {len(held)} tensors begin on a multiple of {_ALIGNED} bytes, "
        f"and the data of {suited} of {len(starts)} files on one of {_DIRECT}"
    )
    # After a tensor whose size is no multiple, no layout can align the next one.
    if suited < len(starts) or any(n % _ALIGNED == 0 and at % _ALIGNED for at, n in held):
        note += "; `mfload align` rewrites them for zero-copy and direct reads"
    yield note
