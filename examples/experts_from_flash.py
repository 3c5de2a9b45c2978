# %% [markdown]
# # Experts from flash
#
# Install: `pip install '.[jax,torch]'`.
#
# A mixture of experts uses a few experts of each layer for a token. `mfload.ondemand.ExpertCache`
# leaves all of them on the disk, in the checkpoint as it is, and reads those that the router names.
# Here a small model is trained, saved, and run in a tenth and in half of the size of its experts,
# in PyTorch and in JAX. What it computes is the same to the last bit.

# %%
import contextlib
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch.nn import functional as F

import mfload

VOCABULARY, WIDTH, HIDDEN = 64, 64, 128
LAYERS, EXPERTS, CHOSEN = 3, 32, 2
torch.manual_seed(0)
torch.set_num_threads(1)  # The products are small.

# %% [markdown]
# ## A model, and what it learns
#
# The next symbol of a text depends on the last two. The names are those of Qwen, OLMoE and
# DeepSeek, which the cache knows by itself.

# %%
weights = {f"embed.{n}": torch.randn(VOCABULARY, WIDTH) for n in (0, 1)}
weights["head"] = torch.randn(VOCABULARY, WIDTH) / WIDTH**0.5
for layer in range(LAYERS):
    weights[f"layers.{layer}.mlp.router"] = torch.randn(EXPERTS, WIDTH) / WIDTH**0.5
    for expert in range(EXPERTS):
        prefix = f"layers.{layer}.mlp.experts.{expert}"
        weights[f"{prefix}.gate_proj.weight"] = torch.randn(HIDDEN, WIDTH) / WIDTH**0.5
        weights[f"{prefix}.up_proj.weight"] = torch.randn(HIDDEN, WIDTH) / WIDTH**0.5
        weights[f"{prefix}.down_proj.weight"] = torch.randn(WIDTH, HIDDEN) / HIDDEN**0.5


def route(x, router):
    """The experts of each token, and their shares: [tokens, CHOSEN] each."""
    scores, ids = torch.topk(F.normalize(x, dim=-1) @ router.T, CHOSEN)
    return ids, torch.softmax(scores, -1)


def expert_output(x, tensors):
    x = F.layer_norm(x, (WIDTH,))
    up = F.silu(x @ tensors["gate_proj"].T) * (x @ tensors["up_proj"].T)
    return up @ tensors["down_proj"].T


def mixture(x, ids, shares, experts):
    """Adds to each token what its experts say; `experts` gives the tensors of each by number."""
    out = x
    for expert in ids.unique().tolist():
        token, place = torch.where(ids == expert)
        said = expert_output(x[token], experts[expert]) * shares[token, place, None]
        out = out.index_add(0, token, said)
    return out


def resident(layer, model):
    names = ("gate_proj", "up_proj", "down_proj")
    prefix = f"layers.{layer}.mlp.experts"
    return [{n: model[f"{prefix}.{e}.{n}.weight"] for n in names} for e in range(EXPERTS)]


def logits_of(tokens, model):
    x = model["embed.0"][tokens[:, 0]] + model["embed.1"][tokens[:, 1]]
    for layer in range(LAYERS):
        ids, shares = route(x, model[f"layers.{layer}.mlp.router"])
        x = mixture(x, ids, shares, resident(layer, model))
    return F.layer_norm(x, (WIDTH,)) @ model["head"].T


following = torch.randint(VOCABULARY, (VOCABULARY, VOCABULARY))
optimizer = torch.optim.Adam([each.requires_grad_() for each in weights.values()], lr=2e-3)
for step in range(120):
    tokens = torch.randint(VOCABULARY, (256, 2))
    loss = F.cross_entropy(logits_of(tokens, weights), following[tokens[:, 0], tokens[:, 1]])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 30 == 0 or step == 119:
        print(f"step {step:3}: loss {loss.item():.2f}")
assert loss < 1.5

# %%
folder = tempfile.TemporaryDirectory()
path = Path(folder.name) / "mixture.safetensors"
mfload.save({name: each.detach() for name, each in weights.items()}, path)
size = LAYERS * EXPERTS * 3 * WIDTH * HIDDEN * 4
print(f"{size / 2**20:.0f} MiB of experts in {path.stat().st_size / 2**20:.1f} MiB")

# %% [markdown]
# ## Token by token, with the experts on the disk
#
# `cache.use` gives the experts of a layer for a block. Until it ends, and as long as one of their
# arrays lives, their memory stays as it is. `cache.prefetch` reads what the next layer is likely to
# use while this one computes: its router has a guess, from what the layer before it gets.


