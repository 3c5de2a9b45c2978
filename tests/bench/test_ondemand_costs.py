"""What a plan says is what the caches then do."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import samples
from hypothesis import HealthCheck, given, settings, strategies as st
from test_ondemand_curve import points

import mfload
from benchmarks import ondemand_costs as costs, ondemand_rehearsal as rehearsal
from benchmarks.ondemand_costs import plan
from benchmarks.ondemand_curve import Curve
from benchmarks.replay import belady
from mfload import errors
from mfload.bench import machine, random_reads
from mfload.io import buffers
from mfload.io.gather import open_gather
from mfload.ondemand import ExpertCache, LayerStream, NeuronCache
from mfload.ondemand.background import Background, Work
from mfload.ondemand.store import Store

LAYERS, EXPERTS = 3, 6
CURVE = Curve(points())
SHAPES = st.sampled_from([(3, 5), (16, 16), (64, 33)])


def experts_of(folder: Path, shapes: dict[int, tuple[int, int]]) -> Path:
    """A model whose layers have experts of these shapes, with other tensors between."""
    rng = np.random.default_rng(0)
    tensors: dict[str, Any] = {}
    for layer, shape in shapes.items():
        tensors[f"model.layers.{layer}.attention.weight"] = rng.random(7)
        for expert in range(EXPERTS):
            for name in ("up_proj", "down_proj"):
                key = f"model.layers.{layer}.mlp.experts.{expert}.{name}.weight"
                tensors[key] = rng.random(shape, np.float32)
    return samples.save(folder / f"{'-'.join(map(str, shapes.values()))}.safetensors", tensors)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("experts")


TRACES = st.lists(
    st.lists(
        st.lists(st.integers(0, EXPERTS - 1), min_size=1, max_size=3),
        min_size=LAYERS, max_size=LAYERS,
    ),
    min_size=1, max_size=12,
)  # fmt: skip


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    shapes=st.lists(SHAPES, min_size=LAYERS, max_size=LAYERS),
    trace=TRACES,
    share=st.floats(0.0, 1.1),
    policy=st.sampled_from(["lru", "lfu", "pin+lru", "window(2)"]),
    engine=st.sampled_from(["pread", "direct"]),
)
def test_experts(
    folder: Path, shapes: list[Any], trace: list[Any], share: float, policy: str, engine: Any
) -> None:
    path = experts_of(folder, dict(enumerate(shapes, 2)))
    options = mfload.Options(engine=engine)
    with ExpertCache(path, budget=1 << 40, options=options) as cache:
        most = cache.report().peak_bytes + 3 * buffers.PAGE
    budget = int(most * share) + 1
    try:
        with ExpertCache(path, budget=budget, policy=policy, options=options) as cache:
            for token in trace:
                for layer, ids in enumerate(token, 2):
                    cache.use(layer, ids).close()
            done = cache.report()
    except errors.MemoryLimitError as error:
        with pytest.raises(errors.MemoryLimitError, match=re.escape(str(error))):
            plan(path, budget=budget, trace=trace, policy=policy, curve=CURVE, options=options)
        return
    found = plan(
        path,
        budget=budget,
        trace=trace,
        policy=policy,
        curve=CURVE,
        budgets=[most],
        options=options,
    )
    said, tokens = found.budget, len(trace)
    assert found.tokens == tokens
    assert said.budget_bytes == budget
    assert said.memory_bytes == done.peak_bytes
    assert (said.misses, said.hit_rate) == (done.misses / tokens, done.hit_rate)
    assert (said.reads, said.read_bytes) == (done.reads / tokens, done.read_bytes / tokens)
    # No policy reads less than the optimum. With room for all, only a window does not reach it.
    assert said.least_bytes is not None
    assert 0 < said.least_bytes <= said.read_bytes
    whole = found.budgets[-1 if most >= budget else 0]
    assert whole.least_bytes is not None
    assert whole.least_bytes <= said.least_bytes
    assert whole.least_bytes == whole.read_bytes or policy == "window(2)"
    assert said.io_ms is not None
    assert whole.io_ms is not None
    assert whole.io_ms > 0


def test_the_optimum_is_that_of_a_replay(folder: Path) -> None:
    path = experts_of(folder, dict.fromkeys(range(LAYERS), (16, 16)))
    rng = np.random.default_rng(1)
    trace = np.stack([[rng.permutation(EXPERTS)[:2] for _ in range(LAYERS)] for _ in range(30)])
    with ExpertCache(path, budget=1 << 40) as cache:
        most = cache.report().peak_bytes
    found = plan(path, budget=most // 3, trace=trace, curve=CURVE)
    keys = [ids + EXPERTS * layer for token in trace for layer, ids in enumerate(token)]
    least = belady(keys, LAYERS * EXPERTS // 3).sum() * 2 * 16 * 16 * 4 / 30
    assert found.budget.least_bytes == least
    assert found.budget.least_bytes < found.budget.read_bytes


def test_milliseconds_are_those_of_the_batches(folder: Path) -> None:
    """The two tensors of an expert lie side by side: one read. A request's are one batch."""
    path = experts_of(folder, {0: (64, 64)})
    trace = [{0: [0, 1, 2]}, {0: [0]}, {0: [3]}]
    options = mfload.Options(engine="pread")
    found = plan(path, budget="1MiB", trace=trace, curve=CURVE, options=options)
    size = 64 * 64 * 4
    took = CURVE.seconds([3, 1], [6 * size, 2 * size])
    assert found.budget.reads == 4 / 3
    assert found.budget.io_ms == pytest.approx(took.sum() * 1e3 / 3)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng = np.random.default_rng(0)
    tensors: dict[str, Any] = {"embed": rng.random((10, 64)), "layers.1.norm": rng.random(9)}
    for layer in range(9):
        for name in ("q", "k", "up"):
            tensors[f"layers.{layer}.{name}"] = rng.random((64, 64 if layer else 80))
    return samples.save(tmp_path_factory.mktemp("layers") / "model.safetensors", tensors)


