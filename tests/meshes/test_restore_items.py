"""What Orbax's own restore gives: several items as a dict by item, and scalars as they were."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax_savers
import pytest
from hypothesis import example, given, settings, strategies as st

import mfload
from mfload import errors

ocp, v1 = orbax_savers.ocp, orbax_savers.ocp_v1
pytestmark = [
    pytest.mark.filterwarnings("ignore:Sharding info not provided"),
    pytest.mark.filterwarnings("ignore:Use `load` instead"),
]

SCALARS = st.one_of(
    st.booleans(), st.integers(-(2**63), 2**63 - 1), st.integers(-9, 9), st.floats(width=64)
)
NAMES = st.text("abcxyz", min_size=1, max_size=4)
ARRAYS = st.sampled_from([jnp.ones((2, 3)), jnp.arange(4, dtype=jnp.bfloat16), jnp.float32(2)])


def nested(leaves: Any) -> Any:
    below = st.recursive(
        leaves,
        lambda each: (
            st.lists(each, min_size=1, max_size=3)
            | st.dictionaries(NAMES, each, min_size=1, max_size=3)
        ),
        max_leaves=6,
    )
    return st.dictionaries(NAMES, below, min_size=1, max_size=3)


TREES = nested(ARRAYS | SCALARS | st.text("abc", max_size=3) | st.none())
PLAIN = nested(st.text(max_size=4) | SCALARS | st.none())


def assert_same(found: Any, wanted: Any, where: str = "") -> None:
    """The same nodes and plain values of the same types, and arrays with the same bits."""
    if isinstance(wanted, dict):
        assert isinstance(found, dict), where
        assert found.keys() == wanted.keys(), where
        for key, each in wanted.items():
            assert_same(found[key], each, f"{where}.{key}")
    elif isinstance(wanted, list | tuple):
        assert len(found) == len(wanted), where
        for number, each in enumerate(wanted):
            assert_same(found[number], each, f"{where}.{number}")
    elif hasattr(wanted, "dtype"):
        assert found.dtype == wanted.dtype, where
        assert np.asarray(found).tobytes() == np.asarray(wanted).tobytes(), where
    else:
        assert type(found) is type(wanted), where
        assert repr(found) == repr(wanted), where  # NaN and minus zero too.


def blank(tree: Any) -> Any:
    """A target of the same shapes and types, with other values."""
    return jax.tree.map(
        lambda each: (
            jax.ShapeDtypeStruct(each.shape, each.dtype) if hasattr(each, "dtype") else type(each)()
        ),
        tree,
    )


@settings(max_examples=5)
@given(
    items=st.dictionaries(NAMES, TREES | PLAIN.map(lambda tree: (tree,)), min_size=2, max_size=3)
)
@example(items={"params": {"w": jnp.ones(2)}, "opt": {"n": 3, "mu": jnp.zeros(2)}})
@example(items={"state": {"w": jnp.ones(2)}, "opt": {"n": 3}, "config": ({"a": [1, None]},)})
def test_items_of_a_manager(items: dict[str, Any]) -> None:
    """Trees, and JSON where the value is in a tuple."""
    if not any(isinstance(each, dict) for each in items.values()):
        return  # Of JSON alone there is nothing to load.
    with tempfile.TemporaryDirectory() as path:
        args = {
            name: ocp.args.JsonSave(each[0])
            if isinstance(each, tuple)
            else ocp.args.PyTreeSave(each)
            for name, each in items.items()
        }
        with orbax_savers.manager(Path(path, "run"), enable_async_checkpointing=False) as manager:
            manager.save(1, args=ocp.args.Composite(**args))
            manager.wait_until_finished()
            how = {
                name: ocp.args.JsonRestore()
                if isinstance(each, tuple)
                else ocp.args.PyTreeRestore()
                for name, each in items.items()
            }
            wanted = dict(manager.restore(1, args=ocp.args.Composite(**how)))
        compare(Path(path, "run"), wanted)


@settings(max_examples=4)
@given(items=st.dictionaries(NAMES, TREES, min_size=2, max_size=3))
@example(items={"params": {"w": jnp.ones(2)}, "opt": {"n": 3, "mu": jnp.zeros(2)}})
@example(items={"state": {"w": jnp.ones(2)}, "config": {"a": [1, None], "name": "x"}})
def test_checkpointables(items: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as path:
        v1.save_checkpointables(Path(path, "run"), items)
        compare(Path(path, "run"), v1.load_checkpointables(Path(path, "run")))


def compare(path: Path, wanted: dict[str, Any]) -> None:
    whole = mfload.restore(path, framework="jax")
    assert_same(whole, wanted)
    assert_same(mfload.restore(path, blank(wanted)), wanted)
    mfload.convert(path, path / "x.safetensors")
    assert_same(mfload.restore(path / "x.safetensors", framework="jax"), wanted)
    assert_same(mfload.restore(path / "x.safetensors", blank(wanted)), wanted)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Steps of a manager with items of each kind; the last has one that holds arrays."""
    path = tmp_path_factory.mktemp("items") / "run"
    params = ocp.args.StandardSave({"w": jnp.ones((2, 3)), "b": [jnp.zeros(2)]})
    opt = ocp.args.StandardSave({"mu": jnp.ones(2), "count": 3})
    config = ocp.args.JsonSave({"rate": 0.5, "names": ["a", None]})
    keys = {
        "key": ocp.args.JaxRandomKeySave(jax.random.key(3)),
        "seeds": ocp.args.ArraySave(jnp.arange(4.0)),
    }
    how = {"best_fn": lambda metrics: metrics["loss"], "enable_async_checkpointing": False}
    steps = [
        (ocp.args.Composite(params=params, opt=opt), {"loss": 0.5}),
        (ocp.args.Composite(params=params, opt=opt, config=config), None),
        (ocp.args.Composite(params=params, **keys), None),
        (params, {"loss": float("nan")}),
        (ocp.args.Composite(default=params, config=config), None),
    ]
    for step, (args, metrics) in enumerate(steps):
        with orbax_savers.manager(path, **how) as manager:
            manager.save(step, args=args, metrics=metrics)
    return path


