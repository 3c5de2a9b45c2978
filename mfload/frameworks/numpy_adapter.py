"""NumPy: arrays straight over mfload's buffers, at any alignment; ml_dtypes names the rest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mfload import dtypes
from mfload.dlpack import View
from mfload.frameworks import base

OLDEST = "2.0"
_KINDS = {name: row.numpy for name, row in dtypes.TABLE.items()}


class NumpyAdapter(base.Adapter):
    """Arrays on the host (see `base.Adapter`)."""

    name = "numpy"
    readonly_maps = True
    forms = base.forms({name: kind.name for name, kind in _KINDS.items() if kind is not None})

    def wrap(self, views: Sequence[View]) -> list[Any]:
        make, kinds = np.ndarray, _KINDS
        return [
            make(shape, kinds[dtype.name], memory, at) for _, dtype, shape, memory, at, _ in views
        ]

    def empty(self, dtype: dtypes.DType, kind: str, shape: tuple[int, ...]) -> tuple[Any, int]:
        array = np.empty(shape, dtype.numpy or kind)
        return array, array.ctypes.data


def make(device: object) -> NumpyAdapter:
    """The adapter; NumPy knows the host alone."""
    base.check_version("numpy", np.__version__, OLDEST)
    if device is not None and str(device) not in ("cpu", "host"):
        raise base.no_device("NumPy", device, "cpu")
    return NumpyAdapter()


def export(array: Any) -> base.Exported:
    """What is to be saved of a NumPy array or scalar."""
    masked = isinstance(array, np.ma.MaskedArray)
    dense = isinstance(array, np.ndarray | np.generic)
    found = type(array).__name__
    why = "a mask has no place in the file; save x.filled(value)"
    base.refuse("numpy", [(masked, why, found), (not dense, "not an array", found)])
    return base.export_numpy("numpy", np.asarray(array))
