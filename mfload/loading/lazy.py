"""A checkpoint opened to take tensors and slices from, one by one."""

from __future__ import annotations

import functools
import logging
import threading
import time
from _thread import get_ident
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import numpy as np

from mfload import errors, frameworks
from mfload.dlpack import View
from mfload.dtypes import DType
from mfload.errors import counted
from mfload.formats import checkpoint
from mfload.frameworks.base import Adapter
from mfload.index import ChosenIndex, Columns, Index, TensorInfo
from mfload.io import buffers, route
from mfload.io.pread import FETCHED, PreadReader, fetch
from mfload.loading import execute
from mfload.loading.session import MAX_RANK, Loader, Shared, verifying
from mfload.options import LoadOptions, started
from mfload.planning import extents, selection
from mfload.planning.memory import Ledger
from mfload.planning.reads import Reads
from mfload.planning.request import Request, whole
from mfload.planning.slicing import runs, select
from mfload.runtime import Crew, Usage, local_processes, share_of_cores, usage
from mfload.sources.base import Costs, Source
from mfload.sources.local import AtOnce

if TYPE_CHECKING:
    from mfload.io.mapped import MapRange
    from mfload.options import Options
    from mfload.planning.selection import Names
    from mfload.report import Report

_FILLED = 64 << 20  # Bytes that are read past plan and session.
_AHEAD = 32 << 20  # Bytes that are fetched from a disk before they are asked for, at most.
_PART, _THREADS = 2 << 20, 4  # Bytes that are worth a thread of their own, of so many.
_FEW_ROWS = 256  # To read them one by one takes less time than to plan blocks.
_KINDS = 64  # Shapes and selections whose cells are kept: layers of a model are alike.
_SHOWN = 50  # Tensors that a notebook shows.
_SLICED = 64  # Tensors of which rows are taken one by one: to look one up costs as much as a read.

_new: Any = tuple.__new__  # Named tuples' own constructors take twice the time.

Array = TypeVar("Array")
"""Arrays of the framework, or lists of them."""

Span = tuple[Usage, Usage]
"""What a thread has used before and after some work."""

_NO_SPANS: tuple[Span, ...] = ()

T = TypeVar("T")

counting = threading.Lock()
"""Held while a report is added to: several threads may read for one."""


class Asked(NamedTuple):
    """What a checkpoint is opened with; arguments as for `mfload.open`."""

    device: Any = None
    options: Options | None = None
    names: Names = None
    verify: Any = None
    report: Report | None = None
    fallback: Any = None


