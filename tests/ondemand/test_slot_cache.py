"""The cache against a plain dict: contents after each use, pins, threads, failed reads, forks."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from benchmarks.replay import replay
from mfload import errors
from mfload.io import buffers
from mfload.ondemand import policies
from mfload.ondemand.background import Background
from mfload.ondemand.cache import SlotCache
from mfload.ondemand.rows import RowCache

WIDTH = 24
POLICIES = ("lru", "lfu", "pin+lru", "window(1)", "window(3)", "cyclic", "pinned")


class Disk:
    """What keys hold; reads fail on demand, and wait for `gate`."""

    def __init__(self, keys: int, arenas: int) -> None:
        self.data = np.random.default_rng(keys).integers(0, 256, (keys, arenas, WIDTH), np.uint8)
        self.fails: set[int] = set()
        self.read: list[int] = []
        self.gate: threading.Event | None = None
        self.began = threading.Event()

    def fill(self, keys: Any, addresses: Any) -> tuple[int, int]:
        self.began.set()
        if self.gate is not None:
            assert self.gate.wait(30)
        for key, row in zip(keys.tolist(), addresses.tolist(), strict=True):
            for part, address in enumerate(row):
                buffers.ctypes.memset(address, 0xEE, WIDTH)
                if key not in self.fails:
                    buffers.ctypes.memmove(address, self.data[key, part].ctypes.data, WIDTH)
        if self.fails & set(keys.tolist()):
            raise errors.ReadError("could not read", file="disk")
        self.read += keys.tolist()
        return keys.size, addresses.size * WIDTH


def make(
    keys: int = 8, capacity: int = 3, policy: str = "lru", arenas: int = 1, rows: bool = False,
    **more: Any,
) -> tuple[Any, Disk]:  # fmt: skip
    disk = Disk(keys, arenas)
    special: dict[str, Callable[[int, int], Any]] = {
        "cyclic": policies.Cyclic,
        "pinned": lambda keys, capacity: policies.PinLru(keys, capacity, [0, 1]),
    }
    chosen = policies.make(special.get(policy, policy), keys, capacity)
    memory = [np.zeros((capacity, WIDTH), np.uint8) for _ in range(arenas)]
    more.setdefault("wait", 0.0)
    return (RowCache if rows else SlotCache)(disk.fill, keys, memory, chosen, **more), disk


def views(lease: Any, arenas: int, rows: bool) -> dict[int, list[Any]]:
    """Arrays by key; through the whole arena for rows, which come first."""
    if rows:
        assert lease.slots.tolist() == list(range(lease.slots.size))
        whole = [lease.whole(arena) for arena in range(arenas)]
        return {int(key): [each[n] for each in whole] for n, key in enumerate(lease.keys)}
    return {
        int(key): [lease.memory(n, arena) for arena in range(arenas)]
        for n, key in enumerate(lease.keys)
    }


def right(disk: Disk, found: dict[int, list[Any]]) -> None:
    for key, parts in found.items():
        for part, array in enumerate(parts):
            assert np.array_equal(array, disk.data[key, part]), key


class Machine(RuleBasedStateMachine):
    """Uses, views that are kept, reads ahead and failures; `held` is the plain dict."""

    @initialize(
        keys=st.integers(1, 9), capacity=st.integers(1, 6), policy=st.sampled_from(POLICIES),
        arenas=st.integers(1, 2), rows=st.booleans(),
    )  # fmt: skip
    def begin(self, keys: int, capacity: int, policy: str, arenas: int, rows: bool) -> None:
        self.cache, self.disk = make(keys, capacity, policy, arenas, rows)
        self.keys, self.capacity, self.arenas, self.rows = keys, capacity, arenas, rows
        self.held: list[tuple[dict[int, list[Any]], set[int]]] = []

    def check(self) -> None:
        cache = self.cache
        for found, _ in self.held:
            right(self.disk, found)
        live = np.flatnonzero(cache.key_of >= 0)
        assert np.array_equal(cache.slot_of[cache.key_of[live]], live)
        assert np.count_nonzero(cache.slot_of >= 0) == live.size
        assert (cache.pins >= 0).all()
        cache._settle()
        pinned = set[int]().union(*(slots for _, slots in self.held))
        assert set(np.flatnonzero(cache.pins).tolist()) == pinned
        for slot in live:
            for part in range(self.arenas):
                wanted = self.disk.data[cache.key_of[slot], part]
                assert np.array_equal(cache._arenas[part][slot], wanted)

    @rule(asked=st.sets(st.integers(0, 8), max_size=7), keep=st.booleans())
    def use(self, asked: set[int], keep: bool) -> None:
        asked = {key % self.keys for key in asked}
        self.cache._settle()
        there = {key for key in asked if self.cache.slot_of[key] >= 0}
        pinned = set(np.flatnonzero(self.cache.pins).tolist())
        try:
            lease = self.cache.use(asked)
        except errors.MemoryLimitError as error:
            free = self.capacity - len(pinned | {int(self.cache.slot_of[key]) for key in there})
            too_many = len(asked) > self.capacity
            if not (too_many or pinned) or not (self.rows or too_many or len(asked - there) > free):
                raise AssertionError("there was room") from error
            self.check()
            return
        except errors.ReadError:
            assert self.disk.fails & (asked - there)
            assert not any(self.cache.slot_of[key] >= 0 for key in asked - there)
            self.check()
            return
        assert asked <= set(lease.keys.tolist()) if self.rows else asked == set(lease.keys.tolist())
        found = views(lease, self.arenas, self.rows)
        right(self.disk, found)
        if keep:
            self.held.append((found, set(lease.slots.tolist())))
        del lease, found
        self.check()

    @precondition(lambda self: self.held)
    @rule(number=st.integers(0, 20))
    def release(self, number: int) -> None:
        del self.held[number % len(self.held)]
        self.check()

    @rule(asked=st.lists(st.integers(0, 8), max_size=7))
    def prefetch(self, asked: list[int]) -> None:
        keys = self.cache._known([key % self.keys for key in asked])
        there = {key for key in keys.tolist() if self.cache.slot_of[key] >= 0}
        try:
            self.cache.read_ahead(keys)
        except errors.ReadError:
            assert self.disk.fails
        # What is asked for does not leave for the rest of it.
        assert all(self.cache.slot_of[key] >= 0 for key in there)
        self.check()

    @rule(fails=st.sets(st.integers(0, 8), max_size=2))
    def fail(self, fails: set[int]) -> None:
        self.disk.fails = fails

    def teardown(self) -> None:
        if hasattr(self, "cache"):
            self.held.clear()
            self.cache._settle()
            assert not self.cache.pins.any()


Machine.TestCase.settings = settings(stateful_step_count=40, deadline=None)
TestCache = Machine.TestCase


def test_a_view_that_escapes_keeps_its_slot_alone() -> None:
    cache, disk = make(capacity=2, wait=0.02)
    lease = cache.use([0, 1])
    view = lease.split()[1].memory(0)[3:7]
    del lease
    gc.collect()
    for key in (2, 3, 4):
        cache.use([key])
    assert np.array_equal(view, disk.data[1, 0, 3:7])
    with pytest.raises(errors.MemoryLimitError, match="1 of 2 slots pinned") as info:
        cache.use([5, 6])
    assert "no room for 2 keys" in str(info.value)
    del view
    cache.use([5, 6])


def test_more_keys_than_slots_are_refused_at_once() -> None:
    cache, disk = make(capacity=2, wait=60)
    with pytest.raises(errors.MemoryLimitError, match=r"at most 2; found: 3"):
        cache.use([0, 1, 2])
    assert disk.read == []


def test_what_a_signal_breaks_off_before_it_is_read_is_not_handed_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A request in a signal handler, of the same thread, fails between two steps of another."""
    cache, _ = make(capacity=2)
    start = cache._crew.start

    def interrupted(*given: Any) -> Any:
        with pytest.raises(errors.MemoryLimitError):
            cache.use([2, 3])
        return start(*given)

    monkeypatch.setattr(cache._crew, "start", interrupted)
    with pytest.raises(errors.MfloadError):
        cache.use([0, 1])
    monkeypatch.undo()
    cache, disk = make(capacity=2)
    right(disk, views(cache.use([0, 1]), 1, False))


