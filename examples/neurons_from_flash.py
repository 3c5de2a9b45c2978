# %% [markdown]
# # Neurons from flash
#
# Install: `pip install '.[jax]' '.[cli,verify]'`.
#
# Of a feed-forward layer with ReLU, a token uses the neurons that fire, and most do not. Here a
# small transformer is trained to be sparse; its neurons are bundled, so that each is one read; and
# it runs with a part of them in memory, as "LLM in a flash" (Alizadeh et al., 2024) has it. A
# predictor says which will fire. The consumers are NumPy and JAX.

# %%
import tempfile
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import mfload
from mfload.ondemand import NeuronCache, Predictor, bundle

VOCABULARY, WIDTH, HEAD, NEURONS, LAYERS = 64, 128, 32, 2048, 2

# %% [markdown]
# ## A sparse transformer
#
# The next symbol of a text depends on the last two. A small penalty on activations makes neurons
# fire rarely, as those of large models with ReLU do by themselves. The names are those of OPT.

# %%
random = np.random.default_rng(0)


def normal(*shape):
    return random.standard_normal(shape, np.float32) / np.float32(np.sqrt(shape[-1]))


weights = {"embed": 8 * normal(VOCABULARY, WIDTH), "head": normal(VOCABULARY, WIDTH)}
for layer in range(LAYERS):
    prefix = f"layers.{layer}"
    weights |= {f"{prefix}.{name}": normal(HEAD, WIDTH).T for name in ("q", "k", "v")}
    weights[f"{prefix}.out"] = normal(HEAD, WIDTH)
    weights[f"{prefix}.fc1.weight"] = normal(NEURONS, WIDTH)
    weights[f"{prefix}.fc1.bias"] = np.zeros(NEURONS, np.float32)
    weights[f"{prefix}.fc2.weight"] = normal(WIDTH, NEURONS)


def norm(x):
    middle = x - x.mean(-1, keepdims=True)
    return middle / ((middle**2).mean(-1, keepdims=True) + 1e-5) ** 0.5


def attention(np, x, model, layer):
    """Of a text [symbols, WIDTH]; `np` is NumPy or JAX's."""
    q, k, v, out = (model[f"layers.{layer}.{name}"] for name in ("q", "k", "v", "out"))
    n = len(x)
    # Neighbours are easier to find: each symbol prefers those that are near.
    distance = (np.arange(n)[:, None] - np.arange(n)).astype(np.float32)
    scores = (norm(x) @ q) @ (norm(x) @ k).T / HEAD**0.5 - 2.0 * distance
    scores = np.where(distance >= 0, scores, -1e9)
    shares = np.exp(scores - scores.max(-1, keepdims=True))
    return shares / shares.sum(-1, keepdims=True) @ (norm(x) @ v) @ out


def logits_of(np, text, model, ffn):
    x = model["embed"][text]
    for layer in range(LAYERS):
        x = x + attention(np, x, model, layer)
        x = x + ffn(layer, norm(x))
    return norm(x) @ model["head"].T


def loss_of(model, texts):
    def one(text):
        fired = []

        def ffn(layer, x):
            prefix = f"layers.{layer}"
            up = x @ model[f"{prefix}.fc1.weight"].T + model[f"{prefix}.fc1.bias"]
            fired.append(jax.nn.relu(up))
            return fired[-1] @ model[f"{prefix}.fc2.weight"].T

        said = jax.nn.log_softmax(logits_of(jnp, text, model, ffn))[1:-1]
        wrong = -jnp.take_along_axis(said, text[2:, None], 1).mean()
        return wrong, sum(each.mean() for each in fired)

    wrong, activity = jax.vmap(one)(texts)
    return wrong.mean() + 1.0 * activity.mean(), wrong.mean()


@jax.jit
def train_step(model, means, squares, texts, step):
    (_, loss), found = jax.value_and_grad(loss_of, has_aux=True)(model, texts)
    means = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, means, found)
    squares = jax.tree.map(lambda s, g: 0.99 * s + 0.01 * g * g, squares, found)
    rate = 2e-3 * jnp.minimum(1.0, step / 20)
    model = jax.tree.map(lambda w, m, s: w - rate * m / (jnp.sqrt(s) + 1e-6), model, means, squares)
    return model, means, squares, loss


following = random.integers(0, VOCABULARY, (8, VOCABULARY))


def texts_of(count, length=24):
    made = random.integers(0, VOCABULARY, (count, length))
    for n in range(2, length):
        made[:, n] = following[made[:, n - 2] % 8, made[:, n - 1]]
    return made


