"""Private maps of files: nothing is copied, and nothing written reaches the file.

A file cut short after it was mapped kills the process that touches the missing part. Bringing the
pages in during the load reports it as an error; later it is a risk of this engine.
"""

from __future__ import annotations

import errno
import mmap
import os
import sys
from typing import Any

import numpy as np

from mfload import errors
from mfload.io import buffers
from mfload.sources.local import LocalFile, OpenFile, shrunk

# A map needs no descriptor, and a thousand shards would exceed the usual limit of them.
_UNTRACKED: dict[str, Any] = {"trackfd": False} if sys.version_info >= (3, 13) else {}
_PART = 64 << 20


def map_file(source: LocalFile, ranges: list[tuple[int, int]]) -> Any:
    """A writable uint8 array over a private map of a file, with ranges of it brought in.

    `ranges` are (first byte, length) of what will be used. Raises SourceChangedError if the file is
    shorter than its header said, ReadError if the device failed, and MemoryLimitError if the system
    has no room for the map.
    """
    with OpenFile(source) as opened:
        try:
            mapped = mmap.mmap(opened.fd, source.size, access=mmap.ACCESS_COPY, **_UNTRACKED)
        except ValueError as error:
            # mmap looks at the size itself.
            raise shrunk(source.path, source.size, os.fstat(opened.fd).st_size) from error
        except OSError as error:
            raise errors.MemoryLimitError(
                "the file could not be mapped", file=source.path, found=str(error)
            ) from error
    array = np.frombuffer(mapped, np.uint8)
    address = array.ctypes.data
    for start, length in ranges:
        begin = start // mmap.PAGESIZE * mmap.PAGESIZE
        # In parts, so that Ctrl-C is heard between them.
        for part in range(begin, start + length, _PART):
            _populate(address + part, min(_PART, start + length - part), source)
    return array


def _populate(address: int, nbytes: int, source: LocalFile) -> None:
    try:
        buffers.madvise(address, nbytes, buffers.POPULATE_READ)
    except OSError as error:
        if error.errno in (errno.EFAULT, errno.EIO):
            # EFAULT: touching the page would kill the process. The file was cut short, or
            # the disk failed.
            source.check()
            failed = OSError(errno.EIO, os.strerror(errno.EIO))
            raise errors.from_os(failed, source.path, "read") from error
        # Elsewhere pages come when they are touched.
