"""What a load would do, for people and programs to look at before it does it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mfload.errors import counted
from mfload.io.route import Leg
from mfload.planning.plan import Plan
from mfload.planning.request import names
from mfload.report import Printable, human


@dataclass(frozen=True, slots=True, repr=False)
class Preview(Printable):
    """What a load would do: the plan, which is the same on every machine, and this one's route.

    Attributes:
        plan: Buffers, blocks and places.
        route: Engine and reason for each file.
        framework: Whose arrays it would make.
        overhead_bytes: The most it would hold beside its buffers: slots, or tensors that wait to
            be copied.
        threads: Readers at once.
        notes: What else was decided without being asked for.
        read_bytes: Bytes that would be read, in all batches, without headers.
        wanted_bytes: Those of them that tensors want.
        copied_bytes: Bytes that would be copied in memory after they were read, at most: those
            that pass through a slot, and those of tensors that the framework copies.
        peak_bytes: The most host memory that mfload's buffers would hold at once: arrays that lie
            in them, tensors that wait for the framework to copy them, and slots of the readers
            (`Report.peak_bytes` says what a load held). Maps of files and the framework's own
            memory are not counted.
        device_overhead_bytes: The most that would be held beside the result in the memory of any
            device: slots of reads past the host, or tensors that wait to be copied there.
        exchanged_bytes: Bytes that would come from other processes.
        processes: How many would load together.
        remote_requests: Requests for ranges of data that would be sent to servers.
        round_trips: How many of these would wait for one another, at least. A listing, an index
            and the headers, which are one each, came before: the plan has read them.
    """

    DERIVED = ("tensors", "over_read_bytes")

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
    remote_requests: int = 0
    round_trips: int = 0

    @property
    def over_read_bytes(self) -> int:
        """Bytes read that no tensor wants."""
        return self.read_bytes - self.wanted_bytes

    @property
    def tensors(self) -> int:
        """How many tensors; of those that are sharded, there may be several arrays."""
        return len(set(names(self.plan.requests)))

    def as_dict(self) -> dict[str, Any]:
        """The figures as plain data."""
        plan, data = self.plan, Printable.as_dict(self)
        del data["plan"], data["wanted_bytes"]
        return data | {
            "parts": len(plan.places),
            "result_bytes": plan.result_bytes,
            "mapped_bytes": plan.mapped_bytes,
            "buffers": len(plan.buffers),
            "buffer_bytes": plan.buffer_bytes,
            "blocks": len(plan.blocks),
            "device_bytes": sum(plan.device_bytes.values()),
        }

    def rows(self) -> list[tuple[str, str]]:
        """What it prints: names and values."""
        plan, devices = self.plan, self.plan.device_bytes
        tensors = f"{counted(self.tensors, f'{self.framework} tensor')}, {human(plan.result_bytes)}"
        if len(plan.places) > self.tensors:
            tensors += f" in {counted(len(plan.places), 'part')}"
        blocks, over = counted(len(plan.blocks), "block"), human(self.over_read_bytes)
        rows = [
            ("result", tensors),
            ("read", f"{human(self.read_bytes)} in {blocks}, {over} unwanted"),
        ]
        if self.remote_requests:
            asked = counted(self.remote_requests, "request")
            trips = counted(self.round_trips, "round trip")
            rows.append(("requests", f"{asked} for data, in {trips} after those for headers"))
        if self.processes > 1:
            others = counted(self.processes - 1, "other process", "other processes")
            rows.append(("exchanged", f"{human(self.exchanged_bytes)} from {others}"))
        rows += [
            ("copied", f"at most {human(self.copied_bytes)} in memory, once they are read"),
            ("mapped", human(plan.mapped_bytes)),
            ("buffers", f"{len(plan.buffers)}, {human(plan.buffer_bytes)} of memory"),
            ("overhead", f"at most {human(self.overhead_bytes)} beyond the buffers"),
            ("peak", f"at most {human(self.peak_bytes)} in mfload's buffers"),
        ]
        if devices:
            beside = f"at most {human(self.device_overhead_bytes)} beside it on each"
            held = human(sum(devices.values()))
            rows.append(("devices", f"{held} on {len(devices)}, {beside}"))
        rows.append(("threads", str(self.threads)))
        rows += [("route", f"{leg.file}: {leg.engine} ({leg.why})") for leg in self.route[:16]]
        if len(self.route) > 16:
            rows.append(("route", f"… and {counted(len(self.route) - 16, 'more file')}"))
        return rows + [("note", note) for note in self.notes]

    def __repr__(self) -> str:
        engines = ", ".join(dict.fromkeys(leg.engine for leg in self.route)) or "none"
        size = human(self.plan.result_bytes)
        tensors = counted(self.tensors, f"{self.framework} tensor")
        return f"<mfload plan: {tensors}, {size}, engine {engines}>"
