"""A run: steps in the order of their weight; results are written after every sample."""

from __future__ import annotations

import random
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import ROOT, gpu_facts, gpu_steps, gpu_tables, gpu_tasks, gpu_trials, pages, timings
from benchmarks.checkpoint import write_llama
from benchmarks.gpu_budget import Budget
from benchmarks.gpu_files import GIB, Files, room
from benchmarks.gpu_memory import HOST
from benchmarks.gpu_rounds import Rounds, Step
from benchmarks.gpu_steps import ORDER, PARTS
from benchmarks.gpu_trials import Outcome, Trials
from benchmarks.process import environment
from benchmarks.results import Results
from benchmarks.runner import Bed

_WARMUP = 4_000_000
_RESERVE = 15.0
"""Seconds kept for the last page and the plot."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What a run is told.

    Attributes:
        device: What is loaded onto.
        gpu: What is known of it; empty without one.
        cores: How many may be used.
        steps: Which steps.
        minutes: What the run may take.
        gib: Size of the checkpoint.
        rounds: How many rounds are wanted at most.
        seed: What is drawn follows from it; of an earlier run where there was one.
        out: Where results go, a path without its suffix.
    """

    device: str
    gpu: dict[str, Any]
    cores: int
    steps: tuple[int, ...]
    minutes: float
    gib: float
    rounds: int
    seed: int
    out: Path


