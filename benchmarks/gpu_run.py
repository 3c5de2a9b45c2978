"""A run: trials, then rounds; its results are written after every step."""

from __future__ import annotations

import random
import re
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import ROOT, gpu_facts, gpu_tables, gpu_tasks, gpu_trials, pages, timings
from benchmarks.checkpoint import Checkpoint, write_llama
from benchmarks.gpu_budget import Budget
from benchmarks.gpu_memory import HOST
from benchmarks.gpu_plan import Plan, too_early
from benchmarks.gpu_rounds import Rounds, Step
from benchmarks.gpu_trials import Group, Outcome
from benchmarks.process import environment
from benchmarks.results import Results
from benchmarks.runner import Bed
from mfload.bench import machine
from mfload.io import probes

GIB = 1 << 30
_WARMUP = 4_000_000
_RESERVE = 25.0
"""Seconds kept for the last page and the plot."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What a run is told.

    Attributes:
        device: What is loaded onto.
        gpu: What is known of it; empty without one.
        cores: How many may be used.
        minutes: What the run may take.
        gib: Size of the checkpoint.
        rounds: How many rounds are wanted.
        seed: What is drawn follows from it.
        trials: Which trials, a regex.
        out: Where results go, a path without its suffix.
    """

    device: str
    gpu: dict[str, Any]
    cores: int
    minutes: float
    gib: float
    rounds: int
    seed: int
    trials: str
    out: Path


class Run:
    """A run.

    Args:
        setting: What it is told.
        folder: Where the checkpoints are written.
    """

    def __init__(self, setting: Setting, folder: Path) -> None:
        self._setting, self._folder = setting, folder
        self._budget = Budget(setting.minutes * 60 - _RESERVE)
        self._results = timings.begun(folder, setting.seed, setting.rounds, {})
        self._results.run |= {
            "gpu": setting.gpu, "cores": setting.cores, "minutes": setting.minutes,
            "trials": [], "left_out": self._budget.left_out, "seconds": 0.0,
        }  # fmt: skip
        more = gpu_facts.environment(setting.gpu.get("count", 0))
        self._env = environment({} if setting.device == HOST else more, [str(ROOT)])
        self._more = more

    def all(self) -> Results:
        """Tries and measures everything that there is time for."""
        setting = self._setting
        with ThreadPoolExecutor(1) as pool:
            # The disk writes while trials wait for imports; those that measure come after.
            writing = pool.submit(write_llama, self._folder / "large", setting.seed, self._size())
            self._try(gpu_trials.questions(setting.device, setting.cores))
            for group in gpu_trials.checks(setting.device, setting.cores, gds=self._gds()):
                self._try(group)
            found = writing.result()
        self._try(gpu_trials.costs(setting.device))
        self._checkpoint(found)
        self._measure(found)
        self._write()
        return self._results

    def _size(self) -> int:
        """Bytes of the checkpoint: what was asked for, or what there is room for."""
        wanted = int(self._setting.gib * GIB)
        room = probes.memory_room()
        limits = {"disk": shutil.disk_usage(self._folder).free * 0.8}
        if room is not None:
            limits[room[1]] = room[0] * 0.4
        if self._setting.gpu:
            limits["device memory"] = self._setting.gpu["memory"] * 0.2
        where, most = min(limits.items(), key=lambda pair: pair[1])
        if wanted > most:
            self._budget.left_out.append(
                f"a checkpoint of {self._setting.gib:g} GiB: {where} has room for "
                f"{most / GIB:.2f} GiB"
            )
        return int(min(wanted, most))

    def _gds(self) -> bool:
        return any(
            t["name"] == "gds" and t["status"] == "pass" for t in self._results.run["trials"]
        )

    def _try(self, group: Group) -> None:
        wanted = re.compile(self._setting.trials)
        chosen = [name for name in group["names"] if wanted.search(name)]
        group["names"] = chosen
        gpu_trials.run(
            group, self._setting.device, self._env, self._budget, self._folder, self._noted
        )
        self._write()

    def _noted(self, outcome: Outcome) -> None:
        self._results.run["trials"].append(outcome)
        print(f"  {outcome['status']:7} {outcome['name']:34} {outcome['said'][:150]}", flush=True)

    def _checkpoint(self, found: Checkpoint) -> None:
        self._results.checkpoints["large"] = {
            "nbytes": found.nbytes,
            "tensors": found.tensors,
            "files": len(found.paths),
            "starts": list(found.starts),
            "drawn": found.drawn,
        }
        print(f"{found.nbytes / 1e9:.2f} GB, {found.tensors} tensors, {found.drawn}", flush=True)

    def _measure(self, found: Checkpoint) -> None:
        setting = self._setting
        warmup = write_llama(self._folder / "warmup", setting.seed, _WARMUP)
        rounds = Rounds(
            self._results,
            setting.device,
            found.subject(),
            Bed(warmup.paths, gpu_tasks.__name__, [str(ROOT)], explain=True),
            self._more,
            self._budget,
            random.Random(setting.seed),
            self._ahead(found.nbytes),
            self._write,
        )
        plan = Plan(
            self._results, setting.device, setting.cores, gds=self._gds(), rounds=setting.rounds
        )
        self._take(rounds, plan.warm_ceilings())
        why = None
        try:
            machine.fill_or_drop(found.subject().extents, cold=True)
        except machine.UnfitError as error:
            why = str(error)
        if why is not None:
            self._results.skipped.append(("cold", "all", why))
        else:
            self._take(rounds, plan.cold_ceilings())
        for step in plan.rest():
            if step.case.cold and why is not None:
                continue
            if too_early(step, self._results):
                self._budget.left_out.append(f"{step.case.name}: no load as it comes was measured")
                continue
            self._take(rounds, step)

    def _take(self, rounds: Rounds, step: Step) -> None:
        rounds.take(step)
        self._write()

    def _ahead(self, nbytes: int) -> int:
        """How many processes get ready side by side: JAX leaves the others a quarter of a GPU."""
        room = self._setting.gpu.get("memory", 4 * (nbytes * 2 + 8 * GIB)) / 4
        return max(1, min(6, self._setting.cores // 2)) if room > nbytes * 1.3 + 6 * GIB else 1

    def _write(self) -> None:
        run = self._results.run
        run["seconds"] = self._budget.used
        run["ended"] = time.strftime("%Y-%m-%d %H:%M")
        if self._results.checkpoints:
            put(self._results, self._setting.out)
        else:
            self._results.save(self._setting.out.with_suffix(".json"))


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
