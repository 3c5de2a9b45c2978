"""The figures of loading onto a GPU: targets, tables, plot."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from benchmarks import described, gpu_facts, gpu_tasks, markdown, plot, tables, timings
from benchmarks.gpu_ceilings import PEAK, is_ceiling
from benchmarks.gpu_plan import FAST, PLAIN
from benchmarks.gpu_tasks import Way
from benchmarks.results import Results
from benchmarks.targets import Target

TITLES = {
    "warm": "Warm: all of it in the page cache",
    "cold": "Cold: none of it in the page cache",
    "sweep": "Ring and readers, warm",
    "sweep-cold": "Readers, cold",
}
REHEARSAL = "A rehearsal without a GPU: only the plumbing was tried, and no figure means anything."


def real(results: Results) -> bool:
    """Whether there was a GPU."""
    return bool(results.run["gpu"])


def floor(results: Results, case: str) -> tuple[str, float] | None:
    """What cannot be beaten in a case, and its seconds: copies when warm, the file when cold."""
    kind, where = ("direct", "cold") if case.endswith("cold") else (PEAK, "warm")
    found = {
        name: seconds
        for name in results.names(where)
        if name.startswith(kind)
        for seconds in [results.best(where, name)]
        if seconds
    }
    return min(found.items(), key=lambda pair: pair[1], default=None)


def share(results: Results, case: str, name: str) -> float | None:
    """The part of the floor's speed that was reached."""
    least, best = floor(results, case), results.best(case, name)
    return least[1] / best if least and best else None


def _faster(results: Results, case: str, ours: str, theirs: str) -> float | None:
    best, other = results.best(case, ours), results.best(case, theirs)
    return other / best if best and other else None


def _all(results: Results) -> Iterator[Target]:
    cores = results.run["cores"]
    for framework in ("torch", "jax", "cupy"):
        what = f"warm, {framework}: share of the pinned host-to-device peak, {cores} cores"
        found = share(results, "warm", Way(framework).name)
        yield Target(what, 0.85, found, "", at_least=True)
    torch = Way("torch").name
    for what, peer, limit in (
        ("safetensors.torch.load_file", PLAIN, 5),
        ("fastsafetensors", FAST, 2),
    ):
        found = _faster(results, "warm", torch, peer)
        yield Target(f"warm, torch: faster than {what}", limit, found, at_least=True)
    found = share(results, "cold", torch)
    yield Target("cold, torch: share of the file ceiling", 0.9, found, "", at_least=True)


def judge(results: Results) -> list[Target]:
    """Every target with what was found; none was, where there was no GPU."""
    judged = list(_all(results))
    if real(results):
        return judged
    return [Target(t.what, t.limit, None, t.unit, at_least=t.at_least) for t in judged]


targets = tables.targets


def _names(results: Results, case: str) -> list[str]:
    """Ceilings, then from the fastest to the slowest; a sweep in its own order."""
    names = results.names(case)
    if case.startswith("sweep"):
        return names
    return sorted(names, key=lambda n: (not is_ceiling(n), results.best(case, n) or 0.0))


def _row(results: Results, case: str, name: str) -> list[str]:
    best = results.best(case, name) or 0.0
    part, peer = share(results, case, name), results.best(case, PLAIN)
    nbytes = results.checkpoints["large"]["nbytes"]
    label = gpu_tasks.label(name)
    return [
        f"**{label}**" if gpu_tasks.is_ours(name) else f"*{label}*" if is_ceiling(name) else label,
        markdown.seconds(best),
        markdown.seconds(results.median(case, name)),
        f"{nbytes / 1e9 / best:.2f}" if best else "–",
        markdown.times(part),
        "–" if not best or peer is None else f"{peer / best:.1f}",
        markdown.seconds(results.best(case, name, "cpu_s")),
        str(len(results.values(case, name, "seconds"))),
    ]


def _table(results: Results, case: str) -> str:
    of = "file ceiling" if case.endswith("cold") else "pinned peak"
    head = ("", "best s", "median s", "GB/s", f"of the {of}", "times faster than safetensors",
            "CPU s", "rounds")  # fmt: skip
    return markdown.table(head, (_row(results, case, name) for name in _names(results, case)))


