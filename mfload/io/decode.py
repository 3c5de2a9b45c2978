"""Decoding: the bytes of a block, fetched in parts, become elements in their places.

Codecs follow each other without a buffer between them. So no more is held than the part that was
fetched, what the codecs keep, and the window in which a segment is put together.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mfload import errors
from mfload.io.buffers import PAGE, WorkerSlot
from mfload.io.codecs import CODECS, Reader
from mfload.io.pread import PreadReader, put
from mfload.planning.blocks import Block
from mfload.stored import Encoding

Saw = Callable[[int, int, Any, Callable[[], bool]], object]
"""The method of an `Observer`."""

_MADE = 256 << 10  # Bytes that a codec makes at once.


def decoded(read: Reader, encoding: Encoding) -> Reader:
    """What a step of decoding makes, from its first byte that counts to the end that it declares.

    Raises FormatError where it makes more or fewer bytes than it declares.
    """
    codec = CODECS.get(encoding.codec)
    if codec is None:
        raise errors.FormatError(
            "unknown encoding", expected=" | ".join(CODECS), found=encoding.codec
        )
    source = codec(read)
    left = encoding.nbytes if encoding.stop is None else encoding.stop
    whole = left == encoding.nbytes

    def made(most: int) -> Any:
        nonlocal left
        if not left and not whole:
            return b""
        part = source(min(most, left, _MADE) or 1)
        if bool(left) != bool(len(part)):
            raise errors.FormatError(
                f"{encoding.codec} makes {'fewer' if left else 'more'} bytes than declared",
                expected=errors.amount(encoding.nbytes),
            )
        left -= len(part)
        return part

    _skip(made, encoding.start)
    return made


class _Fetch:
    """Called as a `Reader`: the bytes of a block as the source holds them, a part at a time.

    They lie in a reader's slot, or in memory of their own if codecs hold on to them for longer.
    """

    def __init__(self, block: Block, *, own: bool = False) -> None:
        assert block.decode is not None
        self._own = own
        self._source, self._offset = block.source, block.offset
        self._stop = block.offset + block.nbytes
        self._fetched = block.decode.fetched
        self._part = memoryview(block.decode.inline or b"")

    def use(
        self, reader: PreadReader, slot: WorkerSlot, saw: Saw | None, stopped: Callable[[], bool]
    ) -> None:
        """Has what follows come from a reader, by its slot."""
        self._using = reader, slot, saw, stopped

    def leave(self) -> None:
        """Lets go of the reader and its slot."""
        del self._using

    def __call__(self, most: int) -> Any:
        if not len(self._part) and self._offset < self._stop:
            reader, slot, saw, stopped = self._using
            if stopped():
                raise errors.SourceError("the load was given up")
            nbytes = min(self._fetched, self._stop - self._offset)
            landed = reader.land(Block(self._source, self._offset, nbytes, ()), slot)
            if saw is not None:
                saw(self._source, self._offset, landed, stopped)
            self._part = memoryview(bytes(landed) if self._own else landed)
            self._offset += nbytes
        given, self._part = self._part[:most], self._part[most:]
        return given


class Unfinished:
    """Pieces that are decoded so far, for blocks of the next plan that go on from there.

    Args:
        most: Bytes to hold of what was fetched and is not decoded yet.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        # What blocks of this plan go on from, and what they leave to those of the next.
        self._begun: dict[object, tuple[_Fetch, Reader, int]] = {}
        self._left: dict[object, tuple[_Fetch, Reader, int]] = {}

    def resume(self, blocks: Sequence[Block]) -> tuple[Block, ...]:
        """The blocks of the next plan; those that go on have no bytes of their own to read.

        Forgets the pieces that none of them goes on with.
        """
        left, self._left, self._begun = self._left, {}, {}
        share = self._most // max(1, sum(block.decode is not None for block in blocks))
        made: list[Block] = []
        for block in blocks:
            if (decode := block.decode) is not None:
                known = left.get(_piece(block))
                if known is not None and known[-1] <= block.segments[0].offset:
                    self._begun[_piece(block)] = known
                    block = block._replace(nbytes=0, shared=0)
                fetched = min(decode.fetched, max(PAGE, share))
                block = block._replace(decode=decode._replace(fetched=fetched))
            made.append(block)
        return tuple(made)

    def begun(self, block: Block) -> tuple[_Fetch, Reader | None, int]:
        """What fetches and what decodes the block's piece, and the first byte not decoded yet."""
        return self._begun.pop(_piece(block), None) or (_Fetch(block, own=True), None, 0)

    def leave(self, block: Block, fetch: _Fetch, read: Reader, end: int) -> None:
        """Keeps these for the next block."""
        fetch.leave()
        if block.decode is not None and block.decode.inline is None:  # Those have no place.
            self._left[_piece(block)] = fetch, read, end


