"""CRC-32C (Castagnoli), by which stores of arrays check their bytes; `zlib` has another CRC-32.

Long bytes are cut into lanes that NumPy takes through the table side by side. The CRC of two parts
is that of the first, moved on by as many zeros as the second has bytes, xor that of the second.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

_POLYNOMIAL = 0x82F63B78
_LANE = 512  # Bytes of a lane.
_SHORT = 16 * _LANE  # Fewer bytes take less time one by one.


def crc32c(data: Any, crc: int = 0) -> int:
    """The checksum of bytes; `crc` is that of the bytes before them."""
    view = memoryview(data).cast("B")
    state, lanes = crc ^ 0xFFFFFFFF, len(view) // _LANE
    if len(view) >= _SHORT:
        import numpy as np

        table = np.array(_table(), np.uint32)
        rows = np.frombuffer(view[: lanes * _LANE], np.uint8).reshape(lanes, _LANE)
        found = np.zeros(lanes, np.uint32)
        for column in rows.T:
            found = table[(found ^ column) & 0xFF] ^ (found >> 8)
        one, two, three, four = _zeros()
        for each in found.tolist():
            state = (
                one[state & 0xFF]
                ^ two[state >> 8 & 0xFF]
                ^ three[state >> 16 & 0xFF]
                ^ four[state >> 24]
                ^ each
            )
        view = view[lanes * _LANE :]
    table = _table()
    for byte in view:
        state = table[(state ^ byte) & 0xFF] ^ (state >> 8)
    return state ^ 0xFFFFFFFF


@functools.cache
def _table() -> Sequence[int]:
    """What becomes of a state of 8 bits after one byte."""
    made: list[int] = []
    for state in range(256):
        for _ in range(8):
            state = state >> 1 ^ (_POLYNOMIAL if state & 1 else 0)
        made.append(state)
    return made


@functools.cache
def _zeros() -> Sequence[Sequence[int]]:
    """What each byte of a state becomes after a lane of zeros."""
    table = _table()
    bits: list[int] = []
    for bit in range(32):
        state = 1 << bit
        for _ in range(_LANE):
            state = table[state & 0xFF] ^ (state >> 8)
        bits.append(state)
    made: list[list[int]] = []
    for byte in range(4):
        row = [0] * 256
        for value in range(1, 256):
            low = value & -value
            row[value] = row[value ^ low] ^ bits[8 * byte + low.bit_length() - 1]
        made.append(row)
    return made
