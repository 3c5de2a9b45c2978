"""What a seed and a reader of device memory wait for, over the stub of CuPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from devices.contract import pinned
from devices.cupy_stub import Machine
from test_peer_cuda_ipc import OnDevice, machine

import mfload
from mfload import PeerOptions, errors
from mfload.cuda.memory import DeviceBuffer
from mfload.peer import cuda_ipc, source
from mfload.peer.fragments import Held

__all__ = ["machine"]


class Producing(OnDevice):
    """An array that a kernel of another stream still writes to."""

    def __init__(self, array: Any, device: int) -> None:
        super().__init__(np.zeros_like(array), device)
        self.stream = self.device.stream()
        given = OnDevice(array, device)
        ends = DeviceBuffer(self.device, self.address, array.nbytes, self._buffer, own=False)
        self.stream.copy_within(
            ends, 0, given._buffer, 0, mfload.cuda.device.DeviceRows.one(array.nbytes)
        )
        self.given, self.event = given, self.stream.record()

    def __dlpack__(self, stream: Any = None) -> Any:
        self.device.ask("streamWaitEvent", stream, self.event.handle)
        return super().__dlpack__(stream)


def test_a_seed_waits_for_what_its_arrays_wait_for(machine: Machine) -> None:
    """Readers know nothing of its streams."""
    array = np.arange(1000, dtype=np.int32)
    given = Producing(array, 1)
    memory = cuda_ipc.find(given, array.nbytes)
    assert memory is not None
    assert not machine.queues.busy()
    assert bytes(memory[0 : array.nbytes]) == array.tobytes()
    given.stream.close()


def test_arrays_that_fail_later_are_not_offered(machine: Machine) -> None:
    if machine.queues.mode != "lazy":
        pytest.skip("it may have failed before")
    machine.late["memcpyAsync"] = 1
    given = Producing(np.arange(1000, dtype=np.int32), 1)
    assert cuda_ipc.find(given, given.array.nbytes) is None
    assert machine.lost
    _forget(machine)


def test_a_copy_that_fails_later(machine: Machine) -> None:
    """Into memory that is page-locked: others are copied before the call returns."""
    array = np.arange(300_000, dtype=np.int32)
    seed = mfload.publish(
        [_held("x", array)], model="m", peer=mfload.PeerOptions(transports=("cuda_ipc",))
    )
    with seed:
        options = PeerOptions(transports=("cuda_ipc",))
        opened = source.connect(*source.ask(seed.address, options), options)
        device = cuda_ipc.discovery.find(0)
        with pinned(device, array.nbytes) as stage:
            opened.way.read([memoryview(stage)], 0)
            assert stage.tobytes() == array.tobytes()
            machine.late["memcpyAsync"] = 1
            machine.ran.clear()
            with pytest.raises(errors.ReadError, match="device memory can't be read"):
                opened.way.read([memoryview(stage)], 0)
            _forget(machine)
        opened.way.close()
        del opened


def _held(name: str, array: Any) -> Held:
    return OnDevice(array).row(name)


def _forget(machine: Machine) -> None:
    """What CUDA lost with the context, the test is not about."""
    machine.lost = 0
    machine.late.clear()
    machine.streams.clear()
    machine.events.clear()
