"""Connections to HTTP servers: kept for the next reader, and through the environment's proxies."""

from __future__ import annotations

import base64
import http.client
import ipaddress
import logging
import netrc
import os
import urllib.request
import weakref
from collections import deque
from contextlib import suppress
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

from mfload import errors
from mfload.runtime import Forked
from mfload.sources.tls import Tls

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


class Answer(http.client.HTTPResponse):
    """An answer; those before it, such as 103 Early Hints, are passed over."""

    _heads = 0

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


class _Forwarded(http.client.HTTPConnection):
    """To a server by http:// through a proxy, which is told the whole URL."""

    def __init__(self, proxy: Proxy, server: str) -> None:
        super().__init__(proxy.host, proxy.port)
        self._server, self._own = server, proxy.headers

    def putrequest(self, method: str, url: str, *args: Any, **more: Any) -> None:
        super().putrequest(method, self._server + url, *args, **more)
        for name, value in self._own.items():
            self.putheader(name, value)


class Pool:
    """Connections to a server, and to those it redirects to, that wait to be used again."""

    def __init__(self, tls: Tls, most: int) -> None:
        self._tls, self._context, self._most = tls, None, most
        self._idle: deque[tuple[tuple[Any, ...], http.client.HTTPConnection]] = deque()
        self._forked = Forked()
        weakref.finalize(self, _close, self._idle)  # At exit too, while there are modules.

    def connect(self, scheme: str, host: str, port: int) -> http.client.HTTPConnection:
        """A new connection, not yet opened; raises UsageError as `proxy_of` and `Tls.context`."""
        proxy = proxy_of(scheme, host, port)
        if scheme == "http" and proxy is not None:
            name = f"[{host}]" if ":" in host else host
            server = f"http://{name}" + (f":{port}" if port != 80 else "")
            made: http.client.HTTPConnection = _Forwarded(proxy, server)
        elif scheme == "http":
            made = http.client.HTTPConnection(host, port)
        else:
            if self._context is None:
                self._context = self._tls.context(server=False)
            first = (host, port) if proxy is None else proxy[:2]
            made = http.client.HTTPSConnection(*first, context=self._context)
            if proxy is not None:
                made.set_tunnel(host, port, proxy.headers)
        made.response_class = Answer
        return made

    def take(self, server: tuple[Any, ...]) -> http.client.HTTPConnection | None:
        """A connection to a server; None if there is none."""
        if self._forked:  # They are those of the parent.
            self.close()
            self._forked = Forked()
        for _ in range(len(self._idle)):
            with suppress(IndexError):
                entry = self._idle.popleft()
                if entry[0] == server:
                    return entry[1]
                self._idle.append(entry)
        return None

    def give(self, server: tuple[Any, ...], connection: http.client.HTTPConnection) -> None:
        """Keeps a connection, or closes it if there are enough."""
        if len(self._idle) < self._most and not self._forked:
            self._idle.append((server, connection))
        else:
            connection.close()

    def close(self) -> None:
        """Closes all of them."""
        _close(self._idle)


def _close(idle: deque[tuple[tuple[Any, ...], http.client.HTTPConnection]]) -> None:
    with suppress(IndexError):  # Other threads may take the last one.
        while True:
            idle.pop()[1].close()
