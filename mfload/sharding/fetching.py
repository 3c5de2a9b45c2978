"""Fetching: the needs of this process become arrays, read here or exchanged with the others."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mfload.loading import Loader
from mfload.placement import Need
from mfload.report import Report


def fetch(
    needs: Mapping[int, Sequence[Need]],
    rank: int,
    loader: Loader,
    *,
    report: Report | None = None,
    advance: Callable[[int], None] | None = None,
) -> list[tuple[Any, ...]]:
    """Loads what this process needs.

    Args:
        needs: What each process needs, by its number: the same on every process.
        rank: This process.
        loader: Loads into the devices of this process.
        report: Filled.
        advance: Told of progress, in bytes.

    Returns:
        For each need of this process an array for each of its devices.
    """
    return loader.load(needs[rank], report=report, advance=advance)
