"""Seeds for tests: rows of what they hold, seeds in processes of their own, and a proxy."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

import mfload
from mfload import dtypes
from mfload.peer import transports
from mfload.peer.fragments import Held

MODEL, TRANSPORTS = "org/name", ("memory", "memfd", "http")
TOTAL = 24 << 20  # Bytes of `weights()`.
_NAMES = {row.numpy: row for row in dtypes.TABLE.values() if row.numpy is not None}


def options(*transports: str, **peer: Any) -> mfload.Options:
    """Options of a reader over these transports."""
    return mfload.Options(peer=mfload.PeerOptions(transports=transports or None, **peer))


def row(name: str, array: Any, box: Any = None, dtype: str = "") -> Held:
    """A box of an array, as a seed holds it; for a packed dtype the array counts bytes."""
    kind = dtypes.TABLE[dtype] if dtype else _NAMES[array.dtype]
    shape = array.shape
    if kind.numpy is None:
        shape = (*shape[:-1], shape[-1] * kind.elements // kind.nbytes)
    box = tuple((0, length) for length in shape) if box is None else tuple(box)
    spans = list(box)
    if kind.numpy is None:
        low, high = box[-1]
        spans[-1] = (low * kind.nbytes // kind.elements, high * kind.nbytes // kind.elements)
    part = array[tuple(slice(*span) for span in spans)]
    memory = np.frombuffer(bytearray(part.tobytes()), np.uint8)
    return Held(name, kind, shape, box, memory)


def rows(arrays: Mapping[str, Any]) -> list[Held]:
    """Whole arrays."""
    return [row(name, array) for name, array in arrays.items()]


def grid(shape: Sequence[int], cuts: Sequence[Sequence[int]]) -> list[Any]:
    """The boxes that cuts in each dim make."""
    spans = [
        list(itertools.pairwise([0, *sorted(some), length]))
        for length, some in zip(shape, cuts, strict=True)
    ]
    return list(itertools.product(*spans))


def weights(generation: int = 0, count: int = 24, side: int = 512) -> dict[str, Any]:
    """Tensors of 1 MiB, by default; each generation has other bytes everywhere."""
    one = np.arange(side * side, dtype=np.uint32).reshape(side, side)
    return {f"t{n:02}": one * 7 + 1000 * n + 1_000_003 * generation for n in range(count)}


def publish(arrays: Mapping[str, Any], **more: Any) -> Any:
    """A seed in this process; all are of one run."""
    fields = mfload.PeerOptions.__dataclass_fields__
    own = {name: more.pop(name) for name in fields if name in more}
    peer = replace(more.pop("peer", mfload.PeerOptions()), **own)
    given = {"model": MODEL, "revision": "main", "run": "one", **more}
    return mfload.publish(rows(arrays), peer=peer, **given)


class SeedProcess:
    """A seed with `weights()` in a process of its own, which takes a line at a time."""

    def __init__(self, **given: Any) -> None:
        path = os.pathsep.join([str(Path(mfload.__file__).parents[1]), *sys.path])
        self.process = subprocess.Popen(
            [sys.executable, __file__, json.dumps(given)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path},
        )
        self.url, self.pid = self._line(), self.process.pid

    def tell(self, what: str) -> str:
        """Has it do something; its answer."""
        assert self.process.stdin is not None
        self.process.stdin.write(what + "\n")
        self.process.stdin.flush()
        return self._line()

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def send(self, number: int) -> None:
        """Sends a signal, and waits until one that ends or stops it has."""
        os.kill(self.pid, number)
        if number == signal.SIGKILL:
            self.process.wait()
        elif number == signal.SIGSTOP:  # Its threads run on until the first has taken it.
            os.waitpid(self.pid, os.WUNTRACED)

    def end(self) -> int:
        """Lets it end as a program does; its exit code."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        code = self.process.wait(20)
        self.process.stdout.close()
        return code

    def __enter__(self) -> SeedProcess:
        return self

    def __exit__(self, *_: object) -> None:
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None and not stream.closed:
                stream.close()
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


def _serve(count: int = 24, side: int = 512, **more: Any) -> None:
    arrays = weights(0, count, side)
    seed = publish(arrays, **more)
    held = seed._version.data.arrays
    generation = 0
    print(seed.url, flush=True)
    for line in sys.stdin:
        what = line.strip()
        if what == "update":
            generation += 1
            seed.update(rows(weights(generation, count, side)))
            held = seed._version.data.arrays
        elif what == "write":
            for each in held:
                each[:: 64 << 10] ^= 255
        elif what == "close":
            seed.close()
        elif what == "hold":
            threading.Thread(target=_hold, daemon=True).start()
        elif what == "threads":
            names = sorted(each.name for each in threading.enumerate())
            print(json.dumps(names), flush=True)
            continue
        elif what == "connections":
            print(seed.connections, flush=True)
            continue
        elif what == "memory":
            text = Path("/proc/self/status").read_text()
            print(text.partition("VmRSS:")[2].split()[0], flush=True)
            continue
        elif what == "fork":
            child = os.fork()
            if not child:  # It keeps nothing of the seed, and ends as a program does.
                assert not sockets()
                seed.close()
                sys.exit(0)
            print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
            continue
        print("done", flush=True)


