"""Neurons of sparse feed-forward layers: each step reads those that are about to fire.

A layer has a matrix of bundles (see `bundles`), allocated once; or one for each of their parts, for
frameworks that would copy a part out of it. New neurons take the rows of those that left, and the
last rows close gaps, so that the matrices have none.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from types import MappingProxyType, ModuleType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from mfload import errors
from mfload.io import buffers
from mfload.io.gather import ReadColumns
from mfload.ondemand import bundles, policies
from mfload.ondemand.cache import checked_wait, layer_in, numbers
from mfload.ondemand.pools import Caches
from mfload.ondemand.rows import RowCache
from mfload.ondemand.store import RowPart, Slots, Store
from mfload.options import Options, byte_count
from mfload.planning.selection import compiled
from mfload.sources.base import ClosedAtEnd

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from mfload.frameworks import Framework
    from mfload.io.gather import Gather
    from mfload.ondemand.cache import Fill, Lease, Numbers
    from mfload.ondemand.policies import Lru
    from mfload.sources import PathOrBytes


class Matrices(NamedTuple):
    """Rows of the projections of a layer, [rows, width] each; row n of all is one neuron.

    In NumPy and PyTorch they are views, with strides, of one array [rows, parts, width].

    Attributes:
        gate: None if the layer has none.
    """

    up: Any
    down: Any
    gate: Any = None


class Neurons(ClosedAtEnd):
    """The neurons of a layer that are in memory: those asked for, and what the window keeps.

    Their rows stay as they are until the end of the block and as long as an array of them lives,
    through views, DLPack capsules and running computations. Arrays of NumPy refuse writing; those
    of other frameworks must not be written to.

    Attributes:
        rows: The number of each neuron, int64[used].
        used: How many there are.
    """

    def __init__(self, store: Store, part: RowPart, lease: Lease) -> None:
        self._store, self._part = store, part
        self._lease: Lease | None = lease
        self._made: dict[bool, Matrices] = {}
        self.rows, self.used = lease.keys, len(lease.keys)

    @property
    def up(self) -> Any:
        """Rows of the up-projection: [used, width]."""
        return self._matrices(whole=False).up

    @property
    def down(self) -> Any:
        """Columns of the down-projection, as rows: [used, width]."""
        return self._matrices(whole=False).down

    @property
    def gate(self) -> Any:
        """Rows of the gate: [used, width]; None if the layer has none."""
        return self._matrices(whole=False).gate

    @property
    def whole(self) -> Matrices:
        """The same in matrices of one shape for all requests, [capacity, width].

        So a jitted function is compiled once. From row `used` on they hold what is left of other
        neurons, and may change: `jnp.where(jnp.arange(capacity) < used, hidden, 0)`.
        """
        return self._matrices(whole=True)

    def _matrices(self, whole: bool) -> Matrices:
        if self._lease is None:
            raise errors.UsageError("the block of these neurons is over")
        if whole not in self._made:
            store, lease, (_, dtype, (_, parts, width), *_) = self._store, self._lease, self._part
            rows = lease.capacity if whole else self.used
            if store.adapter.slices_are_views:
                one = store.array(lease.whole(), dtype, (rows, parts, width), 0)
                arrays = [one[:, n] for n in range(parts)]
            else:
                each = map(lease.whole, range(parts))
                arrays = [store.array(memory, dtype, (rows, width), 0) for memory in each]
            self._made[whole] = Matrices(*arrays)
        return self._made[whole]

    def close(self) -> None:
        """Lets go of the rows, if no array of them lives."""
        self._lease, self._made = None, {}


class NeuronCache(Caches):
    """Neurons of the feed-forward layers of a model, read from bundles when they are about to fire.

        with mfload.ondemand.NeuronCache("bundled.safetensors", budget="4GiB") as cache:
            rows = predictors[layer].predict(x)
            with cache.use(layer, rows) as part:
                y = np.maximum(x @ part.up.T, 0) @ part.down

    The file is one that `mfload.ondemand.bundle` wrote. All other tensors, such as attention and
    embeddings, stay in memory. What is left of the budget is allocated when the cache is made, and
    each layer gets the same share of its neurons. Any number of threads may use it at once; while
    one computes with a layer, neurons that another reads come behind, and none leaves.

    If O_DIRECT can't read neurons, because their bytes are not multiples of the disk's unit (512 or
    4096), they are read through the page cache.

    Args:
        path: As for `mfload.load`.
        budget: Bytes, or a text such as "2GiB".
        window: Neurons stay that the last so many requests of a layer asked for, that under way
            included, and no others; they leave earlier only if there is no room. None: they leave
            only then, as `policy` says.
        framework: As for `mfload.load`. The arrays lie in host memory.
        policy: "lru", "lfu", "pin+lru", or a function of (keys, capacity) to an object of a class
            of `mfload.ondemand.policies`, for each layer.
        resident: A regex for the names of tensors that stay in memory. Default: all that are no
            bundles.
        options: How files are opened and read: `engine` ("auto", "pread" or "direct"),
            `page_cache`, `threads`, and `timeout`, which opening has, and each request.
        gather: What reads: "auto", "io_uring" or "threads".
        wait: Seconds to wait for rows that are pinned.

    Attributes:
        resident: The tensors that stay in memory, by name.
        neurons: By layer, how many it has.
        capacity: By layer, how many of them can be in memory.

    Raises:
        UsageError: An argument is invalid.
        FormatError: The file has no bundles, or is malformed.
        MemoryLimitError: The budget has no room for what stays, and a neuron of each layer; or the
            system refuses it.
        UnsupportedDtypeError, UnsupportedShapeError: No array can hold a tensor.
        SourceError: A file is missing or can't be read.
    """

    _opens = Store

    def __init__(
        self,
        path: PathOrBytes | Sequence[PathOrBytes],
        budget: int | str = 2 << 30,
        window: int | None = 5,
        framework: Framework | ModuleType = "numpy",
        policy: str | Callable[[int, int], Lru] = "lru",
        *,
        resident: str | re.Pattern[str] | None = None,
        options: Options | None = None,
        gather: Literal["auto", "io_uring", "threads"] = "auto",
        wait: float = 10.0,
    ) -> None:
        wait = checked_wait(wait)
        self._budget = byte_count("budget", budget, 1)
        if window is not None:
            policy = f"window({byte_count('window', window, 1)})"
        stays = None if resident is None else compiled(resident, "resident=").search

        def wanted(name: str) -> bool:
            return stays is None or stays(name) is not None or name.endswith(bundles.SUFFIX)

        opens = partial(self._opens, path, wanted, framework, gather=gather)
        store, layers = _opened(opens, options or Options())
        try:
            found = {part.name for part in layers.values()}
            kept = [store.part(info) for info in store.tensors if info.name not in found]
            slots = Slots(store, [[each for each in kept if stays is None or stays(each.name)]])
            count = 1 + sum(len(_slots(store, part)) for part in layers.values())
            # Each arena begins on a page.
            fixed = slots.nbytes + buffers.PAGE * count
            capacities = self._divide([*layers.values()], fixed)
            sizes = [*zip(layers.values(), capacities, strict=True)]
            # Before there is memory, which an error that is kept would keep.
            chosen = [policies.make(policy, part.shape[0], capacity) for part, capacity in sizes]
            self.resident: Mapping[str, Any] = MappingProxyType(slots.load()[0])
            shapes = [(n, each) for part, n in sizes for each in _slots(store, part)]
            arenas = iter(store.arenas(shapes))
        except BaseException:
            vars(self).clear()
            store.close()
            raise
        self._store, self._background = store, store.background()
        more = self._how("neuron", wait)
        self._layers: dict[int, tuple[RowPart, RowCache]] = {}
        for (layer, part), each in zip(layers.items(), chosen, strict=True):
            mine = [*islice(arenas, len(_slots(store, part)))]
            fill = _fill(store.gather, part)
            self._layers[layer] = part, RowCache(fill, part.shape[0], mine, each, **more)
        self.neurons = {layer: part.shape[0] for layer, part in layers.items()}
        self.capacity = {layer: cache.capacity for layer, (_, cache) in self._layers.items()}

    def _divide(self, parts: Sequence[RowPart], fixed: int) -> list[int]:
        """How many neurons of each layer the budget has room for, beside so many bytes."""
        least = fixed + sum(part.nbytes // part.shape[0] for part in parts)
        if least > self._budget:
            raise errors.MemoryLimitError(
                "the budget has no room for what stays in memory, and a neuron of each layer",
                expected=f"at least {errors.amount(least, self._budget)}",
                found=errors.amount(self._budget, self._budget),
            )
        left, total = self._budget - least, sum(part.nbytes for part in parts)
        return [min(part.shape[0], 1 + left * part.shape[0] // total) for part in parts]

    def use(self, layer: int, rows: Iterable[int] | NDArray[np.int64]) -> Neurons:
        """Neurons of a layer, for a `with` block; those that are not there are read.

        Args:
            layer: Number of the layer, as in the names of its tensors.
            rows: Numbers of neurons, in any order; each counts once.

        Raises:
            UsageError: There is no such layer or neuron; or the cache was closed, or made before a
                fork.
            MemoryLimitError: The budget has no room for so many of the layer at once; or rows are
                pinned by arrays that still live, and none became free in time.
            SourceChangedError: The file is no longer the one that was opened.
            ReadError: The system can't read it.
            LoadTimeoutError: The timeout passed. A read under way keeps its rows until it returns.
        """
        part, cache = self._known(layer)
        return Neurons(self._store, part, cache.use(rows))

    def use_drafts(
        self, layer: int, drafts: Sequence[Iterable[int] | NDArray[np.int64]], acceptance: float
    ) -> Neurons:
        """The same for λ + 1 tokens that speculative decoding verifies at once.

        The neurons of the last α(λ + 1) drafts, rounded up, count for the window as one request;
        what only the others asked for leaves with the next one.

        Args:
            layer: Number of the layer.
            drafts: The numbers of the neurons of each draft, in order.
            acceptance: α, the share of drafts that are expected to be accepted, 0 to 1.

        Raises:
            UsageError: As `use`; or `acceptance` is no share.
            MemoryLimitError, SourceChangedError, ReadError: As `use`.
        """
        acceptance = errors.number("acceptance", acceptance, "0 to 1", lambda n: 0 <= n <= 1)
        part, cache = self._known(layer)
        each = [numbers(rows, "neuron") for rows in drafts]
        none = np.empty(0, np.int64)
        # A product such as 0.7 * 10 is a little more than it should be.
        first = len(each) - math.ceil(acceptance * len(each) - 1e-9)
        counted = np.unique(np.concatenate([none, *each[first:]]))
        return Neurons(self._store, part, cache.use(np.concatenate([none, *each]), counted))

    def prefetch(self, layer: int, rows: Iterable[int] | NDArray[np.int64]) -> None:
        """Has a thread read neurons ahead, the first of them first, as far as there is room now.

        What was asked for before of that layer, and is not begun, is dropped. What fails is read
        again when it is used, and raised then.

        Args:
            layer: Number of the layer.
            rows: Numbers of neurons that are likely to be used next.

        Raises:
            UsageError: As `use`.
        """
        self._known(layer)[1].prefetch(rows)

    def _caches(self) -> Iterable[RowCache]:
        return (cache for _, cache in self._layers.values())

    def _known(self, layer: int) -> tuple[RowPart, RowCache]:
        return layer_in(self._layers, layer, "neurons")


def _layers(store: Store) -> dict[int, RowPart]:
    """The bundles [neurons, parts, width], by layer."""
    made: dict[int, RowPart] = {}
    for each in bundles.bundles(store.index):
        part = made[each.layer] = store.part(store.index[each.tensor])
        if 0 in part.shape:
            raise errors.UnsupportedShapeError(
                "a bundle has no neurons, or neurons without weights",
                file=store.file,
                tensor=part.name,
                found=list(part.shape),
            )
    return made


def _opened(
    opens: Callable[..., Store], how: Options, why: str | None = None
) -> tuple[Store, dict[int, RowPart]]:
    """A store and its bundles; through the page cache, where O_DIRECT can't read neurons.

    `why`: why it can't.
    """
    store = opens(options=how)
    try:
        layers = _layers(store)
        wrong = _unaligned(store, layers.values())
        if wrong is not None and how.engine == "direct":
            raise errors.UsageError(wrong, file=store.file)
    except BaseException:
        store.close()
        raise
    if wrong is not None:
        store.close()
        return _opened(opens, replace(how, engine="pread", page_cache="auto"), wrong)
    if why is not None:
        store.gather.why = f"page cache: {why}"
    return store, layers


def _slots(store: Store, part: RowPart) -> list[int]:
    """Bytes of a neuron in each arena of its layer.

    There is one arena, as a read into one place is the fastest, unless the framework would copy the
    rows of one part out of it.
    """
    count = 1 if store.adapter.slices_are_views else part.shape[1]
    return [part.nbytes // (part.shape[0] * count)] * count


def _unaligned(store: Store, parts: Iterable[RowPart]) -> str | None:
    """Why O_DIRECT can't read neurons, if it can't."""
    unit = store.gather.unit
    for part in parts:
        nbytes, *others = _slots(store, part)
        if part.offset % unit or nbytes % unit:
            return (
                f"a {'row' if others else 'neuron'} of {part.name!r} has {errors.amount(nbytes)}, "
                f"its file begins it at byte {part.offset}, and O_DIRECT takes multiples of {unit}"
            )
    return None


def _fill(gather: Gather, part: RowPart) -> Fill:
    neuron = part.nbytes // part.shape[0]

    def fill(keys: Numbers, addresses: NDArray[np.uint64]) -> tuple[int, int]:
        nbytes = neuron // addresses.shape[1]
        gather.read(ReadColumns.of(part.source, part.offset + keys * neuron, addresses, nbytes))
        return keys.size, keys.size * neuron

    return fill
