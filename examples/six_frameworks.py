# %% [markdown]
# # The same file into six frameworks
#
# Install: `pip install '.[jax,torch]'`, or those that you want to see.
#
# One checkpoint, six kinds of arrays. Each framework has a process of its own, since TensorFlow and
# Paddle don't live in one; what is not installed is left out, with the reason.

# %%
import importlib.util
import subprocess
import sys
import tempfile
from pathlib import Path

import ml_dtypes
import numpy as np

import mfload

folder = tempfile.TemporaryDirectory()
path = Path(folder.name) / "model.safetensors"
written = {
    "dense.weight": np.arange(32).reshape(8, 4).astype(ml_dtypes.bfloat16),
    "dense.bias": np.arange(8, dtype=np.float32),
}
mfload.save(written, path)

# %% [markdown]
# ## What each does with it
#
# The loaded dict goes where the framework wants its parameters: through `jit`, into a module on the
# `meta` device without a copy, into variables, into a layer. Each program prints the sum of its
# result, which is the same everywhere.

# %%
LOAD = """
import sys
import mfload

report = mfload.Report()
params = mfload.load(sys.argv[1], framework={framework!r}, report=report)
weight, bias = params["dense.weight"], params["dense.bias"]
"""
USE = {
    "numpy": """
import numpy as np
result = weight.astype(np.float32) @ np.ones(4, np.float32) + bias
""",
    "jax": """
import jax
dense = jax.jit(lambda params, x: params["dense.weight"].astype(x.dtype) @ x + params["dense.bias"])
result = dense(params, jax.numpy.ones(4))
""",
    "torch": """
import torch
module = torch.nn.Linear(4, 8, device="meta")
module.load_state_dict({"weight": weight.float(), "bias": bias}, assign=True)
assert module.bias.data_ptr() == bias.data_ptr()
result = module(torch.ones(4)).detach()
""",
    "tensorflow": """
import tensorflow as tf
variable = tf.Variable(tf.cast(weight, tf.float32))
result = tf.linalg.matvec(variable, tf.ones(4)) + bias
""",
    "paddle": """
import paddle
layer = paddle.nn.Linear(4, 8)
layer.set_state_dict({"weight": weight.astype("float32").T, "bias": bias})
result = layer(paddle.ones([4])).detach()
""",
    "cupy": """
import cupy
result = weight.view(cupy.uint16).astype(cupy.uint32) << 16
result = result.view(cupy.float32) @ cupy.ones(4, cupy.float32) + bias
""",
}
TELL = """
print(type(weight).__module__.partition(".")[0], weight.dtype, tuple(weight.shape),
      "sum", float(result.sum() if hasattr(result, "sum") else tf.reduce_sum(result)),
      f"{report.aliased_share:.0%} aliased")
"""
expected = float(written["dense.weight"].astype(np.float32).sum() + written["dense.bias"].sum())

# %% [markdown]
# ## Start each


# %%
def missing(framework):
    """Why a framework is left out; None if it can be used."""
    if importlib.util.find_spec(framework) is None:
        return "not installed"
    if framework != "cupy":
        return None
    probe = "import cupy; cupy.zeros(1)"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, check=False)
    return "needs an NVIDIA GPU" if done.returncode else None


for framework, use in USE.items():
    if reason := missing(framework):
        print(f"{framework:11} left out: {reason}")
        continue
    program = LOAD.format(framework=framework) + use + TELL
    done = subprocess.run(
        [sys.executable, "-c", program, path], capture_output=True, text=True, timeout=180
    )
    assert done.returncode == 0, done.stderr
    print(f"{framework:11} {done.stdout.splitlines()[-1]}")
    assert f"sum {expected}" in done.stdout

# %%
folder.cleanup()
