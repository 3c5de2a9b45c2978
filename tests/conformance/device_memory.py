"""What every adapter must make of tensors that land on a device. Each framework's test subclasses.

The framework on the CPU lands on a fake device in host memory; where there is a GPU, the same
tests run on it.
"""

from __future__ import annotations

import gc
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pytest
from calls import as_options
from conformance import material
from conformance.material import BITS, Stored
from conformance.suite import Conformance, no_gpu
from devices.fake import FakeDevice
from leaks import left

import mfload
from mfload import dtypes, errors, frameworks
from mfload.cuda import discovery, memory
from mfload.cuda.device import Device, DeviceRows
from mfload.dlpack import View
from mfload.frameworks.base import Adapter
from mfload.index import Piece, TensorInfo
from mfload.io import buffers
from mfload.loading import session
from mfload.options import LoadOptions
from mfload.planning import request as planning
from mfload.planning.layout import DEVICE_ALIGNMENT as ALIGNMENT
from mfload.planning.request import Allocation, Request


class Ground(NamedTuple):
    """Where arrays land.

    Attributes:
        adapter: What makes them.
        device: Its device.
    """

    adapter: Adapter
    device: Device


def request(row: Stored, devices: tuple[int, ...] = ()) -> Request:
    """What asks for the whole of a tensor as it is stored."""
    dtype = dtypes.TABLE[row.dtype]
    info = TensorInfo(row.name, dtype, row.shape, (Piece(0, 0, len(row.raw)),))
    return Request(info, dtype, devices=devices)


def allocation(
    adapter: Adapter, row: Stored, allocator: Any = "auto", devices: tuple[int, ...] = ()
) -> Allocation:
    """Where a tensor lands."""
    return adapter.allocation(request(row, devices), LoadOptions(allocator=allocator))


def write(device: Device, parts: Sequence[tuple[Any, int, bytes]]) -> None:
    """Writes bytes to device buffers, each with the first byte there, and waits."""
    slot = buffers.allocate(max([1, *(len(raw) for *_, raw in parts)]))
    device.pin(slot)
    stream = device.stream()
    for target, at, raw in parts:
        if raw:
            slot[: len(raw)] = np.frombuffer(raw, np.uint8)
            stream.copy_in(target, at, slot, DeviceRows(1, len(raw), len(raw)))
            stream.synchronize()
    stream.close()
    device.unpin(slot)


