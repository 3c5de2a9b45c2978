"""What each process of JAX does in a test of exchanges between devices (see `launching`).

    python device_cases.py RANK COUNT PORT DIRECTORY CASE…

Each process has fake devices with JAX's CPU arrays over them, and XLA's collective for CPUs.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import process_cases
from devices.fake import FakeDevice
from process_cases import SPECS
from world import at_swap, io_error, kill

import mfload
from mfload.cuda import staging
from mfload.frameworks import jax_memory
from mfload.mesh import device_link, load, schedule
from mfload.mesh.jax_processes import JaxLink


class World(process_cases.World):
    """A process with fake devices."""

    swaps = nbytes = 0

    @contextlib.contextmanager
    def there(self, mode: Any = "lazy", **fails: Any) -> Generator[dict[int, FakeDevice]]:
        """Loads land on the devices, and nothing is left there."""
        made: dict[int, FakeDevice] = {}

        def land(device: Any) -> tuple[FakeDevice, tuple[str, ...]]:
            number = device.local_hardware_id
            if number not in made:
                name = f"fake:{self.rank}:{number}"
                made[number] = FakeDevice((1, number), name, mode=mode, seed=number, **fails)
            return made[number], ()

        swap = JaxLink.swap_there

        def counted(link: Any, room: Any) -> Any:
            self.swaps += 1
            return swap(link, room)

        with (
            mock.patch.object(jax_memory, "find_device", land),
            mock.patch.object(JaxLink, "moves", lambda _, device: device.place[1] == 0),
            mock.patch.object(JaxLink, "swap_there", counted),
            mock.patch.object(device_link, "_STAGE", 64 << 10),
            mock.patch.object(staging, "SLOT", 256 << 10),
            mock.patch.object(schedule, "ALONE", 8 << 10),
        ):
            self.swaps = 0
            yield made


def values(here: World, spec: str, mode: str, allocator: str) -> dict[str, Any]:
    """Bit for bit the file; each byte is read once, and long parts travel between devices."""
    with here.there(mode) as land:
        report = mfload.Report()
        given: Any = {"exchange": "once", "engine": "pread", "allocator": allocator}
        arrays = here.load(SPECS[spec], report=report, **given)
        here.check(arrays)
        assert any("between devices" in note for note in report.notes), report.notes
        arrays.clear()
        for device in land.values():
            device.assert_clean()
    return {"read_bytes": report.read_bytes, "swaps": here.swaps}


def by_host(here: World, why: str) -> None:
    """One that has no room: none does."""
    options: Any = {"exchange": "once", "timeout": 20}
    with here.there() as land, contextlib.ExitStack() as stack:
        if why == "limit" and here.rank:
            options["max_device_overhead"] = "1KiB"
        elif why == "none" and here.rank:
            stack.enter_context(mock.patch.object(load, "landing", return_value=None))
        arrays = here.load(SPECS["columns"], **options)
        here.check(arrays)
        arrays.clear()
        for device in land.values():
            device.assert_clean()
    assert not here.swaps


def auto(here: World) -> None:
    """Between devices moving pays; where they can't be connected, each reads its own."""
    gpu = mock.patch.object(process_cases.JaxBackend, "platform", return_value="gpu")
    link = mock.patch.object(process_cases.JaxBackend, "link", _cpu_link)
    for connected in (True, False):
        with here.there(), gpu, link, contextlib.ExitStack() as stack:
            if not connected:
                stack.enter_context(mock.patch.object(JaxLink, "moves", return_value=False))
            report = mfload.Report()
            plan = mfload.plan(
                here.model, "jax", mesh=here.mesh, shardings=[("^t", SPECS["columns"])]
            )
            arrays = here.load(SPECS["columns"], engine="pread", report=report)
            here.check(arrays)
            arrays.clear()
        said = "between devices" if connected else "each process reads its own"
        assert any(said in note for note in report.notes), report.notes
        assert (plan.exchanged_bytes > 0) == connected
        assert (here.swaps > 0) == connected


def _cpu_link(_: Any, ranks: Any, width: int, deadline: Any) -> JaxLink:
    return JaxLink(ranks, "cpu", width, deadline)


def disk(here: World, after: str) -> None:
    with here.there(), here.failing(int(after), io_error):
        here.load(SPECS["columns"], exchange="once", engine="pread")


def device(here: World, verb: str, number: str, when: str) -> None:
    """A device of process 1 fails."""
    with here.there(**({when: {verb: int(number)}} if here.rank == 1 else {})):
        here.load(SPECS["columns"], exchange="once", allocator="mfload")


def killed(here: World) -> None:
    with here.there(), at_swap(here, 1, kill):
        here.load(SPECS["columns"], exchange="once")


def main() -> None:
    rank, count, port = map(int, sys.argv[1:4])
    jax.distributed.initialize(f"127.0.0.1:{port}", count, rank)
    here = World(rank, count, Path(sys.argv[4]))

    def run(case: str) -> Any:
        name, *rest = case.split(":")
        return globals()[name](here, *rest) or {}

    if process_cases.world.said(here, sys.argv[5:], run):
        process_cases.world.leave(here)


if __name__ == "__main__":
    main()
