"""Memory of tensors of PyTorch that are there already, on the host and on CUDA devices."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from mfload.frameworks import base
from mfload.planning.layout import DEVICE_BUFFER

if TYPE_CHECKING:
    from mfload.cuda.device import Device

_ROUNDED = 512  # Bytes to which PyTorch's allocator rounds.
_SMALL = 1 << 20  # Bytes up to which it cuts out of blocks of 2 MiB, and of no larger ones.


def memory_of(tensor: Any, *, on_device: bool = True) -> Any:
    """The memory of a tensor to be written to, in C order (see `base.Lent`).

    None if it has gaps, can't be written to directly, or lies where mfload does not land, which
    without `on_device` is any device. What the current stream was given before has ended then.
    """
    plain = type(tensor) is torch.Tensor and tensor.layout == torch.strided
    if not plain or not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        return None
    place, device = tensor.device, device_of(tensor.device)
    lands = device is not None
    if not (lands and on_device) and (lands or place.type != "cpu"):
        return None
    if place.type == "cuda":
        with torch.cuda.device(place):
            if torch.cuda.is_current_stream_capturing():
                return None
            torch.cuda.current_stream().synchronize()
    return base.memory_at(tensor, tensor.data_ptr(), tensor.nbytes, device)


@functools.cache
def device_of(place: Any) -> Device | None:
    """The CUDA device that a `torch.device` is; None if mfload does not land there."""
    if place.type != "cuda" or torch.version.cuda is None:
        return None
    return base.find_device(place.index or 0)[0]


def together(sizes: Sequence[int]) -> Iterator[int]:
    """For each buffer of a load, the bytes of a group that begins with it; 0 for the others."""
    told = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
    most = re.search(r"max_split_size_mb\s*:\s*(\d+)", told)
    if most and int(most[1]) << 20 <= DEVICE_BUFFER:  # It would cut nothing out of such a block.
        return iter([0] * len(sizes))
    groups: list[int] = []
    start = room = 0
    for number, nbytes in enumerate(sizes):
        rounded = -(-nbytes // _ROUNDED) * _ROUNDED
        groups.append(0)
        if rounded <= _SMALL:
            continue
        if room < rounded:
            start, room = number, DEVICE_BUFFER
        groups[start] += rounded
        room -= rounded
    # One that is alone is no group.
    pairs = zip(groups, sizes, strict=True)
    return (group if group > nbytes + _ROUNDED else 0 for group, nbytes in pairs)
