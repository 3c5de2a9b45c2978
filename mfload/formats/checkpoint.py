"""The headers of all files of a checkpoint, as one index."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from mfload import errors
from mfload.formats import discovery, hints, safetensors, strict_json
from mfload.formats.discovery import CheckpointFiles, Path
from mfload.index import Index, TensorInfo
from mfload.sources.local import LocalFile

_TRIES = 5


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
        values = [
            value if isinstance(value, int | None) else str(value)
            for value in (error.expected, error.found)
        ]
        return Problem(error.message, error.file, error.tensor, *values)

    def __str__(self) -> str:
        what, file, tensor, expected, found = self
        return str(
            errors.MfloadError(what, file=file, tensor=tensor, expected=expected, found=found)
        )


@dataclass(slots=True)
class Headers:
    """What the headers of a checkpoint say, and what is wrong with them.

    Attributes:
        sources: Files whose header was read; pieces of tensors refer to them by number.
        tensors: The tensors by name, in file order; of two with one name, the first.
        unnamed: Tensors that the index does not name.
    """

    found: CheckpointFiles
    sources: list[LocalFile] = field(default_factory=list[LocalFile])
    tensors: dict[str, TensorInfo] = field(default_factory=dict[str, TensorInfo])
    metadata: dict[str, str] | None = None
    unnamed: set[str] = field(default_factory=set[str])
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


def read(path: Path | Sequence[Path]) -> tuple[Index, list[LocalFile]]:
    """Reads the headers of a checkpoint; returns the index, and the source of each of its files.

    They are read again if a writer replaced the checkpoint meanwhile: half of the shards may have
    been looked at before and half after. Sources notice that, and so do names that do not fit the
    index. What tells it from damage is that the index changed too.

    Raises:
        UsageError: `path` is not a path.
        SourceError: A file is missing or can't be read.
        HeaderError: A header is malformed.
        CheckpointError: The files disagree; one error names all offenders.
        MemoryLimitError: The headers do not fit in memory.
    """
    for left in reversed(range(_TRIES)):
        before = discovery.state(path)
        try:
            seen = read_headers(discovery.find(path))
            # The first may have been replaced while the last was read.
            for source in seen.sources[:-1]:
                source.check()
            files, missing = seen.found.files, seen.found.missing
            if seen.problems:
                what = "the files of the checkpoint disagree"
                problems = (*missing, *map(str, seen.problems))
                raise errors.CheckpointError(what, file=seen.found.name, problems=problems)
            if missing:
                what = "shards are missing"
                raise errors.ShardNotFoundError(what, file=seen.found.name, problems=missing)
            if seen.unnamed:
                count = len(seen.unnamed)
                seen.notes.append(f"{count} tensors are in the shards but not in the index")
            index = Index(tuple(files), seen.tensors, seen.metadata, tuple(seen.notes))
            return index, seen.sources
        except (errors.SourceError, errors.FormatError) as error:
            if left and discovery.state(path) != before:
                continue
            if isinstance(error, errors.SourceNotFoundError):
                hints.explain_path(error, path)
            raise
        except MemoryError as error:
            if isinstance(error, errors.MfloadError):
                raise
            name = path if isinstance(path, str | os.PathLike) else None
            raise errors.MemoryLimitError("the headers do not fit in memory", file=name) from None
    raise AssertionError("unreachable")


def read_headers(found: CheckpointFiles, *, every: bool = False) -> Headers:
    """Reads the header of each file and compares them with the index.

    `every`: a file that can't be read is a problem, and the others are read; by default it raises.
    """
    seen = Headers(found)
    tensors, problems = seen.tensors, seen.problems
    for file in found.files:
        try:
            source = LocalFile(file)
            rows, strings = safetensors.read(source, len(seen.sources))
        except (errors.SourceError, errors.FormatError) as error:
            alone = len(found.files) == 1 and isinstance(error, errors.SourceNotFoundError)
            if alone or not every:
                raise
            problems.append(Problem.of(error))
            continue
        seen.sources.append(source)
        if strings is not None:
            seen.metadata = {**(seen.metadata or {}), **strings}
        for row in rows:
            known = tensors.setdefault(row.name, row)
            if known is not row:
                holders = f"{seen.file_of(known)} and {file}"
                problems.append(
                    Problem("two files hold the tensor", None, row.name, "one file", holders)
                )
    if found.placed is not None:
        _compare_index(seen, found.placed)
    return seen


def _compare_index(seen: Headers, placed: dict[str, str]) -> None:
    paths = [source.path for source in seen.sources]
    files = set(paths)
    for name, file in placed.items():
        row = seen.tensors.get(name)
        holder = None if row is None else paths[row.pieces[0].source]
        if holder != file and file in files:
            what = "the tensor is not where the index says"
            seen.problems.append(Problem(what, seen.found.name, name, file, holder or "no file"))
    seen.unnamed = seen.tensors.keys() - placed.keys()
    complete = not (seen.unnamed or seen.found.missing) and len(files) == len(seen.found.files)
    total = sum(row.nbytes for row in seen.tensors.values())
    if complete and seen.found.total not in (None, total):
        # Off in many published checkpoints, and no loader uses it.
        given = strict_json.brief(seen.found.total)
        seen.notes.append(f"the index gives a total_size of {given}, its tensors take {total}")
