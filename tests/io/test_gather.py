"""Many short reads at once: each engine against `os.pread`, and what can go wrong."""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import ctypes
import errno
import gc
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from mfload import errors, runtime
from mfload.io import buffers, gather, uring
from mfload.io.gather import Gather, ReadColumns, open_gather
from mfload.sources.local import LocalFile
from mfload.sources.memory import MemorySource

if not sys.platform.startswith("linux"):
    pytest.skip("io_uring and O_DIRECT are parts of Linux", allow_module_level=True)

SIZE = 300_001  # No multiple of a block.
DATA = np.random.default_rng(0).integers(0, 256, SIZE, np.uint8).tobytes()
WAYS = [
    ("io_uring", "direct"), ("io_uring", "pread"), ("threads", "direct"),
    ("threads", "pread"),
]  # fmt: skip


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("gather") / "data"
    made.write_bytes(DATA)
    return made


@pytest.fixture(scope="module", params=WAYS, ids="-".join)
def opened(request: Any, path: Path) -> Iterator[Gather]:
    engine, files = request.param
    with open_gather([LocalFile(path), LocalFile(path)], engine=engine, files=files) as made:
        assert made.name == engine
        assert made.direct == (files == "direct")
        yield made
    gc.collect()


def _open(path: Path, **how: Any) -> Gather:
    given: dict[str, Any] = {"files": "direct", **how}
    return open_gather([LocalFile(path)], **given)


