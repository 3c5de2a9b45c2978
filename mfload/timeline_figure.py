"""The picture of a timeline: a lane for each thread, and how fast bytes came."""

from __future__ import annotations

import io
import os
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from mfload import errors
from mfload.timeline import LOAD, Span

# Told apart by those who don't see all colours, too.
_COLOURS = {
    "read": "#0072b2",
    "map": "#56b4e9",
    "copy": "#e69f00",
    "decode": "#009e73",
    "check": "#cc79a7",
    "exchange": "#d55e00",
    "wait": "#b4b8bf",
}
_STAGES = ("#d9dce1", "#eceef1")  # In turn, so that neighbours are told apart.
_INK = "#30343a"
_BINS = 120  # Of the curve.
_APART = 100  # Fewer spans of a lane are drawn apart.
_NAMED = 0.05  # A stage with less of the width has no room for its name.
_WIDTH, _LANE, _DPI = 8.0, 0.32, 100


def write(figure: Any, path: str | os.PathLike[str], dpi: int) -> None:
    """Writes a figure; raises TargetError, or UsageError for a suffix that matplotlib lacks."""
    try:
        figure.savefig(os.fspath(path), dpi=dpi)
    except OSError as error:
        raise errors.from_target(error, path, "write the plot") from error
    except ValueError as error:  # It names those that it knows.
        raise errors.UsageError(f"can't write the plot: {error}", file=path) from error


class TimelineFigure(Figure):  # pyright: ignore[reportUntypedBaseClass]
    """A figure that notebooks show by themselves, on white paper in a dark theme too."""

    def __init__(self, spans: Sequence[Span], heading: str, ceiling: float | None = None) -> None:
        lanes = _lanes(spans)
        size = (_WIDTH, 2.6 + _LANE * len(lanes))
        super().__init__(figsize=size, dpi=_DPI, layout="constrained", facecolor="white")
        FigureCanvasAgg(self)
        begin = min(span.start for span in spans)
        seconds = max(max(span.stop for span in spans) - begin, 1e-6)
        scale, unit = (1.0, "seconds") if seconds >= 2 else (1e3, "milliseconds")
        lane_axes, rate_axes = self.subplots(
            2, 1, sharex=True, height_ratios=(_LANE * len(lanes) + 0.2, 1.2)
        )
        _draw_lanes(lane_axes, spans, lanes, begin, seconds, scale)
        _draw_rate(rate_axes, spans, begin, seconds, scale, ceiling)
        rate_axes.set_xlim(0, seconds * scale)
        rate_axes.set_xlabel(f"{unit} since the load began", fontsize=8, color=_INK)
        text = f"{heading}, in {seconds * scale:.4g} {unit}"
        self.suptitle(text, x=0.01, ha="left", fontsize=10, color=_INK)

    def _repr_png_(self) -> bytes:
        data = io.BytesIO()
        self.savefig(data, format="png", dpi=2 * _DPI)
        return data.getvalue()


def _lanes(spans: Sequence[Span]) -> list[str]:
    """The threads: that of the load, then readers by number, each with its copies."""

    def order(thread: str) -> tuple[bool, int, bool]:
        number = re.search(r"\d+$", thread)
        return thread != LOAD, int(number[0]) if number else 1 << 30, thread[:1] == "c"

    return sorted(dict.fromkeys(span.thread for span in spans), key=order)


def _draw_lanes(
    axes: Any, spans: Sequence[Span], lanes: list[str], begin: float, seconds: float, scale: float
) -> None:
    stages = [span for span in spans if span.thread == LOAD]
    for number, span in enumerate(sorted(stages, key=lambda each: each.start)):
        start, width = (span.start - begin) * scale, (span.stop - span.start) * scale
        axes.broken_barh([(start, width)], (-0.4, 0.8), facecolor=_STAGES[number % 2])
        if span.stop - span.start > _NAMED * seconds:
            centred = {"ha": "center", "va": "center", "fontsize": 8, "color": _INK}
            axes.text(start + width / 2, 0, span.kind, clip_on=True, **centred)
    kinds: dict[str, str] = {}
    for row, lane in enumerate(lanes):
        for kind, colour in _COLOURS.items():
            bars = [
                ((span.start - begin) * scale, (span.stop - span.start) * scale)
                for span in spans
                if span.thread == lane != LOAD and span.kind == kind
            ]
            if bars:
                kinds[kind] = colour
                # The edge keeps a few blocks apart, and the shortest of many visible.
                edge = "white" if len(bars) < _APART else colour
                axes.broken_barh(bars, (row - 0.4, 0.8), facecolor=colour, edgecolor=edge, lw=0.4)
    axes.set_yticks(range(len(lanes)), lanes)
    axes.set_ylim(len(lanes) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0, labelsize=8, labelcolor=_INK)
    axes.spines[["top", "right", "left"]].set_visible(False)
    labels = {"map": "read in place"}
    patches = [Patch(color=c, label=labels.get(kind, kind)) for kind, c in kinds.items()]
    if patches:
        axes.legend(
            handles=patches, loc="lower right", bbox_to_anchor=(1, 1), ncols=len(patches),
            frameon=False, fontsize=8, handlelength=1, borderaxespad=0.2,
        )  # fmt: skip


def _draw_rate(
    axes: Any,
    spans: Sequence[Span],
    begin: float,
    seconds: float,
    scale: float,
    ceiling: float | None,
) -> None:
    """GiB/s over time: the bytes of each read are spread evenly over its span."""
    edges = np.linspace(0, seconds, _BINS + 1)
    came = np.zeros(_BINS + 1)  # Bytes until each edge.
    for span in spans:
        if span.kind in ("read", "map"):
            start, stop = span.start - begin, span.stop - begin
            share = np.clip((edges - start) / max(stop - start, 1e-9), 0, 1)
            came += span.nbytes * share
    rate = np.diff(came) / np.diff(edges) / 2**30
    colour = _COLOURS["read"]
    axes.stairs(rate, edges * scale, fill=True, color=colour, alpha=0.25)
    axes.stairs(rate, edges * scale, color=colour, lw=1.2)
    top = max(float(rate.max(initial=0)), ceiling or 0, 1e-3)
    if ceiling is not None:
        axes.axhline(ceiling, color=_INK, ls="--", lw=1)
        text = f"ceiling: {ceiling:.3g} GiB/s"
        place: dict[str, Any] = {"ha": "right", "va": "bottom", "fontsize": 8, "color": _INK}
        place["bbox"] = {"facecolor": "white", "alpha": 0.8, "lw": 0, "pad": 1}
        axes.text(0.995, ceiling, text, transform=axes.get_yaxis_transform(), **place)
    axes.set_ylim(0, top * 1.2)
    axes.set_ylabel("read, GiB/s", fontsize=8, color=_INK)
    axes.tick_params(labelsize=8, labelcolor=_INK)
    axes.spines[["top", "right"]].set_visible(False)
