"""Parts of tensors: indices as in NumPy and boxes, turned into plain numbers for each dim. Pure."""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from mfload import errors
from mfload.index import Box, TensorInfo

_LAYOUTS = 1024  # Layouts of views of which the selections are kept: layers of a model are alike.


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


class Selection(tuple[Axis, ...]):
    """What is taken of each dim. Tensors that are alike share it, so it keeps what it computes.

    Attributes:
        leads: The dim of the result that NumPy makes the first; 0 if it is in its place.
        steps: Elements between neighbours of each dim in the memory that it lands in; None if the
            result lies in C order.
    """

    leads = 0
    steps: tuple[int, ...] | None = None

    @functools.cached_property
    def shape(self) -> tuple[int, ...]:
        """Shape of the result."""
        return tuple([axis.size for axis in self if not axis.drop])

    @functools.cached_property
    def size(self) -> int:
        """Elements of the result."""
        return math.prod(self.shape)

    @functools.cached_property
    def simple(self) -> bool:
        """Whether it has neither steps nor lists."""
        return all((axis.step == 1 and axis.picks is None) or axis.size == 1 for axis in self)


def select(info: TensorInfo, index: Any) -> Selection | None:
    """Turns an index as in NumPy's basic indexing into a selection; None if it takes all.

    An int, a slice, Ellipsis, a list of ints, or a tuple of these with one list at most; negatives
    count from the end. Dims are in the order of the tensor's, also where NumPy's are not
    (`Selection.leads`). Raises SliceError if it does not fit, or cuts through packed elements.
    """
    items = list(index) if isinstance(index, tuple) else [index]
    dots = [at for at, item in enumerate(items) if item is Ellipsis]
    missing = len(info.shape) - len(items) + len(dots)
    if len(dots) > 1 or missing < 0:
        raise _bad(info, index, f"{len(info.shape)} indices and one Ellipsis at most")
    at = dots[0] if dots else len(items)
    # For NumPy a list is apart from an integer also by an Ellipsis that stands for nothing.
    picked = [n for n, item in enumerate(items) if item is not ... and not isinstance(item, slice)]
    apart = len(picked) > 1 and picked[-1] - picked[0] >= len(picked)
    items[at : at + len(dots)] = [slice(None)] * missing
    lists = [n for n, item in enumerate(items) if _is_list(item)]
    if len(lists) > 1:
        raise _bad(info, index, "one list of integers at most")
    try:
        axes = Selection(map(_axis, items, info.shape))
    except (TypeError, ValueError, IndexError) as error:
        raise _bad(info, index, str(error)) from None
    if lists and apart:
        axes.leads = sum(not axis.drop for axis in axes[: lists[0]])
    return _unless_whole(info, index, axes)


def within(info: TensorInfo, outer: Selection | None, index: Any) -> Selection | None:
    """The selection of an index into a part of a tensor; `outer` is that of the part.

    Raises SliceError as `select` does, and for a list of integers.
    """
    part = info if outer is None else info._replace(shape=outer.shape)
    inner = select(part, index)
    if inner is None:
        return outer
    if inner.leads or any(axis.picks for axis in inner):
        raise _bad(part, index, "integers, slices and Ellipsis")
    return composed(info, outer, inner)


def composed(info: TensorInfo, outer: Selection | None, inner: Selection) -> Selection | None:
    """What a selection without lists takes of a part of a tensor, which lies in C order.

    `outer` is the selection of the part. Raises SliceError if it cuts through packed elements.
    """
    if outer is None:
        return _unless_whole(info, inner.shape, inner)
    axes, paces = list(outer), [1] * len(outer)
    rest = zip(inner, inner.steps or [1] * len(inner), strict=True)
    for n, (start, _, step, drop, *_) in enumerate(outer):
        if not drop:
            axis, paces[n] = next(rest)
            axes[n] = Axis(start + axis.start * step, axis.size, step * axis.step, axis.drop)
    made = Selection(axes)
    made.steps = None if inner.steps is None else tuple(paces)
    return _unless_whole(info, inner.shape, made)


