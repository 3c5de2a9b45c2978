from __future__ import annotations

import pickle
import random
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import boards
import pytest
from hypothesis import given, settings, strategies as st

from mfload import errors
from mfload.mesh import fingerprints, group as parties, heartbeat, outcome
from mfload.runtime import Deadline

STEPS = 3
KINDS = ("post", "error", "verdict")


class Broken(Exception):
    """What a process fails with of its own."""


def enter(
    rank: int,
    board: boards.MemoryBoard,
    count: int,
    *,
    act: Callable[[int], None] = lambda step: None,
    prints: Callable[[int], str] = lambda step: "same",
    seconds: float | None = None,
    steps: int = STEPS,
) -> str:
    with fingerprints.together(range(count), rank, board, Deadline(seconds)) as party:
        for step in range(steps):
            act(step)
            party.agree(f"step {step}", prints(step))
        act(steps)
    return "well"


def test_one_process_needs_no_board() -> None:
    with fingerprints.together([3], 3, None, Deadline(None)) as party:
        party.agree("anything", "x")
        party.watch("anything")


def test_a_process_that_takes_no_part() -> None:
    with (
        pytest.raises(errors.UsageError, match="takes no part"),
        fingerprints.together([0, 1], 2, boards.MemoryBoard(boards.Memory()), Deadline(None)),
    ):
        pass


FATES = ("well", "well", "well", "fails", "late", "gives up", "interrupted", "differs")


@settings(max_examples=50)
@given(
    fates=st.lists(
        st.tuples(st.sampled_from(FATES), st.integers(0, STEPS)), min_size=2, max_size=4
    ),
    seed=st.integers(0, 2**32),
)
def test_all_go_on_or_all_stop(fates: list[tuple[str, int]], seed: int) -> None:
    """Whatever happens to whom and when; and the next load of all of them works."""
    memory, count = boards.Memory(), len(fates)
    made = [boards.MemoryBoard(memory) for _ in fates]

    def process(rank: int) -> Callable[[], str]:
        fate, at = fates[rank]
        chance = random.Random(seed + rank)
        looks = [chance.randrange(1, 12)]

        def before() -> None:
            time.sleep(chance.random() * 0.003)
            looks[0] -= 1
            if fate == "interrupted" and looks[0] == 0:
                raise KeyboardInterrupt

        def act(step: int) -> None:
            time.sleep(chance.random() * 0.002)
            if fate == "fails" and step == at:
                raise Broken
            if fate == "late" and step == at:
                time.sleep(0.02)

        made[rank].before = before
        prints = (lambda step: f"{step == at}") if fate == "differs" else (lambda step: "False")
        seconds = chance.random() * 0.02 + 0.001 if fate == "gives up" else None
        return lambda: enter(rank, made[rank], count, act=act, prints=prints, seconds=seconds)

    ended = boards.all_at_once([process(rank) for rank in range(count)])
    well = [each == "well" for each in ended]
    for rank, (fate, _) in enumerate(fates):
        own = {
            "fails": Broken,
            "interrupted": KeyboardInterrupt,
            "gives up": errors.LoadTimeoutError,
        }
        allowed = (errors.ProcessError, own.get(fate, errors.ProcessError))
        assert well[rank] or isinstance(ended[rank], allowed), ended
    # Who was interrupted after all were through keeps the others from nothing.
    rest = [w for w, (fate, _) in zip(well, fates, strict=True) if fate != "interrupted"]
    assert len(set(rest)) < 2, (fates, ended)
    if any(fate == "fails" for fate, _ in fates):
        assert not any(well)
    for board in made:
        board.before = lambda: None
    acts = [lambda rank=rank: enter(rank, made[rank], count) for rank in range(count)]
    assert boards.all_at_once(acts) == ["well"] * count
    # Of all that was posted, the last load's texts remain.
    assert not [k for k in memory.texts if any(f"/1/{kind}/" in k for kind in KINDS)]


def test_what_differs_is_told_on_all() -> None:
    memory = boards.Memory()
    prints = ["a: 1 byte\nb: 2 bytes", "a: 1 byte\nb: 3 bytes", "a: 1 byte\nb: 2 bytes"]
    acts = [
        lambda rank=rank: enter(
            rank, boards.MemoryBoard(memory), 3, prints=lambda step, rank=rank: prints[rank]
        )
        for rank in range(3)
    ]
    ended = boards.all_at_once(acts)
    assert {str(each) for each in ended} == {
        "the processes do not see the same step 0\n"
        "  - processes 0, 2: b: 2 bytes\n  - process 1: b: 3 bytes"
    }
    assert str(pickle.loads(pickle.dumps(ended[0]))) == str(ended[0])


