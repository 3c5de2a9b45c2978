"""What a load would do, for people and programs to look at before it does it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mfload.io.route import Leg
from mfload.planning.planner import Plan
from mfload.report import html_table, human, table


@dataclass(frozen=True, slots=True)
class Preview:
    """What a load would do: the plan, which is pure, and beside it this machine's route.

    Attributes:
        plan: Buffers, blocks and places.
        route: Engine and reason for each file.
        framework: Whose arrays it would make.
        overhead_bytes: The most it would hold beside its buffers: slots, or tensors that wait to
            be copied.
        threads: Readers at once.
        notes: What else was decided without being asked for.
        read_bytes: Bytes that would be read, in all waves.
        wanted_bytes: Those of them that tensors want.
        copied_bytes: Bytes that would be copied in memory after they were read, at most: those
            that pass through a slot, and those of tensors that the framework copies.
        peak_bytes: The most host memory that mfload's buffers would hold at once: arrays that lie
            in them, tensors that wait for the framework to copy them, and slots of the readers
            (`Report.peak_bytes` says what a load held). Maps of files and the framework's own
            memory are not counted.
        device_overhead_bytes: The most that would be held beside the result in the memory of any
            device: slots of a way past the host, elements that wait to be converted, or tensors
            that wait to be copied there.
        exchanged_bytes: Bytes that would come from other processes.
        processes: How many would load together.
    """

    plan: Plan
    route: tuple[Leg, ...]
    framework: str
    overhead_bytes: int
    threads: int
    notes: tuple[str, ...] = ()
    read_bytes: int = 0
    wanted_bytes: int = 0
    copied_bytes: int = 0
    peak_bytes: int = 0
    device_overhead_bytes: int = 0
    exchanged_bytes: int = 0
    processes: int = 1

    @property
    def over_read_bytes(self) -> int:
        """Bytes read that no tensor wants."""
        return self.read_bytes - self.wanted_bytes

    @property
    def tensors(self) -> int:
        """How many tensors; of those that are sharded, there may be several arrays."""
        return len({place.request.info.name for place in self.plan.places})

    def as_dict(self) -> dict[str, Any]:
        """The figures as plain data."""
        made = self.plan.device_bytes
        return {
            "framework": self.framework,
            "tensors": self.tensors,
            "parts": len(self.plan.places),
            "result_bytes": self.plan.result_bytes,
            "read_bytes": self.read_bytes,
            "over_read_bytes": self.over_read_bytes,
            "exchanged_bytes": self.exchanged_bytes,
            "copied_bytes": self.copied_bytes,
            "mapped_bytes": self.plan.mapped_bytes,
            "buffers": len(self.plan.buffers),
            "buffer_bytes": self.plan.buffer_bytes,
            "blocks": len(self.plan.blocks),
            "overhead_bytes": self.overhead_bytes,
            "peak_bytes": self.peak_bytes,
            "device_bytes": sum(made.values()),
            "device_overhead_bytes": self.device_overhead_bytes,
            "processes": self.processes,
            "threads": self.threads,
            "route": [leg._asdict() for leg in self.route],
            "notes": list(self.notes),
        }

    def rows(self) -> list[tuple[str, str]]:
        """What it prints: names and values."""
        made = self.plan
        tensors = f"{self.tensors} {self.framework} tensors, {human(made.result_bytes)}"
        if len(made.places) > self.tensors:
            tensors += f" in {len(made.places)} parts"
        over = human(self.over_read_bytes)
        rows = [
            ("result", tensors),
            ("read", f"{human(self.read_bytes)} in {len(made.blocks)} blocks, {over} unwanted"),
            *self._exchange(),
            ("copied", f"at most {human(self.copied_bytes)} in memory, once they are read"),
            ("mapped", human(made.mapped_bytes)),
            ("buffers", f"{len(made.buffers)}, {human(made.buffer_bytes)} of memory"),
            ("overhead", f"at most {human(self.overhead_bytes)} beyond the buffers"),
            ("peak", f"at most {human(self.peak_bytes)} in mfload's buffers"),
            *self._devices(),
            ("threads", str(self.threads)),
        ]
        rows += [("route", f"{leg.file}: {leg.engine} ({leg.why})") for leg in self.route[:16]]
        if len(self.route) > 16:
            rows.append(("route", f"… and {len(self.route) - 16} more files"))
        return rows + [("note", note) for note in self.notes]

    def _devices(self) -> list[tuple[str, str]]:
        held = self.plan.device_bytes
        if not held:
            return []
        beside = human(self.device_overhead_bytes)
        where = f"{human(sum(held.values()))} on {len(held)}, at most {beside} beside it on each"
        return [("devices", where)]

    def _exchange(self) -> list[tuple[str, str]]:
        if self.processes == 1:
            return []
        handed = f"{human(self.exchanged_bytes)} from {self.processes - 1} other processes"
        return [("exchanged", handed)]

    def __str__(self) -> str:
        return table(self.rows())

    def _repr_html_(self) -> str:
        return html_table(self.rows())
