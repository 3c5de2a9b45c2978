"""Landing: what leaves are made of goes straight to its place in memory that is there.

A transposed, reshaped, split, stacked or joined tensor is a box of what is stored, whose elements
have strides in the leaf. Only products, and boxes that a reshape has grown, are made of what has
landed before (see `batches`).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import Any, NamedTuple

from mfload.dlpack import array_at
from mfload.index import Box
from mfload.planning.extents import c_strides
from mfload.planning.request import Request
from mfload.planning.slicing import Selection, boxed, shape_of, strided
from mfload.trees.recipe import Recipe, new_row


class Target(NamedTuple):
    """Memory on the host that a leaf, or a box of it, lies in; strides are in elements."""

    owner: Any
    address: int
    strides: tuple[int, ...]


class _Place(NamedTuple):
    """Where a tensor goes: its number, the box of it, and the bytes that it lies in."""

    tensor: int
    selection: Selection | None
    at: int
    nbytes: int


class Landing:
    """What lands in targets, by their owners: requests, and the memory that each is for.

    Requests name their memory by numbers from `first` on, as `InPlaceAdapter` wants it.
    """

    def __init__(self, memory: dict[int, Any], first: int = 0) -> None:
        self.requests: list[Request] = []
        self._memory, self._first = memory, first
        self._places: dict[Hashable, tuple[int, list[_Place]]] = {}
        self._kinds: dict[Any, tuple[Any, list[_Place] | None]] = {}

    def add(self, owner: Hashable, recipe: Recipe, box: Box, strides: Sequence[int]) -> bool:
        """Takes a box of a leaf, if strides say where it goes; `give` says in which memory."""
        # Leaves of one transform are alike; it is kept, so that its id stays its own.
        kind = id(recipe.transform), id(recipe.landed), box, strides
        if (known := self._kinds.get(kind)) is None:
            known = self._kinds[kind] = recipe, _found(recipe, box, strides)
        places, first = known[1], self._first + len(self.requests)
        if places is None:
            return False
        self._places[owner] = first, places
        for number, (tensor, selection, _, _) in enumerate(places, first):
            row = recipe.tensors[tensor], recipe.landed, selection, recipe.checked, (number,)
            self.requests.append(new_row(Request, row))
        return True

    def give(self, owner: Hashable, target: Target) -> None:
        """Says where the memory is; its strides are those of `add`."""
        (memory, address, _), (first, places) = target, self._places[owner]
        for number, (_, _, at, nbytes) in enumerate(places, first):
            self._memory[number] = array_at(memory, address + at, (nbytes,))

    def __contains__(self, owner: object) -> bool:
        return owner in self._places

    def __iter__(self) -> Iterator[Any]:
        return iter(self._places)


def _found(recipe: Recipe, box: Box, strides: Sequence[int]) -> list[_Place] | None:
    if not all(start < stop for start, stop in box):
        return []
    if recipe.landed.elements > 1 or recipe.tensors[0].dtype.elements > 1:
        return None
    transform, reads = recipe.transform.part(box)
    places = transform.places(strides)
    if places is None:
        return None
    unit, found = recipe.landed.nbytes, list[_Place]()
    known: dict[Any, Selection | None] = {}  # Tensors that are alike share their selections.
    for (tensor, inner), (at, steps) in zip(reads, places, strict=True):
        info, shape = recipe.tensors[tensor], shape_of(inner)
        key = info.shape, inner, steps
        if key not in known:
            pairs = zip(shape, steps, c_strides(shape, 1), strict=True)
            tight = all(size == 1 or step == wanted for size, step, wanted in pairs)
            known[key] = boxed(info, inner) if tight else strided(inner, steps)
        reach = sum((size - 1) * step for size, step in zip(shape, steps, strict=True)) + 1
        found.append(_Place(tensor, known[key], at * unit, reach * unit))
    return found
