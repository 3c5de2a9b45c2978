"""Replicas: each byte is copied from the host once, and then from one device to the others."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import samples
from conformance.suite import no_gpu
from devices import arrays
from devices.cupy_stub import Machine
from devices.fake import FakeDevice
from devices.queues import MODES
from hypothesis import given, strategies as st

import mfload
from mfload import errors
from mfload.cuda import discovery, staging
from mfload.cuda.copies import DeviceCopier
from mfload.cuda.cupy_device import CupyDevice
from mfload.dtypes import TABLE
from mfload.formats import checkpoint
from mfload.io import buffers
from mfload.loading import session
from mfload.options import LoadOptions
from mfload.planning.blocks import Block, Segment
from mfload.planning.request import Request
from mfload.planning.slicing import select

MODEL = samples.model()
TOTAL = sum(array.nbytes for array in MODEL.values())


@pytest.fixture(autouse=True)
def small_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "SLOT", 64 << 10)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return samples.save(tmp_path_factory.mktemp("replicas") / "model.safetensors", MODEL)


def _fakes(count: int, mode: Any = "lazy", **how: Any) -> list[FakeDevice]:
    """Devices that all reach each other."""
    made = [FakeDevice(name=f"fake:{n}", mode=mode, seed=n, **how) for n in range(count)]
    for each in made:
        each.near = {other.name for other in made}
    return made


def _load(path: Path, there: Any, requests: Any = None, threads: int = 4, on_host: Any = ()) -> Any:
    index, sources = checkpoint.read(path)
    if requests is None:
        every = tuple(range(len(there)))
        requests = [Request(info, info.dtype, devices=every) for info in index.tensors.values()]
    adapter = arrays.Arrays(*there, on_host=on_host)
    loader = session.Loader(index, sources, adapter, LoadOptions(threads=threads))
    found = loader.load(requests)
    return {
        (r.info.name, n, r.dtype.name): one for r, some in zip(requests, found, strict=True)
        for n, one in zip(r.devices, some, strict=True)
    }  # fmt: skip


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("mode", MODES)
def test_each_byte_comes_from_the_host_once(path: Path, mode: Any, threads: int) -> None:
    there = _fakes(4, mode)
    found = _load(path, there, threads=threads)
    assert all(samples.same(array, MODEL[name]) for (name, *_), array in found.items())
    assert len(found) == 4 * len(MODEL)
    assert sum(device.nbytes["copy_in"] for device in there) == TOTAL
    assert sum(device.nbytes["copy_within"] for device in there) == 3 * TOTAL
    if threads == 4:  # Each takes its share of them.
        assert all(device.nbytes["copy_in"] > TOTAL // 8 for device in there)
    del found
    for device in there:
        device.assert_clean()


def test_devices_out_of_reach_get_theirs_from_the_host(path: Path) -> None:
    there = _fakes(4)
    for n, device in enumerate(there):
        device.near = {f"fake:{n ^ 1}"}  # Two pairs.
    found = _load(path, there)
    assert all(samples.same(array, MODEL[name]) for (name, *_), array in found.items())
    assert sum(device.nbytes["copy_in"] for device in there) == 2 * TOTAL
    assert sum(device.nbytes["copy_within"] for device in there) == 2 * TOTAL


@arrays.FEW
@given(st.data())
def test_any_parts_in_any_dtypes(path: Path, data: st.DataObject) -> None:
    """Of any devices that reach any others: what each alone would get."""
    index, _ = checkpoint.read(path)
    count = data.draw(st.integers(2, 4))
    there = _fakes(count, data.draw(st.sampled_from(MODES)))
    for device in there:
        device.near = data.draw(st.sets(st.sampled_from([f"fake:{n}" for n in range(count)])))
    requests: list[Request] = []
    for info in data.draw(st.permutations(list(index.tensors.values())))[:4]:
        dtype = info.dtype
        if dtype.name in ("F32", "F16", "BF16"):
            dtype = data.draw(st.sampled_from([dtype, TABLE["F64"], TABLE["BF16"]]))
        selection = None
        if len(info.shape) == 2 and data.draw(st.booleans()):
            step = data.draw(st.sampled_from([1, 2]))
            selection = select(info, (slice(0, None), slice(1, info.shape[1] // 2 + 1, step)))
        devices = data.draw(st.permutations(range(count)))[: data.draw(st.integers(1, count))]
        requests.append(Request(info, dtype, selection, devices=tuple(devices)))
        if dtype is not info.dtype and data.draw(st.booleans()):  # Some of it stays as it is.
            requests.append(requests[-1]._replace(dtype=info.dtype))
    on_host = data.draw(st.sampled_from([(), ("F64", "I16"), ("F32", "BF16")]))
    found = _load(path, there, requests, data.draw(st.sampled_from([1, 3])), on_host)
    arrays_found = iter(found.values())
    for request in requests:
        alone = [request._replace(devices=(0,))]
        (expected,) = _load(path, [FakeDevice()], alone, 1).values()
        for _ in request.devices:
            assert samples.same(next(arrays_found), expected)
    del found, arrays_found
    for device in there:
        device.assert_clean()


def test_the_same_bytes_on_the_host_and_on_devices() -> None:
    """Places on the host are filled from the slot, and are nobody's source."""
    one, two = _fakes(2)
    stage = buffers.allocate(4096)
    stage[:] = np.arange(4096, dtype=np.uint8)
    one.pin(stage)
    host = [np.zeros(100, np.uint8) for _ in range(2)]
    memory: list[Any] = [*host, one.allocate(100), two.allocate(100), one.allocate(100)]
    segments = tuple(Segment(8, 100, number, 0) for number in range(5))
    copier = DeviceCopier(memory, streams := {}, two)
    for event in copier.copy(Block(0, 0, 4096, segments, 100), stage, spare=stage[:0]):
        event.wait()
    for stream in streams.values():
        stream.close()
    one.unpin(stage)
    for each in memory:
        found = each if isinstance(each, np.ndarray) else each.owner.bytes[:100]
        np.testing.assert_array_equal(found, stage[8:108])
    assert (one.nbytes["copy_in"], two.nbytes["copy_in"]) == (0, 100)


