"""`shard=(rank, size)`: plain local shards, one dim of a tensor cut into chunks."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from types import ModuleType
from typing import Any

from mfload import errors, frameworks
from mfload.dtypes import DType
from mfload.frameworks.several import MeshAdapter
from mfload.mesh import base, specs
from mfload.mesh.base import MeshArguments, Share, TensorShares, Whole
from mfload.options import LoadOptions
from mfload.planning.request import Request

Shape = tuple[int, ...]
_EXPECTED = "the number of a dim, or None"


class ShardBackend:
    """The chunks of `size` processes, of which this one takes those of `rank` (see `MeshBackend`).

    Shardings are dims: numbers, or None for whole tensors. Each process reads its own chunks, and
    no process group is needed, unless the exchange is asked for: then the framework's own group
    takes part, which must have the same rank and size. A rank that does not ask for it tells the
    others nothing, so these wait for it for `arrival` seconds at most, or until their timeout.
    """

    arrival = base.ARRIVAL

    def __init__(
        self,
        framework: str | ModuleType,
        device: object,
        shard: tuple[int, int],
        *,
        exchange: bool,
    ) -> None:
        self._framework, self._device = frameworks.resolve(framework), device
        self._shard = shard
        self._group: base.MeshBackend | None = None
        self._adapter: MeshAdapter | None = None
        if not exchange:
            self.rank, self._size = _checked(shard)
            return
        if self._framework not in frameworks.ON_MESHES:
            raise errors.UsageError(
                f"exchange='once' needs a process group, and {self._framework} has none",
                expected="another framework, or exchange='never'",
            )
        # What `shard` is to be: if it is not, `resolve` tells all processes.
        self._group = base.backend(self._framework)
        self.rank, self._size = self._group.group()

    def group(self) -> tuple[int, int]:
        """The rank of this process, and how many there are."""
        return self.rank, self._size

    def processes(self, asked: MeshArguments) -> tuple[int, ...]:
        """The process itself, or all that exchange."""
        return self._ranks()

    def _ranks(self) -> tuple[int, ...]:
        return (self.rank,) if self._group is None else tuple(range(self._size))

    def resolve(self, requests: Sequence[Request], asked: MeshArguments) -> list[int | None]:
        """The dim that is cut of each whole tensor, counted from the first; None for none."""
        mesh, shardings, *_ = asked
        if mesh is not None or shardings is None:
            message = "shard=(rank, size) is for dims"
            expected = "shardings=[(regex, dim)] and no mesh="
            raise errors.UsageError(message, expected=expected, found=f"{mesh=}, {shardings=}")
        if self._group is not None and _checked(self._shard) != self.group():
            raise errors.UsageError(
                f"exchange='once' needs a process group of {self._framework} with the same rank "
                "and size as shard=",
                expected=f"shard={self.group()}, or exchange='never'",
                found=f"shard={self._shard}",
            )
        rows = specs.rows(requests)
        dims = specs.resolve(rows, asked, _dim, single=_is_dim, expected=_EXPECTED)
        for (info, dtype, *_), dim in zip(requests, dims, strict=True):
            if info.dtype.elements > 1:  # Refused by all, also by one whose own chunk would do.
                every = self._chunks(dim, info.shape, range(self._size))
                base.requests([TensorShares(info, dtype, False, every)])
        return dims

    def shares(self, sharding: int | None, shape: Shape) -> tuple[Share, ...]:
        """The chunk of each process that takes part."""
        return self._chunks(sharding, shape, self._ranks())

    def _chunks(self, dim: int | None, shape: Shape, ranks: Iterable[int]) -> tuple[Share, ...]:
        made: list[Share] = []
        for rank in ranks:
            box = [(0, length) for length in shape]
            if dim is not None:
                box[dim] = specs.chunk(shape[dim], self._size, rank)
            made.append(Share(rank, 0, tuple(box)))
        return tuple(made)

    def separate(self, sharding: Any, dtype: DType, options: LoadOptions) -> bool:
        """A process has one device, so nothing is shared."""
        return False

    def adapter(self, *, late: bool = False) -> MeshAdapter:
        """The adapter of the one device."""
        if self._adapter is None:
            self._adapter = MeshAdapter([frameworks.get(self._framework, self._device)])
        return self._adapter

    def assemble(self, wholes: Iterable[Whole]) -> list[Any]:
        """The chunks as they are."""
        return [parts[0] for _, _, _, parts in wholes]

    def platform(self) -> str:
        """The kind of this process's device."""
        return "cpu" if self.adapter().on_host else "accelerator"

    def store(self) -> base.Store | None:
        """That of the process group."""
        return None if self._group is None else self._group.store()

    @property
    def transport(self) -> base.Transport:
        """That of the process group."""
        return getattr(self._group, "transport", base.GLOO)

    def link(self, ranks: Sequence[int], width: int, deadline: Any) -> base.Link:
        """That of the process group."""
        assert self._group is not None
        return self._group.link(ranks, width, deadline)


def _checked(shard: Any) -> tuple[int, int]:
    try:
        rank, size = shard
        if _is_dim(rank) and _is_dim(size) and 0 <= rank < size:
            return operator.index(rank), operator.index(size)
    except (TypeError, ValueError):
        pass
    expected = "(rank, size), with rank from 0 to size - 1"
    raise errors.UsageError("shard is invalid", expected=expected, found=repr(shard))


def _is_dim(spec: Any) -> bool:
    try:
        operator.index(spec)
    except TypeError:  # A float, a text, an array of several numbers.
        return False
    return not isinstance(spec, bool)


def _dim(row: specs.Row, spec: Any) -> int | None:
    name, shape = row.name, row.shape
    if spec is None:
        return None
    if not _is_dim(spec):
        expected = f"{_EXPECTED} for {name!r}; placements and specs need a mesh"
        raise errors.UsageError("not a dim", expected=expected, found=repr(spec))
    if not -len(shape) <= spec < len(shape):
        expected = f"a dim from {-len(shape)} to {len(shape) - 1}" if shape else "None"
        raise errors.ShardingError(
            f"the tensor has no dim {spec}",
            tensor=name,
            expected=expected,
            found=f"shape {list(shape)}",
        )
    return operator.index(spec) % len(shape)
