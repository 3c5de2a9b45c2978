"""What is measured, step by step; what comes last in `ORDER` is left out first."""

from __future__ import annotations

from typing import NamedTuple

from benchmarks import gpu_seams
from benchmarks.gpu_ceilings import DEVICE_COPY, PEAK, cached, direct, maps
from benchmarks.gpu_given import landings
from benchmarks.gpu_memory import HOST
from benchmarks.gpu_rounds import Step
from benchmarks.gpu_tasks import Way
from benchmarks.runner import Case


class Part(NamedTuple):
    """A step of the table: the minutes that it may take, and what it is about."""

    minutes: float
    what: str


PARTS = {
    0: Part(1.5, "tests that need a GPU; streams, lifetimes, pins and failures"),
    1: Part(0.5, "races"),
    2: Part(3, "readers, slots and depth, in one process"),
    3: Part(3, "CuPy, PyTorch and JAX, by each allocator, a process' first load and the next"),
    4: Part(1, "page-locked maps of the page cache"),
    5: Part(2, "cold"),
    6: Part(2, "seams"),
    7: Part(1.5, "against others on the same file"),
    8: Part(0.5, "device to device, and waking"),
}
ORDER = (0, 1, 3, 2, 5, 7, 6, 8, 4)
WARM = Case("warm", primed=False)
MANY = Case("many", primed=False)
RING = Case("ring", primed=False)
MAPS = Case("maps", primed=False)
COLD = Case("cold", cold=True, primed=False)
SEAMS = Case("seams", primed=False)
MODEL = Case("model", primed=False)
OTHERS = Case("others", primed=False)
OTHERS_COLD = Case("others-cold", cold=True, primed=False)
DEVICE = Case("device", primed=False)
TITLES = {
    WARM.name: "From a full page cache",
    MANY.name: "Many small tensors, from a full page cache",
    RING.name: "Readers, slots and depth, into CuPy in one process",
    MAPS.name: "Page-locked maps of the page cache",
    COLD.name: "From an empty page cache",
    SEAMS.name: "Seams of other libraries",
    MODEL.name: "A model of transformers",
    OTHERS.name: "Against others, from a full page cache",
    OTHERS_COLD.name: "Against others, from an empty page cache",
    DEVICE.name: "On the device",
}
RIVALS = (
    "safetensors.torch", "safetensors.prefetch", "instanttensor", "instanttensor.buffered",
    "fastsafetensors", "runai",
)  # fmt: skip
TENSORS = 18_632


def steps(number: int, device: str, cores: int) -> list[Step]:
    """What a step measures, in order.

    Args:
        number: Of the step.
        device: What is loaded onto.
        cores: How many there are.
    """
    found = {2: _ring, 3: _loads, 4: _maps, 5: _cold, 6: _seams, 7: _others, 8: _on_device}
    return found[number](device, cores) if number in found else []


def frameworks(device: str) -> tuple[str, ...]:
    """Those that are measured, the plainest first."""
    return ("numpy" if device == HOST else "cupy", "torch", "jax")


def _counts(cores: int, *counts: int) -> list[int]:
    """Those that the cores allow; one at least."""
    return [n for n in counts if n <= cores] or [min(counts)]


def _ring(device: str, cores: int) -> list[Step]:
    plain = Way(frameworks(device)[0], again=1)
    ways = [plain, *(plain._replace(threads=n) for n in _counts(cores, 6, 8, 10, 12, 16))]
    if device != HOST:
        ways += [plain._replace(slot=mib) for mib in (1, 2, 4, 8, 16)]
        ways += [*(plain._replace(depth=n) for n in (2, 3)), plain._replace(kept=0)]
        ways += [plain._replace(threads=n, slot=8) for n in _counts(cores, 8, 16)]
    ceilings = [PEAK, *map(cached, _counts(cores, 8, 12, 16))]
    return [Step(2, RING, [[*ceilings, *(way.name for way in ways)]], 3, fresh=False)]


def _loads(device: str, cores: int) -> list[Step]:
    ways = [
        Way(framework, allocator)
        for framework in frameworks(device)
        for allocator in dict.fromkeys(("auto", *landings(framework)))
    ]
    groups = [[way.name, way._replace(again=1).name] for way in ways]
    # The plainest first, so that there is something to compare when the time is up.
    first = [group for group, way in zip(groups, ways, strict=True) if way.allocator == "auto"]
    rest = [group for group in groups if group not in first]
    first += [[Way(framework, again=0).name] for framework in frameworks(device)]
    ceilings = [[PEAK], [cached(_counts(cores, 8, 4, 2)[0])]]
    return [
        Step(3, WARM, [*ceilings, *first], 3),
        Step(3, MANY, [[PEAK], *first], 2, "many"),
        Step(3, WARM, [*ceilings, *first], 7),
        Step(3, WARM, rest, 3),
        Step(3, MANY, [[PEAK], *first], 7, "many"),
    ]


def _maps(device: str, cores: int) -> list[Step]:
    names = [maps(threads, mib) for threads in _counts(cores, 8, 16, 1) for mib in (16, 64, 256)]
    return [Step(4, MAPS, [[PEAK, *names]], 3, fresh=False)]


def _cold(device: str, cores: int) -> list[Step]:
    counts = _counts(cores, 4, 8, 2)
    ceilings = [direct(threads, mib) for mib in (4, 8, 16) for threads in counts]
    ways = [Way("torch", cache=cache).name for cache in (None, "bypass")]
    ways += [Way("jax").name]
    names = [*ways[:2], *ceilings[:2], cached(counts[0]), ways[2]]
    return [
        Step(5, COLD, [[name] for name in names], 1, "single"),
        Step(5, COLD, [[name] for name in dict.fromkeys(names + ceilings)], 7, "single"),
    ]


def _seams(device: str, cores: int) -> list[Step]:
    plain = [name for what in gpu_seams.WHAT if what != "transformers"
             for name in gpu_seams.names(what)]  # fmt: skip
    model = [gpu_seams.names("transformers")]
    return [
        Step(6, SEAMS, [plain], 2, "single", fresh=False),
        Step(6, MODEL, model, 2, "model", fresh=False),
        Step(6, SEAMS, [plain], 5, "single", fresh=False),
        Step(6, MODEL, model, 5, "model", fresh=False),
    ]


def _others(device: str, cores: int) -> list[Step]:
    groups = [[Way("torch").name], *([name] for name in RIVALS)]
    cold = [group for group in groups if group != ["instanttensor.buffered"]]
    return [
        Step(7, OTHERS, groups, 2),
        Step(7, OTHERS_COLD, cold, 1, "single"),
        Step(7, OTHERS, groups, 5),
        Step(7, OTHERS_COLD, cold, 3, "single"),
    ]


def _on_device(device: str, cores: int) -> list[Step]:
    cupy, torch, jax = (Way(framework) for framework in frameworks(device))
    ways = [torch._replace(served=how) for how in ("mapped", "copied")]
    ways += [each._replace(served="mapped") for each in (jax, cupy)]
    groups = [[way.name, way._replace(again=1).name] for way in ways]
    return [Step(8, DEVICE, [[DEVICE_COPY], *groups], 5, "served", alone=True)]
