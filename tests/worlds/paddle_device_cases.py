"""What each process of Paddle does in a test of exchanges between devices (see `launching`).

python paddle_device_cases.py RANK COUNT PORT DIRECTORY CASE…

Each process has a fake device on which Paddle's CPU tensors lie; its all-to-all are scatters of
gloo's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from typing import Any
from unittest import mock

import paddle
import paddle.distributed as dist
import paddle_cases
from devices.fake import FakeDevice
from paddle_cases import SPECS, Shard, World
from world import at_swap, io_error, kill

import mfload
from mfload.cuda import staging
from mfload.frameworks import paddle_adapter
from mfload.mesh import schedule
from mfload.mesh.paddle_backend import PaddleLink


@contextlib.contextmanager
def there(here: World, mode: Any = "lazy", **fails: Any) -> Generator[list[int]]:
    """Loads land on the device, and nothing is left there; the list counts its swaps."""
    land, swaps = FakeDevice(name=f"fake:{here.rank}", mode=mode, **fails), list[int]()

    def swap(came: Any, sent: Any) -> None:
        swaps.append(sent.size)
        count, width = here.count, sent.size // here.count
        for root in range(count):
            row = paddle.empty([width], "uint8")
            parts = [sent[n * width : (n + 1) * width].clone() for n in range(count)]
            dist.scatter(row, parts if root == here.rank else None, src=root)
            came[root * width : (root + 1) * width] = row

    allocate = PaddleLink.room

    def room(link: PaddleLink, rows: Any) -> Any:
        before = waits.call_count
        made = allocate(link, rows)
        assert link.device is None or waits.call_count > before, "kernels may still use the memory"
        return made

    adapter = paddle_adapter.PaddleAdapter(paddle.CPUPlace(), land)
    with (
        mock.patch.object(paddle_adapter, "make", return_value=adapter),
        mock.patch.object(PaddleLink, "moves", return_value=True),
        mock.patch.object(dist, "alltoall_single", swap),
        mock.patch.object(PaddleLink, "room", room),
        mock.patch.object(paddle.device, "synchronize") as waits,
        mock.patch.object(staging, "SLOT", 256 << 10),
        mock.patch.object(schedule, "ALONE", 8 << 10),
    ):
        yield swaps
    land.assert_clean()


def values(here: World, spec: str, mode: str) -> dict[str, Any]:
    """Bit for bit what Paddle makes of the file; long parts travel between devices."""
    with there(here, mode) as swaps:
        report = mfload.Report()
        given: Any = {"exchange": "once", "engine": "pread"}
        arrays = here.load(SPECS[spec], report=report, **given)
        assert any("between devices" in note for note in report.notes), report.notes
    here.check(arrays, SPECS[spec])
    return {"read_bytes": report.read_bytes, "swaps": len(swaps)}


def disk(here: World, after: str) -> None:
    with there(here), here.failing(int(after), io_error):
        here.load([Shard(1)], exchange="once", engine="pread")


def device(here: World, verb: str, number: str, when: str) -> None:
    """The device of process 1 fails."""
    with there(here, **({when: {verb: int(number)}} if here.rank == 1 else {})):
        here.load([Shard(1)], exchange="once")


def killed(here: World) -> None:
    with there(here), at_swap(here, 1, kill):
        here.load([Shard(1)], exchange="once")


if __name__ == "__main__":
    paddle_cases.main(globals())
