"""Assembling: the parts of all leaves are fetched, transformed where they landed, and put together.

What is stored as a leaf wants it lands in place, in one fetch. The rest comes in batches: what a
batch is made of waits on its devices until the transforms have run, within the overhead.
"""

from __future__ import annotations

import hashlib
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from mfload import dtypes, errors
from mfload.cuda import memory
from mfload.frameworks.base import Adapter
from mfload.index import Index
from mfload.io import buffers
from mfload.loading.session import Loader, Session, check_host
from mfload.mesh import base, load as mesh_load
from mfload.mesh.base import TensorShares
from mfload.mesh.jax_backend import arrives
from mfload.options import OVERHEAD, LoadOptions
from mfload.planning import planner
from mfload.planning.requests import Request, Share
from mfload.report import Report
from mfload.sources.local import LocalFile
from mfload.trees import batches, jax_transforms
from mfload.trees.batches import BatchItem, LeafPart
from mfload.trees.recipe import Recipe, is_plain
from mfload.trees.transforms import Shape, shape_of, sizes

# One in so many bytes of the overhead is for the readers' slots while transforms are under way;
# the rest is for what waits for them.
_SLOTS = 4

# Seconds to wait for memory to be let go of, if another load of the process needs none.
_PATIENCE, _TICK = 0.1, 0.0002

Advance = Callable[[int], None] | None
Fetched = list[tuple[Any, ...]]


class Goal(NamedTuple):
    """A leaf that is to be filled: its recipe, and its sharding."""

    recipe: Recipe
    sharding: Any

    @property
    def shape(self) -> Shape:
        """In elements."""
        return shape_of(self.recipe.transform)


class _Requests(NamedTuple):
    """Requests of all processes, and for each the number of what it is for, by process."""

    requests: dict[int, list[Request]]
    owners: dict[int, list[int]]


def _requests(wanted: Iterable[tuple[int, TensorShares]]) -> _Requests:
    made = _Requests({}, {})
    for owner, one in wanted:
        for process, found in base.requests([one]).items():
            made.requests.setdefault(process, []).extend(found)
            made.owners.setdefault(process, []).extend([owner] * len(found))
    return made


