"""What lies already where a checkpoint is to lie."""

from __future__ import annotations

import json
import os
import re
from typing import Any, NamedTuple

from mfload import errors
from mfload.formats.finding import INDEX_SUFFIX, SUFFIX
from mfload.targets import Place


class Found(NamedTuple):
    """What lies at a place.

    Attributes:
        single: Whether the single file is there.
        indexed: Whether the index is.
        placed: Files in the directory to which the index leads.
        shards: Files with names of shards, whether the index knows them or not.
        hidden: Files that writers left, or have not finished.
        kept: Files to which other indexes in the directory lead.
        others: Other checkpoints' files and indexes that a load of the directory would see.
    """

    single: bool
    indexed: bool
    placed: frozenset[str]
    shards: frozenset[str]
    hidden: frozenset[str]
    kept: frozenset[str]
    others: tuple[str, ...]

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
    hidden = frozenset(filter(place.is_hidden, names))
    if place.stem is None or place.index is None:
        none: frozenset[str] = frozenset()
        return Found(place.name in names, False, none, none, hidden, none, ())
    shard = re.compile(re.escape(place.stem) + r"-\d+-of-\d+" + re.escape(SUFFIX))
    shards = frozenset(filter(shard.fullmatch, names))
    # Whatever lies in other directories is not ours to touch.
    placed = _leads_to(place, place.index) & names if place.index in names else frozenset[str]()
    seen = sorted(name for name in names if not name.startswith("."))
    indexes = [name for name in seen if name.endswith(INDEX_SUFFIX) and name != place.index]
    kept = frozenset(name for index in indexes for name in _leads_to(place, index))
    files = [name for name in seen if name.endswith(SUFFIX)]
    others = [name for name in files if name not in shards | placed | {place.name}]
    return Found(
        place.name in names,
        place.index in names,
        placed,
        shards,
        hidden,
        kept,
        (*indexes, *others),
    )


def _leads_to(place: Place, index: str) -> frozenset[str]:
    """Files to which an index leads; none where it can't be read."""
    try:
        with open(os.path.join(place.directory, index), "rb") as file:
            table: Any = json.load(file)
        return frozenset(os.path.normpath(name) for name in table["weight_map"].values())
    except (OSError, ValueError, RecursionError, TypeError, KeyError, AttributeError):
        return frozenset()
