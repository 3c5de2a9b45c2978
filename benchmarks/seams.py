"""Measure start-up under seams of other libraries, against their own loaders.

    python -m benchmarks.seams [--gb 1] [--rounds 5] [--seams dcp,transformers] [--out DIR]

Prints a table: seconds of the slower process, the best and the median, and the most memory that
one held beside its weights; with `--out` they go into `seams.json` there, beside those of other
seams, and `seams.png` shows them all. Loaders alternate, each time in fresh processes. Wants
PyTorch and transformers (`requirements/transformers.txt`) and a quiet machine.
"""

from __future__ import annotations

import argparse
import functools
import json
import mmap
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import ROOT, seams_plot
from benchmarks.mesh_processes import free_port
from mfload.bench import machine

_POPULATE_READ, _BLOCK = 22, 16 << 20


def write(directory: Path, gb: float) -> None:
    """A Llama of so many GB in bf16, in files of a fourth of that."""
    import torch
    import transformers

    layers = max(1, round(gb * 1e9 / 2 / (4 * 1024 * 1024 + 3 * 1024 * 4096)))
    given = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": layers}
    config = transformers.LlamaConfig(**given, num_attention_heads=16, vocab_size=8192)
    torch.set_default_dtype(torch.bfloat16)
    model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(directory, max_shard_size=f"{max(1, int(gb * 250))}MB")


