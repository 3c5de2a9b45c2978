"""Trials: a load finds the readers and the way that its disk likes, and loses little by trying."""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import samples
import watch
from devices import arrays
from devices.fake import FakeDevice
from devices.queues import MODES
from hypothesis import given, strategies as st

import mfload
from mfload.cuda import staging
from mfload.io import buffers, engine, probes, route, trial
from mfload.io.trial import ReadWay, Trial
from mfload.loading import execute
from mfload.planning import memory
from mfload.planning.blocks import Block
from mfload.runtime import Deadline

MIB = 1 << 20
H200 = {2: 2.0, 4: 2.6, 8: 1.95, 16: 1.85}
"""GB/s of O_DIRECT by readers, of 4 MiB, on a virtual disk that was measured."""


def _load(tried: Trial, nbytes: int, speed: Callable[[ReadWay], float]) -> float:
    """Seconds of a load from a disk which reads so many bytes a second each way."""
    now, block = 0.0, 4 * MIB
    tried.resume(now)
    under_way = collections.deque[ReadWay]()
    while nbytes > 0:
        while len(under_way) < tried.way.readers:
            under_way.append(tried.way)
        now += block / speed(under_way.popleft())
        nbytes -= block
        tried.came(block, now)
    return now


def test_readers_are_few_where_the_disk_likes_few() -> None:
    nbytes = 8 << 30
    tried = Trial(nbytes, 4 * MIB, 1, 16, 8)
    speed = lambda way: 1e9 * (H200[way.readers] if way.direct else 1.83)  # noqa: E731
    seconds = _load(tried, nbytes, speed)
    assert tried.way == ReadWay(True, 4)
    assert [*tried.speeds] == [ReadWay(False, 4), *(ReadWay(True, n) for n in (4, 8, 2))]
    assert tried.gain == pytest.approx(2.6 / 1.83, rel=0.1)
    assert nbytes / 2.6e9 <= seconds < 1.05 * nbytes / 2.6e9


def test_where_the_page_cache_is_fast_it_keeps_the_files() -> None:
    nbytes = 8 << 30
    for past, ways in ((1.19, 6), (0.9, 4)):
        tried = Trial(nbytes, 4 * MIB, 1, 16, 8)
        seconds = _load(tried, nbytes, lambda way, past=past: 2e9 * (past if way.direct else 1.0))
        assert tried.way == ReadWay(False, 2)  # All are alike.
        assert len(tried.speeds) == ways  # More readers are tried only where some are no slower.
        assert seconds < 1.02 * nbytes / 2e9


def test_one_look_at_the_page_cache_is_not_enough_to_give_it_up() -> None:
    """A disk that is slow to begin with, whatever the way."""
    tried, came = Trial(8 << 30, 4 * MIB, 1, 16, 8), [0]

    def speed(way: ReadWay) -> float:
        came[0] += 1
        return 1e9 if came[0] < 40 else 2e9

    _load(tried, 8 << 30, speed)
    assert not tried.way.direct


def test_files_that_stay_in_the_page_cache_are_tried_by_numbers_alone() -> None:
    tried = Trial(8 << 30, 4 * MIB, 1, 8, 8, past=False)
    _load(tried, 8 << 30, lambda way: 1e9 * H200[way.readers])
    assert [*tried.speeds] == [ReadWay(False, n) for n in (4, 8, 2)]
    assert tried.way == ReadWay(False, 4)
    assert tried.gain is None


def test_a_short_load_tries_nothing() -> None:
    for through, way in ((8, ReadWay(False, 4)), (None, ReadWay(True, 4))):
        tried = Trial(128 * MIB, 4 * MIB, 1, 8, through)
        _load(tried, 128 * MIB, lambda _: 2e9)
        assert tried.way == way
        assert tried.gain is None
        assert len(tried.speeds) <= 1


def test_what_is_left_must_be_worth_another_trial() -> None:
    tried = Trial(1 << 30, 4 * MIB, 1, 16)
    _load(tried, 1 << 30, lambda way: 1e9 * H200[way.readers])
    assert [*tried.speeds] == [ReadWay(True, 4)]  # Of which each moment reads a quarter.
    tried = Trial(1 << 30, 4 * MIB, 1, 16, 8)
    _load(tried, 1 << 30, lambda way: 4e9 if way.direct else 2e9)
    assert [*tried.speeds] == [ReadWay(False, 4), ReadWay(True, 4)]
    assert tried.way == ReadWay(False, 4)  # The little that is left is better kept.


