# %% [markdown]
# # PyTorch: two processes, DTensors and plain shards
#
# Install: `pip install '.[torch]'`.
#
# On a cluster `torchrun` starts the processes. Here one command starts two of them, which read
# their own parts of a checkpoint, and then read for each other.

# %%
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

import mfload

folder = tempfile.TemporaryDirectory()
path = Path(folder.name) / "model.safetensors"
shapes = {"up_proj.weight": (2049, 2048), "down_proj.weight": (2048, 2048), "norm.weight": (2048,)}
mfload.save({name: torch.rand(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}, path)
print(path.stat().st_size, "bytes on disk")

# %% [markdown]
# ## The program of each process
#
# `up_proj` has 2,049 rows, which two processes share as 1,025 and 1,024, as `torch.chunk` does.
# `down_proj` is cut in columns.

# %%
PROGRAM = """
import sys
import textwrap

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

import mfload

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))
shardings = [("up_proj", Shard(0)), ("down_proj", Shard(1))]

for exchange in ("never", "once", "auto"):
    report = mfload.Report()
    options = mfload.Options(exchange=exchange, timeout=60)
    state = mfload.load(
        sys.argv[1], framework="torch", mesh=mesh, shardings=shardings, report=report,
        options=options,
    )
    print(f"{exchange:5} read {report.read_bytes:8}, exchanged {report.exchanged_bytes:8}")
for note in report.notes:
    print(textwrap.fill(note, 80))
for name, tensor in state.items():
    print(f"{name:17} {tuple(tensor.shape)} {tuple(tensor.to_local().shape)} {tensor.placements}")

# The same parts as plain tensors, without a mesh.
plain = mfload.load(
    sys.argv[1], framework="torch", shardings=[("up_proj", 0), ("down_proj", 1)], shard=(rank, size)
)
same = all((plain[name] == tensor.to_local()).all() for name, tensor in state.items())
print("plain shards are the same:", bool(same))
dist.destroy_process_group()
"""

# %% [markdown]
# ## Start both

# %%
program = Path(folder.name) / "program.py"
program.write_text(PROGRAM)
with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    port = str(probe.getsockname()[1])
environment = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2"}
started = [
    subprocess.Popen(
        [sys.executable, program, path],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**environment, "RANK": str(rank), "OMP_NUM_THREADS": "1"},
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
    print(*(line for line in said.splitlines() if not line.startswith("[Gloo]")), sep="\n")

# %%
folder.cleanup()
