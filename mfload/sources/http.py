"""A file behind http:// or https:// as a source: ranges over connections that are kept alive.

Nothing but ranges is asked for. Every answer must have exactly the bytes that were asked for, of
the version that was seen first: the same ETag, or Last-Modified if there is none, and the same
size. Whatever breaks off is taken up again at the byte, a few times and after a pause.
"""

from __future__ import annotations

import http.client
import io
import posixpath
import random
import re
import socket
import ssl
import time
import weakref
from collections import deque
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from email.utils import parsedate_to_datetime
from typing import Any, NamedTuple, NoReturn, TypeVar
from urllib.parse import parse_qsl, quote, urljoin, urlsplit

from mfload import errors
from mfload.options import LoadOptions
from mfload.sources.base import ClosedAtEnd, Costs, redacted, shrunk
from mfload.sources.client import BROKEN, Answer, Client, Timeouts, fill, from_netrc
from mfload.sources.link import Link, SlowError, Watch
from mfload.sources.tls import Tls

T = TypeVar("T")

# Reads are long, and gaps are read over: at 20 ms a request and 80 MB/s a connection, 480 tensors
# with gaps of 512 KiB came in 0.70 s with them and in 1.35 s without; of 1 MiB, in 0.9 s and 1.0 s;
# of 2 MiB, they were slower. Rows of a tensor lie closer, and are many.
COSTS = Costs(
    block=8 << 20,
    merge_gap=1 << 20,
    row_gap=256 << 10,
    staged=8 << 20,
    span=8 << 20,
    concurrency=16,
    most=32,
)

STALLED = 30.0
"""Seconds without a byte after which a connection is given up."""

PATIENCE = 300.0
"""Seconds of a pause that a server may ask for, if there is no timeout."""

TRIES = 5
"""Tries in a row that bring next to nothing, after which a read fails."""

_PROGRESS = 64 << 10  # Bytes after which tries are counted anew.
_PAUSE, _LONGEST_PAUSE = 0.1, 10.0  # Seconds before the second try, doubled each time.
_HEAD = 64 << 10  # Bytes of the first answer: most headers are shorter.
_REDIRECTS = 5
_MOVED = (301, 302, 303, 307, 308)
BUSY = (408, 425, 429, 500, 502, 503, 504)
_EXPIRED = (400, 401, 403, 404, 410)  # What servers say to a signed URL whose time is up.
# Numbers fit 64 bits.
_RANGE = re.compile(r"bytes[ =]+(\d{1,18})-(\d{1,18})/(\d{1,18}|\*)", re.IGNORECASE)
_TUNNEL = re.compile(r"Tunnel connection failed: (?=(\d+))")
_PLAIN = re.compile(r"[!-~]+")
SAFE_NAME = re.compile(r'[^\x00-\x1f\x7f%?#\\"<>^`{|}]+')
# Not encodings of what is stored: S3 keeps the first from an upload, others name a charset.
_PLAIN_CONTENT = {"", "identity", "aws-chunked", "utf-8", "binary"}
_PLAIN_BODY = ("Content-Encoding", _PLAIN_CONTENT), ("Transfer-Encoding", {"", "chunked"})
_IN_URLS = "!#$%&'()*+,/:;=?@[]~"
_PORTS = {"http": 80, "https": 443}
_NO_RANGES = "the server does not answer requests for ranges: download the file first"
_NO_ACCESS = "the server refuses access; credentials go into Options(headers=…) or ~/.netrc"
TRUSTED = "ca_file=, the certificates of its authority; or SSL_CERT_FILE in the environment"
_NO_PROXY = "the proxy refuses access; a user and a password go into its URL in the environment"
_NO_FILE = "no such file on the server"
_SECRET = 6  # Characters of a secret, at least.
_NO_SECRETS = {"if-match", "user-agent", "accept", "accept-encoding", "x-ms-version"}
_GONE = (404, 410)
_REFUSALS: dict[int, tuple[type[errors.SourceError], str]] = {
    200: (errors.SourceError, _NO_RANGES),
    401: (errors.SourcePermissionError, _NO_ACCESS),
    403: (errors.SourcePermissionError, _NO_ACCESS),
    **dict.fromkeys(_GONE, (errors.SourceNotFoundError, _NO_FILE)),
    407: (errors.SourcePermissionError, _NO_PROXY),
}


_SYSTEM = Tls()


