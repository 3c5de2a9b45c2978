"""Private APIs of other libraries that mfload touches, each behind one function.

Every seam looks before it leaps: where the private call is missing or behaves otherwise than
expected, the public way is taken, slower and with the same result.

- `jax_capsule_importer`: `jaxlib._jax.dlpack_managed_tensor_to_buffer`, tested with jaxlib
  0.10.2; the public way is `jax.dlpack.from_dlpack`.
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
