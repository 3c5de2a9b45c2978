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
        loader = Loader(index, sources, self.adapter(), options)
        self._filling = Filling(self, None, None, loader, atomic=False)
        self._filling.plan(dict(enumerate(recipes)))

    @property
    def stored_bytes(self) -> int:
        """Bytes of the files that they are made of."""
        return self._filling.stored_bytes

    def run(self, report: Report, advance: Callable[[int], None] | None) -> list[Any]:
        """The arrays, in the order of the recipes."""
        self._filling.run(report, advance)
        made = (self._filling.made[number].array for number in range(len(self.leaves)))
        return [np.require(array, requirements="W") for array in made]  # No map of a file.

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
