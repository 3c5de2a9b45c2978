"""Rounds of samples, a fresh process each, as many as the time allows.

Getting ready (imports, CUDA's context, a first tiny load) takes longer than most loads. So the
processes of a batch get ready side by side, and are then measured one after the other, while the
others wait.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass, field

from benchmarks import described, gpu_tasks, runner
from benchmarks.gpu_budget import Budget
from benchmarks.gpu_ceilings import is_ceiling
from benchmarks.process import Child, ChildError
from benchmarks.results import Results
from benchmarks.runner import Bed, Case, Sample
from benchmarks.subject import Subject
from mfload.bench.machine import UnfitError

_LONGEST = 90.0
"""Seconds that a process may take to get ready, and to be measured."""
_GUESS, _GUESS_CEILING = 12.0, 4.0
"""Seconds that a sample is taken to need before one was seen; a ceiling imports no framework."""


@dataclass(frozen=True, slots=True)
class Step:
    """Something to measure next.

    Attributes:
        case: Under which conditions.
        names: What takes turns.
        rounds: How many rounds each name is to have had afterwards, earlier steps counted.
    """

    case: Case
    names: Sequence[str]
    rounds: int


@dataclass
class Rounds:
    """Measures steps.

    Args:
        results: Where samples go.
        device: What is loaded onto.
        subject: What is loaded.
        bed: What all samples share.
        env: What all processes are run with.
        budget: The time there is.
        rng: What the orders follow from.
        ahead: How many processes get ready side by side.
        written: Called after each round.
    """

    results: Results
    device: str
    subject: Subject
    bed: Bed
    env: Mapping[str, str]
    budget: Budget
    rng: random.Random
    ahead: int
    written: Callable[[], None]
    _failed: set[tuple[str, str]] = field(default_factory=set[tuple[str, str]])

    def take(self, step: Step) -> None:
        """Measures a step, or what the time allows of it."""
        case = step.case.name
        done = {name: len(self.results.values(case, name, "seconds")) for name in step.names}
        for number in range(step.rounds):
            names = [
                name for name in step.names
                if done[name] <= number and (case, name) not in self._failed
            ]  # fmt: skip
            self.rng.shuffle(names)
            what = f"{case}: rounds {number + 1} to {step.rounds} of {_listed(names)}"
            if names and not self.budget.allows(self._cost(case, names), what):
                return
            if names and case not in self.results.run["busy_share"]:
                self.results.run["busy_share"][case] = round(described.busy_share(0.5), 3)
            for batch in batches(names, self.ahead):
                self._batch(step.case, batch, number)
            if names:
                self.written()

    def _cost(self, case: str, names: Sequence[str]) -> float:
        def guess(name: str) -> float:
            return (_GUESS_CEILING if is_ceiling(name) else _GUESS) / self.ahead

        return sum(self.budget.cost(f"{case}/{name}", guess(name)) for name in names)

    def _batch(self, case: Case, names: Sequence[str], number: int) -> None:
        begun = time.monotonic()
        for name, taken in self._taken(case, names):
            if isinstance(taken, str):
                self._failed.add((case.name, name))
                self.results.skipped.append((case.name, gpu_tasks.label(name), taken))
                print(f"  {case.name} FAILED {gpu_tasks.label(name)}: {taken}", flush=True)
                continue
            self.results.samples.append({"round": number, **taken})
            seconds = taken["seconds"]
            speed = self.subject.nbytes / 1e9 / seconds
            label = gpu_tasks.label(name)
            said = "; ".join((taken["explained"] or {"notes": []})["notes"])
            print(f"  {case.name} {number + 1} {label:60} {seconds:8.4f} s {speed:6.2f} GB/s"
                  f"  {said}", flush=True)  # fmt: skip
        share = (time.monotonic() - begun) / len(names)
        for name in names:
            self.budget.note(f"{case.name}/{name}", share)

    def _taken(self, case: Case, names: Sequence[str]) -> Iterator[tuple[str, Sample | str]]:
        """Each name with its sample, or the reason why there is none."""
        with ExitStack() as logs, ThreadPoolExecutor(len(names)) as pool:
            left = {name: self._start(logs, name) for name in names}
            try:
                ready = {
                    name: pool.submit(child.get_ready, self._job(name))
                    for name, child in left.items()
                }
                wait(ready.values())  # So that nobody imports while another is measured.
                for name in names:
                    yield name, self._measured(case, name, left[name], ready[name])
                    left.pop(name).end()
            finally:
                for child in left.values():
                    child.end()

    def _measured(self, case: Case, name: str, child: Child, ready: Future[None]) -> Sample | str:
        try:
            ready.result()
            cached = runner.prepare(case, self.subject)
            result = child.run()
        except (ChildError, UnfitError) as error:
            return str(error)
        return {"case": case.name, "name": name, "cached": cached, **result}

    def _start(self, logs: ExitStack, name: str) -> Child:
        log = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115  `logs` closes it.
        logs.enter_context(log)
        timeout = min(_LONGEST, max(20.0, self.budget.left))
        return Child(log, self.env, self.bed.roots, timeout)

    def _job(self, name: str) -> runner.Job:
        return self.bed.job(f"{self.device}/{name}", self.subject)


def _listed(names: Sequence[str]) -> str:
    shown = [gpu_tasks.label(name) for name in sorted(names)]
    more = f" and {len(shown) - 4} more" if len(shown) > 4 else ""
    return "; ".join(shown[:4]) + more


def batches(names: Iterable[str], size: int) -> list[list[str]]:
    """Names in batches, each in the first with room.

    JAX is at most once in each, since it takes most of a GPU's memory at start.

    Args:
        names: What is to be measured.
        size: How many a batch at most.
    """
    made: list[list[str]] = []
    for name in names:
        alone = gpu_tasks.framework(name) == "jax"
        for batch in made:
            taken = any(gpu_tasks.framework(each) == "jax" for each in batch)
            if len(batch) < size and not (alone and taken):
                batch.append(name)
                break
        else:
            made.append([name])
    return made
