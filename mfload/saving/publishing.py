"""How the files of a checkpoint get their names: all at one stroke.

- One file over one file, or over nothing, is a link or a rename.
- Several files over nothing: they get their names, and the index that leads to them comes last.
- Several files or an index are replaced, where a load follows the index alone:

  1. The new files get hidden names, which nothing else has.
  2. An index that leads to these takes the place of the old one. This is the stroke: until then a
     load finds the old checkpoint, from then on the new one.
  3. The files get their own names too, by hard links, and what only the old checkpoint had is
     removed. The index remembers which names these are, in case the writer dies.
  4. An index that leads to their own names takes the place of the first, and the hidden names go;
     for a single file the index goes too.

A writer that dies leaves the old or the new checkpoint whole; the next writer removes what it left.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import stat
import threading
import time
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from mfload import errors
from mfload.formats.discovery import INDEX_SUFFIX
from mfload.saving import drafts as files, layout, targets
from mfload.saving.drafts import NO_LINKS, Draft
from mfload.saving.targets import Existing, Location

log = logging.getLogger("mfload")

Held = Sequence[Sequence[str]]
"""The names of the tensors in each file."""

_TICK = 0.01  # Seconds between two tries for a lock.
_SHOWN = 8


class Published(NamedTuple):
    """What lies there now: paths, the index last if there is one; and notes for the user."""

    files: tuple[str, ...]
    notes: tuple[str, ...]


class SaveTarget:
    """Where a checkpoint is to be written: a file, or a `model.safetensors` in a directory."""

    def __init__(self, path: str | os.PathLike[str], overwrite: bool = False) -> None:
        self.place = targets.resolve(path)
        self.path = self.place.path
        self.overwrite = overwrite
        self.hidden = self.place.hidden()
        self.fd = -1  # The directory, while drafts are there.
        self._old()

    def _old(self) -> Existing:
        """What is there; refused unless it may be replaced."""
        old = targets.look(self.place)
        names = [self.place.name] * old.single + [str(self.place.index)] * old.indexed
        found = names or sorted(old.named)
        if found and not self.overwrite:
            raise errors.TargetExistsError(
                "a checkpoint exists already; overwrite=True replaces it",
                file=self.place.at(found[0]),
            )
        return old

    @contextmanager
    def drafts(self, sizes: Sequence[int]) -> Generator[list[Draft]]:
        """Makes files of these sizes, invisible; those not published at the end are gone."""
        place, names = self.place, self.place.names(len(sizes))
        self._check(names, targets.look(place))
        drafts: list[Draft] = []
        # Whatever happens to one on the way out, the others are let go of.
        with contextlib.ExitStack() as stack:
            try:
                targets.make_directory(place.directory)
                self.fd = stack.enter_context(files.open_directory(place.directory))
            except OSError as error:
                raise errors.from_target(error, place.directory, "open the directory") from error
            # Under the lock, so that no other save takes a draft with a name for a leftover.
            with _locked(self.fd, place.directory):
                old = self._old()
                self._sweep(old)
                for number, (name, size) in enumerate(zip(names, sizes, strict=True), 1):
                    hidden = f"{self.hidden}{number:05}.safetensors"
                    drafts.append(self.draft(hidden, size, name, old))
                    stack.callback(drafts[-1].discard)
                if _swaps(old, len(names)):
                    self._check_links(drafts[0])
            yield drafts

    def _check(self, names: Sequence[str], old: Existing) -> None:
        """Refuses what can't be replaced, where several files change."""
        place, behind = self.place, self.place.linked
        several = len(names) > 1 or old.sharded
        if behind is not None and not several:
            # The link's own neighbours would go on hiding what lies behind it.
            several = targets.look(Location(*os.path.split(behind))).sharded
        if not several:
            return targets.check_names(place, names, links=False)
        if behind is not None:
            raise errors.TargetError(
                "several files can't be replaced through a symbolic link; name its target",
                file=behind,
                expected=self.path,
            )
        try:
            place.name.encode()
        except UnicodeEncodeError:
            raise errors.UsageError(
                "an index can't name the files",
                file=self.path,
                expected="a name that UTF-8 can encode",
                found=repr(place.name),
            ) from None
        if old.doubt is not None:
            raise errors.TargetError(
                "an index can't be read, so it is unknown which files are its; remove it first",
                file=place.at(old.doubt),
            )
        for name in sorted({*names, *([place.name] * old.single)}):
            if name in old.kept and os.path.lexists(place.at(name)):
                raise errors.TargetError(
                    "an index of another name leads to the file, which would be replaced; "
                    "name that index's checkpoint, or another target",
                    file=place.at(name),
                )
        index = [] if place.index is None else [place.index]
        return targets.check_names(place, [*names, *index], links=False)

    def _check_links(self, draft: Draft) -> None:
        """Refuses to replace shards on a file system without hard links, before bytes come."""
        if not draft.named:
            return
        spare = f"{draft.hidden}.link"
        try:
            os.link(draft.hidden, spare)
            os.unlink(spare)
        except OSError as error:
            if error.errno not in NO_LINKS:
                raise errors.from_target(error, self.path, "link the file") from error
            raise errors.TargetError(
                "this file system has no hard links, and without them a sharded checkpoint can't "
                "be replaced; remove it first, or save to another directory",
                file=self.path,
            ) from error

    def draft(self, hidden: str, size: int, name: str, old: Existing) -> Draft:
        """A file of so many bytes that will have a name."""
        mode = None
        # Permissions of the file that is replaced, or of one of its checkpoint's.
        for each in (name, self.place.name, *sorted(old.names)):
            with contextlib.suppress(OSError):
                status = os.lstat(self.place.at(each))
                if stat.S_ISREG(status.st_mode):
                    mode = stat.S_IMODE(status.st_mode) & 0o777
                    break
        return Draft(self.place.at(hidden), size, self.place.at(name), mode)

    def _sweep(self, old: Existing) -> None:
        """Removes what writers of this checkpoint left that died."""
        if old.doubt is not None:
            return  # They may be what that index leads to.
        for path in map(self.place.at, old.hidden - old.placed - old.kept):
            with contextlib.suppress(OSError):
                fd = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
                try:
                    if files.lock(fd):
                        os.unlink(path)
                        log.info("%s: removed, its writer died", path)
                finally:
                    os.close(fd)

    def publish(self, drafts: Sequence[Draft], held: Held, total: int) -> Published:
        """Gives the drafts their final names, at one stroke; they are whole and synced.

        From the stroke on, a failure leaves the new checkpoint.
        """
        place = self.place
        names = place.names(len(drafts))
        with _locked(self.fd, place.directory):
            old = self._old()
            change = _Change(self, drafts, names, held, total, old)
            commit = change.add
            if _swaps(old, len(names)):
                commit = change.replace
                self._check(names, old)
                if not any(held):
                    raise errors.TargetError(
                        "cannot replace a sharded checkpoint with an empty one; remove it first",
                        file=self.path,
                    )
            try:
                commit()
            except OSError as error:
                told = errors.from_target(error, self.path, "put the files in their place")
                if change.committed:
                    told.message += "; the new checkpoint is whole, and loads by its index"
                raise told from (None if told is error else error)
        notes = change.notes
        if place.index is not None and os.path.exists(place.at(place.index)):
            names.append(place.index)
        # What else a load of the directory would see, if the directory was named.
        seen = [name for name in old.others if len(names) == 1 or name.endswith(INDEX_SUFFIX)]
        if seen and place.whole:
            notes.append(
                f"{seen[0]} lies beside it: load {names[-1]} by its name, not the directory"
            )
        return Published(tuple(map(place.at, names)), tuple(notes))


