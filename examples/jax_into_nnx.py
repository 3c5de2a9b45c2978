# %% [markdown]
# # JAX: a Hugging Face checkpoint into a Flax NNX model
#
# Install: `pip install '.[flax]'`.
#
# The checkpoint calls its tensors one thing, the model another; the checkpoint keeps a layer a
# tensor and linear maps as (outputs, inputs), the model one stack of all layers and (inputs,
# outputs). A key map says how the one becomes the other, and `mfload.load_into` does it while it
# loads, on the devices, shard by shard.

# %%
import os
import tempfile
from pathlib import Path

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax import nnx
from jax.sharding import Mesh, PartitionSpec as P

import mfload

LAYERS, WIDTH, INNER, WORDS = 4, 64, 128, 256

# %% [markdown]
# ## A checkpoint, as Hugging Face names it
#
# Small and made up, in the names of a Llama.

# %%
random = np.random.default_rng(0)


def made_up(*shape):
    return (random.standard_normal(shape) / np.sqrt(shape[-1])).astype(ml_dtypes.bfloat16)


stored = {"model.embed_tokens.weight": made_up(WORDS, WIDTH), "model.norm.weight": made_up(WIDTH)}
for n in range(LAYERS):
    at = f"model.layers.{n}"
    for name in ("q", "k", "v", "o"):
        stored[f"{at}.self_attn.{name}_proj.weight"] = made_up(WIDTH, WIDTH)
    stored[f"{at}.mlp.gate_proj.weight"] = made_up(INNER, WIDTH)
    stored[f"{at}.mlp.up_proj.weight"] = made_up(INNER, WIDTH)
    stored[f"{at}.mlp.down_proj.weight"] = made_up(WIDTH, INNER)
    stored[f"{at}.input_layernorm.weight"] = made_up(WIDTH)
    stored[f"{at}.post_attention_layernorm.weight"] = made_up(WIDTH)
folder = tempfile.TemporaryDirectory()
path = Path(folder.name) / "model.safetensors"
mfload.save(stored, path)
print(len(stored), "tensors stored")

# %% [markdown]
# ## The model
#
# All layers are one module, its parameters stacked, and `nnx.scan` goes through them: compiling
# takes as long as for a single layer. Queries, keys and values are one kernel, as are gate and up.


# %%
def normalised(x, scale):
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) * scale


class Block(nnx.Module):
    """A layer, with one head to be short."""

    def __init__(self, rngs: nnx.Rngs):
        linear = {"use_bias": False, "dtype": jnp.float32, "rngs": rngs}
        self.norm1 = nnx.Param(jnp.ones(WIDTH))
        self.norm2 = nnx.Param(jnp.ones(WIDTH))
        self.qkv = nnx.Linear(WIDTH, 3 * WIDTH, **linear)
        self.out = nnx.Linear(WIDTH, WIDTH, **linear)
        self.gate_up = nnx.Linear(WIDTH, 2 * INNER, **linear)
        self.down = nnx.Linear(INNER, WIDTH, **linear)

    def __call__(self, x):
        q, k, v = jnp.split(self.qkv(normalised(x, self.norm1[...])), 3, -1)
        weights = jax.nn.softmax(jnp.where(jnp.tri(len(x)), q @ k.T / WIDTH**0.5, -jnp.inf))
        x = x + self.out(weights @ v)
        gate, up = jnp.split(self.gate_up(normalised(x, self.norm2[...])), 2, -1)
        return x + self.down(jax.nn.silu(gate) * up)


class Model(nnx.Module):
    """A decoder with tied embeddings."""

    def __init__(self, rngs: nnx.Rngs):
        self.embed = nnx.Embed(WORDS, WIDTH, rngs=rngs)
        self.layers = nnx.vmap(Block, in_axes=0)(rngs.split(LAYERS))
        self.norm = nnx.Param(jnp.ones(WIDTH))

    def __call__(self, ids):
        @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        def through(layer, x):
            return layer(x)

        x = through(self.layers, self.embed(ids))
        return normalised(x, self.norm[...]) @ self.embed.embedding[...].T