def test_all_pinned_waits_and_goes_on() -> None:
    cache, disk = make(capacity=1, wait=30)
    held = [cache.use([0])]
    timer = threading.Timer(0.1, held.clear)
    timer.start()
    assert np.array_equal(cache.use([1]).memory(0), disk.data[1, 0])
    assert cache.counts.wait_seconds > 0.05
    timer.join()


def test_a_view_in_a_cycle_is_collected() -> None:
    cache, _ = make(capacity=1, wait=10)
    ring: list[Any] = [cache.use([0]).memory(0)]
    ring.append(ring)
    del ring
    start = time.monotonic()
    cache.use([1])
    assert time.monotonic() - start < 5


@pytest.mark.parametrize("keys", [[-1], [8], [2**63], ["a"], [1.5], [True], 3, None, [[None]]])
def test_keys_that_are_none_are_refused(keys: Any) -> None:
    cache, disk = make()
    with pytest.raises(errors.UsageError):
        cache.use(keys)
    with pytest.raises(errors.UsageError):
        cache.prefetch(keys)
    assert disk.read == []


def test_keys_may_come_twice_and_in_any_form() -> None:
    cache, disk = make()
    for keys in ([1, 0, 1], np.array([[0], [1]], np.uint8), {1, 0}, (n for n in (1, 0)), range(2)):
        assert cache.use(keys).keys.tolist() == [0, 1]
    assert sorted(disk.read) == [0, 1]
    assert cache.use([]).keys.size == 0


