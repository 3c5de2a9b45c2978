"""Gather: many short reads at once, at the least CPU time.

What stays on the disk until it is needed is read in pieces of a few KiB. To keep a disk busy, many
of them have to be under way; a thread for each costs several times what the read does. So the
kernel is given all of them in one call, by io_uring.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, Literal, NamedTuple

import numpy as np

from mfload import errors
from mfload.io import route
from mfload.io.uring import Uring
from mfload.runtime import Crew, Forked, share_of_cores
from mfload.sources.base import ClosedAtEnd, Handle, Source

Engine = Literal["auto", "io_uring", "threads"]

DEPTH = 128
"""Reads under way at once."""
PIECE = 1 << 20
"""Bytes of a longer read that are one for the kernel."""
_THREADS = 32  # Threads that read from a disk at once.


class ReadColumns(NamedTuple):
    """Reads, in columns: NumPy arrays of int64, of n items, or of n rows.

    Attributes:
        source: Number of the source.
        offset: First byte in it.
        address: Where the parts of a read land in memory, one after the other: a column a part.
        nbytes: Bytes of the parts.
        least: Bytes that must arrive. A direct read is rounded up past the end of a file.
    """

    source: Any
    offset: Any
    address: Any
    nbytes: Any
    least: Any

    @staticmethod
    def of(source: Any, offset: Any, address: Any, nbytes: Any, least: Any = None) -> ReadColumns:
        """Reads of columns, or of single numbers; by default, all bytes must arrive."""
        address, nbytes = (np.asarray(each, np.int64) for each in (address, nbytes))
        address = address if address.ndim > 1 else address[:, None]
        nbytes = np.broadcast_to(nbytes[:, None] if nbytes.ndim == 1 else nbytes, address.shape)
        count = len(address)
        source, offset = (
            np.broadcast_to(np.asarray(each, np.int64), count) for each in (source, offset)
        )
        least = nbytes.sum(1) if least is None else np.broadcast_to(least, count)
        return ReadColumns(source, offset, address, nbytes, least)

    def __len__(self) -> int:
        return len(self.offset)

    def cut(self) -> ReadColumns:
        """The same bytes, in reads that are short enough to be under way side by side."""
        if self.nbytes.shape[1] > 1 or not len(self) or self.nbytes.max() <= PIECE:
            return self
        counts = np.maximum(1, -(-self.nbytes[:, 0] // PIECE))
        number = np.repeat(np.arange(len(self)), counts)
        at = (np.arange(len(number)) - np.repeat(np.cumsum(counts) - counts, counts)) * PIECE
        nbytes = np.minimum(self.nbytes[number, 0] - at, PIECE)
        least = np.clip(self.least[number] - at, 0, nbytes)
        address = self.address[number] + at[:, None]
        return ReadColumns(
            self.source[number], self.offset[number] + at, address, nbytes[:, None], least
        )


class Gather(ClosedAtEnd):
    """Reads of some sources; many threads may use it at once. Made by `open_gather`.

    Attributes:
        sources: What it reads.
        name: "io_uring" or "threads".
        why: Why it is this one, for people.
        unit: What offsets, addresses and lengths must be multiples of: 1, unless O_DIRECT is used.
        direct: Whether it is.
        depth: Reads under way at once in a call, at most.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        handles: Sequence[Handle],
        name: str,
        why: str,
        unit: int,
        make: Callable[[], Uring] | None,
        depth: int = DEPTH,
        count: int | None = None,
    ) -> None:
        self.name, self.why, self.unit, self.direct = name, why, unit, unit > 1
        self.depth = depth if make else min(depth, count or _THREADS)
        self._count = count
        self.sources, self._handles, self._make = sources, list(handles), make
        self._fds = np.array([each.fd for each in handles], np.int32)
        self._idle: deque[Uring] = deque()
        self._crew, self._forked = Crew(), Forked()
        self._lock, self._active, self._closed = threading.Lock(), 0, False
        self._stopped = False

    def read(self, reads: ReadColumns) -> None:
        """Returns when all has arrived; the caller keeps the memory alive, and unmoved.

        When it raises, nothing of the call is under way any more.

        Raises:
            SourceChangedError: A file is shorter than expected, or no longer the one that it was.
            ReadError: The system can't read it.
        """
        self._renew()
        with self._lock:
            if self._closed:
                raise errors.UsageError("it was closed")
            self._active += 1
        try:
            cut = reads.cut()
            if self._make is None:
                self._by_threads(cut)
            elif len(cut):
                self._by_ring(cut, self._make)
            # Not np.unique: it aborts a process that ends meanwhile.
            for number in np.flatnonzero(np.bincount(reads.source)).tolist():
                self.sources[number].check()
        finally:
            with self._lock:
                self._active -= 1
                ends = self._closed and not self._active
            if ends:
                self._release()

    def stop(self) -> None:
        """Ends the calls under way, each after the reads that it has begun: none waits for them."""
        self._stopped = True

    def _check_going(self) -> None:
        if self._stopped:
            raise errors.UsageError("it was stopped")

    def _by_ring(self, reads: ReadColumns, make: Callable[[], Uring]) -> None:
        try:
            try:
                ring = self._idle.pop()
            except IndexError:
                ring = make()
            try:
                results = _drive(ring, self._fds[reads.source], reads, self._check_going)
            except BaseException:
                ring.close()
                raise
        except OSError as error:  # Such as for want of descriptors.
            name = self.sources[int(reads.source[0])].name
            raise errors.from_os(error, name, "read") from error
        self._idle.append(ring)
        for number in np.flatnonzero(results < reads.least).tolist():
            self._finish(reads, number, int(results[number]))

    def _finish(self, reads: ReadColumns, n: int, result: int) -> None:
        """Reads what is missing of a short read; raises the error of one that failed."""
        source = self.sources[int(reads.source[n])]
        if result < 0:
            error = OSError(-result, os.strerror(-result))
            raise errors.from_os(error, source.name, "read") from error
        vector, done = _vector(reads, n), result
        while done and done >= vector[0].nbytes:
            done -= vector.pop(0).nbytes
        vector[0] = vector[0][done:]
        offset, left = int(reads.offset[n]) + result, int(reads.least[n]) - result
        self._read_through_cache(source, vector, offset, left)

    def _read_through_cache(
        self, source: Source, vector: list[memoryview], offset: int, least: int
    ) -> None:
        try:
            with source.open() as handle:
                handle.read(vector, offset, least)
        except OSError as error:
            raise errors.from_os(error, source.name, "read") from error

    def _by_threads(self, reads: ReadColumns) -> None:
        waits = self.direct or any(each.costs.concurrency for each in self.sources)
        count = min(len(reads), self.depth, *([] if waits or self._count else [share_of_cores()]))
        self._crew.share(lambda number: self._read_one(reads, number), len(reads), count)

    def _read_one(self, reads: ReadColumns, n: int) -> None:
        self._check_going()
        number, least, offset = (int(each[n]) for each in (reads.source, reads.least, reads.offset))
        source, vector = self.sources[number], _vector(reads, n)
        if not self.direct:
            self._read_through_cache(source, vector, offset, least)
            return
        try:
            done = os.preadv(int(self._fds[number]), vector, offset)
        except OSError as error:
            raise errors.from_os(error, source.name, "read") from error
        if done < least:
            self._finish(reads, n, done)

    def close(self) -> None:
        """Closes files and rings, once the reads of other threads are at their end."""
        self._renew()
        with self._lock:
            self._closed, active = True, self._active
        if not active:
            self._release()

    def _renew(self) -> None:
        """After a fork: rings, threads and who holds the lock are the parent's."""
        if self._forked:
            self._idle, self._lock, self._active = deque(), threading.Lock(), 0
            self._forked = Forked()

    def _release(self) -> None:
        self._crew.close()
        while self._idle:
            self._idle.pop().close()
        while self._handles:
            self._handles.pop().close()

    def __del__(self) -> None:
        if hasattr(self, "_closed") and os:  # See `Uring.close`.
            self._release()


