"""Assembling: how each leaf of a tree of JAX's is made, and its parts put together.

What is stored as a leaf wants it lands in place, in one fetch. The rest comes in batches, within
the overhead: what a batch is made of waits on the host until one call copies a leaf to its devices
(see `host_leaves`), or on these until compiled functions have run (see `jax_transforms`).
"""

from __future__ import annotations

import collections
import functools
import hashlib
import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import SingleDeviceSharding

from mfload.cuda import memory
from mfload.frameworks import jax_adapter
from mfload.frameworks.base import Adapter
from mfload.frameworks.jax_memory import Uncommitter, laid_out
from mfload.frameworks.numpy_adapter import NumpyAdapter
from mfload.frameworks.several import InPlaceAdapter
from mfload.index import Index
from mfload.io import buffers
from mfload.loading.allocate import check_host
from mfload.loading.session import Loader, Session
from mfload.mesh import base, load as mesh_load
from mfload.mesh.base import DeviceShare, TensorShares, Whole
from mfload.mesh.jax_backend import JaxBackend, JaxMeshAdapter, arrives, moved
from mfload.options import OVERHEAD, LoadOptions
from mfload.planning import request
from mfload.planning.extents import c_strides
from mfload.planning.memory import Ledger, grouped
from mfload.planning.request import Request, stored_bytes
from mfload.planning.slicing import shape_of
from mfload.report import Report
from mfload.sources.base import Source
from mfload.trees import batches, host_leaves, jax_transforms
from mfload.trees.batches import BatchItem, LeafPart
from mfload.trees.landing import Landing, Target
from mfload.trees.numpy_leaves import NumpyLeaves
from mfload.trees.recipe import Recipe, new_row
from mfload.trees.transforms import Shape, Transform

Advance = Callable[[int], None] | None


class Goal(NamedTuple):
    """A leaf that is to be filled: its recipe, and its place (see `jax_shardings.LeafPlace`).

    Without a sharding it is one of NumPy's.
    """

    recipe: Recipe
    sharding: Any
    committed: bool = True
    form: Any = None

    @property
    def shape(self) -> Shape:
        """In elements."""
        return self.recipe.transform.shape


class _Kind(NamedTuple):
    """How leaves with the same transform, dtypes and sharding are made.

    Attributes:
        nbytes: What this process is to hold of one, replicas counted once.
        lands: Numbers of tensors, and the shares of what lands in its place as it is.
        alone: The device that holds it whole, as a plain load gives it, and whether it is committed
            to that; None for any other.
        separate: Whether devices that hold the same part get memory of their own.
        on_host: How they are made on the host; None if they are not.
        compiled: Whether compiled functions make what does not land in its place.
    """

    nbytes: int
    separate: bool
    lands: tuple[tuple[int, tuple[DeviceShare, ...]], ...] = ()
    alone: Any = None
    on_host: host_leaves.Kind | None = None
    compiled: bool = False


class _Wanted(NamedTuple):
    """Requests of all processes, those of this one, and for each the number of what it is for.

    Those behind the last that has a number land in memory that is there.
    """

    requests: dict[int, list[Request]]
    mine: list[Request]
    owners: list[int]


class _Step(NamedTuple):
    """A batch: what is fetched, by what, and what makes leaves of it.

    `prepare` makes memory that is read into, of which leaves keep so many bytes.
    """

    wanted: _Wanted
    loader: Loader
    make: Callable[[_Wanted, list[Any]], None]
    prepare: Callable[[], None] | None = None
    kept: int = 0


