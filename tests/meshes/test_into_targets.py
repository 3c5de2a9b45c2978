"""Each kind of target comes back as what it was, with the right arrays in place."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections import OrderedDict
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from flax import nnx
from flax.core import FrozenDict, meta
from flax.training.train_state import TrainState
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P, SingleDeviceSharding
from samples import numbers, save

import mfload
from mfload import errors
from mfload.trees import jax_shardings, jax_trees
from mfload.trees.jax_trees import Axes

KINDS = [AxisType.Auto, AxisType.Explicit]
MESH = jax.make_mesh((2, 4), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
W, B = numbers((16, 32), np.float32, 1), numbers((32,), ml_dtypes.bfloat16, 2)


def sds(array: Any, sharding: Any = None) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)


def same(array: Any, numbers: Any, spec: Any = None, mesh: Any = MESH) -> None:
    assert isinstance(array, jax.Array)
    assert array.dtype == numbers.dtype
    assert array.shape == numbers.shape
    assert np.asarray(array).tobytes() == numbers.tobytes()
    if spec is not None:
        assert array.sharding.is_equivalent_to(NamedSharding(mesh, spec), array.ndim)
        assert array.sharding.mesh == mesh


@dataclasses.dataclass
class Pair:
    w: Any
    b: Any
    name: str = "pair"


jax.tree_util.register_dataclass(Pair, data_fields=["w", "b"], meta_fields=["name"])


def bare(*names: str) -> Any:
    """The warning about leaves that stay and have no value."""
    found = r".*only shapes for them .*not by nnx\.eval_shape"
    return pytest.warns(UserWarning, match=r".*".join(map(re.escape, names)) + found)


def afresh() -> Any:
    """The warning about an optimizer's state that the checkpoint lacks."""
    return pytest.warns(UserWarning, match=r"of the optimizer's state: it stays as it is")


class Named(NamedTuple):
    w: Any
    b: Any


@pytest.fixture
def two(tmp_path):
    return save(tmp_path / "two.safetensors", {"w": W, "b": B})


# -- trees of JAX ----------------------------------------------------------------------------


@pytest.mark.parametrize("leaf", [sds, jnp.asarray, np.zeros_like])
@pytest.mark.parametrize("kind", [dict, OrderedDict, FrozenDict, Pair, Named])
def test_containers(two, kind, leaf):
    fields = {"w": leaf(W), "b": leaf(B)}
    target = kind(**fields) if kind in (Pair, Named) else kind(fields)
    made = mfload.load_into(target, two, mesh=MESH, shardings=[("w", P("x", "y"))])
    assert type(made) is kind
    assert made is not target
    part = (lambda key: getattr(made, key)) if kind in (Pair, Named) else made.__getitem__
    same(part("w"), W, P("x", "y"))
    if leaf is np.zeros_like:  # What no rule asks for on the mesh stays NumPy's.
        assert type(part("b")) is np.ndarray
        assert part("b").tobytes() == B.tobytes()
    else:
        same(part("b"), B, P())


def test_lists_and_numbers_as_keys(tmp_path):
    path = save(tmp_path / "m.safetensors", {"layers.0.w": W, "layers.1.w": -W, "x.7": B})
    made = mfload.load_into({"layers": [{"w": sds(W)}, {"w": sds(W)}], "x": {7: sds(B)}}, path)
    same(made["layers"][1]["w"], -W)
    same(made["x"][7], B)


def test_names_with_dots(tmp_path):
    path = save(tmp_path / "m.safetensors", {"a.b.w": W, "a.b": B})
    made = mfload.load_into({"a.b.w": sds(W), "a.b": sds(B)}, path)
    same(made["a.b.w"], W)


def test_a_single_leaf(tmp_path):
    path = save(tmp_path / "m.safetensors", {"w": W})
    same(mfload.load_into(sds(W), path, mapping={"w": ""}), W)


def test_two_leaves_of_one_name(two):
    with pytest.raises(errors.UsageError, match=r"same name.*'a\.b'"):
        mfload.load_into({"a.b": sds(W), "a": {"b": sds(W)}}, two)


def test_arrays_of_the_target_are_left_alone(two):
    before = jnp.zeros_like(W), jnp.zeros_like(B)
    target = {"w": before[0], "b": before[1]}
    mfload.load_into(target, two)
    assert target["w"] is before[0]
    assert not np.asarray(before[0]).any()


def test_what_is_no_array_stays(two):
    def function():
        pass

    rest = {"f": function, "t": "text", "n": None, "step": 3, "rate": 0.5, "flag": True}
    made = mfload.load_into({"w": sds(W), "b": sds(B), **rest}, two)
    assert {key: made[key] for key in rest} == rest


