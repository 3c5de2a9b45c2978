"""CuPy: arrays over mfload's buffers on a CUDA device, at any alignment.

Not through DLPack, where CuPy lacks bfloat16 in places and names the 8-bit floats wrongly.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Generator, Sequence
from typing import Any, cast

import numpy as np

from mfload.cuda import finding
from mfload.cuda.device import Device
from mfload.dlpack import View
from mfload.frameworks import base, giving, ground
from mfload.planning.requests import Request

OLDEST = "14.2"  # The first whose streams leave those of others alone; bfloat16 came with 14.0.


class CupyAdapter(ground.Landing):
    """See `adapter.Adapter`.

    Args:
        cupy: The module.
        number: The CUDA device.
        land: The same device, to land on.
    """

    name = "cupy"
    alignment = None
    readonly_maps = False
    on_host = False
    # CuPy takes bfloat16 through ml_dtypes and exports wrong codes for the 8-bit floats.
    forms = base.forms(base.COMMON | {"BF16": "bfloat16"})
    lendable = base.lendable(forms)

    def __init__(self, cupy: Any, number: int, land: Device) -> None:
        super().__init__(land)
        self._cupy = cupy
        self._number = number

    def wrap(self, views: Sequence[View]) -> list[Any]:
        """A `cupy.ndarray` for each view, in order."""
        return [
            self._over(view) if ground.on_device(view.memory) else self._copy(view)
            for view in views
        ]

    @contextlib.contextmanager
    def _current(self) -> Generator[None]:
        # Not by `cupy.cuda.Device`: at its end it sets the device that was, so that a thread that
        # had none would get one, and memory taken on device 0.
        with self.devices[0].current(), ground.refusals("CuPy", MemoryError):
            yield

    def _over(self, view: View) -> Any:
        memory, cuda = view.memory, self._cupy.cuda
        held = cuda.UnownedMemory(memory.address, memory.nbytes, memory, self._number)
        return self._cupy.ndarray(view.shape, view.dtype.numpy, cuda.MemoryPointer(held, view.at))

    def _copy(self, view: View) -> Any:
        with self._current():
            host = np.ndarray(view.shape, view.dtype.numpy, view.memory, view.at)
            return self._cupy.asarray(host)

    def lend(self, requests: Sequence[Request]) -> list[base.Lent]:
        """Arrays of CuPy's own pool, one for each need."""
        lent: list[base.Lent] = []
        with self._current():
            for request in requests:
                name, shape = base.lent_as(self.forms[request.dtype.name], request)
                as_bytes = self.forms[request.dtype.name].how == "bytes"
                array = self._cupy.empty(shape, name if as_bytes else request.dtype.numpy)
                memory = base.memory_at(array, array.data.ptr, request.nbytes, self.devices[0])
                lent.append(base.Lent(array, memory))
            # CuPy gives memory that was let go of to whoever asks next on the same stream, where
            # kernels that were started before may still use it.
            self._cupy.cuda.get_current_stream().synchronize()
        return lent

    def pool(self, number: int) -> base.Pool | None:
        """What CuPy's pool has of the device (see `adapter.Adapter`)."""
        with self._current():
            kept = self._cupy.get_default_memory_pool().free_bytes()
        return base.Pool(
            self.devices[number].room().free + kept,
            "cupy.get_default_memory_pool().free_all_blocks() gives back the "
            f"{kept} bytes that CuPy keeps for itself, and allocator='framework' uses them",
        )


def make(device: object) -> CupyAdapter:
    """The adapter for a device.

    Raises:
        DeviceError: There is no driver, or no such device.
    """
    finding.count()  # Asked first because the import takes seconds and tells less.
    cupy: Any = importlib.import_module("cupy")
    base.check_version("cupy", cupy.__version__, OLDEST)
    if isinstance(device, cupy.cuda.Device):
        device = f"cuda:{cast(Any, device).id}"
    kind, number = base.split_device("cuda:0" if device is None else str(device))
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except Exception as error:
        raise base.no_device("CuPy", device, error) from error
    if kind not in ("cuda", "gpu") or (number or 0) >= count:
        raise base.no_device("CuPy", device, f"{count} CUDA devices")
    return CupyAdapter(cupy, number or 0, finding.find(number or 0))


def give(name: str, array: Any) -> giving.Outgoing:
    """What is to be written of a CuPy array; it is copied to the host when its turn comes.

    Raises:
        UnsupportedArrayError: It can't be saved.
    """
    cupy: Any = importlib.import_module("cupy")
    if not isinstance(array, cupy.ndarray):
        raise giving.refused(
            "cupy", name, "not a dense array; save x.toarray()", type(array).__name__
        )
    given: Any = array
    row = giving.row_of("cupy", name, given.dtype)
    return giving.late("cupy", name, row, given.shape, given.get)
