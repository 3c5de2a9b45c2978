"""Reading into CUDA tensors under seams of other libraries, theirs and ours in turns.

A seam is called `seam:WHAT:theirs` and `seam:WHAT:ours`. Before a process measures ours for the
first time, all values are compared with theirs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import mfload
from benchmarks.gpu_memory import HOST
from benchmarks.tasks import Found, Job, Task

Way = Callable[[], dict[str, Any]]
Pair = tuple[Way, Way]
"""Theirs and ours."""


def names(what: str) -> list[str]:
    """The names of a seam: theirs and ours."""
    return [f"seam:{what}:theirs", f"seam:{what}:ours"]


def is_seam(name: str) -> bool:
    """Whether a name is that of a seam."""
    return name.startswith("seam:")


def is_ours(name: str) -> bool:
    """Whether it is mfload's way."""
    return name.endswith(":ours")


def label(name: str) -> str:
    """What it is called."""
    _, what, whose = name.split(":")
    return f"{WHAT[what]}: {'mfload' if whose == 'ours' else whose}"


def why_not(name: str) -> str | None:
    """Why it can't be measured."""
    more = ["transformers", "accelerate"] if ":transformers:" in name else []
    missing = [each for each in ["torch", "safetensors", *more] if find_spec(each) is None]
    return f"not installed: {', '.join(missing)}" if missing else None


def _load_file(path: Path, device: str) -> Pair:
    theirs: Any = import_module("safetensors.torch").load_file
    ours: Any = import_module("mfload.compat.safetensors.torch").load_file
    return lambda: theirs(str(path), device=device), lambda: ours(str(path), device=device)


def _openers(path: Path, device: str, use: Callable[[Any], dict[str, Any]]) -> Pair:
    def way(module: str) -> Way:
        opener: Any = import_module(module).safe_open

        def opened() -> dict[str, Any]:
            with opener(path, framework="pt", device=device) as file:
                return use(file)

        return opened

    return way("safetensors"), way("mfload.compat.safetensors")


def _tensors(path: Path, device: str) -> Pair:
    def use(file: Any) -> dict[str, Any]:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  It has none.

    return _openers(path, device, use)


def _halves(path: Path, device: str) -> Pair:
    def use(file: Any) -> dict[str, Any]:
        parts = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        sizes = {name: part.get_shape() for name, part in parts.items()}
        return {name: parts[name][: -(-n[0] // 2)] for name, n in sizes.items() if n}

    return _openers(path, device, use)


def _checkpoint(path: Path, device: str) -> Pair:
    import torch
    import torch.distributed.checkpoint as dcp

    from mfload.compat.dcp import HuggingFaceReader

    def way(make: Callable[[str], Any]) -> Way:
        def loaded() -> dict[str, Any]:
            reader = make(str(path.parent))
            rows = reader.read_metadata().state_dict_metadata.items()
            state = {
                name: torch.empty(row.size, dtype=row.properties.dtype, device=device)
                for name, row in rows
            }
            dcp.load(state, storage_reader=reader, no_dist=True)
            return state

        return loaded

    return way(dcp.HuggingFaceStorageReader), way(HuggingFaceReader)


def _into(path: Path, device: str, dim: int) -> Pair:
    """Halves of tensors, copied into parameters that are there, as weight loaders of vLLM do."""
    import safetensors
    import torch

    targets: dict[str, Any] = {}
    with safetensors.safe_open(path, framework="pt") as opened:
        for name in opened.keys():  # noqa: SIM118  It has no other way.
            if half := list(opened.get_slice(name).get_shape()):
                half[dim] //= 2
                targets[name] = torch.zeros(half, dtype=torch.bfloat16, device=device)

    def fill(name: str, tensor: Any) -> None:
        if name in targets:
            length = targets[name].shape[dim]
            targets[name].copy_(tensor.narrow(dim, tensor.shape[dim] - length, length))

    def theirs() -> dict[str, Any]:
        with safetensors.safe_open(path, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118
                fill(name, opened.get_tensor(name))
        return targets

    def ours() -> dict[str, Any]:
        with mfload.stream(path, "torch", lazy=True) as tensors:
            for name, tensor in tensors:
                fill(name, tensor)
        return targets

    return theirs, ours


def _model(path: Path, device: str) -> Pair:
    folder = path.parent
    if not (folder / "config.json").exists():  # The tiny checkpoint, before the clock.
        return _load_file(path, device)
    import transformers

    from mfload.compat.transformers import from_pretrained

    cls = transformers.LlamaForCausalLM
    return (
        lambda: cls.from_pretrained(folder, device_map=device).state_dict(),
        lambda: from_pretrained(cls, folder, device_map=device).state_dict(),
    )


_PAIRS: dict[str, Callable[[Path, str], Pair]] = {
    "load_file": _load_file,
    "tensors": _tensors,
    "halves": _halves,
    "rows": lambda path, device: _into(path, device, 0),
    "columns": lambda path, device: _into(path, device, -1),
    "dcp": _checkpoint,
    "transformers": _model,
}
WHAT = {
    "load_file": "safetensors.torch.load_file",
    "tensors": "safe_open, tensor by tensor",
    "halves": "safe_open, halves",
    "rows": "rows into parameters, as vLLM does",
    "columns": "columns into parameters",
    "dcp": "torch's distributed checkpoints",
    "transformers": "transformers, device_map",
}
"""What each is called."""


@cache
def _pair(what: str, path: str, device: str) -> Pair:
    return _PAIRS[what](Path(path), device)


def _settle(device: str) -> None:
    if device != HOST:
        sys.modules["torch"].cuda.synchronize()


@cache
def _compare(what: str, path: str, device: str) -> None:
    """Compares all values, once a process."""
    import torch

    theirs, ours = _pair(what, path, device)
    first = theirs()
    expected = {name: tensor.clone() for name, tensor in first.items()}
    for tensor in first.values() if what in ("rows", "columns") else ():
        tensor.zero_()  # Ours lands where theirs did.
    del first
    found = ours()
    if found.keys() != expected.keys():
        raise AssertionError(f"{what}: other tensors")
    for name, tensor in expected.items():
        flat = (each.reshape(-1).view(torch.uint8) for each in (tensor, found[name]))
        if not torch.equal(*flat):
            raise AssertionError(f"{what}: other values of {name}")


def find(name: str, device: str) -> Task:
    """The task of a name."""
    _, what, whose = name.split(":")

    def run(job: Job) -> dict[str, Any]:
        made = _pair(what, job["files"][0], device)[whose == "ours"]()
        _settle(device)
        return made

    def prepare(job: Job) -> None:
        if whose == "ours":
            _compare(what, job["files"][0], device)

    return Task(run, lambda made: Found(made, []), prepare)
