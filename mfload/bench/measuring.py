"""One bench: a checkpoint, this machine's ceilings, and loaders, cold and warm."""

from __future__ import annotations

import json
import random
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from mfload import errors
from mfload.bench import ceilings, extents, machine, pagecache, subject, sums
from mfload.bench.options import CASES, Entrant, Options, entrants
from mfload.bench.results import Results
from mfload.bench.runner import Bed, Case, rounds, sample
from mfload.bench.subject import Chosen
from mfload.formats import checkpoint
from mfload.io import probes

_KEPT = 2
"""Of the patterns that were tried, how many take turns with the loaders."""

Watch = Callable[[int, int, str], None]
"""Told of progress: measurements done, measurements in all, and what is measured now."""


@dataclass
class Bench:
    """What was measured.

    Attributes:
        results: Machine, samples, and what failed on the way.
        chosen: What was loaded.
        entrants: Every loader asked for.
        impossible: Why a case could not be measured, by its name.
    """

    results: Results
    chosen: Chosen
    entrants: list[Entrant]
    impossible: dict[str, str] = field(default_factory=dict[str, str])


def bench(path: str, options: Options, watch: Watch = lambda done, total, what: None) -> Bench:
    """Measures; takes seconds to minutes and writes nothing but a tiny file elsewhere.

    Args:
        path: A file, a directory, or an index.
        options: What to measure.
        watch: Told of progress.

    Returns:
        The samples. What could not be measured is in there, with the reason.

    Raises:
        MfloadError: The checkpoint can't be read, or an option makes no sense.
    """
    if not sys.platform.startswith("linux"):
        raise errors.DeviceError(
            "mfload bench needs Linux: no other system says what it caches",
            expected="linux",
            found=sys.platform,
        )
    watch(0, 0, "reading headers")
    chosen = subject.choose(path, options.names, options.max_bytes)
    watch(0, 0, "reading the data once")
    chosen = _summed(chosen)
    what = chosen.subject
    with tempfile.TemporaryDirectory(prefix="mfload-bench-") as folder:
        bed = Bed(
            [_write_tiny(Path(folder))],
            timeout=options.timeout,
            threads=options.threads,
            explain=True,
        )
        made = Bench(
            Results(machine.describe(what.files[0]), _run_of(options), _checkpoint_of(chosen)),
            chosen,
            entrants(options, everything=what.names is None),
        )
        _Run(made, options, bed, watch).all()
    return made


def _summed(chosen: Chosen) -> Chosen:
    """The same with the sums that touching must yield, where all loaders hold the same bytes."""
    what = chosen.subject
    index, _ = checkpoint.read(what.path)
    rows = [index[name] for name in (what.names or index)]
    found = sums.read(index.files, rows, what.extents)
    tensors = found.tensors if chosen.known else None
    return chosen._replace(subject=replace(what, page_sum=tensors, file_sum=found.extents))


def _run_of(options: Options) -> dict[str, object]:
    seed = random.SystemRandom().randrange(2**32) if options.seed is None else options.seed
    return {
        "seed": seed,
        "rounds": options.rounds,
        "threads": options.threads,
        "quick": options.quick,
        "busy_share": {},
        "started": time.strftime("%Y-%m-%d %H:%M"),
    }


def _checkpoint_of(chosen: Chosen) -> dict[str, object]:
    what = chosen.subject
    return {
        "large": {
            "path": what.path,
            "files": len(what.files),
            "nbytes": what.nbytes,
            "tensors": what.tensors,
            "read_bytes": extents.total(what.extents),
            "whole": what.names is None,
            "notes": chosen.notes,
        }
    }


def _write_tiny(folder: Path) -> str:
    """A tiny checkpoint to load before the clock starts, in a folder of its own."""
    header = json.dumps({"w": {"dtype": "F32", "shape": [1024], "data_offsets": [0, 4096]}})
    path = folder / "tiny.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header.encode() + bytes(4096))
    return str(path)


class _Run:
    """A bench in progress."""

    def __init__(self, made: Bench, options: Options, bed: Bed, watch: Watch) -> None:
        self._made, self._options, self._bed, self._watch = made, options, bed, watch
        self._rng = random.Random(made.results.run["seed"])
        self._done = self._total = 0

    def all(self) -> None:
        """Measure every case."""
        cases = [case for case in CASES if case in self._options.cases]
        names = [each.loader.name for each in self._made.entrants if each.why_not is None]
        plans = {case: self._patterns(case) for case in cases}
        rounds_of = {case: len(names) + min(_KEPT, len(plans[case])) for case in cases}
        steps = {case: len(plans[case]) + self._options.rounds * rounds_of[case] for case in cases}
        self._total = sum(steps.values())
        for case in cases:
            why = self._why_not(case)
            if why is not None:
                self._made.impossible[case] = why
                self._total -= steps[case]
                continue
            with self._noted(case):
                trial = f"{case} trial"
                tried = self._take(trial, case, plans[case], 1)
                best = self._best(trial, tried)
                self._take(case, case, [*best, *names], self._options.rounds)
        self._made.results.run["ended"] = time.strftime("%Y-%m-%d %H:%M")

    def _patterns(self, case: str) -> list[str]:
        cold, quick = case == "cold", self._options.quick
        return [pattern.name for pattern in ceilings.trial(probes.cores(), cold=cold, quick=quick)]

    def _why_not(self, case: str) -> str | None:
        what = self._made.chosen.subject.extents
        if case == "cold":
            return pagecache.why_not_cold(what)
        try:
            pagecache.warm(what)
        except pagecache.UnfitError as error:
            return str(error)
        return None

    @contextmanager
    def _noted(self, case: str) -> Generator[None]:
        """Notes how busy the machine is with other things before and after a case."""
        before = machine.busy_share(0.3)
        yield
        busy = max(before, machine.busy_share(0.3))
        self._made.results.run["busy_share"][case] = round(busy, 3)

    def _take(self, name: str, case: str, names: Sequence[str], count: int) -> list[str]:
        """Measure names under a case; gives those that could be."""
        results, what = self._made.results, self._made.chosen.subject
        failed: set[str] = set()
        under = Case(name, cold=case == "cold")
        self._watch(self._done, self._total, name)
        for taken in rounds(
            names, lambda one: sample(one, under, what, self._bed), count, self._rng
        ):
            self._done += 1
            if isinstance(taken, tuple):
                failed.add(taken[0])
                results.skipped.append((case, *taken))
            else:
                results.samples.append(taken)
            self._watch(min(self._done, self._total), self._total, name)
        return [each for each in names if each not in failed]

    def _best(self, trial: str, tried: Sequence[str]) -> list[str]:
        """The fastest pattern, and the fastest of those that keep what they read."""
        results = self._made.results
        order = sorted(tried, key=lambda name: results.best(trial, name) or 0.0)
        fresh = [name for name in order if not ceilings.PATTERNS[name].reuse]
        return list(dict.fromkeys([*order[:1], *fresh[:1], *order]))[:_KEPT]
