"""Paddle's process meshes: the part of each process, and distributed tensors made of it.

What `paddle.distributed.shard_tensor` makes of a whole tensor, these are. Where it fails on one
process, since its part would begin beyond the end of a dim, the load is refused on all.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist

from mfload import errors
from mfload.cuda.device import Device
from mfload.cuda.memory import DeviceBuffer
from mfload.frameworks import base as adapters, paddle_adapter, private_api
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
    Whole,
)
from mfload.mesh.device_link import DeviceLink
from mfload.mesh.link import Pieces
from mfload.mesh.specs import Placed
from mfload.planning.request import Request
from mfload.runtime import Deadline

Shape = tuple[int, ...]
_FORMS = paddle_adapter.PaddleAdapter.forms
_MESH = "paddle.distributed.ProcessMesh"
_PLACEMENTS = specs.Placements("Paddle", _MESH, dist.ProcessMesh, dist.Placement)


class PaddleBackend(Backend):
    """Paddle's meshes, for one load (see `MeshBackend`). A process has one device."""

    # 2.7 to 3.7 measured on a busy machine: processor time of 500 MB replicated to two ranks.
    transport = ProcessTransport(3.0, 8 << 20, held=4)

    @staticmethod
    def group() -> tuple[int, int]:
        """The rank of this process, and how many are joined."""
        return dist.get_rank(), dist.get_world_size() if dist.is_initialized() else 1

    def processes(self, asked: MeshArguments) -> tuple[int, ...]:
        """The processes of the mesh; all of them if it is none."""
        if isinstance(asked.mesh, dist.ProcessMesh):
            return tuple(sorted(asked.mesh.process_ids))
        return tuple(range(dist.get_world_size())) if dist.is_initialized() else (self.rank,)

    def resolve(self, requests: Sequence[Request], asked: MeshArguments) -> list[Placed]:
        """A sharding for each whole tensor."""
        if isinstance(asked.mesh, dist.ProcessMesh) and private_api.paddle_sharder() is None:
            message = "this version of Paddle makes no distributed tensors of parts"
            raise errors.UsageError(message, expected="Paddle 3.3", found=paddle.__version__)
        return _PLACEMENTS.resolve(requests, asked, _sharding)

    def divided(self, sharding: Placed, shape: Shape) -> Iterator[DeviceShare]:
        """The part of a tensor that each process of the mesh holds."""
        sizes = tuple(sharding.mesh.shape)
        for rank, at in zip(sharding.mesh.process_ids, np.ndindex(sizes), strict=True):
            yield DeviceShare(rank, 0, _box(shape, sizes, at, sharding.placements))

    def adapter(self, *, late: bool = False) -> MeshAdapter:
        """The adapter of Paddle's current device."""
        return MeshAdapter([paddle_adapter.make(None)])

    def assemble(self, wholes: Iterable[Whole]) -> list[Any]:
        """A distributed tensor for each tensor, over the memory of its part."""
        make = private_api.paddle_sharder()
        assert make is not None  # Checked by `resolve`.
        return [
            make(parts[0], adapters.arrives(_FORMS, dtype, shape)[1], mesh, list(placements))
            for shape, dtype, (mesh, placements), parts in wholes
        ]

    def platform(self) -> str:
        """The kind of this process's device."""
        return paddle.get_device().partition(":")[0]

    def store(self) -> None:
        """Nothing: a request of Paddle's store takes 45 ms, and one that lists keys is missing."""

    def link(self, ranks: Sequence[int], width: int, deadline: Deadline) -> PaddleLink:
        """A link between all processes, with rows of `width` bytes."""
        rank, count = self.group()
        if sorted(ranks) != (every := list(range(count))):
            # Other groups often fail to connect, or hang (Paddle 3.3.1), and what some processes
            # send in the group of all puts its numbers out of step for the others.
            raise errors.UsageError(
                "processes that load together must be all that are joined",
                expected="a mesh of all processes, after paddle.distributed.init_parallel_env()",
                found=f"a mesh of processes {list(ranks)[:16]}; joined are {every[:16]}",
            )
        return PaddleLink(rank, count, width, deadline)


