"""Buffers: aligned, counted, and gone with their last view."""

from __future__ import annotations

import gc
import mmap
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import watch

import mfload
from mfload import errors
from mfload.io import buffers
from mfload.planning.blocks import Block
from mfload.runtime import Deadline


@pytest.mark.parametrize("nbytes", [0, 1, 4095, 4096, 4097, 1 << 20, (2 << 20) - 1, 2 << 20,
                                    (2 << 20) + 1, 32 << 20, (33 << 20) + 5,
                                    (32 << 20) + 1, (64 << 20) + 4096])  # fmt: skip
def test_a_buffer_is_aligned_zeroed_and_counted(nbytes: int) -> None:
    buffer = buffers.allocate(nbytes)
    assert (buffer.shape, buffer.dtype) == ((nbytes,), np.uint8)
    assert buffer.flags.writeable
    assert not buffer.any()
    lead = buffers.PAGE if nbytes > 32 << 20 and nbytes % buffers.HUGE in (1, 4096) else 0
    unit = buffers.HUGE if nbytes >= buffers.HUGE else buffers.PAGE
    if nbytes:
        assert (buffer.ctypes.data + lead) % unit == 0
        assert buffer.ctypes.data % buffers.PAGE == 0
        buffer[-1] = 1
    assert mfload.live_bytes() == nbytes
    del buffer
    assert mfload.live_bytes() == 0


def test_the_last_view_holds_the_memory() -> None:
    buffer = buffers.allocate(10_000)
    view = buffer[5000:5008].view(np.float64)
    del buffer
    assert mfload.live_bytes() == 10_000
    view[:] = 1.5
    assert view[0] == 1.5
    del view
    assert mfload.live_bytes() == 0


def test_the_peak_is_remembered() -> None:
    buffers.peak_bytes(reset=True)
    first, second = buffers.allocate(1000), buffers.allocate(2000)
    del first
    third = buffers.allocate(500)
    assert buffers.peak_bytes() == 3000
    assert buffers.peak_bytes(reset=True) == 3000
    assert buffers.peak_bytes() == mfload.live_bytes() == 2500
    del second, third


@pytest.mark.parametrize("nbytes", [1 << 60, 1 << 62, 1 << 70])
def test_memory_that_is_not_there_is_an_error(nbytes: int) -> None:
    with pytest.raises(errors.MemoryLimitError, match="refused memory") as info:
        buffers.allocate(nbytes)
    assert str(nbytes) in str(info.value)
    assert isinstance(info.value, MemoryError)
    assert mfload.live_bytes() == 0


def test_kernels_without_huge_pages_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    class Old(mmap.mmap):
        def madvise(self, *_: int) -> None:
            raise OSError(22, "Invalid argument")

    monkeypatch.setattr(mmap, "mmap", Old)
    buffer = buffers.allocate(4 << 20)
    buffer[:] = 1
    assert buffer.ctypes.data % buffers.HUGE == 0


def test_a_slot_is_reused_and_grows() -> None:
    slot = buffers.WorkerSlot()
    first = slot.bytes(1000)
    assert slot.bytes(500).ctypes.data == first.ctypes.data
    assert mfload.live_bytes() == 1000
    del first
    assert slot.bytes(5000).size == 5000
    assert mfload.live_bytes() == 5000


def test_counting_may_be_interrupted_by_a_buffer_that_dies() -> None:
    """As when the collector, or a signal's handler, runs in the middle of it."""
    done = threading.Event()

    def work() -> None:
        buffer = buffers.allocate(100)
        with buffers.counter._lock:
            del buffer
        done.set()

    threading.Thread(target=work, daemon=True).start()
    assert done.wait(10)


def test_counting_from_several_threads_adds_up() -> None:
    def work() -> None:
        for size in range(1, 300):
            held = [buffers.allocate(size) for _ in range(3)]
            held.clear()

    workers = [threading.Thread(target=work) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert mfload.live_bytes() == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_fork_while_another_thread_counts_does_not_hang() -> None:
    locked, release = threading.Event(), threading.Event()

    def hold() -> None:
        with buffers.counter._lock:
            locked.set()
            release.wait(30)

    holder = threading.Thread(target=hold)
    holder.start()
    locked.wait(10)
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(10)
        buffers.allocate(100)
        os._exit(0)
    try:
        assert os.waitpid(child, 0)[1] == 0
    finally:
        release.set()
        holder.join()


def test_arrays_may_outlive_the_module_at_exit() -> None:
    code = """
import builtins
from mfload.io import buffers
builtins.kept = buffers.allocate(5 << 20)
cycle = [buffers.allocate(100)]
cycle.append(cycle)
"""
    found: Any = subprocess.run(
        [sys.executable, "-X", "dev", "-c", code], capture_output=True, text=True, check=False
    )
    assert (found.returncode, found.stderr) == (0, "")


def test_a_cycle_is_no_leak() -> None:
    cycle: list[Any] = [buffers.allocate(100)]
    cycle.append(cycle)
    del cycle
    gc.collect()
    assert mfload.live_bytes() == 0


def test_a_few_bytes_over_cost_no_huge_page() -> None:
    def resident() -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * buffers.PAGE

    before = resident()
    held = [buffers.allocate((32 << 20) + 64) for _ in range(4)]
    for buffer in held:
        buffer[:] = 1
    # Four huge pages are 8 MiB.
    assert resident() - before < (4 << 25) + (4 << 20)


def _forked(array: Any) -> bool:
    """Whether a child that is forked now gets the memory."""
    address = array.ctypes.data
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in (head := line.split(" ", 1)[0]) and not head.endswith(":"):
            start, stop = (int(part, 16) for part in head.split("-"))
            inside = start <= address < stop
        elif inside and line.startswith("VmFlags:"):
            return "dc" not in line.split()
    raise AssertionError("no such memory")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux alone")
def test_fork_protection_lasts_until_a_hung_reader_has_ended() -> None:
    array = buffers.allocate(1 << 20)
    go, inside = threading.Event(), threading.Event()

    class Hangs:
        def fill(self, block: Block, memory: list[Any], slot: Any) -> None:
            if block.offset:
                inside.set()
                go.wait(20)

        def close(self) -> None:
            pass

    assert _forked(array)
    blocks = [Block(0, 0, 1, ()), Block(0, 1, 1, ())]
    engine = watch.engine(blocks, lambda _: Hangs(), 2, memory=[array])
    with pytest.raises(errors.LoadTimeoutError):
        engine.run(Deadline(0.3))
    assert inside.wait(20)
    assert watch.readers()
    assert not _forked(array)
    go.set()
    assert watch.wait_for(lambda: not watch.readers())
    assert _forked(array)


def test_memory_is_asked_to_be_huge_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as the process has few maps, which are counted now and then."""
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(
        buffers, "madvise", lambda address, nbytes, _: asked.append((address, nbytes))
    )
    huge = buffers.HUGE
    for n in range(20_000):
        buffers.ask_huge(n * huge, huge)
    assert len(asked) == 20_000
    monkeypatch.setattr(buffers, "_MOST_MAPS", 1)
    for n in range(20_000, 40_000):
        buffers.ask_huge(n * huge, huge)
    assert 20_000 < len(asked) < 30_000
    monkeypatch.undo()
    for n in range(40_000, 60_000):  # There is room again.
        buffers.ask_huge(n * huge, 0)
        buffers._Asked.may((n * huge, huge))  # pyright: ignore[reportPrivateUsage]
    assert buffers._Asked.room  # pyright: ignore[reportPrivateUsage]