def test_a_number_that_was_asked_for_stays() -> None:
    tried = Trial(8 << 30, 4 * MIB, 3, 3, 3)
    _load(tried, 8 << 30, lambda way: 3e9 if way.direct else 1e9)
    assert tried.way == ReadWay(True, 3)
    assert [*tried.speeds] == [ReadWay(False, 3), ReadWay(True, 3)]


def test_pauses_of_a_load_are_not_counted() -> None:
    tried = Trial(8 << 30, 4 * MIB, 1, 8)
    now = 0.0
    for _ in range(100):
        now += 10
        tried.resume(now)
        for _ in range(4):
            tried.came(4 * MIB, now := now + 0.002)
    assert tried.speeds[ReadWay(True, 4)] == pytest.approx(4 * MIB / 0.002)


@given(
    best=st.integers(0, 4), more=st.floats(0.6, 0.94), fewer=st.floats(0.6, 0.94),
    noise=st.lists(st.floats(-0.01, 0.01), min_size=7, max_size=7), rate=st.floats(0.2e9, 4e9),
    kept=st.none() | st.floats(0.3, 1.5),
)  # fmt: skip
def test_the_best_of_a_disk_with_one_best_number_is_found(
    best: int, more: float, fewer: float, noise: list[float], rate: float, kept: float | None
) -> None:
    """Each doubling beyond the best number, and each halving, loses some of the speed."""

    def speed(way: ReadWay) -> float:
        if not way.direct:
            return rate * (kept or 0)
        steps = way.readers.bit_length() - 1 - best
        n = noise[way.readers.bit_length()]
        return rate * (1 + n) * (more**steps if steps > 0 else fewer**-steps)

    nbytes = 32 << 30
    tried = Trial(nbytes, 4 * MIB, 1, 16, None if kept is None else 8)
    seconds = _load(tried, nbytes, speed)
    past = [speed(ReadWay(True, 1 << n)) for n in range(5)]
    fastest = max(past)
    if kept is not None and (tried.gain or 0) < trial.WORTH:
        assert not tried.way.direct
    else:
        assert tried.way.direct
        assert speed(tried.way) >= 0.94 * fastest
    assert seconds <= 1.25 * nbytes / speed(tried.way)


