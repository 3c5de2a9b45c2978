"""What the caches need of a checkpoint: its tensors, slots to read them into, arrays over those.

    store = Store(path, matches, "jax")               # Reads headers, and opens the files.
    parts = [[store.part(info)] for info in store.tensors]  # What each key stands for.
    slots = Slots(store, parts)                       # Where it lands, and which reads bring it.
    [arena] = store.arenas([(8, slots.nbytes)])       # Memory: uint8[8, bytes of a slot].
    cache = SlotCache(slots.fill, len(parts), [arena], policy)
    lease = cache.use([3])
    arrays = slots.arrays(3, lease.memory(0))         # By name; they keep the lease.

What is not read key by key, such as the rows of a matrix, calls `store.gather.read` itself, with
`RowPart.source` as number of the source, and makes arrays by `store.array`. Offsets, addresses and
lengths of its reads are multiples of `store.gather.unit`.

A process may fork while a disk writes to slots, if slots that are not read by one call share no
page: the kernel copies a page that both processes have when one of them writes to it, and nothing
but the disk writes to the pages of these.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterable, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mfload import errors, frameworks
from mfload.dlpack import View
from mfload.dtypes import DType
from mfload.formats import checkpoint
from mfload.index import Index, TensorInfo
from mfload.io import buffers
from mfload.io.gather import Engine, ReadColumns, open_gather
from mfload.loading import session
from mfload.ondemand.background import Background
from mfload.ondemand.report import OndemandReport
from mfload.options import Options, started
from mfload.planning.request import Request
from mfload.sources.base import ClosedAtEnd

if TYPE_CHECKING:
    from mfload.io.buffers import Bytes
    from mfload.ondemand.cache import Numbers
    from mfload.sources import PathOrBytes

_ENGINES = ("auto", "pread", "direct")
_LINE = 64  # Bytes.


class RowPart(NamedTuple):
    """A tensor, or a row of one; `source` is its number in the store's `gather`."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    source: int
    offset: int
    nbytes: int


