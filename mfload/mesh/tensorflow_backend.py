"""TensorFlow's meshes: the part of each device, and DTensors of those of this process.

A DTensor is made by `dtensor.pack`, which takes tensors on TensorFlow's first CPU for any of its
CPUs without a copy. Clients swap bytes by one collective of TensorFlow's own runtime.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.experimental import dtensor  # pyright: ignore[reportMissingImports]

from mfload import errors
from mfload.cuda.device import Device
from mfload.cuda.memory import DeviceBuffer
from mfload.dlpack import View, capsule, data_address
from mfload.dtypes import TABLE, DType
from mfload.errors import counted
from mfload.frameworks import tensorflow_adapter
from mfload.frameworks.several import MeshAdapter
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
from mfload.options import LoadOptions
from mfload.planning.request import Request
from mfload.runtime import Deadline

Shape = tuple[int, ...]
Sharding = tuple[str, ...]
"""The dim of the mesh that cuts each dim of a tensor, or UNSHARDED; not TensorFlow's layout, which
names the devices of this process and so differs between processes."""
_EXPECTED = "a Layout, or a list of dims of the mesh and UNSHARDED, one for each dim of the tensor"


class TensorflowBackend(Backend):
    """TensorFlow's meshes, for one load (see `MeshBackend`). Devices are those of one mesh."""

    transport = ProcessTransport(14.0, 1 << 20)  # 14 measured; longer rows are not faster.

    def __init__(self) -> None:
        super().__init__()
        self._mesh: Any = None
        self._owners: list[tuple[int, int]] = []

    @staticmethod
    def group() -> tuple[int, int]:
        """The number of this client of DTensor's, and how many there are."""
        try:
            return dtensor.client_id(), dtensor.num_clients()
        except ValueError as error:
            message, expected = "DTensor's clients are not set up", "DTENSOR_CLIENT_ID in range"
            raise errors.UsageError(message, expected=expected, found=str(error)) from error

    def processes(self, asked: MeshArguments) -> tuple[int, ...]:
        """The clients in the mesh; all of them if it does not say."""
        owners = _owners(asked.mesh)
        if owners is None:
            return tuple(range(self.group()[1]))
        return tuple(sorted({process for process, _ in owners}))

    def resolve(self, requests: Sequence[Request], asked: MeshArguments) -> list[Sharding]:
        """The dims of the mesh that cut each whole tensor."""
        mesh: Any = asked.mesh
        owners = _owners(mesh)
        if owners is None:
            raise errors.UsageError(
                "TensorFlow's layouts need a mesh whose devices are spread evenly over the "
                "clients, in their order; dims need shard=(rank, size)",
                expected="mesh=, as dtensor.create_mesh or create_distributed_mesh make it",
                found=repr(mesh),
            )
        self._mesh, self._owners = mesh, owners
        return specs.resolve(
            specs.rows(requests),
            asked,
            functools.partial(_sharding, mesh),
            single=_is_single,
            expected=_EXPECTED,
        )

    def divided(self, sharding: Sharding, shape: Shape) -> Iterator[DeviceShare]:
        """The part of a tensor that each device of the mesh holds."""
        sizes = dict(zip(self._mesh.dim_names, self._mesh.shape(), strict=True))
        places = np.ndindex(*sizes.values())
        for (process, device), place in zip(self._owners, places, strict=True):
            at = dict(zip(sizes, place, strict=True))
            pairs = [(sizes.get(name, 1), at.get(name, 0)) for name in sharding]
            box = (specs.chunk(n, *pair) for n, pair in zip(shape, pairs, strict=True))
            yield DeviceShare(process, device, tuple(box))

    def separate(self, sharding: Any, dtype: DType, options: LoadOptions) -> bool:
        """Devices share memory, unless it is TensorFlow's, which lends it for one."""
        forms = tensorflow_adapter.TensorflowAdapter.forms
        return options.allocator == "framework" and forms[dtype.name].how != "copy"

    def adapter(self, *, late: bool = False) -> MeshAdapter:
        """The adapter of this client's devices; of its CPUs all have the first one's."""
        if self.platform() == "cpu":
            count = 1 if self._mesh is None else self._mesh.num_local_devices()
            return MeshAdapter([tensorflow_adapter.make("CPU:0")] * count)
        return MeshAdapter([tensorflow_adapter.make(name) for name in self._mesh.local_devices()])

    def assemble(self, wholes: Iterable[Whole]) -> list[Any]:
        """A DTensor for each tensor."""
        layout_of: Any = dtensor.Layout
        layouts: dict[Sharding, Any] = {}
        made: list[Any] = []
        for _, _, sharding, parts in wholes:
            if sharding not in layouts:
                layouts[sharding] = layout_of(list(sharding), self._mesh)
            made.append(dtensor.pack([parts[n] for n in range(len(parts))], layouts[sharding]))
        return made

    def platform(self) -> str:
        """The kind of this client's devices: "cpu", "gpu" or "tpu"."""
        return "cpu" if self._mesh is None else self._mesh.device_type().lower()

    def link(self, ranks: Sequence[int], width: int, deadline: Deadline) -> TensorflowLink:
        """A link between clients, with rows of `width` bytes."""
        return TensorflowLink(tuple(sorted(ranks)), width, deadline)


