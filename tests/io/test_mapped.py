"""Private maps: what is written stays in memory, what is missing is an error and no signal."""

from __future__ import annotations

import errno
import mmap
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import samples
import watch

import mfload
from mfload import errors
from mfload.io import buffers, mapped
from mfload.sources.local import LocalFile


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return samples.save(tmp_path / "a.safetensors", {"a": samples.numbers((5000,), np.float32)})


def test_writing_reaches_no_file(path: Path) -> None:
    before = path.read_bytes()
    source = LocalFile(path)
    memory = mapped.map_file(source, [(0, source.size)])
    assert memory.tobytes() == before
    memory[:] = 7
    assert path.read_bytes() == before
    assert mapped.map_file(source, [])[0] == before[0]


def test_numpy_arrays_over_a_map_are_read_only(path: Path) -> None:
    array = mfload.load(path, framework="numpy", options=mfload.Options(engine="mmap"))["a"]
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 1
    assert mfload.live_bytes() == 0


@pytest.mark.parametrize("size", [0, 100, 8192])
def test_a_file_cut_short_under_the_map_is_an_error(path: Path, size: int) -> None:
    source = LocalFile(path)
    real = mapped._populate

    def populate(*args: Any) -> None:
        os.truncate(path, size)
        real(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mapped, "_populate", populate)
        with pytest.raises(errors.SourceChangedError) as info:
            mapped.map_file(source, [(0, source.size)])
    assert info.value.file == os.fspath(path)


def test_a_file_cut_short_before_the_map_is_an_error(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = LocalFile(path)
    real = source.open

    def late() -> Any:
        opened = real()
        os.truncate(path, 100)
        return opened

    monkeypatch.setattr(source, "open", late)
    with watch.nothing_left():
        with pytest.raises(errors.SourceChangedError, match="100 bytes") as info:
            mapped.map_file(source, [(0, source.size)])
        del info


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOSYS])
def test_kernels_that_bring_nothing_in_do_so_on_touch(
    path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def old(*_: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(buffers, "madvise", old)
    loaded = mfload.load(path, framework="numpy", options=mfload.Options(engine="mmap"))
    assert samples.same(loaded["a"], samples.numbers((5000,), np.float32))


def test_no_room_for_a_map_is_an_error(path: Path) -> None:
    source, before = LocalFile(path), resource.getrlimit(resource.RLIMIT_AS)
    os.truncate(path, 1 << 40)  # Of which no byte is stored.
    source = LocalFile(path)
    resource.setrlimit(resource.RLIMIT_AS, (1 << 39, before[1]))
    try:
        with pytest.raises(errors.MemoryLimitError, match="could not be mapped"):
            mapped.map_file(source, [])
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def test_a_map_keeps_no_descriptor_and_goes_with_its_last_view(path: Path) -> None:
    source, before = LocalFile(path), watch.open_files()
    array = mapped.map_file(source, [(0, source.size)])
    view = array[100:]
    assert watch.open_files() == before
    del array
    assert view.tobytes() == path.read_bytes()[100:]
    assert str(path) in Path("/proc/self/maps").read_text()
    view[:] = 1
    del view
    assert str(path) not in Path("/proc/self/maps").read_text()


def test_a_map_that_lives_to_the_end_of_the_process_says_nothing(path: Path) -> None:
    code = """
import sys
from mfload.io import mapped
from mfload.sources.local import LocalFile
kept = mapped.map_file(LocalFile(sys.argv[1]), [])
sys.modules["kept"] = [kept]
print(kept[0])
"""
    command = [sys.executable, "-W", "error", "-c", code, os.fspath(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == (f"{path.read_bytes()[0]}\n", "")


def test_a_range_is_mapped_alone_or_out_of_one_map(tmp_path: Path) -> None:
    path = tmp_path / "file"
    data = np.random.default_rng(0).integers(0, 256, 5 * mmap.PAGESIZE + 77, np.uint8)
    path.write_bytes(data.tobytes())
    source = LocalFile(path)
    shared = mapped.shared_maps()
    ranges = [(0, 1), (0, data.size), (4095, 2), (4096, 4096), (9000, 5), (data.size - 1, 1)]
    for offset, nbytes in ranges:
        expected = data[offset : offset + nbytes]
        alone, at = mapped.map_range(source, offset, nbytes)
        assert alone.size == at + nbytes < nbytes + mmap.PAGESIZE
        assert np.array_equal(alone[at:], expected)
        alone[:] = 0  # Private to the request.
        one, at = shared(source, offset, nbytes)
        assert one is shared(source, 0, 1)[0]
        assert np.array_equal(one[at : at + nbytes], expected)
        assert not one.flags.writeable
    assert path.read_bytes() == data.tobytes()
    os.truncate(path, mmap.PAGESIZE)
    with pytest.raises(errors.SourceChangedError):
        mapped.map_range(source, 2 * mmap.PAGESIZE, 9)
    with pytest.raises(errors.SourceChangedError):
        shared(source, 2 * mmap.PAGESIZE, 9)


@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_a_tensor_maps_its_own_part_of_a_file(tmp_path: Path, framework: Any) -> None:
    """Not the file once a tensor, which takes address space, and of a page table, for each."""
    arrays = {f"t{n}": np.full(3 << 20, n, np.uint8) for n in range(20)} | {"empty": np.zeros(0)}
    path, kept = samples.save(tmp_path / "a.safetensors", arrays), list[Any]()
    with mfload.open(path, framework=framework, options=mfload.Options(engine="mmap")) as opened:
        for name, array in arrays.items():
            kept.append(opened.get_tensor(name))
            assert np.array_equal(np.asarray(kept[-1]), array)
        maps = Path("/proc/self/smaps").read_text().split(str(path))[1:]
        sizes = [int(each.split("Size:")[1].split()[0]) << 10 for each in maps]
        assert len(sizes) >= 1
        assert sum(sizes) <= 20 * (4 << 20)
    del kept
