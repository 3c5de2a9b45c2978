# %% [markdown]
# # NumPy: load a checkpoint, or some of it
#
# mfload reads a `.safetensors` file, a directory of them, or their index. Here is a small file to
# play with, written by safetensors itself. NumPy has no bfloat16 of its own: `ml_dtypes` adds it.

# %%
import tempfile
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

import mfload

folder = tempfile.TemporaryDirectory()
path = Path(folder.name) / "model.safetensors"
written = {
    "layers.0.weight": np.arange(32).reshape(4, 8).astype(ml_dtypes.bfloat16),
    "layers.0.bias": np.arange(4, dtype=np.float32),
    "layers.1.weight": np.ones((2, 4), np.float32),
}
save_file(written, path)

# %% [markdown]
# ## Load
#
# One call gives a `dict` from names to arrays, in the order of the file. They are what the file
# holds, bit for bit.

# %%
params = mfload.load(path, framework="numpy")
for name, array in params.items():
    print(f"{name:16} {array.dtype!s:9} {array.shape}")
    assert array.dtype == written[name].dtype
    assert np.array_equal(array, written[name])

# %% [markdown]
# ## Look before you load
#
# `mfload.plan` takes the arguments of `load` and reads headers only: how much would be read, by
# which engine, and what it would cost in memory.

# %%
plan = mfload.plan(path, framework="numpy", names=r"layers\.0\.")
made = plan.as_dict()
print(made["tensors"], "tensors,", made["read_bytes"], "bytes to read,", plan.route[0].engine)

# %% [markdown]
# ## Some of it, in another dtype
#
# `names=` is a regular expression that is searched for; what it does not find is not read. `dtype=`
# converts the floating tensors while their bytes land.

# %%
first = mfload.load(path, framework="numpy", names=r"layers\.0\.", dtype="float32")
print({name: str(array.dtype) for name, array in first.items()})
assert sorted(first) == ["layers.0.bias", "layers.0.weight"]
assert {array.dtype for array in first.values()} == {np.dtype(np.float32)}

# %% [markdown]
# ## A slice
#
# `mfload.open` reads the header alone; indexing then reads the bytes that the index needs.

# %%
with mfload.open(path, framework="numpy") as file:
    columns = file.get_slice("layers.0.weight")[:, 2:4]
print(columns.shape)
assert np.array_equal(columns, written["layers.0.weight"][:, 2:4])

# %% [markdown]
# ## Save
#
# The way back: whole or not at all, and on the disk when the call returns.

# %%
saved = mfload.save(first, Path(folder.name) / "first.safetensors", metadata={"layer": "0"})
again = mfload.load(saved.files[0], framework="numpy")
print(saved.tensors, "tensors saved")
assert all(np.array_equal(again[name], first[name]) for name in first)

# %% [markdown]
# ## The arrays are yours
#
# They own their memory and may be written to. The file may go.
folder.cleanup()
params["layers.0.bias"] += 1
print(params["layers.0.bias"], path.exists())
assert params["layers.0.bias"].sum() == 10
