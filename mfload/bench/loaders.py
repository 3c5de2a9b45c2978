"""The loaders that are measured: mfload and its peers, each as its own documentation calls it.

Every loader takes a request and gives arrays by name. Nothing is imported before a loader is
called, since no process may hold TensorFlow and Paddle both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

from mfload import frameworks
from mfload.report import Report

Arrays = Mapping[str, Any]


class Request(NamedTuple):
    """What to load.

    Attributes:
        path: What a user gave, a path or several.
        files: The files of it.
        names: The tensors, all of them where None. Peers load whole files only.
        threads: Readers at once, chosen by the loader where None.
        report: To be filled by mfload; by no peer.
    """

    path: str | list[str]
    files: list[str]
    names: list[str] | None = None
    threads: int | None = None
    report: Report | None = None


Load = Callable[[Request], Arrays]


@dataclass(frozen=True, slots=True)
class Loader:
    """One way to load a checkpoint.

    Args:
        name: What it is called on the command line and in the results.
        label: What it is called in tables and plots.
        framework: Whose arrays it gives.
        load: The call to measure.
        requests: Modules that must be there, beside the framework.
        mapped: Whether the arrays are views of the file in the page cache, nothing copied.
        env: Environment that it is run with.
    """

    name: str
    label: str
    framework: str
    load: Load
    requests: tuple[str, ...]
    mapped: bool = False
    env: Mapping[str, str] = field(default_factory=dict[str, str])

    @property
    def ours(self) -> bool:
        """Whether it is mfload."""
        return self.name.startswith("mfload-")

    def missing(self) -> list[str]:
        """The modules it needs that are not installed."""
        return [name for name in (self.framework, *self.requests) if find_spec(name) is None]


def _mfload(request: Request, *, framework: Any, engine: Any) -> Arrays:
    import mfload

    return mfload.load(
        request.path,
        framework=framework,
        names=request.names,
        report=request.report,
        options=mfload.Options(engine=engine, threads=request.threads),
    )


def _safetensors(request: Request, *, module: str, **options: Any) -> Arrays:
    # Its NumPy loader asks NumPy for bfloat16, which NumPy knows only after this.
    import_module("ml_dtypes")
    load_file = import_module(f"safetensors.{module}").load_file
    arrays: dict[str, Any] = {}
    for path in request.files:
        arrays.update(load_file(path, **options))
    return arrays


def _safetensors_clone(request: Request) -> Arrays:
    load_file = import_module("safetensors.torch").load_file
    return {
        name: mapped.clone() for path in request.files for name, mapped in load_file(path).items()
    }


def _fastsafetensors(request: Request) -> Arrays:
    # `nogds` is its path for machines without a GPU. Its tensors share their buffers, so they stay
    # valid after both are closed.
    make = import_module("fastsafetensors").SafeTensorsFileLoader
    loader = make(None, device="cpu", nogds=True)
    loader.add_filenames({0: request.files})
    buffers = loader.copy_files_to_device()
    arrays = {name: buffers.get_tensor(name) for name in loader.get_keys()}
    buffers.close()
    loader.close()
    return arrays


def _runai(request: Request) -> Arrays:
    with import_module("runai_model_streamer").SafetensorsStreamer() as streamer:
        streamer.stream_files(request.files)
        # It hands out views of a buffer that it fills again: keeping a tensor means cloning it.
        return {name: tensor.clone() for name, tensor in streamer.get_tensors()}


def ours(framework: str, engine: str = "auto") -> Loader:
    """Our own loader, into a framework by an engine."""
    auto = engine == "auto"
    return Loader(
        f"mfload-{framework}" if auto else f"mfload-{framework}-{engine}",
        f"mfload → {framework}" if auto else f"mfload → {framework}, engine {engine}",
        framework,
        partial(_mfload, framework=framework, engine=engine),
        ("mfload",),
        mapped=engine == "mmap",
    )


def _theirs(name: str, label: str, framework: str, *, mapped: bool = False) -> Loader:
    # The package calls its JAX loader by the name of Flax.
    load = partial(_safetensors, module="flax" if framework == "jax" else framework)
    return Loader(f"safetensors-{name}", label, framework, load, ("safetensors",), mapped=mapped)


def _into_torch(name: str, label: str, load: Load, requests: str, **env: str) -> Loader:
    return Loader(name, label, "torch", load, (requests,), env=env)


_pread = partial(_safetensors, module="torch", backend="pread")
_ALL = (
    ours("jax"),
    ours("torch"),
    ours("numpy"),
    ours("tensorflow"),
    ours("paddle"),
    ours("torch", "mmap"),
    _theirs("torch", "safetensors.torch (maps)", "torch", mapped=True),
    _into_torch(
        "safetensors-torch-clone", "safetensors.torch + clone", _safetensors_clone, "safetensors"
    ),
    _into_torch("safetensors-torch-pread", "safetensors.torch, pread", _pread, "safetensors"),
    _theirs("flax", "safetensors.flax", "jax"),
    _theirs("numpy", "safetensors.numpy", "numpy"),
    _theirs("tensorflow", "safetensors.tensorflow", "tensorflow"),
    _theirs("paddle", "safetensors.paddle (maps)", "paddle", mapped=True),
    _into_torch("fastsafetensors", "fastsafetensors", _fastsafetensors, "fastsafetensors"),
    _into_torch(
        "fastsafetensors-buffered",
        "fastsafetensors, buffered",
        _fastsafetensors,
        "fastsafetensors",
        FASTSAFETENSORS_ODIRECT="0",
    ),
    _into_torch(
        "runai-model-streamer", "runai-model-streamer + clone", _runai, "runai_model_streamer"
    ),
)
LOADERS: dict[str, Loader] = {loader.name: loader for loader in _ALL}
"""The loaders that the project compares, in the order of the tables."""


def find(name: str) -> Loader:
    """The loader of a name, mfload's with any engine among them.

    Raises:
        KeyError: There is none.
    """
    if name in LOADERS:
        return LOADERS[name]
    who, _, what = name.partition("-")
    framework, _, engine = what.partition("-")
    if who != "mfload" or framework not in frameworks.NAMES:
        raise KeyError(name)
    return ours(framework, engine or "auto")
