"""A run's figures as Markdown, to be included in a page."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks import described, markdown
from benchmarks.compared import LOADERS
from benchmarks.markdown import Row
from benchmarks.results import MIB, Results, is_ceiling, label
from benchmarks.targets import Target


def _name(name: str) -> str:
    """A name for a row: ours stand out, ceilings are set apart."""
    text = label(name)
    if is_ceiling(name):
        return f"*{text}*"
    return f"**{text}**" if name.startswith("mfload") else text


def conditions(results: Results) -> str:
    """What was measured on what, in one paragraph."""
    m, run, found = results.machine, results.run, results.checkpoints["large"]
    starts = ", ".join(str(start) for start in found["starts"])
    host = " (its host may still hold the file)" if m["virtual"] else ""
    return (
        f"{described.sentence(m)}. "
        f"{found['nbytes'] / 1e9:.2f} GB of bf16, {found['tensors']} tensors in "
        f"{len(found['starts'])} files, shapes {found['drawn']}, data starting at {starts} mod 64, "
        f"seed {run['seed']}. Each figure from {run['rounds']} rounds, a fresh process each, "
        f"imports and a first tiny load done, loaders taking turns, every page touched. "
        f"Warm: all of it in the page cache. Cold: none of it in this machine's page cache{host}. "
        f"{described.versions_sentence(m)}."
    )


def targets(judged: Sequence[Target]) -> str:
    """What was to be reached, and what was."""

    def row(target: Target) -> Row:
        sign = "≥" if target.at_least else "≤"
        unit = target.unit
        found = "–" if target.found is None else f"{target.found:.2f}{unit}"
        return target.what, f"{sign} {target.limit:g}{unit}", found, target.verdict

    return markdown.table(("target", "to reach", "found", ""), map(row, judged))


def _speed_row(results: Results, case: str, name: str) -> Row:
    ratio = results.ratio(case, name)
    best = results.best(case, name)
    nbytes = results.checkpoints["large"]["nbytes"]
    return (
        _name(name),
        markdown.seconds(best),
        markdown.seconds(results.median(case, name)),
        markdown.times(ratio),
        "–" if not best else f"{nbytes / 2**30 / best:.1f}",
        markdown.seconds(results.best(case, name, "cpu_s")),
    )


def speed(results: Results, case: str) -> str:
    """Times of a case, the ceilings first, then the fastest loader to the slowest."""
    names = results.names(case)

    def order(name: str) -> tuple[bool, float]:
        return not is_ceiling(name), results.best(case, name) or 0.0

    head = ("loader", "best s", "median s", "÷ ceiling", "GiB/s", "CPU s")
    names.sort(key=order)
    return markdown.table(head, (_speed_row(results, case, name) for name in names))


def small(results: Results) -> str:
    """CPU time a tensor of many small ones."""
    tensors = results.run["small_tensors"]

    def micro(value: float | None) -> str:
        return "–" if value is None else f"{value / tensors * 1e6:.1f}"

    rows = [
        (
            _name(name),
            LOADERS[name].framework or "",
            micro(results.best("small", name, "cpu_load_s")),
            micro(results.median("small", name, "cpu_load_s")),
        )
        for name in results.names("small")
    ]
    return markdown.table(("loader", "framework", "best CPU µs a tensor", "median"), rows)


def memory(results: Results) -> str:
    """Peaks over the data: resident memory as it is, and the private part of it."""
    data = results.checkpoints["large"]["nbytes"]
    cases = ("memory", "memory-cold")
    names = dict.fromkeys(name for case in cases for name in results.names(case))

    def row(name: str) -> Row:
        cells = [_name(name)]
        for case in cases:
            peak = results.worst([case], name, "peak_over")
            private = results.worst([case], name, "anon_peak")
            cells.append("–" if peak is None else f"{peak / MIB:.0f}")
            cells.append("–" if private is None else f"{(private - data) / MIB:.0f}")
        return cells

    head = ("loader", "warm MiB", "private only", "cold MiB", "private only")
    return markdown.table(head, (row(name) for name in names if not is_ceiling(name)))


def page(results: Results, judged: Sequence[Target]) -> str:
    """Everything that was measured, as a page."""
    cases = {sample["case"] for sample in results.samples}
    parts = ["# Tables of loading", conditions(results), "## Targets", targets(judged)]
    if "warm" in cases:
        parts += ["## Warm", speed(results, "warm")]
    if "cold" in cases:
        parts += ["## Cold", speed(results, "cold")]
    if "small" in cases:
        parts += ["## Many small tensors", small(results)]
    if cases & {"memory", "memory-cold"}:
        said = (
            "Peak of resident memory less what was resident before and less the data, the worst "
            "sample. Pages of the page cache that a loader maps count as resident; *private only* "
            "leaves them out, so that a loader which copies nothing shows the data as saved."
        )
        parts += ["## Memory", said, memory(results)]
    if results.skipped:
        lines = (f"- {case}: {name}: {reason}" for case, name, reason in results.skipped)
        parts += ["## Not measured", "\n".join(lines)]
    return "\n\n".join(parts) + "\n"