class Version(NamedTuple):
    """What tells one version of the file from the next."""

    validator: str  # The ETag, or else Last-Modified.
    size: int

    def __str__(self) -> str:
        return f"{errors.amount(self.size)}, {self.validator}"


class RequestTarget(NamedTuple):
    """Where a request goes."""

    scheme: str
    host: str
    port: int
    path: str  # With the query.

    @staticmethod
    def of(url: str) -> RequestTarget:
        """Takes a URL apart; raises UsageError for one that is malformed."""
        what = "the URL is malformed"
        with suppress(ValueError):
            parts = urlsplit(url)
            scheme, host, port = parts.scheme.lower(), parts.hostname or "", parts.port
            host.encode("idna")  # As `socket` does.
            if "@" in parts.netloc:
                what = "a URL holds no user or password: use Options(headers=…) or ~/.netrc"
            elif not _PLAIN.fullmatch(url):
                what = "the URL has characters that must be percent-encoded"
            elif scheme in _PORTS and host:
                path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
                return RequestTarget(scheme, host, _PORTS[scheme] if port is None else port, path)
        expected = "https://host/path/model.safetensors"
        raise errors.UsageError(what, expected=expected, found=redacted(url))

    @property
    def url(self) -> str:
        """The URL, with what may be secret in it."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        port = "" if self.port == _PORTS[self.scheme] else f":{self.port}"
        return f"{self.scheme}://{host}{port}{self.path}"

    def same_server(self, other: RequestTarget) -> bool:
        """Whether credentials for this server may be sent to another: it is the same one.

        From http:// to https:// on their usual ports counts as the same.
        """
        secured = ("http", self.host, 80), ("https", self.host, 443)
        return other[:3] == self[:3] or (self[:3], other[:3]) == secured


def open_url(url: str, options: LoadOptions) -> HttpSource:
    """The source of a URL; nothing is asked of the server yet.

    Raises:
        UsageError: The URL is malformed, holds a password, or names a directory.
    """
    if RequestTarget.of(url).path.partition("?")[0].endswith("/"):
        raise errors.UsageError(
            "the files behind a URL can't be listed",
            expected="the URL of a .safetensors file or of a .safetensors.index.json",
            found=redacted(url),
        )
    tls = Tls(options.cert_file, options.key_file, options.ca_file)
    given = url, options.headers or (), options.timeout, tls
    return HttpSource(*given, rate=options.max_bandwidth)


class HttpSource:
    """A file behind a URL as a `Source`; the server is asked when something is needed first.

    Args:
        headers: Names and values that are sent to this server alone.
        timeout: Seconds that a call has, which bound each wait. Default: `STALLED` without a byte,
            `PATIENCE` where the server asks for a pause.
        tls: Certificates of `https://` connections. Default: the system's.
        version: The one that was seen before. Default: the one that the first answer has.
        rate: Bytes a second, at most (see `Options.max_bandwidth`).

    Attributes:
        asked: Requests for its bytes.
        repeated: Those of them that were given up, and asked again.
    """

    file, engine, costs = None, "http", COSTS
    atomic = False
    """Whether each answer is of one version to its end, even if the file is replaced meanwhile."""

    netrc = True  # Whether credentials may come from there.

    def __init__(
        self,
        url: str,
        headers: tuple[tuple[str, str], ...] = (),
        timeout: float | None = None,
        tls: Tls = _SYSTEM,
        version: Version | None = None,
        rate: int | None = None,
    ) -> None:
        self.name, self.patience = redacted(url), PATIENCE if timeout is None else timeout
        self.limits = Timeouts(min(STALLED, self.patience))
        self.first = self.target = RequestTarget.of(url)
        self.headers = {name.title(): value for name, value in headers}
        if self.netrc and "Authorization" not in self.headers:
            self.headers |= from_netrc(self.first.host)
        client = Client(tls, COSTS.most or 0)
        self.link = _links.setdefault((*self.first[:3], tls, rate), Link(client, rate))
        self.client, self.asked, self.repeated = self.link.client, 0, 0
        self._given, self._version, self._head = (url, headers, timeout, tls), version, b""
        self._rate = rate
        self._begun = False  # Whether the first bytes were asked for.
        self.whole = 0  # The size, of a server that does not say it beside a range.
        self._others = dict[str, dict[str, str]]()  # Headers for hosts that redirects lead to.
        self.unchecked = False  # Whether the file may have changed within an answer.
        # Whether it is one of several files. Its data is requested from the URL itself: where a
        # redirect led to may stay valid when all files are replaced.
        self.shard = False

    def __eq__(self, other: object) -> bool:
        return isinstance(other, HttpSource) and self._given == other._given

    def __hash__(self) -> int:
        return hash(self._given)

    def __reduce__(self) -> tuple[Any, ...]:
        return HttpSource, (*self._given, self._version, self._rate), {"shard": self.shard}

    @property
    def identity(self) -> Version:
        """The version that was seen first."""
        if self._version is None:
            self.ask_ahead()
        assert self._version is not None
        return self._version

    def ask_ahead(self) -> None:
        """Asks once for the first bytes, which hold most headers, and for the version."""
        if self._begun:
            return
        with self.open() as opened:
            version, head = opened.first_answer()
        if self._version is None:
            self._version = version
        elif version != self._version:
            opened.changed(version)
        self._head, self._begun = head, True
        if self.shard:
            self.target = self.first

    @property
    def listed(self) -> Version | None:
        """The version that is known; None before the first answer, if no listing named it."""
        return self._version

    @property
    def known_size(self) -> int:
        """In bytes, for an answer that does not say it; 0 if it is not known."""
        return self.whole if self._version is None else self._version.size

    @property
    def size(self) -> int:
        """In bytes."""
        return self.identity.size

    @property
    def failures(self) -> list[str]:
        """What a report is to say."""
        if not self.repeated:
            return []
        asked = f"{self.repeated} of {errors.counted(self.asked, 'request')} for {self.name}"
        return [f"given up since others were faster, and asked again: {asked}"]

    def read(self, offset: int, nbytes: int) -> bytes:
        """Reads exactly that range (see `Source`)."""
        if offset + nbytes > self.size:
            raise shrunk(self.name, offset + nbytes, self.size)
        if offset + nbytes <= _HEAD:
            self.ask_ahead()
        head = self._head[offset : offset + nbytes]
        if len(head) == nbytes:
            return head
        data = bytearray(nbytes)
        with self.open() as opened:
            opened.read([memoryview(data)], offset)
        return bytes(data)

    def open(self, flags: int = 0) -> HttpHandle:
        """What reads for one thread; the server is asked when something is read."""
        del flags
        return HttpHandle(self)

    def keep(self, keeps: bool) -> None:
        """At the checkpoint's end, forgets the first bytes, and closes connections that wait."""
        if not keeps:
            self._head = b""
            self.client.close()

    def take(self, views: deque[memoryview], offset: int) -> int:
        """Fills buffers with what the first answer held from an offset on; returns the bytes.

        What lies behind a header is asked for once, and held until it is read.
        """
        head = self._head[offset:]
        taken = fill(views, len(head), io.BytesIO(head).readinto)
        if taken:
            self.unchecked = True
            if taken == len(head):
                self._head = b""
        return taken

    def check(self) -> None:
        """Asks for a byte, so that the answer names the version.

        Every answer does, before its bytes: only one that takes a while may end in another.
        """
        if self.unchecked and not self.atomic:
            self._check()

    def _check(self) -> None:
        self.unchecked = False
        with self.open() as opened:
            opened.fill(deque([memoryview(bytearray(1))]), 0, 1)

    def check_now(self) -> None:
        """Raises SourceChangedError if the URL leads to another version by now; sends a request.

        For a file that was read, such as an index, while files that belong to it are read.
        """
        self.target = self.first
        self._check()

    def beside(self, name: str) -> HttpSource:
        """The file of that name in the same directory or below; the query stays the same."""
        if not SAFE_NAME.fullmatch(name) or name[0] == "/" or ".." in name.split("/"):
            raise errors.UsageError("is not a plain name below its URL", found=name)
        path, mark, query = self.first.path.partition("?")
        path = f"{posixpath.dirname(path).rstrip('/')}/{quote(posixpath.normpath(name))}"
        made = self.first._replace(path=path + mark + query)
        beside = HttpSource(made.url, *self._given[1:], rate=self._rate)
        beside.shard = True
        return beside

    def headers_for(self, target: RequestTarget) -> dict[str, str]:
        """What another server than that of the URL is sent: the entry in `.netrc` with its name."""
        if self.first.same_server(target):
            return self.headers
        if target.host not in self._others:
            self._others[target.host] = from_netrc(target.host, named=True)
        return self._others[target.host]

    def signed(self, target: RequestTarget) -> tuple[RequestTarget, dict[str, str]]:
        """Where a request for a target is sent, and with which headers; stores sign it."""
        return target, self.headers_for(target)

    def resend(self, answer: Answer, again: bool) -> bool:
        """Whether a request is to be sent once more, signed anew; `again`: it was sent so.

        Stores raise the error that a refusal's body names.
        """
        del answer, again
        return False

    def follow(self, target: RequestTarget, location: str | None) -> RequestTarget:
        """Where a redirect leads; raises SourceError if it must not be followed."""
        what, url = "without saying where to", ""
        with suppress(UnicodeError):  # `http.client` takes UTF-8 for Latin-1.
            location = location and location.encode("latin-1").decode()
        try:
            url = urljoin(target.url, quote((location or "").strip(), safe=_IN_URLS))
            made = RequestTarget.of(url)
            if location is not None and (target.scheme, made.scheme) != ("https", "http"):
                self.target = made
                return made
            what = what if location is None else "from https to http"
        except ValueError as error:  # A UsageError is one.
            what = f"to where it can't be followed: {getattr(error, 'message', 'malformed URL')}"
        what, found = f"the server redirects {what}", redacted(url) if url else None
        raise errors.SourceError(what, file=self.name, found=found)


