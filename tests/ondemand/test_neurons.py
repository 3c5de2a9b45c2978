"""Neurons: the rows of a plain array, however they came into memory; and the product of them."""

from __future__ import annotations

import gc
import os
import threading
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import samples
from hypothesis import settings, strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

import mfload
from mfload import Options, errors
from mfload.frameworks.numpy_adapter import NumpyAdapter
from mfload.io import buffers
from mfload.ondemand import NeuronCache, bundle

LAYERS, NEURONS, WIDTH = (0, 1, 5), 64, 32
PAGED = Options(engine="pread")


def weights(
    dtype: Any = np.float32, gate: bool = False, neurons: int = NEURONS, width: int = WIDTH
) -> dict[str, Any]:
    arrays: dict[str, Any] = {"embed": samples.numbers((400, width)), "none": np.empty((0, 3))}
    for layer in LAYERS:
        arrays[f"layers.{layer}.norm"] = samples.numbers((width,), np.float16, layer)
        arrays[f"layers.{layer}.up"] = samples.numbers((neurons, width), dtype, 3 * layer)
        arrays[f"layers.{layer}.down"] = samples.numbers((width, neurons), dtype, 3 * layer + 1)
        if gate:
            gates = samples.numbers((neurons, width), dtype, 3 * layer + 2)
            arrays[f"layers.{layer}.gate"] = gates
    return arrays


def save(where: Path, arrays: dict[str, Any], gate: bool = False) -> Path:
    mfload.save(arrays, where / "dense.safetensors", overwrite=True)
    rules: dict[str, Any] = {n: rf"layers\.(\d+)\.{n}" for n in ("up", "down", "gate")[: 2 + gate]}
    bundle(where / "dense.safetensors", where / "a.safetensors", **rules, overwrite=True)
    return where / "a.safetensors"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    arrays = weights()
    return save(tmp_path_factory.mktemp("neurons"), arrays), arrays


def budget(neurons: float, parts: int = 2, row: int = WIDTH * 4) -> int:
    """Bytes that have room for so many neurons of each layer, beside what stays."""
    return int(
        400 * row + 4096 + (1 + len(LAYERS) * parts) * 4096 + neurons * len(LAYERS) * parts * row
    )


def right(part: Any, arrays: dict[str, Any], layer: int) -> None:
    assert part.rows.size == part.used == len(set(part.rows.tolist()))
    assert samples.same(np.asarray(part.up), arrays[f"layers.{layer}.up"][part.rows])
    assert samples.same(np.asarray(part.down), arrays[f"layers.{layer}.down"].T[part.rows])
    if f"layers.{layer}.gate" in arrays:
        assert samples.same(np.asarray(part.gate), arrays[f"layers.{layer}.gate"][part.rows])
    else:
        assert part.gate is None


