"""Small lazy tensors of a server: fetched together before they are read."""

from __future__ import annotations

import pickle
import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import reference
import serving

import mfload
from mfload import errors
from mfload.sources.ahead import AheadSource, runs_of
from mfload.sources.base import Costs
from mfload.sources.local import LocalFile
from mfload.sources.memory import MemorySource

SMALL = 4 << 10
NAMES = [f"t{number:03}" for number in range(200)]


def _file() -> tuple[dict[str, bytes], bytes]:
    """Small tensors with a large one in the middle, and the file that holds them."""
    random.seed(0)
    data = {name: random.randbytes(SMALL) for name in NAMES}
    data["t100"] = random.randbytes(3 << 20)
    tensors = {name: reference.Tensor("U8", (len(raw),), raw) for name, raw in data.items()}
    return data, reference.write(tensors)


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[serving.Server, dict[str, bytes]]]:
    data, raw = _file()
    with serving.serving({"/model.safetensors": raw}) as server:
        yield server, data


def _stream(server: serving.Server, **given: Any) -> Any:
    server.asked.clear()
    return mfload.stream(server.url(), "numpy", lazy=True, **given)


def test_few_requests_and_the_same_bytes(served: Any) -> None:
    server, data = served
    report = mfload.Report()
    with _stream(server, report=report) as tensors:
        for name, tensor in tensors:
            assert tensor.read().tobytes() == data[name]
            assert tensor[1:5].read().tobytes() == data[name][1:5]
    assert len(server.asked) <= 12  # The header, two runs, and twice parts of the large one.
    assert report.tensors == 2 * len(data)


@pytest.mark.parametrize("backwards", [False, True])
def test_those_that_are_read_late_or_in_another_order_are_right(
    served: Any, backwards: bool
) -> None:
    server, data = served
    order = NAMES[::-1] if backwards else random.sample(NAMES, 40)
    with _stream(server, order=order) as tensors:
        kept = dict(tensors)
        assert list(kept) == order
        for name in reversed(order):
            assert kept[name].read().tobytes() == data[name]


def test_a_limit_of_the_stream_bounds_what_is_fetched(served: Any) -> None:
    server, data = served
    options = mfload.Options(max_host_overhead=4 << 20)
    with _stream(server, options=options) as tensors:
        for name, tensor in tensors:
            assert tensor.read().tobytes() == data[name]
    ranges = [asked.range for asked in server.asked]
    spans = [each.removeprefix("bytes=").split("-") for each in ranges if each]
    assert all(int(stop) - int(start) < (1 << 20) + SMALL for start, stop in spans)


def test_a_run_that_fails_is_met_by_its_reader() -> None:
    data, raw = _file()
    with serving.serving({"/model.safetensors": raw}) as server, _stream(server) as tensors:
        server.always = serving.refuse(403)
        name, tensor = next(tensors)
        with pytest.raises(errors.SourceError) as caught:
            tensor.read()
        assert (caught.value.file, caught.value.tensor) == (server.url(), name)
        server.always = None
        name, tensor = next(tensors)
        assert tensor.read().tobytes() == data[name]


class _Counted(MemorySource):
    """Counts what is read; refuses some of it."""

    def __init__(self, data: bytes, refused: bool = False) -> None:
        super().__init__(data)
        self.opened, self._refused = 0, refused

    def open(self, flags: int = 0) -> Any:
        self.opened += 1
        if self._refused and self.opened == 1:
            raise errors.ReadError("refused", file=self.name)
        return super().open(flags)


def _read(source: Any, offset: int, nbytes: int) -> bytes:
    memory = np.zeros(nbytes, np.uint8)
    with source.open() as handle:
        assert handle.read([memory[:3], memory[3:]], offset) == nbytes
    return memory.tobytes()


def test_ranges_are_held_two_at_a_time() -> None:
    raw = bytes(range(256))
    inner = _Counted(raw)
    source = AheadSource(inner, [(10, 50), (60, 100), (100, 140)])
    source.advance(20)
    assert _read(source, 12, 30) == raw[12:42]
    assert _read(source, 60, 40) == raw[60:100]
    assert inner.opened == 2
    assert _read(source, 45, 10) == raw[45:55]  # Past the end of its range.
    assert inner.opened == 3
    source.advance(110)
    assert _read(source, 100, 40) == raw[100:140]
    assert inner.opened == 4
    assert _read(source, 12, 30) == raw[12:42]  # It was let go.
    assert inner.opened == 5
    source.advance(5)  # In none.
    assert inner.opened == 5
    assert (source.size, source.name) == (256, inner.name)


def test_what_was_not_fetched_is_read() -> None:
    raw = bytes(range(256))
    source = AheadSource(_Counted(raw, refused=True), [(10, 50)])
    source.advance(10)
    assert _read(source, 12, 30) == raw[12:42]


@pytest.mark.parametrize("seed", range(4))
def test_threads_that_read_pieces_in_turns_take_few_requests(seed: int) -> None:
    draw = random.Random(seed)
    raw = draw.randbytes(400_000)
    source = _Counted(raw)
    source.costs = Costs(concurrency=16, merge_gap=64, block=20_000)
    pieces, at = list[tuple[int, int, int]](), 0
    while at < 390_000:
        nbytes = draw.randint(1, 3000)
        pieces.append((0, at, nbytes))
        at += nbytes + draw.choice((0, 0, 7, 63, 500))
    runs = runs_of([source], pieces, 1 << 20)[0]
    assert len(runs) < len(pieces) / 3
    assert all(stop - start <= 20_000 for start, stop in runs)
    ahead = AheadSource(source, runs, at_once=8)
    waiting = iter(pieces)
    lock = threading.Lock()

    def work() -> None:
        while True:
            with lock:
                _, offset, nbytes = next(waiting, (0, 0, 0))
            if not nbytes:
                return
            assert _read(ahead, offset, nbytes) == raw[offset : offset + nbytes]

    with ThreadPoolExecutor(8) as pool:
        for each in [pool.submit(work) for _ in range(8)]:
            each.result()
    assert source.opened <= len(runs) + len(pieces) // 10
    far = pieces[0]  # It was let go.
    assert _read(ahead, *far[1:]) == raw[far[1] : far[1] + far[2]]


def test_it_can_be_pickled(tmp_path: Path) -> None:
    source = AheadSource(MemorySource(bytes(range(256))), [(10, 50)])
    source.advance(10)
    assert _read(pickle.loads(pickle.dumps(source)), 12, 30) == bytes(range(12, 42))


@pytest.mark.parametrize("engine", ["mmap", "direct", "pread", "auto"])
def test_files_that_are_waited_for_keep_their_descriptors(engine: Any, tmp_path: Path) -> None:
    """Such as those of a file system over a network, of a source of the user's own."""

    class Slow(LocalFile):
        costs = Costs(concurrency=4)

    data, raw = _file()
    path = tmp_path / "a.safetensors"
    path.write_bytes(raw)
    options = mfload.Options(engine=engine)
    with mfload.stream(Slow(path), "numpy", lazy=True, options=options) as tensors:
        for name, tensor in tensors:
            assert tensor.read().tobytes() == data[name]
