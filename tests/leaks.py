"""How much of mfload's memory is left, once all who let go of it have."""

from __future__ import annotations

import gc
import time

from mfload.cuda.memory import live_bytes


def left() -> int:
    """Bytes of mfload's, on the host and on devices, that something still refers to in the end."""
    if live_bytes():  # A look at all objects takes as long as many a test.
        gc.collect()
    # XLA lets go of what it computed with in threads of its own, some milliseconds later.
    end = time.monotonic() + 5
    while live_bytes() and time.monotonic() < end:
        time.sleep(0.001)
    return live_bytes()
