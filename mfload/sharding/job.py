"""What there is to load onto which devices, and how what was fetched becomes sharded arrays."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from mfload import errors, frameworks, planning
from mfload.index import Index
from mfload.io.source import LocalFile
from mfload.loading import Loader
from mfload.placement import Need
from mfload.settings import Settings
from mfload.sharding import fetching
from mfload.sharding.shares import Wanted, needs


class Request(NamedTuple):
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
        needs: The whole of each tensor that is wanted.
        settings: How.
    """

    index: Index
    sources: Sequence[LocalFile]
    needs: Sequence[Need]
    settings: Settings


class Job:
    """What each process needs of a checkpoint, and how it becomes arrays here.

    Args:
        chosen: What there is to load.
        request: Onto which devices.

    Attributes:
        ranks: The processes that take part.
        rank: This one.
        needs: What each of them needs, by its number.
        loader: Loads what this process needs.
        platform: JAX's name of what this process's devices are.
        notes: What was decided without being asked for.

    Raises:
        UsageError: An argument makes no sense.
        ShardingError: A sharding does not fit its tensor.
    """

    def __init__(self, chosen: Chosen, request: Request) -> None:
        self._jax = frameworks.module("jax", "mesh")
        jax_sharding = frameworks.module("jax", "sharding")
        self.rank: int = jax_sharding.rank()
        ranks = jax_sharding.processes(request.mesh, request.shardings)
        self.ranks: tuple[int, ...] = ranks or (self.rank,)
        notes: list[str] = []
        self._wanted = chosen.needs
        self._shardings = resolve(chosen.needs, request, notes, chosen.index.tensors)
        self.notes = tuple(notes)
        # Whole rows are read over rather than skipped, where a few are not wanted.
        self._settings = replace(chosen.settings, merge_gap=planning.MESH_GAP)
        self._spots = jax_sharding.Spots()
        wanted = [self._share(*each) for each in zip(self._wanted, self._shardings, strict=True)]
        self.needs = {rank: [] for rank in (*self.ranks, self.rank)} | needs(wanted)
        spots = self._spots.of(self.rank)
        self.platform: str = spots[0].device.platform if spots else "cpu"
        adapter = self._jax.JaxMeshAdapter(spots)
        self.loader = Loader(chosen.index, chosen.sources, adapter, self._settings)

    def _share(self, need: Need, sharding: Any) -> Wanted:
        shares = self._spots.shares(sharding, need.info.shape)
        lent = self._settings.landing == "framework" or not self._spots.plain(sharding)
        apart = lent and need.dtype.name in self._jax.JaxMeshAdapter.lendable
        return Wanted(need.info, need.dtype, need.checked, shares, apart)

    def links(self) -> fetching.Links | None:
        """How bytes get from one process to another; None for one process."""
        if len(self.ranks) < 2:
            return None
        processes = frameworks.module("jax", "processes")
        return processes.Links(self.ranks, self.platform, self._settings.deadline)

    @property
    def stored_bytes(self) -> int:
        """Bytes of the files that this process wants."""
        seen = {(need.info.name, need.selection): need for need in self.needs[self.rank]}
        return sum(need._replace(dtype=need.info.dtype).nbytes for need in seen.values())

    @property
    def whole(self) -> bool:
        """Whether this process, alone, wants all of every tensor."""
        every = sum(need.info.nbytes for need in self._wanted)
        return len(self.ranks) == 1 and self.stored_bytes == every

    def lines(self) -> list[str]:
        """What is wanted and how, the same where processes want the same."""
        how = self._settings
        lines = [f"landing={how.landing!r}, max_host_overhead={how.max_host_overhead}"]
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
        parts: dict[str, dict[Any, Any]] = {need.info.name: {} for need in self._wanted}
        for need, arrays in zip(self.needs[self.rank], fetched, strict=True):
            held = parts[need.info.name]
            for number, array in zip(need.devices, arrays, strict=True):
                held[spots[number].device] = array
        fetched.clear()
        made: dict[str, Any] = {}
        for need, sharding in zip(self._wanted, self._shardings, strict=True):
            shape, dtype = self._jax.arrives(need.dtype, need.info.shape)
            name = need.info.name
            made[name] = self._jax.assemble(shape, sharding, parts.pop(name), dtype)
        return made


def resolve(
    needs: Sequence[Need], request: Request, notes: list[str], known: Iterable[str]
) -> list[Any]:
    """A sharding for each need, that fits the tensor and the array it becomes.

    Args:
        needs: The whole of each tensor.
        request: What was asked for.
        notes: Takes what a user should hear of that is no error.
        known: All names of the checkpoint, which rules may be for.

    Raises:
        UsageError: These are no shardings, or a mesh is missing.
        ShardingError: One does not fit its tensor.
    """
    jax_mesh = frameworks.module("jax", "mesh")
    jax_sharding = frameworks.module("jax", "sharding")
    rows = [(need.info.name, need.info.shape) for need in needs]
    infos = [need.info for need in needs]
    mesh, shardings, unmatched, _ = request
    made = jax_sharding.resolve(
        rows, mesh, shardings, unmatched, infos=infos, notes=notes, known=known
    )
    for need, sharding in zip(needs, made, strict=True):
        if need.dtype.elements > 1:
            shape, _ = jax_mesh.arrives(need.dtype, need.info.shape)
            _check_bytes(jax_sharding, need, shape, sharding)
    return made


def _check_bytes(jax_sharding: Any, need: Need, shape: tuple[int, ...], sharding: Any) -> None:
    """Some arrive as bytes: their dims need not be those of the tensor."""
    try:
        jax_sharding.check(need.info.name, shape, sharding)
    except errors.ShardingError as error:
        raise errors.ShardingError(
            f"elements of {need.dtype} that share a byte can't be split like this: the tensor "
            f"arrives in shape {list(shape)}",
            tensor=need.info.name,
            expected=f"whole blocks of {need.dtype.elements} elements in the last dim of each",
            found=f"{sharding} for shape {list(need.info.shape)}",
        ) from error
