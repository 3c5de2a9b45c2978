# %% [markdown]
# # TensorFlow: load a checkpoint and compute with it

# %%
import tempfile
from pathlib import Path

import ml_dtypes
import numpy as np
import tensorflow as tf
from safetensors.numpy import save_file

import mfload

# Whole numbers this small survive bfloat16, and every device adds them up exactly.
written = {
    "kernel": np.arange(32).reshape(4, 8).astype(ml_dtypes.bfloat16),
    "bias": np.arange(8, dtype=np.float32),
}
with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "model.safetensors"
    save_file(written, path)
    params = mfload.load(path, framework="tensorflow")

for name, tensor in params.items():
    print(f"{name:7} {tensor.dtype.name:9} {tuple(tensor.shape)}")
    # Bit for bit what was written: bfloat16 stays bfloat16.
    assert np.array_equal(tensor.numpy(), written[name])

# %%
# A loaded tensor is constant; what is to be trained goes into a variable.
bias = tf.Variable(params["bias"])
bias.assign_add(tf.ones(8))
result = tf.ones((1, 4)) @ tf.cast(params["kernel"], tf.float32) + bias
expected = written["kernel"].astype(np.float32).sum(axis=0) + written["bias"] + 1
assert np.array_equal(result[0].numpy(), expected)
