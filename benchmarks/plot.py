"""Pictures of a run: bars from zero, the best of the samples, with a tick at the median."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.results import Results, is_ceiling, label
from mfload.bench import loaders

_LIMIT = 12.0
"""Where bars are cut off: beyond it the exact length says little, and the figure stands beside."""
WIDTH = 8.0
"""Of every picture, in inches: a page is some 700 pixels wide, on which text of TEXT is read."""
TEXT = 10.0
"""The size of the smallest text, in points."""
_DPI = 150
_CHARACTERS = 100
"""How many of the title's fit beside each other."""
_LABEL = 36
"""A label of more characters takes two lines."""
_CHARACTER = 0.019
"""What a character right of a bar takes, as a share of the panel."""
_FRONT = {
    "mfload-torch": "mfload → PyTorch",
    "fastsafetensors-buffered": "fastsafetensors → PyTorch",
    "safetensors-torch-clone": "safetensors → PyTorch, cloned",
    "mfload-jax": "mfload → JAX",
    "safetensors-flax": "safetensors → JAX",
}
"""What the picture of the front page shows, and what it is called there."""
OURS, PEER, CEILING, _INK = "#2a6fb0", "#b4b8bf", "#4a4f57", "#1d1f23"


class Bar(NamedTuple):
    """One bar.

    Attributes:
        label: What stands left of it.
        best: Its length.
        middle: Where its tick is.
        text: What stands right of it.
        colour: Of the bar.
        bold: Whether the label stands out.
        goal: Where the mark of what is to be reached stands, if there is one.
    """

    label: str
    best: float
    middle: float
    text: str
    colour: str
    bold: bool = False
    goal: float | None = None


