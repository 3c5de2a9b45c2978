# %% [markdown]
# # PyTorch: fill a module with the loaded tensors
#
# A small file to play with, written by safetensors itself.

# %%
import tempfile
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import save_file

import mfload

folder = tempfile.TemporaryDirectory()
path = Path(folder.name) / "model.safetensors"
written = {
    "weight": np.arange(32, dtype=np.float32).reshape(8, 4),
    "bias": np.arange(8, dtype=np.float32),
}
save_file(written, path)

# %% [markdown]
# ## Load
#
# What comes back is a state dict.

# %%
state = mfload.load(path, framework="torch")
for name, tensor in state.items():
    print(f"{name:7} {tensor.dtype!s:14} {tuple(tensor.shape)} {tensor.device}")

# %% [markdown]
# ## Into a module, without a copy
#
# A module on the `meta` device has no memory of its own. With `assign=True` it takes the tensors as
# they are.

# %%
module = torch.nn.Linear(4, 8, device="meta")
module.load_state_dict(state, assign=True)
assert module.weight.data_ptr() == state["weight"].data_ptr()
result = module(torch.ones(4)).detach()
print(result)
assert np.array_equal(result.numpy(), written["weight"].sum(axis=1) + written["bias"])

# %% [markdown]
# ## Writing in place is safe
#
# The tensors are private, with every engine. Training changes neither the file nor a later load.

# %%
with torch.no_grad():
    module.bias.zero_()
again = mfload.load(path, framework="torch")
print(module.bias.sum().item(), again["bias"].sum().item())
assert np.array_equal(again["bias"].numpy(), written["bias"])

# %% [markdown]
# ## Half of it, in half the bytes
#
# Only the rows asked for are read; `dtype=` converts while bytes land.

# %%
half = mfload.load(path, framework="torch", names="weight", dtype=torch.bfloat16)["weight"]
with mfload.open(path, framework="torch") as file:
    rows = file.get_slice("weight")[:4]
print(half.dtype, tuple(rows.shape))
assert torch.equal(half[:4].float(), rows)

# %% [markdown]
# ## Save
#
# The way back, from a state dict as it is: whole or not at all, and on the disk when the call
# returns.

# %%
saved = mfload.save(module.state_dict(), Path(folder.name) / "trained.safetensors")
again = mfload.load(saved.files[0], framework="torch")
print(saved.tensors, "tensors saved")
assert torch.equal(again["bias"], torch.zeros(8))
folder.cleanup()
