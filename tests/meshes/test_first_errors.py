"""Mistakes of the first hour, as they are typed: each message tells the next step."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec as P
from safetensors.numpy import save_file

import mfload
from mfload import errors

PATH = "model.safetensors"
ARRAYS = {"dense.kernel": np.ones((10, 4), np.float32), "dense.bias": np.ones(4, np.float32)}


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    save_file(ARRAYS, PATH)
    zipped = b"PK\x03\x04" + bytes(200)
    Path("model.pt").write_bytes(zipped)
    Path("torch").mkdir()
    Path("torch/pytorch_model.bin").write_bytes(zipped)
    Path("model.gguf").write_bytes(b"GGUF\x03\0\0\0" + bytes(200))
    Path("config.json").write_text('{"model_type": "llama"}')
    Path("notes").mkdir()
    Path("paddle").mkdir()
    Path("paddle/model.pdparams").write_bytes(b"\x80\x04\x95" + bytes(200))
    Path("cut").mkdir()
    Path("cut/model.safetensors.incomplete").write_bytes(bytes(20))


def _saved_as(end: str) -> Callable[[], Any]:
    return lambda: mfload.save(ARRAYS, f"new{end}")


def _mesh() -> Mesh:
    return Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "model"))


def _on_mesh(shardings: Any, mesh: Any = None) -> Any:
    return mfload.load(PATH, "jax", mesh=mesh or _mesh(), shardings=shardings)


def _tree(**shapes: tuple[int, ...]) -> Any:
    return {"dense": {name: jnp.zeros(shape) for name, shape in shapes.items()}}


def _load(path: str, **given: Any) -> Callable[[], Any]:
    return lambda: mfload.load(path, "numpy", **given)


def _without(module: str) -> Callable[[], Any]:
    def call() -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(sys.modules, module, None)
            return mfload.load(PATH, module)

    return call


class _Foreign:
    """As a tensor of PyTorch, whose dtype NumPy does not know."""

    shape = (4,)
    dtype = object()


Case = tuple[Callable[[], Any], type[errors.MfloadError], tuple[str, ...]]
CASES: dict[str, Case] = {
    "framework mistyped": (
        lambda: mfload.load(PATH, "pytorhc"), errors.UsageError, ("did you mean 'torch'?",)),
    "framework unknown": (
        lambda: mfload.load(PATH, "mlx"), errors.UsageError, ("numpy | jax | torch", "mlx")),
    "framework not installed": (
        _without("tensorflow"), errors.FrameworkMissingError, ("pip install 'tensorflow>=",)),
    "arguments swapped": (
        lambda: mfload.load("jax", PATH), errors.UsageError, ("load(path, framework)",)),
    "path mistyped": (
        _load("modle.safetensors"), errors.SourceNotFoundError, ("names: model.safetensors",)),
    "path of an empty directory": (
        _load("notes"), errors.SourceNotFoundError, ("Orbax", "an empty directory")),
    "home directory": (
        _load("~/model.safetensors"), errors.SourceNotFoundError, ("os.path.expanduser",)),
    "Hub id": (
        _load("org/model-7B"), errors.SourceNotFoundError, ("hf://org/model-7B",)),
    "Hub id without an owner": (
        _load("gpt2"), errors.SourceNotFoundError, ("hf://gpt2",)),
    "URL of another scheme": (
        _load("ftp://host/model.safetensors"), errors.SourceNotFoundError, ("download it first",)),
    "URL of the Hub": (
        _load("hf://datasets/org/x"), errors.UsageError, ("this is a dataset",)),
    "config in place of the model": (
        _load("config.json"), errors.HeaderError, ("give the directory of the checkpoint",)),
    "PyTorch file": (
        _load("model.pt"), errors.HeaderError, ("torch.load(path, ", "mfload.save")),
    "directory of PyTorch files": (
        _load("torch"), errors.SourceNotFoundError, ("pytorch_model.bin", "mfload.save")),
    "Paddle file": (
        _load("paddle/model.pdparams"), errors.HeaderError, ("if paddle.save, in Python",)),
    "directory of Paddle files": (
        _load("paddle"), errors.SourceNotFoundError, ("paddle.load(path)",)),
    "unfinished download": (
        _load("cut"), errors.SourceNotFoundError, ("an unfinished download",)),
    "URL of a file here": (
        _load("file:///model.safetensors"), errors.SourceNotFoundError, ("the path alone",)),
    "GGUF file": (
        _load("model.gguf"), errors.HeaderError, ("GGUF", "look for the model's safetensors")),
    "name mistyped": (
        _load(PATH, names=["dense.kernle"]), errors.TensorNotFoundError, ("dense.kernel",)),
    "expression that finds nothing": (
        _load(PATH, names="kernle"), errors.TensorNotFoundError, ("dense.bias, dense.kernel",)),
    "shell pattern": (
        _load(PATH, names="*.kernel"), errors.UsageError, ("what a shell writes * is .* here",)),
    "dtype mistyped": (
        _load(PATH, dtype="bfloat61"), errors.UsageError, ("did you mean 'bfloat16'?",)),
    "lossy dtype": (
        _load(PATH, dtype="int32"), errors.LossyCastError, ("dtype={name: dtype}",)),
    "device mistyped": (
        lambda: mfload.load(PATH, "jax", device="gpu:0"), errors.DeviceError, ("mfload doctor",)),
    "options as a dict": (
        _load(PATH, options={"threads": 4}), errors.UsageError, ("mfload.Options(",)),
    "engine mistyped": (
        lambda: mfload.Options(engine="dirct"), errors.UsageError, ("did you mean 'direct'?",)),  # type: ignore
    "report=True": (
        _load(PATH, report=True), errors.UsageError, ("report=mfload.Report()",)),
    "verify=True": (
        _load(PATH, verify=True), errors.UsageError, ("mfload.verify(path, mode='write')",)),
    "plot of nothing": (
        lambda: mfload.Report().plot(), errors.UsageError, ("report=report) before it",)),
    "dim that the mesh does not divide": (
        lambda: _on_mesh(P("model")), errors.ShardingError, ("a multiple of 4", "None there")),
    "axis mistyped": (
        lambda: _on_mesh(P("modle")), errors.ShardingError, ("no axis 'modle'", "data, model")),
    "more axes than dims": (
        lambda: _on_mesh([("bias", P(None, "data"))]), errors.ShardingError, ("at most 1 entr",)),
    "mesh as a tuple": (
        lambda: _on_mesh(P(), (2, 4)), errors.UsageError, ("jax.make_mesh",)),
    "shardings without a mesh": (
        lambda: mfload.load(PATH, "jax", shardings=P("model")), errors.UsageError, ("mesh=",)),
    "shardings as a text": (
        lambda: _on_mesh("model"), errors.UsageError, ("PartitionSpec", "[(regex, spec)]")),
    "rule with a text": (
        lambda: _on_mesh([("kernel", "model")]), errors.UsageError, ("such as P('model')",)),
    "rule the wrong way round": (
        lambda: _on_mesh([(P("model"), "kernel")]), errors.UsageError, ("(regex, value)",)),
    "mesh for NumPy": (
        _load(PATH, shardings=[("kernel", 0)]), errors.UsageError, ("shard=(rank, size)",)),
    "target and path swapped": (
        lambda: mfload.load_into(PATH, _tree(kernel=(10, 4))), errors.UsageError,
        ("swapped", "load_into(target, path)")),
    "restore swapped": (
        lambda: mfload.restore(_tree(kernel=(10, 4)), PATH), errors.UsageError,
        ("restore(path, target)",)),
    "class as a target": (
        lambda: mfload.load_into(dict, PATH), errors.UsageError, ("class dict", "an instance")),
    "names that don't match": (
        lambda: mfload.load_into(_tree(weight=(10, 4), bias=(4,)), PATH), errors.MappingError,
        ("missing: dense.weight", "extra: dense.kernel", "mapping=", "strict=False")),
    "transposed": (
        lambda: mfload.load_into(_tree(kernel=(4, 10), bias=(4,)), PATH), errors.MappingError,
        ("transpose=(1, 0) fits",)),
    "restore into another model": (
        lambda: mfload.restore(PATH, _tree(weight=(3,))), errors.MappingError,
        ("missing: dense.weight", "strict=False")),
    "restore of nothing": (
        lambda: mfload.restore("modle.safetensors", framework="jax"),
        errors.SourceNotFoundError, (PATH,)),
    "save swapped": (
        lambda: mfload.save("new.safetensors", ARRAYS), errors.UsageError,  # type: ignore
        ("save(arrays, path)",)),
    "tensors of another framework as a target": (
        lambda: mfload.load_into({"dense": {"bias": _Foreign()}}, PATH), errors.UsageError,
        ("'dense.bias'", "load_into(model, path)")),
    "restore into tensors of another framework": (
        lambda: mfload.restore(PATH, {"dense": {"bias": _Foreign()}}), errors.UsageError,
        ("'dense.bias'", "load_into(model, path)")),
    **{f"save as {end}": (
        _saved_as(end), errors.UsageError,
        ("a .safetensors file or a directory",)) for end in (".npz", ".npy", ".msgpack")},
    "convert to a name of another format": (
        lambda: mfload.convert(PATH, "new.npz"), errors.UsageError, ("a .safetensors file",)),
    "save over a checkpoint": (
        lambda: mfload.save(ARRAYS, PATH), errors.TargetExistsError, ("overwrite=True",)),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_the_message_tells_the_next_step(case: str) -> None:
    call, kind, parts = CASES[case]
    with pytest.raises(kind) as info:
        call()
    for part in parts:
        assert part in str(info.value), str(info.value)


def test_rules_that_match_nothing_are_refused_with_names() -> None:
    text = r"'kernle', did you mean 'dense.kernel'\?; names are such as 'dense.bias'"
    with pytest.raises(errors.TensorNotFoundError, match=text):
        _on_mesh([("kernle", P("data"))])


def test_64_bits_stay_64_bits_in_jax() -> None:
    """JAX by itself would cut them in half, and the values with them."""
    ids = np.array([2**40, 3])
    save_file({"ids": ids}, "ids.safetensors")
    loaded = mfload.load("ids.safetensors", "jax")["ids"]
    assert loaded.dtype == np.int64
    assert np.array_equal(np.asarray(loaded), ids)


def test_a_bar_without_tqdm_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    with caplog.at_level(logging.WARNING, "mfload"):
        assert len(mfload.load(PATH, "numpy", progress=True)) == 2
    assert "pip install 'tqdm>=" in caplog.text


def test_checksums_without_xxhash_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "xxhash", None)
    with pytest.raises(errors.FrameworkMissingError, match=r"pip install 'xxhash>="):
        mfload.verify(PATH, mode="write")
