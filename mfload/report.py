"""What happened in a load, and how results are shown."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, ClassVar

from mfload import errors
from mfload.errors import counted

if TYPE_CHECKING:
    from mfload.timeline import Span
    from mfload.timeline_figure import TimelineFigure


def human(nbytes: float, *, decimal: bool = False) -> str:
    """Bytes in binary units, 1.5 MiB, or in decimal ones, 1.5 MB."""
    step, units = (1000, ("kB", "MB", "GB")) if decimal else (1024, ("KiB", "MiB", "GiB"))
    if abs(nbytes) < step:
        return f"{nbytes:.0f} B"
    for unit in units:
        nbytes /= step
        if abs(nbytes) < step:
            return f"{nbytes:.4g} {unit}"
    return f"{nbytes / step:.4g} {'TB' if decimal else 'TiB'}"


def table(rows: Iterable[Sequence[object]]) -> str:
    """Lines of aligned columns."""
    texts = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    lines = ("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) for row in texts)
    return "\n".join(line.rstrip() for line in lines)


def html_table(rows: Iterable[Sequence[object]], *, head: bool = False) -> str:
    """The same for a notebook; `head`: the first row names the columns."""
    import html  # Late: a load does without it.

    lines: list[str] = []
    for number, row in enumerate(rows):
        tag = "th" if head and not number else "td"
        cells = (errors.printable(cell) for cell in row)
        lines.append("".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells))
    return f"<table>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"


FAILED = "failed attempt"
"""The stage of what was tried at another place, and failed."""


class Printable:
    """A result that is shown as the table of its `rows()`, in a terminal and in a notebook.

    `DERIVED` names the properties that `as_dict()` has before the attributes of the dataclass.
    """

    __slots__ = ()
    DERIVED: ClassVar[tuple[str, ...]] = ()

    def as_dict(self) -> dict[str, Any]:
        """All of it as plain data, by the names of attributes and properties."""
        data: Any = self
        names = (*self.DERIVED, *(each.name for each in fields(data)))
        return {name: _plain(getattr(self, name)) for name in names}

    def rows(self) -> Iterable[Sequence[object]]:
        """What it prints."""
        raise NotImplementedError

    def __str__(self) -> str:
        return table(self.rows())

    def _repr_html_(self) -> str:
        return html_table(self.rows())


def _plain(value: Any) -> Any:
    """Tuples as lists, and named ones as dicts."""
    for name in ("as_dict", "_asdict"):
        if isinstance(value, tuple) and hasattr(value, name):
            return getattr(value, name)()
    return list(map(_plain, value)) if isinstance(value, tuple) else value


@dataclass
class Report(Printable):
    """Filled by `mfload.load(..., report=report)`, and batch by batch by `mfload.stream`.

    Attributes:
        framework: The framework of the arrays.
        tensors: Number of tensors.
        result_bytes: Bytes of the arrays. Of a sharded load: those of this process, with replicas
            that share memory counted once.
        read_bytes: Bytes requested of the files, without headers, and without the edges of direct
            reads (at most two pages each).
        over_read_bytes: Bytes read that no tensor wanted.
        whole_reads: Operations on lazy tensors that read all of them, because mfload does not know
            which part they need (see `mfload.stream`).
        exchanged_bytes: Bytes that came from other processes instead of the files.
        processes: Number of processes that loaded together.
        mapped_bytes: Bytes of the arrays that lie in maps of the files.
        aliased_bytes: Bytes of the arrays that were not copied after they had landed.
        peak_bytes: The most host memory that mfload's buffers held at once (`Preview.peak_bytes`
            states it beforehand): arrays that lie in them, tensors that wait for the framework to
            copy them, and slots of the readers, also of loads of other threads; onto devices also
            larger slots that loads before have left. Not counted: what was held before, maps of
            files, the framework's own memory, and some 5 to 17 MiB of Python, its threads and the
            framework.
        device_peak_bytes: The most that mfload's buffers held on each device, added up.
        stages: Seconds of each stage: headers, import (of the framework, the first time), plan,
            allocate, transfer, arrays. "failed attempt" is what was spent on places and seeds that
            failed, before others were asked; the notes say why, and what was read there counts as
            over-read. "publish" is for `PeerOptions(publish=True)`.
        user_seconds: CPU seconds of the process in its own code, without headers and import.
        system_seconds: The same in the kernel: copying from the page cache, and providing pages.
        page_faults: Page faults meanwhile. Many system seconds a fault: the kernel is slow to
            provide pages, as on a virtual machine whose memory is touched for the first time.
        route: (file, engine, why) for each file.
        threads: Number of threads that read; 1 is mostly the one that loads. Of those that were
            tried on cold files, the number that was fastest.
        notes: Other decisions that the load made.
        timeline: What each thread did when: (thread, kind, start, stop, nbytes, file), with seconds
            of `time.perf_counter()`. Its rows make a data frame; `plot` draws them. At most 1,024
            spans of a thread: of more, neighbours are merged. Not part of `as_dict()`.
    """

    DERIVED = ("seconds", "gib_per_s", "aliased_share")

    framework: str = ""
    tensors: int = 0
    result_bytes: int = 0
    read_bytes: int = 0
    over_read_bytes: int = 0
    whole_reads: int = 0
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
    timeline: tuple[Span, ...] = field(default=(), repr=False)

    def as_dict(self) -> dict[str, Any]:
        """All of it but the timeline as plain data, by the names of attributes and properties."""
        data = Printable.as_dict(self)
        del data["timeline"]
        return data

    def clear(self) -> None:
        """Empties it, so that a load that fails leaves no figures of the one before."""
        vars(self).update(vars(Report()))

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
        if other.timeline:
            from mfload.timeline import bounded  # Late: it takes part in no load without a report.

            self.timeline = bounded(self.timeline)

    def add_stage(
        self, name: str, start: float, stop: float, nbytes: int = 0, file: str = ""
    ) -> None:
        """Counts a stage of the load, from and to seconds of `time.perf_counter()`."""
        from mfload.timeline import LOAD, Span

        self.stages[name] = self.stages.get(name, 0.0) + stop - start
        self.timeline += (Span(LOAD, name, start, stop, nbytes, file),)

    def leave_read(self) -> None:
        """Empties it but for what a load that fails has read, and what that cost."""
        kept = ("read_bytes", "user_seconds", "system_seconds", "page_faults", "timeline")
        vars(self).update(vars(Report(**{name: getattr(self, name) for name in kept})))
        self.over_read_bytes = self.read_bytes

    def add_failed(self, other: Report, start: float, stop: float, place: str) -> None:
        """Adds an attempt at another place, which failed, as a stage."""
        from mfload.timeline import LOAD

        other.leave_read()
        other.timeline = tuple(span for span in other.timeline if span.thread != LOAD)
        self.add(other)
        self.add_stage(FAILED, start, stop, other.read_bytes, place)

    def plot(
        self, path: str | os.PathLike[str] | None = None, *, ceiling: float | None = None
    ) -> TimelineFigure:
        """Draws the timeline: what each thread did when, and how fast bytes came.

        A notebook shows the figure. It takes matplotlib, which the extra `plot` brings.

        Args:
            path: Where to write it, too; its suffix says the format.
            ceiling: GiB/s that the machine could read at most, to be drawn beside it.

        Raises:
            UsageError: Nothing was loaded with this report.
            FrameworkMissingError: matplotlib is not installed.
            TargetError: The file can't be written.
        """
        if not self.timeline:
            raise errors.UsageError(
                "nothing was loaded with this report",
                expected="mfload.load(…, report=report) before it",
            )
        try:
            from mfload.timeline_figure import TimelineFigure, write
        except ImportError as error:
            if (error.name or "").partition(".")[0] != "matplotlib":
                raise
            raise errors.missing("the plot needs matplotlib", "plot") from None
        heading = f"{counted(self.tensors, f'{self.framework} tensor')}, {human(self.result_bytes)}"
        figure = TimelineFigure(self.timeline, heading, ceiling)
        if path is not None:
            write(figure, path, 150)
        return figure

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

    def rows(self) -> list[tuple[str, ...]]:
        """What it prints: names and values."""
        if not self.stages:
            return [("an empty report",)]
        stages = ", ".join(f"{name} {seconds:.4f}" for name, seconds in self.stages.items())
        cpu = f"{self.user_seconds:.3f} s user, {self.system_seconds:.3f} s system"
        tensors = counted(self.tensors, f"{self.framework} tensor")
        rows = [
            ("loaded", f"{tensors}, {human(self.result_bytes)}"),
            ("time", f"{self.seconds:.4f} s, {self.gib_per_s:.2f} GiB/s without import"),
            ("stages", f"{stages} s"),
            ("CPU", f"{cpu}, {counted(self.page_faults, 'page fault')}"),
            ("read", f"{human(self.read_bytes)}, {human(self.over_read_bytes)} of it unwanted"),
        ]
        if self.whole_reads:
            rows.append(("read whole", counted(self.whole_reads, "operation on lazy tensors")))
        if self.processes > 1:
            exchanged = (
                f"{human(self.exchanged_bytes)}, {counted(self.processes, 'process', 'processes')}"
            )
            rows.append(("exchanged", exchanged))
        rows += [
            ("mapped", human(self.mapped_bytes)),
            ("aliased", f"{self.aliased_share:.1%}"),
            ("peak", f"{human(self.peak_bytes)} in mfload's buffers"),
        ]
        if self.device_peak_bytes:
            peak = f"{human(self.device_peak_bytes)} in mfload's buffers at most"
            rows.append(("on devices", peak))
        rows.append(("threads", str(self.threads)))
        rows += [("route", f"{file}: {engine} ({why})") for file, engine, why in self.route[:8]]
        if len(self.route) > 8:
            rows.append(("route", f"… and {counted(len(self.route) - 8, 'more file')}"))
        return [*rows, *(("note", note) for note in self.notes)]


def cleared(report: object) -> None:
    """Empties the report that a user gave, if any; raises UsageError if it is not a report."""
    if isinstance(report, Report):
        report.clear()
    elif report is not None:
        raise errors.UsageError(
            "not a report", expected="report=mfload.Report()", found=repr(report)
        )
