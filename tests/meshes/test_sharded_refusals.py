"""What does not fit is refused before data is read, with tensor, dim, axes and sizes."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import samples
import shards
from calls import as_options
from jax.sharding import NamedSharding, PartitionSpec as P

import mfload
from mfload import errors
from mfload.mesh import jax_specs

MODEL = {
    "w": np.zeros((6, 8), np.float32),
    "b": np.zeros((6,), np.float32),
    "s": np.zeros((), np.float32),
}


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    made = samples.save(tmp_path / "model.safetensors", MODEL)
    monkeypatch.setattr(
        "mfload.loading.execute.Transfer", lambda *_, **__: pytest.fail("data was read")
    )
    return made


def _calls(path: Path, **options: Any) -> list[Any]:
    named = {name: value for name, value in options.items() if name not in ("exchange", "device")}
    return [
        lambda: mfload.load(path, framework="jax", **as_options(options)),
        lambda: mfload.plan(path, "jax", **as_options(options)),
        *([lambda: mfload.abstract(path, **as_options(named))] if named == options else []),
    ]


@pytest.mark.parametrize(
    ("tensor", "spec", "words"),
    [
        ("w", P("y"), ["does not divide dim 0 of 6", "'y' (4)", "multiple of 4", "[6, 8]"]),
        ("w", P(None, ("x", "y", "z")), ["no axis 'z'", "x, y"]),
        ("w", P(("y", "x")), ["'y' (4), 'x' (2) does not divide dim 0", "multiple of 8"]),
        ("w", P("x", "x"), ["'x' is used twice"]),
        ("w", P(("x", "x")), ["'x' is used twice"]),
        ("w", P("x", None, None), ["3 entries", "2 dims"]),
        ("w", P("model"), ["no axis 'model'", "'x' (2), 'y' (4)"]),
        ("w", P(P.UNCONSTRAINED), ["unconstrained"]),
        ("b", P("x", None), ["2 entries", "1 dim"]),
        ("s", P("x"), ["1 entry", "0 dims"]),
        ("s", P(None), ["1 entry", "0 dims"]),
    ],
)
def test_a_spec_that_does_not_fit(path: Path, tensor: str, spec: P, words: list[str]) -> None:
    mesh = shards.mesh((2, 4))
    given: list[Any] = [spec]
    abstract = getattr(jax.sharding, "AbstractMesh", None)
    fits = not any("no axis" in word or "twice" in word for word in words)
    if fits:
        given.append(NamedSharding(mesh, spec))
    if fits and abstract is not None:
        # Some versions refuse P.UNCONSTRAINED themselves.
        refused = (ValueError,) if P.UNCONSTRAINED in spec else ()
        with contextlib.suppress(*refused):
            given.append(NamedSharding(abstract((2, 4), ("x", "y")), spec))
    for each in given:
        for call in _calls(path, mesh=mesh, shardings=[(f"^{tensor}$", each)]):
            with pytest.raises(errors.ShardingError) as info:
                call()
            assert info.value.tensor == tensor
            assert [word for word in words if word not in str(info.value)] == []
            assert isinstance(info.value, ValueError)


def test_all_that_do_not_fit_are_named(path: Path) -> None:
    with pytest.raises(errors.ShardingError) as info:
        mfload.load(path, framework="jax", mesh=shards.mesh((2, 4)), shardings=P("y"))
    assert [line.split(":")[0] for line in info.value.problems] == ["b", "s", "w"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"mesh": "cpu"}, "not a mesh"),
        ({"mesh": ("x",)}, "not a mesh"),
        ({"mesh": True, "shardings": "rows"}, "not a mesh"),
        ({"shardings": "rows"}, "invalid shardings"),
        ({"shardings": 0}, "invalid shardings"),
        ({"shardings": b"rows"}, "invalid shardings"),
        ({"shardings": P("x")}, "on which devices"),
        ({"shardings": []}, "on which devices"),
        ({"shardings": {}}, "on which devices"),
        ({"shardings": [("w", P("x"))]}, "on which devices"),
        ({"shardings": lambda _name, _info: P()}, "on which devices"),
        ({"shardings": lambda _name, _info: "rows"}, "not a sharding"),
        ({"shardings": [("(", P("x"))]}, "malformed regular expression: missing \\)"),
        ({"shardings": [(b"w", P("x"))]}, "malformed regular expression"),
        ({"shardings": [(5, P("x"))]}, "malformed regular expression"),
        ({"shardings": [("w",)]}, "list of pairs"),
        ({"shardings": ["w"]}, "list of pairs"),
        ({"shardings": [None]}, "list of pairs"),
        ({"shardings": [("w", ("x", None))]}, "not a sharding"),
        ({"shardings": {"w": "x"}}, "not a sharding"),
        ({"unmatched": "ignore"}, "unknown unmatched"),
        ({"unmatched": []}, "unknown unmatched"),
        ({"exchange": "twice"}, "unknown exchange"),
        ({"exchange": {}}, "unknown exchange"),
        ({"device": "cpu:1"}, "devices are those of the mesh"),
        ({"engine": "fast"}, "engine"),
        ({"names": "("}, "regular expression"),
    ],
)
def test_senseless_arguments(path: Path, options: dict[str, Any], words: str) -> None:
    mesh = None if words == "on which devices" else shards.mesh()
    options = {"mesh": mesh, **options}
    for call in _calls(path, **options)[: 2 if "engine" in options else 3]:
        with pytest.raises(errors.UsageError, match=words):
            call()
    assert mfload.live_bytes() == 0


def test_a_mesh_of_jax_is_for_jax(path: Path) -> None:
    for framework, options, words in (
        ("numpy", {"mesh": shards.mesh()}, "numpy has no meshes"),
        ("np", {"shardings": P()}, "numpy has no meshes"),
        ("torch", {"mesh": shards.mesh()}, "the mesh is one of jax"),
        ("torch", {"shardings": P()}, "placements need a mesh"),
    ):
        for call in (mfload.load, mfload.plan):
            with pytest.raises(errors.UsageError, match=words):
                call(path, framework=framework, **as_options(options))


def test_tensors_without_a_rule(path: Path) -> None:
    mesh = shards.mesh((2,))
    for rules in ([("^w", P("x"))], {"w": P("x")}):
        for call in _calls(path, mesh=mesh, shardings=rules, unmatched="error"):
            with pytest.raises(errors.ShardingError, match="2 of 3 tensors") as info:
                call()
            assert info.value.problems == ("b", "s")


def test_rules_without_a_tensor_warn(path: Path) -> None:
    mesh = shards.mesh((2,))
    for rules, missed in (
        ([("^w", P("x")), ("q_proj", P("x")), ("", None)], "'q_proj'"),
        ({"w": P("x"), "layers": {"q": P()}}, "'layers.q'"),
    ):
        for call in _calls(path, mesh=mesh, shardings=rules)[1:]:
            with pytest.warns(UserWarning, match=f"match no tensor: {re.escape(missed)}") as told:
                call()
            assert [each.filename for each in told] == [__file__]
    with pytest.warns(UserWarning, match="regexes go in a list of pairs"):
        mfload.plan(path, "jax", mesh=mesh, shardings={"^w": P("x"), "w": P("x")})
    for alone in ([("q_proj", P("x"))], {"^w": P("x")}):
        for call in _calls(path, mesh=mesh, shardings=alone):
            with pytest.raises(errors.TensorNotFoundError, match="match no tensor"):
                call()


def test_a_name_that_is_not_loaded_is_no_mistake(path: Path, recwarn: Any) -> None:
    rules = {"w": P("x"), "b": P("x")}
    mfload.plan(path, "jax", mesh=shards.mesh((2,)), shardings=rules, names=["w"])
    assert not recwarn.list


def test_what_a_function_raises_is_its_own(path: Path) -> None:
    def fail(name: str, _: Any) -> Any:
        raise LookupError(name)

    with pytest.raises(LookupError, match="b"):
        mfload.load(path, framework="jax", mesh=shards.mesh(), shardings=fail)


def test_parts_cannot_be_verified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("xxhash")
    path = samples.save(tmp_path / "model.safetensors", MODEL)
    mfload.verify(path, mode="write")
    manifest = path.with_name("model.safetensors.checksums.json")
    # Shardings that leave something out need several processes.
    monkeypatch.setattr("mfload.mesh.load.stored_bytes", lambda _: 0)
    with pytest.raises(errors.UsageError, match="whole tensors"):
        mfload.load(path, framework="jax", mesh=shards.mesh(), verify=manifest)


def test_processes_are_those_of_the_devices() -> None:
    mesh = shards.mesh()
    everybody = tuple(range(jax.process_count()))
    for given in ((mesh, None), (None, NamedSharding(mesh, P()))):
        assert jax_specs.processes(*given) == everybody
    for given in ((None, [("", None)]), (5, 5)):
        assert jax_specs.processes(*given) == everybody
    assert jax_specs.processes(None, lambda _name, _info: None) == everybody
