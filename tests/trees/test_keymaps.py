"""Key maps as their users write them, whole and box by box."""

from __future__ import annotations

import numpy as np
import pytest
from keymaps import CASES, HEAD, Arrays

from mfload import dtypes
from mfload.index import Box, Index, Piece, TensorInfo
from mfload.trees.matching import match
from mfload.trees.recipe import Leaf


def _index(stored: Arrays) -> Index:
    rows = {}
    for name, array in stored.items():
        row = dtypes.resolve(array.dtype)
        rows[name] = TensorInfo(name, row, array.shape, (Piece(0, 0, array.nbytes),))
    return Index(("file",), rows)


def _leaves(arrays: Arrays) -> list[Leaf]:
    return [Leaf((name,), a.shape, dtypes.resolve(a.dtype)) for name, a in arrays.items()]


def _boxes(shape: tuple[int, ...]) -> list[Box]:
    """All of it, and the halves along each dim."""
    whole = tuple((0, size) for size in shape)
    found = [whole]
    for at, size in enumerate(shape):
        for part in ((0, size // 2), (size // 2, size)):
            found.append((*whole[:at], part, *whole[at + 1 :]))
    return found


@pytest.mark.parametrize("case", CASES)
def test_every_box_is_what_numpy_makes(case: str) -> None:
    stored, key_map, expected = CASES[case]()
    matched = match(_index(stored), _leaves(expected), key_map)
    assert list(matched.recipes) == list(range(len(expected)))
    for recipe, leaf in zip(matched.recipes.values(), expected.values(), strict=True):
        assert recipe.transform.shape == leaf.shape
        for box in _boxes(leaf.shape):
            transform, reads = recipe.transform.part(box)
            arrays = [
                stored[recipe.tensors[number].name][tuple(slice(*dim) for dim in read)]
                for number, read in reads
            ]
            made = transform.evaluate([each.astype(recipe.landed.numpy) for each in arrays], np)
            wanted = leaf[tuple(slice(*dim) for dim in box)]
            assert made.dtype == wanted.dtype
            assert np.array_equal(
                made.view(np.uint16), np.ascontiguousarray(wanted).view(np.uint16)
            )
            # Only parts of heads are no box of what is stored.
            if all(
                b - a == size or size != HEAD for (a, b), size in zip(box, leaf.shape, strict=True)
            ):
                assert sum(array.size for array in arrays) == wanted.size


def test_maps_for_a_family_say_what_they_did_not_need() -> None:
    stored, key_map, expected = CASES["tunix llama"]()
    matched = match(_index(stored), _leaves(expected), key_map)
    (note,) = matched.notes
    assert "matched nothing" in note
    assert "norm" in note