def _swaps(old: Existing, count: int) -> bool:
    """Whether so many files can only be put in place at the stroke of an index."""
    return old.sharded or (count > 1 and old.single)


@dataclass
class _Change:
    """A change of names, in progress; the directory is locked."""

    target: SaveTarget
    drafts: Sequence[Draft]
    names: Sequence[str]
    held: Held
    total: int
    old: Existing
    committed: bool = False
    notes: list[str] = field(default_factory=list[str])

    def __post_init__(self) -> None:
        self._at = self.target.place.at
        self._sync = functools.partial(files.fsync, self.target.fd)
        # Without a name that can be numbered there is one file, and no index.
        self._index_name = self.target.place.index or ""
        self._indexes = 0

    def add(self) -> None:
        """Gives the names where no checkpoint is followed by an index; the index comes last."""
        given: list[str] = []
        several = len(self.names) > 1
        try:
            for draft, name in zip(self.drafts, self.names, strict=True):
                draft.publish(self._at(name), replace=self.target.overwrite)
                given.append(self._at(name))
            if several:
                self._sync()
                self._place_index(self.names)
        except BaseException:
            # A single file is there, or it is not.
            if several and not self.committed:
                _remove(given)
            raise
        self._sync()

    def replace(self) -> None:
        """Replaces several files, or an index, at the stroke of an index."""
        old, names = self.old, self.names
        single = [self.target.place.name] * old.single
        going = sorted({*old.names, *single} - {*names, self._index_name})
        hidden = [draft.appear() for draft in self.drafts]
        try:
            self._sync()
            for draft in self.drafts:
                draft.published()  # Its hidden name is what the index leads to.
            self._place_index(map(os.path.basename, hidden), [*going, *names])
        finally:
            if not self.committed:
                _remove(hidden)
        self._sync()
        for path, name in zip(hidden, names, strict=True):
            os.link(path, f"{path}.link")
            os.replace(f"{path}.link", self._at(name))
        left = self._remove_old(going)
        # The names are on disk before what leads to them.
        self._sync()
        self._place_index(names, left)
        self._sync()
        _remove(hidden)
        if len(names) == 1 and not left:
            # Only now: without the index, a load of the directory takes all files there are.
            self._sync()
            _remove([self._at(self._index_name)])
        self._sync()

    def _place_index(self, names: Iterable[str], replaced: Sequence[str] = ()) -> None:
        """Writes an index that leads to files of these names, and gives it its name."""
        pairs = zip(names, self.held, strict=True)
        placed = {tensor: name for name, some in pairs for tensor in some}
        raw = np.frombuffer(layout.index_json(placed, self.total, replaced), np.uint8)
        self._indexes += 1
        hidden = f"{self.target.hidden}index{self._indexes}.json"
        draft = self.target.draft(hidden, raw.size, self._index_name, self.old)
        path = self._at(self._index_name)
        try:
            draft.write(0, raw)
            draft.sync()
            try:
                draft.publish(path, replace=self.target.overwrite)
            finally:
                # Ctrl-C may have come right after the rename: the disk knows what is true.
                self.committed = self.committed or draft.is_at(path)
        finally:
            draft.discard()

    def _remove_old(self, going: Sequence[str]) -> list[str]:
        """Removes what only the old checkpoint had; returns what stays of it."""
        failed = {*_remove(map(self._at, going))}
        left = [name for name in going if self._at(name) in failed]
        gone = [name for name in going if name not in left]
        if left:
            self.notes.append(f"of the old checkpoint, {self._at(left[0])} could not be removed")
        if gone:
            more = f" and {len(gone) - _SHOWN} more" if len(gone) > _SHOWN else ""
            self.notes.append(f"removed of the old checkpoint: {', '.join(gone[:_SHOWN])}{more}")
        return left


