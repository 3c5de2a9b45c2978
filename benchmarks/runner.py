"""Runs measurements: a fresh process each, loaders taking turns, the machine prepared before each.

What is noise on one machine at one time then falls on all loaders alike, and adds, so that the best
of several rounds says most.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks import memory, pagecache
from benchmarks.checkpoint import Checkpoint
from benchmarks.child import Job
from benchmarks.process import Child, ChildError

Sample = dict[str, Any]
"""A child's result, with `case`, `name`, `round` and `cached` (the page cache's share before)."""


@dataclass(frozen=True, slots=True)
class Case:
    """What is measured under which conditions.

    Args:
        name: warm, cold, small, memory or memory-cold.
        cold: Whether the page cache is emptied of the checkpoint before each sample, or filled.
        primed: Whether another process touches memory before each sample.
        watched: Whether private memory is watched meanwhile, which disturbs the time.
    """

    name: str
    cold: bool = False
    primed: bool = True
    watched: bool = False


def _job(name: str, checkpoint: Checkpoint, warmup: Checkpoint) -> Job:
    """The job of loading a checkpoint."""
    return {
        "name": name,
        "paths": list(checkpoint.paths),
        "warmup": list(warmup.paths),
        "nbytes": checkpoint.nbytes,
        "tensors": checkpoint.tensors,
        "page_sum": checkpoint.page_sum,
        "file_sum": checkpoint.file_sum,
    }


def sample(name: str, case: Case, checkpoint: Checkpoint, warmup: Checkpoint) -> Sample:
    """Measure once.

    Args:
        name: Of a loader or of a ceiling's pattern.
        case: Under which conditions.
        checkpoint: What to load.
        warmup: A tiny checkpoint to load before the clock starts.

    Returns:
        The sample.

    Raises:
        ChildError: The measuring process failed, or hung.
    """
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        child = Child(name, log)
        try:
            child.get_ready(_job(name, checkpoint, warmup))
            # The child has imported all it needs: what is prepared now is fresh when it starts.
            prepare = pagecache.drop if case.cold else pagecache.warm
            prepare(checkpoint.paths)
            if case.primed:
                memory.prime((256 << 20) + checkpoint.nbytes * 3 // 2)
            cached = prepare(checkpoint.paths)  # nothing to do, unless memory ran short meanwhile
            result = child.run(watched=case.watched)
        finally:
            child.end()
    return {"case": case.name, "name": name, "cached": cached, **result}


def rounds(
    names: Sequence[str],
    case: Case,
    checkpoint: Checkpoint,
    warmup: Checkpoint,
    count: int,
    rng: random.Random,
) -> Iterator[Sample | tuple[str, str]]:
    """Measure several rounds, each taking every name once, in an order of its own.

    Args:
        names: Of loaders and ceilings.
        case: Under which conditions.
        checkpoint: What to load.
        warmup: A tiny checkpoint to load before each clock starts.
        count: How many rounds.
        rng: What the orders follow from.

    Yields:
        Samples; or (name, reason) for one that failed, which is then left out.
    """
    left = list(names)
    for number in range(count):
        rng.shuffle(left)
        for name in list(left):
            try:
                yield {"round": number, **sample(name, case, checkpoint, warmup)}
            except ChildError as error:
                left.remove(name)
                yield name, str(error)