class Machine(RuleBasedStateMachine):
    """Requests of all sorts; `last` says by layer which request each neuron counted for."""

    path: Path
    arrays: dict[str, Any]

    @initialize(
        window=st.none() | st.integers(1, 4), neurons=st.integers(1, 70),
        policy=st.sampled_from(["lru", "lfu", "pin+lru"]),
        gather=st.sampled_from(["auto", "threads"]),
    )  # fmt: skip
    def begin(self, window: int | None, neurons: int, policy: str, gather: Any) -> None:
        self.cache = NeuronCache(
            self.path, budget(neurons), window, policy=policy, gather=gather, wait=0.0
        )
        self.room, self.window = self.cache.capacity[0], window
        assert self.room >= min(NEURONS, neurons)
        self.last: dict[int, dict[int, int]] = {layer: {} for layer in LAYERS}
        self.now = dict.fromkeys(LAYERS, 0)
        self.held: list[tuple[int, Any, Any]] = []

    @rule(
        layer=st.sampled_from(LAYERS), keep=st.booleans(), acceptance=st.floats(0, 1),
        drafts=st.lists(st.sets(st.integers(0, NEURONS - 1), max_size=30), max_size=4),
    )  # fmt: skip
    def use(self, layer: int, drafts: list[set[int]], acceptance: float, keep: bool) -> None:
        asked = set[int]().union(*drafts)
        pinned = any(each[0] == layer for each in self.held)
        try:
            if len(drafts) == 1:
                part, acceptance = self.cache.use(layer, sorted(asked, reverse=True)), 1.0
            else:
                part = self.cache.use_drafts(layer, [[*each] for each in drafts], acceptance)
        except errors.MemoryLimitError:
            assert len(asked) > self.room or pinned
            assert self.room < NEURONS
            return
        count = next(n for n in range(len(drafts) + 1) if n >= acceptance * len(drafts) - 1e-9)
        self.now[layer] += 1
        for each in drafts[len(drafts) - count :]:
            self.last[layer] |= dict.fromkeys(each, self.now[layer])
        with part:
            right(part, self.arrays, layer)
            there = set(part.rows.tolist())
            assert asked <= there
            assert part.used <= self.room
            if self.room == NEURONS and not pinned and self.window:
                least = self.now[layer] - self.window
                assert there == asked | {n for n, at in self.last[layer].items() if at > least}
            if keep:
                self.held.append((layer, part.rows, (part.up, part.down[1:])))
        with pytest.raises(errors.UsageError, match="block of these neurons is over"):
            _ = part.up

    @precondition(lambda self: self.held)
    @rule(number=st.integers(0, 20))
    def release(self, number: int) -> None:
        for layer, rows, (up, down) in self.held:
            assert samples.same(up, self.arrays[f"layers.{layer}.up"][rows])
            assert samples.same(down, self.arrays[f"layers.{layer}.down"].T[rows][1:])
        del self.held[number % len(self.held)]

    def teardown(self) -> None:
        if hasattr(self, "cache"):
            report = self.cache.report()
            assert report.read_bytes == report.misses * 2 * WIDTH * 4
            self.cache.close()
            self.held.clear()


def test_against_a_dict(saved: tuple[Path, dict[str, Any]]) -> None:
    Machine.path, Machine.arrays = saved
    run_state_machine_as_test(
        Machine, settings=settings(max_examples=60, stateful_step_count=20, deadline=None)
    )


@pytest.mark.parametrize("gate", [False, True])
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.int8, np.float64])
@pytest.mark.parametrize("gather", ["io_uring", "threads"])
def test_dtypes_gates_and_engines(tmp_path: Path, dtype: Any, gate: bool, gather: Any) -> None:
    arrays = weights(dtype, gate)
    path = save(tmp_path, arrays, gate)
    random = np.random.default_rng(0)
    with NeuronCache(path, "1MiB", window=2, gather=gather) as cache:
        assert cache.report().engine == gather
        assert cache.neurons == dict.fromkeys(LAYERS, NEURONS) == cache.capacity
        for _ in range(6):
            for layer in LAYERS:
                with cache.use(layer, random.choice(NEURONS, 9, replace=False)) as part:
                    right(part, arrays, layer)
                    assert part.up.dtype == dtype
                    with pytest.raises(ValueError, match="read-only"):
                        part.up[:] = 0


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("gather", ["io_uring", "threads"])
def test_past_the_page_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gather: Any, together: bool
) -> None:
    """Neurons in one arena, and in one for each part, as for frameworks without strides."""
    monkeypatch.setattr(NumpyAdapter, "slices_are_views", together)
    arrays = weights(np.float16, width=2048)  # 4096 bytes a row.
    path = save(tmp_path, arrays)
    with NeuronCache(path, "8MiB", options=Options(page_cache="bypass"), gather=gather) as cache:
        if "O_DIRECT" not in cache.report().why:
            pytest.skip(f"no O_DIRECT here: {cache.report().why}")
        for layer in LAYERS:
            with cache.use(layer, range(0, NEURONS, 3)) as part:
                right(part, arrays, layer)
        samples.assert_same(
            cache.resident, {k: v for k, v in arrays.items() if k in cache.resident}
        )


@pytest.mark.parametrize("together", [True, False])
def test_rows_that_no_disk_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, together: bool
) -> None:
    monkeypatch.setattr(NumpyAdapter, "slices_are_views", together)
    said = "a neuron of 'layers.0.bundle' has 800 bytes" if together else "has 400 bytes"
    arrays = weights(np.float16, width=200)
    path = save(tmp_path, arrays)
    direct = Options(engine="direct", page_cache="bypass")
    with NeuronCache(path, "1MiB", options=Options(page_cache="bypass")) as cache:
        with cache.use(1, [5, 3]) as part:
            right(part, arrays, 1)
        why = cache.report().why
    if why.startswith("page cache: no O_DIRECT"):
        pytest.skip(why)
    assert said in why
    with pytest.raises(errors.UsageError, match=said) as caught:
        NeuronCache(path, "1MiB", options=direct)
    assert caught.value.file == os.fspath(path)


