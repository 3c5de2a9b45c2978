"""Global arrays of JAX, as what each process has to save of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mfload import errors
from mfload.dtypes import DType
from mfload.frameworks import base
from mfload.index import Box
from mfload.mesh import jax_specs


def dtype_of(name: str, array: Any) -> DType:
    """The stored dtype of an array: of one that safetensors lacks, a wider one."""
    if array.is_deleted():
        raise errors.UnsupportedArrayError("the array was deleted or donated", tensor=name)
    row = base.row_of("jax", array.dtype.name)
    if row.elements > 1 and not array.is_fully_replicated:
        raise errors.UnsupportedArrayError(
            "elements that share a byte can't be saved in parts; replicate the array",
            tensor=name,
            found=array.dtype.name,
        )
    return row.wide


def pieces(array: Any) -> Iterator[tuple[Box, Any]]:
    """The boxes that this process saves, and their arrays: every part once in all processes."""
    for shard in array.addressable_shards:
        if shard.replica_id == 0:
            yield jax_specs.box_of(shard.index, array.shape), shard.data
