"""The client of seeds and planners: kept connections, a token, TLS, and no patience.

What a server sends is hostile input: answers have a largest size, and a connection that brings too
little for `stalled` seconds is given up.
"""

from __future__ import annotations

import http.client
import io
import ipaddress
import json
import random
import socket
import ssl
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from mfload import errors
from mfload.formats import strict_json
from mfload.peer.security import Tls, split_address
from mfload.peer.timed import Timed
from mfload.runtime import forget_in_forks
from mfload.sources.tls import mismatch

T = TypeVar("T")

_BROKEN = (OSError, http.client.HTTPException)
_LEAST = 64 << 10  # Bytes that must come within the seconds of `stalled`.
_ANSWER = 10.0  # Seconds for a whole answer that is not data.
_HELD_UP = 6.0  # Times `stalled` that a program of this machine has to begin an answer.
_PATIENCE = 60.0  # Seconds that one waits for its turn at a server which is busy.
_PAUSES = 0.05, 1.0  # Between two tries: at first, and at most.
_TRIES = 3  # For a request whose connection is dropped, as a server does for others that come.
_BUSY = "the peer is busy"
_REFUSALS: dict[int, tuple[type[errors.SourceError], str]] = {
    401: (errors.SourcePermissionError, "the peer asks for another token"),
    403: (errors.SourcePermissionError, "the peer does not let this one in"),
    404: (errors.SourceNotFoundError, "the peer does not have it"),
    410: (errors.SourceChangedError, "the seed has another generation now"),
    503: (errors.ReadError, _BUSY),
}


class _Response(http.client.HTTPResponse):
    """An answer whose head has to come within `stalled` seconds."""

    def __init__(self, sock: Any, *args: Any, stalled: float, **more: Any) -> None:
        super().__init__(sock, *args, **more)
        self.timed = Timed(sock, self.fp.detach())
        self.patience = stalled * (_HELD_UP if _own(sock) else 1)
        self.timed.allow(self.patience)
        self.fp = io.BufferedReader(self.timed)