PARAMS = {"w": jax.ShapeDtypeStruct((2, 3), jnp.float32), "b": [jnp.ones(2)]}
OPT = {"mu": jnp.zeros(2), "count": 0}


def test_a_target_with_items_as_keys(root: Path) -> None:
    found = mfload.restore(root, {"params": PARAMS, "opt": OPT, "metrics": {"loss": 0.0}}, step=0)
    assert found["opt"]["count"] == 3
    assert found["metrics"] == {"loss": 0.5}
    assert found["params"]["w"].sum() == 6
    report = mfload.Report()
    found = mfload.restore(root, {"params": PARAMS, "opt": OPT}, step=1, report=report)
    assert found["opt"]["mu"].tolist() == [1, 1]
    assert "items that the target has no place for: config" in report.notes
    config = {"rate": 0.0, "names": ["", None]}
    found = mfload.restore(root, {"params": PARAMS, "opt": OPT, "config": config}, step=1)
    assert found["config"] == {"rate": 0.5, "names": ["a", None]}
    with pytest.raises(errors.MappingError, match=r"the target has no 'opt\.mu'"):
        mfload.restore(root, {"params": PARAMS}, step=1)
    only = mfload.restore(root, {"params": PARAMS}, step=1, names=r"^params\.")
    assert only["params"]["w"].sum() == 6


def test_a_target_of_one_of_several(root: Path) -> None:
    for strict in (True, False):
        with pytest.raises(errors.CheckpointError, match="several items") as caught:
            mfload.restore(root, PARAMS, step=1, strict=strict)
        assert caught.value.problems == ("config", "opt", "params")
    assert mfload.restore(root / "1" / "params", PARAMS)["w"].sum() == 6
    mapping = {r"params\.(.*)": r"\1", r"opt\..*": None}
    assert mfload.restore(root, PARAMS, step=1, mapping=mapping)["w"].sum() == 6
    target = {"params": PARAMS, "opt": {"mu": jnp.zeros(2), "count": jnp.int32(0)}}
    assert mfload.load_into(target, root / "1")["opt"]["mu"].tolist() == [1, 1]
    with pytest.raises(errors.MappingError, match=r"params\.w"):
        mfload.load_into(PARAMS, root / "1")


