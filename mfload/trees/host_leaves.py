"""Leaves that are put together on the host, from where one call copies all shards to their devices.

What is made of one tensor lands as it is stored, and XLA turns it as it copies it, with no program
to compile. What is made of several, or is wanted more than once, lands by strides where it belongs
in one array, and so does what one device holds whole: it keeps that memory. Values are only moved
here: what is scaled is left to compiled functions, so that its numbers do not depend on its
size.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from mfload.dlpack import View
from mfload.dtypes import TABLE, DType
from mfload.frameworks import jax_memory, private_api
from mfload.frameworks.jax_adapter import JaxAdapter
from mfload.frameworks.jax_memory import undisturbed
from mfload.index import Box
from mfload.mesh.base import DeviceShare
from mfload.mesh.jax_backend import JaxBackend, arrives
from mfload.options import OVERHEAD
from mfload.planning.extents import c_strides
from mfload.planning.slicing import shape_of
from mfload.runtime import Crew, share_of_cores
from mfload.trees.recipe import Recipe
from mfload.trees.transforms import Transform

MOST = OVERHEAD
"""Bytes of such a leaf, at most."""
SMALL = 1 << 20
"""The same for other devices than CPUs. To run a compiled function costs less than it saves there,
as larger leaves are turned on the device. CPUs have leaves of which parts land in their places put
together here up to this size as well: one call costs less than several functions."""
_JOINED = 1 << 20  # Bytes from which on to copy once more costs more than memory of its own.
_SHARED_OUT = 8 << 20  # Bytes of a leaf, on average, from which on several threads place them.


class Kind(NamedTuple):
    """What leaves with the same transform and sharding have in common.

    Attributes:
        reads: Numbers of tensors, and for each the box that each process takes of it.
        box: What holds all shards of this process; None if it has none.
        transform: Makes the box of what has landed.
        joined: Whether what it is made of lands in the box by strides, and not apart.
        take: Wraps that memory as the array of its device, without a copy; None if it is copied.
        cuts: The place of each of these shards in that box, and their devices.
        partly: Whether some of these shards are alike, but not all of the leaf's.
        nbytes: What a leaf makes wait on a process, at most: as it lands, and what NumPy copies.
        result: Bytes of the shards of this process.
    """

    shape: tuple[int, ...]
    dtype: Any
    sharding: Any
    reads: tuple[tuple[int, tuple[DeviceShare, ...]], ...]
    box: Box | None
    transform: Transform | None
    joined: bool
    take: Callable[[Any], Any] | None
    cuts: tuple[tuple[slice, ...], ...]
    devices: list[Any]
    partly: bool
    nbytes: int
    result: int


def kind(recipe: Recipe, sharding: Any, backend: JaxBackend, *, own: bool) -> Kind:
    """The kind of a leaf, which is not empty; `own`: it may keep memory of mfload's."""
    shape, dtype = arrives(recipe.dtype, recipe.transform.shape)
    shares = backend.shares(sharding, shape)
    around: dict[int, Box] = {}
    for process, _, box in shares:
        pairs = zip(around.get(process, box), box, strict=True)
        around[process] = tuple([(min(a, c), max(b, d)) for (a, b), (c, d) in pairs])
    held = [share.box for share in shares if share.process == backend.rank]
    whole = own and len(held) == 1 and backend.platform() == "cpu"
    reads: dict[int, list[DeviceShare]] = {}
    waits: Counter[int] = Counter()
    mine, joined = None, False
    for process, hull in around.items():
        transform, found = recipe.transform.part(hull)
        for number, box in found:
            reads.setdefault(number, []).append(DeviceShare(process, 0, box))
            waits[process] += recipe.landed.size_of(shape_of(box)) or 0
        strided = transform.places(c_strides(shape_of(hull), 1)) is not None
        if process == backend.rank:
            mine = transform
            large = (recipe.dtype.size_of(shape_of(hull)) or 0) >= _JOINED
            # What processes exchange has no steps, and all split the same leaves into batches.
            alone = jax.process_count() == 1 and recipe.landed.elements == 1
            several = len(found) > 1 or len({*held}) < len(held)
            joined = large and alone and strided and (several or whole)
        if not (joined or (strided and len(found) == 1)):  # Then NumPy shows it without a copy.
            waits[process] *= 2
    cuts: list[Any] = []
    devices: list[Any] = []
    boxes: set[Box] = set()
    result = 0
    for process, number, box in shares:
        if process == backend.rank:
            pairs = zip(box, around[process], strict=True)
            # With an ellipsis NumPy gives an array also of no dims.
            cuts.append((*(slice(a - at, b - at) for (a, b), (at, _) in pairs), ...))
            devices.append(backend.device(number))
            boxes.add(box)
            result += recipe.dtype.size_of(shape_of(box)) or 0
    partly = len(boxes) < len(cuts) and not sharding.is_fully_replicated
    if partly:
        for process, _, box in shares:
            waits[process] += recipe.dtype.size_of(shape_of(box)) or 0
    taken = tuple((number, tuple(held)) for number, held in sorted(reads.items()))
    take = None
    if joined and whole:
        as_bytes = JaxAdapter.forms[recipe.dtype.name].how == "bytes"
        stored = TABLE["U8"] if as_bytes else recipe.dtype
        take = partial(_taken, jax_memory.importer(devices[0]), stored, shape)
    given = shape, dtype, sharding, taken, around.get(backend.rank), mine, joined, take
    return Kind(*given, tuple(cuts), devices, partly, max(waits.values()), result)


def _taken(importer: Callable[[View], Any], dtype: DType, shape: Any, memory: Any) -> Any:
    return importer(View("", dtype, shape, memory, 0))


def make(leaves: Iterable[tuple[Kind, Sequence[Any]]]) -> list[Any]:
    """The array of each leaf, in memory of JAX's, from the NumPy arrays that it is made of."""
    every = list(leaves)
    if sum(kind.result for kind, _ in every) < _SHARED_OUT * len(every):
        with undisturbed():
            return [_make(kind, arrays) for kind, arrays in every]
    made: list[Any] = [None] * len(every)

    def place(number: int) -> None:
        with undisturbed():
            made[number] = _make(*every[number])

    Crew().share(place, len(every), share_of_cores())
    return made


def _make(kind: Kind, arrays: Sequence[Any]) -> Any:
    shape, dtype, sharding, _, box, transform, joined, take, cuts, devices, partly, *_ = kind
    assert transform is not None
    assert box is not None
    if take is not None:
        made = take(arrays[0])
        if isinstance(sharding, SingleDeviceSharding):
            return made
        return jax.make_array_from_single_device_arrays(shape, sharding, [made])
    if joined:
        whole = arrays[0].view(dtype).reshape(shape_of(box))
    else:
        whole = transform.evaluate(arrays, np)
    parts = [whole[cut] for cut in cuts]
    if partly:  # XLA refuses parts that share memory, unless all do.
        parts = [np.array(part) for part in parts]
    place = private_api.jax_placer() or _place
    return place(shape, dtype, sharding, parts, devices)


def _place(shape: Any, dtype: Any, sharding: Any, parts: list[Any], devices: list[Any]) -> Any:
    arrays = jax.device_put([np.array(part) for part in parts], devices)
    return jax.make_array_from_single_device_arrays(shape, sharding, arrays, dtype=dtype)
