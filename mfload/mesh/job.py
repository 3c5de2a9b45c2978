"""What there is to load onto which devices, and how what was fetched becomes sharded arrays."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from mfload import errors, frameworks
from mfload.index import Index
from mfload.loading.session import Loader
from mfload.mesh import fetching
from mfload.mesh.shares import Wanted, requests
from mfload.options import LoadOptions
from mfload.planning import planner
from mfload.planning.requests import Request
from mfload.sources.local import LocalFile


class MeshArguments(NamedTuple):
    """What `mfload.load` was asked for about devices.

    Attributes:
        mesh: The user's mesh, or None.
        shardings: What splits each tensor.
        unmatched: What becomes of tensors that no rule matches.
        exchange: Whether processes read for each other.
    """

    mesh: Any
    shardings: Any
    unmatched: str
    exchange: str


@dataclass(frozen=True, slots=True)
class Chosen:
    """What there is to load.

    Attributes:
        index: The checkpoint's table.
        sources: Its files.
        requests: The whole of each tensor that is wanted.
        options: How.
    """

    index: Index
    sources: Sequence[LocalFile]
    requests: Sequence[Request]
    options: LoadOptions


class Job:
    """What each process needs of a checkpoint, and how it becomes arrays here.

    Args:
        chosen: What there is to load.
        arguments: Onto which devices.

    Attributes:
        ranks: The processes that take part.
        rank: This one.
        requests: What each of them needs, by its number.
        loader: Loads what this process needs.
        platform: JAX's name of what this process's devices are.
        notes: What was decided without being asked for.

    Raises:
        UsageError: An argument makes no sense.
        ShardingError: A sharding does not fit its tensor.
    """

    def __init__(self, chosen: Chosen, arguments: MeshArguments) -> None:
        self._jax = frameworks.module("jax", "mesh")
        jax_sharding = frameworks.module("jax", "sharding")
        self.rank: int = jax_sharding.rank()
        ranks = jax_sharding.processes(arguments.mesh, arguments.shardings)
        self.ranks: tuple[int, ...] = ranks or (self.rank,)
        notes: list[str] = []
        self._wanted = chosen.requests
        self._shardings = resolve(chosen.requests, arguments, notes, chosen.index.tensors)
        self.notes = tuple(notes)
        # Whole rows are read over rather than skipped, where a few are not wanted.
        self._settings = replace(chosen.options, merge_gap=planner.MESH_GAP)
        self._spots = jax_sharding.Spots()
        wanted = [self._share(*each) for each in zip(self._wanted, self._shardings, strict=True)]
        self.requests = {rank: [] for rank in (*self.ranks, self.rank)} | requests(wanted)
        spots = self._spots.of(self.rank)
        self.platform: str = spots[0].device.platform if spots else "cpu"
        adapter = self._jax.JaxMeshAdapter(spots)
        self.loader = Loader(chosen.index, chosen.sources, adapter, self._settings)

    def _share(self, request: Request, sharding: Any) -> Wanted:
        shares = self._spots.shares(sharding, request.info.shape)
        lent = self._settings.allocator == "framework" or not self._spots.plain(sharding)
        apart = lent and request.dtype.name in self._jax.JaxMeshAdapter.lendable
        return Wanted(request.info, request.dtype, request.checked, shares, apart)

    def links(self) -> fetching.Links | None:
        """How bytes get from one process to another; None for one process."""
        if len(self.ranks) < 2:
            return None
        processes = frameworks.module("jax", "processes")
        return processes.Links(self.ranks, self.platform, self._settings.deadline)

    @property
    def stored_bytes(self) -> int:
        """Bytes of the files that this process wants."""
        seen = {
            (request.info.name, request.selection): request for request in self.requests[self.rank]
        }
        return sum(request._replace(dtype=request.info.dtype).nbytes for request in seen.values())

    @property
    def whole(self) -> bool:
        """Whether this process, alone, wants all of every tensor."""
        every = sum(request.info.nbytes for request in self._wanted)
        return len(self.ranks) == 1 and self.stored_bytes == every

    def lines(self) -> list[str]:
        """What is wanted and how, the same where processes want the same."""
        how = self._settings
        lines = [f"allocator={how.allocator!r}, max_host_overhead={how.max_host_overhead}"]
        for wanted, sharding in zip(self._wanted, self._shardings, strict=True):
            shares = self._spots.shares(sharding, wanted.info.shape)
            digest = hashlib.sha256(repr(shares).encode()).hexdigest()[:16]
            checked = " checked" if wanted.checked else ""
            lines.append(f"{wanted.info.name}: {wanted.dtype}{checked} {sharding} {digest}")
        return lines

    def assemble(self, fetched: list[tuple[Any, ...]]) -> dict[str, Any]:
        """The sharded arrays, by name.

        Args:
            fetched: For each need of this process an array for each of its devices; emptied.
        """
        spots = self._spots.of(self.rank)
        parts: dict[str, dict[Any, Any]] = {request.info.name: {} for request in self._wanted}
        for request, arrays in zip(self.requests[self.rank], fetched, strict=True):
            held = parts[request.info.name]
            for number, array in zip(request.devices, arrays, strict=True):
                held[spots[number].device] = array
        fetched.clear()
        made: dict[str, Any] = {}
        for request, sharding in zip(self._wanted, self._shardings, strict=True):
            shape, dtype = self._jax.arrives(request.dtype, request.info.shape)
            name = request.info.name
            made[name] = self._jax.assemble(shape, sharding, parts.pop(name), dtype)
        return made


def resolve(
    requests: Sequence[Request], arguments: MeshArguments, notes: list[str], known: Iterable[str]
) -> list[Any]:
    """A sharding for each need, that fits the tensor and the array it becomes.

    Args:
        requests: The whole of each tensor.
        arguments: What was asked for.
        notes: Takes what a user should hear of that is no error.
        known: All names of the checkpoint, which rules may be for.

    Raises:
        UsageError: These are no shardings, or a mesh is missing.
        ShardingError: One does not fit its tensor.
    """
    jax_mesh = frameworks.module("jax", "mesh")
    jax_sharding = frameworks.module("jax", "sharding")
    rows = [(request.info.name, request.info.shape) for request in requests]
    infos = [request.info for request in requests]
    mesh, shardings, unmatched, _ = arguments
    made = jax_sharding.resolve(
        rows, mesh, shardings, unmatched, infos=infos, notes=notes, known=known
    )
    for request, sharding in zip(requests, made, strict=True):
        if request.dtype.elements > 1:
            shape, _ = jax_mesh.arrives(request.dtype, request.info.shape)
            _check_bytes(jax_sharding, request, shape, sharding)
    return made


def _check_bytes(
    jax_sharding: Any, request: Request, shape: tuple[int, ...], sharding: Any
) -> None:
    """Some arrive as bytes: their dims need not be those of the tensor."""
    try:
        jax_sharding.check(request.info.name, shape, sharding)
    except errors.ShardingError as error:
        raise errors.ShardingError(
            f"elements of {request.dtype} that share a byte can't be split like this: the tensor "
            f"arrives in shape {list(shape)}",
            tensor=request.info.name,
            expected=f"whole blocks of {request.dtype.elements} elements in the last dim of each",
            found=f"{sharding} for shape {list(request.info.shape)}",
        ) from error