def test_the_only_item_with_arrays(root: Path) -> None:
    for step in (3, 4):
        report = mfload.Report()
        assert mfload.restore(root, PARAMS, step=step, report=report)["w"].sum() == 6
        assert mfload.load_into(PARAMS, root / str(step))["w"].sum() == 6
        note = "items that the target has no place for: config"
        assert (note in report.notes) == (step == 4)
    # Metrics are not one of several; what has a name beside `default` is.
    assert mfload.restore(root, framework="jax", step=3).keys() == PARAMS.keys()
    whole = mfload.restore(root, framework="jax")
    assert whole["config"] == {"rate": 0.5, "names": ["a", None]}
    assert_same(whole, mfload.restore(root, blank(whole)))


@pytest.mark.parametrize("item", [
    {"w": jnp.ones(2), "b": {"n": 3}}, {"params": {"w": jnp.ones(2)}}, {"params": jnp.ones(2)},
])  # fmt: skip
def test_the_name_of_a_single_item(tmp_path: Path, item: dict[str, Any]) -> None:
    """A target may have it as its only key, as with several; the item's own key counts first."""
    args = ocp.args.Composite(params=ocp.args.StandardSave(item))
    with orbax_savers.manager(tmp_path, enable_async_checkpointing=False) as manager:
        manager.save(1, args=args)
    assert_same(mfload.restore(tmp_path, framework="jax"), item)
    assert_same(mfload.restore(tmp_path, blank(item)), item)
    if "params" not in item:
        wanted = {"params": item}
        assert_same(mfload.restore(tmp_path, blank(wanted)), wanted)
        assert_same(mfload.restore(tmp_path / "1" / "params", blank(wanted)), wanted)
        with pytest.raises(errors.MappingError, match=r"params\.w"):
            mfload.restore(tmp_path, blank({**wanted, "x": jnp.ones(2)}))


def test_an_array_as_the_only_item(tmp_path: Path) -> None:
    args = ocp.args.Composite(weights=ocp.args.ArraySave(jnp.arange(3.0)))
    with orbax_savers.manager(tmp_path, enable_async_checkpointing=False) as manager:
        manager.save(1, args=args)
        wanted = manager.restore(1, args=ocp.args.Composite(weights=ocp.args.ArrayRestore()))
    assert_same(mfload.restore(tmp_path, framework="jax"), wanted["weights"])
    assert_same(mfload.restore(tmp_path, jnp.zeros(3)), wanted["weights"])
    assert_same(mfload.restore(tmp_path, {"weights": jnp.zeros(3)}), dict(wanted))


def test_a_step_of_json_alone(tmp_path: Path) -> None:
    """It is finished: the error says that there are no arrays."""
    args = ocp.args.Composite(config=ocp.args.JsonSave({"a": 1}))
    with orbax_savers.manager(tmp_path, enable_async_checkpointing=False) as manager:
        manager.save(1, args=args)
    for step in (None, 1):
        with pytest.raises(errors.CheckpointError, match="or holds no arrays"):
            mfload.restore(tmp_path, framework="jax", step=step)


@settings(max_examples=10)
@given(out=st.sets(st.sampled_from(range(6))))
@example(out={1, 2, 3, 4, 5})
def test_placeholders(out: set[int]) -> None:
    """A leaf `...` of a target stays as it is, and its tensor in the checkpoint."""
    state = {"w": jnp.ones(2), "n": 3, "s": "x", "l": [jnp.ones(1), jnp.zeros(3)], "half": 0.5}
    leaves, tree = jax.tree.flatten(state)
    arrays = {number for number, leaf in enumerate(leaves) if hasattr(leaf, "dtype")}
    chosen = [... if number in out else leaf for number, leaf in enumerate(leaves)]
    target = jax.tree.unflatten(tree, chosen)
    with tempfile.TemporaryDirectory() as path:
        orbax_savers.save("pytree", Path(path, "x"), state)
        if arrays <= out:
            return  # What holds nothing is no target.
        found = jax.tree.leaves(mfload.restore(Path(path, "x"), target))
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            how = ocp.args.PyTreeRestore(target)
            wanted = jax.tree.leaves(checkpointer.restore(Path(path, "x"), args=how))
    assert_same(found, wanted)


