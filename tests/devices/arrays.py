"""A framework whose arrays lie on fake devices: NumPy arrays over their memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from mfload import frameworks
from mfload.devices.memory import DeviceBuffer
from mfload.dlpack import View
from mfload.frameworks import adapter
from mfload.frameworks.numpy_adapter import NumpyAdapter
from mfload.placement import Need


class Arrays(NumpyAdapter):
    """See `adapter.Adapter`.

    Args:
        devices: Where arrays land; needs without devices on the first.
        on_host: Names of dtypes that land on the host.
        copies: Names of dtypes that are copied after they landed.
        pool: What is said of the framework's own memory.
    """

    readonly_maps = False
    landings = frozenset(("mfload", "framework"))

    def __init__(
        self,
        *devices: Any,
        on_host: Sequence[str] = (),
        copies: Sequence[str] = (),
        pool: adapter.Pool | None = None,
    ) -> None:
        super().__init__(None)
        self.devices = devices
        self._held = on_host
        self._pool = pool
        if copies:
            self.forms = {**self.forms, **{n: adapter.Form("copy", "") for n in copies}}
            self.lendable = adapter.lendable(self.forms)

    def lands(self, need: Need) -> int | None:
        if need.dtype.name in self._held:
            return None
        return need.devices[0] if need.devices else 0

    def pool(self, number: int) -> adapter.Pool | None:
        return self._pool

    def wrap(self, views: Sequence[View]) -> list[Any]:
        made: list[Any] = []
        for view in views:
            array = _over(view)
            if self.forms[view.dtype.name].how == "copy":
                array = array.copy()
            made.append((array,) * len(view.devices) if view.devices else array)
        return made

    def lend(self, needs: Sequence[Need]) -> list[adapter.Lent]:
        lent: list[adapter.Lent] = []
        for need, one in zip(needs, super().lend(needs), strict=True):
            number = self.lands(need)
            if number is None:
                lent.append(one._replace(array=(one.array,)) if need.devices else one)
                continue
            device = self.devices[number]
            address = one.memory.ctypes.data
            memory = DeviceBuffer(device, address, need.nbytes, one.memory, own=False)
            array = (one.array,) if need.devices else one.array
            lent.append(adapter.Lent(array, memory))
        return lent


def _over(view: View) -> Any:
    memory: Any = view.memory
    if isinstance(memory, DeviceBuffer):
        memory = adapter.memory_at(memory, memory.address, memory.nbytes)
    shape = view.dtype.storage_shape(view.shape) if view.dtype.numpy is None else view.shape
    return np.ndarray(shape, view.dtype.numpy or np.uint8, memory, view.at)


def take(monkeypatch: pytest.MonkeyPatch, made: adapter.Adapter) -> None:
    """Has mfload find this adapter, whatever framework is asked for."""
    monkeypatch.setattr(frameworks, "get", lambda *_: made)