def _piece(block: Block) -> object:
    decode = block.decode
    return decode and (block.source, block.offset, decode.tensor, decode.encodings)


def fill(
    block: Block,
    reader: PreadReader,
    memory: list[Any],
    slot: WorkerSlot,
    window: WorkerSlot,
    saw: Saw | None,
    stopped: Callable[[], bool],
    unfinished: Unfinished | None = None,
) -> None:
    """Decodes a block into its places; `saw` is told of all bytes as they are stored.

    Raises FormatError if they don't decode to what the index declares. A block may take long, so
    it ends with an error soon after `stopped` says that the load was given up.
    """
    assert block.decode is not None
    tensor, encodings, fetched, length, _ = block.decode
    fetch, read, end = (_Fetch(block), None, 0) if unfinished is None else unfinished.begun(block)
    fetch.use(reader, slot, saw, stopped)
    try:
        if read is None:
            read = fetch
            for encoding in encodings:
                read = decoded(read, encoding)
        end = _scatter(block, read, memory, window.bytes(length) if length else None, end)
        while saw is not None and len(fetch(fetched)):
            pass
        if unfinished is not None:
            unfinished.leave(block, fetch, read, end)
    except (errors.FormatError, errors.FrameworkMissingError) as error:
        error.tensor = tensor
        raise


def _scatter(block: Block, read: Reader, memory: list[Any], held: Any, start: int) -> int:
    """Puts segments in their places, and returns the end of what was read, from `start` on.

    `held` is room for the longest that needs it.
    """
    end = start  # Which part of what was read is held.
    after = [each.offset for each in block.segments[1:]]
    for segment, following in zip(block.segments, [*after, sys.maxsize], strict=True):
        offset, nbytes, buffer, at, copy = segment
        stop = offset + nbytes
        if copy is None and end <= offset and stop <= following:
            _skip(read, offset - end)
            _take(read, memory[buffer][at : at + nbytes])
            start = end = stop
            continue
        if offset < end:
            held[: end - offset] = held[offset - start : end - start].copy()
        else:
            _skip(read, offset - end)
            end = offset
        start = offset
        _take(read, held[end - start : max(0, stop - start)])
        end = max(end, stop)
        put(held, segment, memory[buffer], at)
    assert block.decode is not None
    for _, nbytes, first, _ in block.decode.encodings[-1:]:
        if first + end == nbytes:
            read(1)  # Raises if anything follows.
    return end


def _skip(read: Reader, nbytes: int) -> None:
    while nbytes:
        nbytes -= len(_some(read, nbytes))


def _take(read: Reader, place: Any) -> None:
    done = 0
    while done < place.size:
        part = _some(read, place.size - done)
        place[done : done + len(part)] = np.frombuffer(part, np.uint8)
        done += len(part)


def _some(read: Reader, most: int) -> Any:
    part = read(most)
    if not len(part):
        raise errors.FormatError("the bytes end before the tensor does", expected=f"{most} more")
    return part