class HttpHandle(ClosedAtEnd):
    """Reads ranges for one thread (see `Handle`), over connections of its source's client."""

    fd = -1

    def __init__(self, source: HttpSource) -> None:
        self._source = source
        self._watch: Watch
        self._sent: tuple[RequestTarget, dict[str, str]] | None = None

    def read(self, vector: list[Any], offset: int, least: int | None = None) -> int:
        """Fills the buffers of a vector by one request, and by more if it breaks off."""
        views = deque(memoryview(part).cast("B") for part in vector if part.nbytes)
        wanted = sum(view.nbytes for view in views)
        stop = min(offset + wanted, self._source.size)
        if stop - offset < (wanted if least is None else least):
            raise shrunk(self._source.name, offset + wanted, self._source.size)
        self.fill(views, offset + self._source.take(views, offset), stop)
        return stop - offset

    def fill(self, views: deque[memoryview], offset: int, stop: int) -> None:
        """Asks for a range, and fills buffers with it."""
        end = offset + sum(view.nbytes for view in views)

        def came() -> int:
            return end - sum(view.nbytes for view in views) - offset

        def step() -> None:
            with self._asked(start := offset + came(), stop - 1) as answer:
                self._watch.receive(answer, views, stop - start)

        if stop > offset:
            self._persist(step, came)
        self._source.unchecked |= stop - offset > _HEAD

    def first_answer(self) -> tuple[Version, bytes]:
        """The version of the file, and its first bytes."""

        def step() -> tuple[Version, bytes]:
            with self._asked(0, _HEAD - 1, opening=True) as answer:
                if not _span(answer).endswith("/*"):
                    return self._opened(answer)
            self._source.whole = self._whole()
            with self._asked(0, _HEAD - 1, opening=True) as answer:
                return self._opened(answer)

        return self._persist(step)

    def _opened(self, answer: Answer) -> tuple[Version, bytes]:
        if answer.status != 206:  # An empty file has no range.
            if (known := self._source.listed) is not None and not known.size:
                return known, b""
            return Version(_validator(answer) or "", 0), b""
        version, nbytes = self._version(answer, 0, _HEAD - 1)
        head = bytearray(nbytes)
        self._watch.receive(answer, deque([memoryview(head)]), nbytes)
        return version, bytes(head)

    def _whole(self) -> int:
        """The size of the file, by an answer that is left before its bytes."""
        with self._send(self._source.target, None) as answer:
            if answer.status != 200 or answer.length is None:
                what = "the server does not say how long the file is: download it first"
                raise errors.SourceError(what, file=self._source.name, expected="Content-Length")
            return answer.length

    def _persist(self, step: Callable[[], T], came: Callable[[], int] = int) -> T:
        """Calls a step until it ends, as long as tries bring anything; `came` counts the bytes."""
        tries = 0
        while True:
            before, self._watch = came(), self._source.link.watch()
            self._source.asked += 1
            try:
                return step()
            except errors.MfloadError as error:
                self._forget_sent(error)
                raise
            except SlowError:
                self._source.repeated += 1
            except BROKEN as error:
                tries = 1 if came() - before >= _PROGRESS else tries + 1
                if tries == 1 and not came():
                    self._check_scheme(error)
                final = isinstance(error, ssl.SSLCertVerificationError | http.client.InvalidURL)
                if isinstance(error, socket.gaierror):
                    final = error.errno != socket.EAI_AGAIN
                final |= str(error).startswith("Tunnel connection failed: 4")  # By the proxy.
                after = getattr(error, "after", 0)
                if tries >= TRIES or final or after > self._source.patience:
                    unknown = isinstance(error, ssl.SSLCertVerificationError)
                    proxy = self._source.client.proxy(self._source.target[:3])
                    through = "" if proxy is None else f" through the proxy {proxy}"
                    told = errors.ReadError(
                        f"could not read from the server{through}: {self._reason(error)}",
                        file=self._source.name,
                        expected=TRUSTED if unknown else None,
                        found=f"given up after {errors.counted(tries, 'try', 'tries')}",
                    )
                    raise told from (None if self._forget_sent(told, error) else error)
                pause = _PAUSE * 2 ** (tries - 1) * random.uniform(0.5, 1.5)
                time.sleep(max(min(pause, _LONGEST_PAUSE), after))

    def _check_scheme(self, error: Exception) -> None:
        """Raises SourceError if the server speaks TLS and the URL does not, or the reverse."""
        scheme, host = self._source.target[:2]
        if problem := self._source.client.mismatch(self._source.target[:3], error):
            raise errors.SourceError(
                f"the server {problem}",
                file=self._source.name,
                expected=f"{'https' if scheme == 'http' else 'http'}://{host}…",
                found=f"{scheme}://{host}…",
            ) from error

    def _forget_sent(self, error: errors.MfloadError, cause: BaseException | None = None) -> bool:
        """Takes credentials that the server quotes out of an error; whether its cause has some."""
        if self._sent is None:
            return False
        target, headers = self._sent
        secrets = [value for name, value in headers.items() if name.lower() not in _NO_SECRETS]
        secrets += [last for each in secrets if len(last := each.split(" ")[-1]) < len(each)]
        query = target.path.partition("?")[2]
        secrets += [query, *(value for _, value in parse_qsl(query))]
        secrets = [each for each in secrets if len(each) >= _SECRET]
        spelled = {text for each in secrets for text in (each, quote(each))}
        for name in ("message", "expected", "found"):
            if isinstance(value := getattr(error, name), str):
                for each in sorted(spelled, key=len, reverse=True):
                    value = value.replace(each, "…")
                setattr(error, name, value)
        error.args = (error.message,)
        chain = [each for each in (cause, error.__cause__, error.__context__) if each is not None]
        return any(each in str(one) for one in chain for each in spelled)

    def _reason(self, error: Exception) -> str:
        if isinstance(error, TimeoutError):
            return f"no byte came for {self._source.limits.stalled:g} s"
        if isinstance(error, http.client.IncompleteRead):
            return "the connection ended before the data"
        if refused := _TUNNEL.match(str(error)):  # What follows may be what the proxy was sent.
            return f"{refused[0]}{_status(int(refused[1]))}"
        if isinstance(error, ValueError) and "header value" in str(error):
            return "a header holds what can't be sent"  # It may be a token.
        text = getattr(error, "strerror", None) or str(error)  # It may quote the server.
        return errors.shown(text, 100) or type(error).__name__

    @contextmanager
    def _asked(self, first: int, last: int, *, opening: bool = False) -> Generator[Answer]:
        """The answer to a request for a range, whose head is checked (see `_version`)."""
        source = self._source
        with self._found(f"bytes={first}-{last}") as answer:
            span = _span(answer)
            said = _RANGE.fullmatch(span)
            if answer.status == 200 and said and int(said[2]) <= last:
                answer.status = 206  # Of a server that does as it is asked, and says OK.
            empty = span.lower() == "bytes */0" or (answer.status, answer.length) == (200, 0)
            known = source.listed
            if answer.status == 416 and known is not None and not known.size:
                empty = True  # As the listing says.
            if answer.status == 206:
                if not opening:
                    version, _ = self._version(answer, first, last)
                    if version != source.identity:
                        self.changed(version)
            elif not (opening and empty):
                self._refuse(answer, opening)
            yield answer

    def _found(self, span: str | None) -> Answer:
        """The answer from where redirects lead to."""
        source, target, followed, again = self._source, self._source.target, 0, False
        while True:
            answer = self._send(target, span)
            try:
                if source.resend(answer, again):
                    again = True
                    answer.close()
                    continue
            except BaseException:
                answer.close()
                raise
            if answer.status in _MOVED:
                answer.close()
                followed += 1
                if followed > _REDIRECTS:
                    what = f"the server redirects more than {_REDIRECTS} times"
                    raise errors.SourceError(what, file=source.name)
                target = source.follow(target, answer.getheader("Location"))
            elif answer.status in _EXPIRED and target != source.first and not followed:
                answer.close()  # A redirect led to a URL that is valid for a while.
                target = source.first
            else:
                return answer

    def _send(self, target: RequestTarget, span: str | None) -> Answer:
        source, ranges = self._source, {} if span is None else {"Range": span}
        target, headers = self._sent = source.signed(target)
        limits = source.limits._replace(expected=self._watch.expected)
        return source.client.ask(target[:3], target.path, ranges | headers, limits)

    def _version(self, answer: Answer, first: int, last: int) -> tuple[Version, int]:
        """The version of the file, and bytes in the answer, which must be those asked for."""
        name, found = self._source.name, answer.getheader("Content-Range", "no Content-Range")
        for header, plain in _PLAIN_BODY:
            encoding = answer.getheader(header, "")
            if not plain.issuperset(each.strip() for each in encoding.lower().split(",")):
                what = "the server sends encoded bytes"
                raise errors.ReadError(what, file=name, expected=f"no {header}", found=encoding)
        match = _RANGE.fullmatch(found.strip())
        said = match[3] if match else "0"
        size = self._source.known_size if said == "*" else int(said)
        stop = min(last + 1, size)
        if not match or (int(match[1]), int(match[2])) != (first, stop - 1):
            what = "the server sends another range than it was asked for"
            raise errors.ReadError(what, file=name, expected=f"bytes {first}-{last}", found=found)
        if answer.length not in (None, stop - first):
            what = "the server sends another number of bytes than its range has"
            raise errors.ReadError(what, file=name, expected=stop - first, found=answer.length)
        validator = _validator(answer)
        if validator is None:
            raise errors.SourceError(
                "the server does not say which version of the file it sends: download it first",
                file=name,
                expected="an ETag or a Last-Modified header",
            )
        return Version(validator, size), stop - first

    def changed(self, found: object) -> NoReturn:
        """Raises SourceChangedError."""
        raise errors.SourceChangedError(
            "the file changed since its header was read",
            file=self._source.name,
            expected=self._source.identity,
            found=found,
        )

    def _refuse(self, answer: Answer, opening: bool) -> NoReturn:
        """Raises the error of an answer without the bytes."""
        status = answer.status
        if status == 400 and self._source.target.scheme == "http":  # So nginx answers to no TLS.
            self._check_scheme(ConnectionResetError())
        found = _status(status)
        if status in BUSY:
            raise BusyError(found, answer.getheader("Retry-After", ""))
        if status == 412:
            self.changed(f"another version ({found})")
        if status == 416 and not opening:
            self.changed(f"an end before that range ({found})")
        if status in _GONE and not opening:
            self.changed(f"{_NO_FILE} ({found})")
        kind, what = _REFUSALS.get(status, (errors.SourceError, "the server refuses the request"))
        expected = "206 Partial Content" if status == 200 else None
        raise kind(what, file=self._source.name, expected=expected, found=found)


