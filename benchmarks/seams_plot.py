"""Keeps and draws what `benchmarks.seams` found: `python -m benchmarks.seams_plot DIR` draws it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.plot import OURS, PEER, TEXT, WIDTH

NAMES = {"vllm": "vLLM", "sglang": "SGLang", "transformers": "transformers", "dcp": "torch's DCP"}
CELLS = ("1 warm", "1 cold", "2 warm", "2 cold")
COLOURS = {"theirs": PEER, "mfload": OURS}

Found = dict[str, dict[str, list[float]]]
"""Seconds of each round, by cell ("2 cold": processes and page cache) and loader."""


def keep(out: Path, seam: str, machine: str, found: Found) -> None:
    """Writes what was found of a seam beside what is there of others, and draws all."""
    path = out / "seams.json"
    every: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    every[seam] = {"machine": machine, "seconds": found}
    path.write_text(json.dumps(every, indent=1, sort_keys=True) + "\n")
    try:
        draw(every, out / "seams.png")
    except ImportError as error:  # As in the environments of most seams.
        print(f"nothing is drawn: {error}; python -m benchmarks.seams_plot {out}", flush=True)


def draw(every: dict[str, Any], path: Path) -> None:
    """Draws the best of all rounds as bars, and the medians as ticks."""
    from matplotlib import pyplot

    figure, grid = pyplot.subplots(
        2, 2, figsize=(WIDTH, 6.4), sharey=True, sharex=True, layout="constrained"
    )
    axes = [*grid.flat]
    seams = [seam for seam in NAMES if seam in every]
    for axis, cell in zip(axes, CELLS, strict=True):
        for row, seam in enumerate(seams):
            for shift, (loader, colour) in zip((-0.2, 0.2), COLOURS.items(), strict=True):
                seconds = every[seam]["seconds"].get(cell, {}).get(loader)
                if not seconds:
                    continue
                at, best = row + shift, min(seconds)
                axis.barh(at, best, 0.36, color=colour, label=loader if not row else None)
                middle = median(seconds)
                axis.plot([middle] * 2, [at - 0.18, at + 0.18], color="black", lw=1)
                axis.text(middle, at, f" {best:.2f}", va="center", fontsize=TEXT)
        ranks, cache = cell.split()
        axis.set_title(f"{ranks} process{'es' if ranks != '1' else ''}, {cache}", fontsize=TEXT)
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(labelsize=TEXT)
    for axis in grid[-1]:
        axis.set_xlabel("seconds", fontsize=TEXT)
    axes[0].set_yticks(range(len(seams)), [NAMES[seam] for seam in seams])
    axes[0].invert_yaxis()
    axes[0].legend(fontsize=TEXT, frameon=False, loc="lower right")
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    draw(json.loads((folder / "seams.json").read_text()), folder / "seams.png")