def make() -> MeshBackend:
    """A backend for one load."""
    return PaddleBackend()


def _sharding(mesh: Any, row: specs.Row, spec: Any) -> Placed:
    """The sharding that a user's spec means for a tensor."""
    shape, dtype = row.shape, row.dtype
    sizes = tuple(mesh.shape)
    given, misfit = specs.placements(dist.Placement, row, sizes, spec)
    cuts: dict[int, list[int]] = {}  # The dims of the mesh that cut each dim.
    for n, each in enumerate(given):
        if each.is_partial():
            raise misfit(f"{each} does not say where values lie", "Shard or Replicate")
        if each.is_shard():
            dim = specs.dim_of(row, each.get_dim(), misfit)
            if _get(each, "get_split_factor", 1) != 1:
                raise misfit("a shard would be made of rows that lie apart", "no split_factor=")
            cuts.setdefault(dim, []).append(n)
    made: list[Any] = [dist.Replicate() for _ in sizes]
    for dim, numbers in cuts.items():
        orders = [_get(given[n], "get_co_shard_order", 0) for n in numbers]
        if not any(orders):
            orders = list(range(len(numbers)))  # From the left, as Paddle sets them.
        if sorted(orders) != list(range(len(numbers))):
            raise misfit(f"shard_order= of dim {dim} has gaps", "0, 1, … or none at all")
        held = {shape[dim]}  # The lengths that processes hold.
        for _, n in sorted(zip(orders, numbers, strict=True)):
            if any(-(-length // sizes[n]) * (sizes[n] - 1) > length for length in held):
                message = f"dim {dim} has too few elements: Paddle makes no such shards"
                raise misfit(message, "as many as leave at most one process without any")
            chunks = [specs.chunk(each, sizes[n], k) for each in held for k in range(sizes[n])]
            held = {stop - start for start, stop in chunks}
        for order, n in zip(orders, numbers, strict=True):
            # Paddle dies of negative dims, and names no order where there is one Shard alone.
            ordered = {"shard_order": order} if len(numbers) > 1 else {}
            made[n] = dist.Shard(dim, **ordered)
    if cuts and adapters.arrives(_FORMS, dtype, shape)[1] != shape:
        last = cuts.get(len(shape) - 1, [])
        unit = dtype.elements * int(np.prod([sizes[n] for n in last]))
        if shape[-1] % unit:
            message = f"{dtype} arrives as bytes, which are cut elsewhere than elements"
            raise misfit(message, f"a multiple of {unit} in the last dim")
    return Placed(mesh, tuple(made))


def _get(placement: Any, name: str, default: int) -> int:
    """What only later versions of Paddle know of a placement."""
    return getattr(placement, name)() if hasattr(placement, name) else default


def _box(shape: Shape, sizes: Sequence[int], at: Sequence[int], placements: Sequence[Any]) -> Box:
    """The box of the process at a place in the mesh."""
    box = [(0, length) for length in shape]
    cuts = [n for n, each in enumerate(placements) if each.is_shard()]
    for n in sorted(cuts, key=lambda n: _get(placements[n], "get_co_shard_order", 0)):
        dim = placements[n].get_dim()
        first, last = box[dim]
        start, stop = specs.chunk(last - first, sizes[n], at[n])
        box[dim] = first + start, first + stop
    return tuple(box)


class PaddleLink(DeviceLink):
    """Swaps by sending and receiving uint8 in pairs, which gloo and NCCL both can.

    Paddle numbers what is sent within a group, also between other processes, so each process sends
    and receives as often as each other. Gloo gives up after 30 seconds.
    """

    def __init__(self, rank: int, count: int, width: int, deadline: Deadline) -> None:
        super().__init__(dist.get_group() if count > 1 else None, deadline, count, width)
        self._rank = rank
        gloo = count == 1 or dist.get_backend().lower() == "gloo"
        # Gloo sends from and receives into NumPy's memory, where Paddle takes that.
        self._over = private_api.paddle_constructor() if gloo else None
        self._place = paddle.CPUPlace() if gloo else paddle_adapter.make(None).place

    def exchange(self, rows: Any) -> Any:
        """Scatters the rows of each process (see `Link`)."""
        came = buffers.allocate(rows.size).reshape(rows.shape)
        came[self._rank] = rows[self._rank]
        for root in range(self._count if self._count > 1 else 0):
            sent = [self._tensor(row) for row in rows] if root == self._rank else None
            with self._taking(came[root]) as row:
                dist.scatter(row, sent, src=root)
        return came

    def by_host(self, rows: Any, pieces: Pieces) -> Any:
        """Sends pieces from and to where they lie, and as many between any two (see `Link`)."""
        if self._count % 2:  # In pairs, one would be left alone.
            return super().by_host(rows, pieces)
        came = [buffers.allocate(size) for size in pieces.come]
        came[self._rank][:] = rows[self._rank, : pieces.come[self._rank]]
        sent = [[row[:size]] for row, size in zip(rows, pieces.sizes, strict=True)]
        taken = [[row] for row in came]
        for every, given in ((sent, pieces.sent), (taken, pieces.taken)):
            for number, _, memory in given:
                every[number].append(memory)
            for each in every:
                each += [np.zeros(1, np.uint8) for _ in range(pieces.most + 1 - len(each))]
        for step in range(self._count - 1):
            peer = partner(self._rank, step, self._count)
            for sends in (self._rank < peer, self._rank > peer):  # The lower one sends first.
                for memory in sent[peer] if sends else taken[peer]:
                    if sends:
                        dist.send(self._tensor(memory), dst=peer)
                    else:
                        with self._taking(memory) as tensor:
                            dist.recv(tensor, src=peer)
        return came

    def moves(self, device: Device) -> bool:
        """Whether NCCL can move its bytes (see `Link`)."""
        return super().moves(device) and self._over is None

    def room(self, rows: Any) -> Any:
        """Memory of Paddle's on the device (see `Link`), which takes no other."""
        if self.device is None:
            return super().room(rows)

        def allocate() -> Any:
            made = paddle.empty([rows.size], "uint8")
            # Kernels that were started before may still use memory that Paddle gave away again.
            paddle.device.synchronize()
            return made

        tensor = self._deadline.bound(allocate, "allocating on a device")
        self._rooms[rows.ctypes.data] = room = self._memory_of(tensor)
        return room

    def swap_there(self, room: DeviceBuffer) -> DeviceBuffer:
        """One all-to-all of NCCL's (see `DeviceLink`)."""
        came = paddle.empty([room.nbytes], "uint8")
        dist.alltoall_single(came, room.owner)
        paddle.device.synchronize()
        return self._memory_of(came)

    def _memory_of(self, tensor: Any) -> DeviceBuffer:
        address = tensor.data_ptr()
        return DeviceBuffer(self.device, address, tensor.size, tensor, own=False)

    def _tensor(self, memory: Any) -> Any:
        """A tensor of bytes, over their memory where Paddle can."""
        if self._over is not None:
            return self._over(memory)
        return paddle.to_tensor(memory, place=self._place)

    @contextlib.contextmanager
    def _taking(self, memory: Any) -> Generator[Any]:
        """A tensor of which what it gets is in the memory afterwards."""
        tensor = self._tensor(memory)
        yield tensor
        if self._over is None:
            memory[:] = tensor.numpy()


def partner(rank: int, step: int, count: int) -> int:
    """Whom a rank meets in one of `count - 1` steps, in which each of an even number meets each."""
    last = count - 1
    if rank == last:
        return step
    return last if rank == step else (2 * step - rank) % last
