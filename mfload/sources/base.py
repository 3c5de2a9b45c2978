"""What a load needs to know of a source: its identity, and what reading it costs."""

from __future__ import annotations

from typing import Any, NamedTuple


class Costs(NamedTuple):
    """What reading a source costs; the plan takes these as plain numbers.

    Attributes:
        merge_gap: Unwanted bytes that are cheaper read over than skipped; exclusive.
        staged: Bytes a read, at most, that is picked apart in a slot.
    """

    block: int = 16 << 20
    # A gap shorter than a page holds no whole page, so reading over it costs the disk nothing.
    merge_gap: int = 4096
    # Copied out while it is in the processor's cache.
    staged: int = 2 << 20

    @property
    def slot(self) -> int:
        """Bytes a slot has to hold, at most."""
        return min(self.block, self.staged)


class Identity(NamedTuple):
    """What tells one version of a file from the next."""

    inode: int
    size: int
    mtime_ns: int
    device: int | None

    def matches(self, other: Identity) -> bool:
        """Whether both are the same version; a device number counts only where both have one."""
        return self[:3] == other[:3] and (None in (self[3], other[3]) or self[3] == other[3])

    def __reduce__(self) -> tuple[Any, ...]:
        # Another machine, or this one after a reboot, numbers its devices differently.
        return Identity, (*self[:3], None)

    def __str__(self) -> str:
        return f"{self.size} bytes, inode {self.inode}, mtime {self.mtime_ns} ns"
