"""Measure loading into CUDA tensors under seams of other libraries, against their own ways.

    python -m benchmarks.gpu_seams [--gib 2] [--rounds 5]

Needs an NVIDIA GPU, CuPy, PyTorch and safetensors; transformers takes part where it is installed.
Theirs and ours take turns in one process, from a warm page cache, and every value is compared.
Prints a table, best and median, and ends with status 1 if a value differs. `--device cpu` rehearses
it on host arrays.
"""

from __future__ import annotations

import argparse
import gc
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import safetensors
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp

import mfload
from benchmarks import gpu_facts
from benchmarks.checkpoint import write_llama
from mfload.compat import safetensors as compat
from mfload.compat.dcp import HuggingFaceReader
from mfload.compat.safetensors import torch as compat_torch

Way = Callable[[], dict[str, Any]]


def whole(path: Path, device: str) -> dict[str, tuple[Way, Way]]:
    """Ways to read one file: theirs and ours."""

    def tensors(module: Any) -> dict[str, Any]:
        with module.safe_open(path, framework="pt", device=device) as opened:
            return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118

    def halves(module: Any) -> dict[str, Any]:
        with module.safe_open(path, framework="pt", device=device) as opened:
            parts = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
            sizes = {name: part.get_shape() for name, part in parts.items()}
            return {name: parts[name][: -(-n[0] // 2)] for name, n in sizes.items() if n}

    def checkpoint(reader: Any) -> dict[str, Any]:
        rows = reader.read_metadata().state_dict_metadata.items()
        state = {
            name: torch.empty(row.size, dtype=row.properties.dtype, device=device)
            for name, row in rows
        }
        dcp.load(state, storage_reader=reader, no_dist=True)
        return state

    at, folder = str(path), str(path.parent)
    return {
        "load_file": (
            lambda: safetensors.torch.load_file(at, device=device),
            lambda: compat_torch.load_file(at, device=device),
        ),
        "safe_open, tensor by tensor": (lambda: tensors(safetensors), lambda: tensors(compat)),
        "safe_open, halves": (lambda: halves(safetensors), lambda: halves(compat)),
        "torch's distributed checkpoints": (
            lambda: checkpoint(dcp.HuggingFaceStorageReader(folder)),
            lambda: checkpoint(HuggingFaceReader(folder)),
        ),
    }


def parts(path: Path, device: str) -> dict[str, tuple[Way, Way]]:
    """Halves of tensors, copied into parameters that are there, as weight loaders of vLLM do."""
    made: dict[str, tuple[Way, Way]] = {}
    with safetensors.safe_open(path, framework="pt") as opened:
        shapes = {name: opened.get_slice(name).get_shape() for name in opened.keys()}  # noqa: SIM118
    for what, dim in (("rows", 0), ("columns", -1)):
        targets: dict[str, Any] = {}
        for name, shape in shapes.items():
            if half := list(shape):
                half[dim] //= 2
                targets[name] = torch.empty(half, dtype=torch.bfloat16, device=device)

        def fill(name: str, tensor: Any, targets: Any = targets, dim: int = dim) -> None:
            if name in targets:
                length = targets[name].shape[dim]
                targets[name].copy_(tensor.narrow(dim, tensor.shape[dim] - length, length))

        def theirs(fill: Any = fill, targets: Any = targets) -> dict[str, Any]:
            emptied(targets)
            with safetensors.safe_open(path, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118
                    fill(name, opened.get_tensor(name))
            return dict(targets)

        def ours(fill: Any = fill, targets: Any = targets) -> dict[str, Any]:
            emptied(targets)
            with mfload.stream(path, "torch", lazy=True) as tensors:
                for name, tensor in tensors:
                    fill(name, tensor)
            return dict(targets)

        made[f"{what} into parameters"] = theirs, ours
    return made


def emptied(targets: dict[str, Any]) -> None:
    """Takes away what the other way left; both need as long for it."""
    for each in targets.values():
        each.zero_()


def model(folder: Path, gib: float, device: str) -> dict[str, tuple[Way, Way]]:
    """A model of transformers."""
    import transformers

    from benchmarks.seams import write
    from mfload.compat.transformers import from_pretrained

    write(folder, gib)
    cls = transformers.LlamaForCausalLM
    return {
        "transformers": (
            lambda: cls.from_pretrained(folder, device_map=device).state_dict(),
            lambda: from_pretrained(cls, folder, device_map=device).state_dict(),
        )
    }


def _bits(tensor: Any) -> Any:
    return tensor.reshape(-1).view(torch.uint8)


def timed(way: Way, settle: Callable[[], object]) -> tuple[float, dict[str, Any]]:
    """Seconds, and what came."""
    gc.collect()
    settle()
    start = time.perf_counter()
    made = way()
    settle()
    return time.perf_counter() - start, made


def compare(what: str, pair: tuple[Way, Way], rounds: int, settle: Callable[[], object]) -> bool:
    """Prints a row of the table; whether all values were the same."""
    seconds: tuple[list[float], list[float]] = [], []
    same = True
    for _ in range(rounds + 1):
        first, theirs = timed(pair[0], settle)
        theirs = {name: each.clone() for name, each in theirs.items()}
        second, ours = timed(pair[1], settle)
        same &= theirs.keys() == ours.keys()
        same &= all(torch.equal(_bits(each), _bits(ours[name])) for name, each in theirs.items())
        for found, one in zip(seconds, (first, second), strict=True):
            found.append(one)
        del theirs, ours
    cells = [f"{min(each[1:]):.3f} ({median(each[1:]):.3f})" for each in seconds]  # One warms up.
    ratio = min(seconds[0][1:]) / min(seconds[1][1:])
    print(f"| {what} | {cells[0]} | {cells[1]} | {ratio:.2f} | {same} |", flush=True)
    return same


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_seams")
    parser.add_argument("--gib", type=float, default=2, help="size of the checkpoints in GiB (2)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds that count (5)")
    parser.add_argument("--device", choices=("cuda:0", "cpu"), default="cuda:0")
    args = parser.parse_args(argv)
    there: str = args.device
    gpu = {} if there == "cpu" else gpu_facts.look()
    if isinstance(gpu, str):
        print(f"benchmarks.gpu_seams needs an NVIDIA GPU: {gpu}", file=sys.stderr)
        return 2
    print(f"{gpu_facts.sentence(gpu)}; PyTorch {torch.__version__}\n")
    settle = torch.cuda.synchronize if gpu else bool
    print("| | theirs, s | mfload, s | ratio | same |\n|---|--:|--:|--:|---|")
    with tempfile.TemporaryDirectory(prefix="mfload-bench-") as folder:
        largest = max(
            write_llama(Path(folder) / "files", 1, int(args.gib * 2**30)).paths,
            key=lambda path: Path(path).stat().st_size,
        )
        alone = Path(folder) / "one" / "model.safetensors"
        alone.parent.mkdir()
        alone.hardlink_to(largest)
        ways = whole(alone, there) | parts(alone, there)
        if find_spec("transformers") is not None:
            ways |= model(Path(folder) / "model", args.gib, there)
        results = [compare(what, pair, args.rounds, settle) for what, pair in ways.items()]
    return int(not all(results))


if __name__ == "__main__":
    sys.exit(main())
