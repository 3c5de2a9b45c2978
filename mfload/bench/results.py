"""A bench's figures: rows with a sentence each, conditions, plain data for JSON, and a picture."""

from __future__ import annotations

import statistics
import textwrap
from pathlib import Path
from typing import Any

from mfload.bench import loaders, machine
from mfload.bench.ceilings import PATTERNS
from mfload.bench.measuring import CASES, Bench, Sample

SCHEMA = 1
"""Counts up when a field of the JSON changes its meaning or goes."""
OURS, PEER, CEILING, INK = "#2a6fb0", "#b4b8bf", "#4a4f57", "#1d1f23"
_LIMIT = 12.0
"""Where bars are cut off: beyond it the exact length says little, and the figure stands beside."""

Row = dict[str, Any]
"""One line of the table; docs/performance/bench.md describes the fields."""


def label(name: str) -> str:
    """What a loader or a ceiling's pattern is called in tables and plots."""
    return PATTERNS[name].label if name in PATTERNS else loaders.find(name).label


def rows(made: Bench) -> list[Row]:
    """Every row: of each case the ceilings, then loaders by speed, then those without figures."""
    found: list[Row] = []
    for case in CASES:
        names = made.names(case)
        found += [_measured(made, case, name) for name in names]
        reasons = {loader.name: why for loader, why in made.entrants if names}
        reasons |= {name: why for where, name, why in made.failed if where == case}
        for name, why in reasons.items():
            if name not in names:
                found.append(_row(case, name, measured=False, explanation=why or "not measured"))
    return found


def _row(case: str, name: str, **figures: Any) -> Row:
    ceiling = name in PATTERNS
    row: Row = {
        "case": case,
        "name": name,
        "label": label(name),
        "kind": "ceiling" if ceiling else "mfload" if name.startswith("mfload-") else "peer",
        "framework": None if ceiling else loaders.find(name).framework,
        "measured": True,
        "rounds": 0,
    }
    empty = ("best_s", "median_s", "gb_per_s", "over_ceiling", "cpu_s", "peak_over_bytes")
    return row | dict.fromkeys(empty) | {"engines": [], "explanation": ""} | figures


def _measured(made: Bench, case: str, name: str) -> Row:
    samples = made.of(case, name)
    best = samples[0]["seconds"]
    ceiling = next((made.of(case, each)[0]["seconds"] for each in made.names(case)
                    if each in PATTERNS), None)  # fmt: skip
    speed, ratio = made.subject.nbytes / 1e9 / best, ceiling and best / ceiling
    explained = [s["explained"] for s in samples if s["explained"]]
    figures = f"{speed:.2f} GB/s" + (f", {ratio:.2f} of the ceiling's time" if ratio else "")
    notes = list(dict.fromkeys(note for each in explained for note in each["notes"]))[:2]
    keeps = name not in PATTERNS or not PATTERNS[name].reuse
    return _row(
        case,
        name,
        rounds=len(samples),
        best_s=best,
        median_s=_median(samples),
        gb_per_s=speed,
        over_ceiling=ratio,
        cpu_s=min(s["cpu_s"] for s in samples),
        peak_over_bytes=max(s["peak_over"] for s in samples) if keeps else None,
        engines=list(dict.fromkeys(leg[0] for each in explained for leg in each["route"])),
        explanation="; ".join([_how(name, explained), figures, *notes]),
    )


def _median(samples: list[Sample]) -> float:
    return statistics.median(sample["seconds"] for sample in samples)


def _how(name: str, explained: list[dict[str, Any]]) -> str:
    if name in PATTERNS:
        kept = "keeps nothing of it" if PATTERNS[name].reuse else "keeps all of it"
        return f"reads the bytes as fast as this machine gives them, {kept}"
    if not explained:
        mapped = loaders.find(name).mapped
        return "maps the files, copies nothing" if mapped else "as its own documentation calls it"
    # Several rounds may have taken several routes, a file each.
    files = {(engine, why): n for each in explained for engine, why, n in each["route"]}
    most = sorted(files, key=lambda leg: -files[leg])[:2]
    ways = " and ".join(f"{engine} ({why})" for engine, why in most) or "nothing to read"
    threads = max(each["threads"] for each in explained)
    return f"{ways}, {threads} thread{'s' if threads > 1 else ''}"


