"""What comes back has the type of the leaf: JAX's, NumPy's, Python's, in trees of any shape."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
import samples
from flax import serialization
from hypothesis import given, settings, strategies as st
from jax.experimental.layout import Format, Layout
from jax.sharding import NamedSharding, PartitionSpec as P, SingleDeviceSharding

import mfload
from mfload import errors

MESH = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
HERE = SingleDeviceSharding(jax.devices()[0])
THERE = SingleDeviceSharding(jax.devices()[5])
SPLIT = NamedSharding(MESH, P("x"))
TURNED = Format(Layout((1, 0)), HERE)
WIDE = np.array([[2**40 + n for n in range(4)]] * 8, np.int64)
DTYPES = ["int64", "float64", "float32", "bfloat16", "int8", "uint16", "bool", "float8_e4m3fn"]


def like(array: Any, sharding: Any = None) -> Any:
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)


def put(array: Any, there: Any = None) -> Any:
    with jax.enable_x64(True):
        return jax.device_put(np.zeros_like(array), there)


def exact(made: Any, array: Any) -> None:
    assert made.dtype == array.dtype
    assert samples.same(np.asarray(made), array)


def of_numpy(made: Any, array: Any) -> None:
    assert type(made) is np.ndarray
    exact(made, array)
    assert made.flags.writeable
    assert made.flags.aligned


def free(made: Any, array: Any) -> None:
    assert isinstance(made, jax.Array)
    assert not made.committed
    exact(made, array)


def lies(there: Any) -> Callable[[Any, Any], None]:
    def check(made: Any, array: Any) -> None:
        exact(made, array)
        assert made.committed
        assert made.sharding.is_equivalent_to(there, made.ndim)

    return check


def turned(made: Any, array: Any) -> None:
    lies(HERE)(made, array)
    assert made.format.layout.major_to_minor == (1, 0)


# A leaf for an array, and what must come back for it.
LEAVES: list[tuple[Callable[[Any], Any], Callable[[Any, Any], None]]] = [
    (np.zeros_like, of_numpy),
    (lambda a: np.asfortranarray(np.zeros_like(a)), of_numpy),
    (like, free),
    (put, free),
    (lambda a: jax.typeof(put(a)), free),
    (lambda a: like(a, THERE), lies(THERE)),
    (lambda a: like(a, SPLIT), lies(SPLIT)),
    (lambda a: put(a, THERE), lies(THERE)),
    (lambda a: put(a, SPLIT), lies(SPLIT)),
    (lambda a: like(a, TURNED), turned),
]  # fmt: skip


@st.composite
def leaves(draw: st.DrawFn) -> tuple[Any, Any, Callable[[Any], None]]:
    """What is stored, the leaf for it, and a check of what comes back."""
    kind = draw(st.sampled_from(["array", "scalar", "python", "none"]))
    if kind == "none":
        return None, None, lambda made: _is(made, None)
    if kind == "python":
        value = draw(st.sampled_from([True, 7, 2**40, -(2**62), 0.1, 1e300]))
        return value, type(value)(0), lambda made: _is(made, value)
    dtype = np.dtype(getattr(ml_dtypes, name := draw(st.sampled_from(DTYPES)), name))
    if kind == "scalar":
        scalar = dtype.type(draw(st.sampled_from([0, 1, 3])))
        return np.asarray(scalar), dtype.type(0), lambda made: _is(made, scalar)
    array = WIDE if dtype == np.int64 else (WIDE % 97 / 2).astype(dtype)
    make, check = draw(st.sampled_from(LEAVES))
    return array, make(array), lambda made: check(made, array)


def _is(made: Any, value: Any) -> None:
    assert type(made) is type(value)
    assert made == value


def orbax(state: Any, path: Path) -> Path:
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(path / "orbax", state)
    return path / "orbax"


def msgpack(state: Any, path: Path) -> Path:
    (path / "state.msgpack").write_bytes(serialization.to_bytes(state))
    return path / "state.msgpack"


def safetensors(state: Any, path: Path) -> Path:
    path.mkdir(exist_ok=True)
    mfload.save(state, path / "state.safetensors")
    return path / "state.safetensors"


@settings(max_examples=60, deadline=None)
@given(st.lists(leaves(), min_size=1, max_size=6), st.sampled_from([orbax, msgpack, safetensors]))
def test_leaves_of_every_type(found: list[Any], save: Callable[[Any, Path], Path]) -> None:
    anchor = (WIDE, np.zeros_like(WIDE), lambda made: of_numpy(made, WIDE))
    found = [*found, anchor]

    def tree(part: int) -> Any:
        return {"one": {f"l{n}": each[part] for n, each in enumerate(found)}, "none": None}

    with tempfile.TemporaryDirectory() as folder:
        path = save(tree(0), Path(folder))
        made = mfload.restore(path, tree(1))
        assert jax.tree.structure(made) == jax.tree.structure(tree(1))
        for n, (_, _, check) in enumerate(found):
            check(made["one"][f"l{n}"])
        arrays = {f"l{n}": leaf for n, (stored, leaf, _) in enumerate(found)
                  if hasattr(stored, "dtype")}  # fmt: skip
        flat = {name: tree(0)["one"][name] for name in arrays}
        into = mfload.load_into(arrays, safetensors(flat, Path(folder) / "flat"))
        for name, array in into.items():
            found[int(name[1:])][2](array)
    del made, into


def test_one_tensor_for_several_leaves(tmp_path: Path) -> None:
    path = samples.save(tmp_path / "m.safetensors", {"w": WIDE})
    target = {name: np.zeros_like(WIDE) for name in "abc"} | {"d": like(WIDE)}
    report = mfload.Report()
    mapping = {"w": [*target]}
    made = mfload.load_into(target, path, mapping=mapping, report=report)
    made["a"][:] = 0
    for name in "bcd":
        exact(made[name], WIDE)
    assert (report.tensors, report.result_bytes, report.framework) == (4, 4 * WIDE.nbytes, "jax")


def test_leaves_of_numpy_of_a_mapped_file(tmp_path: Path) -> None:
    array = samples.numbers((600, 512), np.float32)
    path = samples.save(tmp_path / "a.safetensors", {"w": array})
    options = mfload.Options(engine="mmap")
    made = mfload.load_into({"w": np.zeros_like(array)}, path, options=options)["w"]
    of_numpy(made, array)
    made[:] = 1
    exact(mfload.load(path, "numpy")["w"], array)


def test_shardings_make_arrays_of_jax(tmp_path: Path) -> None:
    """What is asked for goes first; a mesh alone asks for nothing."""
    path = samples.save(tmp_path / "m.safetensors", {"w": WIDE, "v": WIDE})
    target = {"w": np.zeros_like(WIDE), "v": np.zeros_like(WIDE)}
    made = mfload.load_into(target, path, mesh=MESH, shardings=[("w", P("x"))])
    lies(SPLIT)(made["w"], WIDE)
    of_numpy(made["v"], WIDE)
    with jax.set_mesh(MESH):
        of_numpy(mfload.load_into(target, path)["v"], WIDE)
    made = mfload.load_into(target, path, mesh=MESH, unmatched="error")
    of_numpy(made["w"], WIDE)


def test_a_cap_that_numpy_keeps(tmp_path: Path) -> None:
    array = samples.numbers((1024, 1024), np.float32)
    path = samples.save(tmp_path / "m.safetensors", {"w": array})
    target, turn = {"w": np.zeros_like(array)}, {"w": mfload.rule("w", transpose=(1, 0))}
    options = mfload.Options(max_host_overhead=1 << 20, threads=1)
    of_numpy(mfload.load_into(target, path, options=options)["w"], array)
    # Dims in another order come so out of the readers' slots; products are made in stretches.
    of_numpy(mfload.load_into(target, path, mapping=turn, options=options)["w"], array.T)
    twice, report = {"w": mfload.rule("w", transpose=(1, 0), scale=0.5)}, mfload.Report()
    made = mfload.load_into(target, path, mapping=twice, options=options, report=report)
    with np.errstate(all="ignore"):
        of_numpy(made["w"], array.T * np.float32(0.5))
    assert report.peak_bytes <= 1 << 20
    options = mfload.Options(max_host_overhead=1 << 10, threads=1)
    with pytest.raises(errors.MemoryLimitError, match=r"max_host_overhead is too small.*'w'"):
        mfload.load_into(target, path, mapping=twice, options=options)
    report, options = mfload.Report(), mfload.Options(max_host_overhead=6 << 20, threads=1)
    made = mfload.load_into(target, path, mapping=turn, options=options, report=report)
    of_numpy(made["w"], array.T)
    seen: list[int] = []
    mfload.load_into(target, path, progress=lambda done, total: seen.append(total))
    assert set(seen) == {array.nbytes}


def test_leaves_of_numpy_stay_as_they_are_if_nothing_fills_them(tmp_path: Path) -> None:
    path = samples.save(tmp_path / "m.safetensors", {"w": WIDE})
    target = {"w": np.zeros_like(WIDE), "other": np.ones(3)}
    with pytest.raises(errors.MappingError, match="missing"):
        mfload.load_into(target, path)
    assert mfload.load_into(target, path, strict=False)["other"] is target["other"]


@pytest.mark.parametrize("stored", [np.float32(0.5), np.int32(3), np.complex64(1j)])
def test_numbers_that_a_leaf_of_python_can_not_be(tmp_path: Path, stored: Any) -> None:
    path = samples.save(tmp_path / "m.safetensors", {"w": WIDE, "n": np.asarray(stored)})
    target = {"w": np.zeros_like(WIDE), "n": 0.0}
    if stored.dtype.kind == "c":
        with pytest.raises(errors.MappingError, match="wants a Python float, stored is C64"):
            mfload.load_into(target, path)
    else:
        _is(mfload.load_into(target, path)["n"], float(stored))


@pytest.mark.parametrize("tree", [{"x": None}, {"x": {}}, {"x": []}, {"x": None, "y": {"z": ()}}])
@pytest.mark.parametrize("save", [orbax, msgpack])
def test_states_without_arrays(
    tmp_path: Path, tree: Any, save: Callable[[Any, Path], Path]
) -> None:
    """As Orbax and Flax give them back."""
    path = save(tree, tmp_path)
    for strict in (True, False):
        assert mfload.restore(path, tree, strict=strict) == tree
        assert mfload.load_into(tree, path, strict=strict) == tree
    if save is orbax:
        with ocp.PyTreeCheckpointer() as checkpointer:
            assert checkpointer.restore(path, item=tree) == tree
    with pytest.raises(errors.MappingError, match="missing"):
        mfload.restore(path, {"w": np.zeros(3)})


def test_texts_alone(tmp_path: Path) -> None:
    for save in (orbax, msgpack):
        path = save({"name": "stored"}, tmp_path)
        assert mfload.restore(path, {"name": "mine"}) == {"name": "stored"}


def test_nothing_can_not_take_the_place_of_arrays(tmp_path: Path) -> None:
    path = orbax({"a": WIDE}, tmp_path)
    for target in ({}, {"a": None}, {"x": None}, None, {"a": "text"}):
        with pytest.raises(errors.UsageError, match="no leaf of the target can hold a tensor"):
            mfload.restore(path, target if target is not None else [])


def test_layouts(tmp_path: Path) -> None:
    path = samples.save(tmp_path / "m.safetensors", {"w": WIDE})
    flat, split = Format(Layout((0, 1)), HERE), Format(Layout((1, 0)), SPLIT)
    made = mfload.load_into({"w": like(WIDE, flat)}, path)["w"]
    assert made.format.layout.major_to_minor == (0, 1)
    made = mfload.load_into({"w": like(WIDE, split)}, path)["w"]
    lies(SPLIT)(made, WIDE)
    assert made.format.layout.major_to_minor == (1, 0)
    # A rule goes before what the leaf says of itself.
    made = mfload.load_into({"w": like(WIDE, split)}, path, mesh=MESH, shardings=P(None, None))["w"]
    assert made.format.layout.major_to_minor == (0, 1)


def test_what_typeof_gives(tmp_path: Path) -> None:
    path = samples.save(tmp_path / "m.safetensors", {"w": WIDE})
    split = put(WIDE, SPLIT)
    explicit = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,))
    free(mfload.load_into({"w": jax.typeof(split)}, path)["w"], WIDE)  # Auto axes say nothing.
    made = mfload.load_into({"w": jax.typeof(split)}, path, mesh=MESH)["w"]
    assert made.sharding.device_set == set(jax.devices())
    typed = jax.typeof(put(WIDE, NamedSharding(explicit, P("x"))))
    with pytest.raises(errors.ShardingError, match="no mesh has devices"):
        mfload.load_into({"w": typed}, path)
    lies(SPLIT)(mfload.load_into({"w": typed}, path, mesh=MESH)["w"], WIDE)
