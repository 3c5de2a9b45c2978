# %% [markdown]
# # PyTorch: fill a module with the loaded tensors

# %%
import tempfile
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import save_file

import mfload

written = {
    "weight": np.arange(32, dtype=np.float32).reshape(8, 4),
    "bias": np.arange(8, dtype=np.float32),
}
with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "model.safetensors"
    save_file(written, path)
    state = mfload.load(path, framework="torch")

    # The module is made without memory of its own and takes the tensors as they are.
    module = torch.nn.Linear(4, 8, device="meta")
    module.load_state_dict(state, assign=True)

    # The tensors are private: training in place changes neither the file nor a later load.
    with torch.no_grad():
        module.bias.zero_()
    again = mfload.load(path, framework="torch")

# %%
for name, tensor in state.items():
    print(f"{name:7} {tensor.dtype!s:14} {tuple(tensor.shape)}")
assert module.weight.data_ptr() == state["weight"].data_ptr()
assert np.array_equal(again["bias"].numpy(), written["bias"])
result = module(torch.ones(4)).detach()
assert np.array_equal(result.numpy(), written["weight"].sum(axis=1))
