"""The figures of loading onto a GPU: targets, tables, plot."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from benchmarks import (
    described,
    gpu_facts,
    gpu_seams,
    gpu_steps,
    gpu_tasks,
    markdown,
    plot,
    tables,
    timings,
)
from benchmarks.gpu_ceilings import DEVICE_COPY, PEAK, is_ceiling
from benchmarks.gpu_steps import (
    COLD,
    DEVICE,
    MODEL,
    OTHERS,
    OTHERS_COLD,
    RIVALS,
    SEAMS,
    TITLES,
    WARM,
)
from benchmarks.gpu_tasks import Way
from benchmarks.results import Results
from benchmarks.targets import Target

REHEARSAL = "A rehearsal without a GPU: only the plumbing was tried, and no figure means anything."
_FLOORS = {
    COLD.name: (COLD.name, ("direct", "cached")),
    OTHERS_COLD.name: (COLD.name, ("direct", "cached")),
    OTHERS.name: (WARM.name, (PEAK,)),
    DEVICE.name: (DEVICE.name, (DEVICE_COPY,)),
}
"""Where the ceiling of a case was measured, and what counts as one; else the peak of the case."""
_NAMES = {"cupy": "CuPy", "torch": "PyTorch", "jax": "JAX", "numpy": "NumPy"}


def real(results: Results) -> bool:
    """Whether there was a GPU."""
    return bool(results.run["gpu"])


def floor(results: Results, case: str) -> tuple[str, float] | None:
    """What cannot be beaten in a case, and its seconds."""
    where, kinds = _FLOORS.get(case, (case, (PEAK,)))
    found = {
        name: seconds
        for name in results.names(where)
        if name.startswith(kinds)
        for seconds in [results.best(where, name)]
        if seconds
    }
    return min(found.items(), key=lambda pair: pair[1], default=None)


def share(results: Results, case: str, name: str) -> float | None:
    """The part of the floor's speed that was reached."""
    least, best = floor(results, case), results.best(case, name)
    return least[1] / best if least and best else None


def _over(results: Results, case: str, ours: str, theirs: str) -> float | None:
    best, other = results.best(case, ours), results.best(case, theirs)
    return best / other if best and other else None


def _all(results: Results) -> Iterator[Target]:
    for way, what, limit in (
        (Way("cupy"), "", 0.9),
        (Way("torch"), "", 0.9),
        (Way("jax", again=0), ", first load of a process", 0.75),
        (Way("jax", again=1), ", next load", 0.88),
    ):
        text = f"warm into {_NAMES[way.framework]}{what}: share of the pinned peak"
        yield Target(text, limit, share(results, WARM.name, way.name), "", at_least=True)
    found = share(results, COLD.name, Way("torch").name)
    text = "cold into PyTorch: share of the best file ceiling"
    yield Target(text, 0.95, found, "", at_least=True)
    for what, label in gpu_seams.WHAT.items():
        case = MODEL if what == "transformers" else SEAMS
        theirs, ours = gpu_seams.names(what)
        found = _over(results, case.name, ours, theirs)
        yield Target(f"{label}: of the library's own time", 1, found)
    found = share(results, DEVICE.name, Way("torch", served="copied", again=1).name)
    text = "device to device into PyTorch, next load: share of a raw device copy"
    yield Target(text, 0.8, found, "", at_least=True)
    found = results.best(DEVICE.name, Way("torch", served="mapped").name)
    yield Target("PyTorch maps what a seed holds on the device, first load", 1, found, " s")
    for case in (OTHERS, OTHERS_COLD):
        for name in RIVALS:
            found = _over(results, case.name, name, Way("torch").name)
            label = gpu_tasks.label(name)
            if found is not None:
                where = "warm" if case == OTHERS else "cold"
                yield Target(f"{where}: faster than {label}", 1, found, at_least=True)


def judge(results: Results) -> list[Target]:
    """Every target with what was found; none was, where there was no GPU."""
    judged = list(_all(results))
    if real(results):
        return judged
    return [Target(t.what, t.limit, None, t.unit, at_least=t.at_least) for t in judged]


