"""`save` of trees: what `restore` gives back, bit for bit."""

# pyright: reportUnknownParameterType=false, reportUntypedBaseClass=false

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import mfload
from mfload import errors
from mfload.formats import structure


class Pair(NamedTuple):
    one: Any
    two: Any


def _assert_same(tree: Any, other: Any) -> None:
    flat, treedef = jax.tree.flatten(tree)
    found, same = jax.tree.flatten(other)
    assert treedef == same
    for one, two in zip(flat, found, strict=True):
        if jnp.issubdtype(getattr(one, "dtype", np.float32), jax.dtypes.prng_key):
            one, two = jax.random.key_data(one), jax.random.key_data(two)
        assert np.asarray(one).dtype == np.asarray(two).dtype
        assert np.asarray(one).tobytes() == np.asarray(two).tobytes()


def test_nested_dicts_come_back_as_they_were(tmp_path: Path) -> None:
    state = {
        "params": {"layers": [{"w": np.ones((2, 3), np.float16)}, {"w": np.zeros(4, np.int8)}]},
        "pair": (np.arange(3), np.float32(2.5)),
        "step": 7,
        "rate": 1e-3,
        "name": "base",
        "none": None,
        "empty": {},
        "numbers": {1: np.ones(2)},
    }
    saved = mfload.save(state, tmp_path / "a.safetensors", metadata={"who": "me"})
    assert saved.tensors == 5
    names = set(mfload.load(tmp_path / "a.safetensors", "numpy"))
    assert names == {"params.layers.0.w", "params.layers.1.w", "pair.0", "pair.1", "numbers.1"}
    found = mfload.restore(tmp_path / "a.safetensors", framework="numpy")
    assert found["step"] == 7
    assert found["none"] is None
    _assert_same(found, state)


def test_a_flat_dict_stays_as_it_is(tmp_path: Path) -> None:
    arrays = {"a.b": np.ones(3), "c": jnp.ones(2), "p": nnx.Param(jnp.ones(2))}
    mfload.save(arrays, tmp_path / "a.safetensors")
    assert structure.KEY.encode() not in (tmp_path / "a.safetensors").read_bytes()


def _train_state() -> TrainState:
    model = nn.Sequential([nn.Dense(4), nn.Dense(3)])
    params = model.init(jax.random.key(0), jnp.ones((1, 5)))
    tx = optax.chain(optax.clip(1.0), optax.adamw(optax.linear_schedule(1e-2, 1e-3, 10)))
    state = TrainState.create(apply_fn=model.apply, params=params, tx=tx)
    for seed in range(3):
        grads = jax.tree.map(lambda x, s=seed: jnp.full_like(x, 0.1 * s), params)
        state = state.apply_gradients(grads=grads)
    return state


def test_a_train_state(tmp_path: Path) -> None:
    state = _train_state()
    mfload.save(state, tmp_path / "a.safetensors")
    target = jax.tree.map(lambda x: jnp.zeros_like(x) if hasattr(x, "shape") else 0, state)
    found = mfload.restore(tmp_path / "a.safetensors", target)
    assert isinstance(found, TrainState)
    _assert_same(found, state)
    grads = jax.tree.map(jnp.ones_like, state.params)
    _assert_same(found.apply_gradients(grads=grads), state.apply_gradients(grads=grads))
    plain = mfload.restore(tmp_path / "a.safetensors", framework="jax")
    assert plain["step"] == 3
    assert set(plain["opt_state"][1][0]) == {"count", "mu", "nu"}


class Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(6, 4, rngs=rngs)
        self.layers = nnx.List([nnx.Linear(4, 4, rngs=rngs, param_dtype=jnp.bfloat16)])
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.head = nnx.Linear(4, 6, rngs=rngs)
        self.tied = self.embed


@pytest.mark.parametrize("what", ["module", "state", "optimizer"])
def test_nnx(what: str, tmp_path: Path) -> None:
    def make(seed: int) -> Any:
        model = Model(nnx.Rngs(seed))
        if what == "optimizer":
            return nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
        return model if what == "module" else nnx.state(model)

    one, two = make(0), make(1)
    mfload.save(one, tmp_path / "a.safetensors")
    names = set(mfload.load(tmp_path / "a.safetensors", "numpy"))
    assert not any(name.endswith("value") for name in names)
    found = mfload.restore(tmp_path / "a.safetensors", two)
    assert type(found) is type(two)
    state = lambda each: each if what == "state" else nnx.state(each)  # noqa: E731
    _assert_same(nnx.to_pure_dict(state(found)), nnx.to_pure_dict(state(one)))
    if what == "module":
        assert "embed.embedding" in names
        assert "tied.embedding" not in names
        plain = mfload.restore(tmp_path / "a.safetensors", framework="jax")
        assert (plain["tied"]["embedding"] == plain["embed"]["embedding"]).all()
        assert isinstance(plain["layers"], dict | list)


def test_boxes_and_keys_and_meshes(tmp_path: Path) -> None:
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("x", "y"))
    array = jax.device_put(
        jnp.arange(32.0).reshape(8, 4), NamedSharding(mesh, PartitionSpec("x", "y"))
    )
    state = {
        "w": nn.Partitioned(array, ("x", "y")),
        "key": jax.random.key(3),
        "keys": Pair(jax.random.split(jax.random.key(3, impl="rbg"), 2), 1),
    }
    mfload.save(state, tmp_path / "a.safetensors")
    target = jax.tree.map(lambda x: x, state) | {"key": jax.random.key(0)}
    _assert_same(mfload.restore(tmp_path / "a.safetensors", target), state)
    data = mfload.restore(tmp_path / "a.safetensors", framework="jax")["key"]
    assert (jax.random.wrap_key_data(data) == jax.random.key(3)).all()


def test_what_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    with pytest.raises(errors.UsageError, match="same name") as caught:
        mfload.save({"a": {"b": np.ones(1)}, "a.b": np.ones(1)}, path)
    assert "['a', 'b'] and ['a.b']" in str(caught.value)
    with pytest.raises(errors.UsageError, match="same name"):
        mfload.save({"a": {"b": 1}, "a.b": np.ones(1)}, path)
    with pytest.raises(errors.UnsupportedArrayError, match="can't be saved") as other:
        mfload.save({"a": {"b": object()}}, path)
    assert other.value.tensor == "a.b"
    with pytest.raises(errors.UnsupportedArrayError) as other:
        mfload.save({"a": {"b": jax.ShapeDtypeStruct((2,), jnp.float32)}}, path)
    assert other.value.tensor == "a.b"
    with pytest.raises(errors.UsageError, match="save the state alone"):
        mfload.save(nnx.split(nnx.Linear(2, 2, rngs=nnx.Rngs(0))), path)
    loop: dict[str, Any] = {"w": np.ones(1)}
    loop["again"] = loop
    with pytest.raises(errors.UsageError, match="holds itself"):
        mfload.save(loop, path)
    deep: Any = np.ones(1)
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(errors.UsageError, match="too deep"):
        mfload.save({"deep": deep}, path)
    with pytest.raises(errors.UsageError, match="invalid metadata"):
        mfload.save({"a": {"b": np.ones(1)}}, path, metadata={structure.KEY: "{}"})
    assert not path.exists()
