"""The headers of all files of a checkpoint, as one index."""

from __future__ import annotations

import os
from collections.abc import Sequence

from mfload import errors
from mfload.formats import discovery, hints, safetensors, strict_json
from mfload.formats.discovery import CheckpointFiles, Path
from mfload.index import Index, TensorInfo
from mfload.sources.local import LocalFile

_TRIES = 5


def read(path: Path | Sequence[Path]) -> tuple[Index, list[LocalFile]]:
    """Reads the headers of a checkpoint.

    They are read again if a writer replaced the checkpoint meanwhile: half of the shards may have
    been looked at before and half after. Sources notice that, and so do names that do not fit the
    index. What tells it from damage is that the index changed too.

    Args:
        path: A `.safetensors` file, a directory, a `.safetensors.index.json`, or a list of files.

    Returns:
        The index, and the source of each of its `files`.

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
            return _read(discovery.find(path))
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


def _read(found: CheckpointFiles) -> tuple[Index, list[LocalFile]]:
    files = found.files
    sources = list(map(LocalFile, files))
    tensors: dict[str, TensorInfo] = {}
    metadata: dict[str, str] | None = None
    problems: list[str] = []
    for number, source in enumerate(sources):
        rows, strings = safetensors.read(source, number)
        if strings is not None:
            metadata = {**(metadata or {}), **strings}
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
        total = sum(row.nbytes for row in tensors.values())
        if found.total not in (None, total) and not extra and not found.missing:
            # Off in many published checkpoints, and no loader uses it.
            given = strict_json.brief(found.total)
            notes.append(f"the index gives a total_size of {given}, its tensors take {total}")
    if problems or found.missing:
        kind = errors.CheckpointError if problems else errors.ShardNotFoundError
        what = "the files of the checkpoint disagree" if problems else "shards are missing"
        raise kind(what, file=found.name, problems=(*found.missing, *problems))
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
