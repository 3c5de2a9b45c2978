"""Random rules, shapes, meshes and caps, against NumPy on the whole arrays; and refusals."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
import samples
import shards
from calls import as_options
from flax import nnx
from hypothesis import given, settings, strategies as st
from jax.sharding import NamedSharding, PartitionSpec as P, SingleDeviceSharding

import mfload
from mfload import errors
from mfload.frameworks import private_api
from mfload.trees import host_leaves

MESHES = [shards.mesh((8,)), shards.mesh((2, 4)), shards.mesh((2, 2, 2))]
DTYPES = [np.float32, ml_dtypes.bfloat16, np.int16, ml_dtypes.float8_e5m2]


def values(shape: tuple[int, ...], dtype: Any, seed: int) -> Any:
    """Numbers that every dtype here holds."""
    return np.random.default_rng(seed).integers(-4, 5, shape).astype(dtype)


@st.composite
def loads(draw: st.DrawFn) -> Any:
    mesh = draw(st.sampled_from(MESHES))
    dtype = draw(st.sampled_from(DTYPES))
    rank = draw(st.integers(1, 3))
    shape = tuple(draw(st.sampled_from([1, 2, 4, 8, 6, 16, 0])) for _ in range(rank))
    count = draw(st.integers(1, 3))
    arguments: dict[str, Any] = {}
    whole = [values(shape, dtype, n) for n in range(count)]
    made = whole
    if draw(st.booleans()):
        order = tuple(draw(st.permutations(range(rank))))
        arguments["transpose"] = order
        made = [array.transpose(order) for array in made]
    if draw(st.booleans()):
        size = int(np.prod(shape))
        wanted = draw(st.sampled_from([(size,), (1, size), made[0].shape[::-1]]))
        arguments["reshape"] = wanted
        made = [array.reshape(wanted) for array in made]
    if draw(st.booleans()):
        axis = draw(st.integers(0, made[0].ndim))
        arguments["stack"] = {1: axis}
        result = np.stack(made, axis=axis)
    else:
        axis = draw(st.integers(0, made[0].ndim - 1))
        arguments["concat"] = (axis, 1)
        result = np.concatenate(made, axis=axis)
    if np.dtype(dtype).kind != "i" and draw(st.booleans()):
        arguments["scale"], arguments["cast"] = 0.5, "float32"
        result = result.astype(np.float32) * np.float32(0.5)
    left = dict(mesh.shape)
    spec: list[Any] = []
    for size in result.shape:
        axes = [a for a, n in left.items() if size % n == 0]
        axis_name = draw(st.sampled_from([None, *axes]))
        left.pop(axis_name, None)
        spec.append(axis_name)
    cap = draw(st.sampled_from([None, 330_000]))
    return whole, arguments, result, NamedSharding(mesh, P(*spec)), cap


@settings(max_examples=40, deadline=None)
@given(
    loads(),
    st.sampled_from(["auto", "framework"]),
    st.sampled_from(["small", "large", "public", "joined"]),
)
def test_any_rule_on_any_mesh(load: Any, allocator: Any, way: str) -> None:
    whole, arguments, result, sharding, cap = load
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        if way == "large":  # Compiled functions make it.
            patch.setattr(host_leaves, "MOST", 0)
        elif way == "joined":  # In one array, by threads.
            patch.setattr(host_leaves, "_JOINED", 0)
            patch.setattr(host_leaves, "_SHARED_OUT", 0)
        elif way == "public":  # By no private call.
            patch.setattr(private_api, "jax_placer", lambda: None)
        path = samples.save(
            Path(folder) / "m.safetensors", {f"w{n}": array for n, array in enumerate(whole)}
        )
        made = mfload.load_into(
            {"w": jax.ShapeDtypeStruct(result.shape, result.dtype, sharding=sharding)},
            path,
            mapping={r"w(\d)": mfload.rule("w", **arguments)},
            options=mfload.Options(allocator=allocator, max_host_overhead=cap, threads=1),
        )
        on_host = mfload.load_into(
            {"w": np.zeros_like(result)},
            path,
            mapping={r"w(\d)": mfload.rule("w", **arguments)},
            options=mfload.Options(max_host_overhead=cap, threads=1),
        )["w"]
    shards.assert_sharded(made["w"], result, sharding)
    assert type(on_host) is np.ndarray
    assert samples.same(on_host, result)
    assert on_host.flags.writeable
    assert on_host.flags.c_contiguous
    del made, on_host


@pytest.mark.parametrize("seed", range(4))
def test_stretches_of_any_rule(tmp_path: Path, seed: int) -> None:
    """Leaves of several times the cap, with every step there is."""
    whole = [values((64, 512 + 256 * seed), ml_dtypes.bfloat16, n) for n in range(8)]
    path = samples.save(tmp_path / "m.safetensors", {f"w{n}": a for n, a in enumerate(whole)})
    axis = seed % 3
    result = np.stack([a.T for a in whole], axis=axis).astype(np.float32) * np.float32(0.5)
    sharding = NamedSharding(shards.mesh((2, 4)), [P("x", "y"), P(None, "x"), P("y"), P()][seed])
    target = {"w": jax.ShapeDtypeStruct(result.shape, np.float32, sharding=sharding)}
    rule = mfload.rule("w", transpose=(1, 0), stack={1: axis}, scale=0.5)
    report = mfload.Report()
    made = mfload.load_into(
        target,
        path,
        mapping={r"w(\d)": rule},
        report=report,
        options=mfload.Options(max_host_overhead=400_000, threads=1),
    )
    shards.assert_sharded(made["w"], result, sharding)
    assert report.peak_bytes <= 400_000


@pytest.fixture
def one(tmp_path: Path) -> Path:
    return samples.save(tmp_path / "one.safetensors", {"w": np.array([[300.0, -1.5]], np.float32)})


@pytest.mark.parametrize(
    ("cast", "fits"), [("int8", False), ("int16", True), ("uint16", False), ("bool", False)]
)
def test_casts_that_would_wrap_are_refused(one: Path, cast: str, fits: bool) -> None:
    def load() -> Any:
        target = {"w": jax.ShapeDtypeStruct((1, 2), cast)}
        return mfload.load_into(target, one, mapping={"w": mfload.rule("w", cast=cast)})

    if fits:
        assert np.asarray(load()["w"]).tolist() == [[300, -1]]
        return
    with pytest.raises(errors.LossyCastError) as caught:
        load()
    assert caught.value.tensor == "w"
    # Who keeps the error keeps no memory.
    assert mfload.live_bytes() == 0


@pytest.mark.parametrize(
    "options",
    [
        {"mesh": "cpu"},
        {"shardings": 3},
        {"shardings": [("w",)]},
        {"unmatched": "drop"},
        {"exchange": "twice"},
        {"allocator": "jax"},
        {"engine": "fast"},
        {"strict": "yes"},
        {"dtype": "float33"},
        {"mapping": 7},
        {"mapping": {"(": "w"}},
        {"mapping": {"w": 3}},
        {"threads": 0},
        {"max_host_overhead": -1},
        {"timeout": -1},
        {"report": {}},
        {"logical_axis_rules": 3},
    ],
)
def test_silly_arguments(one: Path, options: dict[str, Any]) -> None:
    with pytest.raises(errors.UsageError):
        mfload.load_into(
            {"w": jax.ShapeDtypeStruct((1, 2), np.float32)}, one, **as_options(options)
        )


def test_nothing_at_the_path(tmp_path: Path) -> None:
    with pytest.raises(errors.SourceNotFoundError):
        mfload.load_into({"w": np.zeros(3)}, tmp_path / "nothing.safetensors")


def test_a_report_that_failed_is_empty(one: Path) -> None:
    report = mfload.Report()
    mfload.load_into({"w": jax.ShapeDtypeStruct((1, 2), np.float32)}, one, report=report)
    with pytest.raises(errors.MappingError):
        mfload.load_into({"v": jax.ShapeDtypeStruct((1, 2), np.float32)}, one, report=report)
    assert report == mfload.Report()


FLOATS = ["float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"]


def delicate(dtype: Any) -> Any:
    """Numbers near the ties of narrower floats, numbers too small for them, and those between."""
    rng = np.random.default_rng(7)
    exponents = rng.integers(-152, 15, 4096)
    with np.errstate(all="ignore"):
        anything = rng.standard_normal(4096) * 2.0**exponents
        ties = [(1 + 2.0**-n * (2 * rng.integers(0, 2 ** (n - 1), 512) + 1)) for n in (3, 4, 8, 11)]
        near = [tie * (1 + sign * 2.0**-40) for tie in ties for sign in (-1, 0, 1)]
        small = np.ldexp(np.concatenate(near), -20)
        every = np.concatenate([anything, *near, small, [0.0, -0.0, np.inf, -np.inf]])
        every = every[: every.size // 64 * 64].reshape(8, -1).astype(dtype)
    every[np.isnan(every.astype(np.float64))] = 0  # Which NaN becomes which, nobody says.
    return every


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("wanted", FLOATS)
@pytest.mark.parametrize("stored", FLOATS)
def test_every_float_is_rounded_once(
    tmp_path: Path, stored: str, wanted: str, *, apart: bool
) -> None:
    """As `ml_dtypes` rounds on the host: once, to the nearest, and what is subnormal is kept."""
    dtypes = [np.dtype(getattr(ml_dtypes, name, name)) for name in (stored, wanted)]
    whole = delicate(dtypes[0])
    sharding = NamedSharding(shards.mesh((2, 4)), P("x", "y"))
    rule = mfload.rule("w", transpose=(1, 0)) if apart else mfload.rule("w")
    path = samples.save(tmp_path / "m.safetensors", {"w": whole})
    if wanted == "float8_e4m3fn" != stored:  # It has no infinity for what is too large.
        target = {"w": jax.ShapeDtypeStruct(whole.T.shape if apart else whole.shape, dtypes[1])}
        with pytest.raises(errors.LossyCastError, match="a value does not fit"):
            mfload.load_into(target, path, mapping={"w": rule})
        whole[np.abs(whole.astype(np.float64)) > 448] = 0
        path = samples.save(tmp_path / "m.safetensors", {"w": whole})
    with np.errstate(all="ignore"):
        result = (whole.T if apart else whole).astype(dtypes[1])
    with jax.enable_x64(True):
        target = {"w": jax.ShapeDtypeStruct(result.shape, dtypes[1], sharding=sharding)}
    made = mfload.load_into(
        target, path, mapping={"w": rule}, options=mfload.Options(allocator="framework")
    )
    shards.assert_sharded(made["w"], result, sharding)


def test_any_name_of_a_shared_variable_is_one_for_rules(tmp_path: Path) -> None:
    class Tied(nnx.Module):
        def __init__(self) -> None:
            self.embed = nnx.Embed(8, 4, rngs=nnx.Rngs(0))
            self.out = self.embed

    whole = np.arange(32, dtype=np.float32).reshape(8, 4)
    path = samples.save(tmp_path / "m.safetensors", {"embed.embedding": whole})
    mesh = shards.mesh((8,))
    made = mfload.load_into(
        nnx.eval_shape(Tied), path, mesh=mesh, shardings=[(r"out\.embedding", P("x"))]
    )
    array = made.embed.embedding.get_value()
    shards.assert_sharded(array, whole, NamedSharding(mesh, P("x")))


@pytest.mark.skipif(not hasattr(jax, "set_mesh"), reason="jax.set_mesh came with JAX 0.7")
@pytest.mark.parametrize("allocator", ["auto", "framework"])
@pytest.mark.parametrize("spec", [P(), P("x"), P(None, "y"), P(None, ("x", "y"))])
def test_nothing_of_the_mesh_that_is_set_gets_in_the_way(
    tmp_path: Path, spec: Any, allocator: Any
) -> None:
    """Parts that one device makes alone, and arrays on one device or another mesh."""
    parts = {name: samples.numbers((16, 24), np.float32, n) for n, name in enumerate("qkv")}
    path = samples.save(tmp_path / "m.safetensors", parts)
    rule = mfload.rule("w", concat=(1, 1, ("q", "k", "v")))
    whole = np.concatenate(list(parts.values()), 1)
    with jax.set_mesh(shards.mesh((2, 4))):
        for home in (
            NamedSharding(shards.mesh((2, 4)), spec),
            SingleDeviceSharding(jax.devices()[3]),
        ):
            target = {"w": jax.ShapeDtypeStruct(whole.shape, whole.dtype, sharding=home)}
            made = mfload.load_into(
                target, path, mapping={"([qkv])": rule}, options=mfload.Options(allocator=allocator)
            )
            shards.assert_sharded(made["w"], whole, home)
            loaded = mfload.load(
                path, framework="jax", shardings=home, options=mfload.Options(allocator=allocator)
            )
            shards.assert_sharded(loaded["q"], parts["q"], home)
        alone = mfload.load(path, framework="jax", options=mfload.Options(allocator=allocator))["k"]
        assert samples.same(np.asarray(alone), parts["k"])
