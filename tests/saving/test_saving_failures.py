"""Whatever fails, and whenever: the old checkpoint or the new one, whole, and nothing else."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scenarios
from recorder import Recorder
from test_saving_kill import memory

import mfload
from mfload import errors
from mfload.io import buffers
from mfload.saving import save as saving

__all__ = ["memory"]
pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux alone")
OLD, NEW = scenarios.arrays(1), scenarios.arrays(2)


@pytest.fixture(autouse=True)
def no_descriptors_left() -> Iterator[None]:
    before = len(os.listdir("/proc/self/fd"))
    yield
    assert len(os.listdir("/proc/self/fd")) == before


class TestFetching:
    """Arrays that can't be had when their turn comes."""

    def failing(self, monkeypatch: pytest.MonkeyPatch, error: BaseException, at: str) -> None:
        real = saving.export

        def export(arrays: Any) -> Any:
            def fail() -> Any:
                raise error

            return [x._replace(fetch=fail) if x.name == at else x for x in real(arrays)]

        monkeypatch.setattr(saving, "export", export)

    @pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("gone"), MemoryError()])
    @pytest.mark.parametrize("limit", [None, 9000])
    @pytest.mark.parametrize("size", [5000, 3 << 20])
    def test_nothing_changes(
        self,
        error: BaseException,
        limit: int | None,
        size: int,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        mfload.save(OLD, tmp_path, max_shard_size=limit)
        before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
        self.failing(monkeypatch, error, "w4")
        with pytest.raises(type(error)):
            mfload.save(
                scenarios.arrays(2, size=size), tmp_path, max_shard_size=limit, overwrite=True
            )
        assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before

    def test_an_array_that_lies_is_named(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        real = saving.export

        def export(arrays: Any) -> Any:
            return [x._replace(fetch=lambda: np.zeros(3, np.uint8)) for x in real(arrays)]

        monkeypatch.setattr(saving, "export", export)
        with pytest.raises(errors.UnsupportedArrayError) as caught:
            mfload.save({"w": np.zeros(4, np.uint8)}, tmp_path)
        assert (caught.value.tensor, caught.value.found) == ("w", "3 bytes")
        assert os.listdir(tmp_path) == []

    def test_refused_arrays_are_refused_before_a_byte_is_written(self, tmp_path: Path) -> None:
        with Recorder(tmp_path) as seen, pytest.raises(errors.MfloadError):
            mfload.save({"a": np.zeros(3), "b": np.array(["text"])}, tmp_path)
        assert seen.changes == []


def large() -> dict[str, Any]:
    return {f"w{n}": np.random.default_rng(n).integers(0, 255, 3 << 20, np.uint8)
            for n in range(4)}  # fmt: skip


@pytest.mark.parametrize("how", ["write", "direct", "sync"])
def test_threads_that_fail_leave_nothing(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mfload.save(OLD, tmp_path)
    real = os.pwritev
    calls: list[int] = []

    def fail(fd: int, vector: Any, at: int) -> int:
        calls.append(at)
        if len(calls) == 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(fd, vector, at)

    def unsynced(fd: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    if how == "sync":
        monkeypatch.setattr(os, "fsync", unsynced)
    else:
        monkeypatch.setattr(os, "pwritev", fail)
    if how == "write":
        monkeypatch.setattr("mfload.io.probes.direct_alignment", lambda fd: None)
    with pytest.raises(errors.WriteError) as caught:
        mfload.save(large(), tmp_path, overwrite=True)
    error = caught.value
    # Whoever keeps the error keeps none of our memory.
    assert buffers.live_bytes() == 0
    assert error.file == str(tmp_path / "model.safetensors")
    if how != "sync":
        assert str(error.tensor).startswith("w")
    assert scenarios.found(tmp_path, {"old": OLD}) == "old"
    assert os.listdir(tmp_path) == ["model.safetensors"]


class TestFullDisk:
    """On a file system of 4 MiB."""

    @pytest.fixture
    def disk(self) -> Iterator[Path]:
        with tempfile.TemporaryDirectory(prefix="mfload-test-") as name:
            mounted = subprocess.run(
                ["mount", "-t", "tmpfs", "-o", "size=4m", "mfload-test", name],
                capture_output=True, text=True, check=False,
            )  # fmt: skip
            if mounted.returncode:
                pytest.skip(f"mounting is not permitted here: {mounted.stderr.strip()}")
            try:
                yield Path(name)
            finally:
                subprocess.run(["umount", name], check=True)

    @pytest.mark.parametrize("allots", [True, False])
    @pytest.mark.parametrize("limit", [None, "1MiB"])
    def test_it_is_told_and_nothing_is_left(
        self,
        disk: Path,
        limit: str | None,
        allots: bool,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        mfload.save(OLD, disk, max_shard_size=9000)
        before = {path.name: path.read_bytes() for path in disk.iterdir()}
        if not allots:
            monkeypatch.setattr("mfload.saving.drafts._fallocate", lambda *_: errno.ENOSYS)
        big = {f"w{n}": np.ones(1 << 20, np.uint8) for n in range(6)}
        free = os.statvfs(disk).f_bavail
        with pytest.raises(errors.WriteError) as caught:
            mfload.save(big, disk, max_shard_size=limit, overwrite=True)
        assert caught.value.errno == errno.ENOSPC
        assert "bytes" in str(caught.value.expected)
        assert "bytes" in str(caught.value.found)
        assert {path.name: path.read_bytes() for path in disk.iterdir()} == before
        assert os.statvfs(disk).f_bavail == free
        assert scenarios.found(disk, {"old": OLD}) == "old"
        mfload.save(NEW, disk, overwrite=True)
        assert scenarios.found(disk, {"new": NEW}) == "new"

    def test_old_and_new_must_both_fit(self, disk: Path) -> None:
        half = {"w": np.ones(5 << 19, np.uint8)}
        mfload.save(half, disk)
        with pytest.raises(errors.WriteError):
            mfload.save(half, disk, overwrite=True)
        assert scenarios.found(disk, {"half": half}) == "half"


def test_a_limit_on_the_size_of_files(tmp_path: Path) -> None:
    code = """
        import errno, resource, sys
        import numpy as np, mfload
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
        try:
            mfload.save({"w": np.ones(2 << 20, np.uint8)}, sys.argv[1], overwrite=True)
        except mfload.errors.WriteError as error:
            assert error.errno == errno.EFBIG, error
            print("told")
    """
    mfload.save(OLD, tmp_path)
    found = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), str(tmp_path)],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert found.stdout == "told\n"
    assert scenarios.found(tmp_path, {"old": OLD}) == "old"
    assert os.listdir(tmp_path) == ["model.safetensors"]


def test_a_directory_that_may_not_be_written(tmp_path: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root may write everywhere")
    tmp_path.chmod(0o500)
    with pytest.raises(errors.TargetError) as caught:
        mfload.save(NEW, tmp_path)
    assert caught.value.errno == errno.EACCES
