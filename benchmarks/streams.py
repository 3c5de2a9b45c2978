"""Measure `mfload.stream` beside `mfload.load`, both keeping all tensors.

    python -m benchmarks.streams

Writes `streams.json` and the figures of `loading.md`. The two take turns in one process for each
framework; files are in the page cache, memory of the machine is there in small and in huge pages
before each sample, and every page of the result is touched before the clock stops.
"""

from __future__ import annotations

import json
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import arguments, described, markdown, pages, process, tables, timings
from benchmarks.checkpoint import write_llama
from benchmarks.results import Results
from benchmarks.targets import Target

FRAMEWORKS = ("numpy", "torch")
WAYS = ("load", "stream")
_LIMIT = 1.1
_CHILD = """
import gc, importlib, json, random, resource, sys, time
import mfload
from mfload.bench import machine
framework, folder = sys.argv[1:3]
rounds, seed, nbytes = map(int, sys.argv[3:])
int16 = importlib.import_module(framework).int16
ways = {"load": mfload.load, "stream": lambda *given: dict(mfload.stream(*given))}
def used():
    found = resource.getrusage(resource.RUSAGE_SELF)
    return found.ru_utime + found.ru_stime
chance, order = random.Random(seed), list(ways)
for number in range(-1, rounds):  # The first is for imports and the page cache.
    chance.shuffle(order)
    for way in order:
        machine.prime(2 * nbytes)
        cpu, start = used(), time.perf_counter()
        arrays = ways[way](folder, framework)
        total = 0
        for each in arrays.values():
            total += int(each.reshape(-1)[::2048].view(int16).sum())
        took, cpu = time.perf_counter() - start, used() - cpu
        if number >= 0:
            print(json.dumps({"name": way, "round": number, "seconds": took, "cpu_s": cpu,
                              "total": total}))
        del arrays, each
        gc.collect()
"""


def measure(folder: Path, frameworks: Sequence[str], rounds: int, seed: int, gb: float) -> Results:
    """Writes a checkpoint and measures each framework."""
    found = write_llama(folder / "model", seed, int(gb * 1e9))
    about = {"nbytes": found.nbytes, "tensors": found.tensors, "files": len(found.paths)}
    results = timings.begun(folder, seed, rounds, {"large": about})
    for framework in frameworks:
        busy = described.busy_share()
        results.run["busy_share"][framework] = round(busy, 3)
        print(f"{framework}: {len(WAYS)} × {rounds}, machine {busy:.0%} busy with other things")
        given = [framework, str(folder / "model"), str(rounds), str(seed), str(found.nbytes)]
        made = subprocess.run(
            [sys.executable, "-c", _CHILD, *given],
            env=process.environment({"OMP_NUM_THREADS": "1"}, []),
            capture_output=True,
            text=True,
            check=False,
        )
        if made.returncode:
            reason = process.last_words(made.returncode, made.stderr)
            results.skipped.append((framework, "all", reason))
            print(f"  FAILED {reason}")
            continue
        samples: list[dict[str, Any]] = [json.loads(line) for line in made.stdout.splitlines()]
        assert len({sample["total"] for sample in samples}) == 1, "they hold other values"
        results.samples += [{"case": framework, **sample} for sample in samples]
    return results


def _ratio(results: Results, framework: str, kind: str, key: str = "seconds") -> float | None:
    ours, theirs = (getattr(results, kind)(framework, way, key) for way in ("stream", "load"))
    return ours / theirs if ours and theirs else None


def page(results: Results) -> str:
    """The figures as Markdown."""
    found, rows = results.checkpoints["large"], list[list[str]]()
    for framework in timings.cases(results):
        for way in WAYS:
            best, middle = results.best(framework, way), results.median(framework, way)
            cells = [markdown.seconds(best), markdown.seconds(middle)]
            cells.append(markdown.seconds(results.best(framework, way, "cpu_s")))
            ratios = (("best", "seconds"), ("median", "seconds"), ("best", "cpu_s"))
            for kind, key in ratios:
                times = _ratio(results, framework, kind, key)
                cells.append("" if way == "load" else markdown.times(times))
            rows.append([f"`mfload.{way}`, {framework}", *cells])
    head = ("", "best s", "median s", "CPU s", "over load: best", "median", "CPU")
    judged = [
        Target(f"{each}: time of a stream over a load's", _LIMIT, _ratio(results, each, "best"))
        for each in timings.cases(results)
    ]
    m = results.machine
    text = (
        f"{described.sentence(m)}. {found['nbytes'] / 1e9:.2f} GB of bf16, {found['tensors']} "
        f"tensors in {found['files']} files, all in the page cache. {timings.busy(results)}."
    )
    parts = [text, markdown.table(head, rows), tables.targets(judged)]
    return "\n\n".join([*parts, *timings.skipped(results)])


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit status, 0."""
    parser = arguments.parser("streams", __doc__)
    parser.add_argument("--gb", type=float, default=1.0, help="size of the checkpoint in GB (1)")
    args = arguments.parsed(parser, FRAMEWORKS, argv)
    if not args.redraw:
        seed = secrets.randbelow(2**32) if args.seed is None else args.seed
        with tempfile.TemporaryDirectory(prefix="mfload-bench-", dir=args.workdir) as folder:
            results = measure(Path(folder), args.cases, args.rounds, seed, args.gb)
        results.run["ended"] = time.strftime("%Y-%m-%d %H:%M")
        results.save(args.out / "streams.json")
    results = Results.read(args.out / "streams.json")
    figures = page(results)
    print(figures)
    pages.put(args.out / "loading.md", figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
