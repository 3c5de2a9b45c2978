"""New arrays in XLA's own memory, to be filled in place: a jitted function can take them over.

Each comes out of a compiled program, since only what a program gives is memory that XLA allocated
for sure. A program makes one array of every kind that is still wanted, and is run for as long as
all of them are: there are as many programs as kinds differ in their counts, a few for most models.

No program makes two of a kind: XLA computes once what is equal and copies it, and compiles each
copy. Measured with arrays of a few numbers on a CPU of two cores, the first time in a process: one
program for 291 arrays as in an 8B Llama takes 0.19 s and these take 0.27 s (on eight devices 0.22
and 0.33); programs of up to 512 for 18,723 as in a mixture of experts take 1.1 s, these 0.5 s.

What an array holds at first is no matter, for a load writes all of its bytes or throws it away. So
it is nothing where JAX has `jax.lax.empty`: what XLA of JAX 0.11.2 compiles of it for an H100,
ahead of time, asks for memory and has no kernel; it was not yet run. On the CPU that is zeros, as
without it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mfload import errors
from mfload.frameworks.jax_context import undisturbed


class Wanted(NamedTuple):
    """An array to be made.

    Attributes:
        device: On which device of this process.
        memory: Which of its memories, None for the default.
        dtype: JAX's name of the dtype.
        shape: The shape.
    """

    device: Any
    memory: str | None
    dtype: str
    shape: tuple[int, ...]


_Kind = tuple[str | None, str, tuple[int, ...]]


def allocate(wanted: Sequence[Wanted]) -> list[Any]:
    """New arrays of no matter what, in order; nothing that ran before uses their memory.

    XLA gives away memory in the order of its own stream. An array is ready when that stream has
    come to where it was made, whether or not something was written there.

    Raises:
        MemoryLimitError: A device has no room for them.
    """
    queues: dict[_Kind, dict[Any, list[int]]] = {}
    for n in reversed(range(len(wanted))):
        device, *_ = each = wanted[n]
        queues.setdefault(each[1:], {}).setdefault(device, []).append(n)
    made: dict[int, Any] = {}
    while queues:
        # What is wanted on the same devices comes from one program, once each.
        rounds: dict[tuple[Any, ...], list[_Kind]] = {}
        for kind, waiting in queues.items():
            rounds.setdefault(tuple(waiting), []).append(kind)
        for devices, kinds in rounds.items():
            for kind, array in zip(kinds, _make(devices, tuple(kinds)), strict=True):
                for shard in array.addressable_shards:
                    made[queues[kind][shard.device].pop()] = shard.data
        queues = {
            kind: left
            for kind, waiting in queues.items()
            if (left := {device: queue for device, queue in waiting.items() if queue})
        }
    return [made[n] for n in range(len(wanted))]


def _make(devices: tuple[Any, ...], kinds: tuple[_Kind, ...]) -> tuple[Any, ...]:
    try:
        with undisturbed():
            return jax.block_until_ready(_maker(devices, kinds)())
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        text = str(error).splitlines()[0]
        raise errors.MemoryLimitError("JAX has no room on the device", found=text) from error


@functools.lru_cache(maxsize=256)
def _maker(devices: tuple[Any, ...], kinds: tuple[_Kind, ...]) -> Callable[[], tuple[Any, ...]]:
    # A mesh for this alone, of which nothing is seen outside: replicas have memory of their own,
    # and one program makes them all.
    mesh = Mesh(np.array(devices, object), ("device",))
    there = tuple(NamedSharding(mesh, PartitionSpec(), memory_kind=kind[0]) for kind in kinds)

    # Public since 0.8; until then it took no shape.
    fill = getattr(jax.lax, "empty", jnp.zeros)

    def make() -> tuple[Any, ...]:
        return tuple(fill(shape, dtype) for _, dtype, shape in kinds)

    return jax.jit(make, out_shardings=there)
