"""Experts, layers and neurons on demand in each framework: the bits of weights that are resident.

A subclass says how to look into an array without mfload's help.
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import gc
import re
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import samples
from conformance import material
from conformance.material import Stored
from hypothesis import HealthCheck, given, settings, strategies as st

import mfload
from mfload import errors
from mfload.ondemand import ExpertCache, LayerStream, NeuronCache, bundle

LAYERS, EXPERTS = (3, 4, 5, 6, 9), 4  # The first layers of many models are dense.
STACKED = r"layers\.(\d+)\.moe\.(\w+)$"
EACH = r"layers\.(\d+)\.mlp\.experts\.(\d+)\.(.+)"
WAYS = [("direct", "io_uring"), ("direct", "threads"), ("pread", "io_uring")]
STARTS = (0, 8, 32, 40)
"""Where the data begins mod 64 in real files."""
BUDGET = 5 * 20_000


def mixture() -> list[Stored]:
    """Experts with scales, in several dtypes; those of the last layer are larger.

    Odd sizes, so that little is aligned, and what lies together in the file is not of one expert.
    """
    rows: list[Stored] = [material.stored("model.embed", "F32", (9, 31))]
    for layer in LAYERS:
        wide = 65 if layer == LAYERS[-1] else 32
        for expert in range(EXPERTS):
            name = f"model.layers.{layer}.mlp.experts.{expert}"
            rows += [
                material.stored(f"{name}.up_proj.weight", "BF16", (wide, 47)),
                material.stored(f"{name}.down_proj.weight", "F8_E4M3", (33, wide)),
                material.stored(f"{name}.down_proj.scale", "F32", (33,)),
                material.stored(f"{name}.bias", "F32", ()),
            ]
        name = f"model.layers.{layer}"
        rows += [
            material.stored(f"{name}.moe.up", "F32", (EXPERTS, wide, 7)),
            material.stored(f"{name}.moe.packed", "F4", (EXPERTS, 5, 6)),
            material.stored(f"{name}.moe.bias", "BF16", (EXPERTS,)),
            material.stored(f"{name}.attn", "F16", (wide, 21)),
            material.stored(f"{name}.empty", "F32", (0, 3)),
        ]
    return [*rows, material.stored("model.head", "F32", (31, 9))]


def write(folder: Path, rows: list[Stored], start: int) -> Path:
    """The file whose data begins at `start` mod 64."""
    path = folder / f"mixture-{start}.safetensors"
    return path if path.exists() else material.save(path, rows, start)


def experts_of(rows: list[Stored], stacked: bool) -> dict[tuple[int, int], dict[str, bytes]]:
    """By layer and expert, the bytes of each of its tensors."""
    made: dict[tuple[int, int], dict[str, bytes]] = {}
    for row in rows:
        parts = row.name.split(".")
        if stacked and ".moe." in row.name:
            nbytes = len(row.raw) // EXPERTS
            for expert in range(EXPERTS):
                raw = row.raw[expert * nbytes : (expert + 1) * nbytes]
                made.setdefault((int(parts[2]), expert), {})[parts[-1]] = raw
        elif not stacked and ".experts." in row.name:
            key = int(parts[2]), int(parts[5])
            made.setdefault(key, {})[".".join(parts[6:])] = row.raw
    return made


class Ondemand:
    framework: str
    same_as_loaded = True  # Also what has several elements in a byte.

    def raw(self, array: Any) -> bytes:
        """Its bytes."""
        raise NotImplementedError

    def address(self, array: Any) -> int:
        """Where it lies."""
        raise NotImplementedError

    def copied(self, array: Any) -> bool:
        """Whether the framework copies what has its dtype."""
        return False

    def capsule(self, array: Any) -> Any:
        """A capsule of DLPack."""
        return array.__dlpack__()

    def view(self, array: Any) -> Any:
        """Another array over the end of its memory."""
        return array[1:]

    def settled(self, array: Any) -> Any:
        """An array as NumPy's, once it was computed."""
        return np.asarray(array)

    @pytest.fixture
    def rows(self) -> list[Stored]:
        return mixture()

    def check(self, experts: Any, layer: int, expected: Any) -> None:
        for expert, arrays in experts.items():
            found = {name: self.raw(array) for name, array in arrays.items()}
            assert found == expected[layer, expert], (layer, expert)

    @pytest.mark.parametrize(("engine", "gather"), WAYS)
    @pytest.mark.parametrize("start", STARTS)
    @pytest.mark.parametrize("stacked", [False, True])
    def test_each_expert(
        self, tmp_path: Path, rows: list[Stored], engine: Any, gather: Any, start: int,
        stacked: bool,
    ) -> None:  # fmt: skip
        path, expected = write(tmp_path, rows, start), experts_of(rows, stacked)
        loaded = mfload.load(path, self.framework, device="cpu")
        options = mfload.Options(engine=engine)
        given: dict[str, Any] = {"options": options, "gather": gather, "framework": self.framework}
        with ExpertCache(path, STACKED if stacked else EACH, BUDGET, **given) as cache:
            assert cache.experts == dict.fromkeys(LAYERS, EXPERTS)
            for layer in LAYERS:
                for expert in range(EXPERTS):
                    with cache.use(layer, [expert]) as experts:
                        self.check(experts, layer, expected)
                        assert list(experts) == [expert]
                        for name, array in experts[expert].items():
                            whole = f"model.layers.{layer}." + (
                                f"moe.{name}" if stacked else f"mlp.experts.{expert}.{name}"
                            )
                            one = loaded[whole][expert] if stacked else loaded[whole]
                            if self.same_as_loaded or name != "packed":
                                assert array.dtype == one.dtype
                                assert tuple(array.shape) == tuple(one.shape)
                        array = one = None
            assert cache.report().misses == len(LAYERS) * EXPERTS
            assert cache.report().engine == gather
            assert ("O_DIRECT" in cache.report().why) == (engine == "direct")
            assert cache.report().peak_bytes <= BUDGET

    def test_arrays_lie_in_the_slots(self, tmp_path: Path, rows: list[Stored]) -> None:
        """Nothing is copied, whatever the file's alignment."""
        path = write(tmp_path, rows, 8)
        options = mfload.Options(engine="direct")
        with ExpertCache(path, EACH, 2 * BUDGET, self.framework, options=options) as cache:
            before = mfload.live_bytes()
            arenas = [pool.cache._arenas[0] for pool in cache._pools._pools]
            spans = [(each.ctypes.data, each.ctypes.data + each.nbytes) for each in arenas]
            with cache.use(4, range(2)) as one, cache.use(9, range(2)) as other:
                for arrays in (one[0], one[1], other[0], other[1]):
                    for array in arrays.values():
                        if not self.copied(array):
                            address = self.address(array)
                            assert any(first <= address < last for first, last in spans)
                array = arrays = None
            del arenas
            assert mfload.live_bytes() == before <= 2 * BUDGET

    def test_numbers_are_arrays(self, tmp_path: Path, rows: list[Stored]) -> None:
        """As a router of the framework gives them, and a loop over what it gave."""
        path = samples.save(
            tmp_path / "numbers.safetensors", {"numbers": np.array([4, 1, 3], np.int32)}
        )
        numbers = mfload.load(path, self.framework, device="cpu")["numbers"]
        expected = experts_of(rows, stacked=True)
        with ExpertCache(write(tmp_path, rows, 0), STACKED, framework=self.framework) as cache:
            cache.prefetch(numbers[0], numbers[1:])
            with cache.use(numbers[0], numbers[1:]) as experts:
                for expert in numbers[1:]:
                    found = {name: self.raw(array) for name, array in experts[expert].items()}
                    assert found == expected[4, int(expert)]

    @pytest.mark.parametrize("how", ["array", "view", "capsule"])
    def test_what_is_kept_stays(self, tmp_path: Path, rows: list[Stored], how: str) -> None:
        """It pins its expert and no other; when it goes, the slot is free again."""
        path, expected = write(tmp_path, rows, 0), experts_of(rows, stacked=True)
        budget = 10_000  # Three of the smaller ones.
        with ExpertCache(path, STACKED, budget, self.framework, wait=0.1) as cache:
            with cache.use(3, [0, 1]) as experts:
                array = experts[0]["up"]
            kept = {"array": array, "view": self.view(array), "capsule": None}[how]
            kept = self.capsule(array) if how == "capsule" else kept
            address = self.address(array)
            del array, experts
            for turn in range(3):
                for expert in range(1, EXPERTS):
                    with cache.use(4, [expert]) as experts:
                        self.check(experts, 4, expected)
                    del experts
                assert turn or cache.report().evictions
            nbytes = len(expected[3, 0]["up"])
            there = samples.memory(address, nbytes)
            assert there == expected[3, 0]["up"]
            if how != "capsule":
                assert self.raw(kept) == there[-len(self.raw(kept)) :]
            pool = cache._pools._of[0][0].cache
            with pool._changed:
                pool._settle()
                assert pool.pins.sum() == 1
            del kept
            self.wait_for_pins(cache)

    def wait_for_pins(self, cache: Any) -> None:
        """Until nothing is pinned; a framework may let go in threads of its own."""
        end = time.monotonic() + 10
        while True:
            gc.collect()
            for each in cache._pools._pools:
                with each.cache._changed:
                    each.cache._settle()
            if not any(each.cache.pins.any() for each in cache._pools._pools):
                return
            assert time.monotonic() < end
            time.sleep(0.01)

    def test_all_slots_pinned(self, tmp_path: Path, rows: list[Stored]) -> None:
        path, expected = write(tmp_path, rows, 0), experts_of(rows, stacked=True)
        with ExpertCache(path, STACKED, 10_000, self.framework, wait=0.05) as cache:
            slots = cache._pools._of[0][0].cache.capacity
            kept = [cache.use(3, [expert])[expert]["up"] for expert in range(slots)]
            with pytest.raises(errors.MemoryLimitError, match="let go of views") as caught:
                cache.use(4, [0])
            assert caught.value.found == f"{slots} of {errors.counted(slots, 'slot')} pinned"
            cache.use(3, [0]).close()  # What is there needs no slot.
            del kept
            with cache.use(4, [0]) as experts:
                self.check(experts, 4, expected)

    @given(data=st.data())
    @settings(
        max_examples=40,
        suppress_health_check=[
            HealthCheck.function_scoped_fixture,
            HealthCheck.differing_executors,
        ],
    )
    def test_random_traces(
        self, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
    ) -> None:
        """Against a dict of all bytes."""
        rows = mixture()
        folder = tmp_path_factory.getbasetemp() / "traces"
        folder.mkdir(exist_ok=True)
        path = write(folder, rows, data.draw(st.sampled_from(STARTS)))
        stacked, (engine, gather) = data.draw(st.booleans()), data.draw(st.sampled_from(WAYS))
        expected = experts_of(rows, stacked)
        cache = ExpertCache(
            path,
            STACKED if stacked else EACH,
            data.draw(st.integers(140_000, 500_000)),
            self.framework,
            data.draw(st.sampled_from(["lru", "lfu", "pin+lru", "window(2)"])),
            options=mfload.Options(engine=engine),
            gather=gather,
        )
        layer = st.sampled_from(LAYERS)
        some = st.lists(st.integers(0, EXPERTS - 1), max_size=2, unique=True)
        asked_for = 0
        with cache:
            for _ in range(data.draw(st.integers(1, 12))):
                for each in data.draw(st.lists(st.tuples(layer, some), max_size=2)):
                    cache.prefetch(*each)
                number, asked = data.draw(layer), data.draw(some)
                with cache.use(number, asked) as experts:
                    self.check(experts, number, expected)
                    assert sorted(experts) == sorted(asked)
                asked_for += len(asked)
        report = cache.report()
        assert report.hits + report.misses == asked_for
        assert report.peak_bytes <= report.budget_bytes
        read = report.misses + report.prefetched
        sizes = [sum(map(len, each.values())) for each in expected.values()]
        assert min(sizes) * read <= report.read_bytes <= max(sizes) * read

    @pytest.mark.parametrize("more", [0, 40_000, 1 << 20])
    @pytest.mark.parametrize("ahead", [0, 1, 2])
    @pytest.mark.parametrize(("engine", "start"), [("direct", 8), ("pread", 40)])
    def test_layers(
        self, tmp_path: Path, rows: list[Stored], engine: Any, start: int, ahead: int, more: int
    ) -> None:
        path, expected = write(tmp_path, rows, start), {row.name: row.raw for row in rows}
        own = {name for name in expected if ".layers." not in name}
        how: dict[str, Any] = {
            "ahead": ahead,
            "framework": self.framework,
            "options": mfload.Options(engine=engine),
        }
        budget = more + least(lambda budget: LayerStream(path, budget=budget, **how))
        with LayerStream(path, budget=budget, **how) as stream:
            assert stream.layers == LAYERS
            found = {name: self.raw(array) for name, array in stream.resident.items()}
            assert found == {name: expected[name] for name in own}
            for _ in range(3):
                seen: set[str] = set()
                for layer, tensors in stream:
                    names = {name for name in expected if f".layers.{layer}." in name}
                    found = {name: self.raw(array) for name, array in tensors.items()}
                    assert found == {name: expected[name] for name in names}
                    seen |= names
                assert seen | own == expected.keys()
            report = stream.report()
            assert report.requests == 3 * len(LAYERS)
            assert report.peak_bytes <= budget
            if more == 1 << 20:  # Everything fits.
                assert report.misses + report.prefetched == len(LAYERS)
                assert report.evictions == 0

    def test_a_kept_layer(self, tmp_path: Path, rows: list[Stored]) -> None:
        """Its slot is taken away; with none left, that is an error, and the stream goes on."""
        path = write(tmp_path, rows, 0)
        how: dict[str, Any] = {"framework": self.framework, "wait": 0.05, "resident": "embed"}
        with LayerStream(path, r"layers\.(3|4)\.", "200KB", **how) as stream:
            assert len(list(stream)) == 2  # Both fit.
        with LayerStream(path, r"layers\.([345])\.mlp\.experts\.", 40_000, **how) as stream:
            kept: list[Any] = []
            with pytest.raises(errors.MemoryLimitError, match="let go of views"):
                kept.extend(tensors for _ in range(3) for _, tensors in stream)
            kept.clear()
            assert [layer for layer, _ in stream] == [3, 4, 5]

    @pytest.mark.parametrize("start", [0, 8])
    def test_a_mixture_of_experts(self, tmp_path: Path, start: int) -> None:
        """The same logits as with all weights in memory, to the last bit, in a third of them."""
        path = toy(tmp_path, start)
        resident = mfload.load(path, self.framework, device="cpu")

        def run(experts_of: Any) -> Any:
            x = resident["embed"][:5]
            for layer in [0, 1, 2, 3] * 3:
                scores = self.product(x, resident[f"layers.{layer}.router"])
                chosen = np.argsort(-self.settled(scores).sum(0))[:2].tolist()
                with experts_of(layer, chosen) as experts:
                    for expert in chosen:
                        x = x + self.expert(x, experts[expert])
            return self.settled(self.product(x, resident["embed"])).tobytes()

        class Resident(dict[int, Any]):
            def __init__(self, layer: int, chosen: list[int]) -> None:
                name = "layers.{}.mlp.experts.{}.{}_proj.weight"
                self |= {
                    n: {f"{k}_proj": resident[name.format(layer, n, k)] for k in ("up", "down")}
                    for n in chosen
                }

            def __enter__(self) -> Any:
                return self

            def __exit__(self, *_: object) -> None:
                pass

        for engine in ("direct", "pread"):
            options = mfload.Options(engine=engine)
            with ExpertCache(path, budget=1 << 20, framework=self.framework, options=options) as c:
                assert run(c.use) == run(Resident)
                assert c.report().evictions

    @pytest.mark.parametrize("engine", ["direct", "pread"])
    @pytest.mark.parametrize(("kind", "gate"), [("F32", False), ("BF16", True), ("F8_E4M3", True)])
    def test_neurons(self, tmp_path: Path, engine: Any, kind: str, gate: bool) -> None:
        """The rows of plain matrices, in a third of their memory; nothing is copied."""
        parts = ("up", "down", "gate")[: 2 + gate]
        path, expected = bundled(tmp_path, kind, parts)
        how: dict[str, Any] = {"options": mfload.Options(engine=engine), "window": 2}
        rng, row = np.random.default_rng(3), len(expected[0, "up"]) // NEURONS
        with NeuronCache(path, 2 * 60 * len(parts) * row, framework=self.framework, **how) as cache:
            [low, high] = span(each for _, rows in cache._layers.values() for each in rows._arenas)
            for turn in range(8):
                layer = turn % 2
                asked = rng.choice(NEURONS, 25, replace=False)
                cache.prefetch(1 - layer, asked[:5])
                with cache.use(layer, asked) as part:
                    assert {*asked.tolist()} <= {*part.rows.tolist()}
                    assert (part.gate is not None) == gate
                    for name in parts:
                        array, whole = getattr(part, name), getattr(part.whole, name)
                        raw = self.raw(array)
                        assert len(raw) == row * part.used
                        for n, number in enumerate(part.rows.tolist()):
                            found = raw[n * row : (n + 1) * row]
                            assert found == expected[layer, name][number * row :][:row]
                        assert self.raw(whole)[: len(raw)] == raw
                        assert len(self.raw(whole)) == row * cache.capacity[layer]
                        assert self.copied(array) or low <= self.address(array) < high
                    del array, whole
                del part
            assert cache.report().evictions
            assert cache.report().peak_bytes <= cache.report().budget_bytes

    def product(self, x: Any, matrix: Any) -> Any:
        return x @ matrix.T

    def expert(self, x: Any, arrays: Any) -> Any:
        h = self.product(x, arrays["up_proj"])
        return self.product(h * (h > 0), arrays["down_proj"])

    @pytest.mark.parametrize("start", [0, 8])
    def test_a_dense_model(self, tmp_path: Path, start: int) -> None:
        path = toy(tmp_path, start)
        resident = mfload.load(path, self.framework, device="cpu")

        def run(layers: Any, embed: Any) -> bytes:
            x = embed[:5]
            for layer, tensors in layers:
                for n in range(8):
                    name = f"layers.{layer}.mlp.experts.{n}."
                    arrays = {k: tensors[f"{name}{k}.weight"] for k in ("up_proj", "down_proj")}
                    x = x + self.expert(x, arrays)
                arrays = None
            return self.settled(self.product(x, embed)).tobytes()

        expected = run(((n, resident) for n in range(4)), resident["embed"])
        with LayerStream(path, budget=4 << 20, framework=self.framework) as stream:
            for _ in range(3):
                assert run(stream, stream.resident["embed"]) == expected
            assert stream.report().evictions


