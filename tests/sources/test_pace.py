"""What requests to one server know of each other: pace, and which has stalled."""

from __future__ import annotations

import gc
import os
import pickle
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import samples
import serving
from hypothesis import given, settings, strategies as st
from serving import Server, after, stall

import mfload
from mfload.io import trial
from mfload.io.trial import Trial
from mfload.loading import session
from mfload.sources import http, link
from mfload.sources.client import Client
from mfload.sources.link import Link, Pace
from mfload.sources.tls import Tls

BLOCK = 1 << 20  # Bytes a request, here: a server in this process is slow.
MODEL = {f"w{n:02}": np.full(BLOCK // 4, n, np.float32) for n in range(24)}


class Clock:
    """Time that passes only while somebody sleeps."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return samples.save(tmp_path_factory.mktemp("m") / "m", MODEL).read_bytes()


@pytest.fixture
def server(raw: bytes, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Server]:
    monkeypatch.setenv("NETRC", os.fspath(tmp_path / "no netrc"))
    monkeypatch.setattr(http.HttpSource, "costs", http.COSTS._replace(block=BLOCK))
    with serving.serving({"/model.safetensors": raw}) as served:
        yield served


class TestPace:
    @given(
        rate=st.integers(1, 10**10),
        parts=st.lists(st.tuples(st.floats(0, 1), st.floats(0, 0.3)), min_size=1, max_size=300),
    )
    @settings(deadline=None, max_examples=100)
    def test_no_second_has_more_than_the_rate(
        self, rate: int, parts: list[tuple[float, float]]
    ) -> None:
        clock = Clock()
        pace = Pace(rate, clock, clock.sleep)
        taken = list[tuple[float, int]]()
        for part, idle in parts:
            clock.now += idle
            nbytes = max(1, int(part * pace.piece))
            pace.take(nbytes)
            taken.append((clock.now, nbytes))
        for begun, _ in taken:
            second = sum(nbytes for at, nbytes in taken if begun <= at < begun + 1)
            assert second <= 1.1 * rate + 1

    @pytest.mark.parametrize("rate", [1000, 10**6, 3 * 10**8])
    def test_all_of_the_rate_is_used(self, rate: int) -> None:
        clock = Clock()
        pace, came = Pace(rate, clock, clock.sleep), 0
        while clock.now < 102:
            pace.take(pace.piece)
            came += pace.piece
        assert came == pytest.approx(2 * rate, rel=0.1)

    def test_threads_share_it(self) -> None:
        clock, slept = Clock(), list[float]()
        pace = Pace(64_000, clock, slept.append)  # The time stands still.
        threads = [
            threading.Thread(target=lambda: [pace.take(1000) for _ in range(8)]) for _ in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert max(slept) == pytest.approx(63_000 / 64_000)
        assert len(slept) == 63

    def test_loads_with_the_same_number_share_it(self) -> None:
        client = Client(Tls(), 1)
        one, other = Link(client, 5000), Link(client, 5000)
        assert one.pace is other.pace
        assert one.pace is not Link(client, 5001).pace
        assert Link(client).pace is None

    def test_a_load_takes_all_its_bytes_at_the_pace(
        self, server: Server, raw: bytes, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        taken = list[int]()
        monkeypatch.setattr(Pace, "take", lambda _, nbytes: taken.append(nbytes))
        options = mfload.Options(max_bandwidth="64MB")
        found = mfload.load(server.url(), "numpy", options=options)
        samples.assert_same(found, MODEL)
        assert sum(taken) == len(raw) + 1  # And a byte for the version, at the end.
        assert max(taken) <= 10**6  # So that no turn takes long.

    def test_it_travels_with_a_pickle(self, server: Server) -> None:
        options = mfload.Options(max_bandwidth=10**9)
        with mfload.open(server.url(), options=options) as opened:
            copied = pickle.loads(pickle.dumps(opened))
        source: Any = copied._sources[0] if hasattr(copied, "_sources") else None
        made = http.open_url(server.url(), mfload.options.LoadOptions(max_bandwidth=10**9))
        again = pickle.loads(pickle.dumps(made))
        for each in (made, again, made.beside("x"), *([source] if source else [])):
            assert each.link.pace is made.link.pace is not None


class TestStalls:
    def test_one_that_stalls_is_asked_again(
        self, server: Server, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(link, "_LEAST", 0.3)
        server.always = after(15, once(stall(20, after=100_000)))
        report, begun = mfload.Report(), time.monotonic()
        options = mfload.Options(threads=4)
        found = mfload.load(server.url(), "numpy", report=report, options=options)
        samples.assert_same(found, MODEL)
        assert time.monotonic() - begun < 10
        assert any("asked again: 1 of 28 requests" in note for note in report.notes)
        assert len(server.asked) == 28

    def test_the_head_of_an_answer_may_stall(
        self, server: Server, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(link, "_LEAST", 0.3)
        server.always = after(15, once(lambda handler: time.sleep(20) or True))
        begun = time.monotonic()
        found = mfload.load(server.url(), "numpy", options=mfload.Options(threads=4))
        samples.assert_same(found, MODEL)
        assert time.monotonic() - begun < 10

    def test_others_than_a_few_are_waited_for(
        self, server: Server, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(link, "_LEAST", 0.3)
        late = lambda handler: time.sleep(1)  # noqa: E731 - and then the usual answer.
        server.always = after(15, late)
        report = mfload.Report()
        found = mfload.load(server.url(), "numpy", report=report, options=mfload.Options(threads=4))
        samples.assert_same(found, MODEL)
        assert len(server.asked) <= 27 + 2

    def test_slow_answers_are_not_asked_again(self, server: Server) -> None:
        server.always = lambda handler: time.sleep(0.2)
        report = mfload.Report()
        found = mfload.load(server.url(), "numpy", report=report)
        samples.assert_same(found, MODEL)
        assert not any("asked again" in note for note in report.notes)
        assert len(server.asked) == 27

    def test_the_budget(self) -> None:
        made = Link(Client(Tls(), 1))
        for _ in range(100):
            watch = made.watch()
        assert sum(made.spend() for _ in range(100)) == 6  # One, and 5 of 100.
        assert made.patience() is None
        watch._since -= 100  # pyright: ignore - it has waited for so long
        assert watch.late() == link._LEAST  # Nothing is known of others.
        for _ in range(link._KNOWN):
            made.add(2.0)
        assert made.patience() == pytest.approx(6.0)
        assert made.watch().late() == pytest.approx(6.0, abs=0.1)
        assert watch.late() == link._LEAST  # Nothing is left to spend.

    def test_a_link_goes_with_its_sources(self, server: Server) -> None:
        source = http.open_url(server.url(), mfload.options.LoadOptions())
        source.read(0, 100)
        source.read(100_000, 100)
        gone = weakref.ref(source.link)
        gc.disable()
        try:
            del source
            assert gone() is None
        finally:
            gc.enable()


class TestConnections:
    def test_they_are_used_again(self, server: Server) -> None:
        mfload.load(server.url(), "numpy", options=mfload.Options(threads=4))
        assert len(server.asked) == 27  # A header, 25 blocks, and the version at the end.
        assert len({each.connection for each in server.asked}) <= 4

    def test_a_long_load_tries_numbers_of_them(
        self, server: Server, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(session, "_LONG", 10 << 20)
        for name in ("_SECONDS", "_BLOCKS", "_SETTLING"):
            monkeypatch.setattr(trial, name, 0)
        report = mfload.Report()
        samples.assert_same(mfload.load(server.url(), "numpy", report=report), MODEL)
        assert report.threads <= 32
        assert any(note.startswith("readers tried, GB/s: 16 ") for note in report.notes)
        options = mfload.Options(max_host_overhead="16MiB")
        mfload.load(server.url(), "numpy", report=report, options=options)
        assert not any("tried" in note for note in report.notes)

    @pytest.mark.parametrize(
        ("single", "shared", "expected"), [(60e6, 9e9, 32), (200e6, 2e9, 16), (1e9, 500e6, 16)]
    )
    def test_more_of_them_as_long_as_that_helps(
        self, single: float, shared: float, expected: int
    ) -> None:
        how = {"begin": 16, "past": False, "files": False}
        made, now = Trial(16 << 30, BLOCK, 2, 32, 32, **how), 0.0  # pyright: ignore
        made.resume(now)
        while not made.over:
            now += BLOCK / min(single * made.way.readers, shared)
            made.came(BLOCK, now)
        assert made.way.readers <= expected
        assert min(single * made.way.readers, shared) == min(single * expected, shared)
        assert "page cache" not in str(made)


def once(fault: Any) -> Any:
    """A fault of the first request that it meets."""
    left = [fault]
    return lambda handler: left.pop()(handler) if left else None
