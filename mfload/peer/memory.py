"""Transport "memory": the kernel copies out of a process of the same user on the same machine.

`process_vm_readv` needs no help of the seed. Which process the seed is, a reader does not take from
the seed: the kernel says that the process has the other end of the connection over which the
manifest came. That it still has these weights is said by what it keeps at an address that it told:
a secret number, and its generation, which is read again after the last byte. A seed opens nothing
for it: where the kernel lets only parents read their children (Yama), another transport is taken.

A seed of this process is read without the kernel.
"""

from __future__ import annotations

import ctypes
import errno
import os
import secrets
import struct
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np

from mfload import errors
from mfload.peer import connections
from mfload.peer.data import Data, Spans
from mfload.peer.transports import Offer, Remote, malformed
from mfload.sources.base import Costs

_SECRET, _WORD = 16, 24
_CALLS = 1024  # Ranges a call, on both sides; Linux takes no more.

_unused: list[Any] = []
"""Words of generations that ended. They get other secrets, and are never freed: freed memory may be
given to an array that has an old secret in it."""

_here: weakref.WeakValueDictionary[str, _Generation] = weakref.WeakValueDictionary()
"""What this process offers, by secret."""


class _Generation:
    """The data of a generation of this process, and its word."""

    def __init__(self, data: Data, generation: int) -> None:
        self.data: Data | None = data
        self.secret = secrets.token_bytes(_SECRET)
        self.word: Any = _unused.pop() if _unused else np.empty(_WORD, np.uint8)
        self.word[:] = np.frombuffer(self.secret + struct.pack("<q", generation), np.uint8)
        _here[self.secret.hex()] = self

    def close(self) -> None:
        """Ends the generation; more than once does nothing."""
        if self.data is not None:
            self.data = None
            self.word[:] = 255  # No secret, and no generation.
            _unused.append(self.word)


def _call() -> Any:
    """The system call; None where there is none."""
    call = getattr(ctypes.CDLL(None, use_errno=True), "process_vm_readv", None)
    if call is not None:
        call.restype = ctypes.c_ssize_t
        call.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_void_p]
        call.argtypes += [ctypes.c_ulong, ctypes.c_ulong]
    return call


def offer(data: Data, generation: int) -> Offer | None:
    """Tells where the data lies, and where the proof is."""
    if _call() is None or max(data.devices(), default=-1) >= 0:
        return None
    kept = _Generation(data, generation)
    given = {
        "pid": os.getpid(),
        "proof": [kept.word.ctypes.data, kept.secret.hex()],
        "spans": Spans.told(data.runs()),
    }
    return Offer(given, kept.close)


def connect(given: Any, remote: Remote) -> MemoryWay | LocalWay | str:
    """Finds the seed's process; what the seed tells leads to memory of its own alone."""
    call = _call()
    if call is None:
        return "the system has no process_vm_readv"
    pid, proof, spans = _checked(given, remote)
    if pid == os.getpid():
        kept = _here.get(proof[1].hex())
        data = None if kept is None else kept.data
        if kept is None or data is None or data.size != remote.manifest.size:
            return "this process has no such seed"
        return LocalWay(kept, data)
    if not remote.compares:
        return "nothing is compared with checksums"
    against = connections.held_by(pid, remote)
    if against:
        return against
    way = MemoryWay(call, pid, proof, spans, remote.manifest.generation, remote.name)
    try:
        return way if way.check() else "the process of that number is not the seed"
    except errors.SourceError:
        return "the seed let go of its memory"
    except OSError as error:
        return f"the kernel refuses: {os.strerror(error.errno or 0)}"


def _checked(given: Any, remote: Remote) -> tuple[int, tuple[int, bytes], Spans]:
    try:
        pid, (address, secret) = given["pid"], given["proof"]
        fine = [type(pid), type(address)] == [int, int] and 0 < pid < 1 << 31
        if fine and 0 < address < 1 << 56 and len(secret) == 2 * _SECRET:
            spans = Spans.of(given["spans"], remote.manifest.size)
            return pid, (address, bytes.fromhex(secret)), spans
    except (KeyError, TypeError, ValueError):
        pass
    raise malformed(remote.name, "its memory")


class LocalWay:
    """Reads what this process publishes (see `Way`)."""

    costs = Costs()
    why = "the seed is in this process"

    def __init__(self, kept: _Generation, data: Data) -> None:
        self._kept, self._data = kept, data

    def read(self, vector: Sequence[Any], offset: int) -> None:
        """Fills buffers (see `Way`)."""
        for each in vector:
            view = np.frombuffer(each, np.uint8)
            for part in self._data.parts(offset, offset + view.size):
                view[: part.size] = part
                view, offset = view[part.size :], offset + part.size

    def check(self) -> bool:
        """Whether the seed still has this generation (see `Way`)."""
        return self._kept.data is not None

    def close(self) -> None:
        """Nothing is open."""


class MemoryWay:
    """Reads the memory of one process (see `Way`)."""

    costs = Costs()
    why = "process_vm_readv: one copy by the kernel, the seed does nothing"

    def __init__(
        self,
        call: Any,
        pid: int,
        proof: tuple[int, bytes],
        spans: Spans,
        generation: int,
        name: str,
    ) -> None:
        self._call, self._pid, self._name = call, pid, name
        self._address, self._secret = proof
        self._generation = generation
        self._spans = spans

    def read(self, vector: Sequence[Any], offset: int) -> None:
        """Fills buffers (see `Way`)."""
        local = [(np.frombuffer(each, np.uint8).ctypes.data, each.nbytes) for each in vector]
        mine = np.array([row for row in local if row[1]], np.int64).reshape(-1, 2)
        found = self._spans.within(offset, offset + mine[:, 1].sum())
        self._copy(mine, np.ascontiguousarray(found[:, 1:]))

    def check(self) -> bool:
        """Whether the proof is still there (see `Way`)."""
        found = np.empty(_WORD, np.uint8)
        self._copy(*np.array([[(found.ctypes.data, _WORD)], [(self._address, _WORD)]], np.int64))
        return found.tobytes() == self._secret + struct.pack("<q", self._generation)

    def close(self) -> None:
        """Nothing is open."""

    def _copy(self, mine: Any, theirs: Any) -> None:
        """Copies ranges of the other process to ranges of this one, of as many bytes in all.

        Ranges are as the kernel takes them: address and bytes, one pair after the other.
        """
        while mine.size:
            ranges = [(each.ctypes.data, min(len(each), _CALLS)) for each in (mine, theirs)]
            got = self._call(self._pid, *ranges[0], *ranges[1], 0)
            if got <= 0:
                self._fail(ctypes.get_errno() if got < 0 else 0)
            mine, theirs = _rest(mine, got), _rest(theirs, got)

    def _fail(self, number: int) -> None:
        if number == errno.ESRCH:
            what, found = "the seed's process is gone", f"no process {self._pid}"
            raise errors.SourceNotFoundError(what, file=self._name, found=found)
        if number in (errno.EFAULT, 0):
            raise errors.SourceChangedError("the seed let go of its memory", file=self._name)
        raise OSError(number, os.strerror(number))


def _rest(ranges: Any, done: int) -> Any:
    """The ranges without as many bytes, of which the kernel has copied them."""
    ends = ranges[:_CALLS, 1].cumsum()
    left = ranges[(whole := int(np.searchsorted(ends, done, "right"))) :]
    if whole < len(ends):
        left[0] += np.array([1, -1]) * (done - (ends[whole - 1] if whole else 0))
    return left
