"""kvikio on host memory, for a fake device: it reads with `preadv`, and sees misuse.

It is as strict as cuFile may be: reads on whole units alone, into memory that was registered as
it was allocated, with a device current in the calling thread.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.machinery
import os
import sys
import types
from typing import Any

from devices.entered import entered

UNIT = 4096


class Kvikio(types.ModuleType):
    """The module.

    Attributes:
        short: Bytes that a read brings, at most.
        fails: What a verb raises: "open", "read", "register", "deregister", "close".
        stalls: Reads that bring nothing, from this number on.
        compat: Whether kvikio would read by itself.
        before_read: Called first by each read.
        before_open: Called first by each open.
        misuse: What should not have been done, in words.
        handles: Files that are open.
        registered: Bytes by address.
        reads: (size, file offset, device offset) of each.
        streams: What each was given to: 0 is the default stream, for which others wait.
    """

    def __init__(self) -> None:
        super().__init__("kvikio")
        self.__spec__ = importlib.machinery.ModuleSpec("kvikio", None)
        self.short: int | None = None
        self.stalls: int | None = None
        self.fails: dict[str, Exception] = {}
        self.compat = False
        self.before_read: Any = None
        self.before_open: Any = None
        self.misuse: list[str] = []
        self.handles = 0
        self.registered: dict[int, int] = {}
        self.reads: list[tuple[int, int, int]] = []
        self.streams: list[int] = []
        self.defaults = types.ModuleType("kvikio.defaults")
        self.defaults.is_compat_mode_preferred = lambda: self.compat  # type: ignore[attr-defined]
        module = self

        class CuFile(_CuFile):
            def __init__(self, file: str, flags: str = "r") -> None:
                super().__init__(module, file, flags)

        self.CuFile = CuFile

    def install(self) -> None:
        sys.modules["kvikio"] = self
        sys.modules["kvikio.defaults"] = self.defaults

    def check(self, verb: str) -> None:
        if not entered():
            self.misuse.append(f"{verb} with {entered()} current")
        if verb in self.fails:
            raise type(self.fails[verb])(*self.fails[verb].args)  # A traceback of its own.

    def memory_register(self, buf: Any) -> None:
        self.check("register")
        face = buf.__cuda_array_interface__
        assert face["data"][0] not in self.registered
        self.registered[face["data"][0]] = face["shape"][0]

    def memory_deregister(self, buf: Any) -> None:
        self.check("deregister")
        del self.registered[buf.__cuda_array_interface__["data"][0]]


class _CuFile:
    def __init__(self, module: Kvikio, file: str, flags: str) -> None:
        assert flags == "r"
        self._module = module
        if module.before_open is not None:
            module.before_open()
        module.check("open")
        self._fd = os.open(file, os.O_RDONLY)
        module.handles += 1

    def raw_read(
        self, buf: Any, size: int, file_offset: int, dev_offset: int, stream: int = 0
    ) -> int:
        module = self._module
        module.streams.append(stream)
        if module.before_read is not None:
            module.before_read()
        module.check("read")
        face = buf.__cuda_array_interface__
        base, nbytes = face["data"][0], face["shape"][0]
        module.reads.append((size, file_offset, dev_offset))
        assert module.registered.get(base) == nbytes, "not the buffer that was registered"
        assert dev_offset + size <= nbytes
        assert size % UNIT == file_offset % UNIT == (base + dev_offset) % UNIT == 0
        if module.stalls is not None and len(module.reads) > module.stalls:
            return 0
        size = size if module.short is None else min(size, module.short)
        memory: Any = (ctypes.c_uint8 * size).from_address(base + dev_offset)
        return os.preadv(self._fd, [memory], file_offset)

    def raw_read_async(
        self, buf: Any, stream: int, size: int, file_offset: int, dev_offset: int
    ) -> Any:
        """As kvikio's, but it reads when it is asked how much it has read."""
        read = functools.partial(self.raw_read, buf, size, file_offset, dev_offset, stream)
        return types.SimpleNamespace(check_bytes_done=read)

    def close(self) -> None:
        os.close(self._fd)
        self._module.handles -= 1
        self._module.check("close")
