"""How the files of a checkpoint get their names: all at one stroke.

One file over one file is a rename. Several files change their names one by one, so it is the
index that commits them: whoever loads the directory or the index follows it alone.

1. The new files get hidden names, which nothing else has.
2. An index that leads to these takes the place of the old one: this is the stroke. Until then a
   load finds the old checkpoint, from then on the new one.
3. The files get their own names too, by hard links.
4. What the old checkpoint had and the new one has not goes; the first index remembers its names.
5. An index that leads to their own names takes the place of the first, and the hidden names go.

A writer that dies on the way leaves one of the two whole; what lies about then is removed by the
next. `renaming` has the steps for file systems without hard links.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import stat
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np

from mfload import errors
from mfload.formats.discovery import INDEX_SUFFIX
from mfload.saving import existing, folders, layout, renaming, targets
from mfload.saving.drafts import Draft
from mfload.saving.existing import Found
from mfload.saving.folders import Folder
from mfload.saving.renaming import Change

log = logging.getLogger("mfload")

Held = Sequence[Sequence[str]]
"""The names of the tensors in each file."""


class Published(NamedTuple):
    """What lies there now.

    Attributes:
        files: Paths; the index last where there is one.
        notes: What a user should hear of.
    """

    files: tuple[str, ...]
    notes: tuple[str, ...]


class Target:
    """Where a checkpoint is to be written.

    Args:
        path: A file, or a directory for a `model.safetensors` in it.
        overwrite: Whether what is there may be replaced.

    Raises:
        UsageError: It is no path for a checkpoint.
        TargetExistsError: Something is there.
        TargetError: No file can lie there.
    """

    def __init__(self, path: str | os.PathLike[str], overwrite: bool = False) -> None:
        self.place = targets.resolve(path)
        self.path = self.place.path
        self.overwrite = overwrite
        self._hidden = self.place.hidden()
        self._folder: Folder | None = None
        self._refuse_existing(existing.look(self.place))

    def _refuse_existing(self, old: Found) -> None:
        if self.overwrite:
            if old.broken is not None:
                raise old.broken
            return
        names = [self.place.name] * old.single + [str(self.place.index)] * old.indexed
        named = old.shards | old.strays
        if names or named:
            found = (names or sorted(named))[0]
            raise errors.TargetExistsError(
                "a checkpoint is there already; overwrite=True replaces it",
                file=os.path.join(self.place.directory, found),
            )

    def names(self, count: int) -> list[str]:
        """What so many files will be called."""
        return self.place.names(count)

    @contextmanager
    def drafts(self, sizes: Sequence[int]) -> Generator[list[Draft]]:
        """Makes the files, invisible and with room for all their bytes.

        Args:
            sizes: Bytes of each.

        Yields:
            The drafts. What is not published when the context ends is gone.

        Raises:
            WriteError: The disk has no room.
            TargetError: No such files can be made there.
        """
        names = self._checked(len(sizes))
        drafts: list[Draft] = []
        # Whatever happens to one on the way out, the others are let go of.
        with contextlib.ExitStack() as stack:
            folder = self._folder = Folder(self.place.directory)
            stack.callback(folder.close)
            stack.callback(setattr, self, "_folder", None)
            # Under the lock, so that nobody takes a draft with a name for a leftover.
            with folder.locked():
                old = existing.look(self.place)
                self._refuse_existing(old)
                self._sweep(old)
                for number, (name, size) in enumerate(zip(names, sizes, strict=True), 1):
                    hidden = f"{self._hidden}{number:05}.safetensors"
                    drafts.append(self._draft(hidden, size, name, old))
                    stack.callback(drafts[-1].discard)
            yield drafts

    def _checked(self, count: int) -> list[str]:
        """Names of the files, none of which may be a link where several change at once."""
        place, names = self.place, self.names(count)
        old = existing.look(place)
        several = count > 1 or old.indexed or bool(old.shards)
        behind = place.linked
        if behind is not None and not several:
            # The link's own neighbours would go on hiding what lies behind it.
            there = existing.look(targets.Place(*os.path.split(behind)))
            several = there.indexed or bool(there.shards)
        if several and behind is not None:
            raise errors.TargetError(
                "several files can't be replaced through a symbolic link; name its target",
                file=behind,
                expected=self.path,
            )
        if several:
            self._refuse_unspelled()
            self._refuse_kept(names, old)
        index = [place.index] if several and place.index is not None else []
        targets.check_names(place.directory, [*names, *index], links=False)
        return names

    def _refuse_unspelled(self) -> None:
        """An index is UTF-8, and has the names in it."""
        try:
            self.place.name.encode()
        except UnicodeEncodeError:
            raise errors.UsageError(
                "an index can't name the files",
                file=self.path,
                expected="a name that UTF-8 can spell",
                found=repr(self.place.name),
            ) from None

    def _refuse_kept(self, names: Sequence[str], old: Found) -> None:
        """What another index leads to neither changes nor goes, where several files do."""
        taken = ({self.place.name} if old.single else set[str]()) | {*names}
        for name in sorted(taken & old.kept):
            path = os.path.join(self.place.directory, name)
            if os.path.lexists(path):
                raise errors.TargetError(
                    "an index of another name leads to the file, which would be replaced; "
                    "name that index's checkpoint, or another target",
                    file=path,
                )

    def _draft(self, hidden: str, size: int, name: str, old: Found) -> Draft:
        path = os.path.join(self.place.directory, hidden)
        shown = os.path.join(self.place.directory, name)
        return Draft(path, size, shown, self._mode(name, old))

    def _mode(self, name: str, old: Found) -> int | None:
        """Permissions of the file that is replaced, or of one of its checkpoint's."""
        for each in (name, self.place.name, *sorted(old.names)):
            with contextlib.suppress(OSError):
                status = os.lstat(os.path.join(self.place.directory, each))
                if stat.S_ISREG(status.st_mode):
                    return stat.S_IMODE(status.st_mode) & 0o777
        return None

    def _sweep(self, old: Found) -> None:
        """Removes what writers of this checkpoint left that died."""
        if old.doubt is not None:
            return  # They may be what that index leads to.
        for name in old.hidden - old.placed - old.kept:
            path = os.path.join(self.place.directory, name)
            with contextlib.suppress(OSError):
                fd = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
                try:
                    if folders.lock(fd):
                        os.unlink(path)
                        log.info("%s: removed, its writer died", path)
                finally:
                    os.close(fd)

    def publish(self, drafts: Sequence[Draft], held: Held, total: int) -> Published:
        """Gives the drafts their final names, at one stroke; they are whole and synced.

        Args:
            drafts: The files, as `drafts` gave them.
            held: The names of the tensors in each.
            total: Bytes of all tensors.

        Returns:
            What lies there now. From the stroke on, a failure leaves the new checkpoint.

        Raises:
            TargetExistsError: Somebody else was faster.
            TargetError: The names could not be given.
        """
        folder = self._folder
        assert folder is not None, "published outside of the drafts' context"
        names = self.names(len(drafts))
        with folder.locked():
            old = existing.look(self.place)
            self._refuse_existing(old)
            if len(drafts) == 1 and not old.indexed and not old.shards:
                notes: list[str] = []
                self._single(drafts[0], folder)
            else:
                notes = self._several(drafts, names, held, total, folder, old)
        if self.place.index is not None and os.path.exists(folder.at(self.place.index)):
            names.append(self.place.index)
        strays = sorted(old.strays - {*names})
        if strays and self.overwrite:
            notes.append(
                f"{len(strays)} files such as {strays[0]} are named as shards of it, and were "
                "left: no index leads to them, and they are no complete set"
            )
        notes += self._neighbours(names, old)
        return Published(tuple(map(folder.at, names)), tuple(notes))

    def _neighbours(self, names: list[str], old: Found) -> list[str]:
        """What else a load of the directory would see, for whoever named the directory."""
        seen = [name for name in old.others if len(names) == 1 or name.endswith(INDEX_SUFFIX)]
        if not seen or not self.place.whole:
            return []
        return [f"{seen[0]} lies beside it: load {names[-1]} by its name, not the directory"]

    def _single(self, draft: Draft, folder: Folder) -> None:
        """One file where one file, or none, was: a link or a rename."""
        try:
            try:
                renaming.place(draft, self.path)
            except FileExistsError:
                if not self.overwrite:
                    raise
                os.replace(draft.appear(), self.path)
                draft.published()
            folder.sync()
        except OSError as error:
            raise errors.from_target(error, self.path, "put the file in its place") from error

    def _several(
        self,
        drafts: Sequence[Draft],
        names: list[str],
        held: Held,
        total: int,
        folder: Folder,
        old: Found,
    ) -> list[str]:
        """Several files, or over several: by the index."""
        final = str(self.place.index)
        self._refuse_unspelled()
        self._refuse_kept(names, old)
        if not any(held):
            raise errors.TargetError(
                "nothing can't take the place of a sharded checkpoint at one stroke; "
                "remove that first",
                file=folder.at(final),
            )
        numbers = itertools.count()
        with contextlib.ExitStack() as stack:

            def index(files: Iterable[str], replaced: Sequence[str]) -> Draft:
                pairs = zip(files, held, strict=True)
                placed = {name: file for file, some in pairs for name in some}
                raw = np.frombuffer(layout.index_json(placed, total, replaced), np.uint8)
                hidden = f"{self._hidden}index{next(numbers)}.json"
                draft = self._draft(hidden, raw.size, final, old)
                stack.callback(draft.discard)
                draft.write(0, raw)
                draft.sync()
                return draft

            going = old.names | {self.place.name} if old.single else old.names
            staying = sorted(going - {*names}) if old.doubt is not None else []
            change = Change(
                folder,
                drafts,
                names,
                index,
                final,
                replaces=self.overwrite,
                # For one file it is there for the time of the change alone.
                keeps_index=len(names) > 1,
                old=frozenset() if old.doubt is not None else going,
                stays=bool(staying),
                led=old.placed if old.indexed else None,
                alone=not (old.single or old.shards or old.others),
            )
            if old.doubt is not None:
                change.notes.append(
                    f"{old.doubt} was no index that can be read: no file was removed"
                )
            try:
                return change.run()
            except OSError as error:
                told = errors.from_target(error, folder.at(final), "put the files in place")
                if change.committed:
                    told.message += "; the new checkpoint is whole, and loads by its index"
                raise told from (None if told is error else error)
