"""What each process does in a test of exchanges between devices (see `launching`).

python torch_device_cases.py RANK COUNT PORT DIRECTORY CASE…

Each process has a fake device on which PyTorch's CPU tensors lie. NCCL is a group of gloo's that
begins what it is given when a batch ends, and takes only tensors on the device.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import sys
import threading
from collections import Counter
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch_cases
import world
from calls import as_options
from devices.fake import FakeDevice
from samples import save_raw
from torch.distributed.device_mesh import init_device_mesh
from torch_cases import SPECS, World, on_mesh, same
from world import at_swap, io_error, kill

import mfload
from mfload.cuda import staging
from mfload.frameworks import private_api, torch_adapter
from mfload.mesh import load, schedule, torch_backend


class Batches:
    """A group that sends and receives in batches, as NCCL's.

    Args:
        ranks: Of the group.
        device: What all tensors must lie on.
    """

    made = 0
    moved = 0
    lent = False  # Whether tensors lie in PyTorch's own memory.

    def __init__(self, ranks: Sequence[int], device: FakeDevice) -> None:
        store = dist.PrefixStore(f"batches/{Batches.made}", private_api._torch_group_store())
        timeout = datetime.timedelta(seconds=60)
        own = ranks.index(dist.get_rank())
        self._group = dist.ProcessGroupGloo(store, own, len(ranks), timeout)
        self._device = device
        self._given: list[tuple[Any, Any, int]] | None = None
        Batches.made += 1

    def _start_coalescing(self) -> None:
        self._given = []

    def send(self, tensors: list[Any], number: int, tag: int) -> None:
        self._add(self._group.send, tensors, number)
        Batches.moved += tensors[0].numel()

    def recv(self, tensors: list[Any], number: int, tag: int) -> None:
        self._add(self._group.recv, tensors, number)

    def _add(self, begin: Any, tensors: list[Any], number: int) -> None:
        (tensor,) = tensors
        start, end = tensor.data_ptr(), tensor.data_ptr() + tensor.numel()
        if not Batches.lent:
            held = self._device.memory.items()
            assert any(at <= start and end <= at + nbytes for at, nbytes in held)
        assert self._given is not None
        self._given.append((begin, tensor, number))

    def _end_coalescing(self) -> Batches:
        given, self._given = self._given, None
        assert given, "NCCL refuses an empty batch"
        tags: Counter[Any] = Counter()
        self._works: list[Any] = []
        for begin, tensor, number in given:
            key = begin.__name__, number
            passed = tensor.cpu()  # The tensor itself if it lies in host memory.
            self._works.append((begin([passed], number, tags[key]), tensor, passed))
            tags[key] += 1
        return self

    def wait(self) -> None:
        while self._works:
            work, tensor, passed = self._works.pop()
            work.wait()
            tensor.copy_(passed)

    def abort(self) -> None:
        pass


class Rank(World):
    """A process with a fake device."""

    land: FakeDevice

    @contextlib.contextmanager
    def there(self, mode: Any = "lazy", **fails: Any) -> Generator[FakeDevice]:
        """Loads land on the device, and nothing is left there."""
        self.land = land = FakeDevice(name=f"fake:{self.rank}", mode=mode, **fails)

        def make(device: object) -> Any:
            return torch_adapter.TorchAdapter(torch.device("cpu"), land)

        def group(place: Any, ranks: Sequence[int], name: str, timeout: Any) -> Batches:
            return Batches(ranks, land)

        with (
            mock.patch.object(torch_adapter, "make", make),
            mock.patch.object(private_api, "torch_device_group", group),
            mock.patch.object(torch_backend.TorchLink, "moves", return_value=True),
            mock.patch.object(staging, "SLOT", 256 << 10),
            mock.patch.object(schedule, "ALONE", 8 << 10),
        ):
            yield land
        groups = torch_backend._world().groups
        for ranks, place in [key for key in groups if key[1] is not None]:
            del groups[ranks, place]


def values(here: Rank, spec: str, mode: str, allocator: str) -> dict[str, Any]:
    """Bit for bit what PyTorch makes of the file; what travels alone does so between devices."""
    with here.there(mode) as land:
        report, before = mfload.Report(), Batches.moved
        given = {"exchange": "once", "engine": "pread", "allocator": allocator}
        Batches.lent = allocator != "mfload"
        arrays = here.load(SPECS[spec], report=report, **given)
        here.check(arrays, SPECS[spec])
        assert any("between devices" in note for note in report.notes), report.notes
        del arrays
        land.assert_clean()
        return {"read_bytes": report.read_bytes, "moved": Batches.moved - before}


def grid(here: Rank) -> None:
    """F6 does not land on a device, and so nothing does."""
    with here.there("thread"):
        on_mesh(here, here.mesh, [torch_cases.Shard(0)], "once")


def dtypes(here: Rank) -> None:
    """Each dtype that lands, in parts that travel alone and in parts that share a row."""
    path = here.directory / f"own.{here.rank}" / "dtypes.safetensors"
    path.parent.mkdir(exist_ok=True)
    every = {name: each for name, each in world.every_dtype().items() if "F6" not in name}
    save_raw(path, [(name, *each[:2], each[2].tobytes()) for name, each in every.items()])
    rows, columns = ("^t.F4", SPECS["rows"]), ("^t", SPECS["columns"])
    given: Any = {"mesh": here.mesh, "shardings": [rows, columns]}
    plain = mfload.load(path, "torch", **given, **as_options({"exchange": "never"}))
    before, report = Batches.moved, mfload.Report()
    with here.there("mixed"):
        limits = as_options({"exchange": "once", "timeout": 20})
        made = mfload.load(path, "torch", report=report, **given, **limits)
    assert here.count > 2 or Batches.moved > before
    assert any("between devices" in note for note in report.notes), report.notes
    for name, array in made.items():
        assert same(array.to_local(), plain[name].to_local()), name


def converted(here: Rank) -> None:
    """Others read what this process has converted."""
    given: Any = {"mesh": here.mesh, "shardings": [("^t", SPECS["columns"])], "dtype": "float64"}
    given |= {"names": ["t.a", "t.b", "t.d", "norm"]}
    plain = mfload.load(here.model, "torch", **given, **as_options({"exchange": "never"}))
    before, report = Batches.moved, mfload.Report()
    with here.there("mixed"):
        limits = {"exchange": "once", "max_host_overhead": "8MiB", "timeout": 20}
        planned = mfload.plan(here.model, "torch", **given, **as_options(limits))
        assert planned.device_overhead_bytes
        made = mfload.load(here.model, "torch", report=report, **given, **as_options(limits))
    assert Batches.moved > before
    assert report.peak_bytes <= 8 << 20, report.peak_bytes
    for name, array in made.items():
        assert same(array.to_local(), plain[name].to_local()), name


def shards(here: Rank) -> None:
    """Plain shards travel between devices as well."""
    given: Any = {"shardings": [("^t", 1)], "shard": (here.rank, here.count)}
    plain = mfload.load(here.model, "torch", **given)
    before = Batches.moved
    with here.there():
        made = mfload.load(
            here.model, "torch", **given, **as_options({"exchange": "once", "timeout": 20})
        )
    assert Batches.moved > before
    for name, array in made.items():
        assert same(array, plain[name]), name


def by_host(here: Rank, why: str) -> None:
    """One that can't, or two on one device: none does."""
    before, options = Batches.moved, {"exchange": "once", "timeout": 20}
    with here.there() as land, contextlib.ExitStack() as stack:
        if why == "one":
            land.name = "the same"
        elif why in ("limit", "nothing") and here.rank:
            options["max_device_overhead"] = "1KiB" if why == "limit" else 0
        elif why == "none" and here.rank:
            stack.enter_context(mock.patch.object(load, "landing", return_value=None))
        arrays = here.load(SPECS["columns"], **options)
        here.check(arrays, SPECS["columns"])
    assert Batches.moved == before


