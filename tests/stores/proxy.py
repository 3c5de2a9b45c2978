"""A proxy in front of an HTTP server on loopback, which delays, slows and breaks what passes.

    with proxying(server.port, delay=0.02) as proxy:
        proxy.plan(stall(at=1000), first=8 << 20)
        mfload.load(proxy.url("/model.safetensors"), "numpy")
    proxy.requests, proxy.connections, proxy.sent

Clients use it as the server itself: the Host header passes unchanged, so that signatures hold. For
a process of its own: `python tests/stores/proxy.py PORT [--delay S] [--rate BYTES]`, which prints
its port.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import re
import socket
import threading
import zlib
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field

_CHUNK = 256 << 10
_LONGEST_HEAD = 64 << 10


@dataclass
class Request:
    """What a client asks for."""

    method: str
    path: str  # With the query.
    headers: dict[str, str]  # By names in lower case.
    connection: int

    @property
    def first(self) -> int | None:
        """The first byte of the range; None if there is no range."""
        found = re.match(r"bytes=(\d+)-", self.headers.get("range", ""))
        return int(found[1]) if found else None


@dataclass
class Exchange:
    """A request, the head of the server's answer, and what moves the body."""

    request: Request
    proxy: Proxy
    status: str  # Such as `206 Partial Content`.
    headers: dict[str, str]  # Of the answer, by names as they came.
    server: asyncio.StreamReader
    client: asyncio.StreamWriter

    @property
    def length(self) -> int:
        """Bytes of the body."""
        return next((int(v) for k, v in self.headers.items() if k.lower() == "content-length"), 0)

    def put(self, name: str, value: str | None) -> None:
        """Changes a header of the answer, or takes it out."""
        for known in [each for each in self.headers if each.lower() == name.lower()]:
            del self.headers[known]
        if value is not None:
            self.headers[name] = value

    def head(self) -> None:
        """Sends the head of the answer."""
        lines = [f"HTTP/1.1 {self.status}", *(f"{k}: {v}" for k, v in self.headers.items())]
        self.client.write(("\r\n".join(lines) + "\r\n\r\n").encode("latin-1"))

    async def relay(self, nbytes: int) -> None:
        """Sends so many bytes of the server's body, at the proxy's rate."""
        rate = self.proxy.rate
        chunk = min(_CHUNK, max(1, int(rate / 50))) if rate else _CHUNK
        loop = asyncio.get_running_loop()
        begun, came = loop.time(), 0
        while came < nbytes:
            data = await self.server.read(min(chunk, nbytes - came))
            if not data:
                raise ConnectionError("the server's body ended")
            came += len(data)
            self.client.write(data)
            await self.client.drain()
            self.proxy.sent += len(data)
            if rate:
                await asyncio.sleep(max(0.0, begun + came / rate - loop.time()))

    def abort(self) -> None:
        """Resets the client's connection."""
        made = self.client.get_extra_info("socket")
        made.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        self.client.transport.abort()
        raise ConnectionError("reset on purpose")


Fault = Callable[[Exchange], Awaitable[None]]
"""Answers in place of the proxy; raises ConnectionError to close the client's connection."""


@dataclass
class _Planned:
    fault: Fault
    first: int | None
    times: int
    path: str


@dataclass
class Proxy:
    """What passes and how; counts what has passed."""

    port: int = 0
    delay: float = 0.0  # Seconds that an answer waits for.
    rate: float | None = None  # Bytes a second of a connection.
    requests: list[Request] = field(default_factory=list)
    connections: int = 0
    sent: int = 0  # Bytes of bodies.
    planned: list[_Planned] = field(default_factory=list)
    # Says what is answered, such as `501 Not Implemented`, to what the server is not to see.
    instead: Callable[[Request], str | None] = lambda _: None

    def url(self, path: str) -> str:
        """The URL of a path of the server, through the proxy."""
        return f"http://127.0.0.1:{self.port}{path}"

    def plan(
        self, fault: Fault, *, first: int | None = None, times: int = 1, path: str = ""
    ) -> None:
        """Has a fault befall requests: whose range begins at `first`, whose path has `path`."""
        self.planned.append(_Planned(fault, first, times, path))

    def reset(self) -> None:
        """Forgets what has passed, and what is planned."""
        self.requests, self.connections, self.sent, self.planned = [], 0, 0, []

    def fault_of(self, request: Request) -> Fault | None:
        """The fault that befalls a request."""
        for each in self.planned:
            if each.times and each.first in (None, request.first) and each.path in request.path:
                each.times -= 1
                return each.fault
        return None


