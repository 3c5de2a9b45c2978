"""`mfload.restore`: any target gets back what was saved, or an error that says why not."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn, nnx, serialization
from flax.training.train_state import TrainState
from restore_cases import Net, assert_same, keyless, linen_state, linen_step, nnx_optimizer

import mfload
from mfload import errors


@pytest.fixture(scope="module")
def saved() -> tuple[TrainState, bytes]:
    state = linen_state(steps=3)
    return state, serialization.to_bytes(state)


def test_a_train_state_of_linen(saved: Any) -> None:
    state, raw = saved
    target = linen_state(seed=1)
    found = mfload.restore(raw, target)
    assert type(found) is TrainState
    assert found.step == 3
    assert type(found.step) is int
    assert_same(found, state.replace(step=3))
    assert target.step == 0
    assert_same(linen_step(found, 3), linen_step(state, 3))


def test_shapes_alone_are_a_target(saved: Any) -> None:
    state, raw = saved
    found = mfload.restore(raw, jax.eval_shape(linen_state))
    assert isinstance(found.step, jax.Array)
    assert_same(found, state.replace(step=np.int32(3)))


def test_a_step_that_was_an_array_becomes_a_number_again() -> None:
    raw = serialization.to_bytes({"step": jnp.int32(7), "rate": np.float64(0.1), "on": np.True_})
    found = mfload.restore(raw, {"step": 0, "rate": 1.0, "on": False})
    assert found == {"step": 7, "rate": 0.1, "on": True}
    assert {key: type(each) for key, each in found.items()} == {
        "step": int, "rate": float, "on": bool
    }  # fmt: skip


def test_numbers_become_arrays_of_the_targets_dtype() -> None:
    raw = serialization.to_bytes({"step": 7, "rate": 0.1, "wide": 1 << 31})
    target = {"step": jnp.uint32(0), "rate": jnp.float32(0), "wide": jnp.uint32(0)}
    found = mfload.restore(raw, target)
    assert_same(found, {"step": np.uint32(7), "rate": np.float32(0.1), "wide": np.uint32(1 << 31)})


def test_an_integer_of_64_bits_becomes_a_narrow_one_if_it_fits(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    mfload.save({"step": np.int64(7)}, path)
    assert_same(mfload.restore(path, {"step": jnp.int32(0)}), {"step": np.int32(7)})
    mfload.save({"step": np.int64(1 << 31)}, path, overwrite=True)
    with pytest.raises(errors.MfloadError, match="int32"):
        mfload.restore(path, {"step": jnp.int32(0)})
    mfload.save({"step": np.array([7])}, path, overwrite=True)
    with pytest.raises(errors.MappingError, match="wants I32, stored is I64"):
        mfload.restore(path, {"step": jnp.zeros(1, jnp.int32)})


def test_names_of_numbers_that_collide() -> None:
    target = {"w": jnp.zeros(2)}
    for tree in ({"a.b": 1, "a": {"b": 2}}, {"a.b": 1, "a": {"b": jnp.ones(2)}}):
        raw = serialization.to_bytes({"w": jnp.ones(2), **tree})
        with pytest.raises(errors.HeaderError, match="the same name") as caught:
            mfload.restore(raw, target)
        assert caught.value.tensor == "a.b"


def test_numbers_of_numpy_stay_what_they_are() -> None:
    raw = serialization.to_bytes({"a": 0.1, "w": jnp.ones(2)})
    found = mfload.restore(raw, {"a": np.float64(0), "w": np.zeros(2, "f4")})
    assert type(found["a"]) is np.float64
    assert found["a"] == 0.1
    assert type(found["w"]) is np.ndarray


def test_texts_come_from_the_checkpoint() -> None:
    raw = serialization.to_bytes({"w": jnp.ones(2), "name": "stored", "none": None})
    assert mfload.restore(raw, {"w": jnp.zeros(2), "name": "mine"})["name"] == "stored"


@pytest.mark.parametrize("abstract", [False, True])
def test_nnx_with_statistics_and_typed_keys(abstract: bool) -> None:
    model, _ = nnx_optimizer(steps=3)
    raw = serialization.to_bytes(keyless(nnx.to_pure_dict(nnx.state(model))))
    target = nnx.eval_shape(lambda: Net(nnx.Rngs(9))) if abstract else Net(nnx.Rngs(9))
    found = mfload.restore(raw, target)
    assert type(found) is Net
    assert_same(nnx.state(found), nnx.state(model))
    x = jnp.ones((4, 8))
    assert_same(found(x), model(x))  # Dropout too.
    assert_same(found(x), model(x))


def test_nnx_states_and_optimizers() -> None:
    model, optimizer = nnx_optimizer(steps=2)
    both = {"model": nnx.state(model), "optimizer": nnx.state(optimizer)}
    pure = keyless({name: nnx.to_pure_dict(each) for name, each in both.items()})
    fresh = nnx_optimizer(seed=3)
    target = {"model": nnx.state(fresh[0]), "optimizer": nnx.state(fresh[1])}
    for tree in (pure, jax.tree.map(lambda x: {"value": x}, pure)):
        found = mfload.restore(serialization.to_bytes(tree), target)
        assert type(found["model"]) is nnx.State
        assert_same(found, both)


def test_boxes_of_linen() -> None:
    model = nn.Dense(4, kernel_init=nn.with_partitioning(nn.initializers.ones, ("x", None)))
    boxed = model.init(jax.random.key(0), jnp.ones((1, 8)))
    mesh = jax.make_mesh((8,), ("x",))
    target = jax.eval_shape(model.init, jax.random.key(1), jnp.ones((1, 8)))
    for tree in (boxed, nn.unbox(boxed)):
        found = mfload.restore(serialization.to_bytes(tree), target, mesh=mesh)
        kernel = found["params"]["kernel"]
        assert type(kernel) is nn.Partitioned
        assert kernel.value.sharding.spec == jax.P("x", None)
        assert_same(found, boxed)


class Pair(NamedTuple):
    left: Any
    right: Any


def test_named_tuples_lists_and_integer_keys() -> None:
    target = {"p": Pair(jnp.zeros(2), [jnp.zeros(3), (jnp.zeros(1),)]), "k": {7: jnp.zeros(4)}}
    wanted = {"p": Pair(jnp.ones(2), [jnp.ones(3), (jnp.full(1, 5.0),)]), "k": {7: jnp.ones(4)}}
    by_field = {
        "p": {"left": wanted["p"].left, "right": {"0": wanted["p"][1][0]}},
        "k": {"7": jnp.ones(4)},
    }
    by_field["p"]["right"]["1"] = {"0": wanted["p"][1][1][0]}
    by_number = {"p": [jnp.ones(2), [jnp.ones(3), [jnp.full(1, 5.0)]]], "k": {"7": jnp.ones(4)}}
    for tree in (by_field, by_number):
        assert_same(mfload.restore(serialization.msgpack_serialize(tree), target), wanted)


def test_optax_states_by_number() -> None:
    params = {"w": jnp.arange(4.0)}
    tx = optax.chain(optax.trace(0.9), optax.scale_by_adam())
    _, wanted = tx.update(params, tx.init(params), params)
    tree = {"opt": [[wanted[0].trace], [wanted[1].count, wanted[1].mu, wanted[1].nu]]}
    found = mfload.restore(serialization.msgpack_serialize(tree), {"opt": tx.init(params)})
    assert_same(found, {"opt": wanted})


# -- where it lies ---------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 4, 8])
def test_rules_and_the_mesh_decide(saved: Any, count: int) -> None:
    state, raw = saved
    mesh = jax.make_mesh((count,), ("x",), devices=jax.devices()[:count])
    rules = [("kernel", jax.P("x", None))]
    found = mfload.restore(raw, jax.eval_shape(linen_state), mesh=mesh, shardings=rules)
    assert_same(found, state.replace(step=np.int32(3)))
    for path, leaf in jax.tree_util.tree_flatten_with_path(found)[0]:
        spec = jax.P("x", None) if "kernel" in str(path) else jax.P()
        assert leaf.sharding == jax.NamedSharding(mesh, spec)


def test_the_target_decides(saved: Any) -> None:
    state, raw = saved
    mesh = jax.make_mesh((4, 2), ("a", "b"))
    where = {
        2: jax.NamedSharding(mesh, jax.P("b", "a")),
        1: jax.NamedSharding(mesh, jax.P("a")),
        0: jax.NamedSharding(mesh, jax.P()),
    }
    target = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where[x.ndim]),
        jax.eval_shape(linen_state),
    )
    found = mfload.restore(raw, target)
    assert_same(found, state.replace(step=np.int32(3)))
    assert all(leaf.sharding == where[leaf.ndim] for leaf in jax.tree.leaves(found))


def test_without_a_word_on_the_default_device(saved: Any) -> None:
    for found in (
        mfload.restore(saved[1], linen_state(seed=1)),
        mfload.restore(saved[1], framework="jax"),
    ):
        for leaf in jax.tree.leaves(found):
            assert isinstance(leaf, int) or leaf.devices() == {jax.devices()[0]}


# -- parts -----------------------------------------------------------------------------------


def test_a_smaller_target(saved: Any) -> None:
    state, raw = saved
    target = {"params": jax.tree.map(jnp.zeros_like, state.params)}
    with pytest.raises(errors.MappingError, match="extra") as caught:
        mfload.restore(raw, target)
    assert "strict=False" in str(caught.value)
    assert "names=" in str(caught.value)
    report = mfload.Report()
    found = mfload.restore(raw, target, strict=False, report=report)
    assert_same(found, {"params": state.params})
    assert any("no place for" in note and "opt_state" in note for note in report.notes)
    assert_same(mfload.restore(raw, target, names=r"^params\."), {"params": state.params})


def test_names_pick_and_the_rest_stays(saved: Any) -> None:
    state, raw = saved
    target, report = linen_state(seed=1), mfload.Report()
    found = mfload.restore(raw, target, names=r"^params\.", report=report)
    assert_same(found.params, state.params)
    assert_same(found.opt_state, target.opt_state)
    assert found.step == 0
    assert any("stay as they are" in note for note in report.notes)
    one = mfload.restore(raw, target, names=["params.Dense_0.bias", "step"])
    assert one.step == 3
    assert_same(one.params["Dense_0"]["kernel"], target.params["Dense_0"]["kernel"])
    assert_same(one.params["Dense_0"]["bias"], state.params["Dense_0"]["bias"])
    with pytest.raises(errors.TensorNotFoundError):
        mfload.restore(raw, target, names=["params.nothing"])


def test_lora_takes_the_base_alone() -> None:
    base = nnx.Linear(8, 4, rngs=nnx.Rngs(0))
    raw = serialization.to_bytes(nnx.to_pure_dict(nnx.state(base)))

    class Adapted(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.base = nnx.LoRALinear(8, 4, lora_rank=2, rngs=rngs)

    target, report = Adapted(nnx.Rngs(1)), mfload.Report()
    with pytest.raises(errors.MappingError, match="missing"):
        mfload.restore(raw, target, mapping=lambda name: f"base.{name}")
    found = mfload.restore(
        raw, target, mapping=lambda name: f"base.{name}", strict=False, report=report
    )
    assert_same(found.base.kernel[...], base.kernel[...])
    assert_same(found.base.lora.lora_a[...], target.base.lora.lora_a[...])
    assert any("lora_a" in note for note in report.notes)


def test_tied_weights() -> None:
    class Tied(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.embed = nnx.Embed(8, 4, rngs=rngs)
            self.head = nnx.Linear(4, 4, rngs=rngs)
            self.out = self.embed

    model = Tied(nnx.Rngs(0))
    raw = serialization.to_bytes(nnx.to_pure_dict(nnx.state(model)))
    found = mfload.restore(raw, Tied(nnx.Rngs(1)))
    assert found.out is found.embed
    assert_same(nnx.state(found), nnx.state(model))


# -- without a target ------------------------------------------------------------------------


def test_the_saved_tree_comes_back() -> None:
    tree = {
        "a": {"b": jnp.arange(3), "c": [jnp.ones(2), {"d": None}]},
        "n": 7,
        "e": {},
        "l": [],
        "s": "text",
        "5": np.float32(2),
    }
    raw = serialization.msgpack_serialize(tree)
    found = mfload.restore(raw, framework="jax")
    assert isinstance(found["a"]["b"], jax.Array)
    assert_same(found, tree)
    assert (found["e"], found["l"], found["s"], found["n"]) == ({}, [], "text", 7)
    plain = mfload.restore(raw, framework="numpy", names=r"a\.")
    assert_same(plain, {"a": {"b": np.arange(3, dtype="i4"), "c": {"0": np.ones(2, "f4")}}})


def test_names_without_a_tree_are_split(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    mfload.save({"a.0.b": np.ones(2), "a.1.b": np.zeros(2), "c": np.arange(2)}, path)
    found = mfload.restore(path, framework="numpy")
    assert_same(found, {"a": {"0": {"b": np.ones(2)}, "1": {"b": np.zeros(2)}}, "c": np.arange(2)})


@pytest.mark.parametrize("names", [("a", "a.b"), ("a.b", "a"), ("x.a.b", "x.a.b.c.d")])
def test_names_that_are_no_tree(tmp_path: Path, names: tuple[str, str]) -> None:
    path = tmp_path / "x.safetensors"
    mfload.save({name: np.ones(2) for name in names}, path)
    with pytest.raises(errors.CheckpointError, match="no tree") as caught:
        mfload.restore(path, framework="numpy")
    assert min(names, key=len) in str(caught.value)
    assert mfload.restore(path, framework="numpy", names=[names[0]])


def test_names_with_very_many_dots(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    mfload.save({".".join("a" * 5000): np.ones(2), "b": np.ones(2)}, path)
    with pytest.raises(errors.CheckpointError, match="at most 100 dots"):
        mfload.restore(path, framework="numpy")
    assert list(mfload.restore(path, framework="numpy", names=["b"])) == ["b"]


def test_on_a_mesh_without_a_target(saved: Any) -> None:
    mesh = jax.make_mesh((8,), ("x",))
    found = mfload.restore(saved[1], framework="jax", mesh=mesh, shardings=[("kernel", jax.P("x"))])
    assert found["params"]["Dense_0"]["kernel"].sharding.spec == jax.P("x")
    assert found["step"] == 3


def test_a_malformed_tree_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    for text in ('{"a":{"$tensor":"gone"}}', '{"a":{"$what":1}}', "{", '{"a":{"$tensor":7}}'):
        mfload.save({"w": np.ones(2)}, path, metadata={"mfload.tree": text}, overwrite=True)
        with pytest.raises(errors.HeaderError):
            mfload.restore(path, framework="numpy")
        with pytest.raises(errors.HeaderError):
            mfload.restore(path, {"w": jnp.ones(2)})


# -- what does not fit -----------------------------------------------------------------------


def test_all_that_is_wrong_is_told_at_once(saved: Any) -> None:
    target = linen_state(seed=1)
    params = dict(target.params)
    params["Dense_0"] = {"kernel": jnp.zeros((16, 3)), "bias": jnp.zeros(32, jnp.int32)}
    params["Dense_2"] = {"kernel": jnp.zeros((2, 2))}
    del params["Dense_1"]
    before = jax.tree.map(np.asarray, params)
    with pytest.raises(errors.MappingError) as caught:
        mfload.restore(saved[1], target.replace(params=params, step=False))
    text = "\n".join(caught.value.problems)
    for each in (
        "wrong shape: params.Dense_0.kernel: wants [16, 3]",
        "wrong dtype: params.Dense_0.bias: wants I32",
        "missing: params.Dense_2.kernel",
        "extra: params.Dense_1.kernel",
        "wrong dtype: step: wants a Python bool, stored is I32",
    ):
        assert each in text
    assert_same(params, before)


def test_invalid_calls(saved: Any, tmp_path: Path) -> None:
    raw = saved[1]
    with pytest.raises(errors.UsageError, match="mapping= is for a target"):
        mfload.restore(raw, framework="jax", mapping={"a": "b"})
    with pytest.raises(errors.UsageError, match="step="):
        mfload.restore(raw, framework="jax", step=3)
    with pytest.raises(errors.UsageError, match="arguments are swapped"):
        mfload.restore({"w": jnp.ones(2)}, "x.msgpack")  # type: ignore[arg-type]
    with pytest.raises(errors.UsageError):
        mfload.restore(raw, linen_state(), strict=1)  # type: ignore[arg-type]
    with pytest.raises(errors.SourceNotFoundError):
        mfload.restore(tmp_path / "x.msgpack", linen_state())
    mesh = jax.make_mesh((8,), ("x",))
    with pytest.raises(errors.ShardingError):
        mfload.restore(raw, linen_state(), mesh=mesh, shardings=jax.P("x"))


def test_a_name_is_not_taken_for_a_misspelling_of_itself() -> None:
    raw = serialization.to_bytes({"a": jnp.ones(2), "b": jnp.ones(2)})
    with pytest.raises(errors.MappingError) as caught:
        mfload.restore(raw, {"a": jnp.ones(2), "b": jnp.ones(2)}, mapping={"a": "a"})
    assert "b [2]: no rule matches" in str(caught.value)
    assert "did you mean" not in str(caught.value)


def test_one_array_has_any_name(tmp_path: Path) -> None:
    path = tmp_path / "x.msgpack"
    path.write_bytes(serialization.to_bytes(jnp.arange(3)))
    assert_same(mfload.restore(path, jnp.zeros(3, jnp.int32)), jnp.arange(3))
    path.write_bytes(serialization.to_bytes({"a": jnp.arange(3), "b": jnp.arange(3)}))
    with pytest.raises(errors.MappingError, match="extra"):
        mfload.restore(path, jnp.zeros(3, jnp.int32))


def test_two_stored_names_for_one_leaf() -> None:
    raw = serialization.to_bytes({"a": jnp.ones(2), "a.value": jnp.zeros(2)})
    with pytest.raises(errors.MappingError, match="filled twice"):
        mfload.restore(raw, {"a": jnp.zeros(2)})
    target = {"a": jnp.zeros(2), "a.value": jnp.ones(2)}
    assert_same(mfload.restore(raw, target), {"a": jnp.ones(2), "a.value": jnp.zeros(2)})


def test_steps_of_the_older_files(tmp_path: Path) -> None:
    for step in (9, 10, 2):
        raw = serialization.to_bytes({"w": jnp.full(3, float(step))})
        (tmp_path / f"checkpoint_{step}").write_bytes(raw)
    (tmp_path / "checkpoint_tmp").write_bytes(b"half")
    target = {"w": jnp.zeros(3)}
    assert_same(mfload.restore(tmp_path, target), {"w": jnp.full(3, 10.0)})
    assert_same(mfload.restore(tmp_path, target, step=9), {"w": jnp.full(3, 9.0)})
    assert_same(mfload.restore(tmp_path, framework="jax", step=2), {"w": jnp.full(3, 2.0)})
    with pytest.raises(errors.SourceNotFoundError, match=r"no step 7.*2, 9, 10"):
        mfload.restore(tmp_path, framework="jax", step=7)
    with pytest.raises(errors.UsageError, match="step"):
        mfload.restore(tmp_path, framework="jax", step="7")  # type: ignore[arg-type]


class TestSomeOfTheShards:
    """A target needs the shards that hold what fills it; what rules or names leave out, none."""

    @pytest.fixture
    def torn(self, tmp_path: Path) -> Path:
        state = {name: np.full(4, n, np.float32) for n, name in enumerate("abc")}
        mfload.save(state, tmp_path / "torn" / "model.safetensors", max_shard_size=16)
        with mfload.open(tmp_path / "torn") as opened:
            (tmp_path / "torn" / opened.file_of(opened.info("b"))).unlink()
        return tmp_path / "torn"

    @pytest.mark.parametrize("fill", ["load_into", "restore"])
    @pytest.mark.parametrize(
        "given", [{"mapping": {"([ac])": r"\1", ".*": None}}, {"strict": False}]
    )
    def test_what_is_there(self, torn: Path, fill: str, given: Any) -> None:
        target = {name: jnp.ones(4) for name in "ac"}
        report = mfload.Report()
        if fill == "load_into":
            found = mfload.load_into(target, torn, report=report, **given)
        else:
            found = mfload.restore(torn, target, report=report, **given)
        assert_same(found, {"a": np.full(4, 0, np.float32), "c": np.full(4, 2, np.float32)})
        assert ("strict" in given) == any("no place for: b" in note for note in report.notes)

    @pytest.mark.parametrize("names", [["a", "c"], "a|c", lambda name: name != "b"])
    def test_names(self, torn: Path, names: Any) -> None:
        target = {name: jnp.ones(4) for name in "abc"}
        expected = {"a": np.zeros(4, np.float32), "b": target["b"], "c": np.full(4, 2, np.float32)}
        assert_same(mfload.restore(torn, target, names=names), expected)

    @pytest.mark.parametrize("strict", [True, False])
    def test_what_is_needed_is_never_left_as_it_is(self, torn: Path, strict: bool) -> None:
        whole, some = ({name: jnp.ones(4) for name in each} for each in ("abc", "ac"))
        calls = [
            lambda: mfload.load_into(whole, torn, strict=strict),
            lambda: mfload.restore(torn, whole, strict=strict),
            lambda: mfload.restore(torn, whole, names="[ab]"),
            lambda: mfload.load_into(some, torn, mapping={"b": "a", ".*": None}, strict=strict),
        ]
        if strict:
            calls.append(lambda: mfload.load_into(some, torn))  # b is one too many, or fits.
        for call in calls:
            with pytest.raises(errors.ShardNotFoundError) as caught:
                call()
            assert caught.value.tensor == "b"