def unconnected(here: Rank, why: str) -> None:
    """NCCL can't be set up in process 1: bytes travel by the host, also the next time."""

    def refuse(*_: Any) -> object:
        if here.rank == 1:
            raise RuntimeError("no NCCL\nhere")
        if why == "late":
            threading.Event().wait()
        return mock.Mock()

    before = Batches.moved
    with (
        here.there() as land,
        mock.patch.object(private_api, "torch_device_group", refuse),
        mock.patch.object(torch_backend, "_CONNECTED", 0.5),
    ):
        for words in ("no NCCL" if why == "alone" else "in time", "before"):
            report = mfload.Report()
            arrays = here.load(SPECS["columns"], exchange="once", timeout=20, report=report)
            here.check(arrays, SPECS["columns"])
            assert any(words in note for note in report.notes), report.notes
            del arrays
        land.assert_clean()
    assert Batches.moved == before


def moved(here: Rank) -> None:
    """Where one process has another device, all connect anew."""
    with here.there() as land:
        for number, name in enumerate(("one", "one", "two")):
            land.name = f"{name}:{here.rank}" if here.rank else "same"
            made = Batches.made
            here.check(here.load(SPECS["columns"], exchange="once"), SPECS["columns"])
            assert Batches.made == made + (number != 1)


def disk(here: Rank, after: str) -> None:
    with here.there(), here.failing(int(after), io_error):
        here.load(SPECS["columns"], exchange="once", engine="pread")


def device(here: Rank, verb: str, number: str, when: str) -> None:
    """The device of process 1 fails."""
    with here.there(**({when: {verb: int(number)}} if here.rank == 1 else {})):
        here.load(SPECS["columns"], exchange="once")


def killed(here: Rank) -> None:
    with here.there(), at_swap(here, 1, kill):
        here.load(SPECS["columns"], exchange="once")


def gpu(here: Rank, spec: str) -> None:
    """On one GPU that the processes share; NCCL takes one a process, so gloo moves copies."""
    from mfload.cuda import discovery

    mesh = init_device_mesh("cuda", (here.count,))
    land: Any = discovery.find(torch.cuda.current_device())
    Batches.lent = True
    given: Any = {"mesh": mesh, "shardings": [("^t", SPECS[spec])]}
    plain = mfload.load(here.model, "torch", **given, **as_options({"exchange": "never"}))
    before = Batches.moved
    with (
        mock.patch.object(land, "pci", f"shared:{here.rank}"),
        mock.patch.object(
            private_api, "torch_device_group", lambda _, ranks, *__: Batches(ranks, land)
        ),
        mock.patch.object(torch_backend.TorchLink, "moves", return_value=True),
    ):
        made = mfload.load(
            here.model, "torch", **given, **as_options({"exchange": "once", "timeout": 60})
        )
    assert Batches.moved > before
    for name, array in made.items():
        assert same(array.to_local().cpu(), plain[name].to_local().cpu()), name


def main() -> None:
    rank, count, port = map(int, sys.argv[1:4])
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=count)
    here = Rank(rank, count, Path(sys.argv[4]))
    world.play(here, globals())


if __name__ == "__main__":
    main()
