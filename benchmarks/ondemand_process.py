"""What `benchmarks.ondemand` measures: one way through a trace of experts, or through layers.

    python -m benchmarks.ondemand_process JOB

Prints a sample as JSON. Every weight that a step takes is read by the step: of experts, all bytes
are summed; of layers, products are computed. The clock starts after a part of the trace, or a first
pass, so that each way has in memory what it will.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import mfload
from benchmarks import capped
from benchmarks.subject import whole
from mfload.bench import machine
from mfload.formats import checkpoint

Arrays = Iterable[Any]
Use = Callable[[int, Sequence[int]], Arrays]
NAMES = ("gate_proj", "up_proj", "down_proj")
_BYPASS = mfload.Options(engine="direct", page_cache="bypass")


def expert(layer: int, number: int, name: str) -> str:
    """The name of a tensor."""
    return f"model.layers.{layer}.mlp.experts.{number}.{name}.weight"


def _mfload(job: dict[str, Any]) -> Use:
    policy = job["way"].removeprefix("mfload-")
    cache = mfload.ondemand.ExpertCache(
        job["path"], budget=job["budget"], policy=policy, options=_BYPASS
    )

    def use(layer: int, ids: Sequence[int]) -> Iterator[Any]:
        with cache.use(layer, ids) as experts:
            for number in ids:
                yield from (experts[number][name] for name in NAMES)

    return use


def _memmap(job: dict[str, Any]) -> Use:
    whole = np.memmap(job["path"], np.uint8, "r")
    index, _ = checkpoint.read(job["path"])
    places = {name: index.tensors[name].pieces[0] for name in index.names}

    def use(layer: int, ids: Sequence[int]) -> Iterator[Any]:
        for number in ids:
            for name in NAMES:
                piece = places[expert(layer, number, name)]
                yield whole[piece.offset : piece.offset + piece.nbytes]

    return use


def _safetensors(job: dict[str, Any]) -> Use:
    import safetensors

    opened: Any = safetensors.safe_open(job["path"], "numpy")
    sliced = job["way"].endswith("slice")

    def use(layer: int, ids: Sequence[int]) -> Iterator[Any]:
        for number in ids:
            for name in NAMES:
                key = expert(layer, number, name)
                yield opened.get_slice(key)[:] if sliced else opened.get_tensor(key)

    return use


def _total(arrays: Arrays) -> int:
    """The sum of all bytes, eight at a time."""
    total = 0
    for array in arrays:
        total += int(array.reshape(-1).view(np.uint64).sum())
    return total % 2**64


def experts(job: dict[str, Any]) -> dict[str, Any]:
    """Takes the experts of each token of a trace, layer by layer."""
    way = job["way"].partition("-")[0]
    make = {"mfload": _mfload, "memmap": _memmap, "safetensors": _safetensors}[way]
    capped.enter(job["group"], job["cap"])
    use, total = make(job), 0
    clock = _Clock(job)
    for number, token in enumerate(job["trace"]):
        if number == job["warm_up"]:
            clock.start()
        clock.step()
        for layer, ids in enumerate(token):
            total += _total(use(layer, ids))
    return clock.stop(len(job["trace"]) - job["warm_up"], total % 2**64)


class _Clock:
    """Seconds, CPU seconds and bytes read a step."""

    def __init__(self, job: dict[str, Any]) -> None:
        self._group, self._path = job["group"], job["path"]

    def _now(self) -> list[float]:
        used = resource.getrusage(resource.RUSAGE_SELF)
        read = Path("/proc/self/io").read_text().partition("\nread_bytes: ")[2].split()[0]
        return [time.perf_counter(), used.ru_utime + used.ru_stime, float(read)]

    def start(self) -> None:
        self._began = self._now()

    def step(self) -> None:
        """Before each step; drops the page cache if no group limits it."""
        if not self._group:
            fd = os.open(self._path, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)

    def stop(self, steps: int, total: int) -> dict[str, Any]:
        """The sample, figures a step."""
        took = [(b - a) / steps for a, b in zip(self._began, self._now(), strict=True)]
        named = dict(zip(("seconds", "cpu_s", "read_bytes"), took, strict=True))
        peak = capped.peak(self._group)
        return {**named, "total": total, **({} if peak is None else {"peak": peak})}


def layers(job: dict[str, Any]) -> dict[str, Any]:
    """Passes through all layers of a model of PyTorch."""
    import torch

    torch.set_grad_enabled(False)
    make = {"mfload": _stream, "accelerate": _accelerate}[job["way"].partition("-")[0]]
    run = make(job, torch)
    hidden = torch.ones(job["batch"], job["width"]) / job["width"]
    clock, total = _Clock(job), []
    for number in range(job["passes"] + 1):
        if number == 1:
            clock.start()
        clock.step()
        total.append(run(hidden).double().sum().item())
    assert len({*total}) == 1
    return clock.stop(job["passes"], total[0])


def _stream(job: dict[str, Any], torch: Any) -> Callable[[Any], Any]:
    capped.enter(job["group"], job["cap"])
    stream = mfload.ondemand.LayerStream(
        job["path"], budget=job["budget"], framework="torch", options=_BYPASS
    )
    linear = torch.nn.functional.linear

    def run(hidden: Any) -> Any:
        for layer, tensors in stream:
            up, down = (tensors[f"layers.{layer}.{name}.weight"] for name in ("up", "down"))
            hidden = hidden + linear(torch.relu(linear(hidden, up)), down)
            del up, down
        return hidden

    return run


def _accelerate(job: dict[str, Any], torch: Any) -> Callable[[Any], Any]:
    import accelerate
    from accelerate.utils import set_module_tensor_to_device
    from safetensors import safe_open

    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            width = job["width"]
            self.up = torch.nn.Linear(width, 4 * width, bias=False)
            self.down = torch.nn.Linear(4 * width, width, bias=False)

        def forward(self, hidden: Any) -> Any:
            return hidden + self.down(torch.relu(self.up(hidden)))

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList(Layer() for _ in range(job["layers"]))

        def forward(self, hidden: Any) -> Any:
            for layer in self.layers:
                hidden = layer(hidden)
            return hidden

    with accelerate.init_empty_weights():
        model = Model()
    opened: Any = safe_open(job["path"], "pt")
    names = [name for name, _ in model.named_parameters()]
    if job["way"] == "accelerate-folder":  # Its folder has a file a tensor.
        _offload(accelerate.utils, job["folder"], {name: opened.get_tensor(name) for name in names})
        capped.enter(job["group"], job["cap"])
        return accelerate.disk_offload(model, job["folder"], execution_device="cpu")
    # As transformers does: what fits stays, the rest is read from the checkpoint itself.
    capped.enter(job["group"], job["cap"])
    where = {f"layers.{n}": "cpu" if n < job["resident"] else "disk" for n in range(job["layers"])}
    offload: dict[str, Any] = {}
    for name in names:
        if where[name.rpartition(".")[0].rpartition(".")[0]] == "cpu":
            set_module_tensor_to_device(model, name, "cpu", value=opened.get_tensor(name).clone())
        else:
            entry = {"safetensors_file": job["path"], "weight_name": name, "dtype": "float32"}
            offload[name] = entry
    return accelerate.dispatch_model(
        model, where, main_device="cpu", offload_index=offload, force_hooks=True
    )


def _offload(utils: Any, folder: str, weights: dict[str, Any]) -> None:
    """Writes the folder if it is not there, and has the page cache forget it."""
    if not Path(folder).exists():
        utils.offload_state_dict(folder, weights)
    machine.fill_or_drop(whole(map(str, Path(folder).iterdir())), cold=True)


if __name__ == "__main__":
    given = json.loads(sys.stdin.read())
    print(json.dumps({"experts": experts, "layers": layers}[given["case"]](given)), flush=True)
    os._exit(0)
