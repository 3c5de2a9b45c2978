"""CuPy: arrays on a CUDA device, each copied once from the host."""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Sequence
from typing import Any, cast

import numpy as np

from mfload import errors
from mfload.dlpack import View
from mfload.frameworks import adapter, giving
from mfload.placement import Need

OLDEST = "14.0"  # The first that knows bfloat16.


class CupyAdapter:
    """See `adapter.Adapter`.

    Args:
        cupy: The module.
        number: The CUDA device.
    """

    name = "cupy"
    alignment = None
    readonly_maps = False
    on_host = False
    # CuPy takes bfloat16 through ml_dtypes and exports wrong codes for the 8-bit floats.
    forms = adapter.forms({}, adapter.COMMON | {"BF16": "bfloat16"})
    lendable: frozenset[str] = frozenset()

    def __init__(self, cupy: Any, number: int) -> None:
        self._cupy = cupy
        self._number = number

    def wrap(self, views: Sequence[View]) -> list[Any]:
        """A `cupy.ndarray` for each view, in order."""
        with self._cupy.cuda.Device(self._number):
            return [
                self._cupy.asarray(np.ndarray(v.shape, v.dtype.numpy, v.memory, v.at))
                for v in views
            ]

    def lend(self, needs: Sequence[Need]) -> list[adapter.Lent]:
        """Not to be had: host engines can't write device memory."""
        raise errors.UsageError("landing='framework' needs host memory", found="cupy")


def make(device: object) -> CupyAdapter:
    """The adapter for a device.

    Raises:
        DeviceError: There is no driver, or no such device.
    """
    # Asked first because the import takes seconds and tells less.
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise errors.DeviceError(
            "no CUDA driver on this machine", expected="libcuda.so.1", found=str(error)
        ) from error
    cupy: Any = importlib.import_module("cupy")
    adapter.check_version("cupy", cupy.__version__, OLDEST)
    if isinstance(device, cupy.cuda.Device):
        device = f"cuda:{cast(Any, device).id}"
    kind, number = adapter.split_device("cuda:0" if device is None else str(device))
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except Exception as error:
        raise adapter.no_device("CuPy", device, error) from error
    if kind not in ("cuda", "gpu") or (number or 0) >= count:
        raise adapter.no_device("CuPy", device, f"{count} CUDA devices")
    return CupyAdapter(cupy, number or 0)


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
