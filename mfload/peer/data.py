"""The data of a seed: memory that is held, as one flat space of bytes."""

from __future__ import annotations

import bisect
import importlib
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from mfload import errors
from mfload.peer.manifest import BLOCK

_MOST = 1 << 56  # No address lies beyond.
_SMALL = 8 << 10  # Arrays of fewer bytes are copied together, where one comes after the other:
_TOGETHER, _COUNTED = 256 << 10, 256  # so many bytes, of which each has at least some.
_PIECE = 4 << 20  # Bytes that are copied from a device at once.


def hasher() -> Any:
    """The xxh3_64 of the package xxhash; raises FrameworkMissingError without it."""
    try:
        return importlib.import_module("xxhash").xxh3_64
    except ImportError:
        what = "checksums of a peer need the package xxhash"
        expected = "xxhash, or checksums=False on both sides"
        raise errors.missing(what, "peer", expected=expected) from None


class Data:
    """Flat uint8 arrays, one after the other, on the host or on devices (`DeviceMemory`).

    Attributes:
        arrays: Those that have bytes.
        starts: First byte of each.
        size: Bytes of all.
    """

    def __init__(self) -> None:
        self.arrays: list[Any] = []
        self.starts: list[int] = []
        self.size = 0
        self._known: dict[tuple[int, int], int] = {}
        self._groups: list[list[Any]] = []
        self._firsts: list[int] = []  # First byte of each group.
        self._room = 0  # Bytes that the last group takes yet.

    def add(self, memory: Any) -> int:
        """Adds an array, unless its memory is there already; returns its first byte."""
        if not memory.size:
            return self.size
        key = _address(memory), memory.size
        if key not in self._known:
            self._known[key] = self.size
            small = memory.size < _SMALL
            if self._room <= 0 or not small:
                self._groups.append([])
                self._firsts.append(self.size)
                self._room = _TOGETHER if small else 0
            self._groups[-1].append(memory)
            self._room -= max(memory.size, _COUNTED)
            self.arrays.append(memory)
            self.starts.append(self.size)
            self.size += memory.size
        return self._known[key]

    def parts(self, start: int, stop: int) -> Iterator[Any]:
        """The memory of a range, small arrays together; of devices, copies of a few MiB."""
        for n, low, high in cut(self._firsts, self.size, start, stop):
            memory, *more = self._groups[n]
            if more:
                memory = flat(b"".join([each[: each.size] for each in (memory, *more)]))
            yield from _pieces(memory, low, high)

    def checksums(self) -> tuple[str, str]:
        """The checksums of blocks, and of parts of shared ones, as the manifest has them."""
        new = hasher()
        blocks: list[str] = []
        shared: list[str] = []
        mine: list[str] = []  # Of the arrays that have a part of this block.
        made, left = new(), BLOCK
        for memory in self.arrays:
            own, rest = None, memory.size
            for piece in _pieces(memory, 0, memory.size):
                view = memoryview(piece)
                while view:
                    if own is None and (left < BLOCK or rest < BLOCK):
                        own = new()
                    some = view[:left]
                    made.update(some)
                    if own is not None:
                        own.update(some)
                    view, left, rest = view[some.nbytes :], left - some.nbytes, rest - some.nbytes
                    if own is not None and not (left and rest):
                        mine.append(own.hexdigest())
                        own = None
                    if not left:
                        blocks.append(made.hexdigest())
                        shared += mine if len(mine) > 1 else []
                        mine, made, left = [], new(), BLOCK
        if left < BLOCK:
            blocks.append(made.hexdigest())
        shared += mine if len(mine) > 1 else []
        return "".join(blocks), "".join(shared)

    def spans(self) -> list[tuple[int, int]]:
        """Address and bytes of each array, in order."""
        return list(self._known)

    def runs(self) -> Any:
        """The same as an array, of arrays that lie one behind the other together."""
        rows = np.array(self.spans(), np.int64).reshape(-1, 2)
        apart = rows[1:, 0] != rows[:-1].sum(1)
        first = np.flatnonzero(np.append(rows[:1, 0] > 0, apart))
        return np.column_stack([rows[first, 0], np.add.reduceat(rows[:, 1], first)])

    def devices(self) -> list[int]:
        """The CUDA device on which each array lies; -1 for the host."""
        return [getattr(each, "number", -1) for each in self.arrays]


def _pieces(memory: Any, low: int, high: int) -> Iterator[Any]:
    """A range of an array; of one on a device, copies of a few MiB."""
    step = high - low if isinstance(memory, np.ndarray) else _PIECE
    for at in range(low, high, step):
        yield memory[at : min(at + step, high)]


def overlap(vector: Sequence[Any]) -> bool:
    """Whether buffers of a vector share memory, as gaps that are read over do."""
    spans = sorted((flat(each).ctypes.data, each.nbytes) for each in vector if each.nbytes)
    return any(start + size > after for (start, size), (after, _) in pairwise(spans))


def _address(memory: Any) -> int:
    return (
        memory.__array_interface__["data"][0] if isinstance(memory, np.ndarray) else memory.address
    )


class Spans:
    """Where the data of a seed lies.

    Attributes:
        rows: Address and bytes of each array, in order.
        size: Bytes of all.
    """

    def __init__(self, rows: Any) -> None:
        self.rows, self.size = rows, sum(rows[:, 1].tolist())
        self._ends = rows[:, 1].cumsum()

    @staticmethod
    def told(rows: Any) -> str:
        """How a seed tells them: numbers of 64 bits in hexadecimal digits."""
        return np.array(rows, "<i8").tobytes().hex()

    @staticmethod
    def of(given: Any, size: int) -> Spans:
        """Those that a seed of `size` bytes told; raises ValueError or TypeError."""
        rows = np.frombuffer(bytes.fromhex(given), "<i8").reshape(-1, 2)
        made = Spans(rows)
        if made.size != size or not ((rows > 0) & (rows < _MOST)).all():
            raise ValueError("no such memory")
        return made

    def within(self, start: int, stop: int) -> Any:
        """Number of the array, address and bytes of each part of a range, as an array."""
        first = np.searchsorted(self._ends, start, "right")
        last = np.searchsorted(self._ends, stop)
        rows = self.rows[first : last + 1]
        found = np.column_stack([np.arange(first, first + len(rows)), rows])
        if len(rows):
            before = start - self._ends[first] + rows[0, 1]
            found[0] += 0, before, -before
            found[-1, 2] -= self._ends[last] - stop
        return found


def cut(starts: Sequence[int], size: int, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """Which part of which array a range of all is: number, first and past last byte."""
    n = max(0, bisect.bisect_right(starts, start) - 1)
    while start < stop:
        end = starts[n + 1] if n + 1 < len(starts) else size
        end = min(end, stop)
        yield n, start - starts[n], end - starts[n]
        start, n = end, n + 1


def take(vector: Sequence[Any], start: int, stop: int) -> list[Any]:
    """A range of the bytes of several buffers, as parts of them."""
    found: list[Any] = []
    at = 0
    for each in vector:
        low, high = max(start - at, 0), min(stop - at, each.nbytes)
        if low < high:
            found.append(memoryview(each).cast("B")[low:high])
        at += each.nbytes
    return found


def spread(memory: Any, vector: Sequence[Any], start: int, stop: int) -> None:
    """Copies the first bytes of some memory to a range of the bytes of several buffers."""
    done = 0
    for part in take(vector, start, stop):
        part[:] = memory[done : done + part.nbytes]
        done += part.nbytes


def flat(data: Any) -> Any:
    """Bytes as a flat uint8 array."""
    return np.frombuffer(data, np.uint8)