def panel(
    axes: Any,
    bars: Sequence[Bar],
    *,
    title: str,
    unit: str,
    limit: float,
    line: float | None = None,
) -> None:
    """Draw bars below each other.

    Args:
        axes: Matplotlib's axes to draw on.
        bars: From top to bottom.
        title: What stands above.
        unit: What stands below the scale.
        limit: Where bars are cut off.
        line: Where a dashed line stands, if one is to.
    """
    room = _CHARACTER * max((len(bar.text) + 2 for bar in bars), default=0)
    for at, bar in enumerate(bars):
        axes.barh(at, min(bar.best, limit), height=0.66, color=bar.colour, zorder=2)
        if bar.middle <= limit:
            axes.plot([bar.middle], [at], marker="|", ms=11, mew=1.6, color=_INK, zorder=4)
        cut = " →" if bar.best > limit else ""
        goal = bar.goal if bar.goal is not None and bar.goal <= limit else 0.0
        if goal:
            axes.plot([goal] * 2, [at - 0.4, at + 0.4], color=CEILING, lw=1.6, zorder=5)
        right = max(min(max(bar.best, bar.middle), limit), goal)
        text = f"{bar.text}{cut}"
        axes.text(right + limit * 0.015, at, text, va="center", fontsize=TEXT, color=_INK)
    if line is not None:
        axes.axvline(line, color=CEILING, lw=1, ls="--", zorder=3)
    labels = [textwrap.fill(bar.label, _LABEL, break_on_hyphens=False) for bar in bars]
    axes.set_yticks(range(len(bars)), labels)
    for tick, bar in zip(axes.get_yticklabels(), bars, strict=True):
        tick.set_fontweight("bold" if bar.bold else "normal")
    axes.tick_params(axis="y", length=0, labelsize=TEXT)
    axes.tick_params(axis="x", labelsize=TEXT)
    axes.invert_yaxis()
    axes.set_xlim(0, limit / (1 - room))
    axes.set_xticks([tick for tick in axes.get_xticks() if 0 <= tick <= limit])
    axes.set_xlabel(unit, fontsize=TEXT)
    axes.set_title(title, loc="left", fontsize=12, fontweight="bold")
    axes.grid(axis="x", color="#e4e6ea", zorder=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def _colour(name: str) -> str:
    if is_ceiling(name):
        return CEILING
    return OURS if name.startswith("mfload") else PEER


def _label(name: str) -> str:
    return f"ceiling: {label(name)}" if is_ceiling(name) else label(name)


def _kept(results: Results, case: str) -> list[str]:
    """The ceilings that keep what they read, the fastest first."""
    kept = [name for name in results.names(case) if is_ceiling(name) and loaders.find(name).keeps]
    return sorted(kept, key=lambda name: results.best(case, name) or 0.0)


def _case(results: Results, case: str) -> list[Bar]:
    """The bars of one case: the ceilings on top, then the fastest loader to the slowest."""
    found = results.ceiling(case)
    if found is None:
        raise ValueError(f"no ceiling was measured for the case {case!r}")
    ceiling, unit = found
    others = [name for name in results.names(case) if not is_ceiling(name)]
    others.sort(key=lambda name: results.best(case, name) or 0.0)
    # The ceiling may keep nothing of what it reads; the best that does keep it stands below it.
    names = [*dict.fromkeys([ceiling, *_kept(results, case)[:1]]), *others]
    bars: list[Bar] = []
    for name in names:
        best, middle = results.best(case, name), results.median(case, name)
        if best is None or middle is None:
            continue
        text = f"{best / unit:.2f}×  {best:.3f} s"
        ours = name.startswith("mfload")
        bars.append(Bar(_label(name), best / unit, middle / unit, text, _colour(name), bold=ours))
    return bars


def figure(counts: Sequence[int]) -> tuple[Any, list[Any]]:
    """An empty picture and its panels, one below the other, drawn to a file and to no screen.

    Args:
        counts: How many bars each panel has; a bar is as high in one as in another.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    heights = [1.1 + 0.34 * count for count in counts]
    drawn, grid = plt.subplots(
        len(heights), 1, figsize=(WIDTH, 0.5 + sum(heights)), squeeze=False, height_ratios=heights,
        layout="constrained", dpi=_DPI,
    )  # fmt: skip
    return drawn, [*grid[:, 0]]


def finish(drawn: Any, title: str, path: Path) -> None:
    """Put a line above a picture and write it; the file's suffix says the format."""
    from matplotlib import pyplot as plt

    drawn.suptitle(textwrap.fill(title, _CHARACTERS), fontsize=TEXT, x=0.01, ha="left")
    drawn.savefig(path)
    plt.close(drawn)


def draw(results: Results, title: str, path: Path) -> bool:
    """Draw time over the ceiling, warm and cold; a case that was not measured is left out.

    Args:
        results: The run.
        title: The line above.
        path: Where to.

    Returns:
        Whether there was anything to draw.
    """
    cases = [case for case in ("warm", "cold") if results.ceiling(case) is not None]
    if not cases:
        return False
    every = [_case(results, case) for case in cases]
    drawn, panels = figure([*map(len, every)])
    for axes, case, bars in zip(panels, cases, every, strict=True):
        limit = min(_LIMIT, max(2.0, max(bar.middle for bar in bars)) * 1.05)
        panel(axes, bars, title=case, unit="time ÷ ceiling", limit=limit, line=1)
    finish(drawn, title, path)
    return True


def draw_front(results: Results, path: Path) -> None:
    """Draw seconds of a few loaders, warm beside cold: as much as the front page has room for."""
    from matplotlib import pyplot as plt

    cases = [case for case in ("warm", "cold") if results.ceiling(case) is not None]
    if not cases:
        return
    size = WIDTH, 3.0
    drawn, grid = plt.subplots(
        1, len(cases), figsize=size, squeeze=False, layout="constrained", dpi=_DPI
    )
    for axes, case in zip(grid[0], cases, strict=True):
        names = {**dict.fromkeys(_kept(results, case)[:1], "plain reads"), **_FRONT}
        bars: list[Bar] = []
        for name, text in names.items():
            best, middle = results.best(case, name), results.median(case, name)
            if best is not None and middle is not None:
                shown, ours = text if case == cases[0] else "", name.startswith("mfload")
                bars.append(Bar(shown, best, middle, f"{best:.2f} s", _colour(name), bold=ours))
        limit = max(bar.middle for bar in bars) * 1.05
        panel(axes, bars, title=case, unit="seconds", limit=limit)
    found, m = results.checkpoints["large"], results.machine
    title = (
        f"{found['nbytes'] / 1e9:.2f} GB of bf16, {m['cpu']}, {m['cores']} cores, "
        f"{m['file_system']}; bar: best, tick: median"
    )
    finish(drawn, title, path)
