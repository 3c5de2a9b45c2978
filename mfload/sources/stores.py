"""Objects of a store as sources, and prefixes as directories: `s3://bucket/path`."""

from __future__ import annotations

import importlib
import posixpath
import re
import time
from collections.abc import Iterator
from typing import Any

from mfload import errors
from mfload.options import LoadOptions
from mfload.sources.access import Access, Answered
from mfload.sources.base import redacted
from mfload.sources.client import Answer
from mfload.sources.http import BUSY, SAFE_NAME, BusyError, HttpSource, RequestTarget, Version
from mfload.sources.tls import Tls

_AZURE = ("mfload.sources.clouds", "AzureAccess")
ACCESS = {
    "s3": ("mfload.sources.s3", "S3Access"),
    "gs": ("mfload.sources.clouds", "GoogleAccess"),
    **dict.fromkeys(("az", "abfs", "abfss"), _AZURE),
}
"""The module and the class of `Access` to the buckets of each scheme."""

_FILES = (".safetensors", ".json", ".npz", ".npy", ".msgpack")
_WHOLE = 1000  # Objects that are listed at any depth at once; of more, each directory by itself.
_MOST = 1_000_000  # Objects of one listing.
_BODY = 16 << 10  # Bytes of a refusal that are read.
_ANSWERS = (200, 206, 412, 416)


def open_url(url: str, options: LoadOptions) -> HttpSource | StoreDirectory:
    """The source of an object, or the directory of a prefix, which is listed.

    A URL with the end of a file's name is an object, of which nothing is asked yet.

    Raises:
        UsageError: The URL or a setting is malformed.
        FrameworkMissingError: obstore is not installed.
        SourceError: There is nothing at the URL, or the store refuses to list it.
    """
    access, key = access_to(url, options)
    if key.endswith(_FILES):
        return StoreSource(access, key)
    key = key.rstrip("/")
    found = StoreDirectory(access, key)
    if not found.entries:
        return _single(access, key, url)
    return found


def access_to(url: str, options: LoadOptions) -> tuple[Access, str]:
    """The bucket of a URL, and the key in it; raises UsageError for a malformed URL."""
    place, key = _taken_apart(url)
    tls = Tls(options.cert_file, options.key_file, options.ca_file)
    module, name = ACCESS[place.partition("://")[0]]
    make: type[Access] = getattr(importlib.import_module(module), name)
    access = make(place, options.store or (), options.timeout, tls, options.max_bandwidth)
    access.check()
    return access, key


def _taken_apart(url: str) -> tuple[str, str]:
    """The URL of a bucket, and the key in it; raises UsageError for a malformed URL."""
    scheme, _, rest = url.partition("://")
    bucket, _, key = rest.partition("/")
    parts = key.rstrip("/").split("/") if key.rstrip("/") else []
    # Azure's may name the account: container@account.dfs.core.windows.net.
    named = ACCESS[scheme.lower()] is _AZURE and re.fullmatch(r"[\w$-]+@\w+(\.[\w.-]+)?", bucket)
    if not bucket or (not named and {"@", ":"} & {*bucket}) or {"?", "#"} & {*key}:
        what = "the URL of the store is malformed: it has a bucket and a path, and nothing else"
    elif any(part in ("", ".", "..") for part in parts) or not url.isprintable():
        what = "the path in the URL of the store has empty parts, . or .."
    else:
        return f"{scheme.lower()}://{bucket}", key
    raise errors.UsageError(what, expected=f"{scheme}://bucket/path", found=redacted(url))


def _single(access: Access, key: str, url: str) -> HttpSource:
    """The object that a URL without a known end names; raises SourceNotFoundError if none does."""
    _, objects = access.level(posixpath.dirname(key)) if key else ([], [])
    if not url.endswith("/"):
        for each in objects:
            if each.key == key:
                return StoreSource(access, key, version_of(each))
    meant = access.near(key) if key else ""
    raise errors.SourceNotFoundError(
        f"the store has nothing below that path{meant}" if key else "the bucket is empty",
        file=f"{access.url}/{key}",
        expected="the path of a checkpoint or of a file",
    )


def version_of(found: Any) -> Version | None:
    """The version that a listing names; None if it does not say which it is."""
    return Version(found.validator, found.size) if found.validator else None


