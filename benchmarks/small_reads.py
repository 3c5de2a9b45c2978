"""How long it takes to get one row of 2 KiB, or a small tensor, from an opened checkpoint.

Usage: python -m benchmarks.small_reads [--rounds N] [--processes N] [--frameworks numpy,torch]

For each subject N fresh processes run one after the other; with `--processes`, so many forked
workers of one opened checkpoint read at once. In a process the subject and a bare `os.pread` with
`np.frombuffer` take turns in bursts of 100 random rows, for half a second. What is shown is the
best and the median burst of each, in microseconds a row, and the best divided by the best pread.
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
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

ROWS, WIDTH = 20_000, 512
BURST = 100
SECONDS = 0.5


def write(path: Path) -> int:
    """A file with a tensor of rows of 2 KiB, and 2,000 tensors of 2 KiB; where the data begins."""
    header: dict[str, Any] = {}
    end = 0
    shapes = {"rows": [ROWS, WIDTH]} | {f"small.{n}": [WIDTH] for n in range(2000)}
    for name, shape in shapes.items():
        start, end = end, end + 4 * int(np.prod(shape))
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    values = np.random.default_rng(0).standard_normal(end // 4, np.float32)
    path.write_bytes(len(text).to_bytes(8, "little") + text + values.tobytes())
    return 8 + len(text)


def subject(name: str, path: str, framework: str) -> Callable[[int], Any]:
    """What gets a row, or a tensor, by its number."""
    if name.startswith("safe_open"):
        import safetensors

        opened: Any = safetensors.safe_open(path, framework)
    else:
        import mfload
        from mfload.frameworks import resolve

        options = mfload.Options(engine="mmap" if "mmap" in name else "auto")
        opened = mfload.open(path, resolve(framework), options=options)
    if "tensor" in name:
        return lambda row: opened.get_tensor(f"small.{row % 2000}")
    if "handle" in name:
        part = opened.get_slice("rows")
        return lambda row: part[row]
    return lambda row: opened.get_slice("rows")[row]


def measure(name: str, get: Callable[[int], Any], path: str, start: int) -> list[float]:
    """Best and median seconds a row of the subject, and of a bare pread."""
    fd = os.open(path, os.O_RDONLY)

    def pread(row: int) -> Any:
        return np.frombuffer(os.pread(fd, 4 * WIDTH, start + row * 4 * WIDTH), np.float32)

    assert bytes(np.asarray(get(5))) == bytes(pread(ROWS + 5 if "tensor" in name else 5))
    draw = random.Random(os.getpid())
    times: list[list[float]] = [[], []]
    end = time.perf_counter() + SECONDS
    while time.perf_counter() < end:
        rows = [draw.randrange(ROWS) for _ in range(BURST)]
        for call, found in zip((get, pread), times, strict=True):
            begin = time.perf_counter()
            for row in rows:
                call(row)
            found.append((time.perf_counter() - begin) / BURST)
    return [figure for found in times for figure in (min(found), statistics.median(found))]


def forked(name: str, get: Callable[[int], Any], path: str, start: int, count: int) -> list[float]:
    """The same in workers forked after the first row was read, all at once: their medians."""
    get(0)  # What it keeps open is there when they are forked.
    pipes: list[int] = []
    for _ in range(count):
        reading, writing = os.pipe()
        if os.fork() == 0:
            os.write(writing, json.dumps(measure(name, get, path, start)).encode())
            os._exit(0)
        os.close(writing)
        pipes.append(reading)
    found: list[list[float]] = [json.loads(os.read(each, 4096)) for each in pipes]
    return [statistics.median(column) for column in zip(*found, strict=True)]


SUBJECTS = (
    "mfload row", "mfload row, kept handle", "mfload row, mmap", "mfload tensor",
    "safe_open row", "safe_open row, kept handle", "safe_open tensor",
)  # fmt: skip


def main() -> None:
    """Runs the subjects in turns, and prints a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--processes", type=int, default=0)
    parser.add_argument("--frameworks", default="numpy")
    parser.add_argument("--child", nargs=4, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.child:
        name, path, framework, start = asked.child
        run = (name, subject(name, path, framework), path, int(start))
        print(json.dumps(forked(*run, asked.processes) if asked.processes else measure(*run)))
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        start = write(path)
        cases = [(name, each) for each in asked.frameworks.split(",") for name in SUBJECTS]
        found: dict[tuple[str, str], list[list[float]]] = {case: [] for case in cases}
        for _ in range(asked.rounds):
            for case in cases:
                command = [sys.executable, "-m", "benchmarks.small_reads", "--child", case[0]]
                command += [str(path), case[1], str(start), "--processes", str(asked.processes)]
                out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
                found[case].append(json.loads(out))
    print(f"{'':28} {'framework':10}   best  median  pread: best  median  times pread")
    for (name, framework), runs in found.items():
        best, _, pread, _ = (min(column) * 1e6 for column in zip(*runs, strict=True))
        middle, usual = (statistics.median(run[n] for run in runs) * 1e6 for n in (1, 3))
        ratio = statistics.median(run[0] / run[2] for run in runs)
        row = f"{name:28} {framework:10} {best:6.1f} {middle:7.1f} {pread:12.1f} {usual:7.1f}"
        print(f"{row} {ratio:12.1f}")


if __name__ == "__main__":
    main()
