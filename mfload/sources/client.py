"""The HTTP client of files behind URLs, seeds and planners.

Connections are kept for the next request, and lead through the proxies that the environment names.
Bytes of an answer go from the socket into memory that is given.
"""

from __future__ import annotations

import base64
import http.client
import io
import ipaddress
import logging
import math
import netrc
import os
import socket
import urllib.request
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

from mfload import errors
from mfload.runtime import forget_in_forks
from mfload.sources.timed import Timed
from mfload.sources.tls import Tls, mismatch

Server = tuple[str, str, int]
"""Scheme, host and port."""

# `http.client` raises a ValueError for a chunk of a negative size.
BROKEN = (OSError, http.client.HTTPException, ValueError)
"""What a broken connection or a malformed answer raises."""

_INTERIM = 100  # Answers before the final one, at most.


class Proxy(NamedTuple):
    """A proxy, with the headers that it is sent."""

    host: str
    port: int
    headers: dict[str, str]

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


def proxy_of(scheme: str, host: str, port: int) -> Proxy | None:
    """The proxy that the environment names for a server, by the rules of `requests`.

    These are HTTP_PROXY or HTTPS_PROXY, else ALL_PROXY; in lower case they count first. NO_PROXY
    excepts hosts with all below them, `host:port`, addresses and networks. A loopback address is
    excepted only if it is named there.

    Raises:
        UsageError: It is not an http:// proxy, or its password has characters that end a host.
    """
    known = urllib.request.getproxies()
    url = known.get(scheme) or known.get("all")
    if not url or _excepted(host, port, known.get("no", "")):
        return None
    url = url if "://" in url else f"http://{url.lstrip('/')}"
    with suppress(ValueError):
        parts = urlsplit(url)
        cut = "@" in parts.path + parts.query + parts.fragment  # By a password with `/`, `?`, `#`.
        if parts.scheme.lower() == "http" and parts.hostname and not cut:
            headers: dict[str, str] = {}
            if parts.username:
                given = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
                headers["Proxy-Authorization"] = _basic(given)
            return Proxy(parts.hostname, parts.port or 80, headers)
    what = f"the proxy for {scheme}:// in the environment can't be used"
    expected = "http://host:port; %23 for # in a password"
    raise errors.UsageError(what, expected=expected, found=f"{url.partition('://')[0]}://…")


def _excepted(host: str, port: int, entries: str) -> bool:
    if urllib.request.proxy_bypass(f"{host}:{port}"):
        return True
    with suppress(ValueError):
        address = ipaddress.ip_address(host)
        for entry in entries.split(","):
            with suppress(ValueError):
                if address in ipaddress.ip_network(entry.strip().strip("[]"), strict=False):
                    return True
    return False


def _basic(text: str) -> str:
    return f"Basic {base64.b64encode(text.encode()).decode()}"


def from_netrc(host: str, *, named: bool = False) -> dict[str, str]:
    """The header that `.netrc` gives for a host; the environment variable NETRC names the file.

    A file that can't be read gives none, as with `requests`, and a warning in the log.

    `named`: only an entry with the host's name, and not the default for all.
    """
    path = os.environ.get("NETRC")
    try:
        entries = netrc.netrc(path)
        found = entries.hosts.get(host) if named else entries.authenticators(host)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, netrc.NetrcParseError):  # Their texts may quote the file.
        logging.getLogger("mfload").warning(
            "no credentials are taken from %s: it can't be read, is malformed, or is open to "
            "other users", path or "~/.netrc",
        )  # fmt: skip
        return {}
    return {} if found is None else {"Authorization": _basic(f"{found[0] or found[1]}:{found[2]}")}


class Timeouts(NamedTuple):
    """What a server is waited for.

    Attributes:
        stalled: Seconds for the connection, for the head of an answer, and for what follows.
        least: Bytes after which the seconds begin anew. Default: each byte; None: they do not.
        own: Times `stalled` that a program of this machine has to begin an answer. It may be
            busy, and the kernel says at once if it is gone.
        expected: Seconds for the first bytes after which a function is called, and that (see
            `Timed.expect`).
    """

    stalled: float
    least: int | None = 1
    own: float = 1.0
    expected: tuple[float, Callable[[], float]] = math.inf, float


