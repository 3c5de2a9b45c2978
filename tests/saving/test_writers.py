"""Writers: every job is done, few wait at a time, and the first failure stops all."""

from __future__ import annotations

import errno
import threading
import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest

from mfload import errors
from mfload.saving import writers
from mfload.saving.writers import Write, Writers


class FakeDraft:
    """Notes what is written, and does what the test says."""

    def __init__(self) -> None:
        self.written: dict[int, bytes] = {}
        self.gate = threading.Event()
        self.gate.set()
        self.fail_at: int | None = None
        self.most = self.now = 0
        self.lock = threading.Lock()

    def write(self, offset: int, pieces: Sequence[Any]) -> int:
        with self.lock:
            self.now += 1
            self.most = max(self.most, self.now)
        try:
            assert self.gate.wait(20)
            if offset == self.fail_at:
                raise errors.from_target(OSError(errno.ENOSPC, "full"), "f", "write")
            with self.lock:
                self.written[offset] = b"".join(piece.tobytes() for piece in pieces)
            return sum(piece.nbytes for piece in pieces)
        finally:
            with self.lock:
                self.now -= 1


def job(draft: FakeDraft, number: int) -> Write:
    piece = np.full(3, number, np.uint8)
    return partial(draft.write, number, [piece, piece])


@pytest.fixture(autouse=True)
def no_threads_left() -> Any:
    before = threading.active_count()
    yield
    assert threading.active_count() == before


@pytest.mark.parametrize("threads", [0, 1, 4])
def test_every_job_is_done_and_told(threads: int) -> None:
    draft = FakeDraft()
    told: list[int] = []
    names: set[str] = set()

    def advance(nbytes: int) -> None:
        told.append(nbytes)
        names.add(threading.current_thread().name)

    made = Writers(threads, advance)
    for number in range(50):
        made.put(job(draft, number))
    made.drain()
    made.close()
    assert draft.written == {number: bytes([number] * 6) for number in range(50)}
    assert sum(told) == 300
    assert names == {threading.current_thread().name}


def test_few_wait_at_a_time() -> None:
    draft = FakeDraft()
    draft.gate.clear()
    made = Writers(2)
    taken: list[int] = []

    def feed() -> None:
        for number in range(20):
            made.put(job(draft, number))
            taken.append(number)

    thread = threading.Thread(target=feed)
    thread.start()
    thread.join(0.5)
    assert len(taken) == 2 * writers._AHEAD
    draft.gate.set()
    thread.join(20)
    made.drain()
    made.close()
    assert len(draft.written) == 20
    assert draft.most == 2


@pytest.mark.parametrize("threads", [0, 1, 4])
def test_the_first_failure_comes_out(threads: int) -> None:
    draft = FakeDraft()
    draft.fail_at = 3
    made = Writers(threads)

    def feed() -> None:
        for number in range(200):
            made.put(job(draft, number))
        made.drain()

    with pytest.raises(errors.WriteError) as caught:
        feed()
    made.close()
    assert caught.value.errno == errno.ENOSPC
    assert len(draft.written) < 30


def test_what_waits_is_dropped_when_closed() -> None:
    draft = FakeDraft()
    draft.gate.clear()
    made = Writers(1)
    made.put(job(draft, 0))
    while draft.now == 0:
        pass
    made.put(job(draft, 1))
    threading.Timer(0.1, draft.gate.set).start()
    made.close()
    assert list(draft.written) == [0]


def test_one_that_hangs_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writers, "_GRACE", 0.1)
    draft = FakeDraft()
    draft.gate.clear()
    made = Writers(2)
    made.put(job(draft, 0))
    while draft.now == 0:
        pass
    made.close()
    assert not made._threads[0].join(0)
    draft.gate.set()
    assert made._threads[0].join(20)


def test_no_threads_to_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", none)
    draft = FakeDraft()
    told: list[int] = []
    made = Writers(4, told.append)
    for number in range(9):
        made.put(job(draft, number))
    made.drain()
    made.close()
    assert len(draft.written) == 9
    assert sum(told) == 54


def test_bytes_are_let_go_of_once_written() -> None:
    draft = FakeDraft()
    made = Writers(2)
    piece = np.zeros(5, np.uint8)
    gone = weakref.ref(piece)
    made.put(partial(draft.write, 0, [piece]))
    del piece
    made.drain()
    assert gone() is None
    made.close()


def test_who_keeps_the_error_keeps_no_bytes() -> None:
    draft = FakeDraft()
    draft.fail_at = 0
    made = Writers(2)
    piece = np.zeros(5, np.uint8)
    gone = weakref.ref(piece)
    made.put(partial(draft.write, 0, [piece]))
    del piece
    with pytest.raises(errors.WriteError) as caught:
        made.drain()
    made.close()
    assert gone() is None
    assert caught.value.errno == errno.ENOSPC
