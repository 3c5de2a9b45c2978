"""What is measured, in the order of its weight: what comes last is left out first."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks import gpu_ceilings, gpu_tasks
from benchmarks.gpu_ceilings import PEAK
from benchmarks.gpu_given import landings
from benchmarks.gpu_memory import HOST
from benchmarks.gpu_rounds import Step
from benchmarks.gpu_tasks import Way
from benchmarks.results import Results
from benchmarks.runner import Case

WARM = Case("warm", primed=False)
COLD = Case("cold", cold=True, primed=False)
SWEEP = Case("sweep", primed=False)
SWEEP_COLD = Case("sweep-cold", cold=True, primed=False)
_OTHERS = (
    "safetensors.prefetch", "safetensors.flax", "instanttensor", "orbax", "runai",
    "fastsafetensors.gds",
)  # fmt: skip
PLAIN, FAST = "safetensors.torch", "fastsafetensors"


class Plan:
    """What is measured on a device.

    Args:
        results: Where the samples are; what could not be measured is noted there.
        device: What is loaded onto.
        cores: How many there are.
        gds: Whether cuFile is real.
        rounds: How many rounds the figures are to have that the targets are about.
    """

    def __init__(
        self, results: Results, device: str, cores: int, *, gds: bool, rounds: int
    ) -> None:
        self._results, self._device, self._cores = results, device, cores
        self._gds, self._rounds = gds, rounds
        gpu = device != HOST
        self._frameworks = ("torch", "jax", "cupy" if gpu else "numpy")
        self._engine = "pinned" if gpu else "auto"

    def warm_ceilings(self) -> Step:
        """Tries reads through the page cache, and the peak."""
        counts = [n for n in (1, 2, 4, 8, 16, 32) if n <= self._cores]
        names = [PEAK, *map(gpu_ceilings.cached, counts)]
        return Step(WARM, names, 1)

    def cold_ceilings(self) -> Step:
        """Tries reads past it."""
        counts = [n for n in (4, 8, 16) if n <= self._cores] or [2]
        names = [gpu_ceilings.direct(n, mib) for n in counts for mib in (4, 16)]
        return Step(COLD, names, 1)

    def rest(self) -> list[Step]:
        """All else, once the ceilings are known."""
        few = min(2, self._rounds)
        warm, cold, others, sweep = self._warm(), self._cold(), self._others(), self._sweep()
        readers = [name for name in sweep if gpu_tasks.way(name).threads]
        ring = [name for name in sweep if name not in readers]
        peers = [name for name in others if not gpu_tasks.is_ours(name)]
        return [
            Step(WARM, warm, few),
            Step(COLD, cold, few),
            Step(SWEEP, ring, 1),
            Step(WARM, others, 1),
            Step(SWEEP, readers, 1),
            Step(WARM, warm, self._rounds),
            Step(COLD, cold, self._rounds),
            Step(WARM, others, self._rounds),
            Step(SWEEP_COLD, readers, 1),
            Step(COLD, peers, 1),
            Step(SWEEP, sweep, min(3, self._rounds)),
        ]

    def _ours(self) -> list[str]:
        return [Way(framework).name for framework in self._frameworks]

    def _warm(self) -> list[str]:
        best = self._best("warm", "cached")
        return [PEAK, *best, *self._possible("warm", [*self._ours(), PLAIN, FAST])]

    def _cold(self) -> list[str]:
        ways = [Way("torch").name, Way("jax").name]
        if self._gds:
            ways += [Way("torch", "gds", "mfload").name, "fastsafetensors.gds"]
        return [*self._best("cold", "direct"), *self._possible("cold", [*ways, PLAIN, FAST])]

    def _others(self) -> list[str]:
        engines = (self._engine, *(("gds",) if self._gds else ()))
        ways = [
            Way(framework, engine, allocator).name
            for framework in self._frameworks
            for engine in engines
            for allocator in landings(framework)
        ]
        # XLA compiles for the shapes of a checkpoint when they come up first.
        ways += [Way("jax", self._engine, each, again=1).name for each in landings("jax")]
        peers = [name for name in _OTHERS if self._gds or name != "fastsafetensors.gds"]
        return self._possible("warm", [*ways, *peers])

    def _sweep(self) -> list[str]:
        framework = self._frameworks[-1]
        counts = [n for n in (1, 2, 4, 6, 8, 12, 16) if n <= self._cores]
        ways = [Way(framework, self._engine, "mfload")]
        ways += [way._replace(threads=n) for way in ways[:1] for n in counts]
        if self._device != HOST:
            ways += [ways[0]._replace(slot=mib) for mib in (1, 2, 4, 8, 16, 32)]
            ways += [ways[0]._replace(depth=n) for n in (1, 2, 3, 4, 8)]
        return self._possible("sweep", [way.name for way in ways])

    def _best(self, case: str, kind: str) -> list[str]:
        """The fastest ceiling of a kind."""
        found = [
            (best, name)
            for name in self._results.names(case)
            if name.startswith(kind)
            for best in [self._results.best(case, name)]
            if best is not None
        ]
        return [min(found)[1]] if found else []

    def _possible(self, case: str, names: Sequence[str]) -> list[str]:
        """The names that can be measured; notes why the others can't."""
        found: list[str] = []
        for name in names:
            why = gpu_tasks.why_not(name, self._device)
            if why is None:
                found.append(name)
            elif (case, gpu_tasks.label(name), why) not in self._results.skipped:
                self._results.skipped.append((case, gpu_tasks.label(name), why))
        return found


def too_early(step: Step, results: Results) -> bool:
    """Whether a step varies what was not measured as it comes: there was no time for that."""
    plain = any(gpu_tasks.is_ours(name) for name in results.names(WARM.name))
    return step.case in (SWEEP, SWEEP_COLD) and not plain