def runs(info: TensorInfo, index: Any) -> tuple[Sequence[int], int, tuple[int, ...]] | None:
    """Where in a tensor what an index takes begins, the bytes of each run, and the shape of all.

    One run, or rows of the first dim that lie apart: these are read in less time than a `Selection`
    takes to make. None: `select` says what the index means, or refuses it.
    """
    _, dtype, shape, _ = info
    if type(index) is int and shape and dtype.elements == 1 and -shape[0] <= index < shape[0]:
        nbytes = math.prod(shape[1:]) * dtype.nbytes
        return (index % shape[0] * nbytes,), nbytes, shape[1:]
    items: tuple[Any, ...] = index if isinstance(index, tuple) else (index,)
    if items and items[-1] is Ellipsis:
        items = items[:-1]
    if len(items) > len(shape) or dtype.elements > 1:
        return None
    start, several = 0, False  # `several`: more than one was taken of a dim before.
    rows: Sequence[int] = ()
    taken: tuple[int, ...] = ()
    try:
        for dim, (item, length) in enumerate(zip(items, shape, strict=False)):
            step, picks = 1, None
            if type(item) is slice:
                first, stop, step = item.indices(length)
                size = stop - first if step == 1 else len(range(first, stop, step))
                taken += (size,)
            elif type(item) is int or dim or not _is_list(item):
                first, size = _number(item, length), 1
            else:
                first, size, step, _, picks = _axis(item, length)
                taken += (size,)
            if size <= 0 or (several and size != length):
                return None
            if size > 1 and (step != 1 or picks):
                if dim:
                    return None
                rows, first = picks or range(first, first + size * step, step), 0
            start = start * length + first
            several = several or size > 1
    except (TypeError, ValueError, IndexError):
        return None
    nbytes = math.prod(shape[len(items) :]) * dtype.nbytes
    shape = *taken, *shape[len(items) :]
    if not rows:
        return (start * nbytes,), math.prod(shape) * dtype.nbytes, shape
    nbytes = math.prod(shape[1:]) * dtype.nbytes
    return [number * nbytes for number in rows], nbytes, shape


def boxed(info: TensorInfo, box: Box) -> Selection | None:
    """The selection of a box: half-open (start, stop) for each dim; None if it is the whole tensor.

    Raises SliceError if it cuts through packed elements.
    """
    return _unless_whole(info, box, Selection(Axis(start, stop - start) for start, stop in box))


def strided(box: Box, steps: Sequence[int]) -> Selection:
    """The selection of a box that lands in memory with so many elements between neighbours."""
    made = Selection(Axis(start, stop - start) for start, stop in box)
    made.steps = tuple(steps)
    return made