class Answer(http.client.HTTPResponse):
    """An answer; those before it, such as 103 Early Hints, are passed over.

    Its end, as a context manager, keeps the connection if all of the answer has come, and else
    closes it.

    Attributes:
        timed: What bounds the time for it.
        at_end: Called once with whether all of it has come.
        patience: Seconds that its head had.
    """

    _heads = 0
    at_end: Callable[[bool], object] = bool

    def __init__(self, sock: Any, *args: Any, limits: Timeouts, **more: Any) -> None:
        super().__init__(sock, *args, **more)
        self.timed = Timed(sock, self.fp.detach())
        self.patience = limits.stalled
        if limits.own != 1.0 and on_this_machine(sock):
            self.patience *= limits.own
        self.timed.allow(self.patience, least=limits.least)
        self.timed.expect(*limits.expected)
        self.fp = io.BufferedReader(self.timed)

    def begin(self) -> None:
        """Reads the head of the final one."""
        super().begin()
        while 100 <= self.status < 200 and self.status != http.HTTPStatus.SWITCHING_PROTOCOLS:
            self.headers = self.msg = None  # pyright: ignore - so that `begin` reads the next
            super().begin()

    def _read_status(self) -> tuple[str, int, str]:
        # `begin` passes over those with 100 by itself, however many come.
        self._heads += 1
        if self._heads > _INTERIM:
            raise http.client.BadStatusLine("no answer but interim ones")
        return super()._read_status()  # pyright: ignore[reportAttributeAccessIssue]

    def fill(self, views: deque[memoryview], nbytes: int, piece: int | None = None) -> None:
        """Receives so many bytes into buffers; those that are full leave the queue.

        `piece`: what a timeout may lose of what has come. Default: a buffer.
        """
        self.check_filled(nbytes - fill(views, nbytes, self.readinto, piece))

    def check_filled(self, left: int) -> None:
        """Raises IncompleteRead if bytes are left."""
        if left:
            raise http.client.IncompleteRead(b"", left)

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if isinstance(error, BROKEN):  # `http.client` also closes what has lost its place.
            at_end, self.at_end = self.at_end, bool
            at_end(False)
        self.close()

    def close(self) -> None:
        """Ends it."""
        whole = self.isclosed() or self.length == 0  # What follows the last chunk isn't waited for.
        super().close()
        self.timed.expect(math.inf, float)  # Its connection keeps it until the next.
        at_end, self.at_end = self.at_end, bool
        at_end(whole)


def fill(
    views: deque[memoryview],
    nbytes: int,
    read_into: Callable[[Any], int],
    piece: int | None = None,
) -> int:
    """Fills buffers, and takes those that are full from the queue; returns the bytes that came."""
    left = nbytes
    while left and views and (got := read_into(views[0][: min(left, piece or left)])):
        left -= got
        views[0] = views[0][got:]
        if not views[0]:
            views.popleft()
    return nbytes - left


def on_this_machine(connection: socket.socket) -> bool:
    """Whether the other end of a connection is on this machine."""
    try:
        here, there = (each()[0] for each in (connection.getsockname, connection.getpeername))
        return here == there or ipaddress.ip_address(there.split("%")[0]).is_loopback
    except (OSError, ValueError):  # It broke off, or has no address of the internet.
        return False


class _Forwarded(http.client.HTTPConnection):
    """To a server by http:// through a proxy, which is told the whole URL."""

    def __init__(self, proxy: Proxy, server: str) -> None:
        super().__init__(proxy.host, proxy.port)
        self._server, self._own = server, proxy.headers

    def putrequest(self, method: str, url: str, *args: Any, **more: Any) -> None:
        super().putrequest(method, self._server + url, *args, **more)
        for name, value in self._own.items():
            self.putheader(name, value)


