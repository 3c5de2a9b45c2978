"""`Options` mean the same in every public call, or the call refuses them."""

from __future__ import annotations

import inspect
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import watch

import mfload
from mfload import Options, errors, ondemand
from mfload.planning import layout
from mfload.sources.base import ClosedAtEnd, Costs

EXPERTS = {
    f"model.layers.{layer}.mlp.experts.{n}.{part}.weight": np.full((64, 64), n, np.float32)
    for layer in range(2)
    for n in range(3)
    for part in ("up_proj", "down_proj")
}
OTHERS = {"embed": np.zeros((100, 100), np.float32), "norm": np.ones(7, np.float32)}


class Slow:
    """A file whose data, behind the header, come when it is told."""

    file, engine, costs = None, "slow", Costs()

    def __init__(self, path: Path, name: str = "slow") -> None:
        self.name, self._raw = name, path.read_bytes()
        self.size, self.identity = len(self._raw), "always"
        self.data = 8 + int.from_bytes(self._raw[:8], "little")
        self.gate, self.waiting, self.most, self.blocked = threading.Event(), 0, 0, True
        self._lock = threading.Lock()

    def read(self, offset: int, nbytes: int) -> bytes:
        if offset + nbytes > self.data and self.blocked:
            with self._lock:
                self.waiting += 1
                self.most = max(self.most, self.waiting)
            self.gate.wait(30)
            with self._lock:
                self.waiting -= 1
        return self._raw[offset : offset + nbytes]

    def open(self, flags: int = 0) -> Any:
        return Handle(self)

    def keep(self, keeps: bool) -> None:
        pass

    def check(self) -> None:
        pass

    def beside(self, name: str) -> Any:
        raise errors.UsageError("nothing lies beside it")


class Handle(ClosedAtEnd):
    fd = -1

    def __init__(self, source: Slow) -> None:
        self._source = source

    def read(self, vector: list[Any], offset: int, least: int | None = None) -> int:
        start = offset
        for part in vector:
            view = memoryview(part).cast("B")
            view[:] = self._source.read(offset, view.nbytes)
            offset += view.nbytes
        return offset - start


