"""What the first load of a process costs beside the import of its framework.

    python -m benchmarks.import_time [--rounds N] [--frameworks numpy,torch]

Each row is timed in fresh processes, which take turns: milliseconds of CPU and of the clock, best
and median. What NumPy, ml_dtypes and the framework take to import is not counted. Compiled modules
are kept in a folder of their own, as an installed wheel has them.
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

MODULES = {"numpy": "numpy", "torch": "torch", "jax": "jax.numpy", "tensorflow": "tensorflow"}
PEERS = {"numpy": "numpy", "torch": "torch", "jax": "flax", "tensorflow": "tensorflow"}
IMPORTS = {
    "import mfload": "import mfload",
    "mfload.load": "import mfload; mfload.load",
    "mfload.Options()": "import mfload; mfload.Options()",
}
CHILD = """
import numpy, ml_dtypes, {module}, sys, time
before, wall, cpu = len(sys.modules), time.perf_counter(), time.process_time()
{statement}
wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
names = [name for name in sys.modules if name.partition(".")[0] == "mfload"]
print(wall * 1e3, cpu * 1e3, len(sys.modules) - before, len(names))
"""


def write(path: Path) -> None:
    """A file with one tensor of 256 bytes, as the writer of safetensors lays it out."""
    header = {"w": {"dtype": "F32", "shape": [8, 8], "data_offsets": [0, 256]}}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(256))


def statements(path: Path, frameworks: list[str]) -> dict[str, tuple[str, str]]:
    """What is timed, by the name of its row: the module that is imported before, and the code."""
    made = {name: ("numpy", code) for name, code in IMPORTS.items()}
    for each in frameworks:
        peer = f"safetensors.{PEERS[each]}"
        ours = f"import mfload; mfload.load({str(path)!r}, {each!r})"
        made[f"mfload, first load, {each}"] = MODULES[each], ours
        theirs = f"import {peer}; {peer}.load_file({str(path)!r})"
        made[f"safetensors, first load, {each}"] = MODULES[each], theirs
    return made


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--frameworks", default="numpy")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "w.safetensors"
        write(path)
        rows = statements(path, asked.frameworks.split(","))
        env = {**os.environ, "PYTHONPYCACHEPREFIX": f"{folder}/cache"}
        env.pop("PYTHONDONTWRITEBYTECODE", None)
        found: dict[str, list[list[float]]] = {name: [] for name in rows}
        for number in range(asked.rounds + 1):
            for name, (module, statement) in rows.items():
                code = CHILD.format(module=module, statement=statement)
                command = [sys.executable, "-c", code]
                run = subprocess.run(command, capture_output=True, text=True, check=True, env=env)
                if number:  # The first compiles.
                    found[name].append(list(map(float, run.stdout.split()[-4:])))
    print(f"{'':30} CPU ms: best median   clock: best median   modules   of mfload")
    for name, runs in found.items():
        wall, cpu, modules, own = zip(*runs, strict=True)
        print(
            f"{name:30} {min(cpu):12.1f} {statistics.median(cpu):6.1f} {min(wall):13.1f} "
            f"{statistics.median(wall):6.1f} {modules[0]:9.0f} {own[0]:11.0f}"
        )


if __name__ == "__main__":
    main()
