"""Streams: tensors one after the other, read ahead in a thread, in bounded memory."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from mfload import errors
from mfload.dlpack import View
from mfload.frameworks.base import Adapter
from mfload.index import Index
from mfload.io import buffers
from mfload.loading.session import Loader, Shared, check, wanted_bytes
from mfload.options import LoadOptions
from mfload.planning.memory import Ledger, grouped
from mfload.planning.request import Request, names
from mfload.progress import Progress, shown
from mfload.report import Report
from mfload.runtime import Deadline, Task
from mfload.sources.base import Source

if TYPE_CHECKING:
    from mfload.loading.lazy import LazyCheckpoint

BATCH = 64 << 20
"""Bytes of tensors that are read together, at most; a larger tensor is read alone."""

# Parts of the overhead: one for a batch of which the consumer still holds a tensor, one for what is
# handed out, one for what is read meanwhile, and one for the readers.
_PARTS = 4
_GRACE = 5.0  # Seconds that the end of a stream waits for reads under way.


Array = TypeVar("Array")


class Stream(Iterator[tuple[str, Array]]):
    """Names and tensors, one after the other. Made by `mfload.stream`.

    What was handed out stays as it is. A stream ends with its last tensor, an error, `close()`, the
    end of a `with` block, or when nothing refers to it any more; reading ahead ends with it.

    Attributes:
        names: Names of all its tensors, in the order in which they come.
    """

    def __init__(
        self,
        rows: Generator[tuple[str, Array]],
        end: Callable[[bool], object] = bool,
        close: Callable[[], object] = bool,
        *,
        names: Sequence[str],
    ) -> None:
        self.names = names
        self._rows, self._end, self._close = rows, end, close
        self._lock = threading.Lock()

    def __next__(self) -> tuple[str, Array]:
        self._begin()
        try:
            return next(self._rows)
        except BaseException as error:
            self._end(True)
            errors.let_go(error)
            raise
        finally:
            self._lock.release()

    def close(self) -> None:
        """Ends it, and waits for a read under way, 5 seconds at most.

        Lazy tensors of it can't be read any more. While another thread takes a tensor it raises
        UsageError.
        """
        self._begin()
        try:
            self._rows.close()
            self._end(True)
            self._close()
        finally:
            self._lock.release()

    def _begin(self) -> None:
        if not self._lock.acquire(False):
            raise errors.UsageError(
                "the stream is in use", expected="one thread at a time, which also closes it"
            )

    def __enter__(self) -> Stream[Array]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        # The collector may come here in any thread, whatever locks this holds: nothing may wait.
        self._rows.close()
        self._end(False)


class Tensors:
    """What a stream hands out: whole tensors of a checkpoint, for one process.

    Attributes:
        names: The name of each tensor.
        sizes: Bytes of each tensor.
        batches: Which of them are read together.
        most: Bytes of a batch of several tensors, at most.
        options: Those of the readers of one batch.
        ahead: Whether a batch is read while the one before is in use.
        late: Whether arrays are made in the thread that iterates. Threads of frameworks differ in
            their modes and default devices, and in what they may let go of.
    """

    ahead = late = True

    def __init__(
        self,
        index: Index,
        sources: Sequence[Source],
        adapter: Adapter,
        options: LoadOptions,
        requests: Sequence[Request],
        sizes: Sequence[int],
        report: Report | None,
    ) -> None:
        self._index, self._sources, self._adapter = index, sources, adapter
        self._requests, self._report = requests, report
        ledger = Ledger(options)
        self.most = ledger.share(_PARTS, BATCH)
        if ledger.given is not None:
            left = ledger.given - (_PARTS - 1) * self.most
            options = options.replace(max_host_overhead=left)
        self.options = options
        self.names, self.sizes, self.batches = names(requests), sizes, batches(sizes, self.most)
        self._live = buffers.live_bytes()
        self.shared = Shared(wanted_bytes(requests)[0])

    def read(self, batch: range, deadline: Deadline) -> list[Any]:
        """Reads a batch, in any thread."""
        return self._load(self._requests[batch.start : batch.stop], deadline)

    def follow(self) -> AbstractContextManager[object]:
        """What another thread enters to read as this one would (see `Adapter.follow`)."""
        return self._adapter.follow()

    def arrays(self, batch: range, take: Callable[[], list[Any]]) -> list[Any]:
        """The arrays of a batch; `take` gives what was read of it."""
        return self._wrap(take())

    def leave(self, may_wait: bool) -> None:
        """Called at the end, however it came."""

    def _load(self, requests: Sequence[Request], deadline: Deadline) -> list[Any]:
        adapter: Any = Unwrapped(self._adapter) if self.late else self._adapter
        options = self.options.replace(deadline=deadline)
        loader = Loader(self._index, self._sources, adapter, options)
        loader.shared = self.shared

        def advance(_: int) -> None:
            deadline.left()  # It raises if the stream has ended.

        with self._reported() as one:
            return loader.load(requests, report=one, advance=advance)

    def _wrap(self, landed: Sequence[Any]) -> list[Any]:
        made = iter(self._adapter.wrap([each for each in landed if isinstance(each, View)]))
        whole = [next(made) if isinstance(each, View) else each for each in landed]
        return list(self._adapter.results(whole))

    @contextmanager
    def _reported(self) -> Generator[Report | None]:
        """The report of a batch, which is added to that of the stream."""
        if self._report is None:
            yield None
            return
        one, others = Report(), buffers.live_bytes() - self._live
        yield one
        one.peak_bytes += others
        self._report.add(one)
        if self.options.check is not None:
            self.options.check.tell(self._report)


class Unwrapped:
    """An adapter that leaves views as they are."""

    def __init__(self, adapter: Adapter) -> None:
        self._adapter = adapter

    def __getattr__(self, name: str) -> Any:
        return getattr(self._adapter, name)

    def wrap(self, views: Sequence[View]) -> Sequence[View]:
        """The views themselves."""
        return views

    results = wrap


class _Stopped(Exception):
    """The stream has ended while a batch was read."""


class _Until(Deadline):
    """A deadline that passes early if a stream ends: it raises `_Stopped`, once."""

    def __init__(self, seconds: float | None, stopped: threading.Event) -> None:
        super().__init__(seconds)
        self._stopped: threading.Event | None = stopped

    def left(self) -> float:
        if self._stopped is not None and self._stopped.is_set():
            self._stopped = None  # What stops readers asks how long it may wait for them.
            raise _Stopped
        return super().left()


class _Ahead:
    """Reads the batch that is asked for next, in a thread, if there is room for it."""

    def __init__(self, tensors: Tensors) -> None:
        self._tensors, self._stopped = tensors, threading.Event()
        self._task: Task[list[Any]] | None = None

    def take(self, number: int) -> list[Any]:
        """What was read of a batch; they are taken in order."""
        task, self._task = self._task, None
        # A fork leaves the thread to the parent.
        landed = task.result() if task and task.join() else self._read(number)
        self._begin(number + 1)
        return landed

    def close(self, may_wait: bool) -> None:
        """Ends reading. If it may, waits for the thread; one that hangs in the kernel is left."""
        self._stopped.set()
        if may_wait and self._task is not None:
            self._task.join(_GRACE)
        self._tensors.shared.close()
        self._task = None

    def _begin(self, number: int) -> None:
        every = self._tensors.batches
        if not self._tensors.ahead or number == len(every):
            return
        now, after = (
            sum(map(self._tensors.sizes.__getitem__, every[n])) for n in (number - 1, number)
        )
        # A tensor that was read alone is the consumer's.
        if after + (now if len(every[number - 1]) > 1 else 0) > 2 * self._tensors.most:
            return
        read = partial(self._read, number, self._tensors.follow())
        # The system may give no more threads.
        with suppress(RuntimeError):
            self._task = self._tensors.shared.crew.start(read)

    def _read(self, number: int, place: AbstractContextManager[object] | None = None) -> list[Any]:
        deadline = _Until(self._tensors.options.timeout, self._stopped)
        try:
            with place or nullcontext():
                return self._tensors.read(self._tensors.batches[number], deadline)
        except BaseException:
            if not self._stopped.is_set():
                raise
            return []  # It is not taken, and an error would keep what it refers to.


def stream(tensors: Tensors, progress: Progress) -> Stream[Any]:
    """The stream of some tensors."""
    ahead = _Ahead(tensors)

    def end(may_wait: bool) -> None:
        ahead.close(may_wait)
        tensors.leave(may_wait)

    return Stream(_rows(tensors, ahead.take, progress), end, names=tensors.names)


def continued(
    first: Stream[Array], go_on: Callable[[Sequence[str], str], Stream[Array]]
) -> Stream[Array]:
    """A stream that goes on with another one where its place fails.

    `go_on` takes the names that are left and what failed.
    """
    held = [first]

    def rows() -> Generator[tuple[str, Array]]:
        left, why = deque(first.names), ""
        try:
            while left:
                yield next(first)  # It is kept nowhere here, as in `_rows`.
                left.popleft()
            next(first, None)
        except errors.OF_A_PLACE as error:
            why = str(error)
        if left:
            with errors.after(why):
                held[:] = [go_on([*left], why)]
                yield from held[0]

    def end(may_wait: bool) -> None:
        if may_wait and held:
            held[0].close()
        held.clear()

    return Stream(rows(), end, names=first.names)


def _rows(
    tensors: Tensors, take: Callable[[int], list[Any]], progress: Progress
) -> Generator[tuple[str, Any]]:
    with shown(progress, sum(tensors.sizes)) as advance:
        for number, batch in enumerate(tensors.batches):
            arrays = deque(tensors.arrays(batch, partial(take, number)))
            for n in batch:
                # It is kept nowhere here, so that it goes when the consumer lets go of it.
                yield tensors.names[n], arrays.popleft()
                if advance is not None:
                    advance(tensors.sizes[n])


def ahead(
    sources: Sequence[Source], requests: Sequence[Request], options: LoadOptions
) -> list[Any]:
    """The sources of lazy tensors; of those that are waited for, small tensors come together.

    Tensors of up to 1 MiB that follow each other are fetched in runs of at most a block, or a part
    of the bytes that the stream may hold.
    """
    if all(source.costs.concurrency is None for source in sources):
        return list(sources)  # Files do without.
    from mfload.sources.ahead import AheadSource, runs_of

    wanted = sorted(requests, key=lambda each: each.info.pieces[0][:2])
    pieces = (piece[:3] for request in wanted for piece in request.info.pieces)
    runs = runs_of(sources, pieces, Ledger(options).share(_PARTS))
    return [AheadSource(each, runs[n]) if n in runs else each for n, each in enumerate(sources)]


def lazily(
    opened: LazyCheckpoint[Any],
    index: Index,
    sources: Sequence[Any],
    adapter: Adapter,
    requests: Sequence[Request],
    report: Report | None,
) -> Stream[Any]:
    """The stream of some tensors that are read when they are used, of one device."""
    from mfload.loading import lazy_tensor  # Other streams do without.

    if adapter.assign(requests) is not requests:
        expected = "one device, or lazy=False"
        raise errors.UsageError("lazy tensors are for one device", expected=expected)
    check(requests, index, counts_items=adapter.counts_items)
    forms: dict[str, tuple[Any, bool]] = {}
    advances = [getattr(source, "advance", None) for source in sources]

    def rows() -> Generator[tuple[str, Any]]:
        make, files, lazy = adapter.lazy(), index.files, lazy_tensor.LazyTensor
        for request in requests:
            info, dtype, *_ = request
            form = forms.get(dtype.name)
            if form is None:
                form = forms[dtype.name] = lazy_tensor.form(adapter, dtype)
            source, offset, *_ = info.pieces[0]
            if (advance := advances[source]) is not None:
                advance(offset)
            yield info.name, make(lazy(opened, files[source], request, form, adapter, report))

    return Stream(rows(), close=opened.close, names=names(requests))


def batches(sizes: Sequence[int], most: int) -> list[range]:
    """Runs of tensors, of so many bytes each, that have at most `most` together."""
    made = grouped(range(len(sizes)), most, sizes.__getitem__)
    return [range(group[0], group[-1] + 1) for group in made]
