# %% [markdown]
# # JAX: load a checkpoint and use it as a pytree

# %%
import tempfile
from pathlib import Path

import jax
import numpy as np
from safetensors.numpy import save_file

import mfload

# Whole numbers this small survive bfloat16, and every device adds them up exactly.
written = {
    "dense.weight": np.arange(32, dtype=np.float32).reshape(8, 4),
    "dense.bias": np.arange(8).astype(jax.numpy.bfloat16),
}
report = mfload.Report()  # filled by the load
with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "model.safetensors"
    save_file(written, path)
    params = mfload.load(path, framework="jax", report=report)

print(report)
for name, array in params.items():
    print(f"{name:13} {array.dtype!s:9} {array.shape}")
    assert array.dtype == written[name].dtype


# %%
# A dict of arrays is a pytree: it goes through jit, grad and optimisers as it is.
@jax.jit
def dense(params, x):
    return x @ params["dense.weight"].T + params["dense.bias"]


expected = written["dense.weight"].sum(axis=1) + written["dense.bias"].astype("float32")
assert np.array_equal(dense(params, np.ones(4, np.float32)), expected)
