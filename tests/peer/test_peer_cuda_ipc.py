"""The transport "cuda_ipc" over the stub of CuPy: what lies on devices, and what is hostile."""

from __future__ import annotations

import ctypes
import gc
import time
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from devices.cupy_stub import Machine
from devices.queues import MODES

import mfload
from mfload import Options, PeerOptions, Report, dtypes, errors
from mfload.cuda import discovery
from mfload.cuda.cupy_device import CupyDevice
from mfload.cuda.memory import live_bytes
from mfload.dlpack import View, capsule, compact_nbytes
from mfload.peer import cuda_ipc, fragments, nixl, source
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
    while gc.collect() >= 0 and live_bytes() and time.monotonic() < until:
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
    with mfload.publish(_rows(arrays), model="m", transports=("cuda_ipc",)) as seed:
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
    with mfload.publish(_rows(arrays), model="m", transports=("cuda_ipc",)) as seed:
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
    with mfload.publish(_rows(arrays), model="m", transports=names) as seed:
        assert set(seed.manifest.ways) == {"memfd", "http", "cuda_ipc"}
        for name in ("memfd", "http"):
            options = Options(peer=PeerOptions(transports=(name,)))
            _same(mfload.load(seed.url, "numpy", options=options), arrays)


def test_arrays_of_the_host_alone(machine: Machine) -> None:
    """It is not offered."""
    arrays = _arrays()
    with mfload.publish(arrays, model="m", transports=("cuda_ipc", "http")) as seed:
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
        mfload.publish(_rows(_arrays()), model="m", transports=("cuda_ipc",))
    machine.fail.clear()


def test_handles_that_can_t_be_opened(machine: Machine) -> None:
    """Another transport is taken, and the route says why."""
    arrays, report = _arrays(), Report()
    both = Options(peer=PeerOptions(transports=("cuda_ipc", "http")))
    with mfload.publish(_rows(arrays), model="m", transports=("cuda_ipc", "http")) as seed:
        machine.fail["ipcOpenMemHandle"] = 400
        _same(mfload.load(seed.url, "numpy", options=both, report=report), arrays)
        machine.fail.clear()
    assert report.route[0][1] == "peer-http"
    assert "no cuda_ipc: cuda:0 failed in ipcOpenMemHandle" in report.route[0][2]


def test_a_copy_that_fails(machine: Machine) -> None:
    """Is an error of the seed; handles are closed."""
    options = Options(peer=PeerOptions(transports=("cuda_ipc",), checksums=False))
    with mfload.publish(_rows(_arrays()), model="m", transports=("cuda_ipc",)) as seed:
        machine.fail["memcpyAsync"] = 719
        with pytest.raises(errors.ReadError, match="device memory can't be read"):
            mfload.load(seed.url, "numpy", options=options)
        machine.fail.clear()


def test_new_weights(machine: Machine) -> None:
    """Readers of those before are told."""
    before, after = _arrays(), {name: each + 1 for name, each in _arrays().items()}
    with mfload.publish(_rows(before), model="m", transports=("cuda_ipc",)) as seed:
        client, manifest = source.ask(seed.address, PeerOptions())
        opened = source.connect(client, manifest, PeerOptions(transports=("cuda_ipc",)))
        seed.update(_rows(after))
        with pytest.raises(errors.SourceChangedError):
            opened.check()
        _same(mfload.load(seed.url, "numpy", options=IPC), after)
        del opened


def _connect(given: Any, size: int = 10) -> Any:
    about = {"size": size, "incarnation": "0" * 32, "generation": 0}
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
        [{"nbytes": 10}],
        7,
    ],
)
def test_hostile_offers(rows: Any) -> None:
    """Rows of bytes, and a device, a handle and an offset or none of them."""
    with pytest.raises(errors.HeaderError, match="what it says of its devices"):
        _connect({"host": HERE, "arrays": rows})
    with pytest.raises(errors.HeaderError, match="what it says of its devices"):
        _connect(rows)


def test_an_array_beyond_its_memory(machine: Machine) -> None:
    """What was opened is closed."""
    given = OnDevice(np.zeros(100, np.uint8))
    handle = given.address.to_bytes(64, "little").hex()
    pci = given.device.pci
    with pytest.raises(errors.HeaderError, match=r"beyond its memory.*bytes 1995 to 2005"):
        _connect({"host": HERE, "arrays": [[10, pci, handle, 1995]]})
    assert not machine.opened.total()


def test_seeds_elsewhere(machine: Machine) -> None:
    """On another machine, or on a device that this process does not see."""
    row = [10, "0000:99:00.0", HANDLE, 0]
    assert _connect({"host": "other", "arrays": [row]}) == "the seed runs on another machine"
    assert "no such CUDA device here" in _connect({"host": HERE, "arrays": [row]})


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
