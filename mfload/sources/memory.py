"""Bytes in memory as a source, such as what came from a database or an archive."""

from __future__ import annotations

from typing import Any

import numpy as np

from mfload import errors
from mfload.sources.base import ClosedAtEnd, Costs, shrunk


class MemorySource:
    """Bytes in memory as a `Source`. They are copied like those of a file: no array aliases them.

    Raises:
        UsageError: The bytes of a memoryview are not contiguous.
    """

    file, engine, costs = None, "memory", Costs()

    def __init__(self, data: bytes | bytearray | memoryview) -> None:
        if not memoryview(data).c_contiguous:
            what = "the bytes in memory are not contiguous"
            raise errors.UsageError(what, expected="a memoryview in C order")
        self.size = memoryview(data).nbytes
        self.bytes: Any = np.frombuffer(data, np.uint8) if self.size else np.empty(0, np.uint8)
        self.name = f"<{errors.amount(self.size)} in memory>"
        self.identity = f"{errors.amount(self.size)} in memory"

    def __reduce__(self) -> tuple[Any, ...]:
        return MemorySource, (self.bytes.tobytes(),)

    def part(self, offset: int, nbytes: int) -> Any:
        """A range; raises SourceChangedError if the bytes end before."""
        if offset + nbytes > self.size:
            raise shrunk(self.name, offset + nbytes, self.size)
        return self.bytes[offset : offset + nbytes]

    def read(self, offset: int, nbytes: int) -> bytes:
        """Copies a range."""
        return self.part(offset, nbytes).tobytes()

    def open(self, flags: int = 0) -> MemoryHandle:
        """A handle; nothing has to be opened."""
        del flags
        return MemoryHandle(self)

    def keep(self, keeps: bool) -> None:
        """Does nothing: there is nothing to close."""

    def check(self) -> None:
        """Does nothing: a buffer can't be resized while it is in use."""

    def beside(self, name: str) -> MemorySource:
        """Raises UsageError: nothing lies beside bytes in memory."""
        raise errors.UsageError("nothing lies beside bytes in memory", found=name)


class MemoryHandle(ClosedAtEnd):
    """Reads bytes in memory (see `Handle`)."""

    fd = -1

    def __init__(self, source: MemorySource) -> None:
        self._source = source

    def read(self, vector: list[Any], offset: int, least: int | None = None) -> int:
        """Copies bytes into the buffers of a vector (see `Handle`)."""
        nbytes = sum(part.nbytes for part in vector)
        if least is not None:
            nbytes = min(nbytes, max(least, self._source.size - offset))
        if nbytes <= 0:
            return 0
        data = self._source.part(offset, nbytes)
        if len(vector) > 1:
            return scatter(data, vector)
        np.frombuffer(vector[0], np.uint8)[:nbytes] = data
        return nbytes


def scatter(data: Any, vector: list[Any]) -> int:
    """Copies bytes into the buffers of a vector, as NumPy does without the interpreter's lock."""
    at = 0
    for part in vector:
        nbytes = min(part.nbytes, data.size - at)
        if nbytes:
            np.frombuffer(part, np.uint8)[:nbytes] = data[at : at + nbytes]
        at += nbytes
    return at