def test_a_plain_number_is_filled_where_the_checkpoint_has_one(tmp_path):
    path = save(tmp_path / "m.safetensors", {"w": W, "step": np.array(7, np.int32)})
    made = mfload.load_into({"w": sds(W), "step": 0}, path)
    assert made["step"] == 7
    assert type(made["step"]) is int


def test_random_keys_stay(two):
    key = jax.random.key(3)
    made = mfload.load_into({"w": sds(W), "b": sds(B), "key": key}, two)
    assert made["key"] is key


def test_random_keys_are_loaded_as_their_data(tmp_path):
    key = jax.random.key(3)
    data = jax.random.key_data(key)
    path = save(tmp_path / "m.safetensors", {"w": W, "key": np.asarray(data)})
    with pytest.raises(errors.MappingError, match=r"typed PRNG key.*key_data.*wrap_key_data"):
        mfload.load_into({"w": sds(W), "key": jax.random.key(0)}, path)
    made = mfload.load_into({"w": sds(W), "key": jnp.zeros_like(data)}, path)
    assert jax.random.wrap_key_data(made["key"]) == key


def test_arrays_that_the_checkpoint_lacks(two):
    more = jnp.ones(3)
    with pytest.raises(errors.MappingError, match=r"missing: more \[3\]"):
        mfload.load_into({"w": sds(W), "b": sds(B), "more": more}, two)
    made = mfload.load_into({"w": sds(W), "b": sds(B), "more": more}, two, strict=False)
    assert made["more"] is more
    same(made["w"], W)


def test_a_dtype_that_no_checkpoint_has(two):
    odd = jax.ShapeDtypeStruct((3,), jnp.float8_e3m4)
    with pytest.raises(errors.MappingError, match="odd: no stored tensor becomes float8_e3m4"):
        mfload.load_into({"w": sds(W), "b": sds(B), "odd": odd}, two)
    with bare("1 leaf (odd)"):
        assert mfload.load_into({"w": sds(W), "odd": odd}, two, strict=False)["odd"] is odd


def test_no_tree_and_tracers(two):
    with pytest.raises(errors.UsageError, match="tracer"):
        jax.jit(lambda w: mfload.load_into({"w": w}, two))(jnp.asarray(W))


def test_a_pytree_without_names_for_its_children(tmp_path):
    class Odd:
        def __init__(self, *children):
            self.children = children

    jax.tree_util.register_pytree_node(Odd, lambda o: (o.children, None), lambda _, c: Odd(*c))
    path = save(tmp_path / "m.safetensors", {"0": W, "1": B})
    made = mfload.load_into(Odd(sds(W), sds(B)), path)
    assert isinstance(made, Odd)
    same(made.children[1], B)


# -- whose sharding counts -------------------------------------------------------------------


def test_a_leaf_brings_its_own_sharding(two):
    own = NamedSharding(MESH, P("y"))
    made = mfload.load_into({"w": sds(W, own), "b": sds(B)}, two)
    same(made["w"], W, P("y"))
    assert made["b"].sharding == SingleDeviceSharding(jax.devices()[0])


def test_an_array_brings_its_own_sharding(two):
    w = jax.device_put(W, NamedSharding(MESH, P(None, "x")))
    b = jax.device_put(B, jax.devices()[5])
    made = mfload.load_into({"w": w, "b": b}, two)
    same(made["w"], W, P(None, "x"))
    assert made["b"].devices() == {jax.devices()[5]}


def test_an_array_that_merely_lies_somewhere_goes_onto_the_mesh(two):
    made = mfload.load_into({"w": jnp.asarray(W), "b": jnp.asarray(B)}, two, mesh=MESH)
    same(made["w"], W, P())


def test_what_the_user_says_goes_first(two):
    own = NamedSharding(MESH, P("y"))
    target = {"w": sds(W, own), "b": sds(B, own)}
    made = mfload.load_into(target, two, mesh=MESH, shardings=[("w", P("x"))])
    same(made["w"], W, P("x"))
    same(made["b"], B, P("y"))


def test_unmatched_is_about_leaves_that_nobody_speaks_for(two):
    rules = [("w", P("x"))]
    own = NamedSharding(MESH, P("y"))
    target = {"w": sds(W), "b": sds(B, own)}
    mfload.load_into(target, two, mesh=MESH, shardings=rules, unmatched="error")
    with pytest.raises(errors.ShardingError, match="'b'"):
        mfload.load_into(
            {"w": sds(W), "b": sds(B)}, two, mesh=MESH, shardings=rules, unmatched="error"
        )


