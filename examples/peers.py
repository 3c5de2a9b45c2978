# %% [markdown]
# # Peers: from a running JAX job into PyTorch
#
# Install: `pip install '.[jax,torch,peer]'`.
#
# One process holds weights on eight devices and computes with them. Two others want them in
# PyTorch, cut another way. They read them from its memory while it goes on computing.

# %%
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import mfload

# %% [markdown]
# ## The job
#
# `up_proj` is cut in rows, `down_proj` in columns, one part for each device.

# %%
mesh = Mesh(np.array(jax.devices()), ("tp",))
cuts = {"up_proj.weight": P("tp", None), "down_proj.weight": P(None, "tp"), "norm.weight": P()}
shapes = {"up_proj.weight": (4096, 1024), "down_proj.weight": (1024, 4096), "norm.weight": (1024,)}
keys = jax.random.split(jax.random.key(0), len(shapes))
params = {
    name: jax.device_put(
        jax.random.normal(key, shapes[name], jnp.bfloat16) / 32, NamedSharding(mesh, cuts[name])
    )
    for name, key in zip(shapes, keys, strict=True)
}


@jax.jit
def step(params, x):
    y = jnp.tanh(x @ params["up_proj.weight"].T) @ params["down_proj.weight"].T
    return y * params["norm.weight"] + x


x = step(params, jnp.ones((4, 1024), jnp.bfloat16))
for name, array in params.items():
    print(f"{name:17} {array.dtype} {array.shape} on {len(array.sharding.device_set)} devices")

# %% [markdown]
# ## Publish
#
# The seed reads the shards where they lie. Nothing runs in the job but a thread that waits.

# %%
seed = mfload.publish(params, model="org/name", revision="step-1")
print(seed)
print(seed.copied_bytes, "bytes copied")

# %% [markdown]
# ## The program of each reader
#
# Two ranks of PyTorch take the columns of `up_proj` and the rows of `down_proj`: each of their
# parts comes from all eight shards. A digest says what arrived.

# %%
PROGRAM = """
import hashlib
import json
import sys

import torch

import mfload

url, rank = sys.argv[1], int(sys.argv[2])
report = mfload.Report()
state = mfload.load(
    url, framework="torch", shardings=[("up_proj", 1), ("down_proj", 0)], shard=(rank, 2),
    options=mfload.Options(timeout=60), report=report,
)
found = {
    name: hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy()).hexdigest()
    for name, tensor in state.items()
}
shapes = {name: list(tensor.shape) for name, tensor in state.items()}
(engine,) = {engine for _, engine, _ in report.route}
print(json.dumps({"found": found, "shapes": shapes, "read": report.read_bytes, "by": engine}))
"""

# %% [markdown]
# ## Both read, and the job goes on

# %%
folder = tempfile.TemporaryDirectory()
program = Path(folder.name) / "reader.py"
program.write_text(PROGRAM)
readers = [
    subprocess.Popen(
        [sys.executable, program, seed.url, str(rank)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    for rank in range(2)
]
steps, start = 0, time.perf_counter()
while any(reader.poll() is None for reader in readers):
    x = jax.block_until_ready(step(params, x))
    steps += 1
    assert time.perf_counter() - start < 120
assert steps > 1
print("the job computed while they started and read:", bool(jnp.isfinite(x).all()))

# %% [markdown]
# ## What they have, bit by bit

# %%
parts = {"up_proj.weight": np.s_[:, 512:], "down_proj.weight": np.s_[512:], "norm.weight": np.s_[:]}
firsts = {"up_proj.weight": np.s_[:, :512], "down_proj.weight": np.s_[:512]}
for rank, reader in enumerate(readers):
    said, errors = reader.communicate()
    assert reader.returncode == 0, errors
    result = json.loads(said)
    for name, array in params.items():
        cut = parts[name] if rank else firsts.get(name, parts[name])
        expected = np.ascontiguousarray(np.asarray(array)[cut])
        assert list(expected.shape) == result["shapes"][name]
        digest = hashlib.sha256(expected.view(np.uint8)).hexdigest()
        assert digest == result["found"][name], name
    print(f"rank {rank} of 2: {result['read']} bytes read by {result['by']}, all bits equal")

# %% [markdown]
# ## New weights, and the end
#
# `update` gives readers the next generation. What the job deletes, the seed still holds.

# %%
params = {name: array * 2 for name, array in params.items()}
seed.update(params)
expected = {name: np.asarray(array) for name, array in params.items()}
for array in params.values():
    array.delete()
loaded = mfload.load(seed.url, framework="numpy")
assert all((loaded[name] == array).all() for name, array in expected.items())
print("generation", seed.generation, "loaded after the job let go of it")
seed.close()
folder.cleanup()
