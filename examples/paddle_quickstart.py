# %% [markdown]
# # Paddle: fill a layer with the loaded tensors
#
# A small file to play with, written by safetensors itself.

# %%
import tempfile
from pathlib import Path

import numpy as np
import paddle
from safetensors.numpy import save_file

import mfload

folder = tempfile.TemporaryDirectory()
path = Path(folder.name) / "model.safetensors"
written = {
    "weight": np.arange(32, dtype=np.float32).reshape(4, 8),
    "bias": np.arange(8, dtype=np.float32),
}
save_file(written, path)

# %% [markdown]
# ## Load

# %%
state = mfload.load(path, framework="paddle", device="cpu")
for name, tensor in state.items():
    print(f"{name:7} {tensor.dtype!s:15} {tuple(tensor.shape)}")
    assert np.array_equal(tensor.numpy(), written[name])

# %% [markdown]
# ## Into a layer
#
# Paddle keeps a linear layer's weight as (inputs, outputs), and copies it into the layer.

# %%
layer = paddle.nn.Linear(4, 8)
missing, unexpected = layer.set_state_dict(state)
assert not missing
assert not unexpected
result = layer(paddle.ones([4])).numpy()
print(result)
assert np.array_equal(result, written["weight"].sum(axis=0) + written["bias"])

# %% [markdown]
# ## Some of it, converted on the way
#
# `dtype=` takes Paddle's own dtypes too. A slice reads its own columns alone.

# %%
narrow = mfload.load(path, framework="paddle", names="weight", dtype=paddle.bfloat16)["weight"]
with mfload.open(path, framework="paddle") as file:
    columns = file.get_slice("weight")[:, :2]
print(narrow.dtype, tuple(columns.shape))
assert np.array_equal(columns.numpy(), written["weight"][:, :2])

# %% [markdown]
# ## Save
#
# The way back, from a state dict as it is: whole or not at all, and on the disk when the call
# returns.

# %%
saved = mfload.save(layer.state_dict(), Path(folder.name) / "trained.safetensors")
again = mfload.load(saved.files[0], framework="paddle", device="cpu")
print(saved.tensors, "tensors saved")
assert np.array_equal(again["bias"].numpy(), written["bias"])
folder.cleanup()
