"""What is measured: patterns of reading, mfload, and its peers as their documentation calls them.

No framework is imported before a loader is called, since no process may hold TensorFlow and Paddle
both.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Literal, NamedTuple

import numpy as np

from mfload import dlpack, frameworks
from mfload.bench import ceilings
from mfload.bench.ceilings import ByteRange
from mfload.report import Report
from mfload.saving import export

PAGE = 4096
Job = Mapping[str, Any]
"""What to load, as JSON: the `path` and its `files`, the `names` of tensors (None for all), and the
number of `threads` (or None). Patterns read `extents`; peers load all of the files."""
Arrays = Mapping[str, Any]
Span = tuple[int, int]
"""Address and bytes of an array."""


class BenchLoader(NamedTuple):
    """One way to get a checkpoint into memory.

    Attributes:
        framework: Of the arrays by name that `load` returns; None for `ceilings.Bytes`.
        needs: Modules that must be installed.
        keeps: Whether all bytes are in memory afterwards.
    """

    name: str
    label: str
    kind: Literal["ceiling", "mfload", "peer"]
    framework: str | None
    load: Callable[[Job, Report | None], Any]
    needs: tuple[str, ...] = ()
    keeps: bool = True

    def missing(self) -> list[str]:
        """The modules it needs that are not installed."""
        return [name for name in self.needs if find_spec(name) is None]

    def run(self, job: Job, report: Report | None = None) -> Any:
        """Loads, and waits until all copies are over; the report is filled by mfload alone."""
        made = self.load(job, report)
        if self.framework == "jax":
            sys.modules["jax"].block_until_ready(list(made.values()))
        return made

    def spans(self, made: Any) -> list[Span]:
        """Where in host memory that is which `run` returned."""
        if self.framework is None:
            return made.spans
        ends = [each.span for each in export.export(made)]
        # TensorFlow does not say where a single number lies.
        return [(start, stop - start) for start, stop in filter(None, ends)]


def find(name: str) -> BenchLoader:
    """The pattern or the loader of a name, mfload's with any engine among them."""
    if pattern := ceilings.named(name):
        read, keeps = partial(_read, pattern), not pattern.reuse
        return BenchLoader(name, pattern.label, "ceiling", None, read, keeps=keeps)
    who, _, what = name.partition("-")
    framework, _, engine = what.partition("-")
    if who == "mfload" and framework in frameworks.NAMES:
        return ours(framework, engine or "auto")
    return PEERS[name]


def _read(pattern: ceilings.Pattern, job: Job, _: object) -> ceilings.Bytes:
    return ceilings.read([ByteRange(*each) for each in job["extents"]], pattern)


def ours(framework: str, engine: str = "auto") -> BenchLoader:
    """mfload, into a framework by an engine."""
    name, label = f"mfload-{framework}", f"mfload → {framework}"
    if engine != "auto":
        name, label = f"{name}-{engine}", f"{label}, engine {engine}"
    load = partial(_mfload, framework, engine)
    return BenchLoader(name, label, "mfload", framework, load, (framework,))


def _mfload(framework: str, engine: Any, job: Job, report: Report | None) -> Arrays:
    from mfload import api
    from mfload.options import Options

    how = Options(engine=engine, threads=job["threads"])
    name = frameworks.resolve(framework)
    return api.load(job["path"], name, names=job["names"], report=report, options=how)


def _safetensors(module: str, job: Job, _: object, **options: Any) -> Arrays:
    # Its NumPy loader asks NumPy for bfloat16, which NumPy knows only after this.
    import_module("ml_dtypes")
    load_file = import_module(f"safetensors.{module}").load_file
    return {name: t for path in job["files"] for name, t in load_file(path, **options).items()}


def _clone(job: Job, _: object) -> Arrays:
    load_file = import_module("safetensors.torch").load_file
    return {name: t.clone() for path in job["files"] for name, t in load_file(path).items()}


def _fastsafetensors(job: Job, _: object, *, buffered: bool = False) -> Arrays:
    if buffered:
        os.environ["FASTSAFETENSORS_ODIRECT"] = "0"
    # `nogds` is its path for machines without a GPU. Its tensors share their buffers, so they stay
    # valid after both are closed.
    loader = import_module("fastsafetensors").SafeTensorsFileLoader(None, device="cpu", nogds=True)
    loader.add_filenames({0: job["files"]})
    buffers = loader.copy_files_to_device()
    arrays = {name: buffers.get_tensor(name) for name in loader.get_keys()}
    buffers.close()
    loader.close()
    return arrays


def _runai(job: Job, _: object) -> Arrays:
    with import_module("runai_model_streamer").SafetensorsStreamer() as streamer:
        streamer.stream_files(job["files"])
        # It hands out views of a buffer that it fills again: keeping a tensor means cloning it.
        return {name: tensor.clone() for name, tensor in streamer.get_tensors()}


def _peer(name: str, label: str, framework: str, load: Any, package: str = "") -> BenchLoader:
    needs = framework, package or name.partition("-")[0]
    return BenchLoader(name, label, "peer", framework, load, needs)


def _theirs(module: str, framework: str, note: str = "") -> BenchLoader:
    load = partial(_safetensors, module)
    return _peer(f"safetensors-{module}", f"safetensors.{module}{note}", framework, load)


_PREAD = partial(_safetensors, "torch", backend="pread")
_BUFFERED = partial(_fastsafetensors, buffered=True)
_STREAMER = "runai_model_streamer"
_ALL = (
    _theirs("torch", "torch", " (maps)"),
    _peer("safetensors-torch-clone", "safetensors.torch + clone", "torch", _clone),
    _peer("safetensors-torch-pread", "safetensors.torch, pread", "torch", _PREAD),
    _theirs("flax", "jax"),
    _theirs("numpy", "numpy"),
    _theirs("tensorflow", "tensorflow"),
    _theirs("paddle", "paddle", " (maps)"),
    _peer("fastsafetensors", "fastsafetensors", "torch", _fastsafetensors),
    _peer("fastsafetensors-buffered", "fastsafetensors, buffered", "torch", _BUFFERED),
    _peer("runai-model-streamer", "runai-model-streamer + clone", "torch", _runai, _STREAMER),
)
PEERS: dict[str, BenchLoader] = {loader.name: loader for loader in _ALL}


def touch(spans: Iterable[Span]) -> int:
    """Reads and sums bytes 0, 4096, 8192, … of every span.

    A map is not loaded before its pages are read, and a copy may end late. By address, no
    framework pays for a conversion, and none can copy.
    """
    pages = (dlpack.array_at(None, address, (nbytes,))[::PAGE] for address, nbytes in spans)
    return sum(int(page.sum(dtype=np.uint64)) for page in pages)
