"""NIXL without it: as much of its agent as is used, for agents of one process."""

from __future__ import annotations

import ctypes
import sys
from collections import Counter
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from mfload.peer import nixl


class Agent:
    """As much of NIXL's agent as is used, for agents of one process.

    Attributes:
        state: What transfers end as; "PROC" for such as never end.
        moved: Bytes by the kinds of memory that they came to and from.
        spans: Registered memory: kind, device, address and bytes.
    """

    state = "DONE"
    known: dict[str, Agent] = {}  # noqa: RUF012
    moved: Counter[tuple[str, str]] = Counter()  # noqa: RUF012

    def __init__(self, name: str, config: Any) -> None:
        assert config == {"enable_prog_thread": False, "backends": [], "sync_mode": 1}
        self.name, self.pumped = name, 0
        self.spans: list[tuple[str, int, int, int]] = []
        Agent.known[name] = self

    def create_backend(self, name: str, given: dict[str, str]) -> None:
        assert (name, given["engine_config"]) == ("UCX", "TLS=^tcp")

    def register_memory(self, rows: Any, kind: str) -> Any:
        self.spans += [(kind, device, address, nbytes) for address, nbytes, device, _ in rows]
        return kind, rows

    def deregister_memory(self, registered: Any) -> None:
        kind, rows = registered
        for address, nbytes, device, _ in rows:
            self.spans.remove((kind, device, address, nbytes))

    def get_agent_metadata(self) -> bytes:
        return self.name.encode()

    def add_remote_agent(self, metadata: bytes) -> str:
        return Agent.known[metadata.decode()].name

    def remove_remote_agent(self, name: str) -> None:
        assert name in Agent.known

    def get_new_notifs(self) -> None:
        self.pumped += 1

    def get_xfer_descs(self, rows: Any, kind: str) -> Any:
        return kind, rows

    def initialize_xfer(self, what: str, mine: Any, theirs: Any, peer: str) -> Any:
        assert what == "READ"
        for (kind, rows), agent in ((mine, self), (theirs, Agent.known[peer])):
            for start, nbytes, device in rows:
                assert any(
                    at <= start and start + nbytes <= at + size
                    for *where, at, size in agent.spans
                    if where == [kind, device]
                )
        rows = list(zip(mine[1], theirs[1], strict=True))
        kinds = mine[0], theirs[0]
        return SimpleNamespace(rows=rows, kinds=kinds, release=lambda: None)

    def transfer(self, handle: Any) -> str:
        if Agent.state == "raise":
            raise KeyError("NIXL_ERR_BACKEND")
        return "PROC"

    def check_xfer_state(self, handle: Any) -> str:
        if Agent.state == "DONE":
            for (target, nbytes, _), (start, _, _) in handle.rows:
                ctypes.memmove(target, start, nbytes)
                Agent.moved[handle.kinds] += nbytes
        return Agent.state


@pytest.fixture
def agents(monkeypatch: pytest.MonkeyPatch) -> None:
    """A package nixl_cu13 of fakes."""
    api: Any = ModuleType("nixl_cu13._api")
    api.nixl_agent, api.nixl_agent_config = Agent, lambda **given: given
    api.nixl_thread_sync_t = SimpleNamespace(NIXL_THREAD_SYNC_STRICT=1)
    api.logger = SimpleNamespace(setLevel=lambda level: None)
    monkeypatch.setitem(sys.modules, "nixl_cu13", ModuleType("nixl_cu13"))
    monkeypatch.setitem(sys.modules, "nixl_cu13._api", api)
    monkeypatch.setattr(Agent, "known", {})
    monkeypatch.setattr(Agent, "moved", Counter())
    monkeypatch.setattr(nixl, "_kept", [])
