"""Measure mfload against its peers and against the ceiling of this machine, in one run.

    python -m benchmarks.load

Writes `loading.json` (every sample), `loading_table.md` and `loading.png`. Wants a quiet machine:
it says how busy it found it. `benchmarks/README.md` explains what is measured and how.
"""

from __future__ import annotations

import argparse
import random
import secrets
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from fnmatch import fnmatch
from pathlib import Path

from benchmarks import arguments, described, plot, tables
from benchmarks.checkpoint import Checkpoint, write_llama, write_many_small
from benchmarks.compared import COLD, LOADERS, WARM
from benchmarks.results import Results, label
from benchmarks.run import Run
from benchmarks.runner import Bed, Case, sample
from benchmarks.targets import judge
from mfload.bench import loaders, machine

CASES = ("warm", "cold", "small", "memory")
SMALL_TENSORS = 20_000
_SCOUTED, _KEPT = 2, 3
"""Rounds in which all cold patterns run, and how many of the best then take turns with loaders."""


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = arguments.parser("load", __doc__)
    parser.add_argument("--gb", type=float, default=1.0, help="size of the checkpoint in GB (1)")
    parser.add_argument("--loaders", default="*", help="names or patterns, with commas (all)")
    parser.add_argument("--list", action="store_true", help="list the loaders and end")
    return arguments.parsed(parser, CASES, argv)


def _chosen(patterns: str, results: Results) -> list[str]:
    """The loaders asked for that are installed; what is missing is said and noted."""
    names: list[str] = []
    for name, loader in LOADERS.items():
        if not any(fnmatch(name, pattern) for pattern in patterns.split(",")):
            continue
        missing = loader.missing()
        if missing:
            why = f"not installed: {', '.join(missing)}"
            print(f"skipped {name}: {why}")
            results.skipped.append(("all", name, why))
        else:
            names.append(name)
    return names


class _Loading(Run):
    """A run that loads checkpoints."""

    def __init__(self, results: Results, rng: random.Random, warmup: Checkpoint) -> None:
        super().__init__(results, rng, label)
        self._bed = Bed(warmup.paths)

    def load(self, case: Case, names: Sequence[str], checkpoint: Checkpoint, count: int) -> None:
        """Measure all names in a case."""
        subject = checkpoint.subject()
        self.take(case.name, names, lambda name: sample(name, case, subject, self._bed), count)

    def best_patterns(self, checkpoint: Checkpoint) -> list[str]:
        """Try every cold pattern a few times and name the best."""
        names = [pattern.name for pattern in COLD]
        self.load(Case("scouting", cold=True), names, checkpoint, _SCOUTED)
        tried = self.results.names("scouting")
        tried.sort(key=lambda name: self.results.best("scouting", name) or 0.0)
        # One that keeps what it reads is always among them: that is what a loader has to do.
        fresh = next(name for name in tried if loaders.find(name).keeps)
        return list(dict.fromkeys([*tried[:_KEPT], fresh]))


def _measure(args: argparse.Namespace, folder: Path) -> Results:
    """Write the checkpoints and measure every case asked for."""
    seed = secrets.randbelow(2**32) if args.seed is None else args.seed
    rng = random.Random(seed)
    print(f"seed {seed}")
    large = write_llama(folder / "large", seed, int(args.gb * 1e9))
    small = write_many_small(folder / "small", seed, SMALL_TENSORS)
    warmup = write_many_small(folder / "warmup", seed, 3)
    results = Results(
        machine=described.describe(folder),
        run={
            "seed": seed,
            "rounds": args.rounds,
            "small_tensors": SMALL_TENSORS,
            "busy_share": {},
            "started": time.strftime("%Y-%m-%d %H:%M"),
        },
        checkpoints={
            name: {k: v for k, v in asdict(found).items() if k != "paths"}
            for name, found in (("large", large), ("small", small))
        },
    )
    print(f"{large.nbytes / 1e9:.3f} GB, {large.tensors} tensors, {large.drawn}")
    names = _chosen(args.loaders, results)
    run = _Loading(results, rng, warmup)
    if "warm" in args.cases:
        # Read back by the first sample: one history for all pages.
        machine.fill_or_drop(large.subject().extents, cold=True)
        run.load(Case("warm"), [WARM.name, *names], large, args.rounds)
    if "cold" in args.cases:
        best = run.best_patterns(large)
        run.load(Case("cold", cold=True), [*best, *names], large, args.rounds)
    if "small" in args.cases:
        run.load(Case("small"), names, small, args.rounds)
    if "memory" in args.cases:
        for name, cold in (("memory", False), ("memory-cold", True)):
            case = Case(name, cold=cold, primed=False, watched=True)
            run.load(case, names, large, min(3, args.rounds))
    results.run["ended"] = time.strftime("%Y-%m-%d %H:%M")
    return results


def _write(results: Results, out: Path, *, keep_json: bool) -> None:
    """Write the JSON, the tables and the plot."""
    judged = judge(results)
    if not keep_json:
        results.save(out / "loading.json", targets=[target.as_dict() for target in judged])
    (out / "loading_table.md").write_text(tables.page(results, judged))
    m, found = results.machine, results.checkpoints["large"]
    title = (
        f"{found['nbytes'] / 1e9:.2f} GB of bf16 in {len(found['starts'])} files on {m['cpu']}, "
        f"{m['cores']} cores, {m['file_system']}; bar: best of {results.run['rounds']} rounds, "
        "tick: median; pages touched"
    )
    if plot.draw(results, title, out / "loading.png"):
        plot.draw_front(results, out / "loading-front.png")
    print("\n" + tables.targets(judged))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        argv: Its arguments, those of the process by default.

    Returns:
        The exit status: 0, or 2 where the place to measure in is unfit.
    """
    args = _arguments(argv)
    if args.list:
        for name, loader in LOADERS.items():
            print(f"{name:28} {loader.label}")
        return 0
    if args.redraw:
        _write(Results.read(args.out / "loading.json"), args.out, keep_json=True)
        return 0
    with tempfile.TemporaryDirectory(prefix="mfload-bench-", dir=args.workdir) as folder:
        kind = machine.file_system(folder)
        on_memory = kind in machine.MEMORY_FILE_SYSTEMS
        if on_memory and {"cold", "memory"} & set(args.cases):
            print(f"{kind} has no disk to read cold from: give a --workdir on a real one")
            return 2
        _write(_measure(args, Path(folder)), args.out, keep_json=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
