"""A limit on the memory of a process, its page cache included if the system lets us make a group.

A cap is made by the parent, and entered by the measuring process once it has imported all it needs:
what it allocates and what it reads through the page cache from then on counts.
"""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from mfload.bench import machine

_V1, _V2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")
_LIMIT = {1: "memory.limit_in_bytes", 2: "memory.max"}
_PEAK = {1: "memory.max_usage_in_bytes", 2: "memory.peak"}


@contextmanager
def group(nbytes: int) -> Generator[str]:
    """A control group inside that of this process, with a limit; "" if there can be none."""
    for version, root, field in ((2, _V2, "0::"), (1, _V1, ":memory:")):
        lines = Path("/proc/self/cgroup").read_text().splitlines()
        own = next((line.partition(field)[2] for line in lines if field in line), None)
        if own is None:
            continue
        parent = root / own.lstrip("/")
        folder = parent / f"mfload-bench-{os.getpid()}-{time.monotonic_ns()}"
        try:
            if not (parent / "cgroup.procs").exists():
                continue  # Other groups, or none, are mounted there.
            folder.mkdir()
        except OSError:
            continue
        if not (folder / _LIMIT[version]).exists():  # Memory is not what it limits.
            folder.rmdir()
            continue
        (folder / _LIMIT[version]).write_text(str(nbytes))
        try:
            yield str(folder)
        finally:
            for _ in range(100):
                with suppress(OSError):
                    folder.rmdir()
                    break
                time.sleep(0.05)  # Its process is still ending.
        return
    yield ""


def described(folder: str) -> str:
    """What a cap covers, in words."""
    if folder:
        version = 2 if (Path(folder) / _LIMIT[2]).exists() else 1
        return f"control group (version {version}): memory and page cache"
    return "RLIMIT_DATA: memory; files are dropped from the page cache before each step"


def enter(folder: str, nbytes: int) -> None:
    """Puts this process under a cap, a group or else RLIMIT_DATA."""
    if folder:
        (Path(folder) / "cgroup.procs").write_text(str(os.getpid()))
        return
    limit = machine.memory_status("VmData") + nbytes
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def peak(folder: str) -> int | None:
    """The most bytes that a group held, page cache included; None without a group."""
    for name in _PEAK.values():
        if folder and (Path(folder) / name).exists():
            return int((Path(folder) / name).read_text())
    return None
