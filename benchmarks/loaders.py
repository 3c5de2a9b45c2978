"""The loaders that are compared: mfload and its peers, each as its own documentation calls it.

Every loader takes the paths of a checkpoint and gives arrays by name. Nothing is imported before a
loader is called, since no process may hold TensorFlow and Paddle both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

Arrays = Mapping[str, Any]
Load = Callable[[Sequence[str]], Arrays]


@dataclass(frozen=True, slots=True)
class Loader:
    """One way to load a checkpoint.

    Args:
        name: What it is called on the command line and in the results.
        label: What it is called in tables and plots.
        framework: Whose arrays it gives.
        load: The call to measure.
        needs: Modules that must be there, beside the framework.
        mapped: Whether the arrays are views of the file in the page cache, nothing copied.
        env: Environment that it is run with.
    """

    name: str
    label: str
    framework: str
    load: Load
    needs: tuple[str, ...]
    mapped: bool = False
    env: Mapping[str, str] = field(default_factory=dict[str, str])

    def missing(self) -> list[str]:
        """The modules it needs that are not installed."""
        return [name for name in (self.framework, *self.needs) if find_spec(name) is None]


def _mfload(paths: Sequence[str], *, framework: Any, engine: Any) -> Arrays:
    import mfload

    return mfload.load(list(paths), framework=framework, engine=engine)


def _safetensors(paths: Sequence[str], *, framework: str) -> Arrays:
    # Its NumPy loader asks NumPy for bfloat16, which NumPy knows only after this.
    import_module("ml_dtypes")
    load_file = import_module(f"safetensors.{framework}").load_file
    arrays: dict[str, Any] = {}
    for path in paths:
        arrays.update(load_file(path))
    return arrays


def _safetensors_clone(paths: Sequence[str]) -> Arrays:
    from safetensors.torch import load_file

    return {name: mapped.clone() for path in paths for name, mapped in load_file(path).items()}


def _safetensors_pread(paths: Sequence[str]) -> Arrays:
    from safetensors.torch import load_file

    arrays: dict[str, Any] = {}
    for path in paths:
        arrays.update(load_file(path, backend="pread"))
    return arrays


def _fastsafetensors(paths: Sequence[str]) -> Arrays:
    from fastsafetensors import SafeTensorsFileLoader

    # `nogds` is its path for machines without a GPU. Its tensors share their buffers, so they stay
    # valid after both are closed.
    loader = SafeTensorsFileLoader(None, device="cpu", nogds=True)
    loader.add_filenames({0: list(paths)})
    buffers = loader.copy_files_to_device()
    arrays = {name: buffers.get_tensor(name) for name in loader.get_keys()}
    buffers.close()
    loader.close()
    return arrays


def _runai(paths: Sequence[str]) -> Arrays:
    from runai_model_streamer import SafetensorsStreamer

    with SafetensorsStreamer() as streamer:
        streamer.stream_files(list(paths))
        # It hands out views of a buffer that it fills again: keeping a tensor means cloning it.
        return {name: tensor.clone() for name, tensor in streamer.get_tensors()}


def _ours(name: str, label: str, framework: str, engine: str = "auto") -> Loader:
    load = partial(_mfload, framework=framework, engine=engine)
    return Loader(f"mfload-{name}", label, framework, load, ("mfload",), mapped=engine == "mmap")


def _theirs(name: str, label: str, framework: str, *, mapped: bool = False) -> Loader:
    # The package calls its JAX loader by the name of Flax.
    load = partial(_safetensors, framework="flax" if framework == "jax" else framework)
    return Loader(f"safetensors-{name}", label, framework, load, ("safetensors",), mapped=mapped)


_ALL = (
    _ours("jax", "mfload → jax", "jax"),
    _ours("torch", "mfload → torch", "torch"),
    _ours("numpy", "mfload → numpy", "numpy"),
    _ours("tensorflow", "mfload → tensorflow", "tensorflow"),
    _ours("paddle", "mfload → paddle", "paddle"),
    _ours("torch-mmap", "mfload → torch, engine mmap", "torch", "mmap"),
    _theirs("torch", "safetensors.torch (maps)", "torch", mapped=True),
    Loader(
        "safetensors-torch-clone",
        "safetensors.torch + clone",
        "torch",
        _safetensors_clone,
        ("safetensors",),
    ),
    Loader(
        "safetensors-torch-pread",
        "safetensors.torch, pread",
        "torch",
        _safetensors_pread,
        ("safetensors",),
    ),
    _theirs("flax", "safetensors.flax", "jax"),
    _theirs("numpy", "safetensors.numpy", "numpy"),
    _theirs("tensorflow", "safetensors.tensorflow", "tensorflow"),
    _theirs("paddle", "safetensors.paddle (maps)", "paddle", mapped=True),
    Loader(
        "fastsafetensors",
        "fastsafetensors",
        "torch",
        _fastsafetensors,
        ("fastsafetensors",),
    ),
    Loader(
        "fastsafetensors-buffered",
        "fastsafetensors, buffered",
        "torch",
        _fastsafetensors,
        ("fastsafetensors",),
        env={"FASTSAFETENSORS_ODIRECT": "0"},
    ),
    Loader(
        "runai-model-streamer",
        "runai-model-streamer + clone",
        "torch",
        _runai,
        ("runai_model_streamer",),
    ),
)
LOADERS: dict[str, Loader] = {loader.name: loader for loader in _ALL}
"""Every loader by name, in the order of the tables."""
