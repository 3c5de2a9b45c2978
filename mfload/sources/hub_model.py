"""One model of the Hugging Face Hub at one commit: what it holds, and its files by ranges.

The hub redirects to a store, by a URL that is signed for a while. The token goes to the hub alone.
"""

from __future__ import annotations

import http.client
import json
import os
import posixpath
import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any, NamedTuple, NoReturn
from urllib.parse import quote, unquote

from mfload import errors
from mfload.sources.base import redacted
from mfload.sources.client import BROKEN, Answer, Timeouts
from mfload.sources.http import HttpHandle, HttpSource, RequestTarget, Version
from mfload.sources.tls import Tls

_EXAMPLE = "hf://org/name, hf://org/name@revision or hf://org/name/folder/model.safetensors"
_OTHERS = {
    "datasets": "a dataset",
    "spaces": "a Space",
    "kernels": "a kernel",
    "buckets": "a bucket",
}
_REPOSITORY = r"(?P<id>(?>[\w.-]+(?:/[\w.-]+)?))"
# References of the hub have slashes; those of other revisions are percent-encoded.
_URL = re.compile(
    rf"{_REPOSITORY}(?:@(?P<revision>refs/(?:pr|convert)/\w+|[^/@?#]+))?(?:/(?P<path>.*))?"
)
_PAGE = re.compile(r"(?:tree|blob|resolve)/([^/]+)(/.*)?")  # Of the hub's site.
_COMMIT = re.compile(r"[0-9a-f]{40}")
INDEX, _SHARD, _OTHER = ".safetensors.index.json", ".safetensors", (".npz", ".npy", ".msgpack")
FIRST, FILES = ((INDEX,), (_SHARD,), _OTHER), (INDEX, _SHARD, *_OTHER)
_SHOWN = 3
_DEPTH = 64  # Folders that a file lies in, at most.
_LISTING = 256 << 20  # Bytes of an answer about a repository, at most.
_PAUSE = re.compile(r"\bt=(\d{1,6})")  # Seconds until the hub's quota begins anew.
_LOG_IN = "log in with `hf auth login`, or set HF_TOKEN"
OFFLINE = "HF_HUB_OFFLINE=1"


class HubPath(NamedTuple):
    """What a URL says.

    Attributes:
        id: The model's name, with its owner.
        revision: A branch, a tag, a commit, or a reference such as `refs/pr/1`.
        path: Of a file or folder in it; "" for all of it.
        name: The URL up to the revision, as it was written.
    """

    id: str
    revision: str
    path: str
    name: str

    @property
    def fixed(self) -> bool:
        """Whether the revision is a commit."""
        return _COMMIT.fullmatch(self.revision) is not None

    @staticmethod
    def of(url: str) -> HubPath:
        """Takes a URL apart; raises UsageError for one that is malformed."""
        rest = url.partition("://")[2].removeprefix("models/").rstrip("/")
        if kind := _OTHERS.get(rest.partition("/")[0]):
            what = f"mfload loads models, and this is {kind} of the Hugging Face Hub"
            raise errors.UsageError(what, expected=_EXAMPLE, found=redacted(url))
        found = _URL.fullmatch(rest)
        if found is None or {".", ".."} & {*(found["id"] + "/" + (found["path"] or "")).split("/")}:
            what = "the URL of the Hugging Face Hub is malformed"
            raise errors.UsageError(what, expected=_EXAMPLE, found=redacted(url))
        model, path = found["id"], unquote(found["path"] or "").strip("/")
        owner, mark, file = model.partition("/")
        if mark and not path and file.endswith(FILES) and not found["revision"]:
            model, path = owner, file  # Of a model without an owner, such as gpt2.
        if page := _PAGE.fullmatch(path):
            what = "the URL is that of a page of the hub; the revision stands after an @"
            there = f"hf://{model}@{page[1]}{page[2] or ''}"
            raise errors.UsageError(what, expected=there, found=redacted(url))
        name = f"hf://{model}" + (f"@{found['revision']}" if found["revision"] else "")
        return HubPath(model, unquote(found["revision"] or "main"), path, name)


class Entry(NamedTuple):
    """What a listing says of a file: its bytes, and its hash, if it does."""

    size: int | None
    hash: str | None


