# %% [markdown]
# # JAX: load a checkpoint and use it as a pytree
#
# A small file to play with, written by safetensors itself. Whole numbers this small survive
# bfloat16, and every device adds them up exactly.

# %%
import tempfile
from pathlib import Path

import jax
import numpy as np
from safetensors.numpy import save_file

import mfload

folder = tempfile.TemporaryDirectory()
path = Path(folder.name) / "model.safetensors"
written = {
    "dense.weight": np.arange(32, dtype=np.float32).reshape(8, 4),
    "dense.bias": np.arange(8).astype(jax.numpy.bfloat16),
}
save_file(written, path)

# %% [markdown]
# ## Load
#
# A report is filled by the load that it is given to: which engine read the file and why, and how
# much of the result was copied after it had landed. Here nothing was.

# %%
report = mfload.Report()
params = mfload.load(path, framework="jax", report=report)
for name, array in params.items():
    print(f"{name:13} {array.dtype!s:9} {array.shape}")
    assert isinstance(array, jax.Array)
    assert array.dtype == written[name].dtype

# %%
print(report.tensors, "tensors,", report.route[0][1:], f"{report.aliased_share:.0%} aliased")

# %% [markdown]
# ## A pytree
#
# A dict of arrays goes through `jit`, `grad` and optimisers as it is.


# %%
@jax.jit
def dense(params, x):
    return x @ params["dense.weight"].T + params["dense.bias"]


result = dense(params, np.ones(4, np.float32))
print(result)
expected = written["dense.weight"].sum(axis=1) + written["dense.bias"].astype("float32")
assert np.array_equal(result, expected)

# %% [markdown]
# ## Arrays that JAX may give away
#
# By default the arrays lie in mfload's memory, and JAX keeps them read-only as it does all of its
# all of its arrays. `options=mfload.Options(allocator="framework")` fills arrays of JAX's own
# allocator instead: those can be donated to a jitted function, which then reuses their memory
# for its result.
# %%
own = mfload.load(path, framework="jax", options=mfload.Options(allocator="framework"))
step = jax.jit(lambda weight: weight * 2, donate_argnums=0)
doubled = step(own["dense.weight"])
print(doubled.sum(), own["dense.weight"].is_deleted())
assert np.array_equal(doubled, written["dense.weight"] * 2)

# %% [markdown]
# ## A slice, converted by JAX
#
# Rows of one tensor, as a process of a larger run would take them.

# %%
with mfload.open(path, framework="jax") as file:
    rows = file.get_slice("dense.weight")[4:]
print(rows.astype(jax.numpy.bfloat16).dtype, rows.shape)
assert np.array_equal(rows, written["dense.weight"][4:])

# %% [markdown]
# ## Save
#
# The way back: whole or not at all, and on the disk when the call returns.

# %%
trained = {"dense.weight": doubled, "dense.bias": params["dense.bias"]}
saved = mfload.save(trained, Path(folder.name) / "trained.safetensors")
again = mfload.load(saved.files[0], framework="jax")
print(saved.tensors, "tensors saved")
assert all(jax.numpy.array_equal(again[name], trained[name]) for name in trained)
folder.cleanup()
