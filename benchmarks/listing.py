"""Measure how long it takes to list a checkpoint: 20,000 tensors, 1,000 shards, 1 TB.

    python -m benchmarks.listing

Writes `listing.json`, `listing.png` and the figures of `listing.md`. Wants a quiet machine.
"""

from __future__ import annotations

import random
import secrets
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from benchmarks import ROOT, arguments, commands, listing_files, listing_tasks, pages
from benchmarks.checkpoint import write_many_small
from benchmarks.listing_files import Listed
from benchmarks.run import Run
from mfload.bench import machine, markdown, plot
from mfload.bench.plot import CEILING, OURS, PEER, Bar
from mfload.bench.results import MIB, Results
from mfload.bench.runner import Bed, Case, Sample, sample

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
    rng = random.Random(seed)
    found = listing_files.write_all(folder, scale)
    warmup = write_many_small(folder / "warmup", seed, 3)
    results = Results(
        machine=machine.describe(folder),
        run={
            "seed": seed,
            "rounds": rounds,
            "busy_share": {},
            "started": time.strftime("%Y-%m-%d %H:%M"),
        },
        checkpoints={
            case: {
                "words": listed.words,
                "tensors": listed.subject.tensors,
                "files": len(listed.subject.files),
                "nbytes": listed.nbytes,
                "header_bytes": sum(extent.nbytes for extent in listed.subject.extents),
            }
            for case, listed in found.items()
        },
    )
    bed = Bed(warmup.paths, "benchmarks.listing_tasks", [str(ROOT)])
    run = Run(results, rng, _LABELS.__getitem__)
    for name in cases:
        for cold in (False, True) if name == _COLD else (False,):
            case = Case(f"{name}-cold" if cold else name, cold=cold, primed=False)
            take = partial(_take, case=case, listed=found[name], bed=bed)
            run.take(case.name, list(_LABELS), take, rounds)
    results.run["ended"] = time.strftime("%Y-%m-%d %H:%M")
    return results


def _heading(results: Results, case: str) -> str:
    name, _, cold = case.partition("-")
    words = results.checkpoints[name]["words"]
    return f"{words}, page cache empty" if cold else words


def _table(results: Results, case: str, labels: dict[str, str], head: str) -> str:
    tensors = results.checkpoints[case.partition("-")[0]]["tensors"]
    rows: list[list[str]] = []
    for name in (name for name in labels if results.best(case, name) is not None):
        best = results.best(case, name) or 0.0
        label = f"**{labels[name]}**" if name.startswith("mfload") else labels[name]
        peak = results.worst([case], name, "peak_over")
        rows.append(
            [
                label,
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
    m, run = results.machine, results.run
    busy = ", ".join(f"{case} {share:.0%}" for case, share in run["busy_share"].items())
    parts = [
        f"{machine.sentence(m)}. {run['rounds']} rounds, seed {run['seed']}; busy with other "
        f"things before each case: {busy}. {machine.versions_sentence(m)}."
    ]
    for case in dict.fromkeys(s["case"] for s in results.samples):
        parts += [
            f"### {_heading(results, case)[0].upper()}{_heading(results, case)[1:]}",
            _table(results, case, _COMMANDS, "whole command"),
            _table(results, case, listing_tasks.LABELS, "in Python, imports done"),
        ]
    if results.skipped:
        lines = (f"- {case}: {name}: {reason}" for case, name, reason in results.skipped)
        parts += ["### Not measured", "\n".join(lines)]
    return "\n\n".join(parts)


def draw(results: Results, path: Path) -> None:
    """Draw a panel a case: seconds, commands first."""
    cases = list(dict.fromkeys(s["case"] for s in results.samples))
    rows = -(-len(cases) // 2)
    drawn, grid = plot.figure((15.5, 0.7 + 3.7 * rows), min(2, len(cases)), rows)
    panels = list(grid.flat)
    for axes, case in zip(panels, cases, strict=False):
        bars: list[Bar] = []
        for name, label in _LABELS.items():
            best, middle = results.best(case, name), results.median(case, name)
            if best is None or middle is None:
                continue
            ours = name.startswith("mfload")
            floor = name in ("python", "headers")
            colour = OURS if ours else CEILING if floor else PEER
            bars.append(Bar(label, best, middle, f"{best:.3f} s", colour, bold=ours))
        limit = max(bar.middle for bar in bars) * 1.05
        plot.panel(
            axes, bars, title=_heading(results, case), unit="seconds", limit=limit, line=None
        )
    for axes in panels[len(cases) :]:
        axes.set_visible(False)
    m = results.machine
    title = (
        f"Listing a checkpoint on {m['cpu']}, {m['cores']} cores, {m['file_system']}; bar: best of "
        f"{results.run['rounds']} rounds, tick: median; grey-black: the floor"
    )
    plot.finish(drawn, title, path)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        argv: Its arguments, those of the process by default.

    Returns:
        The exit status, 0.
    """
    parser = arguments.parser("listing", __doc__)
    parser.add_argument("--scale", type=float, default=1.0, help="part of the full size (1)")
    args = arguments.parsed(parser, CASES, argv)
    if args.redraw:
        results = Results.read(args.out / "listing.json")
    else:
        seed = secrets.randbelow(2**32) if args.seed is None else args.seed
        with tempfile.TemporaryDirectory(prefix="mfload-bench-", dir=args.workdir) as folder:
            results = measure(Path(folder), args.cases, args.rounds, seed, args.scale)
        results.save(args.out / "listing.json")
    pages.put(args.out / "listing.md", page(results))
    draw(results, args.out / "listing.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
