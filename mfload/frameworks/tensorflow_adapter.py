"""TensorFlow: aliased through DLPack, the 8-bit floats through one copy.

Eigen's kernels want tensors on 64-byte boundaries, whatever the import accepts.

TensorFlow sets nearly all of a GPU's memory aside for itself when it starts, and leaves next to
nothing for buffers of others. So there tensors land in memory of its own.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Generator, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from mfload import dtypes, errors
from mfload.cuda.device import Device
from mfload.dlpack import View, capsule, data_address
from mfload.frameworks import base
from mfload.options import LoadOptions
from mfload.planning.requests import Allocation, Owner, Request

OLDEST = "2.19"

# `tf.bitcast` and the DLPack import know none of these; the import of NumPy arrays does.
_COPIED = {
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
}


class TensorflowAdapter(base.Adapter):
    """Tensors on one device (see `base.Adapter`).

    `place` is TensorFlow's whole name of the device, which begins with `local` in this process. If
    `lent_alone`, arrays on the device can lie in TensorFlow's own memory alone.
    """

    name = "tensorflow"
    alignment = 64
    forms = base.forms(
        base.COMMON | {"BF16": "bfloat16"},
        {key: name for key, name in _COPIED.items() if hasattr(tf.dtypes.experimental, name)},
    )

    def __init__(
        self,
        place: str,
        local: str,
        device: Device | None = None,
        notes: tuple[str, ...] = (),
        *,
        lent_alone: bool = False,
    ) -> None:
        super().__init__(device, notes)
        self._place = place
        # What is imported appears on the first of TensorFlow's logical CPUs. Its whole name,
        # because "CPU:0" inside the scope of another process's device is that process's.
        self._host = f"{local}/device:CPU:0"
        self.on_host = place == self._host
        self._lent_alone = lent_alone
        # For some dtypes TensorFlow has no kernel on the device, and quietly takes the host's.
        self._not_lent: frozenset[str] = frozenset()
        if device is not None:
            with self._on_device():
                self._not_lent = frozenset(
                    row.name
                    for row in dtypes.TABLE.values()
                    if (form := self.forms[row.name]).how != "copy"
                    and self._new(form.type, (1,)).backing_device != place
                )

    def allocation(self, request: Request, options: LoadOptions) -> Allocation:
        name = request.dtype.name
        if self.forms[name].how == "copy":
            return Allocation(None, "mfload", copied=True)  # They are imported from NumPy arrays.
        made = super().allocation(request, options)
        return made._replace(owner="mfload") if name in self._not_lent else made

    def owner(self, allocator: str) -> Owner:
        return "framework" if self._lent_alone or allocator != "mfload" else "mfload"

    def pool(self, number: int) -> base.Pool | None:
        return base.Pool(
            None,
            "allocator='framework' lands in what TensorFlow has set aside for itself; before it "
            "starts, tf.config.experimental.set_memory_growth has it set aside what it needs alone",
        )

    def wrap(self, views: Sequence[View]) -> list[Any]:
        with tf.device(self._place):
            return [self._one(view) for view in views]

    def _one(self, view: View) -> Any:
        if view.dtype.name in _COPIED:
            host = np.ndarray(view.shape, view.dtype.numpy, view.memory, view.at)
            return tf.convert_to_tensor(host)
        tensor = tf.experimental.dlpack.from_dlpack(capsule(view))
        there = self.on_host or base.on_device(view.memory)
        return tensor if there else tf.identity(tensor)

    @contextlib.contextmanager
    def _on_device(self) -> Generator[None]:
        full = base.full_device("TensorFlow", tf.errors.ResourceExhaustedError)
        with full, tf.device(self._place if self.devices else self._host):
            yield

    @contextlib.contextmanager
    def allocating(self) -> Generator[None]:
        with self._on_device():
            yield
        if not self.on_host:
            # Kernels that were started before may still use memory that was given away again.
            tf.test.experimental.sync_devices()

    def empty(self, dtype: dtypes.DType, kind: str, shape: tuple[int, ...]) -> tuple[Any, int]:
        tensor = self._new(kind, shape)
        # Not tensor.numpy(), which is a copy.
        return tensor, data_address(tf.experimental.dlpack.to_dlpack(tensor))

    @staticmethod
    def _new(kind: str, shape: tuple[int, ...]) -> Any:
        return tf.raw_ops.Empty(shape=shape, dtype=tf.as_dtype(kind), init=False)


def make(device: object) -> TensorflowAdapter:
    """The adapter for a device."""
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
    found = base.find_device(number)
    # What is imported appears on the GPU to which TensorFlow, not CUDA, gives that number.
    return TensorflowAdapter(device, local, *found, lent_alone=own != number)


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
    """The whole name of "/device:GPU:0", "/CPU:0", "cuda:0", "/job:worker/task:1/device:CPU:0"."""
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
    return f"{where or local}/device:{'GPU' if kind == 'cuda' else kind.upper()}:{number}"


# Whose bytes lie in this process.
_LOCAL = re.compile(r"/job:localhost/.*device:CPU:\d+")


def export(array: Any) -> base.Exported:
    """What is to be saved of a tensor, or of what a variable holds now."""
    base.refuse("tensorflow", _refusals(array))
    if isinstance(array, tf.Variable):
        # The variable's own memory; an assignment later on takes other memory.
        array = array.value()
    row = base.row_of("tensorflow", array.dtype.name)
    shape = tuple(array.shape)
    if shape and _LOCAL.fullmatch(array.backing_device):
        return base.export_numpy("tensorflow", np.asarray(array))
    # Not NumPy's own call for all: it fails for single numbers of the types that NumPy lacks.
    return base.Exported(row, shape, lambda: np.asarray(array.numpy()))


def _refusals(array: Any) -> Iterator[tuple[bool, str, object]]:
    found = type(array).__name__
    ragged = isinstance(array, tf.RaggedTensor)
    yield ragged, "a ragged tensor has no one shape; save x.to_tensor() or its parts", found
    sparse = isinstance(array, tf.SparseTensor)
    yield sparse, "a sparse tensor; save tf.sparse.to_dense(x) or its parts", found
    slices = isinstance(array, tf.IndexedSlices)
    yield slices, "slices of a tensor; save tf.convert_to_tensor(x)", found
    known = isinstance(array, tf.Tensor | tf.Variable)
    yield not known, "not a tensor; of a model, save its variables", found
    symbolic = not tf.executing_eagerly() or tf.is_symbolic_tensor(array)
    yield symbolic, "a tensor of a graph has no numbers; save outside tf.function", found
    if isinstance(array, tf.Variable):
        yield not array.is_initialized(), "the variable is not initialised", found
    else:
        why = "a DTensor; save its parts, tf.experimental.dtensor.unpack(x), or a replicated copy"
        yield "device:CUSTOM" in array.device, why, array.device
