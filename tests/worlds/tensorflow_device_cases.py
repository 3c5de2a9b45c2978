"""What each client of TensorFlow does in a test of exchanges between devices (see `launching`).

python tensorflow_device_cases.py RANK COUNT PORT DIRECTORY CASE…

Each client has a fake device on which TensorFlow's CPU tensors lie, and its collective for CPUs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from typing import Any
from unittest import mock

import tensorflow_cases
from devices.fake import FakeDevice
from tensorflow_cases import SPECS, World
from world import io_error

import mfload
from mfload.cuda import staging
from mfload.frameworks import tensorflow_adapter
from mfload.mesh import schedule
from mfload.mesh.tensorflow_backend import TensorflowLink


@contextlib.contextmanager
def there(here: World, mode: Any = "lazy", **fails: Any) -> Generator[list[int]]:
    """Loads land on the device, and nothing is left there; the list counts its swaps."""
    land, swaps = FakeDevice(name=f"fake:{here.rank}", mode=mode, **fails), list[int]()
    plain = tensorflow_adapter.make("CPU:0")
    local = plain.place.rpartition("/device")[0]
    adapter = tensorflow_adapter.TensorflowAdapter(plain.place, local, land)
    real = TensorflowLink.swap_there

    def swap(link: Any, room: Any) -> Any:
        swaps.append(room.nbytes)
        link._gpu = link._device
        return real(link, room)

    with (
        mock.patch.object(tensorflow_adapter, "make", return_value=adapter),
        mock.patch.object(TensorflowLink, "moves", return_value=True),
        mock.patch.object(TensorflowLink, "swap_there", swap),
        mock.patch.object(staging, "SLOT", 256 << 10),
        mock.patch.object(schedule, "ALONE", 8 << 10),
    ):
        yield swaps
    land.assert_clean()


def values(here: World, spec: str, mode: str, allocator: str) -> dict[str, Any]:
    """Bit for bit the file; long parts travel between devices."""
    with there(here, mode) as swaps:
        report = mfload.Report()
        given: Any = {"exchange": "once", "engine": "pread", "allocator": allocator}
        arrays = here.load(SPECS[spec], report=report, **given)
        assert any("between devices" in note for note in report.notes), report.notes
        here.check(arrays, SPECS[spec])
        arrays.clear()
    return {"read_bytes": report.read_bytes, "swaps": len(swaps)}


def lent(here: World) -> None:
    """TensorFlow's memory is waited for in a client that has joined others, too."""
    local = tensorflow_adapter.make("CPU:0").place.rpartition("/device")[0]
    place = f"{local}/device:CPU:1"
    adapter = tensorflow_adapter.TensorflowAdapter(place, local, FakeDevice())
    assert adapter.empty([("float32", (3,))])[0][0].backing_device == place


def disk(here: World, after: str) -> None:
    with there(here), here.failing(int(after), io_error):
        here.load(SPECS["columns"], exchange="once", engine="pread")


def device(here: World, verb: str, number: str, when: str) -> None:
    """The device of client 1 fails."""
    with there(here, **({when: {verb: int(number)}} if here.rank == 1 else {})):
        here.load(SPECS["columns"], exchange="once")


if __name__ == "__main__":
    tensorflow_cases.main(globals())
