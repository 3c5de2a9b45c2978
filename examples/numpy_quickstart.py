# %% [markdown]
# # NumPy: load a checkpoint, or some of it

# %%
import tempfile
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

import mfload

# A small checkpoint to read. NumPy has no bfloat16 of its own: ml_dtypes adds it.
written = {
    "layers.0.weight": np.arange(32).reshape(4, 8).astype(ml_dtypes.bfloat16),
    "layers.0.bias": np.arange(4, dtype=np.float32),
    "layers.1.weight": np.ones((2, 4), np.float32),
}
with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "model.safetensors"
    save_file(written, path)

    params = mfload.load(path, framework="numpy")
    # `names` is a regular expression: whatever it does not find is not read.
    first = mfload.load(path, framework="numpy", names=r"layers\.0\.", dtype="float32")

# %%
# The file is gone by now; the arrays own their memory.
for name, array in sorted(params.items()):
    print(f"{name:16} {array.dtype!s:9} {array.shape}")
    assert array.dtype == written[name].dtype
    assert np.array_equal(array, written[name])

assert sorted(first) == ["layers.0.bias", "layers.0.weight"]
assert {array.dtype for array in first.values()} == {np.dtype(np.float32)}
