"""Measure saving against the ways to write the same bytes, and against safetensors' own writer.

    python -m benchmarks.saving

Writes `saving.json`, `saving.png` and the figures of `saving.md`. Wants a quiet machine, and a real
disk: what is compared is when the bytes are on it.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from benchmarks import ROOT, arguments, described, markdown, plot, saving_tasks, timings
from benchmarks.checkpoint import Checkpoint, write_llama, write_many_small
from benchmarks.results import Results
from benchmarks.run import Run
from benchmarks.runner import Bed, Case, Sample, sample
from benchmarks.saving_tasks import FLOORS, LABELS, ON_DISK

CASES = ("large", "small")
SMALL_TENSORS = 20_000


def _take(name: str, case: Case, found: Checkpoint, bed: Bed) -> Sample:
    taken = sample(name, case, found.subject(), bed)
    # What comes after the call reads the file back, to see that it is right.
    del taken["peak_over"]
    return {**taken, "seconds": taken["load_s"], "cpu_s": taken["cpu_load_s"]}


def measure(folder: Path, cases: Sequence[str], rounds: int, seed: int, gb: float) -> Results:
    """Write what is to be saved and measure every case.

    Args:
        folder: Where everything is written.
        cases: Which of `CASES`.
        rounds: How often each is measured.
        seed: What shapes, values and orders follow from.
        gb: Size of the large checkpoint in GB.
    """
    count = max(3, int(SMALL_TENSORS * min(1, gb)))
    found = {
        "large": write_llama(folder / "large", seed, int(gb * 1e9)),
        "small": write_many_small(folder / "small", seed, count),
    }
    warmup = write_many_small(folder / "warmup", seed, 3)
    about: dict[str, object] = {
        name: {"nbytes": each.nbytes, "tensors": each.tensors, "drawn": each.drawn}
        for name, each in found.items()
    }
    results = timings.begun(folder, seed, rounds, about)
    bed = Bed(warmup.paths, saving_tasks.__name__, [str(ROOT)])
    run = Run(results, random.Random(seed), LABELS.__getitem__)
    names = [name for name in LABELS if "torch" not in name or find_spec("torch")]
    for each in cases:
        run.take(each, names, partial(_take, case=Case(each), found=found[each], bed=bed), rounds)
    return results


def _over(results: Results, case: str, name: str, floor: str) -> float | None:
    ours, theirs = results.best(case, name), results.best(case, floor)
    return ours / theirs if ours and theirs else None


def _table(results: Results, case: str) -> str:
    nbytes = results.checkpoints[case]["nbytes"]
    rows: list[list[str]] = []
    for name in timings.measured(results, case, LABELS):
        best = results.best(case, name) or 0.0
        rows.append(
            [
                timings.cell(name, LABELS),
                "yes" if name in ON_DISK else "no",
                markdown.seconds(best),
                markdown.seconds(results.median(case, name)),
                markdown.times(_over(results, case, name, "direct-fsync")),
                markdown.times(_over(results, case, name, "pwrite-fsync")),
                markdown.times(_over(results, case, name, "pwrite")),
                f"{nbytes / 1e9 / best:.2f}" if best else "–",
                markdown.seconds(results.best(case, name, "cpu_s")),
            ]
        )
    head = ("", "on the disk", "best s", "median s", "÷ O_DIRECT", "÷ pwrite, fsync", "÷ pwrite",
            "GB/s", "CPU s")  # fmt: skip
    return markdown.table(head, rows)


def page(results: Results) -> str:
    """The figures as Markdown, under headings of the third level."""
    m = results.machine
    parts = [
        f"{described.sentence(m)}. {timings.busy(results)}. {described.versions_sentence(m)}.",
    ]
    for case in timings.cases(results):
        found = results.checkpoints[case]
        what = f"{found['nbytes'] / 1e9:.3g} GB of bf16, {found['tensors']} tensors"
        parts += [f"### {what}, {found['drawn']}", _table(results, case)]
    return "\n\n".join([*parts, *timings.skipped(results)])


def draw(results: Results, path: Path) -> None:
    """Draw a panel a case: seconds."""
    cases = timings.cases(results)
    drawn, panels = plot.figure([len(timings.measured(results, case, LABELS)) for case in cases])
    for axes, case in zip(panels, cases, strict=True):
        bars = timings.bars(results, case, LABELS, FLOORS, "direct-fsync")
        limit = max(bar.middle for bar in bars) * 1.05
        found = results.checkpoints[case]
        title = f"{found['tensors']} tensors, {found['nbytes'] / 1e9:.3g} GB"
        plot.panel(axes, bars, title=title, unit="seconds", limit=limit)
    m = results.machine
    title = (
        f"Saving on {m['cpu']}, {m['cores']} cores, {m['file_system']}; bar: best of "
        f"{results.run['rounds']}, tick: median; ×: of O_DIRECT; dark: bytes without tensors"
    )
    plot.finish(drawn, title, path)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        argv: Its arguments, those of the process by default.

    Returns:
        The exit status, 0.
    """
    parser = arguments.parser("saving", __doc__)
    parser.add_argument("--gb", type=float, default=1.0, help="size of the checkpoint in GB (1)")
    args = arguments.parsed(parser, CASES, argv)
    timings.carry_out(
        args,
        "saving",
        lambda folder, seed: measure(folder, args.cases, args.rounds, seed, args.gb),
        page,
        draw,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
