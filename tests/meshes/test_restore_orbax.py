"""Checkpoints of the real Orbax: saved at one mesh size and restored at others, bit by bit."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax_savers
import pytest
from flax import linen as nn, nnx, serialization
from orbax.checkpoint._src.path import atomicity
from restore_cases import (
    Net,
    assert_same,
    linen_state,
    linen_step,
    nnx_optimizer,
    nnx_step,
)  # fmt: skip

import mfload
from mfload import errors

COUNTS = (1, 2, 4, 8)
RULES = [(r"kernel", jax.P("x", None))]


def meshed(count: int, kind: Any = jax.sharding.AxisType.Explicit) -> Any:
    return jax.make_mesh((count,), ("x",), axis_types=(kind,), devices=jax.devices()[:count])


def on_mesh(state: Any, count: int, kind: Any = jax.sharding.AxisType.Explicit) -> Any:
    """A state with its kernels split over a mesh."""
    mesh = meshed(count, kind)

    def put(path: Any, leaf: Any) -> Any:
        spec = jax.P("x", None) if "kernel" in str(path) else jax.P()
        return jax.device_put(leaf, jax.NamedSharding(mesh, spec))

    return jax.tree_util.tree_map_with_path(put, state)


@pytest.mark.parametrize("saver", orbax_savers.SAVERS)
def test_every_layout_onto_every_mesh(tmp_path: Path, saver: str) -> None:
    state = linen_state(steps=2)
    target = jax.eval_shape(linen_state)
    wanted = state.replace(step=jnp.int32(2))
    for count in (1, 8) if saver not in ("standard", "v1") else (1, 2, 4, 8):
        path = tmp_path / str(count)
        orbax_savers.save(saver, path, on_mesh(wanted, count))
        for other in COUNTS:
            found = mfload.restore(path, target, mesh=meshed(other), shardings=RULES)
            assert_same(found, wanted)
            kernel = found.opt_state[1][0].nu["Dense_1"]["kernel"]
            assert kernel.sharding == jax.NamedSharding(meshed(other), jax.P("x", None))
        plain = mfload.restore(path, framework="numpy")
        assert_same(plain["params"], jax.tree.map(np.asarray, wanted.params))


def test_the_saved_topology_has_no_say(tmp_path: Path) -> None:
    state = linen_state(steps=1).replace(step=jnp.int32(1))
    orbax_savers.save("standard", tmp_path / "x", on_mesh(state, 8))
    for found in (
        mfload.restore(tmp_path / "x", jax.eval_shape(linen_state)),
        mfload.restore(tmp_path / "x", framework="jax"),
    ):
        for leaf in jax.tree.leaves(found):
            assert leaf.devices() == {jax.devices()[0]}


@pytest.mark.parametrize("saver", ["standard", "files", "v1"])
def test_the_next_step_is_the_uninterrupted_runs(tmp_path: Path, saver: str) -> None:
    state = linen_state(steps=3)
    orbax_savers.save(saver, tmp_path / "x", state)
    found = mfload.restore(tmp_path / "x", linen_state(seed=1))
    assert type(found.step) is type(linen_state().step)
    assert_same(found, state)
    shapes = mfload.restore(tmp_path / "x", jax.eval_shape(linen_state))  # The step was a number.
    assert_same(shapes, state.replace(step=jnp.int32(3)))
    assert int(mfload.restore(tmp_path / "x", framework="jax")["step"]) == 3
    for number in range(3, 6):
        found, state = linen_step(found, number), linen_step(state, number)
    assert_same(found, state)


@pytest.mark.parametrize("count", [2, 8])
def test_the_next_step_on_a_mesh(tmp_path: Path, count: int) -> None:
    def meshed_state(state: Any) -> Any:
        return on_mesh(state.replace(step=jnp.int32(state.step)), count, jax.sharding.AxisType.Auto)

    step = jax.jit(linen_step, static_argnums=1)
    state = step(meshed_state(linen_state(steps=1)), 1)
    orbax_savers.save("standard", tmp_path / "x", state)
    target = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
    )
    found = mfload.restore(tmp_path / "x", target)
    assert_same(found, state)
    for number in (2, 3):
        found, state = step(found, number), step(state, number)
        assert_same(found, state)
    kernel = found.opt_state[1][0].mu["Dense_0"]["kernel"]
    assert len(kernel.sharding.device_set) == count
    donated = jax.jit(linen_step, static_argnums=1, donate_argnums=0)
    first, second = (mfload.restore(tmp_path / "x", target) for _ in range(2))
    assert_same(donated(first, 2), step(second, 2))


@pytest.mark.parametrize("saver", ["pytree", "zarr3", "raw", "files", "files-zarr3"])
def test_names_that_are_like_those_of_files(tmp_path: Path, saver: str) -> None:
    x = jnp.arange(12.0).reshape(3, 4)
    trees = [x, {"": x, "b": x + 1}, {"d": x, "c": {"0": x + 1}}, {"a": {"": x, "b": x + 1}}]
    for number, tree in enumerate(trees):
        path = tmp_path / str(number)
        orbax_savers.save(saver, path, tree)
        assert_same(mfload.restore(path, jax.tree.map(jnp.zeros_like, tree)), tree)
        assert_same(mfload.restore(path, framework="jax"), tree)


def test_numbers_lists_and_empty_nodes(tmp_path: Path) -> None:
    tree = {"a": [jnp.ones(2), {"b": jnp.arange(3)}], "n": 7, "rate": 0.25, 3: np.arange(2)}
    orbax_savers.save("pytree", tmp_path / "x", {"t": tree["a"], "n": 7, "rate": 0.25})
    found = mfload.restore(
        tmp_path / "x", {"t": [jnp.zeros(2), {"b": 0 * tree["a"][1]["b"]}], "n": 0, "rate": 0.0}
    )
    assert (found["n"], found["rate"]) == (7, 0.25)
    assert_same(found["t"], tree["a"])


@pytest.mark.parametrize(("saver", "abstract"), [("standard", False), ("v1", True)])
def test_nnx(tmp_path: Path, saver: str, abstract: bool) -> None:
    model, optimizer = nnx_optimizer(steps=2)
    saved = {"model": nnx.state(model), "optimizer": nnx.state(optimizer)}
    orbax_savers.save(saver, tmp_path / "x", saved)

    def fresh() -> Any:
        model, optimizer = nnx_optimizer(seed=5)
        return {"model": nnx.state(model), "optimizer": nnx.state(optimizer)}

    target = nnx.eval_shape(fresh) if abstract else fresh()
    found = mfload.restore(tmp_path / "x", target)
    assert_same(found, saved)
    other, stepper = nnx_optimizer(seed=5)
    nnx.update(other, found["model"])
    nnx.update(stepper, found["optimizer"])
    nnx_step(other, stepper, 2)
    nnx_step(model, optimizer, 2)
    assert_same(nnx.state(other), nnx.state(model))
    assert_same(nnx.state(stepper), nnx.state(optimizer))


def test_a_module_of_nnx_from_a_pure_dict_and_a_state(tmp_path: Path) -> None:
    model, _ = nnx_optimizer(steps=1)
    state = nnx.state(model)
    orbax_savers.save("standard", tmp_path / "state", state)
    orbax_savers.save("standard", tmp_path / "pure", nnx.to_pure_dict(state))
    for name in ("state", "pure"):
        found = mfload.restore(tmp_path / name, Net(nnx.Rngs(3)))
        assert type(found) is Net
        assert_same(nnx.state(found), state)


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn])
def test_narrow_floats(tmp_path: Path, dtype: Any) -> None:
    wide = linen_state(steps=2).replace(step=jnp.int32(2))
    state = wide.replace(params=jax.tree.map(lambda x: x.astype(dtype), wide.params))
    orbax_savers.save("standard", tmp_path / "x", on_mesh(state, 4))
    target = jax.eval_shape(lambda: state)
    assert_same(mfload.restore(tmp_path / "x", target, mesh=meshed(8), shardings=RULES), state)
    found = mfload.restore(tmp_path / "x", jax.eval_shape(lambda: wide))  # Widened while read.
    assert_same(found.params, jax.tree.map(lambda x: x.astype(jnp.float32), state.params))


class Scanned(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        body = lambda layer, x, _: (layer(x), None)  # noqa: E731
        scan = nn.scan(body, variable_axes={"params": 0}, split_rngs={"params": True}, length=3)
        return scan(nn.Dense(16, name="layer"), x, None)[0]


def test_scanned_layers(tmp_path: Path) -> None:
    model, x = Scanned(), jnp.ones((2, 16))
    params = model.init(jax.random.key(0), x)
    assert params["params"]["layer"]["kernel"].shape == (3, 16, 16)
    orbax_savers.save("standard", tmp_path / "x", params)
    target = jax.eval_shape(model.init, jax.random.key(1), x)
    rules = [("kernel", jax.P(None, "x", None))]
    found = mfload.restore(tmp_path / "x", target, mesh=meshed(8), shardings=rules)
    assert_same(found, params)
    stack = params["params"]["layer"]
    layers = {f"layers_{n}": jax.tree.map(lambda x, n=n: x[n], stack) for n in range(3)}
    orbax_savers.save("standard", tmp_path / "apart", layers)
    mapping = {r"layers_(\d+)\.(\w+)": mfload.rule(r"params.layer.\2", stack=1)}
    found = mfload.restore(
        tmp_path / "apart", target, mapping=mapping, mesh=meshed(4), shardings=rules
    )
    assert_same(found, params)


def test_tied_and_lora(tmp_path: Path) -> None:
    class Tied(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.embed = nnx.Embed(16, 8, rngs=rngs)
            self.out = self.embed

    class Adapted(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.embed = nnx.Embed(16, 8, rngs=rngs)
            self.out = self.embed
            self.lora = nnx.LoRA(8, 2, 8, rngs=rngs)

    model = Tied(nnx.Rngs(0))
    orbax_savers.save("standard", tmp_path / "x", nnx.state(model))
    found = mfload.restore(tmp_path / "x", Tied(nnx.Rngs(1)), mesh=meshed(8))
    assert found.out is found.embed
    assert_same(nnx.state(found), nnx.state(model))
    target, report = Adapted(nnx.Rngs(2)), mfload.Report()
    with pytest.raises(errors.MappingError, match="2 missing"):
        mfload.restore(tmp_path / "x", target)
    found = mfload.restore(tmp_path / "x", target, strict=False, report=report)
    assert_same(found.embed.embedding[...], model.embed.embedding[...])
    assert_same(nnx.state(found.lora), nnx.state(target.lora))
    assert any("lora" in note for note in report.notes)


# -- steps -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def root(tmp_path_factory: Any) -> Path:
    """The root of a manager with steps 0 to 2."""
    path = tmp_path_factory.mktemp("root") / "run"
    with orbax_savers.manager(path) as manager:
        for step in range(3):
            manager.save(step, args=orbax_savers.ocp.args.StandardSave(linen_state(steps=step)))
        manager.wait_until_finished()
    return path


def test_the_newest_step_or_the_one_asked_for(root: Path) -> None:
    assert_same(mfload.restore(root, linen_state(seed=1)), linen_state(steps=2))
    for step in range(3):
        wanted = linen_state(steps=step)
        assert_same(mfload.restore(root, linen_state(seed=1), step=step), wanted)
        for path in (root / str(step), root / str(step) / "default"):
            assert_same(mfload.restore(path, linen_state(seed=1)), wanted)
    with pytest.raises(errors.SourceNotFoundError, match="7"):
        mfload.restore(root, linen_state(), step=7)


def test_files_of_flax_beside_steps_of_orbax(root: Path, tmp_path: Path) -> None:
    for step in range(3):
        shutil.copytree(root / str(step), tmp_path / f"checkpoint_{step + 2}")
    for step in (1, 9):
        raw = serialization.to_bytes(linen_state(steps=1).replace(step=step))
        (tmp_path / f"checkpoint_{step}").write_bytes(raw)
    target = linen_state(seed=1)
    assert mfload.restore(tmp_path, target).step == 9
    assert mfload.restore(tmp_path, target, step=np.int64(1)).step == 1
    assert mfload.restore(tmp_path, target, step=3).step == 1
    (tmp_path / "checkpoint_9").unlink()
    assert mfload.restore(tmp_path, target).step == 2


def test_a_checkpoint_without_its_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stores can't rename: a checkpoint has its name before it is whole."""
    kind, ocp, seen = atomicity.CommitFileTemporaryPath, orbax_savers.ocp, list[str]()
    finalize, target = kind.finalize, {"w": jnp.zeros(3)}

    async def watched(path: Any) -> None:
        step = path.get_final()
        if step.name == "2":
            assert (step / "default" / "_METADATA").exists()
            assert_same(mfload.restore(tmp_path / "run", target), {"w": jnp.full(3, 1.0)})
            for place, which in ((step, None), (step / "default", None), (tmp_path / "run", 2)):
                with pytest.raises(errors.CheckpointError, match="not finished"):
                    mfload.restore(place, target, step=which)
            seen.append(step.name)
        await finalize(path)

    monkeypatch.setattr(kind, "finalize", watched)
    how = {"temporary_path_class": kind, "enable_async_checkpointing": False}
    with orbax_savers.manager(tmp_path / "run", **how) as manager:
        for step in (1, 2):
            manager.save(step, args=ocp.args.StandardSave({"w": jnp.full(3, float(step))}))
    assert seen == ["2"]
    assert_same(mfload.restore(tmp_path / "run", target), {"w": jnp.full(3, 2.0)})


