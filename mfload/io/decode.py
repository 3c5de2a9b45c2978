"""Decoding: the bytes of a block, fetched in parts, become elements in their places.

Codecs follow each other without a buffer between them. So no more is held than the part that was
fetched, what the codecs keep, and the window in which a segment is put together.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from mfload import errors
from mfload.io.buffers import WorkerSlot
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


def fill(
    block: Block,
    reader: PreadReader,
    memory: list[Any],
    slot: WorkerSlot,
    window: WorkerSlot,
    saw: Saw | None,
    stopped: Callable[[], bool],
) -> None:
    """Decodes a block into its places; `saw` is told of all bytes as they are stored.

    Raises FormatError if they don't decode to what the index declares. A block may take long, so
    it ends with an error soon after `stopped` says that the load was given up.
    """
    assert block.decode is not None
    tensor, encodings, fetched, length, inline = block.decode
    try:
        fetch: Reader = _fetch(block, reader, slot, saw, stopped)
        if inline is not None:
            fetch = io.BytesIO(inline).read
        read = fetch
        for encoding in encodings:
            read = decoded(read, encoding)
        _scatter(block, read, memory, window.bytes(length) if length else None)
        while saw is not None and len(fetch(fetched)):
            pass
    except (errors.FormatError, errors.FrameworkMissingError) as error:
        error.tensor = tensor
        raise


def _scatter(block: Block, read: Reader, memory: list[Any], held: Any) -> None:
    """Puts segments in their places; `held` is room for the longest that needs it."""
    start = end = 0  # Which part of what was read is held.
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
    for _, nbytes, start, _ in block.decode.encodings[-1:]:
        if start + end == nbytes:
            read(1)  # Raises if anything follows.


def _fetch(
    block: Block,
    reader: PreadReader,
    slot: WorkerSlot,
    saw: Saw | None,
    stopped: Callable[[], bool],
) -> Reader:
    """The bytes of a block as the source holds them, fetched a part at a time."""
    offset, stop = block.offset, block.offset + block.nbytes
    part: Any = memoryview(b"")
    assert block.decode is not None
    fetched = block.decode.fetched

    def read(most: int) -> Any:
        nonlocal offset, part
        if not len(part) and offset < stop:
            if stopped():
                raise errors.SourceError("the load was given up")
            nbytes = min(fetched, stop - offset)
            landed = reader.land(Block(block.source, offset, nbytes, ()), slot)
            if saw is not None:
                saw(block.source, offset, landed, stopped)
            part, offset = memoryview(landed), offset + nbytes
        given, part = part[:most], part[most:]
        return given

    return read


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
