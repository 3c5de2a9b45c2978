"""Names of several files that change at one stroke (`publishing` says how, and why)."""

from __future__ import annotations

import ctypes
import errno
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from mfload import errors
from mfload.saving.drafts import Draft
from mfload.saving.folders import Folder

# What file systems say that have no hard links.
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EINVAL)
_RENAME_NOREPLACE = 1
_AT_FDCWD = -100
_SHOWN = 8


def place(draft: Draft, path: str) -> None:
    """Gives a draft its final name, where nothing has that.

    Raises:
        FileExistsError: Something has it.
        OSError: The system refused.
    """
    try:
        draft.link(path)
    except OSError as error:
        if not draft.named or error.errno not in _NO_LINKS:
            raise
        _rename_free(draft.hidden, path)
        draft.published()


def _rename_free(source: str, target: str) -> None:
    """Renames to a name that nothing has, or raises FileExistsError."""
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None) if _linux else None
    if call is not None:
        paths = os.fsencode(source), os.fsencode(target)
        if call(_AT_FDCWD, paths[0], _AT_FDCWD, paths[1], _RENAME_NOREPLACE) == 0:
            return
        code = ctypes.get_errno()
        if code not in (errno.EINVAL, errno.ENOSYS):
            raise OSError(code, os.strerror(code), target)
    # The directory's lock keeps other writers of ours out meanwhile.
    if os.path.lexists(target):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), target)
    os.replace(source, target)


_linux = sys.platform.startswith("linux")


@dataclass(slots=True)
class Change:
    """A change of names, in progress.

    Attributes:
        folder: Where, locked.
        drafts: The new files, whole and on disk.
        names: Their names to be.
        index: Writes an index, synced, that leads to given names, and says which files of the
            old checkpoint are still to be removed.
        index_name: What it is called.
        replaces: Whether files and an index that are there may be replaced.
        keeps_index: Whether the index stays; one file needs none.
        old: Files of the old checkpoint that are to go, the index left out.
        stays: Whether others of its files stay, so that the index must.
        led: Those of them to which the old index led; None where there was none.
        alone: Whether nothing that a load of the directory sees lies there.
        committed: Whether the stroke was done.
    """

    folder: Folder
    drafts: Sequence[Draft]
    names: Sequence[str]
    index: Callable[[Iterable[str], Sequence[str]], Draft]
    index_name: str
    replaces: bool
    keeps_index: bool
    old: frozenset[str]
    led: frozenset[str] | None
    alone: bool
    stays: bool = False
    committed: bool = False
    notes: list[str] = field(default_factory=list[str])

    def run(self) -> list[str]:
        """Does it.

        Returns:
            What a user should hear of.

        Raises:
            OSError: The system refused a step. Before the stroke, everything is as it was.
        """
        hidden = [draft.appear() for draft in self.drafts]
        if _has_links(hidden[0]):
            self._by_links(hidden)
        else:
            self._by_renames(hidden)
        return self.notes

    def _by_links(self, hidden: list[str]) -> None:
        going = self._only_old(self.names)
        self._stroke([os.path.basename(each) for each in hidden], going, hidden)
        given: list[str] = []
        for source, name in zip(hidden, self.names, strict=True):
            path = self.folder.at(name)
            try:
                self._give(source, path)
            except FileExistsError:
                # Somebody who heeds no lock came between, and nothing may be replaced.
                _remove([self.folder.at(self.index_name), *given, *hidden])
                self.committed = False
                raise
            given.append(path)
        left = self._tidy(going)
        # The names are on disk before what leads to them.
        self.folder.sync()
        self._replace_index(self.names, left)
        _remove(hidden)
        self._end(left)

    def _give(self, source: str, path: str) -> None:
        try:
            os.link(source, path)
        except FileExistsError:
            if not self.replaces:
                raise
            spare = f"{source}.link"
            os.link(source, spare)
            os.replace(spare, path)

    def _stroke(self, names: Iterable[str], going: Sequence[str], undo: list[str]) -> None:
        """Puts the first index in place; before that, `undo` is removed on any failure."""
        final = self.folder.at(self.index_name)
        draft: Draft | None = None
        try:
            draft = self.index(names, going)
            self.folder.sync()
            for each in self.drafts:
                each.published()  # Its name is what the index leads to.
            if self.replaces:
                os.replace(draft.appear(), final)
            else:
                place(draft, final)
        finally:
            # Ctrl-C may have come right after the rename: the disk knows what is true.
            self.committed = draft is not None and draft.is_at(final)
            if not self.committed:
                _remove(undo)
        self.folder.sync()

    def _replace_index(self, names: Iterable[str], left: Sequence[str]) -> None:
        os.replace(self.index(names, left).appear(), self.folder.at(self.index_name))
        self.folder.sync()

    def _only_old(self, names: Sequence[str]) -> list[str]:
        return sorted(self.old - {*names, self.index_name})

    def _tidy(self, going: Sequence[str]) -> list[str]:
        """Removes what only the old checkpoint had; returns what stays of it."""
        failed = {*map(os.path.basename, _remove(map(self.folder.at, going)))}
        left = [name for name in going if name in failed]
        gone = [name for name in going if name not in failed]
        if left:
            path = self.folder.at(left[0])
            self.notes.append(f"of the old checkpoint, {path} could not be removed")
        if gone:
            more = f" and {len(gone) - _SHOWN} more" if len(gone) > _SHOWN else ""
            self.notes.append(f"removed of the old checkpoint: {', '.join(gone[:_SHOWN])}{more}")
        return left

    def _end(self, left: Sequence[str]) -> None:
        if not left and not self.keeps_index and not self.stays:
            # Only now: without the index, a load of the directory takes all files there are.
            self.folder.sync()
            _remove([self.folder.at(self.index_name)])
        self.folder.sync()

    def _by_renames(self, hidden: list[str]) -> None:
        """The same without hard links: no file has two names, so none changes its after the stroke.

        New names that nothing has are taken before it, where a load looks at the index alone.
        Files whose names the old checkpoint has keep their hidden ones for good.
        """
        if not self.keeps_index and (self.led is None or self.names[0] in self.led):
            raise errors.TargetError(
                "this file system has no hard links, and without them one file can't take the "
                "place of these shards at one stroke; remove them first",
                file=self.folder.at(self.names[0]),
            )
        taken: list[str] = []
        undo = list(hidden)
        try:
            for source, name in zip(hidden, self.names, strict=True):
                taken.append(self._rename(source, name, undo))
        except BaseException:
            _remove(undo)
            raise
        going = self._only_old(taken)
        self._stroke(taken, going, undo)
        kept = [name for name in taken if name not in self.names]
        if kept:
            self.notes.append(
                f"{len(kept)} of {len(taken)} files keep hidden names such as {kept[0]}: the file "
                "system has no hard links, and the old checkpoint had their own"
            )
        left = self._tidy(going)
        if going:
            self.folder.sync()
            self._replace_index(taken, left)
        self._end(left)

    def _rename(self, source: str, name: str, undo: list[str]) -> str:
        """Takes a name before the stroke, where a load looks at the index alone."""
        path = self.folder.at(name)
        there = os.path.lexists(path)
        # A single file to which no index leads is replaced: who names it gets the new one.
        if self.keeps_index and (there or not (self.alone or self.led is not None)):
            return os.path.basename(source)
        if not there:
            undo.append(path)
        os.replace(source, path)
        return name


def _has_links(path: str) -> bool:
    spare = f"{path}.link"
    try:
        os.link(path, spare)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        return False
    os.unlink(spare)
    return True


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
