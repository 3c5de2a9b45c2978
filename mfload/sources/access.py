"""Access to the objects of a bucket: signed requests, listings, and errors of what is refused.

The package obstore finds the credentials, signs, and lists. Bytes are read by mfload's own HTTP
client, which takes half the processor time of obstore's `get` with its copy into place.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import pkgutil
import re
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from functools import partial, wraps
from typing import Any, NamedTuple, TypeVar
from urllib.parse import urlsplit

from mfload import errors
from mfload.runtime import Deadline
from mfload.sources.base import redacted
from mfload.sources.http import PATIENCE, STALLED, TRUSTED
from mfload.sources.tls import Tls

T = TypeVar("T")

_RETRIES = 8
_BREAKS = 3  # How often a listing may break off.
_NOT_OBEYED = {
    "proxy_url": "HTTPS_PROXY in the environment",
    "proxy_ca_certificate": "Options(ca_file=…)",
    "allow_invalid_certificates": "Options(ca_file=…)",
    "default_headers": "a setting of the store",
}
"""Settings of obstore's client that reads, which have a client of their own, would not follow."""
_PAGE = 1000  # Objects in an answer to a listing.
_TOGETHER = 5000  # Objects beside a missing one whose names are compared with its own.
_STATUS = re.compile(r"non-2xx status code: (\d{3})")
_ASKED = re.compile(r"Error performing \w+ (\S+) in ")
_QUOTED = re.compile(r"(non-2xx status code: \d{3}[^:]*):.*")
_ADDRESS = re.compile(r"https?://[^/\s]+")
_REDIRECTED = "redirect without LOCATION"
_CODE = re.compile(r"<Code>([\w.]{1,64})</Code>")
_REGION = re.compile(r"<Region>([\w-]{1,32})</Region>")
_ANSWER = "from mfload.sources import access; access.answer()"

_home: int | None = None  # The process that has the threads of obstore.


class Object(NamedTuple):
    """An object of a listing."""

    key: str
    size: int
    validator: str | None

    @staticmethod
    def of(meta: Any) -> Object:
        """What a listing of obstore says of one."""
        validator = meta["e_tag"]
        if validator and not validator.endswith('"'):  # Some list them without quotes.
            validator = f'"{validator}"'
        return Object(meta["path"], meta["size"], validator)


class Answered(NamedTuple):
    """What a store answered in place of what it was asked for.

    Attributes:
        status: Of HTTP.
        code: The store's name for what is wrong, such as NoSuchKey.
        text: The body, which may quote credentials.
        region: Where the bucket is, if the answer says so.
    """

    status: int
    code: str = ""
    text: str = ""
    region: str | None = None

    @staticmethod
    def of(status: int, text: str, region: str | None = None) -> Answered:
        """Takes a body apart."""
        code, named = _CODE.search(text), _REGION.search(text)
        region = region or (named[1] if named else None)
        return Answered(status, code[1] if code else "", text, region)

    def __str__(self) -> str:
        return f"{self.status} {self.code}".rstrip()


class Request(NamedTuple):
    """What reads an object.

    Attributes:
        url: With its signature.
        headers: Those that the signature needs, or a token.
        seconds: For which it may be used.
    """

    url: str
    headers: dict[str, str]
    seconds: float


def in_fork() -> bool:
    """Whether obstore was used by the process that this one is a fork of."""
    return _home not in (None, os.getpid())


def in_home(
    made: Callable[[Any], T],
) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """Has a method called in another process by forks, in which the threads of obstore are gone.

    `made` gives the value of the method from what JSON keeps of it.
    """

    def wrapper(method: Callable[..., T]) -> Callable[..., T]:
        @wraps(method)
        def call(self: Access, *args: Any) -> T:
            if _home in (None, os.getpid()):
                return method(self, *args)
            return made(_by_another(self, method.__name__, args))

        return call

    return wrapper


def _as_objects(found: Any) -> list[Object] | None:
    return None if found is None else [Object(*each) for each in found]


def _as_level(found: Any) -> tuple[list[str], list[Object]]:
    return found[0], [Object(*each) for each in found[1]]