def test_the_product(tmp_path: Path) -> None:
    """Bit-equal to that over resident weights in the same order, and near the dense one."""
    random = np.random.default_rng(4)
    shape = (512, 128)
    arrays = {
        "layers.0.up": random.standard_normal(shape, np.float32),
        "layers.0.down": random.standard_normal(shape[::-1], np.float32),
    }
    path = save(tmp_path, arrays)
    up, down = arrays["layers.0.up"], np.ascontiguousarray(arrays["layers.0.down"].T)
    with NeuronCache(path, 400 << 10, window=3) as cache:
        for _ in range(10):
            x = random.standard_normal(shape[1:], np.float32)
            before = up @ x - 12
            with cache.use(0, np.flatnonzero(before > 0)) as part:
                hidden = np.maximum(x @ part.up.T - 12, 0)
                found = hidden @ part.down
                resident = np.maximum(x @ up[part.rows].T - 12, 0) @ down[part.rows]
                assert found.tobytes() == resident.tobytes()
            dense = np.maximum(before, 0) @ down
            assert 0 < np.count_nonzero(before > 0) < 200
            np.testing.assert_allclose(found, dense, rtol=1e-4, atol=1e-3)


def test_nothing_and_everything(saved: tuple[Path, dict[str, Any]]) -> None:
    path, arrays = saved
    with NeuronCache(path, budget(20)) as cache:
        room = cache.capacity[0]
        assert 20 <= room < NEURONS
        with cache.use(0, []) as part:
            assert part.used == 0
            assert part.up.shape == part.down.shape == (0, WIDTH)
            assert (np.ones(WIDTH, np.float32) @ part.up.T @ part.down).shape == (WIDTH,)
            assert part.whole.up.shape == (room, WIDTH)
        with pytest.raises(errors.MemoryLimitError, match="more neurons at once") as caught:
            cache.use(0, range(NEURONS))
        assert (caught.value.expected, caught.value.found) == (f"at most {room}", NEURONS)
        with cache.use(0, range(room)) as part:
            right(part, arrays, 0)
    with NeuronCache(path, "1MiB") as cache, cache.use(5, range(NEURONS)) as part:
        assert part.rows.tolist() == list(range(NEURONS))
        right(part, arrays, 5)


def test_the_window(saved: tuple[Path, dict[str, Any]]) -> None:
    path, _ = saved

    def rows(cache: NeuronCache, asked: Any) -> set[int]:
        with cache.use(0, asked) as part:
            return set(part.rows.tolist())

    with NeuronCache(path, "1MiB", window=2) as cache:
        assert rows(cache, [1, 2]) == {1, 2}
        assert rows(cache, [2, 3]) == {1, 2, 3}
        assert rows(cache, [4]) == {2, 3, 4}
        assert rows(cache, []) == {4}
        assert rows(cache, [2]) == {2}
        report = cache.report()
        assert (report.hits, report.misses, report.evictions) == (1, 5, 4)
        assert report.requests == 5
        # Of four drafts the last two count, at 0.5 or a little less.
        for acceptance in (0.5, 0.3):
            cache.use_drafts(0, [[10], [11], [12], [13, 10]], acceptance).close()
            assert rows(cache, [20]) == {20, 12, 13, 10}
        cache.use_drafts(0, [[11, 12]], 0).close()
        assert rows(cache, [20]) == {20}
        cache.use_drafts(0, [], 1).close()
        for share in (1.5, float("nan"), "a", None):
            with pytest.raises(errors.UsageError, match="acceptance"):
                cache.use_drafts(0, [[1]], share)  # type: ignore[arg-type]
    with NeuronCache(path, "1MiB", window=None) as cache:
        assert rows(cache, [1]) | rows(cache, [2]) | rows(cache, [3]) == {1, 2, 3}
        assert cache.report().evictions == 0


