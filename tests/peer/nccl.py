"""NCCL without it: as much of PyTorch as the transport "collective" uses, in one process."""

from __future__ import annotations

import queue
import sys
import threading
from contextlib import nullcontext
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mfload.frameworks import private_api
from mfload.frameworks.base import memory_at
from mfload.peer import collective


class Tensor:
    """As much of PyTorch's as is used."""

    def __init__(self, array: Any, place: Any = "cpu") -> None:
        self.array, self.place = array, place

    def to(self, place: Any) -> Tensor:
        return Tensor(self.array.copy(), place)

    def __len__(self) -> int:
        return len(self.array)

    def __getitem__(self, part: slice) -> Tensor:
        return Tensor(self.array[part], self.place)

    cpu = numpy = lambda self: self.array if self.place == "cpu" else Tensor(self.array)


@dataclass(frozen=True)
class Place:
    """A `torch.device`."""

    type: str
    index: int


def _over(torch: Any, buffer: Any) -> Tensor:
    assert buffer.device.place[1] == 3
    return Tensor(memory_at(buffer, buffer.address, buffer.nbytes), Place("cuda", 3))


class Nccl:
    """A group of NCCL's for two sides of one process; this one joins it for one of them."""

    there: dict[str, list[queue.Queue[Any]]] = {}  # noqa: RUF012
    places: list[Any] = []  # noqa: RUF012
    aborted: list[Any] = []  # noqa: RUF012

    def __init__(self, place: Any, ranks: Any, name: str, timeout: Any) -> None:
        self.mine = int(threading.current_thread() is threading.main_thread())
        self.queues = self.there.setdefault(name, [queue.Queue(), queue.Queue()])
        self.places.append((place, ranks))

    def abort(self) -> None:
        self.aborted.append(self)

    def send(self, tensors: list[Tensor], rank: int, tag: int) -> Any:
        assert (rank, tag, tensors[0].place) == (1 - self.mine, 0, Place("cuda", 3))
        self.queues[rank].put(tensors[0].array)
        return SimpleNamespace(wait=lambda timeout: None)

    def recv(self, tensors: list[Tensor], rank: int, tag: int) -> Any:
        assert (rank, tag, tensors[0].place) == (1 - self.mine, 0, Place("cuda", 3))

        def wait(timeout: Any) -> None:
            try:
                tensors[0].array[:] = self.queues[self.mine].get(timeout=timeout.total_seconds())
            except queue.Empty:
                raise RuntimeError("timed out") from None

        return SimpleNamespace(wait=wait)


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """PyTorch with a process group of NCCL's; the list has the rank that this process has."""
    rank = [0]
    torch: Any = ModuleType("torch")
    torch.distributed = SimpleNamespace(
        is_available=lambda: True,
        is_initialized=lambda: True,
        get_rank=lambda: rank[0],
        get_world_size=lambda: 2,
        get_backend=lambda: "nccl",
    )
    torch.cuda = SimpleNamespace(
        current_device=lambda: 3, Stream=lambda _: None, stream=lambda _: nullcontext()
    )
    torch.device = Place
    torch.uint8 = np.uint8
    torch.from_numpy = Tensor
    torch.cat = lambda some: Tensor(np.concatenate([each.array for each in some]), some[0].place)
    torch.empty = lambda size, dtype, device: Tensor(np.empty(size, dtype), device)
    keys: set[str] = set()
    store = SimpleNamespace(
        set=lambda key, _: keys.add(key),
        check=lambda given: keys.issuperset(given),
        delete_key=keys.discard,
    )
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setattr(private_api, "torch_store", lambda: store)
    monkeypatch.setattr(private_api, "torch_device_group", Nccl)
    monkeypatch.setattr(Nccl, "there", {})
    monkeypatch.setattr(Nccl, "places", [])
    monkeypatch.setattr(Nccl, "aborted", [])
    monkeypatch.setattr(collective, "_over", _over)
    monkeypatch.setattr(collective, "_kept", [])
    return rank
