"""The direct reader: O_DIRECT, past the page cache, for files that it does not hold.

The disk writes straight to its destination where that has the file's own alignment, and to a
reused slot from which segments are placed where it has not.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable
from typing import Any

from mfload.io import probes
from mfload.io.buffers import PAGE
from mfload.io.pread import PreadReader, place
from mfload.planning.blocks import Block, Segment, Slot
from mfload.sources.local import LocalFile, OpenFile

log = logging.getLogger("mfload")

# Below this a slot costs less than the three reads of a read in place.
_IN_PLACE = 256 << 10
# What file systems say that don't do O_DIRECT, or not at this alignment.
_REFUSED = (errno.EINVAL, errno.EOPNOTSUPP)


class DirectReader(PreadReader):
    """Reads blocks of one file with O_DIRECT; falls back to the page cache, and notes it.

    Args:
        source: The file; it is open until `close`.
        note: Called with a text when it falls back.
    """

    def __init__(self, source: LocalFile, note: Callable[[str], None] = log.warning) -> None:
        super().__init__(source)
        self._note = note
        self._direct: OpenFile | None = None
        self._memory_unit = self._file_unit = PAGE
        try:
            units = probes.direct_alignment(self._file.fd)
            if units is None:
                raise OSError(errno.EINVAL, "the file takes no O_DIRECT")
            self._memory_unit, self._file_unit = units
            self._direct = OpenFile(source, os.O_DIRECT)
            # The ragged ends go through the page cache, without reading ahead of them.
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(self._file.fd, 0, 0, os.POSIX_FADV_RANDOM)
        except OSError as error:
            try:
                self._fall_back(error)
            except OSError:
                self.close()
                raise

    def fill(self, block: Block, memory: list[Any], slot: Slot) -> Any | None:
        """Reads a block into its destinations."""
        segments = block.segments
        if self._direct is not None and len(segments) == 1 and self._suits(segments[0], memory):
            try:
                self._in_place(segments[0], memory, self._direct)
            except OSError as error:
                self._fall_back(error)
            else:
                return None
        if self._direct is None:
            return super().fill(block, memory, slot)
        landed = self.land(block, slot)
        place(landed, block.offset, block, memory)
        return landed

    def land(self, block: Block, slot: Slot) -> Any:
        """Reads a block into a slot."""
        if self._direct is not None:
            start = block.offset // self._file_unit * self._file_unit
            end = block.offset + block.nbytes
            length = -(-(end - start) // self._file_unit) * self._file_unit
            landed = slot.bytes(length)[:length]
            try:
                self._direct.read([landed], start, least=end - start)
            except OSError as error:
                self._fall_back(error)
            else:
                return landed[block.offset - start : end - start]
        return super().land(block, slot)

    def _suits(self, segment: Segment, memory: list[Any]) -> bool:
        """Whether the inner part lands on the same alignment in memory as in the file."""
        if segment.copy is not None or segment.nbytes < _IN_PLACE:
            return False
        address = memory[segment.buffer].ctypes.data + segment.at
        head = -segment.offset % self._file_unit
        return (address + head) % self._memory_unit == 0

    def _in_place(self, segment: Segment, memory: list[Any], direct: OpenFile) -> None:
        target = memory[segment.buffer][segment.at : segment.at + segment.nbytes]
        head = -segment.offset % self._file_unit
        inner = (segment.nbytes - head) // self._file_unit * self._file_unit
        for file, start, stop in (
            (direct, head, head + inner),
            (self._file, 0, head),
            (self._file, head + inner, segment.nbytes),
        ):
            if stop > start:
                file.read([target[start:stop]], segment.offset + start)

    def _fall_back(self, error: OSError) -> None:
        """Goes on through the page cache; raises what does not refuse O_DIRECT."""
        if error.errno not in _REFUSED:
            raise error
        self._note(f"{self._file.path}: fell back from direct to pread: {error.strerror}")
        if self._direct is not None:
            self._direct.close()
            self._direct = None
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._file.fd, 0, 0, os.POSIX_FADV_NORMAL)

    def close(self) -> None:
        """Closes the file."""
        if self._direct is not None:
            self._direct.close()
        super().close()
