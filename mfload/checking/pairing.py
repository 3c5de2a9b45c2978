"""Two checkpoints side by side: the same part of a tensor from both, part after part.

However the two are sharded and ordered, no more of them is held than a part of each a reader. The
table of parts comes on top: some 400 bytes for each, which is 100 MiB for a terabyte.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from mfload import errors
from mfload.checking import streaming
from mfload.checking.streaming import Range
from mfload.index import TensorInfo
from mfload.io import buffers, route as routing
from mfload.io.direct import DirectReader
from mfload.io.pread import PreadReader
from mfload.planning.blocks import Block, Reader
from mfload.runtime import Deadline
from mfload.sources.local import LocalFile

PART = 4 << 20
"""Bytes of the larger of two parts that are read together."""

# Elements come in blocks of up to four: parts of so many begin and end with whole ones.
_WHOLE = 8


class Pair(NamedTuple):
    """A tensor that both checkpoints have, of one shape."""

    left: TensorInfo
    right: TensorInfo


Visit = Callable[[Pair, int, Any, Any], None]
"""Called with a pair, the number of the part's first element, and the bytes of both sides; by
several threads at once, for the parts in any order."""


def walk(
    left: Sequence[LocalFile],
    right: Sequence[LocalFile],
    pairs: Iterable[Pair],
    visit: Visit,
    *,
    threads: int | None = None,
    deadline: Deadline | None = None,
    advance: Callable[[int], None] | None = None,
) -> tuple[str, ...]:
    """Visits all parts of pairs of tensors.

    Args:
        left: The files of the one checkpoint.
        right: Those of the other.
        pairs: Tensors whose parts are wanted. Of a dtype that is not known, an element is a
            byte, and both must have as many.
        visit: Who is shown the parts.
        threads: Readers at once; chosen where None.
        deadline: When to give up.
        advance: Told of the bytes that came from the left side.

    Returns:
        What was decided on the way.

    Raises:
        SourceError: Bytes could not be had, or a file changed.
    """
    deadline = deadline or Deadline(None)
    parts = {Range(*part[:3]): part for pair in pairs for part in _parts(pair)}
    wanted: dict[int, int] = {}
    for part in parts.values():
        number = part.pair.right.pieces[0].source
        wanted[number] = wanted.get(number, 0) + part.right_bytes
    used = [(right[n], nbytes) for n, nbytes in wanted.items()]
    legs = deadline.bound(lambda: routing.choose(used, "auto"), "opening the files")
    beside = _Beside(right, dict(zip(wanted, legs, strict=True)), parts, visit)
    notes = streaming.look(
        left,
        sorted(parts),
        beside,
        threads=threads,
        deadline=deadline,
        advance=advance,
        block=None,
    )
    for number in wanted:
        deadline.bound(right[number].check, "looking at the files again", right[number].path)
    return notes


class _Part(NamedTuple):
    source: int
    offset: int
    nbytes: int
    pair: Pair
    first: int
    right_offset: int
    right_bytes: int


def _parts(pair: Pair) -> Iterator[_Part]:
    left, right = pair.left.pieces[0], pair.right.pieces[0]
    (unit, width), (other, breadth) = block(pair.left), block(pair.right)
    count = left.nbytes // width * unit
    step = max(_WHOLE, PART * unit * other // max(width * other, breadth * unit) // _WHOLE * _WHOLE)
    for first in range(0, count, step):
        stop = min(count, first + step)
        start, end = first // unit * width, -(-stop // unit) * width
        begin, last = first // other * breadth, -(-stop // other) * breadth
        yield _Part(
            left.source, left.offset + start, end - start, pair, first,
            right.offset + begin, last - begin,
        )  # fmt: skip


def block(info: TensorInfo) -> tuple[int, int]:
    """Elements and bytes of the smallest block."""
    return (info.dtype.elements, info.dtype.nbytes) if info.dtype.known else (1, 1)


class _Beside:
    """Reads the right side of what it is shown of the left."""

    def __init__(
        self,
        sources: Sequence[LocalFile],
        route: dict[int, routing.Leg],
        parts: dict[Range, _Part],
        visit: Visit,
    ) -> None:
        self._sources = sources
        self._route = route
        self._parts = parts
        self._visit = visit
        self._mine = threading.local()

    def saw(self, source: int, offset: int, data: Any, stopped: Callable[[], bool]) -> None:
        """Takes the next part of the left side (see `io.blocks.Witness`)."""
        part = self._parts[Range(source, offset, data.size)]
        number = part.pair.right.pieces[0].source
        wanted = Block(number, part.right_offset, part.right_bytes, ())
        try:
            reader = self._reader(number)
            try:
                other = reader.fill(wanted, [], self._slot())
            finally:
                reader.close()
        except OSError as error:
            raise errors.from_os(error, self._sources[number].path, "read") from error
        self._visit(part.pair, part.first, data, other)

    def _reader(self, number: int) -> Reader:
        # Opened for each part: then nothing is left to be closed under a reader that hangs.
        source, leg = self._sources[number], self._route[number]
        return DirectReader(source) if leg.engine == "direct" else PreadReader(source)

    def _slot(self) -> buffers.WorkerSlot:
        if not hasattr(self._mine, "slot"):
            self._mine.slot = buffers.WorkerSlot()
        return self._mine.slot
