"""Saving to an object store: written on the local disk first, then uploaded.

A store has no renames and no locks. What decides which checkpoint is there is one object: the
index, or the single file. It comes last, and only if it is still what was seen before, so a reader
finds the old checkpoint or the new one, and of two writers one fails. Shards have a mark of the
save in their names, so that none that another writer made changes, or is taken for one of these.

A single file of several parts has no such condition: of two writers of one, the last wins.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import posixpath
import re
import secrets
import shutil
import tempfile
import time
import weakref
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import cached_property, partial
from typing import Any, BinaryIO, TypeVar

from mfload import errors
from mfload.formats import safetensors
from mfload.formats.discovery import INDEX_SUFFIX, MARKED, SUFFIX, read_index
from mfload.options import LoadOptions, Options, started
from mfload.runtime import Deadline, Forked, start
from mfload.saving.drafts import Draft
from mfload.saving.layout import FileLayout
from mfload.saving.manifest_files import HEAD, is_manifest_text
from mfload.saving.publishing import SaveTarget
from mfload.saving.targets import OTHERS, Location
from mfload.sources import stores
from mfload.sources.access import Access, Answered, in_fork, no_panic, obstore, reason

T = TypeVar("T")

_PART = 16 << 20  # Bytes of a part; a store takes 10,000 of them.
_PARTS_OF = 2048  # A larger file has larger parts: so many, at most.
_TOGETHER = 4  # Parts under way at once.
_PATIENCE = 3600.0  # Seconds for a part.
_REMOVING = 20.0  # Seconds for removing an object,
_ABORTING = 5.0  # and for a part under way that is the last.
_CONFLICTS, _PAUSE = 5, 0.5  # How often a write that met another is repeated, and after how long.


class UploadedTarget(SaveTarget):
    """A checkpoint in a store (see `SaveTarget`), which is made in a temporary directory.

    A URL without the end of a file's name is a directory. The local disk has to hold the
    checkpoint until it is uploaded; TMPDIR says where.

    Raises:
        TargetExistsError: A checkpoint is there, and may not be replaced.
        TargetError: The store refuses to say what is there.
    """

    lasting = False
    _led: str | None = None  # The version of what decides, once it is uploaded.

    def __init__(
        self,
        url: str,
        overwrite: bool,
        stem: str | None,
        *,
        sealed: bool,
        options: Options | None,
    ) -> None:
        how = options if isinstance(options, LoadOptions) else started(options)
        self._access, key = stores.access_to(url, how)
        self._bucket = _Bucket(self._access, how.deadline)
        whole = not key.endswith(SUFFIX)
        self._prefix = key.rstrip("/") if whole else posixpath.dirname(key)
        local = tempfile.mkdtemp(prefix="mfload-")
        self._clean_up = weakref.finalize(self, _remove, local, Forked())
        name = "" if whole else posixpath.basename(key)
        if key[-1:] != "/" and key.lower().endswith((*OTHERS, ".json")):
            what = "checkpoints are written as safetensors; the name is one of another format"
            expected = f"a {SUFFIX} file or a directory"
            raise errors.UsageError(what, file=f"{self._access.url}/{key}", expected=expected)
        super().__init__(os.path.join(local, name), False, stem, sealed=sealed)
        self.path = self._url(self.place.name)
        self._may_replace = overwrite
        self._there = self._listed()
        place = self.place
        deciding = [name for name in (place.name, place.index) if name in self._there]
        numbered = re.compile(rf"{re.escape(place.stem)}-\d{{5,}}-of-\d{{5,}}{re.escape(SUFFIX)}")
        self._old = {*filter(numbered.fullmatch, self._there)}
        deciding += sorted(self._old)
        if deciding and not overwrite:
            what = "a checkpoint exists already; overwrite=True replaces it"
            raise errors.TargetExistsError(what, file=self._url(deciding[0]))
        if place.index in self._there:
            self._old = self._led_to(place.index)
        self._kept = set[str]()  # What other indexes lead to.
        for name in self._there:
            if name.endswith(INDEX_SUFFIX) and name != place.index:
                self._kept |= self._led_to(name)
        self.place: Any = _Marked(place.directory, place.name, whole=place.whole)
        # An index goes on to decide, and so does one beside what a killed save left.
        strays = any(
            made[1] == place.stem for each in self._there if (made := MARKED.fullmatch(each))
        )
        decided = strays or self._old or place.index in self._there or place.name in self._kept
        self.place.indexed = whole and bool(decided)
        shared = place.name in self._kept or (place.name in self._old and len(self._old) > 1)
        if shared and not whole:
            what = "an index leads to the file and to others; save to the directory"
            raise errors.TargetError(what, file=self.path)

    def _key(self, name: str) -> str:
        return posixpath.join(self._prefix, name)

    def _url(self, name: str) -> str:
        return f"{self._access.url}/{self._key(name)}"

    def _listed(self) -> dict[str, str | None]:
        """The objects beside each other at the target, and the version of each."""
        try:
            _, objects = self._access.level(self._prefix)
        except errors.SourceError as error:
            what = f"can't list what is at the target: {error.message}"
            raise errors.TargetError(
                what, file=error.file, expected=error.expected, found=error.found
            ) from None
        return {posixpath.basename(each.key): each.validator for each in objects}

    def _led_to(self, name: str) -> set[str]:
        """Files that an index names."""
        index = stores.StoreSource(self._access, self._key(name))
        try:
            return {*read_index(index)["weight_map"].values()} & self._there.keys()
        except (errors.FormatError, errors.SourceError) as error:
            what = f"an index can't be read, so it is unknown which files are its: {error.message}"
            raise errors.TargetError(what, file=index.name) from None

    @contextmanager
    def drafts(
        self,
        layouts: Sequence[FileLayout],
        key: str | None = None,
        deadline: Deadline | None = None,
    ) -> Generator[list[Draft]]:
        """Makes local drafts; all that is local is gone at the end (see `SaveTarget.drafts`)."""
        try:
            with super().drafts(layouts, None, deadline) as drafts:
                yield drafts
        finally:
            self._clean_up()

    def publish(
        self, drafts: Sequence[Draft], layouts: Sequence[FileLayout], manifest: bytes | None = None
    ) -> tuple[list[str], list[str]]:
        """Uploads all files, the one that decides last (see `SaveTarget.publish`)."""
        files, notes = super().publish(drafts, layouts, manifest)
        front = os.path.join(self.place.directory, "")
        names = [path.removeprefix(front) for path in files]
        if names == self.place.shards(1):
            names.append(self.place.index)
            with open(self.place.at(self.place.index), "wb") as index:
                index.write(_leading((each.name for each in layouts[0].entries), names[0]))
        last = names[-1]
        if last == self.place.name and self._old == {last}:
            # It leads to what is replaced now.
            index_key = self._key(self.place.index)
            if self._bucket.remove_all({index_key: self._there[self.place.index]}):
                raise self._bucket.taken(self._key(self.place.index))
            del self._there[self.place.index]
        if self.place.index in self._there and last == self.place.name:
            # Loads follow the index. So the old one leads to the file until its shards are gone.
            last = self.place.index
            with open(self.place.at(last), "wb") as index:
                index.write(_leading((e.name for e in layouts[0].entries), self.place.name))
        elif last == self.place.index and self.place.name in self._there.keys() - {last}:
            self._lead_to_the_old(last)
        self._upload([each for each in os.listdir(front) if each[0] != "."], last)
        notes += self._bucket.notes
        gone = {*self._old, self.place.name} & self._there.keys() - {*names}
        gone |= {self.place.manifest} & self._there.keys() if manifest is None else set[str]()
        order = [*sorted(gone - self._kept), *({self.place.index} & self._there.keys() - {*names})]
        version = self._led if last == self.place.index else self._there.get(self.place.index)
        left = self._bucket.remove_all(
            {self._key(n): version if n == self.place.index else self._there[n] for n in order}
        )
        if done := [name for name in order if self._key(name) not in left]:
            told = ", ".join(map(self._url, done))
            notes.append(f"removed of the old checkpoint: {told}")
        if left:
            notes.append(f"could not be removed, or were replaced meanwhile: {', '.join(left)}")
        return list(map(self._url, names)), [each.replace(front, self._url("")) for each in notes]

    def _lead_to_the_old(self, name: str) -> None:
        """Has an index, if there is none, lead to a single file until it leads to the shards.

        With shards and without an index, it would not be clear which of them is meant.
        """
        if name in self._there:
            return
        key, seen = self._key(self.place.name), self._there[self.place.name]
        old = stores.StoreSource(self._access, key)
        tensors, _ = safetensors.read(old)
        made = _leading((each.name for each in tensors), self.place.name)
        try:
            self._there[name] = self._bucket.create(self._key(name), made)
        except errors.MfloadError:
            if not self._arrived(name, io.BytesIO(made)):
                raise
            self._there[name] = None
        if seen is not None and self._bucket.version(key) != seen.strip('"'):
            self._bucket.remove_all({self._key(name): self._there[name]})
            raise self._bucket.taken(key)  # The names may be of another file.

    def _upload(self, names: Sequence[str], last: str) -> None:
        """Uploads the files, `last` after what it names."""
        new: dict[str, str | None] = {}  # With the version of those that others may replace.
        # What the old checkpoint has too is replaced last: another writer may win.
        shared = {name for name in names if name in self._there and not name.endswith(SUFFIX)}
        after = (shared | {self.place.manifest}) & {*names} - {last}
        try:
            for name in sorted({*names} - after - {last}):
                marked = self.place.is_marked(name)
                if marked:  # Before: it may be there without an answer.
                    new[name] = None
                sent = self._send(name, None if marked or name in self._there else "create")
                if not marked and name not in self._there:
                    new[name] = sent
        except BaseException:
            self._withdraw(new)
            raise
        try:
            self._led = self._send(last, "replace" if last in self._there else "create")
        except errors.MfloadError as error:
            # What was sent may have arrived, by a request whose answer was lost.
            with open(self.place.at(last), "rb") as sent:
                arrived = self._arrived(last, sent)
            refused = isinstance(error, errors.TargetError) and not isinstance(
                error, errors.WriteError
            )
            if isinstance(error, errors.TargetExistsError):  # It may be the save's own request.
                refused = self._replaced(last)
            if arrived is False and refused:
                self._withdraw(new)
            elif not arrived and new:
                error.add_note(f"it may still arrive, so what it names stays: {', '.join(new)}")
            if not arrived:
                raise
        for name in sorted(after):
            try:
                self._send(name, "replace" if name in self._there else "create")
            except errors.TargetExistsError:
                self._bucket.notes.append(f"{self._url(name)} is another writer's, and stays")

    def _replaced(self, name: str) -> bool:
        """Whether an object is for certain another one than was seen first."""
        now, seen = self._bucket.version(self._key(name)), self._there.get(name)
        return now is not None and now != (seen or "").strip('"')

    def _arrived(self, name: str, sent: BinaryIO) -> bool | None:
        """Whether an object is what was to be uploaded; None if that can't be told."""
        size = sent.seek(0, os.SEEK_END)
        sent.seek(0)
        source = stores.StoreSource(self._access, self._key(name))

        def compare() -> bool:
            if source.size != size:
                return False
            parts = range(0, size, _PART)
            return all(source.read(at, min(_PART, size - at)) == sent.read(_PART) for at in parts)

        try:
            return Deadline(_REMOVING).bound(compare, "looking at what arrived", source.name)
        except errors.SourceNotFoundError:
            return False
        except errors.MfloadError:
            return None

    def _withdraw(self, names: dict[str, str | None]) -> None:
        some = [n for n in names if names[n] is not None or self.place.is_marked(n)]
        self._bucket.remove_all({self._key(name): names[name] for name in some})

    def _send(self, name: str, mode: str | None) -> str | None:
        """Uploads a file; a small one only if nothing, or the old one, has its name.

        Returns its version, if the store says it.
        """
        path, key, bucket = self.place.at(name), self._key(name), self._bucket
        size = os.path.getsize(path)
        if size > _PART:
            if mode == "create" and name in self._listed():  # Parts have no conditions.
                raise bucket.taken(key)
            return bucket.write_parts(key, path, size)
        with open(path, "rb") as file:
            data = file.read()
        if mode == "create":
            return bucket.create(key, data)
        if mode == "replace":
            return bucket.replace(key, data, self._there[name])
        return bucket.write(key, data)


