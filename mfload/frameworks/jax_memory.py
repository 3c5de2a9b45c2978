"""JAX's devices and its memory: new arrays that are filled in place, which a program can take over.

Only what a compiled program gives is memory that XLA allocated for sure. A program makes one array
of every kind that is still wanted, and is run for as long as all of them are: there are as many
programs as kinds differ in their counts, a few for most models. No program makes two of a kind:
XLA computes once what is equal and copies it, and compiles each copy. Measured on a CPU of two
cores, the first time in a process: 0.27 s for the 291 arrays of an 8B Llama (0.33 s on eight
devices), 0.5 s for 18,723 as in a mixture of experts.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mfload import errors
from mfload.cuda.device import Device, Rows
from mfload.cuda.memory import DeviceBuffer
from mfload.frameworks import base, private_api
from mfload.io import buffers

log = logging.getLogger("mfload")

_NO_MESH = jax.sharding.Mesh(np.empty((), object), ())


@contextlib.contextmanager
def undisturbed() -> Generator[None]:
    """A context in which JAX ignores what users set for their own code.

    64-bit types keep their width, and the mesh of `jax.set_mesh`, which refuses jitted functions
    on any other devices, is unset.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(_x64())
        if hasattr(jax, "set_mesh"):
            stack.enter_context(jax.set_mesh(_NO_MESH))
        yield


def _x64() -> contextlib.AbstractContextManager[Any]:
    # A context manager of jax since 0.8, of jax.experimental before.
    with contextlib.suppress(AttributeError):
        return jax.enable_x64(True)
    from jax.experimental import enable_x64  # pyright: ignore

    return enable_x64(True)


def find_device(device: Any) -> tuple[Device | None, tuple[str, ...]]:
    """What `base.find_device` says of a `jax.Device`; None if it is not NVIDIA's."""
    # An AMD card calls itself "gpu" too; Apple's is "METAL".
    if device.platform != "gpu" or "rocm" in device.client.platform_version.lower():
        return None, ()
    return base.find_device(device.local_hardware_id)


def pool(device: Any, there: Device) -> base.Pool:
    """What XLA's allocator has of a `jax.Device`, which is the device `there`."""
    # If XLA does not know a number, it says -1.
    stats = {name: n for name, n in (device.memory_stats() or {}).items() if n >= 0}
    free = None
    if "bytes_limit" in stats and "bytes_in_use" in stats:
        free = stats["bytes_limit"] - stats["bytes_in_use"]
        if "pool_bytes" in stats:
            # What it has not set aside yet, others may have taken.
            free = min(free, stats["pool_bytes"] - stats["bytes_in_use"] + there.memory_info().free)
    return base.Pool(
        free,
        "allocator='framework' lands in what JAX has set aside for itself; before JAX starts, "
        "XLA_PYTHON_CLIENT_PREALLOCATE=false has it set nothing aside, and "
        "XLA_PYTHON_CLIENT_MEM_FRACTION says how much of the device it may have",
    )


class NewArray(NamedTuple):
    """An array to be made."""

    device: Any  # The `jax.Device`.
    memory: str | None  # Which of its memories; None for the default.
    dtype: str
    shape: tuple[int, ...]


_Kind = tuple[str | None, str, tuple[int, ...]]


def allocate(wanted: Sequence[NewArray]) -> list[Any]:
    """New arrays, in order, whose memory nothing that ran before still uses.

    XLA gives away memory in the order of its own stream. An array is ready when that stream has
    come to where it was made, whether or not something was written there.
    """
    queues: dict[_Kind, dict[Any, list[int]]] = {}
    for n in reversed(range(len(wanted))):
        device, *_ = each = wanted[n]
        queues.setdefault(each[1:], {}).setdefault(device, []).append(n)
    made: dict[int, Any] = {}
    while queues:
        # What is wanted on the same devices comes from one program, once each.
        programs: dict[tuple[Any, ...], list[_Kind]] = {}
        for kind, waiting in queues.items():
            programs.setdefault(tuple(waiting), []).append(kind)
        for devices, kinds in programs.items():
            for kind, array in zip(kinds, _run(devices, tuple(kinds)), strict=True):
                for shard in array.addressable_shards:
                    made[queues[kind][shard.device].pop()] = shard.data
        queues = {
            kind: left
            for kind, waiting in queues.items()
            if (left := {device: queue for device, queue in waiting.items() if queue})
        }
    return [made[n] for n in range(len(wanted))]


def _run(devices: tuple[Any, ...], kinds: tuple[_Kind, ...]) -> tuple[Any, ...]:
    try:
        with undisturbed():
            return jax.block_until_ready(_program(devices, kinds)())
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        text = str(error).splitlines()[0]
        raise errors.MemoryLimitError("JAX has no room on the device", found=text) from error


@functools.lru_cache(maxsize=256)
def _program(devices: tuple[Any, ...], kinds: tuple[_Kind, ...]) -> Callable[[], tuple[Any, ...]]:
    # A mesh for this alone, of which nothing is seen outside: replicas have memory of their own,
    # and one program makes them all.
    mesh = Mesh(np.array(devices, object), ("device",))
    there = tuple(NamedSharding(mesh, PartitionSpec(), memory_kind=kind[0]) for kind in kinds)
    # Public since 0.8; until then it took no shape. For an H100, XLA of JAX 0.11.2 compiles it to
    # memory without a kernel; on the CPU it is zeros.
    fill = getattr(jax.lax, "empty", jnp.zeros)

    def make() -> tuple[Any, ...]:
        return tuple(fill(shape, dtype) for _, dtype, shape in kinds)

    return jax.jit(make, out_shardings=there)


def fillable(device: Any, there: Device) -> bool:
    """Whether XLA's arrays on a device can be filled in place, past XLA.

    Tried until there is an answer: two new arrays are written to from a stream of our own, and JAX
    must find in each what was written there. `there` is the same device, which writes.
    """
    try:
        problem = _problem(device, there)
    except errors.MemoryLimitError as error:
        problem = f"there was no room to try: {error}"  # There may be the next time.
    if problem:
        log.info("%s: tensors land in mfload's memory, since in XLA's own %s", device, problem)
    return not problem


_TRIAL = 4096  # int32 elements: some pages.


@functools.lru_cache(maxsize=64)
def _problem(device: Any, there: Device) -> str:
    """What speaks against it; empty if all went well."""
    try:
        arrays = allocate([NewArray(device, None, "int32", (_TRIAL,))] * 2)
        wanted = [np.arange(_TRIAL, dtype=np.int32) * -977 + first for first in (5, 1 << 30)]
        for array, each in zip(arrays, wanted, strict=True):
            address = private_api.jax_address(array)
            _write(there, DeviceBuffer(there, address, each.nbytes, array, own=False), each)
        # What was written to the second must not be seen in the first.
        if all(np.array_equal(*pair) for pair in zip(map(np.asarray, arrays), wanted, strict=True)):
            return ""
    except errors.MemoryLimitError:
        raise
    except Exception as error:  # noqa: BLE001 - whatever goes wrong, there is another way.
        return str(error) or type(error).__name__
    return "JAX does not see what was written to an array, or sees it in another"


def _write(there: Device, target: DeviceBuffer, numbers: Any) -> None:
    source = buffers.allocate(numbers.nbytes)
    source.view(numbers.dtype)[:] = numbers
    there.pin(source)
    try:
        # Once the stream is closed, nothing reads the source any more.
        with contextlib.closing(there.stream()) as stream:
            stream.copy_in(target, 0, source, Rows.one(source.size))
            stream.synchronize()
    finally:
        there.unpin(source)
