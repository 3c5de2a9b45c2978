"""From what a user names (file, directory, index, list) to one index over all its files."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from mfload import errors
from mfload.formats import safetensors
from mfload.index import Index, TensorInfo
from mfload.io.source import LocalFile

Path = str | os.PathLike[str]

SUFFIX = ".safetensors"
INDEX_SUFFIX = ".safetensors.index.json"

# Names that stand for a whole checkpoint of their own. Two of them side by side hold two
# versions of a model, or a model and its adapter, and loading both is never what was meant.
_WHOLE = frozenset({"model", "consolidated", "adapter_model", "pytorch_model",
                    "diffusion_pytorch_model", "optimizer"})  # fmt: skip


def read(path: Path | Sequence[Path]) -> tuple[Index, list[LocalFile]]:
    """Reads the headers of a checkpoint.

    Args:
        path: A `.safetensors` file, a directory, a `.safetensors.index.json`, or a list of
            files.

    Returns:
        The index, and the source of each of its `files`.

    Raises:
        SourceError: A file is missing or can't be read.
        HeaderError: A header is malformed.
        CheckpointError: The files disagree; one error names all offenders.
    """
    found = find(path)
    files, placed = found.files, found.placed
    sources = [LocalFile(file) for file in files]
    tensors: dict[str, TensorInfo] = {}
    metadata: dict[str, str] | None = None
    problems = list(found.missing)
    for number, source in enumerate(sources):
        rows, strings = safetensors.read(source, number)
        if strings is not None:
            metadata = {**(metadata or {}), **strings}
        for row in rows:
            known = tensors.setdefault(row.name, row)
            if known is not row:
                holders = sorted({files[known.pieces[0].source], source.path})
                problems.append(f"{row.name!r} is held by {' and by '.join(holders)}")
    notes: list[str] = []
    if placed is not None:
        placed = {name: file for name, file in placed.items() if file in files}
        problems += _misplaced(placed, tensors, files)
        extra = len(tensors.keys() - found.placed.keys()) if found.placed else 0
        if extra:
            notes.append(f"{extra} tensors are in the shards but not in the index")
    if problems:
        raise errors.CheckpointError(
            "the files of the checkpoint disagree",
            file=os.fspath(path) if isinstance(path, str | os.PathLike) else None,
            problems=tuple(problems),
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


class Found(NamedTuple):
    """The files of a checkpoint.

    Attributes:
        files: Paths, in the order in which they are read.
        placed: The file of each tensor where an index says so.
        missing: A line for each file that the index names and that is not there.
    """

    files: list[str]
    placed: dict[str, str] | None = None
    missing: tuple[str, ...] = ()


def find(path: Path | Sequence[Path]) -> Found:
    """Names the files of a checkpoint without reading their headers.

    Raises:
        SourceNotFoundError: There is nothing to load there.
        CheckpointError: Several checkpoints lie side by side, or the index leads astray.
    """
    if not isinstance(path, str | os.PathLike):
        files = [os.fspath(each) for each in path]
        if not files:
            raise errors.UsageError("an empty list of files")
        return Found(files)
    name = os.fspath(path)
    if os.path.isdir(name):
        return _in_directory(name)
    if name.endswith(".json"):
        return _from_index(name)
    return Found([name])


def _in_directory(directory: str) -> Found:
    try:
        names = sorted(os.listdir(directory))
    except OSError as error:
        raise errors.from_os(error, directory, "list") from error
    indexes = [name for name in names if name.endswith(INDEX_SUFFIX)]
    if len(indexes) > 1:
        raise _several(directory, indexes)
    if indexes:
        return _from_index(os.path.join(directory, indexes[0]))
    files = [name for name in names if name.endswith(SUFFIX)]
    families: dict[str, list[str]] = {}
    for name in files:
        families.setdefault(_family(name), []).append(name)
    if len(families) > 1 and not _WHOLE.isdisjoint(families):
        raise _several(directory, [_choice(members) for members in families.values()])
    if not files:
        raise errors.SourceNotFoundError(
            "nothing to load in the directory",
            file=directory,
            expected=f"*{INDEX_SUFFIX} or *{SUFFIX}",
            found=", ".join(names[:8]) or "an empty directory",
        )
    return Found([os.path.join(directory, name) for name in files])


def _family(name: str) -> str:
    """A file's name less its suffix and shard number: model-00001-of-00002 → model."""
    return re.sub(r"([-_.]?\d+(-of-\d+)?)$", "", name.removesuffix(SUFFIX))


def _choice(members: list[str]) -> str:
    return members[0] if len(members) == 1 else f"{members[0]} … ({len(members)} files)"


def _several(directory: str, choices: list[str]) -> errors.CheckpointError:
    return errors.CheckpointError(
        "several checkpoints side by side; name one of them, or list the files",
        file=directory,
        problems=tuple(choices),
    )


def _from_index(path: str) -> Found:
    source = LocalFile(path)
    if source.size > safetensors.MAX_HEADER:
        raise errors.HeaderError(
            "the index is over the cap",
            file=path,
            expected=f"at most {safetensors.MAX_HEADER} bytes",
            found=f"{source.size} bytes",
        )
    table: Any = safetensors.load_json(source.read(0, source.size), path)
    weights = table.get("weight_map") if isinstance(table, dict) else None
    if not isinstance(weights, dict) or not all(isinstance(x, str) for x in weights.values()):
        raise errors.HeaderError(
            "no checkpoint index", file=path, expected='{"weight_map": {name: file}}'
        )
    directory = os.path.dirname(path)
    shards = sorted(set(weights.values()))
    astray = tuple(f"{name!r} leads out of the directory" for name in shards if _astray(name))
    if astray:
        raise errors.CheckpointError(
            "the index names files outside its directory", file=path, problems=astray
        )
    if not shards:
        raise errors.CheckpointError("the index names no file", file=path)
    # lexists: a link that leads nowhere fails on opening, with its own error.
    there = {x for x in shards if os.path.lexists(os.path.join(directory, x))}
    return Found(
        [os.path.join(directory, shard) for shard in shards if shard in there],
        {name: os.path.join(directory, shard) for name, shard in weights.items()},
        tuple(
            f"{shard!r} is named by the index and not there ({_count(weights, shard)})"
            for shard in shards
            if shard not in there
        ),
    )


def _astray(name: str) -> bool:
    # Only the name is judged: the links with which the Hugging Face cache lays its
    # snapshots do lead elsewhere, and were made by the owner of the directory.
    parts = re.split(r"[/\\]", name)
    return not name or "\0" in name or ".." in parts or os.path.isabs(name) or ":" in parts[0]


def _count(weights: dict[str, str], shard: str) -> str:
    tensors = [name for name, file in weights.items() if file == shard]
    return f"{len(tensors)} tensors, {tensors[0]!r} among them"