def _vector(reads: ReadColumns, n: int) -> list[memoryview]:
    """The memory of a read."""
    pairs = zip(reads.address[n].tolist(), reads.nbytes[n].tolist(), strict=True)
    parts = [(ctypes.c_char * nbytes).from_address(address) for address, nbytes in pairs]
    return [memoryview(part).cast("B") for part in parts]


def _drive(ring: Uring, fds: Any, reads: ReadColumns, check: Callable[[], object] = bool) -> Any:
    """Keeps a ring full until all reads are at their end; returns the result of each.

    `check` is called before more are begun, and may raise.
    """
    count, parts = reads.nbytes.shape
    vectors = np.empty((count, parts, 2), np.uint64)  # struct iovec: address, length.
    vectors[:, :, 0], vectors[:, :, 1] = reads.address, reads.nbytes
    first = vectors.ctypes.data + np.arange(count, dtype=np.uint64) * np.uint64(parts * 16)
    results = np.zeros(count, np.int64)
    begun = ended = 0
    while ended < count:
        more = min(ring.depth - (begun - ended), count - begun)
        if more:
            check()
            some = slice(begun, begun + more)
            ring.submit(fds[some], reads.offset[some], first[some], parts, begun)
            begun += more
        # Of many, a part has to end before more begin: calls cost as much as reads.
        numbers, values = ring.wait(min(begun - ended, max(1, ring.depth // 4)))
        results[numbers] = values
        ended += len(numbers)
    return results


def open_gather(
    sources: Sequence[Source],
    nbytes: Sequence[int] | None = None,
    *,
    engine: Engine = "auto",
    files: str = "auto",
    page_cache: str = "auto",
    depth: int = DEPTH,
    threads: int | None = None,
) -> Gather:
    """Opens sources to gather from.

    Args:
        nbytes: Bytes that will be read of each. Default: all.
        engine: Default: io_uring where the kernel allows it, else threads.
        files: As `Options.engine`: "direct" for O_DIRECT, "pread" for the page cache, "auto" by
            what the page cache holds.
        page_cache: As `Options.page_cache`.
        threads: As `Options.threads`; for reads by threads.

    Raises:
        SourceError: A source can't be opened.
        UsageError: The engine that is asked for does not work here.
    """
    sizes = [source.size for source in sources] if nbytes is None else nbytes
    legs = route.choose([*zip(sources, sizes, strict=True)], files, page_cache)
    local = all(source.file is not None for source in sources)
    direct = local and any(leg.direct for leg in legs)
    why = next((leg.why for leg in legs if leg.direct), legs[0].why if legs else "nothing to read")
    against, unit, handles = list[str](), 1, list[Handle]()
    with ExitStack() as opened:
        if direct:
            try:
                from mfload.io.probes import direct_alignment

                handles = [opened.enter_context(each.open(os.O_DIRECT)) for each in sources]
                unit = max(max(direct_alignment(each.fd) or (4096,)) for each in handles)
                problem = _try(handles, sizes, unit, lambda fd, view: os.preadv(fd, [view], 0))
            except errors.SourceError as error:  # Of several file systems, some may refuse it.
                problem = str(error)
            if problem is not None:
                why, direct, unit = f"no O_DIRECT: {problem}", False, 1
                opened.close()
        if not direct:
            handles = [opened.enter_context(each.open()) for each in sources]

        def works(make: Callable[[], Uring]) -> str | None:
            return _try(handles, sizes, unit, lambda fd, view: _try_ring(make(), fd, view))

        name, make = _choose(engine, local, depth, works, against)
        how = "O_DIRECT" if direct else "page cache" if local else "not a local file"
        why = "; ".join([f"{how}: {why}", *against])
        made = Gather(sources, handles, name, why, unit, make, depth, threads)
        opened.pop_all()  # They are its own.
        return made


def _try(
    handles: Sequence[Handle],
    sizes: Sequence[int],
    unit: int,
    read: Callable[[int, memoryview], int],
) -> str | None:
    """Reads the start of a file; returns what is against it."""
    handle = next((each for each, size in zip(handles, sizes, strict=True) if size), None)
    if handle is None:
        return None
    memory = mmap.mmap(-1, max(unit, mmap.PAGESIZE))  # It has the alignment of any disk.
    with memoryview(memory) as view:
        try:
            read(handle.fd, view[:unit])
        except OSError as error:
            return error.strerror or str(error)
    return None


def _try_ring(ring: Uring, fd: int, view: memoryview) -> int:
    try:
        address = ctypes.addressof(ctypes.c_char.from_buffer(view))
        reads = ReadColumns.of(0, [0], [address], view.nbytes)
        result = int(_drive(ring, np.array([fd], np.int32), reads)[0])
    finally:
        ring.close()
    if result < 0:
        raise OSError(-result, os.strerror(-result))
    return result


def _choose(
    engine: Engine,
    local: bool,
    depth: int,
    works: Callable[[Callable[[], Uring]], str | None],
    against: list[str],
) -> tuple[str, Callable[[], Uring] | None]:
    """An engine and what makes its rings; adds why it is no better one."""
    if engine == "threads":
        return engine, None
    if engine not in ("auto", "io_uring"):
        expected = "auto, io_uring or threads"
        raise errors.UsageError("no such gather engine", expected=expected, found=repr(engine))
    make = partial(Uring, depth)
    problem = works(make) if local else "some sources are no local files"
    if problem is None:
        return "io_uring", make
    if engine != "auto":
        raise errors.UsageError(f"{engine} does not work here", found=f"no {engine}: {problem}")
    against.append(f"no io_uring: {problem}")
    return "threads", None
