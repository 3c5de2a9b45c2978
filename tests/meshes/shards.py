"""What tests of sharded loads share: meshes, and a look at every shard."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
import samples
from jax.sharding import Mesh


def mesh(
    shape: Sequence[int] = (8,), axes: str = "xyz", order: Sequence[int] | None = None
) -> Mesh:
    """A mesh over the first devices, or over those that an order names."""
    count = int(np.prod(shape))
    devices = np.array(jax.devices())[list(order or range(count))[:count]]
    return Mesh(devices.reshape(shape), tuple(axes[: len(shape)]))


def assert_sharded(array: Any, whole: Any, sharding: Any) -> None:
    """Every device holds its slice of the whole, bit by bit."""
    assert array.shape == whole.shape
    assert array.dtype == whole.dtype
    assert array.sharding == sharding
    expected = sharding.devices_indices_map(whole.shape)
    found = {shard.device: shard for shard in array.addressable_shards}
    assert found.keys() == expected.keys()
    for device, index in expected.items():
        shard = found[device]
        assert shard.index == index
        assert shard.data.devices() == {device}
        assert samples.same(np.asarray(shard.data), np.array(whole[index])), device


def pointers(array: Any) -> dict[Any, int]:
    """Where each shard lies."""
    return {shard.device: shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards}


def assert_loaded(loaded: Mapping[str, Any], wholes: Mapping[str, Any], shardings: Any) -> None:
    """The same for all arrays of a load."""
    assert list(loaded) == list(wholes) or sorted(loaded) == sorted(wholes)
    for name, whole in wholes.items():
        assert_sharded(loaded[name], whole, shardings[name])
