"""Private APIs of other libraries that mfload touches, each behind one function.

Every seam looks before it leaps: where the private call is missing or behaves otherwise than
expected, the public way is taken, slower and with the same result.

- `jax_capsule_importer`: `jaxlib._jax.dlpack_managed_tensor_to_buffer`, tested with jaxlib
  0.10.2 (0.5.3 has no such module); the public way is `jax.dlpack.from_dlpack`.
- `paddle_constructor`: the positional arguments of `paddle.Tensor(...)`, tested with Paddle
  3.0.0 and 3.3.1; the public way is `paddle.to_tensor`, which copies.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from typing import Any

import numpy as np

from mfload import dtypes
from mfload.dlpack import View, capsule
from mfload.io import buffers

log = logging.getLogger("mfload")


def jax_capsule_importer(device: Any) -> Callable[[View], Any] | None:
    """JAX's import of a DLPack capsule without the checks around it: 5 µs instead of 27.

    It also leaves 64-bit types alone whatever `jax_enable_x64` says.

    Args:
        device: The CPU device the arrays are to appear on.

    Returns:
        A function from a view to a `jax.Array` over its memory; None where the private call
        is not there or does not do that.
    """
    try:
        take = importlib.import_module("jaxlib._jax").dlpack_managed_tensor_to_buffer
    except (ImportError, AttributeError):
        return None

    def importer(view: View) -> Any:
        return take(capsule(view, device_id=device.id), device, None)

    return importer if _behaves(importer, device) else None


def _behaves(importer: Callable[[View], Any], device: Any) -> bool:
    memory = buffers.allocate(64)
    memory[:8] = np.frombuffer(np.int64(-(2**40)).tobytes(), np.uint8)
    probe = View("probe", dtypes.TABLE["I64"], (1,), memory, 0)
    try:
        array = importer(probe)
        same = array.unsafe_buffer_pointer() == probe.address and array.devices() == {device}
        return bool(same and array.dtype == np.int64 and int(np.asarray(array)[0]) == -(2**40))
    except Exception as error:  # noqa: BLE001 - whatever a private call does, there is another way.
        log.info("jaxlib's private DLPack import is of no use here: %s", error)
        return False


def paddle_constructor(paddle: Any) -> Callable[[Any], Any] | None:
    """Paddle's constructor of a tensor over a NumPy array's memory, undocumented since 2.x.

    Args:
        paddle: The module.

    Returns:
        A function from a NumPy array to a CPU tensor over its memory; None where the
        constructor does not do that.
    """
    place = paddle.CPUPlace()

    def construct(array: Any) -> Any:
        # value, place, persistable, zero_copy, name, stop_gradient
        return paddle.Tensor(array, place, False, True, "", True)

    memory = buffers.allocate(64)
    probe = memory[:8].view(np.int32)
    probe[:] = (-7, 1 << 30)
    try:
        tensor = construct(probe)
        same = tensor.data_ptr() == probe.ctypes.data and tensor.dtype == paddle.int32
        return construct if same and tensor.tolist() == probe.tolist() else None
    except Exception as error:  # noqa: BLE001 - whatever a private call does, there is another way.
        log.info("Paddle's constructor over NumPy memory is of no use here: %s", error)
        return None