def _ways(results: Results) -> list[str]:
    """How mfload says that it went about each load."""
    said: dict[str, None] = {}
    for sample in results.samples:
        explained = sample.get("explained")
        if explained:
            route = "; ".join(f"{engine} ({why})" for engine, why, _ in explained["route"])
            notes = "".join(f"; {note}" for note in explained["notes"])
            label = gpu_tasks.label(sample["name"])
            said[f"- {sample['case']}, {label}: {route}, {explained['threads']} readers{notes}"] = (
                None
            )
    return ["### How mfload went about it", "\n".join(said)] if said else []


def trials(found: Iterable[dict[str, Any]], kind: str) -> str:
    """What came of the checks, or of the questions, as a list; what went wrong comes first."""
    calm = ("pass", "skip", "no")

    def line(each: dict[str, Any]) -> str:
        status = each["status"]
        shown = status if status in calm else f"**{status}**"
        return f"- `{each['name']}`: {shown}: {' '.join(each['said'].split())}"

    chosen = [each for each in found if each["kind"] == kind]
    chosen.sort(key=lambda each: each["status"] in calm)
    return "\n".join(map(line, chosen))


def _conditions(results: Results) -> str:
    m, run, found = results.machine, results.run, results.checkpoints["large"]
    host = " (its host may still hold the file)" if m["virtual"] else ""
    starts = ", ".join(map(str, found["starts"]))
    busy = ", ".join(f"{case} {part:.0%}" for case, part in run["busy_share"].items())
    return (
        f"{gpu_facts.sentence(run['gpu'])}. {described.sentence(m)}, {run['cores']} of the cores "
        f"usable. {found['nbytes'] / 1e9:.2f} GB of bf16, {found['tensors']} tensors in "
        f"{found['files']} files, shapes {found['drawn']}, data starting at {starts} mod 64. "
        f"Rounds as the tables say, taking turns, a fresh process each, imports and a first tiny "
        f"load done; seed {run['seed']}, {run['seconds']:.0f} s of {run['minutes']:g} min used; "
        f"busy with other things before: {busy or 'not looked at'}. Cold: none of it in this "
        f"machine's page cache{host}. {described.versions_sentence(m)}."
    )


def page(results: Results) -> str:
    """The figures as Markdown, under headings of the third level."""
    found = results.run["trials"]
    parts = [] if real(results) else [f"**{REHEARSAL}**"]
    parts += [_conditions(results), "### Targets", targets(judge(results))]
    for case in timings.cases(results):
        parts += [f"### {TITLES[case]}", _table(results, case)]
    for kind, title in (("check", "Is it right?"), ("question", "Open questions")):
        if any(each["kind"] == kind for each in found):
            parts += [f"### {title}", trials(found, kind)]
    parts += _ways(results)
    if results.run["left_out"]:
        lines = "\n".join(f"- {what}" for what in results.run["left_out"])
        parts += ["### Left out for want of time", lines]
    return "\n\n".join([*parts, *timings.skipped(results)])


def draw(results: Results, path: Path) -> None:
    """Draw a panel a case: seconds."""
    cases = timings.cases(results)
    if not cases:
        return
    drawn, panels = plot.figure([len(results.names(case)) for case in cases])
    for axes, case in zip(panels, cases, strict=True):
        labels = {name: gpu_tasks.label(name) for name in _names(results, case)}
        least = floor(results, case)
        ceilings = [name for name in labels if is_ceiling(name)]
        unit = least[0] if least and least[0] in labels else None
        bars = timings.bars(results, case, labels, ceilings, unit)
        limit = max(bar.middle for bar in bars) * 1.05
        if len(bars) > 2:  # The one that takes longest would leave the others no room.
            limit = min(limit, 3 * sorted(bar.middle for bar in bars)[-2])
        plot.panel(axes, bars, title=TITLES[case], unit="seconds", limit=limit)
    m, found = results.machine, results.checkpoints["large"]
    onto = gpu_facts.sentence(results.run["gpu"]) if real(results) else "host arrays"
    title = (
        f"{found['nbytes'] / 1e9:.2f} GB of bf16 onto {onto}; {m['cpu']}, {results.run['cores']} "
        f"cores, {m['file_system']}; bar: best, tick: median; ×: its time over the ceiling's"
    )
    plot.finish(drawn, title if real(results) else f"{REHEARSAL} {title}", path)