class Client:
    """Asks servers; threads may share it.

    Args:
        tls: Certificates of `https` connections.
        most: Connections that wait to be used again, at most.
        proxies: Whether those of the environment count.
    """

    def __init__(self, tls: Tls, most: int, *, proxies: bool = True) -> None:
        self._tls, self._context, self._most, self._proxies = tls, None, most, proxies
        self._idle: deque[tuple[Server, http.client.HTTPConnection]] = deque()
        self._closed = 0  # How often: what was in use meanwhile is not kept.
        forget_in_forks(self)
        weakref.finalize(self, _close, self._idle)  # At exit too, while there are modules.

    def ask(
        self,
        server: Server,
        path: str,
        headers: dict[str, str],
        limits: Timeouts,
        *,
        method: str = "GET",
        body: bytes | None = None,
    ) -> Answer:
        """The answer to a request, whose bytes have not come yet; redirects are not followed.

        Raises:
            One of `BROKEN`: The connection or the answer is broken.
            UsageError: As `proxy_of` and `Tls.context`.
        """
        closed, connection = self._closed, self._take(server) or self._connect(server)
        made: Any = connection
        made.timeout, made.response_class = limits.stalled, partial(Answer, limits=limits)
        if made.sock is not None:
            made.sock.settimeout(limits.stalled)
        try:
            while True:
                kept = made.sock is not None
                try:
                    made.request(method, path, body, {"User-Agent": "mfload", **headers})
                    answer: Answer = made.getresponse()
                    break
                except ConnectionError:
                    if not kept:  # Else the server may have closed it meanwhile.
                        raise
                    made.close()
        except BaseException:
            made.close()
            raise
        finally:
            del made.response_class  # It knows who asked.

        def end(whole: bool) -> None:
            fits = closed == self._closed and len(self._idle) < self._most
            if whole and fits and made.sock is not None:
                self._idle.append((server, connection))
            else:
                made.close()

        answer.at_end = end
        return answer

    def waiting(self, server: Server) -> tuple[Any, Any] | None:
        """Addresses of both ends, the own one first, of a connection that waits."""
        connection = self._take(server)
        if connection is None:
            return None
        try:
            return connection.sock.getsockname(), connection.sock.getpeername()
        except OSError:
            return None  # The server closed it.
        finally:
            self._idle.append((server, connection))

    def mismatch(self, server: Server, error: Exception) -> str | None:
        """What is wrong where a connection broke off since only one side speaks TLS; else None."""
        if self.proxy(server) is not None:  # It alone may reach the server.
            return None
        return mismatch(error, *server[1:], tls=server[0] == "https")

    def proxy(self, server: Server) -> Proxy | None:
        """The proxy that leads to a server; raises UsageError as `proxy_of`."""
        return proxy_of(*server) if self._proxies else None

    def close(self) -> None:
        """Closes the connections that wait; those in use, at the end of their answers."""
        self._closed += 1
        _close(self._idle)

    forget = close
    """In a fork they are the parent's."""

    def _take(self, server: Server) -> http.client.HTTPConnection | None:
        for _ in range(len(self._idle)):
            with suppress(IndexError):  # Other threads may take the last one.
                entry = self._idle.pop()
                if entry[0] == server:
                    return entry[1]
                self._idle.appendleft(entry)
        return None

    def _connect(self, server: Server) -> http.client.HTTPConnection:
        scheme, host, port = server
        proxy = self.proxy(server)
        if scheme == "http" and proxy is not None:
            name = f"[{host}]" if ":" in host else host
            return _Forwarded(proxy, f"http://{name}" + (f":{port}" if port != 80 else ""))
        if scheme == "http":
            return http.client.HTTPConnection(host, port)
        if self._context is None:
            self._context = self._tls.context(server=False)
        first = (host, port) if proxy is None else proxy[:2]
        made = http.client.HTTPSConnection(*first, context=self._context)
        if proxy is not None:
            made.set_tunnel(host, port, proxy.headers)
        return made


def _close(idle: deque[tuple[Server, http.client.HTTPConnection]]) -> None:
    with suppress(IndexError):
        while True:
            idle.pop()[1].close()
