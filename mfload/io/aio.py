"""Linux AIO, for kernels and containers that forbid io_uring, by ctypes and NumPy.

io_submit(2) and linux/aio_abi.h give the layouts. It reads side by side with O_DIRECT alone.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import sys
import time
from typing import Any

import numpy as np

from mfload.runtime import Forked

_PREADV = 7
# setup, destroy, getevents, submit.
_NUMBERS = {"x86_64": (206, 207, 208, 209), "aarch64": (0, 1, 4, 2)}
# On little-endian machines.
_REQUEST = np.dtype(
    [
        ("number", "u8"), ("key", "u4"), ("how", "u4"), ("opcode", "u2"), ("priority", "i2"),
        ("fd", "u4"), ("address", "u8"), ("count", "u8"), ("offset", "i8"), ("rest", "u8", 2),
    ]
)  # fmt: skip
_EVENT = np.dtype([("number", "u8"), ("request", "u8"), ("result", "i8"), ("more", "i8")])

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


class Aio:
    """A context of the kernel's (see `gather.Ring`); raises OSError if it is not to be had."""

    def __init__(self, depth: int) -> None:
        self._context, self._forked = ctypes.c_ulong(0), Forked()
        numbers = _NUMBERS.get(platform.machine())
        if numbers is None or sys.byteorder != "little":
            raise OSError(errno.ENOSYS, f"not known how to on {platform.machine()}")
        self._setup, self._destroy, self._getevents, self._submit = numbers
        self.depth = depth
        self._call(self._setup, ctypes.c_long(depth), ctypes.byref(self._context))
        self._events = np.zeros(depth, _EVENT)
        self._requests = np.zeros(0, _REQUEST)
        self._waiting = 0  # Requests at the end of those that the kernel has not taken yet.
        self._under_way = 0  # Requests that it has taken.

    def _call(self, number: int, *arguments: Any) -> int:
        result = _libc.syscall(ctypes.c_long(number), *arguments)
        if result < 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        return result

    def submit(self, fds: Any, offsets: Any, vectors: Any, parts: int, first: int) -> None:
        """Notes requests (see `Ring`); `wait` hands them to the kernel, which copies them."""
        requests = np.zeros(len(fds), _REQUEST)
        requests["opcode"], requests["fd"], requests["offset"] = _PREADV, fds, offsets
        requests["address"], requests["count"] = vectors, parts
        requests["number"] = np.arange(first, first + len(fds))
        left = self._requests[len(self._requests) - self._waiting :]
        self._requests = np.concatenate([left, requests])
        self._waiting = len(self._requests)

    def wait(self, least: int) -> tuple[Any, Any]:
        """Numbers and results of what has ended (see `Ring`)."""
        while self._waiting:
            first = len(self._requests) - self._waiting
            addresses = np.arange(first, len(self._requests)) * _REQUEST.itemsize
            addresses += self._requests.ctypes.data
            where = addresses.ctypes.data
            given = ctypes.c_long(self._waiting), ctypes.c_void_p(where)
            try:
                taken = self._call(self._submit, self._context, *given)
                self._waiting, self._under_way = self._waiting - taken, self._under_way + taken
            except OSError as error:
                if error.errno == errno.EAGAIN:  # The kernel is short of something for a moment.
                    if self._under_way:
                        least = 1
                        break
                    time.sleep(0.001)
                    continue
                if error.errno != errno.EINTR:
                    # The first of them is refused, such as a file that is closed.
                    refused = self._requests["number"][first:][:1].astype(np.int64)
                    self._waiting -= 1
                    return refused, np.array([-(error.errno or errno.EIO)])
        while True:
            given = ctypes.c_long(least), ctypes.c_long(self.depth)
            where = ctypes.c_void_p(self._events.ctypes.data)
            try:
                count = self._call(self._getevents, self._context, *given, where, None)
                break
            except OSError as error:
                if error.errno != errno.EINTR:
                    raise
        self._under_way -= count
        ended = self._events[:count]
        return ended["number"].astype(np.int64), ended["result"].copy()

    def close(self) -> None:
        """Ends it (see `Ring`); io_destroy(2) waits for what is under way."""
        if not os:
            return
        context, self._context = self._context, ctypes.c_ulong(0)
        if context.value and not self._forked:  # A fork has none.
            self._call(self._destroy, context)

    def __del__(self) -> None:
        self.close()