def test_keys_that_are_called_like_an_item(tmp_path: Path) -> None:
    item = {"b": jnp.zeros(2), "a": {"b": jnp.ones(2)}}
    args = {"a": ocp.args.StandardSave(item), "config": ocp.args.JsonSave({"n": 1})}
    with orbax_savers.manager(tmp_path, enable_async_checkpointing=False) as manager:
        manager.save(1, args=ocp.args.Composite(**args))
    wanted = {"a": item, "config": {"n": 1}}
    assert_same(mfload.restore(tmp_path, blank(wanted)), wanted)
    assert_same(mfload.restore(tmp_path, framework="jax"), wanted)


def test_arrays_and_random_keys_as_items(root: Path) -> None:
    found = mfload.restore(root, framework="jax", step=2)
    assert found["seeds"].tolist() == [0, 1, 2, 3]
    assert (found["key"] == jax.random.key_data(jax.random.key(3))).all()
    target = {"params": PARAMS, "seeds": jnp.zeros(4), "key": jax.random.key(0)}
    found = mfload.restore(root, target, step=2)
    assert found["key"] == jax.random.key(3)
    assert found["seeds"].tolist() == [0, 1, 2, 3]


HOWS: list[Any] = [
    {"framework": "numpy"},
    {"framework": "jax", "dtype": "bfloat16"},
    {
        "framework": "jax",
        "mesh": jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,)),
    },
]


@settings(max_examples=5)
@given(
    tree=nested(SCALARS | st.text(max_size=3) | ARRAYS),
    kind=st.sampled_from([name for name in orbax_savers.SAVERS if name != "standard"]),
)
@example(tree={"big": 2**62, "list": [1, 2.5, True, "x"], "nan": float("nan")}, kind="pytree")
@example(tree={"n": np.float32(1.5), "half": np.int8(7), "of": np.float64(2)}, kind="files")
@example(tree={"array": np.arange(3), "jax": jnp.int32(1), "numpy": np.array(3)}, kind="v1")
def test_scalars(tree: Any, kind: str) -> None:
    with tempfile.TemporaryDirectory() as path:
        place = Path(path, "x")
        orbax_savers.save(kind, place, tree)
        if kind.startswith("v1"):
            wanted = v1.load_pytree(place)
        else:
            with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
                wanted = checkpointer.restore(place)
        mfload.convert(place, Path(path, "x.safetensors"))
        for where in (place, Path(path, "x.safetensors")):
            assert_same(mfload.restore(where, framework="jax"), wanted)
            for how in HOWS:
                found = jax.tree.leaves(mfload.restore(where, **how))
                plain = [each for each in jax.tree.leaves(wanted) if not hasattr(each, "dtype")]
                assert_same([each for each in found if not hasattr(each, "dtype")], plain)


def test_scalars_of_a_part(tmp_path: Path) -> None:
    orbax_savers.save("pytree", tmp_path / "x", {"a": {"n": 3, "w": jnp.ones(2)}, "b": 0.5})
    assert mfload.restore(tmp_path / "x", framework="jax", names=r"\.n") == {"a": {"n": 3}}
    mfload.convert(tmp_path / "x", tmp_path / "x.safetensors", names="[nb]$")
    assert mfload.restore(tmp_path / "x.safetensors", framework="jax") == {"a": {"n": 3}, "b": 0.5}
    # With a target, its leaves say what becomes of them.
    target = {"a": {"n": jnp.int32(0), "w": jnp.ones(2)}, "b": 0.0}
    found = mfload.restore(tmp_path / "x", target)
    assert isinstance(found["a"]["n"], jax.Array)
    assert found["b"] == 0.5
