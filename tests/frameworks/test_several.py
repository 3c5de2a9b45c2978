"""Several devices of one framework: lists of them, and one for each name."""

from __future__ import annotations

import gc
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import samples
import torch
from conformance import material
from conformance.device_memory import Ground, allocation, disjoint, request, wrapped
from conformance.material import Stored
from conformance.suite import no_gpu
from devices.fake import FakeDevice
from leaks import left
from test_jax import JaxConformance

import mfload
from mfload import errors, frameworks
from mfload.frameworks import several
from mfload.frameworks.base import Pool
from mfload.frameworks.jax_adapter import JaxAdapter
from mfload.frameworks.torch_adapter import TorchAdapter

LOOK = JaxConformance()
CPU = torch.device("cpu")


def cpu(number: int) -> Any:
    return jax.devices("cpu")[number]


def rows(*names: str) -> list[Stored]:
    return [material.stored(name, "F32", (3, 5), n) for n, name in enumerate(names)]


class TestAssigning:
    def test_a_list(self) -> None:
        adapter = frameworks.get("jax", ["cpu:3", cpu(0), "cpu:5"])
        assert (adapter.name, adapter.on_host, list(adapter.devices)) == ("jax", True, [])
        requests = adapter.assign([request(row) for row in rows("a", "b")])
        assert [(each.info.name, each.devices) for each in requests] == [
            (name, (n,)) for name in "ab" for n in range(3)
        ]
        assert adapter.results([(n,) for n in range(6)]) == [[0, 1, 2], [3, 4, 5]]

    def test_rules(self) -> None:
        table = [(r"^embed", "cpu:1"), (re.compile("LAYERS", re.I), "cpu:4"), ("", "cpu:1")]
        adapter = frameworks.get("flax", table)
        assert isinstance(adapter, several.SeveralAdapter)
        names = ("embed", "layers.0.embed", "head", "model.Layers.1")
        requests = adapter.assign([request(row) for row in rows(*names)])
        assert [each.devices for each in requests] == [(0,), (1,), (0,), (1,)]
        assert adapter.results([(n,) for n in range(4)]) == [0, 1, 2, 3]

    def test_exact_names(self) -> None:
        adapter = frameworks.get("jax", {"a.b": "cpu:1", "axb": "cpu:4", "c": "cpu:1"})
        requests = adapter.assign([request(row) for row in rows("axb", "a.b", "c")])
        assert [each.devices for each in requests] == [(1,), (0,), (0,)]
        with pytest.raises(errors.DeviceError, match="nothing about 1 tensor"):
            adapter.assign([request(row) for row in rows("c.0")])

    @pytest.mark.parametrize(
        ("device", "message"),
        [
            ({"layer.0": "cpu", "laeyr.1": "cpu"}, "'laeyr.1'.*did you mean 'layer.1'"),
            ([("layer.[0-9]", "cpu"), ("haed", "cpu")], "match no tensor: 'haed'"),
            ({"layer.0": "cpu", "layer.*": "cpu"}, "regexes go in a list of pairs"),
        ],
    )
    def test_what_matches_no_tensor_warns(self, device: Any, message: str) -> None:
        with pytest.warns(UserWarning, match=message) as caught:
            frameworks.get("jax", device, ["layer.0", "layer.1", "head"])
        assert len(caught) == 1

    def test_devices_and_rules_do_not_mix(self) -> None:
        with pytest.raises(errors.UsageError, match="mixes"):
            frameworks.get("jax", [("a", "cpu:0"), "cpu:1"])

    def test_one_device_is_as_it_was(self) -> None:
        adapter = frameworks.get("jax", "cpu:2")
        requests = [request(row) for row in rows("a")]
        assert isinstance(adapter, JaxAdapter)
        assert adapter.assign(requests) == requests
        assert adapter.results([7]) == [7]

    def test_names_without_a_rule(self) -> None:
        adapter = frameworks.get("jax", [("^a", "cpu:0")])
        with pytest.raises(errors.DeviceError, match="nothing about 2 tensors") as caught:
            adapter.assign([request(row) for row in rows("a", "b", "ba")])
        assert caught.value.found == "b, ba"
        with pytest.raises(errors.DeviceError) as caught:
            adapter.assign([request(row) for row in rows(*(f"b{n}" for n in range(30)))])
        assert str(caught.value.found).endswith("b9, …")

    @pytest.mark.parametrize("nothing", [[], (), {}])
    def test_no_device(self, nothing: Any) -> None:
        with pytest.raises(errors.DeviceError, match="no device"):
            frameworks.get("jax", nothing)

    def test_devices_that_are_not_there(self) -> None:
        for device in (["cpu:0", "cpu:99"], [("a", "cpu:0"), ("b", "nonsense")], {"a": "cpu:99"}):
            with pytest.raises(errors.DeviceError):
                frameworks.get("jax", device)

    @pytest.mark.parametrize("rule", ["(", b"a", 3])
    def test_malformed_rules(self, rule: Any) -> None:
        with pytest.raises(errors.UsageError, match="malformed"):
            frameworks.get("jax", [(rule, "cpu:0")])


