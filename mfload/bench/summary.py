"""A bench in words and as plain data: what was measured on what, and what may have disturbed it."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from mfload.bench import machine
from mfload.bench.measuring import Bench
from mfload.bench.results import Results, rounded
from mfload.bench.rows import rows

SCHEMA = 1
"""Counts up when a field of the JSON changes its meaning or goes."""
_BUSY = 0.1


def conditions(made: Bench) -> list[str]:
    """What was measured on what, and what may have disturbed it: a sentence each."""
    results, what = made.results, made.chosen.subject
    m = results.machine
    said = [
        f"{machine.sentence(m)}.",
        f"{machine.versions_sentence(m)}.",
        f"{what.nbytes / 1e9:.3f} GB in {what.tensors} tensors of {len(what.files)} files; "
        f"rounds: {results.run['rounds']}, a fresh process for each sample, imports and a first "
        "tiny load done, every page touched.",
        *(f"{note[0].upper()}{note[1:]}." for note in made.chosen.notes),
    ]
    said += [f"{case}: not possible here, because {why}." for case, why in made.impossible.items()]
    if m["virtual"] and results.names("cold"):
        said.append("This is a virtual machine: its host may still hold what is cold here.")
    said += _noise(results)
    return said


def _noise(results: Results) -> list[str]:
    busy: dict[str, float] = results.run["busy_share"]
    loud = ", ".join(f"{share:.0%} ({case})" for case, share in busy.items() if share > _BUSY)
    load = f"load average {results.machine['load_average']}"
    if not loud:
        return [f"The machine was quiet ({load} at the start)."]
    return [f"The machine was busy with other things: {loud}; {load} at the start. Figures may "
            "be worse than it can do; the best suffers least."]  # fmt: skip


def as_dict(made: Bench) -> dict[str, Any]:
    """Everything as plain data, for JSON.

    Returns:
        `schema`, `machine`, `run`, `checkpoint`, `conditions` (sentences), `impossible` (why a
        case could not be measured), `rows`, `samples` and `failed`.
    """
    results = made.results
    whole: dict[str, Any] = rounded(
        {
            "schema": SCHEMA,
            "machine": results.machine,
            "run": results.run,
            "checkpoint": results.checkpoints["large"],
            "conditions": conditions(made),
            "impossible": made.impossible,
            "rows": [asdict(row) for row in rows(made)],
            "samples": results.samples,
            "failed": [
                {"case": case, "name": name, "why": why} for case, name, why in results.skipped
            ],
        }
    )
    return whole


def title(made: Bench) -> str:
    """The line above a picture."""
    m, what = made.results.machine, made.chosen.subject
    return (
        f"{what.nbytes / 1e9:.2f} GB in {what.tensors} tensors on {m['cpu']}, {m['cores']} cores, "
        f"{m['file_system']}; bar: best of {made.results.run['rounds']}, tick: median"
    )
