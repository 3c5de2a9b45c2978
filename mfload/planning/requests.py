"""Placement: which part of each tensor is needed, in a form that no framework owns.

A whole tensor is a `Request` without a selection. A slice as people write it (`w[..., 8:16]`) is
turned into a `Selection`, plain numbers for each dim, before anything is read.
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
        drop: Whether the dim vanishes from the result, as an integer index makes it.
        picks: The elements one by one, if they have no step in common.
    """

    start: int
    size: int
    step: int = 1
    drop: bool = False
    picks: tuple[int, ...] | None = None

    def at(self, n: int) -> int:
        """The n-th element taken."""
        return self.start + n * self.step if self.picks is None else self.picks[n]


Selection = tuple[Axis, ...]


class Request(NamedTuple):
    """What one device needs of one tensor.

    Attributes:
        selection: The part of it, None for all.
        checked: Whether values are checked on conversion (a cast asked for by name).
        devices: Which of the adapter's devices want it, by their numbers; none where the adapter
            has one device alone.
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
    """Turns an index as NumPy's basic indexing knows it into a selection.

    Args:
        index: An int, a slice, Ellipsis, a list of ints, or a tuple of these with one list at
            most; negatives count from the end.

    Returns:
        An axis for each dim of the tensor, None where it takes all of it.

    Raises:
        SliceError: It does not fit the tensor, or cuts through packed elements.
    """
    items = list(index) if isinstance(index, tuple) else [index]
    dots = [at for at, item in enumerate(items) if item is Ellipsis]
    if len(dots) > 1:
        raise _bad(info, index, "one Ellipsis at most")
    rank = len(info.shape)
    given = len(items) - len(dots)
    if given > rank:
        raise _bad(info, index, f"{rank} indices at most")
    at = dots[0] if dots else len(items)
    items[at : at + len(dots)] = [slice(None)] * (rank - given)
    axes = tuple(
        _axis(info, index, item, length) for item, length in zip(items, info.shape, strict=True)
    )
    _check_lists(info, index, items)
    if axes == tuple(Axis(0, length) for length in info.shape):
        return None
    if info.dtype.elements > 1:
        _check_packed(info, index, axes)
    return axes


def boxed(info: TensorInfo, box: Box) -> Selection | None:
    """The selection of a box, None where it is the whole tensor.

    Args:
        box: Half-open (start, stop) for each of its dims.

    Raises:
        SliceError: It cuts through packed elements.
    """
    if box == tuple((0, length) for length in info.shape):
        return None
    axes = tuple(Axis(start, stop - start) for start, stop in box)
    if info.dtype.elements > 1:
        _check_packed(info, box, axes)
    return axes


def _check_lists(info: TensorInfo, index: Any, items: list[Any]) -> None:
    """NumPy moves or joins the dims of several lists, and of lists apart from ints."""
    lists = [n for n, item in enumerate(items) if _is_list(item)]
    if not lists:
        return
    ints = [n for n, item in enumerate(items) if not isinstance(item, slice) and n not in lists]
    together = sorted((*lists, *ints))
    if len(lists) > 1 or together[-1] - together[0] >= len(together):
        raise _bad(info, index, "one list of integers at most, next to any integers")


def _is_list(item: Any) -> bool:
    return isinstance(item, list) or (getattr(item, "ndim", 0) == 1 and hasattr(item, "tolist"))


def _picked(info: TensorInfo, index: Any, item: Any, length: int) -> Axis:
    """The axis of a list of integers; those at equal distances are a slice."""
    found: list[int] = []
    for each in item if isinstance(item, list) else item.tolist():
        if isinstance(each, bool) or not hasattr(each, "__index__"):
            raise _bad(info, index, "a list of integers; booleans select nothing here")
        number = operator.index(each)
        if not -length <= number < length:
            raise _bad(info, index, f"integers from {-length} to {length - 1}")
        found.append(number % length)
    if not found:
        return Axis(0, 0)
    steps = {b - a for a, b in itertools.pairwise(found)} or {1}
    if len(steps) == 1 and 0 not in steps:
        return Axis(found[0], len(found), steps.pop())
    return Axis(found[0], len(found), 1, picks=tuple(found))


def _axis(info: TensorInfo, index: Any, item: Any, length: int) -> Axis:
    if _is_list(item):
        return _picked(info, index, item, length)
    if isinstance(item, slice):
        try:
            start, stop, step = item.indices(length)
        except (TypeError, ValueError) as error:
            raise _bad(info, index, str(error)) from None
        return Axis(start, len(range(start, stop, step)), step)
    if isinstance(item, bool) or getattr(item, "ndim", 0):
        raise _bad(info, index, "integers, slices, Ellipsis or a list of integers")
    try:
        number = operator.index(item)
    except TypeError:
        raise _bad(info, index, "integers, slices, Ellipsis or a list of integers") from None
    if not -length <= number < length:
        raise _bad(info, index, f"an index from {-length} to {length - 1}")
    return Axis(number % length, 1, 1, drop=True)


def _check_packed(info: TensorInfo, index: Any, axes: Selection) -> None:
    """Elements that share a byte can only be taken in whole blocks of the last dim."""
    block = info.dtype.elements
    last, length = axes[-1], info.shape[-1]
    fits = length % block == 0 and last.start % block == 0 and last.size % block == 0
    if not fits or last.step != 1 or last.drop or last.picks:
        raise _bad(info, index, f"whole blocks of {block} elements of {info.dtype} in the last dim")


def _bad(info: TensorInfo, index: Any, expected: str) -> errors.SliceError:
    return errors.SliceError(
        f"the index does not fit the tensor of shape {list(info.shape)}",
        tensor=info.name,
        expected=expected,
        found=repr(index),
    )
