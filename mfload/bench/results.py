"""A bench's figures: samples by speed, rows with a sentence each, conditions, and a picture."""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mfload.bench import loaders
from mfload.bench.loaders import BenchLoader
from mfload.diagnostics import host
from mfload.errors import counted

CASES = ("warm", "cold")
_COLOURS = {"ceiling": "#4a4f57", "mfload": "#2a6fb0", "peer": "#b4b8bf"}
_LIMIT = 12.0
"""Where bars are cut off: beyond it the exact length says little, and the figure stands beside."""
_FIGURES = ("best_s", "median_s", "gb_per_s", "over_ceiling", "cpu_s", "peak_over_bytes")

Sample = dict[str, Any]
"""What `child.measure` gives, with `case`, `name` and `round`."""
Found = dict[str, Any]
"""What `measuring.bench` gives; docs/performance/bench.md describes it and its rows."""
Row = dict[str, Any]


def ranked(samples: list[Sample], case: str) -> dict[str, list[Sample]]:
    """The samples of a case by name: ceilings, then loaders; the fastest first in all."""
    found: dict[str, list[Sample]] = {}
    for sample in sorted(samples, key=lambda each: each["seconds"]):
        if sample["case"] == case:
            found.setdefault(sample["name"], []).append(sample)
    return dict(sorted(found.items(), key=lambda each: loaders.find(each[0]).kind != "ceiling"))


def rows(found: Found, case: str, reasons: Mapping[str, str | None]) -> list[Row]:
    """The ceilings of a case, then loaders by speed, then those without figures and why."""
    measured = ranked(found["samples"], case)
    if not measured:
        return []
    first, samples = next(iter(measured.items()))
    ceiling = samples[0]["seconds"] if loaders.find(first).kind == "ceiling" else None
    failed = {each["name"]: each["why"] for each in found["failed"] if each["case"] == case}
    made = [_row(found, case, name, measured[name], ceiling) for name in measured]
    for name, why in {**reasons, **failed}.items():
        if name not in measured:
            made.append(_row(found, case, name) | {"explanation": why or "not measured"})
    return made


def _row(
    found: Found, case: str, name: str, samples: Sequence[Sample] = (), ceiling: float | None = None
) -> Row:
    loader = loaders.find(name)
    row = {
        "case": case,
        "name": name,
        "label": loader.label,
        "kind": loader.kind,
        "framework": loader.framework,
        "measured": bool(samples),
        "rounds": len(samples),
        **dict.fromkeys(_FIGURES),
        "engines": [],
        "explanation": "",
    }
    if not samples:
        return row
    best, gigabytes = samples[0]["seconds"], found["checkpoint"]["nbytes"] / 1e9
    explained = [sample["explained"] for sample in samples if sample["explained"]]
    notes = list(dict.fromkeys(note for each in explained for note in each["notes"]))[:2]
    said = [_how(loader, explained), f"{gigabytes / best:.2f} GB/s"]
    if ceiling is not None:
        said.append(f"{best / ceiling:.2f} of the ceiling's time")
    return row | {
        "best_s": best,
        "median_s": statistics.median(sample["seconds"] for sample in samples),
        "gb_per_s": gigabytes / best,
        "over_ceiling": None if ceiling is None else best / ceiling,
        "cpu_s": min(sample["cpu_s"] for sample in samples),
        "peak_over_bytes": max(each["peak_over"] for each in samples) if loader.keeps else None,
        "engines": list(dict.fromkeys(leg[0] for each in explained for leg in each["route"])),
        "explanation": "; ".join([*said, *notes]),
    }


def _how(loader: BenchLoader, explained: list[dict[str, Any]]) -> str:
    if loader.kind == "ceiling":
        kept = "keeps all of it" if loader.keeps else "keeps nothing of it"
        return f"reads the bytes as fast as this machine gives them, {kept}"
    if not explained:
        return "as its own documentation calls it"
    # Several rounds may have taken several routes, a file each.
    files = {(engine, why): n for each in explained for engine, why, n in each["route"]}
    most = sorted(files, key=lambda leg: -files[leg])[:2]
    ways = " and ".join(f"{engine} ({why})" for engine, why in most) or "nothing to read"
    threads = max(each["threads"] for each in explained)
    return f"{ways}, {threads} thread{'s' if threads > 1 else ''}"


