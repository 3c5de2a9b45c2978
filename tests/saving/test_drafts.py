"""Drafts: bytes land where they belong, on every path, and nothing is left of a failure."""

from __future__ import annotations

import errno
import fcntl
import gc
import itertools
import os
import random
import stat
import subprocess
import sys
import tempfile
import textwrap
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import faults
import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from mfload import errors
from mfload.io import buffers, probes
from mfload.io.buffers import PAGE
from mfload.saving import drafts, locks
from mfload.saving.attributes import Attributes
from mfload.saving.drafts import BLOCK, Draft

pytestmark = pytest.mark.skipif(not hasattr(os, "O_TMPFILE"), reason="Linux alone")


def numbers(nbytes: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


def draft(folder: Path, size: int, **options: Any) -> Draft:
    return Draft(str(folder / ".hidden"), size, str(folder / "final"), **options)


def written(made: Draft, folder: Path) -> bytes:
    made.sync()
    made.link(str(folder / "final"))
    made.discard()
    return (folder / "final").read_bytes()


@pytest.fixture(autouse=True)
def no_descriptors_left() -> Iterator[None]:
    gc.collect()  # Of tests before.
    before = len(os.listdir("/proc/self/fd"))
    yield
    assert len(os.listdir("/proc/self/fd")) == before


def direct_here(folder: Path) -> bool:
    made = draft(folder, 2 << 20)
    try:
        return made._open_direct()
    finally:
        made.discard()


SIZES = [0, 1, 511, PAGE, PAGE + 1, 1 << 20, (1 << 20) + 17, BLOCK, BLOCK + 1, 3 * BLOCK + 12345]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("lead", [0, 1, 64, 512])
@pytest.mark.parametrize("cached", [False, True])
def test_one_write(
    size: int, lead: int, cached: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if cached:
        monkeypatch.setattr(probes, "direct_alignment", lambda fd: None)
    memory = buffers.allocate(size + 4096)
    data = memory[lead : lead + size]
    data[:] = numbers(size)
    made = draft(tmp_path, size)
    made.write(0, [data])
    assert written(made, tmp_path) == data.tobytes()


@hypothesis.settings(max_examples=40)
@hypothesis.given(st.data())
def test_any_cut_into_writes_and_pieces(data: st.DataObject) -> None:
    size = data.draw(st.integers(0, 3 * BLOCK // 2))
    whole = numbers(size, size)
    cuts = st.integers(0, size) | st.integers(0, size // PAGE).map(lambda n: n * PAGE)
    marks = sorted({0, size, *data.draw(st.lists(cuts, max_size=6))})
    spans = list(itertools.pairwise(marks))
    random.Random(size).shuffle(spans)
    plans: list[list[int]] = []
    for start, stop in spans:
        inner = sorted({start, stop, *data.draw(st.lists(st.integers(start, stop)))})
        plans.append(inner if stop - start <= BLOCK and data.draw(st.booleans()) else [start, stop])
    with tempfile.TemporaryDirectory() as name:
        made = draft(Path(name), size)
        for inner in plans:
            made.write(inner[0], [whole[a:b] for a, b in itertools.pairwise(inner)])
        assert written(made, Path(name)) == whole.tobytes()


def test_threads_write_to_places_of_their_own(tmp_path: Path) -> None:
    whole = numbers(5 * BLOCK + 999)
    made = draft(tmp_path, whole.nbytes)
    cuts = [0, 700_001, BLOCK, BLOCK + 5, 2 * BLOCK + 77, 4 * BLOCK, whole.nbytes]

    def write(start: int, stop: int) -> None:
        made.write(start, [whole[start:stop]])

    threads = [threading.Thread(target=write, args=span) for span in itertools.pairwise(cuts)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert written(made, tmp_path) == whole.tobytes()


def test_large_writes_go_past_the_page_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not direct_here(tmp_path):
        pytest.skip("this file system takes no O_DIRECT")
    through: list[tuple[int, int]] = []
    real = os.pwritev
    monkeypatch.setattr(
        os, "pwritev", lambda fd, v, at: through.append((fd, sum(map(len, v)))) or real(fd, v, at)
    )
    size = 2 * BLOCK + 100
    memory = buffers.allocate(size + 1)
    for data in (memory[:size], memory[1:]):
        made = draft(tmp_path, size)
        made.write(0, [data])
        past = [nbytes for fd, nbytes in through if fd == made._direct]
        assert past == [2 * BLOCK]
        assert [nbytes for fd, nbytes in through if fd == made._fd] == [100]
        through.clear()
        made.discard()


def test_aligned_memory_needs_no_slot(tmp_path: Path) -> None:
    data = buffers.allocate(BLOCK)
    made = draft(tmp_path, BLOCK)
    made.write(0, [data])
    assert not made._slots
    made.discard()


@pytest.mark.parametrize("code", [errno.EINVAL, errno.EOPNOTSUPP, errno.EFAULT])
def test_direct_writes_that_the_kernel_refuses(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not direct_here(tmp_path):
        pytest.skip("this file system takes no O_DIRECT")
    real = os.pwritev
    data = buffers.allocate(2 * BLOCK)
    data[:] = numbers(data.size)
    made = draft(tmp_path, data.size)

    def refuse(fd: int, vector: list[Any], at: int) -> int:
        assert made._direct >= 0
        if fd == made._direct:
            raise OSError(code, os.strerror(code))
        return real(fd, vector, at)

    monkeypatch.setattr(os, "pwritev", refuse)
    made.write(0, [data])
    assert written(made, tmp_path) == data.tobytes()
    assert made._takes_direct == (code == errno.EFAULT)


def test_short_writes_are_taken_up_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwritev
    monkeypatch.setattr(probes, "direct_alignment", lambda fd: None)
    monkeypatch.setattr(os, "pwritev", lambda fd, v, at: real(fd, [v[0][:70]], at))
    whole = numbers(10_000)
    made = draft(tmp_path, whole.nbytes)
    made.write(0, [whole[:3], whole[3:3], whole[3:5000], whole[5000:]])
    assert written(made, tmp_path) == whole.tobytes()


def test_more_pieces_than_one_call_takes(tmp_path: Path) -> None:
    whole = numbers(9000)
    made = draft(tmp_path, whole.nbytes)
    made.write(0, [whole[n : n + 3] for n in range(0, 9000, 3)])
    assert written(made, tmp_path) == whole.tobytes()


def test_a_device_that_takes_nothing_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "pwritev", lambda fd, v, at: 0)
    made = draft(tmp_path, 10)
    with pytest.raises(errors.WriteError) as caught:
        made.write(0, [numbers(10)])
    assert caught.value.errno == errno.EIO
    made.discard()


def test_bytes_that_are_missing_are_told(tmp_path: Path) -> None:
    made = draft(tmp_path, 100)
    made.write(10, [numbers(80)])
    with pytest.raises(errors.WriteError, match="not whole") as caught:
        made.sync()
    error = caught.value
    assert (error.expected, error.found) == ("100 bytes", "80 bytes")
    assert error.file == str(tmp_path / "final")
    made.discard()


WAYS: list[Callable[[], AbstractContextManager[None]]] = [
    nullcontext,
    *(
        lambda code=code: faults.no_tmpfile(code)
        for code in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT)
    ),
]


@pytest.mark.parametrize("way", WAYS)
def test_nobody_sees_it_before_it_is_published(
    way: Callable[[], AbstractContextManager[None]], tmp_path: Path
) -> None:
    with way():
        made = draft(tmp_path, 10)
        there = [] if way is nullcontext else [".hidden"]
        assert os.listdir(tmp_path) == there
        assert made.named == bool(there)
        made.write(0, [numbers(10)])
        assert Path(made.path).read_bytes() == numbers(10).tobytes()
        made.link(str(tmp_path / "final"))
        assert sorted(os.listdir(tmp_path)) == [*there, "final"]
        assert made.is_at(str(tmp_path / "final"))
        assert not made.is_at(str(tmp_path / "nothing"))
        with pytest.raises(FileExistsError):
            made.link(str(tmp_path / "final"))
        made.discard()
        made.discard()
        assert os.listdir(tmp_path) == ["final"]


def test_without_proc_it_has_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.stat

    def gone(path: Any, **options: Any) -> os.stat_result:
        if str(path).startswith("/proc"):
            raise FileNotFoundError(errno.ENOENT, "no proc")
        return real(path, **options)

    monkeypatch.setattr(os, "stat", gone)
    made = draft(tmp_path, 10)
    monkeypatch.undo()
    assert made.named
    made.discard()
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("way", [nullcontext, faults.no_tmpfile])
def test_its_names_are_locked_while_its_writer_lives(
    way: Callable[[], AbstractContextManager[None]], tmp_path: Path
) -> None:
    with way():
        made = draft(tmp_path, 10)
    made.link(str(tmp_path / "name"))
    fd = os.open(tmp_path / "name", os.O_RDONLY)
    assert drafts.lock(fd) is False
    made.discard()
    assert drafts.lock(fd) is True
    os.close(fd)


@pytest.mark.parametrize("way", [nullcontext, faults.no_tmpfile])
def test_permissions(way: Callable[[], AbstractContextManager[None]], tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        for mode, wanted in ((None, 0o640), (0o600, 0o600), (0o664, 0o664), (0o444, 0o444)):
            like = None if mode is None else Attributes(mode, os.getuid(), os.getgid(), {})
            with way():
                made = draft(tmp_path, 0, like=like)
            # What was private is never open to others, not even for a moment.
            assert like is None or stat.S_IMODE(os.stat(made.path).st_mode) == 0o600
            made.sync()
            assert stat.S_IMODE(os.stat(made.path).st_mode) == wanted
            made.discard()
    finally:
        os.umask(before)


class TestFailures:
    @pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
    def test_a_full_disk_is_told_before_a_byte_is_written(
        self, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def full(fd: int, nbytes: int) -> None:
            raise OSError(code, os.strerror(code))

        monkeypatch.setattr(drafts, "allocate_file", full)
        for way in (nullcontext, faults.no_tmpfile):
            with way(), pytest.raises(errors.WriteError) as caught:
                draft(tmp_path, 1234)
            assert caught.value.errno == code
            assert caught.value.expected == "1234 bytes"
            # What the disk has free says nothing of a quota.
            assert ("bytes free" in str(caught.value.found)) == (code == errno.ENOSPC)
            assert os.listdir(tmp_path) == []

    @pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EFBIG, 9999])
    def test_writes_and_syncs_that_fail(
        self, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(*_: Any) -> None:
            raise OSError(code, "broken")

        made = draft(tmp_path, 10)
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwritev", fail)
            with pytest.raises(errors.WriteError) as caught:
                made.write(0, [numbers(10)])
        assert (caught.value.errno, caught.value.file) == (code, str(tmp_path / "final"))
        made.write(0, [numbers(10)])
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", fail)
            with pytest.raises(errors.WriteError) as caught:
                made.sync()
        assert caught.value.errno == code
        made.discard()
        assert os.listdir(tmp_path) == []

    @pytest.mark.parametrize("code", [errno.EACCES, errno.EROFS, errno.EMFILE])
    def test_a_directory_that_takes_no_files(
        self, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with monkeypatch.context() as patch:

            def fail(*_: Any) -> int:
                raise OSError(code, os.strerror(code))

            patch.setattr(os, "open", fail)
            with pytest.raises(errors.TargetError) as caught:
                draft(tmp_path, 1)
        assert caught.value.errno == code
        assert not isinstance(caught.value, errors.WriteError)
        assert ("ulimit" in str(caught.value)) == (code == errno.EMFILE)

    def test_permissions_that_a_file_system_does_not_have(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(fd: int, mode: int) -> None:
            raise PermissionError(errno.EPERM, "all files have the same")

        monkeypatch.setattr(os, "fchmod", fail)
        made = draft(tmp_path, 0, like=Attributes(0o640, os.getuid(), os.getgid(), {}))
        made.sync()
        assert stat.S_IMODE(os.stat(made.path).st_mode) == 0o600
        made.discard()

    def test_a_write_that_hangs_keeps_its_descriptors(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        go, inside = threading.Event(), threading.Event()
        real = os.pwritev

        def hang(fd: int, vector: list[Any], at: int) -> int:
            inside.set()
            go.wait(20)
            return real(fd, vector, at)

        monkeypatch.setattr(os, "pwritev", hang)
        made = draft(tmp_path, 10)
        thread = threading.Thread(target=made.write, args=(0, [numbers(10)]))
        thread.start()
        assert inside.wait(20)
        made.discard()
        os.fstat(made._fd)
        go.set()
        thread.join()
        assert made._fd == -1


class TestAllot:
    def test_room_is_taken(self, tmp_path: Path) -> None:
        with open(tmp_path / "f", "wb") as file:
            drafts.allocate_file(file.fileno(), 1 << 20)
            found = os.fstat(file.fileno())
            assert found.st_size == 1 << 20
            assert found.st_blocks * 512 >= 1 << 20

    @pytest.mark.parametrize("codes", [[errno.EOPNOTSUPP], [errno.EINTR, errno.ENOSYS]])
    def test_where_none_can_be_promised(
        self, codes: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(drafts, "_fallocate", lambda *_: codes.pop(0))
        with open(tmp_path / "f", "wb") as file:
            drafts.allocate_file(file.fileno(), 12345)
        assert os.stat(tmp_path / "f").st_size == 12345

    def test_a_limit_of_the_process(self, tmp_path: Path) -> None:
        code = """
            import resource, sys
            from mfload import errors
            from mfload.saving.drafts import Draft
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
            try:
                Draft(sys.argv[1] + "/.h", 2 << 20, "final")
            except errors.WriteError as error:
                print(error.errno)
        """
        found = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(code), str(tmp_path)],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        assert int(found.stdout) == errno.EFBIG
        assert os.listdir(tmp_path) == []


def test_a_directory_is_one_s_own_while_locked(tmp_path: Path) -> None:
    order: list[str] = []

    def wait() -> None:
        with locks.locked(str(tmp_path)):
            order.append("second")

    with locks.locked(str(tmp_path)):
        thread = threading.Thread(target=wait)
        thread.start()
        thread.join(0.2)
        order.append("first")
    thread.join(20)
    assert order == ["first", "second"]


def test_directories_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr(fcntl, "flock", none)
    with locks.locked(str(tmp_path)):
        pass
