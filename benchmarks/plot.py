"""A run's figures as a picture: time over the ceiling, warm and cold."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.ceilings import PATTERNS
from benchmarks.results import Results, is_ceiling, label

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_LIMIT = 12.0
"""Where bars are cut off: beyond it the exact length says little, and the figure stands beside."""
_OURS, _PEER, _CEILING, _INK = "#2a6fb0", "#b4b8bf", "#4a4f57", "#1d1f23"


def _colour(name: str) -> str:
    if is_ceiling(name):
        return _CEILING
    return _OURS if name.startswith("mfload") else _PEER


def _label(name: str) -> str:
    return f"ceiling: {label(name)}" if is_ceiling(name) else label(name)


def _panel(axes: Axes, results: Results, case: str) -> None:
    """Draw one case: the ceilings on top, then the fastest loader to the slowest."""
    found = results.ceiling(case)
    if found is None:
        raise ValueError(f"no ceiling was measured for the case {case!r}")
    ceiling, unit = found
    loaders = [name for name in results.names(case) if not is_ceiling(name)]
    loaders.sort(key=lambda name: results.best(case, name) or 0.0)
    # The ceiling may keep nothing of what it reads; the best that does keep it stands below it.
    kept = [name for name in results.names(case) if is_ceiling(name) and not PATTERNS[name].reuse]
    kept.sort(key=lambda name: results.best(case, name) or 0.0)
    ceilings = list(dict.fromkeys([ceiling, *kept[:1]]))
    names = [*ceilings, *loaders]
    longest = max((results.median(case, name) or 0.0) / unit for name in names)
    limit = min(_LIMIT, max(2.0, longest) * 1.05)
    for at, name in enumerate(names):
        best, middle = results.best(case, name), results.median(case, name)
        if best is None or middle is None:
            continue
        width = min(best / unit, limit)
        axes.barh(at, width, height=0.66, color=_colour(name), zorder=2)
        if middle / unit <= limit:
            axes.plot([middle / unit], [at], marker="|", ms=11, mew=1.6, color=_INK, zorder=4)
        cut = " →" if best / unit > limit else ""
        right = min(max(best, middle) / unit, limit)
        text = f"{best / unit:.2f}×  {best:.3f} s{cut}"
        axes.text(right + limit * 0.015, at, text, va="center", fontsize=8.5, color=_INK)
    axes.axvline(1, color=_CEILING, lw=1, ls="--", zorder=3)
    axes.set_yticks(range(len(names)), list(map(_label, names)))
    for tick, name in zip(axes.get_yticklabels(), names, strict=True):
        tick.set_fontweight("bold" if name.startswith("mfload") else "normal")
    axes.tick_params(axis="y", length=0, labelsize=9)
    axes.tick_params(axis="x", labelsize=8.5)
    axes.invert_yaxis()
    axes.set_xlim(0, limit * 1.28)
    axes.set_xticks([tick for tick in axes.get_xticks() if 0 <= tick <= limit])
    axes.set_xlabel("time ÷ ceiling", fontsize=9)
    axes.set_title(case, loc="left", fontsize=12, fontweight="bold")
    axes.grid(axis="x", color="#e4e6ea", zorder=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def draw(results: Results, path: Path) -> None:
    """Write the picture; a case that was not measured is left out.

    Args:
        results: The run.
        path: Where to; its suffix says the format.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    cases = [case for case in ("warm", "cold") if results.ceiling(case) is not None]
    if not cases:
        return
    most = max(len([n for n in results.names(case) if not is_ceiling(n)]) for case in cases)
    size = (7.2 * len(cases), 1.6 + 0.34 * (most + 2))
    figure, grid = plt.subplots(1, len(cases), figsize=size, squeeze=False, layout="constrained")
    for axes, case in zip(grid[0], cases, strict=True):
        _panel(axes, results, case)
    m, found = results.machine, results.checkpoints["large"]
    figure.suptitle(
        f"{found['nbytes'] / 1e9:.2f} GB of bf16 in {len(found['starts'])} files on {m['cpu']}, "
        f"{m['cores']} cores, {m['file_system']}; bar: best of {results.run['rounds']} rounds, "
        "tick: median; pages touched",
        fontsize=10,
        x=0.01,
        ha="left",
    )
    figure.savefig(path, dpi=150)
    plt.close(figure)
