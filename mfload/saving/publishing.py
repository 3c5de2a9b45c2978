"""How the files of a checkpoint get their names: all at once.

- One file over one file, or over nothing, is a link or a rename.
- Several files over nothing: the index is written first, under a hidden name, and synced. Then the
  files get their names, which are synced; then the index gets its own. Until then a load does not
  take the files for a checkpoint, and if the writer died, the next save removes them
  (see `formats.unfinished`).
- Several files or an index are replaced, where a load follows the index alone:

  1. The new files get hidden names, which nothing else has.
  2. An index that leads to these takes the place of the old one. This is the switch: until then a
     load finds the old checkpoint, from then on the new one.
  3. The files get their own names too, by hard links, and what only the old checkpoint had is
     removed. The index remembers which names these are, in case the writer dies.
  4. An index that leads to their own names takes the place of the first, and the hidden names go;
     for a single file the index goes too.

A writer that dies leaves the old or the new checkpoint whole. The next writer removes leftovers,
with a note if these are shards with their final names.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import secrets
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from mfload import errors
from mfload.formats import unfinished
from mfload.formats.discovery import INDEX_SUFFIX, SUFFIX
from mfload.runtime import Deadline
from mfload.saving import drafts as files, journal, layout, manifest_files, targets
from mfload.saving.attributes import Attributes
from mfload.saving.drafts import Draft
from mfload.saving.layout import FileLayout
from mfload.saving.locks import lock_of, locked, only_writer
from mfload.saving.targets import Existing, Location
from mfload.sources.local import place_of

log = logging.getLogger("mfload")

_SHOWN = 8


class SaveTarget:
    """Where a checkpoint is to be written: a file, or a `model.safetensors` in a directory.

    Args:
        stem: The name of the file in a directory, without its end. Default: model.
        sealed: Whether a manifest is to be published with it.
    """

    lasting = True
    """Whether drafts may be kept for the next writer."""

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
        self.like: Attributes | None = None  # What the new files take over from the old.
        self.committed = False  # Whether a new index is in place.
        self._first: Draft | None = None
        self._notes: list[str] = []
        self._look([self.place.name], locked=False)

    def _look(self, names: Sequence[str], *, locked: bool = True) -> Existing:
        """What is there; raises if it may not be replaced by files of these names.

        Without the directory's lock, what is there may change meanwhile.
        """
        place, old = self.place, targets.look(self.place, names)
        if old.found and not self.overwrite:
            what = "a checkpoint exists already; overwrite=True replaces it"
            if not old.sharded and place.name not in old.found:
                what = (
                    "some shards of a checkpoint exist, and no index; if a killed save left them, "
                    "remove them"
                )
            raise errors.TargetExistsError(what, file=place.at(old.found[0]))
        theirs = [n for n in sorted(old.manifests) if manifest_files.is_manifest(place.at(n))]
        if theirs and not self.overwrite:
            raise errors.TargetExistsError(
                "a manifest of an earlier checkpoint is there; overwrite=True removes it",
                file=place.at(theirs[0]),
            )
        if self.sealed and locked and place.manifest not in theirs:
            at = place.at(place.manifest)
            manifest_files.check_target(at, overwrite=True)
            if os.path.lexists(at):
                what = "an old manifest of another checkpoint has the name; rename that one"
                raise errors.TargetExistsError(what, file=at)
        old = old._replace(manifests=frozenset(theirs))
        several = len(names) > 1 or old.sharded
        if place.linked is not None and not several:
            # The link's own neighbours would go on hiding what lies behind it.
            several = targets.look(Location(*os.path.split(place.linked))).sharded
        if not several:
            return old._replace(links=place.check_names(names))
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
        return old._replace(links=place.check_names(sorted({*names, place.index, *old.files})))

    @contextmanager
    def drafts(
        self,
        layouts: Sequence[FileLayout],
        key: str | None = None,
        deadline: Deadline | None = None,
    ) -> Generator[list[Draft]]:
        """Locks the target and makes a draft for each layout; unpublished ones are gone at the end.

        If another writer has the lock, waits for it until the deadline. Default: raise TargetError.

        With a key, which identifies their content, drafts are lasting (see `Draft`): the next
        writer with the same key gets the same ones, and their journal.
        """
        place, names = self.place, self.place.names(len(layouts))
        hidden = place.at(place.hidden + (key or secrets.token_hex(8)))
        paths = [f"{hidden}-{number:05}" for number in range(1, len(layouts) + 1)]
        ours = {lock_of(place)} | ({*paths, journal.name(paths[0])} if key else set[str]())
        changed = time.time_ns() if len(names) > 1 else None
        drafts: list[Draft] = []
        _make_directory(place.directory)
        # No ExitStack: after an interrupt in one, a reference cycle would keep the lock.
        with only_writer(place, deadline):
            try:
                # Under the lock, so that no other save takes a draft with a name for a leftover.
                with locked(place.directory) as directory:
                    old = self._look(names)
                    self._clear(directory, old.left, ours)
                    self.like = Attributes.of(map(place.at, [place.name, *sorted(old.files)]))
                    try:
                        for path, name, made in zip(paths, names, layouts, strict=True):
                            given = path, made.size, place.at(name), self.like
                            drafts.append(Draft(*given, lasting=key is not None))
                            drafts[-1].changed = changed
                        if drafts[0].named and _swaps(old, names):
                            self._check_links(drafts[0])
                    except BaseException:
                        for each in drafts:
                            each.lasting = False
                        if key:
                            _remove([journal.name(paths[0])])
                        raise
                yield drafts
            finally:
                for draft in drafts:
                    draft.discard()

    def _clear(self, directory: int, left: Iterable[str], ours: set[str]) -> None:
        """Removes leftovers of writers that died, except the paths in `ours`."""
        place = self.place
        shards = sorted(name for name in left if not name.startswith(unfinished.HIDDEN))
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
            # Before their draft, by which they are recognised.
            with errors.AsTarget(place.directory, "remove files"):
                files.fsync(directory)
        hidden = sorted({*map(place.at, left)} - {*map(place.at, shards)} - ours)
        _remove_left(hidden)
        if stay := [os.path.basename(path) for path in hidden if os.path.lexists(path)]:
            self._notes.append(
                "a save that did not finish left files, which can't be removed; if no process is "
                f"writing them any more, remove them: {some_of(stay)}"
            )

    def _check_links(self, draft: Draft) -> None:
        """Refuses to replace shards on a file system without hard links, before bytes come."""
        spare = f"{draft.hidden}.link"
        action = (
            "make the hard links that replacing a sharded checkpoint takes (remove it first, "
            "or save to another directory)"
        )
        with errors.AsTarget(self.path, action):
            draft.link(spare)
            os.unlink(spare)

    def publish(
        self, drafts: Sequence[Draft], layouts: Sequence[FileLayout], manifest: bytes | None = None
    ) -> tuple[list[str], list[str]]:
        """Gives the drafts, which are whole and synced, their final names, all at once.

        From the switch on, a failure leaves the new checkpoint. `manifest` is that of these drafts,
        as bytes; manifests of the old checkpoint are removed. Returns the paths of the new files,
        the index last if there is one, and notes for the user.
        """
        place, names = self.place, self.place.names(len(drafts))
        with locked(place.directory) as directory:
            old = self._look(names)
            theirs = sorted(old.manifests)
            given = place.manifest, manifest, Attributes.of(map(place.at, theirs)) or self.like
            change = _Change(self, directory, drafts, layouts)
            self._first = drafts[0]
            with (
                manifest_files.drafted(place, *given) as draft,
                manifest_files.replaced(place, theirs, draft, directory, self.placed),
            ):
                notes = [*self._notes, *self._put(change, old, names)]
        now = {
            n for n in old.links if os.path.exists(place.at(n)) and not os.path.islink(place.at(n))
        }
        if now:
            told = f"replaced links into a cache of blobs, the blobs stay: {some_of(sorted(now))}"
            notes.append(told)
        if change.indexed:
            names.append(place.index)
        if place.whole:
            suffixes = (INDEX_SUFFIX, SUFFIX) if len(names) == 1 else INDEX_SUFFIX
            try:
                seen = {n for n in os.listdir(place.directory) if n.endswith(suffixes)}
            except OSError as error:
                seen = set[str]()
                notes.append(f"could not look at what lies beside it: {error.strerror}")
            for name in sorted(n for n in seen - {*names} if n[0] != ".")[:1]:
                notes.append(
                    f"{name} lies beside it: load {names[-1]} by its name, not the directory"
                )
        at = None if manifest is None else place.at(place.manifest)
        if gone := [path for path in map(place.at, theirs) if path != at]:
            notes.append(f"removed of the old checkpoint: {', '.join(gone)}")
        if at is not None:
            notes.append(f"checksums written to {at}")
        return list(map(place.at, names)), notes

    def placed(self) -> bool:
        """Whether the new checkpoint is in place, also if an interrupt came right after."""
        return self.committed or (self._first is not None and self._first.is_at(self.path))

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
            if self.committed:
                told.message += "; the new checkpoint is whole, and loads by its index"
            elif self.placed():
                told.message += "; the new file is there, whole, but a loss of power may undo that"
            elif told.errno == errno.EBUSY:
                told.message += "; a file that is mounted can't be replaced, mount its directory"
            raise told from (None if told is error else error)
        raise errors.TargetError(
            "cannot replace a sharded checkpoint with an empty one; remove it first",
            file=self.path,
        )


def write_manifest(
    path: str,
    text: bytes,
    *,
    overwrite: bool,
    check: Callable[[], object] | None = None,
    files: Iterable[str] = (),
) -> None:
    """Writes a manifest of files that are there already (see `checking.manifest`).

    It takes over the permissions of the one it replaces, else those of the files. `check` is called
    right before it gets its name, while no save of mfload changes the files beside it; the manifest
    is not written if it raises.
    """
    path = place_of(path)
    if "\0" in path:
        raise errors.UsageError("not a path", expected="the path of a manifest", found=repr(path))
    manifest_files.check_target(path, overwrite=overwrite)
    place = Location(*os.path.split(path))
    with locked(place.directory) as directory:
        _remove_left(sorted(map(place.at, targets.look(place).left)))
        like = Attributes.of([path]) or Attributes.of(files)
        with manifest_files.drafted(place, place.name, text, like) as draft:
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
    layouts: Sequence[FileLayout]
    indexed: bool = False  # Whether an index is there at the end.

    def commit(self, names: Sequence[str], *, indexed: bool, replaced: Sequence[str] = ()) -> None:
        """Gives the files these names and, if indexed, an index that leads to them its own."""
        paths, self.indexed = list(map(self.target.place.at, names)), indexed
        with self._index(names, replaced) if indexed else contextlib.nullcontext() as index:
            try:
                # Without a hidden name, a file is known by what the index says.
                if index is not None and not replaced:
                    files.fsync(self.directory)
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
                    # If shards stay, so does the draft by which they are recognised.
                    index.lasting = bool(stay)
                    with contextlib.suppress(OSError):
                        files.fsync(self.directory)
                raise
            # Before the draft's hidden name is removed, which it still has after a link.
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
            notes.append(f"removed of the old checkpoint: {some_of(gone)}")
        # The names are on disk before what leads to them. Without an index, a load of the
        # directory takes all files there are: it goes last, and only if the old ones are gone.
        files.fsync(self.directory)
        if len(names) > 1 or left or _remove([place.at(place.index)]):
            with self._index(names, left) as index:
                index.publish(index.shown, replace=True)
        else:
            self.indexed = False
        files.fsync(self.directory)
        _remove(map(place.at, hidden))
        files.fsync(self.directory)
        return notes

    @contextmanager
    def _index(self, names: Iterable[str], replaced: Sequence[str]) -> Generator[Draft]:
        """A synced draft of an index of files of these names; its hidden name is not synced yet."""
        target, place = self.target, self.target.place
        raw = layout.index_json(names, self.layouts, replaced)
        path, changed = place.at(place.index), self.drafts[0].changed
        hidden = place.at(f"{place.hidden}{secrets.token_hex(8)}{unfinished.INDEX_END}")
        before = target.committed
        given = raw, hidden, path, target.like
        with files.written(*given, named=True, changed=changed) as draft:
            try:
                # True before the rename, since Ctrl-C may come right after it; checked on errors.
                target.committed = True
                yield draft
            except BaseException:
                target.committed = before or draft.is_at(path)
                raise


def some_of(names: Sequence[str]) -> str:
    """The first of some names, and how many there are besides."""
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
            if os.path.islink(path):  # No writer's.
                os.unlink(path)
                continue
            # The open of a FIFO would wait for a writer.
            flags = os.O_NONBLOCK
            try:  # NFS and SMB lock only what is open for writing.
                fd = os.open(path, os.O_RDWR | flags)
            except PermissionError:
                fd = os.open(path, os.O_RDONLY | flags)
            try:
                if files.lock(fd):
                    os.unlink(path)
                    log.info("%s: removed, its writer died", path)
            finally:
                os.close(fd)


def _make_directory(path: str) -> None:
    """Makes a directory and those above it, on disk, if they do not exist."""
    missing: list[str] = []
    while not os.path.lexists(path):
        missing.append(path)
        path = os.path.dirname(path)
    for path in reversed(missing):
        with errors.AsTarget(path, "make the directory"):
            with contextlib.suppress(FileExistsError):
                os.mkdir(path)
            with files.open_directory(os.path.dirname(path)) as fd:
                files.fsync(fd)
