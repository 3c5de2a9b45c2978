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

    def empty(self, wanted: Sequence[tuple[str, tuple[int, ...]]]) -> list[tuple[Any, int]]:
        arrays = [np.empty(shape, kind) for kind, shape in wanted]
        return [(array, array.ctypes.data) for array in arrays]


def make(device: object) -> NumpyAdapter:
    """The adapter; NumPy knows the host alone."""
    base.check_version("numpy", np.__version__, OLDEST)
    if device is not None and str(device) not in ("cpu", "host"):
        raise base.no_device("NumPy", device, "cpu")
    return NumpyAdapter()


def export(array: Any) -> base.Exported:
    """What is to be saved of a NumPy array or scalar."""
    why = None
    if isinstance(array, np.ma.MaskedArray):
        why = "a mask has no place in the file; save x.filled(value)"
    elif not isinstance(array, np.ndarray | np.generic):
        why = "not an array"
    base.refuse("numpy", why, array)
    return base.export_numpy("numpy", np.asarray(array))
