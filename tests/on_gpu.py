"""Runs the tests that need a GPU: `python tests/on_gpu.py`, or `make gpu PYTHON=python3`.

On a machine with one, with whatever of the frameworks this Python has. A process each: most
frameworks take hold of a GPU's memory when they first touch it, and TensorFlow and Paddle crash
one another.
"""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NEEDS = {
    "tests/devices": ("cupy",),
    "tests/peer/test_cuda_ipc_gpu.py": ("cupy",),
    "tests/frameworks/test_cupy.py": ("cupy",),
    "tests/frameworks/test_torch.py": ("cupy", "torch"),
    "tests/frameworks/test_torch_lazy.py": ("cupy", "torch"),
    "tests/frameworks/test_torch_dcp.py": ("cupy", "torch"),
    "tests/frameworks/test_torch_into.py": ("cupy", "torch"),
    "tests/compat/test_transformers.py": ("cupy", "torch", "transformers", "accelerate"),
    "tests/worlds/test_torch_devices.py": ("cupy", "torch"),
    "tests/frameworks/test_jax.py": ("cupy", "jax"),
    "tests/frameworks/test_jax_landing.py": ("cupy", "jax"),
    "tests/frameworks/test_several.py": ("cupy", "torch", "jax"),
    "tests/frameworks/test_tensorflow.py": ("cupy", "tensorflow"),
    "tests/frameworks/test_paddle.py": ("cupy", "paddle"),
}
_NOTHING_CHOSEN = 5  # pytest's status where no test was.


def main() -> int:
    """The exit status, 1 where a suite failed; tells of those, and of what was left out."""
    told: list[str] = []
    failed = 0
    for suite, requests in NEEDS.items():
        missing = [name for name in requests if find_spec(name) is None]
        if missing:
            told.append(f"{suite}: SKIPPED, not installed: {', '.join(missing)}")
            continue
        print(f"== {suite}", flush=True)
        command = [sys.executable, "-m", "pytest", "-m", "gpu", suite]
        status = subprocess.run(command, cwd=ROOT, check=False).returncode
        if status not in (0, _NOTHING_CHOSEN):
            failed += 1
            told.append(f"{suite}: FAILED, status {status}")
    print("\n".join(told), flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