def test_whole_matrices(saved: tuple[Path, dict[str, Any]]) -> None:
    path, arrays = saved
    with NeuronCache(path, budget(20)) as cache, cache.use(1, [7, 9]) as part:
        up, down, gate = part.whole
        assert gate is None
        assert up.shape == down.shape == (cache.capacity[1], WIDTH)
        assert np.shares_memory(up, part.up)
        assert samples.same(up[: part.used], arrays["layers.1.up"][[7, 9]])


def test_memory(saved: tuple[Path, dict[str, Any]]) -> None:
    path, arrays = saved
    for nbytes in (budget(1), budget(7.5), budget(NEURONS), 1 << 20):
        before = buffers.live_bytes()
        cache = NeuronCache(path, nbytes)
        report = cache.report()
        assert buffers.live_bytes() - before == report.peak_bytes <= nbytes == report.budget_bytes
        assert min(cache.capacity.values()) > 0
        cache.close()
        del cache
        gc.collect()
        assert buffers.live_bytes() == before
    with pytest.raises(errors.MemoryLimitError, match="5000 bytes") as caught:
        NeuronCache(path, 5000)
    least = int(str(caught.value.expected).split()[2])
    NeuronCache(path, least).close()
    with pytest.raises(errors.MemoryLimitError):
        NeuronCache(path, least - 1)
    with NeuronCache(path, "1MiB", resident=r"norm") as cache:
        assert cache.resident.keys() == {f"layers.{layer}.norm" for layer in LAYERS}
    with NeuronCache(path, "1MiB") as cache:
        assert cache.resident.keys() == {"embed", "none", *(f"layers.{n}.norm" for n in LAYERS)}
        samples.assert_same(cache.resident, {k: arrays[k] for k in cache.resident})
    with NeuronCache(path, "1MiB", resident="matches nothing") as cache:
        assert not cache.resident


def test_an_error_keeps_no_memory(
    saved: tuple[Path, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    real, sizes = buffers.allocate, list[int]()

    def allocate(nbytes: int) -> Any:
        sizes.append(nbytes)
        if len(sizes) > 1:
            raise errors.MemoryLimitError("the system refused memory")
        return real(nbytes)

    monkeypatch.setattr(buffers, "allocate", allocate)
    before = buffers.live_bytes()
    with pytest.raises(errors.MemoryLimitError, match="refused") as caught:
        NeuronCache(saved[0], "1MiB")
    assert len(sizes) == 2
    assert buffers.live_bytes() == before
    del caught


def test_pinned_rows(saved: tuple[Path, dict[str, Any]]) -> None:
    path, arrays = saved
    with NeuronCache(path, budget(20), window=1, wait=0.05) as cache:
        room = cache.capacity[0]
        with cache.use(0, range(room)) as part:
            kept = part.up[3:4]
        with pytest.raises(errors.MemoryLimitError, match="pinned by arrays that still live"):
            cache.use(0, [room])
        with cache.use(1, [2]) as part:  # Other layers have rows of their own.
            right(part, arrays, 1)
        assert samples.same(kept[0], arrays["layers.0.up"][3])
        del kept, part
        with cache.use(0, [room]) as part:
            assert part.rows.tolist() == [room]
        with cache.use(0, [0, 1]) as part:
            kept = part.up
        cache.use(0, range(2, room)).close()
        with pytest.raises(errors.MemoryLimitError, match=f"{room} of {room} slots? pinned"):
            cache.use(0, [room])  # Rows come behind those that are pinned, and none leaves.
        assert samples.same(kept[1], arrays["layers.0.up"][1])


def test_reading_ahead(saved: tuple[Path, dict[str, Any]]) -> None:
    path, arrays = saved
    with NeuronCache(path, "1MiB") as cache:
        cache.prefetch(0, [5, 1])
        _, rows = cache._layers[0]  # pyright: ignore[reportPrivateUsage]
        for _ in range(2000):
            if (rows.slot_of[[1, 5]] >= 0).all():
                break
            threading.Event().wait(0.005)
        with cache.use(0, [1, 5, 6]) as part:
            right(part, arrays, 0)
        report = cache.report()
        assert (report.prefetched, report.hits, report.misses) == (2, 2, 1)


def test_threads(saved: tuple[Path, dict[str, Any]]) -> None:
    path, arrays = saved
    wrong: list[BaseException] = []
    with NeuronCache(path, budget(50), window=2, wait=30) as cache:

        def work(seed: int) -> None:
            random = np.random.default_rng(seed)
            try:
                for _ in range(60):
                    layer = int(random.choice(LAYERS))
                    with cache.use(layer, random.choice(NEURONS, 8, replace=False)) as part:
                        right(part, arrays, layer)
            except BaseException as error:
                wrong.append(error)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for each in threads:
            each.start()
        for each in threads:
            each.join(120)
    assert not wrong


def test_faults(tmp_path: Path) -> None:
    arrays = weights()
    path = save(tmp_path, arrays)
    with NeuronCache(path, "1MiB", options=PAGED) as cache:
        cache.use(0, [1]).close()
        os.truncate(path, 5000)
        with pytest.raises(errors.SourceChangedError) as caught:
            cache.use(0, [63])
        assert caught.value.file == os.fspath(path)
        with pytest.raises(errors.SourceChangedError):
            cache.use(1, [1])
        assert cache.report().misses == 3
    path = save(tmp_path, arrays)
    with NeuronCache(path, "1MiB") as cache:
        cache.use(0, [1]).close()
        save(tmp_path, weights(np.float64))
        with pytest.raises(errors.SourceChangedError):
            cache.use(0, [2])


def test_after_a_fork_and_after_the_end(saved: tuple[Path, dict[str, Any]]) -> None:
    path, arrays = saved
    with NeuronCache(path, "1MiB") as cache:
        part = cache.use(0, [1, 2])
        up = part.up
        child = os.fork()
        if child == 0:
            code = 1
            try:
                cache.use(0, [3])
            except errors.UsageError as error:
                code = 0 if "before a fork" in str(error) else 2
            finally:
                os._exit(code)
        assert os.waitpid(child, 0)[1] == 0
    assert samples.same(up, arrays["layers.0.up"][[1, 2]])
    with pytest.raises(errors.UsageError, match="closed"):
        cache.use(0, [1])


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"budget": "x"}, "budget"), ({"budget": 0}, "budget"), ({"window": 0}, "window"),
        ({"policy": "mru", "window": None}, "unknown policy"), ({"framework": "np5"}, "framework"),
        ({"resident": "("}, "resident"), ({"gather": "x"}, "gather|engine"),
        ({"options": Options(engine="mmap")}, "engine"), ({"wait": -1}, "wait"),
    ],
)  # fmt: skip
def test_wrong_arguments(
    saved: tuple[Path, dict[str, Any]], given: dict[str, Any], text: str
) -> None:
    with pytest.raises(errors.UsageError, match=text):
        NeuronCache(saved[0], **{"budget": "1MiB", **given})