def conditions(made: Bench) -> list[str]:
    """What was measured on what, and what may have disturbed it: a sentence each."""
    what, m = made.subject, made.machine
    said = [
        f"{machine.sentence(m)}.",
        f"{machine.versions_sentence(m)}.",
        f"{what.nbytes / 1e9:.3f} GB in {what.tensors} tensors of {len(what.files)} files; "
        f"rounds: {made.run['rounds']}, a fresh process for each sample, imports and a first "
        "tiny load done, every page touched.",
        *(f"{note[0].upper()}{note[1:]}." for note in made.notes),
    ]
    said += [f"{case}: not possible here, because {why}." for case, why in made.impossible.items()]
    if m["virtual"] and made.names("cold"):
        said.append("This is a virtual machine: its host may still hold what is cold here.")
    busy = made.run["busy_share"]
    loud = ", ".join(f"{share:.0%} ({case})" for case, share in busy.items() if share > 0.1)
    load = f"load average {m['load_average']}"
    if not loud:
        return [*said, f"The machine was quiet ({load} at the start)."]
    return [*said, f"The machine was busy with other things: {loud}; {load} at the start. Figures "
                   "may be worse than it can do; the best suffers least."]  # fmt: skip


def as_dict(made: Bench) -> dict[str, Any]:
    """Everything as plain data, for JSON; docs/performance/bench.md describes the fields."""
    what = made.subject
    return {
        "schema": SCHEMA,
        "machine": made.machine,
        "run": made.run,
        "checkpoint": {
            "path": what.path,
            "files": len(what.files),
            "nbytes": what.nbytes,
            "tensors": what.tensors,
            "read_bytes": sum(stop - start for _, start, stop in what.extents),
            "whole": what.names is None,
            "notes": made.notes,
        },
        "conditions": conditions(made),
        "impossible": made.impossible,
        "rows": rows(made),
        "samples": made.samples,
        "failed": [{"case": case, "name": name, "why": why} for case, name, why in made.failed],
    }


def draw(made: Bench, path: Path) -> bool:
    """Draws time over the ceiling, a panel a case: bars for the best, ticks at the medians."""
    found = {case: _bars(made, case) for case in CASES}
    panels = {case: bars for case, bars in found.items() if bars}
    if not panels:
        return False
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    width = 7.2 * len(panels)
    height = 1.6 + 0.34 * max(map(len, panels.values()))
    drawn, grid = plt.subplots(
        1, len(panels), figsize=(width, height), squeeze=False, layout="constrained"
    )
    for axes, (case, bars) in zip(grid[0], panels.items(), strict=True):
        _panel(axes, case, bars)
    m, what = made.machine, made.subject
    title = (
        f"{what.nbytes / 1e9:.2f} GB in {what.tensors} tensors on {m['cpu']}, {m['cores']} cores, "
        f"{m['file_system']}; bar: best of {made.run['rounds']}, tick: median"
    )
    lines = textwrap.wrap(title, int(width * 13))
    drawn.suptitle("\n".join(lines), fontsize=10, x=0.01, ha="left")
    drawn.savefig(path, dpi=150)
    plt.close(drawn)
    return True


def _bars(made: Bench, case: str) -> list[Row]:
    """The fastest ceiling, the fastest that keeps what it reads, and the loaders."""
    measured = [row for row in rows(made) if row["case"] == case and row["over_ceiling"]]
    ceilings = [row for row in measured if row["kind"] == "ceiling"]
    kept = [row for row in ceilings if not PATTERNS[row["name"]].reuse]
    shown = {row["name"]: row for row in (*ceilings[:1], *kept[:1])}
    return [*shown.values(), *(row for row in measured if row["kind"] != "ceiling")]


def _panel(axes: Any, case: str, bars: list[Row]) -> None:
    unit = bars[0]["best_s"]
    limit = min(_LIMIT, max(2.0, *(row["median_s"] / unit for row in bars)) * 1.05)
    colours = {"ceiling": CEILING, "mfload": OURS, "peer": PEER}
    for at, row in enumerate(bars):
        ratio, middle = row["over_ceiling"], row["median_s"] / unit
        axes.barh(at, min(ratio, limit), height=0.66, color=colours[row["kind"]], zorder=2)
        if middle <= limit:
            axes.plot([middle], [at], marker="|", ms=11, mew=1.6, color=INK, zorder=4)
        text = f"{ratio:.2f}×  {row['best_s']:.3f} s" + (" →" if ratio > limit else "")
        right = min(max(ratio, middle), limit) + limit * 0.015
        axes.text(right, at, text, va="center", fontsize=8.5, color=INK)
    axes.axvline(1, color=CEILING, lw=1, ls="--", zorder=3)
    prefix = {"ceiling": "ceiling: "}
    axes.set_yticks(
        range(len(bars)), [prefix.get(row["kind"], "") + row["label"] for row in bars], fontsize=9
    )
    for tick, row in zip(axes.get_yticklabels(), bars, strict=True):
        tick.set_fontweight("bold" if row["kind"] == "mfload" else "normal")
    axes.invert_yaxis()
    axes.set_xlim(0, limit * 1.28)
    axes.set_xticks([tick for tick in axes.get_xticks() if 0 <= tick <= limit])
    axes.set_xlabel("time ÷ ceiling", fontsize=9)
    axes.set_title(case, loc="left", fontsize=12, fontweight="bold")
    axes.grid(axis="x", color="#e4e6ea", zorder=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
