"""Small leaves: NumPy puts them together, and one call places all shards of each."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import samples
import shards
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P, SingleDeviceSharding

import mfload
from mfload.frameworks import private_api
from mfload.trees import host_leaves

ORDERS = [range(8), range(7, -1, -1), (3, 1, 2, 0, 7, 5, 6, 4)]
RNG = np.random.default_rng(0)
STORED = {
    "float": RNG.random((64, 32), np.float32),
    "narrow": RNG.random((8, 16)).astype(ml_dtypes.bfloat16),
    "byte": RNG.random((16, 8)).astype(ml_dtypes.float8_e4m3fn),
    "long": RNG.integers(-(2**60), 2**60, (8, 8)),
}
TURNED = mfload.rule(r"\g<0>", transpose=(1, 0))


@pytest.mark.parametrize("private", [True, False])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("spec", [P("x", "y"), P(None, "y"), P("y"), P(), P(("y", "x"))])
def test_shards_on_devices_in_any_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spec: P, order: Any, private: bool
) -> None:
    if not private:
        monkeypatch.setattr(private_api, "jax_placer", lambda: None)
    path = samples.save(tmp_path / "m.safetensors", STORED)
    sharding = NamedSharding(
        Mesh(np.array(jax.devices())[list(order)].reshape(2, 4), ("x", "y")), spec
    )
    target = {name: np.empty(array.T.shape, array.dtype) for name, array in STORED.items()}
    made = mfload.load_into(target, path, mapping={".*": TURNED}, shardings=sharding)
    # None lies in what was read, so that any can be donated.
    assert mfload.live_bytes() == 0
    for name, array in STORED.items():
        shards.assert_sharded(made[name], array.T, sharding)


@pytest.mark.parametrize("private", [True, False])
@pytest.mark.parametrize("spec", [P("x"), P(None), P("y")])
def test_what_lies_as_it_is_wanted_is_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spec: P, private: bool
) -> None:
    if not private:
        monkeypatch.setattr(private_api, "jax_placer", lambda: None)
    array = np.arange(1 << 17, dtype=np.float32).reshape(1024, 128)
    path = tmp_path / "m.safetensors"
    mfload.save({"w": array}, path)  # It lies on a boundary from where JAX could alias it.
    sharding = NamedSharding(shards.mesh((2, 4)), spec)
    target = {"w": np.empty(array.size, array.dtype)}
    mapping = {"w": mfload.rule("w", reshape=-1)}
    made = mfload.load_into(target, path, mapping=mapping, shardings=sharding)
    assert mfload.live_bytes() == 0
    shards.assert_sharded(made["w"], array.ravel(), sharding)


@pytest.mark.parametrize("spec", [P(), P("x")])
def test_replicas_take_no_memory_beside_the_result(tmp_path: Path, spec: P) -> None:
    if private_api.jax_placer() is None:
        pytest.skip("with this version the result itself is NumPy's memory")
    stored = {f"{n}": np.full((512, 512), n, np.float32) for n in range(8)}
    path = samples.save(tmp_path / "m.safetensors", stored)
    options = mfload.Options(max_host_overhead=16 << 20, threads=1)
    tracemalloc.start()
    made = mfload.load_into(
        {name: jax.ShapeDtypeStruct((1 << 18,), array.dtype) for name, array in stored.items()},
        path,
        mapping={".*": mfload.rule(r"\g<0>", reshape=-1)},
        mesh=shards.mesh((2, 4)),
        shardings=spec,
        options=options,
    )
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 9 << 20  # JAX lets go of what it copied when it copies the next.
    assert all((np.asarray(made[name]) == int(name)).all() for name in stored)


@pytest.mark.parametrize("sharding", [None, P()])
def test_an_array_without_dims(tmp_path: Path, sharding: Any) -> None:
    path = samples.save(tmp_path / "m.safetensors", {"w": np.full((1, 1), 3, np.float32)})
    made = mfload.load_into(
        {"w": np.empty((), np.float32)},
        path,
        mapping={"w": mfload.rule("w", reshape=())},
        mesh=None if sharding is None else shards.mesh(),
        shardings=sharding,
    )
    assert made["w"].shape == ()
    assert float(made["w"]) == 3


def test_what_is_scaled_or_large_is_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The numbers of a product do not depend on the size of its leaf."""
    stored = {name: np.full((4, size), 1e-38, np.float32) for name, size in (("a", 4), ("b", 8))}
    path = samples.save(tmp_path / "m.safetensors", stored)
    monkeypatch.setattr(host_leaves, "MOST", 64)
    scaled = {"a|b": mfload.rule(r"\g<0>", scale=0.5)}
    made = mfload.load_into(jax.tree.map(jnp.asarray, stored), path, mapping=scaled)
    assert np.unique(made["a"]).tobytes() == np.unique(made["b"]).tobytes()
    asked: list[Any] = []
    real = host_leaves.make
    monkeypatch.setattr(host_leaves, "make", lambda each: real(asked.append(e) or e for e in each))
    target = {name: jnp.asarray(array.T) for name, array in stored.items()}
    made = mfload.load_into(target, path, mapping={"a|b": TURNED})
    assert [kind.shape for kind, _ in asked] == [(4, 4)]
    assert all((np.asarray(made[name]) == array).all() for name, array in target.items())


