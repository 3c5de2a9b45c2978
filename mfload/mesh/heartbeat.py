"""Whether another process still runs.

A killed process leaves no message, and the heartbeat of a framework takes minutes to notice. The
kernel knows at once whether a process of the same host runs. For other hosts the framework's
heartbeat remains.
"""

from __future__ import annotations

import os
from pathlib import Path


def identity() -> str:
    """Text by which processes on the same host can look this one up; empty if they can't.

    It holds boot, pid namespace, pid and start time, since a pid alone may be reused.
    """
    started = _started(os.getpid())
    return "" if started is None else f"{_host()} {os.getpid()} {started}"


def alive(identity: str) -> bool | None:
    """Whether the process of an identity runs; None if it is on another host."""
    parts = identity.split(" ")
    if len(parts) != 3 or parts[0] != _host() or not parts[1].isdigit():
        return None
    return _started(int(parts[1])) == parts[2]


def _host() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return "?"


def _started(pid: int) -> str | None:
    """When a process began, in ticks since boot; None if it has ended or is a zombie."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The name in parentheses may hold anything (proc_pid_stat(5)); the state follows it.
    fields = text[text.rindex(")") + 2 :].split()
    return None if fields[0] in "ZX" else fields[19]
