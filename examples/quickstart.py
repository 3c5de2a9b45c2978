# %% [markdown]
# # Quickstart: load, look, take a part, save
#
# Install: `pip install '.[verify]'`.
#
# With NumPy, which every installation has. Another framework is another word: `framework="jax"`,
# `"torch"`, `"tensorflow"`, `"paddle"`, `"cupy"`. The checkpoint is a small one; put the
# path of your own in its place.

# %%
import tempfile
from pathlib import Path

import ml_dtypes
import numpy as np

import mfload

folder = tempfile.TemporaryDirectory()
here = Path(folder.name)
written = {
    "model.embed_tokens.weight": np.arange(64 * 32).reshape(64, 32).astype(ml_dtypes.bfloat16),
    "model.layers.0.self_attn.q_proj.weight": np.ones((32, 32), np.float16),
    "model.layers.0.input_layernorm.weight": np.ones(32, np.float32),
}
path = here / "model.safetensors"
mfload.save(written, path)

# %% [markdown]
# ## Load

# %%
params = mfload.load(path, framework="numpy")
for name, array in params.items():
    print(f"{name:38} {array.dtype!s:9} {array.shape}")
    assert np.array_equal(array, written[name])

# %% [markdown]
# ## Some of it, converted on the way
#
# `names=` is a regular expression, a list of names, or a function. `dtype=` converts while the
# bytes land.

# %%
layer = mfload.load(path, framework="numpy", names=r"^model\.layers\.0\.", dtype="float32")
print({name: str(array.dtype) for name, array in layer.items()})
assert {array.dtype for array in layer.values()} == {np.dtype(np.float32)}

# %% [markdown]
# ## Look before you load
#
# A plan reads headers alone: bytes, memory, and how each file would be read.

# %%
mfload.plan(path, framework="numpy")

# %% [markdown]
# ## Open, and read only what you need
#
# `mfload.open` has the methods of `safetensors.safe_open`. Each slice reads its own bytes.

# %%
file = mfload.open(path)
file

# %%
columns = file.get_slice("model.embed_tokens.weight")[:, 8:16]
last = file.get_slice("model.embed_tokens.weight")[-1]
print(columns.shape, last.shape)
assert np.array_equal(columns, written["model.embed_tokens.weight"][:, 8:16])
file.close()

# %% [markdown]
# ## Save, and be sure of it
#
# A file appears under its name when it is whole and on the disk, or not at all. With checksums
# beside it, a later load refuses what is not what was saved. They take the extra `verify`.

# %%
mfload.save(params, here / "copy.safetensors")
manifest = mfload.verify(here / "copy.safetensors", mode="write").manifest
again = mfload.load(here / "copy.safetensors", framework="numpy", verify=manifest)
print(mfload.diff(path, here / "copy.safetensors").equal, len(again), "arrays, verified")

# %%
with open(here / "copy.safetensors", "r+b") as damaged:
    damaged.seek(-1, 2)
    damaged.write(b"\x07")
try:
    mfload.load(here / "copy.safetensors", framework="numpy", verify=manifest)
except mfload.errors.ChecksumError as error:
    print(type(error).__name__, error.tensor)
else:
    raise AssertionError("a damaged file was loaded")
folder.cleanup()
