"""Loads with and without a check, and what the hash itself costs, each in a process of its own."""

from __future__ import annotations

import hashlib
import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.memory import SPAN, fresh_pages
from benchmarks.tasks import Found, Job, Task

MANIFEST = "measured.checksums.json"
"""Beside the checkpoint; of the tiny one too."""
_BLOCK = 4 << 20


def manifest_of(files: list[str]) -> str:
    """Where the manifest of a checkpoint lies."""
    return str(Path(files[0]).parent / MANIFEST)


def _hasher(name: str) -> Callable[[], Any]:
    if name == "sha256":
        return hashlib.sha256
    made: Callable[[], Any] = import_module("xxhash").xxh3_128
    return made


def _load(job: Job) -> dict[str, Any]:
    import mfload

    return mfload.load(job["path"], framework="numpy")


def _load_checked(job: Job) -> dict[str, Any]:
    import mfload

    return mfload.load(job["path"], framework="numpy", verify=manifest_of(job["files"]))


def _load_then_hash(job: Job) -> dict[str, Any]:
    """What a check costs that goes over the arrays once more, a thread a core."""
    arrays = _load(job)
    digest = _hasher("xxh3_128")

    def over(array: Any) -> bytes:
        made = digest()
        made.update(array.reshape(-1).view("u1"))
        return made.digest()

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(over, arrays.values()))
    return arrays


def _arrays(made: dict[str, Any]) -> Found:
    spans = [SPAN["numpy"](array) for array in made.values()]
    return Found(made, spans, len(made))


def _pass(threads: int, name: str, *, direct: bool = False) -> Callable[[Job], None]:
    """Read blocks into a slot a thread and hash each there, by whole blocks and no tensors."""

    def run(job: Job) -> None:
        flags = os.O_RDONLY | (os.O_DIRECT if direct else 0)
        fds = [os.open(path, flags) for path in job["files"]]
        sizes = [os.fstat(fd).st_size for fd in fds]
        work = deque(
            (fd, at) for fd, size in zip(fds, sizes, strict=True) for at in range(0, size, _BLOCK)
        )

        def drain(slot: memoryview) -> None:
            made = _hasher(name)()
            while True:
                try:
                    fd, at = work.popleft()
                except IndexError:
                    return
                made.update(slot[: os.preadv(fd, [slot], at)])

        memory, first = fresh_pages(threads * _BLOCK)
        slots = memoryview(memory)[first:]
        try:
            with ThreadPoolExecutor(threads) as pool:
                parts = [slots[n * _BLOCK : (n + 1) * _BLOCK] for n in range(threads)]
                list(pool.map(drain, parts))
        finally:
            for fd in fds:
                os.close(fd)

    return run


class _InMemory:
    """Hash bytes that are in memory before the clock starts."""

    def __init__(self, name: str, threads: int) -> None:
        self._name, self._threads = name, threads
        self._memory = memoryview(b"")

    def prepare(self, job: Job) -> None:
        """Fill the memory with as many bytes as the checkpoint has."""
        self._memory = memoryview(bytes(range(251)) * (job["nbytes"] // 251 + 1))

    def run(self, job: Job) -> None:
        """Hash it, in a part a thread."""
        del job
        part = -(-len(self._memory) // self._threads)

        def over(n: int) -> None:
            made = _hasher(self._name)()
            for at in range(n * part, min(len(self._memory), (n + 1) * part), _BLOCK):
                made.update(self._memory[at : min(at + _BLOCK, (n + 1) * part)])

        with ThreadPoolExecutor(self._threads) as pool:
            list(pool.map(over, range(self._threads)))


def _nothing(made: object) -> Found:
    return Found(made, [])


LOADS = {
    "mfload-load": _load,
    "mfload-load-verify": _load_checked,
    "load-then-hash": _load_then_hash,
}
"""The tasks that end up with arrays."""
LABELS = {
    "mfload-load": "mfload.load into numpy",
    "mfload-load-verify": "mfload.load(verify=manifest)",
    "load-then-hash": "plain load, then xxh3 over the arrays",
    "xxh3-memory-1": "xxh3_128 over memory, 1 thread",
    "xxh3-memory-all": "xxh3_128 over memory, a thread a core",
    "sha256-memory-1": "sha256 over memory, 1 thread",
    "xxh3-pass": "read and xxh3_128, one pass, a thread a core",
    "xxh3-pass-direct": "read by O_DIRECT and xxh3_128, 4 threads",
    "sha256-pass": "read and sha256, one pass, 1 thread",
}
"""Every task, in the order of the tables."""


def find(name: str) -> Task:
    """The task of a name."""
    if name in LOADS:
        return Task(LOADS[name], _arrays)
    digest = {"xxh3": "xxh3_128"}.get(name.split("-")[0], "sha256")
    every = os.cpu_count() or 1
    if "-memory" in name:
        memory = _InMemory(digest, every if name.endswith("-all") else 1)
        return Task(memory.run, _nothing, memory.prepare)
    if name == "xxh3-pass-direct":
        return Task(_pass(4, digest, direct=True), _nothing)
    return Task(_pass(every if digest == "xxh3_128" else 1, digest), _nothing)
