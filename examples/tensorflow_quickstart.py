# %% [markdown]
# # TensorFlow: load a checkpoint and compute with it
#
# A small file to play with, written by safetensors itself. Whole numbers this small survive
# bfloat16, and every device adds them up exactly.

# %%
import tempfile
from pathlib import Path

import ml_dtypes
import numpy as np
import tensorflow as tf
from safetensors.numpy import save_file

import mfload

folder = tempfile.TemporaryDirectory()
path = Path(folder.name) / "model.safetensors"
written = {
    "kernel": np.arange(32).reshape(4, 8).astype(ml_dtypes.bfloat16),
    "bias": np.arange(8, dtype=np.float32),
}
save_file(written, path)

# %% [markdown]
# ## Load
#
# Bit for bit what was written: bfloat16 stays bfloat16.

# %%
params = mfload.load(path, framework="tensorflow")
for name, tensor in params.items():
    print(f"{name:7} {tensor.dtype.name:9} {tuple(tensor.shape)}")
    assert np.array_equal(tensor.numpy(), written[name])

# %% [markdown]
# ## Constants and variables
#
# A loaded tensor is constant. What is to be trained goes into a variable, which copies it.

# %%
bias = tf.Variable(params["bias"])
bias.assign_add(tf.ones(8))
result = tf.ones((1, 4)) @ tf.cast(params["kernel"], tf.float32) + bias
print(result[0].numpy())
expected = written["kernel"].astype(np.float32).sum(axis=0) + written["bias"] + 1
assert np.array_equal(result[0].numpy(), expected)

# %% [markdown]
# ## Some of it, converted on the way
#
# With `dtype=` the cast above is not needed: the bytes are converted while they land. A slice reads
# its own columns alone.

# %%
wide = mfload.load(path, framework="tensorflow", names="kernel", dtype=tf.float32)["kernel"]
with mfload.open(path, framework="tensorflow") as file:
    columns = file.get_slice("kernel")[:, :2]
print(wide.dtype.name, tuple(columns.shape))
assert np.array_equal(wide[:, :2].numpy(), columns.numpy().astype(np.float32))

# %% [markdown]
# ## Save
#
# The way back, variables as well as constants: whole or not at all, and on the disk when the call
# returns.

# %%
trained = {"kernel": params["kernel"], "bias": bias}
saved = mfload.save(trained, Path(folder.name) / "trained.safetensors")
again = mfload.load(saved.files[0], framework="tensorflow")
print(saved.tensors, "tensors saved")
assert np.array_equal(again["bias"].numpy(), written["bias"] + 1)
folder.cleanup()
