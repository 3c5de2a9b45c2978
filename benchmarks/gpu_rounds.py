"""Rounds of samples, as many as the time allows.

Getting ready (imports, CUDA's context, a first tiny load) takes longer than most loads. So fresh
processes get ready side by side, and are then measured one after the other, while the others wait;
and a step that is not about a process' first load has one process for all its rounds.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import NamedTuple

from benchmarks import described, gpu_tasks, runner
from benchmarks.gpu_budget import Budget
from benchmarks.process import Child, ChildError
from benchmarks.results import Results
from benchmarks.runner import Bed, Case, Sample
from benchmarks.subject import Subject
from mfload.bench.machine import UnfitError

_LONGEST = 60.0
"""Seconds that a process may take to get ready, and to be measured."""
_GUESS, _GUESS_FRESH = 1.5, 6.0
"""Seconds that a sample is taken to need before one was seen."""

Group = Sequence[str]
"""What one process measures, in this order."""


class Step(NamedTuple):
    """Something to measure.

    Attributes:
        number: Of the step in the table.
        case: Under which conditions.
        groups: What takes turns.
        rounds: How many rounds each name is to have.
        subject: Of which checkpoint.
        fresh: Whether each round has processes of its own; else the only group has one for all
            rounds.
        alone: Whether one process follows another, in this order: the device has no room for more.
    """

    number: int
    case: Case
    groups: Sequence[Group]
    rounds: int
    subject: str = "large"
    fresh: bool = True
    alone: bool = False


@dataclass
class Rounds:
    """Measures steps.

    Args:
        results: Where samples go.
        device: What is loaded onto.
        bed: What all samples share.
        env: What all processes are run with.
        rng: What the orders follow from.
        ahead: How many processes get ready side by side.
        written: Called after each sample.
    """

    results: Results
    device: str
    bed: Bed
    env: Mapping[str, str]
    rng: random.Random
    ahead: int
    written: Callable[[], None]
    _failed: set[tuple[str, str]] = field(default_factory=set[tuple[str, str]])

    def done(self, case: str, name: str) -> int:
        """How many samples there are."""
        return len(self.results.values(case, name, "seconds"))

    def missing(self, step: Step, number: int) -> list[Group]:
        """The groups that a round is not complete without."""

        def wanted(name: str) -> bool:
            case = step.case.name
            return self.done(case, name) <= number and (case, name) not in self._failed

        # A process' second load follows its first: such a group runs whole.
        groups = [[n for n in group if wanted(n) or step.fresh] for group in step.groups]
        return [group for group in groups if any(map(wanted, group))]

    def take(self, step: Step, subject: Subject, budget: Budget) -> bool:
        """Measures a step, or what the time allows of it; whether nothing is left to do.

        Args:
            step: What to measure.
            subject: Of what.
            budget: The time there is.
        """
        taking = _Taking(self, step, subject, budget)
        with taking.processes:
            for number in range(step.rounds):
                groups = self.missing(step, number)
                if not step.alone:
                    self.rng.shuffle(groups)
                side_by_side = step.fresh and not step.alone
                for batch in batches(groups, self.ahead if side_by_side else 1):
                    if taking.cost(batch) > budget.left:
                        return False
                    taking.batch(batch, number)
        return True

    def fail(self, case: str, name: str, why: str) -> None:
        """Notes why there is no sample; the name has no further turn."""
        self._failed.add((case, name))
        self.results.skipped.append((case, gpu_tasks.label(name), why))
        print(f"  {case} FAILED {gpu_tasks.label(name)}: {why}", flush=True)


class _Taking:
    """One step being measured."""

    def __init__(self, rounds: Rounds, step: Step, subject: Subject, budget: Budget) -> None:
        self._rounds, self._step, self._subject, self._budget = rounds, step, subject, budget
        self.processes = ExitStack()
        self._kept: Child | None = None
        self._running: set[Child] = set()
        busy = rounds.results.run["busy_share"]
        if step.case.name not in busy:
            busy[step.case.name] = round(described.busy_share(0.5), 3)

    def cost(self, groups: Sequence[Group]) -> float:
        """Seconds that a batch will take."""
        guess, case = _GUESS_FRESH if self._step.fresh else _GUESS, self._step.case.name
        names = [name for group in groups for name in group]
        return sum(self._budget.cost(f"{case}/{name}", guess / len(groups)) for name in names)

    def batch(self, groups: Sequence[Group], number: int) -> None:
        """Measures groups, each in its process."""
        begun = time.monotonic()
        names = [name for group in groups for name in group]
        if not self._step.fresh:
            self._rounds.rng.shuffle(names)
            groups = [names]
        for name, taken in self._taken(groups):
            if isinstance(taken, str):
                self._rounds.fail(self._step.case.name, name, taken)
            else:
                self._note(name, number, taken)
            self._rounds.written()
        share = (time.monotonic() - begun) / len(names)
        for name in names:
            self._budget.note(f"{self._step.case.name}/{name}", share)

    def _note(self, name: str, number: int, taken: Sample) -> None:
        rounds, case = self._rounds, self._step.case.name
        rounds.results.samples.append({"round": number, **taken})
        seconds, label = taken["seconds"], gpu_tasks.label(name)
        said = "; ".join((taken["explained"] or {"notes": []})["notes"])
        print(f"  {case} {number + 1} {label:60} {seconds:8.4f} s "
              f"{self._subject.nbytes / 1e9 / seconds:6.2f} GB/s  {said}", flush=True)  # fmt: skip

    def _taken(self, groups: Sequence[Group]) -> Iterator[tuple[str, Sample | str]]:
        """Each name with its sample, or the reason why there is none."""
        with ThreadPoolExecutor(len(groups)) as pool:
            children = [self._child() for _ in groups]
            ready = [
                pool.submit(child.get_ready, self._job(group[0]))
                for child, group in zip(children, groups, strict=True)
            ]
            wait(ready)  # So that nobody imports while another is measured.
            for child, group, first in zip(children, groups, ready, strict=True):
                yield from self._group(child, group, first)

    def _group(
        self, child: Child, group: Group, first: Future[None]
    ) -> Iterator[tuple[str, Sample | str]]:
        for at, name in enumerate(group):
            try:
                if at:
                    child = child if child in self._running else self._child()
                    child.get_ready(self._job(name))
                else:
                    first.result()
                cached = runner.prepare(self._step.case, self._subject)
                result = child.run()
            except (ChildError, UnfitError) as error:
                self._end(child)
                if self._step.fresh:
                    yield from ((each, str(error)) for each in group[at:])
                    return
                yield name, str(error)
            else:
                yield name, {"case": self._step.case.name, "name": name, "cached": cached, **result}
        if self._step.fresh:
            self._end(child)

    def _child(self) -> Child:
        """A process: a fresh one, or the one that the step keeps."""
        if self._kept is not None:
            return self._kept
        log = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115  The stack closes it.
        self.processes.enter_context(log)
        timeout = min(_LONGEST, max(20.0, self._budget.left))
        made = Child(log, self._rounds.env, self._rounds.bed.roots, timeout)
        self._running.add(made)
        self.processes.callback(self._end, made)
        self._kept = None if self._step.fresh else made
        return made

    def _end(self, child: Child) -> None:
        if child in self._running:
            self._running.remove(child)
            child.end()
            self._kept = None

    def _job(self, name: str) -> runner.Job:
        job = self._rounds.bed.job(f"{self._rounds.device}/{name}", self._subject)
        # What lies on the device is copied back and summed up in the first round only.
        if self._rounds.done(self._step.case.name, name):
            job["page_sum"] = None
        return job


def batches(groups: Iterable[Group], size: int) -> list[list[Group]]:
    """Groups in batches, each in the first with room.

    JAX is at most once in each, since it takes most of a GPU's memory at start.

    Args:
        groups: What is to be measured.
        size: How many a batch at most.
    """
    made: list[list[Group]] = []
    for group in groups:
        alone = gpu_tasks.framework(group[0]) == "jax"
        for batch in made:
            taken = any(gpu_tasks.framework(each[0]) == "jax" for each in batch)
            if len(batch) < size and not (alone and taken):
                batch.append(group)
                break
        else:
            made.append([group])
    return made
