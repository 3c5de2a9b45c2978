"""Where a checkpoint is to lie, and what lies there already."""

from __future__ import annotations

import errno
import hashlib
import os
import re
import stat
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from mfload import errors, sources
from mfload.formats import unfinished
from mfload.formats.base import FORMATS
from mfload.formats.discovery import INDEX_SUFFIX, SUFFIX, outside, read_index
from mfload.formats.strict_json import encodable
from mfload.saving import manifests
from mfload.saving.layout import REPLACED
from mfload.sources.base import redacted
from mfload.sources.local import is_cached, kind_of, place_of, resolved

_FOREIGN = (
    ".bin", ".ckpt", ".distcp", ".ggml", ".gguf", ".h5", ".hdf5", ".joblib", ".keras", ".nemo",
    ".onnx", ".pb", ".pdopt", ".pdparams", ".pickle", ".pkl", ".pt", ".pt2", ".pth", ".tar",
    ".tflite", ".zarr", ".zip",
)  # fmt: skip
_NUMBER = re.compile(r"-\d{5,}-of-\d{5,}" + re.escape(SUFFIX))
OTHERS = (*(suffix for suffix in FORMATS if suffix != SUFFIX), *_FOREIGN)
"""Ends of names by which files are taken for another format than the one that is written."""


@dataclass(frozen=True)
class Location:
    """A directory and the name of a single file in it.

    Attributes:
        linked: The symbolic link that led here, if one did. A link into a cache of blobs is not
            followed: it is itself what is replaced.
        whole: Whether the directory was named, not a file in it.
    """

    directory: str
    name: str
    linked: str | None = None
    whole: bool = False

    @property
    def path(self) -> str:
        """Of the single file."""
        return self.at(self.name)

    def at(self, name: str) -> str:
        """The path of a name in the directory."""
        return self._root + name

    @cached_property
    def _root(self) -> str:
        return os.path.join(self.directory, "")

    @cached_property
    def stem(self) -> str:
        """What the names of shards and index begin with; empty if there can be none."""
        fits = self.name.endswith(SUFFIX) and encodable(self.name) and outside(self.name) is None
        return self.name.removesuffix(SUFFIX) if fits else ""

    @property
    def index(self) -> str:
        """The name of the index of the shards."""
        return self.stem + INDEX_SUFFIX

    @property
    def manifest(self) -> str:
        """The name of the manifest of checksums, of the single file and of shards."""
        return manifests.named(self.name)

    def names(self, count: int) -> list[str]:
        """Names of so many files: Hugging Face's if there are several."""
        if count == 1:
            return [self.name]
        if not self.stem:
            raise errors.UsageError(
                "shards need a name that an index can list",
                file=self.path,
                expected=f"a name in UTF-8 that ends in {SUFFIX}, without ':' and backslashes",
                found=self.name,
            )
        return self.shards(count)

    def shards(self, count: int) -> list[str]:
        """Hugging Face's names of so many shards."""
        width = max(5, len(str(count)))
        numbers = range(1, count + 1)
        return [f"{self.stem}-{n:0{width}}-of-{count:0{width}}{SUFFIX}" for n in numbers]

    @cached_property
    def hidden(self) -> str:
        """What the hidden names of this place begin with, in any process; no other name does."""
        # Not the name itself: it may be as long as a name can be.
        return f"{unfinished.HIDDEN}{hashlib.sha256(os.fsencode(self.name)).hexdigest()[:12]}-"

    def check_names(self, names: Iterable[str]) -> list[str]:
        """Raises TargetError if something has one of these names that no file may replace.

        Returns those of links into a cache of blobs.
        """
        links: list[str] = []
        for name in names:
            path = self.at(name)
            mode = mode_at(path, "the target")
            if mode is None or stat.S_ISREG(mode):
                continue
            if not stat.S_ISLNK(mode):
                raise errors.TargetError(
                    "something other than a file has the name",
                    file=path,
                    expected="a regular file, or nothing",
                    found=kind_of(mode),
                )
            if not is_cached(path):
                raise errors.TargetError(
                    "a sharded checkpoint can't be replaced through a symbolic link of one of its "
                    "files; save to the directory that holds them, or remove the checkpoint first",
                    file=path,
                    found=f"a link to {place_of(path)}",
                )
            links.append(name)
        return links


def mode_at(path: str, what: str) -> int | None:
    """The mode of what has a name, not following links; None if nothing has it."""
    with errors.AsTarget(path, f"look at {what}"), suppress(FileNotFoundError):
        return os.lstat(path).st_mode
    return None


def key_of(path: str | os.PathLike[str]) -> str:
    """What tells a target from others: its path, or its URL; raises as `resolve`."""
    return path if sources.is_store(path) else resolve(path).path


