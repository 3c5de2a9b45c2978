"""Groups and limits of what is loaded together."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
from hypothesis import given, strategies as st

from mfload import errors
from mfload.options import LoadOptions
from mfload.planning.memory import Ledger, grouped


@given(st.lists(st.integers(0, 9)), st.integers(0, 30))
def test_groups_keep_within_a_limit(sizes: list[int], limit: int) -> None:
    found = list(grouped(enumerate(sizes), limit, lambda each: each[1]))
    assert [each for group in found for each in group] == list(enumerate(sizes))
    assert all(len(group) == 1 or sum(n for _, n in group) <= limit for group in found)
    # The next one would not have fitted.
    for group, following in itertools.pairwise(found):
        assert sum(n for _, n in group) + following[0][1] > limit


@given(
    st.lists(st.dictionaries(st.integers(0, 2), st.integers(0, 9))),
    st.fixed_dictionaries(dict.fromkeys(range(3), st.integers(0, 30))),
)
def test_groups_keep_within_the_limit_of_each_place(
    items: list[dict[int, int]], limits: dict[int, int]
) -> None:
    given = copy.deepcopy(items)
    found = list(grouped(items, limits, lambda each: each))
    assert [each for group in found for each in group] == given
    for group, following in itertools.pairwise([*found, []]):
        held = {place: [each.get(place, 0) for each in group] for place in limits}
        for place, sizes in held.items():
            assert sum(sizes) <= limits[place] or len([*filter(None, sizes)]) == 1
        # The next one would not have fitted.
        more = following[0].items() if following else ()
        over = (sum(held[at]) and sum(held[at]) + nbytes > limits[at] for at, nbytes in more)
        assert not following or any(over)


@given(st.integers(0, 1 << 40), st.integers(1, 1 << 30), st.integers(0, 1 << 20))
def test_the_least_limit_leaves_so_much_for_what_waits(limit: int, waits: int, floor: int) -> None:
    least = Ledger.least(waits, floor)
    for given_limit in (limit, least, least - 1):
        ledger = Ledger(LoadOptions(max_host_overhead=max(0, given_limit)))
        slots, waiting = ledger.split(floor)
        assert slots >= floor
        assert (waiting >= waits) == (ledger.most >= least)


@given(st.integers(1, 1 << 30), st.integers(1, 64), st.integers(1, 1 << 24))
def test_slots_and_readers_keep_within_the_limit(limit: int, count: int, held: int) -> None:
    ledger = Ledger(LoadOptions(max_host_overhead=limit))
    assert 0 <= ledger.slot(count) * count <= limit
    assert ledger.slot(count, 100) == ledger.slot(count) - 100
    readers = ledger.readers(held, None, count, fewer=True)
    assert 1 <= readers <= count
    assert readers == 1 or readers * held <= limit
    assert ledger.readers(held, count, 1, fewer=True) == readers
    for asked in (None, count):
        if held * (asked or 1) <= limit:
            assert ledger.readers(held, asked, count) == (asked or readers)
        else:
            with pytest.raises(errors.UsageError, match="too small"):
                ledger.readers(held, asked, count)
    assert ledger.share(3, 100) == min(100, limit // 3)


def test_a_limit_that_was_not_given_refuses_nothing() -> None:
    for device, name in ((False, "max_host_overhead"), (True, "max_device_overhead")):
        Ledger(LoadOptions(), device=device).check(1 << 60, "too much")
        given: Any = {name: "1KiB"}
        ledger = Ledger(LoadOptions(**given), device=device)
        ledger.check(1024, "just enough")
        with pytest.raises(errors.MemoryLimitError, match="too much") as caught:
            ledger.check(1025, "too much", "a", f"{name} of {{}} or more")
        assert caught.value.expected == f"{name} of 1.01 KiB or more"
        assert (caught.value.tensor, caught.value.found) == ("a", "1 KiB")
