"""Arrays of any framework as what a seed holds of them: boxes, and their memory in place."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from mfload import errors
from mfload.dtypes import DType
from mfload.index import Box, Piece, TensorInfo
from mfload.mesh import base as meshes
from mfload.peer import cuda_ipc
from mfload.planning import request as requesting
from mfload.saving.export import NATIVE, as_bytes, export, unboxed


class Held(NamedTuple):
    """A box of a tensor in this process's memory.

    Attributes:
        shape: Of the whole tensor.
        memory: The bytes of the box, flat, in C order and little-endian, over the array's own
            memory where it can be read in place; or a `cuda_ipc.DeviceMemory`. It keeps that.
        sharding: How the tensor is sharded, for people.
        copied: Whether the memory is a copy.
    """

    name: str
    dtype: DType
    shape: tuple[int, ...]
    box: Box
    memory: Any
    sharding: str = ""
    copied: bool = False


def held(arrays: Mapping[str, Any], devices: bool = False) -> list[Held]:
    """What this process holds of arrays, each box once.

    With `devices`, arrays on CUDA devices stay there, where that is possible.

    Raises:
        UnsupportedArrayError: An array can't be read, or its shards are no boxes.
    """
    found: list[Held] = []
    whole: dict[str, Any] = {}  # Arrays that are not in `found` yet.
    boxes: dict[tuple[int, ...], Box] = {}
    for name, given in arrays.items() if isinstance(arrays, Mapping) else ():  # pyright: ignore
        if type(given) is np.ndarray and type(name) is str and given.flags.c_contiguous:
            row, shape = NATIVE.get(given.dtype), given.shape
            if row is not None:  # Of many small arrays the rest would take most of the time.
                if whole:
                    found += _whole(whole, devices)
                    whole = {}
                if shape not in boxes:
                    boxes[shape] = tuple([(0, length) for length in shape])
                found.append(Held(name, row, shape, boxes[shape], as_bytes(given)))
                continue
        array = unboxed(given)
        parts = list(_parts(name, array))
        if not parts:
            whole[name] = array
            continue
        found += _whole(whole, devices)
        whole = {}
        seen: set[Box] = set()
        for row, shape, box, part, sharding in parts:
            if box not in seen:
                seen.add(box)
                (each,) = _whole({name: part}, devices)
                more = {"dtype": row or each.dtype, "shape": shape, "box": box}
                found.append(each._replace(**more, sharding=sharding))
    found += _whole(whole, devices)
    if not found:
        export(arrays)  # It says what is wrong with them.
        raise errors.UsageError("there is nothing to publish", expected="at least one array")
    return found


def _whole(arrays: Mapping[str, Any], devices: bool) -> Iterator[Held]:
    for row, array in zip(export(arrays) if arrays else (), arrays.values(), strict=True):
        span = row.span
        box = tuple([(0, length) for length in row.shape])
        if devices and span is None and row.dtype.elements == 1:
            lying = cuda_ipc.find(array, row.nbytes)
            if lying is not None:
                yield Held(row.name, row.dtype, row.shape, box, lying)
                continue
        memory = row.fetch()
        address = memory.ctypes.data
        copied = span is None or not span[0] <= address < max(span[1], span[0] + 1)
        yield Held(row.name, row.dtype, row.shape, box, memory, "", bool(memory.size) and copied)


_Part = tuple[DType | None, tuple[int, ...], Box, Any, str]


def _parts(name: str, array: Any) -> Iterator[_Part]:
    """The dtype, shape, box, array and sharding of each part; none of an array that is whole."""
    if hasattr(type(array), "addressable_shards"):
        yield from _of_jax(name, array)
    elif hasattr(array, "device_mesh") and "DTensor" in {c.__name__ for c in type(array).__mro__}:
        parts, mesh = [array.detach().to_local()], array.device_mesh
        yield from _of_backend("torch", name, array, parts, mesh, [*array.placements])
    elif getattr(array, "process_mesh", None) is not None and hasattr(array, "placements"):
        parts = [array._local_value()]
        mesh = array.process_mesh  # Of the C++ core: what has the placements' methods is another.
        ids = np.array(mesh.process_ids).reshape(mesh.shape)
        mesh = sys.modules["paddle"].distributed.ProcessMesh(ids, dim_names=mesh.dim_names)
        yield from _of_backend("paddle", name, array, parts, mesh, [*array.placements])
    elif type(array).__module__.startswith("tensorflow"):
        dtensor: Any = getattr(sys.modules["tensorflow"].experimental, "dtensor", None)
        if dtensor is not None and dtensor.is_dtensor(array):
            layout, parts = dtensor.fetch_layout(array), dtensor.unpack(array)
            yield from _of_backend("tensorflow", name, array, parts, layout.mesh, layout)


def _of_jax(name: str, array: Any) -> Iterator[_Part]:
    from mfload.mesh import jax_pieces, jax_specs

    if array.is_deleted() or not hasattr(array.sharding, "device_set"):
        return
    if len(array.sharding.device_set) == 1:
        return
    row = jax_pieces.dtype_of(name, array)
    spec, mesh = (getattr(array.sharding, each, None) for each in ("spec", "mesh"))
    text = str(array.sharding) if spec is None else f"{spec} on {dict(getattr(mesh, 'shape', {}))}"
    for shard in array.addressable_shards:
        box = jax_specs.box_of(shard.index, array.shape)
        yield row, tuple(array.shape), box, shard.data, text


def _of_backend(
    framework: str, name: str, array: Any, parts: Sequence[Any], mesh: Any, spec: Any
) -> Iterator[_Part]:
    """The parts of this process of a distributed tensor, by the backend that loads such ones."""
    (row,) = export({name: parts[0]})
    units, shape = row.dtype.elements, tuple(array.shape)
    if units > 1 and shape and framework != "tensorflow":  # There, dims count elements.
        shape = (*shape[:-1], shape[-1] * units)
    backend: Any = meshes.backend(framework)
    nbytes = row.dtype.size_of(shape) or 0
    info = TensorInfo(name, row.dtype, shape, (Piece(0, 0, nbytes),))
    requests = [requesting.Request(info, row.dtype)]
    (sharding,) = backend.resolve(requests, meshes.MeshArguments(mesh, {name: spec}, "error"))
    text = str(spec)
    if isinstance(spec, list):
        text = f"{', '.join(map(str, spec))} on {' x '.join(map(str, mesh.shape))}"
    for share in backend.shares(sharding, shape):
        if share.process == backend.rank:
            yield row.dtype, shape, share.box, parts[share.device], text
