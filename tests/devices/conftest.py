"""What tests of devices share: a kvikio on host memory, and its end."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest
from devices.entered import entered
from devices.stub_kvikio import Kvikio

from mfload.cuda import discovery
from mfload.cuda.staging import KITS


@pytest.fixture
def kvikio(monkeypatch: pytest.MonkeyPatch) -> Iterator[Kvikio]:
    """A stub, and the end of every test: nothing open, registered or current."""
    stub = Kvikio()
    monkeypatch.setattr(discovery, "count", lambda: 1)
    monkeypatch.setitem(sys.modules, "kvikio", stub)
    monkeypatch.setitem(sys.modules, "kvikio.defaults", stub.defaults)
    # A configuration, so that reads have streams of their own.
    monkeypatch.setenv("CUFILE_ENV_PATH_JSON", os.devnull)
    before = len(os.listdir("/proc/self/fd"))
    yield stub
    KITS.give_back()
    assert stub.misuse == []
    assert stub.handles == 0
    assert stub.registered == {}
    assert entered() == []
    assert len(os.listdir("/proc/self/fd")) <= before  # Maps of earlier tests may go meanwhile.
