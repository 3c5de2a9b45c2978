"""What happened in a load, and how such things are shown."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields
from typing import Any

from mfload import errors


def human(nbytes: float) -> str:
    """Bytes for people, in binary units: 1.5 MiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(nbytes) < 1024:
            return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes:.4g} {unit}"
        nbytes /= 1024
    return f"{nbytes:.4g} TiB"


def table(rows: Iterable[Sequence[object]]) -> str:
    """Lines of aligned columns."""
    texts = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    lines = ("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) for row in texts)
    return "\n".join(line.rstrip() for line in lines)


def html_table(rows: Iterable[Sequence[object]]) -> str:
    """The same for a notebook."""
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(str(cell))}</td>" for cell in row) + "</tr>"
        for row in rows
    )
    return f"<table>{body}</table>"


class Printable:
    """A result that is shown as the table of its `rows()`, in a terminal and in a notebook."""

    __slots__ = ()

    def rows(self) -> Iterable[Sequence[object]]:
        """What it prints."""
        raise NotImplementedError

    def __str__(self) -> str:
        return table(self.rows())

    def _repr_html_(self) -> str:
        return html_table(self.rows())


@dataclass
class Report:
    """Filled by `mfload.load(..., report=report)`; empty until then.

    Attributes:
        framework: What the arrays are of.
        tensors: How many there are.
        result_bytes: Bytes of the arrays; of a sharded load, those that lie with this process, and
            replicas that share memory counted once.
        read_bytes: Bytes asked of the files; the edges that a direct read rounds its ends to, at
            most two pages each, are not counted.
        over_read_bytes: Bytes read that no tensor wanted.
        exchanged_bytes: Bytes that came from other processes instead of the files.
        processes: How many loaded together.
        mapped_bytes: Bytes of the arrays that lie in maps of the files.
        aliased_bytes: Bytes of the arrays that were not copied once they had landed.
        peak_bytes: The most host memory that mfload's buffers held at once during the load: arrays
            that lie in them, tensors that wait for the framework to copy them, and slots of the
            readers (`Preview.peak_bytes` states it beforehand). What was held before the load is
            not counted, nor are maps of files and the framework's own memory; loads of other
            threads are. What Python, its threads and the framework take comes on top: some 5 to
            17 MiB.
        device_peak_bytes: The most that mfload's buffers held on each device, added up; what lies
            in the framework's own memory is not counted.
        stages: Seconds a stage: headers, import (of the framework, where it was not yet), plan,
            allocate, transfer, arrays.
        user_seconds: Seconds of CPU time that the process spent in its own code while it loaded,
            import and headers left out.
        system_seconds: The same in the kernel: copying from the page cache, and handing out pages.
        page_faults: Page faults meanwhile. A kernel that hands out pages slowly, as on a virtual
            machine whose memory is touched for the first time, shows in system seconds a fault.
        route: (file, engine, why) for each file.
        threads: Readers at once.
        notes: What else was decided without being asked for.
    """

    framework: str = ""
    tensors: int = 0
    result_bytes: int = 0
    read_bytes: int = 0
    over_read_bytes: int = 0
    exchanged_bytes: int = 0
    processes: int = 1
    mapped_bytes: int = 0
    aliased_bytes: int = 0
    peak_bytes: int = 0
    device_peak_bytes: int = 0
    threads: int = 0
    user_seconds: float = 0.0
    system_seconds: float = 0.0
    page_faults: int = 0
    stages: dict[str, float] = field(default_factory=dict[str, float])
    route: tuple[tuple[str, str, str], ...] = ()
    notes: tuple[str, ...] = ()

    def clear(self) -> None:
        """Empties it, so that a load that fails leaves no figures of the one before."""
        for each in fields(self):
            default = each.default
            setattr(self, each.name, {} if default is MISSING else default)

    def add(self, other: Report) -> None:
        """Adds what happened in another part of the same load."""
        most = ("peak_bytes", "device_peak_bytes", "processes", "threads")
        for name in (each.name for each in fields(self)):
            mine, more = getattr(self, name), getattr(other, name)
            if isinstance(mine, dict):
                more = {key: mine.get(key, 0) + more.get(key, 0) for key in {**mine, **more}}
            elif isinstance(mine, tuple):
                more = tuple(dict.fromkeys((*mine, *more)))
            elif isinstance(mine, str):
                more = more or mine
            else:
                more = max(mine, more) if name in most else mine + more
            setattr(self, name, more)

    @property
    def seconds(self) -> float:
        """Seconds of all stages."""
        return sum(self.stages.values())

    @property
    def gib_per_s(self) -> float:
        """GiB of result a second, over all stages but the import of the framework."""
        seconds = self.seconds - self.stages.get("import", 0.0)
        return self.result_bytes / seconds / 2**30 if seconds else 0.0

    @property
    def aliased_share(self) -> float:
        """Share of the result that was not copied after it had landed, 0 to 1."""
        return self.aliased_bytes / self.result_bytes if self.result_bytes else 1.0

    def as_dict(self) -> dict[str, Any]:
        """All of it as plain data."""
        derived = {
            "seconds": self.seconds,
            "gib_per_s": self.gib_per_s,
            "aliased_share": self.aliased_share,
        }
        return asdict(self) | derived

    def rows(self) -> list[tuple[str, str]]:
        """What it prints: names and values."""
        stages = ", ".join(f"{name} {seconds:.4f}" for name, seconds in self.stages.items())
        rows = [
            ("loaded", f"{self.tensors} {self.framework} tensors, {human(self.result_bytes)}"),
            ("time", f"{self.seconds:.4f} s, {self.gib_per_s:.2f} GiB/s without import"),
            ("stages", f"{stages} s"),
            (
                "CPU",
                f"{self.user_seconds:.3f} s user, {self.system_seconds:.3f} s system, "
                f"{self.page_faults} page faults",
            ),
            ("read", f"{human(self.read_bytes)}, {human(self.over_read_bytes)} of it unwanted"),
            *self._exchange(),
            ("mapped", human(self.mapped_bytes)),
            ("aliased", f"{self.aliased_share:.1%}"),
            ("peak", f"{human(self.peak_bytes)} in mfload's buffers"),
            *self._devices(),
            ("threads", str(self.threads)),
        ]
        rows += [("route", f"{file}: {engine} ({why})") for file, engine, why in self.route[:8]]
        if len(self.route) > 8:
            rows.append(("route", f"… and {len(self.route) - 8} more files"))
        return rows + [("note", note) for note in self.notes]

    def _devices(self) -> list[tuple[str, str]]:
        if not self.device_peak_bytes:
            return []
        return [("on devices", f"{human(self.device_peak_bytes)} in mfload's buffers at most")]

    def _exchange(self) -> list[tuple[str, str]]:
        if self.processes == 1:
            return []
        return [("exchanged", f"{human(self.exchanged_bytes)}, {self.processes} processes")]

    def __str__(self) -> str:
        return table(self.rows()) if self.stages else "an empty report"

    def _repr_html_(self) -> str:
        return html_table(self.rows()) if self.stages else "an empty report"


def cleared(report: object) -> None:
    """Empties the report that a user gave, if they gave one.

    Raises:
        UsageError: It is none.
    """
    if report is None:
        return
    if not isinstance(report, Report):
        raise errors.UsageError("no report", expected="a mfload.Report", found=repr(report))
    report.clear()
