"""Ranges of files shown to an observer: all of them, once each, in bounded memory."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import samples
from hypothesis import given, strategies as st

import mfload
from mfload import errors
from mfload.checking import scan as scanning
from mfload.checking.scan import in_turns, scan, scan_ranges
from mfload.index import Piece
from mfload.io import buffers, probes
from mfload.load_options import started
from mfload.planning.blocks import Block, Lot
from mfload.planning.lots import cut, joined, raw
from mfload.sources.local import LocalFile


def look(
    sources: Any, ranges: Any, observer: Any, *, turns: bool = True, deadline: float | None = None,
    threads: int | None = None, engine: Any = "auto", advance: Any = None,
) -> tuple[str, ...]:  # fmt: skip
    how = started(mfload.Options(engine=engine, threads=threads, timeout=deadline))
    lots = in_turns(map(_reads, ranges), how) if turns else [raw(each) for each in ranges]
    return scan(sources, lots, observer, how, advance)


def _reads(part: Block) -> list[Lot]:
    return [raw(each) for each in cut(part, scanning.BLOCK)]


def part(source: int, offset: int, nbytes: int) -> Block:
    return Block(source, offset, nbytes, ())


class _Seen:
    def __init__(self) -> None:
        self.parts: list[tuple[int, int, bytes]] = []
        self._lock = threading.Lock()

    def take(self, lot: Lot, number: int, data: Any, stopped: Any) -> None:
        source, offset, *_ = lot.blocks[number]
        with self._lock:
            self.parts.append((source, offset, data.tobytes()))


@pytest.fixture
def files(tmp_path: Path) -> tuple[list[LocalFile], list[bytes]]:
    raws = [np.random.default_rng(n).bytes(size) for n, size in enumerate([100_001, 70_000, 5])]
    for n, data in enumerate(raws):
        (tmp_path / f"{n}").write_bytes(data)
    return [LocalFile(tmp_path / f"{n}") for n in range(len(raws))], raws


@pytest.mark.parametrize("engine", ["auto", "pread", "direct"])
@pytest.mark.parametrize("threads", [1, 4])
def test_every_byte_is_shown_once(
    engine: str,
    threads: int,
    files: tuple[list[LocalFile], list[bytes]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(scanning, "BLOCK", 8192)
    sources, raws = files
    seen, told = _Seen(), []
    ranges = [part(0, 0, len(raws[0])), part(1, 13, 60_000), part(2, 0, 5)]
    look(sources, ranges, seen, threads=threads, engine=engine, advance=told.append)
    assert sum(told) == 100_001 + 60_000 + 5
    for source, offset, nbytes, *_ in ranges:
        found = b"".join(data for n, _, data in sorted(seen.parts) if n == source)
        assert found == raws[source][offset : offset + nbytes]
    # Cut where the file's blocks end, so that reads past the page cache are whole ones.
    assert all(offset % 8192 == 0 or offset == 13 for _, offset, _ in seen.parts)
    assert max(len(data) for _, _, data in seen.parts) <= 8192
    assert buffers.live_bytes() == 0


def test_files_are_read_in_turns(
    files: tuple[list[LocalFile], list[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scanning, "BLOCK", 30_000)
    ranges = [part(n, 0, source.size) for n, source in enumerate(files[0])]
    for threads, order in ((1, [0, 0, 0, 0, 1, 1, 1, 2]), (2, [0, 1, 0, 1, 0, 1, 0, 2])):
        how = started(mfload.Options(threads=threads))
        assert [block.source for block in in_turns(map(_reads, ranges), how)] == order


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 300), st.integers(0, 90)), max_size=30),
    st.integers(0, 40),
    st.integers(90, 200),
)
def test_neighbours_are_read_together(
    given: list[tuple[int, int, int]], gap: int, most: int
) -> None:
    ranges = [Piece(*each) for each in given]
    found = list(joined(ranges, gap, most))
    assert sorted(n for _, numbers in found for n in numbers) == list(range(len(ranges)))
    assert [block[:2] for block, _ in found] == sorted({block[:2] for block, _ in found})
    for block, numbers in found:
        assert block.nbytes <= most
        mine = sorted(ranges[n] for n in numbers)
        assert (mine[0].source, mine[0].offset) == block[:2]
        end = block.offset
        for source, offset, nbytes, _ in mine:
            assert source == block.source
            assert offset - end <= gap
            end = max(end, offset + nbytes)
        assert end == block.offset + block.nbytes


def test_blocks_as_they_are(files: tuple[list[LocalFile], list[bytes]]) -> None:
    sources, raws = files
    seen = _Seen()
    look(sources, [part(0, 3, 90_000), part(0, 99_000, 7)], seen, turns=False)
    assert sorted(seen.parts) == [(0, 3, raws[0][3:90_003]), (0, 99_000, raws[0][99_000:99_007])]


def test_nothing_to_read(files: tuple[list[LocalFile], list[bytes]]) -> None:
    seen = _Seen()
    assert look(files[0], [], seen) == ()
    assert seen.parts == []


def test_memory_is_a_slot_a_reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scanning, "BLOCK", 64 << 10)
    (tmp_path / "a").write_bytes(bytes(8 << 20))
    source = LocalFile(tmp_path / "a")
    for engine in ("pread", "direct"):
        buffers.peak_bytes(reset=True)
        look([source], [part(0, 0, source.size)], _Seen(), threads=3, engine=engine)
        assert buffers.peak_bytes() <= 3 * ((64 << 10) + 2 * 4096)


def test_a_file_that_changed_or_shrank(tmp_path: Path) -> None:
    for change in (lambda path: os.utime(path, (1, 1)), lambda path: os.truncate(path, 10)):
        path = tmp_path / "a"
        path.write_bytes(bytes(100))
        source = LocalFile(path)
        change(path)
        with pytest.raises(errors.SourceChangedError) as info:
            look([source], [part(0, 0, 100)], _Seen())
        assert info.value.file == os.fspath(path)


def test_a_file_that_changes_meanwhile(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(bytes(100))
    source = LocalFile(path)

    class Changing(_Seen):
        def take(self, *args: Any) -> None:
            os.utime(path, (1, 1))

    with pytest.raises(errors.SourceChangedError):
        look([source], [part(0, 0, 100)], Changing())


def test_an_error_of_the_observer_ends_it(files: tuple[list[LocalFile], list[bytes]]) -> None:
    class Failing(_Seen):
        def take(self, *args: Any) -> None:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        look(files[0], [part(0, 0, 100_001)], Failing(), threads=3)
    assert not [t for t in threading.enumerate() if t.name == "mfload-reader"]


def test_the_deadline(files: tuple[list[LocalFile], list[bytes]]) -> None:
    hung = threading.Event()

    class Slow(_Seen):
        def take(self, *args: Any) -> None:
            hung.wait(20)

    with pytest.raises(errors.LoadTimeoutError):
        look(files[0], [part(0, 0, 100_001)], Slow(), deadline=0.3)
    hung.set()
    for thread in threading.enumerate():
        if thread.name == "mfload-reader":
            thread.join(10)


@pytest.fixture
def large(tmp_path: Path) -> tuple[LocalFile, bytes]:
    raw = np.random.default_rng(0).bytes(9_000_001)
    (tmp_path / "large").write_bytes(raw)
    return LocalFile(tmp_path / "large"), raw


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("cached", [True, False])
def test_ranges_are_shown_in_parts(
    threads: int, cached: bool, large: tuple[LocalFile, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, raw = large
    monkeypatch.setattr(scanning, "BLOCK", 100_000)
    monkeypatch.setattr(scanning, "SHOWN", 300_000)
    if not cached:  # Or unknown.
        monkeypatch.setattr(probes, "cached_share", lambda *_: None)
    ranges = [part(0, 7, 5_000_000), part(0, 5_000_100, 300_000), part(0, 5_400_000, 3_600_001)]
    told, seen, how = list[int](), _Seen(), started(mfload.Options(threads=threads))
    scan_ranges([source], ranges, seen, how, told.append)
    for _, offset, nbytes, *_ in ranges:
        shown = [each for each in sorted(seen.parts) if offset <= each[1] < offset + nbytes]
        assert b"".join(each[2] for each in shown) == raw[offset : offset + nbytes]
        assert max(len(each[2]) for each in shown) <= (300_000 if cached else 100_000)
    assert buffers.live_bytes() == 0
    assert sum(told) == sum(each.nbytes for each in ranges)


CALLS: dict[str, Callable[[Path, mfload.Options], Any]] = {
    "verify": lambda path, how: mfload.verify(path, mode="write", overwrite=True, options=how),
    "diff": lambda path, how: mfload.diff(path, path, options=how),
    "convert": lambda path, how: mfload.convert(
        path, path.parent / "made.safetensors", overwrite=True, options=how
    ),
    "align": lambda path, how: mfload.align(
        path, path.parent / "made.safetensors", overwrite=True, options=how
    ),
}


@pytest.mark.parametrize("threads", [None, 3])
@pytest.mark.parametrize("call", CALLS)
def test_the_limit_of_memory(tmp_path: Path, call: str, threads: int | None) -> None:
    """One without room for the blocks of a reader is refused, before anything is written."""
    path = samples.save(tmp_path / "a.safetensors", {"w": samples.numbers((4 << 20,), np.float32)})
    before = sorted(os.listdir(tmp_path))
    with pytest.raises(errors.UsageError, match="max_host_overhead is too small") as caught:
        CALLS[call](path, mfload.Options(max_host_overhead=1, threads=threads))
    assert sorted(os.listdir(tmp_path)) == before
    least = int(str(caught.value.expected).split()[0])
    buffers.peak_bytes(reset=True)
    CALLS[call](path, mfload.Options(max_host_overhead=least, threads=threads))
    assert buffers.peak_bytes() <= least
    with pytest.raises(errors.UsageError, match="max_host_overhead is too small"):
        CALLS[call](path, mfload.Options(max_host_overhead=least - 1, threads=threads))