targets = tables.targets


def _names(results: Results, case: str) -> list[str]:
    """Ceilings, then from the fastest to the slowest; seams in their own order."""
    names = results.names(case)
    if case in (SEAMS.name, MODEL.name):
        pairs = [name for what in gpu_seams.WHAT for name in gpu_seams.names(what)]
        return [name for name in pairs if name in names]
    return sorted(names, key=lambda n: (not is_ceiling(n), results.best(case, n) or 0.0))


def _nbytes(results: Results, case: str) -> int:
    subjects = dict.fromkeys([SEAMS.name, COLD.name, OTHERS_COLD.name], "single")
    subjects |= {MODEL.name: "model", gpu_steps.MANY.name: "many"}
    return results.checkpoints[subjects.get(case, "large")]["nbytes"]


def _row(results: Results, case: str, name: str) -> list[str]:
    best = results.best(case, name) or 0.0
    label = gpu_tasks.label(name)
    ours = gpu_tasks.is_ours(name) or (gpu_seams.is_seam(name) and gpu_seams.is_ours(name))
    return [
        f"**{label}**" if ours else f"*{label}*" if is_ceiling(name) else label,
        markdown.seconds(best),
        markdown.seconds(results.median(case, name)),
        f"{_nbytes(results, case) / 1e9 / best:.2f}" if best else "–",
        _beside(results, case, name),
        markdown.seconds(results.best(case, name, "cpu_s")),
        str(len(results.values(case, name, "seconds"))),
    ]


def _beside(results: Results, case: str, name: str) -> str:
    """The share of the ceiling's speed; of a seam, of the library's own time."""
    if not gpu_seams.is_seam(name):
        return markdown.times(share(results, case, name))
    theirs = gpu_seams.names(name.split(":")[1])[0]
    return markdown.times(_over(results, case, name, theirs))


def _table(results: Results, case: str) -> str:
    of = "of the pinned peak"
    if case in (SEAMS.name, MODEL.name):
        of = "of their time"
    elif case in (COLD.name, OTHERS_COLD.name):
        of = "of the best file ceiling"
    elif case == DEVICE.name:
        of = "of a raw copy"
    head = ("", "best s", "median s", "GB/s", of, "CPU s", "rounds")
    return markdown.table(head, (_row(results, case, name) for name in _names(results, case)))


def _ways(results: Results) -> list[str]:
    """How mfload says that it went about each load, the last of a name."""
    said: dict[tuple[str, str], str] = {}
    for sample in results.samples:
        if explained := sample.get("explained"):
            route = "; ".join(f"{engine} ({why})" for engine, why, _ in explained["route"])
            notes = "".join(f"; {note}" for note in explained["notes"])
            label = gpu_tasks.label(sample["name"])
            line = f"- {sample['case']}, {label}: {route}, {explained['threads']} readers{notes}"
            said[sample["case"], sample["name"]] = line
    return ["### How mfload went about it", "\n".join(said.values())] if said else []


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
    m, run = results.machine, results.run
    host = " (its host may still hold the file)" if m["virtual"] else ""
    files = "; ".join(
        f"{name}: {found['nbytes'] / 1e9:.2f} GB of bf16, {found['tensors']} tensors in "
        f"{found['files']} files, {found['drawn']}"
        for name, found in results.checkpoints.items()
    )
    busy = ", ".join(f"{case} {part:.0%}" for case, part in run["busy_share"].items())
    return (
        f"{gpu_facts.sentence(run['gpu'])}. {described.sentence(m)}, {run['cores']} of the cores "
        f"usable. Files: {files or 'none'}. Rounds as the tables say, taking turns; imports and a "
        f"first tiny load done; seed {run['seed']}, {run['seconds']:.0f} s in all; busy with other "
        f"things before: {busy or 'not looked at'}. Cold: none of it in this machine's page "
        f"cache{host}. {described.versions_sentence(m)}."
    )