# %%
@torch.no_grad()
def generate(model, use, prefetch=lambda layer, ids: None, count=48):
    """Logits of each step, of a text that begins with 1, 2."""
    text, said = [1, 2], []
    for _ in range(count):
        x = (model["embed.0"][text[-2]] + model["embed.1"][text[-1]])[None]
        for layer in range(LAYERS):
            ids, shares = route(x, model[f"layers.{layer}.mlp.router"])
            with use(layer, ids) as experts:
                if layer + 1 < LAYERS:
                    prefetch(layer + 1, route(x, model[f"layers.{layer + 1}.mlp.router"])[0])
                x = mixture(x, ids, shares, experts)
        said.append((F.layer_norm(x, (WIDTH,)) @ model["head"].T)[0])
        text.append(int(said[-1].argmax()))
    return torch.stack(said)


loaded = mfload.load(path, "torch")
expected = generate(loaded, lambda layer, ids: contextlib.nullcontext(resident(layer, loaded)))

others = mfload.load(path, "torch", names=r"embed|head|router")
for budget in (size // 10, size // 2):
    with mfload.ondemand.ExpertCache(path, budget=budget, framework="torch") as cache:
        found = generate(others, cache.use, cache.prefetch)
        assert torch.equal(found, expected)
        report = cache.report()
        assert report.peak_bytes <= budget
        print(f"\n{budget / size:.0%} of the experts' size: logits equal, bit for bit")
        print(report)

# %% [markdown]
# ## In JAX: a fixed number of experts, compiled once
#
# Several texts at once name a varying number of experts. A function of CAPACITY experts is compiled
# once, if the list is filled up with experts that are there, and their share is 0. JAX's arrays are
# the slots, not copies, and a computation that still runs keeps its experts where they are.

# %%
TEXTS, CAPACITY = 4, 8
compiled = []


def expert_output_jax(x, tensors):
    x = (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)
    up = jax.nn.silu(x @ tensors["gate_proj"].T) * (x @ tensors["up_proj"].T)
    return up @ tensors["down_proj"].T


@jax.jit
def mixture_jax(x, shares, experts):
    """Adds to each text what CAPACITY experts say; shares [TEXTS, CAPACITY] are 0 for most."""
    compiled.append(x.shape)  # Runs when JAX compiles, and not again.
    said = jnp.stack([expert_output_jax(x, each) for each in experts], axis=1)
    return x + jnp.einsum("te,tew->tw", shares, said)


@jax.jit
def route_jax(x, router):
    normal = x / jnp.linalg.norm(x, axis=-1, keepdims=True)
    scores, ids = jax.lax.top_k(normal @ router.T, CHOSEN)
    return ids, jax.nn.softmax(scores)


def generate_jax(model, use, count=24):
    """Logits of each step, of texts that begin with different symbols."""
    texts, said = np.arange(2 * TEXTS).reshape(TEXTS, 2), []
    for _ in range(count):
        x = model["embed.0"][texts[:, -2]] + model["embed.1"][texts[:, -1]]
        for layer in range(LAYERS):
            ids, shares = map(np.asarray, route_jax(x, model[f"layers.{layer}.mlp.router"]))
            named = np.unique(ids)
            filled = np.resize(named, CAPACITY)
            mask = np.arange(CAPACITY) < named.size
            table = ((ids[:, :, None] == filled) * shares[:, :, None]).sum(1) * mask
            with use(layer, named) as experts:
                x = mixture_jax(x, table, [dict(experts[expert]) for expert in filled.tolist()])
        said.append(np.asarray(x @ model["head"].T))
        texts = np.append(texts, said[-1].argmax(-1)[:, None], axis=1)
    return np.stack(said)


loaded = mfload.load(path, "jax")
expected = generate_jax(loaded, lambda layer, ids: contextlib.nullcontext(resident(layer, loaded)))
others = mfload.load(path, "jax", names=r"embed|head|router")
for budget in (size // 10, size // 2):
    with mfload.ondemand.ExpertCache(path, budget=budget, framework="jax") as cache:
        assert np.array_equal(generate_jax(others, cache.use), expected)
        print(f"\n{budget / size:.0%} of the experts' size: logits equal, bit for bit")
        print(cache.report())
assert len(compiled) == 1

# %% [markdown]
# An expert that is there comes at the same address again: the array is its slot.

# %%
with mfload.ondemand.ExpertCache(path, budget=size // 10, framework="jax") as cache:
    places = []
    for _ in range(2):
        with cache.use(0, [3, 17]) as experts:
            places.append(experts[17]["up_proj"].unsafe_buffer_pointer())
    print(places[0] == places[1], cache.report().misses, "misses")
    assert places[0] == places[1]
    assert cache.report().misses == 2

# %%
folder.cleanup()
