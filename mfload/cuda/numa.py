"""The processor cores next to a device, and threads that stay on them.

Linux puts a page on the NUMA node of the thread that touches it first, so a thread bound to a
device's node gets memory near that device.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from collections.abc import Collection, Generator
from pathlib import Path

log = logging.getLogger("mfload")


def cpus(
    pci: str | None, root: Path = Path("/"), allowed: Collection[int] | None = None
) -> frozenset[int] | None:
    """The CPUs of a device's NUMA node that may be used.

    `pci` is its address as sysfs writes it ("0000:3b:00.0"). Allowed are by default those of the
    calling thread, which control groups and `taskset` limit. None if the machine has one node,
    sysfs does not tell which is the device's, or none of its CPUs may be used.
    """
    there = None if pci is None else _node(pci, root)
    if there is None:
        return None
    if allowed is None:
        try:
            allowed = os.sched_getaffinity(0)
        except OSError:
            return None
    return there & frozenset(allowed) or None


@functools.cache
def _node(pci: str, root: Path) -> frozenset[int] | None:
    """The CPUs of a device's node; None if there is one node, or sysfs does not tell."""
    nodes = root / "sys/devices/system/node"
    try:
        node = int((root / f"sys/bus/pci/devices/{pci}/numa_node").read_text())
        online = parse((nodes / "online").read_text())  # Offline nodes may keep a directory.
        return parse((nodes / f"node{node}/cpulist").read_text()) if len(online) > 1 else None
    except (OSError, ValueError):
        return None


def parse(text: str) -> frozenset[int]:
    """The numbers of a kernel's list such as "0-3,8-11"; raises ValueError if malformed."""
    numbers: set[int] = set()
    for part in text.strip().split(",") if text.strip() else ():
        first, dash, last = part.partition("-")
        numbers.update(range(int(first), int(last if dash else first) + 1))
    return frozenset(numbers)


@contextlib.contextmanager
def bound(to: Collection[int] | None) -> Generator[None]:
    """Keeps the calling thread on some CPUs inside a `with`; other threads are left alone.

    If the system refuses, the thread goes on unbound: being near is a matter of speed.
    """
    before: Collection[int] = ()
    if to:
        try:
            before = os.sched_getaffinity(0)
            os.sched_setaffinity(0, to)
        except OSError as error:
            before = ()
            log.debug("a thread could not be bound to CPUs %s: %s", sorted(to), error)
    try:
        yield
    finally:
        if before:
            # A control group may have taken those CPUs away meanwhile.
            with contextlib.suppress(OSError):
                os.sched_setaffinity(0, before)
