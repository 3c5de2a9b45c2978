"""Models and train states to restore, and comparison bit by bit."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn, nnx
from flax.training.train_state import TrainState


class Block(nn.Module):
    """Linen with logical axes, dropout left out."""

    width: int = 16
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: Any) -> Any:
        init = nn.with_logical_partitioning(nn.initializers.lecun_normal(), ("embed", "mlp"))
        x = nn.Dense(self.width * 2, kernel_init=init, param_dtype=self.dtype)(x)
        return nn.Dense(self.width, param_dtype=self.dtype)(nn.relu(x))


class Net(nnx.Module):
    """NNX with batch statistics and a stream of random numbers."""

    def __init__(self, rngs: nnx.Rngs, width: int = 16, dtype: Any = jnp.float32) -> None:
        self.a = nnx.Linear(8, width, rngs=rngs, param_dtype=dtype)
        self.norm = nnx.BatchNorm(width, rngs=rngs)
        self.drop = nnx.Dropout(0.25, rngs=rngs)
        self.b = nnx.Linear(width, 8, rngs=rngs, param_dtype=dtype)

    def __call__(self, x: Any) -> Any:
        return self.b(self.drop(nnx.relu(self.norm(self.a(x)))))


_TX = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(optax.constant_schedule(1e-2)))
_BLOCKS: dict[Any, Block] = {}  # States are of one structure if they have one model.


def linen_state(seed: int = 0, dtype: Any = jnp.float32, steps: int = 0) -> TrainState:
    """A train state of Linen, after some steps."""
    model = _BLOCKS.setdefault(dtype, Block(dtype=dtype))
    params = nn.unbox(model.init(jax.random.key(seed), jnp.ones((1, 16), dtype)))["params"]
    apply = vars(model).setdefault("_apply", model.apply)
    state = TrainState.create(apply_fn=apply, params=params, tx=_TX)
    for step in range(steps):
        state = linen_step(state, step)
    return state


def linen_step(state: TrainState, number: int) -> TrainState:
    """A step of training that its number and the state decide."""
    x = jax.random.normal(jax.random.key(number), (8, 16))

    def loss(params: Any) -> Any:
        return jnp.mean((state.apply_fn({"params": params}, x) - jnp.roll(x, 1, 0)) ** 2)

    return state.apply_gradients(grads=jax.grad(loss)(state.params))


def nnx_optimizer(seed: int = 0, steps: int = 0, dtype: Any = jnp.float32) -> tuple[Any, Any]:
    """A model and its optimizer, after some steps."""
    model = Net(nnx.Rngs(seed), dtype=dtype)
    optimizer = nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param)
    for step in range(steps):
        nnx_step(model, optimizer, step)
    return model, optimizer


def nnx_state(seed: int = 0, steps: int = 0) -> Any:
    """The model's state alone."""
    return nnx.state(nnx_optimizer(seed, steps)[0])


def keyless(tree: Any) -> Any:
    """A state with the data of its typed keys."""
    typed = jax.dtypes.prng_key
    return jax.tree.map(
        lambda x: jax.random.key_data(x) if jax.dtypes.issubdtype(x.dtype, typed) else x, tree
    )


def nnx_step(model: Any, optimizer: Any, number: int) -> None:
    """The same for NNX, in place."""
    x = jax.random.normal(jax.random.key(number), (8, 8))
    grads = nnx.grad(lambda model: jnp.mean((model(x) - x) ** 2))(model)
    optimizer.update(model, grads)


def bits(value: Any) -> Any:
    """A leaf as bytes, with dtype and shape."""
    if jax.dtypes.issubdtype(getattr(value, "dtype", None), jax.dtypes.prng_key):
        value = jax.random.key_data(value)
    array = np.asarray(value)
    return str(array.dtype), array.shape, array.tobytes()


def assert_same(found: Any, wanted: Any) -> None:
    """Both are of one structure, and every leaf is the same bit by bit."""
    one, other = (jax.tree_util.tree_flatten_with_path(each) for each in (found, wanted))
    assert one[1] == other[1]
    for (path, left), (_, right) in zip(one[0], other[0], strict=True):
        assert bits(left) == bits(right), jax.tree_util.keystr(path)