means, squares = (jax.tree.map(jnp.zeros_like, weights) for _ in range(2))
for step in range(1, 151):
    weights, means, squares, loss = train_step(weights, means, squares, texts_of(16), step)
    if step % 50 == 0:
        print(f"step {step}: loss {float(loss):.2f}")
assert loss < 1

# %%
folder = tempfile.TemporaryDirectory()
path, bundled = Path(folder.name) / "dense.safetensors", Path(folder.name) / "bundled.safetensors"
mfload.save(weights, path)
print(bundle(path, bundled, up=r"layers\.(\d+)\.fc1\.weight", down=r"layers\.(\d+)\.fc2\.weight"))
size = bundled.stat().st_size

# %% [markdown]
# ## Predictors
#
# Two matrices of low rank for each layer, trained on inputs of the layer and on which neurons
# fired. The loss is logistic, and the neurons that fired weigh as much, all together, as those that
# did not. What is held out decides the threshold: the highest that names a share `recall` of what
# fired.

# %%


@jax.jit
def train_predictor(values, means, squares, x, fired, weigh, rate):
    def loss(values):
        first, second, bias = values
        scores = x @ first @ second + bias
        return jnp.where(
            fired, weigh * jax.nn.softplus(-scores), (1 - weigh) * jax.nn.softplus(scores)
        ).mean()

    found = jax.grad(loss)(values)
    means = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, means, found)
    squares = jax.tree.map(lambda s, g: 0.99 * s + 0.01 * g * g, squares, found)
    step = jax.tree.map(lambda m, s: rate * m / (jnp.sqrt(s) + 1e-8), means, squares)
    return jax.tree.map(jnp.subtract, values, step), means, squares


