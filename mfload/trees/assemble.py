"""Filling: the parts of all goals are fetched, transformed where they landed, and put together."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from mfload import dtypes, errors, frameworks, trees
from mfload.cuda import live
from mfload.index import Index
from mfload.loading.session import Loader
from mfload.mesh.shares import Wanted
from mfload.options import OVERHEAD, LoadOptions
from mfload.planning import planner
from mfload.planning.requests import Request
from mfload.report import Report
from mfload.sources.local import LocalFile
from mfload.trees import pulling, room, slabs, tally
from mfload.trees.pulling import Part, Requests
from mfload.trees.slabs import Piece
from mfload.trees.targets import Goal

Advance = Callable[[int], None] | None
Fetch = Callable[..., list[tuple[Any, ...]]]
"""`fetching.fetch`, told of the other processes: (needs, rank, loader, report=, advance=)."""

# Seconds to wait for memory to be let go of, where another load of the process needs none.
_PATIENCE, _TICK = 0.1, 0.0002


class Filling:
    """Fills goals on the devices of this process.

    Args:
        index: The checkpoint's table.
        sources: Its files.
        goals: What is to be filled.
        options: How.

    Attributes:
        rank: This process.

    Raises:
        MemoryLimitError: A goal can't be made within the overhead.
        ShardingError: A shard would cut through elements that share a byte.
    """

    def __init__(
        self,
        index: Index,
        sources: Sequence[LocalFile],
        goals: Sequence[Goal],
        options: LoadOptions,
    ) -> None:
        shardings = frameworks.module("jax", "sharding")
        self._jax = frameworks.module("jax", "mesh")
        self._work = frameworks.module("jax", "transforms")
        self._transforms = self._work.Transforms(trees.evaluate)
        self.rank: int = shardings.rank()
        self._goals = goals
        self._spots = shardings.Spots()
        self._settings = options
        plain: list[tuple[int, Wanted]] = []
        made: list[tuple[int, Sequence[Part]]] = []
        for number, goal in enumerate(goals):
            direct, others = self._parts(goal)
            plain += ((number, wanted) for wanted in direct)
            if others:
                made.append((number, others))
        self._plain = pulling.requests(plain)
        adapter = self._jax.JaxMeshAdapter(self._spots.of(self.rank))
        self._on_host: bool = adapter.on_host
        # What a program is to run on waits where it runs.
        overhead = "max_device_overhead" if adapter.devices else "max_host_overhead"
        given: int | None = getattr(options, overhead)
        limit = OVERHEAD
        if given is not None:
            waiting = pulling.requests(pulling.sources(part for _, some in made for part in some))
            requests = waiting.requests.get(self.rank, [])
            readers = room.readers(requests, index, sources, adapter, options)
            limit = max(given, readers)
        slots = limit // room.SLOTS
        self._waves = list(
            slabs.batches(((n, goals[n].recipe, parts) for n, parts in made), limit - slots)
        )
        self._wanted = [pulling.requests(pulling.sources(_flat(batch))) for batch in self._waves]
        # Whole rows are read over rather than skipped, where a few are not wanted.
        options = replace(options, merge_gap=planner.MESH_GAP)
        self._loader = Loader(index, sources, adapter, options)
        waiting = replace(options, allocator="mfload")
        if adapter.devices or adapter.on_host:
            # Elsewhere what waits is copied to its device, and slots are gone by then.
            waiting = replace(waiting, **{overhead: slots})
        self._waiting = Loader(index, sources, adapter, waiting)
        if given is not None:
            pieces = [piece for batch in self._waves for piece in batch]
            room.check(overhead, given, limit, pieces, goals, self._moved)
        self._arrays: list[dict[int, Any]] = [{} for _ in goals]

    def _parts(self, goal: Goal) -> tuple[list[Wanted], list[Part]]:
        """What of a goal lands as it is, and the parts that something is done with."""
        recipe, sharding = goal.recipe, goal.sharding
        held = self._spots.shares(sharding, goal.shape)
        usual = self._spots.plain(sharding)
        # Whether each device gets memory of its own.
        apart = self._settings.allocator == "framework" or not usual
        apart = apart and recipe.dtype.name in self._jax.JaxMeshAdapter.lendable
        if recipe.plain:
            (info,) = recipe.tensors
            return [Wanted(info, recipe.dtype, False, held, apart)], []
        parts = pulling.parts(recipe, held)
        direct = [pulling.as_it_lands(part, apart=apart) for part in parts if part.plain]
        others = [part for part in parts if not part.plain]
        if others and not usual:
            # Work is done in the memory that devices work in, and the result moved.
            there = self._work.in_default_memory(sharding)
            spot = dict(zip(held, self._spots.shares(there, goal.shape), strict=True))
            others = [
                part._replace(holders=tuple(spot[share] for share in part.holders))
                for part in others
            ]
        return direct, others

    def _moved(self, number: int) -> int:
        """Bytes of host memory that a shard of a goal takes twice while it is moved."""
        goal = self._goals[number]
        if not self._on_host or self._spots.plain(goal.sharding):
            return 0
        return goal.recipe.dtype.size_of(goal.sharding.shard_shape(goal.shape)) or 0

    @property
    def stored_bytes(self) -> int:
        """Bytes of the files that this process wants."""
        total = 0
        for each in (self._plain, *self._wanted):
            requests = each.requests.get(self.rank, ())
            seen = {(request.info.name, request.selection): request for request in requests}
            total += sum(request.nbytes for request in seen.values())
        return total

    def lines(self) -> Iterator[str]:
        """What is wanted and how, the same where processes want the same."""
        how = self._settings
        yield f"allocator={how.allocator!r}, max_host_overhead={how.max_host_overhead}"
        for goal in self._goals:
            shares = self._spots.shares(goal.sharding, goal.shape)
            text = repr((goal.recipe, shares)).encode()
            digest = hashlib.sha256(text).hexdigest()[:16]
            yield f"{goal.name}: {goal.recipe.dtype} {goal.sharding} {digest}"

    def run(self, fetch: Fetch, report: Report, advance: Advance) -> list[Any]:
        """Loads.

        Args:
            fetch: As `fetching.fetch`.
            report: What happens is added.
            advance: Told of progress, in bytes.

        Returns:
            An array for each goal.

        Raises:
            MfloadError: Nothing is left half loaded.
        """
        if any(self._plain.requests.values()):
            fetched = self._fetch(fetch, self._plain.requests, self._loader, report, advance)
            for request, owner, arrays in self._mine(self._plain, fetched):
                self._arrays[owner].update(zip(request.devices, arrays, strict=True))
            fetched.clear()
        for number in range(len(self._waves)):
            self._wave(number, fetch, report, advance)
        report.framework, report.tensors = "jax", len(self._goals)
        report.result_bytes = 0
        return [self._assemble(number, report) for number in range(len(self._goals))]

    def _fetch(
        self,
        fetch: Fetch,
        requests: Mapping[int, list[Request]],
        loader: Loader,
        report: Report,
        advance: Advance,
    ) -> list[tuple[Any, ...]]:
        one = Report()
        fetched = fetch(requests, self.rank, loader, report=one, advance=advance)
        if loader is self._waiting:
            one.aliased_bytes = 0
        tally.add(report, one)
        return fetched

    def _wave(self, number: int, fetch: Fetch, report: Report, advance: Advance) -> None:
        """Loads what some goals, or stretches of them, are made of, and makes them."""
        batch, wanted = self._waves[number], self._wanted[number]
        before = live.live_bytes()
        fetched = self._fetch(fetch, wanted.requests, self._waiting, report, advance)
        start = time.perf_counter()
        landed = self._landed(wanted, fetched, sum(len(piece.parts) for piece in batch))
        fetched.clear()
        at = 0
        for piece in batch:
            self._piece(piece, landed[at : at + len(piece.parts)])
            at += len(piece.parts)
        # Of several stretches of a goal the last has what the others were given away to.
        for owner in {piece.owner for piece in batch}:
            self._work.wait(list(self._arrays[owner].values()))
            if any(piece.last for piece in batch if piece.owner == owner):
                self._move(owner)
        landed.clear()
        _settle(before)
        took = time.perf_counter() - start
        report.stages["transforms"] = report.stages.get("transforms", 0.0) + took

    def _mine(
        self, wanted: Requests, fetched: Sequence[tuple[Any, ...]]
    ) -> Iterator[tuple[Request, int, tuple[Any, ...]]]:
        """The needs of this process, what they are for, and the arrays that they became."""
        requests, owners = wanted.requests.get(self.rank, []), wanted.owners.get(self.rank, [])
        return zip(requests, owners, fetched, strict=True)

    def _landed(
        self, wanted: Requests, fetched: Sequence[tuple[Any, ...]], count: int
    ) -> list[dict[int, list[Any]]]:
        """What landed for each part: by device, the part's sources in their order."""
        landed: list[dict[int, list[Any]]] = [{} for _ in range(count)]
        for request, owner, arrays in self._mine(wanted, fetched):
            for device, array in zip(request.devices, arrays, strict=True):
                landed[owner].setdefault(device, []).append(array)
        return landed

    def _piece(self, piece: Piece, landed: Sequence[dict[int, list[Any]]]) -> None:
        """Has the devices make what a piece adds to its goal."""
        goal, arrays = self._goals[piece.owner], self._arrays[piece.owner]
        spots = self._spots.of(self.rank)
        groups: dict[Any, tuple[Part, dict[int, tuple[Any, ...]]]] = {}
        for part, rows in zip(piece.parts, landed, strict=True):
            if rows:
                _, group = groups.setdefault(part.alike, (part, {}))
                group.update((device, tuple(row)) for device, row in rows.items())
        for part, rows in groups.values():
            numbers, given = list(rows), list(rows.values())
            devices = tuple(spots[number].device for number in numbers)
            if goal.recipe.checked:
                self._check(goal, devices, given)
            shape, program = pulling.sizes(part.box), part.pull.program
            if 0 in shape:
                made = self._empty(goal, devices, shape)
            elif piece.start is None:
                made = self._transforms.run(program, devices, given)
            else:
                if numbers[0] not in arrays:
                    whole = self._empty(goal, devices, goal.sharding.shard_shape(goal.shape))
                    arrays.update(zip(numbers, whole, strict=True))
                    del whole
                wholes = [arrays.pop(number) for number in numbers]
                made = self._transforms.put(program, devices, wholes, given, piece.start)
                del wholes
            arrays.update(zip(numbers, made, strict=True))

    def _empty(self, goal: Goal, devices: tuple[Any, ...], shape: tuple[int, ...]) -> list[Any]:
        _, dtype = self._jax.arrives(goal.recipe.dtype, shape)
        return self._transforms.empty(devices, shape, dtype)

    def _check(self, goal: Goal, devices: tuple[Any, ...], rows: list[tuple[Any, ...]]) -> None:
        """Refuses values that an integer dtype can't hold; XLA would wrap or clip them."""
        dtype = goal.recipe.dtype
        low, high = (0, 1) if dtype is dtypes.TABLE["BOOL"] else _bounds(dtype.numpy)
        if not all(map(bool, self._work.fits(devices, rows, low, high))):
            raise errors.LossyCastError(
                "a value does not fit the dtype asked for",
                tensor=goal.name,
                expected=f"{low} to {high} for {dtype}",
            )

    def _move(self, number: int) -> None:
        """Has what was made moved to the memory that it was asked for in, shard by shard."""
        sharding, arrays = self._goals[number].sharding, self._arrays[number]
        for each in list(arrays):
            arrays[each] = self._work.move(arrays.pop(each), sharding)

    def _assemble(self, number: int, report: Report) -> Any:
        goal, spots = self._goals[number], self._spots.of(self.rank)
        held = {spots[n].device: array for n, array in self._arrays[number].items()}
        self._arrays[number] = {}
        report.result_bytes += sum(array.nbytes for array in held.values())
        shape, dtype = self._jax.arrives(goal.recipe.dtype, goal.shape)
        return self._jax.assemble(shape, goal.sharding, held, dtype)


def _settle(before: int) -> None:
    """Waits until what was landed is gone.

    XLA lets go of it in threads of its own, which need the interpreter for that.
    """
    end = time.monotonic() + _PATIENCE
    while live.live_bytes() > before and time.monotonic() < end:
        time.sleep(_TICK)


def _flat(batch: Sequence[Piece]) -> list[Part]:
    return [part for piece in batch for part in piece.parts]


def _bounds(dtype: Any) -> tuple[int, int]:
    limits = np.iinfo(dtype)
    return int(limits.min), int(limits.max)
