"""The headers of all files of a checkpoint, as one index."""

from __future__ import annotations

import os
from collections.abc import Sequence

from mfload import errors
from mfload.formats import discovery, safetensors, surroundings
from mfload.formats.discovery import Found, Path
from mfload.index import Index, TensorInfo
from mfload.sources.local import LocalFile

_TRIES = 5


def read(path: Path | Sequence[Path]) -> tuple[Index, list[LocalFile]]:
    """Reads the headers of a checkpoint.

    Args:
        path: A `.safetensors` file, a directory, a `.safetensors.index.json`, or a list of
            files.

    Returns:
        The index, and the source of each of its `files`.

    Raises:
        UsageError: It is no path.
        SourceError: A file is missing or can't be read.
        HeaderError: A header is malformed.
        CheckpointError: The files disagree; one error names all offenders.
        MemoryLimitError: The headers do not fit in memory.
    """
    try:
        return _settled(path)
    except errors.SourceNotFoundError as error:
        raise surroundings.explain(error, path) from None
    except errors.MfloadError:
        raise
    except MemoryError:
        name = path if isinstance(path, str | os.PathLike) else None
        raise errors.MemoryLimitError("the headers do not fit in memory", file=name) from None


def _settled(path: Path | Sequence[Path]) -> tuple[Index, list[LocalFile]]:
    """Reads the headers, again where a writer put another checkpoint in place meanwhile.

    Half of the shards may have been looked at before and half after: sources notice that, and so
    do names that do not fit the index. What tells it from damage is that the index changed too.
    """
    tries = 0
    while True:
        tries += 1
        before = discovery.state(path)
        try:
            return _read(discovery.find(path))
        except (errors.SourceError, errors.FormatError):
            if tries == _TRIES or discovery.state(path) == before:
                raise


def _read(found: Found) -> tuple[Index, list[LocalFile]]:
    files = found.files
    sources = [LocalFile(file) for file in files]
    tensors: dict[str, TensorInfo] = {}
    metadata: dict[str, str] | None = None
    problems = list(found.missing)
    for number, source in enumerate(sources):
        rows, strings = safetensors.read(source, number)
        if strings is not None:
            metadata = metadata or {}
            metadata.update(strings)
        for row in rows:
            known = tensors.setdefault(row.name, row)
            if known is not row:
                holders = f"{files[known.pieces[0].source]} and by {source.path}"
                problems.append(f"{row.name!r} is held by {holders}")
    notes: list[str] = []
    if found.placed is not None:
        problems += _misplaced(found.placed, tensors, files)
        extra = len(tensors.keys() - found.placed.keys())
        if extra:
            notes.append(f"{extra} tensors are in the shards but not in the index")
    if problems:
        raise errors.CheckpointError(
            "the files of the checkpoint disagree", file=found.name, problems=tuple(problems)
        )
    return Index(tuple(files), tensors, metadata, tuple(notes)), sources


def _misplaced(
    placed: dict[str, str], tensors: dict[str, TensorInfo], files: list[str]
) -> list[str]:
    problems: list[str] = []
    for name, file in placed.items():
        row = tensors.get(name)
        if row is None:
            problems.append(f"{name!r} should be in {file}, no shard holds it")
        elif files[row.pieces[0].source] != file:
            problems.append(f"{name!r} should be in {file}, found in {files[row.pieces[0].source]}")
    return problems