def _hold() -> None:
    """Keeps the interpreter lock six times for 0.9 s."""
    sleep = ctypes.PyDLL(None).usleep  # It does not release it.
    for _ in range(6):
        sleep(900_000)


def sockets(pid: int | str = "self") -> dict[str, str]:
    """The sockets of a process by inode: "tcp 127.0.0.1:80 listen", "unix @name listen"."""
    inodes: set[str] = set()
    for entry in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/{pid}/fd/{entry}")
            if target.startswith("socket:["):
                inodes.add(target[8:-1])
    found: dict[str, str] = {}
    for kind in ("tcp", "tcp6", "udp", "udp6"):
        for line in Path(f"/proc/{pid}/net/{kind}").read_text().splitlines()[1:]:
            parts = line.split()
            if parts[9] in inodes:
                host, _, port = parts[1].partition(":")
                state = "listen" if parts[3] == "0A" else "open"
                found[parts[9]] = f"{kind} {_host(host)}:{int(port, 16)} {state}"
    for line in Path(f"/proc/{pid}/net/unix").read_text().splitlines()[1:]:
        parts = line.split(maxsplit=7)
        if parts[6] in inodes:
            state = "listen" if int(parts[3], 16) & 0x10000 else "open"
            found[parts[6]] = f"unix {(parts[7:] or [''])[0]} {state}"
    return found


def _host(digits: str) -> str:
    raw = b"".join(bytes.fromhex(digits[n : n + 8])[::-1] for n in range(0, len(digits), 8))
    return socket.inet_ntop(socket.AF_INET if len(raw) == 4 else socket.AF_INET6, raw)


@contextlib.contextmanager
def through(
    address: str, change: Callable[[bytes, int], bytes | None]
) -> Generator[tuple[str, list[int]]]:
    """A proxy before a server: `change` gets what the server sends and the bytes before it, by
    connection, and gives what is passed on, or None to cut the connection."""
    host, _, port = address.rpartition(":")
    listener = socket.create_server(("127.0.0.1", 0))
    made: list[socket.socket] = []
    counts = [0]

    def up(near: socket.socket, far: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := near.recv(64 << 10):
                far.sendall(data)
        with contextlib.suppress(OSError):
            far.shutdown(socket.SHUT_WR)

    def down(near: socket.socket, far: socket.socket) -> None:
        done = 0
        with contextlib.suppress(OSError):
            while data := far.recv(64 << 10):
                changed = change(data, done)
                done += len(data)
                counts[0] += len(data)
                if changed is None:
                    break
                near.sendall(changed)
        for each in (near, far):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def accept() -> None:
        while True:
            try:
                near, _ = listener.accept()
            except OSError:
                return
            far = socket.create_connection((host, int(port)))
            made.extend((near, far))
            for call in (up, down):
                threading.Thread(target=call, args=(near, far), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield f"127.0.0.1:{listener.getsockname()[1]}", counts
    finally:
        with contextlib.suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        for each in made:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()


@contextlib.contextmanager
def counted(monkeypatch: Any, block: int | None = None) -> Generator[Reads]:
    """Sees each read of the ways; with `block`, they take as many bytes at once, in one thread."""
    from mfload.peer.http import HttpWay
    from mfload.peer.memfd import MemfdWay
    from mfload.peer.memory import LocalWay, MemoryWay
    from mfload.sources.base import Costs

    reads = Reads()
    with monkeypatch.context() as patch:
        for kind in (LocalWay, MemoryWay, MemfdWay, HttpWay):
            patch.setattr(kind, "read", reads.around(kind.read))
            if block is not None:
                costs = Costs(block=block, merge_gap=0, concurrency=1)
                patch.setattr(kind, "costs", _Fixed(costs), raising=False)
        yield reads


class _Fixed:
    """An attribute that stays as it is."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __get__(self, *_: object) -> Any:
        return self.value

    def __set__(self, *_: object) -> None:
        pass


class Reads:
    """What was read, (offset, bytes), and what is called once so many bytes were."""

    def __init__(self) -> None:
        self.seen: list[tuple[Any, int, int]] = []
        self.total = 0
        self._at: tuple[float, Callable[[], object]] | None = None

    def at(self, nbytes: float, call: Callable[[], object]) -> None:
        self._at = nbytes, call

    def around(self, read: Any) -> Any:
        def reading(way: Any, vector: Sequence[Any], offset: int) -> None:
            if self._at is not None and self.total >= self._at[0]:
                call, self._at = self._at[1], None
                call()
            read(way, vector, offset)
            nbytes = sum(each.nbytes for each in vector)
            self.seen.append((way, offset, nbytes))
            self.total += nbytes

        return reading


def wait_until(true: Callable[[], bool], seconds: float = 10.0) -> bool:
    """Whether something is so, in the end."""
    end = time.monotonic() + seconds
    while not (found := true()) and time.monotonic() < end:
        time.sleep(0.01)
    return found


assert set(TRANSPORTS) == set(transports.DEFAULT)

if __name__ == "__main__":
    _serve(**json.loads(sys.argv[1]))
