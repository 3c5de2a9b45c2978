"""The headers of a checkpoint with all that is wrong in them, where a load stops at the first."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence

import numpy as np

from mfload import errors
from mfload.formats import base, checkpoint, discovery, hints, safetensors
from mfload.formats.checkpoint import Headers, Problem
from mfload.formats.discovery import CheckpointFiles
from mfload.formats.strict_json import brief
from mfload.options import LoadOptions
from mfload.sources import PathOrBytes

_ALIGNED = 64  # Bytes that every framework takes without a copy.
_DIRECT = 4096  # Bytes that suit O_DIRECT everywhere.


def inspect(
    path: PathOrBytes | Sequence[PathOrBytes], options: LoadOptions | None = None
) -> Headers:
    """Reads the headers of a checkpoint and checks them, and the index against them.

    Raises if there is nothing at the path, several checkpoints lie side by side, or a writer
    replaced the checkpoint meanwhile.
    """
    before = discovery.state(path)
    try:
        seen = _inspect(path, options)
    except (errors.SourceError, errors.FormatError):
        discovery.check_state(path, before)
        raise
    if seen.problems:
        discovery.check_state(path, before)
    return seen


def _inspect(path: PathOrBytes | Sequence[PathOrBytes], options: LoadOptions | None) -> Headers:
    try:
        seen = checkpoint.read_headers(discovery.find(path, options), every=True)
        checkpoint.check_unchanged(seen.found, seen.sources)
    except errors.SourceNotFoundError as error:
        raise hints.explain_path(error, path) from None
    except errors.FormatError as error:
        # A broken index is a problem; not to know which checkpoint is meant is an error.
        if error.file is None or os.path.isdir(error.file):
            raise
        seen = Headers(CheckpointFiles([], {}, name=error.file))
        seen.problems += [Problem.of(error), *map(Problem, error.problems)]
        return seen
    except MemoryError:
        raise errors.MemoryLimitError("the headers do not fit in memory") from None
    name, missing = seen.found.name, seen.missing
    seen.problems[:0] = [Problem(line, file=name) for line in missing]
    if not missing:  # Else an unnamed tensor may be one of the missing files.
        for info in map(seen.tensors.__getitem__, filter(seen.unnamed.__contains__, seen.tensors)):
            seen.add("the index does not name the tensor", info)
    for name, files in seen.copies.items():  # Other loaders take the last, or refuse them.
        holders = " and ".join([(seen.found.placed or {})[name], *files])
        seen.problems.append(Problem("two files hold the tensor", None, name, "one file", holders))
    seen.notes += _other_files(seen)
    columns = seen.tensors.columns
    unknown = Counter[str]()
    for kind, count in Counter(columns.kind).items():
        if not (dtype := columns.kinds[kind][0]).known:
            unknown[dtype.name] += count
    for name, count in unknown.items():
        of = errors.counted(count, "tensor")
        seen.notes.append(f"of a dtype that mfload does not know: {of}: {brief(name)}")
    seen.notes += _alignment(seen)
    return seen


def _other_files(seen: Headers) -> list[str]:
    """A note about files beside the index that it does not name."""
    if seen.found.index_file is None:
        return []
    try:
        there = os.listdir(os.path.dirname(seen.found.index_file))
    except OSError:
        return []
    named = {os.path.basename(file) for file in seen.found.names}
    others = sorted({name for name in there if name.endswith(discovery.SUFFIX)} - named)
    some = ", ".join(others[:3])
    note = f"beside the index, not named by it: {errors.counted(len(others), 'file')}: {some}"
    return [note] if others else []


def _alignment(seen: Headers) -> list[str]:
    """A note about how the tensors lie in the files."""
    columns = seen.tensors.columns
    if seen.found.directory is not None:
        return []
    if any(base.find(source) is not safetensors for source in seen.sources):
        return []
    sources, starts, sizes = map(np.asarray, (columns.sources, columns.offsets, columns.nbytes))
    filled = sizes > 0
    sources, starts, sizes = sources[filled], starts[filled], sizes[filled]
    if not starts.size:
        return []
    _, first = np.unique(sources, return_index=True)
    aligned = starts % _ALIGNED == 0
    suited = np.count_nonzero(starts[first] % _DIRECT == 0)
    tensors = f"{np.count_nonzero(aligned)} of {errors.counted(starts.size, 'tensor')}"
    files = f"{suited} of {errors.counted(first.size, 'file')}"
    note = f"on a multiple of {_ALIGNED} bytes: {tensors}; data on one of {_DIRECT}: {files}"
    # After a tensor whose size is no multiple, no layout can align the next one.
    improvable = np.any(~aligned & (sizes % _ALIGNED == 0))
    if suited < first.size or improvable:
        note += "; `mfload align` rewrites them for zero-copy and direct reads"
    return [note]
