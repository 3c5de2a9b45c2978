"""The HTTP server of seeds and planners: a thread a connection, strict, and never held up.

Every client is a stranger: requests have a deadline as a whole and a largest size, connections are
counted, and what is malformed is answered and closed.
"""

from __future__ import annotations

import hmac
import http.server
import io
import ipaddress
import logging
import platform
import re
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

from mfload import errors
from mfload.peer.security import Tls, check_exposure, join_address, split_address
from mfload.runtime import forget_in_forks, start
from mfload.sources.timed import Timed

FIRST, IDLE = 1.0, 30.0
"""Seconds that a connection has for the head of its first and of its next request."""

MAX_BODY = 1 << 20
MAX_CONNECTIONS, MAX_STRANGERS = 256, 64
"""Connections that made a request which was let in, and others. Beyond, the one that has waited
longest for its next request gives way, and the oldest of the others."""

_BODY = 10.0  # Seconds for the body of a request.
_PIECE = 1 << 20  # Bytes of an answer that are sent at once, each within `_SENDING` seconds.
_SENDING = 30.0
_PAUSE = 0.05
_HEAD = 64 << 10  # Bytes of a request before its body.
_RANGE = re.compile(r"bytes=(\d{1,18})-(\d{1,18})")
_log = logging.getLogger("mfload.peer")


class HttpRequest(NamedTuple):
    """A request; `span` is the first byte of its Range header and the end, exclusive."""

    method: str
    path: str
    span: tuple[int, int] | None
    body: bytes
    headers: Any
    client: str


class Reply(NamedTuple):
    """An answer; `parts` are sent one after the other, and made when their turn comes."""

    status: int
    parts: Iterable[Any] = ()
    nbytes: int = 0
    kind: str = "application/json"
    headers: tuple[tuple[str, str], ...] = ()


def text(status: int, body: bytes | str, *headers: tuple[str, str]) -> Reply:
    """A short answer, of JSON."""
    data = body.encode() if isinstance(body, str) else body
    return Reply(status, (data,), len(data), headers=headers)


