"""TensorFlow: aliased through DLPack, the 8-bit floats through one copy.

Eigen's kernels want tensors on 64-byte boundaries, whatever the import accepts.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from mfload.dlpack import View, capsule, data_address
from mfload.frameworks import adapter
from mfload.placement import Need

OLDEST = "2.19"

# `tf.bitcast` and the DLPack import know none of these; the import of NumPy arrays does.
_COPIED = {
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
}


class TensorflowAdapter:
    """See `adapter.Adapter`.

    Args:
        device: TensorFlow's name of the device the tensors go to.
    """

    name = "tensorflow"
    alignment = 64
    readonly_maps = False
    forms = adapter.forms(
        adapter.COMMON | {"BF16": "bfloat16"},
        {key: name for key, name in _COPIED.items() if hasattr(tf.dtypes.experimental, name)},
    )
    lendable = adapter.lendable(forms)

    def __init__(self, device: str) -> None:
        self._device = device
        # What is imported appears on the first of TensorFlow's logical CPUs.
        self.on_host = device.endswith(":CPU:0")

    def wrap(self, views: Sequence[View]) -> list[Any]:
        """A `tf.Tensor` for each view, in order."""
        with tf.device("CPU:0" if self.on_host else self._device):
            return [self._one(view) for view in views]

    def _one(self, view: View) -> Any:
        if view.dtype.name in _COPIED:
            host = np.ndarray(view.shape, view.dtype.numpy, view.memory, view.at)
            return tf.convert_to_tensor(host)
        tensor = tf.experimental.dlpack.from_dlpack(capsule(view))
        return tensor if self.on_host else tf.identity(tensor)

    def lend(self, needs: Sequence[Need]) -> list[adapter.Lent]:
        """Tensors of TensorFlow's own allocator, one for each need."""
        lent: list[adapter.Lent] = []
        with tf.device("CPU:0"):
            for need in needs:
                name, shape = adapter.lent_as(self.forms[need.dtype.name], need)
                tensor = tf.raw_ops.Empty(shape=shape, dtype=tf.as_dtype(name), init=False)
                # Not tensor.numpy(), which is a copy.
                address = data_address(tf.experimental.dlpack.to_dlpack(tensor))
                lent.append(adapter.Lent(tensor, adapter.memory_at(tensor, address, need.nbytes)))
        return lent


def make(device: object) -> TensorflowAdapter:
    """The adapter for a device.

    Raises:
        DeviceError: There is no such device.
    """
    adapter.check_version("tensorflow", tf.__version__, OLDEST)
    if device is None:
        # The name of a tensor's device is the one way to learn the default, which is not
        # the first GPU inside a `tf.device` scope.
        return TensorflowAdapter(str(tf.constant(0.0).device))
    # "/device:GPU:0", "/CPU:0", "/job:localhost/…/device:CPU:0", "cuda:0", a LogicalDevice.
    short = str(getattr(device, "name", device)).rsplit("/", 1)[-1]
    kind, number = adapter.split_device(re.sub("^device:", "", short, flags=re.IGNORECASE))
    wanted = f"device:{'GPU' if kind == 'cuda' else kind.upper()}:{number or 0}"
    there = [each.name for each in tf.config.list_logical_devices()]
    if not any(each.endswith(wanted) for each in there):
        raise adapter.no_device("TensorFlow", device, there)
    return TensorflowAdapter(f"/{wanted}")
