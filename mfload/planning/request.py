"""Requests: which part of each tensor is needed, and where it lands.

A whole tensor is a `Request` without a selection. A slice such as `w[..., 8:16]` becomes a
`Selection`, plain numbers for each dim, before anything is read.
"""

from __future__ import annotations

import itertools
import operator
from typing import Any, Literal, NamedTuple

from mfload import errors
from mfload.dtypes import DType
from mfload.index import Box, TensorInfo


class Axis(NamedTuple):
    """The elements taken of one dim: start, start + step, … (size of them).

    Attributes:
        step: Distance to the next, never 0, may be negative.
        drop: Whether the dim vanishes from the result, as with an integer index.
        picks: The elements one by one, if they have no step in common.
    """

    start: int
    size: int
    step: int = 1
    drop: bool = False
    picks: tuple[int, ...] | None = None


Selection = tuple[Axis, ...]


class Request(NamedTuple):
    """What is needed of one tensor.

    Attributes:
        selection: The part of it; None for all.
        checked: Whether values are checked on conversion (a cast asked for by name).
        devices: Numbers of the adapter's devices that want it; none if the adapter has just one.
    """

    info: TensorInfo
    dtype: DType
    selection: Selection | None = None
    checked: bool = False
    devices: tuple[int, ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the result."""
        if self.selection is None:
            return self.info.shape
        return tuple(axis.size for axis in self.selection if not axis.drop)

    @property
    def nbytes(self) -> int:
        """Bytes of the result."""
        if self.selection is None and self.dtype is self.info.dtype:
            return self.info.nbytes
        return self.dtype.size_of(self.shape) or 0


Owner = Literal["mfload", "framework"]
"""Whose memory a result lies in."""


class Allocation(NamedTuple):
    """Where a request lands. The adapter says it once a request.

    Attributes:
        device: Number of the adapter's device in whose memory it lands; None for the host's.
        copied: Whether the framework copies it out of that memory afterwards.
    """

    device: int | None
    owner: Owner
    copied: bool


HOST = Allocation(None, "mfload", copied=False)
"""mfload's buffers in host memory, which the arrays alias."""


class Share(NamedTuple):
    """The part of a tensor that one device of one process holds.

    Attributes:
        device: The device, by its number in the table of its own process's devices.
        box: Half-open (start, stop) for each dim of the tensor.
    """

    process: int
    device: int
    box: Box


def select(info: TensorInfo, index: Any) -> Selection | None:
    """Turns an index as in NumPy's basic indexing into a selection; None if it takes all.

    An int, a slice, Ellipsis, a list of ints, or a tuple of these with one list at most; negatives
    count from the end. Raises SliceError if it does not fit, or cuts through packed elements.
    """
    items = list(index) if isinstance(index, tuple) else [index]
    dots = [at for at, item in enumerate(items) if item is Ellipsis]
    missing = len(info.shape) - len(items) + len(dots)
    if len(dots) > 1 or missing < 0:
        raise _bad(info, index, f"{len(info.shape)} indices and one Ellipsis at most")
    at = dots[0] if dots else len(items)
    items[at : at + len(dots)] = [slice(None)] * missing
    # NumPy moves or joins the dims of several lists, and of lists apart from ints.
    lists = [n for n, item in enumerate(items) if _is_list(item)]
    single = [n for n, item in enumerate(items) if not isinstance(item, slice)]
    if len(lists) > 1 or (lists and single[-1] - single[0] >= len(single)):
        raise _bad(info, index, "one list of integers at most, next to any integers")
    try:
        axes = tuple(map(_axis, items, info.shape))
    except (TypeError, ValueError, IndexError) as error:
        raise _bad(info, index, str(error)) from None
    return _unless_whole(info, index, axes)


def boxed(info: TensorInfo, box: Box) -> Selection | None:
    """The selection of a box: half-open (start, stop) for each dim; None if it is the whole tensor.

    Raises SliceError if it cuts through packed elements.
    """
    return _unless_whole(info, box, tuple(Axis(start, stop - start) for start, stop in box))


def _is_list(item: Any) -> bool:
    return isinstance(item, list) or (getattr(item, "ndim", 0) == 1 and hasattr(item, "tolist"))


def _axis(item: Any, length: int) -> Axis:
    if isinstance(item, slice):
        start, stop, step = item.indices(length)
        return Axis(start, len(range(start, stop, step)), step)
    if not _is_list(item):
        return Axis(_number(item, length), 1, drop=True)
    found = [_number(each, length) for each in (item if isinstance(item, list) else item.tolist())]
    if not found:
        return Axis(0, 0)
    # Integers at equal distances are a slice.
    steps = {b - a for a, b in itertools.pairwise(found)} or {1}
    if len(steps) == 1 and 0 not in steps:
        return Axis(found[0], len(found), steps.pop())
    return Axis(found[0], len(found), picks=tuple(found))


def _number(item: Any, length: int) -> int:
    if isinstance(item, bool) or getattr(item, "ndim", 0) or not hasattr(item, "__index__"):
        raise TypeError("integers, slices, Ellipsis or a list of integers")
    number = operator.index(item)
    if not -length <= number < length:
        raise IndexError(f"integers from {-length} to {length - 1}")
    return number % length


def _unless_whole(info: TensorInfo, index: Any, axes: Selection) -> Selection | None:
    if all(axis == (0, n, 1, False, None) for axis, n in zip(axes, info.shape, strict=True)):
        return None
    block = info.dtype.elements
    if block > 1:
        # Elements that share a byte can only be taken in whole blocks of the last dim.
        last, length = axes[-1], info.shape[-1]
        fits = length % block == 0 and last.start % block == 0 and last.size % block == 0
        if not fits or last.step != 1 or last.drop or last.picks:
            expected = f"whole blocks of {block} elements of {info.dtype} in the last dim"
            raise _bad(info, index, expected)
    return axes


def _bad(info: TensorInfo, index: Any, expected: str) -> errors.SliceError:
    return errors.SliceError(
        f"the index does not fit the tensor of shape {list(info.shape)}",
        tensor=info.name,
        expected=expected,
        found=repr(index),
    )
