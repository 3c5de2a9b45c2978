"""From arrays on devices of a seed to devices of a reader, on simulated devices."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from agents import Agent, agents as agents
from devices import arrays
from devices.fake import FakeDevice
from nccl import Nccl, ranks as ranks

import mfload
from mfload import Options, PeerOptions, Report, dtypes, errors
from mfload.cuda import staging
from mfload.cuda.device import CUDA
from mfload.cuda.memory import live_bytes
from mfload.peer import collective, cuda_ipc, nixl
from mfload.peer.fragments import Held

ROWS = {row.numpy: row for row in dtypes.TABLE.values() if row.numpy is not None}
MODEL: dict[str, Any] = {f"t{n}": np.arange(n * 999, dtype=np.int32) for n in range(1, 30)}
MODEL["long"] = np.arange(2_500_001, dtype=np.float32)
MODEL["wide"] = np.arange(600_000, dtype=np.float32).reshape(600, 1000)
TOTAL = sum(array.nbytes for array in MODEL.values())


def fakes(count: int, **how: Any) -> list[FakeDevice]:
    return [FakeDevice((CUDA, n), f"cuda:{n}", seed=n, **how) for n in range(count)]


def lying(name: str, array: Any, device: FakeDevice | None) -> Held:
    """A row of a seed, on a device or on the host."""
    flat = array.reshape(-1).view(np.uint8)
    memory: Any = flat
    if device is not None:
        made = device.allocate(flat.nbytes)
        made.owner.bytes[: flat.nbytes] = flat
        memory = cuda_ipc.DeviceMemory(device, made.address, flat.nbytes, made)
    box = tuple((0, length) for length in array.shape)
    return Held(name, ROWS[array.dtype], array.shape, box, memory)


def rows(there: Callable[[int], FakeDevice | None], model: Mapping[str, Any] = MODEL) -> list[Held]:
    return [lying(name, array, there(n)) for n, (name, array) in enumerate(model.items())]


def options(*transports: str, **how: Any) -> Options:
    peer = PeerOptions(transports=transports, checksums=how.pop("checksums", False))
    return Options(peer=peer, **how)


def same(found: Any, model: Mapping[str, Any] = MODEL) -> None:
    assert found.keys() == model.keys()
    for name, array in model.items():
        np.testing.assert_array_equal(found[name], array, strict=True)


def settled(*devices: FakeDevice) -> None:
    """Nothing is left, once the threads of a seed's connections are gone."""
    until = time.monotonic() + 5
    while gc.collect() >= 0 and any(each.memory for each in devices) and time.monotonic() < until:
        time.sleep(0.01)
    for device in devices:
        device.assert_clean()
    assert live_bytes() == 0


