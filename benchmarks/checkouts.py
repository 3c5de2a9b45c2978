"""Time one checkout of mfload against another: the same loads, in turns, in fresh processes.

    python -m benchmarks.checkouts OTHER [--rounds 15] [--json FILE]

OTHER is the root of the other checkout. Each round runs every task once with each of the two, in
random order. Prints the best and the median of seconds and CPU seconds, and the ratio of the best
times. Wants a quiet machine and 4 GB of disk.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import ROOT

# `prime` touches as much memory as a load takes, right before the clock starts: the host of a
# virtual machine takes freed pages back within seconds, and hands them out again slowly. A full
# collection of garbage, due after large imports (0.08 s with torch), hits neither by chance.
PREPARE = """
import gc, json, mmap, os, resource, sys, time
def prime():
    gc.collect()
    for advice in (mmap.MADV_NOHUGEPAGE, mmap.MADV_HUGEPAGE):
        with mmap.mmap(-1, 3 << 29, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as pages:
            pages.madvise(advice)
            pages.madvise(23)  # MADV_POPULATE_WRITE
def clocks():
    used = resource.getrusage(resource.RUSAGE_SELF)
    return time.perf_counter(), used.ru_utime + used.ru_stime
def done(start, end):
    print(json.dumps([end[0] - start[0], end[1] - start[1]]))
folder, small = sys.argv[1:3]
def evict():
    for name in os.listdir(folder):
        fd = os.open(os.path.join(folder, name), os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)
"""
LOAD = """
import mfload
mfload.load(small, framework={0!r})
{1}
prime()
start = clocks()
arrays = mfload.load(folder, framework={0!r})
done(start, clocks())
"""
MESH = """
import jax, numpy as np, mfload
from jax.sharding import Mesh, PartitionSpec as P
mesh = Mesh(np.array(jax.devices()), ("x",))
mfload.load(small, framework="jax", mesh=mesh, shardings={0})
prime()
start = clocks()
arrays = jax.block_until_ready(mfload.load(folder, framework="jax", mesh=mesh, shardings={0}))
done(start, clocks())
"""
SAVE = """
import shutil, mfload
arrays = mfload.load(folder, framework="numpy")
target = folder.rstrip("/") + "-saved.safetensors"
mfload.save(mfload.load(small, framework="numpy"), target)
os.unlink(target)
start = clocks()
mfload.save(arrays, target)
end = clocks()
os.unlink(target)
done(start, end)
"""
TASKS: dict[str, tuple[str, ...]] = {
    "warm, NumPy": ("large", LOAD.format("numpy", "")),
    "warm, PyTorch": ("large", LOAD.format("torch", "")),
    "warm, JAX": ("large", LOAD.format("jax", "")),
    "warm, TensorFlow": ("large", LOAD.format("tensorflow", "")),
    "cold, NumPy": ("large", LOAD.format("numpy", "evict()")),
    "cold, PyTorch": ("large", LOAD.format("torch", "evict()")),
    "cold, TensorFlow": ("large", LOAD.format("tensorflow", "evict()")),
    "cold, then again, NumPy": ("large", LOAD.format("numpy", "evict()"), LOAD.format("numpy", "")),
    "mesh of 8, rows": ("large", MESH.format('P("x")')),
    "mesh of 8, columns": ("large", MESH.format('P(None, "x")')),
    "20,000 tiny tensors, NumPy": ("tiny", LOAD.format("numpy", "")),
    "20,000 tiny tensors, JAX": ("tiny", LOAD.format("jax", "")),
    "save, NumPy": ("large", SAVE),
}
"""Which folder each task reads, and the code of its processes, one after the other."""


def write(folder: Path) -> None:
    """Writes a checkpoint of 1 GB in three files, one of 20,000 small tensors, and a little one."""
    import ml_dtypes
    from safetensors.numpy import save_file

    rng = np.random.default_rng(0)

    def noise(*shape: int) -> Any:
        return np.frombuffer(rng.bytes(2 * int(np.prod(shape))), ml_dtypes.bfloat16).reshape(shape)

    for name in ("large", "tiny", "little"):
        (folder / name).mkdir()
    for part in range(3):
        tensors = {f"{part}.{n}.w": noise(2048, 2048) for n in range(39)}
        tensors |= {f"{part}.{n}.v": noise(64, 1024) for n in range(39)}
        save_file(tensors, folder / f"large/model-{part}.safetensors")
    tiny = {f"t.{n}": noise(8, 32) for n in range(20_000)}
    save_file(tiny, folder / "tiny/model.safetensors")
    save_file({"w": noise(64, 64)}, folder / "little/model.safetensors")
    os.sync()


def run(checkout: Path, task: str, folder: Path) -> tuple[float, float]:
    """Seconds and CPU seconds of a task, in processes of its own."""
    where, *codes = TASKS[task]
    env = os.environ | {
        "PYTHONPATH": str(checkout),
        "OMP_NUM_THREADS": "1",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8" if "mesh" in task else "",
    }
    seconds = cpu = 0.0
    for code in codes:
        found = subprocess.run(
            [sys.executable, "-c", PREPARE + code, f"{folder / where}/", f"{folder / 'little'}/"],
            env=env,
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
        )
        if found.returncode:
            raise SystemExit(f"{checkout}: {task}\n{found.stderr[-2000:]}")
        used = json.loads(found.stdout.splitlines()[-1])
        seconds, cpu = seconds + used[0], cpu + used[1]
    return seconds, cpu


def table(samples: dict[str, dict[str, list[tuple[float, float]]]]) -> str:
    """The figures as a table in Markdown; `before` is the other checkout."""
    rows = [
        "| | best s before | now | ratio | median s before | now | CPU s before | now |",
        "|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for task, both in samples.items():
        best, middle, cpu = (
            [f(s[part] for s in both[who]) for who in ("before", "now")]
            for f, part in ((min, 0), (statistics.median, 0), (min, 1))
        )
        rows.append(
            f"| {task} | {best[0]:.4f} | {best[1]:.4f} | **{best[1] / best[0]:.2f}** "
            f"| {middle[0]:.4f} | {middle[1]:.4f} | {cpu[0]:.3f} | {cpu[1]:.3f} |"
        )
    return "\n".join(rows)


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("other", type=Path)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", default="", help="run the tasks whose names hold this")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--folder", type=Path, help="where the checkpoints go")
    given = parser.parse_args()
    checkouts = {"before": given.other.resolve(), "now": Path(ROOT)}
    chosen = [task for task in TASKS if given.only in task]
    samples: dict[str, dict[str, list[tuple[float, float]]]] = {
        task: {"before": [], "now": []} for task in chosen
    }
    with tempfile.TemporaryDirectory(dir=given.folder) as made:
        folder = Path(made)
        write(folder)
        for number in range(given.rounds):
            turns = [(task, who) for task in chosen for who in checkouts]
            random.Random(number).shuffle(turns)
            for task, who in turns:
                samples[task][who].append(run(checkouts[who], task, folder))
            print(f"round {number + 1} of {given.rounds}", file=sys.stderr, flush=True)
    print(table(samples))
    if given.json is not None:
        given.json.write_text(json.dumps(samples, indent=1))


if __name__ == "__main__":
    main()
