"""A NumPy archive beside a safetensors file of the same bytes, and beside `numpy.load`.

Run as `python -m benchmarks.archives [MB] [stored fortran swapped deflated]`. Each way takes turns
in processes of its own; files are in the page cache, and every page of the result is touched.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

_ROUNDS = 7
_CHILD = """
import resource, sys, time
import numpy as np, ml_dtypes
way, path = sys.argv[1:]
if way == "mfload":
    import mfload
    mfload.load(sys.argv[2] + ".tiny.npz", "numpy")
else:
    from safetensors.numpy import load_file
# The system may have taken pages back: they are touched before the clock starts.
np.ones(2 << 27).sum()
before = resource.getrusage(resource.RUSAGE_SELF)
start = time.perf_counter()
if way == "mfload":
    arrays = mfload.load(path, "numpy")
elif way == "numpy":
    with np.load(path) as opened:
        arrays = {name: opened[name] for name in opened}
else:
    arrays = load_file(path)
for each in arrays.values():
    each.reshape(-1, order="A").view(np.uint8)[::4096].sum()
took = time.perf_counter() - start
after = resource.getrusage(resource.RUSAGE_SELF)
print(took, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
"""


def main(megabytes: int, kinds: list[str]) -> None:
    """Prints seconds and CPU seconds, best and median."""
    chance = np.random.default_rng(0)
    count = 16
    shape = (1024, megabytes * 1_000_000 // count // 4096)
    arrays: dict[str, Any] = {
        f"layer.{n}": chance.standard_normal(shape, np.float32) for n in range(count)
    }
    with tempfile.TemporaryDirectory() as folder:
        from safetensors.numpy import save_file

        place = Path(folder)
        save_file(arrays, place / "x.safetensors")
        np.savez(place / "stored.npz", **arrays)
        fortran: dict[str, Any] = {name: np.asfortranarray(each) for name, each in arrays.items()}
        np.savez(place / "fortran.npz", **fortran)
        swapped: dict[str, Any] = {name: each.astype(">f4") for name, each in arrays.items()}
        np.savez(place / "swapped.npz", **swapped)
        if "deflated" in kinds:
            np.savez_compressed(place / "deflated.npz", **arrays)
        ways = [(way, name) for name in kinds for way in ("mfload", "numpy")]
        files = [(way, place / f"{name}.npz") for way, name in ways]
        files[:0] = [("mfload", place / "x.safetensors"), ("safetensors", place / "x.safetensors")]
        for _, path in files:
            np.savez(f"{path}.tiny.npz", a=np.zeros(1))
        found: dict[tuple[str, str], list[Any]] = {}
        for _ in range(_ROUNDS):
            for way, path in files:
                made = subprocess.run(
                    [sys.executable, "-c", _CHILD, way, str(path)],
                    check=True,
                    capture_output=True,
                    text=True,
                )
                found.setdefault((way, path.name), []).append(list(map(float, made.stdout.split())))
        for (way, name), runs in found.items():
            wall, cpu = zip(*runs, strict=True)
            row = {
                "way": way,
                "file": name,
                "best": round(min(wall), 4),
                "median": round(statistics.median(wall), 4),
                "cpu": round(min(cpu), 4),
            }
            print(json.dumps(row))


if __name__ == "__main__":
    kinds = sys.argv[2:] or ["stored", "fortran", "swapped", "deflated"]
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 128, kinds)
