"""Small leaves: NumPy arranges on the host what they are made of, and one call places all shards.

To run a compiled function costs a small leaf more than its bytes do. Values are only moved here:
what is scaled is left to compiled functions, so that its numbers do not depend on its size.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from mfload.frameworks import private_api
from mfload.frameworks.jax_memory import undisturbed
from mfload.index import Box
from mfload.mesh.base import Share
from mfload.mesh.jax_backend import JaxBackend, arrives
from mfload.planning.slicing import shape_of
from mfload.trees.recipe import Recipe
from mfload.trees.transforms import Transform

MOST = 1 << 20
"""Bytes of a small leaf, at most."""


class Kind(NamedTuple):
    """What leaves with the same transform and sharding have in common.

    Attributes:
        reads: Numbers of tensors, and for each the box that each process takes of it.
        transform: Makes the box that holds all shards of this process; None if it has none.
        cuts: The place of each of these shards in that box, and their devices.
        partly: Whether some of these shards are alike, but not all of the leaf's.
        nbytes: What a leaf makes wait on a process, at most: as it lands, once more, and the parts.
        result: Bytes of the shards of this process.
    """

    shape: tuple[int, ...]
    dtype: Any
    sharding: Any
    reads: tuple[tuple[int, tuple[Share, ...]], ...]
    transform: Transform | None
    cuts: tuple[tuple[slice, ...], ...]
    devices: list[Any]
    partly: bool
    nbytes: int
    result: int


def kind(recipe: Recipe, sharding: Any, backend: JaxBackend) -> Kind:
    """The kind of a leaf, which is not empty."""
    shape, dtype = arrives(recipe.dtype, recipe.transform.shape)
    shares = backend.shares(sharding, shape)
    around: dict[int, list[tuple[int, int]]] = {}
    for process, _, box in shares:
        pairs = zip(around.get(process, box), box, strict=True)
        around[process] = [(min(a, c), max(b, d)) for (a, b), (c, d) in pairs]
    reads: dict[int, list[Share]] = {}
    waits: Counter[int] = Counter()
    mine = None
    for process, hull in around.items():
        transform, found = recipe.transform.part(tuple(hull))
        for number, box in found:
            reads.setdefault(number, []).append(Share(process, 0, box))
            waits[process] += 2 * (recipe.landed.size_of(shape_of(box)) or 0)
        if process == backend.rank:
            mine = transform
    cuts: list[Any] = []
    devices: list[Any] = []
    boxes: set[Box] = set()
    result = 0
    for process, number, box in shares:
        nbytes = recipe.dtype.size_of(shape_of(box)) or 0
        waits[process] += nbytes
        if process == backend.rank:
            pairs = zip(box, around[process], strict=True)
            # With an ellipsis NumPy gives an array also of no dims.
            cuts.append((*(slice(a - at, b - at) for (a, b), (at, _) in pairs), ...))
            devices.append(backend.device(number))
            boxes.add(box)
            result += nbytes
    partly = len(boxes) < len(cuts) and not sharding.is_fully_replicated
    taken = tuple((number, tuple(held)) for number, held in sorted(reads.items()))
    most = max(waits.values())
    return Kind(shape, dtype, sharding, taken, mine, tuple(cuts), devices, partly, most, result)


def make(leaves: Iterable[tuple[Kind, Sequence[Any]]]) -> list[Any]:
    """The array of each leaf, in memory of JAX's, from the NumPy arrays that it is made of."""
    with undisturbed():
        return [_make(kind, arrays) for kind, arrays in leaves]


def _make(kind: Kind, arrays: Sequence[Any]) -> Any:
    shape, dtype, sharding, _, transform, cuts, devices, partly, *_ = kind
    assert transform is not None
    whole = transform.evaluate(arrays, np)
    parts = [whole[cut] for cut in cuts]
    if partly:  # XLA refuses parts that share memory, unless all do.
        parts = [np.array(part) for part in parts]
    place = private_api.jax_placer() or _place
    return place(shape, dtype, sharding, parts, devices)


def _place(shape: Any, dtype: Any, sharding: Any, parts: list[Any], devices: list[Any]) -> Any:
    arrays = jax.device_put([np.array(part) for part in parts], devices)
    return jax.make_array_from_single_device_arrays(shape, sharding, arrays, dtype=dtype)