def test_wrong_requests(saved: tuple[Path, dict[str, Any]]) -> None:
    with NeuronCache(saved[0], "1MiB") as cache:
        with pytest.raises(errors.UsageError, match=r"no such layer.*0, 1, 5"):
            cache.use(2, [1])
        for rows in ([-1], [NEURONS], [1.5], ["a"], 3.0):
            wrong: Any = rows
            with pytest.raises(errors.UsageError, match="neuron"):
                cache.use(0, wrong)
        with pytest.raises(errors.UsageError):
            cache.prefetch(2, [1])


def test_files_without_good_bundles(tmp_path: Path) -> None:
    mfload.save(weights(), tmp_path / "plain.safetensors")
    with pytest.raises(errors.FormatError, match="has no bundles") as caught:
        NeuronCache(tmp_path / "plain.safetensors")
    assert caught.value.file == os.fspath(tmp_path / "plain.safetensors")
    said = '{"0.bundle": {"layer": 0, "parts": [["a", 0], ["b", 1]]}}'
    kinds: list[tuple[Any, str, Any]] = [
        (errors.UnsupportedShapeError, "F32", (0, 2, 4)),
        (errors.UnsupportedShapeError, "F32", (4, 2, 0)),
        (errors.FormatError, "F4", (4, 2, 4)),
    ]
    for kind, dtype, shape in kinds:
        raw = bytes(int(np.prod(shape)) * 4 if dtype == "F32" else int(np.prod(shape)) // 2)
        rows, metadata = [("0.bundle", dtype, shape, raw)], {"mfload.bundles": said}
        samples.save_raw(tmp_path / "a.safetensors", rows, metadata=metadata)
        with pytest.raises(kind) as caught:
            NeuronCache(tmp_path / "a.safetensors")
        assert caught.value.tensor == "0.bundle"