class Store(ClosedAtEnd):
    """Tensors of a checkpoint that are read when they are needed, into memory that lasts.

    Args:
        path: As for `mfload.load`.
        wanted: Says of a name whether the tensor is one of them.
        framework: As for `mfload.load`; its arrays lie in host memory.
        options: `engine` ("auto", "pread" or "direct"), `page_cache`, `threads`, `timeout` and
            what opening takes; the timeout is for opening, and for each request.
        gather: What reads: "auto", "io_uring" or "threads".

    Attributes:
        tensors: What the checkpoint says of each, in file order.
        index: What it says of all.
        adapter: The framework's.
        gather: Reads of the sources that hold them.
        alignment: Bytes on which each tensor has to lie.
        allocated: Bytes of memory made so far.
        timeout: Seconds that a request has; None for no limit.
        deadline: When that of opening has run out.

    Raises:
        UsageError: Framework, engine or options are unknown or do not work here; or tensors are
            compressed, or not in one piece: it names all.
        UnsupportedDtypeError, UnsupportedShapeError: No array can hold a tensor.
        DeviceError: The framework has no arrays in host memory.
        LoadTimeoutError: The timeout passed.
        SourceError: A file is missing or can't be read.
        FormatError: The checkpoint is malformed.
    """

    def __init__(
        self,
        path: PathOrBytes | Sequence[PathOrBytes],
        wanted: Callable[[str], object],
        framework: str | ModuleType = "numpy",
        *,
        options: Options | None = None,
        gather: Engine = "auto",
    ) -> None:
        given = started(options)
        errors.check_choice("engine", given.engine, _ENGINES)
        errors.check_choice("allocator", given.allocator, ("auto", "mfload"))
        self.adapter = frameworks.get(framework, "cpu").uncommitted()
        if self.adapter.devices or not self.adapter.on_host:
            what = f"{self.adapter.name} has no arrays over host memory"
            raise errors.DeviceError(what, expected="numpy, jax, torch, tensorflow or paddle")

        def ask(index: Index) -> list[TensorInfo]:
            return list(index.take([name for name in index.searched if wanted(name)]))

        self.tensors, index, files = checkpoint.choose(path, given, ask)
        self.index = index
        self.file = index.files[0] if len(index.files) == 1 else None
        session.check([Request(info, info.dtype) for info in self.tensors], index)
        _check_simple(self.tensors, self.file)
        nbytes: dict[int, int] = {}
        for info in self.tensors:
            piece = info.pieces[0]
            nbytes[piece.source] = nbytes.get(piece.source, 0) + piece.nbytes
        self._numbers = {source: number for number, source in enumerate(nbytes)}
        sizes = [info.dtype.nbytes for info in self.tensors if info.dtype.elements == 1]
        self.alignment = self.adapter.alignment or min(8, max(sizes, default=1))
        self.allocated = 0
        self.timeout, self.deadline = given.timeout, given.deadline
        opens = functools.partial(
            open_gather,
            [files[source] for source in nbytes],
            [*nbytes.values()],
            engine=gather,
            files=given.engine,
            page_cache=given.page_cache,
            threads=given.threads,
        )
        self.gather = given.deadline.bound(opens, "opening", self.file)

    def part(self, info: TensorInfo, name: str | None = None) -> RowPart:
        """A whole tensor, by the name that its user knows. Default: the one in the file."""
        source, offset, nbytes, _ = info.pieces[0]
        where = self._numbers[source], offset, nbytes
        return RowPart(name or info.name, info.dtype, info.shape, *where)

    def rows(self, info: TensorInfo, name: str | None = None) -> list[RowPart]:
        """Its rows along the first dim.

        Raises UnsupportedShapeError if it has no dims, or a row of it ends within a byte.
        """
        whole, shape = self.part(info, name), info.shape[1:]
        nbytes = info.dtype.size_of(shape)
        if not info.shape or nbytes is None:
            raise errors.UnsupportedShapeError(
                "the tensor can't be read row by row",
                file=self.file,
                tensor=info.name,
                expected="rows of whole bytes",
                found=f"{info.dtype}{list(info.shape)}",
            )
        return [
            whole._replace(shape=shape, offset=whole.offset + n * nbytes, nbytes=nbytes)
            for n in range(info.shape[0])
        ]

    def arenas(self, slots: Iterable[tuple[int, int]]) -> list[Bytes]:
        """Memory for slots: uint8[capacity, bytes of a slot] for each pair of these.

        It is allocated at once, in huge pages. Each begins on a page. All of it lives as long as
        one of them does.

        Raises MemoryLimitError if the system refuses it.
        """
        shapes, spans, end = list(slots), list[slice](), 0
        for capacity, nbytes in shapes:
            start = _up(end, buffers.PAGE)
            end = start + capacity * nbytes
            spans.append(slice(start, end))
        made = self.memory(shapes, spans)
        self.allocated += end
        return made

    def memory(self, shapes: Sequence[tuple[int, int]], spans: Sequence[slice]) -> list[Bytes]:
        """Arrays of shapes, each at its span of memory that is made for all of them."""
        whole = buffers.allocate(max((span.stop for span in spans), default=0))
        return [whole[span].reshape(shape) for span, shape in zip(spans, shapes, strict=True)]

    def move(self, target: int, source: int, nbytes: int) -> None:
        """Moves bytes from one address to another; it lets go of the interpreter."""
        ctypes.memmove(target, source, nbytes)

    def background(self) -> Background:
        """What reads ahead for the caches over the store."""
        return Background()

    def array(self, memory: Bytes, dtype: DType, shape: tuple[int, ...], at: int) -> Any:
        """The framework's array over memory, from byte `at` on; it keeps the memory alive.

        What the framework has no type for, or none that is packed, is uint8, as `mfload.load` gives
        it (`mfload.unpack`). Arrays of NumPy refuse writing.
        """
        if self.adapter.readonly_maps:
            memory = memory.view()
            memory.flags.writeable = False
        view = View("", dtype, shape, memory, at)
        how = self.adapter.forms[dtype.name].how
        as_bytes = how == "bytes" or (how == "copy" and dtype.elements > 1)
        return self.adapter.wrap([view.as_bytes() if as_bytes else view])[0]

    def report(self, budget: int) -> OndemandReport:
        """A report that has memory and engine so far."""
        return OndemandReport(
            peak_bytes=self.allocated,
            budget_bytes=budget,
            engine=self.gather.name,
            why=self.gather.why,
        )

    def close(self) -> None:
        """Closes the files, once the reads under way are over; arrays live on."""
        self.gather.close()