def test_a_leaf_is_not_asked_where_a_rule_speaks(linen, variables, two, tmp_path):
    rule = [("far.kernel", P(None, "y"))]
    made = mfload.load_into(variables, linen, mesh=MESH, shardings=rule)
    same(made["params"]["far"]["kernel"].value, linen_stored()["params.far.kernel"], P(None, "y"))
    kernel = nnx.with_partitioning(nnx.initializers.zeros, ("embed", "mlp"))
    with nnx.use_eager_sharding(False):
        module = nnx.Linear(16, 32, kernel_init=kernel, use_bias=False, rngs=nnx.Rngs(0))
    path = save(tmp_path / "m.safetensors", {"kernel": W})
    made = mfload.load_into(module, path, mesh=MESH, shardings=P(None, "x"))
    same(made.kernel.get_value(), W, P(None, "x"))
    own = NamedSharding(MESH.abstract_mesh, P("y"))
    target = {"w": sds(W, own), "b": sds(B, own)}
    made = mfload.load_into(target, two, shardings=NamedSharding(MESH, P("x")))
    same(made["w"], W, P("x"))


def test_what_leaves_say_amiss_is_told_of_all(two):
    own = NamedSharding(MESH.abstract_mesh, P("y"))
    with pytest.raises(errors.ShardingError) as caught:
        mfload.load_into({"w": sds(W, own), "b": sds(B, own)}, two)
    assert [line.split(":")[0] for line in caught.value.problems] == ["b", "w"]


@pytest.mark.parametrize("kind", KINDS)
def test_abstract_meshes_are_bound(two, kind):
    mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=(kind, kind))
    own = NamedSharding(mesh.abstract_mesh, P("y", "x"))
    target = {"w": sds(W, own), "b": sds(B)}
    with pytest.raises(errors.ShardingError, match=r"'w'.*mesh=, or a load inside"):
        mfload.load_into(target, two)
    same(mfload.load_into(target, two, mesh=mesh)["w"], W, P("y", "x"), mesh)
    with jax.set_mesh(mesh):
        same(mfload.load_into(target, two)["w"], W, P("y", "x"), mesh)


def test_an_abstract_mesh_with_other_axes(two):
    other = jax.make_mesh((8,), ("z",), axis_types=(AxisType.Auto,))
    own = NamedSharding(MESH.abstract_mesh, P("y"))
    with pytest.raises(errors.ShardingError, match=r"no axis 'y'.*'w'"):
        mfload.load_into({"w": sds(W, own), "b": sds(B)}, two, mesh=other)


def test_shardings_as_a_tree(two):
    tree = {"w": NamedSharding(MESH, P("x", "y")), "b": P("y")}
    for asked in (tree, FrozenDict(tree), Pair(**tree)):
        made = mfload.load_into({"w": sds(W), "b": sds(B)}, two, mesh=MESH, shardings=asked)
        same(made["w"], W, P("x", "y"))
        same(made["b"], B, P("y"))


def test_a_sharding_that_does_not_fit_names_the_leaf(two):
    with pytest.raises(errors.ShardingError, match=r"no axis 'z'.*'w'") as caught:
        mfload.load_into({"w": sds(W), "b": sds(B)}, two, mesh=MESH, shardings=[("w", P("z"))])
    assert caught.value.tensor == "w"


def test_rules_that_match_no_name_of_the_target_are_told_of(tmp_path):
    path = save(tmp_path / "m.safetensors", {"q_proj.weight": W})
    target, mapping = {"q": {"kernel": sds(W)}}, {r"q_proj\.weight": "q.kernel"}
    for rule in (r"q_proj\.weight", "nothing"):
        rules = [(rule, P("x")), ("kernel", P("x"))]
        with pytest.warns(UserWarning, match="match no tensor") as told:
            mfload.load_into(target, path, mapping=mapping, mesh=MESH, shardings=rules)
        (text,) = (str(each.message) for each in told)
        assert told[0].filename == __file__
        assert "'q.kernel'" in text
    own = {"q": {"kernel": sds(W, NamedSharding(MESH, P("x")))}}
    with pytest.raises(errors.TensorNotFoundError, match="match no tensor: 'nothing'; names are"):
        mfload.load_into(own, path, mapping=mapping, mesh=MESH, shardings={"nothing": P("x")})


# -- nnx -------------------------------------------------------------------------------------


class Block(nnx.Module):
    def __init__(self, rngs):
        kernel = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("x", "y"))
        self.linear = nnx.Linear(16, 32, rngs=rngs, kernel_init=kernel)
        self.norm = nnx.BatchNorm(32, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)


class Model(nnx.Module):
    """Layers in a list, statistics, random numbers, an embedding that is shared."""

    def __init__(self, rngs):
        self.embed = nnx.Embed(8, 32, rngs=rngs)
        self.blocks = nnx.List([Block(rngs), Block(rngs)])
        self.repeat = self.blocks[0]
        self.head = self.embed.embedding
        self.width = 32


