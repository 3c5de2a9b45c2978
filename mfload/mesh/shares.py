"""Shares: which part of each tensor each device of each process holds, and the needs they make.

Pure, and the same on every process: whatever all must decide alike follows from these.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from mfload import errors
from mfload.dtypes import DType
from mfload.index import Box, TensorInfo
from mfload.planning.requests import Request, Selection, Share, boxed

__all__ = ["Share", "Wanted", "requests"]


class Wanted(NamedTuple):
    """One tensor, and where its parts go.

    Attributes:
        info: The tensor.
        dtype: The dtype it is delivered in.
        checked: Whether values are checked on conversion.
        shares: The parts, of all processes.
        apart: Whether each device gets memory of its own, also where several hold the same part.
    """

    info: TensorInfo
    dtype: DType
    checked: bool
    shares: tuple[Share, ...]
    apart: bool = False


def requests(wanted: Sequence[Wanted], *, apart: bool = False) -> dict[int, list[Request]]:
    """What each process needs.

    A part that several devices of a process hold is one need for all of them, unless each is to
    have memory of its own.

    Args:
        wanted: The tensors.
        apart: Whether that is so for all of them.

    Returns:
        The needs by process, for those that hold anything; in each, tensors in the order given,
        parts in that of their first device.

    Raises:
        ShardingError: A part cuts through elements that share a byte.
    """
    made: dict[int, list[Request]] = {}
    for info, dtype, checked, shares, own in wanted:
        held: dict[tuple[int, Box], list[int]] = {}
        for process, device, box in shares:
            held.setdefault((process, box), []).append(device)
        for (process, box), devices in held.items():
            selection = _selection(info, box)
            each = [(n,) for n in devices] if apart or own else [tuple(devices)]
            made.setdefault(process, []).extend(
                Request(info, dtype, selection, checked, numbers) for numbers in each
            )
    return made


def _selection(info: TensorInfo, box: Box) -> Selection | None:
    try:
        return boxed(info, box)
    except errors.SliceError as error:
        raise errors.ShardingError(
            f"a shard would cut through elements of {info.dtype} that share a byte",
            tensor=info.name,
            expected=error.expected,
            found=f"shard {[list(pair) for pair in box]} of shape {list(info.shape)}",
        ) from None
