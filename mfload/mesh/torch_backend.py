"""PyTorch's device meshes: the shard of each rank, and DTensors of those of this process."""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import itertools
import time
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement as _Placement
from torch.utils import dlpack

from mfload import errors
from mfload.cuda.device import CUDA, Device
from mfload.dlpack import View, capsule
from mfload.dtypes import TABLE
from mfload.frameworks import base as adapters, private_api, torch_adapter
from mfload.frameworks.several import MeshAdapter
from mfload.index import Box
from mfload.io import buffers
from mfload.mesh import specs
from mfload.mesh.base import (
    Backend,
    DeviceShare,
    MeshArguments,
    MeshBackend,
    ProcessTransport,
    ReachedStore,
    Whole,
)
from mfload.mesh.link import Link, Pieces
from mfload.mesh.specs import Placed
from mfload.planning.request import Request
from mfload.runtime import Deadline, start

Shape = tuple[int, ...]
Placement: Any = _Placement
_MESH = "torch.distributed.device_mesh.DeviceMesh"
_PLACEMENTS = specs.Placements("PyTorch", _MESH, DeviceMesh, Placement)
_FORMS = torch_adapter.TorchAdapter.forms
# The process waits at its exit for gloo's threads, which give up a collective that hangs.
_GIVEN_UP = datetime.timedelta(minutes=5)
# Seconds for NCCL to connect devices, and between two looks at the other processes meanwhile.
_CONNECTED, _TICK = 60.0, 0.1


class TorchBackend(Backend):
    """PyTorch's meshes, for one load (see `MeshBackend`). A process has one device."""

    # 2.3 to 2.6 measured, in both directions at once.
    # Pieces are sent from where they lie: of the rows, gloo holds no copies.
    transport = ProcessTransport(2.5, 16 << 20, by_devices=dist.is_nccl_available(), held=4)
    _mesh: DeviceMesh | None = None

    @staticmethod
    def group() -> tuple[int, int]:
        """The rank of this process, and how many there are."""
        if dist.is_available() and dist.is_initialized():
            return dist.get_rank(), dist.get_world_size()
        return 0, 1

    def processes(self, asked: MeshArguments) -> tuple[int, ...]:
        """The ranks in the mesh; all of them if it is none."""
        if isinstance(asked.mesh, DeviceMesh):
            return tuple(sorted(set(asked.mesh.mesh.flatten().tolist())))
        return tuple(range(self.group()[1]))

    def resolve(self, requests: Sequence[Request], asked: MeshArguments) -> list[Placed]:
        """A sharding for each whole tensor."""
        made = _PLACEMENTS.resolve(requests, asked, _sharding)
        self._mesh = asked.mesh
        return made

    def divided(self, sharding: Placed, shape: Shape) -> Iterator[DeviceShare]:
        """The part of a tensor that each rank of the mesh holds."""
        ranks = sharding.mesh.mesh.numpy()
        for at in np.ndindex(*ranks.shape):
            box = _box(shape, ranks.shape, at, sharding.placements) or ()
            yield DeviceShare(int(ranks[at]), 0, box)

    def adapter(self, *, late: bool = False) -> MeshAdapter:
        """The adapter of this process's device."""
        device: Any = None
        if self._mesh is not None:
            device = self._mesh.device_type
            if device != "cpu":
                module = torch.get_device_module(device)
                device = torch.device(device, module.current_device())
        return MeshAdapter([torch_adapter.make(device)])

    def assemble(self, wholes: Iterable[Whole]) -> list[Any]:
        """A DTensor for each tensor."""
        made: list[Any] = []
        for shape, dtype, (mesh, placements), parts in wholes:
            _, given = adapters.arrives(_FORMS, dtype, shape)
            stride = tuple(torch.empty(given, device="meta").stride())
            made.append(
                DTensor.from_local(
                    parts[0], mesh, placements, run_check=False, shape=given, stride=stride
                )
            )
        return made

    def platform(self) -> str:
        """The kind of this process's device."""
        return "cpu" if self._mesh is None else self._mesh.device_type

    def store(self) -> TorchStore | None:
        """The store of the process group; None if this version has none that lists keys."""
        joined = dist.is_available() and dist.is_initialized()
        return _world().store if joined else None

    def link(self, ranks: Sequence[int], width: int, deadline: Deadline) -> TorchLink:
        """A link between processes, with rows of `width` bytes."""
        return TorchLink(tuple(sorted(ranks)), width, deadline)


def make() -> MeshBackend:
    """A backend for one load."""
    return TorchBackend()


