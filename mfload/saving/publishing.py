"""How the files of a checkpoint get their names: all at once.

- One file over one file, or over nothing, is a link or a rename.
- Several files over nothing: they get their names, and the index that leads to them comes last.
- Several files or an index are replaced, where a load follows the index alone:

  1. The new files get hidden names, which nothing else has.
  2. An index that leads to these takes the place of the old one. This is the switch: until then a
     load finds the old checkpoint, from then on the new one.
  3. The files get their own names too, by hard links, and what only the old checkpoint had is
     removed. The index remembers which names these are, in case the writer dies.
  4. An index that leads to their own names takes the place of the first, and the hidden names go;
     for a single file the index goes too.

A writer that dies leaves the old or the new checkpoint whole; the next writer removes what it left.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import stat
import threading
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from mfload import errors
from mfload.formats.discovery import INDEX_SUFFIX, SUFFIX
from mfload.saving import drafts as files, journal, layout, manifest_files, targets
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
        sealed: Whether a manifest is to be published with it.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        overwrite: bool = False,
        stem: str | None = None,
        *,
        sealed: bool = False,
    ) -> None:
        self.place = targets.resolve(path, stem or "model")
        self.path = self.place.path
        self.overwrite, self.sealed = overwrite, sealed
        self.mode: int | None = None  # Permissions of the new files. Default: of any new file.
        self._look([self.place.name])

    def _look(self, names: Sequence[str]) -> Existing:
        """What is there; raises if it may not be replaced by files of these names."""
        place, old = self.place, targets.look(self.place)
        if old.found and not self.overwrite:
            raise errors.TargetExistsError(
                "a checkpoint exists already; overwrite=True replaces it",
                file=place.at(old.found[0]),
            )
        theirs = [n for n in sorted(old.manifests) if manifest_files.is_manifest(place.at(n))]
        if theirs and not self.overwrite:
            raise errors.TargetExistsError(
                "a manifest of an earlier checkpoint is there; overwrite=True removes it",
                file=place.at(theirs[0]),
            )
        if self.sealed and place.manifest not in theirs:
            at = place.at(place.manifest)
            manifest_files.check_target(at, overwrite=True)
            if os.path.lexists(at):
                what = "an earlier version gave the manifest of another checkpoint this name"
                raise errors.TargetExistsError(what, file=at, expected="it to be moved")
        old = old._replace(manifests=frozenset(theirs))
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
        place.check_names([*names, place.index])
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
        drafts: list[Draft] = []
        # If one fails to be discarded, the others still are.
        with contextlib.ExitStack() as stack:
            try:
                _make_directory(place.directory)
            except OSError as error:
                raise errors.from_target(error, place.directory, "make the directory") from error
            # Under the lock, so that no other save takes a draft with a name for a leftover.
            with _locked(place.directory):
                old = self._look(names)
                _remove_left(sorted({place.at(name) for name in old.left} - ours))
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
                if drafts[0].named and _swaps(old, names):
                    self._check_links(drafts[0])
            yield drafts

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
        self, drafts: Sequence[Draft], layouts: Sequence[Layout], manifest: bytes | None = None
    ) -> tuple[list[str], list[str]]:
        """Gives the drafts, which are whole and synced, their final names, all at once.

        From the switch on, a failure leaves the new checkpoint. The manifest is the one of these
        drafts; the one of the old checkpoint goes. Returns the paths of what lies there now, the
        index last if there is one, and notes for the user.
        """
        place, names = self.place, self.place.names(len(drafts))
        with _locked(place.directory) as directory:
            old = self._look(names)
            theirs = sorted(old.manifests)
            mode = _mode(map(place.at, theirs))
            given = place.manifest, manifest, self.mode if mode is None else mode
            change = _Change(self, directory, drafts, layouts)
            with (
                manifest_files.drafted(place, *given) as draft,
                manifest_files.replaced(place, theirs, draft, directory, change.landed),
            ):
                notes = self._put(change, old, names)
        if place.stem and os.path.exists(place.at(place.index)):
            names.append(place.index)
        if place.whole:
            suffixes = (INDEX_SUFFIX, SUFFIX) if len(names) == 1 else INDEX_SUFFIX
            seen = {n for n in os.listdir(place.directory) if n.endswith(suffixes) and n[0] != "."}
            for name in sorted(seen - {*names})[:1]:
                notes.append(
                    f"{name} lies beside it: load {names[-1]} by its name, not the directory"
                )
        at = None if manifest is None else place.at(place.manifest)
        if gone := [path for path in map(place.at, theirs) if path != at]:
            notes.append(f"removed of the old checkpoint: {', '.join(gone)}")
        if at is not None:
            notes.append(f"checksums written to {at}")
        return list(map(place.at, names)), notes

    def _put(self, change: _Change, old: Existing, names: Sequence[str]) -> list[str]:
        """Puts the files in their place; returns notes."""
        try:
            if not _swaps(old, names):
                change.commit(names, indexed=len(names) > 1)
                return []
            if any(made.entries for made in change.layouts):
                return change.replace(old, names)
        except OSError as error:
            told = errors.from_target(error, self.path, "put the files in their place")
            if change.committed:
                told.message += "; the new checkpoint is whole, and loads by its index"
            raise told from (None if told is error else error)
        raise errors.TargetError(
            "cannot replace a sharded checkpoint with an empty one; remove it first",
            file=self.path,
        )


def write_manifest(
    path: str, text: bytes, *, overwrite: bool, check: Callable[[], object] | None
) -> None:
    """Writes a manifest of files that are there already (see `checking.manifest`)."""
    manifest_files.check_target(path, overwrite=overwrite)
    place = Location(*os.path.split(path))
    with _locked(place.directory) as directory:
        _remove_left(sorted(map(place.at, targets.look(place).left)))
        with manifest_files.drafted(place, place.name, text, _mode([path])) as draft:
            manifest_files.check_target(path, overwrite=overwrite)  # It may have come meanwhile.
            if check is not None:
                check()
            manifest_files.publish(draft, directory, replace=overwrite)


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

    def landed(self) -> bool:
        """Whether the new checkpoint is in place, or a part of it."""
        place = self.target.place
        alone = len(self.drafts) == 1 and self.drafts[0].is_at(place.path)
        return self.committed or alone

    def commit(self, names: Sequence[str], *, indexed: bool, replaced: Sequence[str] = ()) -> None:
        """Gives the files these names and, if indexed, an index that leads to them its own."""
        paths = list(map(self.target.place.at, names))
        try:
            for draft, path in zip(self.drafts, paths, strict=True):
                draft.publish(path, replace=self.target.overwrite)
            if indexed:
                files.fsync(self.directory)
                self._place_index(names, replaced)
        except BaseException:
            # A single file is there, or it is not.
            if indexed and not self.committed:
                pairs = zip(self.drafts, paths, strict=True)
                _remove(path for draft, path in pairs if draft.is_at(path))
            raise
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
            more = f" and {len(gone) - _SHOWN} more" if len(gone) > _SHOWN else ""
            notes.append(f"removed of the old checkpoint: {', '.join(gone[:_SHOWN])}{more}")
        # The names are on disk before what leads to them. Without an index, a load of the
        # directory takes all files there are: it goes last, and only if the old ones are gone.
        files.fsync(self.directory)
        if len(names) > 1 or left or _remove([place.at(place.index)]):
            self._place_index(names, left)
        files.fsync(self.directory)
        _remove(map(place.at, hidden))
        files.fsync(self.directory)
        return notes

    def _place_index(self, names: Iterable[str], replaced: Sequence[str]) -> None:
        """Writes an index that leads to files of these names, and gives it its name."""
        place = self.target.place
        raw = np.frombuffer(layout.index_json(names, self.layouts, replaced), np.uint8)
        path = place.at(place.index)
        hidden = place.at(place.hidden + secrets.token_hex(8))
        draft = Draft(hidden, raw.size, path, self.target.mode)
        try:
            draft.write(0, [raw])
            draft.sync()
            draft.publish(path, replace=self.target.overwrite)
        finally:
            # Ctrl-C may have come right after the rename: the disk knows what is true.
            self.committed = self.committed or draft.is_at(path)
            draft.discard()


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
            mode = os.lstat(path).st_mode
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
