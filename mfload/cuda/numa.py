"""Where a device hangs on a machine of several NUMA nodes, and threads that stay near it.

Linux puts a page on the node of the thread that touches it first. So a thread that is bound to
a device's node while it takes and touches memory gets memory near that device, and pages that
are page-locked later stay where they are: nothing else is needed to have pinned memory local.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections.abc import Collection, Generator
from pathlib import Path
from typing import NamedTuple

from mfload.cuda.system import System

log = logging.getLogger("mfload")

MOST = 1 << 16
"""CPUs and nodes that are counted: more than any kernel is built for."""

_RANGES = re.compile(r"[0-9]{1,18}(-[0-9]{1,18})?(,[0-9]{1,18}(-[0-9]{1,18})?)*")

_NODES = "sys/devices/system/node"
_NODE = re.compile(r"node[0-9]{1,9}")


class Near(NamedTuple):
    """The node that a device hangs on.

    Attributes:
        node: Its number.
        cpus: Its CPUs that this process may use.
    """

    node: int
    cpus: frozenset[int]


def near(
    pci: str | None, root: Path = Path("/"), allowed: Collection[int] | None = None
) -> Near | None:
    """The node of a device, where there is a choice.

    Args:
        pci: Address on the PCI bus in the spelling of sysfs ("0000:3b:00.0"); None for none.
        root: Where `sys` is; tests lay made-up trees.
        allowed: CPUs that may be used; None for those of the calling thread, which control
            groups and `taskset` have a say in.

    Returns:
        None where the machine has one node, sysfs does not tell which is the device's, or none
        of its CPUs may be used.
    """
    system = System(root)
    node = None if pci is None else system.number(f"sys/bus/pci/devices/{pci}/numa_node")
    if node is None or node < 0 or len(_nodes(system)) < 2:
        return None
    there = parse(system.text(f"{_NODES}/node{node}/cpulist"))
    if allowed is None:
        # Where a system has no affinities, each CPU of the node may be used.
        allowed = _affinity() if hasattr(os, "sched_getaffinity") else there
    usable = there & frozenset(allowed)
    return Near(node, usable) if usable else None


def cpus(pci: str | None, root: Path = Path("/")) -> frozenset[int] | None:
    """The CPUs next to a device that this process may use, None where there is no choice.

    Args:
        pci: See `near`.
        root: See `near`.
    """
    found = near(pci, root)
    return None if found is None else found.cpus


@contextlib.contextmanager
def bound(to: Collection[int] | None) -> Generator[None]:
    """Keeps the calling thread on some CPUs inside; other threads are left alone.

    Threads that it starts inside inherit the binding, and keep it. Where the system refuses,
    the thread goes on unbound: being near is a matter of speed.

    Args:
        to: The CPUs; None or none leave the thread as it is.
    """
    if not to or not hasattr(os, "sched_setaffinity"):
        yield
        return
    before = _affinity()
    try:
        if before:
            os.sched_setaffinity(0, to)
    except OSError as error:
        before = frozenset()
        log.debug("a thread could not be bound to CPUs %s: %s", sorted(to), error)
    try:
        yield
    finally:
        # A control group may have taken those CPUs away meanwhile.
        with contextlib.suppress(OSError):
            if before:
                os.sched_setaffinity(0, before)


def parse(text: str | None) -> frozenset[int]:
    """The numbers of a kernel's list such as "0-3,8-11", up to `MOST`; none where it is malformed.

    Args:
        text: The list, which goes up: so no text takes longer than its length.
    """
    if not text or not _RANGES.fullmatch(text):
        return frozenset()
    numbers: set[int] = set()
    behind = 0
    for part in text.split(","):
        first, _, last = part.partition("-")
        if int(first) < behind:
            return frozenset()
        behind = int(last or first) + 1
        numbers.update(range(int(first), min(behind, MOST)))
    return frozenset(numbers)


def _affinity() -> frozenset[int]:
    """The CPUs that the calling thread may use; none where the system does not tell."""
    try:
        return frozenset(os.sched_getaffinity(0))
    except OSError:
        return frozenset()


def _nodes(system: System) -> frozenset[int]:
    """Nodes that are in use: numbers may have holes, and offline nodes may keep a directory."""
    online = parse(system.text(f"{_NODES}/online"))
    names = system.names(_NODES)
    return online or frozenset(int(each[4:]) for each in names if _NODE.fullmatch(each))
