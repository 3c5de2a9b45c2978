"""Measure loading shards into two processes of PyTorch, against fastsafetensors and torch's reader.

    python -m benchmarks.shards

Writes `shards.json`, `shards.png` and the figures of `shards.md`, and the picture of what the plan
chooses. Wants a quiet machine.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from benchmarks import mesh_processes, shards_process, shards_tables, timings
from benchmarks.checkpoint import Checkpoint, write_divisible
from benchmarks.mesh_processes import PROCESSES
from benchmarks.process import ChildError
from benchmarks.results import Results
from benchmarks.run import Run
from benchmarks.runner import Case, Sample
from benchmarks.shards_process import Job
from benchmarks.shards_tables import BARE, CASES, LABELS

_WARMUP = 4_000_000


def _take(
    name: str, case: Case, found: Checkpoint, warmup: str, totals: dict[tuple[str, int], int]
) -> Sample:
    """Measures once; the time is that of the slower process."""
    layout, port = case.name.removesuffix("-cold"), mesh_processes.free_port()
    jobs: list[Job] = [
        {
            "rank": rank,
            "processes": PROCESSES,
            "port": port,
            "layout": layout,
            "loader": name,
            "folder": str(Path(found.paths[0]).parent),
            "warmup": warmup,
        }
        for rank in range(PROCESSES)
    ]
    answers, cached = shards_process.answers(jobs, case, found.subject())
    for rank, each in enumerate(answers):
        # All make the same of the checkpoint.
        if name not in BARE and each["total"] != totals.setdefault((layout, rank), each["total"]):
            raise ChildError(f"process {rank} holds other values than it did with other loaders")
    return {
        "case": case.name,
        "name": name,
        "cached": cached,
        "seconds": max(each["seconds"] for each in answers),
        "cpu_s": sum(each["cpu_s"] for each in answers),
        "peak_over": max(each["peak_over"] for each in answers),
        "read": [each["read"] for each in answers],
        "exchanged": [each["exchanged"] for each in answers],
        "notes": answers[0]["notes"],
    }


def measure(folder: Path, cases: Sequence[str], rounds: int, seed: int, gb: float) -> Results:
    """Writes a checkpoint and measures every case."""
    found = write_divisible(folder / "large", seed, int(gb * 1e9))
    warmup = write_divisible(folder / "warmup", seed, _WARMUP)
    about = {
        "nbytes": found.nbytes,
        "tensors": found.tensors,
        "files": len(found.paths),
        "starts": list(found.starts),
        "drawn": found.drawn,
    }
    results = timings.begun(folder, seed, rounds, {"large": about})
    run = Run(results, random.Random(seed), lambda name: LABELS[name])
    totals: dict[tuple[str, int], int] = {}
    for case in cases:
        names = [n for n in CASES[case] if n != "fastsafetensors" or find_spec(n)]
        conditions = Case(case, cold=case.endswith("-cold"))
        given = {"found": found, "warmup": str(Path(warmup.paths[0]).parent), "totals": totals}
        run.take(case, names, partial(_take, case=conditions, **given), rounds)
    return results


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit status, 0."""
    size = "--gb", "size of the checkpoint in GB"
    how = measure, shards_tables.page, shards_tables.draw
    return timings.command("shards", __doc__, list(CASES), size, *how, argv)


if __name__ == "__main__":
    sys.exit(main())