class Access:
    """The objects of one bucket; a class for each kind of store says how.

    Pickles without what the environment gave: another process finds its own credentials.

    Args:
        url: The bucket's, such as `s3://bucket`.
        settings: Names and values as obstore takes them.
        timeout: Seconds that a request has. Default: `STALLED` without a byte.
        tls: Certificates.
        rate: Bytes a second, at most (see `Options.max_bandwidth`).

    Attributes:
        made: How often credentials were looked for.
    """

    def __init__(
        self,
        url: str,
        settings: tuple[tuple[str, Any], ...],
        timeout: float | None,
        tls: Tls,
        rate: int | None = None,
    ) -> None:
        self.url, self.settings, self.timeout, self.tls = url, settings, timeout, tls
        self.rate = rate
        self.bucket = url.partition("://")[2]
        self.made = 0
        self._store: Any = None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Access) and self.__reduce__() == other.__reduce__()

    def __hash__(self) -> int:
        return hash(self.url)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.url, self.settings, self.timeout, self.tls, self.rate)

    @property
    def atomic(self) -> bool:
        """Whether an answer is of one version of an object to its end."""
        return True

    credentials = ""
    """Where these may come from, for errors."""

    # -- what a kind of store says -------------------------------------------------------------

    def make(self, settings: dict[str, Any]) -> Any:
        """Makes the store of obstore."""
        raise NotImplementedError

    def place(self, key: str) -> str:
        """The URL of an object, unsigned."""
        raise NotImplementedError

    def request(self, key: str) -> Request:
        """What reads an object now; raises SourcePermissionError if there are no credentials."""
        raise NotImplementedError

    def pinned(self, validator: str) -> dict[str, str]:
        """Headers of a request that only this version may answer."""
        return {"If-Match": validator} if validator.startswith('"') else {}

    def stale(self, said: Answered) -> bool:
        """Whether credentials, a signature or a region may have been right before."""
        del said
        return False

    def refused(self, said: Answered, key: str | None, name: str) -> errors.SourceError:
        """The error of an answer.

        Args:
            key: The object that was asked for; None for a listing.
            name: What the error is about, as the user wrote it.
        """
        raise NotImplementedError

    # -- the store of obstore ------------------------------------------------------------------

    @property
    def store(self) -> Any:
        """The bucket as obstore knows it.

        Raises:
            FrameworkMissingError: obstore is not installed, or what reads a profile is not.
            UsageError: A setting is unknown or wrong.
        """
        store = self._store  # Another thread may forget it meanwhile.
        if store is None:
            store = self._store = self.made_of(dict(self.settings))
            self.made += 1
        return store

    def made_of(self, settings: dict[str, Any]) -> Any:
        """A store with these settings, and limits of time (see `store`)."""
        each = timedelta(seconds=self.seconds)
        client: dict[str, Any] = {"allow_http": True, "timeout": each, "connect_timeout": each}
        if self.tls.ca_file is not None:
            with open(self.tls.ca_file, "rb") as file:
                client["root_certificate"] = file.read()
        client |= dict(settings.get("client_options") or {})
        retries = {"max_retries": _RETRIES, "retry_timeout": each}
        failures = (obstore().exceptions.BaseError, ValueError, TypeError)
        try:
            return self.make({"retry_config": retries} | settings | {"client_options": client})
        except errors.MfloadError:
            raise
        except failures as error:
            what = f"the settings of the store are invalid: {reason(error)}"
            raise errors.UsageError(what, file=self.url, expected="as obstore takes them") from None

    addresses: tuple[str, ...] = ()
    """Settings that are the URL of a server."""

    def setting(self, *names: str) -> str:
        """A setting that was given, or that of the environment; or ''."""
        raise NotImplementedError

    def check(self) -> None:
        """Refuses settings that obstore panics at, and those that reads would not follow."""
        settings = dict(self.settings)
        for name, value in settings.items():
            text = isinstance(value, str) and "service_account" not in name
            if text and not value.isprintable():
                what = f"the setting {name!r} of the store has a line break or control character"
                raise errors.UsageError(what, file=self.url)
            if "sse_customer" in name.lower():
                what = f"the setting {name!r} is not followed: reads send no keys of the customer"
                raise errors.UsageError(what, file=self.url, expected="keys that the store keeps")
        for name in dict(settings.get("client_options") or {}):
            if name in _NOT_OBEYED:
                what = f"the client_options {name!r} are not followed by reads"
                raise errors.UsageError(what, file=self.url, expected=_NOT_OBEYED[name])
        for name in self.addresses:
            value = self.setting(name)
            if "@" in value.partition("://")[2].partition("/")[0]:
                what = f"the setting {name!r} of the store has credentials in its URL"
                raise errors.UsageError(what, file=self.url, expected="settings of their own")
            if value and not _ADDRESS.match(value):
                what = f"the setting {name!r} of the store is no URL"
                raise errors.UsageError(
                    what, file=self.url, expected="https://host or http://host:port",
                    found=redacted(value),
                )  # fmt: skip

    @property
    def seconds(self) -> float:
        """That a request has."""
        return min(STALLED, PATIENCE if self.timeout is None else self.timeout)

    def renew(self, made: int, said: Answered) -> None:
        """Has credentials looked for again, unless they were since the store was `made`."""
        del said
        if made == self.made:
            self._store = None

    def bounded(self, call: Callable[[], T], what: str) -> T:
        """Waits for a call of obstore; an interrupt ends the waiting.

        Raises LoadTimeoutError after `timeout`, by default `PATIENCE`.
        """
        patience = PATIENCE if self.timeout is None else self.timeout
        return Deadline(patience).bound(partial(no_panic, call), what, self.url, apart=True)

    # -- listings ------------------------------------------------------------------------------

    @in_home(_as_objects)
    def objects(self, prefix: str, most: int) -> list[Object] | None:
        """Objects below a prefix, of any depth.

        None if they are more than so many, or have names that can't be listed at once.
        """
        return self._listed(partial(self._objects, prefix, most), prefix)

    def _objects(self, prefix: str, most: int) -> list[Object] | None:
        pages = obstore().list(self.store, prefix or None, chunk_size=_PAGE)
        found = list[Object]()
        try:
            while page := self.bounded(lambda: next(pages, None), "listing the store"):
                found += map(Object.of, page)
                if len(found) > most:
                    return None
        except obstore().exceptions.BaseError as error:
            if "invalid path" not in str(error):
                raise
            return None  # Something far below has a name with empty parts, as S3 allows.
        return found

    @in_home(_as_level)
    def level(self, prefix: str) -> tuple[list[str], list[Object]]:
        """Prefixes and objects directly below a prefix."""

        def call() -> tuple[list[str], list[Object]]:
            ask = partial(obstore().list_with_delimiter, self.store, prefix or None)
            found = self.bounded(ask, "listing the store")
            return list(found["common_prefixes"]), [Object.of(each) for each in found["objects"]]

        return self._listed(call, prefix)

    def _listed(self, call: Callable[[], T], prefix: str) -> T:
        """Calls what lists: once more with new credentials, and again if an answer breaks off."""
        again, left, name = False, _BREAKS, f"{self.url}/{prefix}"
        while True:
            made = self.made
            try:
                return call()
            except errors.MfloadError:
                raise
            except (obstore().exceptions.BaseError, OSError, ValueError) as error:
                said = self.said(str(error))
                left -= 1
                if said is None and left and "response body" in str(error):
                    continue
                if said is None:
                    raise self.unanswered(error, name) from None
                if again or not self.stale(said):
                    raise self.refused(said, None, name) from None
                self.renew(made, said)
                again = True

    def said(self, text: str) -> Answered | None:
        """The answer of the store that an error of obstore quotes; None if there was none."""
        found = _STATUS.search(text)
        if self._of_another(text):
            return None
        if _REDIRECTED in text:
            return Answered(301)
        return Answered.of(int(found[1]), text) if found else None

    def _of_another(self, text: str) -> bool:
        """Whether an error of obstore is about another server, which it asked for credentials."""
        asked = _ASKED.search(text)
        if asked is None or asked[1] == "REDACTED":
            return asked is not None and "performing POST" in text  # What gives web identities.
        return urlsplit(asked[1]).netloc != urlsplit(self.place("-")).netloc

    def unanswered(self, error: BaseException, name: str) -> errors.SourceError:
        """The error of a store, or of what gives credentials, that did not answer."""
        text = str(error)
        if self._of_another(text):
            return self.without_credentials(reason(error))
        what = f"could not read from the store: {reason(error)}"
        found, expected = _deepest(text), None
        if "InvalidCertificate" in text:
            found, expected = "a certificate that can't be verified", TRUSTED
        return errors.ReadError(what, file=name, expected=expected, found=found)

    def without_credentials(self, found: str | None) -> errors.SourcePermissionError:
        """The error where no credentials were found; `found`: what the last place said."""
        what = "no credentials for the store were found"
        return errors.SourcePermissionError(
            what, file=self.url, expected=self.credentials, found=found
        )

    def near(self, key: str) -> str:
        """`, did you mean 'x'?` with a name that lies beside a key; empty if none is near."""
        directory, _, name = key.rpartition("/")
        try:
            prefixes, objects = self.level(directory)
        except errors.MfloadError:
            return ""
        beside = [*prefixes, *(each.key for each in objects)][:_TOGETHER]
        return errors.did_you_mean(name, [each.rstrip("/").rpartition("/")[2] for each in beside])