class _Leaves(NamedTuple):
    """Which leaves are made in which way, by number."""

    direct: list[tuple[int, TensorShares]]
    compiled: list[tuple[int, list[LeafPart]]]
    on_host: list[tuple[int, host_leaves.Kind]]


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
        self._files = index, sources
        self._arrays: list[dict[int, Any]] = [{} for _ in goals]  # By number of the device.
        self._whole: dict[int, Any] = {}  # Those that are made at once, by number.
        # Numbers of leaves by the device that holds them, and whether they are committed to it.
        self._alone: dict[tuple[Any, bool], list[int]] = {}
        self._held = self._nbytes = self._placed = 0
        self._of_numpy = [n for n, goal in enumerate(goals) if goal.sharding is None]
        self._numpy: NumpyLeaves | None = None
        if self._of_numpy:
            recipes = [goals[number].recipe for number in self._of_numpy]
            self._numpy = NumpyLeaves(index, sources, recipes, options)
        leaves = self._decide()
        self._direct = self._wanted(leaves.direct)
        self._loader = Loader(index, sources, backend.adapter(), options)
        self._steps = self._batches(leaves)

    def _decide(self) -> _Leaves:
        """How each leaf is made; those that one device holds whole, and NumPy's, are noted."""
        made, kinds = _Leaves([], [], []), dict[Any, _Kind]()
        for number, goal in enumerate(self._goals):
            recipe, sharding, committed, _ = goal
            if sharding is None:
                continue
            # By id first, since hashes take longer: most alike leaves share these objects.
            key = id(recipe.transform), id(recipe.dtype), id(recipe.landed), id(sharding)
            if (kind := kinds.get(key)) is None:
                names = recipe.dtype.name, recipe.landed.name
                same = recipe.transform, names, sharding, committed
                if same not in kinds:
                    kinds[same] = self._kind(goal)
                kind = kinds[key] = kinds[same]
            self._nbytes += kind.nbytes
            if kind.alone is not None:
                self._alone.setdefault(kind.alone, []).append(number)
                self._placed += kind.nbytes
                continue
            made.direct.extend((number, e) for e in _shares(recipe, kind.lands, kind.separate))
            if kind.on_host is not None:
                made.on_host.append((number, kind.on_host))
                self._placed += kind.on_host.result
            elif kind.compiled:
                made.compiled.append((number, self._compiled_parts(goal)))
        return made

    def _batches(self, leaves: _Leaves) -> list[_Step]:
        """The steps of what does not land in its place; refuses an overhead that is too small."""
        (index, sources), adapter, options = self._files, self._loader.adapter, self._options
        # What a transform is to run on waits where it runs.
        ledger = Ledger(options, device=bool(adapter.devices))
        if ledger.given is not None:
            parts = (part for _, some in leaves.compiled for part in some)
            wanted = self._wanted(batches.sources(parts)).mine
            least = _least_for_readers(wanted, index, sources, adapter, options)
            if adapter.on_host:
                wanted = self._wanted(self._sources_of(leaves.on_host)).mine
                host = NumpyAdapter()
                least = max(least, _least_for_readers(wanted, index, sources, host, options))
            ledger.most = max(ledger.most, least)  # With so much, it shows what leaves take.
        slots, waiting = ledger.split()
        compiled = list(batches.batches(leaves.compiled, waiting))
        items = itertools.chain.from_iterable(compiled)
        self._check_overhead(ledger, items, on_host=adapter.on_host)
        options = options.replace(allocator="mfload")
        on_host = options.replace(max_host_overhead=slots, max_device_overhead=None)
        if adapter.devices or adapter.on_host:
            # Elsewhere what waits is copied to its device, and slots are gone by then.
            options = options.replace(**{ledger.name: slots})
        waits, steps = Loader(index, sources, adapter, options), list[_Step]()
        for batch in compiled:
            wanted = self._wanted(batches.sources(part for item in batch for part in item.parts))
            steps.append(_Step(wanted, waits, functools.partial(self._transform, batch)))
        for batch in grouped(leaves.on_host, waiting, lambda each: each[1].nbytes):
            steps.append(self._on_host(dict(batch), on_host))
        return steps

    def _on_host(self, batch: dict[int, host_leaves.Kind], options: LoadOptions) -> _Step:
        """The step that makes some leaves on the host."""
        memory: dict[int, Any] = {}
        landing = Landing(memory, 1)  # All else has the number 0.
        for number, kind in batch.items():
            if kind.joined and kind.box is not None:
                recipe = self._goals[number].recipe
                landing.add(number, recipe, kind.box, c_strides(shape_of(kind.box), 1))
        apart = [each for each in batch.items() if each[0] not in landing]
        wanted = self._wanted(self._sources_of(apart))
        adapter: Adapter = NumpyAdapter()
        if not landing.requests:
            loader = Loader(*self._files, adapter, options)
            return _Step(wanted, loader, functools.partial(self._arrange, batch, {}))
        wanted.mine.extend(landing.requests)
        loader = Loader(*self._files, InPlaceAdapter(adapter, memory), options)
        wholes: dict[int, Any] = {}

        def prepare() -> None:
            for number in landing:
                box, dtype = batch[number].box, batch[number].dtype
                assert box is not None
                shape = shape_of(box)
                held = wholes[number] = buffers.allocate(math.prod(shape) * dtype.itemsize)
                landing.give(number, Target(held, held.ctypes.data, ()))

        def make(wanted: _Wanted, fetched: list[Any]) -> None:
            memory.clear()
            self._arrange(batch, wholes, wanted, fetched)

        kept = sum(batch[number].nbytes for number in landing if batch[number].take is not None)
        return _Step(wanted, loader, make, prepare, kept)

    def _kind(self, goal: Goal) -> _Kind:
        recipe, sharding, committed, _ = goal
        shape, rank = goal.shape, self._backend.rank
        held = self._backend.shares(sharding, shape)
        boxes = {share.box for share in held if share.process == rank}
        nbytes = sum(recipe.dtype.size_of(shape_of(box)) or 0 for box in boxes)
        separate = self._backend.separate(sharding, recipe.dtype, self._options)
        kind = _Kind(nbytes, separate)
        if recipe.transform.plain:
            one = isinstance(sharding, SingleDeviceSharding) and jax.process_count() == 1
            if one and self._backend.in_default_memory(sharding):
                return kind._replace(alone=(self._backend.device(held[0].device), committed))
            return kind._replace(lands=((0, held),))
        if 0 in shape:
            return kind  # There is nothing to read.
        lands: list[tuple[int, tuple[DeviceShare, ...]]] = []
        parts = batches.parts(recipe, held)
        for part in parts:
            if part.transform.plain:
                ((number, box),) = recipe.transform.part(part.box)[1]
                lands.append((number, tuple(each._replace(box=box) for each in part.holders)))
        if len(lands) < len(parts):
            if (made := self._host_kind(goal, partly=bool(lands))) is not None:
                return kind._replace(on_host=made)
            return kind._replace(lands=tuple(lands), compiled=True)
        return kind._replace(lands=tuple(lands))

    def _host_kind(self, goal: Goal, *, partly: bool) -> host_leaves.Kind | None:
        """How a leaf is made on the host, parts of which may land in place; None if it is not.

        Then it is too large, or not moved alone.
        """
        recipe, sharding, *_ = goal
        ledger = Ledger(self._options)
        if recipe.transform.scale is not None or not self._backend.in_default_memory(sharding):
            return None
        elsewhere = self._backend.platform() != "cpu"
        # What waits on the host counts against the limit that others wait within on CPUs alone.
        most = min(host_leaves.MOST, host_leaves.SMALL if elsewhere or partly else OVERHEAD)
        too_large = (recipe.dtype.size_of(goal.shape) or 0) > most
        if too_large or (elsewhere and ledger.given is not None):
            return None
        own = self._options.allocator != "framework"
        made = host_leaves.kind(recipe, sharding, self._backend, own=own)
        return made if made.nbytes <= ledger.split()[1] else None

    def _compiled_parts(self, goal: Goal) -> list[LeafPart]:
        """The parts of a leaf that compiled functions make."""
        recipe, sharding, *_ = goal
        if not self._backend.in_default_memory(sharding):
            # Transforms run in the memory that devices work in, and the result is moved.
            sharding = sharding.with_memory_kind(None)
        parts = batches.parts(recipe, self._backend.shares(sharding, goal.shape))
        return [part for part in parts if not part.transform.plain]

    def _sources_of(
        self, small: Iterable[tuple[int, host_leaves.Kind]]
    ) -> Iterator[tuple[int, TensorShares]]:
        for number, kind in small:
            for each in _shares(self._goals[number].recipe, kind.reads):
                yield number, each

    def _wanted(self, wanted: Iterable[tuple[int, TensorShares]]) -> _Wanted:
        every = list(wanted)
        requests = base.requests(each for _, each in every)
        rank = self._backend.rank
        counts: dict[Any, int] = {}
        owners: list[int] = []
        for owner, (_, _, _, shares, separate) in every:
            key = id(shares), separate
            if key not in counts:
                boxes = [share.box for share in shares if share.process == rank]
                counts[key] = len(boxes if separate else set(boxes))
            owners += [owner] * counts[key]
        return _Wanted(requests, requests.setdefault(rank, []), owners)

    def _check_overhead(self, ledger: Ledger, items: Iterable[BatchItem], *, on_host: bool) -> None:
        """Refuses an overhead in which the transforms can't be done; names the least that does."""
        if ledger.given is None:
            return
        small = "is too small for readers beside transforms; or ask for fewer threads"
        wanted: list[tuple[int, str, str | None]] = [(ledger.most, f"{ledger.name} {small}", None)]
        for item in items:
            recipe, sharding = self._goals[item.owner].recipe, self._goals[item.owner].sharding
            waits = ledger.least(batches.most(item.parts))
            wanted.append((waits, "what the tensor is made of exceeds the overhead", recipe.name))
            if on_host and not self._backend.in_default_memory(sharding):
                # A shard takes host memory twice while it is moved.
                shape = sharding.shard_shape(recipe.transform.shape)
                moved = recipe.dtype.size_of(shape) or 0
                wanted.append((moved, "a shard that is moved exceeds the overhead", recipe.name))
        ledger.check(*max(wanted, key=lambda each: each[0]))

    @property
    def stored_bytes(self) -> int:
        """Bytes of the files that this process wants."""
        every = [self._direct.mine, *(step.wanted.mine for step in self._steps)]
        every += map(self._whole_tensors, self._alone.values())
        of_numpy = 0 if self._numpy is None else self._numpy.stored_bytes
        return sum(map(stored_bytes, every)) + of_numpy

    def _whole_tensors(self, numbers: Sequence[int]) -> list[Request]:
        recipes = [self._goals[number].recipe for number in numbers]
        return [
            new_row(Request, (each.tensors[0], each.landed, None, each.checked, ()))
            for each in recipes
        ]

    def arguments(self) -> Iterator[str]:
        """What is wanted of each leaf: lines that must be the same on all processes."""
        for goal in self._goals:
            shares = goal.sharding and self._backend.shares(goal.sharding, goal.shape)
            digest = hashlib.sha256(repr((goal.recipe, shares)).encode()).hexdigest()[:16]
            yield f"{goal.recipe.name}: {goal.recipe.dtype} {goal.sharding} {digest}"

    def run(self, group: Any, report: Report, advance: Advance) -> list[Any]:
        """Loads an array for each goal; nothing is left half loaded."""
        self._held = buffers.live_bytes()
        fetches = len(self._steps) + len(self._alone) + bool(self._direct.mine)
        fetches += bool(self._of_numpy)
        if fetches > 1 and self._loader.adapter.on_host:
            # Each fetch is checked when its turn comes: what can't end must not begin.
            check_host(self._nbytes)
        for (device, committed), numbers in self._alone.items():
            adapter = jax_adapter.make(device)
            if not committed:
                adapter = adapter.uncommitted()
            requests = {self._backend.rank: self._whole_tensors(numbers)}
            loader = Loader(*self._files, adapter, self._options)
            made = self._fetch(requests, loader, group, report, advance)
            self._whole.update(zip(numbers, made, strict=True))
        if any(self._direct.requests.values()):
            fetched = self._fetch(self._direct.requests, self._loader, group, report, advance)
            for owner, rows in _by_device(self._direct, fetched).items():
                self._arrays[owner].update((device, row[0]) for device, row in rows.items())
            del fetched
        for wanted, loader, make, prepare, stays in self._steps:
            before = memory.live_bytes()
            if prepare is not None:
                prepare()
            fetched = self._fetch(wanted.requests, loader, group, report, advance)
            start = time.perf_counter()
            make(wanted, fetched)
            jax_adapter.wait_for_release(memory.live_bytes, before + stays)
            report.add_stage("transforms", start, time.perf_counter())
        if self._numpy is not None:
            made = self._numpy.run(report, advance)
            self._placed += sum(array.nbytes for array in made)
            self._whole.update(zip(self._of_numpy, made, strict=True))
        report.framework, report.tensors = "jax", len(self._goals)
        report.result_bytes = self._placed
        numbers = [number for number in range(len(self._goals)) if number not in self._whole]
        made = self._backend.assemble(self._assembled(n, report) for n in numbers)
        self._whole.update(zip(numbers, made, strict=True))
        del made
        self._settle()
        return [self._whole.pop(number) for number in range(len(self._goals))]

    def _settle(self) -> None:
        """Gives leaves the layout that they ask for, and commits none to a default device."""
        done = set(itertools.chain.from_iterable(self._alone.values()))
        uncommit = collections.defaultdict[Any, Uncommitter](Uncommitter)
        for number, (recipe, sharding, committed, form) in enumerate(self._goals):
            if form is not None:
                self._whole[number] = laid_out(self._whole[number], form)
            elif not committed and number not in done:
                array = self._whole[number]
                self._whole[number] = uncommit[sharding](array, recipe.dtype, array.shape)

    def _fetch(
        self, requests: base.Requests, loader: Loader, group: Any, report: Report, advance: Advance
    ) -> list[Any]:
        """What landed, in the order of the requests of this process."""
        one = Report()
        kept = buffers.live_bytes() - self._held
        if group is None and not isinstance(loader.adapter, JaxMeshAdapter | InPlaceAdapter):
            # Alike to the devices that requests name, there is one; so they may be columns.
            requests = {rank: request.compact(some) for rank, some in requests.items()}
        fetched = mesh_load.fetch(
            requests, loader, self._backend, group=group, report=one, advance=advance
        )
        one.peak_bytes += max(0, kept)
        if step := next((each for each in self._steps if each.loader is loader), None):
            one.aliased_bytes = step.kept
        report.add(one)
        return fetched

    def _arrange(
        self,
        batch: dict[int, host_leaves.Kind],
        wholes: dict[int, Any],
        wanted: _Wanted,
        fetched: list[Any],
    ) -> None:
        """Makes leaves of a batch on the host; what was fetched, or is there whole, is released."""
        arrays: dict[int, list[Any]] = {number: [whole] for number, whole in wholes.items()}
        wholes.clear()
        for owner, array in zip(wanted.owners, fetched, strict=False):
            arrays.setdefault(owner, []).append(array)
        fetched.clear()
        made = host_leaves.make([(batch[owner], given) for owner, given in arrays.items()])
        jax_transforms.wait(made)
        self._whole.update(zip(arrays, made, strict=True))

    def _transform(self, batch: Sequence[BatchItem], wanted: _Wanted, fetched: list[Any]) -> None:
        """Makes what a batch adds to its leaves; what was fetched is released."""
        landed = _by_device(wanted, fetched)
        fetched.clear()
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
                arrays[device] = moved(arrays.pop(device), sharding.memory_kind)

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

    def _assembled(self, number: int, report: Report) -> Whole:
        goal = self._goals[number]
        arrays, self._arrays[number] = self._arrays[number], {}
        if 0 in goal.shape and not arrays:
            shares = self._backend.shares(goal.sharding, goal.shape)
            mine = [share.device for share in shares if share.process == self._backend.rank]
            arrays = self._empty(goal, mine)
        report.result_bytes += sum(array.nbytes for array in arrays.values())
        return Whole(goal.shape, goal.recipe.dtype, goal.sharding, arrays)