@pytest.mark.parametrize("allocator", ["auto", "framework"])
def test_leaves_that_one_device_holds_whole(tmp_path: Path, allocator: Any) -> None:
    """Many enough for columns; one tensor for several leaves is several arrays all the same."""
    stored = {f"w{n}": np.full((4, 16), n, np.float32) for n in range(300)}
    path = samples.save(tmp_path / "m.safetensors", stored)
    options, report = mfload.Options(allocator=allocator), mfload.Report()
    like = jax.ShapeDtypeStruct((4, 16), np.float32)
    made = mfload.load_into(dict.fromkeys(stored, like), path, report=report, options=options)
    assert report.result_bytes == sum(array.nbytes for array in stored.values())
    assert report.aliased_share == 1
    there = SingleDeviceSharding(jax.devices()[0])
    assert all(array.sharding == there for array in made.values())
    assert all(made[name].tobytes() == array.tobytes() for name, array in stored.items())
    target = {f"{n}": like for n in range(300)}
    made = mfload.load_into(target, path, mapping={"w7": list(target), ".*": None}, options=options)
    addresses = {array.unsafe_buffer_pointer() for array in made.values()}
    assert len(addresses) == 300
    assert all(array.tobytes() == stored["w7"].tobytes() for array in made.values())


@pytest.mark.parametrize("devices", [1, 8])
def test_large_leaves_need_no_program(tmp_path: Path, devices: int) -> None:
    """One is turned where XLA copies it, one is joined by strides.

    Both can be donated: one device gets them in XLA's memory if it is asked for.
    """
    rng = np.random.default_rng(1)
    stored = {f"w{n}": rng.random((512, 1024), np.float32) for n in range(4)}
    path = samples.save(tmp_path / "m.safetensors", stored)
    lines = {"w0": mfload.rule("turned", transpose=(1, 0))}
    lines[r"w([123])"] = mfload.rule("stack", stack={1: 0}, transpose=(1, 0))
    mesh = Mesh(np.array(jax.devices()[:devices]), ("x",))
    sharding = NamedSharding(mesh, P("x"))
    like = {"turned": (1024, 512), "stack": (3, 1024, 512)}
    spec = {name: jax.ShapeDtypeStruct(shape, np.float32) for name, shape in like.items()}
    shardings = {"turned": sharding, "stack": NamedSharding(mesh, P(None, "x"))}
    compiled: list[str] = []

    def listen(event: str, _seconds: float, **_: object) -> None:
        if event.endswith("backend_compile_duration"):
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        given: Any = {"options": mfload.Options(allocator="framework")} if devices == 1 else {}
        made = mfload.load_into(spec, path, mapping=lines, shardings=shardings, **given)
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert compiled == []
    assert mfload.live_bytes() == 0
    shards.assert_sharded(made["turned"], stored["w0"].T, shardings["turned"])
    stack = np.stack([stored[f"w{n}"].T for n in (1, 2, 3)])
    shards.assert_sharded(made["stack"], stack, shardings["stack"])
    before = shards.pointers(made["stack"])
    stepped = jax.jit(lambda x: -x, donate_argnums=0)(made["stack"])
    assert shards.pointers(stepped) == before


def test_a_large_leaf_of_one_device_keeps_the_memory_it_landed_in(tmp_path: Path) -> None:
    """As what a load gives as it is stored; replicas are turned once, and copied."""
    stored = {f"w{n}": np.random.default_rng(n).random((512, 1024), np.float32) for n in range(3)}
    path = samples.save(tmp_path / "m.safetensors", stored)
    like = {f"w{n}": jax.ShapeDtypeStruct((1024, 512), np.float32) for n in range(3)}
    lines = {r"w(\d)": mfload.rule(r"w\1", transpose=(1, 0))}
    report = mfload.Report()
    made = mfload.load_into(like, path, mapping=lines, report=report)
    assert mfload.live_bytes() == report.aliased_bytes == 3 << 21
    assert {made["w1"].device} == {jax.devices()[0]}
    for name, array in stored.items():
        np.testing.assert_array_equal(np.asarray(made[name]), array.T)
    del made
    one = Mesh(np.array(jax.devices()[:1]), ("x",))
    asked = NamedSharding(one, P("x"))
    made = mfload.load_into(like, path, mapping=lines, shardings=asked)
    for name, array in stored.items():
        assert made[name].sharding == asked
        np.testing.assert_array_equal(np.asarray(made[name]), array.T)
    assert mfload.live_bytes() == 3 << 21
    del made
    assert mfload.live_bytes() == 0
    mesh = Mesh(np.array(jax.devices()), ("x",))
    made = mfload.load_into(like, path, mapping=lines, mesh=mesh, shardings=P())
    assert mfload.live_bytes() == 0
    for name, array in stored.items():
        shards.assert_sharded(made[name], array.T, NamedSharding(mesh, P()))
