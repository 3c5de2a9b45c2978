"""The names of manifests of checksums, and which manifests belong to a checkpoint.

A manifest has the whole name of its checkpoint, followed by `.checksums.json`:

| checkpoint | manifest |
|---|---|
| a file, such as `ckpt-100.safetensors` or `a.npz` | `ckpt-100.safetensors.checksums.json` |
| shards, with an index or without | as for the file `a.safetensors` that they are shards of |
| another index, `list.json` | `list.json.checksums.json` |
| several files in a list | the first name, how many more, and a hash of all names |
| a directory that is read as a whole | `checkpoint.checksums.json` in it |

Only `-00001-of-00002` counts as the number of a shard. Earlier versions left out the ending of the
format, and other numbers too.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import stat
from collections.abc import Callable, Collection, Sequence
from typing import Any

from mfload import errors, sources
from mfload.formats import discovery, strict_json
from mfload.formats.base import FORMATS
from mfload.formats.discovery import INDEX_SUFFIX
from mfload.sources.base import read_whole

SUFFIX = ".checksums.json"
LONGEST = 240
"""Bytes of the longest name: file systems take 255, and hidden names of drafts are longer."""
MAX_SIZE = 256 << 20
"""Bytes of the longest manifest that is read: some two million tensors."""

_SHARD = re.compile(r"(?P<stem>.+)-[0-9]+-of-(?P<total>[0-9]+)(?P<end>\.[^.]+)?", re.DOTALL)
_LIST = re.compile(r".+\+[0-9]+-[0-9a-f]{12}" + re.escape(SUFFIX), re.DOTALL)
_WHOLE = "checkpoint"
# Errors for a name that does not exist. Old names of manifests may be too long to exist.
_NOTHING = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG)


def named(name: str) -> str:
    """The name of the manifest of a checkpoint; a long one is cut and ends with a hash."""
    raw, most = os.fsencode(name), LONGEST - len(SUFFIX)
    if len(raw) > most:
        end = f"-{_hash(raw)}"
        # A character is not cut in two.
        name = raw[: most - len(end)].decode("utf-8", "ignore") + end
    return name + SUFFIX


def as_text(name: str) -> str:
    """The name of a file as a manifest has it: with escapes for bytes that are not UTF-8."""
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def saved_as(name: str) -> str:
    """The name of the checkpoint of a file; for a shard or an index, without number or ending."""
    if name.endswith(INDEX_SUFFIX):
        return name.removesuffix(".index.json")
    shard = _SHARD.fullmatch(name)
    return name if shard is None else shard["stem"] + (shard["end"] or "")


def incomplete(names: Collection[str]) -> bool:
    """Whether these files are some of the shards of one checkpoint, and not all."""
    shards = list(map(_SHARD.fullmatch, names))
    return bool(shards) and all(each and len(names) < int(each["total"]) for each in shards)


def names_of(names: Sequence[str], index: str | None = None, *, whole: bool = False) -> list[str]:
    """Names that a manifest of these files may have: the default, then those that are also read.

    Args:
        names: Of the files, relative to their directory.
        index: Name of the index that leads to them.
        whole: Whether a directory was named, and these are what it holds.
    """
    base, made = [os.path.basename(name) for name in names], {*map(saved_as, names)}
    if index is not None:
        first = saved_as(index)
    elif len(names) == 1:
        first = base[0]
    elif len(made) == 1 and made.isdisjoint(names):
        first = os.path.basename(made.pop())
    elif whole:
        first = _WHOLE
    else:
        several = "\0".join(sorted(names)).encode("utf-8", "surrogateescape")
        first = f"{min(base)}+{len(names) - 1}-{_hash(several)}"
    others = [saved_as(base[0])] if index is None and len(names) == 1 else []
    found = [first, *others, *([_WHOLE] if whole else ())]
    return list(dict.fromkeys([*map(named, found), *_old_names(base, index)]))


def rivals(directory: str, manifest: str, names: Collection[str]) -> list[str]:
    """Files of other checkpoints to which earlier versions gave a manifest of this name, too.

    `names` are the files of the checkpoint itself, and its index.
    """
    ours = {as_text(saved_as(name)) for name in names}
    files = [n for n in _listed(directory) if n.endswith((*FORMATS, INDEX_SUFFIX)) and n[0] != "."]
    others = [n for n in files if as_text(saved_as(n)) not in ours]
    return [n for n in others if manifest in _old_names([n], n)]


def lying(directory: str, names: Collection[str], index: str | None = None) -> list[str]:
    """Names of the manifests in a directory that are for these files, also if for others too.

    They are removed when the files, all of one checkpoint, are replaced: the manifest of a set of
    shards no longer holds if one of them is another.
    """
    new = {*map(named, names)}
    old = {n for name in names for n in _old_names([name])} | {*_old_names([*names], index)}
    several = {named(_WHOLE), *(named(saved_as(name)) for name in names)}
    several |= {n for n in _listed(directory) if _LIST.fullmatch(n)}
    found: list[str] = []
    for name in sorted(new | old | several):
        if not stat.S_ISREG(_mode(os.path.join(directory, name), os.stat, errors.from_target) or 0):
            continue
        own = name in new and not rivals(directory, name, [*names, index or ""])
        known = None if own else _files_of(os.path.join(directory, name))
        if known == set() and name in old:  # It lists no files.
            own = not incomplete(names) and not rivals(directory, name, [*names, index or ""])
        if own or (known and not known.isdisjoint(map(as_text, names))):
            found.append(name)
    return found


def _listed(directory: str) -> list[str]:
    try:
        return sorted(os.listdir(directory))
    except OSError:
        return []


def is_there(path: str) -> bool:
    """Whether a manifest's name is taken; raises SourceError if that is unknown."""
    return _mode(path, os.lstat, errors.from_os) is not None


def _mode(path: str, look: Callable[[str], os.stat_result], told: Callable[..., Any]) -> int | None:
    """The mode of what has the name of a manifest; None if nothing has it."""
    try:
        return look(path).st_mode
    except OSError as error:
        if error.errno in _NOTHING:
            return None
        raise told(error, path, "look at the manifest") from error


def _files_of(path: str) -> set[str] | None:
    """The files that a manifest names; None if it can't be read."""
    try:
        source = sources.find(path)
        table = strict_json.loads(read_whole(source, MAX_SIZE, "too long"), path, "manifest")
        return {*table.get("files", ()), *table.get("identity", ())}
    except (errors.MfloadError, AttributeError, TypeError):
        return None  # Unknown.


def _old_names(names: Sequence[str], index: str | None = None) -> list[str]:
    """Names that earlier versions gave to the manifest of these files, the latest first."""
    if index is not None and index.endswith(INDEX_SUFFIX):
        return [index.removesuffix(INDEX_SUFFIX) + SUFFIX]
    found: list[str] = []
    for alone in (len(names) == 1, False):
        stems = {discovery.stem(name, alone=alone) for name in names}
        found.append(((stems.pop() if len(stems) == 1 else "") or _WHOLE) + SUFFIX)
    return found


def _hash(raw: bytes) -> str:
    return hashlib.sha256(raw).hexdigest()[:12]
