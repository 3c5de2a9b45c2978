"""What `benchmarks.peers` measures: a seed with plain servers beside it, and readers.

    python -m benchmarks.peers_process seed|reader JOB

The seed prints what it offers and ends with its input; a reader prints its sample.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import ssl
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

import mfload
from mfload.bench import machine

_SHARE = 0.3  # Of the bytes, when a fault comes.


def seed(job: dict[str, Any]) -> None:
    """Publishes checkpoints with and without TLS, and serves the large one over plain sockets."""
    loaded = {name: mfload.load(job[name], "numpy") for name in ("large", "tiny", "many")}
    offers: dict[str, Any] = {"pid": os.getpid()}
    cert = mfload.PeerOptions(cert_file=job["cert"], key_file=job["key"])
    for scheme, peer in (("http", None), ("https", cert)):
        for name, each in loaded.items():
            offers[f"{scheme}-{name}"] = mfload.publish(each, model=name, peer=peer).url
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(job["cert"], job["key"])
    memory = [each.reshape(-1).view(np.uint8).data for each in loaded["large"].values()]
    for name, tls in (("socket", None), ("tls", context)):
        listener = socket.create_server(("127.0.0.1", 0))
        offers[name] = listener.getsockname()[1]
        threading.Thread(target=_send, args=(listener, tls, memory), daemon=True).start()
    print(json.dumps(offers), flush=True)
    sys.stdin.read()


def _send(
    listener: socket.socket, tls: ssl.SSLContext | None, memory: Sequence[memoryview]
) -> None:
    while True:
        connection, _ = listener.accept()
        with connection if tls is None else tls.wrap_socket(connection, server_side=True) as each:
            for part in memory:
                each.sendall(part)


def _receive(port: int, nbytes: int, ca: str | None) -> list[Any]:
    """All bytes of a plain server, in fresh memory."""
    buffer: Any = np.empty(nbytes, np.uint8)
    memory, came = memoryview(buffer), 0
    with socket.create_connection(("127.0.0.1", port)) as connection:
        if ca is not None:
            context = ssl.create_default_context(cafile=ca)
            connection = context.wrap_socket(connection, server_hostname="127.0.0.1")
        while came < nbytes:
            got = connection.recv_into(memory[came:])
            assert got, "the connection ended early"
            came += got
    return [buffer]


def _options(job: dict[str, Any]) -> mfload.Options:
    """What the name of a way asks for, such as "mfload-http-unchecked"."""
    _, way, *unchecked = job["name"].split("-")
    transport, ca = ("http", job["ca"]) if way == "https" else (way, None)
    return mfload.Options(
        peer=mfload.PeerOptions(transports=(transport,), checksums=not unchecked, ca_file=ca)
    )


def _load(job: dict[str, Any], what: str) -> list[Any]:
    """The arrays of a checkpoint, by the way of a job."""
    if job["name"] in ("files", "publish"):
        return list(mfload.load(job[what], "numpy").values())
    if job["name"] in ("socket", "tls"):
        ca = job["ca"] if job["name"] == "tls" else None
        return _receive(job["offers"][job["name"]], job["nbytes"], ca) if what == "large" else []
    scheme = "https" if job["name"].split("-")[1] == "https" else "http"
    url = job["offers"][f"{scheme}-{what}"]
    return list(mfload.load(url, "numpy", options=_options(job)).values())


def _touched(arrays: Sequence[Any]) -> int:
    """The sum of a byte of each page."""
    return sum(int(each.reshape(-1).view(np.uint8)[::4096].sum(dtype=np.int64)) for each in arrays)


def reader(job: dict[str, Any]) -> dict[str, Any]:
    """Loads the tiny checkpoint, and a larger one, or publishes that, on the clock."""
    tiny = _load(job, "tiny")
    _touched(tiny)
    given = dict[str, Any]()
    if job["name"] == "publish":
        mfload.publish({"tiny": tiny[0]}, model="tiny")
        given = mfload.load(job[job["what"]], "numpy")
    if job["primed"]:
        machine.prime((256 << 20) + job["nbytes"] * 3 // 2)
    machine.reset_peak()
    before = machine.memory_status("VmRSS")
    used, start = time.process_time(), time.perf_counter()
    arrays = list(given.values()) or _load(job, job["what"])
    if given:
        mfload.publish(given, model="many")
    _touched(arrays)
    said = {"seconds": time.perf_counter() - start, "cpu_s": time.process_time() - used}
    said["peak_over"] = machine.memory_status("VmHWM") - before - job["nbytes"]
    said["total"] = sum(int(each.reshape(-1).view(np.uint8).sum(dtype=np.int64)) for each in arrays)
    return said


class _Seen(logging.Handler):
    """When the first warning came: a fall-back begins with one."""

    at: float | None = None

    def emit(self, record: logging.LogRecord) -> None:
        if self.at is None and record.levelno >= logging.WARNING:
            self.at = time.perf_counter()


def fault(job: dict[str, Any]) -> dict[str, Any]:
    """Ends or stops the seed in the middle of a load, and waits for what follows."""
    _touched(_load(job, "tiny"))
    struck: list[float] = []
    number = getattr(signal, job["signal"])

    def strike(done: int, total: int) -> None:
        if not struck and done > _SHARE * total:
            os.kill(job["offers"]["pid"], number)
            struck.append(time.perf_counter())

    seen = _Seen()
    logging.getLogger("mfload").addHandler(seen)
    url, options = job["offers"]["http-large"], _options(job)
    fallback = job["large"] if job["fallback"] else None
    used = time.process_time()
    try:
        mfload.load(url, "numpy", options=options, progress=strike, fallback=fallback)
        ended = seen.at
    except mfload.errors.SourceError:
        ended = time.perf_counter()
    assert struck, "the load ended before the fault"
    assert ended is not None, "the fault did not end the load"
    return {"seconds": ended - struck[0], "cpu_s": time.process_time() - used}


def main() -> None:
    """Runs one of them."""
    kind, job = sys.argv[1], json.loads(sys.argv[2])
    if kind == "seed":
        seed(job)
        return
    print("\n" + json.dumps(reader(job) if kind == "reader" else fault(job)), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
