"""Shards of a save that has not finished, or was killed: the draft of their index tells.

A save of several files over nothing gives its index a hidden name before the shards get theirs,
and the final name after (see `saving.publishing`). Until then they are no checkpoint. A name alone
does not tell a shard from a user's own file: it must also hold the tensors that the draft places
in it, and have the draft's owner and its time of change to the nanosecond, which the save gave to
both. What is no regular file is neither.
"""

from __future__ import annotations

import collections
import contextlib
import os
import re
import stat
from collections.abc import Collection

from mfload import errors, sources
from mfload.formats import safetensors
from mfload.formats.safetensors import INDEX_SUFFIX, SUFFIX, read_index

HIDDEN = ".mfload-"
"""Hidden names of a save begin with it."""
INDEX_END = "-index"
"""That of the draft of an index ends with it."""

_NUMBERS = re.compile(r"-\d+-of-\d+" + re.escape(SUFFIX))
_SHOWN = 3


def shards(directory: str, names: Collection[str]) -> list[str]:
    """Of the names in a directory, those of shards whose index has not got its name."""
    found: set[str] = set()
    for name in names:
        if name.startswith(HIDDEN) and name.endswith(INDEX_END):
            # What can't be read, or has got its name meanwhile, tells of none.
            with contextlib.suppress(OSError, errors.SourceError, errors.FormatError):
                found |= _shards(directory, name, names)
    return sorted(found)


def _shards(directory: str, draft: str, names: Collection[str]) -> set[str]:
    path = os.path.join(directory, draft)
    mark = _mark(path)
    # Compared first: reading all drafts that anything might have put there could take long.
    shards = [name for name in names if name.endswith(SUFFIX) and name[0] != "."]
    shards = [name for name in shards if _mark(os.path.join(directory, name)) == mark]
    if mark is None or not shards:
        return set()
    held: dict[str, set[str]] = collections.defaultdict(set)
    for tensor, file in read_index(sources.local_file(path))["weight_map"].items():
        held[file].add(tensor)
    if any(_NUMBERS.sub(INDEX_SUFFIX, file) in names for file in held):
        return set()
    found: set[str] = set()
    for name in shards:
        with contextlib.suppress(errors.SourceError, errors.FormatError):
            rows, _ = safetensors.read(sources.local_file(os.path.join(directory, name)))
            # A shard without tensors is not named by the draft.
            if {row.name for row in rows} == held.get(name, set()):
                found.add(name)
    return found


def _mark(path: str) -> tuple[int, int] | None:
    """What a save gives to the draft and to its shards alike; None for no regular file."""
    with contextlib.suppress(OSError):
        found = os.lstat(path)
        if stat.S_ISREG(found.st_mode):
            return found.st_uid, found.st_mtime_ns
    return None


def told(names: Collection[str]) -> str:
    """Says of some shards that they are such."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    what = errors.counted(len(names), "shard")
    return f"{what} of a save that did not finish: {', '.join([*names][:_SHOWN])}{more}"