class StoreSource(HttpSource):
    """An object of a store as a `Source`; each request is signed, and pinned to the version.

    Args:
        version: The one that a listing gave. Default: the one that the first answer has.
    """

    netrc, shared_link = False, True

    def __init__(self, access: Access, key: str, version: Version | None = None) -> None:
        given = (), access.timeout, access.tls, version, access.rate
        super().__init__(access.place(key), *given)
        self.access, self.key, self.name = access, key, f"{access.url}/{key}"
        self._given = (access, key)
        self.atomic = access.atomic
        # What requests are sent as, until when, and with which credentials.
        self._request: tuple[RequestTarget, dict[str, str], float, int] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return StoreSource, (*self._given, self._version), {"shard": self.shard}

    def beside(self, name: str) -> StoreSource:
        """The object of that name in the same directory or below."""
        if not SAFE_NAME.fullmatch(name) or name[0] == "/" or ".." in name.split("/"):
            raise errors.UsageError("is not a plain name below its URL", found=name)
        if posixpath.normpath(name) == ".":
            raise errors.UsageError("is not a plain name below its URL", found=name)
        directory = posixpath.dirname(self.key)
        beside = StoreSource(self.access, posixpath.join(directory, posixpath.normpath(name)))
        beside.shard = True
        return beside

    @property
    def directory(self) -> StoreDirectory:
        """The directory that the object is in."""
        return StoreDirectory(self.access, posixpath.dirname(self.key), shallow=True)

    def signed(self, target: RequestTarget) -> tuple[RequestTarget, dict[str, str]]:
        """The signed URL of the object, and the version that alone may be sent."""
        del target
        access, kept = self.access, self._request
        if kept is None or kept[2] < time.monotonic() or kept[3] != access.made:
            url, headers, seconds = access.request(self.key)
            until = time.monotonic() + seconds
            kept = self._request = RequestTarget.of(url), headers, until, access.made
        pinned = {} if self._version is None else access.pinned(self._version.validator)
        return kept[0], kept[1] | pinned

    def resend(self, answer: Answer, again: bool) -> bool:
        """Whether credentials are to be found anew; else raises the error that the body names."""
        if answer.status in _ANSWERS:
            return False
        # One that breaks off is asked for again: it may say that a token has ended.
        answer.timed.allow(self.access.seconds, least=None)  # For all of it, trailers too.
        text = answer.read(_BODY).decode("utf-8", "replace")
        said = Answered.of(answer.status, text, answer.getheader("x-amz-bucket-region"))
        if not again and self.access.stale(said):
            self.access.renew(self._request[3] if self._request else 0, said)
            self._request = None
            return True
        if answer.status in BUSY:
            raise BusyError(str(said), answer.getheader("Retry-After", ""))
        if answer.status in (404, 410) and self._version is not None:
            return False  # It was there before.
        raise self.access.refused(said, self.key, self.name)


