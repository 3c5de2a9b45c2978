"""The figures of loading onto a mesh: targets, tables, plot."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks import described, markdown, plot, tables, timings
from benchmarks.mesh_layouts import LAYOUTS
from benchmarks.mesh_processes import EXCHANGES, PROCESSES
from benchmarks.mesh_tasks import CEILINGS, LABELS
from benchmarks.plot import OURS, PEER, Bar
from benchmarks.results import MIB, Results
from benchmarks.targets import Target

COLD, PAIR = "rows-cold", "two-processes"
TITLES = {
    **{name: layout.label for name, layout in LAYOUTS.items()},
    COLD: "rows, page cache empty",
    PAIR: "two processes",
}
_OVER_CEILING = {"rows": 1.5, "columns": 3.0, "grid": 3.0}
_OVER_ORBAX = {"rows": 6.0, "columns": 30.0}
_SHARE = 0.55
_OVERHEAD = 256


def _faster(results: Results, case: str) -> float | None:
    """How many times faster than Orbax mfload is."""
    ours, theirs = results.best(case, "mfload"), results.best(case, "orbax")
    return theirs / ours if ours and theirs else None


def _worst(results: Results, case: str, name: str) -> float | None:
    """The most that was held beside the shards in any sample, in MiB."""
    peak = results.worst([case], name, "peak_over")
    return None if peak is None else max(0.0, peak / MIB)


def _samples(results: Results, name: str) -> list[dict[str, Any]]:
    return [s for s in results.samples if s["case"] == PAIR and s["name"] == name]


def _share(results: Results, name: str) -> float | None:
    """What the process that read most read, as a share of the checkpoint."""
    return max((max(s["shares"]) for s in _samples(results, name)), default=None)


def _all(results: Results) -> Iterator[Target]:
    for case, limit in _OVER_CEILING.items():
        what = f"{TITLES[case]}: time over the ceiling"
        yield Target(what, limit, results.ratio(case, "mfload"))
    for case, limit in _OVER_ORBAX.items():
        what = f"{TITLES[case]}: faster than Orbax"
        yield Target(what, limit, _faster(results, case), at_least=True)
    for case in _OVER_CEILING:
        # `auto` may read more where that is cheaper; its reason stands below the table.
        what = f"two processes, {TITLES[case]}, `once`: share of the bytes that each reads"
        yield Target(what, _SHARE, _share(results, f"{case}/once"), "")
    for case in (*LAYOUTS, COLD):
        # Noise does not add to a peak: the worst of all samples counts.
        what = f"{TITLES[case]}: resident memory beside the shards"
        yield Target(what, _OVERHEAD, _worst(results, case, "mfload"), " MiB")
    pairs = [_worst(results, PAIR, f"{case}/{how}") for case in _OVER_CEILING for how in EXCHANGES]
    worst = max((peak for peak in pairs if peak is not None), default=None)
    yield Target("two processes: resident memory beside the shards", _OVERHEAD, worst, " MiB")


def judge(results: Results) -> list[Target]:
    """Every target with what was found."""
    return list(_all(results))


targets = tables.targets


def _row(results: Results, case: str, name: str) -> list[str]:
    best = results.best(case, name) or 0.0
    theirs, peak = results.best(case, "orbax"), _worst(results, case, name)
    nbytes = results.checkpoints["large"]["nbytes"]
    return [
        timings.cell(name, LABELS),
        markdown.seconds(best),
        markdown.seconds(results.median(case, name)),
        markdown.times(results.ratio(case, name)),
        "–" if not best or theirs is None else f"{theirs / best:.1f}",
        f"{nbytes / 1e9 / best:.2f}" if best else "–",
        markdown.seconds(results.best(case, name, "cpu_s")),
        "–" if peak is None or name in CEILINGS else f"{peak:.0f}",
        str(len(results.values(case, name, "seconds"))),
    ]


def _table(results: Results, case: str) -> str:
    head = ("", "best s", "median s", "÷ ceiling", "times faster than Orbax", "GB/s", "CPU s",
            "MiB beside the shards", "rounds")  # fmt: skip
    names = timings.measured(results, case, LABELS)
    return markdown.table(head, (_row(results, case, name) for name in names))


def _pairs(results: Results) -> str:
    """What two processes read, by layout and exchange."""
    rows: list[list[str]] = []
    for case in _OVER_CEILING:
        for how in EXCHANGES:
            name = f"{case}/{how}"
            found = _samples(results, name)
            if not found:
                continue
            best, peak = results.best(PAIR, name) or 0.0, _worst(results, PAIR, name) or 0.0
            rows.append(
                [
                    TITLES[case],
                    f"`{how}`",
                    ", ".join(f"{share:.3f}" for share in found[-1]["shares"]),
                    ", ".join(f"{nbytes / 1e6:.0f}" for nbytes in found[-1]["exchanged"]),
                    markdown.seconds(best),
                    markdown.seconds(results.median(PAIR, name)),
                    markdown.seconds(results.best(PAIR, name, "cpu_s")),
                    f"{peak:.0f}",
                    str(len(found)),
                ]
            )
    head = ("sharding", "`Options(exchange=…)`", "share of the bytes each reads",
            "MB exchanged by each", "best s", "median s", "CPU s", "MiB beside the shards",
            "rounds")  # fmt: skip
    return markdown.table(head, rows)


def _reasons(results: Results) -> str:
    """What `auto` decided, in its own words."""
    said: list[str] = []
    for case in _OVER_CEILING:
        for found in _samples(results, f"{case}/auto")[-1:]:
            notes = "; ".join(found["notes"]) or "nothing to say"
            said.append(f"- `auto`, {TITLES[case]}: {notes}.")
    return "\n".join(said)


def page(results: Results) -> str:
    """The figures as Markdown, under headings of the third level."""
    m, found = results.machine, results.checkpoints["large"]
    host = " (its host may still hold the file)" if m["virtual"] else ""
    starts = ", ".join(map(str, found["starts"]))
    parts = [
        f"{described.sentence(m)}. {found['nbytes'] / 1e9:.2f} GB of bf16, {found['tensors']} "
        f"tensors in {found['files']} files, shapes {found['drawn']}, data starting at {starts} "
        f"mod 64; the largest tensor has {found['largest'] / MIB:.0f} MiB. "
        f"{timings.busy(results)}. Cold: none of it in this machine's page cache{host}. "
        f"{described.versions_sentence(m)}.",
        "### Targets",
        targets(judge(results)),
    ]
    for case in timings.cases(results):
        title = TITLES[case][0].upper() + TITLES[case][1:]
        if case == PAIR:
            parts += [f"### {title}", _pairs(results), _reasons(results)]
        else:
            parts += [f"### {title}", _table(results, case)]
    return "\n\n".join([*parts, *timings.skipped(results)])


def _bars(results: Results, case: str) -> list[Bar]:
    unit = next((name for name in CEILINGS if results.best(case, name) is not None), None)
    return timings.bars(results, case, LABELS, CEILINGS, unit)


def _panel(axes: Any, bars: Sequence[Bar], case: str) -> None:
    # The one that takes longest would leave the others no room.
    second = sorted(bar.middle for bar in bars)[-2:][0]
    limit = min(max(bar.middle for bar in bars), 3 * second) * 1.05
    plot.panel(axes, bars, title=TITLES[case], unit="seconds", limit=limit)


def _shares(results: Results) -> list[Bar]:
    bars: list[Bar] = []
    for case in _OVER_CEILING:
        for how in EXCHANGES:
            share = _share(results, f"{case}/{how}")
            if share is None:
                continue
            best = results.best(PAIR, f"{case}/{how}") or 0.0
            colour = OURS if how == "auto" else PEER
            text = f"{share:.2f}  {best:.3f} s"
            label = f"{TITLES[case]}, {how}"
            bars.append(Bar(label, share, share, text, colour, bold=how == "auto"))
    return bars


def draw(results: Results, path: Path) -> None:
    """Draw a panel a case: seconds, and what two processes read."""
    cases = timings.cases(results)
    every = [_shares(results) if case == PAIR else _bars(results, case) for case in cases]
    drawn, panels = plot.figure([*map(len, every)])
    for axes, case, bars in zip(panels, cases, every, strict=True):
        if case == PAIR:
            unit = f"share of the bytes that each process reads; dashed: 1 in {PROCESSES}"
            line = 1 / PROCESSES
            plot.panel(axes, bars, title=TITLES[case], unit=unit, limit=1.1, line=line)
        else:
            _panel(axes, bars, case)
    m, found = results.machine, results.checkpoints["large"]
    title = (
        f"{found['nbytes'] / 1e9:.2f} GB of bf16 onto eight CPU devices of {m['cpu']}, "
        f"{m['cores']} cores, {m['file_system']}; bar: best, tick: median; ×: of the ceiling; "
        "pages touched"
    )
    plot.finish(drawn, title, path)