class _Reader:
    """What reads for an opened checkpoint and its lazy tensors."""

    def __init__(
        self,
        index: Index,
        sources: Sequence[Source],
        adapter: Adapter,
        asked: Asked,
        *,
        check: Any = None,
        small: int = execute.INLINE,
    ) -> None:
        self._check = check
        self._index, self._sources, self._adapter = index, sources, adapter
        self._sliced = functools.lru_cache(_SLICED)(index.__getitem__)
        self._asked, self._alone = asked, asked.fallback is None
        self._turning = threading.Lock()
        self.closed = False
        how = started(asked.options)
        # Whether a session would read any small part in the same way: at once, into host memory.
        reads_small = (
            asked.report is None
            and check is None
            and how.engine in ("auto", "pread", "mmap")
            and how.page_cache != "bypass"
            and how.allocator != "framework"
            and adapter.on_host
            and not adapter.devices
            and adapter.assign(none := []) is none  # One of several devices splits requests.
        )
        self._most = small if reads_small else 0
        # A map holds one range, reads that are waited for are better made side by side, and slots
        # count as overhead.
        costs = sources[0].costs if sources else Costs()
        waits = costs.concurrency is not None or Ledger(how).most < 2 * costs.span
        self._reads_parts = reads_small and how.engine != "mmap" and not waits
        # With a timeout, what the page cache holds is read at once, since that never waits.
        self._never_waits = how.timeout is not None
        self._threads = how.threads or min(share_of_cores(), _THREADS)
        self._crew: Crew | None = None
        self._landing: Shared | None = None  # What loads onto devices share.
        self._route, self._legs = (how.engine, how.page_cache), dict[int, route.Leg]()
        # Of a file on a disk: bytes read without a gap, where they end, and how far it is fetched.
        self._fetched = dict[int, tuple[int, int, int]]()
        self._shared = local_processes() > 1
        self._cells = dict[Any, Any]()
        self._map: MapRange | None = None
        if how.engine == "mmap":
            from mfload.io import mapped  # Late: most do without it.

            if any(source.file is None for source in sources):
                self._most = 0
            # A write to an array must not reach those of other requests.
            self._map = mapped.shared_maps() if adapter.readonly_maps else mapped.map_range
        for source in sources:
            source.keep(True)

    @property
    def compares(self) -> bool:
        """Whether tensors are compared with a manifest."""
        return self._check is not None

    def file_of(self, info: TensorInfo) -> str:
        """The file that holds a tensor."""
        return self._opened().files[info.pieces[0].source]

    def read(self, row: TensorInfo) -> Any:
        """One tensor, by its row."""
        made = self._at_once(row, row.shape, (0,), row.pieces[0].nbytes)
        return self.load([Request(row, row.dtype)])[0] if made is None else made

    def read_part(self, row: TensorInfo, index: Any) -> Any:
        """The part of a tensor that an index takes (see `TensorSlice`)."""
        self._opened()
        if (found := runs(row, index)) is not None:
            starts, nbytes, shape = found
            if len(starts) == 1 or (self._reads_parts and len(starts) <= _FEW_ROWS):
                made = self._at_once(row, shape, starts, nbytes)
                if made is not None:
                    return made
        with errors.about(file=self.file_of(row)):
            selection = select(row, index)
        request = Request(row, row.dtype, selection)
        made = self._at_once(row, request.shape, request, request.nbytes)
        array = self.load([request])[0] if made is None else made
        if selection is not None and selection.leads:
            return self._adapter.with_first(array, selection.leads)
        return array

    def _at_once(
        self,
        row: TensorInfo,
        shape: tuple[int, ...],
        part: Sequence[int] | Request,
        nbytes: int,
    ) -> Any:
        """A small part of a tensor, read past plan and session, which take longer than to read it.

        `part` is a request, or the first bytes of ranges of `nbytes` each. None if a session would
        read it in another way, or if it must not wait, and the read would.
        """
        name, dtype, every, pieces = row
        number, offset, _, stored = pieces[0]
        known = dtype.nbytes > 0 and len(every) <= MAX_RANK
        total = nbytes if isinstance(part, Request) else nbytes * len(part)
        if not 0 < total <= self._most or stored is not None or len(pieces) > 1 or not known:
            return None
        adapter, source = self._adapter, self._sources[number]
        try:
            if not isinstance(part, Request):
                memory, at = self._land(source, dtype, offset, part, nbytes)
            elif self._reads_parts and self._is_warm(number, part):
                memory, at = buffers.small(nbytes, adapter.alignment), 0
                self._land_part(source, part, memory)
            else:
                return None
            source.check()
        except BlockingIOError:
            return None
        except (OSError, MemoryError, errors.MfloadError) as error:
            memory = None
            errors.let_go(error)
            raise execute.named(error, source.name, name)  # noqa: B904 - it has its cause
        view: View = _new(View, (name, dtype, shape, memory, at, ()))
        how = adapter.forms[dtype.name].how
        return adapter.wrap([view.as_bytes() if how == "bytes" else view])[0]

    def _land(
        self, source: Source, dtype: DType, offset: int, starts: Sequence[int], nbytes: int
    ) -> tuple[Any, int]:
        """Memory that holds ranges of a tensor, and where in it they begin."""
        first, alignment, count = offset + starts[0], self._adapter.alignment, len(starts)
        map_range = self._map  # None after another thread has closed the checkpoint.
        if map_range is not None and count == 1:
            align = alignment or max(1, dtype.nbytes // dtype.elements)
            # As in a plan, what is not aligned in the file is read.
            if first % align == 0:
                if self._never_waits:  # Pages that are there are mapped at once.
                    AtOnce(source).read([buffers.small(nbytes, None)], first)
                return map_range(source, first, nbytes)
        # NumPy's memory, which is not counted: to map a buffer takes longer than to read.
        memory = buffers.small(nbytes * count, alignment)
        handle = AtOnce(source) if self._never_waits else source.open()
        try:
            if count == 1:
                handle.read([memory], first)
            else:
                for start, part in zip(starts, memory.reshape(count, nbytes), strict=True):
                    handle.read([part], offset + start)
        finally:
            handle.close()
        return memory, 0

    def _is_warm(self, number: int, request: Request) -> bool:
        """Whether a part of a tensor is read through the page cache, which holds most of it."""
        if self._never_waits or (span := extents.span(request)) < route.SMALL:
            return True
        source = self._sources[number]
        (leg,) = route.choose([(source, min(span, source.size))], *self._route)
        return not (leg.direct or leg.cold)

    def _land_part(self, source: Source, request: Request, memory: Any) -> int:
        """Reads what a request takes of a tensor; returns the bytes that it reads for that."""
        reads, info = Reads(source.costs, self._cells), request.info
        if len(self._cells) > _KINDS:
            self._cells.clear()
        chosen = request.selection or ()
        kind = info.shape, info.dtype.name, chosen, getattr(chosen, "steps", None)
        # Lists of numbers are long, and seldom twice the same.
        listed = any(axis.picks is not None for axis in chosen)
        reads.parts([request], [None], [(0, 0)], None if listed else kind)
        opens: Any = AtOnce(source) if self._never_waits else source
        reader, slot = PreadReader(opens), buffers.WorkerSlot()
        try:
            blocks = reads.end()
            for block in blocks:
                reader.fill(block, [memory], slot)
        finally:
            reader.close()
        return sum(block.nbytes for block in blocks)

    def fill(self, request: Request, memory: Any) -> tuple[route.Leg, int, Sequence[Span]] | None:
        """Reads a part into memory of the caller, past plan and session.

        Returns the route, the bytes read, and what threads beside this one used. None, and nothing
        is read, if plan and session would read it in another way.
        """
        info, dtype, selection, *_ = request
        source, at, nbytes, stored = info.pieces[0]
        if not (self._reads_parts and len(info.pieces) == 1 and stored is None):
            return None
        on_host = isinstance(memory, np.ndarray)
        most = self._most if self._never_waits else _FILLED
        if dtype is not info.dtype or not (on_host and 0 < memory.nbytes <= most):
            return None
        apart = False
        if selection is not None:
            start, nbytes = extents.contiguous(request), request.nbytes
            apart, at = start is None, at if start is None else start
        opened, used = self._sources[source], _NO_SPANS
        if opened.file is None or nbytes != memory.nbytes:
            return None
        try:
            leg, ahead = self._legs.get(source), range(0)
            if leg is None:
                # It stands for what else is read of the file, so small reads ask, too.
                wanted = [(opened, max(nbytes, route.SMALL))]
                choose = functools.partial(route.choose, wanted, *self._route)
                (leg,) = started(self._asked.options).deadline.bound(choose, "opening the files")
                self._legs[source] = leg  # To ask again takes as long as to read 2 MB.
            if leg.direct:
                return None
            if leg.cold:
                # Rows that lie apart: together the processes of a machine read all of a tensor.
                together = self._shared and info.nbytes <= _FILLED
                through = nbytes < route.SMALL or together or not apart
                if self._never_waits or not through:
                    return None
                if together or not apart:
                    part = (info.pieces[0].offset, info.nbytes) if apart else (at, nbytes)
                    ahead = self._ahead(source, *part)
            if apart:
                if ahead:
                    with opened.open() as handle:
                        fetch(handle.fd, ahead)
                nbytes = self._land_part(opened, request, memory)
            else:
                used = self._read_whole(opened, at, memory, ahead)
            opened.check()
        except BlockingIOError:
            return None
        except (OSError, MemoryError, errors.MfloadError) as error:
            errors.let_go(error)
            raise execute.named(error, opened.name, info.name)  # noqa: B904 - it has its cause
        return leg, nbytes, used

    def _ahead(self, source: int, at: int, nbytes: int) -> range:
        """Where the kernel is to fetch on in a file, before these bytes of it are read.

        As far beyond them as was read up to them without a gap, and 32 MiB at most. What is left
        out is no gap if other processes of this machine read it.
        """
        read, end, fetched = self._fetched.get(source, (0, 0, 0))
        opened = self._sources[source]
        if end == at + nbytes:  # Another part of the same tensor.
            return range(0)
        if not 0 <= at - end <= (_AHEAD if self._shared else opened.costs.merge_gap):
            read, fetched = 0, at
        end = at + nbytes
        stop = min(end + min(read, _AHEAD), opened.size)
        self._fetched[source] = read + nbytes, end, max(fetched, stop)
        return range(max(fetched, at), stop, FETCHED)

    def _read_whole(self, source: Source, at: int, memory: Any, ahead: range) -> Sequence[Span]:
        """Reads a range, a large one in several threads, and has the kernel fetch what is ahead.

        The pages of new memory take longer to make than their bytes to copy. Returns what other
        threads used.
        """
        count = min(self._threads, memory.nbytes // _PART) if memory.nbytes > _PART else 1
        if count <= 1:
            handle = AtOnce(source) if self._never_waits else source.open()
            try:
                if ahead:
                    fetch(handle.fd, ahead)
                buffers.populate(memory)
                handle.read([memory], at)
            finally:
                handle.close()
            return _NO_SPANS
        size, caller = -(-memory.nbytes // count), get_ident()
        used: list[Span] = []

        def read(number: int) -> None:
            before = None if get_ident() == caller else usage(thread=True)
            part = memory[number * size : (number + 1) * size]
            with source.open() as handle:
                fetch(handle.fd, ahead[number::count])
                buffers.populate(part)
                handle.read([part], at + number * size)
            if before is not None:
                used.append((before, usage(thread=True)))

        if self._crew is None:
            self._crew = Crew()
        self._crew.share(read, count, count)
        return used

    def load(
        self,
        requests: Sequence[Request],
        report: Report | None = None,
        adapter: Adapter | None = None,
    ) -> list[Any]:
        """An array for each request, made by an adapter. Default: that of the checkpoint."""
        options, adapter = started(self._asked.options), adapter or self._adapter
        if self._check is not None:
            options = options.replace(check=self._check)
        loader = Loader(self._opened(), self._sources, adapter, options)
        if adapter.devices:
            if self._landing is None:
                self._landing = Shared(None)
                if self.closed:  # By another thread, which did not see it.
                    self._landing.close()
            loader.shared = self._landing
        if report is not None or self._asked.report is None:
            return loader.load(requests, report=report)
        made = loader.load(requests, report=(one := type(self._asked.report)()))
        self.tell(self._asked.report, one)
        return made

    def tell(self, report: Report, one: Report) -> None:
        """Adds what was read to a report."""
        with counting:
            report.add(one)
            if self._check is not None:
                self._check.tell(report)

    def _opened(self) -> Index:
        if self.closed:
            raise errors.UsageError("the checkpoint was closed", file=self._index.files[0])
        return self._index


class LazyCheckpoint(_Reader, Generic[Array]):
    """The headers of a checkpoint, and the way to its data. Made by `mfload.open`.

    It may be shared between threads, inherited by a fork and pickled (with a device given by name).
    Each request checks that the files are still those whose headers were read. They stay open from
    their first use until it is closed; a request that is under way then still gets its result.
    """

    _other: LazyCheckpoint[Array] | None = None

    def keys(self) -> list[str]:
        """Names of the tensors, sorted."""
        return self._tried(lambda each: sorted(each._opened()))

    def offset_keys(self) -> list[str]:
        """Names of the tensors in the order in which the files hold them."""
        return self._tried(lambda each: list(each._opened().tensors))

    def metadata(self) -> dict[str, str] | None:
        """The free-form strings of the headers; None if there are none."""
        strings = self._tried(lambda each: each._opened().metadata)
        return None if strings is None else dict(strings)

    def info(self, name: str) -> TensorInfo:
        """Name, dtype, shape and whereabouts of a tensor.

        Raises:
            TensorNotFoundError: There is none of that name.
        """
        if self._alone:
            return self._opened()[name]
        return self._tried(lambda each: each._opened()[name])

    def get_tensor(self, name: str) -> Array:
        """One tensor.

        Raises:
            TensorNotFoundError: There is none of that name.
        """
        if self._alone:
            return self.read(self._opened()[name])
        return self._tried(lambda each: each.read(each._opened()[name]))

    def get_tensors(self, names: Iterable[str] | None = None) -> dict[str, Array]:
        """Several tensors, read together. Default: all.

        Raises:
            TensorNotFoundError: A name is missing.
        """
        if names is not None:
            names = list(dict.fromkeys(names))
        return self._tried(lambda each: each._get(names))

    def _get(self, names: Sequence[str] | None) -> dict[str, Array]:
        index = self._opened()
        if names is None:
            columns = index.columns
        else:
            index.take([name for name in names if name in index.names])  # Reads headers together.
            columns = Columns.of(map(index.__getitem__, names))
        arrays = self.load(whole(columns))
        return dict(zip(columns.names, arrays, strict=True))

    def get_slice(self, name: str) -> TensorSlice[Array]:
        """A tensor to be indexed: only the bytes that the index needs are read.

        Raises:
            TensorNotFoundError: There is none of that name.
        """
        self._opened()
        try:
            return TensorSlice(self, self._tried(lambda each: each._sliced(name)))
        except TypeError:  # Such as a list: not a name, which the index says.
            return TensorSlice(self, self.info(name))

    def _slice(self, info: TensorInfo, index: Any) -> Array:
        """The part of a tensor that an index takes."""
        if self._alone:
            return self.read_part(info, index)
        return self._tried(lambda each: each.read_part(each._opened()[info.name], index))

    def _tried(self, call: Callable[[LazyCheckpoint[Array]], T]) -> T:
        """What `call` takes of this place, or of the fallback once this one has failed."""
        if self._other is None:
            if self._alone:
                return call(self)
            try:
                return call(self)
            except errors.OF_A_PLACE as error:
                why = str(error)  # So that what the error refers to is freed.
            with errors.after(why):
                self._turn_to_fallback(why)
                return self._tried(call)
        self._opened()
        return call(self._other)

    def _turn_to_fallback(self, why: str) -> None:
        asked = self._asked._replace(fallback=None)
        with self._turning:
            if self._other is None:
                note = f"{self._index.files[0]} failed, the fallback is read instead: {why}"
                logging.getLogger("mfload").warning("%s", note)
                how = started(asked.options)
                self._other = opened(self._asked.fallback, self._adapter.name, asked, how)
                if self.closed:  # By another thread, which did not see it.
                    self._other.close()
                if asked.report is not None:
                    with counting:
                        asked.report.notes += (note,)

    def __getitem__(self, name: str) -> Array:
        """One tensor, as `get_tensor` gives it."""
        return self.get_tensor(name)

    def items(self) -> Iterator[tuple[str, Array]]:
        """Names and tensors, each read when its turn comes; `mfload.stream` reads ahead."""
        return ((name, self.get_tensor(name)) for name in self.keys())

    def __len__(self) -> int:
        return self._tried(lambda each: len(each._opened()))

    def __contains__(self, name: object) -> bool:
        return self._tried(lambda each: name in each._opened())

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def close(self) -> None:
        """Ends it, and closes its files; arrays taken from it live on."""
        self.closed = True
        for source in self._sources:
            source.keep(False)
        for shared in (self._crew, self._landing):
            if shared is not None:
                shared.close()
        self._cells.clear()
        self._map = None
        if self._other is not None:
            self._other.close()

    def __enter__(self) -> LazyCheckpoint[Array]:
        self._opened()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        files = self._index.files
        where = files[0] if len(files) == 1 else counted(len(files), "file")
        count, framework = len(self._index.names), self._adapter.name
        return f"<mfload checkpoint: {counted(count, 'tensor')} in {where}, for {framework}>"

    def _repr_html_(self) -> str:
        return self._tried(LazyCheckpoint._table)

    def _table(self) -> str:
        from mfload.report import html_table, human  # Late: scripts do without.

        index = self._opened()
        names = list(index.tensors)
        rows: list[tuple[object, ...]] = [("name", "dtype", "shape", "size")]
        for name in names[:_SHOWN]:
            row = index[name]
            rows.append((name, row.dtype, list(row.shape), human(row.nbytes)))
        rest = f"… and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        return html_table(rows, head=True) + (rest and f"<p>{rest}</p>")

    def __reduce__(self) -> tuple[Any, ...]:
        origin, names = self._index.found or self._sources, None
        if self._asked.names is not None:  # A function of the user's may not be pickled.
            names = list(self._index.names)
        asked = self._asked._replace(names=names, report=None)
        return _reopen, (origin, self._adapter.name, asked, self.closed)


def opened(path: Any, framework: Any, asked: Asked, how: LoadOptions) -> LazyCheckpoint[Any]:
    """Opens a checkpoint; `how` is for its headers."""
    start = time.perf_counter()
    select: Callable[[Index], Any] = attrgetter("names")
    if asked.names is not None:
        select = functools.partial(selection.select, names=asked.names)
    chosen, index, sources = checkpoint.choose(path, how, select)
    if asked.names is not None:
        index = ChosenIndex(index, chosen)
    check = verifying(asked.verify, how, index, sources).check
    read = time.perf_counter()
    adapter = frameworks.get(framework, asked.device, index.names)
    if asked.report is not None:
        with counting:
            asked.report.add_stage("headers", start, read)
            asked.report.add_stage("import", read, time.perf_counter())
    return LazyCheckpoint(index, sources, adapter, asked, check=check)


def _reopen(origin: Any, framework: str, asked: Asked, closed: bool) -> LazyCheckpoint[Any]:
    try:
        made = opened(origin, framework, asked, started(asked.options))
    except errors.OF_A_PLACE as error:
        if asked.fallback is None:
            raise
        alone = asked._replace(fallback=None)
        with errors.after(str(error)):
            made = opened(asked.fallback, framework, alone, started(asked.options))
    if closed:
        made.close()
    return made


class TensorSlice(Generic[Array]):
    """A tensor that has not been read. Made by `LazyCheckpoint.get_slice`."""

    __slots__ = ("_info", "_opened")

    def __init__(self, opened: LazyCheckpoint[Array], info: TensorInfo) -> None:
        self._opened = opened
        self._info = info

    def get_shape(self) -> list[int]:
        """Its shape, in elements."""
        return list(self._info.shape)

    def get_dtype(self) -> str:
        """Its dtype by the format's name, such as "BF16"."""
        return self._info.dtype.name

    def __getitem__(self, index: Any) -> Array:
        """Reads a part.

        Args:
            index: Integers, slices (steps and negatives too), Ellipsis, one list of integers, or a
                tuple of these.

        Returns:
            The part as an array, its dims in the order of the framework's own indexing: where an
            integer is apart from the list, the list's dim is the first in all but PyTorch and
            Paddle.

        Raises:
            SliceError: The index does not fit the tensor.
        """
        return self._opened._slice(self._info, index)  # pyright: ignore[reportPrivateUsage]

    def __repr__(self) -> str:
        return f"<{self._info.name}: {self._info.dtype} {list(self._info.shape)}, not read>"