class StoreDirectory:
    """A prefix as a `Directory`, listed when it is first looked at.

    Up to `_WHOLE` objects are listed at once, whatever their depth. Of more, each directory is
    listed by itself, so that a root of many checkpoints costs no listing of all of them.

    Args:
        path: The prefix, without a slash at its end.
        entries: Versions of its files and entries of its directories by name, if they are known;
            None for a directory that was not listed.
        shallow: Whether it alone is listed, and nothing below.
    """

    def __init__(
        self,
        access: Access,
        path: str,
        entries: dict[str, Any] | None = None,
        shallow: bool = False,
    ) -> None:
        self._access, self._path, self._known, self._shallow = access, path, entries, shallow
        self._above: StoreDirectory | None = None
        self._below: dict[str, StoreDirectory] = {}  # Each is listed once.

    @property
    def name(self) -> str:
        """Its URL."""
        return f"{self._access.url}/{self._path}".rstrip("/")

    @property
    def entries(self) -> dict[str, Any]:
        """What is in it by name: a listed object, the entries of a directory, or None for one."""
        if self._known is None:
            whole = None if self._shallow else self._tree(_WHOLE)
            self._known = self._level() if whole is None else whole
        return self._known

    def _tree(self, most: int) -> dict[str, Any] | None:
        """All objects below it as a tree; None if they are more."""
        objects = self._access.objects(self._path, most)
        if objects is None:
            return None
        made, front = dict[str, Any](), len(self._path) + 1 if self._path else 0
        for each in objects:
            *directories, name = each.key[front:].split("/")
            inner = made
            for directory in directories:
                held = inner.get(directory)
                if not isinstance(held, dict):  # An empty object may mark the directory.
                    held = inner[directory] = {}
                inner = held
            if name:
                inner.setdefault(name, each)
        return made

    def _level(self) -> dict[str, Any]:
        prefixes, objects = self._access.level(self._path)
        made: dict[str, Any] = {posixpath.basename(each.key): each for each in objects}
        made |= dict.fromkeys(posixpath.basename(each.rstrip("/")) for each in prefixes)
        return made

    def names(self) -> list[str]:
        """Names in it, in order (see `Directory`)."""
        return sorted(self.entries)

    def is_directory(self, name: str) -> bool:
        """Whether a directory has the name."""
        holder, name = self._holder(name)
        found = holder.entries.get(name, "") if holder else ""
        return found is None or isinstance(found, dict)

    def is_file(self, name: str) -> bool:
        """Whether an object has the name."""
        return self._found(name) is not None

    def _found(self, name: str) -> Any:
        holder, name = self._holder(name)
        found = holder.entries.get(name) if holder else None
        return None if isinstance(found, dict) else found

    def _holder(self, name: str) -> tuple[StoreDirectory | None, str]:
        """The directory that a name with slashes lies in, if there is one, and the last part."""
        directory, _, last = name.rstrip("/").rpartition("/")
        if not directory:
            return self, last
        return (self.below(directory) if self.is_directory(directory) else None), last

    def at(self, name: str) -> HttpSource | StoreDirectory:
        """What has the name."""
        return self.below(name) if self.is_directory(name) else self.file(name)

    def file(self, name: str) -> HttpSource:
        """The source of an object, in the version that was listed."""
        found = self._found(name)
        if found is None:
            raise errors.SourceNotFoundError(
                f"no such object in the store{errors.did_you_mean(name, self.names())}",
                file=f"{self.name}/{name}",
            )
        source = StoreSource(self._access, posixpath.join(self._path, name), version_of(found))
        source.shard = True
        return source

    def below(self, name: str) -> StoreDirectory:
        """The directory of a name."""
        held: StoreDirectory = self
        for part in name.strip("/").split("/"):
            held = held._below.get(part) or held._child(part)
        return held

    def _child(self, name: str) -> StoreDirectory:
        found = self.entries.get(name, {})
        known = found if isinstance(found, dict | None) else {}
        child = StoreDirectory(self._access, posixpath.join(self._path, name), known)
        child._above = self
        self._below[name] = child
        return child

    @property
    def above(self) -> tuple[StoreDirectory, str] | None:
        """The directory that holds it, and its name there; None for the whole bucket."""
        if not self._path:
            return None
        directory, name = posixpath.split(self._path)
        if self._above is None:
            self._above = _Above(self._access, directory, shallow=True)
        return self._above, name

    def walk(self) -> Iterator[tuple[str, int]]:
        """The names of all objects below it, and their bytes (see `Directory`)."""
        if self._known is None or not _complete(self._known):
            tree = self._tree(_MOST)
            if tree is None:
                raise errors.SourceError(
                    "the store has too many objects below that path",
                    file=self.name,
                    expected=f"at most {_MOST}: the path of one checkpoint",
                )
            self._known = tree
        yield from _walked(self._known)


class _Above(StoreDirectory):
    """A directory above what a URL names, which may not be listed: then nothing is known of it."""

    @property
    def entries(self) -> dict[str, Any]:
        try:
            return super().entries
        except errors.SourceError:
            self._known = {}
            return self._known


def _complete(entries: dict[str, Any]) -> bool:
    return all(
        _complete(each) if isinstance(each, dict) else each is not None for each in entries.values()
    )


def _walked(entries: dict[str, Any]) -> Iterator[tuple[str, int]]:
    for name, held in entries.items():
        if isinstance(held, dict):
            for below, size in _walked(held):
                yield f"{name}/{below}", size
        else:
            yield name, held.size
