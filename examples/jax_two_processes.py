# %% [markdown]
# # JAX: two processes, one mesh
#
# Install: `pip install '.[jax]'`.
#
# On a cluster each process holds some of the devices, and all of them call `mfload.load` with the
# same arguments. Here one command starts two processes with four CPU devices each.

# %%
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import ml_dtypes
import numpy as np

import mfload

folder = tempfile.TemporaryDirectory()
path = Path(folder.name) / "model.safetensors"
random = np.random.default_rng(0)
shapes = {"up_proj.weight": (2048, 2048), "down_proj.weight": (2048, 2048), "norm.weight": (2048,)}
written = {name: random.random(shape).astype(ml_dtypes.bfloat16) for name, shape in shapes.items()}
mfload.save(written, path)
print(path.stat().st_size, "bytes on disk")

# %% [markdown]
# ## The program of each process
#
# Nothing in it but `jax.distributed.initialize` knows that there are several. `up_proj` is cut in
# columns: each process's part of it lies all over the file, in pieces of half a row.
#
# - `exchange="never"`: each process reads what its own devices need, and what lies between.
# - `exchange="once"`: every byte is read by one process, and the others get it over JAX's own
#   collectives.
# - `exchange="auto"`, the default, decides from the plan, on every process alike, and says so.

# %%
PROGRAM = """
import os
import sys
import textwrap

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"

import jax
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import mfload

path, address, rank = sys.argv[1], sys.argv[2], int(sys.argv[3])
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(address, num_processes=2, process_id=rank)
mesh = Mesh(np.array(jax.devices()), ("tp",))
shardings = [("up_proj", P(None, "tp")), ("down_proj", P("tp", None))]

for exchange in ("never", "once", "auto"):
    report = mfload.Report()
    options = mfload.Options(exchange=exchange)
    params = mfload.load(
        path, framework="jax", mesh=mesh, shardings=shardings, report=report, options=options
    )
    print(f"{exchange:5} read {report.read_bytes:8}, exchanged {report.exchanged_bytes:8}")
for note in report.notes:
    print(textwrap.fill(note, 80))

# The sum is taken over the shards of both processes, and is the same on each.
up = params["up_proj.weight"]
total = float(jax.jit(lambda x: x.astype("float32").sum())(up))
print(f"{len(up.addressable_shards)} shards here, sum {total:.0f}")
"""

# %% [markdown]
# ## Start both

# %%
program = Path(folder.name) / "program.py"
program.write_text(PROGRAM)
with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    address = f"127.0.0.1:{probe.getsockname()[1]}"
started = [
    subprocess.Popen(
        [sys.executable, program, path, address, str(rank)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )
    for rank in range(2)
]
print(len(started), "processes started")

# %% [markdown]
# ## What they say

# %%
for rank, process in enumerate(started):
    said, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    print(f"process {rank} of 2")
    # JAX's transport prints a line of its own for each connection.
    print(*(line for line in said.splitlines() if not line.startswith("[Gloo]")), sep="\n")

# %% [markdown]
# A process that fails, or is killed, makes the others raise a `ProcessError` that names it: none
# of them is left waiting.

# %%
folder.cleanup()
