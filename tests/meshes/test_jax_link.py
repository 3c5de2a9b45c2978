"""A swap between processes, while another process fails."""

from __future__ import annotations

import threading
from collections.abc import Generator
from typing import Any

import pytest

from mfload import errors
from mfload.mesh import jax_processes
from mfload.runtime import Deadline


@pytest.fixture
def collective(monkeypatch: pytest.MonkeyPatch) -> Generator[threading.Event]:
    """What a collective over one device waits for."""
    ends, true = threading.Event(), jax_processes._all_to_all

    def late(devices: Any) -> Any:
        ends.wait(30)
        return true(devices)

    monkeypatch.setattr(jax_processes, "_all_to_all", late)
    yield ends
    ends.set()
    for thread in threading.enumerate():
        if thread.name == "mfload-swap":
            thread.join()
    jax_processes._broken.clear()


def gone() -> None:
    raise errors.ProcessError("another process failed")


def test_a_swap_that_ends_counts_though_a_process_failed_since(collective: threading.Event) -> None:
    link = jax_processes.JaxLink([0], "cpu", 4096, Deadline(None))
    rows = link.buffer()
    rows[:] = 7

    def check() -> None:
        collective.set()
        gone()

    came, interrupted = link.swap(rows, check)
    assert (came == 7).all()
    assert interrupted is None
    assert not link.broken


def test_a_swap_that_hangs_is_given_up(
    collective: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jax_processes, "_GRACE", 0.05)
    link = jax_processes.JaxLink([0], "cpu", 4096, Deadline(None))
    with pytest.raises(errors.ProcessError, match="another process failed"):
        link.swap(link.buffer(), gone)
    assert link.broken