def _by_device(wanted: _Wanted, fetched: list[Any]) -> dict[int, dict[int, list[Any]]]:
    """The arrays that landed, in order, by what they are for and by the device's number."""
    landed: dict[int, dict[int, list[Any]]] = {}
    for one, owner, arrays in zip(wanted.mine, wanted.owners, fetched, strict=True):
        for device, array in zip(one.devices, arrays, strict=True):
            landed.setdefault(owner, {}).setdefault(device, []).append(array)
    return landed


def _shares(
    recipe: Recipe, taken: Iterable[tuple[int, tuple[DeviceShare, ...]]], separate: bool = False
) -> Iterator[TensorShares]:
    """What is wanted of the tensors of a leaf, given their numbers and shares."""
    for number, held in taken:
        yield TensorShares(recipe.tensors[number], recipe.landed, recipe.checked, held, separate)


def _least_for_readers(
    requests: Sequence[Request],
    index: Index,
    sources: Sequence[Source],
    adapter: Adapter,
    options: LoadOptions,
) -> int:
    """The least overhead that leaves readers their slots beside what waits on this process."""
    if not requests:
        return 0
    free = options.replace(allocator="mfload", max_host_overhead=None, max_device_overhead=None)
    found = Session(Loader(index, sources, adapter, free), requests).limits
    if adapter.devices:
        return Ledger.least_for(found.least_on_device)
    return Ledger.least_for(found.least) if adapter.on_host else found.least
