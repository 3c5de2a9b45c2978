"""All memory of mfload's own, wherever it is."""

from __future__ import annotations

from mfload.cuda import memory
from mfload.io import buffers


def live_bytes() -> int:
    """Bytes in buffers that something still refers to, in the host's memory and on devices."""
    return buffers.live_bytes() + memory.live_bytes()
