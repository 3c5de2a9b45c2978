"""A whole mesh backend of its own: grids of NumPy arrays in one process."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from mfload import errors
from mfload.dtypes import DType
from mfload.frameworks.base import Adapter, Lent
from mfload.frameworks.numpy_adapter import NumpyAdapter
from mfload.index import Box
from mfload.mesh.base import DeviceShare, KeyValueStore, MeshArguments, Whole
from mfload.mesh.link import Link
from mfload.options import LoadOptions
from mfload.planning.request import Request
from mfload.planning.selection import Rules
from mfload.runtime import Deadline


@dataclass(frozen=True)
class GridMesh:
    """Devices in a grid, by the sizes of its axes."""

    axes: tuple[tuple[str, int], ...]

    @property
    def places(self) -> list[dict[str, int]]:
        """Where each device is along each axis."""
        names = [name for name, _ in self.axes]
        every = itertools.product(*(range(size) for _, size in self.axes))
        return [dict(zip(names, place, strict=True)) for place in every]


class GridSharding(NamedTuple):
    """A mesh, and for each dim the axis that cuts it."""

    mesh: GridMesh
    cuts: tuple[str | None, ...]


class Grid(NamedTuple):
    """A sharded array: the array of each device by its number, or what it will be, without any."""

    shape: tuple[int, ...]
    sharding: GridSharding | None
    parts: dict[int, Any]


class GridAdapter(NumpyAdapter):
    """Arrays of NumPy; devices that want the same part share it."""

    def wrap(self, views: Sequence[Any]) -> list[Any]:
        made = zip(super().wrap(views), views, strict=True)
        return [(array,) * len(view.devices) for array, view in made]

    def lend(self, requests: Sequence[Request]) -> list[Lent]:
        return [Lent((each.array,), each.memory) for each in super().lend(requests)]


class Echo(Link):
    """The link of a process that is alone."""

    def __init__(self, width: int, deadline: Deadline) -> None:
        super().__init__("grid", deadline)
        self._width = width

    def buffer(self) -> Any:
        return np.zeros((1, self._width), np.uint8)

    def exchange(self, rows: Any) -> Any:
        return rows.copy()


class GridBackend:
    """See `MeshBackend`."""

    rank = 0

    def group(self) -> tuple[int, int]:
        return 0, 1

    def processes(self, asked: MeshArguments) -> tuple[int, ...]:
        return (0,)

    def resolve(self, requests: Sequence[Request], asked: MeshArguments) -> list[Any]:
        mesh, shardings, unmatched, _ = asked
        rules, sizes = Rules("shardings=", shardings), dict(mesh.axes)
        made: list[Any] = []
        for request in requests:
            info, cuts = request.info, rules.find(request.info.name)
            if cuts is None and unmatched == "error":
                raise errors.ShardingError("no sharding for a tensor", tensor=info.name)
            cuts = () if cuts is None else cuts
            parts = [1 if axis is None else sizes[axis] for axis in cuts]
            if len(cuts) > len(info.shape) or any(
                n % k for n, k in zip(info.shape, parts, strict=False)
            ):
                raise errors.ShardingError("the axes do not divide the shape", tensor=info.name)
            made.append(GridSharding(mesh, cuts))
        return made

    def shares(self, sharding: GridSharding, shape: tuple[int, ...]) -> tuple[DeviceShare, ...]:
        sizes = dict(sharding.mesh.axes)
        made: list[DeviceShare] = []
        for number, place in enumerate(sharding.mesh.places):
            box: list[tuple[int, int]] = []
            for length, axis in itertools.zip_longest(shape, sharding.cuts):
                step = length if axis is None else length // sizes[axis]
                start = 0 if axis is None else place[axis] * step
                box.append((start, start + step))
            made.append(DeviceShare(0, number, tuple(box)))
        return tuple(made)

    def separate(self, sharding: Any, dtype: DType, options: LoadOptions) -> bool:
        return options.allocator == "framework"

    def adapter(self, *, late: bool = False) -> Adapter:
        return GridAdapter()

    def assemble(self, wholes: Iterable[Whole]) -> list[Any]:
        return [Grid(shape, sharding, dict(parts)) for shape, _, sharding, parts in wholes]

    def abstract(self, requests: Sequence[Request], shardings: Sequence[Any]) -> dict[str, Any]:
        pairs = zip(requests, shardings, strict=True)
        return {r.info.name: Grid(r.info.shape, sharding, {}) for r, sharding in pairs}

    def platform(self) -> str:
        return "cpu"

    def store(self) -> KeyValueStore | None:
        return None

    def link(self, ranks: Sequence[int], width: int, deadline: Deadline) -> Link:
        return Echo(width, deadline)


def boxes(array: Grid) -> list[tuple[Box, Any]]:
    """The box and the array of each device."""
    assert array.sharding is not None
    shares = GridBackend().shares(array.sharding, array.shape)
    assert math.prod(size for _, size in array.sharding.mesh.axes) == len(array.parts)
    return [(share.box, array.parts[share.device]) for share in shares]
