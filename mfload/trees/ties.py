"""Ties: one variable of a target under several names, for each of which there is a stored tensor.

The last name counts, as in `load_state_dict`, which copies one after the other.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from mfload import errors
from mfload.frameworks.numpy_adapter import NumpyAdapter
from mfload.index import Box, Index
from mfload.loading.session import Loader
from mfload.options import LoadOptions
from mfload.planning.request import Request
from mfload.planning.slicing import boxed
from mfload.sources.base import Source
from mfload.trees.recipe import Recipe

_WHOLE, _SAMPLES, _SAMPLE = 1 << 20, 16, 64 << 10  # Bytes; of larger tensors samples are compared.


def warn(
    ties: Iterable[tuple[Recipe, Recipe]],
    index: Index,
    sources: Sequence[Source],
    options: LoadOptions,
) -> None:
    """Warns of variables for which the checkpoint holds different values under two names.

    Args:
        ties: What is loaded, and what is not since it is the same variable.
        index: That of the checkpoint.
        sources: Its files.
        options: Of the load.
    """
    loader = Loader(index, sources, NumpyAdapter(), options.replace(allocator="mfload"))
    for kept, other in ties:
        if kept.landed != other.landed or _differ(kept, other, loader):
            errors.warn(
                f"{other.name} and {kept.name} are one variable, and the checkpoint holds "
                f"different values for them: {kept.name} was loaded, the last one; untie the two, "
                "or map the tensor that is not wanted to None"
            )


def _differ(kept: Recipe, other: Recipe, loader: Loader) -> bool:
    shape = kept.transform.shape
    for part in range(_SAMPLES):
        box = _sample(kept, part)
        pair = [Request(r.tensors[0], r.landed, boxed(r.tensors[0], box)) for r in (kept, other)]
        one, two = loader.load(pair)
        if one.tobytes() != two.tobytes():
            return True
        if box == tuple((0, size) for size in shape):
            return False
    return False


def _sample(recipe: Recipe, part: int) -> Box:
    """One of some boxes that are spread over a tensor, or all of a small one."""
    dtype, shape = recipe.landed, recipe.transform.shape
    size = dtype.size_of(shape) or 0
    most = _SAMPLE * dtype.elements // dtype.nbytes
    if size <= _WHOLE or dtype.elements > 1:
        most = math.prod(shape)
    box: list[tuple[int, int]] = []
    for at, length in enumerate(shape):
        taken = min(length, max(1, most // max(1, math.prod(shape[at + 1 :]))))
        start = (length - taken) * part // (_SAMPLES - 1)
        box.append((start, start + taken))
    return tuple(box)