class Assembly:
    """Fills leaves on the devices of this process."""

    def __init__(
        self,
        index: Index,
        sources: Sequence[LocalFile],
        goals: Sequence[Goal],
        options: LoadOptions,
        backend: Any,
    ) -> None:
        self._backend, self._goals, self._options = backend, goals, options
        plain: list[tuple[int, TensorShares]] = []
        made: list[tuple[int, Recipe, list[LeafPart]]] = []
        for number, goal in enumerate(goals):
            direct, others = self._parts(goal)
            plain += ((number, wanted) for wanted in direct)
            if others:
                made.append((number, goal.recipe, others))
        self._plain = _requests(plain)
        adapter = backend.adapter()
        # What a transform is to run on waits where it runs.
        overhead = "max_device_overhead" if adapter.devices else "max_host_overhead"
        given: int | None = getattr(options, overhead)
        limit = OVERHEAD
        if given is not None:
            waiting = _requests(_wanted(part for _, _, some in made for part in some))
            requests = waiting.requests.get(backend.rank, [])
            limit = max(given, _least_for_readers(requests, index, sources, adapter, options))
        slots = limit // _SLOTS
        self._batches = list(batches.batches(made, limit - slots))
        if given is not None:
            self._check(overhead, given, limit, on_host=adapter.on_host)
        self._awaited = [_requests(_wanted(_flat(batch))) for batch in self._batches]
        # Whole rows are read over rather than skipped, where a few are not wanted.
        options = replace(options, merge_gap=planner.MESH_GAP)
        self._loader = Loader(index, sources, adapter, options)
        waiting = replace(options, allocator="mfload")
        if adapter.devices or adapter.on_host:
            # Elsewhere what waits is copied to its device, and slots are gone by then.
            waiting = replace(waiting, **{overhead: slots})
        self._waiting = Loader(index, sources, adapter, waiting)
        self._arrays: list[dict[int, Any]] = [{} for _ in goals]
        self._held = 0

    def _parts(self, goal: Goal) -> tuple[list[TensorShares], list[LeafPart]]:
        """What of a leaf lands as it is, and the parts that are transformed."""
        recipe, sharding = goal.recipe, goal.sharding
        held = self._backend.shares(sharding, goal.shape)
        separate = self._backend.separate(sharding, recipe.dtype, self._options)
        if is_plain(recipe.transform):
            return [TensorShares(recipe.tensors[0], recipe.dtype, False, held, separate)], []
        every = batches.parts(recipe, held)
        direct = [next(_wanted_by(part, separate)) for part in every if part.plain]
        others = [part for part in every if not part.plain]
        if others and not self._backend.in_default_memory(sharding):
            # Transforms run in the memory that devices work in, and the result is moved.
            there = self._backend.shares(sharding.with_memory_kind(None), goal.shape)
            spot = dict(zip(held, there, strict=True))
            others = [
                part._replace(holders=tuple(spot[share] for share in part.holders))
                for part in others
            ]
        return direct, others

    def _check(self, name: str, given: int, limit: int, *, on_host: bool) -> None:
        """Refuses an overhead in which the transforms can't be done; names the least that does."""
        small = f"{name} is too small for readers beside transforms; or ask for fewer threads"
        wanted: list[tuple[int, str, str | None]] = [(limit, small, None)]
        for item in itertools.chain.from_iterable(self._batches):
            goal = self._goals[item.owner]
            tensor = goal.recipe.name
            waits = (batches.most(item.parts) - 1) * _SLOTS // (_SLOTS - 1) + 1
            wanted.append((waits, "what the tensor is made of exceeds the overhead", tensor))
            if on_host and not self._backend.in_default_memory(goal.sharding):
                # A shard takes host memory twice while it is moved.
                moved = goal.recipe.dtype.size_of(goal.sharding.shard_shape(goal.shape)) or 0
                wanted.append((moved, "a shard that is moved exceeds the overhead", tensor))
        least, message, tensor = max(wanted, key=lambda each: each[0])
        if least > given:
            expected = f"{least} bytes or more"
            raise errors.MemoryLimitError(message, tensor=tensor, expected=expected, found=given)

    @property
    def stored_bytes(self) -> int:
        """Bytes of the files that this process wants."""
        total = 0
        for each in (self._plain, *self._awaited):
            requests = each.requests.get(self._backend.rank, ())
            seen = {(request.info.name, request.selection): request for request in requests}
            total += sum(request.nbytes for request in seen.values())
        return total

    def arguments(self) -> Iterator[str]:
        """What is wanted and how: lines that must be the same on all processes."""
        for name in ("exchange", "allocator", "max_host_overhead"):
            yield f"{name}={getattr(self._options, name)!r}"
        for goal in self._goals:
            shares = self._backend.shares(goal.sharding, goal.shape)
            digest = hashlib.sha256(repr((goal.recipe, shares)).encode()).hexdigest()[:16]
            yield f"{goal.recipe.name}: {goal.recipe.dtype} {goal.sharding} {digest}"

    def run(self, group: Any, report: Report, advance: Advance) -> list[Any]:
        """Loads an array for each goal; nothing is left half loaded."""
        self._held = buffers.live_bytes()
        if self._batches and self._loader.on_host:
            # Each fetch is checked when its turn comes: what can't end must not begin.
            check_host(sum(map(self._bytes, self._goals)))
        if any(self._plain.requests.values()):
            fetched = self._fetch(self._plain, self._loader, group, report, advance)
            for request, owner, arrays in self._mine(self._plain, fetched):
                self._arrays[owner].update(zip(request.devices, arrays, strict=True))
            fetched.clear()
        for batch, awaited in zip(self._batches, self._awaited, strict=True):
            before = memory.live_bytes()
            fetched = self._fetch(awaited, self._waiting, group, report, advance)
            start = time.perf_counter()
            self._transform(batch, awaited, fetched)
            _settle(before)
            took = time.perf_counter() - start
            report.stages["transforms"] = report.stages.get("transforms", 0.0) + took
        report.framework, report.tensors, report.result_bytes = "jax", len(self._goals), 0
        return [self._assemble(number, report) for number in range(len(self._goals))]

    def _bytes(self, goal: Goal) -> int:
        """Bytes of a leaf that this process is to hold, those of replicas counted once."""
        shares = self._backend.shares(goal.sharding, goal.shape)
        boxes = {share.box for share in shares if share.process == self._backend.rank}
        return sum(goal.recipe.dtype.size_of(sizes(box)) or 0 for box in boxes)

    def _fetch(
        self, wanted: _Requests, loader: Loader, group: Any, report: Report, advance: Advance
    ) -> Fetched:
        one = Report()
        kept = buffers.live_bytes() - self._held
        fetched = mesh_load.fetch(
            wanted.requests, loader, self._backend, group=group, report=one, advance=advance
        )
        one.peak_bytes += max(0, kept)
        if loader is self._waiting:
            one.aliased_bytes = 0
        report.add(one)
        return fetched

    def _mine(
        self, wanted: _Requests, fetched: Fetched
    ) -> Iterator[tuple[Request, int, tuple[Any, ...]]]:
        """The requests of this process, what they are for, and the arrays that they became."""
        rank = self._backend.rank
        requests, owners = wanted.requests.get(rank, []), wanted.owners.get(rank, [])
        return zip(requests, owners, fetched, strict=True)

    def _transform(self, batch: Sequence[BatchItem], awaited: _Requests, fetched: Fetched) -> None:
        """Makes what a batch adds to its leaves; what was fetched is let go of."""
        # By part, then by device: the part's sources in their order.
        landed: list[dict[int, list[Any]]] = [{} for _ in _flat(batch)]
        for request, owner, arrays in self._mine(awaited, fetched):
            for device, array in zip(request.devices, arrays, strict=True):
                landed[owner].setdefault(device, []).append(array)
        fetched.clear()
        rows = iter(landed)
        for item in batch:
            self._make(item, list(itertools.islice(rows, len(item.parts))))
        # Of several stretches of a leaf the last has what the others were donated to.
        last = {item.owner for item in batch if item.last}
        for owner in {item.owner for item in batch}:
            arrays = self._arrays[owner]
            jax_transforms.wait(list(arrays.values()))
            for number in list(arrays) if owner in last else ():
                array = arrays.pop(number)
                arrays[number] = jax_transforms.move(array, self._goals[owner].sharding)

    def _make(self, item: BatchItem, landed: Sequence[Mapping[int, list[Any]]]) -> None:
        goal, arrays = self._goals[item.owner], self._arrays[item.owner]
        groups: dict[Any, tuple[LeafPart, dict[int, tuple[Any, ...]]]] = {}
        for part, rows in zip(item.parts, landed, strict=True):
            if rows:
                _, group = groups.setdefault(part.alike, (part, {}))
                group.update((number, tuple(row)) for number, row in rows.items())
        for part, rows in groups.values():
            numbers, given = list(rows), list(rows.values())
            devices = tuple(map(self._backend.device, numbers))
            if goal.recipe.checked:
                _check_values(goal.recipe, devices, given)
            if 0 in (shape := shape_of(part.transform)):
                made = _empty(goal, devices, shape)
            elif item.start is None:
                made = jax_transforms.run(part.transform, devices, given)
            else:
                if numbers[0] not in arrays:
                    shape = goal.sharding.shard_shape(goal.shape)
                    arrays.update(zip(numbers, _empty(goal, devices, shape), strict=True))
                wholes = [arrays.pop(number) for number in numbers]
                made = jax_transforms.put(part.transform, devices, wholes, given, item.start)
                del wholes
            arrays.update(zip(numbers, made, strict=True))

    def _assemble(self, number: int, report: Report) -> Any:
        goal, device = self._goals[number], self._backend.device
        held = {device(n): array for n, array in self._arrays[number].items()}
        self._arrays[number] = {}
        report.result_bytes += sum(array.nbytes for array in held.values())
        return self._backend.assemble(goal.shape, goal.sharding, held, goal.recipe.dtype)


