"""What a measuring process can do: read by a pattern, load by a loader."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypedDict

from benchmarks import subject
from benchmarks.memory import SPAN
from mfload.bench import loaders
from mfload.bench.loaders import Span
from mfload.report import Report


class Job(TypedDict):
    """One measurement, as a process is told of it. Plain values: it travels as JSON."""

    tasks: str
    """The module that knows the task: its `find` turns the name into a `Task`."""
    name: str
    """Of a loader, of a ceiling's pattern, or of another module's task."""
    path: str | list[str]
    files: list[str]
    extents: list[tuple[str, int, int]]
    warmup: list[str]
    """Paths of a tiny checkpoint, to load before anything is measured."""
    names: list[str] | None
    """The tensors to load, all where None."""
    threads: int | None
    nbytes: int
    tensors: int
    page_sum: int | None
    """Sum of bytes 0, 4096, … of each tensor; None where it is not known."""
    file_sum: int | None
    """The same of each extent."""
    explain: bool
    """Whether mfload's report is wanted; a little of the time goes into filling it."""


class Explained(TypedDict):
    """How mfload went about a load."""

    route: list[tuple[str, str, int]]
    """Engine, why, and for how many files."""
    threads: int
    notes: list[str]


class Found(NamedTuple):
    """What a task came to.

    Attributes:
        result: Whatever holds the memory.
        spans: Where it lies.
        tensors: How many there are; None for bytes without tensors.
        report: How mfload loaded it.
        copies: Where parts of it lie once more: touched too, and left out of the sum.
        total: The sum of its pages, where the task took it: memory that the host can't touch.
    """

    result: object
    spans: list[Span]
    tensors: int | None = None
    report: Report | None = None
    copies: Sequence[Span] = ()
    total: int | None = None


@dataclass(frozen=True, slots=True)
class Task:
    """Something to measure.

    Args:
        run: The call whose time counts.
        find: What it came to; not timed.
        prepare: Called before the clock starts, with the job.
    """

    run: Callable[[Job], Any]
    find: Callable[[Any], Found]
    prepare: Callable[[Job], None] = field(default=lambda job: None)


def warmup(job: Job) -> Job:
    """The same job with the tiny checkpoint in its place."""
    paths = job["warmup"]
    whole = list[tuple[str, int, int]](subject.whole(paths))
    return {**job, "path": paths, "files": paths, "extents": whole, "names": None}


def find(name: str) -> Task:
    """The task of a pattern or a loader."""
    loader = loaders.find(name)
    if loader.framework is None:
        return Task(loader.run, lambda found: Found(found, found.spans))
    span = SPAN[loader.framework]

    def run(job: Job) -> tuple[Any, Report | None]:
        report = Report() if job["explain"] and loader.kind == "mfload" else None
        return loader.run(job, report), report

    def found(made: tuple[Any, Report | None]) -> Found:
        arrays, report = made
        return Found(arrays, [span(array) for array in arrays.values()], len(arrays), report)

    return Task(run, found)