# %% [markdown]
# ## The key map
#
# A regex of the checkpoint's name on the left, the model's name on the right. `mfload.rule` says
# the rest: the dims in another order, a stack in the order of the layers' numbers (group 1 of the
# regex), tensors joined side by side in the order of group 2.

# %%
LAYER = r"model\.layers\.(\d+)\."
mapping = {
    r"model\.embed_tokens\.weight": "embed.embedding",
    r"model\.norm\.weight": "norm",
    LAYER + r"self_attn\.(q|k|v)_proj\.weight": mfload.rule(
        "layers.qkv.kernel", transpose=(1, 0), concat=(1, 2, ("q", "k", "v")), stack=1
    ),
    LAYER + r"self_attn\.o_proj\.weight": mfload.rule(
        "layers.out.kernel", transpose=(1, 0), stack=1
    ),
    LAYER + r"mlp\.(gate|up)_proj\.weight": mfload.rule(
        "layers.gate_up.kernel", transpose=(1, 0), concat=(1, 2, ("gate", "up")), stack=1
    ),
    LAYER + r"mlp\.down_proj\.weight": mfload.rule("layers.down.kernel", transpose=(1, 0), stack=1),
    LAYER + r"input_layernorm\.weight": mfload.rule("layers.norm1", stack=1),
    LAYER + r"post_attention_layernorm\.weight": mfload.rule("layers.norm2", stack=1),
}

# %% [markdown]
# ## Load into it
#
# The target is a model without data: `nnx.eval_shape` makes one for nothing. Its parameters are
# float32, the stored ones bfloat16; `dtype="target"`, the default, gives what the target has.

# %%
mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "model"))
shardings = [
    (r"(qkv|gate_up)\.kernel", P(None, "data", "model")),
    (r"(out|down)\.kernel", P(None, "model", "data")),
    (r"embedding", P("model", "data")),
]
target = nnx.eval_shape(lambda: Model(nnx.Rngs(0)))
report = mfload.Report()
model = mfload.load_into(
    target, path, mapping=mapping, mesh=mesh, shardings=shardings, report=report
)
print(f"{report.tensors} arrays, {report.read_bytes} bytes read")
assert report.read_bytes < 1.01 * sum(array.nbytes for array in stored.values())

# %%
kernel = model.layers.qkv.kernel[...]
print(type(model).__name__, kernel.shape, kernel.dtype, kernel.sharding.spec)

# %% [markdown]
# ## Is it the same model?
#
# Layer by layer, against what was stored:

# %%
for n in range(LAYERS):
    parts = [stored[f"model.layers.{n}.self_attn.{name}_proj.weight"].T for name in "qkv"]
    assert np.array_equal(np.asarray(kernel[n]), np.concatenate(parts, axis=1).astype(np.float32))
    down = stored[f"model.layers.{n}.mlp.down_proj.weight"].T.astype(np.float32)
    assert np.array_equal(np.asarray(model.layers.down.kernel[n]), down)
print("every layer is what was stored")

# %% [markdown]
# ## All problems at once
#
# What is missing, left over, matched twice, or of the wrong shape is said in one error, before any
# data is read.

# %%
broken = {regex: what for regex, what in mapping.items() if "norm" not in regex}
broken[r"model\.norm\.weight"] = "nrom"
try:
    mfload.load_into(target, path, mapping=broken, mesh=mesh)
except mfload.errors.MappingError as error:
    print(error)
else:
    raise AssertionError("a broken map was taken")

# %% [markdown]
# ## Names that need no map
#
# Where the model spells its parameters as the checkpoint does and keeps their layout, there is
# nothing to say. [The encoder of the MiniLM demo](minilm/encoder.py) is written like that; its file
# holds a pooling head and a table of positions, too, which `strict=False` leaves out. All it takes
# is
#
#     target = nnx.eval_shape(lambda: SentenceEncoder(config))
#     model = mfload.load_into(target, path, mesh=mesh, strict=False)

# %%
folder.cleanup()
