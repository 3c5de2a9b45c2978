"""Shards of a save that has not finished, or was killed, recognised by the draft of their index.

If there is no old checkpoint, a save of several files writes the index under a hidden name, gives
the shards their names, then the index its own (see `saving.publishing`). Until then the shards are
not a checkpoint. To tell a shard from a user's file of the same name, it must be a regular file
that holds exactly the tensors that the draft assigns to it, and have the draft's owner and its
modification time to the nanosecond: the save sets one time for all its files.
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
"""Beginning of the hidden names of saves."""
INDEX_END = "-index"
"""End of the hidden name of the draft of an index."""

_NUMBERS = re.compile(r"-\d+-of-\d+" + re.escape(SUFFIX))
_SHOWN = 3

_Mark = tuple[int, int]


def shards(directory: str, names: Collection[str]) -> list[str]:
    """The names in a directory that are shards whose index has not got its name yet."""
    drafts = [name for name in names if name.startswith(HIDDEN) and name.endswith(INDEX_END)]
    # Compared before anything is read: there could be many drafts, and large ones.
    alike: dict[_Mark | None, list[str]] = collections.defaultdict(list)
    for name in names if drafts else ():
        if name.endswith(SUFFIX) and name[0] != ".":
            alike[_mark(os.path.join(directory, name))].append(name)
    found: set[str] = set()
    for draft in drafts:
        mark = _mark(os.path.join(directory, draft))
        if mark is not None and mark in alike:
            # A draft that can't be read, or was renamed meanwhile, leads to none.
            with contextlib.suppress(errors.SourceError, errors.FormatError):
                found |= _shards(directory, draft, alike[mark], names)
    return sorted(found)


def _shards(
    directory: str, draft: str, shards: Collection[str], names: Collection[str]
) -> set[str]:
    held: dict[str, set[str]] = collections.defaultdict(set)
    index = read_index(sources.local_file(os.path.join(directory, draft)))
    for tensor, file in index["weight_map"].items():
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


def _mark(path: str) -> _Mark | None:
    """What a save gives to the draft and to its shards alike; None for no regular file."""
    with contextlib.suppress(OSError):
        found = os.lstat(path)
        if stat.S_ISREG(found.st_mode):
            return found.st_uid, found.st_mtime_ns
    return None


def told(names: Collection[str]) -> str:
    """Describes such shards, for errors and notes."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    what = errors.counted(len(names), "shard")
    return f"{what} of a save that did not finish: {', '.join([*names][:_SHOWN])}{more}"
