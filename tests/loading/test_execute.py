"""Running plans: one failure stops all, Ctrl-C drains, and nothing is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import samples
import watch

import mfload
from mfload import errors
from mfload.frameworks.base import Lent
from mfload.frameworks.numpy_adapter import NumpyAdapter
from mfload.io import buffers, engine, probes
from mfload.loading import allocate
from mfload.planning import blocks, layout
from mfload.planning.plan import Plan
from mfload.runtime import Deadline
from mfload.sources import local

MODEL = samples.model()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return samples.save(tmp_path / "model.safetensors", MODEL)


def _blocks(count: int) -> list[blocks.Block]:
    return [blocks.Block(n % 2, n, 1, ()) for n in range(count)]


class _Reader:
    """Notes what it was given; fails where told to."""

    open = 0

    def __init__(self, fail_at: int = -1, seconds: float = 0) -> None:
        self.filled: list[int] = []
        self._fail_at = fail_at
        self._seconds = seconds
        _Reader.open += 1

    def fill(self, block: blocks.Block, memory: list[Any], slot: Any) -> None:
        time.sleep(self._seconds)
        if block.offset == self._fail_at:
            raise ValueError(block.offset)
        self.filled.append(block.offset)

    def close(self) -> None:
        _Reader.open -= 1


def test_one_failure_stops_the_other_workers() -> None:
    made: list[_Reader] = []

    def open_reader(_: int) -> _Reader:
        made.append(_Reader(fail_at=3, seconds=0.005))
        return made[-1]

    made_engine = watch.engine(_blocks(500), open_reader, 4)
    with pytest.raises(ValueError, match="3"):
        made_engine.run(Deadline(None))
    assert made_engine.block is not None
    assert made_engine.block.offset == 3
    assert sum(len(reader.filled) for reader in made) < 50
    assert _Reader.open == 0
    assert [t for t in threading.enumerate() if t.name == "mfload-reader"] == []


def test_every_block_is_filled_once_and_reported_once() -> None:
    made: list[_Reader] = []

    def open_reader(_: int) -> _Reader:
        made.append(_Reader())
        return made[-1]

    told: list[int] = []
    watch.engine(_blocks(1000), open_reader, 3).run(Deadline(None), told.append)
    assert sum(told) == 1000
    assert sorted(n for reader in made for n in reader.filled) == list(range(1000))
    assert _Reader.open == 0


def test_the_block_that_is_waited_for_is_known_when_the_time_is_up() -> None:
    go = threading.Event()

    def work(share: engine.Share) -> None:
        for block in share:
            if block.offset == 2:
                go.wait(20)
            share.done(block)

    made = engine.Engine([(_blocks(3), work, 1), ([], work, 1)])
    with pytest.raises(errors.LoadTimeoutError):
        made.run(Deadline(0.2))
    assert made.block is not None
    assert made.block.offset == 2
    go.set()
    assert watch.wait_for(lambda: not watch.readers())


def test_a_reader_that_will_not_open_is_an_error() -> None:
    def refuse(number: int) -> Any:
        raise PermissionError(number)

    with pytest.raises(PermissionError):
        watch.engine(_blocks(10), refuse, 2).run(Deadline(None))


@pytest.mark.parametrize("some", [0, 1])
def test_where_no_thread_can_be_had_the_work_is_done(
    path: Path, monkeypatch: pytest.MonkeyPatch, some: int
) -> None:
    real = threading.Thread.start
    left = some

    def start(thread: threading.Thread) -> None:
        nonlocal left
        if left == 0:
            raise RuntimeError("can't start new thread")
        left -= 1
        real(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    samples.assert_same(
        mfload.load(path, framework="numpy", options=mfload.Options(threads=4)), MODEL
    )


def test_time_runs_out_though_bytes_keep_coming(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = samples.save(tmp_path / "a.safetensors", {"a": np.zeros(24 << 20, np.uint8)})
    small = blocks.Costs(block=1 << 20)
    monkeypatch.setattr("mfload.sources.local.LocalFile.costs", small)
    seen, read = list[int](), local.OpenFile.read

    def slow(self: Any, vector: Any, *args: Any) -> int:
        time.sleep(0.1 if vector[0].nbytes >= 1 << 20 else 0)
        return read(self, vector, *args)

    monkeypatch.setattr(local.OpenFile, "read", slow)
    with pytest.raises(errors.LoadTimeoutError) as info:
        mfload.load(
            path,
            framework="numpy",
            progress=lambda done, _: seen.append(done),
            options=mfload.Options(timeout=0.5, engine="pread", threads=2),
        )
    assert 2 < len(seen) < 20
    assert info.value.file == os.fspath(path)
    for thread in threading.enumerate():
        if thread.name == "mfload-reader":
            thread.join(10)


def test_an_error_of_the_callback_is_the_callers(path: Path) -> None:
    def fail(done: int, total: int) -> None:
        raise ZeroDivisionError(done, total)

    for threads in (1, 3):
        with pytest.raises(ZeroDivisionError):
            mfload.load(
                path, framework="numpy", progress=fail, options=mfload.Options(threads=threads)
            )
        assert [t for t in threading.enumerate() if t.name == "mfload-reader"] == []
        assert mfload.live_bytes() == 0


def _plan(nbytes: int) -> Plan:
    return Plan((), (layout.BufferSpec(nbytes),), (), 0)


def test_a_load_that_does_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "memory_room", lambda: (100 << 20, "test machine"))
    allocate.check_host(100 << 20)
    with pytest.raises(errors.MemoryLimitError, match="test machine") as info:
        allocate.check_host((100 << 20) + 1)
    assert info.value.found == f"{100 << 20} bytes free"
    # Little loads are not worth the question, and maps take no memory.
    monkeypatch.setattr(probes, "memory_room", lambda: (0, "test machine"))
    allocate.check_host((16 << 20) - 1)
    assert Plan((), (layout.BufferSpec(1 << 40, 0),), (), 0).buffer_bytes == 0
    monkeypatch.setattr(probes, "memory_room", lambda: None)
    allocate.check_host(1 << 40)


def test_lent_memory_is_used_as_it_is() -> None:
    lent = np.zeros(10, np.uint8)
    plan = Plan((), (layout.BufferSpec(5), layout.BufferSpec(10)), (), 0)
    memory = allocate.allocate(plan, [], NumpyAdapter(), {1: Lent(lent, lent)}, {})
    assert memory[1] is lent
    assert memory[0].size == buffers.live_bytes() == 5


INTERRUPTED = """
    import gc, os, signal, sys, threading, time
    import mfload
    from mfload.planning import blocks
    import mfload.sources.local

    path, threads, timeout, progress = sys.argv[1], *map(int, sys.argv[2:])
    mfload.sources.local.LocalFile.costs = blocks.Costs(block=64 << 10)
    real = os.preadv
    reads = 0

    def slow(*args):
        global reads
        reads += 1
        try:
            if reads == 3:
                print("reading", flush=True)
            time.sleep(0.1)
            return real(*args)
        finally:
            del args  # As the system call, which holds nothing when it is over.

    def load(timeout=None):
        shown = (lambda done, total: None) if progress else False
        return mfload.load(path, framework="numpy", progress=shown, options=mfload.Options(
            threads=threads or None, timeout=timeout or None, engine="pread"))

    before = sorted(os.listdir("/proc/self/fd"))
    os.preadv = slow
    gc.disable()
    try:
        load(timeout)
    except KeyboardInterrupt as error:
        assert mfload.live_bytes() == 0, mfload.live_bytes()
        assert threading.active_count() == 1, threading.enumerate()
    else:
        sys.exit("not interrupted")
    assert sorted(os.listdir("/proc/self/fd")) == before
    assert reads < 15, reads
    os.preadv = real
    assert len(load()) == 10
    print("done", flush=True)
