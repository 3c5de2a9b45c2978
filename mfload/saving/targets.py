"""Where a checkpoint is to lie, and what lies there already."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import secrets
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from mfload import errors
from mfload.formats.discovery import INDEX_SUFFIX, SUFFIX, read_index
from mfload.saving.drafts import fsync, open_directory
from mfload.saving.layout import REPLACED
from mfload.sources.local import KINDS, LocalFile

_DEFAULT = "model" + SUFFIX


@dataclass(frozen=True, slots=True)
class Location:
    """A directory and the name of a single file in it.

    Attributes:
        linked: The symbolic link that led here, if one did.
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
        return os.path.join(self.directory, name)

    @property
    def stem(self) -> str | None:
        """What the names of shards begin with; None if the name is not a safetensors name."""
        found = self.name.removesuffix(SUFFIX)
        return found if found not in (self.name, "") else None

    @property
    def index(self) -> str | None:
        """What the index of the shards is called."""
        return None if self.stem is None else self.stem + INDEX_SUFFIX

    def names(self, count: int) -> list[str]:
        """What so many files are called: Hugging Face's names if there are several."""
        if count == 1:
            return [self.name]
        if self.stem is None:
            raise errors.UsageError(
                "shards need a name to count up from",
                file=self.path,
                expected=f"a name that ends in {SUFFIX}",
                found=self.name,
            )
        width = max(5, len(str(count)))
        numbers = range(1, count + 1)
        return [f"{self.stem}-{n:0{width}}-of-{count:0{width}}{SUFFIX}" for n in numbers]

    def hidden(self) -> str:
        """A prefix for names that nothing else has."""
        return f"{self._hidden}{secrets.token_hex(8)}-"

    @property
    def _hidden(self) -> str:
        # Not the name itself: it may be as long as a name can be.
        return f".mfload-{hashlib.sha256(os.fsencode(self.name)).hexdigest()[:12]}-"

    def hidden_among(self, names: Iterable[str]) -> frozenset[str]:
        """Those of many names that `hidden` made for this place, in any process."""
        made = re.compile(re.escape(self._hidden) + "[0-9a-f]{16}-.*", re.DOTALL)
        return frozenset(filter(made.fullmatch, names))


def resolve(path: str | os.PathLike[str]) -> Location:
    """Takes apart what a user gave; a directory stands for a `model.safetensors` in it."""
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
            "cannot save to a URL", expected="a path of the local file system", found=given
        )
    separators = tuple(filter(None, (os.sep, os.altsep)))
    inside = given.endswith(separators) or os.path.basename(given) in (".", "..")
    try:
        if inside or (os.path.isdir(given) and not given.endswith(SUFFIX)):
            place = Location(os.path.realpath(given), _DEFAULT, whole=True)
        else:
            directory, name = os.path.split(given)
            place = Location(os.path.realpath(directory or "."), name)
        if os.path.islink(place.path):
            # As an editor would: what the link leads to is replaced, the link stays.
            target = os.path.realpath(place.path)
            if os.path.islink(target):
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
            place = Location(*os.path.split(target), place.path)
        parent = place.directory
        while not os.path.lexists(parent):
            parent = os.path.dirname(parent)
        if not stat.S_ISDIR(os.stat(parent).st_mode):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
    except OSError as error:
        raise errors.from_target(error, given, "use the target's directory") from error
    if place.name.endswith(".json"):
        raise errors.UsageError(
            "an index is written beside its shards",
            file=given,
            expected=f"a {SUFFIX} file or a directory",
            found=place.name,
        )
    check_names(place, [place.name])
    return place


def make_directory(path: str) -> None:
    """Makes a directory and those above it, on disk, if they do not exist."""
    if os.path.lexists(path):
        return
    parent = os.path.dirname(path)
    make_directory(parent)
    with contextlib.suppress(FileExistsError):
        os.mkdir(path)
    with open_directory(parent) as fd:
        fsync(fd)