class Model:
    """A model of the hub: one commit of it, once it is resolved.

    Args:
        asked: What the URL says.
        headers: Names and values that the hub is sent, beside the token.
        timeout: Seconds that a call has (see `HttpSource`).
        commit: The commit; "" while it is not known.
        files: What it holds, by path.
    """

    def __init__(
        self,
        asked: HubPath,
        headers: tuple[tuple[str, str], ...],
        timeout: float | None,
        tls: Tls,
        rate: int | None = None,
        commit: str = "",
        files: Mapping[str, Entry] | None = None,
    ) -> None:
        self.asked, self.commit, self.files = asked, commit, files or {}
        self.given = headers, timeout, tls, rate
        self.endpoint: str = surroundings().ENDPOINT

    def __reduce__(self) -> tuple[Any, ...]:
        return Model, (self.asked, *self.given, self.commit, self.files)  # Without the token.

    @cached_property
    def headers(self) -> tuple[tuple[str, str], ...]:
        """What the hub is sent: the headers that were given, and the token of this machine."""
        given = {name.title(): value for name, value in self.given[0]}
        if "Authorization" not in given and not surroundings().HF_HUB_DISABLE_IMPLICIT_TOKEN:
            from huggingface_hub import get_token

            if token := get_token():
                given["Authorization"] = f"Bearer {token}"
        return tuple(given.items())

    @property
    def page(self) -> str:
        """Its address in a browser."""
        return f"{self.endpoint}/{self.asked.id}"

    @cached_property
    def folders(self) -> dict[str, set[str]]:
        """The names in each folder, by its path; "" is that of the model."""
        found: dict[str, set[str]] = {"": set()}
        for path in self.files:
            while path:
                folder, _, name = path.rpartition("/")
                found.setdefault(folder, set()).add(name)
                path = folder
        return found

    def name(self, path: str) -> str:
        """The URL of a path in it, in the words of the caller."""
        return f"{self.asked.name}/{path}".rstrip("/")

    def cached(self, revision: str) -> str | None:
        """The snapshot of a revision in the cache, which may hold only some files."""
        place = self._cache
        if not _COMMIT.fullmatch(revision):
            try:
                with open(os.path.join(place, "refs", *revision.split("/"))) as file:
                    revision = file.read(64).strip()
            except (OSError, ValueError):
                return None
        snapshot = os.path.join(place, "snapshots", revision)
        return snapshot if _COMMIT.fullmatch(revision) and os.path.isdir(snapshot) else None

    @property
    def _cache(self) -> str:
        """Its place in the cache."""
        cache, name = surroundings().HF_HUB_CACHE, self.asked.id.replace("/", "--")
        return os.path.join(os.path.abspath(cache), f"models--{name}")

    def resolved(self, *, patient: bool = True) -> Model:
        """The model at the commit that its revision stands for, with a list of its files.

        `patient`: whether a hub that does not answer is asked again.

        Raises:
            SourceError: There is no such model or revision, or it may not be read.
            ReadError: The hub can't be reached, or answers with something else.
        """
        where = f"revision/{quote(self.asked.revision, safe='')}?blobs=true"
        said, files = self.ask(f"/{self.asked.id}/{where}", patient=patient), dict[str, Entry]()
        commit = said.get("sha") if isinstance(said, dict) else None
        if not isinstance(commit, str) or not _COMMIT.fullmatch(commit):
            raise self._strange("a commit")
        try:
            for each in said.get("siblings") or ():
                stored = each.get("lfs") or {}
                size, hashed = stored.get("size", each.get("size")), stored.get("sha256")
                if _possible(name := str(each["rfilename"])):
                    files[name] = Entry(size, hashed or each.get("blobId"))
        except (AttributeError, KeyError, TypeError):
            raise self._strange("a list of files") from None
        return Model(self.asked, *self.given, commit, files)

    def ask(self, path: str, *, patient: bool = False, explains: bool = True) -> Any:
        """What the hub's API says; raises SourceError.

        `patient`: it is asked again if it does not answer. `explains`: it may be asked more for the
        words of an error.
        """
        source = HubSource(self, "", address=f"{self.endpoint}/api/models{path}")
        source.explains = explains
        if not patient:
            seconds: float = surroundings().HF_HUB_ETAG_TIMEOUT
            source.limits = Timeouts(min(seconds, source.limits.stalled))
        raw = source.open().whole(patient)
        try:
            return json.loads(raw)
        except (ValueError, RecursionError):
            raise self._strange("JSON") from None

    def _strange(self, expected: str) -> errors.ReadError:
        what = f"{self.endpoint} does not answer as the Hugging Face Hub does; check HF_ENDPOINT"
        return errors.ReadError(what, file=self.asked.name, expected=expected)

    def missing(self, path: str) -> errors.SourceNotFoundError:
        """The error of a file or folder that the commit does not have."""
        what = f"the model has no such file or folder{_close(path, [*self.files])}"
        found = f"commit {self.commit[:12]} of {self.asked.id}"
        return errors.SourceNotFoundError(what, file=self.name(path), found=found)

    def uncached(self, lacking: Sequence[str]) -> errors.SourceNotFoundError:
        """The error while the hub must not be asked; `lacking`: what a snapshot lacks."""
        place = self._cache
        what = f"{OFFLINE} is set, and the hub's cache does not hold it"
        expected = f"`hf download {self.asked.id}`, or @ and a commit that the cache has"
        commits: list[str] = []
        with suppress(OSError):
            commits = sorted(os.listdir(os.path.join(place, "snapshots")))
        found = f"{place} with the commits {', '.join(commits)}" if commits else f"no {place}"
        if lacking:
            found = f"a snapshot without {some(lacking)}"
        where = self.name(self.asked.path)
        return errors.SourceNotFoundError(what, file=where, expected=expected, found=found)

    def refused(self, answer: Answer, path: str) -> errors.SourceError | None:
        """The error of an answer that refuses, which says what to do; None if it says no more."""
        code, said = answer.getheader("X-Error-Code", ""), answer.getheader("X-Error-Message", "")
        status, name, denied = answer.status, self.name(path), errors.SourcePermissionError
        known = any(header == "Authorization" for header, _ in self.headers)
        for _, value in self.headers:  # A server may quote what it was sent.
            said = said.replace(value.split(" ")[-1], "…") if value else said
        found = errors.shown(said, 200) or f"{status} {http.client.responses.get(status, '')}"
        if code == "GatedRepo":
            who = "with the account of the token" if known else f"then {_LOG_IN}"
            what = f"the model is gated: accept its terms at {self.page}, {who}"
            return denied(what, file=name, found=found)
        if known and status == 401 and code != "RepoNotFound":
            return denied(f"the hub does not accept the token: {_LOG_IN}", file=name, found=found)
        if code == "RepoNotFound" or status == 401:
            private = "the token may not read it" if known else f"it is private: {_LOG_IN}"
            what = f"the hub has no model {self.asked.id}{self._near()}, or {private}"
            return errors.SourceNotFoundError(what, file=name, found=found)
        if code == "RevisionNotFound":
            there = self._revisions()
            what = f"the model has no revision {self.asked.revision}"
            what += _close(self.asked.revision, there)
            expected = ", ".join(there[:8]) or "a branch, a tag or a commit"
            return errors.SourceNotFoundError(what, file=name, expected=expected)
        if code == "EntryNotFound":
            return self.missing(path)
        if status == 403:
            what = f"the hub refuses access: look at {self.page}, and at the rights of the token"
            return denied(what, file=name, found=found)
        return None

    def _near(self) -> str:
        """Models with a name like it, if the hub's search tells any."""
        owner, _, name = self.asked.id.rpartition("/")
        queries = ([f"author={quote(owner)}"] if owner else []) + [f"search={quote(name)}"]
        found = [_texts(self._asked_once(f"?{each}&limit=200"), "id") for each in queries]
        return _close(self.asked.id, [name for names in found for name in names])

    def _revisions(self) -> list[str]:
        said = self._asked_once(f"/{self.asked.id}/refs")
        kinds = ("branches", "tags") if isinstance(said, dict) else ()
        return [name for kind in kinds for name in _texts(said.get(kind), "name")]

    def _asked_once(self, path: str) -> Any:
        """What the API says, for the words of an error."""
        with suppress(errors.MfloadError):
            return self.ask(path, explains=False)


