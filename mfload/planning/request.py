"""Requests: which part of each tensor is needed, and where it lands.

A whole tensor is a `Request` without a selection. A slice such as `w[..., 8:16]` becomes a
`Selection`, plain numbers for each dim, before anything is read (see `slicing`).
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, overload

from mfload import errors
from mfload.dtypes import DType
from mfload.index import Box, Columns, TensorInfo

if TYPE_CHECKING:
    from mfload.planning.slicing import Selection

_NAME, _NBYTES = operator.attrgetter("info.name"), operator.attrgetter("nbytes")
_new: Any = tuple.__new__  # Named tuples' own constructors take twice the time.
_MANY = 256


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
    def by_host(self) -> bool:
        """Whether it is put together on the host.

        What is encoded, not in C order or wanted with steps in memory is; so are columns of a list.
        """
        if self.selection is not None and self.selection.steps is not None:
            return True
        return not self.info.simple or any(axis.picks for axis in (self.selection or ())[1:])

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the result."""
        return self.info.shape if self.selection is None else self.selection.shape

    @property
    def nbytes(self) -> int:
        """Bytes of the result."""
        _, dtype, selection, *_ = self
        if selection is not None:
            return selection.size // dtype.elements * dtype.nbytes
        if dtype is self.info.dtype:
            return self.info.nbytes
        return dtype.size_of(self.info.shape) or 0


class WholeTensors(Sequence[Request]):
    """Requests for whole tensors as they are stored, in columns; one is made when it is asked for.

    All of the tensors are simple.
    """

    def __init__(self, columns: Columns) -> None:
        self.columns = columns

    @overload
    def __getitem__(self, number: int) -> Request: ...
    @overload
    def __getitem__(self, number: slice) -> WholeTensors: ...
    def __getitem__(self, number: int | slice) -> Request | WholeTensors:
        if isinstance(number, slice):
            return WholeTensors(self.columns[number])
        info = self.columns[number]
        return Request(info, info.dtype)

    def __iter__(self) -> Iterator[Request]:
        return (_new(Request, (info, info.dtype, None, False, ())) for info in self.columns)

    def __len__(self) -> int:
        return len(self.columns)

    def of_each_kind(self) -> WholeTensors:
        """The first of each dtype and shape, in order."""
        kind = self.columns.kind
        first = dict(zip(reversed(kind), range(len(kind) - 1, -1, -1), strict=True))
        return WholeTensors(self.columns.take(sorted(first.values())))


def whole(columns: Columns) -> Sequence[Request]:
    """Requests for whole tensors as they are stored."""
    if len(columns.names) >= _MANY and not columns.others:
        return WholeTensors(columns)
    made: list[Request] = []
    for info in columns:  # A few take less time in rows.
        made.append(Request(info, info.dtype))
    return made


def compact(requests: Sequence[Request]) -> Sequence[Request]:
    """The same in columns, if they are many, and all for whole tensors as they are stored."""
    if len(requests) < _MANY:
        return requests
    if any(s is not None or d is not i.dtype or not i.simple for i, d, s, *_ in requests):
        return requests
    return WholeTensors(Columns.of(request.info for request in requests))


def ordered(requests: Sequence[Request], order: Iterable[str]) -> list[Request]:
    """The requests in an order of names; raises UsageError unless each is there once."""
    rows, made = {request.info.name: request for request in requests}, list[Request]()
    count, found = len(rows), "nothing of "
    try:
        made += [rows.pop(name) for name in order]
    except (KeyError, TypeError) as error:
        rows, found = {str(error): None}, "unknown or repeated: "
    if rows:
        expected = f"the names of the {errors.counted(count, 'selected tensor')}, each once"
        found += ", ".join([*rows][:10])
        raise errors.UsageError("order= does not fit the tensors", expected=expected, found=found)
    return made


def names(requests: Sequence[Request]) -> Sequence[str]:
    """The name of the tensor of each request."""
    if isinstance(requests, WholeTensors):
        return requests.columns.names
    return list(map(_NAME, requests))


def sizes(requests: Sequence[Request]) -> Sequence[int]:
    """Bytes of the result of each request."""
    if isinstance(requests, WholeTensors):
        return requests.columns.nbytes
    return list(map(_NBYTES, requests))


def stored_bytes(requests: Sequence[Request]) -> int:
    """Bytes of the files that requests want, each part counted once."""
    nbytes = 0
    seen: set[tuple[str, Selection | None]] = set()
    for request in requests:
        info, _, selection, *_ = request
        if (part := (info.name, selection)) not in seen:
            seen.add(part)
            nbytes += info.nbytes if selection is None else info.dtype.size_of(selection.shape) or 0
    return nbytes


Owner = Literal["mfload", "framework", "source"]
"""Whose memory a result lies in; in that of its source, it lies there already."""


class Allocation(NamedTuple):
    """Where a request lands. The adapter says it once a request.

    Attributes:
        device: Number of the adapter's device in whose memory it lands; None for the host's.
        copied: Whether the framework copies it out of that memory afterwards.
        near: Whether its source has it on a device, from which devices take it: it is not read.
    """

    device: int | None
    owner: Owner
    copied: bool
    near: bool = False


HOST = Allocation(None, "mfload", copied=False)
"""mfload's buffers in host memory, which the arrays alias."""


def box_of(request: Request) -> Box:
    """The box of its tensor that a request wants."""
    if request.selection is None:
        return tuple((0, length) for length in request.info.shape)
    return tuple((axis.start, axis.start + axis.size) for axis in request.selection)