def test_what_another_thread_reads_is_not_read_twice() -> None:
    cache, disk = make()
    disk.gate = threading.Event()
    found: list[Any] = []

    def work() -> None:
        found.append(cache.use([4]).memory(0).copy())

    threads = [threading.Thread(target=work) for _ in range(4)]
    threads[0].start()
    assert disk.began.wait(10)
    for each in threads[1:]:
        each.start()
    time.sleep(0.05)
    assert not found
    disk.gate.set()
    for each in threads:
        each.join()
    assert disk.read == [4]
    assert all(np.array_equal(each, disk.data[4, 0]) for each in found)
    assert (cache.counts.hits, cache.counts.misses) == (3, 1)


def test_a_failed_read_raises_for_all_who_wait() -> None:
    cache, disk = make(capacity=1, wait=10)
    disk.gate, disk.fails = threading.Event(), {4}
    said: list[BaseException] = []

    def work() -> None:
        try:
            cache.use([4])
        except errors.ReadError as error:
            said.append(error)

    threads = [threading.Thread(target=work) for _ in range(3)]
    threads[0].start()
    assert disk.began.wait(10)
    for each in threads[1:]:
        each.start()
    while cache.pins.sum() < 3:
        time.sleep(0.001)
    disk.gate.set()
    for each in threads:
        each.join()
    assert [error.file for error in said] == ["disk"] * 3
    assert len({id(error) for error in said}) == 3
    disk.fails = set()
    assert np.array_equal(cache.use([4]).memory(0), disk.data[4, 0])


