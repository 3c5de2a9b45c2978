"""Models of the Hugging Face Hub as sources: `hf://org/name[@revision][/folder][/file]`.

The cache of `huggingface_hub` comes first: a snapshot that holds all a load needs is read from the
disk. Else ranges are requested of the one commit that the revision stands for, and nothing is
written to the disk. What the cache has of an incomplete snapshot is not used: the plan takes the
same costs for all files of a checkpoint.
"""

from __future__ import annotations

import json
import logging
import os
import posixpath
from collections.abc import Collection, Iterator
from contextlib import suppress
from typing import NamedTuple

from mfload import errors
from mfload.options import LoadOptions
from mfload.sources.base import Source
from mfload.sources.directories import Directory, LocalDirectory
from mfload.sources.hub_model import (
    FILES,
    FIRST,
    INDEX,
    OFFLINE,
    HubPath,
    HubSource,
    Model,
    some,
    surroundings,
)
from mfload.sources.local import LocalFile
from mfload.sources.tls import Tls


def open_url(url: str, options: LoadOptions) -> Source | Directory:
    """The file or directory of a URL, in the cache of `huggingface_hub` or on the hub.

    A snapshot in the cache that holds all needed files is used. The hub is asked which commit a
    branch stands for, unless HF_HUB_OFFLINE is set; if it can't be reached, the cached one counts.

    Raises:
        UsageError: The URL is malformed.
        FrameworkMissingError: `huggingface_hub` is not installed.
        SourceError: There is no such model, revision or file, or it may not be read.
    """
    asked = HubPath.of(url)
    tls = Tls(options.cert_file, options.key_file, options.ca_file)
    model = Model(asked, options.headers or (), options.timeout, tls, options.max_bandwidth)
    held = model.cached(asked.revision)
    usable = held if held is not None and not _lacks(held, asked.path) else None
    # Of a commit, a file in the cache, or an index, tells what is needed; a folder may lack files.
    if usable and asked.fixed and _tells(os.path.join(usable, asked.path)):
        return _local(usable, asked.path)
    if surroundings().HF_HUB_OFFLINE:
        if usable:
            return _local(usable, asked.path, f": {OFFLINE}")
        raise model.uncached([] if held is None else _lacks(held, asked.path))
    try:
        model = model.resolved(patient=not usable)
    except errors.ReadError as error:
        if not usable:
            raise
        why = f", which may be old: {error.message}"
        logging.getLogger("mfload").warning("%s: from the hub's cache%s", asked.name, why)
        return _local(usable, asked.path, why)
    except errors.SourceError as error:
        if usable:
            error.add_note(f"the cache has a snapshot of it: {OFFLINE} loads that one")
        raise
    return _placed(model, asked.path)


def _placed(model: Model, path: str) -> Source | Directory:
    """What lies at a path of a commit: from the cache if that has all of it."""
    whole = HubDirectory(model, path)
    single = path in model.files or (path.endswith(FILES) and not whole.names())
    if path and not single and not whole.names():
        raise model.missing(path)
    note = f"{model.asked.id} at commit {model.commit[:12]}, by ranges from {model.endpoint}"
    if held := model.cached(model.commit):
        lacking = _lacks(held, path, model)
        if not lacking:
            return _local(held, path)
        note += f"; the cache lacks {some(lacking)}"
    if not single:
        return whole._replace(notes=(note,))
    source = HubSource(model, path)
    source.directory = HubDirectory(model, os.path.dirname(path))
    return source


def _local(snapshot: str, path: str, why: str = "") -> Source | Directory:
    """What lies at a path of a snapshot in the cache; `why` follows what its note says."""
    place, note = os.path.join(snapshot, path), f"from the hub's cache at {snapshot}{why}"
    if os.path.isfile(place):
        return LocalFile(place)
    found = CachedDirectory(place)
    found.notes = (note,)
    return found


