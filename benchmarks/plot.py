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
_CHARACTERS = 13
"""How many of the title's fit into an inch."""
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
    """

    label: str
    best: float
    middle: float
    text: str
    colour: str
    bold: bool = False


def panel(
    axes: Any,
    bars: Sequence[Bar],
    *,
    title: str,
    unit: str,
    limit: float,
    line: float | None = None,
    room: float = 0.28,
) -> None:
    """Draw bars below each other.

    Args:
        axes: Matplotlib's axes to draw on.
        bars: From top to bottom.
        title: What stands above.
        unit: What stands below the scale.
        limit: Where bars are cut off.
        line: Where a dashed line stands, if one is to.
        room: What the text right of the longest bar takes, as a share of that bar.
    """
    for at, bar in enumerate(bars):
        axes.barh(at, min(bar.best, limit), height=0.66, color=bar.colour, zorder=2)
        if bar.middle <= limit:
            axes.plot([bar.middle], [at], marker="|", ms=11, mew=1.6, color=_INK, zorder=4)
        cut = " →" if bar.best > limit else ""
        right = min(max(bar.best, bar.middle), limit)
        text = f"{bar.text}{cut}"
        axes.text(right + limit * 0.015, at, text, va="center", fontsize=8.5, color=_INK)
    if line is not None:
        axes.axvline(line, color=CEILING, lw=1, ls="--", zorder=3)
    axes.set_yticks(range(len(bars)), [bar.label for bar in bars])
    for tick, bar in zip(axes.get_yticklabels(), bars, strict=True):
        tick.set_fontweight("bold" if bar.bold else "normal")
    axes.tick_params(axis="y", length=0, labelsize=9)
    axes.tick_params(axis="x", labelsize=8.5)
    axes.invert_yaxis()
    axes.set_xlim(0, limit * (1 + room))
    axes.set_xticks([tick for tick in axes.get_xticks() if 0 <= tick <= limit])
    axes.set_xlabel(unit, fontsize=9)
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


def _case(axes: Any, results: Results, case: str) -> None:
    """Draw one case: the ceilings on top, then the fastest loader to the slowest."""
    found = results.ceiling(case)
    if found is None:
        raise ValueError(f"no ceiling was measured for the case {case!r}")
    ceiling, unit = found
    others = [name for name in results.names(case) if not is_ceiling(name)]
    others.sort(key=lambda name: results.best(case, name) or 0.0)
    # The ceiling may keep nothing of what it reads; the best that does keep it stands below it.
    kept = [name for name in results.names(case) if is_ceiling(name) and loaders.find(name).keeps]
    kept.sort(key=lambda name: results.best(case, name) or 0.0)
    names = [*dict.fromkeys([ceiling, *kept[:1]]), *others]
    bars: list[Bar] = []
    for name in names:
        best, middle = results.best(case, name), results.median(case, name)
        if best is None or middle is None:
            continue
        text = f"{best / unit:.2f}×  {best:.3f} s"
        ours = name.startswith("mfload")
        bars.append(Bar(_label(name), best / unit, middle / unit, text, _colour(name), bold=ours))
    limit = min(_LIMIT, max(2.0, max(bar.middle for bar in bars)) * 1.05)
    panel(axes, bars, title=case, unit="time ÷ ceiling", limit=limit, line=1)


def figure(
    size: tuple[float, float],
    columns: int,
    rows: int = 1,
    heights: Sequence[float] | None = None,
) -> tuple[Any, Any]:
    """An empty picture and its panels, drawn to a file and to no screen.

    Args:
        size: Width and height, in inches.
        columns: Panels beside each other.
        rows: Panels above each other.
        heights: How high the rows are in proportion; alike where None.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    return plt.subplots(
        rows, columns, figsize=size, squeeze=False, layout="constrained", height_ratios=heights
    )


def finish(drawn: Any, title: str, path: Path) -> None:
    """Put a line above a picture and write it; the file's suffix says the format."""
    from matplotlib import pyplot as plt

    columns = int(drawn.get_figwidth() * _CHARACTERS)
    drawn.suptitle("\n".join(textwrap.wrap(title, columns)), fontsize=10, x=0.01, ha="left")
    drawn.savefig(path, dpi=150)
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
    most = max(len([n for n in results.names(case) if not is_ceiling(n)]) for case in cases)
    drawn, grid = figure((7.2 * len(cases), 1.6 + 0.34 * (most + 2)), len(cases))
    for axes, case in zip(grid[0], cases, strict=True):
        _case(axes, results, case)
    finish(drawn, title, path)
    return True
