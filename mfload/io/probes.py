"""Questions to the kernel, each with a plain answer if the kernel has none."""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

# Stretches of a file, and bytes of each.
_SAMPLES, _SAMPLE = 64, 256 << 10
_CACHESTAT = 451  # The same number on every architecture; Linux 6.5 and newer.
_STATX = {"x86_64": 332, "aarch64": 291}
_STATX_DIOALIGN = 0x2000
_AT_EMPTY_PATH = 0x1000


@functools.cache
def _syscall() -> ctypes._NamedFuncPointer:  # pyright: ignore[reportPrivateUsage]
    function = ctypes.CDLL(None, use_errno=True).syscall
    function.restype = ctypes.c_long
    return function


def cached_share(fd: int, nbytes: int, start: int = 0) -> float | None:
    """The share of the pages of `nbytes` from `start` that the page cache holds; None if unknown.

    More than 16 MiB are sampled: to look at all pages takes a tenth of the time of a load.
    `cachestat(2)` looks without touching; a read with RWF_NOWAIT would start read-ahead.
    """
    call = _syscall()
    if nbytes == 0:
        return None
    page, length, samples = os.sysconf("SC_PAGE_SIZE"), nbytes, 1
    if nbytes > _SAMPLES * _SAMPLE:
        length, samples = _SAMPLE, _SAMPLES
    answer = (ctypes.c_uint64 * 5)()
    held = looked = 0
    for n in range(samples):
        at = start + (nbytes - length) * n // max(1, samples - 1)
        span = (ctypes.c_uint64 * 2)(at, length)
        if call(_CACHESTAT, fd, ctypes.byref(span), ctypes.byref(answer), 0) != 0:
            return None
        held += answer[0]
        looked += -(-(at + length) // page) - at // page
    return min(1.0, held / looked)


def direct_alignment(fd: int) -> tuple[int, int] | None:
    """(memory, offset) alignment in bytes that O_DIRECT needs; None if the file takes no O_DIRECT.

    If kernel or file system do not say, (4096, 4096), which every disk takes.
    """
    call, number = _syscall(), _STATX.get(platform.machine())
    if number is None:
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


def memory_room(root: Path | str = "/", *, swap: bool = True) -> tuple[int, str] | None:
    """Bytes that can still be allocated before the kernel kills a process, and what limits them.

    The smallest of the machine's available memory (with swap, if asked for) and what each control
    group above this process leaves, page cache counted as free. `root` is where `proc` and `sys`
    are.
    """
    rooms = [
        (max(0, each.limit - each.used + each.cache), f"memory limit of {each.name}")
        for each in cgroups(root)
    ]
    machine = sizes(f"{root}/proc/meminfo")
    if "MemAvailable" in machine:
        room = machine["MemAvailable"] + swap * machine.get("SwapFree", 0)
        rooms.append((room, "available memory of the machine"))
    return min(rooms, default=None)


_MOST = 1 << 60  # Bytes.
# Of each version of control groups: the line of /proc/self/cgroup, the folder, and the files
# that hold the limit and what is used of it.
_CGROUPS = (
    (r"^0::(.*)$", ".", "memory.max", "memory.current"),
    (
        r"^\d+:(?:[^:]*,)?memory(?:,[^:]*)?:(.*)$",
        "memory",
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
    ),
)


class MemoryLimit(NamedTuple):
    """A limit on the memory of this process, in bytes; `cache` is what of `used` can be had."""

    name: str
    limit: int
    used: int
    cache: int = 0


def cgroups(root: Path | str = "/") -> Iterator[MemoryLimit]:
    """The limits of the control groups above this process, from its own up."""
    lines = _text(f"{root}/proc/self/cgroup")
    for line, folder, most, current in _CGROUPS:
        inside = re.search(line, lines, re.MULTILINE)
        if inside is None:
            continue
        names = list(filter(None, inside[1].strip().split("/")))
        for count in range(len(names), -1, -1):
            name = "/".join(names[:count])
            group = f"{root}/sys/fs/cgroup/{folder}/{name}"
            limit = _text(f"{group}/{most}").strip()
            # No limit reads "max", and in version 1 as a number that no machine has.
            if not limit.isdecimal() or int(limit) > _MOST:
                continue
            used = _text(f"{group}/{current}").strip()
            if not used.isdecimal():
                continue
            stat = _text(f"{group}/memory.stat")
            cache = sum(map(int, re.findall(r"^(?:in)?active_file (\d+)$", stat, re.MULTILINE)))
            yield MemoryLimit(f"control group /{name}", int(limit), int(used), cache)


def _text(path: str) -> str:
    """A file of the kernel's; empty if it can't be read."""
    try:
        # Streams ask often: `Path` and its `read_text` take several times as long.
        file = os.open(path, os.O_RDONLY)
    except OSError:
        return ""
    try:
        return os.read(file, 1 << 16).decode(errors="replace")
    except OSError:
        return ""
    finally:
        os.close(file)


def sizes(path: str) -> dict[str, int]:
    """Bytes by name, of a file with lines such as "MemFree:  5 kB"; none if it can't be read."""
    found = re.findall(r"^(\w+):\s+(\d+) kB$", _text(path), re.MULTILINE)
    return {name: int(number) << 10 for name, number in found}


def process_limits(root: Path | str = "/") -> list[MemoryLimit]:
    """The limits that are set (`ulimit -v`, `ulimit -d`), and what is used of them.

    `root` is where `proc` is.
    """
    import resource

    found: list[MemoryLimit] = []
    for name, key in (("RLIMIT_AS", "VmSize"), ("RLIMIT_DATA", "VmData")):
        limit, _ = resource.getrlimit(getattr(resource, name))
        if limit != resource.RLIM_INFINITY:
            used = sizes(f"{root}/proc/self/status")
            if key in used:
                found.append(MemoryLimit(name, limit, used[key]))
    return found