def obstore() -> Any:
    """The package; raises FrameworkMissingError if it is not installed."""
    global _home
    try:
        for name in ("obstore.exceptions", "obstore.store"):
            importlib.import_module(name)
    except ImportError as error:
        what = "object stores are read with the package obstore, which is not installed"
        raise errors.missing(what, "stores") from error
    _home = _home or os.getpid()
    return sys.modules["obstore"]


def no_panic(call: Callable[[], T]) -> T:
    """Calls obstore; where that gives up in a way that no program is to catch, ValueError."""
    try:
        return call()
    except Exception:
        raise
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        what = "a setting, or a variable of the environment, is malformed"
        raise ValueError(what) from None


def reason(error: BaseException) -> str:
    """The first line of an error of obstore, without queries of URLs and bodies of answers."""
    text = _QUOTED.sub(r"\1", str(error).partition("\n")[0])
    return errors.shown(re.sub(r"\?[^\s'\"]*", "?…", text), 200)


def _deepest(text: str) -> str | None:
    """The last cause that an error of obstore names, such as that of a connection."""
    causes = re.findall(r'(?:error|message|kind|source): "([^"?]{1,200})"', text)
    return causes[-1] if causes else None


def _by_another(access: Access, method: str, args: tuple[Any, ...]) -> Any:
    """What a method gives in a fresh interpreter, by JSON, or what it raises there, raised."""
    kind, (*given, tls, rate) = access.__reduce__()
    files = [None if each is None else os.fspath(each) for each in dataclasses.astuple(tls)]
    name = f"{kind.__module__}:{kind.__name__}"
    try:
        asked = json.dumps({"kind": name, "given": given, "tls": files, "rate": rate,
                            "method": method, "args": args}).encode()  # fmt: skip
    except TypeError:
        what = "the settings of the store can't be used in a fork: start processes by spawn"
        raise errors.UsageError(what, file=access.url, expected="text and numbers") from None
    path = os.pathsep.join(filter(None, sys.path))
    try:
        done = subprocess.run(
            [sys.executable, "-c", _ANSWER], input=asked, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, timeout=PATIENCE, env={**os.environ, "PYTHONPATH": path},
            check=True,
        )  # fmt: skip
        said = json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as failure:
        what = "a fork could not ask the store by another process: start processes by spawn"
        raise errors.SourceError(what, file=access.url, found=type(failure).__name__) from None
    if "error" in said:
        raise getattr(errors, said["error"])(**said["fields"])
    return said["value"]


def answer() -> None:
    """Calls the method that standard input names, and writes what it gives or raises as JSON."""
    asked = json.load(sys.stdin)
    url, settings, timeout = asked["given"]
    pairs = tuple((name, value) for name, value in settings)
    make = pkgutil.resolve_name(asked["kind"])
    access = make(url, pairs, timeout, Tls(*asked["tls"]), asked["rate"])
    said: dict[str, Any]
    try:
        said = {"value": getattr(access, asked["method"])(*asked["args"])}
    except errors.MfloadError as error:
        names = ("message", "file", "tensor", "expected", "found")
        fields = {name: getattr(error, name) for name in names}
        said = {"error": type(error).__name__, "fields": fields}
    json.dump(said, sys.stdout, default=str)
