"""The collector waits while many objects are made, and never for good."""

from __future__ import annotations

import gc
import os
import signal
import threading

import pytest

from mfload import runtime
from mfload.runtime import gc_paused


def test_the_collector_waits_and_goes_on() -> None:
    assert gc.isenabled()
    with gc_paused():
        assert not gc.isenabled()
        with gc_paused():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(ValueError, match="out"), gc_paused():
        raise ValueError("out")
    assert gc.isenabled()


def test_one_that_was_off_stays_off() -> None:
    gc.disable()
    try:
        with gc_paused():
            assert not gc.isenabled()
        assert not gc.isenabled()
    finally:
        gc.enable()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.parametrize("locked", [False, True])
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_fork_while_another_thread_is_inside_leaves_the_child_whole(locked: bool) -> None:
    inside, release = threading.Event(), threading.Event()

    def work() -> None:
        with gc_paused():
            if locked:
                with runtime._lock:
                    inside.set()
                    release.wait(30)
            else:
                inside.set()
                release.wait(30)

    worker = threading.Thread(target=work)
    worker.start()
    inside.wait(10)
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(10)
        before = gc.isenabled()
        with gc_paused():
            pass
        os._exit(0 if before and gc.isenabled() else 1)
    try:
        assert os.waitpid(child, 0)[1] == 0
    finally:
        release.set()
        worker.join()
    assert gc.isenabled()
