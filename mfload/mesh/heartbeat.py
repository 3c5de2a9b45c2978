"""Whether another process still runs.

A framework takes minutes to notice a killed process; the kernel of the same host knows at once. For
processes of other hosts the framework's own heartbeat remains.
"""

from __future__ import annotations

import os
from pathlib import Path


def identity(pid: int | None = None) -> str:
    """Host, pid and start time of a process of this host; empty if it has ended or is a zombie.

    The host is boot and pid namespace. Default: this process.
    """
    pid = pid or os.getpid()
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = os.readlink("/proc/self/ns/pid")
        text = Path(f"/proc/{pid}/stat").read_text("latin-1")
    except OSError:
        return ""
    # The name in parentheses may hold anything (proc_pid_stat(5)); the state follows it.
    state, *fields = text[text.rindex(")") + 2 :].split()
    return "" if state in "ZX" else f"{boot}/{namespace} {pid} {fields[18]}"


def ended(process: str) -> bool:
    """Whether the process of an identity has ended; False if it is on another host."""
    host, _, rest = process.partition(" ")
    here = host == identity().partition(" ")[0] != ""
    return here and identity(int(rest.partition(" ")[0])) != process
