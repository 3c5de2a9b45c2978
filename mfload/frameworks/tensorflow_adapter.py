"""TensorFlow: aliased through DLPack, the 8-bit floats through one copy.

Eigen's kernels want tensors on 64-byte boundaries, whatever the import accepts.

TensorFlow sets nearly all of a GPU's memory aside for itself when it starts, and leaves next to
nothing for buffers of others. So there tensors land in memory of its own.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from mfload import errors
from mfload.dlpack import View, capsule, data_address
from mfload.frameworks import base
from mfload.frameworks.traits import TRAITS
from mfload.options import LoadOptions
from mfload.planning.request import Allocation, Owner, Request

if TYPE_CHECKING:
    from mfload.cuda.device import Device

OLDEST = "2.19"


def _has(kind: str) -> bool:
    return hasattr(tf, kind) or hasattr(tf.dtypes.experimental, kind)


class TensorflowAdapter(base.Adapter):
    """Tensors on one device (see `base.Adapter`).

    `place` is TensorFlow's whole name of the device, which begins with `local` in this process. If
    `lent_alone`, arrays on the device can lie in TensorFlow's own memory alone.
    """

    name = "tensorflow"
    alignment = TRAITS["tensorflow"].alignment
    forms = TRAITS["tensorflow"].forms(_has)

    def __init__(
        self,
        place: str,
        local: str,
        device: Device | None = None,
        notes: tuple[str, ...] = (),
        *,
        lent_alone: bool = False,
    ) -> None:
        super().__init__(place, device, notes)
        # What is imported appears on the first of TensorFlow's logical CPUs. Its whole name,
        # because "CPU:0" inside the scope of another process's device is that process's.
        self._host = f"{local}/device:CPU:0"
        self.on_host = place == self._host
        self._lent_alone = lent_alone
        self._not_lent: set[str] = set()
        if device is not None:
            # For some dtypes TensorFlow has no kernel on the device, and quietly takes the host's.
            known = [(name, kind) for name, (how, kind) in self.forms.items() if how != "copy"]
            made = self._new([(kind, (1,)) for _, kind in known])
            pairs = zip(known, made, strict=True)
            self._not_lent = {name for (name, _), x in pairs if x.backing_device != place}

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
            "allocator='framework' lands in what TensorFlow has set aside for itself; with "
            "TF_FORCE_GPU_ALLOW_GROWTH=true in the environment it sets aside what it needs alone",
        )

    def wrap(self, views: Sequence[View]) -> list[Any]:
        with _eager(), tf.device(self.place):
            return [self._tensor(view) for view in views]

    def _tensor(self, view: View) -> Any:
        if self.forms[view.dtype.name].how == "copy":
            return tf.convert_to_tensor(base.host_array(view))
        tensor = tf.experimental.dlpack.from_dlpack(capsule(view))
        return tensor if self.on_host or base.on_device(view) else tf.identity(tensor)

    def with_first(self, array: Any, dim: int) -> Any:
        # Of TensorFlow's own only `tf.experimental.numpy` takes lists; it goes by NumPy's rules.
        rest = [n for n in range(len(array.shape)) if n != dim]
        return tf.transpose(array, [dim, *rest])

    def empty(self, wanted: Sequence[tuple[str, tuple[int, ...]]]) -> list[tuple[Any, int]]:
        tensors = self._new(wanted)
        if not self.on_host:
            # Kernels that were started before may still use memory that was given away again.
            _wait(self.place)
        # Not tensor.numpy(), which is a copy.
        return [(x, data_address(tf.experimental.dlpack.to_dlpack(x))) for x in tensors]

    def _new(self, wanted: Sequence[tuple[str, tuple[int, ...]]]) -> list[Any]:
        full = base.full_device("TensorFlow", tf.errors.ResourceExhaustedError)
        with _eager(), full, tf.device(self.place if self.devices else self._host):
            return [
                tf.raw_ops.Empty(shape=shape, dtype=tf.as_dtype(kind), init=False)
                for kind, shape in wanted
            ]


@contextlib.contextmanager
def _eager() -> Generator[None]:
    """A context of eager execution, also while a `tf.function` is traced.

    Raises UsageError within a `tf.Graph`, whose tensors hold no numbers.
    """
    with tf.init_scope():
        if not tf.executing_eagerly():
            raise errors.UsageError(
                "TensorFlow builds a graph here, whose tensors hold no numbers",
                expected="eager execution: a load before the tf.Graph, and without "
                "tf.compat.v1.disable_eager_execution()",
            )
        yield


def _wait(device: str) -> None:
    """Returns when a device has done what was started before.

    Not `tf.test.experimental.sync_devices`, which fails in a client that has joined others.
    """
    with tf.device(device):
        float(tf.fill([], 0.0))  # A value gets to the host behind it.


@_eager()
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
    try:
        given = tf.DeviceSpec.from_string(re.sub("cuda", "GPU", name, flags=re.IGNORECASE))
    except ValueError as error:
        raise errors.DeviceError(
            "not a device name",
            expected="CPU:0, GPU:0, /job:worker/task:1/device:CPU:0, …",
            found=name,
        ) from error
    default = tf.DeviceSpec.from_string(f"{local}/device:CPU:0")
    return default.make_merged_spec(given).to_string() if given.device_type else name


# Tensors on such a device have their bytes in this process.
_LOCAL = re.compile(r"/job:localhost/.*device:CPU:\d+")


def export(array: Any) -> base.Exported:
    """What is to be saved of a tensor, or of what a variable holds now."""
    base.refuse("tensorflow", _refusal(array), array)
    if variable := isinstance(array, tf.Variable):
        # The variable's own memory; an assignment later on takes other memory.
        array = array.value()
    row = base.row_of("tensorflow", array.dtype.name)
    shape = tuple(array.shape)
    if shape and _LOCAL.fullmatch(array.backing_device):
        exported = base.export_numpy("tensorflow", np.asarray(array))
        return exported._replace(frozen=not variable)
    # Not NumPy's own call for all: it fails for single numbers of the types that NumPy lacks.
    return base.Exported(row, shape, lambda: np.asarray(array.numpy()))


def _refusal(array: Any) -> str | None:
    """Why an array can't be saved, and what to save instead."""
    if isinstance(array, tf.RaggedTensor):
        return "a ragged tensor has no one shape; save x.to_tensor() or its parts"
    if isinstance(array, tf.SparseTensor):
        return "a sparse tensor; save tf.sparse.to_dense(x) or its parts"
    if isinstance(array, tf.IndexedSlices):
        return "slices of a tensor; save tf.convert_to_tensor(x)"
    if not isinstance(array, tf.Tensor | tf.Variable):
        return "not a tensor; of a model, save its variables"
    if not tf.executing_eagerly() or tf.is_symbolic_tensor(array):
        return "a tensor of a graph has no numbers; save outside tf.function"
    if isinstance(array, tf.Variable):
        return None if array.is_initialized() else "the variable is not initialised"
    if "device:CUSTOM" in array.device:
        return "a DTensor; save its parts, tf.experimental.dtensor.unpack(x), or a replicated copy"
    return None
