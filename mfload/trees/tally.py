"""Tally: one report of the several fetches that make up a load into a target."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from mfload.report import Report

_MOST = ("peak_bytes", "device_peak_bytes", "processes", "threads")


def add(total: Report, one: Report) -> None:
    """Adds what happened in a fetch.

    Args:
        total: What happened so far.
        one: What happened since.
    """
    for name in (field.name for field in fields(Report)):
        setattr(total, name, _added(name, getattr(total, name), getattr(one, name)))


def _added(name: str, before: Any, now: Any) -> Any:
    if isinstance(before, dict):
        return {key: before.get(key, 0) + now.get(key, 0) for key in {**before, **now}}
    if isinstance(before, tuple):
        return tuple(dict.fromkeys((*before, *now)))
    if isinstance(before, int | float) and not isinstance(before, bool):
        return max(before, now) if name in _MOST else before + now
    return now or before
