"""What `mfload.stream` costs beside `mfload.load`, both keeping all tensors.

Run as `python -m benchmarks.streams [MB] [numpy torch …]`. The two take turns in processes of their
own; files are in the page cache, and every page of the result is touched.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

_ROUNDS = 9
_CHILD = """
import importlib, resource, sys, time
import numpy as np, mfload
way, framework, folder = sys.argv[1:]
importlib.import_module(framework)
ways = {"load": mfload.load, "stream": lambda *given: dict(mfload.stream(*given))}
ways[way](folder + "/tiny.safetensors", framework)
# The system may have taken pages back: they are touched before the clock starts.
np.ones(2 << 27).sum()
before = resource.getrusage(resource.RUSAGE_SELF)
start = time.perf_counter()
arrays = ways[way](folder + "/model", framework)
for each in arrays.values():
    each.reshape(-1)[::2048].sum()
took = time.perf_counter() - start
after = resource.getrusage(resource.RUSAGE_SELF)
print(took, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
"""


def main(megabytes: int, frameworks: list[str]) -> None:
    """Prints seconds and CPU seconds, best and median."""
    chance = np.random.default_rng(0)
    found: dict[tuple[str, str], list[Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder, "model")
        place.mkdir()
        save_file({"a": np.zeros(1, np.float32)}, Path(folder, "tiny.safetensors"))
        for number in range(
            3
        ):  # Each with 30 matrices of 11 MB for 1000 MB, and a norm beside each.
            shape = 2048, megabytes * 1_000_000 // 90 // 4096
            arrays: dict[str, Any] = {}
            for n in range(30):
                bits = np.frombuffer(chance.bytes(shape[0] * shape[1] * 2), ml_dtypes.bfloat16)
                arrays[f"layer.{number}.{n}"] = bits.reshape(shape)
                arrays[f"layer.{number}.{n}.norm"] = bits[:4096]
            save_file(arrays, place / f"{number}.safetensors")
            del arrays
        for _ in range(_ROUNDS):
            for framework in frameworks:
                for way in ("load", "stream"):
                    made = subprocess.run(
                        [sys.executable, "-c", _CHILD, way, framework, folder],
                        check=True,
                        capture_output=True,
                        text=True,
                    )
                    runs = found.setdefault((framework, way), [])
                    runs.append(list(map(float, made.stdout.split())))
    for (framework, way), runs in found.items():
        wall, cpu = zip(*runs, strict=True)
        row = {
            "framework": framework,
            "way": way,
            "best": round(min(wall), 4),
            "median": round(statistics.median(wall), 4),
            "cpu": round(min(cpu), 4),
        }
        print(json.dumps(row))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1000, sys.argv[2:] or ["numpy", "torch"])