@pytest.mark.parametrize("how", ["fail", "fail_later"])
@pytest.mark.parametrize("verb", ["copy_in", "copy_within"])
def test_a_copy_fails(path: Path, verb: str, how: str) -> None:
    there = _fakes(2, **{how: {verb: 2}})
    with pytest.raises(errors.DeviceError):
        _load(path, there)
    for device in there:
        device.assert_clean()


def test_which_devices_cuda_connects() -> None:
    """Once, also if another library has connected them; none if it says that it can't."""
    machine = Machine()
    one, two = (CupyDevice(n, machine.cupy(), machine.driver()) for n in range(2))
    assert one.reaches(one)
    assert machine.calls["deviceCanAccessPeer"] == 0
    assert one.reaches(two)
    assert one.reaches(two)
    assert machine.connected == {(0, 1)}
    assert machine.calls["deviceCanAccessPeer"] == 1
    machine.connected.add((1, 0))
    assert two.reaches(one)
    machine.peers = False
    assert not CupyDevice(0, machine.cupy(), machine.driver()).reaches(two)
    machine.peers, machine.fail["deviceEnablePeerAccess"] = True, 711
    assert not CupyDevice(0, machine.cupy(), machine.driver()).reaches(two)


@pytest.mark.gpu
@pytest.mark.skipif(no_gpu() is not None, reason=str(no_gpu()))
def test_twice_on_one_gpu(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One copy over the bus and one on the device."""
    cupy: Any = importlib.import_module("cupy")
    moved = {"copy_in": 0, "copy_within": 0}

    def count(verb: str, real: Any) -> Any:
        def counted(self: Any, *args: Any) -> None:
            moved[verb] += args[-1].count * args[-1].nbytes
            real(self, *args)

        return counted

    stream = discovery.find(0).stream()
    stream.close()
    for verb in moved:
        kind: Any = type(stream)
        monkeypatch.setattr(kind, verb, count(verb, getattr(kind, verb)))
    model = {name: array for name, array in MODEL.items() if array.dtype.isbuiltin == 1}
    file = samples.save(path.with_name("plain.safetensors"), model)
    found: Any = mfload.load(file, framework="cupy", device=["cuda:0", "cuda:0"])
    for name, (first, second) in found.items():
        assert samples.same(cupy.asnumpy(first), model[name])
        assert samples.same(cupy.asnumpy(second), model[name])
        assert not model[name].size or first.data.ptr != second.data.ptr
    total = sum(array.nbytes for array in model.values())
    assert moved == {"copy_in": total, "copy_within": total}
