# %% [markdown]
# # JAX: load a checkpoint onto a mesh
#
# Install: `pip install '.[jax]'`.
#
# Eight CPU devices stand for eight accelerators: the code is the same. The number of CPU devices
# has to be said before JAX starts.

# %%
import os
import tempfile
from pathlib import Path

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import mfload

random = np.random.default_rng(0)
folder = tempfile.TemporaryDirectory()
path = Path(folder.name) / "model.safetensors"
shapes = {
    "embed.weight": (4096, 512),
    "layers.0.up_proj.weight": (2048, 512),
    "layers.0.down_proj.weight": (512, 2048),
    "layers.0.norm.weight": (512,),
}
written = {name: random.random(shape).astype(ml_dtypes.bfloat16) for name, shape in shapes.items()}
mfload.save(written, path)

# %% [markdown]
# ## The mesh and the rules
#
# The mesh is yours; mfload never makes one. A rule is a regex and a `PartitionSpec`, the first that
# is found in a name counts, and what matches none lies whole on every device.

# %%
mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "model"))
shardings = [
    (r"embed", P("model", None)),
    (r"up_proj", P("model", "data")),
    (r"down_proj", P("data", "model")),
]

# %% [markdown]
# ## What it is going to cost
#
# A plan reads headers alone. However a tensor is cut, its bytes are read once.

# %%
plan = mfload.plan(path, framework="jax", mesh=mesh, shardings=shardings)
figures = plan.as_dict()
print({key: figures[key] for key in ("result_bytes", "read_bytes", "over_read_bytes")})
size = sum(array.nbytes for array in written.values())
assert figures["read_bytes"] < 1.01 * size

# %% [markdown]
# ## Compile while nothing is loaded yet
#
# `abstract` gives shapes, dtypes and shardings without data: all that `jit` needs to compile.


# %%
def forward(params, ids):
    x = params["embed.weight"][ids] * params["layers.0.norm.weight"]
    up = jax.nn.relu(x @ params["layers.0.up_proj.weight"].T)
    return (up @ params["layers.0.down_proj.weight"].T).astype(jnp.float32)


targets = mfload.abstract(path, mesh=mesh, shardings=shardings)
for name, leaf in targets.items():
    print(f"{name:26} {leaf.dtype} {leaf.shape} {leaf.sharding.spec}")
ids = jax.ShapeDtypeStruct((16,), jnp.int32, sharding=NamedSharding(mesh, P()))
step = jax.jit(forward).lower(targets, ids).compile()

# %% [markdown]
# ## Load
#
# Each device gets its shard. On the CPU the shards are mfload's memory itself, so nothing is
# copied after it has landed.

# %%
report = mfload.Report()
params = mfload.load(path, framework="jax", mesh=mesh, shardings=shardings, report=report)
print(f"{report.read_bytes} of {size} bytes read, {report.aliased_share:.0%} aliased")

up = params["layers.0.up_proj.weight"]
for shard in up.addressable_shards[:3]:
    rows, columns = shard.index
    print(shard.device, rows, columns, shard.data.shape)

for name, array in params.items():
    assert array.sharding == targets[name].sharding
    assert np.array_equal(np.asarray(array), written[name])

# %%
tokens = jax.device_put(np.arange(16, dtype=np.int32), NamedSharding(mesh, P()))
print(step(params, tokens).shape)

# %% [markdown]
# ## A sharding that does not fit
#
# An axis of the mesh that does not divide its dim is refused before anything is read.

# %%
narrow = Path(folder.name) / "narrow.safetensors"
mfload.save({"head.weight": np.zeros((10, 4), np.float32)}, narrow)
try:
    mfload.load(narrow, framework="jax", mesh=mesh, shardings=P("model"))
except mfload.errors.ShardingError as error:
    print(error)
else:
    raise AssertionError("10 rows were cut into 4 parts")

# %% [markdown]
# ## Arrays that JAX may give away
#
# `allocator="framework"` fills memory of JAX's own allocator. The first step that donates its
# parameters then writes its result where they lay.

# %%
own = mfload.load(
    path,
    framework="jax",
    mesh=mesh,
    shardings=shardings,
    options=mfload.Options(allocator="framework"),
)
where = [s.data.unsafe_buffer_pointer() for s in own["embed.weight"].addressable_shards]
halved = jax.jit(lambda tree: jax.tree.map(lambda x: x / 2, tree), donate_argnums=0)(own)
again = [s.data.unsafe_buffer_pointer() for s in halved["embed.weight"].addressable_shards]
print("the same memory:", where == again)
assert where == again
folder.cleanup()
