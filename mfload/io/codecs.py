"""Codecs: functions from a reader of encoded bytes to one of decoded ones.

A reader is called with the most bytes to return, and returns none at the end. Codecs raise
FormatError where the bytes are malformed, and hold no more than they must.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable
from typing import Any

from mfload import errors

Reader = Callable[[int], Any]

_TAKEN = 64 << 10  # Bytes that a codec takes at once.


def deflate(read: Reader, what: str = "deflate", wbits: int = -zlib.MAX_WBITS) -> Reader:
    """Deflate: raw, as in zip archives, or framed by zlib or gzip; bytes after it are an error."""
    inflate = zlib.decompressobj(wbits)

    def made(most: int) -> bytes:
        while not inflate.eof:
            given = inflate.unconsumed_tail or read(_TAKEN)
            try:
                part = inflate.decompress(given, most)
            except zlib.error as error:
                raise errors.FormatError(f"malformed {what} data", found=str(error)) from None
            if part:
                return part
            if not len(given) and not inflate.eof:
                raise errors.FormatError(f"the {what} data ends within its stream")
        if inflate.unused_data or len(read(1)):
            raise errors.FormatError(f"there are bytes after the end of the {what} stream")
        return b""

    return made


def zstd(read: Reader) -> Reader:
    """Frames of zstd. Parts that fit the processor's cache take half the time of whole frames."""
    try:
        import zstandard
    except ImportError:
        what = "the tensor is compressed, and the package zstandard is not installed"
        raise errors.missing(what, "orbax") from None
    frames = zstandard.ZstdDecompressor().stream_reader(
        _File(read), read_size=_TAKEN, read_across_frames=True
    )

    def made(most: int) -> bytes:
        try:
            return frames.read(most)
        except zstandard.ZstdError as error:
            raise errors.FormatError("malformed zstd data", found=str(error)) from None

    return made


class _File:
    """A reader as a file."""

    def __init__(self, read: Reader) -> None:
        self.read = read


def crc32c(read: Reader) -> Reader:
    """Bytes with their CRC-32C behind them, 4 bytes."""
    from mfload.formats.crc32c import crc32c as checksum

    held, computed = b"", 0

    def made(most: int) -> bytes:
        nonlocal held, computed
        while len(held) < 4 + most and len(part := read(4 + most - len(held))):
            held += bytes(part)
        given, held = held[:-4], held[-4:]
        computed = checksum(given, computed)
        if not given and computed.to_bytes(4, "little") != held:
            expected = f"CRC-32C {int.from_bytes(held, 'little'):08x}"
            found = f"{computed:08x}"
            raise errors.FormatError("the bytes are damaged", expected=expected, found=found)
        return given

    return made


def narrow(read: Reader, bits: int, sign: int) -> Reader:
    """Integers of so many bits in a byte each, as 8-bit ones; the other bits count for nothing."""
    table = bytes(((code & (1 << bits) - 1) ^ sign) - sign & 255 for code in range(256))
    return lambda most: bytes(read(most)).translate(table)


CODECS: dict[str, Callable[[Reader], Reader]] = {
    "deflate": deflate,
    "zlib": functools.partial(deflate, what="zlib", wbits=zlib.MAX_WBITS),
    "gzip": functools.partial(deflate, what="gzip", wbits=zlib.MAX_WBITS | 16),
    "zstd": zstd,
    "crc32c": crc32c,
    **{f"int{n}": functools.partial(narrow, bits=n, sign=1 << n - 1) for n in (2, 4)},
    **{f"uint{n}": functools.partial(narrow, bits=n, sign=0) for n in (2, 4)},
}
"""The codecs by name."""