class Run:
    """A run, which goes on from what an earlier one has written.

    Args:
        setting: What it is told.
        folder: Where the checkpoints are written.
    """

    def __init__(self, setting: Setting, folder: Path) -> None:
        self._setting, self._folder = setting, folder
        self._budget = Budget(setting.minutes * 60 - _RESERVE)
        self._results = results = self._begun()
        results.skipped.clear()  # Tried again.
        more = gpu_facts.environment(setting.gpu.get("count", 0))
        more = {} if setting.device == HOST else more
        env = environment(more, [str(ROOT)])
        log = setting.out.with_suffix(".log")
        self._trials = Trials(setting.device, env, folder, log, self._noted)
        self._groups = gpu_trials.groups(setting.device, setting.cores)
        most, limit = room(folder, setting.gpu)
        wanted = int(setting.gib * GIB)
        self._short = [] if wanted <= most else [
            f"a checkpoint of {setting.gib:g} GiB: {limit} has room for {most / GIB:.2f} GiB"
        ]  # fmt: skip
        nbytes = int(min(wanted, most))
        self._files = Files(folder, results.run["seed"], nbytes, more, self._written)
        warmup = write_llama(folder / "warmup", setting.seed, _WARMUP)
        self._rounds = Rounds(
            results,
            setting.device,
            Bed(warmup.paths, gpu_tasks.__name__, [str(ROOT)], explain=True),
            more,
            random.Random(setting.seed),
            self._ahead(nbytes),
            self._write,
        )

    def _begun(self) -> Results:
        setting, path = self._setting, self._setting.out.with_suffix(".json")
        if path.exists():
            found = Results.read(path)
            if found.run.get("gib") != setting.gib:
                raise SystemExit(
                    f"{path} has figures of a checkpoint of {found.run.get('gib')} GiB, not "
                    f"{setting.gib:g}: give --gib alike, or another --out"
                )
            kept = ("pass", "skip", "no")
            found.run["trials"] = [t for t in found.run["trials"] if t["status"] in kept]
            return found
        results = timings.begun(self._folder, setting.seed, setting.rounds, {})
        results.run |= {
            "gpu": setting.gpu, "cores": setting.cores, "gib": setting.gib, "steps": [],
            "trials": [], "left_out": [], "seconds": 0.0,
        }  # fmt: skip
        return results

    def all(self) -> Results:
        """Tries and measures everything that there is time for; more rounds in what is left."""
        steps = [number for number in ORDER if number in self._setting.steps]
        run = self._results.run
        before, run["steps"] = run["seconds"], sorted({*run["steps"], *steps})
        measured = {number: self._measured(number) for number in steps}
        with ThreadPoolExecutor(1) as pool:
            # The disk writes while trials wait for imports; those that measure come after.
            needed = dict.fromkeys(
                step.subject.replace("served", "large")
                for each in measured.values()
                for step in each
                if any(self._rounds.missing(step, at) for at in range(step.rounds))
            )
            writing = pool.submit(lambda: [self._files.get(name) for name in needed])
            if 0 in steps:
                self._step(0, [])
            writing.result()
        for bounded in (True, False):
            for number in steps:
                self._step(number, measured[number], bounded=bounded)
        run["left_out"] = [*self._short, *self._left_out(steps, measured)]
        run["seconds"] = before + self._budget.used
        self._write()
        return self._results

    def _step(self, number: int, measured: Iterable[Step], *, bounded: bool = True) -> None:
        """Goes on with a step, for its own minutes or for all that are left."""
        part = PARTS[number]
        budget = self._budget.part(part.minutes * 60 if bounded else self._budget.left)
        done = {each["name"] for each in self._results.run["trials"]}
        for group in self._groups.get(number, ()):
            left = {**group, "names": [name for name in group["names"] if name not in done]}
            self._trials.run(left, budget)  # type: ignore[arg-type]
        for step in measured:
            if not any(self._rounds.missing(step, at) for at in range(step.rounds)):
                continue
            with self._files.lent(step.subject, self._setting.device) as subject:
                if not self._rounds.take(step, subject, budget):
                    break
        print(f"step {number}, {part.what}: {budget.used:.0f} s", flush=True)

    def _measured(self, number: int) -> list[Step]:
        """What a step measures here; notes why the rest can't be."""
        setting, found = self._setting, list[Step]()
        for step in gpu_steps.steps(number, setting.device, setting.cores):
            groups: list[list[str]] = []
            for group in step.groups:
                whys = {name: gpu_tasks.why_not(name, setting.device) for name in group}
                groups.append([name for name, why in whys.items() if why is None])
                for name, why in whys.items():
                    skipped = (step.case.name, gpu_tasks.label(name), why or "")
                    if why and skipped not in self._results.skipped:
                        self._results.skipped.append(skipped)
            rounds = min(step.rounds, setting.rounds)
            kept = [group for group in groups if group]
            found += [step._replace(groups=kept, rounds=rounds)] if kept else []
        return found

    def _left_out(self, steps: list[int], measured: dict[int, list[Step]]) -> list[str]:
        """What there was no time for."""
        tried = {each["name"] for each in self._results.run["trials"]}
        found: dict[str, None] = {}
        for number in steps:
            names = [n for group in self._groups.get(number, ()) for n in group["names"]]
            if late := [name for name in names if name not in tried]:
                found[f"step {number}: {', '.join(late)}"] = None
            for step in measured[number]:
                for at in range(step.rounds):
                    if groups := self._rounds.missing(step, at):
                        names = [gpu_tasks.label(name) for group in groups for name in group]
                        more = f" and {len(names) - 4} more" if len(names) > 4 else ""
                        found[f"step {number}, {step.case.name}: round {at + 1} of "
                              f"{'; '.join(names[:4])}{more}"] = None  # fmt: skip
        return list(found)

    def _noted(self, outcome: Outcome) -> None:
        self._results.run["trials"].append(outcome)
        said = outcome["said"][: 600 if gpu_trials.failed([outcome]) else 150]
        print(f"  {outcome['status']:7} {outcome['name']:34} {said}", flush=True)
        self._write()

    def _written(self, name: str, about: dict[str, Any]) -> None:
        self._results.checkpoints[name] = about
        print(f"{name}: {about['nbytes'] / 1e9:.2f} GB, {about['tensors']} tensors, "
              f"{about['drawn']}", flush=True)  # fmt: skip

    def _ahead(self, nbytes: int) -> int:
        """How many processes get ready side by side: JAX leaves the others a quarter of a GPU."""
        left = self._setting.gpu.get("memory", 4 * (nbytes * 2 + 8 * GIB)) / 4
        return max(1, min(6, self._setting.cores // 2)) if left > nbytes * 1.3 + 6 * GIB else 1

    def _write(self) -> None:
        self._results.run["ended"] = time.strftime("%Y-%m-%d %H:%M")
        put(self._results, self._setting.out)


def put(results: Results, out: Path) -> None:
    """Write JSON and page.

    Args:
        results: The run.
        out: Where to, without a suffix.
    """
    path = out.with_suffix(".json")
    results.save(path, targets=[target.as_dict() for target in gpu_tables.judge(results)])
    # From what was written, so that the page can be made again from it.
    pages.put(out.with_suffix(".md"), gpu_tables.page(Results.read(path)))
