"""The client of seeds and planners: kept connections, a token, TLS, and no patience.

What a server sends is hostile input: answers have a largest size, and a connection that brings too
little for `stalled` seconds is given up.
"""

from __future__ import annotations

import json
import random
import socket
import ssl
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeVar

from mfload import errors
from mfload.formats import strict_json
from mfload.peer.security import Tls, split_address
from mfload.sources import client as clients
from mfload.sources.client import BROKEN, Answer, Timeouts

T = TypeVar("T")

_LEAST = 64 << 10  # Bytes that must come within the seconds of `stalled`.
_ANSWER = 10.0  # Seconds for a whole answer that is not data.
_IDLE = 32  # Connections that wait, at most.
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


class SeedClient:
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
        self._server = ("http" if tls is None else "https", *split_address(address))
        self._limits, self._answered = Timeouts(stalled, None, _HELD_UP), False
        self._headers, self._token = {}, token
        if token is not None:
            self._headers["Authorization"] = f"Bearer {token}"
        self._client = clients.Client(tls or Tls(), _IDLE, proxies=False)

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

        def read(answer: Answer) -> bytes:
            answer.timed.allow(answer.patience, limit, least=_LEAST, total=seconds)
            if (answer.length or 0) > limit:
                raise BufferError
            return answer.read()

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
        views = deque(memoryview(each).cast("B") for each in vector if each.nbytes)
        wanted = sum(each.nbytes for each in views)
        headers = {"Range": f"bytes={offset}-{offset + wanted - 1}"}

        def read(answer: Answer) -> None:
            answer.timed.allow(self.stalled, least=_LEAST)
            told = str(answer.getheader("Content-Range"))
            expected = f"bytes {offset}-{offset + wanted - 1}/"
            if answer.length != wanted or not told.startswith(expected):
                what = "the peer sends another range than it was asked for"
                found = f"{errors.amount(answer.length)}, {errors.shown(told, 80)}"
                expected = f"{errors.amount(wanted)}, {expected}…"
                raise errors.ReadError(what, file=self.name, expected=expected, found=found)
            answer.fill(views, wanted)

        if wanted:
            self._ask("GET", path, None, headers, (206,), read)

    def ends(self) -> tuple[Any, Any] | None:
        """Host and port of both ends, this one first, of a connection that waits."""
        return self._client.waiting(self._server)

    def close(self) -> None:
        """Closes the connections that wait."""
        self._client.close()

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
        read: Callable[[Answer], T],
    ) -> T:
        try:
            headers = {**self._headers, **headers}
            with self._client.ask(
                self._server, path, headers, self._limits, method=method, body=body
            ) as answer:
                self._answered = True
                if answer.status not in fine:
                    self._refuse(answer)
                return read(answer)
        except errors.MfloadError:
            raise
        except BROKEN as error:
            raise self._broken(error) from error

    def _refuse(self, answer: Answer) -> NoReturn:
        kind, what = _REFUSALS.get(
            answer.status, (errors.ReadError, "the peer refuses the request")
        )
        said = answer.read(1024).decode("ascii", "replace")
        if self._token is not None:
            said = said.replace(self._token, "…")  # Some servers repeat what they were sent.
        found = f"{answer.status} {errors.shown(said, 160)}".strip()
        raise kind(what, file=self.name, found=found)

    def _broken(self, error: Exception) -> errors.SourceError:
        if not self._answered and (problem := self._client.mismatch(self._server, error)):
            plain = self._server[0] == "http"
            expected = "ca_file=, the certificates of its authority" if plain else "no ca_file="
            return errors.SourceError(f"the peer {problem}", file=self.name, expected=expected)
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
