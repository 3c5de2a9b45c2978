"""Liveness: whether another process of this host still runs.

A process that is killed leaves no word, and the heartbeat of a framework takes minutes to miss it.
On one host the kernel knows at once. Elsewhere nobody does, and the answer is None.
"""

from __future__ import annotations

import os
from pathlib import Path


def identity() -> str:
    """Words by which others on the same host can look this process up; empty where none can.

    Returns:
        Boot, pid namespace, pid and time of start: a pid alone may be somebody else's by now.
    """
    pid = os.getpid()
    started = _started(pid)
    return "" if started is None else f"{_host()} {pid} {started}"


def alive(who: str) -> bool | None:
    """Whether the process of an `identity` runs; None where this host can't tell."""
    parts = who.split(" ")
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
    """When a process began, in ticks since boot; None for one that is gone or a zombie."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The name in parentheses may hold anything (proc_pid_stat(5)); the state follows it.
    fields = text[text.rindex(")") + 2 :].split()
    return None if fields[0] in "ZX" else fields[19]
