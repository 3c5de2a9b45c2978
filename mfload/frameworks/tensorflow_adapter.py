"""TensorFlow: aliased through DLPack, the 8-bit floats through one copy.

Eigen's kernels want tensors on 64-byte boundaries, whatever the import accepts.

TensorFlow sets nearly all of a GPU's memory aside for itself when it starts, and leaves next to
nothing for buffers of others. So there tensors land in memory of its own.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from mfload import errors
from mfload.cuda.device import Device
from mfload.dlpack import View, capsule, data_address
from mfload.frameworks import base, giving, ground
from mfload.frameworks.base import Whose
from mfload.planning.requests import Request

OLDEST = "2.19"

# `tf.bitcast` and the DLPack import know none of these; the import of NumPy arrays does.
_COPIED = {
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
}


class TensorflowAdapter(ground.Landing):
    """See `adapter.Adapter`.

    Args:
        device: TensorFlow's whole name of the device the tensors go to.
        local: The part of such a name that says which process, for this one.
        land: The device that they land on, None to copy them there from the host.
        notes: See `adapter.Adapter`.
    """

    name = "tensorflow"
    alignment = 64
    readonly_maps = False
    forms = base.forms(
        base.COMMON | {"BF16": "bfloat16"},
        {key: name for key, name in _COPIED.items() if hasattr(tf.dtypes.experimental, name)},
    )
    lendable = base.lendable(forms)

    def __init__(
        self,
        device: str,
        local: str,
        land: Device | None = None,
        notes: tuple[str, ...] = (),
    ) -> None:
        super().__init__(land, notes)
        self._device = device
        # What is imported appears on the first of TensorFlow's logical CPUs. Its whole name,
        # because "CPU:0" inside the scope of another process's device is that process's.
        self._host = f"{local}/device:CPU:0"
        self.on_host = device == self._host
        if land is not None:
            # For some dtypes TensorFlow has no kernel there, and quietly takes the host's.
            self.lendable = frozenset(
                name for name in self.lendable if self._empty(name, (1,)).backing_device == device
            )

    @property
    def allocator(self) -> Whose:
        """Whose memory is the better one on the device (see `adapter.Adapter`)."""
        return "framework"

    def lands(self, request: Request) -> int | None:
        """The number of the device that a need lands on (see `adapter.Adapter`)."""
        # The 8-bit floats are imported from NumPy arrays alone.
        return None if self.forms[request.dtype.name].how == "copy" else super().lands(request)

    def pool(self, number: int) -> base.Pool | None:
        """What TensorFlow's allocator has of the device: it does not say (see `Adapter`)."""
        return base.Pool(
            None,
            "allocator='framework' lands in what TensorFlow has set aside for itself; before it "
            "starts, tf.config.experimental.set_memory_growth has it set aside what it needs alone",
        )

    def wrap(self, views: Sequence[View]) -> list[Any]:
        """A `tf.Tensor` for each view, in order."""
        with tf.device(self._device):
            return [self._one(view) for view in views]

    def _one(self, view: View) -> Any:
        if view.dtype.name in _COPIED:
            host = np.ndarray(view.shape, view.dtype.numpy, view.memory, view.at)
            return tf.convert_to_tensor(host)
        tensor = tf.experimental.dlpack.from_dlpack(capsule(view))
        there = self.on_host or ground.on_device(view.memory)
        return tensor if there else tf.identity(tensor)

    def lend(self, requests: Sequence[Request]) -> list[base.Lent]:
        """Tensors of TensorFlow's own allocator, one for each need."""
        land = self.devices[0] if self.devices else None
        lent: list[base.Lent] = []
        for request in requests:
            _, shape = base.lent_as(self.forms[request.dtype.name], request)
            tensor = self._empty(request.dtype.name, shape)
            # Not tensor.numpy(), which is a copy.
            address = data_address(tf.experimental.dlpack.to_dlpack(tensor))
            memory = base.memory_at(tensor, address, request.nbytes, land)
            lent.append(base.Lent(tensor, memory))
        if not self.on_host:
            # Kernels that were started before may still use memory that was given away again.
            tf.test.experimental.sync_devices()
        return lent

    def _empty(self, name: str, shape: tuple[int, ...]) -> Any:
        kind = tf.as_dtype(self.forms[name].type)
        where = self._device if self.devices else self._host
        full = tf.errors.ResourceExhaustedError
        with ground.refusals("TensorFlow", full), tf.device(where):
            return tf.raw_ops.Empty(shape=shape, dtype=kind, init=False)