def test_the_root_of_a_checkpointer_of_v1(tmp_path: Path) -> None:
    with orbax_savers.ocp_v1.training.Checkpointer(tmp_path / "run") as checkpointer:
        for step in (5, 10):
            checkpointer.save(step, linen_state(steps=step // 5))
    assert_same(mfload.restore(tmp_path / "run", linen_state(seed=1)), linen_state(steps=2))
    found = mfload.restore(tmp_path / "run", linen_state(seed=1), step=5)
    assert_same(found, linen_state(steps=1))


def test_items_are_named(tmp_path: Path) -> None:
    ocp = orbax_savers.ocp
    state = linen_state(steps=1)
    with orbax_savers.manager(tmp_path / "run") as manager:
        items = {"params": ocp.args.StandardSave(state.params), "meta": ocp.args.JsonSave({"a": 1})}
        manager.save(
            3, args=ocp.args.Composite(**items, opt=ocp.args.StandardSave({"n": jnp.ones(2)}))
        )
    target = jax.eval_shape(lambda: state.params)
    assert_same(mfload.restore(tmp_path / "run" / "3" / "params", target), state.params)
    with pytest.raises(errors.CheckpointError, match="several items") as caught:
        mfload.restore(tmp_path / "run", target)
    assert "params" in str(caught.value)


def test_what_does_not_fit_is_told_with_its_path(root: Path) -> None:
    target = linen_state()
    params = {**target.params, "Dense_0": {"kernel": jnp.zeros((16, 3))}}
    with pytest.raises(errors.MappingError) as caught:
        mfload.restore(root, target.replace(params=params))
    text = "\n".join(caught.value.problems)
    assert "wrong shape: params.Dense_0.kernel" in text
    assert "extra: params.Dense_0.bias" in text
    assert caught.value.file == str(root / "2" / "default" / "_METADATA")


@pytest.mark.parametrize("with_target", [False, True])
def test_unfinished_checkpoints(tmp_path: Path, with_target: bool) -> None:
    target = linen_state(seed=1) if with_target else None
    with orbax_savers.manager(tmp_path / "run") as manager:
        for step in (1, 2):
            manager.save(step, args=orbax_savers.ocp.args.StandardSave(linen_state(steps=step)))
    root = tmp_path / "run"
    half = root / "3.orbax-checkpoint-tmp"
    shutil.copytree(root / "2", half)
    # The unfinished one is passed over.
    assert mfload.restore(root, target, names="step", framework="jax")
    with pytest.raises(errors.CheckpointError, match="not finished") as caught:
        mfload.restore(half, target, framework="jax")
    assert str(half) in str(caught.value)
    with pytest.raises(errors.CheckpointError, match="not finished"):
        mfload.restore(root, target, step=3, framework="jax")
    (root / "2" / "default" / "_METADATA").unlink()
    with pytest.raises(errors.CheckpointError, match="_METADATA"):
        mfload.restore(root / "2", target, framework="jax")


def test_a_missing_chunk_is_told(tmp_path: Path) -> None:
    orbax_savers.save("files", tmp_path / "x", {"a": jnp.ones(4), "b": {"c": jnp.ones(3)}})
    target = {"a": jnp.zeros(4), "b": {"c": jnp.zeros(3)}}
    assert_same(mfload.restore(tmp_path / "x", target), jax.tree.map(jnp.ones_like, target))
    (tmp_path / "x" / "b.c" / "0").unlink()
    with pytest.raises(errors.MfloadError, match=r"b\.c"):
        mfload.restore(tmp_path / "x", target)


def test_what_is_saved_and_converted_restores(tmp_path: Path) -> None:
    state = linen_state(steps=2)
    mfload.save(state, tmp_path / "saved.safetensors")
    orbax_savers.save("standard", tmp_path / "orbax", state)
    mfload.convert(tmp_path / "orbax", tmp_path / "converted.safetensors")
    for name in ("saved", "converted"):
        path = tmp_path / f"{name}.safetensors"
        assert_same(mfload.restore(path, linen_state(seed=1)), state)
        found = mfload.restore(path, framework="numpy")
        assert_same(found["params"], jax.tree.map(np.asarray, state.params))
    model, _ = nnx_optimizer(steps=1)
    mfload.save(model, tmp_path / "model.safetensors")
    found = mfload.restore(tmp_path / "model.safetensors", nnx.eval_shape(lambda: Net(nnx.Rngs(3))))
    assert_same(nnx.state(found), nnx.state(model))
