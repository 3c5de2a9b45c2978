"""The speeds that mfload sets out to reach, judged by the best of a run's rounds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.results import MIB, Results

_SMALL = {"numpy": 10, "torch": 20, "tensorflow": 20, "paddle": 20, "jax": 45}
"""CPU microseconds a tensor of 1 KiB, by framework."""
_FASTSAFETENSORS = ("fastsafetensors", "fastsafetensors-buffered")
"""Both of its settings: the one that is faster here counts."""
_PRIVATE = ("jax", "torch", "numpy", "tensorflow", "paddle")
_MEASURED = ("warm", "cold", "memory", "memory-cold")


@dataclass(frozen=True, slots=True)
class Target:
    """One figure to reach.

    Args:
        what: What is measured.
        limit: The figure to reach.
        found: The figure found, None where it was not measured.
        unit: What follows the figure.
        at_least: Whether more is better.
    """

    what: str
    limit: float
    found: float | None
    unit: str = "×"
    at_least: bool = False

    @property
    def reached(self) -> bool | None:
        """Whether the figure, as it is printed, is reached; None where it was not measured."""
        if self.found is None:
            return None
        shown = round(self.found, 2)
        return shown >= self.limit if self.at_least else shown <= self.limit

    @property
    def verdict(self) -> str:
        """`reached`, `**missed**` or `not measured`."""
        return {None: "not measured", True: "reached", False: "**missed**"}[self.reached]

    def as_dict(self) -> dict[str, Any]:
        """The target and its judgement as plain values."""
        return {**asdict(self), "reached": self.reached}


def _over(results: Results, case: str, ours: str, *peers: str) -> float | None:
    """Our best time over that of the fastest of the peers."""
    times = [results.best(case, peer) for peer in peers]
    theirs = min((time for time in times if time is not None), default=None)
    best = results.best(case, ours)
    return None if best is None or theirs is None else best / theirs


def _faster(results: Results, case: str, ours: str, *peers: str) -> float | None:
    """How many times faster we are than the fastest of the peers."""
    over = _over(results, case, ours, *peers)
    return None if over is None else 1 / over


def _all(results: Results) -> Iterator[Target]:
    yield Target("warm, JAX: time over the ceiling", 1.3, results.ratio("warm", "mfload-jax"))
    flax = _faster(results, "warm", "mfload-jax", "safetensors-flax")
    yield Target("warm, JAX: faster than safetensors.flax", 7, flax, at_least=True)
    for name in ("torch", "numpy"):
        ours = f"mfload-{name}"
        found = results.ratio("warm", ours)
        yield Target(f"warm, private {name}: time over the ceiling", 1.2, found)
        for called, peers in (
            ("safetensors + clone", ["safetensors-torch-clone"]),
            ("fastsafetensors", _FASTSAFETENSORS),
        ):
            found = _faster(results, "warm", ours, *peers)
            yield Target(f"warm, private {name}: faster than {called}", 2.5, found, at_least=True)
    found = results.ratio("cold", "mfload-torch")
    yield Target("cold, torch: time over the best ceiling", 1.1, found)
    found = _over(results, "cold", "mfload-torch", *_FASTSAFETENSORS)
    yield Target("cold, torch: time over fastsafetensors", 1.0, found)
    found = results.ratio("cold", "mfload-jax")
    yield Target("cold, JAX: time over the best ceiling", 1.25, found)
    found = _over(results, "warm", "mfload-torch-mmap", "safetensors-torch")
    yield Target("warm, engine mmap: time over safetensors.torch.load_file", 1.0, found)
    tensors = results.run["small_tensors"]
    for framework, limit in _SMALL.items():
        cpu = results.best("small", f"mfload-{framework}", "cpu_load_s")
        found = None if cpu is None else cpu / tensors * 1e6
        what = f"{tensors:,} tensors of 1 KiB into {framework}: CPU a tensor"
        yield Target(what, limit, found, " µs")
    for framework in _PRIVATE:
        # Noise does not add to a peak: the worst of all samples counts, warm and cold.
        peak = results.worst(_MEASURED, f"mfload-{framework}", "peak_over")
        found = None if peak is None else max(0.0, peak / MIB)
        yield Target(f"peak memory over the data, {framework}", 64, found, " MiB")


def judge(results: Results) -> list[Target]:
    """Every target with what was found, in the order of the README's table."""
    return list(_all(results))
