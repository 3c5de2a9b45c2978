"""Private APIs of other libraries, each behind one function that falls back on a public one.

The public way is slower and has the same result. Tested with jax(lib) 0.5.3, 0.10.2 and 0.11.2,
Paddle 3.0.0 and 3.3.1, and PyTorch 2.13.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import os
import sys
from collections.abc import Callable, Collection, Generator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from mfload import dtypes, errors
from mfload.dlpack import View, capsule, data_address
from mfload.io import buffers

if TYPE_CHECKING:
    import datetime

    from mfload.cuda.device import Device

log = logging.getLogger("mfload")
_libraries: list[Any] = []
R = TypeVar("R")


def _tried(
    what: str, kept: int = 1
) -> Callable[[Callable[..., tuple[R, bool]]], Callable[..., R | None]]:
    """Makes of a function, which returns something and whether it behaves, one that gives it.

    That is asked once a process, not once a load. None if it fails or does not behave.
    """

    def decorate(find: Callable[..., tuple[R, bool]]) -> Callable[..., R | None]:
        @functools.lru_cache(maxsize=kept)
        @functools.wraps(find)
        def tried(*given: Any) -> R | None:
            try:
                found, behaves = find(*given)
                return found if behaves else None
            except errors.MfloadError:  # Of Paddle's mode, or no memory.
                raise
            except Exception as error:  # noqa: BLE001 - there is another way
                log.info("%s is of no use here: %s", what, error)
                return None

        return tried

    return decorate


@_tried("jaxlib's private DLPack import", 64)
def jax_capsule_importer(
    device: Any, there: Device | None = None
) -> tuple[Callable[..., Any], bool]:
    """JAX's import of a DLPack capsule without the checks around it: 5 µs instead of 27.

    It is called with the capsule, the device and None, and also leaves 64-bit types alone whatever
    `jax_enable_x64` says. Memory of views is that of `there`, which is the `jax.Device`. Default:
    host memory, and it is a CPU. None if the private call does not exist (as in jaxlib 0.5.3), or
    does not give a `jax.Array` over a view's memory on that device: then `jax.dlpack.from_dlpack`
    does.
    """
    take = importlib.import_module("jaxlib._jax").dlpack_managed_tensor_to_buffer
    memory = _jax_memory(np.array([-(2**40)], np.int64), device, there)
    array = take(capsule(View("probe", dtypes.TABLE["I64"], (1,), memory, 0)), device, None)
    address = memory.ctypes.data if there is None else memory.address
    same = jax_address(array) == address and array.devices() == {device}
    return take, same and array.dtype == np.int64 and int(np.asarray(array)[0]) == -(2**40)


def _jax_memory(numbers: Any, device: Any, there: Device | None) -> Any:
    """Memory with some numbers in it, as a view lies in."""
    if there is None:
        memory = buffers.allocate(64)
        memory[: numbers.nbytes] = numbers.view(np.uint8)
        return memory
    import jax

    from mfload.cuda.memory import DeviceBuffer

    array = jax.block_until_ready(jax.device_put(numbers.view(np.uint8), device))
    return DeviceBuffer(there, jax_address(array), numbers.nbytes, array, own=False)


@_tried("jax.Array's private constructor")
def jax_constructor() -> tuple[Callable[[Any, list[Any]], Any], bool]:
    """Makes a sharded `jax.Array` like another one, of arrays in the order of its devices.

    It checks neither them nor their order: that takes three quarters of the time, some 4 µs an
    array. None if the private constructor does not make such an array: then
    `jax.make_array_from_single_device_arrays` does.
    """
    import jax
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    def construct(like: Any, arrays: list[Any]) -> Any:
        make = type(like)
        return make(like.aval, like.sharding, arrays, committed=True, _skip_checks=True)

    devices = jax.local_devices()[1::-1]
    sharding = NamedSharding(Mesh(np.array(devices), ("device",)), PartitionSpec("device"))
    parts = [jax.device_put(np.array([n], np.int32), each) for n, each in enumerate(devices)]
    like = jax.make_array_from_single_device_arrays((len(parts),), sharding, parts)
    made = construct(like, parts)
    same = (made.shape, made.dtype, made.committed) == (like.shape, like.dtype, True)
    same = same and made.sharding == sharding and made.weak_type == like.weak_type
    return construct, same and np.asarray(made).tolist() == list(range(len(parts)))


@_tried("jaxlib's private handler of results")
def jax_wrapper() -> tuple[Callable[[Any], Callable[[tuple[Any]], Any]], bool]:
    """Makes arrays that are not committed to their one device, over the memory of others.

    It takes one of these, and returns what makes such an array of a tuple with any other of the
    same shape, dtype and device. That takes 1.2 µs, and 0.3 µs if the other is let go at once, as
    those that are made share what describes them. None if the private call does not make such
    an array: then `jax.device_put` does, of what `numpy.asarray` gives, which is a copy on any
    device but a CPU.
    """
    import jax

    handler: Any = None
    for module in ("jaxlib._jax", "jaxlib.xla_extension"):  # The second in jaxlib 0.5.3.
        with contextlib.suppress(ImportError):
            handler = handler or getattr(
                importlib.import_module(module), "array_result_handler", None
            )
    if handler is None:
        raise AttributeError("array_result_handler")
    how = {"_skip_checks": True}

    def wrapper(like: Any) -> Any:
        return handler(like.aval, like.sharding, committed=False, **how)

    given = jax.device_put(np.arange(16, dtype=np.int32), jax.local_devices()[-1])
    try:
        wrapper(given)
    except TypeError:  # JAX 0.11 has no such argument.
        how.clear()
    made = wrapper(given)((given,))
    same = (made.sharding, made.dtype, made.weak_type) == (given.sharding, given.dtype, False)
    same = same and (given.committed, made.committed) == (True, False)
    same = same and jax_address(made) == jax_address(given)
    return wrapper, same and np.asarray(made).tolist() == list(range(16))


@_tried("jaxlib's batched placement")
def jax_placer() -> tuple[Callable[..., Any], bool]:
    """Makes a sharded `jax.Array` of NumPy arrays of any strides, which it copies, in one call.

    It takes shape, dtype and sharding, an array for each of the devices, and these: 5 µs an array
    instead of 40, and XLA transposes faster than NumPy. None if the private call does not exist (as
    in jaxlib 0.5.3) or does not make such an array: then `jax.device_put` does, of copies, since it
    aliases what it is given.
    """
    import jax
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    jaxlib = importlib.import_module("jaxlib._jax")
    put, copies = jaxlib.batched_device_put, jaxlib.HostBufferSemantics.IMMUTABLE_ONLY_DURING_CALL

    @functools.lru_cache
    def abstract(shape: Any, dtype: Any) -> Any:
        return jax.core.ShapedArray(shape, dtype)

    def placer(shape: Any, dtype: Any, sharding: Any, parts: list[Any], devices: list[Any]) -> Any:
        how = {"committed": True, "host_buffer_semantics": copies}
        return put(abstract(shape, dtype), sharding, parts, devices, **how)

    devices = jax.local_devices()[1::-1]
    sharding = NamedSharding(Mesh(np.array(devices), ("device",)), PartitionSpec("device"))
    whole = np.arange(8, dtype=np.float32).reshape(4, 2).T
    parts = np.split(whole, len(devices))
    made = placer(whole.shape, whole.dtype, sharding, parts, devices)
    same = made.sharding == sharding and made.committed and np.array_equal(made, whole)
    held = {shard.device: shard.data for shard in made.addressable_shards}
    pairs = zip(devices, parts, strict=True)
    return placer, same and all(np.array_equal(held[device], part) for device, part in pairs)


def jax_address(array: Any) -> int:
    """The address of the first byte of a `jax.Array` of one device, also of one on a GPU."""
    pointer = getattr(array, "unsafe_buffer_pointer", None)
    return data_address(array.__dlpack__()) if pointer is None else pointer()


def dynamic_paddle() -> Any:
    """Paddle, which is asked for its mode first: in static mode private constructors crash it.

    Raises UsageError in static mode, in which there are no tensors with numbers.
    """
    paddle = importlib.import_module("paddle")
    if not paddle.in_dynamic_mode():
        raise errors.UsageError(
            "Paddle is in static mode, in which tensors hold no numbers",
            expected="dynamic mode: call paddle.disable_static(), or load outside to_static",
        )
    return paddle


@_tried("Paddle's constructor over NumPy memory")
def paddle_constructor() -> tuple[Callable[[Any], Any], bool]:
    """Paddle's constructor of a tensor over a NumPy array's memory, undocumented since 2.x.

    None if the constructor does not do that: then `paddle.to_tensor` copies.
    """
    paddle = dynamic_paddle()
    place = paddle.CPUPlace()

    def construct(array: Any) -> Any:
        # value, place, persistable, zero_copy, name, stop_gradient
        return paddle.Tensor(array, place, False, True, "", True)

    probe = buffers.allocate(64)[:8].view(np.int32)
    probe[:] = (-7, 1 << 30)

    tensor = construct(probe)
    same = tensor.data_ptr() == probe.ctypes.data and tensor.dtype == paddle.int32
    return construct, same and tensor.tolist() == probe.tolist()


def paddle_written(tensor: Any) -> None:
    """Tells Paddle's autograd that a tensor has new values, so that it refuses what it kept of it.

    Without the private call, what was computed before a tensor was filled gets gradients from the
    new values.
    """
    with contextlib.suppress(AttributeError):
        tensor._bump_inplace_version()


def paddle_local(tensor: Any) -> Any:
    """What this process holds of a tensor of Paddle, over the same memory.

    Without the private call distributed tensors raise: `dtensor_to_local` may copy.
    """
    return tensor._local_value() if tensor.is_dist() else tensor


def paddle_give(new: Any, tensor: Any) -> None:
    """Gives a tensor that is not initialised the memory of a new one; else copies its values.

    Its initialiser goes, as after `initialize()`: in that of a sharded tensor is the tensor itself.
    """
    try:
        new._share_buffer_to(tensor)
    except AttributeError:
        tensor.set_value(new)
    if hasattr(tensor, "set_init_func"):
        tensor.set_init_func(None)


def keras_layers(layer: Any) -> list[Any]:
    """A layer of Keras and all layers in it; without the private call, those of a model alone."""
    try:
        return layer._flatten_layers()
    except AttributeError:
        return [layer, *getattr(layer, "layers", ())]


@_tried("Paddle's constructor of distributed tensors")
def paddle_sharder() -> tuple[Callable[[Any, tuple[int, ...], Any, list[Any]], Any], bool]:
    """Makes a distributed tensor of a part, the whole shape, a mesh and placements.

    Paddle's own code for experts uses this constructor. None if it does not keep the part and the
    shape: then there is no way, since `dtensor_from_local` multiplies the part's shape.
    """
    paddle = dynamic_paddle()
    dist = importlib.import_module("paddle.distributed")

    def construct(part: Any, shape: tuple[int, ...], mesh: Any, placements: list[Any]) -> Any:
        where = {"process_mesh": mesh, "placements": placements, "place": part.place}
        return paddle.Tensor(part, dims=list(shape), **where)

    rank = dist.get_rank()
    part = paddle.to_tensor([[1, 2]], place=paddle.CPUPlace())
    mesh = dist.ProcessMesh([rank, rank + 1, rank + 2])
    made = construct(part, (3, 2), mesh, [dist.Shard(0)])
    local = made._local_value()
    same = made.shape == [3, 2] and local.data_ptr() == part.data_ptr()
    return construct, same and local.tolist() == [[1, 2]] and made.placements == [dist.Shard(0)]


def jax_store() -> Any | None:
    """The client of the key-value store of `jax.distributed`, which JAX's checkpointing code uses.

    None if processes were not joined by `jax.distributed.initialize`, or this version of JAX has no
    such client: then processes agree by a collective.
    """
    try:
        client = importlib.import_module("jax._src.distributed").global_state.client
        _ = client.key_value_set, client.key_value_dir_get
        _ = client.blocking_key_value_get, client.key_value_delete
    except (ImportError, AttributeError):
        return None
    return client


def torch_copy(targets: Sequence[Any], sources: Sequence[Any]) -> None:
    """Fills tensors with the numbers of others, without the interpreter between two of them."""
    import torch

    if hasattr(torch, "_foreach_copy_"):
        torch._foreach_copy_(targets, sources)
        return
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


def torch_load_hooks(module: Any) -> tuple[Collection[Any], Collection[Any]]:
    """The hooks that `load_state_dict` calls before and after a module is filled.

    PyTorch has no public call for this. Both are empty in a version without these attributes.
    """
    before = getattr(module, "_load_state_dict_pre_hooks", {})
    return before.values(), getattr(module, "_load_state_dict_post_hooks", {}).values()


@contextlib.contextmanager
def torch_before_loading(module: Any, hook: Callable[..., None]) -> Generator[None]:
    """Has `load_state_dict` call a hook as the last one before it fills a module.

    Meanwhile the module has a copy of its hooks: one may take itself away, or load the module
    again, and what is walked through must not change.
    """
    own = module._load_state_dict_pre_hooks
    vars(module)["_load_state_dict_pre_hooks"] = held = own.copy()
    given = {"with_module": True}  # What the public method, which came with 2.5, is short for.
    base = sys.modules["torch"].nn.Module  # Modules of TorchScript refuse their own.
    last = base._register_load_state_dict_pre_hook(module, hook, **given).id
    try:
        yield
    finally:
        own.update((number, each) for number, each in held.items() if number > last)
        vars(module)["_load_state_dict_pre_hooks"] = own


def torch_saves(module: Any, buffer: str) -> bool:
    """Whether a buffer is one that `state_dict` saves; True if this version does not say."""
    return buffer not in getattr(module, "_non_persistent_buffers_set", ())


def torch_dispatches() -> bool:
    """Whether a `TorchDispatchMode` is active; False if this version does not say."""
    import torch

    count: Any = getattr(torch._C, "_len_torch_dispatch_stack", int)
    return count() > 0


def torch_undispatched() -> Any:
    """A context without the effect of a `TorchDispatchMode`, such as that of fake tensors.

    Without the private class, it has no effect itself.
    """
    import torch

    return getattr(torch._C, "_DisableTorchDispatch", contextlib.nullcontext)()


def torch_class_in_making() -> Any | None:
    """The class of which `nn.Parameter` or `nn.Buffer`, two frames up, makes a tensor.

    They call methods of tensors of other classes, and return these themselves. None if another
    function is there.
    """
    from torch import nn

    frame = sys._getframe(2)  # pyright: ignore[reportPrivateUsage]
    makers = nn.Parameter, getattr(nn, "Buffer", nn.Parameter)  # PyTorch 2.5 and newer.
    found = any(frame.f_code is kind.__new__.__code__ for kind in makers)
    return frame.f_locals["cls"] if found else None


def torch_data_answers(lazy: Any) -> dict[Any, Callable[[Any, Any], bool]]:
    """What PyTorch asks before `tensor.data = other`, with an answer that reads `other`.

    `lazy` is a class of tensors on the meta device, with `read`. PyTorch calls nothing else of it,
    and asks this class itself in inference mode only; so the question is answered for all tensors
    on the meta device. Empty without the private operation: then PyTorch refuses lazy tensors.
    """
    import torch

    try:
        asked: Any = torch.ops.aten._has_compatible_shallow_copy_type.default
        library = torch.library.Library("aten", "IMPL")
    except (AttributeError, RuntimeError) as error:
        log.info("tensor.data = lazy can't be had: %s", error)
        return {}

    def answer(tensor: Any, other: Any) -> bool:
        if type(tensor) is lazy:
            return True
        with torch._C.DisableTorchFunctionSubclass():
            if type(other) is lazy and other.is_meta:
                other.data = other.read(unknown=False)
            return asked.decompose(tensor, other)

    library.impl("_has_compatible_shallow_copy_type", answer, "AutogradMeta")
    _libraries.append(library)  # Without it, the answer goes.
    return {asked: answer}


def torch_store() -> Any | None:
    """A connection of its own to the store of PyTorch's default process group.

    The group's own is locked while a collective waits for a process that never comes. None if this
    version has no store, or one that can't be cloned or does not list its keys (before 2.10): then
    processes agree by a collective.
    """
    try:
        store = _torch_group_store().clone()
        _ = store.list_keys(), store.compare_set, store.multi_get, store.delete_key
    except (ImportError, AttributeError, ValueError, RuntimeError):
        return None
    return store


def torch_group(ranks: Sequence[int], timeout: datetime.timedelta, name: str = "") -> Any:
    """A process group of gloo's over some ranks that `torch.distributed` does not know of.

    Made once for them and a name. `torch.distributed.new_group` names a group after the number of
    groups that a process is in, so that processes in different numbers of groups never meet. It is
    what this falls back on, and has the same methods.
    """
    import torch.distributed as dist

    try:
        store = _torch_prefix_store("_".join(map(str, ranks)) + name)
        return dist.ProcessGroupGloo(store, ranks.index(dist.get_rank()), len(ranks), timeout)
    except (ImportError, AttributeError, TypeError) as error:
        log.info("a process group of gloo can't be made directly: %s", error)
        given: Any = {"backend": "gloo", "timeout": timeout, "use_local_synchronization": True}
        return dist.new_group(list(ranks), **given)


def torch_device_group(
    place: Any, ranks: Sequence[int], name: str, timeout: datetime.timedelta
) -> Any:
    """A group of NCCL's for a CUDA device, which all ranks make at once. Not yet run on a GPU.

    A name serves once: NCCL would take what it finds in the store for what is said now.
    """
    import torch.distributed as dist

    store = _torch_prefix_store(f"nccl/{'_'.join(map(str, ranks))}/{name}")
    options: Any = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    variable = "TORCH_NCCL_BLOCKING_WAIT"  # Else a thread of torch's ends the process.
    before, os.environ[variable] = os.environ.get(variable), "1"
    try:
        group = dist.ProcessGroupNCCL(store, ranks.index(dist.get_rank()), len(ranks), options)
    finally:
        if before is None:
            del os.environ[variable]
        else:
            os.environ[variable] = before
    group.eager_connect_single_device(place)
    return group


def _torch_prefix_store(name: str) -> Any:
    import torch.distributed as dist

    store = _torch_group_store()
    with contextlib.suppress(AttributeError, RuntimeError):
        store = store.clone()  # As in `torch_store`.
    return dist.PrefixStore(f"mfload/{name}", store)


def _torch_group_store() -> Any:
    return importlib.import_module("torch.distributed.distributed_c10d")._get_default_store()