def test_processes_at_different_calls() -> None:
    memory = boards.Memory()
    acts = [
        lambda rank=rank: enter(rank, boards.MemoryBoard(memory), 2, steps=rank) for rank in (0, 1)
    ]
    for each in boards.all_at_once(acts):
        assert isinstance(each, errors.ProcessError)
        assert "not at the same call" in str(each)


def test_the_first_error_is_told_with_class_and_text() -> None:
    memory = boards.Memory()

    def act(step: int) -> None:
        raise errors.ReadError("could not read", file="a.safetensors")

    fail = lambda: enter(0, boards.MemoryBoard(memory), 2, act=act)  # noqa: E731
    wait = lambda: enter(1, boards.MemoryBoard(memory), 2)  # noqa: E731
    own, other = boards.all_at_once([fail, wait])
    assert isinstance(own, errors.ReadError)
    assert isinstance(other, errors.ProcessError)
    assert "process 0 failed" in str(other)
    assert "ReadError: could not read [file: a.safetensors]" in str(other)


def test_who_loads_alone_times_out_and_the_latecomer_hears_of_it() -> None:
    memory = boards.Memory()
    made = [boards.MemoryBoard(memory), boards.MemoryBoard(memory)]
    with pytest.raises(errors.LoadTimeoutError, match="process 1"):
        enter(0, made[0], 2, seconds=0.05)
    with pytest.raises(errors.ProcessError, match="process 0 gave up waiting"):
        enter(1, made[1], 2)
    acts = [lambda rank=rank: enter(rank, made[rank], 2) for rank in (0, 1)]
    assert boards.all_at_once(acts) == ["well", "well"]


def test_a_dead_process_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = boards.Memory()
    boards.MemoryBoard(memory).post("mfload/at/1", heartbeat.Place("its name").text())
    monkeypatch.setattr(heartbeat, "alive", lambda who: who != "its name")
    start = time.monotonic()
    with pytest.raises(errors.ProcessError, match="process 1 is gone"):
        enter(0, boards.MemoryBoard(memory), 2)
    with pytest.raises(errors.ProcessError, match="process 1 is gone"):
        enter(2, boards.MemoryBoard(memory), 3)
    assert time.monotonic() - start < 2


def test_watching_tells_of_an_error_elsewhere() -> None:
    memory = boards.Memory()

    def fails() -> None:
        enter(0, boards.MemoryBoard(memory), 2, act=lambda step: 1 / (1 - step), steps=1)

    def watches() -> None:
        with fingerprints.together([0, 1], 1, boards.MemoryBoard(memory), Deadline(None)) as party:
            party.agree("step 0", "same")
            raise party.failure("the exchange")

    own, other = boards.all_at_once([fails, watches])
    assert isinstance(own, ZeroDivisionError)
    assert isinstance(other, errors.ProcessError)
    assert "ZeroDivisionError" in str(other)


def test_the_first_verdict_counts() -> None:
    """Process 0 is about to give up when process 1 comes, sees all there, and goes on."""
    memory = boards.Memory()
    late = boards.MemoryBoard(memory)
    true, came = late.decide, []

    def decide(key: str, text: str) -> str:
        if not came:
            came.append(key)
            with fingerprints.together(
                [0, 1], 1, boards.MemoryBoard(memory), Deadline(0.2)
            ) as party:
                party.agree("step 0", "same")
                came.append("goes on")
                raise Broken
        return true(key, text)

    late.decide = lambda key, text: _without(Broken, lambda: decide(key, text), true, key, text)

    def goes_on() -> None:
        with fingerprints.together([0, 1], 0, late, Deadline(0.05)) as party:
            party.agree("step 0", "same")
            came.append("goes on too")

    with pytest.raises(errors.ProcessError, match="process 1 failed"):
        goes_on()
    assert came[1:] == ["goes on", "goes on too"]


def _without(
    kind: type[Exception], call: Callable[[], str], after: Callable[[str, str], str], *args: str
) -> str:
    try:
        return call()
    except kind:
        return after(*args)


def test_a_failure_is_settled_at_once() -> None:
    """Who comes after a process failed hears of it, though the error's own text is gone."""
    memory = boards.Memory()

    def act(step: int) -> None:
        raise Broken

    with pytest.raises(Broken):
        enter(0, boards.MemoryBoard(memory), 2, act=act)
    assert [outcome.read(t).kind for k, t in memory.texts.items() if "/verdict/" in k] == ["failed"]


def test_who_leaves_says_which_turn_was_the_last() -> None:
    memory = boards.Memory()
    made = [
        parties.Party([0, 1, 2], rank, boards.MemoryBoard(memory), Deadline(None))
        for rank in range(3)
    ]
    assert made[0].left() is None
    made[1].leave(7)
    made[2].leave(5)
    assert [party.left() for party in made] == [5, 5, 5]


