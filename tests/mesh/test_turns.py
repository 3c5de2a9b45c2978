"""Turns of groups and of threads: which load of one process belongs to which of another."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import boards
import pytest
from hypothesis import given, settings, strategies as st

from mfload import errors, frameworks
from mfload.mesh import barrier, fingerprints
from mfload.runtime import Deadline

SECONDS = 5.0  # A process that waits in vain is found out by then.


class Broken(Exception):
    """What a process fails with of its own."""


class World:
    """Processes that are threads, each with a board."""

    def __init__(self, count: int) -> None:
        memory = boards.Memory()
        self.boards = [boards.MemoryBoard(memory) for _ in range(count)]

    def load(self, rank: int, ranks: Sequence[int], what: str = "same", fate: str = "well") -> str:
        """One load of one process, and how it ended; `own` for an error of this process."""
        seconds = 0.01 if fate == "late" else SECONDS
        try:
            with fingerprints.together(
                () if fate == "lost" else ranks, rank, self.boards[rank], Deadline(seconds)
            ) as party:
                if fate in ("lost", "fails"):
                    raise Broken
                party.agree("files", what)
                if fate == "breaks":
                    raise Broken
                party.agree("arguments", what)
        except Broken:
            return "own"
        except errors.LoadTimeoutError:
            return "late"
        except errors.ProcessError as error:
            text = str(error)
            assert "not see the same" not in text, text
            assert "wait for each other" not in text, text
            return "told"
        return "well"


def test_a_lost_load_is_told_once() -> None:
    world = World(3)
    lost = [lambda: world.load(1, (1, 2), fate="lost"), lambda: world.load(2, (1, 2))]
    assert boards.all_at_once(lost) == ["own", "told"]
    for group in ((0, 1), (0, 1, 2), (1, 2), (0, 1), (1, 2)):
        for first in group:
            # Whoever waits meanwhile: it is none of the loads that were lost.
            assert _one_by_one(world, group, first) == ["well"] * len(group)


def _one_by_one(world: World, group: Sequence[int], first: int) -> list[str]:
    def load(rank: int) -> str:
        time.sleep(0 if rank == first else 0.05)
        return world.load(rank, group)

    return boards.all_at_once([lambda rank=rank: load(rank) for rank in group])


def test_a_loss_that_comes_after_the_load_has_failed_is_not_told_again() -> None:
    """Two processes lose the same load, one of them late: the next is none of it."""
    world = World(3)
    everybody = (0, 1, 2)
    began = [lambda: world.load(0, everybody), lambda: world.load(1, everybody, fate="lost")]
    assert boards.all_at_once(began) == ["told", "own"]

    def late() -> list[str]:
        time.sleep(0.1)
        first = world.load(2, everybody, fate="lost")
        time.sleep(0.4)
        return [first, world.load(2, everybody)]

    ended = [lambda: world.load(0, everybody), lambda: world.load(1, everybody), late]
    assert boards.all_at_once(ended) == ["well", "well", ["own", "well"]]


COUNT = 4
GROUPS = st.sets(st.integers(0, COUNT - 1), min_size=2).map(lambda ranks: tuple(sorted(ranks)))
FATES = ("well", "well", "fails", "breaks", "late", "lost")
LOADS = st.lists(st.tuples(GROUPS, st.sampled_from(FATES), st.integers(0, 3)), max_size=8)


@settings(max_examples=40)
@given(LOADS, st.integers(0, 2**32))
def test_one_load_after_another(loads: list[tuple[Any, str, int]], seed: int) -> None:
    """Exactly those loads fail in which somebody failed, on all of their processes."""
    world, chance = World(COUNT), random.Random(seed)
    for number, (group, fate, which) in enumerate(loads):
        bad = group[which % len(group)]
        naps = {rank: chance.choice((0, 0, 0.005)) for rank in group}

        def act(rank: int, naps: Any = naps, load: Any = (group, number, fate, bad)) -> str:
            group, number, fate, bad = load
            time.sleep(0.05 if fate == "late" and rank != bad else naps[rank])
            return world.load(rank, group, f"{number}", fate if rank == bad else "well")

        ended = boards.all_at_once([lambda rank=rank: act(rank) for rank in group])
        own = {"well": "well", "late": "late"}.get(fate, "own")
        rest = "well" if fate == "well" else "told"
        assert ended == [own if rank == bad else rest for rank in group], (number, ended)


@settings(max_examples=40)
@given(LOADS, st.integers(0, 2**32))
def test_loads_at_once_that_are_repeated(loads: list[tuple[Any, str, int]], seed: int) -> None:
    """Each process goes on as fast as it can, and repeats a load that failed: all come through.

    Loads before the first that is lost fail only where somebody failed in them.
    """
    world = World(COUNT)
    clean = next((n for n, (_, fate, _) in enumerate(loads) if fate == "lost"), len(loads))

    def process(rank: int) -> int:
        chance = random.Random(seed + rank)
        for number, (group, fate, which) in enumerate(loads):
            if rank not in group:
                continue
            fated = fate if rank == group[which % len(group)] else "well"
            for _ in range(2 + 2 * len(loads)):
                time.sleep(chance.choice((0, 0.002)))
                ended = world.load(rank, group, f"{number}", fated)
                if ended == "well":
                    break
                fated = "well"
                assert ended != "late" or fate == "late", (rank, number)
                assert fate != "well" or number > clean, (rank, number, ended)
            else:
                raise AssertionError(f"process {rank} never came through load {number}")
        return rank

    ended = boards.all_at_once([lambda rank=rank: process(rank) for rank in range(COUNT)], 60)
    assert ended == list(range(COUNT)), ended


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """Runs loads of two processes with two threads each: the first is slow on process 0."""
    world, me = World(2), threading.local()
    fake = SimpleNamespace(rank=lambda: me.rank, board=lambda: world.boards[me.rank])
    monkeypatch.setattr(frameworks, "module", lambda *_: fake)
    monkeypatch.setattr(barrier.atexit, "register", lambda *_: None)

    def load(rank: int, seconds: float, wrong: Exception | None, nap: float, ranks: Any) -> str:
        me.rank = rank
        try:
            with barrier.meeting(ranks, Deadline(seconds), wrong) as party:
                time.sleep(nap)
                party.agree("files", "same")
        except (Broken, errors.MfloadError) as error:
            return f"{type(error).__name__}: {error}"
        return "well"

    def run(wrong: Exception | None, seconds: float, ranks: Any = (0, 1)) -> dict[str, Any]:
        def process(rank: int, thread: str) -> str:
            if thread == "A":
                return load(rank, SECONDS, None, 0.8 if rank == 0 else 0, (0, 1))
            time.sleep(0.1)
            ended = load(
                rank, *((seconds, wrong, 0, ranks) if rank else (SECONDS, None, 0, (0, 1)))
            )
            return ended

        names = [(rank, thread) for thread in "AB" for rank in (0, 1)]
        acts = [lambda name=name: process(*name) for name in names]
        ended = dict(zip((f"{t}{r}" for r, t in names), boards.all_at_once(acts), strict=True))
        again = [lambda rank=rank: load(rank, SECONDS, None, 0, (0, 1)) for rank in (0, 1)]
        return ended | {"again": boards.all_at_once(again)}

    return run


@pytest.mark.parametrize("how", ["wrong", "late", "lost"])
def test_a_load_that_fails_before_its_turn_leaves_the_other_threads(
    two: Callable[..., dict[str, Any]], how: str
) -> None:
    wrong = None if how == "late" else Broken("oops")
    ended = two(wrong, 0.2 if how == "late" else SECONDS, () if how == "lost" else (0, 1))
    assert (ended["A0"], ended["A1"], ended["again"]) == ("well", "well", ["well", "well"]), ended
    own = "LoadTimeoutError" if how == "late" else "Broken: oops"
    assert ended["B1"].startswith(own)
    assert "process 1 failed" in ended["B0"]
    assert ("load of another thread" if how == "late" else "oops") in ended["B0"]


def test_what_all_have_lost_is_told_to_none() -> None:
    """Also where they go on with others than those with whom they lost it."""
    world = World(3)

    def process(rank: int) -> list[str]:
        ended = [world.load(rank, (0, 1, 2), fate="lost")]
        time.sleep(0.4 * rank)
        for group in ((0, 1), (0, 1, 2), (1, 2)):
            ended += [world.load(rank, group)] if rank in group else []
        return ended

    ended = boards.all_at_once([lambda rank=rank: process(rank) for rank in range(3)])
    assert [set(each[1:]) for each in ended] == [{"well"}] * 3, ended


def test_a_load_inside_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(2)
    fake = SimpleNamespace(rank=lambda: 0, board=lambda: world.boards[0])
    monkeypatch.setattr(frameworks, "module", lambda *_: fake)
    monkeypatch.setattr(barrier.atexit, "register", lambda *_: None)

    def load() -> Any:
        return barrier.meeting((0, 1), Deadline(SECONDS))

    with pytest.raises(errors.UsageError, match="part of another"), load(), load():
        pass
    assert world.boards[0].place.loads == ()
