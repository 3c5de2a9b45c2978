"""Hashes made while bytes arrive: in whatever order threads bring them, and never of a part."""

from __future__ import annotations

import hashlib
import itertools
import random
import sys
import threading
import time
from typing import Any

import numpy as np
import pytest
import watch
import xxhash
from hypothesis import given, strategies as st

from mfload import dtypes, errors
from mfload.checking import checksums
from mfload.checking.checksums import Hasher
from mfload.index import Piece, TensorInfo
from mfload.io.pread import PreadReader
from mfload.planning.blocks import Block, Segment, stored
from mfload.planning.lots import raw
from mfload.runtime import Deadline


def _row(name: str, start: int, nbytes: int, source: int = 0) -> TensorInfo:
    return TensorInfo(name, dtypes.TABLE["U8"], (nbytes,), (Piece(source, start, nbytes),))


def _data(nbytes: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


def _never() -> bool:
    return False


@st.composite
def _layouts(draw: st.DrawFn) -> tuple[int, list[TensorInfo], list[int]]:
    """A header's length, tensors one after another, and where the reads are cut."""
    start = draw(st.integers(0, 20))
    sizes = draw(st.lists(st.integers(0, 60), max_size=8))
    rows: list[TensorInfo] = []
    end = start
    for n, size in enumerate(sizes):
        rows.append(_row(f"t{n}", end, size))
        end += size
    cuts = draw(st.lists(st.integers(0, end), max_size=12))
    return end, rows, sorted({0, end, *cuts})


@given(_layouts(), st.integers(1, 6), st.integers(0, 1000), st.booleans())
def test_digests_are_those_of_the_bytes_whoever_brings_them(
    layout: tuple[int, list[TensorInfo], list[int]], threads: int, seed: int, whole: bool
) -> None:
    size, rows, cuts = layout
    data = _data(size, seed)
    observer = Hasher(rows, {0: size} if whole else None)
    lots = [raw(Block(0, a, b - a, ())) for a, b in itertools.pairwise(cuts)]
    delays = random.Random(seed)

    class Reader(PreadReader):
        def __init__(self) -> None: ...

        def land(self, block: Block, slot: Any) -> Any:
            # Whoever has read may come later than those who began after it.
            time.sleep(delays.choice([0, 0, 0.001]))
            return data[block.offset : block.offset + block.nbytes]

        def close(self) -> None: ...

    watch.handing(lots, lambda _: Reader(), threads, observer).run(Deadline(None))
    for row in rows:
        part = data[row.pieces[0].offset :][: row.nbytes]
        assert observer.digests()[row.name] == xxhash.xxh3_128_hexdigest(part.tobytes())
    if whole:
        assert observer.digests()[0] == hashlib.sha256(data.tobytes()).hexdigest()


def test_a_range_waits_for_the_ones_before() -> None:
    data = _data(30)
    observer = Hasher([_row("a", 0, 30)])
    order: list[int] = []

    def late(start: int) -> None:
        observer.saw(0, start, data[start : start + 10], _never)
        order.append(start)

    threads = [threading.Thread(target=late, args=(start,)) for start in (20, 10)]
    for thread in threads:
        thread.start()
        time.sleep(0.05)
    assert order == []
    with pytest.raises(AssertionError, match="not all bytes"):
        observer.digests()["a"]
    late(0)
    for thread in threads:
        thread.join(10)
    assert sorted(order) == [0, 10, 20]
    assert observer.digests()["a"] == xxhash.xxh3_128_hexdigest(data.tobytes())


def test_who_waits_when_all_is_given_up_goes() -> None:
    observer = Hasher([_row("a", 0, 30)], {0: 30})
    stop = threading.Event()
    waiting = threading.Thread(
        target=observer.saw, args=(0, 10, _data(10), stop.is_set), daemon=True
    )
    waiting.start()
    time.sleep(0.05)
    assert waiting.is_alive()
    stop.set()
    waiting.join(5)
    assert not waiting.is_alive()
    with pytest.raises(AssertionError):
        observer.digests()["a"]
    with pytest.raises(AssertionError, match="2 digests are missing"):
        observer.digests()[0]


def test_a_hash_that_fails_stops_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing:
        def __init__(self, *_: Any) -> None: ...

        def update(self, data: Any) -> None:
            raise ZeroDivisionError

    monkeypatch.setattr(checksums, "tensor_hash", lambda: Failing)
    observer = Hasher([_row("a", 0, 100)])

    class Reader(PreadReader):
        def __init__(self) -> None: ...

        def land(self, block: Block, slot: Any) -> Any:
            if block.offset == 0:
                time.sleep(0.05)
            return _data(10)

        def close(self) -> None: ...

    lots = [raw(Block(0, at, 10, ())) for at in range(0, 100, 10)]
    with pytest.raises(ZeroDivisionError):
        watch.handing(lots, lambda _: Reader(), 4, observer).run(Deadline(None))


def test_bytes_shown_twice_are_a_fault_and_no_digest() -> None:
    observer = Hasher([_row("a", 0, 30)])
    observer.saw(0, 0, _data(10), _never)
    with pytest.raises(AssertionError, match="twice"):
        observer.saw(0, 5, _data(10), _never)


def test_files_and_empty_tensors_and_others_bytes() -> None:
    observer = Hasher([_row("a", 8, 4, source=1), _row("none", 12, 0, source=1)])
    observer.saw(0, 0, _data(100), _never)  # Of a source that holds none of them.
    observer.saw(1, 0, _data(8), _never)
    with pytest.raises(AssertionError):
        observer.digests()["a"]
    observer.saw(1, 8, np.arange(4, dtype=np.uint8), _never)
    assert observer.digests()["a"] == xxhash.xxh3_128_hexdigest(bytes(range(4)))
    assert observer.digests()["none"] == xxhash.xxh3_128_hexdigest(b"")
    empty = Hasher(files={0: 0})
    assert empty.digests()[0] == hashlib.sha256().hexdigest()


def test_the_published_digest_of_some_bytes() -> None:
    # From the algorithm's own test vectors: nothing, with seed 0.
    observer = Hasher([_row("none", 0, 0)])
    assert observer.digests()["none"] == "99aa06d3014798d86001c324468d497f"


def test_without_the_package_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "xxhash", None)
    with pytest.raises(errors.FrameworkMissingError, match="pip install 'xxhash>="):
        Hasher([_row("a", 0, 1)])
    # SHA-256 takes no package.
    Hasher(files={0: 1})


def test_what_was_stored_is_shown_segment_by_segment() -> None:
    memory = [np.arange(100, dtype=np.uint8)]
    block = Block(0, 1000, 30, (Segment(1000, 10, 0, 50), Segment(1020, 10, 0, 70)))
    placed = [(at, bytes(part)) for at, part in stored(block, memory, None)]
    assert placed == [(1000, bytes(range(50, 60))), (1020, bytes(range(70, 80)))]
    landed = np.arange(200, 230, dtype=np.uint8)
    slot = [(at, bytes(part)) for at, part in stored(block, memory, landed)]
    assert slot == [(1000, bytes(range(200, 210))), (1020, bytes(range(220, 230)))]