def _sharding(mesh: Any, row: specs.Row, spec: Any) -> Placed:
    """The sharding that a user's spec means for a tensor."""
    shape, dtype = row.shape, row.dtype
    sizes = tuple(mesh.mesh.shape)
    given, misfit = specs.placements(Placement, row, sizes, spec)
    made: list[Any] = []
    for each in given:
        if isinstance(each, Replicate):
            made.append(each)
            continue
        factor = _factor(each)
        if factor is None:
            raise misfit(f"{each} does not say where values lie", "Shard or Replicate")
        if (dim := specs.dim_of(row, each.dim, misfit)) != each.dim:
            given_factor = {} if type(each) is Shard else {"split_factor": factor}
            each = type(each)(dim, **given_factor)
        made.append(each)
    made += [Replicate()] * (mesh.ndim - len(made))
    if dtype.elements > 1 and shape:
        count = 1
        for size, each in zip(sizes, made, strict=True):
            count *= size if getattr(each, "dim", None) == len(shape) - 1 else 1
        if shape[-1] % (dtype.elements * count):
            shards = errors.counted(count, "shard")
            message = f"elements of {dtype} share a byte, and {shards} would cut through them"
            raise misfit(message, f"a multiple of {dtype.elements * count} in the last dim")
    strided = any(_factor(each) not in (None, 1) for each in made)
    if strided and any(_box(shape, sizes, at, made) is None for at in np.ndindex(*sizes)):
        raise misfit("a shard would be made of rows that lie apart", "stretches of rows")
    return Placed(mesh, tuple(made))


def _factor(placement: Any) -> int | None:
    """How many chunks a placement cuts by themselves: 1 for `Shard`; None if it cuts nothing."""
    if type(placement).__name__ == "_StridedShard":  # A subclass of Shard in some versions.
        return placement.split_factor
    return 1 if type(placement) is Shard else None


def _box(
    shape: Shape, sizes: Sequence[int], at: Sequence[int], placements: Sequence[Any]
) -> Box | None:
    """The box of the rank at a place in the mesh; None if its part is no box.

    Placements count from the left. A `_StridedShard` cuts each of `split_factor` chunks by itself
    and takes one piece of each, as if the mesh dims to its right had cut first; of these pieces
    one is left where a `Shard` over such a mesh dim follows.
    """
    runs = [[(0, length)] for length in shape]  # What is held of each dim.
    for size, number, each in zip(sizes, at, placements, strict=True):
        if (factor := _factor(each)) is not None:
            held, taken = runs[each.dim], list[tuple[int, int]]()
            length = sum(stop - start for start, stop in held)
            for n in range(factor):
                first, last = specs.chunk(length, factor, n)
                start, stop = specs.chunk(last - first, size, number)
                for run in _between(held, first + start, first + stop):
                    if taken and taken[-1][1] == run[0]:
                        run = taken.pop()[0], run[1]
                    taken.append(run)
            runs[each.dim] = taken
    box: list[tuple[int, int]] = []
    for held in runs:
        if len(held) > 1:
            return None
        box.append(held[0] if held else (0, 0))
    return tuple(box)


def _between(runs: Sequence[tuple[int, int]], start: int, stop: int) -> Iterator[tuple[int, int]]:
    """What lies at start to stop of runs laid end to end."""
    at = 0
    for first, last in runs:
        a, b = first + max(0, start - at), first + min(last - first, stop - at)
        at += last - first
        if a < b:
            yield a, b


class TorchStore(ReachedStore):
    """The store of a process group: short texts that all processes read and write."""

    framework = "torch"

    def put(self, key: str, text: str) -> None:
        """Writes a text, in place of an older one."""
        self._reach(self._client.set, key, text)

    def first(self, key: str, text: str) -> str:
        """Writes a text if there is none; returns the one that is there, on every process."""
        return self._reach(self._client.compare_set, key, "", text).decode()

    def texts(self, prefix: str, names: Sequence[str]) -> dict[str, str]:
        """The texts that are there of keys `prefix + name`, by name."""
        there = self._there(prefix, names)
        keys = [prefix + name for name in there]
        found = self._reach(self._client.multi_get, keys) if keys else []
        return {name: text.decode() for name, text in zip(there, found, strict=True)}

    def drop(self, keys: Sequence[str]) -> None:
        """Removes texts."""
        for key in keys:
            self._reach(self._client.delete_key, key)

    def _there(self, prefix: str, names: Sequence[str]) -> list[str]:
        # To list all keys would take time for those that others put there.
        if not names or self._reach(self._client.check, [prefix + name for name in names]):
            return [*names]
        half = len(names) // 2
        halves = (names[:half], names[half:]) if half else ()
        return [each for some in halves for each in self._there(prefix, some)]


class World:
    """What loads keep for a process group, as long as that lives."""

    def __init__(self) -> None:
        store = private_api.torch_store()
        self.store = None if store is None else TorchStore(store)
        # By ranks, and by the devices of all of them: NCCL's, None if it can't connect these.
        self.groups: dict[tuple[tuple[int, ...], tuple[str, ...] | None], Any] = {}

    def group(self, ranks: tuple[int, ...]) -> Any:
        """A group of gloo's, so that a load does not get between the collectives of its user."""
        if (ranks, None) not in self.groups:
            self.groups[ranks, None] = private_api.torch_group(ranks, _GIVEN_UP)
        return self.groups[ranks, None]


