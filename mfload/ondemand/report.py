"""What a cache has done so far."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mfload.errors import counted
from mfload.report import Printable, human


@dataclass
class OndemandReport(Printable):
    """What a cache of weights has done since it was made.

    Attributes:
        requests: Requests that were answered, such as one of `ExpertCache.use`.
        hits: Keys of requests that were there, or on the way already: experts, layers or neurons.
        misses: Keys that a request had to read.
        prefetched: Keys that were read ahead.
        evictions: Keys that left.
        reads: Reads that were handed to the engine, which may split long ones.
        read_bytes: Bytes of them that were wanted.
        peak_bytes: Memory that the cache holds: slots, and tensors that stay resident. It was
            allocated when the cache was made.
        budget_bytes: What it was allowed.
        wait_seconds: Seconds that requests waited for reads and for slots, of all threads.
        engine: What reads: "io_uring" or "threads".
        why: Why that one.
    """

    DERIVED: ClassVar[tuple[str, ...]] = ("hit_rate",)

    requests: int = 0
    hits: int = 0
    misses: int = 0
    prefetched: int = 0
    evictions: int = 0
    reads: int = 0
    read_bytes: int = 0
    peak_bytes: int = 0
    budget_bytes: int = 0
    wait_seconds: float = 0.0
    engine: str = ""
    why: str = ""

    @property
    def hit_rate(self) -> float:
        """Share of the keys asked for that were there or on the way, 0 to 1."""
        asked = self.hits + self.misses
        return self.hits / asked if asked else 0.0

    def add(self, other: OndemandReport) -> None:
        """Adds what another cache of the same model has done; memory and engine stay."""
        for name in _ADDED:
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def rows(self) -> list[tuple[str, str]]:
        """What it prints: names and values."""
        rate = f"{self.hit_rate:.1%}: {self.hits} found, {self.misses} read"
        return [
            ("requests", str(self.requests)),
            ("hit rate", rate),
            ("read ahead", str(self.prefetched)),
            ("evictions", str(self.evictions)),
            ("read", f"{human(self.read_bytes)} in {counted(self.reads, 'read')}"),
            ("waited", f"{self.wait_seconds:.4f} s"),
            ("memory", f"{human(self.peak_bytes)} of {human(self.budget_bytes)}"),
            ("engine", f"{self.engine} ({self.why})"),
        ]


_ADDED = (
    "requests", "hits", "misses", "prefetched", "evictions", "reads", "read_bytes", "wait_seconds",
)  # fmt: skip
