"""Time the paths beside the load of whole files, each against the natural alternative.

    python -m benchmarks.cliffs [--topics slices trees …] [--rounds 7] [--only TEXT] [--scale 1]
        [--out DIR]

A topic is a module beside this one, with `rows(folder, scale)` and, where it needs variables of
the environment, `ENV`. Each runs in a process of its own. A row is called once by each side to warm
up, then they take turns. Prints the best and the median of each side in milliseconds, the ratio of
the bests, and what is to be reached. `--scale 0.1` shrinks the checkpoints, to try the code;
`--out` gets `cliffs.json`, `cliffs.png` and the figures of `cliffs.md`.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import ROOT, described, pages, plot
from benchmarks.cliffs.row import Row, drop

HERE = Path(__file__).parent
TOPICS = sorted(path.stem for path in HERE.glob("[a-z]*.py") if path.stem != "row")

Result = dict[str, Any]


def measure(row: Row, rounds: int) -> Result:
    """Seconds of both sides, in turns."""
    seconds: dict[str, list[float]] = {"ours": [], "theirs": []}
    sides = {"ours": row.ours, "theirs": row.theirs}
    for number in range(rounds + 1):
        for side in sides if number % 2 else reversed(sides):
            if row.before is not None:
                row.before()
            drop(row.cold)
            gc.collect()
            start = time.perf_counter()
            made = sides[side]()
            took = time.perf_counter() - start
            del made
            if number:
                seconds[side].append(took)
    limits = {"limit": row.limit, "allowance": row.allowance, "cold": bool(row.cold)}
    return {"name": row.name, "peer": row.peer, **limits, **seconds}


def child(topic: str, folder: Path, rounds: int, scale: float, only: str) -> None:
    """Measures the rows of a topic, and prints each as a line of JSON."""
    for row in importlib.import_module(f"benchmarks.cliffs.{topic}").rows(folder, scale):
        if only in row.name:
            print(json.dumps(measure(row, rounds)), flush=True)


def run(topic: str, folder: Path, asked: argparse.Namespace) -> list[Result]:
    """Measures a topic in a process of its own."""
    module = importlib.import_module(f"benchmarks.cliffs.{topic}")
    extra = {"PYTHONPATH": str(ROOT)} | getattr(module, "ENV", {})
    command = [sys.executable, "-m", "benchmarks.cliffs", "--child", topic, str(folder)]
    command += ["--rounds", str(asked.rounds), "--scale", str(asked.scale), "--only", asked.only]
    found = subprocess.run(command, env=os.environ | extra, stdout=subprocess.PIPE, text=True)
    if found.returncode:
        raise SystemExit(f"{topic} ended with status {found.returncode}")
    return [{"topic": topic, **json.loads(line)} for line in found.stdout.splitlines()]


def ratio(result: Result, of: Any = min) -> float:
    """The best (or what else `of` makes of samples) of ours over that of theirs."""
    return of(result["ours"]) / of(result["theirs"])


def reached(result: Result) -> bool:
    """Whether the best of ours is within its limit."""
    most = min(result["theirs"]) * result["limit"] + result["allowance"]
    return min(result["ours"]) <= most


def table(results: Sequence[Result]) -> str:
    """The figures as a table in Markdown."""
    lines = [
        "| | mfload ms: best | median | alternative | ms: best | median | ratio | to reach | |",
        "|---|--:|--:|---|--:|--:|--:|--:|---|",
    ]
    for each in results:
        ours, theirs = each["ours"], each["theirs"]
        goal = f"{each['limit']:g}"
        if each["allowance"]:
            goal += f" + {each['allowance'] * 1e3:g} ms"
        figures = [
            f"{of(side) * 1e3:.2f}" for side in (ours, theirs) for of in (min, statistics.median)
        ]
        lines.append(
            f"| {each['name']} | {figures[0]} | {figures[1]} | {each['peer']} | {figures[2]} "
            f"| {figures[3]} | {ratio(each):.2f} | {goal} | {'' if reached(each) else 'missed'} |"
        )
    return "\n".join(lines)


def draw(results: Sequence[Result], path: Path) -> None:
    """Draws the ratios, each with a mark where its limit is."""
    drawn, (axes,) = plot.figure([len(results)])
    bars: list[plot.Bar] = []
    for each in results:
        text = f"{ratio(each):.2f}×  {min(each['ours']) * 1e3:.3g} ms"
        colour = plot.OURS if reached(each) else "#c2554d"
        middle = ratio(each, statistics.median)
        goal = each["limit"] + each["allowance"] / min(each["theirs"])
        bars.append(plot.Bar(each["name"], ratio(each), middle, text, colour, goal=goal))
    most = min(12.0, max(2.0, *(bar.best for bar in bars)) * 1.05)
    plot.panel(axes, bars, title="", unit="time ÷ alternative", limit=most, line=1)
    axes.set_ylim(len(results) - 0.4, -0.6)
    title = "Time of mfload divided by the alternative's: bars are the best, ticks the median"
    plot.finish(drawn, f"{title}; a grey line is what is to be reached", path)


def main() -> None:
    """Runs the topics one after the other."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--topics", nargs="+", choices=TOPICS, default=TOPICS)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", default="")
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.child:
        topic, folder = asked.child
        child(topic, Path(folder), asked.rounds, asked.scale, asked.only)
        return
    results: list[Result] = []
    for topic in asked.topics:
        with tempfile.TemporaryDirectory() as folder:
            results += run(topic, Path(folder), asked)
    print(table(results))
    if asked.out:
        asked.out.mkdir(parents=True, exist_ok=True)
        (asked.out / "cliffs.json").write_text(json.dumps(results, indent=1))
        draw(results, asked.out / "cliffs.png")
        found = described.describe(tempfile.gettempdir())
        where = f"{described.sentence(found)}. Rounds: {asked.rounds}, taking turns."
        pages.put(asked.out / "cliffs.md", f"{where}\n\n{table(results)}")


if __name__ == "__main__":
    main()
