"""Whether two checkpoints hold the same tensors, bit for bit, however they are sharded."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from mfload import errors, packed
from mfload.checking import pairing
from mfload.checking.inspecting import Inspected, Problem
from mfload.checking.pairing import Pair
from mfload.index import TensorInfo
from mfload.runtime import Deadline


class Equality:
    """Compares every tensor of a checkpoint with that of another.

    Args:
        seen: The one; what is found is added to it.
        other: The other.
    """

    def __init__(self, seen: Inspected, other: Inspected) -> None:
        self._seen = seen
        self._other = other
        self._lock = threading.Lock()
        self._first: dict[str, tuple[int, str, str]] = {}
        here, there = seen.tensors, other.tensors
        problems = seen.problems
        problems += [each._replace(what=f"the other one: {each.what}") for each in other.problems]
        for name, info in here.items():
            if name not in there:
                problems.append(Problem("the tensor is only here", seen.file_of(info), name))
        for name, info in there.items():
            if name not in here:
                problems.append(Problem("the tensor is only there", other.file_of(info), name))
        common = [Pair(info, there[name]) for name, info in here.items() if name in there]
        self._pairs = [pair for pair in common if _kind(pair.left) == _kind(pair.right)]
        for left, right in common:
            if _kind(left) != _kind(right):
                what, file = "the tensors differ in dtype or shape", other.file_of(right)
                problems.append(Problem(what, file, left.name, _shown(left), _shown(right)))

    @property
    def nbytes(self) -> int:
        """Bytes to be read of the one checkpoint."""
        return sum(pair.left.nbytes for pair in self._pairs)

    def run(
        self, threads: int | None, deadline: Deadline, advance: Callable[[int], None] | None
    ) -> None:
        """Reads both and compares; where one can't be read, that is the problem."""
        problems = self._seen.problems
        try:
            self._seen.notes += pairing.walk(
                self._seen.sources,
                self._other.sources,
                self._pairs,
                self._visit,
                threads=threads,
                deadline=deadline,
                advance=advance,
            )
        except errors.LoadTimeoutError:
            raise
        except errors.SourceError as error:
            problems.append(Problem.of(error))
        for left, right in self._pairs:
            if left.name in self._first:
                element, expected, found = self._first[left.name]
                what = f"the tensors differ from {_place(left, element)} on"
                file = self._other.file_of(right)
                problems.append(Problem(what, file, left.name, expected, found))

    def _visit(self, pair: Pair, first: int, left: Any, right: Any) -> None:
        differ = left != right
        at = int(differ.argmax())
        if not differ[at]:
            return
        unit, width = pairing.block(pair.left)
        start = at // width * width
        ours = _values(pair.left, left[start : start + width])
        theirs = _values(pair.right, right[start : start + width])
        within = next((n for n in range(unit) if ours[n] != theirs[n]), 0)
        element = first + start // width * unit + within
        with self._lock:
            known = self._first.get(pair.left.name)
            if known is None or element < known[0]:
                self._first[pair.left.name] = element, ours[within], theirs[within]


def _kind(info: TensorInfo) -> tuple[str, tuple[int, ...], int]:
    return info.dtype.name, info.shape, info.nbytes


def _shown(info: TensorInfo) -> str:
    return f"{info.dtype} {list(info.shape)}"


def _place(info: TensorInfo, element: int) -> str:
    if not info.dtype.known:
        return f"byte {element}"
    return str([int(n) for n in np.unravel_index(element, info.shape)])


def _values(info: TensorInfo, block: Any) -> list[str]:
    """The elements of a smallest block, with their bits where the numbers may hide them."""
    raw = block.tobytes()[::-1].hex()
    if not info.dtype.known:
        return [f"0x{raw}"]
    numbers = packed.unpack(block.copy(), info.dtype.name, (info.dtype.elements,))
    if info.dtype.elements > 1:
        return [str(number) for number in numbers]
    return [f"{numbers[0]!s} (0x{raw})"]
