"""The transport "cuda_ipc" over the stub of CuPy: what lies on devices, and what is hostile."""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from devices import arrays as on_devices
from devices.cupy_stub import Machine
from devices.queues import MODES

import mfload
from mfload import Options, PeerOptions, Report, dtypes, errors
from mfload.cli import commands
from mfload.cuda import discovery
from mfload.cuda.cupy_device import CupyDevice
from mfload.cuda.memory import live_bytes
from mfload.dlpack import View, capsule, compact_nbytes
from mfload.frameworks.base import Lent
from mfload.peer import cuda_ipc, fragments, memfd, nixl, serve, source
from mfload.peer.data import Data
from mfload.peer.fragments import Held
from mfload.saving.export import TensorToSave

_NAMES = {row.numpy: row for row in dtypes.TABLE.values() if row.numpy is not None}
IPC = Options(peer=PeerOptions(transports=("cuda_ipc",)))


@pytest.fixture(params=MODES)
def machine(request: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    """Two devices, that are seen under their PCI addresses."""
    made = Machine(mode=request.param)
    devices = [CupyDevice(n, made.cupy(), made.driver()) for n in range(2)]
    monkeypatch.setattr(discovery, "find", devices.__getitem__)
    known = {each.pci: n for n, each in enumerate(devices)}

    def numbered(pci: str) -> int:
        if pci not in known:
            raise errors.DeviceError("no such CUDA device here", found=pci)
        return known[pci]

    monkeypatch.setattr(discovery, "numbered", numbered)
    yield made
    until = time.monotonic() + 5  # Threads of a seed's connections may still be on their way out.
    while gc.collect() >= 0 and (live_bytes() or any(made._left().values())):
        if time.monotonic() > until:
            break
        time.sleep(0.01)
    made.assert_clean()


class OnDevice:
    """An array on a device, with as much as DLPack asks of it."""

    def __init__(self, array: Any, device: int = 0, at: int = 0) -> None:
        self.device: Any = discovery.find(device)
        self.array, self._dtype = array, _NAMES[array.dtype]
        self._buffer = self.device.allocate(at + array.nbytes + 100)
        self._at = at
        self.synchronized = 0
        ctypes.memmove(self.address, array.ctypes.data, array.nbytes)

    @property
    def address(self) -> int:
        return self._buffer.address + self._at

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device.place

    def __dlpack__(self, stream: Any = None) -> Any:
        assert stream in self.device.runtime._machine.streams
        self.synchronized += 1
        return capsule(View("x", self._dtype, self.array.shape, self._buffer, self._at))

    def row(self, name: str) -> Held:
        """As a seed holds it."""
        memory = cuda_ipc.find(self, self.array.nbytes)
        assert memory is not None
        return _row(name, self.array, memory)


def _row(name: str, array: Any, memory: Any) -> Held:
    box = tuple((0, length) for length in array.shape)
    return Held(name, _NAMES[array.dtype], array.shape, box, memory)


def _arrays() -> dict[str, Any]:
    """One is longer than what is copied at once."""
    found: dict[str, Any] = {f"t{n}": np.arange(n * 1000, dtype=np.int32) for n in range(1, 20)}
    found["long"] = np.arange(1_300_001, dtype=np.float32).reshape(1, -1)
    return found


def _rows(arrays: Mapping[str, Any]) -> list[Held]:
    """On both devices and, each third, on the host."""
    return [
        _row(name, array, array.reshape(-1).view(np.uint8))
        if n % 3 == 2
        else OnDevice(array, n % 3, at=n * 4).row(name)
        for n, (name, array) in enumerate(arrays.items())
    ]


def _same(found: Any, arrays: Mapping[str, Any]) -> None:
    assert found.keys() == arrays.keys()
    for name, array in arrays.items():
        np.testing.assert_array_equal(found[name], array, strict=True)


@pytest.mark.parametrize("checksums", [True, False])
def test_bit_for_bit(machine: Machine, checksums: bool) -> None:
    """From devices and the host; nothing of it is left in the end."""
    arrays, report = _arrays(), Report()
    options = Options(peer=PeerOptions(transports=("cuda_ipc",), checksums=checksums))
    with mfload.publish(
        _rows(arrays), model="m", peer=mfload.PeerOptions(transports=("cuda_ipc",))
    ) as seed:
        _same(mfload.load(seed.url, "numpy", options=options, report=report), arrays)
        assert seed.copied_bytes == 0
    assert report.route[0][1] == "peer-cuda_ipc"
    assert "device memory" in report.route[0][2]
    assert machine.calls["ipcOpenMemHandle"]


def test_any_range_into_any_buffers(machine: Machine) -> None:
    """Of arrays on two devices and the host."""
    arrays, options = _arrays(), PeerOptions(transports=("cuda_ipc",))
    random = np.random.default_rng(7)
    whole = np.concatenate([each.reshape(-1).view(np.uint8) for each in arrays.values()])
    with mfload.publish(
        _rows(arrays), model="m", peer=mfload.PeerOptions(transports=("cuda_ipc",))
    ) as seed:
        opened = source.connect(*source.ask(seed.address, options), options)
        for most in [3000] * 10 + [whole.size] * 10:
            nbytes = int(random.integers(0, most))
            offset = int(random.integers(0, whole.size - nbytes))
            ends = sorted(random.integers(0, nbytes + 1, 3).tolist())
            sizes = np.diff([0, *ends, nbytes]).tolist()
            vector = [memoryview(bytearray(size)) for size in sizes]
            opened.way.read(vector, offset)
            assert b"".join(vector) == whole[offset : offset + nbytes].tobytes()
        del opened


def test_other_transports_copy_to_the_host(machine: Machine) -> None:
    """Range by range; what reads addresses of the host is not offered."""
    arrays = _arrays()
    names = ("memory", "memfd", "http", "cuda_ipc")
    with mfload.publish(
        _rows(arrays), model="m", peer=mfload.PeerOptions(transports=names)
    ) as seed:
        assert set(seed.manifest.ways) == {"memfd", "http", "cuda_ipc"}
        for name in ("memfd", "http"):
            options = Options(peer=PeerOptions(transports=(name,)))
            _same(mfload.load(seed.url, "numpy", options=options), arrays)


def test_arrays_of_the_host_alone(machine: Machine) -> None:
    """It is not offered."""
    arrays = _arrays()
    with mfload.publish(
        arrays, model="m", peer=mfload.PeerOptions(transports=("cuda_ipc", "http"))
    ) as seed:
        assert set(seed.manifest.ways) == {"http"}


def test_which_arrays_stay_on_their_device(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those in C order, if the seed is to offer it; they are waited for."""
    array = np.arange(12, dtype=np.float32).reshape(3, 4)
    given = OnDevice(array, 1, at=8)

    def export(arrays: Any) -> list[TensorToSave]:
        lookup, flat = _NAMES[array.dtype], array.reshape(-1).view(np.uint8)
        return [TensorToSave(n, lookup, array.shape, 48, None, lambda: flat) for n in arrays]

    monkeypatch.setattr(fragments, "export", export)
    (held,) = fragments.held({"x": given}, devices=True)
    assert (held.memory.address, held.memory.number) == (given.address, 1)
    assert given.synchronized == 1
    assert not held.copied
    np.testing.assert_array_equal(held.memory[4:12], array.reshape(-1).view(np.uint8)[4:12])
    (held,) = fragments.held({"x": given})
    assert isinstance(held.memory, np.ndarray)
    assert held.copied


@pytest.mark.parametrize("dtype", ["F32", "BF16", "F8_E4M3", "BOOL", "I64"])
def test_bytes_of_a_capsule(dtype: str) -> None:
    """As many as the tensor has, for each width."""
    row = dtypes.TABLE[dtype]
    memory = np.zeros(6 * row.nbytes, np.uint8)
    assert compact_nbytes(capsule(View("x", row, (2, 1, 3), memory, 0))) == memory.size


def test_what_lies_with_gaps() -> None:
    """Has no such bytes; dims of one element don't count."""
    whole = np.zeros((4, 6), np.int16)
    for array in (whole[:, :5], whole.T, whole[::-1], whole[:, ::2]):
        assert compact_nbytes(array.__dlpack__()) is None
    assert compact_nbytes(whole[1:3].__dlpack__()) == 24
    assert compact_nbytes(whole[:, None].__dlpack__()) == 48
    assert compact_nbytes(whole[:1, 2:4].__dlpack__()) == 4
    assert compact_nbytes(np.zeros((0, 3)).__dlpack__()) == 0
    assert compact_nbytes(np.array(7.0).__dlpack__()) == 8


@pytest.mark.parametrize("call", ["ipcGetMemHandle", "cuMemGetAddressRange_v2"])
def test_memory_that_cuda_can_t_share(machine: Machine, call: str) -> None:
    """The seed does not start."""
    machine.fail[call] = 1
    with pytest.raises(errors.UsageError, match="CUDA can't share the memory"):
        mfload.publish(
            _rows(_arrays()), model="m", peer=mfload.PeerOptions(transports=("cuda_ipc",))
        )
    machine.fail.clear()


def test_handles_that_can_t_be_opened(machine: Machine) -> None:
    """Another transport is taken, and the route says why."""
    arrays, report = _arrays(), Report()
    both = Options(peer=PeerOptions(transports=("cuda_ipc", "http")))
    with mfload.publish(
        _rows(arrays), model="m", peer=mfload.PeerOptions(transports=("cuda_ipc", "http"))
    ) as seed:
        machine.fail["ipcOpenMemHandle"] = 400
        _same(mfload.load(seed.url, "numpy", options=both, report=report), arrays)
        machine.fail.clear()
    assert report.route[0][1] == "peer-http"
    assert "no cuda_ipc: cuda:0 failed in ipcOpenMemHandle" in report.route[0][2]


def test_a_copy_that_fails(machine: Machine) -> None:
    """Is an error of the seed; handles are closed."""
    options = Options(peer=PeerOptions(transports=("cuda_ipc",), checksums=False))
    with mfload.publish(
        _rows(_arrays()), model="m", peer=mfload.PeerOptions(transports=("cuda_ipc",))
    ) as seed:
        machine.fail["memcpyAsync"] = 719
        with pytest.raises(errors.ReadError, match="device memory can't be read"):
            mfload.load(seed.url, "numpy", options=options)
        machine.fail.clear()


def test_new_weights(machine: Machine) -> None:
    """Readers of those before are told."""
    before, after = _arrays(), {name: each + 1 for name, each in _arrays().items()}
    with mfload.publish(
        _rows(before), model="m", peer=mfload.PeerOptions(transports=("cuda_ipc",))
    ) as seed:
        client, manifest = source.ask(seed.address, PeerOptions())
        opened = source.connect(client, manifest, PeerOptions(transports=("cuda_ipc",)))
        seed.update(_rows(after))
        with pytest.raises(errors.SourceChangedError):
            opened.check()
        _same(mfload.load(seed.url, "numpy", options=IPC), after)
        del opened


def _offered(rows: Any, size: int = 10) -> Any:
    """What a reader makes of rows that a lender hands out."""
    lender = cuda_ipc._Lender(Data(), json.dumps(rows).encode())
    try:
        return _connect({"host": HERE, "socket": lender.name}, size)
    finally:
        lender.close()


def _connect(given: Any, size: int = 10) -> Any:
    entries = [SimpleNamespace(fragments=[None] * 2)]
    about = {"size": size, "incarnation": "0" * 32, "generation": 0, "entries": entries}
    client = SimpleNamespace(close=lambda: None)
    remote: Any = SimpleNamespace(
        name="peer://x",
        manifest=SimpleNamespace(**about),
        stalled=1.0,
        client=client,
        check=lambda: True,
    )
    return cuda_ipc.connect(given, remote)


HERE, PCI, HANDLE = cuda_ipc.here(), "0000:3b:00.0", "00" * 64


@pytest.mark.parametrize(
    "rows",
    [
        None,
        [[]],
        [[11]],
        [[-1], [11]],
        [["10"]],
        [[10.0]],
        [[True], [9]],
        [[10, PCI]],
        [[10, PCI, HANDLE, -1]],
        [[10, PCI, HANDLE, "0"]],
        [[10, PCI, HANDLE[2:], 0]],
        [[10, PCI, "zz" * 64, 0]],
        [[10, 7, HANDLE, 0]],
        [[10, "\u00fc", HANDLE, 0]],
        [[10, PCI, HANDLE, 0, 0]],
        [[4], [3], [3]],
        [{"nbytes": 10}],
        7,
    ],
)
def test_hostile_offers(rows: Any) -> None:
    """Rows of bytes, and a device, a handle and an offset or none of them."""
    with pytest.raises(errors.HeaderError, match="what it says of its devices"):
        _offered(rows)
    with pytest.raises(errors.HeaderError, match="what it says of its devices"):
        _connect(rows)
    with pytest.raises(errors.HeaderError, match="what it says of its devices"):
        _connect({"host": HERE, "socket": rows})


def test_an_array_beyond_its_memory(machine: Machine) -> None:
    """What was opened is closed."""
    given = OnDevice(np.zeros(100, np.uint8))
    handle = given.address.to_bytes(64, "little").hex()
    pci = given.device.pci
    with pytest.raises(errors.HeaderError, match=r"beyond its memory.*bytes 1995 to 2005"):
        _offered([[10, pci, handle, 1995]])
    assert not machine.opened.total()


def test_seeds_elsewhere(machine: Machine) -> None:
    """On another machine, or on a device that this process does not see."""
    row = [10, "0000:99:00.0", HANDLE, 0]
    other = {"host": "other", "socket": "mfload-x"}
    assert _connect(other) == "the seed runs on another machine"
    assert "no such CUDA device here" in _offered([row])
    assert "the seed's socket can't be reached" in _connect({"host": HERE, "socket": "mfload-x"})


def _land(monkeypatch: pytest.MonkeyPatch, *numbers: int, **more: Any) -> None:
    made = on_devices.Arrays(*map(discovery.find, numbers or (0,)), **more)
    on_devices.take(monkeypatch, made)


def _devices(arrays: Mapping[str, Any], device: int = 0) -> list[Held]:
    return [OnDevice(array, device).row(name) for name, array in arrays.items()]


def _addresses(rows: list[Held]) -> dict[str, int]:
    return {row.name: row.memory.address for row in rows}


def _until(done: Any, collect: Any = gc.collect) -> None:
    until = time.monotonic() + 5
    while not done():
        assert time.monotonic() < until
        collect()
        time.sleep(0.005)


def _host_calls(machine: Machine) -> int:
    """Page-locks and slots are of loads that pass through the host."""
    return machine.calls["hostRegister"]


def test_arrays_over_the_memory_of_a_seed(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is copied or allocated; the memory stays open as long as an array lives."""
    arrays, report = _arrays(), Report()
    rows = _devices(arrays)
    there = _addresses(rows)
    _land(monkeypatch)
    with mfload.publish(rows, model="m", peer=mfload.PeerOptions(transports=("cuda_ipc",))) as seed:
        copies = machine.calls["memcpyAsync"]
        found = mfload.load(seed.url, "numpy", options=IPC, report=report)
        assert machine.calls["memcpyAsync"] == copies
        assert not _host_calls(machine)
        assert {name: each.ctypes.data for name, each in found.items()} == there
        _same(found, arrays)
        assert report.route[0][1] == "peer-cuda_ipc"
        assert "arrays lie in its memory" in report.route[0][2]
        assert report.mapped_bytes == report.result_bytes
        assert report.read_bytes == 0
        gc.collect()
        assert cuda_ipc.leases() == 1
        last = found.pop("long")
        found.clear()
        gc.collect()
        assert machine.opened.total() == cuda_ipc.leases() == 1
        del last
        _until(lambda: not machine.opened.total() and not cuda_ipc.leases())


def test_a_lease_ends_with_what_needs_it(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """At once: a process that does nothing more would keep the seed from its end."""
    _land(monkeypatch)
    copied = Options(peer=PeerOptions(transports=("cuda_ipc",), copy=True))

    def gone() -> None:
        _until(lambda: not cuda_ipc.leases(), collect=bool)

    rows = _devices({"x": np.arange(600, dtype=np.float32), "y": np.ones(9)})
    with mfload.publish(rows, model="m", peer=mfload.PeerOptions(transports=("cuda_ipc",))) as seed:
        gc.collect()
        gc.disable()
        try:
            for how in (IPC, copied):
                found = mfload.load(seed.url, "numpy", options=how, report=Report())
                found = found if how is copied else None
                gone()
            opened = mfload.open(seed.url, "numpy", options=IPC)
            part = opened.get_slice("x")
            array = opened.get_tensor("y")
            opened.close()
            time.sleep(0.05)
            assert cuda_ipc.leases() == 1
            np.testing.assert_array_equal(array, np.ones(9))
            array = None
            gone()
            with pytest.raises(errors.UsageError, match="was closed"):
                part[:5]
            found = next(iter(mfload.stream(seed.url, "numpy", options=IPC)))
            found = None
            gone()
        finally:
            gc.enable()
    assert not caplog.records
    del found, part, opened


def test_work_on_memory_that_is_closed(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is over before the handle is closed: the seed may use the memory again at once."""
    _land(monkeypatch)
    order: list[str] = []
    real = machine.status

    def status(call: str) -> int:
        order.append(call)
        return real(call)

    with mfload.publish(
        _devices({"x": np.ones(9)}), model="m", peer=mfload.PeerOptions(transports=("cuda_ipc",))
    ) as seed:
        found = mfload.load(seed.url, "numpy", options=IPC)
        gc.collect()
        monkeypatch.setattr(machine, "status", status)
        del found
        _until(lambda: "ipcCloseMemHandle" in order)
        assert order.index("free") < order.index("ipcCloseMemHandle")


@pytest.mark.parametrize(
    ("numbers", "options", "copies"),
    [
        ((0,), {"copy": True}, ()),
        ((1,), {}, ()),
        ((0,), {"allocator": "framework"}, ()),
        ((0,), {}, ("F32", "I32")),
    ],
    ids=["copy=True", "another device", "allocator", "the framework copies"],
)
def test_copies_from_device_to_device(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, numbers: Any, options: Any, copies: Any
) -> None:
    """Each array at once, without the host; they outlive the seed."""
    arrays, report, allocator = _arrays(), Report(), options.get("allocator", "auto")
    _land(monkeypatch, *numbers, copies=copies)
    peer = PeerOptions(transports=("cuda_ipc",), copy="copy" in options)
    rows = _devices(arrays)
    with mfload.publish(rows, model="m", peer=mfload.PeerOptions(transports=("cuda_ipc",))) as seed:
        before = machine.calls["memcpyAsync"]
        how = Options(peer=peer, allocator=allocator)
        found = mfload.load(seed.url, "numpy", options=how, report=report)
        assert 0 < machine.calls["memcpyAsync"] - before <= len(arrays)
        assert not _host_calls(machine)
        there = {row.memory.address for row in rows}
        assert not there & {each.ctypes.data for each in found.values()}
        _until(lambda: not cuda_ipc.leases())
    assert "copied from device to device" in report.route[0][2]
    del rows, seed
    gc.collect()
    _same(found, arrays)


@pytest.mark.parametrize("gap", [0, 256, 4096])
def test_neighbours_are_copied_at_once(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, gap: int
) -> None:
    """A copy for tensors that lie alike on both sides, and what lies between is no tensor's."""
    arrays = {f"t{n:02}": np.arange(100 + 7 * n, dtype=np.int16) + n for n in range(20)}
    row = OnDevice(np.full(100_000, 0xA5, np.uint8))
    rows, at = list[Held](), 0
    for name, array in arrays.items():
        ctypes.memmove(row.address + at, array.ctypes.data, array.nbytes)
        memory = cuda_ipc.DeviceMemory(row.device, row.address + at, array.nbytes, row)
        rows.append(_row(name, array, memory))
        at += -(-array.nbytes // 256) * 256 + gap
    _land(monkeypatch)
    with mfload.publish(rows, model="m", peer=mfload.PeerOptions(transports=("cuda_ipc",))) as seed:
        before = machine.calls["memcpyAsync"]
        peer = PeerOptions(transports=("cuda_ipc",), copy=True)
        for names, copies in ((None, 1), (["t03", "t04", "t07"], 2), ([*arrays][::2], 10)):
            found = mfload.load(seed.url, "numpy", names=names, options=Options(peer=peer))
            _same(found, arrays if names is None else {n: arrays[n] for n in names})
            made, before = machine.calls["memcpyAsync"] - before, machine.calls["memcpyAsync"]
            assert made == (copies if not gap else len(found))


def test_what_lies_between_neighbours_is_not_copied(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of three that lie alike on both sides, the one between is converted on the host."""
    arrays = {name: np.arange(256, dtype=np.float16) + n for n, name in enumerate("abc")}
    row, rows = OnDevice(np.concatenate([*arrays.values()])), list[Held]()
    for n, (name, array) in enumerate(arrays.items()):
        memory = cuda_ipc.DeviceMemory(row.device, row.address + 512 * n, 512, row)
        rows.append(_row(name, array, memory))
    _land(monkeypatch)
    peer = PeerOptions(transports=("cuda_ipc",), copy=True)
    with mfload.publish(rows, model="m", peer=mfload.PeerOptions(transports=("cuda_ipc",))) as seed:
        given: Any = {"dtype": {"b": "int16"}, "options": Options(peer=peer)}
        found = mfload.load(seed.url, "numpy", **given)
    _same(found, {**arrays, "b": arrays["b"].astype(np.int16)})


@pytest.mark.parametrize("call", ["memcpyAsync", "streamSynchronize"])
def test_a_copy_on_the_device_that_fails(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """At once or late, it is an error of the seed, for which there may be a fall-back."""
    _land(monkeypatch)
    peer = PeerOptions(transports=("cuda_ipc",), copy=True)
    with mfload.publish(
        _devices(_arrays()), model="m", peer=mfload.PeerOptions(transports=("cuda_ipc",))
    ) as seed:
        machine.fail[call] = 719
        with pytest.raises(errors.ReadError, match="device memory can't be read"):
            mfload.load(seed.url, "numpy", options=Options(peer=peer))
        machine.fail.clear()


def test_parts_of_what_a_seed_holds(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows and columns are copied by devices; steps and other dtypes pass through the host."""
    arrays = {"x": np.arange(6000, dtype=np.float32).reshape(60, 10, 10)}
    _land(monkeypatch)
    with mfload.publish(
        _devices(arrays), model="m", peer=mfload.PeerOptions(transports=("cuda_ipc",))
    ) as seed:
        with mfload.open(seed.url, "numpy", options=IPC) as opened:
            part = opened.get_slice("x")
            for index in (np.s_[5], np.s_[3:50], np.s_[:, 2:4], np.s_[7:9, 3:5], np.s_[4, 2:4]):
                np.testing.assert_array_equal(part[index], arrays["x"][index], strict=True)
            assert not _host_calls(machine)
            for index in (np.s_[::2], np.s_[:, :, 3:5], [4, 1]):
                np.testing.assert_array_equal(part[index], arrays["x"][index], strict=True)
            del opened, part
        found = mfload.load(seed.url, "numpy", dtype="float16", options=IPC)
        np.testing.assert_array_equal(found["x"], arrays["x"].astype(np.float16), strict=True)
        assert _host_calls(machine)


def test_rows_on_no_boundary_are_copied(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels load several items at once: arrays begin on multiples of 256 bytes."""
    arrays = {"x": np.arange(600, dtype=np.float32).reshape(6, 100)}
    rows = _devices(arrays)
    _land(monkeypatch)
    with mfload.publish(rows, model="m", peer=mfload.PeerOptions(transports=("cuda_ipc",))) as seed:
        given: Any = {"framework": "numpy", "shardings": 0, "options": IPC}
        for rank in range(6):
            found = mfload.load(seed.url, shard=(rank, 6), **given)["x"]
            np.testing.assert_array_equal(found, arrays["x"][rank : rank + 1], strict=True)
            inside = found.ctypes.data - rows[0].memory.address
            assert (0 <= inside < 2400) == (rank * 400 % 256 == 0)
        assert not _host_calls(machine)


def test_shards_of_a_seed(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each lies on its device; readers of one have arrays over it, others copy of both."""
    arrays = {"x": np.arange(60_000, dtype=np.int16).reshape(6, 10_000)}
    boxes = [((0, 4), (0, 10_000)), ((4, 6), (0, 10_000))]
    rows = [
        OnDevice(arrays["x"][low:high], n).row("x")._replace(shape=(6, 10_000), box=boxes[n])
        for n, ((low, high), _) in enumerate(boxes)
    ]
    with mfload.publish(rows, model="m", peer=mfload.PeerOptions(transports=("cuda_ipc",))) as seed:
        for n, ((low, high), _) in enumerate(boxes):
            _land(monkeypatch, n)
            with mfload.open(seed.url, "numpy", options=IPC) as opened:
                found = opened.get_slice("x")[low:high]
            np.testing.assert_array_equal(found, arrays["x"][low:high], strict=True)
            assert found.ctypes.data == rows[n].memory.address
            del found, opened
        assert not _host_calls(machine)
        _same(mfload.load(seed.url, "numpy", options=IPC), arrays)


def test_what_loaders_copy_into_their_own_arrays(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the parameters of a serving system: a lazy tensor is copied on the device."""
    array = np.arange(6000, dtype=np.float32).reshape(60, 100)
    _land(monkeypatch)
    device: Any = discovery.find(0)
    with mfload.publish(
        _devices({"x": array}), model="m", peer=mfload.PeerOptions(transports=("cuda_ipc",))
    ) as seed:
        ((_, lazy),) = mfload.stream(seed.url, "numpy", lazy=True, options=IPC)
        for index in (np.s_[:], np.s_[20:40], np.s_[:, 30:60]):
            part = np.ascontiguousarray(array[index])
            memory = device.allocate(part.nbytes)
            lazy[index].read(Lent(None, memory))
            held = ctypes.string_at(memory.address, part.nbytes)
            assert held == part.tobytes()
        assert not _host_calls(machine)
        del lazy


def test_bytes_that_are_compared(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    """`verify=` sees them on the host."""
    arrays = _arrays()
    mfload.save(arrays, tmp_path / "x.safetensors", checksums=True)
    _land(monkeypatch)
    with mfload.publish(
        _devices(arrays), model="m", peer=mfload.PeerOptions(transports=("cuda_ipc",))
    ) as seed:
        manifest = tmp_path / "x.safetensors.checksums.json"
        found = mfload.load(seed.url, "numpy", options=IPC, verify=manifest)
        _same(found, arrays)
        assert _host_calls(machine)
        assert not cuda_ipc.leases() or gc.collect() >= 0


def test_weights_that_are_replaced_stay_for_their_readers(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until these let go of them; then the seed does."""
    before, after = _arrays(), {name: each + 1 for name, each in _arrays().items()}
    rows = _devices(before)
    there = [row.memory.address for row in rows]
    _land(monkeypatch)
    seed = mfload.publish(rows, model="m", peer=mfload.PeerOptions(transports=("cuda_ipc",)))
    del rows
    with seed:
        old = mfload.load(seed.url, "numpy", options=IPC)
        seed.update(_devices(after))
        new = mfload.load(seed.url, "numpy", options=IPC)
        gc.collect()
        _same(old, before)
        _same(new, after)
        assert cuda_ipc.leases() == 2
        del old
        _until(lambda: cuda_ipc.leases() == 1)
        _until(lambda: not any(machine.find(each, 1) is not None for each in there))
    gc.collect()
    _same(new, after)  # Also of a seed that is closed, in a process that goes on.
    assert cuda_ipc.leases() == 1
    del new
    _until(lambda: not cuda_ipc.leases())


def test_a_reader_that_is_killed(machine: Machine) -> None:
    """The seed no longer keeps memory for it."""
    with mfload.publish(
        _devices(_arrays()), model="m", peer=mfload.PeerOptions(transports=("cuda_ipc",))
    ) as seed:
        name = seed.manifest.ways["cuda_ipc"]["socket"]
        code = "import socket, sys, time; s = socket.socket(socket.AF_UNIX); s.connect('\\0' +"
        code += " sys.argv[1]); s.recv(9); print(flush=True); time.sleep(60)"
        command = [sys.executable, "-c", code, name]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            process.stdout.readline()
            _until(lambda: cuda_ipc.leases() == 1)
            process.kill()
        _until(lambda: not cuda_ipc.leases())


@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="needs forks, and /proc")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_forks_keep_no_lease(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither of the reader nor of the seed, where it would outlive a process that is killed."""
    _land(monkeypatch)
    with mfload.publish(
        _devices(_arrays()), model="m", peer=mfload.PeerOptions(transports=("cuda_ipc",))
    ) as seed:
        found = mfload.load(seed.url, "numpy", options=IPC)
        held = [each for each in gc.get_objects() if type(each) is cuda_ipc._Lease]
        numbers = [each.connection.fileno() for each in held]
        for each in list(cuda_ipc._lenders):
            numbers += [key.fd for key in list(each._selector.get_map().values())]
        assert len(numbers) >= 3
        child = os.fork()
        if not child:
            os._exit(sum(os.path.exists(f"/proc/self/fd/{number}") for number in numbers))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert cuda_ipc.leases() == 1
        _same(found, _arrays())
        del found, held
        _until(lambda: not cuda_ipc.leases())


def test_a_seed_that_ends(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Who has arrays in its memory is told."""
    _land(monkeypatch)
    with mfload.publish(
        _devices(_arrays()), model="m", peer=mfload.PeerOptions(transports=("cuda_ipc",))
    ) as seed:
        (lender,) = [each for each in cuda_ipc._lenders if each.name in str(seed.manifest.ways)]
        found = mfload.load(seed.url, "numpy", options=IPC)
        with caplog.at_level(logging.WARNING, "mfload.peer"):
            for key in list(lender._selector.get_map().values()):
                reader: Any = key.fileobj
                if reader is not lender._listener:
                    reader.shutdown(2)  # As the kernel does for a process that ends.
            _until(lambda: "is gone" in caplog.text)
        assert seed.address in caplog.text
        del found


@pytest.mark.parametrize("sent", ["", "all but a byte", "slowly"])
def test_a_lender_that_stalls(sent: str) -> None:
    """It is given up, also if a byte comes now and then."""
    name, listener = memfd.listening()

    def lend() -> None:
        connection, _ = listener.accept()
        with connection, contextlib.suppress(OSError):
            rows = json.dumps([[10]]).encode()
            told = cuda_ipc._LENGTH.pack(len(rows)) + rows
            if sent == "slowly":
                for n in range(len(told)):
                    connection.sendall(told[n : n + 1])
                    time.sleep(0.5)
            elif sent:
                connection.sendall(told[:-1])
            connection.recv(1)

    thread = threading.Thread(target=lend)
    thread.start()
    start = time.monotonic()
    assert "hands nothing out" in _connect({"host": HERE, "socket": name})
    assert time.monotonic() - start < 3
    thread.join()
    listener.close()


def _small(count: int) -> tuple[list[Held], dict[str, Any]]:
    """So many arrays that what is said of them fills the buffer of a socket."""
    arrays = {f"t{n}": np.full(3, n, np.int32) for n in range(count)}
    row, rows = OnDevice(np.zeros(512 * count, np.uint8)), list[Held]()
    for n, (name, array) in enumerate(arrays.items()):
        memory = cuda_ipc.DeviceMemory(row.device, row.address + 512 * n, 12, row)
        ctypes.memmove(memory.address, array.ctypes.data, 12)
        rows.append(_row(name, array, memory))
    return rows, arrays


@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="needs forks, and /proc")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_reader_that_does_not_read(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """It holds up no other, counts as one that has the memory open, and no fork keeps it."""
    rows, arrays = _small(3000)
    _land(monkeypatch)
    with mfload.publish(rows, model="m", peer=mfload.PeerOptions(transports=("cuda_ipc",))) as seed:
        (lender,) = [each for each in cuda_ipc._lenders if each.name in str(seed.manifest.ways)]
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stuck:
            stuck.connect(f"\0{lender.name}")
            _until(lambda: cuda_ipc.leases() == 1)
            (number,) = [key.fd for key in lender._selector.get_map().values() if key.data]
            child = os.fork()
            if not child:
                os._exit(os.path.exists(f"/proc/self/fd/{number}"))
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
            _same(mfload.load(seed.url, "numpy", options=IPC), arrays)
        _until(lambda: not cuda_ipc.leases())


def test_devices_that_are_not_seen(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """What lies on them comes over HTTP; the rest is not copied."""
    arrays, report, numbered = _arrays(), Report(), discovery.numbered
    rows = _rows(arrays)
    there = {row.name: row.memory.address for n, row in enumerate(rows) if not n % 3}
    _land(monkeypatch)

    def seen(pci: str) -> int:
        if numbered(pci):
            raise errors.DeviceError("no such CUDA device here", found=pci)
        return 0

    monkeypatch.setattr(discovery, "numbered", seen)
    with mfload.publish(rows, model="m", peer=mfload.PeerOptions(transports=("cuda_ipc",))) as seed:
        found = mfload.load(seed.url, "numpy", options=IPC, report=report)
        _same(found, arrays)
    assert report.route[0][1] == "peer-cuda_ipc"
    assert "read through the host" in report.route[0][2]
    aligned = {name: at for name, at in there.items() if not at % 256}
    assert aligned
    assert aligned.items() <= {name: each.ctypes.data for name, each in found.items()}.items()
    del found


def test_the_route_of_arrays_without_bytes(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are read in no way."""
    empty, report = np.zeros((0, 3), np.float32), Report()
    rows = [*_devices({"x": np.ones(9)}), _row("e", empty, empty.reshape(-1).view(np.uint8))]
    _land(monkeypatch)
    with mfload.publish(rows, model="m", peer=mfload.PeerOptions(transports=("cuda_ipc",))) as seed:
        found = mfload.load(seed.url, "numpy", options=IPC, report=report)
        _same(found, {"x": np.ones(9), "e": empty})
    assert "arrays lie in its memory" in report.route[0][2]
    assert "host" not in report.route[0][2]
    del found


def test_other_users(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are handed nothing, and trust no other user's process."""
    with mfload.publish(
        _devices(_arrays()), model="m", peer=mfload.PeerOptions(transports=("cuda_ipc",))
    ) as seed:
        monkeypatch.setattr(memfd, "trusted", lambda _: False)
        with pytest.raises(errors.SourceError, match="another user's"):
            mfload.load(seed.url, "numpy", options=IPC)
        mine = threading.main_thread()
        monkeypatch.setattr(memfd, "trusted", lambda _: threading.current_thread() is mine)
        with pytest.raises(errors.SourceError, match="hands nothing out"):
            mfload.load(seed.url, "numpy", options=IPC)
        assert not cuda_ipc.leases()


def test_nixl_registers_device_memory_as_such(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each kind under its own name, and with its device."""
    registered: list[Any] = []

    class Agent:
        def register_memory(self, rows: Any, kind: str) -> Any:
            registered.append((kind, [(nbytes, device) for _, nbytes, device, _ in rows]))
            return rows

        def deregister_memory(self, rows: Any) -> None:
            registered.pop()

        def get_agent_metadata(self) -> bytes:
            return b"A"

    monkeypatch.setattr(nixl, "_agent", Agent)
    data = Data()
    for each in (OnDevice(np.zeros(8, np.uint8), 1).row("a").memory, np.zeros(5, np.uint8)):
        data.add(each)
    offered = nixl.offer(data, 0)
    assert registered == [("VRAM", [(8, 1)]), ("DRAM", [(5, 0)])]
    assert offered.given["devices"] == [1, -1]
    offered.close()
    assert registered == []


@pytest.mark.parametrize("devices", [["cuda:0"], ["cuda:0", "cuda:1"]])
def test_a_checkpoint_that_is_served_from_devices(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Any, devices: list[str]
) -> None:
    """Whole on one, or a chunk of each first dim on several; readers have arrays over both."""
    arrays = {**_arrays(), "alone": np.array(7.0), "none": np.zeros((0, 3), np.int8)}
    mfload.save(arrays, tmp_path / "x.safetensors", metadata={"a": "b"})
    held, metadata = serve.stored(tmp_path / "x.safetensors", devices=devices)
    assert metadata == {"a": "b"}
    assert {each.memory.number for each in held} == set(range(len(devices)))
    locked = machine.calls["hostRegister"]
    with mfload.publish(
        held, model="m", peer=mfload.PeerOptions(transports=("cuda_ipc", "http"))
    ) as seed:
        assert seed.copied_bytes == 0
        _same(mfload.load(seed.url, "numpy"), arrays)  # Over HTTP.
        _land(monkeypatch, 0)
        found = mfload.load(seed.url, "numpy", names=["t19"], options=IPC)["t19"]
        np.testing.assert_array_equal(found, arrays["t19"])
        if len(devices) == 1:
            assert machine.calls["hostRegister"] == locked
        count = len(devices)
        given: Any = {"framework": "numpy", "shardings": 0, "options": IPC, "names": ["t19", "t8"]}
        for rank in range(count):
            _land(monkeypatch, rank)
            report = Report()
            shards = mfload.load(seed.url, shard=(rank, count), report=report, **given)
            for name in ("t19", "t8"):
                size = -(-arrays[name].size // count)
                expected = arrays[name][rank * size : (rank + 1) * size]
                np.testing.assert_array_equal(shards[name], expected, strict=True)
            assert report.mapped_bytes == report.result_bytes
            del shards
        del found


def test_what_no_gpu_serves() -> None:
    """The host is asked for by no device."""
    with pytest.raises(errors.DeviceError, match="weights are served from a GPU"):
        serve.stored("x.safetensors", devices=["cpu"])


def test_a_server_waits_for_those_that_have_its_memory(machine: Machine) -> None:
    """It no longer listens, and ends when they let go."""
    said: list[str] = []
    left = iter([2, 2, 1, 0])
    seed = mfload.publish({"x": np.ones(3)}, model="m")
    with serve.told(seed, said.append, lambda: next(left)):
        pass
    assert not seed.open
    assert said[-1].startswith("waits for 2 readers, whose arrays lie here")
    assert not [*left]


@pytest.mark.parametrize("transports", [None, "http", "cuda_ipc"])
def test_the_command(
    machine: Machine,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Any,
    capsys: pytest.CaptureFixture[str],
    transports: str | None,
) -> None:
    """`mfload serve --device` offers it, unless others are named."""
    arrays, path = _arrays(), str(tmp_path / "x.safetensors")
    mfload.save(arrays, path)
    _land(monkeypatch)
    reports = [Report(), Report()]

    def run(server: Any, started: Any) -> None:
        with server:
            started()
            url = capsys.readouterr().out.strip()
            for names, report in zip(("cuda_ipc", "http"), reports, strict=True):
                peer = PeerOptions(transports=(names,))
                with contextlib.suppress(errors.SourceError):
                    found = mfload.load(url, "numpy", options=Options(peer=peer), report=report)
                    _same(found, arrays)
                    del found

    monkeypatch.setattr(serve, "run", run)
    given = {"device": "cuda:0", "transports": transports}
    commands.serve(path=path, model="m", **given)
    routes = [report.route[0][1] if report.route else None for report in reports]
    offered = ("cuda_ipc", "http") if transports is None else (transports,)
    engines = {"cuda_ipc": "peer-cuda_ipc", "http": "pinned"}
    assert routes == [engines[n] if n in offered else None for n in ("cuda_ipc", "http")]


@pytest.mark.parametrize("copy", [False, True])
def test_within_a_time_and_with_progress(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, copy: bool
) -> None:
    """Both are of all bytes, whether or not they are copied."""
    arrays, told = _arrays(), list[int]()
    _land(monkeypatch)
    peer = PeerOptions(transports=("cuda_ipc",), copy=copy)
    options = Options(peer=peer, timeout=60)
    with mfload.publish(
        _devices(arrays), model="m", peer=mfload.PeerOptions(transports=("cuda_ipc",))
    ) as seed:
        given: Any = {"progress": lambda done, _: told.append(done), "options": options}
        _same(mfload.load(seed.url, "numpy", **given), arrays)
    size = sum(each.nbytes for each in arrays.values())
    assert told[-1] == size


def test_plans_and_streams(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan says that nothing is read or held; a stream has arrays in the seed's memory, too."""
    arrays = _arrays()
    rows = _devices(arrays)
    there = _addresses(rows)
    _land(monkeypatch)
    with mfload.publish(rows, model="m", peer=mfload.PeerOptions(transports=("cuda_ipc",))) as seed:
        plan = mfload.plan(seed.url, "numpy", options=IPC)
        assert plan.read_bytes == plan.copied_bytes == plan.device_overhead_bytes == 0
        assert plan.plan.mapped_bytes == sum(each.nbytes for each in arrays.values())
        assert "arrays lie in its memory" in plan.route[0].why
        del plan
        found = dict(mfload.stream(seed.url, "numpy", options=IPC))
        assert {name: each.ctypes.data for name, each in found.items()} == there
        _same(found, arrays)
        assert not _host_calls(machine)
        del found


def test_weights_that_change_while_they_are_taken(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All or nothing, as of every seed."""
    arrays = _arrays()
    _land(monkeypatch)
    for copy in (False, True):
        with mfload.publish(
            _devices(arrays), model="m", peer=mfload.PeerOptions(transports=("cuda_ipc",))
        ) as seed:
            real = cuda_ipc.CudaIpcWay.open

            def opened(way: Any, lease: Any, seed: Any = seed, real: Any = real) -> None:
                real(way, lease)
                seed.update(_devices(arrays))

            monkeypatch.setattr(cuda_ipc.CudaIpcWay, "open", opened)
            options = Options(peer=PeerOptions(transports=("cuda_ipc",), copy=copy))
            with pytest.raises(errors.SourceChangedError):
                mfload.load(seed.url, "numpy", options=options)
            monkeypatch.setattr(cuda_ipc.CudaIpcWay, "open", real)
