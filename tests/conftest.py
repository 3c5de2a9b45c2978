"""What all tests share: files made by the reference writer, and a look at leaks after each."""

from __future__ import annotations

import gc
import os
import signal
import sys
import time
from collections.abc import Iterator

import hypothesis
import pytest

from mfload.devices.live import live_bytes

hypothesis.settings.register_profile("ci", max_examples=60, deadline=None, derandomize=False)
hypothesis.settings.register_profile("slow", max_examples=1000, deadline=None)
hypothesis.settings.load_profile("slow" if os.environ.get("MFLOAD_SLOW") else "ci")


@pytest.fixture(autouse=True)
def no_jax_beside_forks(request: pytest.FixtureRequest) -> Iterator[None]:
    """JAX's threads make a fork in any later test of the process a warning, and so a failure."""
    before = "jax" in sys.modules
    yield
    apart = {"frameworks", "meshes"} & set(request.path.parts)
    assert before or apart or "jax" not in sys.modules, "JAX wants a process of its own"


@pytest.fixture(autouse=True)
def no_handlers_left() -> Iterator[None]:
    """Signals do after a test what they did before: a handler left for SIGTERM makes a pool of
    forked workers in any later test wait for ever, once in some hundred times."""
    before = {number: signal.getsignal(number) for number in signal.valid_signals()}
    yield
    assert {number: signal.getsignal(number) for number in signal.valid_signals()} == before


@pytest.fixture(autouse=True)
def no_bytes_live() -> Iterator[None]:
    """After every test, none of mfload's memory is left, on the host or on a device."""
    yield
    if live_bytes():  # A look at all objects takes as long as many a test.
        gc.collect()
    # XLA lets go of what it computed with in threads of its own, some milliseconds later.
    end = time.monotonic() + 5
    while live_bytes() and time.monotonic() < end:
        time.sleep(0.001)
    assert live_bytes() == 0
