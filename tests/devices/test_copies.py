"""Rows: what a copy engine is told must be what NumPy would pick."""

from __future__ import annotations

import numpy as np
from devices.contract import download, noise, pinned
from devices.fake import FakeDevice, span
from hypothesis import given, strategies as st

from mfload.cuda import copies
from mfload.cuda.copies import DeviceCopier, rows
from mfload.cuda.device import DeviceRows
from mfload.planning.blocks import Block, Copy, Segment


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
    assert rows(Copy((3, 4), (8, 2), 0, kind, kind)) == DeviceRows(1, 24, 24)
    assert rows(Copy((3, 4), (16, 2), 0, kind, kind)) == DeviceRows(3, 8, 16)
    assert rows(Copy((2, 3, 4), (48, 16, 2), 0, kind, kind)) == DeviceRows(6, 8, 16)
    assert rows(Copy((2, 3, 4), (64, 16, 2), 0, kind, kind)) is None
    assert rows(Copy((4,), (-2,), 6, kind, kind)) is None
    assert rows(Copy((3, 4), (-8, 2), 16, kind, kind)) is None


def test_a_replica_behind_what_took_its_room() -> None:
    """What is prepared is prepared anew where the memory for that holds something else by now."""
    half, count = np.dtype("f2"), 64
    kind = np.dtype("f4")
    copy = Copy((count,), (4,), 0, kind, half)
    devices = [FakeDevice(), FakeDevice((1, 1), "fake:1")]
    memory = [each.allocate(2 * count * 2) for each in devices]
    first, second, replica = (
        Segment(at * 4 * count, 4 * count, buffer, into * 2 * count, copy)
        for at, buffer, into in ((0, 0, 0), (1, 0, 1), (0, 1, 0))
    )
    numbers = np.arange(2 * count, dtype=kind)
    with pinned(devices[0], numbers.nbytes) as landed, pinned(devices[0], 2 * count) as spare:
        landed[:] = numbers.view(np.uint8)
        copier = DeviceCopier(list(memory), streams := {})
        block = Block(0, 0, numbers.nbytes, (first, second, replica))
        for event in copier.copy(block, landed, spare=spare):
            event.wait()
        for stream in streams.values():
            stream.close()
    assert download(memory[0]).view(half).tolist() == numbers.tolist()
    assert download(memory[1]).view(half)[:count].tolist() == numbers[:count].tolist()


def test_what_is_given_on_before_its_room_is_taken_has_left_it() -> None:
    """On every device: the copies out of it have ended on all streams of the block."""
    half, count = np.dtype("f2"), 64
    copy = Copy((count,), (4,), 0, np.dtype("f4"), half)
    devices = [FakeDevice(), FakeDevice((1, 1), "fake:1")]
    memory = [each.allocate(2 * count * 3) for each in devices]
    segments = tuple(
        Segment(at * 4 * count, 4 * count, buffer, at * 2 * count, copy)
        for at in range(3)
        for buffer in (0, 1)
    )
    numbers = np.frombuffer(noise(3 * count).tobytes(), np.uint8).astype("f4")
    with pinned(devices[0], numbers.nbytes) as landed, pinned(devices[0], 2 * count) as spare:
        landed[:] = numbers.view(np.uint8)
        copier = DeviceCopier(list(memory), streams := {})
        for event in copier.copy(Block(0, 0, numbers.nbytes, segments), landed, spare=spare):
            event.wait()
        for stream in streams.values():
            stream.close()
    for each in memory:
        assert download(each).view(half).tolist() == numbers.tolist()


def test_what_lies_side_by_side_is_one_copy() -> None:
    """In the file, in memory and in one buffer, without a copy of its own."""
    rows = Copy((2,), (3,), 0, np.dtype("u1"), np.dtype("u1"))
    found = copies.joined(
        [
            Segment(10, 5, 0, 100), Segment(15, 5, 0, 105), Segment(20, 0, 0, 110),
            Segment(20, 4, 0, 110), Segment(25, 1, 0, 114), Segment(26, 1, 0, 116),
            Segment(27, 1, 1, 117), Segment(28, 6, 1, 118, rows), Segment(34, 1, 1, 120),
            Segment(35, 1, 1, 121),
        ]
    )  # fmt: skip
    assert found == [
        Segment(10, 14, 0, 100), Segment(25, 1, 0, 114), Segment(26, 1, 0, 116),
        Segment(27, 1, 1, 117), Segment(28, 6, 1, 118, rows), Segment(34, 2, 1, 120),
    ]  # fmt: skip
