# %% [markdown]
# # Paddle: two processes, distributed tensors and plain shards
#
# Install: `pip install '.[paddle]'`.
#
# On a cluster `python -m paddle.distributed.launch` starts the processes. Here one command starts
# two of them, which read their own parts of a checkpoint, and then read for each other.

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
shapes = {"up_proj.weight": (2049, 2048), "down_proj.weight": (2048, 2048), "norm.weight": (2048,)}
written = {name: random.random(shape).astype(ml_dtypes.bfloat16) for name, shape in shapes.items()}
mfload.save(written, path)
print(path.stat().st_size, "bytes on disk")

# %% [markdown]
# ## The program of each process
#
# `up_proj` has 2,049 rows, which two processes share as 1,025 and 1,024. `down_proj` is cut in
# columns.

# %%
PROGRAM = """
import sys
import textwrap

import paddle
import paddle.distributed as dist
from paddle.distributed import ProcessMesh, Shard

import mfload

dist.init_parallel_env()
rank, size = dist.get_rank(), dist.get_world_size()
mesh = ProcessMesh(list(range(size)), dim_names=["tp"])
shardings = [("up_proj", Shard(0)), ("down_proj", Shard(1))]

for exchange in ("never", "once", "auto"):
    report = mfload.Report()
    options = mfload.Options(exchange=exchange, timeout=60)
    state = mfload.load(
        sys.argv[1], framework="paddle", mesh=mesh, shardings=shardings, report=report,
        options=options,
    )
    print(f"{exchange:5} read {report.read_bytes:8}, exchanged {report.exchanged_bytes:8}")
for note in report.notes:
    print(textwrap.fill(note, 80))
for name, tensor in state.items():
    print(f"{name:17} {list(tensor.shape)} {list(tensor._local_shape)} {tensor.placements}")

# The same parts as plain tensors, without a mesh.
plain = mfload.load(
    sys.argv[1], framework="paddle", shard=(rank, size),
    shardings=[("up_proj", 0), ("down_proj", 1)]
)
same = [bool((plain[name] == tensor._local_value()).all()) for name, tensor in state.items()]
print("plain shards are the same:", all(same))

# A layer that is sharded already is filled with the part of each process.
layer = paddle.nn.Linear(2049, 2048, bias_attr=False)
layer.weight = dist.shard_tensor(layer.weight, mesh, [Shard(0)])
mfload.load_into(layer, sys.argv[1], mapping={"up_proj.weight": "weight", "(?!up).*": None})
same = layer.weight._local_value() == plain["up_proj.weight"].astype("float32")
print("the layer holds its part:", layer.weight._local_shape, bool(same.all()))
"""

# %% [markdown]
# ## Start both

# %%
program = Path(folder.name) / "program.py"
program.write_text(PROGRAM)
ports: list[int] = []
probes = [socket.socket() for _ in range(3)]
for probe in probes:
    probe.bind(("127.0.0.1", 0))
    ports.append(probe.getsockname()[1])
for probe in probes:
    probe.close()
addresses = [f"127.0.0.1:{port}" for port in ports]
environment = {
    **os.environ,
    "PADDLE_MASTER": addresses[2],
    "PADDLE_TRAINERS_NUM": "2",
    "PADDLE_TRAINER_ENDPOINTS": ",".join(addresses[:2]),
    "PADDLE_DISTRI_BACKEND": "gloo",
    "OMP_NUM_THREADS": "1",
}
started = [
    subprocess.Popen(
        [sys.executable, program, path],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={
            **environment,
            "PADDLE_TRAINER_ID": str(rank),
            "PADDLE_CURRENT_ENDPOINT": addresses[rank],
        },
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
    # Paddle prints its flags.
    print(*(line for line in said.splitlines() if not line.startswith(("=", "FLAGS"))), sep="\n")

# %%
folder.cleanup()