def stored() -> dict[str, Any]:
    found = {"embed.embedding": numbers((8, 32), np.float32, 3)}
    for n in range(2):
        found |= {
            f"blocks.{n}.linear.kernel": numbers((16, 32), np.float32, 4 + n),
            f"blocks.{n}.linear.bias": numbers((32,), np.float32, 6 + n),
            f"blocks.{n}.norm.scale": numbers((32,), np.float32, 8 + n),
            f"blocks.{n}.norm.bias": numbers((32,), np.float32, 10 + n),
        }
    return found


@pytest.fixture
def model(tmp_path):
    return save(tmp_path / "model.safetensors", stored())


def check_model(made: Any, whole: dict[str, Any], *, spec: Any = None) -> None:
    for n, block in enumerate(made.blocks):
        same(block.linear.kernel.get_value(), whole[f"blocks.{n}.linear.kernel"], spec)
        same(block.linear.bias.get_value(), whole[f"blocks.{n}.linear.bias"])
        same(block.norm.scale.get_value(), whole[f"blocks.{n}.norm.scale"])
    same(made.embed.embedding.get_value(), whole["embed.embedding"])
    assert made.head is made.embed.embedding
    assert made.repeat is made.blocks[0]
    assert made.width == 32


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("abstract", [False, True])
def test_modules(model, abstract, kind):
    mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=(kind, kind))
    with jax.set_mesh(mesh):
        target = nnx.eval_shape(lambda: Model(nnx.Rngs(0))) if abstract else Model(nnx.Rngs(0))
    mean = target.blocks[1].norm.mean.get_value()
    key = target.blocks[0].drop.rngs.key.get_value()
    told = bare("blocks.0.drop.rngs.count", "and 5 more")
    with told if abstract else contextlib.nullcontext():
        made = mfload.load_into(target, model, mesh=mesh)
    assert type(made) is Model
    assert made is not target
    check_model(made, stored())
    kernel = made.blocks[0].linear.kernel
    same(kernel.get_value(), stored()["blocks.0.linear.kernel"], P("x", "y"), mesh)
    assert kernel.get_metadata() == target.blocks[0].linear.kernel.get_metadata()
    assert kernel is not target.blocks[0].linear.kernel
    assert type(made.blocks[0].norm.mean) is nnx.BatchStat
    assert made.blocks[1].norm.mean.get_value() is mean
    assert made.blocks[0].drop.rngs.key.get_value() is key
    assert made.blocks[0].drop.rngs.count is not target.blocks[0].drop.rngs.count


def test_a_module_that_was_loaded_works(model):
    with nnx.use_eager_sharding(False):
        target = Model(nnx.Rngs(0))
    made = mfload.load_into(target, model, mesh=MESH)
    check_model(made, stored(), spec=P("x", "y"))
    x = jnp.ones((2, 16))

    @nnx.jit
    def call(model, x):
        return model.blocks[0].linear(x) @ model.head.T

    whole = stored()
    with np.errstate(all="ignore"):
        expected = x @ jnp.asarray(whole["blocks.0.linear.kernel"])
        expected = (expected + whole["blocks.0.linear.bias"]) @ whole["embed.embedding"].T
    np.testing.assert_allclose(call(made, x), expected, rtol=1e-4)
    assert not np.array_equal(target.embed.embedding.get_value(), whole["embed.embedding"])
    assert len(nnx.to_flat_state(nnx.state(made))) == len(nnx.to_flat_state(nnx.state(target)))


def test_axes_of_a_variable_where_tracing_told_nothing(model):
    with nnx.use_eager_sharding(False), jax.set_mesh(MESH):
        target = nnx.eval_shape(lambda: Model(nnx.Rngs(0)))
    with bare("8 leaves"):
        made = mfload.load_into(target, model, mesh=MESH)
    same(made.blocks[0].linear.kernel.get_value(), stored()["blocks.0.linear.kernel"], P("x", "y"))


def test_axes_of_a_variable_go_before_a_trace_that_split_nothing(tmp_path):
    path = save(tmp_path / "m.safetensors", {"w": W})
    leaf = sds(W, NamedSharding(MESH.abstract_mesh, P(None, None)))
    target = {"w": nnx.Param(leaf, out_sharding=("y", "x"), eager_sharding=False)}
    same(mfload.load_into(target, path, mesh=MESH)["w"].get_value(), W, P("y", "x"))


def test_states(model):
    with nnx.use_eager_sharding(False):
        graph, state = nnx.split(nnx.eval_shape(lambda: Model(nnx.Rngs(0))))
    with bare("8 leaves"):
        made = mfload.load_into(state, model, mesh=MESH)
    assert type(made) is nnx.State
    whole = nnx.merge(graph, made)
    assert isinstance(whole.blocks[0].drop.rngs.key.get_value(), jax.ShapeDtypeStruct)
    check_model(whole, stored(), spec=P("x", "y"))


