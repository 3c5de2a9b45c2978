"""Ways to get arrays, or just bytes, into a file; each measured in a process of its own."""

from __future__ import annotations

import mmap
import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.memory import SPAN, fresh_pages
from benchmarks.tasks import Found, Job, Task

_BLOCK = 4 << 20
_PAGE = mmap.PAGESIZE

LABELS = {
    "pwrite": "pwrite, 1 thread, left to the page cache",
    "pwrite-fsync": "pwrite, 1 thread, fsync",
    "direct-fsync": "O_DIRECT, 4 threads, fsync",
    "mfload-numpy": "mfload.save, numpy",
    "mfload-torch": "mfload.save, torch",
    "safetensors-numpy-fsync": "safetensors.numpy.save_file, then fsync",
    "safetensors-torch-fsync": "safetensors.torch.save_file, then fsync",
    "safetensors-numpy": "safetensors.numpy.save_file, left to the page cache",
    "safetensors-torch": "safetensors.torch.save_file, left to the page cache",
}
"""Every task, in the order of the tables."""
ON_DISK = tuple(name for name in LABELS if name.endswith("fsync") or name.startswith("mfload"))
"""What returns when the bytes are on the disk."""
FLOORS = ("pwrite", "pwrite-fsync", "direct-fsync")
"""What knows no tensors: the bytes lie ready in one piece, and on a page."""


def _target(job: Job) -> str:
    return str(Path(job["files"][0]).parent / f"written-{os.getpid()}.safetensors")


def _fsync(path: str) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


class _Saving:
    """Saves arrays that are in the framework's own memory before the clock starts.

    Args:
        framework: Whose.
        save: Saves them to a path.
    """

    def __init__(self, framework: Any, save: Callable[[dict[str, Any], str], object]) -> None:
        self._framework, self._save = framework, save
        self._arrays: dict[str, Any] | None = None
        self._found: dict[str, Any] = {}

    def prepare(self, job: Job) -> None:
        """Load what is to be saved."""
        import mfload

        loaded = mfload.load(job["files"], framework=self._framework)
        # Copies: as a framework lays its arrays out, not as mfload does.
        own = "copy" if self._framework == "numpy" else "clone"
        self._arrays = {name: getattr(array, own)() for name, array in loaded.items()}
        del loaded
        os.sync()

    def run(self, job: Job) -> str:
        """Save it."""
        if self._arrays is None:  # The tiny one, before anything is prepared.
            self.prepare(job)
        assert self._arrays is not None
        path = _target(job)
        self._save(self._arrays, path)
        return path

    def find(self, path: str) -> Found:
        """Read the file back; the sums of its pages must be the checkpoint's."""
        import mfload

        self._found = mfload.load(path, framework="numpy")
        os.unlink(path)
        self._arrays = None
        spans = [SPAN["numpy"](array) for array in self._found.values()]
        return Found(None, spans, len(self._found))


class _Writing:
    """Writes as many bytes as the tensors have, from one stretch of memory.

    Args:
        threads: How many write.
        direct: Whether past the page cache.
        fsync: Whether it waits for the disk.
    """

    def __init__(self, threads: int, *, direct: bool, fsync: bool) -> None:
        self._threads, self._direct, self._fsync = threads, direct, fsync
        self._memory: Any = None

    def prepare(self, job: Job) -> None:
        """Fill the memory with numbers that nothing on the way can compress."""
        nbytes = -(-job["nbytes"] // _PAGE) * _PAGE
        memory, first = fresh_pages(nbytes)
        whole = np.frombuffer(memory, np.uint8)[first : first + nbytes]
        for at in range(0, nbytes, 64 << 20):
            part = whole[at : at + (64 << 20)]
            part[:] = np.frombuffer(np.random.default_rng(at).bytes(part.size), np.uint8)
        self._memory = whole
        os.sync()

    def run(self, job: Job) -> tuple[str, int]:
        """Write it."""
        if self._memory is None:
            self.prepare(job)
        assert self._memory is not None
        whole = memoryview(self._memory)
        path = _target(job)
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | (os.O_DIRECT if self._direct else 0)
        fd = os.open(path, flags)
        try:
            if self._direct:
                os.posix_fallocate(fd, 0, len(whole))
            work = deque(range(0, len(whole), _BLOCK))

            def drain(_: int) -> None:
                while True:
                    try:
                        at = work.popleft()
                    except IndexError:
                        return
                    while at < len(whole):
                        at += os.pwrite(fd, whole[at : (at // _BLOCK + 1) * _BLOCK], at)
                        if at % _BLOCK == 0:
                            break

            with ThreadPoolExecutor(self._threads) as pool:
                list(pool.map(drain, range(self._threads)))
            if self._fsync:
                os.fsync(fd)
        finally:
            os.close(fd)
        return path, len(whole)

    def find(self, made: tuple[str, int]) -> Found:
        """Look at the size."""
        path, nbytes = made
        found = os.path.getsize(path)
        os.unlink(path)
        self._memory = None
        if found != nbytes:
            raise RuntimeError(f"{found} bytes of {nbytes} were written")
        return Found(None, [])


def _mfload(arrays: dict[str, Any], path: str) -> object:
    import mfload

    return mfload.save(arrays, path)


def _safetensors(framework: str, *, fsync: bool) -> Callable[[dict[str, Any], str], object]:
    save_file = import_module(f"safetensors.{framework}").save_file

    def save(arrays: dict[str, Any], path: str) -> None:
        save_file(arrays, path)
        if fsync:
            _fsync(path)

    return save


def find(name: str) -> Task:
    """The task of a name."""
    library, _, rest = name.partition("-")
    made: _Saving | _Writing
    if library == "pwrite":
        made = _Writing(1, direct=False, fsync=rest == "fsync")
    elif library == "direct":
        made = _Writing(4, direct=True, fsync=True)
    elif library == "mfload":
        made = _Saving(rest, _mfload)
    else:
        framework, _, fsync = rest.partition("-")
        made = _Saving(framework, _safetensors(framework, fsync=fsync == "fsync"))
    return Task(made.run, made.find, made.prepare)
