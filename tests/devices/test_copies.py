"""Rows: what a copy engine is told must be what NumPy would pick."""

from __future__ import annotations

import numpy as np
from devices.fake import span
from hypothesis import given, strategies as st

from mfload.cuda.copies import rows
from mfload.cuda.device import Rows
from mfload.planning.blocks import Copy


@given(st.data())
def test_rows_hold_what_a_copy_takes(data: st.DataObject) -> None:
    unit = data.draw(st.sampled_from([1, 2, 4]))
    kind = np.dtype(f"V{unit}") if unit > 1 else np.dtype(np.uint8)
    full = tuple(data.draw(st.lists(st.integers(1, 5), min_size=0, max_size=4)))
    whole = np.arange(max(1, int(np.prod(full))) * unit, dtype=np.uint8).view(kind).reshape(full)
    cuts = tuple(
        slice(data.draw(st.integers(0, length - 1)), None, data.draw(st.sampled_from([1, 1, 2])))
        for length in full
    )
    part = whole[cuts] if full else whole
    first = part.__array_interface__["data"][0] - whole.__array_interface__["data"][0]
    found = rows(Copy(part.shape, part.strides, 0, kind, kind))
    if found is None:
        assert part.ndim > 1 or part.strides[-1] < part.itemsize
        return
    flat = np.frombuffer(whole.tobytes(), np.uint8)[first:]
    made = b"".join(flat[n * found.pitch :][: found.nbytes].tobytes() for n in range(found.count))
    assert made == part.tobytes()
    assert span(found) <= flat.nbytes


def test_what_lies_together_is_one_row() -> None:
    kind = np.dtype("V2")
    assert rows(Copy((3, 4), (8, 2), 0, kind, kind)) == Rows(1, 24, 24)
    assert rows(Copy((3, 4), (16, 2), 0, kind, kind)) == Rows(3, 8, 16)
    assert rows(Copy((2, 3, 4), (48, 16, 2), 0, kind, kind)) == Rows(6, 8, 16)
    assert rows(Copy((2, 3, 4), (64, 16, 2), 0, kind, kind)) is None
    assert rows(Copy((4,), (-2,), 6, kind, kind)) is None
    assert rows(Copy((3, 4), (-8, 2), 16, kind, kind)) is None
