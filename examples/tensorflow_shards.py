# %% [markdown]
# # TensorFlow: two clients, DTensors
#
# Install: `pip install . tensorflow-cpu`.
#
# DTensor takes a cluster from the environment of each process. Here one command starts two clients,
# which read their own parts of a checkpoint, and then read for each other.

# %%
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

import mfload

folder = tempfile.TemporaryDirectory()
path = Path(folder.name) / "model.safetensors"
shapes = {"up_proj.weight": (4096, 1024), "down_proj.weight": (1024, 4096), "norm.weight": (1024,)}
mfload.save({name: np.ones(shape, np.float16) for name, shape in shapes.items()}, path)
print(path.stat().st_size, "bytes on disk")

# %% [markdown]
# ## The program of each client
#
# `up_proj` is cut in rows and `down_proj` in columns, as a `Layout` of DTensor says it: for each
# dim of the tensor a dim of the mesh, or `UNSHARDED`.

# %%
PROGRAM = """
import sys
import textwrap

import tensorflow as tf
from tensorflow.experimental import dtensor

import mfload

(cpu,) = tf.config.list_physical_devices("CPU")
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
dtensor.initialize_accelerator_system("CPU")
mesh = dtensor.create_distributed_mesh([("tp", 4)], device_type="CPU")
shardings = [("up_proj", ["tp", dtensor.UNSHARDED]), ("down_proj", [dtensor.UNSHARDED, "tp"])]

for exchange in ("never", "once", "auto"):
    report = mfload.Report()
    options = mfload.Options(exchange=exchange, timeout=60)
    state = mfload.load(
        sys.argv[1], framework="tensorflow", mesh=mesh, shardings=shardings, report=report,
        options=options,
    )
    print(f"{exchange:5} read {report.read_bytes:8}, exchanged {report.exchanged_bytes:8}")
for note in report.notes:
    print(textwrap.fill(note, 80))
for name, tensor in state.items():
    parts = [tuple(part.shape) for part in dtensor.unpack(tensor)]
    print(f"{name:17} {tuple(tensor.shape)} {parts} {dtensor.fetch_layout(tensor).sharding_specs}")

# TensorFlow computes with them on all devices of both clients.
total = tf.reduce_sum(tf.cast(state["down_proj.weight"], tf.float32))
print("sum of down_proj:", int(total.numpy()))
dtensor.barrier(mesh)
"""

# %% [markdown]
# ## Start both


# %%
def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


program = Path(folder.name) / "program.py"
program.write_text(PROGRAM)
jobs = ",".join(f"127.0.0.1:{free_port()}" for _ in range(2))
environment = {**os.environ, "DTENSOR_JOBS": jobs, "DTENSOR_NUM_CLIENTS": "2"}
environment |= {"DTENSOR_JOB_NAME": "worker", "TF_CPP_MIN_LOG_LEVEL": "3"}
started = [
    subprocess.Popen(
        [sys.executable, program, path],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**environment, "DTENSOR_CLIENT_ID": str(client)},
    )
    for client in range(2)
]
print(len(started), "processes started")

# %% [markdown]
# ## What they say

# %%
for client, process in enumerate(started):
    said, errors = process.communicate(timeout=180)
    assert process.returncode == 0, errors
    assert "sum of down_proj: 4194304" in said
    print(f"client {client} of 2")
    print(said, end="")

# %%
folder.cleanup()
