"""Tally: one report of the several fetches that make up a load into a target."""

from __future__ import annotations

from mfload.report import Report

_SUMS = ("read_bytes", "over_read_bytes", "mapped_bytes", "exchanged_bytes")


def add(total: Report, one: Report) -> None:
    """Adds what happened in a fetch.

    Args:
        total: What happened so far; results are for others to count.
        one: What happened since.
    """
    for name in _SUMS:
        # Not every figure is there yet in each version of the report.
        setattr(total, name, getattr(total, name) + getattr(one, name))
    total.peak_bytes = max(total.peak_bytes, one.peak_bytes)
    total.threads = max(total.threads, one.threads)
    total.framework = one.framework or total.framework
    for stage, seconds in one.stages.items():
        total.stages[stage] = total.stages.get(stage, 0.0) + seconds
    total.route = tuple(dict.fromkeys((*total.route, *one.route)))
    total.notes = tuple(dict.fromkeys((*total.notes, *one.notes)))
