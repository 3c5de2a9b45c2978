"""NumPy: arrays straight over mfload's buffers, at any alignment; ml_dtypes names the rest."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from mfload import dtypes
from mfload.dlpack import View, Views
from mfload.frameworks import base
from mfload.planning.layout import evenly

OLDEST = "2.0"
_MOST_DIMS = 64
_KINDS = {name: row.numpy for name, row in dtypes.TABLE.items()}


class NumpyAdapter(base.Adapter):
    """Arrays on the host (see `base.Adapter`)."""

    name = "numpy"
    readonly_maps = slices_are_views = True
    forms = base.forms(
        {name: row.numpy_name for name, row in dtypes.KNOWN.items() if row.numpy_name is not None},
        dtypes.NARROW,
    )

    def wrap(self, views: Sequence[View]) -> list[Any]:
        if type(views) is Views:  # To ask an abstract class takes as long as the rest.
            return _in_columns(views)
        arrays: list[Any] = []
        try:
            for _, dtype, shape, memory, at, _ in views:
                arrays.append(np.ndarray(shape, _KINDS[dtype.name], memory, at))
        except KeyError:  # One of `dtypes.NARROW`: to look for them first would slow all loads.
            return list(map(base.host_array, views))
        return arrays

    def with_first(self, array: Any, dim: int) -> Any:
        return np.moveaxis(array, dim, 0)

    def empty(self, wanted: Sequence[tuple[str, tuple[int, ...]]]) -> list[tuple[Any, int]]:
        arrays = [np.empty(shape, kind) for kind, shape in wanted]
        return [(array, array.ctypes.data) for array in arrays]


def _in_columns(views: Views) -> list[Any]:
    """The arrays of many tensors.

    To take alike ones that lie at equal distances out of an array of all of them is several times
    as fast as to make one after the other.
    """
    kinds = [(_KINDS.get(dtype.name), shape) for dtype, shape in views.kinds]
    like = np.asarray(views.kind) * len(views.memory) + views.buffers
    order = np.argsort(like, kind="stable")
    like, at = like[order], views.at[order]
    step = np.diff(at)
    arrays: list[Any] = []
    for first, end in itertools.pairwise(evenly(np.diff(like) == 0, step)):
        kind, buffer = divmod(int(like[first]), len(views.memory))
        dtype, shape = kinds[kind]
        memory, places = views.memory[buffer], at[first:end].tolist()
        alike = len(places) > 1 and step[first] > 0
        if alike and shape and 0 not in shape and len(shape) < _MOST_DIMS:
            one = np.ndarray(shape, dtype, memory, places[0])
            strides = (int(step[first]), *one.strides)
            arrays.extend(np.ndarray((len(places), *shape), dtype, memory, places[0], strides))
        else:
            arrays += [np.ndarray(shape, dtype, memory, place) for place in places]
    made: list[Any] = [None] * len(arrays)
    for number, array in zip(order.tolist(), arrays, strict=True):
        made[number] = array
    return made


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
