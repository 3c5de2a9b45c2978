"""Leaves that stay NumPy's: read on the host, and arranged there.

Each process of a load reads its own, since nothing of them is sharded.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from mfload import errors
from mfload.frameworks.numpy_adapter import NumpyAdapter
from mfload.index import Index
from mfload.loading.session import Loader
from mfload.mesh import base
from mfload.options import OVERHEAD, LoadOptions
from mfload.planning.memory import grouped
from mfload.planning.request import Request, stored_bytes
from mfload.planning.slicing import boxed, transposed
from mfload.report import Report
from mfload.sources.base import Source
from mfload.trees import batches
from mfload.trees.batches import LeafPart
from mfload.trees.recipe import Recipe


class NumpyLeaves:
    """Makes a NumPy array of each recipe, which can be written to."""

    def __init__(
        self,
        index: Index,
        sources: Sequence[Source],
        recipes: Sequence[Recipe],
        options: LoadOptions,
    ) -> None:
        every = [(n, _whole(recipe)) for n, recipe in enumerate(recipes)]
        self._direct = [(n, part) for n, part in every if _lands(part)]
        self._arranged = [(n, part) for n, part in every if not _lands(part)]
        given = options.max_host_overhead
        limit = OVERHEAD if given is None else given
        waits, slots = max((part.nbytes for _, part in self._arranged), default=0), limit
        if self._arranged:
            slots = limit // batches.SLOTS  # The rest is for what waits to be arranged.
        if given is not None and waits > limit - slots:
            most = max(self._arranged, key=lambda each: each[1].nbytes)[1]
            raise errors.MemoryLimitError(
                "what the tensor is made of exceeds the overhead",
                tensor=most.recipe.name,
                expected=f"{errors.amount(batches.least_overhead(waits), given)} or more",
                found=errors.amount(given, given),
            )
        self._limit = limit - slots
        options = options.replace(allocator="mfload", max_device_overhead=None)
        if given is not None:
            options = options.replace(max_host_overhead=slots)
        self._loader = Loader(index, sources, NumpyAdapter(), options)

    @property
    def stored_bytes(self) -> int:
        """Bytes of the files that they are made of."""
        every = [part for _, part in (*self._direct, *self._arranged)]
        return stored_bytes([request for part in every for request in _requests(part)])

    def run(self, report: Report, advance: Callable[[int], None] | None) -> list[Any]:
        """The arrays, in the order of the recipes."""
        made: dict[int, Any] = {}
        # All that lands as it is wanted at once, and what waits in groups.
        groups = grouped(self._arranged, self._limit, lambda each: each[1].nbytes)
        for batch in filter(None, itertools.chain([self._direct], groups)):
            one, wanted = Report(), [request for _, part in batch for request in _requests(part)]
            landed = iter(self._loader.load(wanted, report=one, advance=advance))
            for number, part in batch:
                arrays = [next(landed) for _ in part.sources]
                made[number] = _own(part, arrays)
            report.add(one)
        return [made[number] for number in range(len(made))]


def _whole(recipe: Recipe) -> LeafPart:
    """All of a leaf as one part."""
    transform = recipe.transform
    box = tuple((0, length) for length in transform.shape)
    if transform.plain or 0 in transform.shape:
        sources = ((recipe.tensors[0], box),) if transform.plain else ()
        return LeafPart(recipe, box, (), sources, transform, 0)
    (part,) = batches.parts(recipe, [base.Share(0, 0, box)])
    return part


def _lands(part: LeafPart) -> bool:
    """Whether a leaf is one box of a tensor, its dims in some order."""
    if part.transform.order is None or len(part.sources) != 1:
        return False
    return part.transform.plain or part.sources[0][0].dtype.elements == 1


def _requests(part: LeafPart) -> Iterator[Request]:
    recipe = part.recipe
    for info, box in part.sources:
        selection, order = boxed(info, box), part.transform.order
        if order is not None and order != tuple(range(len(order))) and _lands(part):
            selection = transposed(box, order)
        yield Request(info, recipe.landed, selection, recipe.checked, ())


def _own(part: LeafPart, arrays: Sequence[Any]) -> Any:
    """A leaf that can be written to, in C order."""
    if _lands(part):
        return np.require(arrays[0], requirements="W").reshape(part.shape)  # No map of a file.
    if not arrays:
        return np.empty(part.shape, part.recipe.dtype.numpy)
    return np.array(part.transform.evaluate(arrays, np), order="C")
