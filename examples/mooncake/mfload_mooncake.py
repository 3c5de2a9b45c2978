"""Mooncake as a transport of mfload: readers pull from registered memory of a seed.

For networks that are trusted as a whole: see docs/how-to/transports.md for what is unsafe about it.
`MFLOAD_MOONCAKE_HOST` is the address of this machine that others reach (127.0.0.1), and
`MFLOAD_MOONCAKE_PROTOCOL` is "tcp" or "rdma".
"""

from __future__ import annotations

import importlib
import os
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from mfload import errors
from mfload.peer.data import Data, Spans, take
from mfload.peer.http import HttpWay
from mfload.peer.transports import Offer, Remote
from mfload.sources.base import Costs

SLOT = 4 << 20
BATCH = 512  # Mooncake fails where a batch has more than 1024 ranges.
_kept: list[Any] = []  # What Mooncake may still write to: it is never given back.


def _engine() -> tuple[Any, str]:
    """An engine of its own, and the name by which others reach it."""
    host = os.environ.get("MFLOAD_MOONCAKE_HOST", "127.0.0.1")
    protocol = os.environ.get("MFLOAD_MOONCAKE_PROTOCOL", "tcp")
    made = importlib.import_module("mooncake.engine").TransferEngine()
    if made.initialize(host, "P2PHANDSHAKE", protocol, ""):
        raise errors.UsageError("Mooncake can't start", expected="tcp | rdma", found=protocol)
    return made, f"{host}:{made.get_rpc_port()}"


def offer(data: Data, generation: int) -> Offer:
    """Registers the memory of a seed, and listens on all interfaces."""
    engine, name = _engine()
    spans = data.spans()
    if max(data.devices(), default=-1) >= 0:
        raise errors.UsageError("Mooncake serves memory of the host here, and no device's")
    if engine.batch_register_memory([a for a, _ in spans], [n for _, n in spans]):
        raise errors.UsageError("Mooncake can't register the memory of the seed")

    def close() -> None:
        engine.batch_unregister_memory([address for address, _ in spans])

    return Offer({"name": name, "spans": Spans.told(spans)}, close)


def connect(given: Any, remote: Remote) -> MooncakeWay | str:
    """The way to a seed, unless Mooncake is not installed here."""
    try:
        name, spans = str(given["name"]), Spans.of(given["spans"], remote.manifest.size)
    except (KeyError, TypeError, ValueError):
        what = "the seed's manifest is malformed: what it says of Mooncake"
        raise errors.HeaderError(what, file=remote.name) from None
    try:
        return MooncakeWay(_engine()[0], name, spans, remote)
    except (ImportError, errors.UsageError) as error:
        return str(error)


class MooncakeWay:
    """Pulls from one seed, a batch of ranges after the other."""

    costs = Costs(block=SLOT, concurrency=1)
    why = "Mooncake: pulled from registered memory; any client of its port can write to the seed"

    def __init__(self, engine: Any, name: str, spans: Spans, remote: Remote) -> None:
        self._engine, self._name, self._spans, self._remote = engine, name, spans, remote
        self._lock = threading.Lock()
        self._slot: Any = None

    def read(self, vector: Sequence[Any], offset: int) -> None:
        """Fills buffers, by a slot that Mooncake knows."""
        with self._lock:
            for at in range(0, sum(each.nbytes for each in vector), SLOT):
                parts = take(vector, at, at + SLOT)
                size, done = sum(part.nbytes for part in parts), 0
                self._pull(offset + at, size)
                for part in parts:
                    part[:] = self._slot[done : done + part.nbytes].data
                    done += part.nbytes

    def check(self) -> bool:
        """Whether the seed still has this generation."""
        return HttpWay(self._remote).check()

    def close(self) -> None:
        """Gives the slot back."""
        if self._slot is not None:
            self._engine.unregister_memory(self._slot.ctypes.data)
            self._slot = None

    def _pull(self, offset: int, size: int) -> None:
        if self._slot is None:
            self._slot = np.empty(SLOT, np.uint8)
            if self._engine.register_memory(self._slot.ctypes.data, SLOT):
                raise errors.ReadError("Mooncake can't register memory", file=self._remote.name)
        theirs = self._spans.within(offset, offset + size)[:, 1:].tolist()
        ends = np.cumsum([0, *(nbytes for _, nbytes in theirs)]) + self._slot.ctypes.data
        mine = ends.tolist()
        for n in range(0, len(theirs), BATCH):
            some = theirs[n : n + BATCH]
            given = [each[0] for each in some], [each[1] for each in some]
            self._wait(mine[n : n + len(some)], *given)

    def _wait(self, *given: list[int]) -> None:
        """One batch; a slot is left to Mooncake for good if it did not come in time."""
        ended: list[int] = []

        def work() -> None:
            ended.append(self._engine.batch_transfer_sync_read(self._name, *given))

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        thread.join(self._remote.stalled)
        if ended != [0]:
            _kept.append((self._engine, self._slot))
            self._slot = None
            found = f"error {ended[0]}" if ended else f"nothing for {self._remote.stalled:g} s"
            raise errors.ReadError("Mooncake's read failed", file=self._remote.name, found=found)