@functools.lru_cache(_LAYOUTS)
def laid(
    whole: tuple[int, ...], shape: tuple[int, ...], strides: tuple[int, ...], first: int
) -> Selection | None:
    """The selection of a view of an array: what any chain of indices, transposes, reshapes makes.

    What it takes lands in C order of the view. None if a box of the array holds more than the view:
    a diagonal, windows that overlap, a dim that was split and then turned, a run that begins in
    the middle of one row and ends in another; or if it holds nothing.

    Args:
        whole: The shape of the array, in C order.
        shape: That of the view.
        strides: Of the view, in elements of the array.
        first: The number of its first element.
    """
    if 0 in whole or 0 in shape:
        return None
    walks, axes, paces, unit, tight = _walks(shape, strides), list[Axis](), list[int](), 1, 1
    in_order = True
    for length in reversed(whole):
        start, count, step, pace = first // unit % length, 1, 1, 1
        if walks and abs(walks[-1][0]) < unit * length:
            stride, size, pace = walks.pop()
            sign = -1 if stride < 0 else 1
            step, rest = divmod(sign * stride, unit)
            if rest or not step:
                return None
            count = min(size, (start if sign < 0 else length - 1 - start) // step + 1)
            if count < size:
                # It goes on in the dim before, if each row of that holds the same elements.
                if size % count or length != count * step:
                    return None
                walks.append((sign * unit * length, size // count, pace * count))
            step = sign * step if count > 1 else 1
        axes.append(Axis(start, count, step))
        paces.append(pace)
        in_order = in_order and (count == 1 or pace == tight)
        unit, tight = unit * length, tight * count
    if walks:
        return None
    made = Selection(reversed(axes))
    made.steps = None if in_order else tuple(reversed(paces))
    return made


def _walks(shape: Sequence[int], strides: Sequence[int]) -> list[tuple[int, int, int]]:
    """The dims of a view, those of short strides last: stride, size, and its stride in C order.

    Dims that follow each other in the array and in the view are one.
    """
    walks, pace = list[tuple[int, int, int]](), 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size == 1:
            continue
        step, count, first = walks[-1] if walks else (0, 0, 0)
        if stride and stride == step * count:
            walks[-1] = step, count * size, first
        else:
            walks.append((stride, size, pace))
        pace *= size
    return sorted(walks, key=lambda walk: -abs(walk[0]))


def shape_of(box: Box) -> tuple[int, ...]:
    """Shape of a box."""
    return tuple([stop - start for start, stop in box])


def intersection(box: Box, other: Box) -> Box | None:
    """What two boxes have in common; None if that is nothing."""
    common = tuple([(max(a, c), min(b, d)) for (a, b), (c, d) in zip(box, other, strict=True)])
    return common if all(start < stop for start, stop in common) else None


def units_of(info: TensorInfo) -> list[int]:
    """Elements of each dim that stay together, as they share a byte."""
    shape, elements = info.shape, info.dtype.elements
    if shape and shape[-1] % elements:
        return list(shape)  # Rows share bytes as well.
    return [1] * (len(shape) - 1) + [elements]


def cuts(box: Box, units: Sequence[int], count: int) -> tuple[int, list[int]]:
    """The outermost dim of a box that can be cut, and its ends in `count` runs of rows or more.

    Runs are of whole `units` of the dim, and of one at least; no ends if no dim can be cut.
    """
    for dim, ((start, stop), unit) in enumerate(zip(box, units, strict=False)):
        if stop - start > unit:
            step = max(1, (stop - start) // (count * unit)) * unit
            return dim, [*range(start, stop, step), stop]
    return 0, []


def slabs(info: TensorInfo, nbytes: int, most: int, again: int | None = None) -> Iterator[Box]:
    """Boxes of up to `most` of a tensor's `nbytes`, or one element, one after the other in C order.

    Rows of chunks that are decoded as a whole stay together. Where these are larger, boxes have up
    to `again` bytes (default: `most`), since each decodes its chunks anew.
    """
    units, stored = units_of(info), info.pieces[0].stored
    if stored is not None and stored.encodings and info.shape:
        start, stop = stored.box[0] if stored.box else (0, info.shape[0])
        if (stop - start) * nbytes <= most * info.shape[0]:
            units[0] = math.lcm(units[0], stop - start)
        else:
            most = again or most
    return _slabs(tuple((0, length) for length in info.shape), units, nbytes, most)


def _slabs(box: Box, units: Sequence[int], nbytes: int, most: int) -> Iterator[Box]:
    dim, ends = cuts(box, units, -(-nbytes // most)) if nbytes > most else (0, [])
    if not ends:
        yield box
        return
    length = ends[-1] - ends[0]
    for start, stop in itertools.pairwise(ends):
        inner = (*box[:dim], (start, stop), *box[dim + 1 :])
        yield from _slabs(inner, units, nbytes * (stop - start) // length, most)


def boxes_between(start: int, stop: int, shape: Sequence[int]) -> Iterator[Box]:
    """The boxes that make up a range of elements in C order, one after the other."""
    if not shape:
        yield from [()] * (stop - start)
        return
    row = math.prod(shape[1:])
    while start < stop:
        first, inner = divmod(start, row)
        end = stop // row * row
        if inner or end <= start:
            end = min(stop, (first + 1) * row)
            for box in boxes_between(inner, end - first * row, shape[1:]):
                yield ((first, first + 1), *box)
        else:
            yield ((first, end // row), *((0, length) for length in shape[1:]))
        start = end


def first_element(box: Box, inner: Box) -> int:
    """The number of the first element of a box inside another, in C order."""
    at = 0
    for (start, stop), (first, _) in zip(box, inner, strict=True):
        at = at * (stop - start) + first - start
    return at


def _is_list(item: Any) -> bool:
    return isinstance(item, list) or (getattr(item, "ndim", 0) == 1 and hasattr(item, "tolist"))


def _axis(item: Any, length: int) -> Axis:
    if isinstance(item, slice):
        start, stop, step = item.indices(length)
        return Axis(start, len(range(start, stop, step)), step)
    if not _is_list(item):
        return Axis(_number(item, length), 1, drop=True)
    given: list[Any] = item if isinstance(item, list) else item.tolist()
    if set(map(type, given)) == {int} and -length <= min(given) and max(given) < length:
        found = [number % length for number in given]  # Many take less time than one by one.
    else:
        found = [_number(each, length) for each in given]
    if not found:
        return Axis(0, 0)
    # Integers at equal distances are a slice.
    step = found[1] - found[0] if len(found) > 1 else 1
    if step and found == [*range(found[0], found[0] + len(found) * step, step)]:
        return Axis(found[0], len(found), step)
    return Axis(found[0], len(found), picks=tuple(found))


def _number(item: Any, length: int) -> int:
    number = item
    if type(item) is not int:
        if isinstance(item, bool) or getattr(item, "ndim", 0) or not hasattr(item, "__index__"):
            raise TypeError("integers, slices, Ellipsis or a list of integers")
        number = operator.index(item)
    if not -length <= number < length:
        raise IndexError(f"integers from {-length} to {length - 1}")
    return number % length


def _unless_whole(info: TensorInfo, index: Any, axes: Selection) -> Selection | None:
    pairs = zip(axes, info.shape, strict=True)
    if axes.steps is None and all(axis == (0, n, 1, False, None) for axis, n in pairs):
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