def _remove(paths: Iterable[str]) -> list[str]:
    """Removes files; returns those that stay."""
    left: list[str] = []
    for path in paths:
        try:
            os.unlink(path)
        except FileNotFoundError:
            continue
        except OSError:
            left.append(path)
    return left


_holders: set[tuple[int, int, int, int]] = set()
"""Whose locks are held: process, thread, device and inode of the directory."""


@contextmanager
def _locked(fd: int, path: str) -> Generator[None]:
    """Keeps other saves out of a directory: two writers must not take names in turns.

    The kernel drops the lock of a process that dies. Some file systems have no such locks.
    """
    status = os.fstat(fd) if fd >= 0 else None
    # A fork copies the record, but the child is another process.
    device, inode = (status.st_dev, status.st_ino) if status else (0, 0)
    owner = os.getpid(), threading.get_ident(), device, inode
    if owner in _holders:
        raise errors.TargetError("this thread is already saving into this directory", file=path)
    locked: bool | None = None
    try:
        _holders.add(owner)
        # In ticks, so that Ctrl-C gets through.
        while (locked := files.lock(fd)) is False:
            time.sleep(_TICK)
        yield
    finally:
        if locked:
            with contextlib.suppress(OSError):
                files.fcntl.flock(fd, files.fcntl.LOCK_UN)
        _holders.discard(owner)
