"""Device memory is counted as long as something refers to it."""

from __future__ import annotations

import gc
import os
import threading

import pytest
from devices.fake import FakeDevice

import mfload
from mfload.devices import memory
from mfload.devices.memory import DeviceBuffer
from mfload.io import buffers


def test_live_and_peak() -> None:
    one, two = FakeDevice(name="fake:0"), FakeDevice((1, 1), name="fake:1")
    memory.peak_bytes(reset=True)
    first, second = one.allocate(1000), two.allocate(24)
    assert memory.live_bytes() == 1024
    del first
    gc.collect()
    assert memory.live_bytes() == 24
    assert memory.peak_bytes() == 1024
    assert memory.peak_bytes(reset=True) == 1024
    assert memory.peak_bytes() == 24
    assert "24 bytes on fake:1 at 0x" in repr(second)


def test_memory_of_others_is_not_counted() -> None:
    owner = bytearray(100)
    lent = DeviceBuffer(FakeDevice(), 4096, 100, owner, own=False)
    assert memory.live_bytes() == 0
    assert lent.owner is owner


def test_all_memory_is_counted_together() -> None:
    kept = buffers.allocate(100), FakeDevice().allocate(1000)
    assert mfload.live_bytes() == 1100
    del kept
    gc.collect()
    assert mfload.live_bytes() == 0


def test_a_buffer_that_was_never_made_whole() -> None:
    made = DeviceBuffer.__new__(DeviceBuffer)
    del made  # pytest would tell of an error in __del__.


def test_threads() -> None:
    device = FakeDevice()

    def work() -> None:
        for _ in range(200):
            device.allocate(256)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    gc.collect()
    assert memory.live_bytes() == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_process_can_let_go() -> None:
    held = threading.Event(), threading.Event()
    kept = [FakeDevice().allocate(256)]

    def hold() -> None:
        with memory._counter._lock:
            held[0].set()
            held[1].wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    held[0].wait(60)
    child = os.fork()
    if not child:
        ended = threading.Thread(target=memory.DeviceBuffer.__del__, args=(kept[0],), daemon=True)
        ended.start()
        ended.join(10)
        os._exit(ended.is_alive())
    held[1].set()
    thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
