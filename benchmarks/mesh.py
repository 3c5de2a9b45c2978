"""Measure loading onto a mesh of eight CPU devices, against Orbax and the ceiling of this machine.

    python -m benchmarks.mesh

Writes `mesh.json`, `mesh.png` and the figures of `mesh.md`. Wants a quiet machine. Ends with
status 1 if mfload held more memory beside the shards than it may.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks import ROOT, arguments, mesh_processes, mesh_tables, mesh_tasks, timings
from benchmarks.checkpoint import Checkpoint, write_divisible
from benchmarks.mesh_layouts import LAYOUTS, Sums, sums
from benchmarks.mesh_tables import COLD, PAIR
from benchmarks.mesh_tasks import CEILINGS, LABELS
from benchmarks.results import Results
from benchmarks.run import Run
from benchmarks.runner import Bed, Case, Sample, sample

CASES = (*LAYOUTS, COLD, PAIR)
_WARMUP = 4_000_000
_SLOW = {("columns", "orbax"), ("grid", "orbax"), ("replicated", "orbax")}
"""What takes so long that fewer rounds must do."""


def _take(name: str, case: Case, layout: str, found: Checkpoint, cut: Sums, bed: Bed) -> Sample:
    subject = replace(found.subject(), page_sum=cut.cut + cut.whole)
    task = name if name in CEILINGS else f"{layout}/{name}"
    return {**sample(task, case, subject, bed), "name": name}


def _take_pair(
    name: str, case: Case, found: Checkpoint, cuts: dict[str, Sums], folders: tuple[str, str]
) -> Sample:
    layout, _, exchange = name.partition("/")
    return mesh_processes.sample(layout, exchange, case, found.subject(), cuts[layout], folders)


class _Measuring:
    """A run: the checkpoints, and what is taken of them."""

    def __init__(self, results: Results, folder: Path, seed: int, found: Checkpoint) -> None:
        self._found, self._sums = found, sums(found.paths)
        warmup = write_divisible(folder / "warmup", seed, _WARMUP)
        self._folders = str(Path(found.paths[0]).parent), str(folder / "warmup")
        self._bed = Bed(warmup.paths, mesh_tasks.__name__, [str(ROOT)])
        self._run = Run(results, random.Random(seed), lambda name: LABELS.get(name, name))

    def one_process(self, name: str, rounds: int, slow: int) -> None:
        """Measure a case; what is slow takes part in its first rounds."""
        cold = name == COLD
        layout = "rows" if cold else name
        case = Case(name, cold=cold)
        take = partial(_take, case=case, layout=layout, found=self._found, bed=self._bed)
        take = partial(take, cut=self._sums[layout])
        ways = [CEILINGS[cold], "mfload", *([] if cold else ["plain"])]
        peer = ["orbax"] if find_spec("orbax") else []
        few = min(rounds, slow) if (layout, "orbax") in _SLOW else rounds
        self._run.take(name, [*ways, *peer], take, few)
        if rounds > few:
            self._run.take(name, ways, take, rounds - few)

    def two_processes(self, rounds: int) -> None:
        """Measure what two processes read, and how long they take."""
        names = [f"{layout}/{exchange}" for layout in LAYOUTS if layout != "replicated"
                 for exchange in mesh_processes.EXCHANGES]  # fmt: skip
        take = partial(_take_pair, case=Case(PAIR), found=self._found, cuts=self._sums)
        self._run.take(PAIR, names, partial(take, folders=self._folders), rounds)


def measure(
    folder: Path, cases: Sequence[str], rounds: int, slow: int, seed: int, gb: float
) -> Results:
    """Write a checkpoint and measure every case.

    Args:
        folder: Where the checkpoint is written.
        cases: Which of `CASES`.
        rounds: How often each is measured.
        slow: How often what takes long is, at most, and two processes.
        seed: What shapes, values and orders follow from.
        gb: Size of the checkpoint in GB.
    """
    found = write_divisible(folder / "large", seed, int(gb * 1e9))
    about: dict[str, Any] = {
        "nbytes": found.nbytes,
        "tensors": found.tensors,
        "files": len(found.paths),
        "starts": list(found.starts),
        "largest": found.largest,
        "drawn": found.drawn,
    }
    results = timings.begun(folder, seed, rounds, {"large": about})
    print(f"seed {seed}: {found.nbytes / 1e9:.3f} GB, {found.tensors} tensors, {found.drawn}")
    run = _Measuring(results, folder, seed, found)
    for name in cases:
        if name == PAIR:
            run.two_processes(min(rounds, slow))
        else:
            run.one_process(name, rounds, slow)
    return results


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        argv: Its arguments, those of the process by default.

    Returns:
        The exit status: 0, or 1 if the memory beside the shards was too much.
    """
    parser = arguments.parser("mesh", __doc__)
    parser.add_argument("--gb", type=float, default=1.0, help="size of the checkpoint in GB (1)")
    what = "rounds of what takes long: Orbax but for rows, and two processes (2)"
    parser.add_argument("--slow-rounds", type=int, default=2, help=what)
    args = arguments.parsed(parser, CASES, argv)
    timings.carry_out(
        args,
        "mesh",
        lambda folder, seed: measure(
            folder, args.cases, args.rounds, args.slow_rounds, seed, args.gb
        ),
        mesh_tables.page,
        mesh_tables.draw,
    )
    judged = mesh_tables.judge(Results.read(args.out / "mesh.json"))
    print("\n" + mesh_tables.targets(judged))
    return int(any(target.unit == " MiB" and target.reached is False for target in judged))


if __name__ == "__main__":
    sys.exit(main())