def test_shardings_as_a_state(model):
    with nnx.use_eager_sharding(False):
        target = nnx.eval_shape(lambda: Model(nnx.Rngs(0)))
    shardings = nnx.get_named_sharding(nnx.state(target), MESH)
    with bare("8 leaves"):
        made = mfload.load_into(target, model, shardings=shardings)
    check_model(made, stored(), spec=P("x", "y"))


def test_variables_in_other_trees(tmp_path):
    path = save(tmp_path / "m.safetensors", {"a": W, "b": B})
    shared = nnx.Param(jnp.asarray(W))
    made = mfload.load_into({"a": shared, "twice": [shared], "b": nnx.Cache(sds(B))}, path)
    assert type(made["a"]) is nnx.Param
    assert type(made["b"]) is nnx.Cache
    same(made["a"].get_value(), W)
    assert made["twice"][0] is made["a"] is not shared


def test_one_variable(tmp_path):
    path = save(tmp_path / "m.safetensors", {"a": W})
    made = mfload.load_into(nnx.Param(sds(W)), path, mapping={"a": ""})
    assert type(made) is nnx.Param
    same(made.get_value(), W)


def test_a_shared_variable_goes_by_any_of_its_names(tmp_path):
    whole = stored()
    whole["head"] = whole.pop("embed.embedding")
    with nnx.use_eager_sharding(False):
        target = Model(nnx.Rngs(0))
    made = mfload.load_into(target, save(tmp_path / "m.safetensors", whole))
    same(made.embed.embedding.get_value(), whole["head"])
    assert made.head is made.embed.embedding
    path = save(tmp_path / "none.safetensors", {k: v for k, v in whole.items() if k != "head"})
    with pytest.raises(errors.MappingError, match=r"embed\.embedding, which is also head"):
        mfload.load_into(target, path)
    both = whole | {"embed.embedding": whole["head"]}
    report = mfload.Report()
    mfload.load_into(target, save(tmp_path / "both.safetensors", both), report=report)
    assert any("embed.embedding was not loaded" in note for note in report.notes)
    path = save(tmp_path / "both.safetensors", both | {"head": whole["head"][::-1]})
    with pytest.warns(UserWarning, match=r"embed\.embedding and head are one variable"):
        made = mfload.load_into(target, path)
    same(made.embed.embedding.get_value(), whole["head"][::-1])  # As by `nnx.update`.


def test_statistics_are_loaded_where_the_checkpoint_has_them(tmp_path):
    mean = numbers((32,), np.float32, 20)
    path = save(tmp_path / "m.safetensors", stored() | {"blocks.1.norm.mean": mean})
    with nnx.use_eager_sharding(False):
        made = mfload.load_into(Model(nnx.Rngs(0)), path)
    same(made.blocks[1].norm.mean.get_value(), mean)
    assert not np.asarray(made.blocks[0].norm.mean.get_value()).any()