class Server:
    """Listens at an address in a thread, until it is closed.

    Args:
        address: "host:port"; port 0 takes a free one.
        handle: Answers a request, in the thread of its connection.
        token: What clients must send as `Authorization: Bearer …`.
        tls: Certificates; clients must have one of their own if it names an authority.

    Raises:
        UsageError: Other machines reach the address, and neither a token nor mutual TLS guards it;
            or it is taken.
    """

    def __init__(
        self,
        address: str,
        handle: Callable[[HttpRequest], Reply],
        *,
        token: str | None = None,
        tls: Tls | None = None,
        name: str = "mfload-peer",
    ) -> None:
        check_exposure(address, token, tls)
        self._handle, self._token = handle, None if token is None else f"Bearer {token}".encode()
        self._context = None if tls is None else tls.context(server=True)
        # Those that made no request yet which was let in, the oldest first, and those that did:
        # whether they wait for the next, the longest first.
        self._strangers: dict[socket.socket, None] = {}
        self._open: dict[socket.socket, bool] = {}
        self._lock = threading.Lock()
        host, port = split_address(address)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        made = type("_Listener", (_Listener,), {"address_family": family})
        try:
            self._listener: Any = made((host, port), self)
        except OSError as error:
            raise errors.UsageError(
                f"could not listen: {error.strerror}", expected="a free port", found=address
            ) from error
        self.address = join_address(host, self._listener.server_address[1])
        self._closed = False
        self._task = start(self._listener.accept, name, service=True)
        forget_in_forks(self)

    def close(self) -> None:
        """Ends listening and all connections; more than once does nothing."""
        with self._lock:  # What is open leaves before it is closed, and its number is free again.
            self._closed = True
            for each in (self._listener.socket, *self._strangers, *self._open):
                _shut(each)
        if self._task.thread is not threading.current_thread():
            self._task.join(5.0)
        self._listener.server_close()

    def forget(self) -> None:
        """Closes what the parent of this fork listens and answers with; there it stays open."""
        self._closed = True
        for each in (self._listener.socket, *self._strangers, *self._open):
            each.close()
        self._strangers, self._open = {}, {}

    @property
    def closed(self) -> bool:
        """Whether it no longer listens."""
        return self._closed

    @property
    def connections(self) -> int:
        """How many are open."""
        return len(self._strangers) + len(self._open)

    def enter(self, connection: socket.socket) -> bool:
        """Adds a connection, in place of the oldest stranger if need be; False if it is closed."""
        with self._lock:
            if self._closed:
                return False
            if len(self._strangers) >= MAX_STRANGERS:
                _shut(oldest := next(iter(self._strangers)))
                del self._strangers[oldest]
            self._strangers[connection] = None
            return True

    def works(self, connection: socket.socket) -> bool:
        """Moves one to those whose requests are let in; False if there is no place for it."""
        with self._lock:
            if connection not in self._open and len(self._open) >= MAX_CONNECTIONS:
                longest = next((each for each, waits in self._open.items() if waits), None)
                if longest is None:
                    return False
                _shut(longest)
                del self._open[longest]
            self._strangers.pop(connection, None)
            self._open[connection] = False
            return True

    def rests(self, connection: socket.socket) -> float:
        """The seconds that a connection has for its next request, for which it waits now."""
        with self._lock:
            if self._open.pop(connection, None) is None:
                return FIRST
            self._open[connection] = True
            return IDLE

    def leave(self, connection: socket.socket) -> None:
        """Forgets a connection."""
        with self._lock:
            self._strangers.pop(connection, None)
            self._open.pop(connection, None)

    def secured(self, connection: socket.socket) -> socket.socket:
        """The connection, inside TLS if there is any; to be called in its own thread."""
        connection.settimeout(_BODY)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self._context is None:
            return connection
        made = self._context.wrap_socket(
            connection, server_side=True, do_handshake_on_connect=False
        )
        with self._lock:
            there = self._strangers.pop(connection, self)
            self._strangers[made] = None
            closed = self._closed or there is self
        try:
            if closed:
                raise ConnectionAbortedError("the server is closed, or others came")
            made.do_handshake()
        except BaseException:
            self.leave(made)
            made.close()
            raise
        return made

    def admits(self, header: str | None) -> bool:
        """Whether an Authorization header has the token, compared in constant time."""
        given = (header or "").encode("latin-1", "replace")
        return self._token is None or hmac.compare_digest(given, self._token)

    def called(self, header: str | None) -> bool:
        """Whether a Host header is an address, or a name of this machine's.

        A web page may have its own name lead here, and read what neither a token nor TLS guards.
        """
        if self._token is not None or self._context is not None or header is None:
            return True
        host = header.rpartition(":")[0] if re.search(r":\d+$", header) else header
        own = "localhost", platform.node(), split_address(self.address)[0]
        if host.lower() in map(str.lower, own):
            return True
        try:
            return bool(ipaddress.ip_address(host.strip("[]").partition("%")[0]))
        except ValueError:
            return False

    def answer(self, request: HttpRequest) -> Reply:
        """The answer to a request; what fails unexpectedly is logged, not sent."""
        try:
            return self._handle(request)
        except Exception:  # noqa: BLE001 - one request must not end the server
            _log.exception("a request failed: %s %s", request.method, errors.shown(request.path))
            return text(500, '{"error": "internal error"}')


def _shut(connection: socket.socket) -> None:
    """Ends a connection; its thread sees that, and closes it."""
    with suppress(OSError):
        # That of TLS would let its thread send in the clear first.
        socket.socket.shutdown(connection, socket.SHUT_RDWR)