def make() -> MeshBackend:
    """A backend for one load."""
    return TensorflowBackend()


def _owners(mesh: Any) -> list[tuple[int, int]] | None:
    """The client of each device of a mesh, and its number there; None if it does not say.

    A mesh knows the devices of its own client alone. Those of the others follow if all have equally
    many, one client after the other.
    """
    kind: Any = dtensor.Mesh
    if not isinstance(mesh, kind):
        return None
    (rank, clients), count = TensorflowBackend.group(), mesh.num_local_devices()
    mine = [number - mesh.min_global_device_id() for number in mesh.local_device_ids()]
    if sorted(mine) == list(range(mesh.size)):
        return [(rank, mine.index(number)) for number in range(mesh.size)]
    if mesh.size == clients * count and mine == list(range(rank * count, (rank + 1) * count)):
        return [divmod(number, count) for number in range(mesh.size)]
    return None


_is_single = functools.partial(specs.is_single, dtensor.Layout, str)


def _sharding(mesh: Any, row: specs.Row, spec: Any) -> Sharding:
    """The sharding that a user's spec means for a tensor."""
    name, shape, dtype = row.name, row.shape, row.dtype
    if spec is None:
        return (dtensor.UNSHARDED,) * len(shape)
    if not _is_single(spec) and spec not in ([], ()):
        expected = f"{_EXPECTED}, for {name!r}"
        raise errors.UsageError("not a layout", expected=expected, found=repr(spec))
    given = tuple(spec.sharding_specs if isinstance(spec, dtensor.Layout) else spec)
    sizes = dict(zip(mesh.dim_names, mesh.shape(), strict=True))

    def misfit(message: str, expected: str) -> errors.ShardingError:
        on = ", ".join(f"{dim}={size}" for dim, size in sizes.items())
        found = f"{list(given)} for shape {list(shape)} on a mesh of {on}"
        return errors.ShardingError(message, tensor=name, expected=expected, found=found)

    if isinstance(spec, dtensor.Layout) and spec.mesh != mesh:
        raise misfit("the layout is one of another mesh", f"a Layout of {mesh!r}")
    if len(given) != len(shape):
        message = f"{counted(len(given), 'spec')} for a tensor of {counted(len(shape), 'dim')}"
        raise misfit(message, "one for each dim, or None")
    for dim, (length, axis) in enumerate(zip(shape, given, strict=True)):
        if axis == dtensor.UNSHARDED:
            continue
        if axis not in sizes or given.count(axis) > 1:
            where = "cuts two dims" if axis in sizes else "is not a dim of the mesh"
            raise misfit(f"{axis!r} {where}", f"each once: {', '.join(sizes)}, or UNSHARDED")
        unit = sizes[axis] * (dtype.elements if dim == len(shape) - 1 else 1)
        if length % unit:
            why = f", and elements of {dtype} share a byte" if unit > sizes[axis] else ""
            message = (
                f"dim {dim} of {length} does not divide into {counted(sizes[axis], 'shard')}{why}"
            )
            raise misfit(message, f"a multiple of {unit}")
    return given


