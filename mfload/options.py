"""How to load: the arguments of `mfload.load` that say nothing of what."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from mfload import errors, suggestions
from mfload.deadline import Deadline
from mfload.io.route import ENGINES

Landing = Literal["auto", "mfload", "framework"]
Exchange = Literal["auto", "never", "once"]
EXCHANGES = ("auto", "never", "once")
Unmatched = Literal["replicate", "error"]
UNMATCHED = ("replicate", "error")
ALLOCATORS = ("auto", "mfload", "framework")

OVERHEAD = 256 << 20
"""Bytes beside the result that a load may hold where nobody says otherwise."""


@dataclass(frozen=True, slots=True)
class Options:
    """Checked once, so that nothing further down the street need doubt them.

    Attributes:
        engine: As for `mfload.load`, and so are those that follow.
        allocator: See there.
        max_host_overhead: See there.
        max_device_overhead: See there.
        threads: See there.
        deadline: What `timeout=` became.
        merge_gap: Unwanted bytes that are rather read over than skipped; None for what the
            sources say.
        by_host: Whether arrays come by way of host memory, wherever they are to be.

    Raises:
        UsageError: One makes no sense.
    """

    engine: str = "auto"
    allocator: str = "auto"
    max_host_overhead: int | None = None
    max_device_overhead: int | None = None
    threads: int | None = None
    deadline: Deadline = field(default_factory=lambda: Deadline(None))
    merge_gap: int | None = None
    by_host: bool = False

    def __post_init__(self) -> None:
        if self.allocator not in ALLOCATORS:
            expected = " | ".join(ALLOCATORS)
            meant = suggestions.meant(self.allocator, ALLOCATORS)
            raise errors.UsageError(
                f"unknown allocator{meant}", expected=expected, found=self.allocator
            )
        _check_count("threads", self.threads, 1)
        _check_count("max_host_overhead", self.max_host_overhead, 0)
        _check_count("max_device_overhead", self.max_device_overhead, 0)
        if self.engine not in ENGINES:
            expected = " | ".join(ENGINES)
            meant = suggestions.meant(self.engine, ENGINES)
            raise errors.UsageError(f"unknown engine{meant}", expected=expected, found=self.engine)


def _check_count(name: str, value: object, least: int) -> None:
    if value is None:
        return
    # What indexes counts: NumPy's integers do, booleans only by accident.
    if isinstance(value, bool) or not hasattr(value, "__index__") or value < least:  # pyright: ignore
        raise errors.UsageError(
            name, expected=f"a whole number, {least} or more", found=repr(value)
        )
