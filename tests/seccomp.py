"""System calls that are forbidden from now on, as containers do."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence

IO_URING = (425,)
"""`io_uring_setup`, on every architecture."""


def forbid(calls: Sequence[int]) -> None:
    """Has the kernel answer EPERM to calls of those numbers, in this process."""
    libc = ctypes.CDLL(None, use_errno=True)
    # Loads the number of the call; errno EPERM for those that are forbidden; allows the rest.
    code = [(0x20, 0, 0, 0)]
    code += [(0x15, len(calls) - n, 0, number) for n, number in enumerate(calls)]
    code += [(0x06, 0, 0, 0x7FFF0000), (0x06, 0, 0, 0x00050001)]
    program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *each) for each in code))
    kept = struct.pack("HxxxxxxQ", len(code), ctypes.addressof(program))
    assert libc.prctl(38, 1, 0, 0, 0) == 0
    assert libc.prctl(22, 2, ctypes.create_string_buffer(kept), 0, 0) == 0