def predictor_of(x, fired, rank=64, epochs=8, batch=64, recall=0.99):
    count, width = x.shape
    order = random.permutation(count)
    test, train = order[: count // 10], order[count // 10 :]
    middle, scale = x[train].mean(0), x[train].std(0)  # Each input counts as much.
    values = [normal(width, rank), np.zeros((rank, fired.shape[1]), np.float32)]
    values.append(np.zeros(fired.shape[1], np.float32))
    means, squares = (jax.tree.map(jnp.zeros_like, values) for _ in range(2))
    weigh, steps = 1 - fired[train].mean(), epochs * (train.size // batch)
    for step in range(steps):
        some = random.choice(train, batch)
        given = (x[some] - middle) / scale, fired[some], weigh, 3e-3 * (1 - step / steps)
        values, means, squares = train_predictor(values, means, squares, *given)
    first, second, bias = map(np.asarray, values)
    first = first / scale[:, None]
    bias = bias - middle @ first @ second
    scores, fired = x[test] @ first @ second + bias, fired[test]
    threshold = np.quantile(scores[fired], 1 - recall)
    named = scores >= threshold
    figures = np.array([named[fired].sum(), named.sum()]) / fired.sum()
    return Predictor(first, second, bias, float(threshold), *map(float, figures))


# %% [markdown]
# The activations are of texts of the same kind; yours are of a run of your model over some texts.

# %%
model = dense = mfload.load(path, "numpy")
seen = {layer: ([], []) for layer in range(LAYERS)}


def fire(layer, x):
    prefix = f"layers.{layer}"
    return np.maximum(x @ dense[f"{prefix}.fc1.weight"].T + dense[f"{prefix}.fc1.bias"], 0)


def watched(layer, x):
    hidden = fire(layer, x)
    seen[layer][0].append(x)
    seen[layer][1].append(hidden > 0)
    return hidden @ model[f"layers.{layer}.fc2.weight"].T


for text in texts_of(128):
    logits_of(np, text, model, watched)
predictors = {}
for layer, (x, fired) in seen.items():
    fired = np.concatenate(fired)
    made = predictors[layer] = predictor_of(np.concatenate(x), fired)
    print(
        f"layer {layer}: {fired.mean():.1%} fire, {made.recall:.1%} of them named, "
        f"{made.over_prediction:.1f} named for each"
    )

# %% [markdown]
# ## Token by token
#
# One text, with keys and values kept, and a feed-forward function that is given: over all weights,
# then over those that the cache holds.


# %%
def decode(text, ffn):
    """Logits after each symbol."""
    said, kept = [], [([], []) for _ in range(LAYERS)]
    for place, symbol in enumerate(text):
        x = model["embed"][symbol]
        for layer, (keys, values) in enumerate(kept):
            q, k, v, out = (model[f"layers.{layer}.{name}"] for name in ("q", "k", "v", "out"))
            keys.append(norm(x) @ k)
            values.append(norm(x) @ v)
            distance = np.arange(place, -1, -1, np.float32)
            scores = np.stack(keys) @ (norm(x) @ q) / HEAD**0.5 - 2.0 * distance
            shares = np.exp(scores - scores.max())
            x = x + shares / shares.sum() @ np.stack(values) @ out
            x = x + ffn(layer, norm(x))
        said.append(norm(x) @ model["head"].T)
    return np.stack(said)


text = texts_of(1, 48)[0]
expected = decode(text, lambda layer, x: fire(layer, x) @ dense[f"layers.{layer}.fc2.weight"].T)

# %% [markdown]
# ## In NumPy
#
# `part.rows` says which neurons the rows of `part.up` and `part.down` are: those that were asked
# for, and those of the last few tokens, which a window keeps, as they are likely to fire again.
# Biases, attention and embeddings are no bundles, and stay in `cache.resident`. Neurons that are
# there and do not fire add nothing. Those that fire and were not named are missing, so the logits
# are not those of the dense model. With 1 % missing, they are to differ by less than 5 % (the root
# of the mean square), and the symbol that follows is to be the same.
#
# The first symbols of a text make more neurons fire than a small budget has room for. So `predict`
# is told how many there may be, and names those with the highest scores.

# %%
TOLERANCE = 0.05
budgets = size // 4, size // 2


def difference(found):
    return float(np.sqrt(((found - expected) ** 2).mean() / (expected**2).mean()))


def from_flash(cache, layer, x):
    with cache.use(layer, predictors[layer].predict(x, cache.capacity[layer])) as part:
        bias = cache.resident[f"layers.{layer}.fc1.bias"][part.rows]
        return np.maximum(x @ part.up.T + bias, 0) @ part.down


def gathered(cache, layer, x):
    """The same product, of rows that are gathered from all weights."""
    with cache.use(layer, predictors[layer].predict(x, cache.capacity[layer])) as part:
        prefix = f"layers.{layer}"
        up = dense[f"{prefix}.fc1.weight"][part.rows]
        down = np.ascontiguousarray(dense[f"{prefix}.fc2.weight"].T)[part.rows]
        bias = dense[f"{prefix}.fc1.bias"][part.rows]
        return np.maximum(x @ up.T + bias, 0) @ down


for budget in budgets:
    with NeuronCache(bundled, budget=budget, window=3) as cache:
        model = cache.resident
        found = decode(text, partial(from_flash, cache))
        report = cache.report()
    with NeuronCache(bundled, budget=budget, window=3) as cache:
        assert np.array_equal(decode(text, partial(gathered, cache)), found)
    error = difference(found)
    assert error < TOLERANCE
    assert (found.argmax(-1) == expected.argmax(-1))[1:].all()
    assert report.peak_bytes <= budget
    print(f"\n{budget / size:.0%} of its size: logits differ by {error:.1%}")
    print(report)

# %% [markdown]
# With the neurons that do fire in place of a prediction, only the order of the sums is another.


# %%
def told(cache, layer, x):
    with cache.use(layer, np.flatnonzero(fire(layer, x))) as part:
        bias = cache.resident[f"layers.{layer}.fc1.bias"][part.rows]
        return np.maximum(x @ part.up.T + bias, 0) @ part.down


with NeuronCache(bundled, budget=budgets[0], window=3) as cache:
    error = difference(decode(text, partial(told, cache)))
print(f"{error:.1g}")
assert error < 1e-5

# %% [markdown]
# ## In JAX: one shape, compiled once
#
# `part.whole` has the same matrices in one shape for all requests, [capacity, WIDTH]. Behind the
# first `part.used` rows is what others left, so it is masked. The arrays are the cache's memory,
# not copies, and rows stay while a computation with them still runs.

# %%
compiled = []


@jax.jit
def masked(x, up, down, bias, used):
    compiled.append(up.shape)  # Runs when JAX compiles, and not again.
    hidden = jax.nn.relu(up @ x + bias)
    return jnp.where(jnp.arange(len(up)) < used, hidden, 0) @ down


def from_flash_jax(cache, layer, x):
    with cache.use(layer, predictors[layer].predict(x, cache.capacity[layer])) as part:
        bias = np.zeros(cache.capacity[layer], np.float32)
        bias[: part.used] = np.asarray(cache.resident[f"layers.{layer}.fc1.bias"])[part.rows]
        return np.asarray(masked(x, part.whole.up, part.whole.down, bias, part.used))


for budget in budgets:
    compiled.clear()
    with NeuronCache(bundled, budget=budget, window=3, framework="jax") as cache:
        model = {name: np.asarray(array) for name, array in cache.resident.items()}
        error = difference(decode(text, partial(from_flash_jax, cache)))
        print(f"{budget / size:.0%} of its size: logits differ by {error:.1%}")
        assert error < TOLERANCE
        assert len(compiled) == len(set(cache.capacity.values()))

# %%
folder.cleanup()
