"""What tests of engines look at and meddle with: descriptors, threads, system calls."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import gc
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from mfload.io import engine as engines, mapped
from mfload.io.buffers import ForkProtection
from mfload.io.engine import Engine, fill, hand_on


class Read(NamedTuple):
    """One read as the kernel was asked for it."""

    path: str
    offset: int
    nbytes: int
    got: int
    direct: bool
    parts: int


def open_files() -> list[str]:
    """What this process holds open."""
    links = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    found: list[str] = []
    for link in links:
        with contextlib.suppress(OSError):
            found.append(os.readlink(link))
    return found


def readers() -> list[str]:
    """Threads of mfload that are alive."""
    return [t.name for t in threading.enumerate() if t.name.startswith("mfload")]


def wait_for(condition: Callable[[], bool], seconds: float = 10.0) -> bool:
    """Whether it came true in time."""
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.005)
    return condition()


def spy(monkeypatch: pytest.MonkeyPatch) -> list[Read]:
    """Writes down every `preadv`."""
    reads: list[Read] = []
    real = os.preadv

    def preadv(fd: int, vector: list[Any], offset: int, *flags: int) -> int:
        got = real(fd, vector, offset, *flags)
        direct = bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)
        nbytes = sum(part.nbytes for part in vector)
        path = os.readlink(f"/proc/self/fd/{fd}")
        reads.append(Read(path, offset, nbytes, got, direct, len(vector)))
        return got

    monkeypatch.setattr(os, "preadv", preadv)
    return reads


def before_read(monkeypatch: pytest.MonkeyPatch, action: Callable[[int], None]) -> None:
    """Calls `action` with 0, 1, 2 … before each read, or before each range of a map comes in."""
    lock = threading.Lock()
    count = 0
    real, real_populate = os.preadv, mapped._populate

    def act() -> None:
        nonlocal count
        with lock:
            number = count
            count += 1
        action(number)

    def preadv(*args: Any) -> int:
        try:
            act()
            return real(*args)
        finally:
            # The frame of a system call, which this stands for, holds nothing.
            del args

    def populate(*args: Any) -> None:
        try:
            act()
            real_populate(*args)
        finally:
            del args

    monkeypatch.setattr(os, "preadv", preadv)
    monkeypatch.setattr(mapped, "_populate", populate)


def told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has readers wait, after news of their bytes, until the loading thread has taken them."""
    real = engines.Share.count

    def count(share: engines.Share, *counted: int) -> None:
        real(share, *counted)
        news: Any = getattr(share._tell, "__self__", None)
        if news is not None and threading.current_thread() is not threading.main_thread():
            wait_for(lambda: news.empty() or share.stopped())

    monkeypatch.setattr(engines.Share, "count", count)


def engine(blocks: Any, open_reader: Any, threads: int, memory: Any = ()) -> Engine:
    """The engine of readers into memory that a disk writes to."""
    protection = ForkProtection(memory)
    work = functools.partial(fill, open_reader, list(memory), None, protection)
    return Engine([(blocks, work, threads)])


def handing(lots: Any, open_reader: Any, threads: int, place: Any) -> Engine:
    """The engine of readers that hand lots to a place."""
    return Engine([(lots, functools.partial(hand_on, open_reader, place), threads)])


def drop_cache(path: Path) -> None:
    """Has the kernel forget the file's pages, where it lies on a disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


@contextlib.contextmanager
def nothing_left() -> Iterator[None]:
    """No descriptor and no thread may be left that was not there before."""
    gc.collect()  # An error that a test before looked at may hold a checkpoint that is open.
    before = sorted(open_files())
    yield
    assert wait_for(lambda: not readers()), readers()
    assert sorted(open_files()) == before