def stall(at: int = 0, seconds: float = 60.0) -> Fault:
    """Sends so many bytes of the body, and then nothing for a while; the rest follows."""

    async def fault(exchange: Exchange) -> None:
        exchange.head()
        await exchange.relay(min(at, exchange.length))
        await asyncio.sleep(seconds)
        await exchange.relay(exchange.length - min(at, exchange.length))

    return fault


def silence(seconds: float = 60.0) -> Fault:
    """Not even the head comes, for a while."""

    async def fault(exchange: Exchange) -> None:
        await asyncio.sleep(seconds)
        raise ConnectionError("silent on purpose")

    return fault


def trickle(rate: float) -> Fault:
    """Sends the body at so many bytes a second."""

    async def fault(exchange: Exchange) -> None:
        exchange.head()
        for _ in range(exchange.length):
            await exchange.relay(1)
            await asyncio.sleep(1 / rate)

    return fault


def reset(at: int = 0) -> Fault:
    """Resets the connection after so many bytes of the body."""

    async def fault(exchange: Exchange) -> None:
        exchange.head()
        await exchange.relay(min(at, exchange.length))
        exchange.abort()

    return fault


def truncated(at: int = 0) -> Fault:
    """Closes the connection after so many bytes of the body."""

    async def fault(exchange: Exchange) -> None:
        exchange.head()
        await exchange.relay(min(at, exchange.length))
        raise ConnectionError("cut on purpose")

    return fault


def wrong_length(by: int) -> Fault:
    """Says another length than the range has, and sends so many bytes."""

    async def fault(exchange: Exchange) -> None:
        whole = exchange.length
        exchange.put("Content-Length", str(max(0, whole + by)))
        exchange.head()
        await exchange.relay(max(0, min(whole, whole + by)))
        exchange.client.write(bytes(max(0, by)))
        raise ConnectionError("the server's body is left")

    return fault


def refuse(status: str = "503 Service Unavailable", **headers: str) -> Fault:
    """Another status, without a body: 500, 503, 429, with `Retry_After` and others."""

    async def fault(exchange: Exchange) -> None:
        more = {name.replace("_", "-"): value for name, value in headers.items()}
        exchange.status, exchange.headers = status, {"Content-Length": "0"} | more
        exchange.head()
        await exchange.client.drain()
        raise ConnectionError("the server's body is left")

    return fault


def redirect(to: str) -> Fault:
    """To the same path and query below another URL."""

    async def fault(exchange: Exchange) -> None:
        await refuse("307 Temporary Redirect", Location=to + exchange.request.path)(exchange)

    return fault


async def gzip(exchange: Exchange) -> None:
    """Sends the body compressed, which was not asked for."""
    packer = zlib.compressobj(1, wbits=31)
    body = packer.compress(await exchange.server.readexactly(exchange.length)) + packer.flush()
    exchange.put("Content-Length", str(len(body)))
    exchange.put("Content-Encoding", "gzip")
    exchange.head()
    exchange.client.write(body)


def changed(name: str, value: str | None) -> Fault:
    """Another header, or none, beside the right body."""

    async def fault(exchange: Exchange) -> None:
        exchange.put(name, value)
        exchange.head()
        await exchange.relay(exchange.length)

    return fault


def midway(call: Callable[[], object], at: int = 0) -> Fault:
    """Calls a function, such as one that replaces the object, after so many bytes of the body."""

    async def fault(exchange: Exchange) -> None:
        exchange.head()
        await exchange.relay(min(at, exchange.length))
        await asyncio.to_thread(call)
        await exchange.relay(exchange.length - min(at, exchange.length))

    return fault


