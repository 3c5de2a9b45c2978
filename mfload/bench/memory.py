"""The memory of a process, and of the machine. Linux only.

As a script it touches memory and exits (see `prime`), so it imports nothing but Python's own.
"""

from __future__ import annotations

import ctypes
import mmap
import subprocess
import sys
from pathlib import Path

HUGE = 2 << 20
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE (Linux 5.14); mmap has no name for it yet


def status(field: str, pid: int | str = "self") -> int:
    """A memory field of a process's status, VmRSS, VmHWM or RssAnon for instance, in bytes."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(field)


def reset_peak() -> None:
    """Set this process's peak, VmHWM, back to what it holds now."""
    Path("/proc/self/clear_refs").write_text("5\n")


def free() -> int:
    """Bytes of memory that nothing is kept in, not even the page cache."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemFree:"):
            return int(line.split()[1]) * 1024
    raise KeyError("MemFree")


def fresh_pages(nbytes: int) -> tuple[mmap.mmap, int]:
    """Anonymous private memory on 2 MiB pages, not yet faulted in.

    Args:
        nbytes: Bytes wanted from the aligned start on.

    Returns:
        The map, and the offset in it of its first 2 MiB boundary.
    """
    size = -(-nbytes // HUGE) * HUGE + HUGE
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    return memory, -address % HUGE


def prime(nbytes: int) -> bool:
    """Have another process touch memory and exit.

    A virtual machine may give freed pages back to its host; the next to touch them then pays for
    their return, ten times what fresh memory costs otherwise. After this the machine holds free
    memory of its own for `nbytes` in pages of 4 KiB and for `nbytes` in pages of 2 MiB. Both are
    touched, since small pages come from other free blocks than huge ones.

    Args:
        nbytes: Bytes to touch of each size; cut so that nothing is pushed out of the page cache
            and no control group's limit is reached.

    Returns:
        Whether it was done; memory may run short meanwhile.
    """
    from mfload.io import probes

    room = probes.memory_room()
    most = free() if room is None else min(free(), room[0])
    wanted = min(nbytes, int(0.4 * most))
    command = [sys.executable, "-I", "-S", __file__, str(wanted)]
    return subprocess.run(command, check=False, stderr=subprocess.DEVNULL).returncode == 0


def _touched(nbytes: int, advice: int) -> mmap.mmap:
    """Fresh memory with every page faulted in."""
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(advice)
    try:
        memory.madvise(_POPULATE_WRITE)
    except OSError:
        for at in range(0, nbytes, mmap.PAGESIZE):
            memory[at] = 1
    return memory


if __name__ == "__main__":
    _held = [_touched(int(sys.argv[1]), a) for a in (mmap.MADV_NOHUGEPAGE, mmap.MADV_HUGEPAGE)]