def test_an_interrupt_frees_the_slots_and_wakes_those_who_wait() -> None:
    cache, disk = make(capacity=1, wait=10)
    disk.gate = threading.Event()
    said: list[BaseException] = []
    real = disk.fill

    def interrupted(keys: Any, addresses: Any) -> Any:
        real(keys, addresses)
        raise KeyboardInterrupt

    cache._fill = interrupted

    def work() -> None:
        try:
            cache.use([4])
        except BaseException as error:
            said.append(error)

    threads = [threading.Thread(target=work) for _ in range(2)]
    threads[0].start()
    assert disk.began.wait(10)
    threads[1].start()
    while cache.pins.sum() < 2:
        time.sleep(0.001)
    disk.gate.set()
    for each in threads:
        each.join()
    assert {type(error) for error in said} == {KeyboardInterrupt, errors.ReadError}
    cache._fill = real
    cache.use([5])


@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.parametrize("policy", ["lru", "lfu", "window(2)"])
def test_threads(rows: bool, policy: str) -> None:
    """Several sequences at once: right contents, no deadlock, no slot taken from under anyone."""
    background = Background()
    cache, disk = make(40, 16, policy, 2, rows, wait=20, background=background)
    failed: list[Any] = []

    def work(seed: int) -> None:
        generator = np.random.default_rng(seed)
        try:
            kept: list[Any] = []
            for step in range(150):
                asked = generator.choice(40, generator.integers(1, 5), replace=False)
                found = views(cache.use(asked), 2, rows)
                if step % 3 == 0:
                    cache.prefetch(generator.choice(40, 3))
                right(disk, found)  # Not here: loop variables would pin.
                for each in kept:
                    right(disk, each)
                kept = [] if rows or step % 2 else [found]
                each = None
                del found
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(60)
    assert not failed
    background.close()
    cache._settle()
    assert not cache.pins.any()
    assert not cache._busy.any()


def test_reading_ahead() -> None:
    background = Background()
    cache, disk = make(capacity=4, background=background, wait=5)
    held = cache.use([0, 1])
    disk.gate = threading.Event()
    disk.began.clear()
    cache.prefetch([7, 6, 5])  # Room for two: the likeliest come first.
    assert disk.began.wait(10)
    disk.gate.set()
    assert np.array_equal(cache.use([7]).memory(0), disk.data[7, 0])
    assert sorted(disk.read) == [0, 1, 6, 7]
    counts = cache.counts
    assert (counts.prefetched, counts.misses, counts.hits) == (2, 2, 1)
    disk.fails = {3}
    cache.prefetch([3])
    with pytest.raises(errors.ReadError):  # In whichever thread it failed.
        cache.use([3])
    del held
    background.close()
    cache.prefetch([1])  # After its end it does nothing.


def test_reading_ahead_waits_for_slots() -> None:
    background = Background()
    cache, disk = make(capacity=1, background=background, wait=10)
    held = [cache.use([0])]
    disk.began.clear()
    cache.prefetch([1], patient=True)
    time.sleep(0.05)
    assert disk.read == [0]
    held.clear()
    assert disk.began.wait(5)
    assert np.array_equal(cache.use([1]).memory(0), disk.data[1, 0])
    assert disk.read == [0, 1]
    held = [cache.use([2])]
    cache.prefetch([1], patient=True)
    start = time.monotonic()
    background.close()
    assert time.monotonic() - start < 5
    cache.close()


@pytest.mark.parametrize("rows", [False, True])
def test_what_is_read_ahead_does_not_leave_meanwhile(rows: bool) -> None:
    """No row moves into its place either; whoever needs the slots waits."""
    background = Background()
    cache, disk = make(capacity=2, rows=rows, background=background, wait=20)
    disk.gate = threading.Event()
    cache.prefetch([1, 2])
    assert disk.began.wait(10)
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(views(cache.use([3]), 1, rows)))
    thread.start()
    time.sleep(0.05)
    assert len(cache._under_way) == 1
    disk.gate.set()
    thread.join(30)
    right(disk, found[0])
    assert 3 in found[0]
    background.close()