def check_names(place: Location, names: Iterable[str], *, links: bool = True) -> None:
    """Refuses names that something other than a regular file has, or (links) a symbolic link."""
    for path in map(place.at, names):
        try:
            mode = os.lstat(path).st_mode
        except FileNotFoundError:
            continue
        except OSError as error:
            raise errors.from_target(error, path, "look at the target") from error
        if not stat.S_ISREG(mode) and not (links and stat.S_ISLNK(mode)):
            raise errors.TargetError(
                "something other than a file has the name",
                file=path,
                expected="a regular file, or nothing",
                found=KINDS.get(stat.S_IFMT(mode), "something else"),
            )


class Existing(NamedTuple):
    """What lies at a place.

    Attributes:
        placed: Files in the directory to which the index leads, or that it says are to go.
            Without an index: one complete set of files that are named as its shards.
        named: Files with names of its shards, whether they are its or not.
        hidden: Files that writers left, or have not finished.
        kept: Files to which other indexes in the directory lead.
        others: Other checkpoints' files and indexes that a load of the directory would see.
        doubt: An index that can't be read: it may lead to any file, so that none may go.
    """

    single: bool = False
    indexed: bool = False
    placed: frozenset[str] = frozenset()
    named: frozenset[str] = frozenset()
    hidden: frozenset[str] = frozenset()
    kept: frozenset[str] = frozenset()
    others: tuple[str, ...] = ()
    doubt: str | None = None

    @property
    def names(self) -> frozenset[str]:
        """The files of the checkpoint, the single one and the index left out."""
        return self.placed - self.kept

    @property
    def sharded(self) -> bool:
        """Whether an index or shards are there."""
        return self.indexed or bool(self.placed)


def look(place: Location) -> Existing:
    """Looks at what lies at a place."""
    try:
        names = frozenset(os.listdir(place.directory))
    except FileNotFoundError:
        return Existing()  # It will be made.
    except OSError as error:
        raise errors.from_target(error, place.directory, "list the directory") from error
    hidden = place.hidden_among(names)
    if place.stem is None or place.index is None:
        return Existing(single=place.name in names, hidden=hidden)
    single, indexed = place.name in names, place.index in names
    shard = re.compile(re.escape(place.stem) + r"-\d{5,}-of-\d{5,}" + re.escape(SUFFIX))
    named = frozenset(filter(shard.fullmatch, names))
    count = len(named)
    whole = [f"{place.stem}-00001-of-00001{SUFFIX}"] if count == 1 else place.names(count)
    placed = named if not indexed and named == frozenset(whole) else frozenset[str]()
    seen = sorted(n for n in names if n.endswith((SUFFIX, INDEX_SUFFIX)) and n[0] != ".")
    indexes = [each for each in seen if each.endswith(INDEX_SUFFIX) and each != place.index]
    leads: dict[str, frozenset[str]] = {}
    doubt: str | None = None
    # Read only if something might be removed: they may be many, and large.
    reads = [place.index] * indexed + (indexes if hidden or indexed or named or single else [])
    for each in reads:
        try:
            leads[each] = _leads_to(place.at(each))
        except (errors.SourceError, errors.FormatError):
            doubt = doubt or each
    # Files in other directories, and other files than safetensors, are not ours to touch.
    placed |= {n for n in leads.pop(place.index, ()) if n in names and n.endswith(SUFFIX)}
    kept = frozenset[str]().union(*leads.values())
    others = [n for n in seen if n.endswith(SUFFIX) and n not in placed and n != place.name]
    return Existing(single, indexed, placed, named, hidden, kept, (*indexes, *others), doubt)


def _leads_to(path: str) -> frozenset[str]:
    """Files to which an index leads, or that it says are to be removed; none if it is gone."""
    try:
        table = read_index(LocalFile(path))
    except errors.SourceNotFoundError:
        return frozenset()
    metadata = table.get("metadata")
    replaced = metadata.get(REPLACED) if isinstance(metadata, dict) else None
    names = [*table["weight_map"].values(), *(replaced if isinstance(replaced, list) else ())]
    return frozenset(os.path.normpath(name) for name in names if isinstance(name, str))
