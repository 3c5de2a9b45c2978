"""Probes: what the kernel says, and a plain answer where it says nothing."""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import watch

from mfload.io import probes


@pytest.fixture
def fd(tmp_path: Path) -> Iterator[int]:
    path = tmp_path / "file"
    path.write_bytes(bytes(10 * 4096 + 1))
    number = os.open(path, os.O_RDONLY)
    yield number
    os.close(number)


def _kernel(monkeypatch: pytest.MonkeyPatch, answer: Any) -> None:
    monkeypatch.setattr(probes, "_syscall", lambda: answer)


def test_the_share_of_cached_pages(fd: int) -> None:
    share = probes.cached_share(fd, 10 * 4096 + 1)
    if share is None:
        pytest.skip("no cachestat")
    assert share == 1.0
    assert probes.cached_share(fd, 0) is None
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    assert probes.cached_share(fd, 10 * 4096 + 1) in (0.0, 1.0)


def test_the_share_of_a_long_file_is_that_of_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    spans: list[tuple[int, int]] = []

    def half(_: int, fd: int, span: Any, answer: Any, flags: int) -> int:
        start, nbytes = span._obj
        spans.append((start, nbytes))
        first, last = start // 4096, (start + nbytes - 1) // 4096
        answer._obj[0] = last - first + 1 if start < 3 << 30 else 0
        return 0

    _kernel(monkeypatch, half)
    assert probes.cached_share(0, 4 << 30, 1 << 30) == 0.5
    assert spans[0][0] == 1 << 30
    assert sum(spans[-1]) == 5 << 30
    assert sum(nbytes for _, nbytes in spans) == 16 << 20
    spans.clear()
    assert probes.cached_share(0, 16 << 20, 4095) == 1.0
    assert spans == [(4095, 16 << 20)]


def test_kernels_without_cachestat_do_not_say(fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    _kernel(monkeypatch, lambda *_: -1)
    assert probes.cached_share(fd, 4096) is None


def test_looking_touches_no_page(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(1 << 20))
    watch.drop_cache(path)
    with path.open("rb") as file:
        first = probes.cached_share(file.fileno(), 1 << 20)
        assert probes.cached_share(file.fileno(), 1 << 20) == first


def _statx(mask: int, memory: int, offset: int) -> Any:
    def call(*args: Any) -> int:
        words = ctypes.cast(args[5], ctypes.POINTER(ctypes.c_uint32))
        words[0], words[38], words[39] = mask, memory, offset
        return 0

    return call


@pytest.mark.parametrize(
    ("kernel", "units"),
    [
        (_statx(0x2FFF, 4, 512), (4, 512)),
        (_statx(0x2FFF, 4096, 4096), (4096, 4096)),
        # It says that the file takes none.
        (_statx(0x2FFF, 0, 0), None),
        # It does not say: before Linux 6.1, or file systems that never learnt to.
        (_statx(0x07FF, 0, 0), (4096, 4096)),
        (lambda *_: -1, (4096, 4096)),
    ],
)
def test_alignment_is_what_statx_says(
    fd: int, monkeypatch: pytest.MonkeyPatch, kernel: Any, units: Any
) -> None:
    _kernel(monkeypatch, kernel)
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    assert probes.direct_alignment(fd) == units


def test_alignment_elsewhere(fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    assert probes.direct_alignment(fd) == (4096, 4096)


def test_alignment_here_is_enough(fd: int, tmp_path: Path) -> None:
    units = probes.direct_alignment(fd)
    if units is None:
        pytest.skip("the file takes no O_DIRECT")
    import mmap

    memory, offset = units
    direct = os.open(tmp_path / "file", os.O_RDONLY | os.O_DIRECT)
    try:
        target = memoryview(mmap.mmap(-1, 8192))[memory : memory + offset]
        assert os.preadv(direct, [target], offset) == offset
    finally:
        os.close(direct)


def _tree(root: Path, available: int, groups: dict[str, tuple[str, int, int]]) -> Path:
    """A made-up `proc` and `sys`; the last group is the one this process is in."""
    (root / "proc/self").mkdir(parents=True)
    text = f"MemTotal: 99 kB\nMemAvailable: {available >> 10} kB\nSwapFree: 1 kB\n"
    (root / "proc/meminfo").write_text(text)
    name = ""
    for name, (limit, used, cache) in groups.items():
        group = root / "sys/fs/cgroup" / name.lstrip("/")
        group.mkdir(parents=True, exist_ok=True)
        (group / "memory.max").write_text(f"{limit}\n")
        (group / "memory.current").write_text(f"{used}\n")
        (group / "memory.stat").write_text(f"anon 5\ninactive_file {cache}\nactive_file 0\n")
    (root / "proc/self/cgroup").write_text(f"1:cpu:/old\n0::{name}\n")
    return root


def test_room_is_the_least_of_machine_and_groups(tmp_path: Path) -> None:
    groups = {"/": ("max", 0, 0), "/a": ("9000", 4000, 500), "/a/b": ("max", 1, 1)}
    room = probes.memory_room(_tree(tmp_path, 1 << 20, groups))
    # Its page cache can be had.
    assert room == (9000 - 4000 + 500, "memory limit of control group /a")


def test_room_of_the_machine(tmp_path: Path) -> None:
    room = probes.memory_room(_tree(tmp_path, 8192, {"/a": ("999999", 0, 0)}))
    assert room == (8192 + 1024, "available memory of the machine")
    room = probes.memory_room(tmp_path, swap=False)
    assert room == (8192, "available memory of the machine")


def test_a_group_over_its_limit_has_no_room(tmp_path: Path) -> None:
    room = probes.memory_room(_tree(tmp_path, 8192, {"/a": ("10", 4000, 5)}))
    assert room is not None
    assert room[0] == 0


def test_room_where_nothing_says(tmp_path: Path) -> None:
    assert probes.memory_room(tmp_path) is None
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("nonsense\n")
    assert probes.memory_room(tmp_path) is None


def test_room_here() -> None:
    if sys.platform == "linux":
        room = probes.memory_room()
        assert room is not None
        assert room[0] > 0