class _Bucket:
    """Writes objects; what a store refuses is a typed error.

    Args:
        limit: When all has to be written.
    """

    def __init__(self, access: Access, limit: Deadline) -> None:
        if in_fork():
            what = "a fork can't save to a store that its parent used"
            raise errors.UsageError(what, file=access.url, expected="a spawned process")
        self.access, self._limit, self.notes = access, limit, list[str]()
        self._over = False  # Whether a part under way is to be the last.

    def url(self, key: str) -> str:
        return f"{self.access.url}/{key}"

    def create(self, key: str, data: bytes) -> str | None:
        """Writes an object if there is none; returns its version, if the store says it."""
        try:
            return self._put(key, data, mode="create")
        except _NoConditionsError:
            with contextlib.suppress(errors.SourceNotFoundError):
                if stores.StoreSource(self.access, key).size >= 0:
                    raise self.taken(key) from None
            return self.write(key, data)

    def replace(self, key: str, data: bytes, seen: str | None) -> str | None:
        """Writes an object if it is still of the version that was `seen`; see `create`."""
        found = self._do(lambda: obstore().head(self._store, key), key)
        said = {name: found[name] for name in ("e_tag", "version") if found[name] is not None}
        if seen is not None and said.get("e_tag", seen).strip('"') != seen.strip('"'):
            raise self.taken(key)
        try:
            return self._put(key, data, mode=said)
        except _NoConditionsError:
            return self.write(key, data)

    def write(self, key: str, data: bytes) -> str | None:
        """Writes an object, whatever is there; returns its version, if the store says it."""
        return self._put(key, data)

    def write_parts(self, key: str, path: str, size: int) -> str | None:
        """Writes a large file, whatever is there; an error within aborts it. See `create`."""
        part = max(_PART, -(-size // _PARTS_OF))
        how = {"buffer_size": part, "max_concurrency": _TOGETHER}

        def send() -> None:
            with open(path, "rb") as file, obstore().open_writer(self._store, key, **how) as out:
                while data := file.read(part):
                    self._left(key)
                    out.write(data)

        self._do(send, key)
        return self.version(key)

    def version(self, key: str) -> str | None:
        """The version of an object now, without quotes; None if it is not known."""
        with contextlib.suppress(errors.MfloadError):
            limit = Deadline(_REMOVING)
            found = self._do(lambda: obstore().head(self._store, key), key, limit)["e_tag"]
            return found and found.strip('"')
        return None

    def remove_all(self, objects: Mapping[str, str | None]) -> list[str]:
        """Removes objects in their order; returns those that it did not.

        Each only in the version that is given. None follows one that took too long.
        """
        left = dict(objects)
        with contextlib.suppress(errors.LoadTimeoutError):
            for key, seen in objects.items():
                if self._removed(key, seen):
                    del left[key]
        return [*left]

    def _removed(self, key: str, seen: str | None) -> bool:
        limit = Deadline(_REMOVING)  # Also when the time for all is over.
        try:
            if seen is not None:
                found = self._do(lambda: obstore().head(self._store, key), key, limit)["e_tag"]
                if found is not None and found.strip('"') != seen.strip('"'):
                    return False
            self._do(lambda: obstore().delete(self._store, key), key, limit)
        except errors.LoadTimeoutError:
            raise
        except errors.MfloadError:
            return False
        return True

    def taken(self, key: str) -> errors.TargetExistsError:
        """The error where something else is there than before."""
        what = "another writer saved there meanwhile; overwrite=True replaces what is there now"
        return errors.TargetExistsError(what, file=self.url(key))

    @cached_property
    def _store(self) -> Any:
        """The bucket; a part may take long, where a listing may not."""
        settings = dict(self.access.settings)
        client = dict(settings.get("client_options") or {})
        patience = timedelta(seconds=min(_PATIENCE, max(1.0, self._limit.left())))
        settings["client_options"] = {"timeout": patience} | client
        return self.access.made_of(settings)

    def _left(self, key: str) -> None:
        if self._over or self._limit.left() <= 0:
            raise self._limit.error("uploading", self.url(key))

    def _put(self, key: str, data: bytes, **how: Any) -> str | None:
        self._left(key)
        put = partial(obstore().put, use_multipart=False, **how)
        return self._do(lambda: put(self._store, key, data), key)["e_tag"]

    def _do(self, call: Callable[[], T], key: str, limit: Deadline | None = None) -> T:
        """Calls obstore; its errors become typed ones. Credentials are renewed once."""
        limit = limit or self._limit
        kinds, url, again, left = obstore().exceptions, self.url(key), False, _CONFLICTS
        while True:
            made = self.access.made
            try:
                return self._waited_for(partial(no_panic, call), url, limit)
            except errors.MfloadError:
                raise
            except (kinds.AlreadyExistsError, kinds.PreconditionError):
                raise self.taken(key) from None
            except (kinds.NotSupportedError, NotImplementedError):
                raise self._without_conditions(url) from None
            except (kinds.BaseError, OSError, ValueError, RuntimeError) as error:
                self._left(key)
                said = self.access.said(str(error))
                if said is None:
                    what = f"could not write to the store: {reason(error)}"
                    raise errors.WriteError(what, file=url) from None
            if not again and self.access.stale(said):
                again = True
                self.access.renew(made, said)
                self.__dict__.pop("_store", None)
            elif said.code == "ConditionalRequestConflict" and left:
                left -= 1  # Another request for it was under way.
                time.sleep(min(_PAUSE, max(0.0, self._limit.left())))
            else:
                raise self._refused(said, key)

    def _waited_for(self, call: Callable[[], T], url: str, limit: Deadline) -> T:
        """Calls in a thread, so that an interrupt, or the end of the time, ends the waiting."""
        task = start(call, "mfload-upload")
        try:
            if not task.join(None if limit.seconds is None else limit.left()):
                raise limit.error("uploading", url)
        except BaseException:
            self._over = True
            task.join(_ABORTING)
            raise
        return task.result()

    def _refused(self, said: Answered, key: str) -> errors.MfloadError:
        url = self.url(key)
        if said.status in (409, 412):
            return self.taken(key)
        if said.status == 501:
            return self._without_conditions(url)
        if said.code == "NoSuchUpload":
            what = "the store has forgotten an upload that was under way"
            return errors.WriteError(what, file=url, found=str(said))
        found = self.access.refused(said, key, url)
        denied = said.status in (401, 403)
        expected = "the right to write there" if denied else found.expected
        what = f"the store refuses to write: {found.message}"
        kind = errors.WriteError if said.status >= 500 else errors.TargetError
        return kind(what, file=url, expected=expected, found=found.found)

    def _without_conditions(self, url: str) -> _NoConditionsError:
        note = "the store has no conditional writes: of two writers at once, the last wins"
        if note not in self.notes:
            self.notes.append(note)
        return _NoConditionsError(
            "the store refuses to write, with and without conditions", file=url
        )


class _NoConditionsError(errors.TargetError):
    """A store does not know conditional writes."""


def write_manifest(
    source: stores.StoreSource,
    text: bytes,
    limit: Deadline,
    *,
    overwrite: bool,
    check: Callable[[], object],
) -> None:
    """Writes a manifest of a checkpoint that is there already (see `publishing.write_manifest`)."""
    bucket, key = _Bucket(source.access, limit), source.key
    _, objects = source.access.level(posixpath.dirname(key))
    there = [each for each in objects if each.key == key]
    if there and not (overwrite and is_manifest_text(source.read(0, min(HEAD, there[0].size)))):
        what = "the file exists already; overwrite=True replaces it if it is a manifest"
        raise errors.TargetExistsError(what, file=source.name)
    check()
    seen = there[0].validator if there else None
    made = bucket.replace(key, text, seen) if there else bucket.create(key, text)
    try:
        check()
    except errors.SourceChangedError:  # A save came in between, whose manifest it is not.
        bucket.remove_all({key: made} if made else {})
        raise


def _remove(directory: str, forked: Forked) -> None:
    """Removes a directory, which a fork leaves to its parent."""
    if not forked:
        shutil.rmtree(directory, ignore_errors=True)


def _leading(names: Iterable[str], file: str) -> bytes:
    """An index that leads to a single file."""
    return json.dumps({"metadata": {}, "weight_map": dict.fromkeys(names, file)}).encode()


class _Marked(Location):
    """A place whose shards have names that no other save gives."""

    def shards(self, count: int) -> list[str]:
        """Names of so many shards."""
        names, stem = super().shards(count), self.stem
        return [f"{stem}-{self._mark}{name.removeprefix(stem)}" for name in names]

    def is_marked(self, name: str) -> bool:
        """Whether no other save gives the name."""
        return name.startswith(f"{self.stem}-{self._mark}-")

    indexed = False
    """Whether a single file is a shard, too."""

    def names(self, count: int) -> list[str]:
        """Names of so many files."""
        return self.shards(1) if self.indexed and count == 1 else super().names(count)

    @cached_property
    def _mark(self) -> str:
        return secrets.token_hex(4)