def _wanted_by(part: LeafPart, separate: bool = False) -> Iterator[TensorShares]:
    """What a part is made of, in order: for its holders, the box of the stored tensor."""
    for info, box, dtype in part.sources:
        held: tuple[Share, ...] = tuple(share._replace(box=box) for share in part.holders)
        yield TensorShares(info, dtype, False, held, separate)


def _wanted(parts: Iterable[LeafPart]) -> Iterator[tuple[int, TensorShares]]:
    """What parts are made of, with the number of the part."""
    return ((number, one) for number, part in enumerate(parts) for one in _wanted_by(part))


def _flat(batch: Iterable[BatchItem]) -> list[LeafPart]:
    return [part for item in batch for part in item.parts]


def _empty(goal: Goal, devices: tuple[Any, ...], shape: Shape) -> list[Any]:
    return jax_transforms.empty(devices, shape, arrives(goal.recipe.dtype, shape)[1])


def _check_values(recipe: Recipe, devices: tuple[Any, ...], rows: list[tuple[Any, ...]]) -> None:
    """Refuses values that an integer dtype can't hold; XLA would wrap or clip them."""
    dtype, low, high = recipe.dtype, 0, 1
    if dtype is not dtypes.TABLE["BOOL"]:
        limits = np.iinfo(dtype.numpy)  # pyright: ignore[reportArgumentType, reportCallIssue]
        low, high = int(limits.min), int(limits.max)
    if not all(map(bool, jax_transforms.fits(devices, rows, low, high))):
        message, expected = "a value does not fit the dtype asked for", f"{low} to {high}"
        raise errors.LossyCastError(message, tensor=recipe.name, expected=f"{expected} for {dtype}")


def _least_for_readers(
    requests: Sequence[Request],
    index: Index,
    sources: Sequence[LocalFile],
    adapter: Adapter,
    options: LoadOptions,
) -> int:
    """The least overhead that leaves readers their slots beside what waits on this process."""
    if not requests:
        return 0
    free = replace(options, allocator="mfload", max_host_overhead=None, max_device_overhead=None)
    found = Session(requests, index, sources, adapter, free).limits
    if adapter.devices:
        return found.least_on_device * _SLOTS
    return found.least * (_SLOTS if adapter.on_host else 1)


def _settle(before: int) -> None:
    """Waits until what was landed is gone: XLA lets go of it in threads that need the GIL."""
    end = time.monotonic() + _PATIENCE
    while memory.live_bytes() > before and time.monotonic() < end:
        time.sleep(_TICK)