def make(device: object) -> TensorflowAdapter:
    """The adapter for a device.

    Raises:
        DeviceError: There is no such device.
    """
    base.check_version("tensorflow", tf.__version__, OLDEST)
    local = _local()
    if device is None:
        # The name of a tensor's device is the one way to learn the default, which is not
        # the first GPU inside a `tf.device` scope.
        return _at(str(tf.constant(0.0).device), local)
    wanted = _whole(str(getattr(device, "name", device)), local)
    there = [_whole(each.name, local) for each in tf.config.list_logical_devices()]
    if wanted not in there:
        raise base.no_device("TensorFlow", device, there)
    return _at(wanted, local)


def _at(device: str, local: str) -> TensorflowAdapter:
    if not device.startswith(f"{local}/device:GPU:") or not tf.test.is_built_with_cuda():
        return TensorflowAdapter(device, local)
    own = int(device.rpartition(":")[2])
    number = _ordinals()[own]
    made = TensorflowAdapter(device, local, *ground.device_to_land_on(number))
    if own != number:
        # What is imported appears on the GPU that TensorFlow, not CUDA, gives that number.
        made.landings = frozenset(("framework",))
    return made


def _ordinals() -> list[int]:
    """Which CUDA device each logical GPU is: several may share one, and some be left out."""
    found: list[int] = []
    for physical in tf.config.get_visible_devices("GPU"):
        parts = tf.config.get_logical_device_configuration(physical) or [None]
        found += [int(physical.name.rpartition(":")[2])] * len(parts)
    return found


def _local() -> str:
    """What whole names of this process's devices begin with; joining a cluster changes it."""
    with tf.device(None), tf.device("CPU:0"):
        return str(tf.constant(0.0).device).rpartition("/")[0]


def _whole(name: str, local: str) -> str:
    """The whole name of "/device:GPU:0", "/CPU:0", "cuda:0", "/job:worker/task:1/device:CPU:0".

    Raises:
        DeviceError: It is no device name.
    """
    where, _, short = name.rpartition("/")
    kind, number = base.split_device(re.sub("^device:", "", short, flags=re.IGNORECASE))
    if where:
        try:
            process = tf.DeviceSpec.from_string(where)
        except ValueError as error:
            raise errors.DeviceError(
                "not a device name", expected="/job:worker/task:1/device:CPU:0, …", found=name
            ) from error
        where = f"/job:{process.job}/replica:{process.replica or 0}/task:{process.task}"
    return f"{where or local}/device:{'GPU' if kind == 'cuda' else kind.upper()}:{number or 0}"


# Whose bytes lie in this process.
_LOCAL = re.compile(r"/job:localhost/.*device:CPU:\d+")


def give(name: str, array: Any) -> giving.Outgoing:
    """What is to be written of a tensor or of what a variable holds now.

    Raises:
        UnsupportedArrayError: It can't be saved.
    """
    _refuse(name, array)
    if isinstance(array, tf.Variable):
        # The variable's own memory; an assignment later on takes other memory.
        array = array.value()
    row = giving.BY_NAME.get(array.dtype.name)
    if row is None:
        raise giving.no_word("tensorflow", name, array.dtype.name)
    shape = tuple(array.shape)
    if shape and _LOCAL.fullmatch(array.backing_device):
        return giving.host("tensorflow", name, np.asarray(array))
    # Not NumPy's own call for all: it fails for single numbers of the types that NumPy lacks.
    return giving.late("tensorflow", name, row, shape, lambda: np.asarray(array.numpy()))


def _refuse(name: str, array: Any) -> None:
    found = type(array).__name__
    for kind, why in (
        (tf.RaggedTensor, "a ragged tensor has no one shape; save x.to_tensor() or its parts"),
        (tf.SparseTensor, "a sparse tensor; save tf.sparse.to_dense(x) or its parts"),
        (tf.IndexedSlices, "slices of a tensor; save tf.convert_to_tensor(x)"),
    ):
        if isinstance(array, kind):
            raise giving.refused("tensorflow", name, why, found)
    if not isinstance(array, tf.Tensor | tf.Variable):
        why = "not a tensor; of a model, save its variables"
        raise giving.refused("tensorflow", name, why, found)
    if not tf.executing_eagerly() or tf.is_symbolic_tensor(array):
        why = "a tensor of a graph has no numbers; save outside tf.function"
        raise giving.refused("tensorflow", name, why, found)
    if isinstance(array, tf.Variable):
        if not array.is_initialized():
            raise giving.refused("tensorflow", name, "the variable is not initialised", found)
    elif "device:CUSTOM" in array.device:
        why = "a DTensor; save its parts, tf.experimental.dtensor.unpack(x), or a replicated copy"
        raise giving.refused("tensorflow", name, why, array.device)
