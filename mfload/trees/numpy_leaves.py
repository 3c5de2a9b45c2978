"""Leaves that stay NumPy's: a module whose weights are new arrays, which can be written to.

Each process of a load reads its own, since nothing of them is sharded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mfload.dtypes import DType
from mfload.frameworks.numpy_adapter import NumpyAdapter
from mfload.index import Index
from mfload.loading.session import Loader
from mfload.options import LoadOptions
from mfload.planning.request import Request, compact, stored_bytes
from mfload.report import Report
from mfload.sources.base import Source
from mfload.trees.filling import Filling
from mfload.trees.landing import Target
from mfload.trees.modules import Module
from mfload.trees.recipe import Leaf, Recipe


class NumpyLeaves(Module):
    """Makes a NumPy array of each recipe (see `modules.Module`)."""

    framework = "numpy"

    def __init__(
        self,
        index: Index,
        sources: Sequence[Source],
        recipes: Sequence[Recipe],
        options: LoadOptions,
    ) -> None:
        self._arrays: dict[int, Any] = {}
        self.leaves = [
            Leaf((recipe.name,), recipe.transform.shape, recipe.dtype, abstract=True)
            for recipe in recipes
        ]
        options = options.replace(allocator="mfload", max_device_overhead=None)
        self._loader = Loader(index, sources, self.adapter(), options)
        # What is stored as it is wanted is a plain load, which costs many small ones less.
        self._plain = [n for n, each in enumerate(recipes) if each.transform.plain]
        rows = map(recipes.__getitem__, self._plain)
        self._requests = compact(
            [Request(each.tensors[0], each.landed, None, each.checked) for each in rows]
        )
        self._filling = Filling(self, None, None, self._loader, atomic=False)
        self._filling.plan({n: r for n, r in enumerate(recipes) if not r.transform.plain})

    @property
    def stored_bytes(self) -> int:
        """Bytes of the files that they are made of."""
        return self._filling.stored_bytes + stored_bytes(self._requests)

    def run(self, report: Report, advance: Callable[[int], None] | None) -> list[Any]:
        """The arrays, in the order of the recipes."""
        one, made = Report(), list[Any]()
        if self._requests:
            made = self._loader.load(self._requests, report=one, advance=advance)
        made = [np.require(array, requirements="W") for array in made]  # No map of a file.
        report.add(one)
        self._filling.run(report, advance)
        arrays = dict(zip(self._plain, made, strict=True))
        arrays |= {number: new.array for number, new in self._filling.made.items()}
        return [arrays[number] for number in range(len(self.leaves))]

    def adapter(self) -> NumpyAdapter:
        return NumpyAdapter()

    def target(self, number: int) -> Target | None:
        array = self._arrays[number]
        return Target(array, array.ctypes.data, ())

    def empty(self, number: int, shape: tuple[int, ...], dtype: DType) -> Any:
        self._arrays[number] = np.empty(shape, dtype.numpy)
        return self._arrays[number]

    def put(self, number: int, start: tuple[int, ...], array: Any) -> None:
        spans = zip(start, array.shape, strict=True)
        self._arrays[number][tuple(slice(at, at + n) for at, n in spans)] = array
