"""Measure how long it takes to list a checkpoint: 20,000 tensors, 1,000 shards, 1 TB.

    python -m benchmarks.listing

Writes `listing.json`, `listing.png` and the figures of `listing.md`. Wants a quiet machine.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from benchmarks import (
    ROOT,
    commands,
    described,
    listing_files,
    listing_tasks,
    markdown,
    plot,
    timings,
)
from benchmarks.checkpoint import write_many_small
from benchmarks.listing_files import Listed
from benchmarks.results import MIB, Results
from benchmarks.run import Run
from benchmarks.runner import Bed, Case, Sample, sample

CASES = ("file", "shards", "huge")
_COLD = "shards"
"""The case that is measured with an empty page cache too."""
_PEER = (
    "import sys\n"
    "from safetensors import safe_open\n"
    "for path in sys.argv[1:]:\n"
    "    with safe_open(path, framework='np') as opened:\n"
    "        for name in opened.keys():\n"
    "            tensor = opened.get_slice(name)\n"
    "            print(tensor.get_dtype(), tensor.get_shape(), name)\n"
)
_COMMANDS = {
    "python": "python -c pass: what any Python command costs",
    "mfload-ls": "mfload ls",
    "mfload-ls-json": "mfload ls --json",
    "safetensors-script": "a script that prints safe_open's names, dtypes, shapes",
}
_LABELS = {**_COMMANDS, **listing_tasks.LABELS}


def _command(name: str, listed: Listed) -> list[str]:
    path = str(listed.subject.path)
    return [
        sys.executable,
        *{
            "python": ["-c", "pass"],
            "mfload-ls": ["-P", "-m", "mfload", "ls", path],
            "mfload-ls-json": ["-P", "-m", "mfload", "ls", "--json", path],
            "safetensors-script": ["-c", _PEER, *listed.subject.files],
        }[name],
    ]


def _take(name: str, case: Case, listed: Listed, bed: Bed) -> Sample:
    if name in _COMMANDS:
        return commands.sample(name, _command(name, listed), case, listed.subject)
    return sample(name, case, listed.subject, bed)


def measure(folder: Path, cases: Sequence[str], rounds: int, seed: int, scale: float) -> Results:
    """Write the checkpoints and measure every case.

    Args:
        folder: Where checkpoints are written.
        cases: Which of `CASES`.
        rounds: How often each is measured.
        seed: What orders follow from.
        scale: A part of the full number of tensors and shards.
    """
    found = listing_files.write_all(folder, scale)
    warmup = write_many_small(folder / "warmup", seed, 3)
    about: dict[str, object] = {
        case: {
            "words": listed.words,
            "short": listed.short,
            "tensors": listed.subject.tensors,
            "files": len(listed.subject.files),
            "nbytes": listed.nbytes,
            "header_bytes": sum(extent.stop - extent.start for extent in listed.subject.extents),
        }
        for case, listed in found.items()
    }
    results = timings.begun(folder, seed, rounds, about)
    bed = Bed(warmup.paths, "benchmarks.listing_tasks", [str(ROOT)])
    run = Run(results, random.Random(seed), _LABELS.__getitem__)
    for name in cases:
        for cold in (False, True) if name == _COLD else (False,):
            case = Case(f"{name}-cold" if cold else name, cold=cold, primed=False)
            take = partial(_take, case=case, listed=found[name], bed=bed)
            run.take(case.name, list(_LABELS), take, rounds)
    return results


def _heading(results: Results, case: str, key: str) -> str:
    name, _, cold = case.partition("-")
    words = results.checkpoints[name][key]
    words = f"{words}, page cache empty" if cold else words
    return f"{words[0].upper()}{words[1:]}"


def _table(results: Results, case: str, labels: dict[str, str], head: str) -> str:
    tensors = results.checkpoints[case.partition("-")[0]]["tensors"]
    rows: list[list[str]] = []
    for name in timings.measured(results, case, labels):
        best = results.best(case, name) or 0.0
        peak = results.worst([case], name, "peak_over")
        rows.append(
            [
                timings.cell(name, labels),
                markdown.seconds(best),
                markdown.seconds(results.median(case, name)),
                f"{best / tensors * 1e6:.1f}",
                markdown.seconds(results.best(case, name, "cpu_s")),
                *([] if peak is None else [f"{peak / MIB:.0f}"]),
            ]
        )
    heads = (head, "best s", "median s", "µs a tensor", "CPU s", "MiB")
    return markdown.table(heads[: max(map(len, rows), default=5)], rows)


def page(results: Results) -> str:
    """The figures as Markdown, under headings of the third level."""
    m = results.machine
    parts = [
        f"{described.sentence(m)}. {timings.busy(results)}. {described.versions_sentence(m)}.",
    ]
    for case in timings.cases(results):
        parts += [
            f"### {_heading(results, case, 'words')}",
            _table(results, case, _COMMANDS, "whole command"),
            _table(results, case, listing_tasks.LABELS, "in Python, imports done"),
        ]
    return "\n\n".join([*parts, *timings.skipped(results)])


def draw(results: Results, path: Path) -> None:
    """Draw a panel a case: seconds, commands first."""
    cases = timings.cases(results)
    drawn, panels = plot.figure([len(timings.measured(results, case, _LABELS)) for case in cases])
    for axes, case in zip(panels, cases, strict=True):
        bars = timings.bars(results, case, _LABELS, ("python", "headers"))
        title = _heading(results, case, "short")
        limit = max(bar.middle for bar in bars) * 1.05
        plot.panel(axes, bars, title=title, unit="seconds", limit=limit)
    m = results.machine
    title = (
        f"Listing a checkpoint on {m['cpu']}, {m['cores']} cores, {m['file_system']}; bar: best of "
        f"{results.run['rounds']}, tick: median; dark: the floor"
    )
    plot.finish(drawn, title, path)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        argv: Its arguments, those of the process by default.

    Returns:
        The exit status, 0.
    """
    size = ("--scale", "part of the full size")
    return timings.command("listing", __doc__, CASES, size, measure, page, draw, argv)


if __name__ == "__main__":
    sys.exit(main())
