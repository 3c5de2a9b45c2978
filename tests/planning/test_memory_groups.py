"""Groups and limits of what is loaded together."""

from __future__ import annotations

import itertools

from hypothesis import given, strategies as st

from mfload.planning.memory import grouped


@given(st.lists(st.integers(0, 9)), st.integers(0, 30))
def test_groups_keep_within_a_limit(sizes: list[int], limit: int) -> None:
    found = list(grouped(enumerate(sizes), limit, lambda each: each[1]))
    assert [each for group in found for each in group] == list(enumerate(sizes))
    assert all(len(group) == 1 or sum(n for _, n in group) <= limit for group in found)
    # The next one would not have fitted.
    for group, following in itertools.pairwise(found):
        assert sum(n for _, n in group) + following[0][1] > limit