def wrapped(
    ground: Ground, rows: Sequence[Stored], devices: tuple[int, ...] = (), *, own: bool = True
) -> list[Any]:
    """Arrays over one buffer, of ours or the framework's, each on a boundary of 256 bytes."""
    ends = np.cumsum([-(-len(row.raw) // ALIGNMENT) * ALIGNMENT for row in rows])
    starts = [0, *(int(end) for end in ends)]
    number = ground.adapter.devices.index(ground.device)
    nbytes = starts.pop()
    allocate = ground.device.allocate if own else ground.adapter.allocator(number, [nbytes])
    buffer = allocate(nbytes)
    write(ground.device, [(buffer, at, row.raw) for at, row in zip(starts, rows, strict=True)])
    views: list[View] = []
    for at, row in zip(starts, rows, strict=True):
        view = View(row.name, dtypes.TABLE[row.dtype], row.shape, buffer, at, devices)
        as_bytes = ground.adapter.forms[row.dtype].how == "bytes"
        views.append(view.as_bytes() if as_bytes else view)
    return ground.adapter.wrap(views)


def lent(ground: Ground, rows: Sequence[Stored], devices: tuple[int, ...] = ()) -> list[Any]:
    """Arrays in memory of the framework's."""
    before = memory.live_bytes()
    given = ground.adapter.lend([request(row, devices) for row in rows])
    assert [each.memory.nbytes for each in given] == [len(row.raw) for row in rows]
    assert {each.memory.device for each in given} <= {ground.device}
    assert memory.live_bytes() == before  # None of it is ours.
    write(
        ground.device,
        [(each.memory, 0, row.raw) for each, row in zip(given, rows, strict=True)],
    )
    return [each.array for each in given]


def disjoint(ranges: Iterable[tuple[int, int]]) -> None:
    """Asserts that no two ranges of memory overlap, each an address and bytes."""
    ordered = sorted((start, nbytes) for start, nbytes in ranges if nbytes)
    for (start, nbytes), (following, _) in itertools.pairwise(ordered):
        assert start + nbytes <= following


class DeviceMemoryConformance:
    """The suite.

    Attributes:
        look: What looks into arrays of the framework.
        stays: Dtypes that land on the host all the same.
        landings: Whose memory arrays can lie in.
        allocator: Whose is the better one.
    """

    look: ClassVar[Conformance]
    stays: ClassVar[frozenset[str]] = frozenset()
    landings: ClassVar[tuple[str, ...]] = ("mfload", "framework")
    allocator: ClassVar[str] = "mfload"

    def adapter(self, land: Device) -> Adapter:
        """An adapter for the CPU that lands on a device."""
        raise NotImplementedError

    # Helpers.

    @pytest.fixture(params=["fake", pytest.param("gpu", marks=pytest.mark.gpu)])
    def ground(self, request: pytest.FixtureRequest) -> Iterator[Ground]:
        if request.param == "gpu":
            if reason := no_gpu():
                pytest.skip(reason)
            adapter = frameworks.get(self.look.framework, "cuda:0")
            if not adapter.devices:
                pytest.skip(f"{adapter.name} does not land on this GPU: {adapter.notes}")
            yield Ground(adapter, adapter.devices[0])
            return
        device = FakeDevice()
        yield Ground(self.adapter(device), device)
        device.assert_clean()

    def rows(self, ground: Ground, rows: Sequence[Stored]) -> list[Stored]:
        return [row for row in rows if allocation(ground.adapter, row).device is not None]

    def lendable(self, ground: Ground) -> set[str]:
        return {
            row.dtype
            for row in material.aligned()
            if allocation(ground.adapter, row, "framework").owner == "framework"
        }

    def check(self, rows: Sequence[Stored], arrays: Sequence[Any]) -> None:
        loaded = {row.name: array for row, array in zip(rows, arrays, strict=True)}
        self.look.assert_loaded(loaded, list(rows))

    # What lands.

    def test_what_lands(self, ground: Ground) -> None:
        adapter = ground.adapter
        assert list(adapter.devices) == [ground.device]
        allocator = {row.name for row in self.rows(ground, material.aligned())}
        assert allocator == BITS.keys() - self.stays
        floats = material.stored("w", "F32", (3,))
        owners = {who: allocation(adapter, floats, who).owner for who in ("mfload", "framework")}
        assert set(owners.values()) == set(self.landings)
        assert owners["framework"] == self.landings[-1]
        assert allocation(adapter, floats).owner == self.allocator
        assert adapter.notes == ()

    def test_the_pool(self, ground: Ground) -> None:
        pool = ground.adapter.pool(0)
        if pool is not None:
            assert pool.advice
            assert pool.free is None or pool.free >= 0

    def test_the_host_alone(self) -> None:
        adapter = frameworks.get(self.look.framework, "cpu")
        assert list(adapter.devices) == []
        assert {allocation(adapter, row).device for row in material.aligned()} == {None}

    # Memory of ours.

    def test_every_dtype_in_memory_of_ours(self, ground: Ground) -> None:
        if "mfload" not in self.landings:
            pytest.skip("lands in the framework's memory alone")
        rows = self.rows(ground, material.zoo())
        arrays = wrapped(ground, rows)
        self.check(rows, arrays)
        assert memory.live_bytes() > 0
        while arrays:
            arrays.pop()
        assert left() == 0

    def test_nothing_is_copied(self, ground: Ground) -> None:
        if "mfload" not in self.landings:
            pytest.skip("lands in the framework's memory alone")
        for row in self.rows(ground, material.aligned()):
            (array,) = wrapped(ground, [row])
            if self.look.aliased(row.dtype):
                assert memory.live_bytes() >= len(row.raw)
                assert self.look.address(array) % ALIGNMENT == 0
            else:
                assert left() == 0
            self.check([row], [array])
            del array
            assert left() == 0

    def test_the_last_array_keeps_the_memory(self, ground: Ground) -> None:
        if "mfload" not in self.landings:
            pytest.skip("lands in the framework's memory alone")
        rows = [material.stored(f"w{n}", "F32", (3, 50), n) for n in range(4)]
        arrays = wrapped(ground, rows)
        held = memory.live_bytes()
        while len(arrays) > 1:
            arrays.pop()
            gc.collect()
            assert memory.live_bytes() == held
        part = self.look.part(arrays.pop())
        gc.collect()
        if self.look.parts_alias:
            assert memory.live_bytes() == held
        assert self.look.raw(part) == rows[0].array()[1:].tobytes()
        del part
        assert left() == 0

    # The framework's memory.

    def test_every_dtype_in_memory_of_the_framework(self, ground: Ground) -> None:
        rows = self.rows(ground, material.zoo())
        rows = [row for row in rows if row.dtype in self.lendable(ground)]
        arrays = lent(ground, rows)
        self.check(rows, arrays)
        assert memory.live_bytes() == 0  # Of ours.
        disjoint(
            (self.look.address(array), len(row.raw))
            for row, array in zip(rows, arrays, strict=True)
        )

    def test_all_that_lands_has_a_place(self, ground: Ground) -> None:
        """What can't be lent lands in memory of ours, where that can be."""
        allocator = {row.dtype for row in self.rows(ground, material.aligned())}
        if isinstance(ground.device, FakeDevice) or "mfload" not in self.landings:
            assert allocator <= self.lendable(ground) | self.look.copied.keys()
        assert {"F16", "BF16", "F32"} <= self.lendable(ground)

    def test_lent_bytes_keep_the_array(self, ground: Ground) -> None:
        row = material.stored("w", "F32", (1 << 10, 64))
        (given,) = ground.adapter.lend([request(row)])
        held = given.memory
        assert held.owner is given.array
        del given
        gc.collect()
        churn = ground.adapter.lend([request(row)] * 4)
        write(ground.device, [(held, 0, row.raw)])
        back = np.empty(held.nbytes, np.uint8)
        stream = ground.device.stream()
        stream.copy_out(back, held, 0)
        stream.synchronize()
        stream.close()
        assert back.tobytes() == row.raw
        del churn

    # A whole load.

    @pytest.mark.parametrize("allocator", ["auto", "mfload", "framework"])
    @pytest.mark.parametrize("engine", ["auto", "pread", "direct"])
    def test_loading(
        self,
        ground: Ground,
        zoo: Any,
        monkeypatch: pytest.MonkeyPatch,
        engine: str,
        allocator: str,
    ) -> None:
        monkeypatch.setattr(frameworks, "get", lambda *_: ground.adapter)
        for start in (8, 40):
            path, rows = zoo(start)
            loaded = self.look.load(path, engine=engine, allocator=allocator)
            self.look.assert_loaded(loaded, rows)
            del loaded
            options = as_options({"engine": engine, "allocator": allocator})
            self.look.assert_loaded(dict(mfload.stream(path, "numpy", **options)), rows)
            assert left() == 0

    @pytest.mark.parametrize("allocator", ["auto", "mfload"])
    def test_many_tensors_at_once(
        self, ground: Ground, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, allocator: str
    ) -> None:
        """Planned and wrapped in columns they are what they are one by one."""
        adapter, made = ground.adapter, list[Any]()
        if self.allocator != "mfload":
            pytest.skip("each tensor is an array of the framework")
        monkeypatch.setattr(frameworks, "get", lambda *_: adapter)
        views = session._views
        monkeypatch.setattr(session, "_views", lambda *given: made.append(1) or views(*given))
        some = [row for row in self.rows(ground, material.zoo())
                if adapter.forms[row.dtype].how != "copy"]  # fmt: skip
        rows = [replace(row, name=f"{n}.{row.name}") for n in range(3) for row in some]
        rows += [material.stored(f"w{n}", "BF16", (3, 1 + n % 2), n) for n in range(400)]
        path = material.save(tmp_path / "many.safetensors", rows)
        for few, columns in ((256, 1), (len(rows) + 1, 0)):
            monkeypatch.setattr(planning, "_MANY", few)
            loaded = self.look.load(path, allocator=allocator)
            assert len(made) == columns
            made.clear()
            self.look.assert_loaded(loaded, rows)
            disjoint((self.look.address(loaded[row.name]), len(row.raw)) for row in rows)
            del loaded
            assert left() == 0

    def test_no_two_arrays_share_bytes(
        self, ground: Ground, zoo: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A framework may write to what is given away, also where the memory is ours."""
        monkeypatch.setattr(frameworks, "get", lambda *_: ground.adapter)
        path, rows = zoo(8)
        for allocator in self.landings:
            loaded = self.look.load(path, allocator=allocator)
            again = self.look.load(path, allocator=allocator)
            disjoint(
                (self.look.address(arrays[row.name]), len(row.raw))
                for row in self.rows(ground, rows)
                for arrays in (loaded, again)
            )
            del loaded, again

    # Why nothing lands.

    def test_without_what_lands(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from mfload.frameworks import base

        for error in (
            errors.missing("no CuPy", "cuda13"),
            errors.DeviceError("the driver is too old"),
        ):

            def find(number: int, error: Exception = error) -> Device:
                raise error

            monkeypatch.setattr(discovery, "find", find)
            device, notes = base.find_device(0)
            assert device is None
            assert len(notes) == 1
            assert str(error) in notes[0]