@pytest.fixture
def path(tmp_path: Path) -> Path:
    mfload.save({**EXPERTS, **OTHERS}, tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


@pytest.fixture
def bundled(tmp_path: Path) -> Path:
    parts = {
        f"layers.{n}.mlp.{part}.weight": np.full(shape, n, np.float32)
        for n in range(2)
        for part, shape in (("up", (32, 16)), ("down", (16, 32)))
    }
    mfload.save({**parts, "embed": np.zeros((100, 100), np.float32)}, tmp_path / "m.safetensors")
    up, down = (rf"layers\.(\d+)\.mlp\.{part}\.weight" for part in ("up", "down"))
    ondemand.bundle(tmp_path / "m.safetensors", tmp_path / "b.safetensors", up=up, down=down)
    return tmp_path / "b.safetensors"


@pytest.fixture
def slow(path: Path) -> Iterator[Slow]:
    made = Slow(path)
    yield made
    made.gate.set()
    assert watch.wait_for(lambda: not watch.readers())


def _experts(where: Any, options: Any = None) -> None:
    with ondemand.ExpertCache(where, options=options) as cache:
        cache.use(0, [1, 2])


def _layers(where: Any, options: Any = None) -> None:
    with ondemand.LayerStream(where, options=options) as stream:
        next(iter(stream))


def _neurons(where: Any, options: Any = None) -> None:
    with ondemand.NeuronCache(where, options=options) as cache:
        cache.use(0, [1])


def _opened(where: Any, options: Any = None) -> None:
    with mfload.open(where, options=options) as opened:
        opened.get_tensor("embed")


def _sliced(where: Any, options: Any = None) -> None:
    with mfload.open(where, options=options) as opened:
        opened.get_slice("embed")[3:90, 1:50]


def _target(name: str) -> Callable[..., Any]:
    def call(where: Any, options: Any = None) -> None:
        folder = Path(os.environ["TARGET"])
        getattr(mfload, name)(where, folder / f"{name}.safetensors", options=options)

    return call


CALLS: dict[str, Callable[..., Any]] = {
    "load": lambda where, **how: mfload.load(where, "numpy", **how),
    "stream": lambda where, **how: [*mfload.stream(where, "numpy", **how)],
    "open": _opened,
    "get_slice": _sliced,
    "verify": lambda where, **how: mfload.verify(where, against=where, **how),
    "diff": lambda where, **how: mfload.diff(where, where, **how),
    "convert": _target("convert"),
    "align": _target("align"),
    "ExpertCache": _experts,
    "LayerStream": _layers,
}
"""Public calls that read data, each as one that reads a slow source."""

HEADERS = {"abstract", "plan"}  # These read headers only.
# They want other checkpoints, or JAX, and so a process of its own.
ELSEWHERE = {"NeuronCache", "bundle", "unbundle", "load_into", "restore", "save"}


def test_the_table_has_every_call() -> None:
    """Of those with `options=`; a new one belongs into it."""
    found = {
        prefix + name
        for module, prefix in ((mfload, ""), (ondemand, "ondemand."))
        for name in module.__all__
        if callable(each := getattr(module, name))
        and "options" in inspect.signature(each).parameters
    }
    known = {*CALLS, *HEADERS, *ELSEWHERE} - {"get_slice"}
    assert {name.removeprefix("ondemand.") for name in found} == {
        name.removeprefix("ondemand.") for name in known
    }


@pytest.mark.parametrize("call", CALLS)
def test_the_timeout(
    slow: Slow, call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each call ends in time, names the file, and what it left behind goes with its read."""
    monkeypatch.setenv("TARGET", str(tmp_path))
    start = time.monotonic()
    with pytest.raises(errors.LoadTimeoutError, match=r"within 0\.5 s") as info:
        CALLS[call](slow, options=Options(timeout=0.5))
    assert 0.4 < time.monotonic() - start < 3
    assert info.value.file == "slow"
    assert slow.waiting
    slow.gate.set()
    del info
    assert watch.wait_for(lambda: not watch.readers() and mfload.live_bytes() == 0)


@pytest.mark.parametrize("opening", [True, False])
def test_the_timeout_of_neurons(bundled: Path, opening: bool) -> None:
    slow = Slow(bundled)
    slow.blocked = opening

    def use() -> None:
        with ondemand.NeuronCache(slow, options=Options(timeout=0.5)) as cache:
            slow.blocked = True
            cache.use(0, [1])

    start = time.monotonic()
    with pytest.raises(errors.LoadTimeoutError) as info:
        use()
    assert time.monotonic() - start < 4
    assert info.value.file == "slow"
    del info
    slow.gate.set()
    assert watch.wait_for(lambda: not watch.readers() and mfload.live_bytes() == 0)


def test_what_a_load_leaves_behind(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each reader that hangs keeps the buffer that it writes to; the error says how many do."""
    monkeypatch.setattr(layout, "BUFFER", 64 << 10)
    slow = Slow(path)
    slow.costs = Costs(block=64 << 10, concurrency=2)  # Or one thread would read so little.
    with pytest.raises(errors.LoadTimeoutError, match="2 readers left behind") as info:
        mfload.load(slow, "numpy", options=Options(timeout=0.5, threads=2))
    del info
    assert 0 < mfload.live_bytes() <= 2 * (64 << 10) + 8192
    slow.gate.set()
    assert watch.wait_for(lambda: not watch.readers() and mfload.live_bytes() == 0)


def _interrupt() -> None:
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


class TestCaches:
    """What a request leaves behind, when its time is up or it is interrupted."""

    def test_a_read_that_comes_late_is_there(self, slow: Slow) -> None:
        with ondemand.ExpertCache(slow, options=Options(timeout=0.3)) as cache:
            for _ in range(2):  # The second waits for what the first began.
                with pytest.raises(errors.LoadTimeoutError, match="reading 1 expert"):
                    cache.use(0, [2])
            with pytest.raises(errors.LoadTimeoutError):
                cache.use(1, [0])
            slow.gate.set()
            assert watch.wait_for(lambda: not slow.waiting)
            before = cache.report().misses
            with cache.use(0, [2]) as experts:
                assert (experts[2]["up_proj"] == 2).all()
            assert cache.report().misses == before

    def test_slots_of_a_read_under_way_are_no_ones(self, slow: Slow) -> None:
        """Others can't have them: they may still be written to."""
        one = 2 * 64 * 64 * 4
        with ondemand.ExpertCache(slow, budget=one, options=Options(timeout=0.3)) as cache:
            with pytest.raises(errors.LoadTimeoutError, match="reading"):
                cache.use(0, [2])
            with pytest.raises(errors.LoadTimeoutError, match="waiting for slots"):
                cache.use(0, [1])
            slow.gate.set()
            assert watch.wait_for(lambda: not slow.waiting)
            with cache.use(0, [1]) as experts:
                assert (experts[1]["down_proj"] == 1).all()

    @pytest.mark.parametrize("engine", ["auto", "threads"])
    def test_an_interrupt(self, slow: Slow, engine: Any) -> None:
        """It ends the waiting at once; the cache closes after 5 seconds at most."""
        start = time.monotonic()
        timer = threading.Timer(0.3, _interrupt)

        def use() -> None:
            with ondemand.ExpertCache(slow, gather=engine) as cache:
                timer.start()
                cache.use(0, [2])

        with pytest.raises(KeyboardInterrupt):
            use()
        assert time.monotonic() - start < 7
        timer.join()
        slow.gate.set()
        assert watch.wait_for(lambda: not watch.readers() and mfload.live_bytes() == 0)

    def test_an_interrupt_while_it_opens(self, slow: Slow) -> None:
        start = time.monotonic()
        timer = threading.Timer(0.3, _interrupt)
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            ondemand.LayerStream(slow)
        assert time.monotonic() - start < 7
        timer.join()
        slow.gate.set()
        assert watch.wait_for(lambda: not watch.readers() and mfload.live_bytes() == 0)

    @pytest.mark.parametrize("threads", [1, 2])
    def test_the_number_of_threads(self, slow: Slow, threads: int) -> None:
        with ondemand.ExpertCache(slow, options=Options(threads=threads, timeout=1)) as cache:
            with pytest.raises(errors.LoadTimeoutError):
                cache.use(0, [0, 1, 2])
            assert slow.most == threads

    @pytest.mark.parametrize("options", [
        Options(engine="mmap"), Options(engine="gds"), Options(engine="pinned"),
        Options(allocator="framework"),
    ])  # fmt: skip
    def test_what_they_refuse(self, path: Path, bundled: Path, options: Options) -> None:
        for call, where in ((_experts, path), (_layers, path), (_neurons, bundled)):
            with pytest.raises(errors.UsageError):
                call(where, options)


@pytest.mark.parametrize("call", ["diff", "verify"])
@pytest.mark.parametrize("side", [0, 1])
def test_the_file_that_is_slow_is_blamed(path: Path, call: str, side: int) -> None:
    slow, fast = Slow(path, "the slow one"), Slow(path, "the fast one")
    fast.gate.set()
    first, second = (slow, fast) if side == 0 else (fast, slow)
    compare: Any = mfload.diff if call == "diff" else mfload.verify
    other = {"b" if call == "diff" else "against": second}
    with pytest.raises(errors.LoadTimeoutError) as info:
        compare(first, **other, options=Options(timeout=0.5))
    assert info.value.file == "the slow one"
    assert info.value.tensor in EXPERTS | OTHERS or side == 0
    slow.gate.set()
    assert watch.wait_for(lambda: not watch.readers())


@pytest.mark.parametrize("field", [
    {"copy": "no"}, {"copy": 1}, {"checksums": "false"}, {"publish": None}, {"address": 7000},
    {"planner": 5}, {"token_file": 5}, {"transports": 5}, {"transports": [["http"]]},
])  # fmt: skip
def test_fields_of_peers(field: Any) -> None:
    """Are looked at when the object is made: a text such as "no" would count as yes."""
    (name,) = field
    with pytest.raises(errors.UsageError, match=name):
        mfload.PeerOptions(**field)


def test_settings_of_a_store_need_no_hash() -> None:
    given = Options(store={"client_options": {"timeout": "5s"}})
    assert hash(given) == hash(Options())
    assert given != Options()