class _Listener(socketserver.TCPServer):
    allow_reuse_address = True
    request_queue_size = 1024

    def __init__(self, address: tuple[str, int], owner: Server) -> None:
        self.owner = owner
        super().__init__(address, _Connection)

    def accept(self) -> None:
        """Takes connections, until the server is closed."""
        while not self.owner.closed:
            try:
                request, client_address = self.get_request()
            except OSError:
                if not self.owner.closed:
                    time.sleep(_PAUSE)  # No descriptors are left, or the client is gone already.
                continue
            self.process_request(request, client_address)

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self.owner.enter(request):
            self.shutdown_request(request)
            return
        try:
            start(partial(self._serve, request, client_address), "mfload-connection", service=True)
        except RuntimeError:  # The system gives no more threads.
            self.owner.leave(request)
            self.shutdown_request(request)

    def _serve(self, request: Any, client_address: Any) -> None:
        try:
            self.finish_request(request, client_address)
        except Exception:  # noqa: BLE001 - such as that the client is gone
            self.handle_error(request, client_address)
        finally:
            self.shutdown_request(request)
            self.owner.leave(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        _log.debug("a connection from %s broke off", client_address, exc_info=True)


class _Connection(http.server.BaseHTTPRequestHandler):
    server: Any
    protocol_version = default_request_version = "HTTP/1.1"
    server_version, sys_version = "mfload", ""
    error_message_format, error_content_type = '{"error": "%(code)d"}', "application/json"

    def setup(self) -> None:
        self.request = self.server.owner.secured(self.request)
        super().setup()
        self._timed = Timed(self.connection)
        self.rfile = io.BufferedReader(self._timed, _HEAD)

    def finish(self) -> None:
        super().finish()
        self.server.owner.leave(self.request)
        with suppress(OSError):
            self.request.close()

    def handle_one_request(self) -> None:
        seconds = self.server.owner.rests(self.connection)
        self._timed.allow(seconds, 2 * _HEAD)  # What was read ahead is among it.
        try:
            super().handle_one_request()
        except BufferError:
            self.requestline, self.request_version, self.command = "", "HTTP/1.1", ""
            self.send_error(431)

    def parse_request(self) -> bool:
        fine = super().parse_request()
        # A body of unknown length would be read as the next request.
        lengths = self.headers.get_all("Content-Length", ()) if fine else ()
        if fine and (
            "Transfer-Encoding" in self.headers or self.headers.defects or len(lengths) > 1
        ):
            self.send_error(400)
            fine = False
        return fine

    def _serve(self) -> None:
        owner, headers = self.server.owner, self.headers
        if not owner.called(headers.get("Host")):
            self.close_connection = True
            self._send(text(421, '{"error": "this is another host"}'))
            return
        length = headers.get("Content-Length", "0")
        if not re.fullmatch(r"[0-9]{1,9}", length) or int(length) > MAX_BODY:
            self.close_connection = True
            self._send(text(413, '{"error": "the body is too large"}'))
            return
        admitted, parts, left = owner.admits(headers.get("Authorization")), [], int(length)
        self._timed.allow(_BODY, left)
        while left and (part := self.rfile.read1(left)):
            left -= len(part)
            if admitted:  # Of strangers nothing is kept.
                parts.append(part)
        if left:
            self.close_connection = True
            return
        if not admitted:
            self.close_connection = True
            self._send(text(401, '{"error": "a token is needed"}', ("WWW-Authenticate", "Bearer")))
            return
        if not owner.works(self.connection):
            self.close_connection = True
            self._send(text(503, '{"error": "busy"}'))
            return
        body = b"".join(parts)
        match = _RANGE.fullmatch(headers.get("Range", ""))
        span = (int(match[1]), int(match[2]) + 1) if match else None
        if "Range" in headers and (span is None or span[0] >= span[1]):
            self._send(text(416, '{"error": "the range is malformed"}'))
            return
        client = str(self.client_address[0])
        self._send(owner.answer(HttpRequest(self.command, self.path, span, body, headers, client)))

    do_GET = do_PUT = do_POST = do_DELETE = _serve

    def _send(self, reply: Reply) -> None:
        self.connection.settimeout(_SENDING)
        self.send_response(reply.status)
        self.send_header("Content-Type", reply.kind)
        self.send_header("Content-Length", str(reply.nbytes))
        for name, value in reply.headers:
            self.send_header(name, value)
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        for part in reply.parts:
            view = memoryview(part)
            for at in range(0, view.nbytes, _PIECE):
                self.connection.sendall(view[at : at + _PIECE])

    def log_message(self, format: str, *args: Any) -> None:
        _log.debug("%s: " + format, self.client_address[0], *args)

    def version_string(self) -> str:
        return self.server_version
