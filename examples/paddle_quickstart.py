# %% [markdown]
# # Paddle: fill a layer with the loaded tensors

# %%
import tempfile
from pathlib import Path

import numpy as np
import paddle
from safetensors.numpy import save_file

import mfload

written = {
    "weight": np.arange(32, dtype=np.float32).reshape(4, 8),
    "bias": np.arange(8, dtype=np.float32),
}
with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "model.safetensors"
    save_file(written, path)
    state = mfload.load(path, framework="paddle")

for name, tensor in state.items():
    print(f"{name:7} {tensor.dtype!s:15} {tuple(tensor.shape)}")
    assert np.array_equal(tensor.numpy(), written[name])

# %%
# Paddle keeps a linear layer's weight as (inputs, outputs), and copies it into the layer.
layer = paddle.nn.Linear(4, 8)
missing, unexpected = layer.set_state_dict(state)
assert not missing
assert not unexpected
expected = written["weight"].sum(axis=0) + written["bias"]
assert np.array_equal(layer(paddle.ones([4])).numpy(), expected)
