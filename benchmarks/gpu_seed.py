"""A seed that holds a checkpoint on a device, until its standard input ends.

python -m benchmarks.gpu_seed DEVICE FILE …
"""

from __future__ import annotations

import os
import sys

import mfload
from benchmarks.calls import as_options
from benchmarks.gpu_memory import HOST


def main() -> None:
    """Loads, publishes, and prints the URL."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    device, *files = sys.argv[1:]
    # Memory of mfload's own is made to be shared; a pool's may not be.
    given = {"framework": "torch", "device": device, "allocator": "mfload"}
    arrays = mfload.load(files, **as_options(given))
    transports = ("memfd",) if device == HOST else ("cuda_ipc",)
    with mfload.publish(arrays, model="benchmark", transports=transports) as seed:
        print(seed.url, file=answers, flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
