"""Measure what verifying costs: while loading, as a command, and beside what the hash costs alone.

    python -m benchmarks.verifying

Writes `verifying.json`, `verifying.png` and the figures of `verifying.md`. Wants a quiet machine.
"""

from __future__ import annotations

import random
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import mfload
from benchmarks import ROOT, commands, described, markdown, plot, timings, verifying_tasks
from benchmarks.checkpoint import Checkpoint, write_llama, write_many_small
from benchmarks.results import Results
from benchmarks.run import Run
from benchmarks.runner import Bed, Case, Sample, sample

CASES = ("warm", "cold")
_COMMANDS = {
    "mfload-verify-check": "mfload verify --mode check",
    "sha256sum": "sha256sum",
}
_LABELS = {**verifying_tasks.LABELS, **_COMMANDS}
_MEMORY = ("xxh3-memory-1", "xxh3-memory-all", "sha256-memory-1")
"""What reads no file, and so is measured in one case alone."""
_FLOOR = {"xxh3-pass", "xxh3-pass-direct", "sha256-pass", *_MEMORY}


def _command(name: str, found: Checkpoint) -> list[str]:
    if name == "sha256sum":
        return ["sha256sum", *found.paths]
    files = list(found.paths)
    manifest = verifying_tasks.manifest_of(files)
    ours = [sys.executable, "-P", "-m", "mfload", "verify", str(Path(files[0]).parent)]
    return [*ours, "--mode", "check", "--manifest", manifest]


def _take(name: str, case: Case, found: Checkpoint, bed: Bed) -> Sample:
    # What hashes and forgets takes no fresh memory.
    case = case if name in verifying_tasks.LOADS else replace(case, primed=False)
    if name in _COMMANDS:
        return commands.sample(name, _command(name, found), case, found.subject())
    return sample(name, case, found.subject(), bed)


def _note_sums(found: Checkpoint) -> None:
    """Write the manifest of a checkpoint beside it."""
    files = list(found.paths)
    mfload.verify(files, mode="write", manifest=verifying_tasks.manifest_of(files))


def measure(folder: Path, cases: Sequence[str], rounds: int, seed: int, gb: float) -> Results:
    """Write a checkpoint and its manifest and measure every case.

    Args:
        folder: Where the checkpoint is written.
        cases: Which of `CASES`.
        rounds: How often each is measured.
        seed: What shapes, values and orders follow from.
        gb: Size of the checkpoint in GB.
    """
    large = write_llama(folder / "large", seed, int(gb * 1e9))
    warmup = write_many_small(folder / "warmup", seed, 3)
    _note_sums(large)
    _note_sums(warmup)
    about = {
        "nbytes": large.nbytes,
        "tensors": large.tensors,
        "files": len(large.paths),
        "drawn": large.drawn,
    }
    results = timings.begun(folder, seed, rounds, {"large": about})
    bed = Bed(warmup.paths, "benchmarks.verifying_tasks", [str(ROOT)])
    run = Run(results, random.Random(seed), _LABELS.__getitem__)
    names = [name for name in _LABELS if name != "sha256sum" or shutil.which(name)]
    for number, each in enumerate(cases):
        case = Case(each, cold=each == "cold")
        wanted = [name for name in names if number == 0 or name not in _MEMORY]
        take = partial(_take, case=case, found=large, bed=bed)
        run.take(case.name, wanted, take, rounds)
    return results


def _table(results: Results, case: str) -> str:
    nbytes = results.checkpoints["large"]["nbytes"]
    plain = results.best(case, "mfload-load")
    rows: list[list[str]] = []
    for name in timings.measured(results, case, _LABELS):
        best = results.best(case, name) or 0.0
        rows.append(
            [
                timings.cell(name, _LABELS),
                markdown.seconds(best),
                markdown.seconds(results.median(case, name)),
                markdown.times(None if plain is None else best / plain),
                f"{nbytes / 1e9 / best:.2f}" if best else "–",
                markdown.seconds(results.best(case, name, "cpu_s")),
            ]
        )
    return markdown.table(("", "best s", "median s", "÷ plain load", "GB/s", "CPU s"), rows)


def page(results: Results) -> str:
    """The figures as Markdown, under headings of the third level."""
    m, found = results.machine, results.checkpoints["large"]
    host = " (its host may still hold the file)" if m["virtual"] else ""
    parts = [
        f"{described.sentence(m)}. {found['nbytes'] / 1e9:.2f} GB of bf16, {found['tensors']} "
        f"tensors in {found['files']} files, shapes {found['drawn']}. {timings.busy(results)}. "
        f"Cold: none of it in this machine's page cache{host}. {described.versions_sentence(m)}."
    ]
    for case in timings.cases(results):
        parts += [f"### {case.capitalize()}", _table(results, case)]
    return "\n\n".join([*parts, *timings.skipped(results)])


def draw(results: Results, path: Path) -> None:
    """Draw a panel a case: seconds."""
    cases = timings.cases(results)
    drawn, panels = plot.figure([len(timings.measured(results, case, _LABELS)) for case in cases])
    for axes, case in zip(panels, cases, strict=True):
        bars = timings.bars(results, case, _LABELS, _FLOOR, "mfload-load")
        # The one that takes longest would leave the others no room.
        second = sorted(bar.middle for bar in bars)[-2:][0]
        limit = min(max(bar.middle for bar in bars), 2 * second) * 1.05
        plot.panel(axes, bars, title=case, unit="seconds", limit=limit)
    m, found = results.machine, results.checkpoints["large"]
    title = (
        f"{found['nbytes'] / 1e9:.2f} GB of bf16 on {m['cpu']}, {m['cores']} cores, "
        f"{m['file_system']}; bar: best of {results.run['rounds']}, tick: median; "
        "×: of the plain load; dark: hashing alone"
    )
    plot.finish(drawn, title, path)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        argv: Its arguments, those of the process by default.

    Returns:
        The exit status, 0.
    """
    size = ("--gb", "size of the checkpoint in GB")
    return timings.command("verifying", __doc__, CASES, size, measure, page, draw, argv)


if __name__ == "__main__":
    sys.exit(main())
