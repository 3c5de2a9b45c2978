"""How the files of a checkpoint get their names: all at once.

- One file over one file, or over nothing, is a link or a rename.
- Several files over nothing: the index is written first, under a hidden name. When that is on disk,
  the files get their names; when these are, the index gets its own. Until then no load takes the
  files for a checkpoint, and the next save removes them (`formats.unfinished`).
- Several files or an index are replaced, where a load follows the index alone:

  1. The new files get hidden names, which nothing else has.
  2. An index that leads to these takes the place of the old one. This is the switch: until then a
     load finds the old checkpoint, from then on the new one.
  3. The files get their own names too, by hard links, and what only the old checkpoint had is
     removed. The index remembers which names these are, in case the writer dies.
  4. An index that leads to their own names takes the place of the first, and the hidden names go;
     for a single file the index goes too.

A writer that dies leaves the old or the new checkpoint whole; the next writer removes what it left,
and says so if that had names of its own.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import stat
import threading
import time
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from mfload import errors
from mfload.formats import unfinished
from mfload.formats.discovery import INDEX_SUFFIX, SUFFIX
from mfload.saving import drafts as files, journal, layout, targets
from mfload.saving.drafts import Draft
from mfload.saving.layout import Layout
from mfload.saving.targets import Existing, Location

log = logging.getLogger("mfload")

_TICK = 0.01  # Seconds between two tries for a lock.
_SHOWN = 8


class SaveTarget:
    """Where a checkpoint is to be written: a file, or a `model.safetensors` in a directory.

    Args:
        stem: The name of the file in a directory, without its end. Default: model.
    """

    def __init__(
        self, path: str | os.PathLike[str], overwrite: bool = False, stem: str | None = None
    ) -> None:
        self.place = targets.resolve(path, stem or "model")
        self.path = self.place.path
        self.overwrite = overwrite
        self.mode: int | None = None  # Permissions of the new files. Default: of any new file.
        self._notes: list[str] = []
        self._look([self.place.name])

    def _look(self, names: Sequence[str]) -> Existing:
        """What is there; raises if it may not be replaced by files of these names."""
        place, old = self.place, targets.look(self.place)
        if old.found and not self.overwrite:
            what = "a checkpoint exists already; overwrite=True replaces it"
            if not old.sharded and place.name not in old.found:
                what = (
                    "some shards of a checkpoint exist, and no index; if a killed save left them, "
                    "remove them"
                )
            raise errors.TargetExistsError(what, file=place.at(old.found[0]))
        several = len(names) > 1 or old.sharded
        if place.linked is not None and not several:
            # The link's own neighbours would go on hiding what lies behind it.
            several = targets.look(Location(*os.path.split(place.linked))).sharded
        if not several:
            place.check_names(names)
            return old
        if place.linked is not None:
            raise errors.TargetError(
                "several files can't be replaced through a symbolic link; name its target",
                file=place.linked,
                expected=self.path,
            )
        if old.doubt is not None:
            raise errors.TargetError(
                "an index can't be read, so it is unknown which files are its; remove it first",
                file=place.at(old.doubt),
            )
        for name in sorted({*names, place.name} & old.kept):
            if os.path.lexists(place.at(name)):
                raise errors.TargetError(
                    "an index of another name leads to the file, which would be replaced; "
                    "name that index's checkpoint, or another target",
                    file=place.at(name),
                )
        place.check_names(sorted({*names, place.index, *old.files}))
        return old

    @contextmanager
    def drafts(self, layouts: Sequence[Layout], key: str | None = None) -> Generator[list[Draft]]:
        """Makes files of their sizes, invisible; those not published at the end are gone.

        With a key, which tells what they will hold, they are lasting (see `Draft`): the same ones
        for each writer with that key, together with their journal.
        """
        place, names = self.place, self.place.names(len(layouts))
        hidden = place.at(place.hidden + (key or secrets.token_hex(8)))
        paths = [f"{hidden}-{number:05}" for number in range(1, len(layouts) + 1)]
        ours = {*paths, journal.name(paths[0])} if key else set[str]()
        changed = time.time_ns() if len(names) > 1 else None
        drafts: list[Draft] = []
        # If one fails to be discarded, the others still are.
        with contextlib.ExitStack() as stack:
            try:
                _make_directory(place.directory)
            except OSError as error:
                raise errors.from_target(error, place.directory, "make the directory") from error
            # Under the lock, so that no other save takes a draft with a name for a leftover.
            with _locked(place.directory) as directory:
                old = self._look(names)
                self._clear(directory, old.left, ours)
                self.mode = _mode(map(place.at, [place.name, *sorted(old.files)]))
                for path, name, made in zip(paths, names, layouts, strict=True):
                    given = path, made.size, place.at(name), self.mode
                    try:
                        drafts.append(Draft(*given, lasting=key is not None))
                    except BaseException:
                        for each in drafts:
                            each.lasting = False
                        raise
                    stack.callback(drafts[-1].discard)
                    drafts[-1].changed = changed
                if drafts[0].named and _swaps(old, names):
                    self._check_links(drafts[0])
            yield drafts

    def _clear(self, directory: int, left: Iterable[str], ours: set[str]) -> None:
        """Removes what writers left that died; `ours` are paths to keep."""
        place = self.place
        shards = sorted(name for name in left if not name.startswith(place.hidden))
        _remove_left(map(place.at, shards))
        stay = [name for name in shards if os.path.lexists(place.at(name))]
        if stay and not self.overwrite:
            raise errors.TargetExistsError(
                "a save that did not finish left shards, which can't be removed; if no process is "
                "writing them any more, remove them",
                file=place.at(stay[0]),
                found=unfinished.told(stay),
            )
        if shards:
            self._notes = [f"{'not ' if stay else ''}removed {unfinished.told(stay or shards)}"]
            # They go first, and their draft when that is on disk: it tells what they are.
            try:
                files.fsync(directory)
            except OSError as error:
                raise errors.from_target(error, place.directory, "remove files") from error
        _remove_left(sorted({place.at(name) for name in left} - ours))

    def _check_links(self, draft: Draft) -> None:
        """Refuses to replace shards on a file system without hard links, before bytes come."""
        spare = f"{draft.hidden}.link"
        try:
            draft.link(spare)
            os.unlink(spare)
        except OSError as error:
            action = (
                "make the hard links that replacing a sharded checkpoint takes (remove it first, "
                "or save to another directory)"
            )
            raise errors.from_target(error, self.path, action) from error

    def publish(
        self, drafts: Sequence[Draft], layouts: Sequence[Layout]
    ) -> tuple[list[str], list[str]]:
        """Gives the drafts, which are whole and synced, their final names, all at once.

        From the switch on, a failure leaves the new checkpoint. Returns the paths of what lies
        there now, the index last if there is one, and notes for the user.
        """
        place, names = self.place, self.place.names(len(drafts))
        notes = [*self._notes]
        with _locked(place.directory) as directory:
            old = self._look(names)
            # None of them is followed: `_look` refuses links into anything but a cache of blobs.
            links = [n for n in {*names, place.index} if os.path.islink(place.at(n))]
            change = _Change(self, directory, drafts, layouts)
            try:
                if not _swaps(old, names):
                    change.commit(names, indexed=len(names) > 1)
                elif any(made.entries for made in layouts):
                    notes += change.replace(old, names)
                else:
                    raise errors.TargetError(
                        "cannot replace a sharded checkpoint with an empty one; remove it first",
                        file=self.path,
                    )
            except OSError as error:
                told = errors.from_target(error, self.path, "put the files in their place")
                if change.committed:
                    told.message += "; the new checkpoint is whole, and loads by its index"
                raise told from (None if told is error else error)
        now = {n for n in links if os.path.exists(place.at(n)) and not os.path.islink(place.at(n))}
        if now:
            told = f"replaced links into a cache of blobs, the blobs stay: {_shown(sorted(now))}"
            notes.append(told)
        if place.stem and os.path.exists(place.at(place.index)):
            names.append(place.index)
        if place.whole:
            suffixes = (INDEX_SUFFIX, SUFFIX) if len(names) == 1 else INDEX_SUFFIX
            seen = {n for n in os.listdir(place.directory) if n.endswith(suffixes) and n[0] != "."}
            for name in sorted(seen - {*names})[:1]:
                notes.append(
                    f"{name} lies beside it: load {names[-1]} by its name, not the directory"
                )
        return list(map(place.at, names)), notes


def _swaps(old: Existing, names: Sequence[str]) -> bool:
    """Whether files of these names can only be put in place by switching an index."""
    return old.sharded or (len(names) > 1 and bool(old.files))


@dataclass
class _Change:
    """A change of names, in progress; the directory is locked and open."""

    target: SaveTarget
    directory: int
    drafts: Sequence[Draft]
    layouts: Sequence[Layout]
    committed: bool = False  # Whether a new index is in place.

    def commit(self, names: Sequence[str], *, indexed: bool, replaced: Sequence[str] = ()) -> None:
        """Gives the files these names and, if indexed, an index that leads to them its own."""
        paths = list(map(self.target.place.at, names))
        with self._index(names, replaced) if indexed else contextlib.nullcontext() as index:
            try:
                for draft, path in zip(self.drafts, paths, strict=True):
                    draft.publish(path, replace=self.target.overwrite)
                if index is not None:
                    files.fsync(self.directory)
                    index.publish(index.shown, replace=self.target.overwrite)
            except BaseException:
                # A single file is there, or it is not.
                if index is not None and not index.is_at(index.shown):
                    pairs = zip(self.drafts, paths, strict=True)
                    stay = _remove(path for draft, path in pairs if draft.is_at(path))
                    # What tells whose they are goes after them.
                    index.lasting = bool(stay)
                    with contextlib.suppress(OSError):
                        files.fsync(self.directory)
                raise
            # Before the hidden name of the index goes, if it is a second one.
            files.fsync(self.directory)

    def replace(self, old: Existing, names: Sequence[str]) -> list[str]:
        """Replaces several files, or an index, by switching the index; returns notes."""
        place = self.target.place
        going = sorted(old.files - {*names, place.index})
        hidden = [os.path.basename(draft.hidden) + SUFFIX for draft in self.drafts]
        self.commit(hidden, indexed=True, replaced=[*going, *names])
        for draft, name in zip(self.drafts, names, strict=True):
            draft.publish(place.at(name), replace=True)
        notes: list[str] = []
        left = list(map(os.path.basename, _remove(map(place.at, going))))
        if left:
            notes.append(f"of the old checkpoint, {place.at(left[0])} could not be removed")
        gone = [name for name in going if name not in left]
        if gone:
            notes.append(f"removed of the old checkpoint: {_shown(gone)}")
        # The names are on disk before what leads to them. Without an index, a load of the
        # directory takes all files there are: it goes last, and only if the old ones are gone.
        files.fsync(self.directory)
        if len(names) > 1 or left or _remove([place.at(place.index)]):
            with self._index(names, left) as index:
                index.publish(index.shown, replace=True)
        files.fsync(self.directory)
        _remove(map(place.at, hidden))
        files.fsync(self.directory)
        return notes

    @contextmanager
    def _index(self, names: Iterable[str], replaced: Sequence[str]) -> Generator[Draft]:
        """An index that leads to files of these names, on disk under a hidden name."""
        place = self.target.place
        raw = np.frombuffer(layout.index_json(names, self.layouts, replaced), np.uint8)
        path = place.at(place.index)
        hidden = place.at(f"{place.hidden}{secrets.token_hex(8)}{unfinished.INDEX_END}")
        draft = Draft(hidden, raw.size, path, self.target.mode, lasting=True)
        draft.lasting, draft.changed = False, self.drafts[0].changed
        try:
            draft.write(0, [raw])
            draft.sync()
            files.fsync(self.directory)
            yield draft
        finally:
            # Ctrl-C may have come right after the rename: the disk knows what is true.
            self.committed = self.committed or draft.is_at(path)
            draft.discard()


def _shown(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


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


def _remove_left(paths: Iterable[str]) -> None:
    """Removes those of these files that no living writer has locked."""
    for path in paths:
        with contextlib.suppress(OSError):
            # The open of a FIFO would wait for a writer.
            fd = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
            try:
                if files.lock(fd):
                    os.unlink(path)
                    log.info("%s: removed, its writer died", path)
            finally:
                os.close(fd)


def _mode(paths: Iterable[str]) -> int | None:
    """Permissions of the first regular file among these paths; None if there is none."""
    for path in paths:
        with contextlib.suppress(OSError):
            mode = os.stat(path).st_mode  # Of a link into a cache, the blob's.
            if stat.S_ISREG(mode):
                return stat.S_IMODE(mode) & 0o777
    return None


def _make_directory(path: str) -> None:
    """Makes a directory and those above it, on disk, if they do not exist."""
    if os.path.lexists(path):
        return
    parent = os.path.dirname(path)
    _make_directory(parent)
    with contextlib.suppress(FileExistsError):
        os.mkdir(path)
    with files.open_directory(parent) as fd:
        files.fsync(fd)


_holders: set[tuple[object, ...]] = set()
"""Whose locks are held: process, thread and directory. A fork copies it to another process."""


@contextmanager
def _locked(path: str) -> Generator[int]:
    """Keeps other saves out of a directory, and gives a descriptor of it to sync.

    The kernel drops the lock of a process that dies. Some file systems have no such locks.
    """
    with files.open_directory(path) as fd:
        # Not by its path: a directory may have several, through mounts or after a rename.
        where = (path,) if fd < 0 else (os.fstat(fd).st_dev, os.fstat(fd).st_ino)
        owner = os.getpid(), threading.get_ident(), *where
        if owner in _holders:  # In a handler of signals, say: to wait would be for ever.
            raise errors.TargetError("this thread is already saving into this directory", file=path)
        try:
            _holders.add(owner)
            try:
                # In ticks, so that Ctrl-C gets through.
                while files.lock(fd) is False:
                    time.sleep(_TICK)
                yield fd
            finally:
                files.unlock(fd)
        finally:
            _holders.discard(owner)
