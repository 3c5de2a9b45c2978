"""A bench's figures as rows: one for each case and each who was to take part, with a sentence."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from mfload.bench import loaders
from mfload.bench.ceilings import PATTERNS, is_ceiling
from mfload.bench.measuring import Bench
from mfload.bench.options import CASES
from mfload.bench.results import label


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table.

    Attributes:
        case: "warm" or "cold".
        name: Of the loader or the ceiling's pattern.
        label: The same for people.
        kind: "ceiling", "mfload" or "peer".
        framework: Whose arrays, None for a ceiling.
        measured: Whether there are figures.
        rounds: How many samples they come from.
        best_s: Seconds of the fastest sample.
        median_s: Seconds of the middle one.
        gb_per_s: 10⁹ bytes of tensors a second, at its best.
        over_ceiling: Its best time over that of the fastest ceiling of the case.
        cpu_s: CPU seconds of the process, all threads, at their least.
        peak_over_bytes: The most resident memory beside the data, in any sample; None for a
            ceiling that keeps no data.
        engines: Engines that mfload took.
        explanation: How it was done, or why not.
    """

    case: str
    name: str
    label: str
    kind: str
    framework: str | None
    measured: bool
    rounds: int = 0
    best_s: float | None = None
    median_s: float | None = None
    gb_per_s: float | None = None
    over_ceiling: float | None = None
    cpu_s: float | None = None
    peak_over_bytes: int | None = None
    engines: tuple[str, ...] = ()
    explanation: str = ""


def rows(made: Bench) -> list[Row]:
    """Every row: of each case the ceilings, then the fastest to the slowest, then the others."""
    found: list[Row] = []
    for case in CASES:
        names = made.results.names(case)
        names.sort(key=lambda name: (not is_ceiling(name), made.results.best(case, name)))
        found += [_measured(made, case, name) for name in names]
        if names or any(skipped[0] == case for skipped in made.results.skipped):
            found += _others(made, case, set(names))
    return found


def _kind(name: str) -> str:
    if is_ceiling(name):
        return "ceiling"
    return "mfload" if name.startswith("mfload-") else "peer"


def _measured(made: Bench, case: str, name: str) -> Row:
    results = made.results
    best = results.best(case, name)
    nbytes = made.chosen.subject.nbytes
    speed = nbytes / 1e9 / best if best else None
    ratio = results.ratio(case, name)
    samples = [s for s in results.samples if s["case"] == case and s["name"] == name]
    explained: list[dict[str, Any]] = [s["explained"] for s in samples if s.get("explained")]
    return Row(
        case,
        name,
        label(name),
        _kind(name),
        None if is_ceiling(name) else loaders.find(name).framework,
        measured=True,
        rounds=len(samples),
        best_s=best,
        median_s=results.median(case, name),
        gb_per_s=speed,
        over_ceiling=ratio,
        cpu_s=results.best(case, name, "cpu_s"),
        peak_over_bytes=None if _keeps_nothing(name) else max(s["peak_over"] for s in samples),
        engines=tuple(dict.fromkeys(leg[0] for each in explained for leg in each["route"])),
        explanation=_sentence(name, explained, speed, ratio),
    )


def _keeps_nothing(name: str) -> bool:
    return is_ceiling(name) and PATTERNS[name].reuse


def _sentence(
    name: str, explained: list[dict[str, Any]], speed: float | None, ratio: float | None
) -> str:
    """How it was done, GB/s, and the ratio to the ceiling."""
    figures = [] if speed is None else [f"{speed:.2f} GB/s"]
    if ratio is not None:
        figures.append(f"{ratio:.2f} of the ceiling's time")
    return "; ".join([_how(name, explained), ", ".join(figures), *_notes(explained)])


def _how(name: str, explained: list[dict[str, Any]]) -> str:
    if is_ceiling(name):
        kept = "keeps nothing of it" if _keeps_nothing(name) else "keeps all of it"
        return f"reads the bytes as fast as this machine gives them, {kept}"
    if not explained:
        mapped = loaders.find(name).mapped
        return "maps the files, copies nothing" if mapped else "as its own documentation calls it"
    counted: Counter[tuple[str, str]] = Counter()
    for each in explained:
        counted.update({(engine, why): files for engine, why, files in each["route"]})
    most = [leg for leg, _ in counted.most_common(2)]
    threads = max(each["threads"] for each in explained)
    ways = " and ".join(f"{engine} ({why})" for engine, why in most) or "nothing to read"
    return f"{ways}, {threads} thread{'s' if threads > 1 else ''}"


def _notes(explained: list[dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(note for each in explained for note in each["notes"]))[:2]


def _others(made: Bench, case: str, measured: set[str]) -> list[Row]:
    """Those that have no figures, each with the reason."""
    failed = {name: why for where, name, why in made.results.skipped if where == case}
    reasons = {each.loader.name: each.why_not for each in made.entrants}
    reasons |= failed
    return [
        Row(
            case,
            name,
            label(name),
            _kind(name),
            None if is_ceiling(name) else loaders.find(name).framework,
            measured=False,
            explanation=why or "not measured",
        )
        for name, why in reasons.items()
        if name not in measured
    ]
