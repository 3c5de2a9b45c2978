"""A server on loopback that serves bytes by ranges, and misbehaves as it is told."""

from __future__ import annotations

import contextlib
import http.server
import re
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from mfload.sources.tls import Tls


class Asked(NamedTuple):
    """One request as it came."""

    path: str
    range: str | None
    authorization: str | None
    connection: int


@dataclass
class Server:
    """Files by path, what was asked for, and faults: each is taken by one request and used up.

    A fault is a function of the handler that returns True if it answered by itself.
    """

    files: dict[str, bytes]
    etags: dict[str, str] = field(default_factory=dict)
    asked: list[Asked] = field(default_factory=list)
    faults: deque[Callable[[Any], bool | None]] = field(default_factory=deque)
    always: Callable[[Any], bool | None] | None = None
    validator: str | None = "ETag"
    ranges: bool = True
    chunked: bool = False
    protocol: str = "HTTP/1.1"
    port: int = 0
    scheme: str = "http"

    def url(self, path: str = "/model.safetensors") -> str:
        return f"{self.scheme}://127.0.0.1:{self.port}{path}"

    def etag(self, path: str) -> str:
        return self.etags.get(path, f'"{hash(self.files[path]) & 0xFFFFFFFF:x}"')


class Handler(http.server.BaseHTTPRequestHandler):
    served: Server
    disable_nagle_algorithm = True  # Else a body waits for the client's word on the head.

    def log_message(self, *_: Any) -> None:
        pass

    def plain(self, status: int, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def span(self) -> tuple[int, int]:
        """First and last byte asked for."""
        size = len(self.served.files[self.path])
        found = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        return (int(found[1]), min(int(found[2]), size - 1)) if found else (0, size - 1)

    def head(self, status: int = 206, **changed: str | None) -> bytes:
        """Sends the head of an answer, with some headers changed; returns the body."""
        first, last = self.span()
        body = self.served.files[self.path][first : last + 1]
        headers: dict[str, str | None] = {
            "Content-Range": f"bytes {first}-{last}/{len(self.served.files[self.path])}",
            "Content-Length": str(len(body)),
        }
        if self.served.validator is not None:
            headers[self.served.validator] = self.served.etag(self.path)
        headers |= {name.replace("_", "-"): value for name, value in changed.items()}
        self.send_response(status)
        for name, value in headers.items():
            if value is not None:
                self.send_header(name, value)
        self.end_headers()
        return body

    def do_HEAD(self) -> None:  # Only for what answers without a body, or looks at `command`.
        self.do_GET()

    def do_GET(self) -> None:
        served = self.served
        self.path, _, query = self.path.partition("?")
        where = self.path + ("?" + query if query else "")
        served.asked.append(
            Asked(where, self.headers.get("Range"), self.headers.get("Authorization"), id(self))
        )
        fault = served.faults.popleft() if served.faults else served.always
        if fault is not None and fault(self):
            return
        if self.path not in served.files:
            self.plain(404)
        elif not served.files[self.path]:
            self.plain(416, Content_Range="bytes */0")
        elif not served.ranges:
            self.head(200, Content_Range=None)
            with contextlib.suppress(OSError):
                self.wfile.write(served.files[self.path])
        elif served.chunked:
            body = self.head(Content_Length=None, Transfer_Encoding="chunked")
            for at in range(0, len(body), 1000):
                part = body[at : at + 1000]
                self.wfile.write(b"%x\r\n%s\r\n" % (len(part), part))
            self.wfile.write(b"0\r\n\r\n")
        else:
            self.wfile.write(self.head())


def cut(after: int) -> Callable[[Handler], bool]:
    """Closes the connection after so many bytes of the body."""

    def fault(handler: Handler) -> bool:
        handler.wfile.write(handler.head()[:after])
        handler.close_connection = True
        return True

    return fault


def stall(seconds: float, after: int = 0) -> Callable[[Handler], bool]:
    """Sends some bytes of the body, and then nothing."""

    def fault(handler: Handler) -> bool:
        handler.wfile.write(handler.head()[:after])
        handler.wfile.flush()
        time.sleep(seconds)
        handler.close_connection = True
        return True

    return fault


def reset(handler: Handler) -> bool:
    """Resets the connection before an answer."""
    handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    handler.connection.close()
    handler.close_connection = True
    return True


def answer(status: int = 206, **headers: str | None) -> Callable[[Handler], bool]:
    """An answer with the right body and other headers."""

    def fault(handler: Handler) -> bool:
        with contextlib.suppress(OSError):
            handler.wfile.write(handler.head(status, **headers))
        return True

    return fault


def refuse(status: int, **headers: str) -> Callable[[Handler], bool]:
    """A status without a body."""

    def fault(handler: Handler) -> bool:
        handler.plain(status, **headers)
        return True

    return fault


def after(count: int, fault: Callable[[Any], bool | None]) -> Callable[[Any], bool | None]:
    """A fault that begins with the request after so many."""
    seen = [0]

    def later(handler: Handler) -> bool | None:
        seen[0] += 1
        return fault(handler) if seen[0] > count else None

    return later


def own(folder: Path, name: str) -> dict[str, Any]:
    """A certificate of the fixture `certificates` and its key, as options name them."""
    return {"cert_file": folder / f"{name}.pem", "key_file": folder / f"{name}.key"}


@contextlib.contextmanager
def serving(
    files: dict[str, bytes], tls: dict[str, Any] | None = None, **settings: Any
) -> Iterator[Server]:
    """Serves files by path while it lasts; over TLS with what `own` gives."""
    served = Server(files, **settings)

    class Bound(Handler):
        protocol_version = served.protocol

    Bound.served = served

    class Quiet(http.server.ThreadingHTTPServer):
        daemon_threads = True
        block_on_close = False

        def handle_error(self, *_: Any) -> None:
            """Clients that hang up are no news."""

    with Quiet(("127.0.0.1", 0), Bound) as running:
        served.port = running.server_address[1]
        if tls is not None:
            context = Tls(**tls).context(server=True)
            running.socket = context.wrap_socket(running.socket, server_side=True)
            served.scheme = "https"
        thread = threading.Thread(target=running.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        try:
            yield served
        finally:
            running.shutdown()
            thread.join()
