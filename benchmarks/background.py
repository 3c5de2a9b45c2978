"""Measure how long a training is held up by a save that goes on in the background.

    python -m benchmarks.background

Writes `background.json`, `background.png` and the figures of `background.md`. Wants a quiet
machine, and a real disk.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from benchmarks import ROOT, background_tasks, described, markdown, plot, timings
from benchmarks.background_tasks import LABELS, WRITTEN
from benchmarks.checkpoint import Checkpoint, write_llama, write_many_small
from benchmarks.results import Results
from benchmarks.run import Run
from benchmarks.runner import Bed, Case, Sample, sample

CASES = ("large",)
_NEEDS = {"dcp": "torch", "orbax": "orbax"}


def _take(name: str, case: Case, found: Checkpoint, bed: Bed) -> Sample:
    taken = sample(name, case, found.subject(), bed)
    written = Path(found.paths[0]).with_name(WRITTEN).read_text("utf-8")
    # What comes after the call waits for the end.
    del taken["peak_over"]
    return {**taken, "seconds": taken["load_s"], "written_s": float(written)}


def measure(folder: Path, cases: Sequence[str], rounds: int, seed: int, size: float) -> Results:
    """Write what is to be saved and measure every way.

    Args:
        folder: Where everything is written.
        cases: Which of `CASES`.
        rounds: How often each is measured.
        seed: What shapes, values and orders follow from.
        size: Of the checkpoint in GB.
    """
    found = write_llama(folder / "large", seed, int(size * 1e9))
    warmup = write_many_small(folder / "warmup", seed, 3)
    about: dict[str, object] = {
        "large": {"nbytes": found.nbytes, "tensors": found.tensors, "drawn": found.drawn}
    }
    results = timings.begun(folder, seed, rounds, about)
    bed = Bed(warmup.paths, background_tasks.__name__, [str(ROOT)])
    run = Run(results, random.Random(seed), LABELS.__getitem__)
    names = [
        name
        for name in LABELS
        if all(map(find_spec, (name.split("-")[1], _NEEDS.get(name.split("-")[0], "mfload"))))
    ]
    for each in cases:
        run.take(each, names, partial(_take, case=Case(each), found=found, bed=bed), rounds)
    return results


def page(results: Results) -> str:
    """The figures as Markdown, under a heading of the third level."""
    m = results.machine
    parts = [
        f"{described.sentence(m)}. {timings.busy(results)}. {described.versions_sentence(m)}.",
    ]
    for case in timings.cases(results):
        found = results.checkpoints[case]
        rows = [
            [
                timings.cell(name, LABELS),
                markdown.seconds(results.best(case, name)),
                markdown.seconds(results.median(case, name)),
                markdown.seconds(results.best(case, name, "written_s")),
                markdown.seconds(results.median(case, name, "written_s")),
            ]
            for name in timings.measured(results, case, LABELS)
        ]
        head = ("", "blocked: best s", "median s", "until written: best s", "median s")
        what = f"{found['nbytes'] / 1e9:.3g} GB of bf16, {found['tensors']} tensors"
        parts += [f"### {what}, {found['drawn']}", markdown.table(head, rows)]
    return "\n\n".join([*parts, *timings.skipped(results)])


def draw(results: Results, path: Path) -> None:
    """Draw a panel a case: seconds that the caller is blocked."""
    cases = timings.cases(results)
    drawn, panels = plot.figure([len(timings.measured(results, case, LABELS)) for case in cases])
    for axes, case in zip(panels, cases, strict=True):
        bars = timings.bars(results, case, LABELS, ())
        limit = max(bar.middle for bar in bars) * 1.05
        found = results.checkpoints[case]
        title = (
            f"{found['tensors']} tensors, {found['nbytes'] / 1e9:.3g} GB: until the call returns"
        )
        plot.panel(axes, bars, title=title, unit="seconds", limit=limit)
    m = results.machine
    title = (
        f"Saving in the background on {m['cpu']}, {m['cores']} cores, {m['file_system']}; "
        f"bar: best of {results.run['rounds']}, tick: median"
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
    return timings.command("background", __doc__, CASES, size, measure, page, draw, argv)


if __name__ == "__main__":
    sys.exit(main())