"""


@pytest.mark.parametrize(
    ("threads", "timeout", "progress"), [(0, 0, 0), (1, 0, 0), (1, 0, 1), (3, 0, 1), (2, 60, 0)]
)
def test_ctrl_c_drains_and_the_next_load_works(
    path: Path, threads: int, timeout: int, progress: int
) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(INTERRUPTED), os.fspath(path),
         str(threads), str(timeout), str(progress)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert child.stdout is not None
    try:
        assert child.stdout.readline() == "reading\n"
        child.send_signal(signal.SIGINT)
        out, err = child.communicate(timeout=60)
    finally:
        child.kill()
        child.communicate()
    assert (child.returncode, out, err) == (0, "done\n", "")


@pytest.mark.parametrize(
    ("sizes", "options", "expected"),
    [
        ([1 << 10], {}, 1),
        ([3 << 20], {}, 2),
        ([3 << 20], {"threads": 1}, 1),
        ([3 << 20] * 9, {"threads": 2, "max_host_overhead": 1 << 20}, 2),
        ([1 << 10], {"engine": "mmap"}, 1),
        ([1 << 10], {"timeout": 60}, 1),
    ],
)
def test_plan_and_report_tell_how_many_threads_read(
    tmp_path: Path, sizes: list[int], options: Any, expected: int
) -> None:
    arrays = {f"t{n}": np.zeros(size, np.uint8) for n, size in enumerate(sizes)}
    path, report = samples.save(tmp_path / "a.safetensors", arrays), mfload.Report()
    how = mfload.Options(**{"threads": 4} | options)
    mfload.load(path, "numpy", report=report, options=how)
    seen = {span.thread for span in report.timeline if "reader" in span.thread}
    assert len(seen) <= report.threads == mfload.plan(path, options=how).threads == expected