class Client:
    """Talks to one server; threads may share it.

    Args:
        address: "host:port".
        name: What errors name it.
        stalled: Seconds without progress after which a connection is given up. A server on this
            machine has six times as long to begin an answer: its program may be busy, and the
            kernel says at once if it is gone.
        patience: Seconds that requests wait for their turn at a server that is busy.
    """

    def __init__(
        self,
        address: str,
        *,
        token: str | None = None,
        tls: Tls | None = None,
        stalled: float = 1.5,
        patience: float | None = None,
        name: str | None = None,
    ) -> None:
        self._patience = _PATIENCE if patience is None else patience
        self.address, self.name, self.stalled = address, name or address, stalled
        self._host = split_address(address)
        self._headers, self._token = {"User-Agent": "mfload"}, token
        if token is not None:
            self._headers["Authorization"] = f"Bearer {token}"
        self._context = None if tls is None else tls.context(server=False)
        self._idle: deque[http.client.HTTPConnection] = deque()
        forget_in_forks(self)
        weakref.finalize(self, _close, self._idle)

    def json(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        limit: int = 1 << 20,
        seconds: float = _ANSWER,
        most: int | None = None,
    ) -> Any:
        """The JSON that answers a request; None if the answer is empty.

        Raises:
            SourceError: The server can't be reached, refuses, or takes longer than `seconds`.
            HeaderError: The answer is malformed or longer than `limit` bytes, or would take more
                than `most` when it is parsed.
        """
        data = None if body is None else json.dumps(body).encode()
        headers = {} if body is None else {"Content-Type": "application/json"}

        def read(response: _Response) -> bytes:
            response.timed.allow(response.patience, limit, least=_LEAST, total=seconds)
            if (response.length or 0) > limit:
                raise BufferError
            parts: list[bytes] = []
            while part := response.read1(64 << 10):
                parts.append(part)
            if response.length:  # `read1` takes the end of a connection for that of the answer.
                raise http.client.IncompleteRead(b"", response.length)
            return b"".join(parts)

        try:
            text = self._ask(method, path, data, headers, (200, 201, 204), read)
        except BufferError:
            what = "the answer of the peer is over the limit"
            expected = f"at most {errors.amount(limit)}"
            raise errors.HeaderError(what, file=self.name, expected=expected) from None
        return strict_json.loads(text, self.name, "answer", most=most) if text else None

    def read_into(self, path: str, vector: Sequence[Any], offset: int) -> None:
        """Fills the buffers of a vector with the bytes of a path from `offset` on.

        Raises SourceError if the server can't be reached, refuses, or stalls.
        """
        views = [memoryview(each).cast("B") for each in vector if each.nbytes]
        wanted = sum(each.nbytes for each in views)
        headers = {"Range": f"bytes={offset}-{offset + wanted - 1}"}

        def read(response: _Response) -> None:
            response.timed.allow(self.stalled, least=_LEAST)
            told = str(response.getheader("Content-Range"))
            expected = f"bytes {offset}-{offset + wanted - 1}/"
            if response.length != wanted or not told.startswith(expected):
                what = "the peer sends another range than it was asked for"
                found = f"{errors.amount(response.length)}, {errors.shown(told, 80)}"
                expected = f"{errors.amount(wanted)}, {expected}…"
                raise errors.ReadError(what, file=self.name, expected=expected, found=found)
            for view in views:
                at = 0
                while at < view.nbytes:
                    got = response.readinto(view[at:])
                    if not got:
                        raise http.client.IncompleteRead(b"", view.nbytes - at)
                    at += got

        if wanted:
            self._ask("GET", path, None, headers, (206,), read)

    def ends(self) -> tuple[Any, Any] | None:
        """Host and port of both ends, this one first, of a connection that waits."""
        try:
            connection = self._idle.pop()
        except IndexError:
            return None
        try:
            return connection.sock.getsockname(), connection.sock.getpeername()
        except (AttributeError, OSError):
            return None  # The server closed it.
        finally:
            self._idle.append(connection)

    def close(self) -> None:
        """Closes the connections that wait."""
        _close(self._idle)

    forget = close
    """In a fork they are the parent's."""

    def _ask(self, method: str, *given: Any) -> Any:
        """Makes a request; what only reads, again if the server is busy or drops the connection."""
        until, pause, tries = time.monotonic() + self._patience, _PAUSES[0], _TRIES
        while True:
            try:
                return self._ask_once(method, *given)
            except errors.ReadError as error:
                dropped = isinstance(error.__cause__, ConnectionError)
                tries -= dropped
                again = method == "GET" and tries and (dropped or error.message == _BUSY)
                if not again or time.monotonic() + pause > until:
                    raise
            time.sleep(pause * random.uniform(0.5, 1.0))  # So that not all come at once.
            pause = min(1.5 * pause, _PAUSES[1])

    def _ask_once(
        self,
        method: str,
        path: str,
        body: bytes | None,
        headers: dict[str, str],
        fine: tuple[int, ...],
        read: Callable[[Any], T],
    ) -> T:
        connection, kept = self._connection()
        try:
            try:
                response = self._send(connection, method, path, body, headers)
            except ConnectionError:
                if not kept:
                    raise
                connection.close()  # The server may have closed it meanwhile.
                response = self._send(connection, method, path, body, headers)
            if response.status not in fine:
                self._refuse(response)
            found = read(response)
        except BaseException as error:
            connection.close()
            if isinstance(error, _BROKEN) and not isinstance(error, errors.MfloadError):
                raise self._broken(error, kept) from error
            raise
        whole = response.isclosed() or not response.length
        response.close()
        if whole:
            self._idle.append(connection)
        else:
            connection.close()
        return found

    def _send(
        self,
        connection: http.client.HTTPConnection,
        method: str,
        path: str,
        body: bytes | None,
        headers: dict[str, str],
    ) -> Any:
        if connection.sock is not None:
            connection.sock.settimeout(self.stalled)
        connection.request(method, path, body, {**self._headers, **headers})
        return connection.getresponse()

    def _connection(self) -> tuple[http.client.HTTPConnection, bool]:
        try:
            return self._idle.pop(), True
        except IndexError:
            host, port = self._host
        made: http.client.HTTPConnection
        if self._context is None:
            made = http.client.HTTPConnection(host, port, timeout=self.stalled)
        else:
            made = http.client.HTTPSConnection(
                host, port, timeout=self.stalled, context=self._context
            )
        made.response_class = partial(_Response, stalled=self.stalled)  # pyright: ignore
        return made, False

    def _refuse(self, response: http.client.HTTPResponse) -> None:
        kind, what = _REFUSALS.get(
            response.status, (errors.ReadError, "the peer refuses the request")
        )
        said = response.read(1024).decode("ascii", "replace")
        if self._token is not None:
            said = said.replace(self._token, "…")  # Some servers repeat what they were sent.
        found = f"{response.status} {errors.shown(said, 160)}".strip()
        raise kind(what, file=self.name, found=found)

    def _broken(self, error: Exception, kept: bool) -> errors.SourceError:
        if not kept and (other := self._other_scheme(error)):
            return other
        expected = None
        if isinstance(error, TimeoutError):
            what, found = "the peer stalls", "too little in the time that it has"
        elif isinstance(error, ConnectionRefusedError | socket.gaierror):
            what, found = "no peer listens there", str(error)
            return errors.SourceNotFoundError(what, file=self.name, found=errors.shown(found, 160))
        elif isinstance(error, ssl.SSLError):
            what, found = "no secure connection to the peer", str(error)
            expected = "cert_file=, if the peer asks for a certificate"
            if isinstance(error, ssl.SSLCertVerificationError):
                expected = "ca_file=, the certificates of the authority that signed the peer's"
        else:
            what, found = "the connection to the peer broke off", str(error) or type(error).__name__
        found = errors.shown(found, 160)
        return errors.ReadError(what, file=self.name, expected=expected, found=found)

    def _other_scheme(self, error: Exception) -> errors.SourceError | None:
        """The error of a peer that speaks TLS and was asked without it, or the reverse."""
        plain = self._context is None
        problem = mismatch(error, *self._host, tls=not plain)
        expected = "ca_file=, the certificates of its authority" if plain else "no ca_file="
        if problem is None:
            return None
        return errors.SourceError(f"the peer {problem}", file=self.name, expected=expected)


def _own(connection: socket.socket) -> bool:
    """Whether the other end is on this machine."""
    try:
        here, there = (each()[0] for each in (connection.getsockname, connection.getpeername))
        return here == there or ipaddress.ip_address(there.split("%")[0]).is_loopback
    except (OSError, ValueError):  # It broke off, or has no address of the internet.
        return False


def _close(idle: deque[http.client.HTTPConnection]) -> None:
    with suppress(IndexError):  # Other threads may take the last one.
        while True:
            idle.pop().close()