def _texts(rows: Any, key: str) -> list[str]:
    """A column of an answer of the API."""
    rows = rows if isinstance(rows, list) else []
    return [str(each[key]) for each in rows if isinstance(each, dict) and key in each]


def _close(name: str, known: Collection[str]) -> str:
    found = errors.close_names(name, known)
    if not found and "/" in name:  # The same file, or model, at another place.
        last = name.split("/")[-1]
        found = [each for each in known if each.split("/")[-1].lower() == last.lower()][:3]
    return f"; close names: {', '.join(map(errors.printable, found))}" if found else ""


def _possible(name: str) -> bool:
    """Whether a file of the hub can have the name."""
    parts = name.split("/")
    return name.isprintable() and len(parts) <= _DEPTH and not {"", ".", ".."} & {*parts}


class HubSource(HttpSource):
    """A file of one commit as a `Source`: the hub's address of it never leads to other bytes.

    `address`: that of an answer of the API instead.
    """

    netrc, shared_link = False, True
    fixed = True  # Whatever validator a host names.
    directory: Any = None  # The folder of a file that was asked for by itself.

    def __init__(
        self, model: Model, path: str, version: Version | None = None, address: str | None = None
    ) -> None:
        url = f"{model.page}/resolve/{model.commit}/{quote(path)}"
        _, timeout, tls, rate = model.given
        super().__init__(address or url, model.headers, timeout, tls, version, rate)
        self.name, self.model, self.path = model.name(path), model, path
        self.entry = model.files.get(path) or Entry(None, None)
        self.stored = dict[str, str | None]()  # The version that each host names.
        self.explains = True

    def __reduce__(self) -> tuple[Any, ...]:
        return HubSource, (self.model, self.path, self._version)

    def open(self, flags: int = 0) -> HubHandle:
        """What reads for one thread."""
        del flags
        return HubHandle(self)

    def check(self) -> None:
        """Asks nothing: a commit does not change, and each answer was compared."""

    check_now = check

    def beside(self, name: str) -> HubSource:
        """The file of that name in the same folder of the commit, or below."""
        if not name or name[0] == "/" or ".." in name.split("/"):
            raise errors.UsageError("is not a plain name below its URL", found=name)
        path = posixpath.join(posixpath.dirname(self.path), name)
        return HubSource(self.model, posixpath.normpath(path))


