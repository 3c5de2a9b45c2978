"""Policies: what each keeps, and none reads less than Belady's optimum."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from benchmarks.replay import belady, replay
from mfload import errors
from mfload.ondemand import policies

NAMES = ("lru", "lfu", "pin+lru", "window(2)")
TRACES = st.lists(st.sets(st.integers(0, 5), max_size=3), max_size=8)


def fewest(trace: list[set[int]], capacity: int) -> int:
    """Keys read at least, by trying all choices of what stays."""
    states = {frozenset[int](): 0}
    for asked in trace:
        after: dict[frozenset[int], int] = {}
        for there, read in states.items():
            others, cost = there - asked, read + len(asked - there)
            room = min(len(others), capacity - len(asked))
            for kept in itertools.combinations(others, room):
                state = frozenset(asked).union(kept)
                after[state] = min(cost, after.get(state, cost))
        states = after
    return min(states.values())


@given(TRACES, st.integers(3, 5))
def test_belady_is_the_optimum(trace: list[set[int]], capacity: int) -> None:
    best = belady([sorted(each) for each in trace], capacity)
    assert best.shape == (len(trace),)
    assert best.sum() == fewest(trace, capacity)


@given(TRACES, st.integers(3, 5), st.sampled_from(NAMES))
def test_no_policy_beats_it(trace: list[set[int]], capacity: int, policy: str) -> None:
    given = [sorted(each) for each in trace]
    misses = replay(given, capacity, policy)
    assert misses.sum() >= belady(given, capacity).sum()
    # What all fit in is read once.
    assert replay(given, 6, policy).sum() >= len(set[int]().union(*trace))
    if policy != "window(2)":
        assert replay(given, 6, policy).sum() == len(set[int]().union(*trace))


def test_lru_and_its_weakness() -> None:
    loop = [[0], [1], [2]] * 4
    assert replay(loop, 2, "lru").tolist() == [1] * 12
    assert replay(loop, 2, policies.Cyclic).sum() == belady(loop, 2).sum() == 7
    assert replay([[0], [1], [0], [2], [0], [1]], 2).tolist() == [1, 1, 0, 1, 0, 1]


def test_lfu_counts_and_ages() -> None:
    often = [[0]] * 9 + [[1], [2], [0], [3], [0]]
    assert replay(often, 2, "lfu").tolist() == [1, *[0] * 8, 1, 1, 0, 1, 0]
    aged = lambda keys, capacity: policies.Lfu(keys, capacity, half_life=1.0)  # noqa: E731
    # Nine uses long ago count for less than two of late.
    trace = [[0]] * 9 + [[1], [1]] * 3 + [[2], [1], [0]]
    assert replay(trace, 2, aged)[-2:].tolist() == [0, 1]


def test_pins_stay() -> None:
    pinned = lambda keys, capacity: policies.PinLru(keys, capacity, [0, 1])  # noqa: E731
    trace = [[0], [1], *([key] for key in range(2, 9)), [0], [1]]
    assert replay(trace, 3, pinned)[-2:].tolist() == [0, 0]
    assert replay(trace, 3, "lru")[-2:].tolist() == [1, 1]
    # More pinned than there are slots: the oldest of them leave.
    assert replay(trace, 1, pinned).sum() == len(trace)
    # Without a list, those most often used: a scan does not flush them.
    busy = [[0, 1]] * 5 + [[key] for key in range(2, 12)] + [[0, 1]]
    assert replay(busy, 4, "pin+lru")[-1] == 0
    assert replay(busy, 4, "lru")[-1] == 2


def test_windows_end() -> None:
    assert replay([[0], [1], [0], [2], [3], [0]], 9, "window(2)").tolist() == [
        1, 1, 0, 1, 1, 1,
    ]  # fmt: skip
    window = policies.Window(8, 8, 2)
    for keys in ([0, 1], [1, 2], [3]):
        window.use(np.array(keys))
    assert window.expired(np.arange(4)).tolist() == [0]


@pytest.mark.parametrize(
    "policy", ["", "LRU", "window", "window(0)", "window(-1)", "lru ", "belady", 3, None]
)
def test_unknown_policies(policy: Any) -> None:
    with pytest.raises(errors.UsageError, match="unknown policy"):
        policies.make(policy, 1, 1)


def test_a_function_that_makes_no_policy() -> None:
    with pytest.raises(errors.UsageError, match="makes no policy"):
        policies.make(lambda keys, capacity: None, 1, 1)  # type: ignore[arg-type,return-value]


def test_lfu_ages_by_turns_of_all_layers() -> None:
    """As it does if each layer has a cache of its own."""
    layer = np.repeat(np.arange(3), 4)
    one, shared = policies.make("lfu", 4, 2), policies.make("lfu", 12, 6, layer)
    for n in range(200):
        one.use(np.array([n % 4 // 3]))
        for start in (0, 4, 8):
            shared.use(start + np.array([n % 4 // 3]))
    assert np.allclose(one.rank(np.arange(2))[0], shared.rank(np.arange(2))[0], rtol=0.05)


@pytest.mark.parametrize("capacity", [6, 12, 24, 36])
def test_layers_that_share_a_cache(capacity: int) -> None:
    """Each has the hits of a cache of its own; with less than one request of each layer, the plain
    policy has none at all, and each layer keeps what it can."""
    rng = np.random.default_rng(0)
    layers, experts, last = 6, 16, np.tile([0, 1], (6, 1))
    trace: list[Any] = []
    for _ in range(150):
        for n in range(layers):
            if rng.random() < 0.4:
                last[n] = rng.choice(experts, 2, replace=False)
            trace.append(np.sort(last[n] + n * experts))
    layer = np.repeat(np.arange(layers), experts)

    def layered(keys: int, capacity: int) -> Any:
        return policies.make("lru", keys, capacity, layer)

    shared = int(replay(trace, capacity, layered).sum())
    plain = int(replay(trace, capacity).sum())
    own = sum(
        int(replay([x - n * experts for x in trace[n::layers]], capacity // layers).sum())
        for n in range(layers if capacity >= 2 * layers else 0)
    )
    if own:
        assert shared <= 1.06 * own
    else:
        assert plain == 2 * len(trace)
        assert shared < 0.8 * plain