def test_waiting_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(parties, "_PATIENCE", 0.01)
    with pytest.raises(errors.LoadTimeoutError):
        enter(0, boards.MemoryBoard(boards.Memory()), 2, seconds=0.1)
    assert [r.message for r in caplog.records if "waits for processes 1" in r.message]


def test_a_board_that_fails_leaves_the_error() -> None:
    board = boards.MemoryBoard(boards.Memory())

    def act(step: int) -> None:
        board.decide = lambda key, text: 1 / 0  # type: ignore
        raise Broken

    with pytest.raises(Broken):
        enter(0, board, 2, act=act)


def test_alive() -> None:
    me = heartbeat.identity()
    assert heartbeat.alive(me) is True
    host, pid, started = me.split()
    assert heartbeat.alive(f"{host} {pid} {int(started) - 1}") is False
    assert heartbeat.alive(f"elsewhere {pid} {started}") is None
    for text in ("", "x", "? 1 2 3", f"{host} x y"):
        assert heartbeat.alive(text) is None


def test_a_zombie_is_not_alive() -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as child:
        host, _, _ = heartbeat.identity().split()
        started = heartbeat._started(child.pid)
        who = f"{host} {child.pid} {started}"
        assert heartbeat.alive(who) is True
        child.kill()
        end = time.monotonic() + 5
        while heartbeat.alive(who) and time.monotonic() < end:
            time.sleep(0.01)
        assert heartbeat.alive(who) is False  # Nobody has asked for its exit status yet.


@given(st.lists(st.text(max_size=30), max_size=200), st.integers(0, 3))
def test_fingerprints(lines: list[str], repeat: int) -> None:
    text = fingerprints.fingerprint(lines * 10**repeat)
    assert len(text.encode()) < 100_000
    assert text == fingerprints.fingerprint(lines * 10**repeat)


def test_fingerprints_of_many_lines_differ() -> None:
    lines = [f"tensor {n}" for n in range(5000)]
    other = [*lines[:-2], "another", lines[-1]]
    posts = {
        0: ("files", fingerprints.fingerprint(lines)),
        1: ("files", fingerprints.fingerprint(other)),
    }
    verdict: Any = outcome.compare(posts, lambda text: text)
    assert verdict.kind == "differ"
    assert "tensor 4999" in verdict.problems[0]
    assert outcome.read(verdict.text()) == verdict


def test_circles_of_processes_that_wait_for_each_other() -> None:
    all_, two = heartbeat.Place().asked("all", (0, 1, 2)), heartbeat.Place().asked("two", (0, 1))
    free = heartbeat.Place()
    # Process 1 will begin the load of all once it has ended its own, or process 0 has begun that.
    assert heartbeat.circle({0: all_, 1: two, 2: all_}, 0) == (0, 1)
    assert heartbeat.circle({0: all_, 1: two, 2: all_}, 2) == ()
    assert heartbeat.circle({0: _then_two(all_), 1: two, 2: all_}, 0) == ()
    # A load that another thread has asked for is not begun before its turn.
    assert heartbeat.circle({0: all_.asked("two", (0, 1)), 1: two, 2: all_}, 0) == (0, 1)
    assert heartbeat.circle({0: all_, 1: free, 2: all_}, 0) == ()
    assert heartbeat.read(all_.text()) == all_


def _then_two(place: heartbeat.Place) -> heartbeat.Place:
    return place.left(place.loads[0], {}).asked("two", (0, 1))


def test_long_fingerprints_are_posted_once() -> None:
    memory = boards.Memory()
    text = "\n".join(f"tensor {n}" for n in range(1000))
    acts = [
        lambda rank=rank: enter(
            rank, boards.MemoryBoard(memory), 3, prints=lambda step: text, steps=1
        )
        for rank in range(3)
    ]
    assert boards.all_at_once(acts) == ["well"] * 3
    assert sorted(map(len, memory.texts.values()))[-2] < 500
    assert list(memory.texts.values()).count(text) == 1


def test_a_load_without_a_group_fails_one_that_waits_for_that_process() -> None:
    memory = boards.Memory()
    made = [boards.MemoryBoard(memory), boards.MemoryBoard(memory)]

    def loses() -> None:
        with fingerprints.together((), 1, made[1], Deadline(None)):
            raise Broken

    waits, lost = boards.all_at_once([lambda: enter(0, made[0], 2), loses])
    assert isinstance(lost, Broken)
    assert isinstance(waits, errors.ProcessError)
    assert "process 1 failed" in str(waits)
    acts = [lambda rank=rank: enter(rank, made[rank], 2) for rank in (0, 1)]
    assert boards.all_at_once(acts) == ["well", "well"]
