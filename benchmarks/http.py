"""Measure a load over HTTP on loopback against one plain socket.

    python -m benchmarks.http [MiB]

A server in a process of its own sends the file with `sendfile`. In turns, the same bytes come over
one socket, over one connection of `http.client`, and through `mfload.load`. Prints seconds and CPU
seconds of the reading process.
"""

from __future__ import annotations

import http.client
import http.server
import multiprocessing
import os
import re
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

import mfload

ROUNDS = 7


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        with Path("." + self.path).open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
            first, last = (int(asked[1]), int(asked[2])) if asked else (0, size - 1)
            last = min(last, size - 1)
            self.send_response(206 if asked else 200)
            self.send_header("Content-Length", str(last - first + 1))
            self.send_header("Content-Range", f"bytes {first}-{last}/{size}")
            self.send_header("ETag", '"one"')
            self.end_headers()
            while first <= last:
                wanted = last - first + 1
                first += os.sendfile(self.connection.fileno(), file.fileno(), first, wanted)


def _serve(directory: str, told: Connection) -> None:
    os.chdir(directory)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    told.send(server.server_address[1])
    server.serve_forever()


def _plain(port: int, size: int) -> None:
    buffer: Any = np.empty(size + 4096, np.uint8)
    memory = memoryview(buffer)
    came = 0
    with socket.create_connection(("127.0.0.1", port)) as sock:
        sock.sendall(b"GET /m.safetensors HTTP/1.0\r\n\r\n")
        while got := sock.recv_into(memory[came:]):
            came += got
    assert came > size


def _client(port: int, size: int) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port)
    connection.request("GET", "/m.safetensors")
    response = connection.getresponse()
    buffer: Any = np.empty(size, np.uint8)
    assert response.readinto(memoryview(buffer)) == size
    connection.close()


def main() -> None:
    """Prints the table."""
    mebibytes = int(sys.argv[1]) if len(sys.argv) > 1 else 256
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        path = os.path.join(directory, "m.safetensors")
        mfload.save({f"w{n}": np.full(mebibytes << 16, n, np.uint8) for n in range(16)}, path)
        size = os.path.getsize(path)
        told, tells = multiprocessing.Pipe()
        context = multiprocessing.get_context("spawn")
        server = context.Process(target=_serve, args=(directory, tells), daemon=True)
        server.start()
        port = told.recv()
        url = f"http://127.0.0.1:{port}/m.safetensors"
        cases: dict[str, Callable[[], object]] = {
            "one plain socket": lambda: _plain(port, size),
            "one http.client connection": lambda: _client(port, size),
            "mfload": lambda: mfload.load(url, "numpy"),
        }
        taken: dict[str, list[tuple[float, float]]] = {name: [] for name in cases}
        for number in range(ROUNDS + 1):  # The first warms up.
            for name, call in cases.items():
                start, used = time.perf_counter(), time.process_time()
                call()
                each = time.perf_counter() - start, time.process_time() - used
                taken[name] += [each] if number else []
        print(f"{mebibytes} MiB, {ROUNDS} rounds in turns: best, median, CPU of the reader (s)")
        for name, times in taken.items():
            walls, used = zip(*times, strict=True)
            print(f"{name:28}{min(walls):8.3f}{statistics.median(walls):8.3f}{min(used):8.3f}")
        server.terminate()


if __name__ == "__main__":
    main()