@pytest.mark.parametrize("policy", ["lru", "lfu"])
def test_what_is_read_ahead_stays_until_the_next_request(policy: str) -> None:
    """Though it was never used, and the others were."""
    cache, disk = make(capacity=3, policy=policy)
    for key in (0, 0, 1, 1):
        cache.use([key])
    cache.read_ahead(np.array([7]))
    cache.read_ahead(np.array([6]))
    assert sorted(cache.key_of[cache.key_of >= 0].tolist()) in ([0, 6, 7], [1, 6, 7])
    assert disk.read[-2:] == [7, 6]


def test_what_is_asked_for_later_takes_the_place_of_what_waits() -> None:
    background = Background()
    cache, disk = make(capacity=1, background=background, wait=20)
    held = [cache.use([0])]
    cache.prefetch([1], patient=True)
    time.sleep(0.05)  # It waits for the slot.
    cache.prefetch([2], patient=True)
    time.sleep(0.05)
    held.clear()
    end = time.monotonic() + 10
    while disk.read == [0]:
        assert time.monotonic() < end
        time.sleep(0.001)
    background.close()
    assert disk.read == [0, 2]


def test_closing_waits_for_reads() -> None:
    cache, disk = make(wait=20)
    disk.gate = threading.Event()
    thread = threading.Thread(target=cache.use, args=([1],))
    thread.start()
    assert disk.began.wait(10)
    closer = threading.Thread(target=cache.close)
    closer.start()
    closer.join(0.05)
    assert closer.is_alive()
    disk.gate.set()
    closer.join(10)
    thread.join(10)
    assert not closer.is_alive()
    assert disk.read == [1]


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_fork_is_refused() -> None:
    background = Background()
    cache, disk = make(background=background)
    view = cache.use([3]).memory(0)
    cache.prefetch([4])
    cache.use([4])
    child = os.fork()
    if child == 0:
        code = 1
        try:
            try:
                cache.use([3])
            except errors.UsageError as error:
                code = 0 if "made before a fork" in str(error) else 2
            try:
                cache.prefetch([3])
                code = 3
            except errors.UsageError:
                pass
            if not np.array_equal(view, disk.data[3, 0]):
                code = 4
            background.close()
            cache.close()
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    background.close()
    cache.use([5])


def test_closing() -> None:
    arena = buffers.allocate(2 * WIDTH).reshape(2, WIDTH)
    cache, disk = make(capacity=2)
    cache._arenas = (arena,)
    view = cache.use([1]).memory(0)
    del arena
    assert buffers.live_bytes() > 0
    cache.close()
    cache.close()
    with pytest.raises(errors.UsageError, match="closed"):
        cache.use([1])
    with pytest.raises(errors.UsageError, match="closed"):
        cache.prefetch([1])
    assert np.array_equal(view, disk.data[1, 0])
    del view
    assert buffers.live_bytes() == 0


def test_rows_close_gaps_only_while_nothing_is_pinned() -> None:
    cache, disk = make(12, 8, "window(1)", 2, rows=True)
    lease = cache.use([0, 1, 2, 3, 4])
    more = cache.use([7])
    assert more.keys.tolist() == [0, 1, 2, 3, 4, 7]
    del lease, more
    lease = cache.use([4, 9])
    # 9 takes the place of one that left, and the last row fills the other gap.
    assert sorted(lease.keys.tolist()) == [4, 9]
    assert lease.slots.tolist() == [0, 1]
    right(disk, views(lease, 2, True))


@pytest.mark.parametrize("policy", [each for each in POLICIES if "(" in each] + ["lru", "lfu"])
@pytest.mark.parametrize("rows", [False, True])
def test_misses_are_those_of_a_replay(policy: str, rows: bool) -> None:
    rng = np.random.default_rng(3)
    trace = [[key] for key in rng.integers(0, 8, 200)]  # Of several, any may leave first.
    for capacity in (3, 6, 8):
        cache, _ = make(8, capacity, policy, rows=rows)
        misses: list[int] = []
        for asked in trace:
            before = cache.counts.misses
            cache.use(asked)
            misses.append(cache.counts.misses - before)
        assert misses == replay(trace, capacity, policy).tolist()
