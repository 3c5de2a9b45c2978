"""Mounts: which file system a path lies on, and with what options."""

from __future__ import annotations

from typing import NamedTuple

from mfload.cuda.system import System

_MOST = 64 << 20  # A host of many containers has tens of thousands, each with a long line.


class Mount(NamedTuple):
    """The mount that holds a path.

    Attributes:
        kind: Type of the file system.
        options: Its options.
        device: "major:minor".
    """

    kind: str
    options: frozenset[str]
    device: str


def mount(system: System, path: str) -> Mount | None:
    """The mount that holds a path.

    Args:
        system: The machine.
        path: Absolute, links resolved.
    """
    best: tuple[int, Mount] | None = None
    for line in (system.text("proc/self/mountinfo", _MOST) or "").splitlines():
        left, _, right = line.partition(" - ")
        head, tail = left.split(" "), right.split(" ")
        if len(head) < 6 or len(tail) < 3:
            continue
        point = _unescaped(head[4])
        inside = path == point or path.startswith(point.rstrip("/") + "/")
        # `>=`: of two mounts on one point the later lies on top.
        if inside and (best is None or len(point) >= best[0]):
            options = frozenset((*head[5].split(","), *tail[2].split(",")))
            best = (len(point), Mount(tail[0], options, head[2]))
    return None if best is None else best[1]


def _unescaped(point: str) -> str:
    """A mount point as a path: the kernel writes blanks and backslashes as octal numbers."""
    for octal, character in (("040", " "), ("011", "\t"), ("012", "\n"), ("134", "\\")):
        point = point.replace(f"\\{octal}", character)
    return point