def test_more_readers_come_and_go_within_a_load() -> None:
    """Of each number one thread at a time; each block is filled once."""
    wanted, live, seen, told = [2, 5, 1, 3], set[int](), list[int](), [0]
    lock, counts = threading.Lock(), list[tuple[int, int]]()

    class Told:
        way = ReadWay(True, 2)

        def resume(self, now: float) -> None:
            assert now > 0

        def came(self, nbytes: int, now: float) -> None:
            told[0] += nbytes // (2 * MIB)
            Told.way = ReadWay(True, wanted[min(3, told[0] // 100)])

    def work(share: engine.Share) -> None:
        name = threading.get_ident()
        with lock:
            live.add(name)
        for block in share:
            time.sleep(0.001)
            with lock:
                seen.append(block.offset)
                counts.append((told[0], len(live)))
            share.done(block)
        with lock:
            live.discard(name)

    blocks = [Block(0, n, 2 * MIB, ()) for n in range(400)]
    tried: Any = Told()
    engine.Engine([(blocks, work, 5)], trial=tried).run(Deadline(None))
    assert sorted(seen) == list(range(400))
    assert max(n for _, n in counts) == 5
    assert max(n for at, n in counts if at < 100) == 2
    assert min(n for at, n in counts if 200 <= at < 300) == 1
    assert max(n for at, n in counts if at >= 320) == 3
    assert live == set()


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """A load of some MiB is worth a trial, and each way a moment."""
    monkeypatch.setattr(route, "TRIED", MIB)
    monkeypatch.setattr(route, "SMALL", MIB)
    monkeypatch.setattr(trial, "_SECONDS", 0.0)
    monkeypatch.setattr(trial, "_LEFT", 0)
    monkeypatch.setattr(engine, "_REPORTED_BYTES", 1)
    monkeypatch.setattr(memory, "_COLD_BLOCK", 64 << 10)
    watch.told(monkeypatch)  # Else a busy machine reads all before the first look.


LARGE = samples.numbers((24 * MIB + 12,), np.uint8)


def _cold(tmp_path: Path) -> Path:
    path = samples.save(tmp_path / "cold.safetensors", {"a": LARGE, "b": LARGE[: 5 * MIB]})
    _dropped(path)
    return path


def _dropped(path: Path) -> None:
    watch.drop_cache(path)
    with path.open("rb") as file:
        share = probes.cached_share(file.fileno(), path.stat().st_size)
        if share != 0.0 or probes.direct_alignment(file.fileno()) is None:
            pytest.skip(f"cached {share} when dropped")


def _large(reads: list[watch.Read]) -> list[bool]:
    """Which reads of blocks went past the page cache; the ends of tensors are short."""
    return [read.direct for read in reads if read.nbytes >= 32 << 10]


@pytest.mark.parametrize(
    ("worth", "engine_", "why"),
    [(0.0, "direct", "took over: the next load reads the disk again"),
     (1e9, "pread", "not worth the next load's")],
)  # fmt: skip
@pytest.mark.parametrize("framework", ["numpy", "torch"])
@pytest.mark.usefixtures("tried")
def test_a_load_goes_past_the_page_cache_where_that_is_faster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, worth: float, engine_: str, why: str,
    framework: Any,
) -> None:  # fmt: skip
    monkeypatch.setattr(trial, "WORTH", worth)
    path = _cold(tmp_path)
    monkeypatch.setattr(execute, "share_of_cores", lambda: 3)
    real, protected = buffers.ForkProtection, list[int]()

    def protect(memory: Any) -> Any:
        protected.append(sum(array.nbytes for array in memory))
        return real(memory)

    monkeypatch.setattr(buffers, "ForkProtection", protect)
    reads, report = watch.spy(monkeypatch), mfload.Report()
    with watch.nothing_left():
        arrays = mfload.load(path, framework, report=report)
    assert protected[0] >= report.result_bytes
    assert engine_ == "direct" or report.threads <= 3
    assert samples.same(np.asarray(arrays["a"]), LARGE)
    assert samples.same(np.asarray(arrays["b"]), LARGE[: 5 * MIB])
    ((_, name, said),) = report.route
    assert name == engine_
    assert "kept there: at most a quarter of the available " in said
    assert "; O_DIRECT was " in said
    assert said.endswith(why)
    assert any(note.startswith("readers tried, GB/s: ") for note in report.notes)
    assert {*_large(reads)} == {True, False}
    assert _large(reads)[-1] == (engine_ == "direct")


@pytest.mark.usefixtures("tried")
def test_the_word_of_the_user_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "WORTH", 0.0)
    path = _cold(tmp_path)
    for options, direct in (
        ({"page_cache": "keep"}, {False}),
        ({"engine": "pread"}, {False}),
        ({"page_cache": "bypass"}, {True}),
        ({"engine": "direct"}, {True}),
    ):
        watch.drop_cache(path)
        with monkeypatch.context() as patched:
            reads, report = watch.spy(patched), mfload.Report()
            given: Any = options
            mfload.load(path, "numpy", report=report, options=mfload.Options(**given))
        assert {*_large(reads)} == direct, options
        assert "O_DIRECT was" not in report.route[0][2]
        tries = any(note.startswith("readers tried") for note in report.notes)
        assert tries == (options != {"engine": "pread"})  # What is in the page cache is not asked.
    watch.drop_cache(path)
    report = mfload.Report()
    mfload.load(path, "numpy", report=report, options=mfload.Options(threads=3))
    assert report.threads == 3
    (said,) = (note for note in report.notes if note.startswith("readers tried"))
    assert said.count("3 past the page cache ") == said.count(" past the page cache ") == 1


@pytest.mark.usefixtures("tried")
def test_readers_that_come_and_go_stay_within_the_plan(tmp_path: Path) -> None:
    path = _cold(tmp_path)
    for page_cache in ("auto", "bypass"):
        how: Any = mfload.Options(page_cache=page_cache)
        watch.drop_cache(path)
        planned, report = mfload.plan(path, framework="numpy", options=how), mfload.Report()
        mfload.load(path, "numpy", options=how, report=report)
        assert report.peak_bytes <= planned.peak_bytes
        assert report.threads <= planned.threads


def test_files_of_which_some_are_warm_are_not_tried() -> None:
    cold = route.Leg("a", "pread", "", 0.0, cold=True, either=True)
    past = route.Leg("a", "direct", "", 0.0, direct=True)
    warm = route.Leg("b", "pread", "", 1.0)
    through_cufile = past._replace(engine="gds")
    large = route.TRIED
    for legs, worth in (
        ([(cold, large)], True),
        ([(past, large)], True),
        ([(past, large - 1)], False),
        ([(past, large), (warm, large // 16)], True),
        ([(past, large), (warm, large // 16 + 1)], False),
        ([(through_cufile, 2 * large)], False),
        ([(cold._replace(either=False), large)], True),
        ([(warm, large)], False),
    ):
        assert route.worth_a_trial(legs) == worth, legs


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("worth", [0.0, 1e9])
@pytest.mark.usefixtures("tried")
def test_onto_devices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: Any, worth: float
) -> None:
    """Readers that retire wait for their copies; those that come get slots and streams."""
    monkeypatch.setattr(trial, "WORTH", worth)
    monkeypatch.setattr(staging, "SLOT", 64 << 10)
    path = _cold(tmp_path)
    device = FakeDevice(mode=mode)
    arrays.take(monkeypatch, arrays.Arrays(device))
    report = mfload.Report()
    found = mfload.load(path, "numpy", report=report)
    assert samples.same(found["a"], LARGE)
    assert samples.same(found["b"], LARGE[: 5 * MIB])
    ((_, name, why),) = report.route
    assert name == "pinned"
    assert why.startswith("buffered: 0% in the page cache, kept there")
    assert ("took over" in why) == (worth == 0.0)
    del found
    device.assert_clean()


def test_devices_share_the_readers_that_are_wanted() -> None:
    """Each pool has one at least."""
    live, most = collections.Counter[int](), collections.Counter[int]()

    def work(pool: int, share: engine.Share) -> None:
        live[pool] += 1
        most[pool] = max(most[pool], live[pool])
        for block in share:
            time.sleep(0.001)
            share.done(block)

    blocks = [Block(0, n, 1, ()) for n in range(20)]
    for readers, each in ((1, 1), (3, 2), (4, 2), (8, 4)):
        live.clear()
        most.clear()
        tried = Trial(1 << 30, 4 * MIB, readers, readers)
        pools = [(blocks, partial(work, pool), 4) for pool in range(2)]
        engine.Engine(pools, trial=tried).run(Deadline(None))
        assert most == {0: each, 1: each}


@pytest.mark.parametrize("files", [1, 6])
@pytest.mark.usefixtures("tried")
def test_the_batches_of_a_stream_go_on_with_one_trial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: int
) -> None:
    """Also if each is of files that alone are not worth one."""
    monkeypatch.setattr(trial, "WORTH", 0.0)
    monkeypatch.setattr(route, "TRIED", 20 * MIB)
    parts = {f"t{n:02}": LARGE[n : n + 3 * MIB] for n in range(12)}
    path, names = tmp_path / "cold", sorted(parts)
    path.mkdir()
    for n in range(files):
        some = names[n * 12 // files : (n + 1) * 12 // files]
        part = path / f"model-{n:05}.safetensors"
        _dropped(samples.save(part, {name: parts[name] for name in some}))
    monkeypatch.setattr("mfload.loading.stream.BATCH", 4 * MIB)
    reads, report = watch.spy(monkeypatch), mfload.Report()
    for name, array in mfload.stream(path, "numpy", report=report):
        assert samples.same(array, parts[name])
    assert _large(reads)[0] is False
    assert _large(reads)[-1] is True
    assert "took over" in report.route[-1][2]
    assert len([note for note in report.notes if note.startswith("readers tried")]) == 1


@pytest.mark.parametrize("worth", [0.0, 1e9])
@pytest.mark.usefixtures("tried")
def test_a_witness_sees_every_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, worth: float
) -> None:
    """It waits for the bytes before; who retires leaves none behind."""
    pytest.importorskip("xxhash")
    monkeypatch.setattr(trial, "WORTH", worth)
    path = _cold(tmp_path)
    mfload.verify(path, mode="write")
    _dropped(path)
    report = mfload.Report()
    found = mfload.load(path, "numpy", verify=f"{path}.checksums.json", report=report)
    assert samples.same(found["a"], LARGE)
    assert any("readers tried" in note for note in report.notes)


@pytest.mark.usefixtures("tried")
def test_where_nothing_is_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "WORTH", 0.0)
    path = _cold(tmp_path)
    report = mfload.Report()
    mfload.load(path, "numpy", report=report, options=mfload.Options(max_host_overhead="127MiB"))
    assert not any("tried" in note for note in report.notes)
    watch.drop_cache(path)
    report, reads = mfload.Report(), watch.spy(monkeypatch)
    with mfload.open(path) as opened:
        lazy = opened.get_slice("a")[:]
    assert samples.same(lazy, LARGE)
    # Other processes of the machine find in the page cache what this one reads.
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr(execute, "share_of_cores", lambda: 4)
    watch.drop_cache(path)
    reads.clear()
    mfload.load(path, "numpy", report=report)
    assert not any(_large(reads))
    assert any("tried" in note for note in report.notes)


def test_the_route_says_why_a_faster_way_did_not_take_over() -> None:
    leg = route.Leg("a", "pread", "5% in the page cache", 0.05, cold=True, either=True)
    said = {gain: route.after_trial(leg, gain, False).why for gain in (1.1, 1.5)}
    assert said[1.1].endswith("1.10 times as fast in a trial, not worth the next load's")
    assert said[1.5].endswith("1.50 times as fast in a trial, with too little left to change")
