"""What a seed holds arrives bit by bit, however it is held, asked for and carried."""

from __future__ import annotations

import collections
import contextlib
import itertools
import random
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import samples
import seeding
from hypothesis import HealthCheck, given, settings, strategies as st
from seeding import MODEL, TRANSPORTS, grid, options, publish, row

import mfload
from mfload import dtypes, errors
from mfload.peer.fragments import Held

KINDS = list(dtypes.TABLE.values())


@pytest.fixture(params=TRANSPORTS)
def how(request: pytest.FixtureRequest) -> Any:
    return options(request.param)


def raw(kind: dtypes.DType, shape: tuple[int, ...], seed: int) -> Any:
    """Random bytes of a dtype; packed ones as uint8, their last dim in bytes."""
    if kind.numpy is not None:
        return samples.numbers(shape, kind.numpy, seed)
    return samples.numbers(kind.storage_shape(shape), np.uint8, seed)


class TestDtypes:
    def test_every_one(self, how: Any) -> None:
        held: list[Held] = []
        expected: dict[str, Any] = {}
        for n, (kind, shape) in enumerate(itertools.product(KINDS, [(3, 8), (12,), (5, 2, 4)])):
            name = f"{kind.name}.{len(shape)}"
            expected[name] = raw(kind, shape, n)
            held.append(row(name, expected[name], dtype=kind.name))
        with mfload.publish(held, model=MODEL) as seed:
            found = mfload.load(seed.url, "numpy", options=how)
            with mfload.open(seed.url, options=how) as opened:
                for each in held:
                    assert opened.get_slice(each.name).get_dtype() == each.dtype.name
        assert sorted(found) == sorted(expected)
        for name, array in expected.items():
            assert found[name].tobytes() == array.tobytes(), name
            if dtypes.TABLE[name.partition(".")[0]].numpy is not None:
                assert samples.same(found[name], array), name

    def test_scalars_and_empty_ones(self, how: Any) -> None:
        arrays = {
            "scalar": np.array(3.5, np.float64),
            "one": np.ones(1, np.int8),
            "none": np.empty(0, np.float32),
            "rows": np.empty((0, 4), np.int64),
            "columns": np.empty((4, 0, 2), ml_dtypes.bfloat16),
        }
        with publish(arrays) as seed:
            samples.assert_same(mfload.load(seed.url, "numpy", options=how), arrays)
        with publish({"none": np.empty((0, 3), np.float32)}) as seed:
            (found,) = mfload.load(seed.url, "numpy", options=how).values()
            assert found.shape == (0, 3)

    def test_converted(self, how: Any) -> None:
        arrays = {"w": samples.numbers((300, 40), np.int16, 1), "b": np.arange(9.0)}
        with publish(arrays) as seed:
            found = mfload.load(seed.url, "numpy", dtype={"w": "float32"}, options=how)
        samples.assert_same(found, {**arrays, "w": arrays["w"].astype(np.float32)})