def toy(folder: Path, start: int) -> Path:
    """Weights of a mixture with numbers that stay small; all lie as the data begins, mod 64."""
    rng = np.random.default_rng(7)
    made: dict[str, Any] = {"embed": rng.standard_normal((320, 64), np.float32)}
    for layer in range(4):
        made[f"layers.{layer}.router"] = rng.standard_normal((8, 64), np.float32)
        for expert in range(8):
            name = f"layers.{layer}.mlp.experts.{expert}"
            made[f"{name}.up_proj.weight"] = rng.standard_normal((272, 64), np.float32) / 8
            made[f"{name}.down_proj.weight"] = rng.standard_normal((64, 272), np.float32) / 16
    rows = [(name, "F32", x.shape, x.tobytes()) for name, x in made.items()]
    return samples.save_raw(folder / "toy.safetensors", rows, start)


NEURONS = 160


def bundled(
    folder: Path, kind: str, parts: tuple[str, ...]
) -> tuple[Path, dict[tuple[int, str], bytes]]:
    """A file of bundles of two layers, and the bytes of each part, a row a neuron."""
    rows = [
        material.stored(f"{n}.{part}", kind, (NEURONS, 512), 3 * n + seed)
        for n in range(2)
        for seed, part in enumerate(parts)
    ]
    expected = {(int(row.name[0]), row.name[2:]): row.raw for row in rows}
    turned: list[Stored] = []
    for row in rows:
        if row.name.endswith("down"):
            raw = np.frombuffer(row.raw, np.uint8).reshape(NEURONS, 512, -1)
            row = replace(row, shape=(512, NEURONS), raw=raw.swapaxes(0, 1).tobytes())
        turned.append(row)
    dense = material.save(folder / "dense.safetensors", turned, 0)
    rules: dict[str, Any] = {part: rf"(\d)\.{part}" for part in parts}
    bundle(dense, folder / "bundled.safetensors", **rules)
    return folder / "bundled.safetensors", expected


def span(arenas: Iterable[Any]) -> tuple[int, int]:
    """Where memory begins and ends."""
    found = [(each.ctypes.data, each.ctypes.data + each.nbytes) for each in arenas]
    return min(first for first, _ in found), max(last for _, last in found)


def least(make: Any) -> int:
    """The least budget, as the error says it for one that is too small."""
    with pytest.raises(errors.MemoryLimitError, match="the budget is too small") as caught:
        make(1)
    found = re.fullmatch(r"at least (\d+) bytes", str(caught.value.expected))
    assert found
    with pytest.raises(errors.MemoryLimitError, match="the budget is too small"):
        make(int(found[1]) - 1)
    return int(found[1])
