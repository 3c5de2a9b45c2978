"""Arrays of a process as a checkpoint, to be compared with another one."""

from __future__ import annotations

import bisect
import os
import threading
from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np

from mfload import errors
from mfload.index import Columns, Index, Piece, Table, TensorInfo
from mfload.saving import export
from mfload.saving.save import fetched
from mfload.sources.memory import MemorySource
from mfload.trees import outline


def is_held(given: object) -> bool:
    """Whether it is a state, as `mfload.save` takes it, and not the path of one or several."""
    if isinstance(given, Mapping) or outline.framework_of(given) is not None:
        return True
    if isinstance(given, list | tuple):
        return bool(given) and not any(
            isinstance(each, str | os.PathLike | bytes | bytearray | memoryview)
            or hasattr(each, "read_into")
            for each in cast("Sequence[object]", given)
        )
    return outline.is_tree(given)


def read(state: Any) -> tuple[Index, list[Any]]:
    """The arrays of a state as an index and its source, named as `mfload.save` names them.

    Raises UsageError or UnsupportedArrayError as `mfload.save` does.
    """
    source = HeldArrays(export.export(outline.by_name(state)[0]))
    rows: list[TensorInfo] = []
    for each, start in zip(source.tensors, source.starts, strict=True):
        piece = Piece(0, start, each.nbytes)
        rows.append(TensorInfo(each.name, each.dtype, each.shape, (piece,)))
    return Index((source.name,), Table(Columns.of(rows))), [source]


class HeldArrays(MemorySource):
    """The bytes of arrays, one after the other; copies go once all of an array was read.

    Attributes:
        tensors: The arrays.
        starts: First byte of each.
    """

    def __init__(self, tensors: list[export.TensorToSave]) -> None:
        super().__init__(b"")
        self.tensors, self.starts, self.size = tensors, list[int](), 0
        for each in tensors:
            self.starts.append(self.size)
            self.size += each.nbytes
        self.name = f"<{errors.counted(len(tensors), 'array')} in memory>"
        self._lock = threading.Lock()
        self._copies: dict[int, Any] = {}
        self._left = [each.nbytes for each in tensors]

    def part(self, offset: int, nbytes: int) -> Any:
        """A range of the bytes; each is read once."""
        pieces: list[Any] = []
        end, n = offset + nbytes, bisect.bisect_right(self.starts, offset) - 1
        while offset < end:
            tensor, start = self.tensors[n], self.starts[n]
            stop = min(end, start + tensor.nbytes)
            with self._lock:
                if n not in self._copies:
                    self._copies[n] = fetched(tensor)
                pieces.append(self._copies[n][offset - start : stop - start])
                self._left[n] -= stop - offset
                if self._left[n] <= 0:
                    del self._copies[n]
            offset, n = stop, n + 1
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
