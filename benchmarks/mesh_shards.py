"""What a shard costs: the same tensors on meshes of 8 and of 128 CPU devices.

    python -m benchmarks.mesh_shards

CPU time of a load, best of several in one process for each mesh: what is slower was disturbed. The
bytes are the same, so what more a load onto 128 devices takes is the price of its shards.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

TENSORS, SIDE = 100, 1024
DEVICES = (8, 128)
ROUNDS = 7


def _write(folder: str) -> None:
    import ml_dtypes
    import numpy as np
    from safetensors.numpy import save_file

    part = np.arange(SIDE * SIDE, dtype=np.uint16).view(ml_dtypes.bfloat16).reshape(SIDE, SIDE)
    save_file({f"w{n}": part for n in range(TENSORS)}, Path(folder) / "model.safetensors")


def _measure(folder: str, layout: str) -> float:
    """CPU seconds of a load onto all devices of this process."""
    import jax
    import numpy as np
    from jax.sharding import Mesh, PartitionSpec

    import mfload

    mesh = Mesh(np.array(jax.devices()), ("devices",))
    spec = PartitionSpec("devices") if layout == "rows" else PartitionSpec(None, "devices")
    found: list[float] = []
    for _ in range(ROUNDS + 1):
        start = time.process_time()
        arrays = mfload.load(folder, framework="jax", mesh=mesh, shardings=spec)
        found.append(time.process_time() - start)
        del arrays
    return min(found[1:])


def _child(folder: str, layout: str, devices: int) -> float:
    flags = f"--xla_force_host_platform_device_count={devices}"
    command = [sys.executable, "-m", "benchmarks.mesh_shards", folder, layout]
    environment = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    run = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    return float(run.stdout)


def main() -> None:
    """Prints a table."""
    if len(sys.argv) > 1:
        print(_measure(*sys.argv[1:]))
        return
    with tempfile.TemporaryDirectory() as folder:
        _write(folder)
        few, many = DEVICES
        for layout in ("rows", "columns"):
            least, most = (_child(folder, layout, n) for n in DEVICES)
            more = (most - least) / (TENSORS * (many - few)) * 1e6
            print(
                f"{layout:8} {few} devices {least * 1e3:6.1f} ms, {many} devices "
                f"{most * 1e3:6.1f} ms: {more:.1f} µs of CPU for each shard more"
            )


if __name__ == "__main__":
    main()