def test_a_module_that_holds_itself(tmp_path):
    class Loop(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(jnp.zeros(2))
            self.me = nnx.data(self)

    with pytest.raises(errors.UsageError, match=r"holds itself.*me is the target"):
        mfload.load_into(Loop(), tmp_path)


# -- linen -----------------------------------------------------------------------------------


class Dense(nn.Module):
    @nn.compact
    def __call__(self, x):
        init = nn.initializers.lecun_normal()
        x = nn.Dense(32, kernel_init=nn.with_partitioning(init, ("x", "y")), name="near")(x)
        logical = nn.with_logical_partitioning(init, ("embed", "mlp"))
        x = nn.Dense(8, kernel_init=logical, name="far")(x)
        return nn.BatchNorm(use_running_average=True, name="norm")(x)


RULES = [("embed", "y"), ("mlp", "x"), ("unused", None)]


def linen_stored() -> dict[str, Any]:
    return {
        "params.near.kernel": numbers((16, 32), np.float32, 1),
        "params.near.bias": numbers((32,), np.float32, 2),
        "params.far.kernel": numbers((32, 8), np.float32, 3),
        "params.far.bias": numbers((8,), np.float32, 4),
        "params.norm.scale": numbers((8,), np.float32, 5),
        "params.norm.bias": numbers((8,), np.float32, 6),
    }


@pytest.fixture
def linen(tmp_path):
    return save(tmp_path / "linen.safetensors", linen_stored())


@pytest.fixture
def variables():
    return Dense().init(jax.random.key(0), jnp.ones((2, 16)))


@pytest.mark.parametrize("wrap", [dict, FrozenDict])
@pytest.mark.parametrize("abstract", [False, True])
@pytest.mark.parametrize("rules", [RULES, dict(RULES)])
def test_boxes(linen, variables, abstract, wrap, rules):
    if abstract:
        variables = jax.eval_shape(Dense().init, jax.random.key(0), jnp.ones((2, 16)))
    target = wrap(variables)
    with bare("batch_stats.norm.mean") if abstract else contextlib.nullcontext():
        made = mfload.load_into(target, linen, mesh=MESH, logical_axis_rules=rules)
    assert type(made) is wrap
    near, far = made["params"]["near"]["kernel"], made["params"]["far"]["kernel"]
    assert type(near) is nn.Partitioned
    assert near.names == ("x", "y")
    assert type(far) is nn.LogicallyPartitioned
    assert far.names == ("embed", "mlp")
    same(near.value, linen_stored()["params.near.kernel"], P("x", "y"))
    same(far.value, linen_stored()["params.far.kernel"], P("y", "x"))
    same(made["params"]["near"]["bias"], linen_stored()["params.near.bias"], P())
    assert made["batch_stats"]["norm"]["mean"] is target["batch_stats"]["norm"]["mean"]


def test_rules_of_the_context(linen, variables):
    with nn.logical_axis_rules(RULES):
        made = mfload.load_into(variables, linen, mesh=MESH)
    far = made["params"]["far"]["kernel"]
    same(far.value, linen_stored()["params.far.kernel"], P("y", "x"))


def test_logical_axes_need_rules(linen, variables):
    with pytest.raises(errors.ShardingError, match=r"'params\.far\.kernel'.*logical_axis_rules="):
        mfload.load_into(variables, linen, mesh=MESH)
    mfload.load_into(variables, linen)  # Without a mesh nothing is split.


def test_a_rule_for_an_axis_that_the_mesh_lacks(linen, variables):
    with pytest.raises(errors.ShardingError, match=r"lacks.*params\.far\.kernel.*'?z"):
        mfload.load_into(
            variables, linen, mesh=MESH, logical_axis_rules=[("embed", "z"), ("mlp", "x")]
        )


@pytest.mark.parametrize(
    "rules", ["embed", 3, [("embed",)], [("embed", 1)], [(1, "x")], {"embed": 2}, [None]]
)
def test_rules_that_are_none(linen, variables, rules):
    with pytest.raises(errors.UsageError, match="logical_axis_rules"):
        mfload.load_into(variables, linen, mesh=MESH, logical_axis_rules=rules)


@pytest.mark.parametrize(
    ("names", "rules", "spec"),
    [
        (("embed", "mlp"), [("embed", "x"), ("mlp", "x")], P("x", None)),
        (("embed", "mlp"), [("mlp", "x"), ("embed", "x")], P(None, "x")),
        (("embed", "mlp"), [("embed", "x"), ("mlp", "x"), ("mlp", "y")], P("x", "y")),
        (("embed", "mlp"), [("embed", ("x", "y")), ("mlp", "y")], P(("x", "y"), None)),
        (("embed", "mlp"), [("embed", None), ("embed", "x"), ("mlp", "y")], P(None, "y")),
    ],
)
def test_an_axis_that_is_taken(tmp_path, names, rules, spec):
    """Variables of NNX lie where boxes of Linen do."""
    box = nn.LogicallyPartitioned(sds(W), names)
    variable = nnx.Param(sds(W), out_sharding=names, eager_sharding=False)
    path = save(tmp_path / "m.safetensors", {"a": W, "b": W})
    made = mfload.load_into({"a": box, "b": variable}, path, mesh=MESH, logical_axis_rules=rules)
    same(made["a"].value, W, spec)
    same(made["b"].get_value(), W, spec)


@pytest.mark.parametrize(
    ("names", "rules", "spec"),
    [
        (("x", "mlp"), [("mlp", "x")], P("x", None)),
        (("mlp", "mlp"), [("mlp", "x")], P("x", None)),
        ((("mlp", "x"), "embed"), [("embed", "x"), ("mlp", "y")], P(("y", "x"), None)),
    ],
)
def test_axes_of_a_mesh_beside_logical_ones(names, rules, spec):
    found = jax_shardings.of_axes("w", Axes(names, None, None, False), MESH, rules)
    assert found == NamedSharding(MESH, spec)


def test_an_axis_for_two_dims():
    with pytest.raises(errors.ShardingError, match=r"'x' for two dims.*'w'"):
        jax_shardings.of_axes("w", Axes(("x", "x"), None, None, False), MESH, None)
    with pytest.raises(errors.ShardingError, match=r"'x' for two dims.*'w'"):
        jax_shardings.of_axes("w", Axes(("a", "b"), None, None, False), MESH, [("a", ("x", "x"))])


def test_a_logical_axis_without_a_rule():
    axes = Axes(("embed", "mlp"), None, None, False)
    with pytest.raises(errors.ShardingError, match="logical_axis_rules= says where"):
        jax_shardings.of_axes("w", axes, MESH, None)
    with pytest.raises(errors.ShardingError, match=r"add \('mlp', None\) to logical_axis_rules"):
        jax_shardings.of_axes("w", axes, MESH, [("embed", "x")])
    with pytest.raises(errors.ShardingError, match=r"the mesh lacks \["):
        jax_shardings.of_axes("w", axes, MESH, [("embed", "x"), ("mlp", "z")])


def test_axes_of_boxes_on_a_mesh_of_their_own():
    axes = Axes(("x", None), MESH, None, False)
    assert jax_shardings.of_axes("w", axes, None, None) == NamedSharding(MESH, P("x", None))
    renamed = Axes(("a", ("b", "c")), None, (("a", "x"), ("b", ("y",)), ("c", None)), False)
    found = jax_shardings.of_axes("w", renamed, MESH, None)
    assert found == NamedSharding(MESH, P("x", ("y",)))
    brought = Axes(NamedSharding(MESH.abstract_mesh, P("y")), None, None, False)
    assert jax_shardings.of_axes("w", brought, MESH, None) == NamedSharding(MESH, P("y"))


def test_params_alone(tmp_path, variables):
    params = meta.unbox(variables["params"])
    path = save(
        tmp_path / "m.safetensors",
        {name.removeprefix("params."): array for name, array in linen_stored().items()},
    )
    made = mfload.load_into(params, path, mesh=MESH, shardings=[("kernel", P(None, "y"))])
    same(made["near"]["kernel"], linen_stored()["params.near.kernel"], P(None, "y"))


# -- a TrainState ----------------------------------------------------------------------------


@pytest.fixture
def state(variables):
    return TrainState.create(apply_fn=Dense().apply, params=variables["params"], tx=ADAM)


ADAM = optax.adam(1e-3)
MOMENTS = "opt_state.0.mu.near.bias"


def test_train_states(linen, state):
    report = mfload.Report()
    with afresh():
        made = mfload.load_into(state, linen, mesh=MESH, logical_axis_rules=RULES, report=report)
    assert type(made) is TrainState
    assert made.tx is state.tx
    assert made.apply_fn == state.apply_fn
    assert made.step == 0
    assert made.opt_state[0].count is state.opt_state[0].count
    assert any("(step, opt_state.0.count, opt_state.0.mu" in note for note in report.notes)
    assert jax.tree.structure(made) == jax.tree.structure(state)
    same(made.params["near"]["kernel"].value, linen_stored()["params.near.kernel"], P("x", "y"))
    grads = jax.tree.map(jnp.ones_like, made.params)
    assert made.apply_gradients(grads=grads).step == 1


def test_an_abstract_train_state(linen, state):
    def create():
        return state.replace(step=jnp.zeros((), jnp.int32))

    with bare("14 leaves (step, opt_state.0.count", "and 11 more"):
        made = mfload.load_into(jax.eval_shape(create), linen)
    assert isinstance(made.opt_state[0].count, jax.ShapeDtypeStruct)
    same(made.params["near"]["bias"], linen_stored()["params.near.bias"])


def test_an_optimizer_comes_as_a_whole(tmp_path, state):
    some = linen_stored() | {MOMENTS: numbers((32,), np.float32, 9)}
    path = save(tmp_path / "some.safetensors", some)
    with pytest.raises(errors.MappingError, match=r"missing: opt_state\.0\.count") as caught:
        mfload.load_into(state, path)
    assert len(caught.value.problems) == 12
    leaves, _ = jax.tree_util.tree_flatten_with_path(state.opt_state)
    for n, (at, leaf) in enumerate(leaves):
        name = jax.tree_util.keystr(at, simple=True, separator=".").removesuffix(".value")
        some[f"opt_state.{name}"] = numbers(leaf.shape, leaf.dtype, n)
    with afresh():  # For the step, a plain number.
        made = mfload.load_into(state, save(tmp_path / "all.safetensors", some))
    same(made.opt_state[0].mu["near"]["bias"], some[MOMENTS])


@pytest.mark.parametrize("abstract", [False, True])
@pytest.mark.parametrize("as_state", [False, True])
def test_optimizers_of_nnx(tmp_path, abstract, as_state):
    def create():
        model = nnx.Linear(16, 32, rngs=nnx.Rngs(0))
        return {"model": model, "optimizer": nnx.Optimizer(model, ADAM, wrt=nnx.Param)}

    target = nnx.eval_shape(create) if abstract else create()
    if as_state:
        target = nnx.state(target)
    path = save(tmp_path / "m.safetensors", {"model.kernel": W, "model.bias": W[0]})
    told = bare("6 leaves", "optimizer.", "and 3 more")
    with told if abstract else afresh():
        made = mfload.load_into(target, path)
    assert type(made) is type(target)
    model = made["model"]
    same((model["kernel"] if as_state else model.kernel).get_value(), W)
    stored = {"model.kernel": W, "model.bias": W[0], "optimizer.step": np.array(3, np.uint32)}
    with pytest.raises(errors.MappingError, match=r"missing: optimizer\.opt_state"):
        mfload.load_into(target, save(tmp_path / "some.safetensors", stored))


# -- what stays, and what can't be filled ----------------------------------------------------


def test_what_stays_is_noted_and_the_warning_points_here(model):
    report = mfload.Report()
    with nnx.use_eager_sharding(False):
        mfload.load_into(Model(nnx.Rngs(0)), model, report=report)
        target = nnx.eval_shape(lambda: Model(nnx.Rngs(0)))
    (note,) = (note for note in report.notes if "stay as they are" in note)
    assert "8 leaves (blocks.0.drop.rngs.count, blocks.0.drop.rngs.key, blocks.0.norm.mean" in note
    with bare("8 leaves") as told:
        mfload.load_into(target, model)
    assert [each.filename for each in told] == [__file__]


def test_nothing_is_said_where_all_is_filled(two):
    report = mfload.Report()
    mfload.load_into({"w": sds(W), "b": sds(B), "f": print, "t": "text"}, two, report=report)
    assert not any("stay" in note for note in report.notes)


@dataclasses.dataclass
class Unknown:
    w: Any


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize(
    ("target", "words"),
    [
        (None, ["NoneType", "a pytree with"]),
        ({}, ["dict", "a pytree with"]),
        ({"w": None}, ["dict", "a pytree with"]),
        ({"w": "text"}, ["dict", "a pytree with"]),
        (Unknown(sds(W)), ["Unknown", "jax.tree_util.register_dataclass"]),
        (Unknown, ["the class Unknown", "such as nnx.eval_shape"]),
        (nnx.Linear, ["the class Linear", "nnx.eval_shape"]),
    ],
)
def test_targets_without_a_place_for_a_tensor(two, strict, target, words):
    with pytest.raises(errors.UsageError, match="no leaf of the target can hold") as caught:
        mfload.load_into(target, two, strict=strict)
    assert [word for word in words if word not in str(caught.value)] == []


def test_target_and_path_in_the_wrong_order(two):
    with pytest.raises(errors.UsageError, match="the arguments are swapped"):
        mfload.load_into(str(two), {"w": np.zeros((16, 32))})
    with pytest.raises(errors.UsageError, match="the arguments are swapped") as caught:
        mfload.load_into("https://user:hunter2@host/m.safetensors", {"w": np.zeros((16, 32))})
    assert "hunter2" not in str(caught.value)


def test_what_split_gives(two):
    split = nnx.split(nnx.Linear(16, 32, rngs=nnx.Rngs(0)))
    with pytest.raises(errors.UsageError, match=r"nnx\.split.*the state alone.*nnx\.merge"):
        mfload.load_into(split, two)


def test_something_must_fit(two, tmp_path):
    with pytest.raises(errors.MappingError, match=r"nothing in the.*mapping=.*'kernel'.*'(w|b)'"):
        mfload.load_into({"kernel": sds(W)}, two, strict=False)
    empty = save(tmp_path / "empty.safetensors", {})
    with bare("kernel"):
        mfload.load_into({"kernel": sds(W)}, empty, strict=False)


# -- names -----------------------------------------------------------------------------------


def test_names_are_those_of_keystr(variables):
    with nnx.use_eager_sharding(False):
        module = nnx.eval_shape(lambda: Model(nnx.Rngs(0)))
    target = {"l": variables, "m": module, "n": Named(Pair(W, B), [sds(W)])}
    names = [name for leaf in jax_trees.take_apart(target).leaves for name in leaf.names]
    paths = jax.tree_util.tree_flatten_with_path(target)[0]
    expected = [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in paths]
    assert sorted(names) == sorted(name.removesuffix(".value") for name in expected)


def test_swapped_arguments_are_named(tmp_path: Any) -> None:
    path = save(tmp_path / "m.safetensors", {"w": np.ones(3, np.float32)})
    for given in (tmp_path / "m.safetensors", str(path)):
        with pytest.raises(errors.UsageError, match="swapped"):
            mfload.load_into(given, {"w": jax.ShapeDtypeStruct((3,), np.float32)})  # type: ignore[arg-type]
