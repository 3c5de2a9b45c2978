"""The shardings that are measured, and what touching their shards must yield; imports no JAX.

Each is written as its users write it: a few regexes, and what matches none is replicated.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from benchmarks.checkpoint import PAGE

DEVICES = 8
Spec = tuple[str | None, ...]
"""The mesh axis that cuts each dim, None where it is whole: a `PartitionSpec` in plain words."""
_MATRIX = r"(proj|embed_tokens|lm_head)\.weight$"
_BACK = r"(o_proj|down_proj|embed_tokens|lm_head)\.weight$"


@dataclass(frozen=True, slots=True)
class Layout:
    """A mesh of eight devices, and a sharding over it.

    Args:
        label: What it is called in tables.
        shape: Of the mesh.
        axes: Its axes' names.
        rules: Regexes and specs; the first match wins.
    """

    label: str
    shape: tuple[int, ...]
    axes: tuple[str, ...]
    rules: tuple[tuple[str, Spec], ...]

    def spec(self, name: str) -> Spec:
        """How a tensor is sharded."""
        return next((spec for regex, spec in self.rules if re.search(regex, name)), ())

    def cuts(self, name: str, shape: Sequence[int]) -> tuple[int, ...]:
        """Into how many parts each dim of a tensor is cut."""
        sizes = dict(zip(self.axes, self.shape, strict=True))
        spec = [1 if axis is None else sizes[axis] for axis in self.spec(name)]
        return (*spec, *[1] * (len(shape) - len(spec)))


LAYOUTS = {
    "rows": Layout("rows", (8,), ("tp",), ((r"weight$", ("tp",)),)),
    "columns": Layout("columns", (8,), ("tp",), ((_MATRIX, (None, "tp")),)),
    "grid": Layout(
        "2-D mesh (2 x 4)",
        (2, 4),
        ("data", "model"),
        # What leads back into the residual stream is cut the other way round, as models do.
        ((_BACK, ("data", "model")), (r"proj\.weight$", ("model", "data"))),
    ),
    "replicated": Layout("replicated", (8,), ("tp",), ()),
}
"""By the names of their cases."""


class Sums(NamedTuple):
    """Sums of bytes 0, 4096, … of shards, each counted from its own first byte.

    Attributes:
        cut: Of tensors that are cut, each shard once.
        whole: Of those that are replicated, counted once.
    """

    cut: int
    whole: int


def _shard_sum(array: np.ndarray[Any, Any], cuts: Sequence[int]) -> int:
    total = 0
    for place in product(*map(range, cuts)):
        steps = [size // parts for size, parts in zip(array.shape, cuts, strict=True)]
        box = tuple(slice(at * n, at * n + n) for at, n in zip(place, steps, strict=True))
        shard = np.ascontiguousarray(array[box]).reshape(-1).view(np.uint8)
        total += int(shard[::PAGE].sum(dtype=np.uint64))
    return total


def sums(paths: Sequence[str]) -> dict[str, Sums]:
    """What touching the shards of a checkpoint yields, for each layout.

    Args:
        paths: Its files.
    """
    import ml_dtypes  # NumPy knows bfloat16 only after this
    from safetensors import safe_open

    del ml_dtypes
    found = {case: [0, 0] for case in LAYOUTS}
    for path in paths:
        with safe_open(path, framework="numpy") as file:
            for name in file.keys():  # noqa: SIM118 (it is no dict)
                array = file.get_tensor(name)
                for case, layout in LAYOUTS.items():
                    cuts = layout.cuts(name, array.shape)
                    found[case][max(cuts, default=1) == 1] += _shard_sum(array, cuts)
    return {case: Sums(*each) for case, each in found.items()}
