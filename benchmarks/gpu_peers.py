"""Loaders onto a device that mfload is measured against, each as its own documentation calls it."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any, NamedTuple

from benchmarks.gpu_memory import HOST

Arrays = dict[str, Any]


class Peer(NamedTuple):
    """A loader.

    Attributes:
        label: What it is called in tables and plots.
        framework: Whose arrays it gives.
        requests: A module that must be there beside the framework.
        load: Loads files onto a device; also gives what keeps the arrays valid.
        host: Whether it can also load into host memory.
    """

    label: str
    framework: str
    requests: str
    load: Callable[[Sequence[str], str], tuple[Arrays, object]]
    host: bool = True

    def why_not(self, device: str) -> str | None:
        """Why it can't be measured, None where it can."""
        missing = [name for name in (self.framework, self.requests) if find_spec(name) is None]
        if missing:
            return f"not installed: {', '.join(missing)}"
        if device == HOST and not self.host:
            return "needs a GPU"
        # What this process has imported may be older than what one that measures will import.
        if self.load is _prefetch and version("safetensors").startswith(("0.7.", "0.8.")):
            return "this version of safetensors has no prefetch"
        return None


def _plain(files: Sequence[str], device: str) -> tuple[Arrays, object]:
    load_file = import_module("safetensors.torch").load_file
    arrays: Arrays = {}
    for path in files:
        arrays.update(load_file(path, device=device))
    return arrays, None


def _prefetch(files: Sequence[str], device: str) -> tuple[Arrays, object]:
    safe_open: Any = import_module("safetensors").safe_open
    arrays: Arrays = {}
    with ExitStack() as opened:
        handles = [opened.enter_context(safe_open(path, framework="pt")) for path in files]
        loaders = [opened.enter_context(handle.prefetch(device=device)) for handle in handles]
        for loader in loaders:
            arrays.update(loader)
    return arrays, loaders


def _flax(files: Sequence[str], device: str) -> tuple[Arrays, object]:
    del device  # JAX's default device: the first GPU where there is one.
    load_file = import_module("safetensors.flax").load_file
    arrays: Arrays = {}
    for path in files:
        arrays.update(load_file(path))
    return arrays, None


def _fast(files: Sequence[str], device: str, *, gds: bool) -> tuple[Arrays, object]:
    loader = import_module("fastsafetensors").SafeTensorsFileLoader(None, device, nogds=not gds)
    loader.add_filenames({0: list(files)})
    buffers = loader.copy_files_to_device()
    arrays = {name: buffers.get_tensor(name) for name in loader.get_keys()}
    return arrays, (loader, buffers)


def _fast_copied(files: Sequence[str], device: str) -> tuple[Arrays, object]:
    return _fast(files, device, gds=False)


def _fast_gds(files: Sequence[str], device: str) -> tuple[Arrays, object]:
    return _fast(files, device, gds=True)


def _instant(files: Sequence[str], device: str, *, buffered: bool) -> tuple[Arrays, object]:
    module = import_module("instanttensor")
    how = {"backend": module.BackendPolicy.BUFFERED} if buffered else {}
    with module.safe_open(list(files), framework="pt", device=device, **how) as tensors:
        return dict(tensors.tensors()), None


def _instant_direct(files: Sequence[str], device: str) -> tuple[Arrays, object]:
    return _instant(files, device, buffered=False)


def _instant_buffered(files: Sequence[str], device: str) -> tuple[Arrays, object]:
    return _instant(files, device, buffered=True)


def _runai(files: Sequence[str], device: str) -> tuple[Arrays, object]:
    torch: Any = import_module("torch")
    with import_module("runai_model_streamer").SafetensorsStreamer() as streamer:
        streamer.stream_files(list(files))
        # It hands out views of a host buffer that it fills again.
        arrays = {name: torch.empty_like(tensor, device=device).copy_(tensor)
                  for name, tensor in streamer.get_tensors()}  # fmt: skip
    return arrays, None


def _orbax(files: Sequence[str], device: str) -> tuple[Arrays, object]:
    import jax
    import jax.numpy as jnp
    import orbax.checkpoint.experimental.v1 as ocp

    from mfload.formats import checkpoint

    on = jax.devices("cpu" if device == HOST else "cuda")[0]
    sharding = jax.sharding.SingleDeviceSharding(on)
    index, _ = checkpoint.read(list(files))
    targets = {
        name: jax.ShapeDtypeStruct(index[name].shape, jnp.bfloat16, sharding=sharding)
        for name in index
    }
    context = ocp.Context()
    context.checkpoint_layout = ocp.options.CheckpointLayout.SAFETENSORS
    with context:
        return ocp.load(os.path.dirname(files[0]), targets), None


PEERS = {
    "safetensors.torch": Peer("safetensors.torch.load_file", "torch", "safetensors", _plain),
    "safetensors.prefetch": Peer("safetensors, prefetch", "torch", "safetensors", _prefetch, False),
    "safetensors.flax": Peer("safetensors.flax.load_file", "jax", "flax", _flax),
    "fastsafetensors": Peer("fastsafetensors, nogds", "torch", "fastsafetensors", _fast_copied),
    "fastsafetensors.gds": Peer("fastsafetensors", "torch", "fastsafetensors", _fast_gds, False),
    "instanttensor": Peer("InstantTensor", "torch", "instanttensor", _instant_direct, False),
    "instanttensor.buffered": Peer(
        "InstantTensor, buffered", "torch", "instanttensor", _instant_buffered, False
    ),
    "orbax": Peer("Orbax, safetensors layout", "jax", "orbax", _orbax),
    "runai": Peer("runai-model-streamer, copied", "torch", "runai_model_streamer", _runai),
}
"""By the name in the results."""