# A strong reference would keep the port of a group that its user has destroyed.
_worlds: weakref.WeakKeyDictionary[Any, World] = weakref.WeakKeyDictionary()


def _world() -> World:
    group = dist.group.WORLD
    if group not in _worlds:
        _worlds[group] = World()
    return _worlds[group]


@contextlib.contextmanager
def _beside(place: Any) -> Generator[None]:
    """Has a device work on a stream of its own, which is over at the end."""
    stream: Any = torch.cuda.Stream(place) if place.type == "cuda" else None
    with torch.cuda.stream(stream) if stream else contextlib.nullcontext():
        yield
    if stream:
        stream.synchronize()


class TorchLink(Link):
    """Swaps rows over gloo, in a group of mfload's own: as uint8, which all backends take.

    Pieces go from one process to the other directly, from and to where they lie: an all-to-all
    copies each byte twice more, and gloo's all-gather takes three times as long.
    """

    def __init__(self, ranks: tuple[int, ...], width: int, deadline: Deadline) -> None:
        self._world, self._ranks = _world(), ranks
        self._over: Any = None  # NCCL's group.
        super().__init__((self._world, ranks), deadline, len(ranks), width)

    def moves(self, device: Device) -> bool:
        """Whether NCCL can move its bytes (see `Link`)."""
        return device.place[0] == CUDA and dist.is_nccl_available()

    def connect(self, device: Device, spots: Sequence[str], check: Callable[[], object]) -> str:
        """Makes a group of NCCL's, once for these devices (see `Link`)."""
        key, groups = (self._ranks, tuple(spots)), self._world.groups
        self._place = torch.device("cuda" if device.place[0] == CUDA else "cpu", device.place[1])
        if key not in groups:
            groups[key] = None
            name = hashlib.sha256(repr(spots).encode()).hexdigest()[:16]
            given = self._place, self._ranks, name, _GIVEN_UP
            task = start(lambda: private_api.torch_device_group(*given), "mfload-connect")
            end = time.monotonic() + min(_CONNECTED, self._deadline.left() / 2)
            while not task.join(_TICK):
                check()
                if time.monotonic() > end:
                    return "NCCL did not connect the devices in time"
            try:
                groups[key] = task.result()
            except Exception as error:  # noqa: BLE001 - then the host does it
                found = (str(error).splitlines() or [""])[0][:300]
                return f"NCCL can't connect the devices: {found}"
        self._over = groups[key]
        return "" if self._over else "NCCL could not connect the devices before"

    def view(self, memory: Any) -> Any:
        """The same for torch if it lies on a device (see `Link`)."""
        view = View("", TABLE["U8"], (memory.nbytes,), memory, 0)
        return memory if self.device is None else dlpack.from_dlpack(capsule(view))

    def copy(self, copies: Sequence[tuple[Any, Any]]) -> None:
        """Copies on a stream beside the user's (see `Link`)."""

        def act() -> None:
            with _beside(self._place):
                for target, source in copies:
                    target.copy_(torch.as_tensor(source))

        if self.device is None or not copies:
            return super().copy(copies)
        return self._deadline.bound(act, "copying on a device")

    def abandon(self) -> None:
        """Has NCCL's kernels end (see `Link`): until then, CUDA frees no memory."""
        if self._over:
            start(self._over.abort, "mfload-abort", service=True)

    def swap(self, rows: Any, pieces: Pieces) -> Any:
        """Sends to and receives from each process (see `Link`)."""
        if self.device is None:
            return self._swap(rows, pieces)
        came = self._swap(rows, pieces._replace(sent=[], taken=[]))
        if (pieces.sent or pieces.taken) and self.well(rows, came):
            with _beside(self._place):
                group = self._over
                group._start_coalescing()
                for begin, every in ((group.recv, pieces.taken), (group.send, pieces.sent)):
                    for number, _, memory in every:
                        begin([memory], number, 0)
                group._end_coalescing().wait()
        return came

    def _swap(self, rows: Any, pieces: Pieces) -> Any:
        ends = list(itertools.accumulate(pieces.come))
        came = np.split(buffers.allocate(ends[-1]), ends[:-1])
        group, works = self._world.group(self._ranks), list[Any]()
        for number, rank in enumerate(self._ranks):
            if rank == dist.get_rank():
                came[number][:] = rows[number, : pieces.come[number]]
                continue
            takes = [came[number], *(memory for n, _, memory in pieces.taken if n == number)]
            gives = [rows[number, : pieces.sizes[number]]]
            gives += [memory for n, _, memory in pieces.sent if n == number]
            for begin, every in ((group.recv, takes), (group.send, gives)):
                for tag, memory in enumerate(every):
                    works.append(begin([torch.from_numpy(memory)], number, tag))
        for work in works:
            work.wait()
        return came
