"""Leaves that stay NumPy's: read on the host into their places, or arranged there.

Each process of a load reads its own, since nothing of them is sharded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter
from typing import Any

import numpy as np

from mfload.frameworks.numpy_adapter import NumpyAdapter
from mfload.frameworks.several import InPlaceAdapter
from mfload.index import Index
from mfload.loading.allocate import check_host
from mfload.loading.session import Loader
from mfload.mesh import base
from mfload.options import LoadOptions
from mfload.planning.extents import c_strides
from mfload.planning.memory import Ledger, grouped
from mfload.planning.request import Request, stored_bytes
from mfload.planning.slicing import boxed
from mfload.report import Report
from mfload.sources.base import Source
from mfload.trees import batches
from mfload.trees.batches import LeafPart
from mfload.trees.landing import Landing, Target
from mfload.trees.recipe import Recipe, new_row

_NEW = (-1,)  # Names no memory that is there.


class NumpyLeaves:
    """Makes a NumPy array of each recipe, which can be written to."""

    def __init__(
        self,
        index: Index,
        sources: Sequence[Source],
        recipes: Sequence[Recipe],
        options: LoadOptions,
    ) -> None:
        self._recipes, self._memory = recipes, dict[int, Any]()
        self._landing = Landing(self._memory)
        self._direct: list[tuple[int, Request]] = []
        self._arranged: list[tuple[int, LeafPart]] = []
        for number, recipe in enumerate(recipes):
            shape = recipe.transform.shape
            if recipe.transform.plain:
                row = recipe.tensors[0], recipe.landed, None, recipe.checked, _NEW
                self._direct.append((number, new_row(Request, row)))
            elif not self._landing.add(number, recipe, _whole(shape), c_strides(shape, 1)):
                (part,) = batches.parts(recipe, [base.Share(0, 0, _whole(shape))])
                self._arranged.append((number, part))
        ledger = Ledger(options)
        slots, self._limit = ledger.split() if self._arranged else (ledger.most, 0)
        if self._arranged:
            most = max((part for _, part in self._arranged), key=attrgetter("nbytes"))
            what = "what the tensor is made of exceeds the overhead"
            ledger.check(ledger.least(most.nbytes), what, most.recipe.name)
        options = options.replace(allocator="mfload", max_device_overhead=None)
        if ledger.given is not None:
            options = options.replace(max_host_overhead=slots)
        adapter = NumpyAdapter()
        if self._landing.requests:
            adapter = InPlaceAdapter(adapter, self._memory)
        self._loader = Loader(index, sources, adapter, options)

    @property
    def stored_bytes(self) -> int:
        """Bytes of the files that they are made of."""
        every = [request for _, request in self._direct] + self._landing.requests
        return stored_bytes([*every, *_requests(part for _, part in self._arranged)])

    def run(self, report: Report, advance: Callable[[int], None] | None) -> list[Any]:
        """The arrays, in the order of the recipes."""
        made: dict[int, Any] = {}
        recipes = {number: self._recipes[number] for number in self._landing}
        check_host(sum(_nbytes(recipe) for recipe in recipes.values()))
        for number, recipe in recipes.items():
            made[number] = array = np.empty(recipe.transform.shape, recipe.dtype.numpy)
            self._landing.give(number, Target(array, array.ctypes.data, ()))
        numbers = [number for number, _ in self._direct]
        requests = [request for _, request in self._direct]
        landed = self._load([*requests, *self._landing.requests], report, advance)
        for number, array in zip(numbers, landed, strict=False):
            made[number] = np.require(array, requirements="W")  # No map of a file.
        for batch in grouped(self._arranged, self._limit, lambda each: each[1].nbytes):
            landed = self._load([*_requests(part for _, part in batch)], report, advance)
            each = iter(landed)
            for number, part in batch:
                arrays = [next(each) for _ in part.sources]
                made[number] = np.array(part.transform.evaluate(arrays, np), order="C")
        return [made[number] for number in range(len(made))]

    def _load(
        self, requests: Sequence[Request], report: Report, advance: Callable[[int], None] | None
    ) -> list[Any]:
        one = Report()
        landed = self._loader.load(requests, report=one, advance=advance) if requests else []
        report.add(one)
        return landed


def _whole(shape: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    return tuple((0, length) for length in shape)


def _nbytes(recipe: Recipe) -> int:
    return recipe.dtype.size_of(recipe.transform.shape) or 0


def _requests(parts: Iterable[LeafPart]) -> Iterator[Request]:
    for part in parts:
        recipe = part.recipe
        for info, box in part.sources:
            yield Request(info, recipe.landed, boxed(info, box), recipe.checked, _NEW)