def _tells(place: str) -> bool:
    """Whether a place in the cache is a file, or a folder with an index."""
    with suppress(OSError):
        return os.path.isfile(place) or any(name.endswith(INDEX) for name in os.listdir(place))
    return False


def _lacks(snapshot: str, path: str, model: Model | None = None) -> list[str]:
    """The files that a load of a path needs and a snapshot in the cache does not hold.

    `model`: what the commit has, by the hub's list. Default: what the snapshot has.
    """
    single = os.path.isfile(os.path.join(snapshot, path)) if model is None else path in model.files
    folder, name = posixpath.split(path) if single else (path, "")
    mine = os.path.join(snapshot, folder)
    try:
        whole = LocalDirectory(mine) if model is None else HubDirectory(model, folder)
        names = {name} if name else {*_weights(whole)}
    except errors.SourceError:
        return [path]
    for index in [name for name in names if name.endswith(INDEX)]:
        names.update(_named(os.path.join(mine, index)))
    lacking: list[str] = []
    for at in sorted(posixpath.normpath(posixpath.join(folder, name)) for name in names):
        entry, size = model and model.files.get(at), _size(os.path.join(snapshot, at))
        if size is None or (entry and entry.size not in (None, size)):
            lacking.append(at)
    return lacking


def _size(path: str) -> int | None:
    """Bytes of a file; None if there is none, or not any more."""
    with suppress(OSError):
        return os.path.getsize(path) if os.path.isfile(path) else None
    return None


def _named(index: str) -> list[str]:
    """The files that an index in the cache names; none if it can't be read."""
    try:
        with open(index, encoding="utf-8") as file:
            return [*map(str, json.load(file)["weight_map"].values())]
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return []


def _weights(folder: Directory) -> Collection[str]:
    """The files that a load of a folder looks at first; all, if it is an Orbax checkpoint."""
    names = [name for name in folder.names() if name[0] != "."]
    for suffixes in FIRST:
        if found := [n for n in names if n.endswith(suffixes) and folder.is_file(n)]:
            return found
    below = any(map(folder.is_directory, names))
    return [name for name, _ in folder.walk()] if below else ["*.safetensors"]


class CachedDirectory(LocalDirectory):
    """A folder of a snapshot in the cache; notes say so."""

    notes: tuple[str, ...] = ()


class HubDirectory(NamedTuple):
    """A folder of a commit as a `Directory`; nothing is asked: the list of its files is known."""

    model: Model
    path: str
    notes: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Its URL."""
        return self.model.name(self.path)

    @property
    def _front(self) -> str:
        return f"{self.path}/" if self.path else ""

    def names(self) -> list[str]:
        """Names of the files and folders in it, in order."""
        return sorted(self.model.folders.get(self.path, ()))

    def is_directory(self, name: str) -> bool:
        """Whether a folder has the name."""
        return self._front + name in self.model.folders

    def is_file(self, name: str) -> bool:
        """Whether a file has the name."""
        return self._front + name in self.model.files

    def at(self, name: str) -> HubSource | HubDirectory:
        """The source of a file, or the folder of a name."""
        return self.below(name) if self.is_directory(name) else self.file(name)

    def file(self, name: str) -> HubSource:
        """The source of a file."""
        return HubSource(self.model, self._front + name)

    def below(self, name: str) -> HubDirectory:
        """The folder of a name."""
        return HubDirectory(self.model, self._front + name)

    @property
    def above(self) -> tuple[HubDirectory, str] | None:
        """The folder that holds it, and its name there."""
        parent, name = posixpath.split(self.path)
        return (HubDirectory(self.model, parent), name) if name else None

    def walk(self) -> Iterator[tuple[str, int]]:
        """The names of all files below it, and their bytes."""
        front = self._front
        for path in sorted(path for path in self.model.files if path.startswith(front)):
            size = self.model.files[path].size
            yield path[len(front) :], HubSource(self.model, path).size if size is None else size
