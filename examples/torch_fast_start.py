# %% [markdown]
# # PyTorch: a fast start of a model
#
# Install: `pip install '.[torch]' safetensors`.
#
# The usual way makes a model with random weights, reads a state dict beside it, and copies the one
# into the other. A model on the `meta` device has no memory: `mfload.load_into` gives it the
# loaded tensors as they are.

# %%
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

import mfload

LAYERS, WIDTH = 6, 512


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.up = torch.nn.Linear(WIDTH, 4 * WIDTH)
        self.down = torch.nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


def make():
    return torch.nn.Sequential(*(Block() for _ in range(LAYERS)))


torch.manual_seed(0)
trained = make()
folder = tempfile.TemporaryDirectory()
path = Path(folder.name) / "model.safetensors"
save_file(trained.state_dict(), path)
print(f"{path.stat().st_size >> 20} MiB on disk")

# %% [markdown]
# ## The usual way, and mfload's
#
# Each is done five times, and the fastest counts: the first load of a process takes imports along.


# %%
def usual():
    model = make()
    model.load_state_dict(load_file(path))
    return model


def fast():
    with torch.device("meta"):
        model = make()
    return mfload.load_into(model, path)


for start in (usual, fast):
    times = []
    for _ in range(5):
        before = time.perf_counter()
        model = start()
        times.append(time.perf_counter() - before)
    print(f"{start.__name__:6} {min(times) * 1e3:6.1f} ms")
    x = torch.ones(2, WIDTH)
    with torch.no_grad():
        assert torch.equal(model(x), trained(x))

# %% [markdown]
# ## Writing in place is safe
#
# The tensors are the model's own. Training changes neither the file nor a later load.

# %%
with torch.no_grad():
    model[0].up.bias.zero_()
again = fast()
assert torch.equal(again[0].up.bias, trained[0].up.bias)

# %% [markdown]
# ## In half the bytes
#
# `dtype=` converts while bytes land, and `names=` of `mfload.load` takes a part: here the first
# layer, as a dict.

# %%
half = mfload.load(path, framework="torch", names=r"^0\.", dtype=torch.bfloat16)
print({name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in half.items()})
assert torch.equal(half["0.up.weight"], trained[0].up.weight.bfloat16())

# %% [markdown]
# ## Save
#
# From a state dict as it is: whole or not at all, and on the disk when the call returns.

# %%
saved = mfload.save(again.state_dict(), Path(folder.name) / "trained.safetensors")
print(saved.tensors, "tensors saved")
assert mfload.diff(path, saved.files[0]).equal
folder.cleanup()
