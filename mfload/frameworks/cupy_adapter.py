"""CuPy: arrays over mfload's buffers on a CUDA device, at any alignment.

Not through DLPack, where CuPy lacks bfloat16 in places and names the 8-bit floats wrongly.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Generator, Sequence
from typing import Any, cast

import numpy as np

from mfload.cuda import discovery
from mfload.cuda.device import Device
from mfload.dlpack import View
from mfload.dtypes import DType
from mfload.frameworks import base

OLDEST = "14.2"  # The first whose streams leave those of others alone; bfloat16 came with 14.0.


class CupyAdapter(base.Adapter):
    """Arrays on one CUDA device (see `base.Adapter`)."""

    name = "cupy"
    on_host = False
    # CuPy takes bfloat16 through ml_dtypes and exports wrong codes for the 8-bit floats.
    forms = base.forms(base.COMMON | {"BF16": "bfloat16"})

    def __init__(self, cupy: Any, number: int, device: Device) -> None:
        super().__init__(device)
        self._cupy = cupy
        self._number = number

    def wrap(self, views: Sequence[View]) -> list[Any]:
        return [
            self._over(view) if base.on_device(view.memory) else self._copy(view) for view in views
        ]

    @contextlib.contextmanager
    def _current(self) -> Generator[None]:
        # Not by `cupy.cuda.Device`: at its end it sets the device that was, so that a thread that
        # had none would get one, and memory taken on device 0.
        with self.devices[0].current(), base.full_device("CuPy", MemoryError):
            yield

    def _over(self, view: View) -> Any:
        memory, cuda = view.memory, self._cupy.cuda
        held = cuda.UnownedMemory(memory.address, memory.nbytes, memory, self._number)
        return self._cupy.ndarray(view.shape, view.dtype.numpy, cuda.MemoryPointer(held, view.at))

    def _copy(self, view: View) -> Any:
        with self._current():
            host = np.ndarray(view.shape, view.dtype.numpy, view.memory, view.at)
            return self._cupy.asarray(host)

    @contextlib.contextmanager
    def allocating(self) -> Generator[None]:
        with self._current():
            yield
            # CuPy gives memory that was freed to the next array on the same stream, where kernels
            # that were started before may still use it.
            self._cupy.cuda.get_current_stream().synchronize()

    def empty(self, dtype: DType, kind: str, shape: tuple[int, ...]) -> tuple[Any, int]:
        as_bytes = self.forms[dtype.name].how == "bytes"
        array = self._cupy.empty(shape, kind if as_bytes else dtype.numpy)
        return array, array.data.ptr

    def pool(self, number: int) -> base.Pool | None:
        with self._current():
            kept = self._cupy.get_default_memory_pool().free_bytes()
        return base.Pool(
            self.devices[number].memory_info().free + kept,
            "cupy.get_default_memory_pool().free_all_blocks() gives back the "
            f"{kept} bytes that CuPy keeps for itself, and allocator='framework' uses them",
        )


def make(device: object) -> CupyAdapter:
    """The adapter for a device."""
    discovery.count()  # Asked first because the import takes seconds and tells less.
    cupy: Any = importlib.import_module("cupy")
    base.check_version("cupy", cupy.__version__, OLDEST)
    if isinstance(device, cupy.cuda.Device):
        device = f"cuda:{cast(Any, device).id}"
    kind, number = base.split_device("cuda:0" if device is None else str(device))
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except Exception as error:
        raise base.no_device("CuPy", device, error) from error
    if kind not in ("cuda", "gpu") or number >= count:
        raise base.no_device("CuPy", device, f"{count} CUDA devices")
    return CupyAdapter(cupy, number, discovery.find(number))


def export(array: Any) -> base.Exported:
    """What is to be saved of a CuPy array; it is copied to the host when its turn comes."""
    cupy: Any = importlib.import_module("cupy")
    why = "not a dense array; save x.toarray()"
    base.refuse("cupy", [(not isinstance(array, cupy.ndarray), why, type(array).__name__)])
    dense: Any = array
    return base.Exported(base.row_of("cupy", dense.dtype.name), dense.shape, dense.get)
