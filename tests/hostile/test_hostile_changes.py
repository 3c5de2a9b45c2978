"""Files that change under a load: between header and data, in the middle, or right after."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import reference

import mfload
from mfload import errors
from mfload.formats import checkpoint
from mfload.loading import allocate

SIZE = 3 << 20


def write(path: Path, seed: int = 0, size: int = SIZE) -> Path:
    data = random.Random(seed).randbytes(size)
    path.write_bytes(reference.write({"w": reference.Tensor("U8", (size,), data)}))
    return path


def truncated(path: Path) -> None:
    os.truncate(path, SIZE // 2)


def emptied(path: Path) -> None:
    os.truncate(path, 0)


def grown(path: Path) -> None:
    with open(path, "ab") as file:
        file.write(b"!")


def replaced(path: Path) -> None:
    os.replace(write(path.with_name("other"), seed=1), path)


def rewritten(path: Path) -> None:
    status = path.stat()
    write(path, seed=1)
    # A later time, however coarse the clock of the file system.
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))


def gone(path: Path) -> None:
    path.unlink()


def became_a_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def became_a_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def became_a_loop(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.name)


CHANGES: list[Callable[[Path], None]] = [
    truncated, emptied, grown, replaced, rewritten, gone, became_a_directory, became_a_fifo,
    became_a_loop,
]  # fmt: skip
ENGINES = ["pread", "direct", "mmap"]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("change", CHANGES, ids=lambda f: f.__name__)
def test_between_header_and_data(
    change: Callable[[Path], None], engine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "f.safetensors")
    true = checkpoint.choose

    def choose(*args: Any, **given: Any) -> Any:
        found = true(*args, **given)
        change(path)
        return found

    monkeypatch.setattr(checkpoint, "choose", choose)
    report = mfload.Report()
    with pytest.raises(errors.SourceError) as caught:
        mfload.load(path, framework="numpy", report=report, options=mfload.Options(engine=engine))
    assert caught.value.file == str(path)
    assert report.tensors == 0


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("change", CHANGES, ids=lambda f: f.__name__)
def test_after_the_plan_and_before_the_read(
    change: Callable[[Path], None], engine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "f.safetensors")
    true = allocate.allocate

    def slow(*args: Any) -> Any:
        found = true(*args)
        change(path)
        return found

    monkeypatch.setattr(allocate, "allocate", slow)
    with pytest.raises(errors.SourceError) as caught:
        mfload.load(path, framework="numpy", options=mfload.Options(engine=engine))
    assert caught.value.file == str(path)
    assert type(caught.value) is errors.SourceChangedError


@pytest.mark.parametrize("change", CHANGES, ids=lambda f: f.__name__)
def test_in_the_middle_of_the_read(
    change: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first half has been read when it happens; what is in hand is not handed out."""
    path = write(tmp_path / "f.safetensors")
    true, calls = os.preadv, 0

    def preadv(fd: int, vector: list[Any], offset: int) -> int:
        nonlocal calls
        calls += 1
        if calls == 2:
            change(path)
        return true(fd, [vector[0][: SIZE // 2]], offset)

    monkeypatch.setattr(os, "preadv", preadv)
    with pytest.raises(errors.SourceError) as caught:
        mfload.load(path, framework="numpy", options=mfload.Options(engine="pread"))
    assert calls >= 2
    assert caught.value.file == str(path)
    assert type(caught.value) is errors.SourceChangedError


@pytest.mark.parametrize("change", CHANGES, ids=lambda f: f.__name__)
def test_after_opening(change: Callable[[Path], None], tmp_path: Path) -> None:
    path = write(tmp_path / "f.safetensors")
    with mfload.open(path) as opened:
        assert opened.get_slice("w")[:3].nbytes == 3
        change(path)
        for ask in (opened.get_tensor, lambda name: opened.get_slice(name)[5]):
            with pytest.raises(errors.SourceError) as caught:
                ask("w")
            assert caught.value.file == str(path)


def test_one_shard_of_several(tmp_path: Path) -> None:
    one, two = write(tmp_path / "1.safetensors"), tmp_path / "2.safetensors"
    two.write_bytes(reference.write({"v": reference.Tensor("U8", (5,), b"12345")}))
    with mfload.open(tmp_path) as opened:
        replaced(one)
        assert opened.get_tensor("v").tobytes() == b"12345"
        with pytest.raises(errors.SourceChangedError) as caught:
            opened.get_tensors(["v", "w"])
        assert caught.value.file == str(one)
        assert caught.value.expected is not None
        assert caught.value.found is not None


def test_touched_without_a_change_is_a_change(tmp_path: Path) -> None:
    """The bytes may be the same; nobody has looked."""
    path = write(tmp_path / "f.safetensors")
    with mfload.open(path) as opened:
        os.utime(path)
        with pytest.raises(errors.SourceChangedError):
            opened.get_tensor("w")


def test_renamed_away_and_back_is_none(tmp_path: Path) -> None:
    path = write(tmp_path / "f.safetensors")
    with mfload.open(path) as opened:
        os.replace(path, tmp_path / "x")
        with pytest.raises(errors.SourceChangedError):
            opened.get_tensor("w")
        os.replace(tmp_path / "x", path)
        assert opened.get_tensor("w").nbytes == SIZE