class BusyError(http.client.HTTPException):
    """An answer that asks to come again later.

    Args:
        status: What it says, as a status of HTTP.
        after: Seconds, or a date, as the header Retry-After has them.
    """

    def __init__(self, status: str, after: str) -> None:
        self.after = 0.0
        if after.strip().isdecimal():
            self.after = float(after)
        else:
            with suppress(ValueError, TypeError, OverflowError):  # It may be none, or a date.
                self.after = max(0.0, parsedate_to_datetime(after).timestamp() - time.time())
        asks = f", and asks for a pause of {self.after:.0f} s" if self.after else ""
        super().__init__(f"it answers {status}{asks}")


# A link, with its connections, lives as long as a source of its server does.
_links: weakref.WeakValueDictionary[tuple[Any, ...], Link] = weakref.WeakValueDictionary()


def _status(number: int) -> str:
    return f"{number} {http.client.responses.get(number, '')}".rstrip()


def _validator(answer: Answer) -> str | None:
    tag, changed = answer.getheader("ETag"), answer.getheader("Last-Modified")
    if tag and changed and tag[:1] != '"':
        return f"{tag} {changed}"  # Either alone tells less.
    return tag or changed


def _span(answer: Answer) -> str:
    return answer.getheader("Content-Range", "").strip()
