"""Arrays are committed to devices that were asked for, and to no others.

As what safetensors, Flax and JAX make: else they can't meet arrays that lie on a mesh.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.flax
import samples
from flax import serialization
from jax.sharding import NamedSharding, PartitionSpec as P, SingleDeviceSharding

import mfload
from mfload.compat import patch
from mfload.frameworks import private_api
from mfload.ondemand import ExpertCache
from mfload.trees import host_leaves

MESH = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
STORED = {
    "w": samples.numbers((16, 8), np.float32, 1),
    "e.0.0.w": samples.numbers((16, 8), np.float32, 2),
    "packed": samples.numbers((16, 8), ml_dtypes.float4_e2m1fn, 3),
    "wide": np.array([[2**40, -5]], np.int64),
    "empty": np.zeros((0, 8), np.float32),
}
TURNED = {r"(w)": mfload.rule(r"\1", transpose=(1, 0)), ".*": None}
SCALED = {r"(w)": mfload.rule(r"\1", scale=0.5), ".*": None}


def like(array: Any, sharding: Any = None) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)


def opened(path: Path, device: Any) -> dict[str, Any]:
    with mfload.open(path, "jax", device=device) as f:
        parts = {"a": f.get_slice("w")[2], "b": f.get_slice("w")[:, ::3], "c": f.get_slice("w")[:]}
        return {**parts, "d": f.get_tensor("w"), **f.get_tensors()}


def from_a_peer(path: Path, device: Any) -> dict[str, Any]:
    with mfload.publish(mfload.load(path, "numpy"), model="m") as made:
        return mfload.load(made.url, "jax", device=device)


CALLS: dict[str, Callable[[Path, Any], dict[str, Any]]] = {
    "load": lambda path, device: mfload.load(path, "jax", device=device),
    "lent": lambda path, device: mfload.load(
        path, "jax", device=device, options=mfload.Options(allocator="framework")
    ),
    "converted": lambda path, device: mfload.load(path, "jax", device=device, dtype="bfloat16"),
    "mmap": lambda path, device: mfload.load(
        path, "jax", device=device, options=mfload.Options(engine="mmap")
    ),
    "stream": lambda path, device: dict(mfload.stream(path, "jax", device=device)),
    "open": opened,
    "peer": from_a_peer,
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "m.safetensors"
    mfload.save(STORED, path)
    return path


@pytest.mark.parametrize("way", ["private", "public"])
@pytest.mark.parametrize("call", CALLS)
def test_devices_that_were_asked_for_commit(
    path: Path, call: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if way == "public":
        monkeypatch.setattr(private_api, "jax_wrapper", lambda: None)
    made = CALLS[call](path, None)
    assert {array.committed for array in made.values()} == {False}
    assert {array.device for array in made.values()} == {jax.devices()[0]}
    with jax.default_device(jax.devices()[3]):
        made = CALLS[call](path, None)
    assert {array.committed for array in made.values()} == {False}
    assert {array.device for array in made.values()} == {jax.devices()[3]}
    if "wide" in made and call != "converted":
        assert made["wide"].dtype == np.int64
        assert np.asarray(made["wide"]).tolist() == STORED["wide"].tolist()
    for device in (jax.devices()[0], jax.devices()[3], "cpu:2"):
        made = CALLS[call](path, device)
        assert {array.committed for array in made.values()} == {True}
    del made
    gc.collect()


def test_they_meet_arrays_on_a_mesh(path: Path) -> None:
    x = jax.device_put(np.ones((8, 16), np.float32), NamedSharding(MESH, P("x")))
    product = jax.jit(lambda w, x: x @ w)
    w = mfload.load(path, "jax", names=["w"])["w"]
    assert product(w, x).sharding.device_set == set(jax.devices())
    np.testing.assert_allclose(product(w, x), np.ones((8, 16)) @ STORED["w"], rtol=1e-5)
    with pytest.raises(ValueError, match="incompatible devices"):
        product(mfload.load(path, "jax", names=["w"], device="cpu:0")["w"], x)


def test_weights_on_demand(path: Path) -> None:
    pattern = r"e\.(\d)\.(\d)\.(\w)"
    with ExpertCache(path, pattern, 1 << 16, "jax") as cache, cache.use(0, [0]) as experts:
        assert not experts[0]["w"].committed
        assert experts[0]["w"].tolist() == STORED["e.0.0.w"].tolist()
        del experts


def test_no_copy_is_made(path: Path) -> None:
    report = mfload.Report()
    made = mfload.load(path, "jax", names=["w", "wide"], report=report)
    assert report.aliased_share == 1
    assert {array.committed for array in made.values()} == {False}


def test_programs_take_them_over(path: Path) -> None:
    given = mfload.load(path, "jax", names=["w"], options=mfload.Options(allocator="framework"))
    address = given["w"].unsafe_buffer_pointer()
    made = jax.jit(lambda w: w + 1, donate_argnums=0)(given["w"])
    assert given["w"].is_deleted()
    assert made.unsafe_buffer_pointer() == address


@pytest.mark.parametrize("way", ["plain", "lent", "small", "compiled", "scaled"])
def test_leaves_that_name_no_device(path: Path, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if way == "compiled":
        monkeypatch.setattr(host_leaves, "MOST", 0)
    mapping = {"plain": {"w": "w", ".*": None}, "lent": {"w": "w", ".*": None}, "scaled": SCALED}
    allocator = "framework" if way == "lent" else "auto"
    there = SingleDeviceSharding(jax.devices()[0])
    result = STORED["w"].T if way in ("small", "compiled") else STORED["w"]
    free = jnp.zeros(result.shape)
    for leaf, committed in (
        (like(result), False),
        (free, False),
        (jax.typeof(free), False),
        (like(result, there), True),
        (jax.device_put(free, jax.devices()[0]), True),
        (jax.device_put(free, jax.devices()[2]), True),
    ):
        options: Any = mfload.Options(allocator=allocator)
        made = mfload.load_into(
            {"w": leaf}, path, mapping=mapping.get(way, TURNED), options=options
        )["w"]
        assert made.committed is committed, leaf
        # Alike but for that, in one call.
        both = {"w": leaf, "v": like(result, there)}
        two = {"w": ["w", "v"], ".*": None}
        if way in ("plain", "lent"):
            found = mfload.load_into(both, path, mapping=two, options=options)
            assert (found["w"].committed, found["v"].committed) == (committed, True)


def test_restored_states(tmp_path: Path) -> None:
    state = {"w": jnp.ones((4, 4)), "key": jax.random.key(3), "n": np.arange(3)}
    data = {**state, "key": jax.random.key_data(state["key"])}
    path = tmp_path / "state.msgpack"
    path.write_bytes(serialization.to_bytes(data))
    for made in (mfload.restore(path, framework="jax"), mfload.restore(path, state)):
        assert {made["w"].committed, made["key"].committed} == {False}
    assert jax.random.key_data(made["key"]).tolist() == data["key"].tolist()
    assert mfload.restore(path, state, mesh=MESH)["w"].sharding.device_set == set(jax.devices())


def test_in_the_place_of_safetensors(path: Path) -> None:
    data, original = path.read_bytes(), safetensors.safe_open
    with patch():
        made = [safetensors.flax.load_file(path)["w"], safetensors.flax.load(data)["w"]]
        assert safetensors.safe_open is not original
        with safetensors.safe_open(path, "flax") as f:
            made += [f.get_tensor("w"), f.get_slice("w")[1:], f.get_slice("w")[2]]
    assert {array.committed for array in made} == {False}


def test_an_array_that_is_free_is_filled_where_it_lies(tmp_path: Path) -> None:
    """As models are made whose weights are to lie beside the default device."""
    stored = {name: samples.numbers((4, 6), np.float32, n) for n, name in enumerate("abcde")}
    path = tmp_path / "x.safetensors"
    mfload.save(stored, path)
    devices = dict(zip("abcde", (5, 0, 3, 5, 0), strict=True))
    target: dict[str, Any] = {}
    for name, number in devices.items():
        with jax.default_device(jax.devices()[number]):
            target[name] = jnp.zeros((4, 6), "bfloat16" if name > "c" else "float32")
    for made in (
        mfload.load_into(target, path),
        mfload.load_into(target, path, mapping={"(.*)": mfload.rule(r"\1", scale=1.0)}),
        mfload.restore(path, target),
    ):
        for name, number in devices.items():
            assert not made[name].committed
            assert made[name].sharding == SingleDeviceSharding(jax.devices()[number])
            expected = stored[name].astype(target[name].dtype)
            np.testing.assert_array_equal(np.asarray(made[name]), expected)