def _memory(nbytes: int) -> tuple[Any, int]:
    memory = buffers.allocate(nbytes)
    return memory, memory.ctypes.data


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.tuples(st.integers(0, 1), st.integers(0, SIZE - 1), st.integers(1, 70_000))),
    st.integers(1, 3),
    st.data(),
)
def test_reads_are_those_of_pread(
    opened: Gather, rows: list[tuple[int, int, int]], parts: int, data: Any
) -> None:
    """Of any place, length and number of parts, past the end as well."""
    unit = opened.unit
    offsets = [offset // unit * unit for _, offset, _ in rows]
    lengths = np.array(
        [[max(1, -(-nbytes // parts // unit)) * unit] * parts for *_, nbytes in rows], np.int64
    ).reshape(len(rows), parts)
    memory, start = _memory(int(lengths.sum()) + 4096)
    # Parts land in another order than they are read.
    order = data.draw(st.permutations(range(lengths.size)))
    ends = np.cumsum(lengths.ravel()[order]) if lengths.size else np.zeros(0, int)
    at = np.empty(lengths.size, np.int64)
    at[order] = ends - lengths.ravel()[order]
    address = start + at.reshape(lengths.shape)
    totals = lengths.sum(1)
    least = [min(int(n), SIZE - offset) for n, offset in zip(totals, offsets, strict=True)]
    opened.read(ReadColumns.of([n for n, *_ in rows], offsets, address, lengths, least))
    for offset, some, where, needed in zip(
        offsets, lengths.tolist(), at.reshape(lengths.shape).tolist(), least, strict=True
    ):
        got = b"".join(memory[a : a + n].tobytes() for a, n in zip(where, some, strict=True))
        assert got[:needed] == DATA[offset : offset + needed]


def test_more_reads_than_the_ring_holds(opened: Gather) -> None:
    """And long ones, which are cut."""
    unit = max(opened.unit, 64)
    count = 1000
    offsets = np.arange(count) % (SIZE // unit - 1) * unit
    memory, start = _memory(count * unit)
    opened.read(
        ReadColumns.of(np.arange(count) % 2, offsets, start + np.arange(count) * unit, unit)
    )
    wanted = b"".join(DATA[offset : offset + unit] for offset in offsets.tolist())
    assert memory.tobytes()[: len(wanted)] == wanted


def test_long_reads_are_cut(tmp_path: Path) -> None:
    """So that one read keeps the disk as busy as many; the end of the file may be short."""
    data = np.random.default_rng(1).bytes((5 << 20) + 77)
    (tmp_path / "long").write_bytes(data)
    for engine in ("io_uring", "threads"):
        with _open(tmp_path / "long", engine=engine) as opened:
            memory, start = _memory(6 << 20)
            opened.read(ReadColumns.of(0, [0], [start], 6 << 20, len(data)))
            assert memory[: len(data)].tobytes() == data
            cut = ReadColumns.of(0, [0, 4096], [start, start], [6 << 20, 10], [len(data), 5]).cut()
            assert cut.least.tolist() == [*[1 << 20] * 5, 77, 5]
            assert cut.nbytes.tolist() == [*[[1 << 20]] * 6, [10]]


def test_several_threads(opened: Gather) -> None:
    """Each with a ring of its own."""
    unit, wrong = max(opened.unit, 512), []

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        memory, start = _memory(50 * unit)
        for _ in range(10):
            offsets = rng.integers(0, SIZE // unit - 1, 50) * unit
            opened.read(ReadColumns.of(0, offsets, start + np.arange(50) * unit, unit))
            wanted = b"".join(DATA[offset : offset + unit] for offset in offsets.tolist())
            wrong.extend([seed] * (memory.tobytes()[: len(wanted)] != wanted))

    workers = [threading.Thread(target=work, args=(n,)) for n in range(6)]
    for each in workers:
        each.start()
    for each in workers:
        each.join()
    assert not wrong


def test_past_the_end(opened: Gather) -> None:
    """A file that is shorter than its header says."""
    unit = opened.unit
    offset = SIZE // unit * unit
    _, start = _memory(8192)
    with pytest.raises(errors.SourceChangedError, match="ended before"):
        opened.read(ReadColumns.of(0, [0, offset], [start, start], 4096, [4096, SIZE - offset + 1]))
    opened.read(ReadColumns.of(0, [0], [start], 4096))  # It goes on.


@pytest.mark.parametrize(("engine", "files"), WAYS, ids=map("-".join, WAYS))
@pytest.mark.parametrize("what", ["truncated", "replaced", "gone"])
def test_files_that_change(tmp_path: Path, engine: str, files: str, what: str) -> None:
    """Each read looks at its files."""
    path = tmp_path / "data"
    path.write_bytes(DATA)
    _, start = _memory(8192)
    with _open(path, engine=engine, files=files) as opened:
        opened.read(ReadColumns.of(0, [0], [start], 4096))
        if what == "truncated":
            os.truncate(path, 100)
        elif what == "replaced":
            (tmp_path / "new").write_bytes(DATA)
            os.replace(tmp_path / "new", path)
        else:
            path.unlink()
        with pytest.raises(errors.SourceChangedError) as caught:
            opened.read(ReadColumns.of(0, [0], [start], 4096))
        assert caught.value.file == str(path)


class _Faulty:
    """A ring that says other things than the kernel."""

    def __init__(self, ring: Any, change: Any) -> None:
        self._ring, self._change, self.depth = ring, change, ring.depth

    def submit(self, *given: Any) -> None:
        self._ring.submit(*given)

    def wait(self, least: int) -> Any:
        numbers, results = self._ring.wait(least)
        results = results.copy()
        self._change(numbers, results)
        return numbers, results

    def close(self) -> None:
        self._ring.close()


def _faulty(opened: Gather, change: Any) -> None:
    make: Any = opened._make
    opened._idle.clear()
    vars(opened)["_make"] = lambda: _Faulty(make(), change)


def test_one_of_many_fails(path: Path) -> None:
    """The error names the file, and the others have ended."""

    def change(numbers: Any, results: Any) -> None:
        results[numbers == 33] = -errno.EIO

    memory, start = _memory(50 * 4096)
    with _open(path, engine="io_uring") as opened:
        _faulty(opened, change)
        offsets = np.arange(50) * 4096
        with pytest.raises(errors.ReadError, match=r"Input/output error") as caught:
            opened.read(ReadColumns.of(0, offsets, start + offsets, 4096))
        assert caught.value.file == str(path)
        assert memory[49 * 4096 :].tobytes() == DATA[49 * 4096 : 50 * 4096]


@pytest.mark.parametrize("got", [0, 1, 700, 4096, 5000])
def test_short_reads_are_continued(path: Path, got: int) -> None:
    """Within any of its parts."""

    def change(numbers: Any, results: Any) -> None:
        short = np.minimum(results, got)
        for n in numbers.tolist():  # What the kernel did not write is not there.
            for at in range(2):
                first = max(0, got - 4096 * at)
                begin = start + (2 * n + at) * 4096 + first
                if first < 4096:
                    ctypes.memset(begin, 0xEE, 4096 - first)
        results[:] = short

    memory, start = _memory(20 * 4096)
    address = start + np.arange(20).reshape(10, 2) * 4096
    with _open(path) as opened:
        _faulty(opened, change)
        opened.read(ReadColumns.of(0, np.arange(10) * 8192, address, 4096))
    assert memory.tobytes() == DATA[: 20 * 4096]


def test_threads_that_fail(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first error is raised, when all have ended."""
    real, lock = os.preadv, threading.Lock()
    count = [0]

    def preadv(*given: Any) -> int:
        with lock:
            count[0] += 1
            if count[0] == 7:
                raise OSError(errno.EIO, "Input/output error")
        return real(*given)

    _, start = _memory(50 * 4096)
    with _open(path, engine="threads") as opened:
        monkeypatch.setattr(os, "preadv", preadv)
        offsets = np.arange(50) * 4096
        with pytest.raises(errors.ReadError, match=r"Input/output error"):
            opened.read(ReadColumns.of(0, offsets, start + offsets, 4096))


@pytest.mark.parametrize(("engine", "files"), WAYS, ids=map("-".join, WAYS))
def test_a_fork(path: Path, engine: str, files: str) -> None:
    """The child reads by itself, and leaves the parent's reads alone."""
    memory, start = _memory(4096)
    with _open(path, engine=engine, files=files) as opened:
        opened.read(ReadColumns.of(0, [0], [start], 4096))
        child = os.fork()
        if not child:
            code = 1
            try:
                opened.read(ReadColumns.of(0, [4096], [start], 4096))
                code = int(memory.tobytes() != DATA[4096:8192])
                opened.close()
            finally:
                os._exit(code)
        assert os.waitpid(child, 0)[1] == 0
        opened.read(ReadColumns.of(0, [8192], [start], 4096))
        assert memory.tobytes() == DATA[8192:12288]


@pytest.mark.parametrize("engine", ["io_uring", "threads"])
def test_an_interrupt(path: Path, engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """When it is raised, nothing is written to the memory any more."""
    memory, start = _memory(4096 * 70)
    offsets = np.arange(70) * 4096

    def stop(*given: Any) -> Any:
        raise KeyboardInterrupt

    with _open(path, engine=engine) as opened:
        if engine == "threads":
            monkeypatch.setattr(Gather, "_read_one", stop)
        else:
            make: Any = opened._make
            ring = make()
            opened._idle.clear()
            opened._idle.append(ring)
            wait, close = ring.wait, ring.close

            def begin(least: int) -> Any:
                wait(0)  # The kernel has them now.
                raise KeyboardInterrupt

            ring.wait = begin

            def end() -> None:
                ring.wait = wait
                close()
                memory[:] = 7

            ring.close = end
        with pytest.raises(KeyboardInterrupt):
            opened.read(ReadColumns.of(0, offsets, start + offsets, 4096))
        if engine != "threads":
            time.sleep(0.05)
            assert (memory == 7).all()
        monkeypatch.undo()
        opened.read(ReadColumns.of(0, offsets, start + offsets, 4096))
        assert memory.tobytes() == DATA[: 4096 * 70]


@pytest.mark.parametrize("lost", [False, True])
def test_an_interrupt_while_threads_start(
    path: Path, lost: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that have begun are waited for, also one of which nothing came back."""
    reading, ended = threading.Event(), threading.Event()
    real_start, real_read = runtime.Crew.start, Gather._read_one

    def start(crew: Any, call: Any) -> Any:
        if reading.is_set():
            raise KeyboardInterrupt
        made = real_start(crew, call)
        assert reading.wait(10)
        if lost:
            raise KeyboardInterrupt
        return made

    def read_one(*given: Any) -> None:
        reading.set()
        time.sleep(0.1)
        real_read(*given)
        ended.set()

    _, begin = _memory(4096 * 70)
    with _open(path, engine="threads") as opened:
        monkeypatch.setattr(runtime.Crew, "start", start)
        monkeypatch.setattr(Gather, "_read_one", read_one)
        with pytest.raises(KeyboardInterrupt):
            opened.read(ReadColumns.of(0, np.arange(70) * 4096, begin + np.arange(70) * 4096, 4096))
        assert ended.is_set()


@pytest.mark.parametrize("code", [errno.EINTR, errno.EAGAIN])
def test_calls_that_have_to_be_made_again(
    path: Path, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signal came, or the kernel is short of something for a moment."""
    memory, start = _memory(4096 * 70)
    offsets = np.arange(70) * 4096
    calls = [0]

    def refusing(real: Any) -> Any:
        def call(*given: Any) -> int:
            calls[0] += 1
            if calls[0] % 2 == 0 or calls[0] < 0:
                return real(*given)
            raise OSError(code, os.strerror(code))

        return call

    with _open(path, engine="io_uring") as opened:
        opened.read(ReadColumns.of(0, [0], [start], 4096))
        monkeypatch.setattr(uring, "_call", refusing(uring._call))
        for _ in range(5):
            memory[:] = 0
            opened.read(ReadColumns.of(0, offsets, start + offsets, 4096))
            assert memory.tobytes() == DATA[: 4096 * 70]
        assert calls[0] >= 10
        calls[0] = -1 << 30  # No more.


def test_closed_while_it_reads(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files stay open until the read has ended."""
    memory, start = _memory(4096)
    opened = _open(path)
    inside, go = threading.Event(), threading.Event()
    drive = gather._drive

    def slow(*given: Any) -> Any:
        inside.set()
        go.wait(10)
        return drive(*given)

    monkeypatch.setattr(gather, "_drive", slow)
    thread = threading.Thread(target=opened.read, args=(ReadColumns.of(0, [0], [start], 4096),))
    thread.start()
    inside.wait(10)
    opened.close()
    fd = int(opened._fds[0])
    os.fstat(fd)
    go.set()
    thread.join()
    assert memory.tobytes() == DATA[:4096]
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(fd)
    with pytest.raises(errors.UsageError, match="closed"):
        opened.read(ReadColumns.of(0, [0], [start], 4096))


def test_bytes_in_memory() -> None:
    """A source that is no file is read by threads."""
    memory, start = _memory(2000)
    source = MemorySource(DATA)
    with open_gather([source], files="auto") as opened:
        assert opened.name == "threads"
        assert "not a local file" in opened.why
        opened.read(ReadColumns.of(0, [5, 7000], [start, start + 1000], 1000))
    assert memory[:2000].tobytes() == DATA[5:1005] + DATA[7000:8000]


def test_the_system_gives_no_more_rings(path: Path) -> None:
    """A thread that comes later needs another one."""

    def refused() -> Any:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    _, start = _memory(4096)
    with _open(path, engine="io_uring") as opened:
        opened._idle.clear()
        vars(opened)["_make"] = refused
        with pytest.raises(errors.ReadError, match="Too many open files") as caught:
            opened.read(ReadColumns.of(0, [0], [start], 4096))
        assert caught.value.file == str(path)


def test_one_file_system_of_two_takes_no_o_direct(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All files are read through the page cache then, and no descriptor is left."""
    paths = [tmp_path / "one", tmp_path / "other"]
    for each in paths:
        each.write_bytes(DATA)
    real, memory = os.open, buffers.allocate(4096)

    def refusing(path: Any, flags: int, *more: Any, **named: Any) -> int:
        if flags & os.O_DIRECT and os.fspath(path) == str(paths[1]):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(path, flags, *more, **named)

    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(os, "open", refusing)
    with open_gather([LocalFile(each) for each in paths], files="direct") as opened:
        assert (opened.direct, opened.unit) == (False, 1)
        assert "no O_DIRECT: could not open: Invalid argument" in opened.why
        opened.read(ReadColumns.of([1], [7], [memory.ctypes.data], 4096))
    assert memory.tobytes() == DATA[7 : 7 + 4096]
    del opened
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


def test_no_such_engine(path: Path) -> None:
    """The names that there are."""
    with pytest.raises(errors.UsageError, match="auto, io_uring or threads"):
        _open(path, engine="uring")
    with pytest.raises(errors.UsageError, match="io_uring does not work here"):
        open_gather([MemorySource(DATA)], engine="io_uring")


_SECCOMP = """
import sys
from seccomp import forbid
forbid({forbidden})
from mfload.io.gather import open_gather, ReadColumns
from mfload.io import buffers
from mfload.sources.local import LocalFile
opened = open_gather([LocalFile(sys.argv[1])], files="direct")
memory = buffers.allocate(4096)
opened.read(ReadColumns.of(0, [4096], [memory.ctypes.data], 4096))
assert memory.tobytes() == open(sys.argv[1], "rb").read()[4096:8192]
print(opened.name, opened.why)
"""


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="numbers of x86-64's system calls")
@pytest.mark.parametrize("forbidden", [425, 426])
def test_forbidden_by_seccomp(path: Path, forbidden: int) -> None:
    """As in many containers: threads are taken, and say why."""
    code = _SECCOMP.replace("{forbidden}", f"({forbidden},)")
    run = subprocess.run(
        [sys.executable, "-c", code, path],
        cwd=Path(__file__).parents[1], capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith("threads ")
    assert "no io_uring: Operation not permitted" in run.stdout


_EXIT = """
import sys, threading, time
import numpy as np
from mfload.io.gather import open_gather, ReadColumns
from mfload.io import buffers
from mfload.sources.local import LocalFile
opened = open_gather([LocalFile(sys.argv[1])], files="direct", engine=sys.argv[2])
memory = buffers.allocate(70 * 4096)
offsets = np.arange(70) * 4096
def work():
    while True:
        opened.read(ReadColumns.of(0, offsets, memory.ctypes.data + offsets, 4096))
for _ in range(2):
    threading.Thread(target=work, daemon=True).start()
time.sleep(float(sys.argv[3]))
"""


@pytest.mark.parametrize("engine", ["io_uring", "threads"])
def test_the_end_of_the_program(path: Path, engine: str) -> None:
    """With reads under way in threads."""
    for wait in ("0", "0.01", "0.05"):
        run = subprocess.run(
            [sys.executable, "-c", _EXIT, path, engine, wait],
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        assert (run.returncode, run.stderr) == (0, "")


@pytest.mark.parametrize(("engine", "files"), WAYS)
def test_modules_have_gone(
    path: Path, monkeypatch: pytest.MonkeyPatch, engine: Any, files: str
) -> None:
    """When the interpreter ends, what a framework held back is collected after its modules."""
    _, start = _memory(4096)
    with _open(path, engine=engine, files=files) as opened:
        opened.read(ReadColumns.of(0, [0], [start], 4096))
        with monkeypatch.context() as patch:
            for module in (gather, uring):
                patch.setattr(module, "os", None)
            for ring in opened._idle:
                ring.close()
            opened.__del__()
        opened.read(ReadColumns.of(0, [0], [start], 4096))


def test_no_descriptor_is_left(path: Path) -> None:
    """Neither of files nor of rings."""
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    _, start = _memory(4096)
    for engine, files in WAYS:
        opened = _open(path, engine=engine, files=files)
        opened.read(ReadColumns.of(0, [0], [start], 4096))
        del opened
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before