def resident(field: str) -> int:
    """Bytes of memory of this process, by a field of its status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(field))


def with_transformers(ours: bool, path: Path, ranks: int) -> list[Any]:
    """A model of transformers, whole in each process."""
    import transformers

    from mfload.compat.transformers import from_pretrained

    cls = transformers.LlamaForCausalLM
    made = from_pretrained(cls, path) if ours else cls.from_pretrained(path)
    return [each.data for each in made.parameters()]


def with_dcp(ours: bool, path: Path, ranks: int, exchange: Any = "auto") -> list[Any]:
    """A state dict of torch.distributed.checkpoint: of several processes, the slices of each."""
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, empty

    import mfload
    from mfload.compat.dcp import HuggingFaceReader

    options = mfload.Options(exchange=exchange if ranks > 1 else "auto")
    theirs = dcp.HuggingFaceStorageReader(str(path))
    reader: Any = HuggingFaceReader(path, options=options) if ours else theirs
    mesh = init_device_mesh("cpu", (ranks,)) if ranks > 1 else None
    state: dict[str, Any] = {}
    for name, row in reader.read_metadata().state_dict_metadata.items():
        given: dict[str, Any] = {"dtype": row.properties.dtype}
        if mesh is None:
            state[name] = torch.empty(row.size, **given)
        else:
            dim = int("o_proj" in name or "down_proj" in name)
            placed = [Replicate() if exchange == "once" else Shard(dim)]
            state[name] = empty(row.size, device_mesh=mesh, placements=placed, **given)
    dcp.load(state, storage_reader=reader)
    return [each.to_local() if mesh is not None else each for each in state.values()]


def with_vllm(ours: bool, path: Path, ranks: int) -> list[Any]:
    """A model of vLLM: of several processes, the part of each."""
    from benchmarks import seams_vllm

    return seams_vllm.load(ours, path, ranks)


def with_sglang(ours: bool, path: Path, ranks: int) -> list[Any]:
    """The layers of a model of SGLang: of several processes, the part of each."""
    from benchmarks import seams_sglang

    return seams_sglang.load(ours, path, ranks)


SEAMS: dict[str, Callable[[bool, Path, int], list[Any]]] = {
    "transformers": with_transformers,
    "dcp": with_dcp,
    # Whole tensors in each process, of which each byte is read once.
    "dcp-once": functools.partial(with_dcp, exchange="once"),
    "vllm": with_vllm,  # In the environment of `make vllm`.
    "sglang": with_sglang,  # In that of `make sglang`.
}
"""What makes the weights of a process: by mfload or not, of a directory, in so many processes."""


def plain(job: dict[str, Any]) -> float:
    """Seconds to read a process's part of the files: what no loader can do without.

    From the disk through a map, and nothing else; from the page cache into new memory.
    """
    rank, ranks, total = job["rank"], job["ranks"], 0
    parts: list[tuple[int, int, int]] = []
    for path in sorted(Path(job["large"]).glob("*.safetensors")):
        size, fd = path.stat().st_size, os.open(path, os.O_RDONLY)
        start, stop = (size * n // ranks // mmap.PAGESIZE * mmap.PAGESIZE for n in (rank, rank + 1))
        parts.append((fd, start, size if rank + 1 == ranks else stop))
        total += parts[-1][2] - start
    begun = time.perf_counter()
    if job["cold"]:
        for fd, start, stop in parts:
            held = mmap.mmap(fd, stop - start, prot=mmap.PROT_READ, offset=start)
            held.madvise(_POPULATE_READ)
        return time.perf_counter() - begun
    # By default it would be shared, and such memory has no huge pages.
    memory = mmap.mmap(-1, total, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    view, blocks, at = memoryview(memory), list[tuple[int, int, Any]](), 0
    for fd, start, stop in parts:
        for first in range(start, stop, _BLOCK):
            nbytes = min(_BLOCK, stop - first)
            blocks.append((fd, first, view[at : at + nbytes]))
            at += nbytes
    with ThreadPoolExecutor(max(1, len(os.sched_getaffinity(0)) // ranks)) as pool:
        for got, (_, _, place) in zip(
            pool.map(lambda each: os.preadv(each[0], [each[2]], each[1]), blocks),
            blocks,
            strict=True,
        ):
            assert got == place.nbytes
    return time.perf_counter() - begun


def child(job: dict[str, Any]) -> None:
    """Loads a small model, waits, loads the large one and says what it took."""
    import warnings

    import torch
    import torch.distributed as dist

    warnings.simplefilter("ignore")
    if job["ranks"] > 1:
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(job["port"])}
        dist.init_process_group("gloo", rank=job["rank"], world_size=job["ranks"])
    load, ours = SEAMS[job["seam"]], job["loader"] == "mfload"
    load(ours, Path(job["small"]), job["ranks"])
    machine.prime(2 * sum(each.stat().st_size for each in Path(job["large"]).iterdir()))
    if dist.is_initialized():
        dist.barrier()
    if job["loader"] == "plain":
        print(json.dumps({"seconds": plain(job), "over": 0}), flush=True)
        if dist.is_initialized():
            dist.barrier()
        os._exit(0)
    machine.reset_peak()
    before, start = resident("VmRSS"), time.perf_counter()
    weights = load(ours, Path(job["large"]), job["ranks"])
    for each in weights:  # A byte of every page.
        each.view(torch.uint8).flatten()[::4096].sum().item()
    seconds = time.perf_counter() - start
    over = resident("VmHWM") - before - sum(each.nbytes for each in weights)
    print(json.dumps({"seconds": seconds, "over": over}), flush=True)
    if dist.is_initialized():
        dist.barrier()  # The first process keeps the store, which the others may still ask.
    os._exit(0)


def take(job: dict[str, Any], cold: bool) -> tuple[float, int]:
    """Measures once: seconds of the slower process, bytes of the larger one."""
    for path in Path(job["large"]).glob("*.safetensors"):
        with path.open("rb") as file:
            if cold:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            else:
                while file.read(1 << 24):
                    pass
    port, started = free_port(), list[Any]()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    environment["LOCAL_WORLD_SIZE"] = str(job["ranks"])  # As torchrun says.
    for rank in range(job["ranks"]):
        text = json.dumps({**job, "rank": rank, "port": port, "cold": cold})
        command = [sys.executable, "-m", "benchmarks.seams", "--child", text]
        given: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        started.append(subprocess.Popen(command, env=environment, cwd=ROOT, **given))
    said: list[dict[str, Any]] = []
    for process in started:
        out, log = process.communicate(timeout=300)
        if process.returncode:
            raise RuntimeError(log[-2000:])
        said.append(json.loads(out.splitlines()[-1]))
    return max(each["seconds"] for each in said), max(each["over"] for each in said)


def main() -> int:
    """Runs the command; returns the exit status, 0."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--gb", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seams", default="transformers,dcp")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--child")
    asked = parser.parse_args()
    if asked.child:
        child(json.loads(asked.child))
    with tempfile.TemporaryDirectory() as directory:
        paths = {name: str(Path(directory) / name) for name in ("small", "large")}
        for name, gb in (("small", 0.02), ("large", asked.gb)):
            write(Path(paths[name]), gb)
        print(
            "| seam | ranks | cache | plain reads, s | theirs, s | mfload, s | ratio | "
            "theirs, MB | mfload, MB |\n|---|--:|---|--:|--:|--:|--:|--:|--:|"
        )
        for seam in asked.seams.split(","):
            seconds: seams_plot.Found = {}
            for ranks in (1, 2):
                for cold in (False, True):
                    found: dict[str, list[tuple[float, int]]] = {
                        "plain": [],
                        "theirs": [],
                        "mfload": [],
                    }
                    for _ in range(asked.rounds):
                        for loader, samples in found.items():
                            job = {"seam": seam, "loader": loader, "ranks": ranks, **paths}
                            samples.append(take(job, cold))
                    seconds[f"{ranks} {'cold' if cold else 'warm'}"] = {
                        name: [round(each[0], 4) for each in some] for name, some in found.items()
                    }
                    best = [min(each[0] for each in found[name]) for name in found]
                    over = [max(each[1] for each in found[name]) / 1e6 for name in found][1:]
                    middle = [median(each[0] for each in found[name]) for name in found]
                    cells = [seam, ranks, "cold" if cold else "warm"]
                    cells += [f"{s:.2f} ({m:.2f})" for s, m in zip(best, middle, strict=True)]
                    cells += [f"{best[1] / best[2]:.2f}", *(f"{each:.0f}" for each in over)]
                    print(f"| {' | '.join(map(str, cells))} |", flush=True)
            if asked.out is not None:
                facts = machine.facts(paths["large"])
                said = [facts[name] for name in ("processor", "cores", "kernel", "file system")]
                seams_plot.keep(asked.out, seam, ", ".join(said), seconds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