async def _read_head(reader: asyncio.StreamReader) -> tuple[str, dict[str, str]]:
    """The first line, and the headers by their names as they came."""
    start = await reader.readexactly(1)
    if not start.isalpha():
        raise ConnectionError("this is TLS")
    text = (start + await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    first, *lines = text[:-4].split("\r\n")
    return first, {k.strip(): v.strip() for k, _, v in (line.partition(":") for line in lines)}


async def _pass_chunks(server: asyncio.StreamReader, client: asyncio.StreamWriter) -> None:
    while True:
        line = await server.readuntil(b"\r\n")
        client.write(line)
        size = int(line.split(b";")[0], 16)
        client.write(await server.readexactly(size + 2))
        await client.drain()
        if not size:
            return


async def _pass_body(
    request: Request, client: asyncio.StreamReader, to: asyncio.StreamWriter
) -> None:
    if "chunked" in request.headers.get("transfer-encoding", ""):
        return await _pass_chunks(client, to)
    left = int(request.headers.get("content-length", 0))
    while left:
        data = await client.read(min(_CHUNK, left))
        if not data:
            raise ConnectionError("the client's body ended")
        left -= len(data)
        to.write(data)
        await to.drain()


async def _exchange(
    proxy: Proxy,
    number: int,
    client: tuple[asyncio.StreamReader, asyncio.StreamWriter],
    server: tuple[asyncio.StreamReader, asyncio.StreamWriter],
) -> None:
    line, headers = await _read_head(client[0])
    method, path, _ = line.split(" ", 2)
    request = Request(method, path, {k.lower(): v for k, v in headers.items()}, number)
    proxy.requests.append(request)
    if (status := proxy.instead(request)) is not None:
        await client[0].readexactly(int(request.headers.get("content-length", 0)))
        client[1].write(f"HTTP/1.1 {status}\r\nContent-Length: 0\r\n\r\n".encode())
        await client[1].drain()
        return
    lines = [line, *(f"{k}: {v}" for k, v in headers.items())]
    server[1].write(("\r\n".join(lines) + "\r\n\r\n").encode("latin-1"))
    await _pass_body(request, client[0], server[1])
    if proxy.delay:
        await asyncio.sleep(proxy.delay)
    line, headers = await _read_head(server[0])
    while line.split(" ")[1] == "100":
        client[1].write(f"{line}\r\n\r\n".encode("latin-1"))
        line, headers = await _read_head(server[0])
    exchange = Exchange(request, proxy, line.partition(" ")[2], headers, server[0], client[1])
    fault = proxy.fault_of(request)
    if fault is not None:
        await fault(exchange)
    else:
        exchange.head()
        if any(k.lower() == "transfer-encoding" for k in headers):
            await _pass_chunks(server[0], client[1])
        elif method != "HEAD":
            await exchange.relay(exchange.length)
    await client[1].drain()
    if any((k.lower(), v.lower()) == ("connection", "close") for k, v in headers.items()):
        raise ConnectionError("the server closes")


async def _serve(
    proxy: Proxy, target: int, ready: Callable[[], object], end: asyncio.Event
) -> None:
    tasks = set[asyncio.Task[None]]()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks.add(task := asyncio.current_task())  # pyright: ignore - there is one
        proxy.connections += 1
        number, server = proxy.connections, None
        try:
            server = await asyncio.open_connection("127.0.0.1", target, limit=4 * _CHUNK)
            while True:
                await _exchange(proxy, number, (reader, writer), server)
        except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            tasks.discard(task)  # pyright: ignore
            writer.close()
            if server is not None:
                server[1].close()

    running = await asyncio.start_server(connected, "127.0.0.1", proxy.port, limit=4 * _CHUNK)
    proxy.port = running.sockets[0].getsockname()[1]
    ready()
    await end.wait()
    running.close()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@contextlib.contextmanager
def proxying(target: int, *, delay: float = 0.0, rate: float | None = None) -> Iterator[Proxy]:
    """A proxy to a port of loopback, in a thread, while the context lasts."""
    proxy, there = Proxy(delay=delay, rate=rate), threading.Event()
    loop, end = asyncio.new_event_loop(), asyncio.Event()

    def run() -> None:
        try:
            loop.run_until_complete(_serve(proxy, target, there.set, end))
        finally:
            loop.close()
            there.set()

    thread = threading.Thread(target=run, name="proxy", daemon=True)
    thread.start()
    there.wait(10)
    try:
        yield proxy
    finally:
        loop.call_soon_threadsafe(end.set)
        thread.join(10)


def main() -> None:
    """A proxy in a process of its own; prints its port, and ends with its standard input."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("target", type=int, help="port of the server")
    parser.add_argument("--delay", type=float, default=0.0, help="seconds a request")
    parser.add_argument("--rate", type=float, help="bytes a second of a connection")
    given = parser.parse_args()
    with proxying(given.target, delay=given.delay, rate=given.rate) as proxy:
        print(proxy.port, flush=True)
        with contextlib.suppress(EOFError):
            input()


if __name__ == "__main__":
    main()
