"""`load(mesh=, shardings=)`: which part of each tensor lands on which device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
import samples
import shards
from calls import as_options
from jax.sharding import NamedSharding, PartitionSpec as P, SingleDeviceSharding

import mfload
from mfload import errors
from mfload.frameworks import private_api

MODEL = {
    "w": samples.numbers((16, 24), np.float32, 1),
    "cube": samples.numbers((8, 4, 16), ml_dtypes.bfloat16, 2),
    "row": samples.numbers((8,), np.float16, 3),
    "wide": samples.numbers((4, 8), np.int64, 4),
    "scalar": samples.numbers((), np.float64, 5),
    "empty": samples.numbers((0, 8), np.int8),
    "one": samples.numbers((1, 1), np.uint8, 6),
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return samples.save(tmp_path / "model.safetensors", MODEL)


def _load(path: Any, **options: Any) -> dict[str, Any]:
    return mfload.load(path, framework="jax", **as_options(options))


@pytest.mark.parametrize("allocator", ["auto", "framework"])
@pytest.mark.parametrize(
    ("shape", "spec"),
    [
        ((8,), P("x", None)),
        ((8,), P(None, "x")),
        ((8,), P()),
        ((2, 4), P("x", "y")),
        ((2, 4), P("y", "x")),
        ((2, 4), P("x")),
        ((2, 4), P(None, "y")),
        ((2, 4), P(("x", "y"))),
        ((2, 4), P(("y", "x"))),
        ((2, 4), P(None, ("y", "x"))),
        ((2, 2, 2), P("z", ("x", "y"))),
        ((2, 2, 2), P(("z", "x"), "y")),
        ((2, 2, 2), P("y")),
        ((1,), P("x")),
        ((3,), P(None, "x")),
    ],
)
def test_a_matrix_on_a_mesh(path: Path, shape: Any, spec: P, allocator: Any) -> None:
    mesh = shards.mesh(shape)
    report = mfload.Report()
    loaded = _load(path, mesh=mesh, shardings=[("^w$", spec)], allocator=allocator, report=report)
    shardings = {name: NamedSharding(mesh, spec if name == "w" else P()) for name in MODEL}
    shards.assert_loaded(loaded, MODEL, shardings)
    assert report.read_bytes == sum(array.nbytes for array in MODEL.values())
    assert (report.over_read_bytes, report.aliased_share) == (0, 1.0)
    assert report.tensors == len(MODEL)


@pytest.mark.parametrize("spec", [P("x", "y"), P(None, ("x", "y")), P("y"), P()])
@pytest.mark.parametrize("compressed", [False, True])
def test_archives_of_numpy(tmp_path: Path, compressed: bool, spec: P) -> None:
    mesh = shards.mesh((2, 4))
    array = samples.numbers((256, 640), np.float32, 1)
    forms = {"c": array, "f": np.asfortranarray(array), "b": array.astype(">f4")}
    save = np.savez_compressed if compressed else np.savez
    save(tmp_path / "x.npz", **forms)  # type: ignore[arg-type]
    report = mfload.Report()
    loaded = _load(tmp_path / "x.npz", mesh=mesh, shardings=spec, report=report)
    shards.assert_loaded(
        loaded, dict.fromkeys(forms, array), dict.fromkeys(forms, NamedSharding(mesh, spec))
    )
    assert report.read_bytes <= (tmp_path / "x.npz").stat().st_size


def test_devices_in_another_order(path: Path) -> None:
    mesh = shards.mesh((3, 2), order=(7, 2, 5, 0, 1, 6))
    loaded = _load(path, mesh=mesh, shardings={"w": P(None, ("x", "y"))}, names=["w"])
    shards.assert_loaded(loaded, {"w": MODEL["w"]}, {"w": NamedSharding(mesh, P(None, ("x", "y")))})


def test_what_shardings_may_be(path: Path) -> None:
    mesh = shards.mesh((2, 4))
    rows = NamedSharding(mesh, P("x"))
    names = ["w", "cube"]
    split = {"w": rows, "cube": rows}
    mixed = {"w": rows, "cube": NamedSharding(mesh, P(None, "y"))}
    seen: list[Any] = []

    def ask(name: str, info: Any) -> Any:
        seen.append((name, info.shape, info.dtype.name))
        return P("x") if name == "w" else NamedSharding(mesh, P(None, "y"))

    for expected, options in (
        (split, {"shardings": rows}),
        (split, {"mesh": mesh, "shardings": P("x")}),
        (split, {"shardings": [(".", rows)]}),
        (mixed, {"mesh": mesh, "shardings": [("cu", P(None, "y")), ("", P("x"))]}),
        (mixed, {"mesh": mesh, "shardings": (["cu", P(None, "y")], ("", P("x")))}),
        (mixed, {"mesh": mesh, "shardings": ask}),
        (mixed, {"mesh": mesh, "shardings": {"w": P("x"), "cube": P(None, "y")}}),
        (mixed, {"shardings": mixed}),
    ):
        loaded = _load(path, names=names, **options)
        shards.assert_loaded(loaded, {name: MODEL[name] for name in names}, expected)
        del loaded
    assert seen == [("w", (16, 24), "F32"), ("cube", (8, 4, 16), "BF16")]


def test_a_nested_tree(tmp_path: Path) -> None:
    arrays = {"layers.0.q": np.eye(8), "layers.0.norm": np.ones(8), "head": np.eye(8)}
    path = samples.save(tmp_path / "a.safetensors", arrays)
    mesh = shards.mesh()
    tree = {"layers": {0: {"q": P("x"), "norm": None}}, "head": P(None, "x")}
    loaded = _load(path, mesh=mesh, shardings=tree, unmatched="error")
    specs = {"layers.0.q": P("x"), "layers.0.norm": P(), "head": P(None, "x")}
    shards.assert_loaded(
        loaded, arrays, {name: NamedSharding(mesh, spec) for name, spec in specs.items()}
    )


def test_a_mesh_alone_replicates(path: Path) -> None:
    mesh = shards.mesh((2,))
    loaded = _load(path, mesh=mesh)
    shards.assert_loaded(loaded, MODEL, dict.fromkeys(MODEL, NamedSharding(mesh, P())))
    # Replicas on the host share the memory that was read into.
    assert all(len(set(shards.pointers(array).values())) == 1 for array in loaded.values())


def test_one_device_that_is_not_the_default(path: Path) -> None:
    there = SingleDeviceSharding(jax.devices()[5])
    loaded = _load(path, shardings=there)
    shards.assert_loaded(loaded, MODEL, dict.fromkeys(MODEL, there))


def test_the_rest_goes_where_the_rules_go(path: Path) -> None:
    mesh = shards.mesh((2, 4))
    loaded = _load(path, shardings=[("^w$", NamedSharding(mesh, P("x")))])
    assert loaded["cube"].sharding == NamedSharding(mesh, P())
    del loaded
    with pytest.raises(errors.UsageError, match="on which devices") as info:
        _load(path, shardings=[("^w$", SingleDeviceSharding(jax.devices()[1]))])
    assert "mesh=" in info.value.expected


def test_abstract_meshes_are_bound_to_the_mesh(path: Path) -> None:
    abstract = pytest.importorskip("jax.sharding").AbstractMesh((8,), ("x",))
    mesh = shards.mesh()
    spec = NamedSharding(abstract, P(None, "x"))
    loaded = _load(path, mesh=mesh, shardings=spec, names=["w"])
    assert loaded["w"].sharding == NamedSharding(mesh, P(None, "x"))
    assert loaded["w"].sharding.mesh is mesh
    with pytest.raises(errors.UsageError, match="on which devices"):
        _load(path, shardings=spec, names=["w"])


def test_explicit_axes_stay_explicit(path: Path) -> None:
    if not hasattr(jax.sharding, "AxisType"):
        pytest.skip("this version has no such axes")
    explicit, manual = jax.sharding.AxisType.Explicit, jax.sharding.AxisType.Manual
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("x",), axis_types=(explicit,))
    loaded = _load(path, mesh=mesh, shardings=P(None, "x"), names=["w"])
    sharding = NamedSharding(mesh, P(None, "x"))
    shards.assert_sharded(loaded["w"], MODEL["w"], sharding)
    assert jax.typeof(loaded["w"]).sharding.spec == P(None, "x")
    # JAX itself has no arrays on these.
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("x",), axis_types=(manual,))
    with pytest.raises(errors.ShardingError, match="manual axes"):
        _load(path, mesh=mesh, names=["w"])


@pytest.mark.parametrize("kind", ["device", "pinned_host", "unpinned_host"])
@pytest.mark.parametrize("spec", [P("x"), P(None, "x"), P()])
def test_memory_kinds(path: Path, kind: str, spec: P) -> None:
    mesh = shards.mesh()
    if kind not in {memory.kind for memory in jax.devices()[0].addressable_memories()}:
        pytest.skip("this version has no such memory")
    sharding = NamedSharding(mesh, spec, memory_kind=kind)
    loaded = _load(path, shardings=sharding, names=["w"])
    shards.assert_sharded(loaded["w"], MODEL["w"], sharding)
    assert {s.data.sharding.memory_kind for s in loaded["w"].addressable_shards} == {kind}
    loaded = _load(path, mesh=mesh, shardings={"w": sharding, "cube": P("x")}, names=["w", "cube"])
    shards.assert_sharded(loaded["w"], MODEL["w"], sharding)
    shards.assert_sharded(loaded["cube"], MODEL["cube"], NamedSharding(mesh, P("x")))


def test_dtypes_are_converted_on_the_way(path: Path) -> None:
    mesh = shards.mesh((2, 4))
    for spec in (P("x", "y"), P(None, "y"), P("y"), P()):
        loaded = _load(path, mesh=mesh, shardings=spec, names=["w"], dtype="bfloat16")
        with np.errstate(all="ignore"):
            expected = MODEL["w"].astype(ml_dtypes.bfloat16)
        shards.assert_sharded(loaded["w"], expected, NamedSharding(mesh, spec))
        del loaded
    large = samples.save(path.parent / "large.safetensors", {"n": np.arange(16) << 30})
    with pytest.raises(errors.LossyCastError) as info:
        _load(large, mesh=mesh, shardings=P("y"), dtype={"n": "int32"})
    assert info.value.tensor == "n"


@pytest.mark.parametrize("x64", [False, True])
def test_wide_types_stay_wide(path: Path, x64: bool) -> None:
    jax.config.update("jax_enable_x64", x64)
    try:
        mesh = shards.mesh()
        for allocator in ("auto", "framework"):
            loaded = _load(path, mesh=mesh, shardings={"wide": P(None, "x")}, allocator=allocator)
            shards.assert_sharded(loaded["wide"], MODEL["wide"], NamedSharding(mesh, P(None, "x")))
            assert loaded["scalar"].dtype == np.float64
            del loaded
    finally:
        jax.config.update("jax_enable_x64", False)


@pytest.mark.parametrize("allocator", ["auto", "framework"])
def test_elements_that_share_a_byte_stay_together(tmp_path: Path, allocator: Any) -> None:
    raw = samples.numbers((4, 16), np.uint8, 9).tobytes()
    rows = [("f4", "F4", (4, 32), raw), ("f6", "F6_E2M3", (2, 32), raw[:48])]
    path = samples.save_raw(tmp_path / "a.safetensors", rows)
    mesh = shards.mesh((2, 4))
    options: dict[str, Any] = {"mesh": mesh, "allocator": allocator}
    # How whole tensors of these arrive is tested with the adapter.
    whole = {name: np.array(array) for name, array in _load(path).items()}
    for spec in (P("x"), P(None, "y"), P("x", "y"), P()):
        loaded = _load(path, shardings=spec, **options)
        for name, array in whole.items():
            shards.assert_sharded(loaded[name], array, NamedSharding(mesh, spec))
        del loaded
    odd = samples.save_raw(tmp_path / "odd.safetensors", [("f6", "F6_E2M3", (4, 8), raw[:24])])
    with pytest.raises(errors.ShardingError, match="share a byte") as info:
        _load(odd, shardings=P(None, "y"), **options)
    assert info.value.tensor == "f6"
    assert "4 elements" in info.value.expected


def test_bytes_without_rows_are_only_replicated(tmp_path: Path) -> None:
    rows = [("f6", "F6_E2M3", (2, 2), bytes(range(3)))]
    path = samples.save_raw(tmp_path / "a.safetensors", rows)
    mesh = shards.mesh((2,))
    loaded = _load(path, mesh=mesh)
    assert np.asarray(loaded["f6"]).tolist() == [0, 1, 2]
    for spec in (P("x"), P(None, None)):
        with pytest.raises(errors.ShardingError, match=r"share a byte.* in shape \[3\]"):
            _load(path, mesh=mesh, shardings=spec)


@pytest.mark.parametrize("engine", ["pread", "direct", "mmap"])
def test_every_engine(path: Path, engine: Any) -> None:
    mesh = shards.mesh((2, 4))
    specs = {"w": P("x", "y"), "cube": P(None, None, "y"), "row": P(("x", "y")), "wide": P("y")}
    loaded = _load(path, mesh=mesh, shardings=specs, engine=engine)
    shards.assert_loaded(
        loaded, MODEL, {name: NamedSharding(mesh, specs.get(name, P())) for name in MODEL}
    )


def test_what_is_read_over_is_said(tmp_path: Path) -> None:
    rows = [(name, "U8", (64,), bytes(64)) for name in "abc"]
    path = samples.save_raw(tmp_path / "a.safetensors", rows)
    options: dict[str, Any] = {"mesh": shards.mesh((2,)), "shardings": P("x"), "engine": "pread"}
    report = mfload.Report()
    loaded = _load(path, names=["a", "c"], report=report, **options)
    assert len(loaded) == 2
    preview = mfload.plan(path, "jax", names=["a", "c"], **as_options(options))
    assert preview.over_read_bytes == report.over_read_bytes == 64


def test_progress_comes_to_its_end(path: Path) -> None:
    seen: list[tuple[int, int]] = []
    mesh = shards.mesh((2, 4))
    loaded = _load(
        path, mesh=mesh, shardings={"w": P("x", "y")}, progress=lambda *done: seen.append(done)
    )
    total = sum(array.nbytes for array in MODEL.values())
    assert seen[-1] == (total, total)
    assert len(loaded) == len(MODEL)


def test_deleted_arrays_take_the_memory_along(path: Path) -> None:
    mesh = shards.mesh((2, 4))
    loaded = _load(path, mesh=mesh, shardings={"w": P("x", "y")})
    assert mfload.live_bytes() > 0
    for array in loaded.values():
        array.delete()
    assert mfload.live_bytes() == 0
    del loaded


@pytest.mark.parametrize("engine", ["pread", "direct", "mmap"])
def test_verified_while_loading(path: Path, engine: Any) -> None:
    pytest.importorskip("xxhash")
    mfload.verify(path, mode="write")
    manifest = path.with_name("model.safetensors.checksums.json")
    mesh = shards.mesh((2, 4))
    specs = {"w": P("x", "y"), "cube": P(None, None, "y"), "row": P(("x", "y")), "wide": P("y")}
    options: dict[str, Any] = {"mesh": mesh, "shardings": specs, "engine": engine}
    loaded = _load(path, verify=manifest, **options)
    shards.assert_loaded(
        loaded, MODEL, {name: NamedSharding(mesh, specs.get(name, P())) for name in MODEL}
    )
    del loaded
    flipped = bytearray(path.read_bytes())
    flipped[-1] ^= 1
    path.write_bytes(flipped)
    report = mfload.Report()
    with pytest.raises(errors.ChecksumError):
        _load(path, verify=manifest, report=report, **options)
    assert mfload.live_bytes() == 0
    assert report.read_bytes == report.over_read_bytes > 0  # Read, and no part of a result.


@pytest.mark.skipif(not hasattr(jax, "set_mesh"), reason="jax.set_mesh came with JAX 0.7")
def test_the_mesh_that_is_set_counts_where_shardings_name_no_devices(tmp_path: Path) -> None:
    whole = np.arange(64, dtype=np.float32).reshape(8, 8)
    path = samples.save(tmp_path / "m.safetensors", {"w": whole})
    mesh, other = shards.mesh((2, 4)), NamedSharding(shards.mesh((8,)), P("x"))
    with jax.set_mesh(mesh):
        for call in (mfload.load, mfload.abstract):
            options = {"framework": "jax"} if call is mfload.load else {}
            array = call(path, shardings=P("x", "y"), **options)["w"]
            assert array.sharding == NamedSharding(mesh, P("x", "y"))
            assert call(path, shardings={"w": other}, **options)["w"].sharding == other
        assert mfload.plan(path, "jax", shardings=P("x")).read_bytes == whole.nbytes
        # Without shardings nothing was asked for.
        assert len(mfload.load(path, framework="jax")["w"].devices()) == 1


def test_rules_for_tensors_that_were_not_asked_for_are_fine(tmp_path: Path) -> None:
    """No warning, which would be an error here."""
    arrays = {"a.kernel": np.zeros((8, 8), np.float32), "a.bias": np.zeros(8, np.float32)}
    path = samples.save(tmp_path / "m.safetensors", arrays)
    options: Any = {"mesh": shards.mesh((8,)), "shardings": [("kernel", P("x"))]}
    loaded = mfload.load(path, framework="jax", names="bias", **as_options(options))
    assert loaded["a.bias"].is_fully_replicated
    with pytest.raises(errors.TensorNotFoundError, match="match no tensor: 'q_proj'"):
        mfload.load(
            path, framework="jax", **as_options(options | {"shardings": [("q_proj", P("x"))]})
        )


@pytest.mark.parametrize("private", [True, False])
@pytest.mark.parametrize("spec", [P("x", "y"), P("y", "x"), P(None, "y"), P(("y", "x")), P()])
def test_many_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spec: P, private: bool
) -> None:
    """Tensors of one shape and sharding, among others, with JAX's constructor and without."""
    if not private:
        monkeypatch.setattr(private_api, "jax_constructor", lambda: None)
    shapes = [(16, 24), (8, 8), (16, 24), (0, 8)]
    model = {f"w{n}": samples.numbers(shapes[n % 4], np.int32, n) for n in range(40)}
    path = samples.save(tmp_path / "many.safetensors", model)
    mesh = shards.mesh((2, 4))
    report = mfload.Report()
    loaded = _load(path, mesh=mesh, shardings=spec, report=report)
    shards.assert_loaded(loaded, model, dict.fromkeys(model, NamedSharding(mesh, spec)))
    assert (report.tensors, report.aliased_share) == (40, 1.0)
    doubled = jax.jit(lambda arrays: {name: x + x for name, x in arrays.items()})(loaded)
    for name, array in doubled.items():
        assert array.sharding.device_set == loaded[name].sharding.device_set
        assert np.array_equal(np.asarray(array), model[name] + model[name])
    del loaded, doubled


@pytest.mark.parametrize("wrong", [lambda *_, **__: 1 / 0, lambda *_, **__: jax.numpy.zeros(2)])
def test_a_private_constructor_that_misbehaves_is_not_used(
    monkeypatch: pytest.MonkeyPatch, wrong: Any
) -> None:
    private_api.jax_constructor.cache_clear()
    assert private_api.jax_constructor() is not None
    private_api.jax_constructor.cache_clear()
    true = jax.make_array_from_single_device_arrays

    class Wrong:
        def __init__(self, shape: Any, sharding: Any, arrays: Any) -> None:
            self.__dict__.update({name: getattr(true(shape, sharding, arrays), name) for name in (
                "aval", "sharding", "shape", "dtype", "weak_type")})  # fmt: skip

        def __new__(cls, *given: Any, **named: Any) -> Any:
            return wrong() if named else object.__new__(cls)

    monkeypatch.setattr(jax, "make_array_from_single_device_arrays", Wrong)
    assert private_api.jax_constructor() is None
    private_api.jax_constructor.cache_clear()
