"""Assembling: the parts of all leaves are fetched, transformed where they landed, and put together.

What is stored as a leaf wants it lands in place, in one fetch. The rest comes in batches: what a
batch is made of waits on its devices until the transforms have run, within the overhead.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from mfload import errors
from mfload.cuda import memory
from mfload.index import Index
from mfload.io import buffers
from mfload.load_options import OVERHEAD, LoadOptions
from mfload.loading.allocate import check_host
from mfload.loading.session import Loader, Session
from mfload.mesh import base, load as mesh_load
from mfload.mesh.base import Share, TensorShares, Whole
from mfload.mesh.jax_backend import JaxBackend, JaxMeshAdapter, arrives
from mfload.planning.request import Request
from mfload.planning.slicing import shape_of
from mfload.report import Report
from mfload.sources.base import Source
from mfload.trees import batches, jax_transforms
from mfload.trees.batches import BatchItem, LeafPart
from mfload.trees.recipe import Recipe
from mfload.trees.transforms import Shape, Transform

# One in so many bytes of the overhead is for the readers' slots while transforms are under way;
# the rest is for what waits for them.
_SLOTS = 4

# Seconds to wait for memory to be released, if another load of the process needs none.
_PATIENCE, _TICK = 0.1, 0.0002

Advance = Callable[[int], None] | None


class Goal(NamedTuple):
    """A leaf that is to be filled: its recipe, and its sharding."""

    recipe: Recipe
    sharding: Any

    @property
    def shape(self) -> Shape:
        """In elements."""
        return self.recipe.transform.shape


class _Wanted(NamedTuple):
    """Requests of all processes, those of this one, and for each the number of what it is for."""

    requests: dict[int, list[Request]]
    mine: list[Request]
    owners: list[int]


class Assembly:
    """Fills leaves on the devices of this process."""

    def __init__(
        self,
        index: Index,
        sources: Sequence[Source],
        goals: Sequence[Goal],
        options: LoadOptions,
        backend: JaxBackend,
    ) -> None:
        self._backend, self._goals, self._options = backend, goals, options
        self._arrays: list[dict[int, Any]] = [{} for _ in goals]  # By number of the device.
        self._held = 0
        direct: list[tuple[int, TensorShares]] = []
        made: list[tuple[int, list[LeafPart]]] = []
        for number, goal in enumerate(goals):
            some, others = self._parts(goal)
            direct += ((number, wanted) for wanted in some)
            if others:
                made.append((number, others))
        self._direct = self._wanted(direct)
        adapter = backend.adapter()
        # What a transform is to run on waits where it runs.
        overhead = "max_device_overhead" if adapter.devices else "max_host_overhead"
        given: int | None = getattr(options, overhead)
        limit = OVERHEAD
        if given is not None:
            waiting = self._wanted(_sources(part for _, some in made for part in some)).mine
            limit = max(given, _least_for_readers(waiting, index, sources, adapter, options))
        slots = limit // _SLOTS
        self._batches = list(batches.batches(made, limit - slots))
        if given is not None:
            self._check_overhead(overhead, given, limit, on_host=adapter.on_host)
        self._awaited = [
            self._wanted(_sources(part for item in batch for part in item.parts))
            for batch in self._batches
        ]
        # Whole rows are read over rather than skipped, where a few are not wanted.
        options = options.replace(merge_gap=base.MESH_GAP)
        self._loader = Loader(index, sources, adapter, options)
        options = options.replace(allocator="mfload")
        if adapter.devices or adapter.on_host:
            # Elsewhere what waits is copied to its device, and slots are gone by then.
            options = options.replace(**{overhead: slots})
        self._waiting = Loader(index, sources, adapter, options)

    def _parts(self, goal: Goal) -> tuple[list[TensorShares], list[LeafPart]]:
        """What of a leaf lands as it is, and the parts that are transformed."""
        recipe, sharding = goal.recipe, goal.sharding
        held = self._backend.shares(sharding, goal.shape)
        separate = self._backend.separate(sharding, recipe.dtype, self._options)
        if recipe.transform.plain:
            info = recipe.tensors[0]
            return [TensorShares(info, recipe.landed, recipe.checked, held, separate)], []
        if 0 in goal.shape:
            return [], []  # There is nothing to read.
        every = batches.parts(recipe, held)
        plain = [part for part in every if part.transform.plain]
        if len(plain) < len(every) and not self._backend.in_default_memory(sharding):
            # Transforms run in the memory that devices work in, and the result is moved.
            there = self._backend.shares(sharding.with_memory_kind(None), goal.shape)
            every = batches.parts(recipe, there)
        others = [part for part in every if not part.transform.plain]
        return [wanted for _, wanted in _sources(plain, separate=separate)], others

    def _wanted(self, wanted: Iterable[tuple[int, TensorShares]]) -> _Wanted:
        requests: dict[int, list[Request]] = {self._backend.rank: []}
        owners: list[int] = []
        for owner, one in wanted:
            for process, found in base.requests([one]).items():
                requests.setdefault(process, []).extend(found)
            owners += [owner] * (len(requests[self._backend.rank]) - len(owners))
        return _Wanted(requests, requests[self._backend.rank], owners)

    def _check_overhead(self, name: str, given: int, limit: int, *, on_host: bool) -> None:
        """Refuses an overhead in which the transforms can't be done; names the least that does."""
        small = f"{name} is too small for readers beside transforms; or ask for fewer threads"
        wanted: list[tuple[int, str, str | None]] = [(limit, small, None)]
        for item in (item for batch in self._batches for item in batch):
            recipe, sharding = self._goals[item.owner].recipe, self._goals[item.owner].sharding
            waits = (batches.most(item.parts) - 1) * _SLOTS // (_SLOTS - 1) + 1
            wanted.append((waits, "what the tensor is made of exceeds the overhead", recipe.name))
            if on_host and not self._backend.in_default_memory(sharding):
                # A shard takes host memory twice while it is moved.
                shape = sharding.shard_shape(recipe.transform.shape)
                moved = recipe.dtype.size_of(shape) or 0
                wanted.append((moved, "a shard that is moved exceeds the overhead", recipe.name))
        least, message, tensor = max(wanted, key=lambda each: each[0])
        if least > given:
            expected = f"{least} bytes or more"
            raise errors.MemoryLimitError(message, tensor=tensor, expected=expected, found=given)

    @property
    def stored_bytes(self) -> int:
        """Bytes of the files that this process wants."""
        return sum(base.stored_bytes(each.mine) for each in (self._direct, *self._awaited))

    def arguments(self) -> Iterator[str]:
        """What is wanted of each leaf: lines that must be the same on all processes."""
        for goal in self._goals:
            shares = self._backend.shares(goal.sharding, goal.shape)
            digest = hashlib.sha256(repr((goal.recipe, shares)).encode()).hexdigest()[:16]
            yield f"{goal.recipe.name}: {goal.recipe.dtype} {goal.sharding} {digest}"

    def run(self, group: Any, report: Report, advance: Advance) -> list[Any]:
        """Loads an array for each goal; nothing is left half loaded."""
        self._held = buffers.live_bytes()
        if self._batches and self._loader.adapter.on_host:
            # Each fetch is checked when its turn comes: what can't end must not begin.
            check_host(sum(map(self._bytes, self._goals)))
        if any(self._direct.requests.values()):
            landed = self._fetch(self._direct, self._loader, group, report, advance)
            for owner, rows in landed.items():
                self._arrays[owner].update((device, row[0]) for device, row in rows.items())
        for batch, wanted in zip(self._batches, self._awaited, strict=True):
            before = memory.live_bytes()
            landed = self._fetch(wanted, self._waiting, group, report, advance)
            start = time.perf_counter()
            self._transform(batch, landed)
            _settle(before)
            took = time.perf_counter() - start
            report.stages["transforms"] = report.stages.get("transforms", 0.0) + took
        report.framework, report.tensors, report.result_bytes = "jax", len(self._goals), 0
        return self._backend.assemble(self._whole(n, report) for n in range(len(self._goals)))

    def _bytes(self, goal: Goal) -> int:
        """Bytes of a leaf that this process is to hold, those of replicas counted once."""
        shares = self._backend.shares(goal.sharding, goal.shape)
        boxes = {share.box for share in shares if share.process == self._backend.rank}
        return sum(goal.recipe.dtype.size_of(shape_of(box)) or 0 for box in boxes)

    def _fetch(
        self, wanted: _Wanted, loader: Loader, group: Any, report: Report, advance: Advance
    ) -> dict[int, dict[int, list[Any]]]:
        """The arrays that landed, in order, by what they are for and by the device's number."""
        one = Report()
        kept = buffers.live_bytes() - self._held
        fetched = mesh_load.fetch(
            wanted.requests, loader, self._backend, group=group, report=one, advance=advance
        )
        one.peak_bytes += max(0, kept)
        if loader is self._waiting:
            one.aliased_bytes = 0
        report.add(one)
        landed: dict[int, dict[int, list[Any]]] = {}
        for request, owner, arrays in zip(wanted.mine, wanted.owners, fetched, strict=True):
            for device, array in zip(request.devices, arrays, strict=True):
                landed.setdefault(owner, {}).setdefault(device, []).append(array)
        return landed

    def _transform(
        self, batch: Sequence[BatchItem], landed: dict[int, dict[int, list[Any]]]
    ) -> None:
        """Makes what a batch adds to its leaves; what was fetched is released."""
        number = 0
        for item in batch:
            # Devices whose parts are made alike run one function together.
            alike: dict[Transform, tuple[list[int], list[list[Any]]]] = {}
            for part in item.parts:
                devices, rows = alike.setdefault(part.transform, ([], []))
                found = landed.pop(number, {})
                devices.extend(found)
                rows.extend(found.values())
                number += 1
            for transform, (devices, rows) in alike.items():
                if devices:
                    self._make(item, transform, devices, rows)
        # Of several stretches of a leaf the last has what the others were donated to.
        whole = {item.owner: item.last for item in batch}
        for owner, last in whole.items():
            arrays, sharding = self._arrays[owner], self._goals[owner].sharding
            jax_transforms.wait(list(arrays.values()))
            for device in list(arrays) if last else ():
                arrays[device] = jax_transforms.move(arrays.pop(device), sharding)

    def _make(
        self, item: BatchItem, transform: Transform, numbers: list[int], rows: list[list[Any]]
    ) -> None:
        arrays = self._arrays[item.owner]
        devices = tuple(map(self._backend.device, numbers))
        wholes: list[Any] = []
        if item.start is not None:
            if numbers[0] not in arrays:
                arrays.update(self._empty(self._goals[item.owner], numbers))
            wholes = [arrays.pop(number) for number in numbers]
        made = jax_transforms.run(transform, devices, rows, wholes, item.start or ())
        wholes.clear()
        arrays.update(zip(numbers, made, strict=True))

    def _empty(self, goal: Goal, numbers: Sequence[int]) -> dict[int, Any]:
        """An array of zeros for the shard of each of some devices."""
        shape, dtype = arrives(goal.recipe.dtype, goal.sharding.shard_shape(goal.shape))
        devices = tuple(map(self._backend.device, numbers))
        return dict(zip(numbers, jax_transforms.empty(devices, shape, dtype), strict=True))

    def _whole(self, number: int, report: Report) -> Whole:
        goal = self._goals[number]
        arrays, self._arrays[number] = self._arrays[number], {}
        if 0 in goal.shape and not arrays:
            shares = self._backend.shares(goal.sharding, goal.shape)
            mine = [share.device for share in shares if share.process == self._backend.rank]
            arrays = self._empty(goal, mine)
        report.result_bytes += sum(array.nbytes for array in arrays.values())
        return Whole(goal.shape, goal.recipe.dtype, goal.sharding, arrays)


