"""Device memory is counted as long as something refers to it."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading

import pytest
from devices.fake import FakeDevice

import mfload
from mfload.cuda import memory
from mfload.cuda.memory import DeviceBuffer
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
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_fork_while_another_thread_counts_does_not_hang() -> None:
    locked, release = threading.Event(), threading.Event()
    kept = [DeviceBuffer(FakeDevice(), 4096, 256, None)]

    def hold() -> None:
        with memory.counter._lock:
            locked.set()
            release.wait(30)

    holder = threading.Thread(target=hold)
    holder.start()
    locked.wait(10)
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(10)
        kept.clear()
        os._exit(0)
    try:
        assert os.waitpid(child, 0)[1] == 0
    finally:
        release.set()
        holder.join()


def test_buffers_may_outlive_the_module_at_exit() -> None:
    script = """
        import builtins, types
        from mfload.cuda.memory import DeviceBuffer
        device = types.SimpleNamespace(name="cuda:0")
        builtins.kept = DeviceBuffer(device, 4096, 256, None)
        cycle = [DeviceBuffer(device, 4096, 256, None)]
        cycle.append(cycle)
    """
    found = subprocess.run(
        [sys.executable, "-X", "dev", "-c", textwrap.dedent(script)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (found.returncode, found.stderr) == (0, "")