class TestSizes:
    def test_many_small_ones(self, how: Any) -> None:
        base = np.arange(20_000 * 3, dtype=np.int32)
        arrays = {f"layer.{n}": base[3 * n : 3 * n + 1 + n % 3] for n in range(20_000)}
        with publish(arrays) as seed:
            found = mfload.load(seed.url, "numpy", options=how)
        samples.assert_same(found, arrays)

    def test_large_ones(self, how: Any) -> None:
        arrays = {"a": samples.numbers((1031, 8191), np.uint32, 1), "b": samples.numbers((77,))}
        report = mfload.Report()
        with publish(arrays) as seed:
            found = mfload.load(seed.url, "numpy", options=how, report=report)
            ((name, engine, _),) = report.route
        assert (name, engine) == (f"peer://{seed.address}", f"peer-{how.peer.transports[0]}")
        samples.assert_same(found, arrays)

    def test_memory_that_two_tensors_share_travels_as_one(
        self, how: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        first = row("a", samples.numbers((64, 64)))
        with (
            mfload.publish([first, first._replace(name="b")], model=MODEL, run="r") as seed,
            seeding.counted(monkeypatch),
        ):
            assert seed.manifest.size == first.memory.size
            found = mfload.load(seed.url, "numpy", options=how)
        assert samples.same(found["a"], found["b"])


class TestEveryCall:
    ARRAYS = samples.model()

    def test_open(self, how: Any) -> None:
        wide, q = self.ARRAYS["wide"], self.ARRAYS["layer.0.q"]
        with publish(self.ARRAYS) as seed, mfload.open(seed.url, options=how) as opened:
            assert sorted(opened.keys()) == sorted(self.ARRAYS)
            samples.assert_same(opened.get_tensors(), self.ARRAYS)
            for cut in (np.s_[1, 5:140_000:7], np.s_[:, 149_999:], np.s_[0:1], np.s_[..., 3]):
                assert samples.same(opened.get_slice("wide")[cut], np.ascontiguousarray(wide[cut]))
            found = opened.get_slice("layer.0.q")[3:200:5, 7:9]
            assert samples.same(found, np.ascontiguousarray(q[3:200:5, 7:9]))

    def test_plan_stream_and_progress(self, how: Any) -> None:
        seen: list[tuple[int, int]] = []
        with publish(self.ARRAYS) as seed:
            preview = mfload.plan(seed.url, options=how)
            assert f"peer-{how.peer.transports[0]}" in str(preview)
            samples.assert_same(dict(mfload.stream(seed.url, "numpy", options=how)), self.ARRAYS)
            mfload.load(seed.url, "numpy", progress=lambda *each: seen.append(each), options=how)
        assert seen[-1] == (seed.manifest.size, seed.manifest.size)

    def test_verify_diff_and_convert(self, how: Any, tmp_path: Path) -> None:
        path = samples.save(tmp_path / "model.safetensors", self.ARRAYS)
        with publish(self.ARRAYS) as seed:
            found = mfload.verify(seed.url, options=how)
            assert found.ok
            assert found.checked == ("headers", "checksums")
            assert found.read_bytes == seed.manifest.size
            assert mfload.verify(seed.url, checksums=False, options=how).read_bytes == 0
            assert mfload.verify(seed.url, against=path, options=how).ok
            assert mfload.diff(seed.url, path).equal
            copy = tmp_path / "copy.safetensors"
            mfload.convert(seed.url, copy)
            samples.assert_same(mfload.load(copy, "numpy"), self.ARRAYS)
        with publish({**self.ARRAYS, "odd": self.ARRAYS["odd"] ^ 1}) as seed:
            assert not mfload.diff(seed.url, path).equal

    def test_verify_finds_what_changed_in_place(self, how: Any) -> None:
        arrays = {name: each.copy() for name, each in self.ARRAYS.items()}
        with mfload.publish(arrays, model=MODEL) as seed:
            arrays["odd"] ^= 1
            found = mfload.verify(seed.url, options=how)
        assert not found.ok
        assert "differ from those that it published" in str(found.problems[0])
        assert found.problems[0].tensor in arrays

    def test_load_into(self) -> None:
        code = """
            import sys, mfload, numpy as np
            target = {"a": {"w": np.zeros((40, 7), np.int16)}, "b": np.zeros(9)}
            found = mfload.load_into(target, sys.argv[1])
            assert np.array_equal(found["a"]["w"], np.arange(280).reshape(40, 7))
            assert np.array_equal(found["b"], np.arange(9.0))
        """
        arrays = {"a.w": np.arange(280, dtype=np.int16).reshape(40, 7), "b": np.arange(9.0)}
        with publish(arrays) as seed:
            run = [sys.executable, "-c", textwrap.dedent(code), seed.url]
            done = subprocess.run(run, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr

    def test_names_and_shards(self, how: Any) -> None:
        with publish(self.ARRAYS) as seed:
            found = mfload.load(seed.url, "numpy", names=r"layer\.", options=how)
            samples.assert_same(found, {k: v for k, v in self.ARRAYS.items() if "layer." in k})
            for rank in range(4):
                (part,) = mfload.load(
                    seed.url, "numpy", names="layer.1.q", shardings=[("q", 1)], shard=(rank, 4),
                    options=how,
                ).values()  # fmt: skip
                whole = self.ARRAYS["layer.1.q"]
                assert samples.same(part, whole[:, rank * 75 : rank * 75 + 75])

    def test_metadata_and_ls(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from mfload.cli import main

        with publish(self.ARRAYS, metadata={"format": "pt"}) as seed:
            with mfload.open(seed.url) as opened:
                assert (opened.metadata() or {})["format"] == "pt"
            monkeypatch.setattr(sys, "argv", ["mfload", "ls", seed.url])
            assert not main()
        assert "layer.0.q" in capsys.readouterr().out

    def test_a_pickle_reads_on(self, how: Any) -> None:
        import pickle

        with publish(self.ARRAYS) as seed, mfload.open(seed.url, options=how) as opened:
            copy = pickle.loads(pickle.dumps(opened))
            samples.assert_same(copy.get_tensors(), self.ARRAYS)
            copy.close()
            frozen = pickle.dumps(opened)
            seed.update(seeding.rows(self.ARRAYS))
            with pytest.raises(errors.SourceChangedError):
                pickle.loads(frozen).get_tensors()


class TestIdentity:
    def test_another_model_or_revision_is_not_found(self) -> None:
        with publish({"w": np.arange(3)}) as seed:
            for name in ("org/name@other", "org/nam@main", "name@main"):
                with pytest.raises(errors.SourceNotFoundError, match="another model") as info:
                    mfload.load(f"peer://{seed.address}/{name}", "numpy")
                assert info.value.found == "org/name@main"
            assert "w" in mfload.load(f"peer://{seed.address}/org/name", "numpy")

    def test_seeds_that_disagree(self) -> None:
        with (
            publish({"w": np.arange(4, dtype=np.float16)}) as one,
            publish({"w": np.zeros(4, ml_dtypes.bfloat16)}) as two,
            pytest.raises(errors.CheckpointError, match="disagree") as info,
        ):
            mfload.load(f"peer://{one.address},{two.address}/org/name", "numpy")
        assert "BF16" in str(info.value)
        assert "F16" in str(info.value)


@st.composite
def holdings(draw: st.DrawFn) -> tuple[dict[str, Any], list[list[Held]]]:
    """Arrays, and rows of one to four seeds that hold all of them together."""
    count = draw(st.integers(1, 4))
    seeds: list[list[Held]] = [[] for _ in range(count)]
    arrays: dict[str, Any] = {}
    for n in range(draw(st.integers(1, 4))):
        kind = draw(st.sampled_from(KINDS))
        rank = draw(st.integers(1, 3))
        shape = [draw(st.integers(1, 17)) for _ in range(rank)]
        shape[-1] *= kind.elements
        name = f"t{n}.{kind.name}"
        arrays[name] = raw(kind, tuple(shape), n)
        for _ in range(draw(st.integers(1, 2))):  # One mesh, or two that overlap.
            cuts = [draw(st.sets(st.integers(1, length), max_size=2)) for length in shape]
            cuts[-1] = {each // kind.elements * kind.elements for each in cuts[-1]}
            cuts = [each - {0, length} for each, length in zip(cuts, shape, strict=True)]
            for box in grid(shape, [sorted(each) for each in cuts]):
                for number in draw(st.sets(st.integers(0, count - 1), min_size=1, max_size=2)):
                    each = row(name, arrays[name], box, kind.name)
                    if all((e.name, e.box) != (name, each.box) for e in seeds[number]):
                        seeds[number].append(each)
    return arrays, seeds


class TestSharded:
    @given(held=holdings(), data=st.data())
    @settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
    def test_whatever_seeds_hold_and_readers_want(
        self, held: Any, data: st.DataObject, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        arrays, seeds = held
        transport = data.draw(st.sampled_from(TRANSPORTS))
        checks = data.draw(st.booleans())
        how = options(transport, checksums=checks)
        with contextlib.ExitStack() as stack:
            made = [
                stack.enter_context(mfload.publish(each, model=MODEL, revision="main", run="one"))
                for each in seeds
                if each
            ]
            url = f"peer://{','.join(each.address for each in made)}/{MODEL}@main"
            with seeding.counted(monkeypatch, block=1 << 20) as reads:
                found = mfload.load(url, "numpy", options=how)
            assert {k: v.tobytes() for k, v in found.items()} == {
                k: v.tobytes() for k, v in arrays.items()
            }
            if not checks:
                self._once(reads, sum(each.nbytes for each in arrays.values()))
            name = data.draw(st.sampled_from(sorted(arrays)))
            kind = dtypes.TABLE[name.partition(".")[2]]
            if kind.numpy is None:
                return
            whole = arrays[name]
            cut = tuple(
                slice(data.draw(st.integers(0, n)), n, data.draw(st.integers(1, 3)))
                for n in whole.shape
            )
            with mfload.open(url, options=how) as opened:
                assert samples.same(opened.get_slice(name)[cut], np.ascontiguousarray(whole[cut]))
            dim = data.draw(st.integers(0, whole.ndim - 1))
            size = data.draw(st.integers(1, 3))
            if whole.shape[dim] % size == 0:
                parts = [
                    mfload.load(
                        url, "numpy", names=[name], shardings=[("", dim)], shard=(rank, size),
                        options=how,
                    )[name]
                    for rank in range(size)
                ]  # fmt: skip
                for part, expected in zip(parts, np.split(whole, size, dim), strict=True):
                    assert samples.same(part, np.ascontiguousarray(expected))

    def _once(self, reads: seeding.Reads, total: int) -> None:
        """No byte of a seed is read twice, and no more than there are."""
        assert reads.total == total
        by: dict[Any, list[tuple[int, int]]] = collections.defaultdict(list)
        for way, offset, nbytes in reads.seen:
            by[way].append((offset, nbytes))
        for spans in by.values():
            for (low, nbytes), (high, _) in itertools.pairwise(sorted(spans)):
                assert low + nbytes <= high

    def test_seeds_share_a_load(self, monkeypatch: pytest.MonkeyPatch) -> None:
        arrays = seeding.weights(count=12, side=256)
        with contextlib.ExitStack() as stack:
            made = [stack.enter_context(publish(arrays)) for _ in range(3)]
            url = f"peer://{','.join(each.address for each in made)}/{MODEL}"
            reads = stack.enter_context(seeding.counted(monkeypatch))
            how = options("http", checksums=False)
            samples.assert_same(mfload.load(url, "numpy", options=how), arrays)
        by = collections.Counter[Any]()
        for way, _, nbytes in reads.seen:
            by[way] += nbytes
        assert sorted(by.values()) == [4 * 256 * 256 * 4] * 3

    def test_a_gap_is_named(self) -> None:
        array = samples.numbers((8, 8))
        with (
            mfload.publish([row("w", array, [(0, 5), (0, 8)])], model=MODEL, run="one") as one,
            mfload.publish([row("w", array, [(6, 8), (0, 8)])], model=MODEL, run="one") as two,
            pytest.raises(errors.CheckpointError, match="whole model") as info,
        ):
            mfload.load(f"peer://{one.address},{two.address}/{MODEL}", "numpy")
        assert "w: no seed has all of it" in str(info.value)

    def test_boxes_of_any_mesh_among_others(self) -> None:
        from mfload.peer.checkpoint import tiling

        shape = (6, 8)
        rows, columns = grid(shape, [[1, 4], []]), grid(shape, [[], [3]])
        for some in (rows + columns[:1], columns + rows[1:], grid(shape, [[2], [4]]) + rows[:2]):
            random.Random(0).shuffle(some)
            found = tiling(shape, some)
            assert found is not None
            assert _covers(shape, found)
        assert tiling(shape, rows[1:] + columns[:1]) is None
        assert tiling(shape, [((0, 6), (0, 5)), ((0, 6), (4, 8))]) is None


def _covers(shape: tuple[int, ...], boxes: Any) -> bool:
    count = np.zeros(shape, int)
    for box in boxes:
        count[tuple(slice(*span) for span in box)] += 1
    return bool((count == 1).all())
