"""`abstract`: what a load would make, from headers alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import samples
import shards
from calls import as_options
from jax.sharding import NamedSharding, PartitionSpec as P, SingleDeviceSharding

import mfload
from mfload import errors


@pytest.fixture
def path(tmp_path: Path) -> Path:
    raw = bytes(range(96))
    rows = [
        ("w", "BF16", (8, 6), raw),
        ("ids", "I64", (12,), raw),
        ("scalar", "F32", (), raw[:4]),
        ("empty", "F16", (0, 8), b""),
        ("six", "F6_E2M3", (8, 16), raw),
        ("four", "F4", (8, 24), raw),
        ("flags", "BOOL", (96,), bytes(96)),
    ]
    return samples.save_raw(tmp_path / "a.safetensors", rows)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"dtype": "float32"},
        {"names": "w|six"},
        {"mesh": (2, 4)},
        {"mesh": (2, 4), "shardings": [("^(w|six|four)$", P("x"))]},
        {"mesh": (2, 4), "shardings": {"w": P(None, "x"), "ids": P("y")}},
        {"shardings": SingleDeviceSharding(jax.devices()[3])},
    ],
)
def test_it_is_what_is_loaded(path: Path, options: dict[str, Any]) -> None:
    given = dict(options)
    if "mesh" in given:
        given["mesh"] = shards.mesh(given["mesh"])
    abstract = mfload.abstract(path, **as_options(given))
    loaded = mfload.load(path, framework="jax", **as_options(given))
    assert list(abstract) == list(loaded)
    for name, array in loaded.items():
        struct = abstract[name]
        assert isinstance(struct, jax.ShapeDtypeStruct)
        assert (struct.shape, struct.dtype) == (array.shape, array.dtype), name
        expected = array.sharding if "mesh" in given or "shardings" in given else None
        assert struct.sharding == expected


def test_it_reads_headers_only(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "mfload.loading.execute.Transfer", lambda *_, **__: pytest.fail("data was read")
    )
    assert mfload.abstract(path, names=["w"])["w"].shape == (8, 6)
    assert mfload.live_bytes() == 0


def test_jax_can_compile_for_it(path: Path) -> None:
    mesh = shards.mesh((2, 3))
    struct = mfload.abstract(path, mesh=mesh, shardings={"w": P("x", "y")})["w"]
    compiled = jax.jit(lambda x: jnp.sin(x) * 2).lower(struct).compile()
    loaded = mfload.load(path, framework="jax", mesh=mesh, shardings={"w": P("x", "y")})["w"]
    assert np.asarray(compiled(loaded)).shape == (8, 6)
    assert loaded.sharding == NamedSharding(mesh, P("x", "y"))


def test_what_load_refuses_it_refuses(path: Path, tmp_path: Path) -> None:
    with pytest.raises(errors.ShardingError):
        mfload.abstract(path, mesh=shards.mesh((5,)), shardings={"w": P("x")})
    with pytest.raises(errors.UsageError):
        mfload.abstract(path, shardings=P("x"))
    with pytest.raises(errors.SourceNotFoundError):
        mfload.abstract(tmp_path / "nowhere")
    with pytest.raises(errors.TensorNotFoundError):
        mfload.abstract(path, names=["wi"])
    strange = samples.save_raw(tmp_path / "b.safetensors", [("x", "F3", (8,), b"abc")])
    with pytest.raises(errors.UnsupportedDtypeError) as info:
        mfload.abstract(strange)
    assert info.value.tensor == "x"


def test_rules_for_tensors_beside_a_subset_are_no_mistake(
    tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    """Of sharded files only the headers of the subset are read; the index knows all names."""
    for name in ("a", "b"):
        samples.save(tmp_path / f"{name}.safetensors", {name: np.ones((8, 8), np.float32)})
    weights = {name: f"{name}.safetensors" for name in ("a", "b")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weights}))
    options: Any = {"names": ["a"], "mesh": shards.mesh((2, 4))}
    for shardings in ([("^a", P("x")), ("^b", P("y"))], {"a": P("x"), "b": P("y")}):
        given: Any = {**options, "shardings": shardings}
        mfload.load(tmp_path, "jax", **given)
        mfload.plan(tmp_path, "jax", **given)
        mfload.abstract(tmp_path, **given)
    assert [str(each.message) for each in recwarn] == []
    with pytest.warns(UserWarning, match="match no tensor: 'c'"):
        mfload.abstract(tmp_path, **options, shardings={"a": P("x"), "c": P("y")})
