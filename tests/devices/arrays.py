"""A framework whose arrays lie on fake devices: NumPy arrays over their memory."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import settings

from mfload import frameworks
from mfload.cuda.memory import DeviceBuffer
from mfload.dlpack import View
from mfload.frameworks import base
from mfload.frameworks.numpy_adapter import NumpyAdapter
from mfload.options import LoadOptions
from mfload.planning.request import Allocation, Request

SLOW = bool(os.environ.get("MFLOAD_SLOW"))
FEW = settings(max_examples=1000 if SLOW else 20)
"""For whole loads of random requests, each of which takes long."""


class Arrays(NumpyAdapter):
    """See `adapter.Adapter`.

    Args:
        devices: Where arrays land; needs without devices on the first.
        on_host: Names of dtypes that land on the host.
        copies: Names of dtypes that are copied after they landed.
        pool: What is said of the framework's own memory.
    """

    readonly_maps = False

    def __init__(
        self,
        *devices: Any,
        on_host: Sequence[str] = (),
        copies: Sequence[str] = (),
        pool: base.Pool | None = None,
    ) -> None:
        super().__init__(None)
        self.devices = devices
        self._held = on_host
        self._pool = pool
        if copies:
            self.forms = {**self.forms, **{n: base.Form("copy", "") for n in copies}}

    def allocation(self, request: Request, options: LoadOptions) -> Allocation:
        made = super().allocation(request, options)
        number = self.lands(request)
        if number is None or made.device is None:
            return made._replace(device=None, owner="mfload")
        return made._replace(device=number)

    def lands(self, request: Request) -> int | None:
        if request.dtype.name in self._held:
            return None
        return request.devices[0] if request.devices else 0

    def pool(self, number: int) -> base.Pool | None:
        return self._pool

    def wrap(self, views: Sequence[View]) -> list[Any]:
        made: list[Any] = []
        for view in views:
            array = _over(view)
            if self.forms[view.dtype.name].how == "copy":
                array = array.copy()
            made.append((array,) * len(view.devices) if view.devices else array)
        return made

    def lend(self, requests: Sequence[Request]) -> list[base.Lent]:
        lent: list[base.Lent] = []
        for request, one in zip(requests, super().lend(requests), strict=True):
            number = self.lands(request)
            if number is None:
                lent.append(one._replace(array=(one.array,)) if request.devices else one)
                continue
            device = self.devices[number]
            there = isinstance(one.memory, DeviceBuffer)
            address = one.memory.address if there else one.memory.ctypes.data
            memory = DeviceBuffer(device, address, request.nbytes, one.memory, own=False)
            array = (one.array,) if request.devices else one.array
            lent.append(base.Lent(array, memory))
        return lent


def _over(view: View) -> Any:
    memory: Any = view.memory
    if isinstance(memory, DeviceBuffer):
        memory = base.memory_at(memory, memory.address, memory.nbytes)
    shape = view.dtype.storage_shape(view.shape) if view.dtype.numpy is None else view.shape
    return np.ndarray(shape, view.dtype.numpy or np.uint8, memory, view.at)


def take(monkeypatch: pytest.MonkeyPatch, made: base.Adapter) -> None:
    """Has mfload find this base, whatever framework is asked for."""
    monkeypatch.setattr(frameworks, "get", lambda *_: made)