@pytest.fixture
def land(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    """The reader's device."""
    monkeypatch.setattr(staging, "SLOT", 256 << 10)
    made = FakeDevice((CUDA, 3), "cuda:3", mode="mixed")
    arrays.take(monkeypatch, arrays.Arrays(made))
    return made


@pytest.mark.usefixtures("agents")
def test_nixl_moves_between_devices(land: FakeDevice) -> None:
    """What lies on two devices does so; what lies on the host goes by it."""
    there, report = fakes(2), Report()
    given = rows(lambda n: None if n % 7 == 3 else there[n % 2])
    with mfload.publish(
        given, model="m", peer=mfload.PeerOptions(transports=("nixl",), checksums=False)
    ) as seed:
        assert seed.copied_bytes == 0
        found = mfload.load(seed.url, "numpy", options=options("nixl"), report=report)
        same(found)
        assert Agent.moved["VRAM", "VRAM"] > TOTAL // 2
        assert Agent.moved["VRAM", "DRAM"] == 0
        assert land.nbytes["copy_in"] < TOTAL // 10
        (_, engine, why), *_ = report.route
        assert engine == "peer-nixl"
        assert why.endswith("from device to device")
        before = Agent.moved["VRAM", "VRAM"]
        with mfload.open(seed.url, "numpy", options=options("nixl")) as checkpoint:
            part = checkpoint.get_slice("long")[1_000_000:1_500_000]
            np.testing.assert_array_equal(part, MODEL["long"][1_000_000:1_500_000])
            columns = checkpoint.get_slice("wide")[:, 10:40]
            np.testing.assert_array_equal(columns, MODEL["wide"][:, 10:40])
        assert Agent.moved["VRAM", "VRAM"] > before + 500_000
    assert not any(agent.spans for agent in Agent.known.values() if agent.pumped)
    del found, part, columns, given
    settled(*there, land)


@pytest.mark.usefixtures("agents")
@pytest.mark.parametrize("how", ["checksums", "no room", "dtype", "host"])
def test_what_needs_the_host_goes_by_it(land: FakeDevice, how: str) -> None:
    """And the route says why."""
    (there,), report = fakes(1), Report()
    given: Any = {"checksums": how == "checksums"}
    if how == "no room":
        given["max_device_overhead"] = "64KiB"
    on_host = rows(lambda _: None if how == "host" else there)
    with mfload.publish(on_host, model="m", peer=mfload.PeerOptions(transports=("nixl",))) as seed:
        asked: Any = {"dtype": "float64"} if how == "dtype" else {}
        found = mfload.load(
            seed.url, "numpy", options=options("nixl", **given), report=report, **asked
        )
    converted = {n: a.astype(np.float64) if a.dtype == np.float32 else a for n, a in MODEL.items()}
    same(found, converted if how == "dtype" else MODEL)
    if how == "dtype":  # The host converts; integers still go directly.
        assert Agent.moved["DRAM", "VRAM"]
        return
    assert Agent.moved["VRAM", "VRAM"] == 0
    said = {"checksums": "checksums=False", "no room": "no room", "host": "holds its arrays there"}
    reason = report.route[0][2].partition("; through the host: ")[2]
    assert said[how] in reason, report.route


@pytest.mark.usefixtures("agents")
@pytest.mark.parametrize("state", ["PROC", "ERR", "raise"])
def test_nixl_keeps_device_memory_that_it_may_still_write_to(
    land: FakeDevice, state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (there,) = fakes(1)
    given = rows(lambda _: there)
    with mfload.publish(
        given, model="m", peer=mfload.PeerOptions(transports=("nixl",), checksums=False)
    ) as seed:
        monkeypatch.setattr(Agent, "state", state)
        peer = PeerOptions(transports=("nixl",), checksums=False, stalled=0.3)
        with pytest.raises(errors.ReadError, match=r"stalls|broke off|has ended"):
            mfload.load(seed.url, "numpy", options=Options(peer=peer))
    kept: list[Any] = nixl._kept  # pyright: ignore[reportPrivateUsage]
    held = [each[0] for each in kept if isinstance(each, tuple)]
    assert held
    assert all(each.device is land for each in held)
    assert all(land.memory[each.address] >= each.nbytes for each in held)


@pytest.mark.usefixtures("agents")
def test_new_weights_are_told(land: FakeDevice) -> None:
    (there,) = fakes(1)
    given = rows(lambda _: there)
    with (
        mfload.publish(
            given, model="m", peer=mfload.PeerOptions(transports=("nixl",), checksums=False)
        ) as seed,
        mfload.open(seed.url, "numpy", options=options("nixl")) as checkpoint,
    ):
        np.testing.assert_array_equal(checkpoint.get_tensor("long"), MODEL["long"])
        seed.update(rows(lambda _: there, {n: a + 1 for n, a in MODEL.items()}))
        with pytest.raises(errors.SourceChangedError):
            checkpoint.get_tensor("wide")


@pytest.mark.parametrize("how", ["device", "elsewhere", "checksums"])
def test_nccl_moves_between_devices(land: FakeDevice, ranks: list[int], how: str) -> None:
    """Into slots of the reader's device if it is the group's, else by the host."""
    there, report = FakeDevice((CUDA, 3), "cuda:3"), Report()
    given = rows(lambda n: None if n % 7 == 3 else there)
    if how == "elsewhere":
        land.place = CUDA, 2
    with mfload.publish(
        given, model="m", peer=mfload.PeerOptions(transports=("collective",))
    ) as seed:
        assert seed.copied_bytes == 0
        ranks[0], out = 1, there.nbytes["copy_out"]  # Checksums were made of what came out.
        asked = options("collective", checksums=how == "checksums")
        found = mfload.load(seed.url, "numpy", options=asked, report=report)
        same(found)
        assert there.nbytes["copy_out"] == out
        assert (land.nbytes["copy_in"] == 0) == (how == "device")
        why = report.route[0][2]
        said = {"elsewhere": "the group is of", "checksums": "checksums=False", "device": ""}
        assert said[how] in why
        assert why.endswith("from device to device") == (how == "device")
    ranks[0] = 0
    del found, given
    settled(there, land)


def test_nccl_keeps_device_memory_that_it_may_still_write_to(
    land: FakeDevice, ranks: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A message that does not come: the group ends, and what it would land in is kept."""
    there = FakeDevice((CUDA, 3), "cuda:3")
    monkeypatch.setattr(Nccl, "send", lambda *_: SimpleNamespace(wait=lambda _: None))
    given = rows(lambda _: there)
    with mfload.publish(
        given, model="m", peer=mfload.PeerOptions(transports=("collective",), checksums=False)
    ) as seed:
        ranks[0] = 1
        peer = PeerOptions(transports=("collective",), checksums=False, stalled=0.3)
        with pytest.raises(errors.ReadError, match=r"stalls|has ended"):
            mfload.load(seed.url, "numpy", options=Options(peer=peer))
        ranks[0] = 0
    ((tensor, *_),) = collective._kept  # pyright: ignore[reportPrivateUsage]
    address = tensor.array.ctypes.data
    assert any(at <= address < at + held for at, held in land.memory.items())
    assert Nccl.aborted


def test_a_seed_without_memory_for_a_message(
    land: FakeDevice, ranks: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lets go of the reader, which is told after `stalled` seconds."""
    there = FakeDevice((CUDA, 3), "cuda:3")
    served: list[Any] = []

    def refused(self: Any, *_: int) -> None:
        served.append(self)
        raise errors.MemoryLimitError("refused")

    served_by: Any = vars(collective)["_Served"]
    monkeypatch.setattr(served_by, "_tensor", refused)
    given = rows(lambda _: there)
    with mfload.publish(
        given, model="m", peer=mfload.PeerOptions(transports=("collective",), checksums=False)
    ) as seed:
        ranks[0] = 1
        peer = PeerOptions(transports=("collective",), checksums=False, stalled=0.3)
        with pytest.raises(errors.ReadError, match=r"stalls|has ended"):
            mfload.load(seed.url, "numpy", options=Options(peer=peer))
        ranks[0] = 0
        assert not served[0]._joined
