"""Processes agree, or all raise. Threads are processes here, each with a backend of its own."""

from __future__ import annotations

import math
import os
import pickle
import random
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import stores
from hypothesis import given, settings, strategies as st

from mfload import errors
from mfload.mesh import agree, heartbeat
from mfload.runtime import Deadline

STEPS = 3


class Broken(Exception):
    """What a process fails with of its own."""


@pytest.fixture(autouse=True)
def processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads of this test don't wait for each other as those of one process do."""
    monkeypatch.setattr(agree, "_wait_for_turn", lambda *_: None)
    monkeypatch.setattr(agree.atexit, "register", lambda *_: None)


def enter(
    rank: int,
    store: stores.MemoryStore | None,
    count: int,
    *,
    act: Callable[[int], None] = lambda step: None,
    lines: Callable[[int], list[str]] = lambda step: ["same"],
    seconds: float | None = None,
    steps: int = STEPS,
    swaps: stores.Swaps | None = None,
) -> str:
    backend: Any = stores.Backend(rank, store, swaps)
    with agree.joined(backend, range(count), Deadline(seconds)) as group:
        for step in range(steps):
            act(step)
            group.agree(f"step {step}", lines(step))
        act(steps)
    return "well"


def test_a_process_that_takes_no_part() -> None:
    backend: Any = stores.Backend(2, stores.MemoryStore(stores.Memory()))
    with (
        pytest.raises(errors.UsageError, match="takes no part"),
        agree.joined(backend, [0, 1], Deadline(None)),
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
    memory, count = stores.Memory(), len(fates)
    made = [stores.MemoryStore(memory) for _ in fates]

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
        lines = (lambda step: [f"{step == at}"]) if fate == "differs" else (lambda step: ["False"])
        seconds = chance.random() * 0.02 + 0.001 if fate == "gives up" else None
        return lambda: enter(rank, made[rank], count, act=act, lines=lines, seconds=seconds)

    ended = stores.all_at_once([process(rank) for rank in range(count)])
    well = [each == "well" for each in ended]
    for rank, (fate, _) in enumerate(fates):
        own = {
            "fails": Broken,
            "interrupted": KeyboardInterrupt,
            "gives up": errors.LoadTimeoutError,
        }
        allowed = (errors.ProcessError, own.get(fate, errors.ProcessError))
        assert well[rank] or isinstance(ended[rank], allowed), ended
    # A process that is interrupted once all have agreed on the end keeps the others from nothing.
    rest = [w for w, (fate, _) in zip(well, fates, strict=True) if fate != "interrupted"]
    assert len(set(rest)) < 2, (fates, ended)
    if any(fate == "fails" for fate, _ in fates):
        assert not any(well)
    for store in made:
        store.before = lambda: None
    acts = [lambda rank=rank: enter(rank, made[rank], count) for rank in range(count)]
    assert stores.all_at_once(acts) == ["well"] * count
    # Of all that was written, the last load's texts remain.
    assert not [key for key in memory.texts if key.split("/")[2:-1][:1] == ["1"]]


def test_what_differs_is_told_on_all() -> None:
    memory = stores.Memory()
    texts = [["a: 1 byte", "b: 2"], ["a: 1 byte", "b: 3"], ["a: 1 byte", "b: 2"]]
    acts = [
        lambda rank=rank: enter(
            rank, stores.MemoryStore(memory), 3, lines=lambda step, rank=rank: texts[rank]
        )
        for rank in range(3)
    ]
    ended = stores.all_at_once(acts)
    assert {str(each) for each in ended} == {
        "the processes do not see the same step 0\n  - processes 0, 2: b: 2\n  - process 1: b: 3"
    }
    assert str(pickle.loads(pickle.dumps(ended[0]))) == str(ended[0])


def test_one_of_many_lines_differs() -> None:
    memory = stores.Memory()
    lines = [[f"tensor {n}" for n in range(5000)] for _ in range(2)]
    lines[1][4998] = "another"
    acts = [
        lambda rank=rank: enter(
            rank, stores.MemoryStore(memory), 2, lines=lambda step, rank=rank: lines[rank]
        )
        for rank in (0, 1)
    ]
    for each in stores.all_at_once(acts):
        assert "process 0: tensor 4998" in str(each)
        assert "process 1: another" in str(each)
    assert max(map(len, memory.texts.values())) < 10_000


def test_lines_with_names_that_are_no_text() -> None:
    memory = stores.Memory()
    lines = [[os.fsdecode(b"\xff.safetensors"), f"{rank}"] for rank in (0, 1)]
    acts = [
        lambda rank=rank: enter(
            rank, stores.MemoryStore(memory), 2, lines=lambda step, rank=rank: lines[rank]
        )
        for rank in (0, 1)
    ]
    for each in stores.all_at_once(acts):
        assert "process 0: 0" in str(each)


def test_processes_at_different_calls() -> None:
    memory = stores.Memory()
    acts = [
        lambda rank=rank: enter(rank, stores.MemoryStore(memory), 2, steps=rank) for rank in (0, 1)
    ]
    for each in stores.all_at_once(acts):
        assert isinstance(each, errors.ProcessError)
        assert "not at the same call" in str(each)


def _fail(step: int) -> None:
    raise errors.ReadError("could not read", file="a.safetensors")


@pytest.mark.parametrize("collective", [False, True])
def test_the_first_error_is_told_with_class_and_text(collective: bool) -> None:
    memory, swaps = stores.Memory(), stores.Swaps(2)

    def process(rank: int) -> str:
        store = None if collective else stores.MemoryStore(memory)
        act = (lambda step: None) if rank else _fail
        return enter(rank, store, 2, act=act, swaps=swaps)

    own, other = stores.all_at_once([lambda: process(0), lambda: process(1)])
    assert isinstance(own, errors.ReadError)
    assert isinstance(other, errors.ProcessError)
    assert "process 0 failed" in str(other)
    assert "ReadError: could not read [file: a.safetensors]" in str(other)


def test_a_late_process_and_the_one_that_gave_up_hear_of_it() -> None:
    memory = stores.Memory()
    made = [stores.MemoryStore(memory), stores.MemoryStore(memory)]
    with pytest.raises(errors.LoadTimeoutError, match="process 1"):
        enter(0, made[0], 2, seconds=0.05)
    with pytest.raises(errors.ProcessError, match="process 0 gave up waiting"):
        enter(1, made[1], 2)
    acts = [lambda rank=rank: enter(rank, made[rank], 2) for rank in (0, 1)]
    assert stores.all_at_once(acts) == ["well", "well"]


def test_who_does_not_arrive_is_named_before_any_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a rank of shard= that does not ask for the exchange; one that came may take its time."""
    monkeypatch.setattr(stores.Backend, "arrival", 0.1, raising=False)
    memory = stores.Memory()
    made = [stores.MemoryStore(memory) for _ in range(3)]
    came = [lambda rank=rank: enter(rank, made[rank], 3) for rank in (0, 2)]
    for each in stores.all_at_once(came):
        assert isinstance(each, errors.ProcessError), each
        for text in ("gave up", "must load with exchange='once'", "process 1 did not"):
            assert text in str(each)
    with pytest.raises(errors.ProcessError, match="gave up"):
        enter(1, made[1], 3)
    slow = [lambda step: None, lambda step: time.sleep(0.3)]
    acts = [lambda n=n: enter(n, made[n], 2, act=slow[n], steps=2) for n in (0, 1)]
    assert stores.all_at_once(acts) == ["well", "well"]


@pytest.mark.parametrize("seconds", [(60, 60), (60, None)])
def test_a_given_timeout_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, seconds: tuple[float, float | None]
) -> None:
    monkeypatch.setattr(stores.Backend, "arrival", 0.1, raising=False)
    memory = stores.Memory()
    made = [stores.MemoryStore(memory) for _ in range(2)]

    def process(rank: int) -> str:
        time.sleep(0.3 * rank)
        return enter(rank, made[rank], 2, seconds=seconds[rank])

    acts = [lambda rank=rank: process(rank) for rank in (0, 1)]
    assert stores.all_at_once(acts) == ["well", "well"]


@pytest.mark.parametrize("arrival", [60.0, math.inf])
def test_a_load_that_is_left_out_waits_for_no_store(
    monkeypatch: pytest.MonkeyPatch, arrival: float
) -> None:
    """A stream says so when the collector takes it, maybe while another thread uses the store."""
    monkeypatch.setattr(stores.Backend, "arrival", arrival, raising=False)
    memory = stores.Memory()
    made = [stores.MemoryStore(memory) for _ in range(2)]
    with memory.lock:
        backend: Any = stores.Backend(0, made[0])
        agree.fail_next(backend, (0, 1), errors.ReadError("left"))
    with pytest.raises(errors.ProcessError, match=r"process 0 failed.*left"):
        enter(1, made[1], 2)
    acts = [lambda rank=rank: enter(rank, made[rank], 2) for rank in (0, 1)]
    assert stores.all_at_once(acts) == ["well", "well"]
    assert {f"mfload/alive/{rank}" for rank in (0, 1)} < memory.texts.keys()


def test_a_mesh_that_has_more_processes_than_are_joined() -> None:
    backend: Any = stores.Backend(0, stores.MemoryStore(stores.Memory()))
    backend.group = lambda: (0, 2)
    with (
        pytest.raises(errors.UsageError, match="not joined"),
        agree.joined(backend, [0, 2], Deadline(None)),
    ):
        pass


@pytest.mark.parametrize("identity", ["its identity", "ended"])
def test_a_process_that_is_gone_is_missed(monkeypatch: pytest.MonkeyPatch, identity: str) -> None:
    memory = stores.Memory()
    stores.MemoryStore(memory).put("mfload/alive/1", identity)
    monkeypatch.setattr(heartbeat, "ended", lambda process: process == "its identity")
    start = time.monotonic()
    with pytest.raises(errors.ProcessError, match="process 1 is gone"):
        enter(0, stores.MemoryStore(memory), 2)
    with pytest.raises(errors.ProcessError, match="process 1 is gone"):
        enter(2, stores.MemoryStore(memory), 3)
    assert time.monotonic() - start < 2


def test_a_process_that_counts_as_gone_hears_of_it() -> None:
    """As one does that loads while it ends; no timeout is set that could have passed."""
    store = stores.MemoryStore(stores.Memory())

    backend: Any = stores.Backend(0, store)

    def load() -> None:
        with agree.joined(backend, [0, 1], Deadline(None)) as group:
            store.put("mfload/alive/0", "ended")
            group.check("the exchange")

    with pytest.raises(errors.ProcessError, match="process 0, this one, is gone") as caught:
        load()
    assert "None s" not in str(caught.value)


def test_checking_tells_of_an_error_elsewhere() -> None:
    memory = stores.Memory()

    def fails() -> None:
        enter(0, stores.MemoryStore(memory), 2, act=lambda step: 1 / (1 - step), steps=1)

    def checks() -> None:
        backend: Any = stores.Backend(1, stores.MemoryStore(memory))
        with agree.joined(backend, [0, 1], Deadline(None)) as group:
            group.agree("step 0", ["same"])
            while True:
                group.check("the exchange")

    own, other = stores.all_at_once([fails, checks])
    assert isinstance(own, ZeroDivisionError)
    assert isinstance(other, errors.ProcessError)
    assert "ZeroDivisionError" in str(other)


def test_waiting_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(agree, "_PATIENCE", 0.01)
    with pytest.raises(errors.LoadTimeoutError):
        enter(0, stores.MemoryStore(stores.Memory()), 2, seconds=0.1)
    assert [r.message for r in caplog.records if "waits for processes [1]" in r.message]


@pytest.mark.parametrize("seconds", [None, 0.3])
def test_who_is_late_in_a_round_is_named(
    seconds: float | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Processes 0 and 2 wait in round 5; process 1 waited in round 4, and does something else."""
    monkeypatch.setattr(agree, "_WAITS", 0.01)
    monkeypatch.setattr(agree, "_PATIENCE", 0.05)
    memory, groups = stores.Memory(), list[agree.ProcessGroup]()
    for rank in range(3):
        backend: Any = stores.Backend(rank, stores.MemoryStore(memory), None)
        groups.append(agree.ProcessGroup(backend, range(3), Deadline(seconds)))
    early = groups[1].watch("exchange", 4)
    watches = [groups[0].watch("exchange", 5), groups[2].watch("exchange", 5)]
    time.sleep(0.02)
    for each in (early, *watches):
        each()
    assert not caplog.records
    time.sleep(0.3)
    for each in watches:
        if seconds is None:
            each()
        else:
            with pytest.raises(errors.LoadTimeoutError, match=r"process 1 did not come to round 5"):
                each()
    assert [r.message for r in caplog.records] == (
        ["mfload waits for processes [1] (exchange)"] * 2 if seconds is None else []
    )


def test_a_round_that_another_gave_up_in_is_met_and_no_later_one() -> None:
    """Process 0 gave up in round 2, and process 1, which was late, has begun rounds 0 and 1."""
    memory, groups = stores.Memory(), list[agree.ProcessGroup]()
    for rank in range(2):
        backend: Any = stores.Backend(rank, stores.MemoryStore(memory), None)
        groups.append(agree.ProcessGroup(backend, range(2), Deadline(None)))
    for number in range(3):
        groups[0].begin("exchange", number)
        if number < 2:
            groups[1].begin("exchange", number)
    groups[0].fail(errors.LoadTimeoutError("timed out"))
    time.sleep(agree._BEAT)
    groups[1].begin("exchange", 2)
    with pytest.raises(errors.ProcessError, match="process 0 failed"):
        groups[1].begin("exchange", 3)


def test_a_store_that_fails_leaves_the_error() -> None:
    store = stores.MemoryStore(stores.Memory())

    def act(step: int) -> None:
        store.first = lambda key, text: 1 / 0  # type: ignore
        raise Broken

    with pytest.raises(Broken):
        enter(0, store, 2, act=act)


class TestWithoutAStore:
    """Rows travel by collectives."""

    def test_all_agree(self) -> None:
        swaps = stores.Swaps(3)
        acts = [lambda rank=rank: enter(rank, None, 3, swaps=swaps) for rank in range(3)]
        assert stores.all_at_once(acts * 1) == ["well"] * 3
        assert stores.all_at_once(acts) == ["well"] * 3

    def test_what_differs(self) -> None:
        swaps = stores.Swaps(2)
        acts = [
            lambda rank=rank: enter(
                rank, None, 2, lines=lambda step, rank=rank: ["a", f"b {rank}"], swaps=swaps
            )
            for rank in range(2)
        ]
        for each in stores.all_at_once(acts):
            assert "process 1: b 1" in str(each)

    @pytest.mark.parametrize("fails", [False, True])
    def test_ctrl_c_in_a_step_that_was_the_last(self, fails: bool) -> None:
        """None waits for an answer of others that have left: all were done, or one failed."""
        swaps = stores.Swaps(2, 5)

        class Pressed(stores.MemoryLink):
            def finish(self, check: Any) -> Any:
                came, _ = super().finish(check)
                return came, KeyboardInterrupt() if b"end" in rows(came) else None

        def rows(came: Any) -> bytes:
            return b"".join(bytes(row[:16]) for row in came)

        def process(rank: int) -> None:
            backend: Any = stores.Backend(rank, None, swaps)
            if rank == 0:
                backend.link = lambda ranks, width, _: Pressed(rank, ranks, width, swaps)
            with agree.joined(backend, (0, 1), Deadline(None)) as group:
                group.agree("files")
                if fails and rank == 1:
                    raise Broken

        start = time.monotonic()
        pressed, other = stores.all_at_once([lambda rank=rank: process(rank) for rank in (0, 1)])
        assert isinstance(pressed, KeyboardInterrupt)
        assert isinstance(other, Broken) if fails else other is None
        assert time.monotonic() - start < 3

    def test_one_that_does_not_come(self) -> None:
        swaps = stores.Swaps(2, seconds=0.05)
        with pytest.raises(errors.ProcessError, match="broke off"):
            enter(0, None, 2, swaps=swaps)


class TestThreads:
    """Loads of several threads of one process take turns, in the order in which they enter."""

    @pytest.fixture(autouse=True)
    def turns(self, processes: None, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.undo()
        monkeypatch.setattr(agree.atexit, "register", lambda *_: None)

    def _load(
        self, name: str, alone: Any, said: list[str], act: Callable[[], None], seconds: float = 10
    ) -> None:
        try:
            # The other process is a thread that takes no turns in this one.
            with agree.joined(alone, (0, 1), Deadline(seconds)):
                said.append(f"{name} begins")
                act()
                said.append(f"{name} ends")
                raise Broken  # It does not wait for another process at its end.
        except Broken:
            pass

    def test_they_take_turns(self) -> None:
        backend: Any = stores.Backend(0, stores.MemoryStore(stores.Memory()))
        said: list[str] = []
        begun = threading.Event()

        def first() -> None:
            begun.set()
            time.sleep(0.1)

        def second() -> None:
            assert begun.wait(5)
            self._load("b", backend, said, lambda: None)

        stores.all_at_once([lambda: self._load("a", backend, said, first), second])
        assert said == ["a begins", "a ends", "b begins", "b ends"]

    def test_one_that_gives_up_before_its_turn_tells_under_its_own_number(self) -> None:
        memory = stores.Memory()
        backend: Any = stores.Backend(0, stores.MemoryStore(memory))
        said: list[str] = []
        begun, given_up = threading.Event(), threading.Event()

        def first() -> None:
            begun.set()
            assert given_up.wait(5)

        def second() -> None:
            assert begun.wait(5)
            try:
                with pytest.raises(errors.LoadTimeoutError, match="another thread"):
                    self._load("b", backend, said, lambda: None, seconds=0.05)
            finally:
                given_up.set()

        stores.all_at_once([lambda: self._load("a", backend, said, first), second])
        assert said == ["a begins", "a ends"]
        (outcome,) = [key for key in memory.texts if key.endswith("/2/0/outcome")]
        assert "failed" in memory.texts[outcome]

    def test_a_load_inside_of_another(self) -> None:
        backend: Any = stores.Backend(0, stores.MemoryStore(stores.Memory()))

        def load() -> Any:
            return agree.joined(backend, (0, 1), Deadline(10))

        with pytest.raises(errors.UsageError, match="part of another"), load(), load():
            pass
        assert agree._queue == []


def test_ended() -> None:
    me = heartbeat.identity()
    assert not heartbeat.ended(me)
    host, pid, started = me.split()
    assert heartbeat.ended(f"{host} {pid} {int(started) - 1}")
    for elsewhere in (f"elsewhere {pid} {started}", "", "x", "? 1 2 3"):
        assert not heartbeat.ended(elsewhere)


def test_a_zombie_has_ended() -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as child:
        who = heartbeat.identity(child.pid)
        assert not heartbeat.ended(who)
        child.kill()
        end = time.monotonic() + 5
        while not heartbeat.ended(who) and time.monotonic() < end:
            time.sleep(0.01)
        assert heartbeat.ended(who)  # Its exit status was not asked for yet.


def test_a_process_may_have_any_name() -> None:
    """The kernel cuts it after 15 bytes, in the middle of a character too."""
    code = """
        import ctypes
        ctypes.CDLL(None).prctl(15, b") \\xff\\n\\xc3", 0, 0, 0)  # PR_SET_NAME
        print(flush=True)
        input()
    """
    command, pipe = [sys.executable, "-c", textwrap.dedent(code)], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe) as child:
        assert child.stdout
        child.stdout.readline()
        assert not heartbeat.ended(heartbeat.identity(child.pid))
        child.communicate(b"\n")
