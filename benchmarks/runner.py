"""Runs measurements: a fresh process each, loaders taking turns, the machine prepared before each.

What is noise on one machine at one time then falls on all loaders alike, and adds, so that the best
of several rounds says most.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks import ROOT
from benchmarks.process import TIMEOUT, Child, ChildError
from benchmarks.subject import Subject
from benchmarks.tasks import Job
from mfload.bench import machine
from mfload.bench.machine import UnfitError

Sample = dict[str, Any]
"""A child's result, with `case`, `name`, `round` and `cached` (the page cache's share before)."""


@dataclass(frozen=True, slots=True)
class Case:
    """What is measured under which conditions.

    Args:
        name: What the case is called in the results: warm, cold, small, memory or memory-cold.
        cold: Whether the page cache is emptied of the checkpoint before each sample, or filled.
        primed: Whether another process touches memory before each sample.
        watched: Whether private memory is watched meanwhile, which disturbs the time.
    """

    name: str
    cold: bool = False
    primed: bool = True
    watched: bool = False


@dataclass(frozen=True, slots=True)
class Bed:
    """What all samples of a run share.

    Args:
        warmup: Paths of a tiny checkpoint to load before the clock starts.
        tasks: The module that knows what is measured.
        roots: Where that module is found, beside what is installed.
        timeout: Seconds that a process may take to get ready, and to be measured.
        threads: Readers at once, chosen by each loader where None.
        explain: Whether mfload is to say how it went about each load.
    """

    warmup: Sequence[str]
    tasks: str = "benchmarks.tasks"
    roots: Sequence[str] = (str(ROOT),)
    timeout: float = TIMEOUT
    threads: int | None = None
    explain: bool = False

    def job(self, name: str, subject: Subject) -> Job:
        """The job of measuring one thing on a subject."""
        return {
            "tasks": self.tasks,
            "name": name,
            "path": subject.path,
            "files": subject.files,
            "extents": list[tuple[str, int, int]](subject.extents),
            "warmup": list(self.warmup),
            "names": subject.names,
            "threads": self.threads,
            "nbytes": subject.nbytes,
            "tensors": subject.tensors,
            "page_sum": subject.page_sum,
            "file_sum": subject.file_sum,
            "explain": self.explain,
        }


def prepare(case: Case, subject: Subject) -> float | None:
    """Bring page cache and memory into the state that a case asks for.

    Returns:
        The share of the subject that the page cache holds, None where the kernel does not say.

    Raises:
        UnfitError: The page cache can't be brought into that state.
    """
    machine.prepare(subject.extents, subject.nbytes, cold=case.cold, primed=case.primed)
    return machine.cached_share(subject.extents)


def sample(name: str, case: Case, subject: Subject, bed: Bed) -> Sample:
    """Measure once.

    Args:
        name: Of a loader, of a ceiling's pattern, or of another task.
        case: Under which conditions.
        subject: What to load.
        bed: What all samples share.

    Returns:
        The sample.

    Raises:
        ChildError: The measuring process failed, or hung.
        UnfitError: The page cache can't be brought into the state of the case.
    """
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        child = Child(log, {}, bed.roots, bed.timeout)
        try:
            child.get_ready(bed.job(name, subject))
            # The child has imported all it needs: what is prepared now is fresh when it starts.
            cached = prepare(case, subject)
            result = child.run(watched=case.watched)
        finally:
            child.end()
    return {"case": case.name, "name": name, "cached": cached, **result}


Take = Callable[[str], Sample]
"""Measures once what goes by a name."""


def rounds(
    names: Sequence[str], take: Take, count: int, rng: random.Random
) -> Iterator[Sample | tuple[str, str]]:
    """Measure several rounds, each taking every name once, in an order of its own.

    Args:
        names: Of loaders, ceilings and other tasks.
        take: Measures one of them.
        count: How many rounds.
        rng: What the orders follow from.

    Yields:
        Samples; or (name, reason) for one that failed, which is then left out.
    """
    left = list(names)
    for number in range(count):
        rng.shuffle(left)
        for name in list(left):
            try:
                yield {"round": number, **take(name)}
            except (ChildError, UnfitError) as error:
                left.remove(name)
                yield name, str(error)
