"""What lies already where a checkpoint is to lie."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable
from typing import Any, NamedTuple

from mfload import errors
from mfload.formats.discovery import INDEX_SUFFIX, SUFFIX
from mfload.formats.safetensors import MAX_HEADER
from mfload.saving.layout import REPLACED
from mfload.saving.targets import Place
from mfload.sources.local import LocalFile


class Found(NamedTuple):
    """What lies at a place.

    Attributes:
        single: Whether the single file is there.
        indexed: Whether the index is.
        placed: Files in the directory to which the index leads, or that it says are to go.
        shards: Without an index, one complete set of files that are named as its shards.
        strays: Other files with names of its shards; they are not touched.
        hidden: Files that writers left, or have not finished.
        kept: Files to which other indexes in the directory lead.
        others: Other checkpoints' files and indexes that a load of the directory would see.
        doubt: An index that is there and can't be read: what it leads to may be any file, so
            that none may go. None where all were read.
        broken: The same for the own index, where the system refused it.
    """

    single: bool
    indexed: bool
    placed: frozenset[str]
    shards: frozenset[str]
    strays: frozenset[str]
    hidden: frozenset[str]
    kept: frozenset[str]
    others: tuple[str, ...]
    doubt: str | None = None
    broken: errors.TargetError | None = None

    @property
    def names(self) -> frozenset[str]:
        """The files of the checkpoint, the single one and the index left out."""
        return (self.placed | self.shards) - self.kept


def look(place: Place) -> Found:
    """Looks at what lies at a place.

    Raises:
        TargetError: The directory can't be listed.
    """
    try:
        names = frozenset(os.listdir(place.directory))
    except OSError as error:
        raise errors.from_target(error, place.directory, "list the directory") from error
    hidden = place.hidden_among(names)
    none: frozenset[str] = frozenset()
    if place.stem is None or place.index is None:
        return Found(place.name in names, False, none, none, none, hidden, none, ())
    single, indexed = place.name in names, place.index in names
    named = _named_as_shards(place.stem, names)
    shards = named if not indexed and _complete(place.stem, named) else none
    doubt: str | None = None
    broken: errors.TargetError | None = None
    placed = none
    if indexed:
        try:
            # Whatever lies in other directories, or is no such file, is not ours to touch.
            own = _leads_to(place, place.index, replaced=True)
            placed = frozenset(filter(_is_plain, own)) & names
            placed |= _twins(place.directory, placed, named - placed)
        except errors.SourceError as error:
            doubt, broken = place.index, _unread(place, error)
        except errors.FormatError:
            doubt = place.index
    seen = [name for name in names if name.endswith((SUFFIX, INDEX_SUFFIX)) and name[0] != "."]
    indexes = sorted(each for each in seen if each.endswith(INDEX_SUFFIX) and each != place.index)
    kept: set[str] = set()
    # Read where something might be removed alone: they may be many, and large.
    for each in indexes if hidden or indexed or named or single else []:
        try:
            kept |= _leads_to(place, each)
        except (errors.SourceError, errors.FormatError):
            doubt = doubt or each
    files = sorted(name for name in seen if name.endswith(SUFFIX))
    ours = shards | placed | {place.name}
    others = (*indexes, *(name for name in files if name not in ours))
    return Found(
        single,
        indexed,
        placed,
        shards,
        named - placed - shards,
        hidden,
        frozenset(kept),
        others,
        doubt,
        broken,
    )


def _named_as_shards(stem: str, names: Iterable[str]) -> frozenset[str]:
    shard = re.compile(re.escape(stem) + r"-(\d{5,})-of-(\d{5,})" + re.escape(SUFFIX))
    return frozenset(n for n in names if n.startswith(stem) and shard.fullmatch(n))


def _complete(stem: str, shards: frozenset[str]) -> bool:
    """Whether they are all the shards of one checkpoint, as we and the hub name them."""
    width = max(5, len(str(len(shards))))
    total = f"{len(shards):0{width}}"
    made = frozenset(f"{stem}-{n + 1:0{width}}-of-{total}{SUFFIX}" for n in range(len(shards)))
    return bool(shards) and made == shards


def _twins(directory: str, placed: frozenset[str], named: frozenset[str]) -> frozenset[str]:
    """Second names of files to which the index leads: a writer died before it led to these."""
    files = {_identity(directory, name) for name in placed} - {None} if named else set()
    return frozenset(name for name in named if _identity(directory, name) in files)


def _identity(directory: str, name: str) -> tuple[int, int] | None:
    try:
        status = os.lstat(os.path.join(directory, name))
    except OSError:
        return None  # Gone meanwhile: somebody heeds no lock.
    return status.st_dev, status.st_ino


def _is_plain(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return name == os.path.basename(name) and name.endswith(SUFFIX)


def _unread(place: Place, error: errors.SourceError) -> errors.TargetError:
    told = errors.TargetError(
        f"the index of the old checkpoint can't be read, so that nothing is replaced: "
        f"{error.message}",
        file=os.path.join(place.directory, str(place.index)),
        found=error.found,
    )
    told.errno, told.strerror = error.errno, error.strerror
    return told


def _leads_to(place: Place, index: str, *, replaced: bool = False) -> frozenset[str]:
    """Files to which an index leads; none where it is gone.

    Raises:
        SourceError: The system refused it, or it is no regular file.
        FormatError: It is no index.
    """
    try:
        source = LocalFile(os.path.join(place.directory, index))
        if source.size > MAX_HEADER:
            raise errors.HeaderError("the index is over the cap", file=source.path)
        table: Any = json.loads(source.read(0, source.size))
        files = list(table["weight_map"].values())
        if replaced and isinstance(table.get("metadata"), dict):
            files += table["metadata"].get(REPLACED, [])
        return frozenset(os.path.normpath(name) for name in files)
    except errors.SourceNotFoundError:
        return frozenset()
    except errors.MfloadError:
        raise
    except (ValueError, RecursionError, TypeError, KeyError, AttributeError) as error:
        raise errors.HeaderError("no checkpoint index", file=index) from error
