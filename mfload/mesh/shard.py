"""`shard=(rank, size)`: plain local shards, one dim of a tensor cut into chunks."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from types import ModuleType
from typing import Any

from mfload import errors, frameworks
from mfload.frameworks.several import MeshAdapter
from mfload.index import Box
from mfload.mesh import base, specs
from mfload.mesh.base import DeviceShare, MeshArguments, Whole
from mfload.planning import parts
from mfload.planning.request import Request, WholeTensors, names

Shape = tuple[int, ...]
_EXPECTED = "the number of a dim, or None"


def cut(
    whole: Sequence[Request],
    shard: tuple[int, int],
    asked: MeshArguments,
) -> Sequence[Request]:
    """Requests for one rank's chunk of each whole tensor; `shard` is that of `load`."""
    rank, size = _checked(shard)
    _refuse(asked)
    infos = whole.columns if isinstance(whole, WholeTensors) else [each.info for each in whole]
    rows = names(whole)
    dims = specs.given(rows, asked, infos, single=_is_dim, expected=_EXPECTED)
    if asked.unmatched == "error":
        missed = [name for name, dim in zip(rows, dims, strict=True) if dim is specs.NOTHING]
        specs.refuse(missed, (), len(rows))
    # Tensors that are alike are cut alike. `dims` keeps what was given, so the ids stay its own.
    kinds: dict[Any, int] = {}
    alike = zip(parts.kinds(whole), map(id, dims), strict=True)
    numbers = [kinds.setdefault(kind, len(kinds)) for kind in alike]
    made: list[Any] = [None] * len(kinds)
    misfits: list[errors.ShardingError] = []
    for n, number in enumerate(numbers):
        if made[number] is None:
            try:
                made[number] = _chunk(whole[n], dims[n], rank, size)
            except errors.ShardingError as error:
                misfits.append(error)
    specs.refuse((), misfits, len(rows))
    return parts.take(whole, made, numbers)


def _chunk(request: Request, spec: Any, rank: int, size: int) -> parts.TensorPart:
    """The chunk of a rank."""
    info = request.info
    row = specs.rows([request])[0]
    dim = _dim(row, None if spec is specs.NOTHING else spec)
    # What splits elements that share a byte is refused by all, also by one whose own would do.
    ranks = range(size) if info.dtype.elements > 1 else (rank,)
    cuts = {each: base.selected(info, _box(info.shape, dim, each, size)) for each in ranks}
    return parts.part(request, cuts[rank])


def _box(shape: Shape, dim: int | None, rank: int, size: int) -> Box:
    box = [(0, length) for length in shape]
    if dim is not None:
        box[dim] = specs.chunk(shape[dim], size, rank)
    return tuple(box)


class ShardBackend(base.Backend):
    """The chunks of the processes of a group, which read them for each other (see `MeshBackend`).

    Shardings are dims: numbers, or None for whole tensors. The framework's own process group must
    have the rank and size of `shard`. A rank that does not ask for the exchange tells the others
    nothing, so these wait for it for `arrival` seconds at most, or until their timeout.
    """

    arrival = base.ARRIVAL

    def __init__(self, framework: str | ModuleType, device: object, shard: tuple[int, int]) -> None:
        self._framework, self._device = frameworks.resolve(framework), device
        self._shard = shard
        self._adapter: MeshAdapter | None = None
        if self._framework not in frameworks.ON_MESHES:
            raise errors.UsageError(
                f"exchange='once' needs a process group, and {self._framework} has none",
                expected="another framework, or exchange='never'",
            )
        # What `shard` is to be: if it is not, `resolve` tells all processes.
        self._group = base.backend(self._framework)
        super().__init__()
        _, self._size = self.group()

    def group(self) -> tuple[int, int]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The rank of this process, and how many there are."""
        return self._group.group()

    def processes(self, asked: MeshArguments) -> tuple[int, ...]:
        """All that exchange."""
        return tuple(range(self._size))

    def resolve(self, requests: Sequence[Request], asked: MeshArguments) -> list[int | None]:
        """The dim that is cut of each whole tensor, counted from the first; None for none."""
        _refuse(asked)
        if _checked(self._shard) != self.group():
            raise errors.UsageError(
                f"exchange='once' needs a process group of {self._framework} with the same rank "
                "and size as shard=",
                expected=f"shard={self.group()}, or exchange='never'",
                found=f"shard={self._shard}",
            )
        rows = specs.rows(requests)
        return specs.resolve(rows, asked, _dim, single=_is_dim, expected=_EXPECTED)

    def divided(self, sharding: int | None, shape: Shape) -> list[DeviceShare]:
        """The chunk of each process."""
        return [DeviceShare(n, 0, _box(shape, sharding, n, self._size)) for n in range(self._size)]

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

    def store(self) -> base.KeyValueStore | None:
        """That of the process group."""
        return self._group.store()

    @property
    def transport(self) -> base.ProcessTransport:
        """That of the process group."""
        return getattr(self._group, "transport", base.GLOO)

    def link(self, ranks: Sequence[int], width: int, deadline: Any) -> base.Link:
        """That of the process group."""
        return self._group.link(ranks, width, deadline)


def _refuse(asked: MeshArguments) -> None:
    mesh, shardings, *_ = asked
    if mesh is not None or shardings is None:
        message = "shard=(rank, size) is for dims"
        expected = "shardings=[(regex, dim)] and no mesh="
        raise errors.UsageError(message, expected=expected, found=f"{mesh=}, {shardings=}")


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
