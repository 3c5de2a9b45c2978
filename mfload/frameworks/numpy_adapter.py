"""NumPy: arrays straight over mfload's buffers, at any alignment; ml_dtypes names the rest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mfload import dtypes
from mfload.dlpack import View
from mfload.frameworks import base, giving, ground
from mfload.planning.requests import Request

OLDEST = "2.0"


class NumpyAdapter(ground.Landing):
    """See `adapter.Adapter`."""

    name = "numpy"
    alignment = None
    readonly_maps = True
    on_host = True
    forms = base.forms(
        {name: row.numpy.name for name, row in dtypes.TABLE.items() if row.numpy is not None}
    )
    lendable = base.lendable(forms)

    def wrap(self, views: Sequence[View]) -> list[Any]:
        """An array for each view, in order."""
        make = np.ndarray
        return [make(shape, dtype.numpy, memory, at) for _, dtype, shape, memory, at, _ in views]

    def lend(self, requests: Sequence[Request]) -> list[base.Lent]:
        """NumPy's own allocations, one for each need."""
        lent: list[base.Lent] = []
        for request in requests:
            _, shape = base.lent_as(self.forms[request.dtype.name], request)
            array = np.empty(shape, request.dtype.numpy or np.uint8)
            lent.append(base.Lent(array, array.reshape(-1).view(np.uint8)))
        return lent


def make(device: object) -> NumpyAdapter:
    """The adapter; NumPy knows the host alone."""
    base.check_version("numpy", np.__version__, OLDEST)
    if device is not None and str(device) not in ("cpu", "host"):
        raise base.no_device("NumPy", device, "cpu")
    return NumpyAdapter()


def give(name: str, array: Any) -> giving.Outgoing:
    """What is to be written of a NumPy array or scalar.

    Raises:
        UnsupportedArrayError: It can't be saved.
    """
    if isinstance(array, np.ma.MaskedArray):
        raise giving.refused(
            "numpy", name, "a mask has no place in the file; save x.filled(value)", "MaskedArray"
        )
    if not isinstance(array, np.ndarray | np.generic):
        raise giving.refused("numpy", name, "not an array", type(array).__name__)
    return giving.host("numpy", name, np.asarray(array))