def resolve(path: str | os.PathLike[str], stem: str = "model") -> Location:
    """Takes apart what a user gave; a directory stands for a file of that name in it."""
    try:
        given = os.fsdecode(path)
        os.fsencode(given)
    except (TypeError, UnicodeError):
        given = ""
    if not given or "\0" in given:
        found = repr(path) if isinstance(path, str | bytes) else type(path).__name__
        raise errors.UsageError("not a path", expected="save(arrays, path)", found=found)
    if "://" in given:
        raise errors.UsageError(
            "cannot save to a URL of that kind, or by several processes",
            expected="a path of the local file system; s3://, gs:// or az:// by one process",
            found=redacted(given),
        )
    name = os.path.basename(given)
    with errors.AsTarget(given, "use the target's directory"):
        whole = name in ("", ".", "..") or (os.path.isdir(given) and not name.endswith(SUFFIX))
        path = os.path.join(given, stem + SUFFIX) if whole else given
        # As an editor would: what a link leads to is replaced, the link stays.
        target = place_of(path)
        place = Location(*os.path.split(target), whole=whole)
        if os.path.islink(path):
            if os.path.islink(target) and not is_cached(target):
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
            if (linked := resolved(path)) != target:
                place = Location(place.directory, place.name, linked)
    if place.name.endswith(".json"):
        raise errors.UsageError(
            "an index is written beside its shards",
            file=given,
            expected=f"a {SUFFIX} file or a directory",
            found=place.name,
        )
    foreign = [n for n in (place.linked or "", place.name) if n.lower().endswith(OTHERS)]
    if foreign:
        raise errors.UsageError(
            "checkpoints are written as safetensors; the name is one of another format",
            file=given,
            expected=f"a {SUFFIX} file or a directory",
            found=foreign[0],
        )
    place.check_names([place.name])
    return place


class Existing(NamedTuple):
    """What lies at a place.

    Attributes:
        found: The file, the index or the shards that make it a checkpoint of that name.
        sharded: Whether an index, or a complete set of shards without one, is there.
        files: Files of the checkpoint, the index left out, that go when it is replaced.
        kept: Files to which other indexes in the directory lead.
        left: Files of writers that died or have not finished: hidden ones, and shards of a draft
            of an index (see `formats.unfinished`).
        doubt: An index that can't be read: it may lead to any file, so that none may go.
        manifests: Names of its manifests, and of those that name a file that is to be written.
        links: Names of links into a cache of blobs that are replaced.
    """

    found: list[str]
    sharded: bool
    files: frozenset[str]
    kept: frozenset[str]
    left: frozenset[str]
    doubt: str | None = None
    manifests: frozenset[str] = frozenset()
    links: Sequence[str] = ()


def look(place: Location, coming: Iterable[str] = ()) -> Existing:
    """Looks at what lies at a place; `coming` are names of the files that are to be written."""
    names = frozenset[str]()
    about = errors.AsTarget(place.directory, "list the directory")
    with about, suppress(FileNotFoundError):  # It will be made.
        names = frozenset(os.listdir(place.directory))
    # A manifest that is written alone has hidden names of its own.
    prefixes = place.hidden, Location(place.directory, place.manifest).hidden
    hidden = frozenset(name for name in names if name.startswith(prefixes))
    stem = place.stem
    own = [place.name, place.index] if stem else [place.name]
    indexes = {n for n in names if n.endswith(INDEX_SUFFIX) and (n in own or n[0] != ".")}
    numbered = [name for name in names if name.startswith(stem)] if stem else []
    shards = sorted(name for name in numbered if _NUMBER.fullmatch(name, len(stem)))
    indexed = not indexes.isdisjoint(own)
    # Shards whose writer has not given their index its name: not a checkpoint yet.
    looked = {*hidden, *shards} if hidden and not indexed else ()
    early = unfinished.shards(place.directory, looked)
    shards = [name for name in shards if name not in early]
    found = [name for name in own if name in names] or shards
    # Without an index, one complete set of shards is the checkpoint.
    placed = frozenset(shards if not indexed and shards == place.shards(len(shards)) else ())
    kept: frozenset[str] = frozenset()
    doubt: str | None = None
    # Read only if something might be removed: they may be many, and large.
    for each in sorted(indexes) if stem and (found or hidden) else ():
        try:
            leads_to = _leads_to(place.at(each))
        except (errors.SourceError, errors.FormatError):
            doubt = doubt or each
            continue
        if each == place.index:
            # Files in other directories, and other files than safetensors, are not ours to touch.
            placed = frozenset(n for n in leads_to if n in names and n.endswith(SUFFIX))
        else:
            kept |= leads_to
    # While an index can't be read, the hidden files may be what it leads to.
    left = hidden.union(early) - placed - kept if doubt is None else frozenset[str]()
    files = (placed - kept) | ({place.name} & names)
    some = any(name.endswith(manifests.SUFFIX) for name in names)
    ours = {place.name, *files, *early, *coming}
    index = place.index if stem else None
    theirs = frozenset(manifests.lying(place.directory, ours, index) if some else ())
    return Existing(found, indexed or bool(placed), files, kept, left, doubt, theirs)


def _leads_to(path: str) -> frozenset[str]:
    """Files to which an index leads, or that it says are to be removed; none if it is gone."""
    try:
        table = read_index(sources.find(path))
    except errors.SourceNotFoundError:
        return frozenset()
    except errors.SourceChangedError:  # By another writer: its index is the one there is.
        return _leads_to(path)
    metadata = table.get("metadata")
    replaced = metadata.get(REPLACED) if isinstance(metadata, dict) else None
    names = [*table["weight_map"].values(), *(replaced if isinstance(replaced, list) else ())]
    return frozenset(os.path.normpath(name) for name in names if isinstance(name, str))