class HubHandle(HttpHandle):
    """Reads for one thread (see `HttpHandle`), and compares what the hub says of the file."""

    _source: HubSource
    _host = ""

    def whole(self, patient: bool) -> bytes:
        """All bytes of an answer of the API; `patient`: it is asked again if it breaks off."""
        if patient:
            return self._persist(self._once)
        self._watch = self._source.link.watch()
        try:
            return self._once()
        except errors.MfloadError:
            raise
        except BROKEN as error:
            what = f"could not read from the server: {self._reason(error)}"
            raise errors.ReadError(what, file=self._source.name) from error

    def _once(self) -> bytes:
        with self._found(None) as answer:
            if answer.status != 200:
                self._refuse(answer, True)
            raw = answer.read(_LISTING)
            if answer.length:
                raise http.client.IncompleteRead(b"", answer.length)
            return raw

    def _send(self, target: RequestTarget, span: str | None) -> Answer:
        answer, source = super()._send(target, span), self._source
        self._host = target.host
        try:
            if answer.status < 400 and source.first.same_server(target):
                commit = answer.getheader("X-Repo-Commit")
                self._compare("commit", source.model.commit or None, commit)
                self._compare("hash", source.entry.hash, _plain(answer.getheader("X-Linked-ETag")))
        except BaseException:
            answer.close()
            raise
        return answer

    def _version(self, answer: Answer, first: int, last: int) -> tuple[Version, int]:
        (validator, size), nbytes = super()._version(answer, first, last)
        source, validator = self._source, _plain(validator)
        self._compare("number of bytes", source.entry.size, size)
        self._compare("ETag", source.stored.setdefault(self._host, validator), validator)
        return Version(f"{source.model.commit} {source.entry.hash or ''}".rstrip(), size), nbytes

    def _compare(self, what: str, expected: object, found: object) -> None:
        if None not in (expected, found) and expected != found:
            text = f"the hub answers with another {what} than the commit has"
            name = self._source.name
            raise errors.SourceChangedError(text, file=name, expected=expected, found=found)

    def _refuse(self, answer: Answer, opening: bool) -> NoReturn:
        pause = _PAUSE.search(answer.getheader("RateLimit", ""))
        if answer.status == 429 and pause and "Retry-After" not in answer.headers:
            answer.headers["Retry-After"] = pause[1]
        source = self._source
        if source.explains and (error := source.model.refused(answer, source.path)) is not None:
            raise error
        super()._refuse(answer, opening)


def surroundings() -> Any:
    """The constants of `huggingface_hub`: the cache, the endpoint, whether it is offline."""
    try:
        from huggingface_hub import constants
    except ImportError:
        what = "reading hf:// needs huggingface_hub"
        raise errors.missing(what, "hub") from None
    return constants


def some(names: Sequence[str]) -> str:
    """The first of several names."""
    return f"{', '.join(names[:_SHOWN])}{' …' if len(names) > _SHOWN else ''}"


def _plain(etag: str | None) -> str | None:
    """An ETag without its quotes."""
    return etag and etag.removeprefix("W/").strip('"')