class TensorflowLink(DeviceLink):
    """Swaps rows by one all-to-all between the first CPUs of the clients, or their first GPUs."""

    def __init__(self, ranks: tuple[int, ...], width: int, deadline: Deadline) -> None:
        super().__init__(("tensorflow", ranks), deadline, len(ranks), width)
        self._ranks = ranks
        self._device = f"/job:{dtensor.full_job_name()}/device:CPU:0"
        self._gpu = self._device.replace("CPU", "GPU")
        here = tensorflow_adapter.make("CPU:0").place
        if len(ranks) > 1 and here != self._device:  # A collective would wait for ever.
            raise errors.UsageError(
                "TensorFlow has not joined the other clients",
                expected="tf.experimental.dtensor.initialize_accelerator_system() before the load",
                found=f"{here}, not {self._device}",
            )

    def exchange(self, rows: Any) -> Any:
        """One collective (see `Link`)."""
        if len(self._ranks) == 1:
            return rows.copy()
        order = _order(self._ranks, self._device)
        if order == sorted(order) and rows.shape[1] == self._width:
            return _swap(self._ranks, self._device, rows)
        sent = buffers.allocate(rows.size).reshape(rows.shape)
        np.take(rows, order, axis=0, out=sent)
        return _swap(self._ranks, self._device, sent)[np.argsort(order)]

    def moves(self, device: Device) -> bool:
        """Whether it is TensorFlow's first GPU, under the same number (see `Link`)."""
        if not super().moves(device) or device.place[1] or len(self._ranks) > 10:
            return False  # Of more, TensorFlow's order is another (see `_order`).
        return device in tensorflow_adapter.make("GPU:0").devices

    def swap_there(self, room: DeviceBuffer) -> DeviceBuffer:
        """One collective on GPUs (see `DeviceLink`)."""
        shape = len(self._ranks), self._width // 4
        # Not as int32, of which TensorFlow's kernels for GPUs take copies in host memory.
        came = _all_to_all(self._ranks, self._gpu, View("rows", TABLE["F32"], shape, room, 0))
        float(came[0, 0])  # All of it is there when the host has some.
        address = data_address(tf.experimental.dlpack.to_dlpack(came))
        return DeviceBuffer(room.device, address, room.nbytes, came, own=False)


@functools.lru_cache(maxsize=16)
def _order(ranks: tuple[int, ...], device: str) -> list[int]:
    """Which of the ranks TensorFlow has at each place: it sorts tasks as texts, 10 before 2."""
    rows = buffers.allocate(len(ranks) * 64).reshape(-1, 64)
    rows.view(np.int32)[:], _ = TensorflowBackend.group()
    said = _swap(ranks, device, rows).view(np.int32)[:, 0]
    return [ranks.index(each) for each in said.tolist()]


def _swap(ranks: tuple[int, ...], device: str, rows: Any) -> Any:
    """One collective, in TensorFlow's order of the processes; it knows no uint8."""
    # Sent from where they lie: copies by TensorFlow took 200 MiB more.
    shape = len(rows), rows.shape[1] // 4
    view = View("rows", TABLE["I32"], shape, rows.reshape(-1), 0)
    return np.asarray(memoryview(_all_to_all(ranks, device, view))).view(np.uint8)


def _all_to_all(ranks: tuple[int, ...], device: str, view: View) -> Any:
    kind = device.rpartition("/")[2]
    with tf.device(device):
        return tf.raw_ops.CollectiveAllToAllV2(
            input=tf.experimental.dlpack.from_dlpack(capsule(view)),
            group_size=len(ranks),
            group_key=zlib.crc32(f"mfload {ranks} {kind}".encode()) >> 1,
            # TensorFlow keeps a shape and a type with each.
            instance_key=4 * view.shape[1] + (view.dtype is TABLE["F32"]),
            ordering_token=[],
        )