def page(results: Results) -> str:
    """The figures as Markdown, under headings of the third level."""
    found = results.run["trials"]
    parts = [] if real(results) else [f"**{REHEARSAL}**"]
    parts += [_conditions(results), "### Targets", targets(judge(results))]
    for case in TITLES:
        if case in timings.cases(results):
            parts += [f"### {TITLES[case]}", _table(results, case)]
    for kind, title in (("check", "Is it right?"), ("question", "Questions")):
        if any(each["kind"] == kind for each in found):
            parts += [f"### {title}", trials(found, kind)]
    parts += _ways(results)
    if results.run["left_out"]:
        lines = "\n".join(f"- {what}" for what in results.run["left_out"])
        parts += ["### Left out for want of time", lines]
    return "\n\n".join([*parts, *timings.skipped(results)])


def has_front(results: Results) -> bool:
    """Whether it has what the front page shows."""
    return real(results) and results.best(WARM.name, Way("torch").name) is not None


def front(results: Results) -> str:
    """The table of the front page: seconds from a full page cache and from an empty one."""
    rows: list[list[str]] = []
    for name in (PEAK, *(Way(framework).name for framework in ("cupy", "torch", "jax"))):
        if results.best(WARM.name, name) is not None:
            ours = gpu_tasks.is_ours(name)
            more = (
                [gpu_tasks.way(name)._replace(again=n).name for n in (0, 1)] if ours else ["", ""]
            )
            rows.append([_front_label(name), *_figures(results, WARM.name, name),
                         *(_figures(results, WARM.name, each)[0] for each in more),
                         _speed(results, COLD.name, name)])  # fmt: skip
    for name in RIVALS:
        if results.best(OTHERS.name, name) is not None:
            rows.append([_front_label(name), *_figures(results, OTHERS.name, name), "–", "–",
                         _speed(results, OTHERS_COLD.name, name)])  # fmt: skip
    nbytes = results.checkpoints["large"]["nbytes"]
    rounds = len(results.values(WARM.name, Way("torch").name, "seconds"))
    head = ("", "warm, best s", "median s", "of the peak", "a process' first load s",
            "next load s", "cold GB/s")  # fmt: skip
    return (
        f"{nbytes / 1e9:.1f} GB of bf16 onto one {results.run['gpu']['name']}, "
        f"{results.run['cores']} cores, {results.machine['date']}; seconds, up to {rounds} rounds "
        f"in fresh processes:\n\n{markdown.table(head, rows)}"
    )


def summary(results: Results, name: str) -> str:
    """The front page's table, the targets, and the plot, for the page about GPUs.

    Args:
        results: The run.
        name: Of its files, without their suffix.
    """
    alt = f"Seconds of each step on one {results.run['gpu']['name']}"
    return "\n\n".join(
        [
            f"![{alt}]({name}.png)",
            front(results),
            targets(judge(results)),
            f"[All figures]({name}.md).",
        ]
    )


def _front_label(name: str) -> str:
    if name == PEAK:
        return "*copies of page-locked memory*"
    label = gpu_tasks.label(name)
    return f"mfload into {_NAMES[gpu_tasks.framework(name)]}" if gpu_tasks.is_ours(name) else label


def _figures(results: Results, case: str, name: str) -> list[str]:
    best = results.best(case, name)
    if best is None:
        return ["–", "–", "–"]
    middle, part = results.median(case, name), share(results, case, name)
    return [markdown.seconds(best), markdown.seconds(middle), markdown.times(part)]


def _speed(results: Results, case: str, name: str) -> str:
    best = results.best(case, name)
    return f"{_nbytes(results, case) / 1e9 / best:.2f}" if best else "–"


def draw(results: Results, path: Path) -> None:
    """Draw a panel a case: seconds."""
    cases = [case for case in TITLES if case in timings.cases(results)]
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
    m = results.machine
    onto = gpu_facts.sentence(results.run["gpu"]) if real(results) else "host arrays"
    title = (
        f"bf16 onto {onto}; {m['cpu']}, {results.run['cores']} cores, {m['file_system']}; bar: "
        f"best, tick: median; ×: its time over the ceiling's"
    )
    plot.finish(drawn, title if real(results) else f"{REHEARSAL} {title}", path)
