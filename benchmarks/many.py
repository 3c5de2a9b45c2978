"""Time many small tensors into NumPy, against `safetensors.numpy.load_file`.

    python -m benchmarks.many [--counts 10000 100000 1000000] [--rounds 7] [--json FILE]

Files of tensors of 1 KiB, in the page cache. Each round loads every file once with each of the two,
in turns and in fresh processes, after a first load of ten tensors. Prints the best and the median
of seconds and CPU seconds, microseconds of CPU a tensor, and the ratios. Wants memory and disk of
three times the largest file: 4 GB for a million tensors.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from benchmarks import ROOT

CLOCK = """
import gc, json, resource, sys, time
import ml_dtypes, numpy
{}
path, warmup = sys.argv[1:]
load(warmup)
gc.collect()
before, start = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
arrays = load(path)
seconds, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_SELF)
cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
print(json.dumps([len(arrays), seconds, cpu]))
"""
LOADERS = {
    "safetensors": "from safetensors.numpy import load_file as load",
    "mfload": "import mfload\ndef load(path): return mfload.load(path, 'numpy')",
}

Sample = tuple[float, float]
"""Seconds, and CPU seconds."""


def write(path: Path, count: int) -> None:
    """Writes a file of so many tensors of 1 KiB."""
    from safetensors.numpy import save_file

    data = np.frombuffer(np.random.default_rng(0).bytes(count << 10), np.float32)
    save_file({f"t.{n}": each for n, each in enumerate(data.reshape(count, 16, 16))}, path)


def run(loader: str, path: Path, count: int, warmup: Path) -> Sample:
    """One load in a process of its own."""
    found = subprocess.run(
        [sys.executable, "-c", CLOCK.format(LOADERS[loader]), str(path), str(warmup)],
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if found.returncode:
        raise SystemExit(f"{loader}: {found.stderr[-2000:]}")
    loaded, seconds, cpu = json.loads(found.stdout)
    if loaded != count:
        raise SystemExit(f"{loader} loaded {loaded} tensors of {count}")
    return seconds, cpu


def table(samples: dict[int, dict[str, list[Sample]]]) -> str:
    """The figures as a table in Markdown."""
    rows = [
        "| tensors | | best s | median s | best CPU s | CPU µs a tensor | ratio of the best CPU |",
        "|--:|---|--:|--:|--:|--:|--:|",
    ]
    for count, both in samples.items():
        peer = min(cpu for _, cpu in both["safetensors"])
        for loader, found in both.items():
            seconds, cpu = zip(*found, strict=True)
            rows.append(
                f"| {count:,} | {loader} | {min(seconds):.3f} | {statistics.median(seconds):.3f} "
                f"| {min(cpu):.3f} | {min(cpu) / count * 1e6:.2f} | {min(cpu) / peer:.2f} |"
            )
    return "\n".join(rows)


def main(arguments: list[str] | None = None) -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--counts", type=int, nargs="+", default=[10_000, 100_000, 1_000_000])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(arguments)
    samples: dict[int, dict[str, list[Sample]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        warmup = Path(folder, "warmup.safetensors")
        write(warmup, 10)
        for count in given.counts:
            path = Path(folder, "many.safetensors")
            write(path, count)
            samples[count] = {loader: [] for loader in LOADERS}
            for _ in range(given.rounds):
                for loader, found in samples[count].items():
                    found.append(run(loader, path, count, warmup))
    print(table(samples))
    if given.json is not None:
        given.json.write_text(json.dumps(samples, indent=1))


if __name__ == "__main__":
    main()
