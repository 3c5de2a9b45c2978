"""Faults of a server, wherever a block can begin: the right bytes, or a typed error in time."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import proxy as faults
import pytest
import samples
import serving
from hypothesis import HealthCheck, given, settings, strategies as st
from proxy import Fault, Proxy

import mfload
from mfload import errors
from mfload.sources import http, link

BLOCK = 64 << 10  # Bytes a request, here.
DEADLINE = 8.0
SLOW = os.environ.get("MFLOAD_SLOW")
MODEL = {f"w{n}": np.arange(n, n + 20_000, dtype=np.float32).reshape(200, 100) for n in range(6)}
PASSING: dict[str, Callable[[int], Fault]] = {
    "reset": lambda at: faults.reset(at),
    "truncated": lambda at: faults.truncated(at),
    "stall": lambda at: faults.stall(at),
    "silence": lambda at: faults.silence(),
    "shorter": lambda at: faults.wrong_length(-1 - at),
    "longer": lambda at: faults.wrong_length(1 + at),
    "500": lambda at: faults.refuse("500 Internal Server Error"),
    "502": lambda at: faults.refuse("502 Bad Gateway"),
    "503": lambda at: faults.refuse("503 Slow Down", Retry_After="0"),
    "429": lambda at: faults.refuse("429 Too Many Requests", Retry_After="0"),
    "gzip": lambda at: faults.gzip,
    "no ranges": lambda at: faults.changed("Content-Range", None),
    "another range": lambda at: faults.changed("Content-Range", "bytes 7-8/9"),
    "another version": lambda at: faults.changed("ETag", '"other"'),
    "no version": lambda at: faults.changed("ETag", None),
    "denied": lambda at: faults.refuse("403 Forbidden"),
    "gone": lambda at: faults.refuse("404 Not Found"),
}
HELD = {"reset", "truncated", "stall", "silence", "500", "502", "503", "429"}  # Read all the same.


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Short requests and pauses, and no `.netrc` of the user's."""
    monkeypatch.setattr(http, "_PAUSE", 0.001)
    monkeypatch.setattr(http, "_LONGEST_PAUSE", 0.01)
    monkeypatch.setattr(http, "STALLED", 0.4)
    monkeypatch.setattr(link, "_LEAST", 0.2)
    monkeypatch.setenv("NETRC", os.fspath(tmp_path / "no netrc"))
    costs = http.COSTS._replace(block=BLOCK, staged=BLOCK, span=BLOCK, merge_gap=1 << 10)
    monkeypatch.setattr(http.HttpSource, "costs", costs)


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return samples.save(tmp_path_factory.mktemp("m") / "m", MODEL).read_bytes()


@pytest.fixture(scope="module")
def shared(raw: bytes) -> Iterator[tuple[serving.Server, Proxy]]:
    with (
        serving.serving({"/model.safetensors": raw}) as server,
        faults.proxying(server.port) as proxy,
    ):
        yield server, proxy


@pytest.fixture
def proxy(shared: tuple[serving.Server, Proxy]) -> Proxy:
    shared[1].reset()
    return shared[1]


def load(proxy: Proxy, **options: Any) -> dict[str, Any]:
    return mfload.load(
        proxy.url("/model.safetensors"),
        "numpy",
        options=mfload.Options(timeout=DEADLINE, **options),
    )


def starts(proxy: Proxy) -> list[int]:
    """The offsets that requests of a load begin at."""
    load(proxy)
    found = [each.first for each in proxy.requests if each.first is not None]
    proxy.reset()
    return found


def right_or_typed(proxy: Proxy, *, must: bool = False) -> None:
    """A load gives the right bytes, which it `must` for some faults, or raises in time."""
    begun = time.monotonic()
    try:
        samples.assert_same(load(proxy), MODEL)
    except errors.SourceError as error:
        assert not must, error  # noqa: PT017 - some faults must be overcome
        assert error.file == proxy.url("/model.safetensors")  # noqa: PT017
    assert time.monotonic() - begun < DEADLINE + 2


class TestFaults:
    @pytest.mark.parametrize("name", PASSING)
    def test_wherever_a_request_begins(self, proxy: Proxy, name: str) -> None:
        for first in starts(proxy):
            proxy.reset()
            proxy.plan(PASSING[name](1000), first=first)
            right_or_typed(proxy, must=name in HELD)
            assert not proxy.planned[0].times, "the fault did not befall"

    @pytest.mark.parametrize("name", sorted(PASSING.keys() - {"another version"}))
    def test_all_the_time(self, proxy: Proxy, name: str) -> None:
        proxy.plan(PASSING[name](0), times=1000)
        begun = time.monotonic()
        with pytest.raises(errors.SourceError):
            load(proxy)
        assert time.monotonic() - begun < DEADLINE + 2

    @given(
        name=st.sampled_from(sorted(HELD)),
        at=st.integers(0, BLOCK),
        numbers=st.sets(st.integers(0, 7), max_size=3),
    )
    @settings(
        max_examples=100 if SLOW else 10,
        deadline=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture],
    )
    def test_several_at_any_byte(self, proxy: Proxy, name: str, at: int, numbers: set[int]) -> None:
        offsets = starts(proxy)
        for number in numbers:
            proxy.plan(PASSING[name](at), first=offsets[number])
        right_or_typed(proxy, must=True)

    def test_a_server_that_trickles(self, proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(link, "_KNOWN", 3)  # A load of so few requests knows no more.
        proxy.plan(faults.trickle(50), first=starts(proxy)[3])
        right_or_typed(proxy, must=True)

    def test_an_object_replaced_midway(
        self, shared: tuple[serving.Server, Proxy], proxy: Proxy
    ) -> None:
        server, path = shared[0], "/model.safetensors"
        body = server.files[path]
        other = body[:-80_000] + bytes(80_000)
        for first in starts(proxy)[:-1]:
            proxy.reset()
            proxy.plan(faults.midway(lambda: server.files.update({path: other}), 10), first=first)
            begun = time.monotonic()
            try:
                samples.assert_same(load(proxy), MODEL)
            except errors.SourceChangedError:
                pass
            else:
                assert first == starts(proxy)[-1], "no byte was read later"
            finally:
                server.files[path] = body
            assert time.monotonic() - begun < DEADLINE

    def test_a_redirect_to_another_host_brings_no_credentials(
        self, shared: tuple[serving.Server, Proxy], proxy: Proxy
    ) -> None:
        with serving.serving(shared[0].files) as other:
            to = f"http://localhost:{other.port}"
            proxy.plan(faults.redirect(to), times=1000)
            samples.assert_same(load(proxy, headers={"Authorization": "Bearer s3cr3t"}), MODEL)
            assert other.asked
            assert all(each.authorization is None for each in other.asked)
        assert all(each.headers["authorization"] == "Bearer s3cr3t" for each in proxy.requests)

    def test_a_late_answer_is_not_written(self, proxy: Proxy) -> None:
        """Of a request that was given up nothing lands later, in memory of others by then."""
        offsets = starts(proxy)
        for first in offsets[1:5]:
            proxy.plan(faults.stall(100, 0.3), first=first)
        found = load(proxy)
        for each in found.values():
            each[:] = -1
        time.sleep(0.5)
        assert all((each == -1).all() for each in found.values())
