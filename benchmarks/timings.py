"""What the benchmarks of single operations share: from the first sample to the page."""

from __future__ import annotations

import argparse
import secrets
import tempfile
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

from benchmarks import arguments, described, pages
from benchmarks.plot import CEILING, OURS, PEER, Bar
from benchmarks.results import Results


def begun(folder: Path, seed: int, rounds: int, checkpoints: dict[str, object]) -> Results:
    """Results without samples.

    Args:
        folder: Where the checkpoints are.
        seed: What was drawn follows from it.
        rounds: How often each thing is going to be measured.
        checkpoints: Each in words and figures.
    """
    run = {
        "seed": seed,
        "rounds": rounds,
        "busy_share": {},
        "started": time.strftime("%Y-%m-%d %H:%M"),
    }
    return Results(described.describe(folder), run, checkpoints)


def cases(results: Results) -> list[str]:
    """What was measured, in the order of the run."""
    return list(dict.fromkeys(s["case"] for s in results.samples))


def measured(results: Results, case: str, labels: Mapping[str, str]) -> list[str]:
    """The names that have samples in a case, in the order of their labels."""
    return [name for name in labels if results.best(case, name) is not None]


def cell(name: str, labels: Mapping[str, str]) -> str:
    """A name in a table: ours stands out."""
    return f"**{labels[name]}**" if name.startswith("mfload") else labels[name]


def busy(results: Results) -> str:
    """How often each was measured, and how busy the machine was before each case."""
    run = results.run
    shares = ", ".join(f"{case} {share:.0%}" for case, share in run["busy_share"].items())
    return (
        f"Rounds: {run['rounds']}, taking turns, seed {run['seed']}; busy with other things before "
        f"each case: {shares}"
    )


def skipped(results: Results) -> list[str]:
    """Parts of a page that say what was not measured, and why."""
    if not results.skipped:
        return []
    lines = (f"- {case}: {name}: {reason}" for case, name, reason in results.skipped)
    return ["### Not measured", "\n".join(lines)]


def bars(
    results: Results,
    case: str,
    labels: Mapping[str, str],
    floor: Collection[str],
    unit: str | None = None,
) -> list[Bar]:
    """A bar of seconds for each name that was measured.

    Args:
        results: The run.
        case: One of its cases.
        labels: What each name is called, in the order of the bars.
        floor: The names that are no peers but what cannot be beaten.
        unit: The name whose multiples are written beside the seconds.
    """
    of = None if unit is None else results.best(case, unit)
    found: list[Bar] = []
    for name in measured(results, case, labels):
        best, middle = results.best(case, name) or 0.0, results.median(case, name) or 0.0
        ours = name.startswith("mfload")
        colour = OURS if ours else CEILING if name in floor else PEER
        text = f"{best:.3f} s" if of is None else f"{best:.3f} s  {best / of:.2f}×"
        found.append(Bar(labels[name], best, middle, text, colour, bold=ours))
    return found


def carry_out(
    args: argparse.Namespace,
    name: str,
    measure: Callable[[Path, int], Results],
    page: Callable[[Results], str],
    draw: Callable[[Results, Path], None],
) -> None:
    """Measure, or read what was measured, and write JSON, page and plot.

    Args:
        args: What `arguments.parsed` gave.
        name: Of the files.
        measure: Measures in a folder, by a seed.
        page: The figures as Markdown.
        draw: Draws them.
    """
    if not args.redraw:
        seed = secrets.randbelow(2**32) if args.seed is None else args.seed
        with tempfile.TemporaryDirectory(prefix="mfload-bench-", dir=args.workdir) as folder:
            results = measure(Path(folder), seed)
        results.run["ended"] = time.strftime("%Y-%m-%d %H:%M")
        results.save(args.out / f"{name}.json")
    # From what was written, so that page and plot can be made again from it.
    results = Results.read(args.out / f"{name}.json")
    pages.put(args.out / f"{name}.md", page(results))
    draw(results, args.out / f"{name}.png")


Measure = Callable[[Path, Sequence[str], int, int, float], Results]
"""Measures in a folder: cases, rounds, seed, and size."""


def command(
    name: str,
    doc: str | None,
    known: Sequence[str],
    size: tuple[str, str],
    measure: Measure,
    page: Callable[[Results], str],
    draw: Callable[[Results, Path], None],
    argv: Sequence[str] | None,
) -> int:
    """A benchmark's command: its options, and the work.

    Args:
        name: Of the module and of the files.
        doc: The module's docstring.
        known: The cases there are.
        size: The option that says how large, 1 if not given, and its help.
        measure: Measures.
        page: The figures as Markdown.
        draw: Draws them.
        argv: The arguments, those of the process by default.

    Returns:
        The exit status, 0.
    """
    parser = arguments.parser(name, doc)
    parser.add_argument(size[0], dest="size", type=float, default=1.0, help=f"{size[1]} (1)")
    args = arguments.parsed(parser, known, argv)
    carry_out(
        args,
        name,
        lambda folder, seed: measure(folder, args.cases, args.rounds, seed, args.size),
        page,
        draw,
    )
    return 0
