"""Filling modules: what is stored goes into the memory that the weights of a module have.

What is stored as a leaf wants it is read straight into the leaf's memory. The rest is read in
batches, arranged by NumPy and copied in, within the overhead. Leaves without memory get new arrays,
which the module is given once everything has arrived on all processes. With `atomic`, all leaves
are filled beside the module and copied into it at that point.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import hashlib
import json
import time
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from mfload import errors
from mfload.errors import counted
from mfload.formats import checkpoint
from mfload.frameworks.numpy_adapter import NumpyAdapter
from mfload.frameworks.several import InPlaceAdapter
from mfload.index import Box
from mfload.io import buffers
from mfload.loading import session
from mfload.loading.allocate import check_host
from mfload.loading.execute import Advance
from mfload.loading.session import Loader, Session
from mfload.mesh import base, load as mesh_load
from mfload.mesh.base import DeviceShare, MeshBackend, TensorShares
from mfload.options import LoadOptions, Options, started
from mfload.planning.extents import c_strides
from mfload.planning.memory import Ledger, grouped
from mfload.planning.request import Request, stored_bytes
from mfload.planning.slicing import shape_of
from mfload.progress import shown
from mfload.report import Report, cleared
from mfload.runtime import gc_paused
from mfload.trees import batches, matching, ties, torn
from mfload.trees.batches import BatchItem, LeafPart
from mfload.trees.landing import Landing, Target
from mfload.trees.matching import Wishes
from mfload.trees.modules import Module, New, stored
from mfload.trees.recipe import OPEN, Leaf, MisfitError, Recipe, brief

# `batches` counts what has landed twice; NumPy may hold two more copies of a part.
_COPIES = 2
_TOGETHER = 16 << 20  # Bytes of new arrays that replace others at once, or the largest one.
_REPLACED = 4  # The part of the overhead that new arrays may take which replace others at once.
_SOON = 64 << 20  # Bytes of a load that is over soon.
_PIECE = 32 << 10  # Characters that a process says at once: a row of a link has room for them.


def load_into(
    target: Any,
    module: Module,
    asked: Wishes,
    path: Any,
    options: Options | None,
    resume: Callable[[], None],
) -> None:
    """Fills a module, which is `target` taken apart; arguments as for `mfload.load_into`.

    It is called while the collector is paused, and calls `resume` unless it is over soon: the
    collector had better look when what was made of each leaf is gone.
    """
    how, wrong = LoadOptions(), None
    try:
        cleared(asked.report)
        how = started(options)
    except Exception as error:  # noqa: BLE001 - raised where the other processes hear of it
        wrong = error
    backend, ranks = module.mesh(once=how.exchange == "once")
    together: Any = contextlib.nullcontext()
    if backend is not None:
        together = mesh_load.together(backend, ranks, how.deadline)
    if backend is not None or module.own_code:  # It waits for others, or for a user's hooks.
        resume()
    done = Report(processes=max(1, len(ranks)))
    filling: Filling | None = None
    try:
        with together as group:
            if wrong is not None:
                raise wrong
            _check(module, asked)
            start = time.perf_counter()
            index, sources = checkpoint.read_every(path, how)
            read = time.perf_counter()
            done.add_stage("headers", start, read)
            with gc_paused():
                loader = Loader(index, sources, module.adapter(), how)
                filling = Filling(module, backend, group, loader, asked.atomic)
                found = filling.match(asked)
                if found.ties:
                    ties.warn(found.ties, index, sources, how)
            done.add_stage("matching", read, time.perf_counter())
            if filling.nbytes > _SOON:
                resume()
            with shown(asked.progress, filling.stored_bytes if asked.progress else 0) as advance:
                filling.run(done, advance)
        filling.install()
        stay = filling.finish(found, strict=asked.strict)
    except BaseException as error:
        if filling is not None and (begun := filling.begun):
            _tell_what_is_torn(target, begun, error)
        errors.let_go(error)
        raise
    filled = {name for number in found.recipes for name in module.leaves[number].names}
    for part, names in torn.of(module.framework, target):
        torn.mark(part, [own for name, own in names.items() if name not in filled])
    if (check := filling.check) is not None:
        check.tell(done)
    _tell(module, asked, done, found.notes, stay)


def _tell(
    module: Module, asked: Wishes, done: Report, noted: Sequence[str], stay: Sequence[str]
) -> None:
    """Fills the report, and warns of tensors that still have no memory; some `stay` as they are."""
    if asked.report is not None:
        notes = [*noted, *done.notes]
        if stay:
            notes.append(f"the checkpoint has nothing for {brief(stay, 3)}: they stay as they are")
        done.notes = tuple(dict.fromkeys(notes))
        vars(asked.report).update(vars(done))
    if bare := module.bare():
        errors.warn(
            f"the module still has {counted(len(bare), 'tensor')} without memory: {brief(bare)}. "
            "The checkpoint has nothing for them, and the module can't be called before they are "
            "set; what it computes and does not save, its own code has to compute"
        )


def _tell_what_is_torn(target: Any, begun: Sequence[str], error: BaseException) -> None:
    error.add_note(
        f"load_into was filling {counted(len(begun), 'tensor')} of the module in place "
        f"({brief(begun)}): some may hold new values, others those from before; load "
        "again, or make the module anew"
    )
    torn.mark(target, {*vars(target).get("mfload_torn", ()), *begun})


def _check(module: Module, asked: Wishes) -> None:
    for name in ("mesh", "shardings", "unmatched", "logical_axis_rules"):
        value = getattr(asked, name)
        if value is not None and (name, value) != ("unmatched", "replicate"):
            raise errors.UsageError(
                f"{name}= is for trees of JAX; a module says itself how it is sharded",
                expected=module.sharded_by,
                found=f"{name}={value!r}",
            )
    asked.check_bools()
    if module.judged and (asked.atomic or asked.names is not None):
        given, without = (
            ("atomic=True", "atomic=False") if asked.atomic else ("names=", "no names=")
        )
        what, expected = f"{given} does not work for modules with load hooks", without
        parts = brief([prefix.removesuffix(".") or "the module" for prefix in module.judged])
        raise errors.UsageError(what, expected=expected, found=parts)


class _Step(NamedTuple):
    """What is fetched at once: requests of each process, by what, and what becomes of it."""

    requests: dict[int, list[Request]]
    loader: Loader
    finish: Callable[[list[Any]], None]


class Filling:
    """Fills the leaves of a module, by number. `loader` has the files, and makes new arrays.

    Attributes:
        made: New arrays, for leaves that have no memory.
        landing: Leaves whose memory is read into.
        nbytes: Of all leaves, as this process holds them.
    """

    def __init__(
        self,
        module: Module,
        backend: MeshBackend | None,
        group: Any,
        loader: Loader,
        atomic: bool,
    ) -> None:
        self._module, self._backend, self._group, self._loader = module, backend, group, loader
        self._rank = 0 if backend is None else backend.rank
        self._numbers = {leaf.name: n for n, leaf in enumerate(module.leaves)}
        self._shardings: dict[int, Any] = {}
        self.nbytes = self._new_bytes = self._copy_bytes = self._count = 0
        self._empty: dict[int, tuple[int, ...]] = {}  # Shapes of new arrays that `put` fills.
        self._put: set[int] = set()  # What was begun to be filled by it.
        self._steps: list[_Step] = []
        self._adapter: InPlaceAdapter | None = None
        self._wish, self._strict = None, True
        self._beside: dict[int, Any] | None = {} if atomic else None  # What `swap` copies.
        self.made: dict[int, New] = {}
        self.landing: Collection[int] = ()

    def match(self, asked: Wishes) -> matching.Matched:
        """Plans everything; what can be refused is refused here, on all processes."""
        index, sources, options = self._loader.index, self._loader.sources, self._loader.options
        forms = self._loader.adapter.forms.items()
        self._wish, self._strict = matching.read_dtype(asked.dtype), asked.strict
        if self._module.own_code:
            targets = matching.Claims(index.tensors.values(), None, asked.mapping).by_target
            names = {name: None for name in targets if name.startswith(self._module.own_code)}
            names |= dict.fromkeys(self._module.own_names)  # Rules may be for these.
            some = (Leaf((name,), OPEN, abstract=True) for name in names)
            self._module.leaves = [*self._module.leaves, *some]
        found = matching.match(
            index,
            self._module.leaves,
            asked.mapping,
            strict=asked.strict,
            dtype=asked.dtype,
            arrays={name for name, form in forms if form.how != "bytes"},
            fits=self._fit,
            picked=matching.picked(index, asked.names),
            judged=self._module.judged,
        )
        options = session.verifying(asked.verify, options, index, sources, found.requests)
        self._loader.options = options
        if self._group is not None:
            recipes = found.recipes.values()
            digests = (hashlib.sha256(repr(each).encode()).hexdigest()[:16] for each in recipes)
            named = zip(recipes, digests, strict=True)
            lines = [f"{each.name}: {each.dtype} {digest}" for each, digest in named]
            mesh_load.agree_on_inputs(self._group, index.columns, sources, options, lines)
            mesh_load.check_whole(options, len(self._group.ranks))
        self.plan(found.recipes)
        return found

    def _fit(self, leaf: Leaf, recipe: Recipe) -> None:
        """Raises MisfitError if what a recipe makes can't lie where the leaf does."""
        if not leaf.abstract and leaf.dtype != recipe.dtype:
            raise MisfitError(
                "wrong dtype",
                f"the module holds {leaf.dtype} and keeps it, {recipe.dtype} is asked for; convert "
                "the module first, or make it without memory",
            )
        if self._backend is not None and leaf.shape != OPEN:
            number = self._numbers[leaf.name]
            given = leaf.name, leaf.shape, self._module.tensors[number], recipe.dtype
            try:
                sharding = self._module.sharding(*given, self._backend)
            except errors.ShardingError as error:
                raise MisfitError("misfit", str(error)) from None
            self._shardings[number] = sharding

    def _box(self, number: int, shape: tuple[int, ...]) -> Box:
        """The part of a leaf that this process holds."""
        sharding = self._shardings.get(number)
        if sharding is None or self._backend is None:
            return tuple((0, size) for size in shape)
        shares = self._backend.shares(sharding, shape)
        return next(share.box for share in shares if share.process == self._rank)

    def plan(self, recipes: Mapping[int, Recipe]) -> None:
        """Plans how leaves are made; raises MemoryLimitError if a limit is too small."""
        options, leaves = self._loader.options, self._module.leaves
        memory: dict[int, Any] = {}
        self._strided = Landing(memory, len(leaves))
        mine = self._held(recipes, memory)
        every = {self._rank: [(box, lands) for box, lands, _ in mine]}
        if self._exchanges:
            said = gather_rows(self._group, every[self._rank]).items()
            every = {
                r: [(tuple(map(tuple, box)), lands) for box, lands in some] for r, some in said
            }
        direct: list[TensorShares] = []
        replaced: list[tuple[int, TensorShares]] = []
        arranged: list[tuple[int, list[LeafPart]]] = []
        taken: dict[int, TensorShares | None] = {}
        held = sorted(every.items())
        for at, (number, recipe) in enumerate(recipes.items()):
            box, _, nbytes = mine[at]
            leaf, strided = leaves[number], number in self._strided
            lands = not strided and all(some[at][1] for _, some in held)  # On all processes.
            self.nbytes += nbytes
            if leaf.shape == OPEN:
                taken[number] = None
            if leaf.abstract:
                self._new_bytes += nbytes
                self.made[number] = New(None, recipe.dtype, self._shardings.get(number))
                if not (lands and nbytes):
                    self._empty[number] = shape_of(box)
            if strided:
                continue
            boxes = [(rank, some[at][0]) for rank, some in held]
            shares = tuple([DeviceShare(rank, number, box) for rank, box in boxes if _filled(box)])
            wanted = TensorShares(recipe.tensors[0], recipe.landed, recipe.checked, shares)
            if not lands:
                if memory.pop(number, None) is None and not leaf.abstract:
                    self._aside(number, recipe)
                if shares:
                    arranged.append((number, batches.parts(recipe, shares)))
            elif number in taken:
                taken[number] = wanted if nbytes else None
            elif leaf.abstract or memory[number] is not None:
                direct.append(wanted)
            else:
                del memory[number]
                replaced.append((nbytes, wanted))
        self._count = len(recipes)
        filled = [n for n in self._strided if not leaves[n].abstract]
        self.landing = () if self._beside else [*(n for n in memory if n < len(leaves)), *filled]
        self._check_beside()
        self._adapter = InPlaceAdapter(self._loader.adapter, memory)
        loader = Loader(self._loader.index, self._loader.sources, self._adapter, options)
        requests = self._requests(direct)
        requests[self._rank] += self._strided.requests
        land = functools.partial(self._land, requests[self._rank])
        self._steps.append(_Step(requests, loader, land))
        self._steps += self._replacing(replaced, loader)
        self._steps += self._arranged(arranged, options)
        self._steps += self._taken(taken, recipes)

    @property
    def _exchanges(self) -> bool:
        """Whether processes may send each other what they read, as it is stored."""
        return self._group is not None and self._loader.options.exchange != "never"

    def _held(
        self, recipes: Mapping[int, Recipe], memory: dict[int, Any]
    ) -> list[tuple[Box, bool, int]]:
        """What this process holds of each leaf: the box, whether it lands there, and its bytes."""
        found: list[tuple[Box, bool, int]] = []
        exchanges = self._exchanges
        # Leaves that are alike share transforms and shardings, which are kept meanwhile.
        kinds: dict[Any, tuple[bool, Box, int]] = {}
        for number, recipe in recipes.items():
            transform, dtype = recipe.transform, recipe.dtype
            key = id(transform), id(dtype), id(self._shardings.get(number))
            if (kind := kinds.get(key)) is None:
                box = self._box(number, transform.shape)
                kind = transform.plain, box, dtype.size_of(shape_of(box)) or 0
                kinds[key] = kind
            lands, box, nbytes = kind
            abstract = self._module.leaves[number].abstract
            if not exchanges and not (lands and abstract) and self._strides(number, recipe, box):
                lands = True
            elif lands and not abstract:
                memory[number] = self._memory(number, recipe)
                lands = memory[number] is not None or self._module.replaces
            found.append((box, lands, nbytes))
        return found

    def _memory(self, number: int, recipe: Recipe) -> Any:
        """The memory of a leaf; what processes exchange is put together on the host."""
        if (beside := self._aside(number, recipe)) is not None:
            return beside.reshape(-1).view(np.uint8)
        found = self._module.memory(number)
        on_host = self._exchanges or not recipe.tensors[0].simple
        return None if on_host and not isinstance(found, np.ndarray) else found

    def _strides(self, number: int, recipe: Recipe, box: Box) -> bool:
        """Whether strides say where in its memory on the host a leaf lands."""
        leaf = self._module.leaves[number]
        if leaf.abstract:
            if leaf.shape != OPEN and not self._loader.adapter.on_host:
                return False
            return self._strided.add(number, recipe, box, c_strides(shape_of(box), 1))
        if (beside := self._aside(number, recipe)) is not None:
            target = Target(beside, beside.ctypes.data, c_strides(beside.shape, 1))
        elif (target := self._module.target(number)) is None:
            return False
        if lands := self._strided.add(number, recipe, box, target.strides):
            self._strided.give(number, target)
        return lands

    def _aside(self, number: int, recipe: Recipe) -> Any:
        """An array for what this process holds of a leaf, until `swap`; None if not `atomic`."""
        if (beside := self._beside) is None:
            return None
        if number not in beside:
            shape = stored(recipe.dtype, shape_of(self._box(number, recipe.transform.shape)))
            beside[number] = np.empty(shape, recipe.dtype.numpy or np.uint8)
        return beside[number]

    def _check_beside(self) -> None:
        self._copy_bytes = sum(each.nbytes for each in (self._beside or {}).values())
        what = "max_host_overhead is too small for the second copy that atomic=True makes"
        Ledger(self._loader.options).check(self._copy_bytes, what)

    def install(self) -> None:
        """Gives the module what has arrived; if `atomic`, all of it though Ctrl-C interrupts."""
        try:
            self._install()
        except KeyboardInterrupt:
            if self._beside is not None:
                self._install()
            raise

    def _install(self) -> None:
        beside = self._beside or {}
        self._put.update(beside)
        for number, array in beside.items():
            self._module.put(number, (0,) * array.ndim, array)
        self._module.install(self.made, self.landing)
        self._put.difference_update(beside)

    def _replacing(self, leaves: Sequence[tuple[int, TensorShares]], loader: Loader) -> list[_Step]:
        """The steps of what is replaced: the new arrays of a batch lie beside the old ones."""
        # The readers may need the rest. Keras's own loader holds the largest weight twice as well.
        limit = Ledger(loader.options).share(_REPLACED)
        limit = min(limit, max([_TOGETHER, *(nbytes for nbytes, _ in leaves)]))
        together = grouped(leaves, limit, lambda each: each[0])
        every = [self._requests(wanted for _, wanted in group) for group in together]
        return [
            _Step(requests, loader, functools.partial(self._replace, requests[self._rank]))
            for requests in every
        ]

    def _replace(self, requests: Sequence[Request], fetched: list[Any]) -> None:
        made = {
            request.devices[0]: New(array, request.dtype, None)
            for request, array in zip(requests, fetched, strict=True)
        }
        self._put.update(made)
        self._module.install(made, ())

    def _arranged(
        self, leaves: Sequence[tuple[int, list[LeafPart]]], options: LoadOptions
    ) -> list[_Step]:
        """The steps of what is not stored as it is wanted; refuses limits that are too small."""
        ledger, floor = Ledger(options), session.least_overhead(options)
        (slots, waiting), gathered = ledger.split(floor), 0

        def check(waits: int, recipe: Recipe) -> None:
            what = "max_host_overhead is too small for what the tensor is made of"
            ledger.check(ledger.least(waits, floor), what, recipe.name)

        if ledger.given is not None and self._module.replaces and leaves:
            # What is assigned in one is put together before, of parts that should not be tiny.
            recipes = (some[0].recipe for _, some in leaves)
            gathered, recipe = max(((_nbytes(r), r) for r in recipes), key=lambda each: each[0])
            check(gathered + gathered // 8, recipe)
        on_host = options.replace(allocator="mfload", max_host_overhead=slots)
        loader = Loader(self._loader.index, self._loader.sources, NumpyAdapter(), on_host)
        steps: list[_Step] = []
        for batch in batches.batches(leaves, (waiting - gathered) // _COPIES):
            for item in batch:
                check(_COPIES * batches.most(item.parts) + gathered, item.parts[0].recipe)
            parts = [part for item in batch for part in item.parts]
            requests = self._requests(share for _, share in batches.sources(parts))
            if self._group is not None and self._backend is not None:
                mesh_load.exchanged(requests, on_host, self._backend, loader.sources)
            steps.append(_Step(requests, loader, functools.partial(self._arrange, batch)))
        # What can't be done is refused before anything is filled.
        if steps:
            Session(loader, [each for step in steps for each in step.requests[self._rank]])
        return steps

    def _taken(
        self, taken: Mapping[int, TensorShares | None], recipes: Mapping[int, Recipe]
    ) -> list[_Step]:
        """The steps of what the module's own code takes, of one or several of its parts."""
        options, own = self._loader.options, self._module.own_code
        if not own:
            return []
        given = self._loader.index, self._loader.sources, self._module.own_adapter(), options
        loader, ledger = Loader(*given), Ledger(options)
        parts = {prefix: list[int]() for prefix in own}
        for number in taken:
            name = self._module.leaves[number].name
            parts[next(prefix for prefix in own if name.startswith(prefix))].append(number)
        units: list[tuple[int, tuple[str, list[int]]]] = []
        for prefix, numbers in parts.items():
            nbytes = sum(_nbytes(recipes[n]) for n in numbers)
            what = "max_host_overhead is too small for what a module's load hooks take at once"
            ledger.check(nbytes, what, recipes[numbers[0]].name if numbers else None)
            units.append((nbytes, (prefix, numbers)))
        steps: list[_Step] = []
        for group in grouped(units, _TOGETHER, lambda unit: unit[0]):
            some = dict(part for _, part in group)
            wanted = (taken[n] for numbers in some.values() for n in numbers)
            requests = self._requests(each for each in wanted if each is not None)
            take = functools.partial(self._take, some, requests[self._rank])
            steps.append(_Step(requests, loader, take))
        return steps

    def _take(
        self, parts: Mapping[str, list[int]], requests: Sequence[Request], fetched: list[Any]
    ) -> None:
        self._put.update(*parts.values())
        self._land(requests, fetched)
        for prefix, numbers in parts.items():
            state = {self._module.leaves[n].name: self.made.pop(n).array for n in numbers}
            self._module.take(prefix, state, self._wish, strict=self._strict)

    def finish(self, found: matching.Matched, *, strict: bool) -> list[str]:
        """Ends the load; the names of what stays as it is."""
        leaves = self._module.leaves
        stay = [leaf for n, leaf in enumerate(leaves) if leaf.held and n not in found.recipes]
        if not self._module.judged:
            return [leaf.name for leaf in stay]
        names = [name for leaf in stay if leaf.shape != OPEN for name in leaf.names]
        missing, extra, wrong = self._module.finish(names, found.stray)
        if strict:
            wrong += (f"missing: {name}: nothing in the checkpoint goes there" for name in missing)
            wrong += (f"extra: {name}: the module has no place for it" for name in extra)
        if wrong:
            raise errors.MappingError(
                "the checkpoint does not fit the module, says load_state_dict with its hooks",
                expected="what load_state_dict takes; missing and extra names: or strict=False",
                problems=tuple(wrong),
            )
        return missing

    def _requests(self, wanted: Iterable[TensorShares]) -> dict[int, list[Request]]:
        return {self._rank: []} | base.requests(wanted)

    @property
    def stored_bytes(self) -> int:
        """Bytes of the files that this process wants."""
        return sum(stored_bytes(step.requests[self._rank]) for step in self._steps)

    @property
    def check(self) -> Any:
        """What compares the tensors with a manifest; None if nothing does."""
        return self._loader.options.check

    @property
    def begun(self) -> list[str]:
        """Names of what may have been written to in place."""
        some = self._put.union(self.landing if self._adapter and self._adapter.lent else ())
        return [self._module.leaves[number].name for number in sorted(some)]

    def run(self, report: Report, advance: Advance | None) -> None:
        """Fills memory and makes new arrays."""
        on_host = self._loader.adapter.on_host
        check_host(self._copy_bytes + (self._new_bytes if on_host else 0))
        held = buffers.live_bytes()
        for number, shape in self._empty.items():
            array = self._module.empty(number, shape, self.made[number].dtype)
            self.made[number] = self.made[number]._replace(array=array)
            if number in self._strided and (target := self._module.target(number)) is not None:
                self._strided.give(number, target)
        steps, self._steps = self._steps, []  # They refer to this object.
        for requests, loader, finish in steps:
            one, kept = Report(), buffers.live_bytes() - held
            if not any(requests.values()):
                fetched = []
            elif self._group is None or self._backend is None:
                fetched = loader.load(requests[self._rank], report=one, advance=advance)
            else:
                given = requests, loader, self._backend
                fetched = mesh_load.fetch(*given, group=self._group, report=one, advance=advance)
            one.peak_bytes += max(0, kept)
            if loader.adapter is not self._adapter:
                one.aliased_bytes = 0
            report.add(one)
            start = time.perf_counter()
            finish(fetched)
            report.add_stage("transforms", start, time.perf_counter())
        report.framework, report.tensors = self._loader.adapter.name, self._count
        report.result_bytes = self.nbytes
        report.peak_bytes += self._copy_bytes

    def _land(self, requests: Sequence[Request], fetched: list[Any]) -> None:
        for request, array in zip(requests, fetched, strict=True):
            if (number := request.devices[0]) in self.made:
                self.made[number] = self.made[number]._replace(array=array)

    def _arrange(self, batch: Sequence[BatchItem], fetched: list[Any]) -> None:
        arrays = iter(fetched)
        for item in batch:
            beside = (self._beside or {}).get(item.owner)
            if item.owner not in self.made and beside is None:
                self._put.add(item.owner)
            for part in item.parts:
                if self._rank in (share.process for share in part.holders):
                    given = [next(arrays) for _ in part.sources]
                    with np.errstate(all="ignore"):  # A product may be out of a dtype's range.
                        made = np.asarray(part.transform.evaluate(given, np))
                    start = item.start or (0,) * made.ndim
                    if beside is None:
                        self._module.put(item.owner, start, made)
                    else:
                        spans = zip(stored(part.recipe.dtype, start), made.shape, strict=True)
                        beside[tuple(slice(at, at + n) for at, n in spans)] = made


def _filled(box: Box) -> bool:
    """Whether a box has elements."""
    return all(start < stop for start, stop in box)


def _nbytes(recipe: Recipe) -> int:
    return recipe.dtype.size_of(recipe.transform.shape) or 0


def gather_rows(group: Any, rows: Any) -> dict[int, Any]:
    """The rows of each process, by rank: a sharding may know only some of the processes."""
    text = base64.b85encode(zlib.compress(json.dumps(rows).encode())).decode()
    sizes = group.gather("sizes", str(len(text)))
    said = dict.fromkeys(sizes, "")
    for at in range(0, max(map(int, sizes.values())), _PIECE):
        for rank, piece in group.gather("parts", text[at : at + _PIECE]).items():
            said[rank] += piece
    return {rank: json.loads(zlib.decompress(base64.b85decode(said[rank]))) for rank in said}
