"""The direct reader: O_DIRECT, for files that the page cache does not hold.

The disk writes straight to the destination if that has the alignment of the file, and otherwise to
a reused slot from which segments are placed.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from mfload.io import probes
from mfload.io.buffers import PAGE, WorkerSlot
from mfload.io.pread import PreadReader, place
from mfload.io.trial import Trial
from mfload.planning.blocks import Block, Rows
from mfload.sources.base import Handle, Source

log = logging.getLogger("mfload")

# Below this a slot costs less than the three reads of a read in place.
_IN_PLACE = 256 << 10
# What file systems say that don't do O_DIRECT, or not at this alignment.
_REFUSED = (errno.EINVAL, errno.EOPNOTSUPP)


class DirectReader(PreadReader):
    """Reads blocks of one file with O_DIRECT; `note` is told if it falls back to the page cache.

    `trial`: it says of each block whether it is read so, or through the page cache.
    """

    def __init__(
        self,
        source: Source,
        note: Callable[[str], None] = log.warning,
        trial: Trial | None = None,
    ) -> None:
        super().__init__(source, cold=True)
        self._note, self._name, self._trial = note, source.name, trial
        self._opened: Handle | None = None
        self._memory_unit, self._file_unit = probes.direct_alignment(self._file.fd) or (PAGE, PAGE)
        try:
            self._opened = source.open(os.O_DIRECT)
            # The unaligned ends go through the page cache, without reading ahead of them.
            self._advise("POSIX_FADV_RANDOM")
        except OSError as error:
            try:
                self._fall_back(error)
            except OSError:
                self.close()
                raise

    @property
    def _direct(self) -> Handle | None:
        """The file past the page cache, if it is to be read so now."""
        return self._opened if self._trial is None or self._trial.way.direct else None

    def fill(self, block: Block, memory: list[Any], slot: WorkerSlot) -> Any | None:
        """Reads a block into its places (see `PreadReader`)."""
        direct = self._direct if block.rows is None else None
        if direct is not None and self._filled_in_place(block, memory, direct):
            return None
        if direct is None or self._opened is None:
            return super().fill(block, memory, slot)
        landed = self.land(block, slot)
        place(landed, block.offset, block, memory)
        return landed

    def land(self, block: Block, slot: WorkerSlot) -> Any:
        """Reads a block into a slot, and returns its bytes there."""
        direct = self._direct
        if direct is not None and block.rows is None:  # Rows that lie apart are short.
            start = block.offset // self._file_unit * self._file_unit
            end = block.offset + block.nbytes
            length = -(-(end - start) // self._file_unit) * self._file_unit
            landed = slot.bytes(length)[:length]
            try:
                direct.read([landed], start, least=end - start)
            except OSError as error:
                self._fall_back(error)
            else:
                return landed[block.offset - start : end - start]
        return super().land(block, slot)

    def _take_rows(self, block: Block, rows: Rows, memory: Any) -> None:
        """Reads rows through the page cache, side by side, and takes their pages out of it."""
        super()._take_rows(block, rows, memory)
        if self._direct is None:
            return
        for n in rows.numbers:
            start = block.offset + n * rows.stride
            first, end = start // PAGE * PAGE, -(-(start + rows.nbytes) // PAGE) * PAGE
            os.posix_fadvise(self._file.fd, first, end - first, os.POSIX_FADV_DONTNEED)

    def _filled_in_place(self, block: Block, memory: list[Any], direct: Handle) -> bool:
        """Reads a block whose inner part has the same alignment in memory as in the file."""
        if len(block.segments) != 1:
            return False
        offset, nbytes, buffer, at, copy = block.segments[0]
        if copy is not None or nbytes < _IN_PLACE:
            return False
        target = memory[buffer][at : at + nbytes]
        head = -offset % self._file_unit
        if (target.ctypes.data + head) % self._memory_unit:
            return False
        inner = max(0, nbytes - head) // self._file_unit * self._file_unit
        parts = (
            (direct, head, head + inner),
            (self._file, 0, head),
            (self._file, head + inner, nbytes),
        )
        try:
            for file, start, stop in parts:
                if stop > start:
                    file.read([target[start:stop]], offset + start)
        except OSError as error:
            self._fall_back(error)
            return False
        return True

    def _fall_back(self, error: OSError) -> None:
        """Goes on through the page cache; raises what does not refuse O_DIRECT."""
        if error.errno not in _REFUSED:
            raise error
        self._note(f"{self._name}: fell back from direct to pread: {error.strerror}")
        self._close()

    def _advise(self, advice: str) -> None:
        if self._trial is None:  # Or other readers share the descriptor, and its reading ahead.
            with suppress(OSError):
                os.posix_fadvise(self._file.fd, 0, 0, getattr(os, advice))

    def close(self) -> None:
        """Closes the file."""
        if self._opened is not None:
            self._close()
        super().close()

    def _close(self) -> None:
        if self._opened is not None:
            self._opened.close()
            self._opened = None
        self._advise("POSIX_FADV_NORMAL")  # The source may keep the file open.