def conditions(found: Found) -> list[str]:
    """What was measured on what, and what may have disturbed it: a sentence each."""
    what, run = found["checkpoint"], found["run"]
    said = [
        "; ".join(f"{what}: {found}" for what, found in found["machine"].items()) + ".",
        f"{what['nbytes'] / 1e9:.3f} GB in {counted(what['tensors'], 'tensor')} of "
        f"{counted(what['files'], 'file')}; "
        f"rounds: {run['rounds']}, a fresh process for each sample, imports and a first "
        "tiny load done, every page touched.",
        *what["notes"],
    ]
    for case, why in found["impossible"].items():
        said.append(f"{case}: not possible here, because {why}.")
    if host.virtual(Path("/")) and ranked(found["samples"], "cold"):
        said.append("This is a virtual machine: its host may still hold what is cold here.")
    load = f"The load average was {run['load_average']} at the start: of a busy machine, "
    return [*said, f"{load}the best figure suffers least."]


def draw(found: Found, path: Path) -> bool:
    """Draws time over the ceiling, a panel a case; gives whether there was anything to draw.

    Bars are of the best, whiskers reach to the median. Of the ceilings, the fastest is shown and
    the fastest that keeps what it reads.
    """
    from matplotlib.figure import Figure

    panels: dict[str, list[Row]] = {}
    for case in CASES:
        shown = [row for row in found["rows"] if row["case"] == case and row["over_ceiling"]]
        ceilings = [row for row in shown if row["kind"] == "ceiling"]
        kept = [row for row in ceilings if loaders.find(row["name"]).keeps]
        best = [row for row in ceilings if row in (*ceilings[:1], *kept[:1])]
        if shown:
            panels[case] = [*best, *(row for row in shown if row not in ceilings)]
    if not panels:
        return False
    heights = [1.1 + 0.34 * len(bars) for bars in panels.values()]
    figure = Figure(figsize=(8, 0.5 + sum(heights)), layout="constrained")
    grid = figure.subplots(len(panels), 1, squeeze=False, height_ratios=heights)
    for axes, (case, bars) in zip(grid[:, 0], panels.items(), strict=True):
        _panel(axes, case, bars)
    m, what = found["machine"], found["checkpoint"]
    title = (
        f"{what['nbytes'] / 1e9:.2f} GB in {counted(what['tensors'], 'tensor')}; "
        f"{m['processor']}, {m['file system']}; "
        f"bar: best of {found['run']['rounds']}, whisker: median"
    )
    figure.suptitle(textwrap.fill(title, 100), fontsize=10, x=0.01, ha="left")
    figure.savefig(path, dpi=150)
    return True


def _panel(axes: Any, case: str, bars: list[Row]) -> None:
    medians = [row["over_ceiling"] * row["median_s"] / row["best_s"] for row in bars]
    limit = min(_LIMIT, max(2.0, *medians) * 1.05)
    best = [min(row["over_ceiling"], limit) for row in bars]
    beyond = [max(0, min(each, limit) - own) for each, own in zip(medians, best, strict=True)]
    places, colours = range(len(bars)), [_COLOURS[row["kind"]] for row in bars]
    drawn = axes.barh(places, best, xerr=([0] * len(bars), beyond), color=colours, capsize=4)
    texts = [f"{row['over_ceiling']:.2f}×  {row['best_s']:.3f} s" for row in bars]
    axes.bar_label(drawn, texts, padding=5)
    axes.axvline(1, color=_COLOURS["ceiling"], ls="--")
    labels = [("ceiling: " if row["kind"] == "ceiling" else "") + row["label"] for row in bars]
    axes.set_yticks(places, labels)
    axes.invert_yaxis()
    axes.set(xlabel="time ÷ ceiling", xlim=(0, limit * 1.5))  # Room for the texts.
    axes.set_title(case, loc="left", fontweight="bold")
    axes.spines[["top", "right", "left"]].set_visible(False)