class TestLanding:
    """Two devices to land on, and one part that stays on the host."""

    @pytest.fixture
    def lands(self) -> Iterator[list[FakeDevice]]:
        found = [FakeDevice((1, n), f"fake:{n}") for n in (2, 5)]
        yield found
        for device in found:
            device.assert_clean()

    @pytest.fixture
    def adapter(self, lands: Sequence[FakeDevice]) -> several.SeveralAdapter:
        first, second = lands
        return several.SeveralAdapter(
            [
                JaxAdapter(cpu(5), second, ("a", "b")),
                JaxAdapter(cpu(0)),
                JaxAdapter(cpu(2), first, ("b",)),
                JaxAdapter(cpu(5), second),
            ]
        )

    def test_what_lands_where(
        self, lands: Sequence[FakeDevice], adapter: several.SeveralAdapter
    ) -> None:
        (row,) = rows("w")
        assert list(adapter.devices) == [lands[1], lands[0]]
        found = [allocation(adapter, row, devices=(n,)) for n in range(4)]
        assert [each.device for each in found] == [0, None, 1, 0]
        assert [each.owner for each in found] == ["mfload"] * 4
        assert not found[1].copied
        assert adapter.notes == ("a", "b")
        assert allocation(adapter, material.stored("f", "F4", (4, 8)), devices=(0,)).copied

    def test_pools(self, adapter: several.SeveralAdapter, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(JaxAdapter, "pool", lambda self, n: Pool(None, self.devices[n].name))
        pools = [adapter.pool(n) for n in (0, 1)]
        assert [pool and pool.advice for pool in pools] == ["fake:5", "fake:2"]

    def test_arrays_on_each(
        self, lands: Sequence[FakeDevice], adapter: several.SeveralAdapter
    ) -> None:
        every = material.zoo()
        for part, land, number in ((0, lands[1], 5), (2, lands[0], 2)):
            for own in (True, False):
                arrays = wrapped(Ground(adapter, land), every, (part,), own=own)
                loaded = {row.name: x for row, (x,) in zip(every, arrays, strict=True)}
                assert {array.device for array in loaded.values()} == {cpu(number)}
                LOOK.assert_loaded(loaded, every)
                del arrays, loaded
            assert left() == 0

    def test_needs_of_all_at_once(
        self, lands: Sequence[FakeDevice], adapter: several.SeveralAdapter
    ) -> None:
        requests = adapter.assign([request(row) for row in rows("a", "b")])
        where = [each.array[0].device for each in adapter.lend(requests)]
        assert where == [cpu(5), cpu(0), cpu(2), cpu(5)] * 2

    def test_what_each_allocates(
        self, adapter: several.SeveralAdapter, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        told: list[Any] = []
        real = JaxAdapter.allocator
        monkeypatch.setattr(
            JaxAdapter,
            "allocator",
            lambda self, *given: told.append((self.place, given)) or real(self, *given),
        )
        made = [adapter.allocator(n, [64, 128])(64) for n in (0, 1)]
        assert told == [(cpu(5), (0, [64, 128])), (cpu(2), (0, [64, 128]))]
        assert [each.device.name for each in made] == ["fake:5", "fake:2"]
        assert [each.owner[0].device for each in made] == [cpu(5), cpu(2)]

    def test_whose_memory(self, lands: Sequence[FakeDevice]) -> None:
        first, second = lands
        (row,) = rows("w")
        unlike = several.SeveralAdapter([JaxAdapter(cpu(2), first), TorchAdapter(CPU, second)])
        for asked, owners in (
            ("auto", ["mfload", "mfload"]),
            ("mfload", ["mfload", "mfload"]),
            ("framework", ["mfload", "framework"]),  # JAX's lie in buffers of XLA's.
        ):
            assert [allocation(unlike, row, asked, (n,)).owner for n in range(2)] == owners


class TestLoading:
    def test_a_list(self, aligned: Any) -> None:
        path, stored = aligned
        for allocator in ("mfload", "framework"):
            report = mfload.Report()
            loaded = mfload.load(
                path,
                framework="jax",
                device=["cpu:1", "cpu:6"],
                report=report,
                options=mfload.Options(allocator=allocator),
            )
            for n, number in enumerate((1, 6)):
                arrays = {name: each[n] for name, each in loaded.items()}
                assert {array.device for array in arrays.values()} == {cpu(number)}
                LOOK.assert_loaded(arrays, stored)
            assert [len(each) for each in loaded.values()] == [2] * len(stored)
            # Read once for both.
            assert report.read_bytes < 1.5 * sum(len(row.raw) for row in stored)

    @pytest.mark.parametrize("allocator", ["mfload", "framework"])
    def test_one_device_twice(
        self, aligned: Any, allocator: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        land = FakeDevice((1, 2))
        adapter = several.SeveralAdapter([JaxAdapter(cpu(2), land), JaxAdapter(cpu(2), land)])
        monkeypatch.setattr(frameworks, "get", lambda *_: adapter)
        path, stored = aligned
        loaded = mfload.load(path, framework="jax", options=mfload.Options(allocator=allocator))
        # XLA may write to each of them when it is donated.
        disjoint(
            (LOOK.address(array), len(row.raw)) for row in stored for array in loaded[row.name]
        )
        for n in range(2):
            LOOK.assert_loaded({name: each[n] for name, each in loaded.items()}, stored)
        del loaded
        assert left() == 0
        land.assert_clean()

    def test_names(self, aligned: Any) -> None:
        path, stored = aligned
        loaded = mfload.load(path, framework="jax", device=[("^F", "cpu:1"), (".*", "cpu:6")])
        LOOK.assert_loaded(loaded, stored)
        for name, array in loaded.items():
            assert array.device == cpu(1 if name.startswith("F") else 6)
        with pytest.raises(errors.DeviceError, match="says nothing"):
            mfload.load(path, framework="jax", device=[("^F", "cpu:1")])
        gc.collect()

    def test_an_opened_checkpoint(self, aligned: Any) -> None:
        path, stored = aligned
        row = next(row for row in stored if row.dtype == "F32")
        with mfload.open(path, framework="jax", device=["cpu:1", "cpu:6"]) as opened:
            arrays = opened.get_tensor("F32")
            part = opened.get_slice("F32")[1:, ::2]
        assert [array.device for array in arrays] == [cpu(1), cpu(6)]
        for array, piece in zip(arrays, part, strict=True):
            assert LOOK.found(array) == LOOK.expected(row)
            assert np.asarray(piece).tobytes() == row.array()[1:, ::2].tobytes()

    def test_torch_on_the_host_twice(self, aligned: Any) -> None:
        loaded = mfload.load(aligned[0], framework="torch", device=("cpu", CPU), names=["F32"])
        first, second = loaded["F32"]
        assert torch.equal(first.view(torch.int32), second.view(torch.int32))
        first.fill_(1)
        assert not torch.equal(first, second)

    @pytest.mark.gpu
    def test_on_a_gpu_and_on_the_host(self, aligned: Any) -> None:
        if reason := no_gpu():
            pytest.skip(reason)
        path, stored = aligned
        if not torch.cuda.is_available():
            pytest.skip("this torch has no GPU")
        loaded = mfload.load(path, framework="torch", device=["cuda:0", "cpu"], names=["F32"])
        far, near = loaded["F32"]
        assert (far.device.type, near.device.type) == ("cuda", "cpu")
        row = next(row for row in stored if row.dtype == "F32")
        for tensor in (far, near):
            assert tensor.cpu().numpy().tobytes() == row.raw


def test_a_name_that_is_not_there_is_answered_with_one_that_is(tmp_path: Path) -> None:
    path = samples.save(tmp_path / "a.safetensors", {"head": np.zeros(3, np.float32)})
    with pytest.warns(UserWarning, match="'haed'.*did you mean 'head'"):
        mfload.load(path, "jax", device={"head": "cpu:0", "haed": "cpu:1"})


def test_huge_pages_are_asked_for_in_memory_that_is_lent(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a whole target: blocks of one begin and end amid huge pages."""
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(several.buffers, "ask_huge", lambda *given: asked.append(given))
    memory = np.zeros(4 << 20, np.uint8)
    wanted = request(material.stored("w", "F32", (1 << 20,), 1))
    there = FakeDevice().allocate(4 << 20)
    adapter = several.InPlaceAdapter(TorchAdapter(CPU), {0: memory, 1: there})
    given = adapter.lend([wanted._replace(devices=(n,)) for n in range(2)])
    assert given[0].memory is memory
    assert given[1].memory is there
    assert asked == [(memory.ctypes.data, memory.nbytes)]
