"""What the benchmarks of loading compare, in the order of their tables."""

from __future__ import annotations

from mfload.bench.ceilings import MIB, Pattern
from mfload.bench.loaders import PEERS, BenchLoader, ours

WARM = Pattern(2, 16 * MIB)
COLD = (
    *(
        Pattern(threads, block * MIB, direct=True, reuse=reuse)
        for threads in (1, 2, 4, 8)
        for block in (4, 16)
        for reuse in (False, True)
    ),
    WARM,
    Pattern(4, 16 * MIB),
)
_OURS = (*map(ours, ("jax", "torch", "numpy", "tensorflow", "paddle")), ours("torch", "mmap"))
LOADERS: dict[str, BenchLoader] = {loader.name: loader for loader in _OURS} | PEERS
