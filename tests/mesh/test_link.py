"""A swap between processes, while another process fails."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Generator
from typing import Any

import numpy as np
import pytest

from mfload import errors
from mfload.mesh import link as linking
from mfload.runtime import Deadline


class Late(linking.Link):
    """A link whose collective waits for an event, or fails."""

    def __init__(self, ends: threading.Event, deadline: Deadline, error: str = "") -> None:
        super().__init__("a test", deadline)
        self._ends, self._error = ends, error

    def buffer(self) -> Any:
        return np.full((1, 4096), 7, np.uint8)

    def exchange(self, rows: Any) -> Any:
        self._ends.wait(30)
        if self._error:
            raise RuntimeError(self._error)
        return rows.copy()


@pytest.fixture
def ends() -> Generator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()
    for thread in threading.enumerate():
        if thread.name == "mfload-swap":
            thread.join()
    linking._broken.clear()


def gone() -> None:
    raise errors.ProcessError("another process failed")


def test_a_swap_that_ends_counts_though_a_process_failed_since(ends: threading.Event) -> None:
    link = Late(ends, Deadline(None))
    link.start(link.buffer())

    def check() -> None:
        ends.set()
        gone()

    came, interrupted = link.finish(check)
    assert (came == 7).all()
    assert interrupted is None
    assert not link.broken


def test_a_swap_that_hangs_is_given_up(
    ends: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linking, "_GRACE", 0.05)
    link = Late(ends, Deadline(None))
    link.start(link.buffer())
    with pytest.raises(errors.ProcessError, match="another process failed"):
        link.finish(gone)
    assert link.broken


def test_a_swap_ends_at_the_deadline(ends: threading.Event) -> None:
    link = Late(ends, Deadline(0.2))
    link.start(link.buffer())
    with pytest.raises(errors.LoadTimeoutError, match="exchanging bytes"):
        link.finish(lambda: None)
    assert link.broken


def test_a_collective_that_fails_is_a_process_error(ends: threading.Event) -> None:
    ends.set()
    link = Late(ends, Deadline(None), "connection closed by peer\nand more")
    link.start(link.buffer())
    with pytest.raises(errors.ProcessError, match="broke off") as caught:
        link.finish(lambda: None)
    assert caught.value.found == "connection closed by peer"
    assert link.broken


def test_an_interrupt_comes_after_the_swap(ends: threading.Event) -> None:
    """Ctrl-C while the loading thread waits: the swap goes on, and its rows count."""
    link = Late(ends, Deadline(None))
    link.start(link.buffer())

    def interrupt() -> None:
        time.sleep(0.15)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.25)
        ends.set()

    other = threading.Thread(target=interrupt)
    other.start()
    try:
        came, interrupted = link.finish(lambda: None)
    finally:
        other.join()
    assert (came == 7).all()
    assert isinstance(interrupted, KeyboardInterrupt)
    assert not link.broken
    ends.clear()
    link.start(link.buffer())
    ends.set()
    assert (link.finish(lambda: None)[0] == 7).all()


def test_a_second_interrupt_gives_up(ends: threading.Event) -> None:
    link = Late(ends, Deadline(None))
    link.start(link.buffer())

    def interrupt() -> None:
        for _ in range(2):
            time.sleep(0.15)
            os.kill(os.getpid(), signal.SIGINT)

    other = threading.Thread(target=interrupt)
    other.start()
    with pytest.raises(KeyboardInterrupt):
        link.finish(lambda: None)
    other.join()
    assert link.broken
