"""JAX's devices as devices to land on: which can be, in whose memory, and how much it has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mfload.cuda.device import Device
from mfload.frameworks import base, ground, private_api
from mfload.frameworks.base import Whose


def land_on(device: Any) -> tuple[Device | None, tuple[str, ...]]:
    """What `JaxAdapter` is to be told of a `jax.Device` (see `ground.device_to_land_on`)."""
    # An AMD card calls itself "gpu" too; Apple's is "METAL".
    if device.platform != "gpu" or "rocm" in device.client.platform_version.lower():
        return None, ()
    return ground.device_to_land_on(device.local_hardware_id)


def better(pairs: Sequence[tuple[Any, Device]]) -> Whose:
    """Whose memory is the better one on devices, each a `jax.Device` and the same to land on."""
    if pairs and all(private_api.jax_lends_on(device, land) for device, land in pairs):
        return "framework"
    return "mfload"


def pool_of(device: Any, land: Device) -> base.Pool:
    """What XLA's allocator has of a `jax.Device`, which is the device to land on."""
    # Where XLA does not know a number, it says -1.
    told = {name: n for name, n in (device.memory_stats() or {}).items() if n >= 0}
    free = None
    if "bytes_limit" in told and "bytes_in_use" in told:
        free = told["bytes_limit"] - told["bytes_in_use"]
        if "pool_bytes" in told:
            # What it has not set aside yet, others may have taken.
            free = min(free, told["pool_bytes"] - told["bytes_in_use"] + land.room().free)
    return base.Pool(
        free,
        "allocator='framework' lands in what JAX has set aside for itself; before JAX starts, "
        "XLA_PYTHON_CLIENT_PREALLOCATE=false has it set nothing aside, and "
        "XLA_PYTHON_CLIENT_MEM_FRACTION says how much of the device it may have",
    )
