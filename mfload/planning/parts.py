"""One part of each tensor: those that lie in the file as they are wanted are tensors themselves."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from operator import add
from typing import Any, NamedTuple

from mfload.dtypes import DType
from mfload.index import Columns, Piece, TensorInfo
from mfload.planning import extents
from mfload.planning.request import Request, WholeTensors
from mfload.planning.slicing import Selection


class TensorPart(NamedTuple):
    """What is taken of a tensor, and of all that are alike.

    Attributes:
        dtype: As stored.
        ahead: Bytes from the tensor's first to the part, if that lies there as it is wanted.
        selection: For one that does not.
    """

    dtype: DType
    shape: tuple[int, ...]
    nbytes: int
    ahead: int | None
    selection: Selection | None


def kinds(requests: Sequence[Request]) -> Sequence[int]:
    """A number for each request for a whole tensor: that of those that are alike."""
    if isinstance(requests, WholeTensors):
        return requests.columns.kind
    known: dict[Any, int] = {}
    made: list[int] = []
    for info, dtype, *_ in requests:
        kind = info.dtype.name, info.shape, dtype.name, info.simple
        made.append(known.setdefault(kind, len(known)))
    return made


def part(request: Request, selection: Selection | None) -> TensorPart:
    """What a selection takes of a whole tensor."""
    info, taken = request.info, request._replace(selection=selection)
    at = extents.contiguous(taken)
    ahead = None if at is None else at - info.pieces[0].offset
    return TensorPart(info.dtype, taken.shape, taken.nbytes, ahead, selection)


def take(
    requests: Sequence[Request], parts: Sequence[TensorPart], numbers: Sequence[int]
) -> Sequence[Request]:
    """Requests for a part of each whole tensor: the one of `parts` with its number."""
    columns = requests.columns if isinstance(requests, WholeTensors) else None
    ahead = [each.ahead or 0 for each in parts]
    if columns is None or any(each.ahead is None for each in parts):
        return [
            _taken(*pair) for pair in zip(requests, map(parts.__getitem__, numbers), strict=True)
        ]
    known: dict[Any, int] = {}
    kinds = [known.setdefault((each.dtype, each.shape), len(known)) for each in parts]
    sizes = [each.nbytes for each in parts]
    kind, aheads, nbytes = (
        array("q", map(column.__getitem__, numbers)) for column in (kinds, ahead, sizes)
    )
    offsets = array("q", map(add, columns.offsets, aheads))
    moved = columns.names, list(known), kind, columns.sources, offsets, nbytes
    return WholeTensors(Columns(*moved))


def _taken(request: Request, part: TensorPart) -> Request:
    info, dtype, _, checked, devices = request
    if part.ahead is None:
        return Request(info, dtype, part.selection, checked, devices)
    source, offset, *_ = info.pieces[0]
    piece = Piece(source, offset + part.ahead, part.nbytes)
    alone = TensorInfo(info.name, info.dtype, part.shape, (piece,))
    return Request(alone, dtype, None, checked, devices)