@pytest.mark.parametrize(
    ("ahead", "share", "threaded"),
    [*((ahead, share, False) for ahead in (0, 1, 2) for share in (0.7, 0.85, 1.0)), (1, 0.7, True)],
)
def test_layers(
    model: Path, ahead: int, share: float, threaded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LayerStream(model, budget=1 << 40) as stream:
        budget = int((stream.report().peak_bytes + 2 * buffers.PAGE) * share)
    found = plan(model, budget=budget, ahead=ahead, curve=CURVE)
    assert (found.kind, found.tokens) == ("layers", 8)
    later = _Awaited() if threaded else rehearsal.Later()
    monkeypatch.setattr(Store, "background", lambda _: later)
    passes: list[Any] = []
    with LayerStream(model, budget=budget, ahead=ahead, wait=5.0 if threaded else 0.0) as stream:
        for _ in range(10):
            for _, tensors in stream:  # noqa: B007 - it lives until the next
                later.run()
            passes.append(stream.report())
        del tensors
    said, first, last = found.budget, passes[1], passes[-1]
    assert said.memory_bytes == last.peak_bytes
    assert said.read_bytes == (last.read_bytes - first.read_bytes) / 8
    assert said.reads == (last.reads - first.reads) / 8
    assert said.misses == (last.misses + last.prefetched - first.misses - first.prefetched) / 8
    assert said.hit_rate == pytest.approx(1 - said.misses / 9)
    assert (said.read_bytes == 0) == (share == 1.0)
    assert said.least_bytes is None


class _Awaited(Background):
    """The thread itself; a layer computes until it has read ahead."""

    def __init__(self) -> None:
        super().__init__()
        self._done = threading.Event()

    def ask(self, cache: object, work: Work) -> None:
        def noted(dropped: Callable[[], bool]) -> None:
            try:
                work(dropped)
            finally:
                self._done.set()

        self._done.clear()
        super().ask(cache, noted)

    def run(self) -> None:
        assert self._done.wait(60)


def test_it_reads_nothing_and_takes_no_memory(
    model: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mfload.io.gather import Gather

    def never(*_: Any) -> None:
        raise AssertionError

    monkeypatch.setattr(Gather, "read", never)
    monkeypatch.setattr(buffers, "allocate", never)
    assert plan(model, budget="1GiB", curve=CURVE).budget.hit_rate == 1
    path = experts_of(folder, {0: (64, 64)})
    assert plan(path, budget="1GiB", trace=[[[1]]], curve=CURVE).budget.misses == 1


def test_what_it_prints_and_draws(folder: Path, tmp_path: Path) -> None:
    path = experts_of(folder, dict.fromkeys(range(LAYERS), (16, 16)))
    trace = [[[n % EXPERTS, (n + 1) % EXPERTS]] * LAYERS for n in range(20)]
    found = plan(path, budget=20_000, trace=trace, curve=CURVE)
    lines = str(found).splitlines()
    assert lines[0].split() == ["budget", "memory", "hit", "rate", "read", "reads", "I/O", "ms",
                                "least", "read"]  # fmt: skip
    assert sum(" * " in line for line in lines) == 1
    assert "19.53 KiB *" in str(found)
    assert "<td>budget" in found._repr_html_()
    many = found.budget._replace(reads=13410.25, io_ms=1219.6)
    assert [*replace(found, budgets=(many,)).rows()[1]][4:6] == ["13410", "1220"]
    plain = json.loads(json.dumps(found.as_dict()))
    assert plain["budget"] in plain["budgets"]
    assert plain["budget"]["misses"] == found.budget.misses
    # More memory never reads more than the least that could be.
    sizes = [each.memory_bytes for each in found.budgets]
    assert sizes == sorted(sizes)
    least = [each.least_bytes or 0.0 for each in found.budgets]
    assert least == sorted(least, reverse=True)
    picture = tmp_path / "x.png"
    found.plot(picture)
    assert picture.stat().st_size > 5_000
    with pytest.raises(errors.TargetError):
        found.plot(tmp_path / "no" / "x.png")
    with pytest.raises(errors.UsageError, match="'foo' is not supported"):
        found.plot(tmp_path / "x.foo")


def test_a_curve_is_measured_if_none_is_given(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = experts_of(folder, {0: (64, 64)})
    asked: list[Any] = []

    def measure(files: list[str]) -> dict[str, Any]:
        asked.append(files)
        return {"points": points("threads"), "why": ""}

    monkeypatch.setattr(machine, "MEMORY_FILE_SYSTEMS", frozenset())
    monkeypatch.setattr(random_reads, "measure", measure)
    found = plan(path, budget="1MiB", trace=[[[1]]])
    assert asked == [[str(path)]]
    assert found.curve == "threads"
    assert found.budget.io_ms == plan(path, budget="1MiB", trace=[[[1]]], curve=CURVE).budget.io_ms
    monkeypatch.setattr(random_reads, "measure", lambda _: {"points": [], "why": "no O_DIRECT"})
    found = plan(path, budget="1MiB", trace=[[[1]]])
    assert found.budget.io_ms is None
    assert "no milliseconds: no O_DIRECT" in found.notes
    assert "–" in str(found)
    monkeypatch.setattr(machine, "MEMORY_FILE_SYSTEMS", {machine.file_system(path)})
    assert "keeps its files in memory" in str(plan(path, budget="1MiB", trace=[[[1]]]))


def test_the_curve_is_that_of_the_engine_that_would_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def threads(*given: Any, **how: Any) -> Any:
        return open_gather(*given, **{**how, "engine": "threads"})

    monkeypatch.setattr("mfload.ondemand.store.open_gather", threads)
    path = experts_of(folder, {0: (64, 64)})
    both = {"points": [*points(), *points("threads", 0.5)]}
    took: list[Any] = []
    for curve in (both, CURVE):
        found = plan(path, budget="1MiB", trace=[[[1]]], curve=curve)
        assert found.engine == "threads"
        told = "I/O ms are those of io_uring" in found.notes
        took.append((found.curve, told, found.budget.io_ms))
    assert took[0][:2] == ("threads", False)
    assert took[1] == ("io_uring", True, pytest.approx(took[0][2] / 2))


def test_a_plot_without_a_curve(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(costs, "_measured", lambda _: (None, "no milliseconds: why"))
    path = experts_of(folder, {0: (64, 64)})
    plan(path, budget="1MiB", trace=[[[1]]]).plot(tmp_path / "x.svg")
    drawn = (tmp_path / "x.svg").read_text()
    assert "MB a token" in drawn
    assert "Belady&#x27;s optimum" in drawn or "Belady's optimum" in drawn


@pytest.mark.parametrize(
    ("trace", "match"),
    [
        ([], "no tokens"),
        (3, "no tokens"),
        ([3], "no tokens"),
        ([[[0]] * 9], "more layers than the model"),
        ([{9: [0]}], "no such layer"),
        ([[[99]]], "no such expert"),
        ([[["a"]]], "not numbers of experts"),
    ],
)
def test_traces_that_can_not_be(folder: Path, trace: Any, match: str) -> None:
    path = experts_of(folder, {0: (64, 64)})
    with pytest.raises(errors.UsageError, match=match):
        plan(path, budget="1MiB", trace=trace, curve=CURVE)


def test_files_are_closed_whatever_happens(folder: Path) -> None:
    import os

    path = experts_of(folder, {0: (64, 64)})
    before = len(os.listdir("/proc/self/fd"))
    plan(path, budget="1MiB", trace=[[[1]]], curve=CURVE)
    failing: list[Callable[[], object]] = [
        lambda: plan(path, budget=10, trace=[[[1]]], curve=CURVE),
        lambda: plan(path, budget="1MiB", trace=[[[99]]], curve=CURVE),
        lambda: plan(path, budget="1MiB", trace=[[[1]]], curve=CURVE, budgets=[10]),
        lambda: plan(path, "nothing", budget="1MiB", trace=[[[1]]], curve=CURVE),
        lambda: plan(path, budget="1MiB", trace=[[[1]]], curve="nothing.json"),
    ]
    for each in failing:
        with pytest.raises(errors.MfloadError):
            each()
    assert len(os.listdir("/proc/self/fd")) == before


NEURONS, WIDTH = 40, 128  # Of float32: rows of 512 bytes, which O_DIRECT can read.


@pytest.fixture(scope="module")
def bundled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("neurons")
    arrays: dict[str, Any] = {"embed": samples.numbers((9, WIDTH))}
    for layer in range(LAYERS):
        arrays[f"layers.{layer}.up"] = samples.numbers((NEURONS, WIDTH), np.float32, layer)
        arrays[f"layers.{layer}.down"] = samples.numbers((WIDTH, NEURONS), np.float32, layer)
    mfload.save(arrays, where / "dense.safetensors")
    rules: Any = {name: rf"layers\.(\d+)\.{name}" for name in ("up", "down")}
    mfload.ondemand.bundle(where / "dense.safetensors", where / "a.safetensors", **rules)
    return where / "a.safetensors"


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    trace=st.lists(
        st.lists(st.sets(st.integers(0, NEURONS - 1), max_size=9), min_size=LAYERS,
                 max_size=LAYERS),
        min_size=1, max_size=12,
    ),
    share=st.floats(0.2, 1.1),
    window=st.sampled_from([None, 1, 3]),
    engine=st.sampled_from(["auto", "pread", "direct"]),
)  # fmt: skip
def test_neurons(
    bundled: Path, trace: list[Any], share: float, window: int | None, engine: Any
) -> None:
    options = mfload.Options(engine=engine)
    budget = int(share * LAYERS * NEURONS * WIDTH * 8) + 16 * buffers.PAGE
    how: Any = {"window": window, "options": options, "policy": "lfu"}
    try:
        with NeuronCache(bundled, budget, **how) as cache:
            for token in trace:
                for layer, rows in enumerate(token):
                    cache.use(layer, rows).close()
            done = cache.report()
    except errors.MemoryLimitError as error:
        with pytest.raises(errors.MemoryLimitError, match=re.escape(str(error))):
            plan(bundled, budget=budget, trace=trace, curve=CURVE, **how)
        return
    found = plan(bundled, budget=budget, trace=trace, curve=CURVE, budgets=[budget], **how)
    said, tokens = found.budget, len(trace)
    assert (found.kind, found.tokens) == ("neurons", tokens)
    assert found.policy == ("lfu" if window is None else f"window({window})")
    assert said.memory_bytes == done.peak_bytes
    assert (said.misses, said.hit_rate) == (done.misses / tokens, done.hit_rate)
    assert (said.reads, said.read_bytes) == (done.reads / tokens, done.read_bytes / tokens)
    assert said.least_bytes is not None
    assert said.least_bytes <= said.read_bytes
    assert found.engine == done.engine
    assert found.why == done.why


def test_what_stays_resident_is_no_part_of_a_token(tmp_path: Path) -> None:
    arrays: dict[str, Any] = {"embed": np.ones((4096, 1024), np.float32)}
    arrays |= {"layers.0.up": np.ones((512, 512), np.float32)}
    arrays |= {"layers.0.down": np.ones((512, 512), np.float32)}
    mfload.save(arrays, tmp_path / "dense.safetensors")
    rules: Any = {name: rf"layers\.(\d+)\.{name}" for name in ("up", "down")}
    path = tmp_path / "bundled.safetensors"
    mfload.ondemand.bundle(tmp_path / "dense.safetensors", path, **rules)
    found = plan(path, budget="20MiB", trace=[[[1, 2, 3]], [[1, 2]]], curve=CURVE)
    assert found.budget.io_ms == pytest.approx(CURVE.seconds(3, 3 * 4096) * 1e3 / 2)
    # The least budget of the table is what stays, and a 16th of the rest.
    memory = [cost.memory_bytes - (16 << 20) for cost in found.budgets]
    assert len(memory) == 8
    assert 0 < memory[0] < 1 << 18


def test_neurons_that_no_disk_takes(tmp_path: Path) -> None:
    arrays = {"layers.0.up": np.ones((99, 50)), "layers.0.down": np.ones((50, 99))}
    mfload.save(arrays, tmp_path / "dense.safetensors")
    rules: Any = {name: rf"layers\.(\d+)\.{name}" for name in ("up", "down")}
    path, options = tmp_path / "bundled.safetensors", mfload.Options(page_cache="bypass")
    mfload.ondemand.bundle(tmp_path / "dense.safetensors", path, **rules)
    with NeuronCache(path, options=options) as cache:
        why = cache.report().why
    assert plan(path, budget="1MiB", trace=[[[1]]], curve=CURVE, options=options).why == why
