"""Flax's msgpack files against Flax: what it writes, and what it reads of the same bytes."""

from __future__ import annotations

import random
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import serialization

import mfload
from mfload import errors
from mfload.formats import structure

_NAMES = ["float32", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int8", "uint32", "bool", "int64"]


def made_array(rng: random.Random, shape: tuple[int, ...] | None = None) -> Any:
    shape = tuple(rng.randint(0, 4) for _ in range(rng.randint(0, 3))) if shape is None else shape
    name = rng.choice(_NAMES)
    dtype = np.dtype(getattr(ml_dtypes, name, name))
    raw = rng.randbytes(int(np.prod(shape)) * dtype.itemsize)
    if name == "bool":
        raw = bytes(byte & 1 for byte in raw)
    return np.frombuffer(raw, dtype).reshape(shape)


def made_tree(rng: random.Random, depth: int = 0) -> Any:
    kind = rng.randrange(12 if depth < 4 else 9)
    if kind < 4:
        return made_array(rng)
    if kind < 9:
        leaves = [rng.randint(-9, 1 << 40), rng.random(), "text é", None, complex(1, 2), True]
        return rng.choice([*leaves, np.float32(1.5), jnp.arange(3), b"raw"])
    if kind < 10:
        return [made_tree(rng, depth + 1) for _ in range(rng.randint(0, 3))]
    return {f"k{n}": made_tree(rng, depth + 1) for n in range(rng.randint(0, 4))}


def read(raw: bytes) -> Any:
    arrays = mfload.load(raw, "numpy")
    with mfload.open(raw) as opened:
        return structure.loads(opened.metadata()[structure.KEY], "it", arrays.__getitem__)


def same(found: Any, wanted: Any) -> None:
    if isinstance(wanted, dict):
        assert list(found) == list(wanted)
        for key in wanted:
            same(found[key], wanted[key])
    elif isinstance(wanted, list | tuple):
        assert len(found) == len(wanted)
        for one, other in zip(found, wanted, strict=True):
            same(one, other)
    elif hasattr(wanted, "dtype"):
        wanted = np.asarray(wanted)
        assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
        assert found.tobytes() == wanted.tobytes()
    else:
        assert type(found) is type(wanted)
        assert found == wanted


@pytest.mark.parametrize("seed", range(60))
def test_random_trees(seed: int) -> None:
    rng = random.Random(seed)
    tree = {"a": made_tree(rng), "b": made_tree(rng), "c": {"d": made_array(rng)}}
    raw = serialization.msgpack_serialize(tree)
    same(read(raw), serialization.msgpack_restore(raw))


@pytest.mark.parametrize("limit", [1, 3, 8, 40, 1000])
def test_chunked_arrays(monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    monkeypatch.setattr(serialization, "MAX_CHUNK_SIZE", limit)
    rng = random.Random(limit)
    tree = {str(n): made_array(rng, shape) for n, shape in enumerate([(7, 11), (3,), (2, 3, 4)])}
    raw = serialization.msgpack_serialize(tree)
    same(read(raw), serialization.msgpack_restore(raw))
    with mfload.open(raw) as opened:
        rows = opened.get_slice("0")
        same(rows[2:5, 1:9:2], np.asarray(tree["0"])[2:5, 1:9:2])


def test_sharded_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serialization, "MAX_CHUNK_SIZE", 40)
    array = np.arange(8 * 24, dtype="f4").reshape(8, 24)
    raw = serialization.msgpack_serialize({"w": array})
    mesh = jax.make_mesh((2, 4), ("a", "b"))
    found = mfload.load(raw, "jax", mesh=mesh, shardings=[("w", jax.P("b", "a"))])["w"]
    assert found.sharding.spec == jax.P("b", "a")
    same(np.asarray(found), array)


def test_what_flax_refuses_is_refused() -> None:
    raw = serialization.to_bytes({"w": np.arange(4.0), "n": 1})
    for length in range(len(raw)):
        with pytest.raises(errors.HeaderError):
            mfload.load(raw[:length] or b"\x80", "numpy") if length else mfload.load(b"", "numpy")
        with pytest.raises(Exception):  # noqa: B017 - msgpack and NumPy raise several
            serialization.msgpack_restore(raw[:length])
