"""io_uring, as far as reading needs it, by ctypes and NumPy.

Requests and completions lie in memory that is shared with the kernel: NumPy writes many of them at
once, and one system call begins them and waits. io_uring(7) and linux/io_uring.h give the layouts.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import time
from typing import Any

import numpy as np

from mfload.runtime import Forked

_SETUP, _ENTER = 425, 426  # The same numbers on every architecture.
_READV, _GETEVENTS = 1, 1
_SQES = 0x10000000
_ONE_MAP = 1  # IORING_FEAT_SINGLE_MMAP: both rings lie in one map.
_ALL = 0xFFFFFFFF

_REQUEST = np.dtype(
    [
        ("opcode", "u1"), ("flags", "u1"), ("priority", "u2"), ("fd", "i4"), ("offset", "u8"),
        ("address", "u8"), ("count", "u4"), ("how", "u4"), ("number", "u8"), ("rest", "u8", 3),
    ]
)  # fmt: skip
_COMPLETION = np.dtype([("number", "u8"), ("result", "i4"), ("flags", "u4")])
# struct io_uring_params: ten u32, then the offsets of what lies in each ring, ten u32 each.
_PARAMS = ctypes.c_uint32 * 30
_SQ_ENTRIES, _CQ_ENTRIES, _FEATURES, _SQ, _CQ = 0, 1, 5, 10, 20
_HEAD, _TAIL, _RING_MASK = 0, 1, 2
_ARRAY, _CQES = 6, 5

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


def _call(*arguments: Any) -> int:
    """A system call; it lets go of the interpreter. Raises OSError."""
    given = [each if not isinstance(each, int) else ctypes.c_long(each) for each in arguments]
    result = _libc.syscall(*given)
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result


class Uring:
    """A ring of the kernel's, used by one thread at a time; raises OSError if there is none.

    Attributes:
        depth: Reads under way, at most.
    """

    def __init__(self, depth: int) -> None:
        params = _PARAMS()
        self._fd, self._mapped, self._forked = -1, False, Forked()
        self._fd = _call(_SETUP, depth, ctypes.byref(params))
        os.set_inheritable(self._fd, False)
        try:
            self._map(params)
            self._mapped = True
        except BaseException:
            self.close()
            raise

    def _map(self, params: Any) -> None:
        self.depth = entries = params[_SQ_ENTRIES]
        requests, completions = params[_SQ : _SQ + 10], params[_CQ : _CQ + 10]
        if not params[_FEATURES] & _ONE_MAP:
            raise OSError(errno.ENOSYS, "the kernel is older than 5.4")
        length = max(
            requests[_ARRAY] + entries * 4,
            completions[_CQES] + params[_CQ_ENTRIES] * _COMPLETION.itemsize,
        )
        how = mmap.MAP_SHARED | mmap.MAP_POPULATE
        ring = mmap.mmap(self._fd, length, flags=how)
        sqes = mmap.mmap(self._fd, entries * _REQUEST.itemsize, flags=how, offset=_SQES)
        self._requests = np.frombuffer(sqes, _REQUEST, entries)
        self._words = np.frombuffer(ring, np.uint32, length // 4)
        # Of each ring: where its head, its tail and its mask lie among the words.
        self._begun = [requests[n] // 4 for n in (_HEAD, _TAIL)]
        self._ended = [completions[n] // 4 for n in (_HEAD, _TAIL)]
        self._mask = int(self._words[requests[_RING_MASK] // 4])
        self._ended_mask = int(self._words[completions[_RING_MASK] // 4])
        self._words[requests[_ARRAY] // 4 :][:entries] = np.arange(entries)
        self._completions = np.frombuffer(
            ring, _COMPLETION, params[_CQ_ENTRIES], offset=completions[_CQES]
        )

    def _between(self, first: int, last: int) -> int:
        """How far one counter in the rings is behind another; they wrap at 32 bits."""
        return (int(self._words[last]) - int(self._words[first])) & _ALL

    def submit(self, fds: Any, offsets: Any, vectors: Any, parts: int, first: int) -> None:
        """Puts reads into the ring, numbered from `first` on; `wait` hands them to the kernel.

        Each is into the `parts` iovecs at an address of `vectors`.
        """
        _, tail = self._begun
        count, at = len(fds), int(self._words[tail])
        requests = np.zeros(count, _REQUEST)
        requests["opcode"], requests["fd"], requests["offset"] = _READV, fds, offsets
        requests["address"], requests["count"] = vectors, parts
        requests["number"] = np.arange(first, first + count)
        self._requests[(at + np.arange(count)) & self._mask] = requests
        # The system call that follows is the barrier between the two.
        self._words[tail] = (at + count) & _ALL

    def wait(self, least: int) -> tuple[Any, Any]:
        """Numbers and results of what has ended, at least so many; a result is bytes, or -errno."""
        head, tail = self._ended
        while (waiting := self._between(*self._begun)) or self._between(head, tail) < least:
            try:
                _call(_ENTER, self._fd, waiting, least, _GETEVENTS, None, 0)
            except OSError as error:
                if error.errno == errno.EINTR:
                    continue
                # The kernel is short of memory for a moment, or has too much to hand over.
                if error.errno not in (errno.EAGAIN, errno.EBUSY):
                    raise
                if self._between(head, tail):
                    break
                time.sleep(0.001)
        at, count = int(self._words[head]), self._between(head, tail)
        ended = self._completions[(at + np.arange(count)) & self._ended_mask]
        self._words[head] = (at + count) & _ALL
        return ended["number"].astype(np.int64), ended["result"]

    def close(self) -> None:
        """Ends it, once nothing is under way; in a fork it leaves the parent's alone.

        When the interpreter ends and modules have gone, it does nothing.
        """
        if not os:
            return
        # Each request that was put in comes out as one completion.
        while self._fd >= 0 and not self._forked and self._mapped:
            if not self._between(self._ended[0], self._begun[1]):
                break
            try:
                self.wait(1)
            except OSError:
                break
            except KeyboardInterrupt:
                continue  # The kernel still writes to memory.
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        self.close()
