"""Questions to the kernel, each with a plain answer where the kernel has none."""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import sys
from pathlib import Path
from typing import NamedTuple

_CACHESTAT = 451  # The same number on every architecture; Linux 6.5 and newer.
_STATX = {"x86_64": 332, "aarch64": 291}
_STATX_DIOALIGN = 0x2000
_AT_EMPTY_PATH = 0x1000


@functools.cache
def _syscall() -> ctypes._NamedFuncPointer | None:  # pyright: ignore[reportPrivateUsage]
    if not sys.platform.startswith("linux"):
        return None
    function = ctypes.CDLL(None, use_errno=True).syscall
    function.restype = ctypes.c_long
    return function


def cached_share(fd: int, nbytes: int, start: int = 0) -> float | None:
    """The share of the pages of `nbytes` from `start` that the page cache holds.

    None where unknown. `cachestat(2)` looks without touching; a read with RWF_NOWAIT would
    start read-ahead.
    """
    call = _syscall()
    if call is None or nbytes == 0:
        return None
    span = (ctypes.c_uint64 * 2)(start, nbytes)
    answer = (ctypes.c_uint64 * 5)()
    if call(_CACHESTAT, fd, ctypes.byref(span), ctypes.byref(answer), 0) != 0:
        return None
    page = os.sysconf("SC_PAGE_SIZE")
    return min(1.0, answer[0] / (-(-(start + nbytes) // page) - start // page))


def direct_alignment(fd: int) -> tuple[int, int] | None:
    """(memory, offset) alignment in bytes that O_DIRECT needs on this file.

    Returns:
        None where the file takes no O_DIRECT; (4096, 4096), which every disk takes,
        where the kernel or the file system does not say.
    """
    if not hasattr(os, "O_DIRECT"):
        return None
    call, number = _syscall(), _STATX.get(platform.machine())
    if call is None or number is None:
        return 4096, 4096
    # struct statx is 256 bytes; stx_mask opens it, stx_dio_mem_align and
    # stx_dio_offset_align are the two u32 at byte 152 (linux/stat.h).
    answer = (ctypes.c_uint32 * 64)()
    if call(number, fd, b"", _AT_EMPTY_PATH, _STATX_DIOALIGN, ctypes.byref(answer)) != 0:
        return 4096, 4096
    if not answer[0] & _STATX_DIOALIGN:
        return 4096, 4096
    memory, offset = answer[38], answer[39]
    return (memory, offset) if memory and offset else None


def memory_room(root: Path = Path("/")) -> tuple[int, str] | None:
    """Bytes that can still be allocated before the kernel kills a process, and what limits them.

    The smallest of the machine's available memory (with swap) and what each control group
    above this process leaves, page cache counted as free.

    Args:
        root: Where `proc` and `sys` are; tests lay made-up trees.
    """
    rooms = [*_machine_room(root), *_cgroup_rooms(root)]
    return min(rooms) if rooms else None


class ProcessLimit(NamedTuple):
    """A limit on the memory of this process, in bytes."""

    name: str
    limit: int
    used: int


def process_limits(root: Path = Path("/")) -> list[ProcessLimit]:
    """The limits that are set (`ulimit -v`, `ulimit -d`), and what is used of them.

    Args:
        root: Where `proc` is; tests lay made-up trees.
    """
    try:
        import resource  # Not on Windows.
    except ImportError:
        return []
    asked = (("RLIMIT_AS", "VmSize"), ("RLIMIT_DATA", "VmData"))
    limits = {name: resource.getrlimit(getattr(resource, name))[0] for name, _ in asked}
    if all(limit == resource.RLIM_INFINITY for limit in limits.values()):
        return []
    try:
        lines = (root / "proc/self/status").read_text().splitlines()
    except OSError:
        return []
    table = {key: rest.split() for key, _, rest in (line.partition(":") for line in lines)}
    return [
        ProcessLimit(name, limits[name], int(table[key][0]) << 10)
        for name, key in asked
        if limits[name] != resource.RLIM_INFINITY and key in table
    ]


def _machine_room(root: Path) -> list[tuple[int, str]]:
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
        table = {key: int(rest.split()[0]) << 10 for key, rest in (x.split(":") for x in lines)}
        room = table["MemAvailable"] + table.get("SwapFree", 0)
    except (OSError, KeyError, ValueError, IndexError):
        return []
    return [(room, "available memory of the machine")]


def _cgroup_rooms(root: Path) -> list[tuple[int, str]]:
    mount = root / "sys/fs/cgroup"
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
        inside = next(x.split("::", 1)[1] for x in lines if x.startswith("0::"))
    except (OSError, StopIteration):
        return []
    group = mount / inside.strip().lstrip("/")
    rooms: list[tuple[int, str]] = []
    while group == mount or mount in group.parents:
        room = _cgroup_room(group)
        if room is not None:
            rooms.append((room, f"memory limit of control group /{group.relative_to(mount)}"))
        group = group.parent
    return rooms


def _cgroup_room(group: Path) -> int | None:
    try:
        limit = int((group / "memory.max").read_text())
        used = int((group / "memory.current").read_text())
        stat = dict(x.split() for x in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None  # No limit reads "max", which is no number.
    cache = int(stat.get("inactive_file", 0)) + int(stat.get("active_file", 0))
    return max(0, limit - used + cache)


def cores() -> int:
    """Cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