class Slots:
    """Slots for some keys, of a few parts each: where a part lies in its slot, and how it is read.

    Parts of a key that follow each other in a file are one read. With O_DIRECT, a read begins and
    ends on multiples of the disk's unit, so what it is for begins somewhere behind. If that is no
    place for an array of the framework, it is moved down by less than its alignment.

    Attributes:
        nbytes: Bytes of a slot.
        parts: The parts of each key.
    """

    def __init__(self, store: Store, parts: Sequence[Sequence[RowPart]]) -> None:
        self._store, self.parts = store, parts
        unit, align = store.gather.unit, store.alignment
        key = np.repeat(np.arange(len(parts)), [len(each) for each in parts])
        fields = [(part.source, part.offset, part.nbytes) for each in parts for part in each]
        source, offset, nbytes = np.array(fields, np.int64).reshape(-1, 3).T
        order = np.lexsort((nbytes, offset, source, key))
        key, source, offset, nbytes = (each[order] for each in (key, source, offset, nbytes))
        end = offset + nbytes
        # A part begins a read, unless reading on from the one before brings it for nothing.
        begins = np.ones(len(key), bool)
        begins[1:] = (
            (np.diff(key) != 0)
            | (np.diff(source) != 0)
            | (offset[1:] // unit * unit > _up(end[:-1], unit))
            | (np.diff(offset) % align != 0)
        )
        first, read = np.flatnonzero(begins), np.cumsum(begins) - 1
        start, stop = offset[first], np.maximum.reduceat(end, first) if first.size else end
        # Products may depend on addresses mod 64, and are to be those of weights that are loaded:
        # large ones lie as in the file, as far as the adapter permits.
        lead = start % max(unit, _LINE)
        moved = lead % align
        taken = _up(lead + stop - start, max(unit, buffers.PAGE) if unit > 1 else _LINE)
        if unit > 1:
            start, self._shift, to = start - lead, moved, np.zeros_like(start)
        else:
            self._shift, to = np.zeros_like(start), lead - moved
        self._source, self._offset, self._least = source[first], start, stop - start
        self._nbytes = _up(stop, unit) - start
        self._wanted = np.bincount(read, nbytes, first.size).astype(np.int64)
        # By key, its first read; behind the last, how many there are.
        self._first = np.searchsorted(key[first], np.arange(len(parts) + 1))
        before = np.append(0, np.cumsum(taken))
        self.nbytes = int(np.diff(before[self._first]).max(initial=0))
        self._at = before[:-1] - before[self._first][key[first]] + to
        place = np.empty(len(key), np.int64)
        place[order] = offset + (self._at - start - self._shift)[read]
        self._places = np.split(place, np.cumsum([len(each) for each in parts])[:-1])

    def fill(self, keys: Numbers, addresses: Any) -> tuple[int, int]:
        """Reads keys into the slots at those addresses (see `cache.Fill`)."""
        count = self._first[keys + 1] - self._first[keys]
        reads = np.repeat(self._first[keys] - np.cumsum(count) + count, count)
        reads += np.arange(reads.size)
        to = np.repeat(addresses[:, 0].astype(np.int64), count) + self._at[reads]
        self._store.gather.read(
            ReadColumns.of(
                self._source[reads],
                self._offset[reads],
                to,
                self._nbytes[reads],
                self._least[reads],
            )
        )
        for n in np.flatnonzero(self._shift[reads]).tolist():
            number, address = reads[n], int(to[n])
            shift, nbytes = int(self._shift[number]), int(self._least[number])
            self._store.move(address, address + shift, nbytes - shift)
        return reads.size, int(self._wanted[reads].sum())

    def load(self) -> list[dict[str, Any]]:
        """The arrays of each key by name, in memory of their own, where they stay."""
        [memory] = self._store.arenas([(len(self.parts), self.nbytes)])
        try:
            addresses = memory.ctypes.data + self.nbytes * np.arange(len(self.parts))
            read: Any = functools.partial(self.fill, np.arange(len(self.parts)), addresses[:, None])
            read.memory = memory  # A thread that is left behind keeps it.
            self._store.deadline.bound(read, "reading what stays", self._store.file, apart=True)
            read = None
            return [self.arrays(key, row) for key, row in enumerate(memory)]
        except BaseException:
            memory = read = None  # The error may be kept.
            self._store.gather.stop()
            raise

    def arrays(self, key: int, memory: Bytes) -> dict[str, Any]:
        """The arrays of a key by name, over the memory of its slot, which they keep alive."""
        make = self._store.array
        places = self._places[key].tolist()
        return {
            part.name: make(memory, part.dtype, part.shape, at)
            for part, at in zip(self.parts[key], places, strict=True)
        }


def _up(value: Any, unit: int) -> Any:
    return -(-value // unit) * unit


def _check_simple(tensors: Sequence[TensorInfo], file: str | None) -> None:
    problems = tuple(repr(info.name) for info in tensors if not info.simple)
    if problems:
        raise errors.UsageError(
            "tensors can't be read on demand; `mfload convert` writes a copy from which they can",
            file=file,
            expected="raw bytes in one piece",
            found=f"{len(problems)} that are compressed or in several pieces",
            problems=problems,
        )
