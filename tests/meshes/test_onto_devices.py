"""Sharded loads that land in memory of each device: fake ones, with JAX's CPU arrays over it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import samples
import shards
from calls import as_options
from devices.fake import FakeDevice
from jax.sharding import NamedSharding, PartitionSpec as P

import mfload
from mfload.cuda import memory, staging
from mfload.frameworks import jax_memory

MODEL = {
    "w": samples.numbers((64, 48), np.float32, 1),
    "cube": samples.numbers((8, 8, 640), ml_dtypes.bfloat16, 2),
    "row": samples.numbers((8,), np.float16, 3),
    "wide": samples.numbers((4, 8), np.int64, 4),
    "scalar": samples.numbers((), np.float64, 5),
    "empty": samples.numbers((0, 8), np.int8),
}
SPECS = [P("x"), P(None, "x"), P("x", "y"), P("y", "x"), P(None, ("y", "x")), P("y"), P()]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return samples.save(tmp_path / "model.safetensors", MODEL)


@pytest.fixture(params=["lazy", "thread"])
def there(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[dict[int, FakeDevice]]:
    """The fake devices by the number of JAX's; clean at the end."""
    made: dict[int, FakeDevice] = {}

    def land(device: Any) -> tuple[FakeDevice, tuple[str, ...]]:
        number = device.local_hardware_id
        if number not in made:
            name = f"fake:{number}"
            made[number] = FakeDevice((1, number), name, mode=request.param, seed=number)
        return made[number], ()

    monkeypatch.setattr(jax_memory, "find_device", land)
    monkeypatch.setattr(staging, "SLOT", 64 << 10)
    yield made
    for device in made.values():
        device.assert_clean()
    assert memory.live_bytes() == 0


@pytest.mark.parametrize("allocator", ["auto", "framework", "mfload"])
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_any_spec(path: Path, there: Any, spec: P, allocator: Any) -> None:
    mesh = shards.mesh((2, 4))
    report = mfload.Report()
    loaded = mfload.load(
        path, framework="jax", mesh=mesh, shardings=[("^w$|cube", spec)], report=report,
        options=mfload.Options(allocator=allocator))  # fmt: skip
    shardings = {n: NamedSharding(mesh, spec if n in ("w", "cube") else P()) for n in MODEL}
    shards.assert_loaded(loaded, MODEL, shardings)
    assert len(there) == 8
    assert {engine for _, engine, _ in report.route} == {"pinned"}
    # However it is cut, and however many hold the same, each byte is read once.
    assert report.read_bytes == sum(array.nbytes for array in MODEL.values())
    moved = sum(device.nbytes["copy_in"] for device in there.values())
    held = sum(s.data.nbytes for a in loaded.values() for s in a.addressable_shards)
    assert moved >= held
    assert report.tensors == len(MODEL)
    if allocator == "mfload":
        # Each of the eight has memory of its own.
        addresses = {s.data.unsafe_buffer_pointer() for s in loaded["row"].addressable_shards}
        assert len(addresses) == 8
        assert all(device.memory for device in there.values())
    else:
        assert not any(device.memory for device in there.values())  # It is XLA's.
    del loaded


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_conversions_on_the_way(path: Path, there: Any, dtype: str) -> None:
    mesh = shards.mesh((4,))
    names = ["w", "cube", "row"]
    loaded = mfload.load(
        path, framework="jax", mesh=mesh, shardings={"w": P(None, "x"), "cube": P("x")},
        names=names, dtype=dtype,
    )  # fmt: skip
    for name in names:
        with np.errstate(all="ignore"):
            expected = MODEL[name].astype(dtype)
        assert samples.same(np.asarray(loaded[name]), expected), name
    del loaded


def test_columns_need_no_waves(tmp_path: Path, there: Any) -> None:
    """What a small overhead would have read several times by way of the host is read once."""
    model = {"w": samples.numbers((256, 8192), np.float32)}
    path = samples.save(tmp_path / "m.safetensors", model)
    mesh = shards.mesh((4,))
    limit = 4 << 20
    report = mfload.Report()
    options: Any = {"mesh": mesh, "shardings": P(None, "x"), "max_host_overhead": limit}
    stated = mfload.plan(path, framework="jax", **as_options({"threads": 2, **options}))
    loaded = mfload.load(
        path, framework="jax", report=report, **as_options({"threads": 2, **options})
    )
    shards.assert_loaded(loaded, model, {"w": NamedSharding(mesh, P(None, "x"))})
    assert report.read_bytes == model["w"].nbytes
    assert report.peak_bytes <= stated.overhead_bytes <= limit
    assert not any("wave" in note for note in report.notes)
    del loaded


def test_into_a_tree_by_a_key_map(path: Path, there: Any) -> None:
    import jax

    mesh = shards.mesh((2,), ("x",))
    split = NamedSharding(mesh, P("x"))
    target = {
        "turned": jax.ShapeDtypeStruct((48, 64), np.float32, sharding=split),
        "row": jax.ShapeDtypeStruct((8,), np.float16, sharding=split),
    }
    mapping = {"w": mfload.rule("turned", transpose=(1, 0)), "row": "row"}
    found = mfload.load_into(target, path, mapping=mapping, strict=False)
    assert samples.same(np.asarray(found["turned"]), np.ascontiguousarray(MODEL["w"].T))
    assert samples.same(np.asarray(found["row"]), MODEL["row"])
    assert sum(device.nbytes["copy_in"] for device in there.values())
    del found
