"""Private APIs of other libraries that mfload touches, each behind one function.

Every seam looks before it leaps: where the private call is missing or behaves otherwise than
expected, the public way is taken, slower and with the same result.

- `jax_capsule_importer`: `jaxlib._jax.dlpack_managed_tensor_to_buffer`, tested with jaxlib
  0.10.2 and 0.11.2 (0.5.3 has no such module); the public way is `jax.dlpack.from_dlpack`.
- `jax_lends_on`: `jax.Array.unsafe_buffer_pointer` of an array on a GPU, and writing there past
  XLA. Never tried on a GPU when this was written; where a try at run time shows otherwise,
  tensors land in mfload's memory.
- `paddle_constructor`: the positional arguments of `paddle.Tensor(...)`, tested with Paddle
  3.0.0 and 3.3.1; the public way is `paddle.to_tensor`, which copies.
- `jax_store`: `jax._src.distributed.global_state.client`, tested with jax 0.5.3, 0.10.2 and
  0.11.2; there is no public way to put a text where another process finds it, so its absence is
  an error.
"""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from mfload import dtypes, errors
from mfload.cuda.device import Device, Rows
from mfload.cuda.memory import DeviceBuffer
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
        return take(capsule(view, device_id=device.local_hardware_id), device, None)

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


def jax_lends_on(device: Any, land: Device) -> bool:
    """Whether XLA's arrays on a device can be filled in place, past XLA.

    Tried until there is an answer: two arrays of a compiled program, the one program that is
    compiled for it, are written to from a stream of our own, and JAX must find in each what was
    written there.

    Args:
        device: The `jax.Device`.
        land: The same device, which writes.
    """
    try:
        said = _answer(device, land)
    except errors.MemoryLimitError as error:
        said = f"there was no room to try: {error}"  # There may be the next time.
    if said:
        log.info("%s: tensors land in mfload's memory, since in XLA's own %s", device, said)
    return not said


_TRIAL = 4096  # int32 elements: some pages.


@functools.lru_cache(maxsize=64)
def _answer(device: Any, land: Device) -> str:
    """What speaks against it, in words; nothing where all went well."""
    try:
        return _trial(device, land)
    except errors.MemoryLimitError:
        raise
    except Exception as error:  # noqa: BLE001 - whatever goes wrong, there is another way.
        return str(error) or type(error).__name__


def _trial(device: Any, land: Device) -> str:
    from mfload.frameworks.jax_lending import Wanted, allocate

    arrays = allocate([Wanted(device, None, "int32", (_TRIAL,))] * 2)
    wanted = [np.arange(_TRIAL, dtype=np.int32) * -977 + first for first in (5, 1 << 30)]
    numbers = buffers.allocate(4 * _TRIAL)
    for array, each in zip(arrays, wanted, strict=True):
        numbers.view(np.int32)[:] = each
        address = array.unsafe_buffer_pointer()
        _write(land, DeviceBuffer(land, address, 4 * _TRIAL, array, own=False), numbers)
    # What was written to the second is not to be seen in the first.
    for array, each in zip(arrays, wanted, strict=True):
        if not np.array_equal(np.asarray(array), each):
            return "JAX does not see what was written to an array, or sees it in another"
    return ""


def _write(land: Device, target: DeviceBuffer, source: Any) -> None:
    land.pin(source)
    try:
        stream = land.stream()
        try:
            stream.copy_in(target, 0, source, Rows(1, source.size, source.size))
            stream.synchronize()
        finally:
            stream.close()  # Whatever happened, nothing reads the source any more.
    finally:
        land.unpin(source)


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


class JaxStore(NamedTuple):
    """The store of keys and values beside `jax.distributed`.

    Attributes:
        client: Whose it is: another one after `jax.distributed` was started anew.
        put: Sets a key, in place of an older value.
        first: Sets a key that has no value; returns whether it had none.
        get: The value of a key that is there.
        under: Keys and values under a prefix that ends with a slash.
        drop: Takes away all keys under such a prefix.
    """

    client: Any
    put: Callable[[str, str], None]
    first: Callable[[str, str], bool]
    get: Callable[[str], str]
    under: Callable[[str], dict[str, str]]
    drop: Callable[[str], None]


def jax_store() -> JaxStore | None:
    """The store of `jax.distributed`, which JAX's own checkpointing code uses the same way.

    Returns:
        None where processes were not joined by `jax.distributed.initialize`.

    Raises:
        FrameworkVersionError: This version of JAX has none where it is looked for.
    """
    try:
        client = importlib.import_module("jax._src.distributed").global_state.client
        if client is None:
            return None
        put, under = client.key_value_set, client.key_value_dir_get
        get, drop = client.blocking_key_value_get, client.key_value_delete
    except (ImportError, AttributeError) as error:
        raise errors.FrameworkVersionError(
            "this version of JAX has no store of keys where mfload looks for it",
            expected="jax 0.5.3 to 0.11.2, with which several processes were tested",
            found=str(error),
        ) from error

    def first(key: str, text: str) -> bool:
        try:
            put(key, text)
        except RuntimeError as error:
            if "ALREADY_EXISTS" not in str(error):
                raise
            return False
        return True

    return JaxStore(
        client,
        lambda key, text: put(key, text, allow_overwrite=True),
        first,
        lambda key: get(key, 10_000),
        lambda prefix: dict(under(prefix)),
        drop,
    )