def _sources(
    parts: Iterable[LeafPart], *, separate: bool = False
) -> Iterator[tuple[int, TensorShares]]:
    """What parts are made of, in order, with the number of the part."""
    for number, part in enumerate(parts):
        for info, box in part.sources:
            held: tuple[Share, ...] = tuple(share._replace(box=box) for share in part.holders)
            recipe = part.recipe
            yield number, TensorShares(info, recipe.landed, recipe.checked, held, separate)


def _least_for_readers(
    requests: Sequence[Request],
    index: Index,
    sources: Sequence[Source],
    adapter: JaxMeshAdapter,
    options: LoadOptions,
) -> int:
    """The least overhead that leaves readers their slots beside what waits on this process."""
    if not requests:
        return 0
    free = options.replace(allocator="mfload", max_host_overhead=None, max_device_overhead=None)
    found = Session(Loader(index, sources, adapter, free), requests).limits
    if adapter.devices:
        return found.least_on_device * _SLOTS
    return found.least * (_SLOTS if adapter.on_host else 1)


def _settle(before: int) -> None:
    """Waits until what was landed is gone: XLA lets go of it in threads that need the GIL."""
    end = time.monotonic() + _PATIENCE
    while memory.live_bytes() > before and time.monotonic() < end:
        time.sleep(_TICK)
