"""Key maps as their users write them, end to end on eight devices."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P
from samples import save

import mfload
from mfload.trees import host_leaves


def _keymaps() -> Any:
    """The key maps of `tests/trees`, which lies on no path here."""
    if "keymaps" not in sys.modules:
        where = Path(__file__).parents[1] / "trees" / "keymaps.py"
        spec = importlib.util.spec_from_file_location("keymaps", where)
        assert spec is not None
        assert spec.loader is not None
        sys.modules["keymaps"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules["keymaps"])
    return sys.modules["keymaps"]


keymaps = _keymaps()
MESH = jax.make_mesh((2, 4), ("x", "y"))


def tree(leaves: dict[str, Any]) -> Any:
    """A tree of dicts and lists whose leaves go by these names."""
    whole: dict[str, Any] = {}
    for name, leaf in leaves.items():
        at = whole
        *way, last = name.split(".")
        for part in way:
            at = at.setdefault(part, {})
        at[last] = leaf

    def lists(node: Any) -> Any:
        if not isinstance(node, dict):
            return node
        made = {key: lists(value) for key, value in node.items()}
        if made and all(key.isdigit() for key in made):
            return [made[key] for key in sorted(made, key=int)]
        return made

    return lists(whole)


def rows(name: str, leaf: Any) -> P:
    """Two dims split where two can be, the first ones first."""
    axes: list[Any] = []
    left = {"x": 2, "y": 4}
    for size in leaf.shape:
        axis = next((a for a, n in left.items() if size % n == 0), None)
        left.pop(axis, None)
        axes.append(axis)
    return P(*axes)


def columns(name: str, leaf: Any) -> P:
    return P(*reversed(tuple(rows(name, leaf._replace(shape=leaf.shape[::-1])))))


def all_axes(name: str, leaf: Any) -> P:
    """One dim over all devices."""
    axes = [("y", "x") if size % 8 == 0 else None for size in leaf.shape]
    if ("y", "x") in axes:
        first = axes.index(("y", "x"))
        axes[first + 1 :] = [None] * (len(axes) - first - 1)
    return P(*axes)


@pytest.mark.parametrize("shardings", [rows, columns, all_axes, None])
@pytest.mark.parametrize("name", list(keymaps.CASES))
def test_every_leaf_is_what_its_map_says(tmp_path, monkeypatch, name, shardings):
    if shardings in (columns, None):  # Compiled functions make them, and NumPy the others.
        monkeypatch.setattr(host_leaves, "MOST", 0)
    case = keymaps.CASES[name]()
    target = tree({n: jax.ShapeDtypeStruct(a.shape, a.dtype) for n, a in case.expected.items()})
    made = mfload.load_into(
        target,
        save(tmp_path / "model.safetensors", case.checkpoint),
        mapping=case.mapping,
        mesh=MESH,
        shardings=shardings,
    )
    assert jax.tree.structure(made) == jax.tree.structure(target)
    expected = tree(case.expected)
    for array, numbers in zip(jax.tree.leaves(made), jax.tree.leaves(expected), strict=True):
        assert isinstance(array.sharding, NamedSharding)
        assert array.sharding.mesh == MESH
        assert array.dtype == numbers.dtype
        assert array.shape == numbers.shape
        for shard in array.addressable_shards:
            assert np.asarray(shard.data).tobytes() == numbers[shard.index].tobytes()


def test_the_same_on_one_device(tmp_path):
    case = keymaps.CASES["scanned qwen experts"]()
    target = tree({n: jax.ShapeDtypeStruct(a.shape, a.dtype) for n, a in case.expected.items()})
    path = save(tmp_path / "model.safetensors", case.checkpoint)
    made = mfload.load_into(target, path, mapping=case.mapping)
    expected = tree(case.expected)
    for array, numbers in zip(jax.tree.leaves(made), jax.tree.leaves(expected), strict=True):
        assert array.devices() == {jax.devices()[0]}
        assert np.asarray(array).tobytes() == numbers.tobytes()


@pytest.mark.parametrize("shardings", [P("x", "y"), P(), None])
@pytest.mark.parametrize("allocator", ["auto", "framework"])
def test_leaves_of_one_tensor_are_arrays_of_their_own(tmp_path, allocator, shardings):
    """One may be given away, and the other is still there."""
    stored = np.random.default_rng(0).standard_normal((64, 32), np.float32)
    shape = jax.ShapeDtypeStruct(stored.shape, stored.dtype)
    turned = jax.ShapeDtypeStruct((32, 64), stored.dtype)
    lines = [mfload.rule(["embed", "head"]), mfload.rule("turned", transpose=(1, 0))]
    made = mfload.load_into(
        {"embed": shape, "head": shape, "turned": turned},
        save(tmp_path / "model.safetensors", {"w": stored}),
        mapping={"w": lines},
        mesh=None if shardings is None else MESH,
        shardings=shardings,
        options=mfload.Options(allocator=allocator),
    )
    double = jax.jit(lambda array: array * 2, donate_argnums=0)
    assert (np.asarray(double(made["embed"])) == stored * 2).all()
    assert (np.asarray(made["head"]) == stored).all()
    assert (np.asarray(made["turned"]) == stored.T).all()


def test_dtypes_go_by_names_of_leaves(tmp_path):
    stored = {f"stored.{name}": np.ones(8, np.float32) for name in "abc"}
    shape = jax.ShapeDtypeStruct((8,), np.float16)
    path = save(tmp_path / "model.safetensors", stored)
    target, mapping = {"a": shape, "b": shape, "c": shape}, {r"stored\.(.)": r"\1"}
    dtype = [("a", "bfloat16"), (r"^b", "float32"), ("stored", "int8")]
    with pytest.warns(UserWarning, match="dtype= .*'stored'"):
        made = mfload.load_into(target, path, mapping=mapping, dtype=dtype)
    found = {name: str(array.dtype) for name, array in made.items()}
    assert found == {"a": "bfloat16", "b": "float32", "c": "float16"}


@pytest.mark.parametrize("small", [True, False])
def test_layers_share_compilations(tmp_path, monkeypatch, small):
    """As many programs as there are distinct shapes, however many layers there are."""
    if not small:
        monkeypatch.setattr(host_leaves, "MOST", 0)
    layers, wide = 12, 8
    stored, mapping, target = {}, {}, {}
    rng = np.random.default_rng(0)
    for layer in range(layers):
        for name, shape in {"up": (48, wide), "down": (wide, 48), "gate": (48, wide)}.items():
            stored[f"model.{layer}.{name}"] = rng.standard_normal(shape, np.float32)
            target[f"{layer}.{name}"] = jax.ShapeDtypeStruct(shape[::-1], np.float32)
    mapping = {r"model\.(\d+)\.(up|down|gate)": mfload.rule(r"\1.\2", transpose=(1, 0))}
    path = save(tmp_path / "model.safetensors", stored)
    found: list[str] = []

    def listen(event: str, _seconds: float, **_: object) -> None:
        if event.endswith("backend_compile_duration"):
            found.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        made = mfload.load_into(
            target, path, mapping=mapping, mesh=MESH, shardings=P(("x", "y"), None)
        )
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    for name, array in made.items():
        assert (np.asarray(array) == stored[f"model.{name}"].T).all()
    assert len(found) == (0 if small else 2)
