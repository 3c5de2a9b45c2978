"""The ring of slots by itself: when a slot is free again, and which block an error is about."""

from __future__ import annotations

from typing import Any

import pytest

from mfload import errors
from mfload.cuda.staging import Ring
from mfload.planning.blocks import Block

OLD, NEW, AT_HAND = (Block(0, at, 8, ()) for at in (0, 8, 16))


class Slot:
    """A slot."""


class Mark:
    """An event that is over when it is said to be, or was waited for; or fails."""

    def __init__(self, over: bool = False, fails: bool = False) -> None:
        self.over, self.fails = over, fails
        self.waits = 0

    def done(self) -> bool:
        if self.fails:
            raise errors.DeviceError("a copy failed")
        return self.over

    def wait(self) -> None:
        self.waits += 1
        if self.fails:
            raise errors.DeviceError("a copy failed")
        self.over = True


class Share:
    """What a ring tells of its blocks."""

    def __init__(self) -> None:
        self.block: Block | None = AT_HAND
        self.finished: list[Block] = []
        self.track = None

    def done(self, block: Block) -> None:
        self.finished.append(block)


@pytest.fixture
def share() -> Share:
    return Share()


@pytest.fixture
def ring(share: Any) -> Ring:
    return Ring(Slot, 2, share)


def test_a_slot_whose_copies_are_over_is_taken_before_a_new_one(ring: Ring, share: Share) -> None:
    first, mark = ring.take(), Mark(over=True)
    ring.hold(first, [mark], OLD)
    assert ring.take() is first
    assert share.finished == [OLD]
    assert mark.waits == 0  # It was seen to be over.
    assert share.block is AT_HAND


def test_the_oldest_is_waited_for_where_all_are_in_use(ring: Ring, share: Share) -> None:
    slots, marks = [ring.take(), ring.take()], [[Mark(), Mark()], [Mark()]]
    assert slots[0] is not slots[1]
    for slot, events, block in zip(slots, marks, (OLD, NEW), strict=True):
        ring.hold(slot, events, block)
    assert ring.take() is slots[0]
    assert [[mark.waits for mark in events] for events in marks] == [[1, 1], [0]]
    assert share.finished == [OLD]
    assert share.block is AT_HAND


def test_one_copy_of_several_keeps_a_slot(ring: Ring, share: Share) -> None:
    first = ring.take()
    ring.hold(first, [Mark(over=True), Mark()], OLD)
    assert ring.take() is not first
    assert share.finished == []
    assert share.block is AT_HAND


@pytest.mark.parametrize("ask", ["seen", "waited for"])
def test_an_error_is_about_the_block_whose_copy_failed(ring: Ring, share: Share, ask: str) -> None:
    slots = [ring.take(), ring.take()]
    failing = Mark(fails=True)
    if ask == "waited for":
        # What is asked says no; it fails later.
        failing.done = lambda: False  # type: ignore[method-assign]
    ring.hold(slots[0], [failing], OLD)
    ring.hold(slots[1], [Mark()], NEW)
    with pytest.raises(errors.DeviceError):
        ring.take()
    assert share.block is OLD
    assert share.finished == []


def test_all_are_waited_for_in_the_end(ring: Ring, share: Share) -> None:
    slots, marks = [ring.take(), ring.take()], [Mark(), Mark(over=True)]
    for slot, mark, block in zip(slots, marks, (OLD, NEW), strict=True):
        ring.hold(slot, [mark], block)
    ring.drain()
    assert share.finished == [OLD, NEW]
    assert all(mark.over for mark in marks)


def test_a_failure_in_the_end_names_its_block(ring: Ring, share: Share) -> None:
    ring.hold(ring.take(), [Mark()], OLD)
    ring.hold(ring.take(), [Mark(fails=True)], NEW)
    with pytest.raises(errors.DeviceError):
        ring.drain()
    assert (share.finished, share.block) == ([OLD], NEW)


def test_a_slot_from_which_nothing_is_copied(ring: Ring) -> None:
    slot = ring.take()
    ring.give(slot)
    assert ring.take() is slot
