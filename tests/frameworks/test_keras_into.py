"""`load_into` of Keras's models, against `set_weights`; this suite runs once for each backend."""

from __future__ import annotations

import dataclasses
import errno
import gc
import os
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import samples

os.environ.setdefault("KERAS_BACKEND", "tensorflow")

import keras
from keras import layers

import mfload
from mfload import errors
from mfload.io import buffers, pread

BACKEND = keras.backend.backend()
IN_PLACE = BACKEND == "torch"
# Keras calls NumPy as it was before 2.0.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation")


@pytest.mark.skipif(BACKEND != "tensorflow", reason="started by the suite of TensorFlow")
@pytest.mark.parametrize("backend", ["jax", "torch"])
def test_other_backends(backend: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "--no-header", __file__]
    done = subprocess.run(
        command, env=os.environ | {"KERAS_BACKEND": backend}, capture_output=True, timeout=300
    )
    assert done.returncode == 0, done.stdout.decode()[-5000:]


def network() -> Any:
    """Two layers that are one, statistics, and a dropout with a seed."""
    shared = layers.Dense(24, name="shared")
    inputs = keras.Input((24,))
    x = layers.BatchNormalization(name="norm")(shared(shared(inputs)))
    x = layers.Dropout(0.1, name="drop")(x)
    return keras.Model(inputs, layers.Dense(5, name="head", use_bias=False)(x))


class Own(layers.Layer):
    """Weights by their names."""

    def __init__(self, shapes: dict[str, tuple[int, ...]], dtype: str = "float32") -> None:
        super().__init__(name="own")
        for name, shape in shapes.items():
            self.add_weight(shape=shape, dtype=dtype, name=name, initializer="zeros")
        self.build(())


def one(shape: tuple[int, ...], dtype: str = "float32") -> Any:
    return Own({"weight": shape}, dtype)


def numbers(model: Any) -> dict[str, Any]:
    """An array for each weight, by its path."""
    generator = np.random.default_rng(len(model.weights))
    return {
        each.path: generator.random(tuple(each.shape)).astype(
            keras.backend.standardize_dtype(each.dtype)
        )
        for each in model.weights
    }


def value(variable: Any) -> Any:
    return keras.ops.convert_to_numpy(getattr(variable, "value", variable))


def same(variable: Any, array: Any) -> bool:
    """Bit for bit."""
    found = value(variable)
    return (found.shape, found.dtype.name, found.tobytes()) == (
        array.shape,
        array.dtype.name,
        array.tobytes(),
    )


@pytest.fixture
def stored(tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    arrays = numbers(network())
    return samples.save(tmp_path / "net.safetensors", arrays), arrays


def test_fills_a_model(stored: Any) -> None:
    path, arrays = stored
    assert sorted(arrays) == [
        "head/kernel",
        "norm/beta",
        "norm/gamma",
        "norm/moving_mean",
        "norm/moving_variance",
        "shared/bias",
        "shared/kernel",
    ]
    model, like, report = network(), network(), mfload.Report()
    variables = [(each, each.value) for each in model.weights]
    seed = value(model.get_layer("drop").seed_generator.state)
    assert mfload.load_into(model, path, report=report) is model
    like.set_weights([arrays[each.path] for each in like.weights])
    for (before, held), ours, theirs in zip(variables, model.weights, like.weights, strict=True):
        assert before is ours
        assert same(ours, value(theirs))
        if IN_PLACE:
            assert ours.value is held
    assert np.array_equal(value(model.get_layer("drop").seed_generator.state), seed)
    assert (report.tensors, report.result_bytes) == (7, sum(a.nbytes for a in arrays.values()))
    x = np.ones((3, 24), np.float32)
    assert np.array_equal(value(model(x)), value(like(x)))


def test_trains_on_what_was_loaded(stored: Any) -> None:
    path, arrays = stored
    model, like = network(), network()
    like.set_weights([arrays[each.path] for each in like.weights])
    mfload.load_into(model, path)
    for each in (model, like):
        each.get_layer("drop").rate = 0
        each.compile(optimizer="adam", loss="mse")
        each.fit(np.ones((8, 24)), np.ones((8, 5)), verbose=0, epochs=2, shuffle=False)
    for ours, theirs in zip(model.weights, like.weights, strict=True):
        np.testing.assert_allclose(value(ours), value(theirs), rtol=1e-4, atol=1e-5)
    mfload.load_into(model, path)  # The optimizer's variables are no weights.
    assert all(same(each, arrays[each.path]) for each in model.weights)
    model.set_weights(like.get_weights())  # TensorFlow keeps a model that was trained.


@pytest.mark.skipif(BACKEND not in ("tensorflow", "jax"), reason="filled where it lies")
def test_what_was_read_before_keeps_its_values(stored: Any) -> None:
    model = network()
    kernel = model.get_layer("head").kernel

    def read() -> Any:
        return kernel.value.read_value() if BACKEND == "tensorflow" else kernel.value

    before, copy = read(), np.array(read())
    mfload.load_into(model, stored[0])
    held = read()
    kernel.assign(kernel + 1)
    kernel.assign_add(np.ones_like(copy))
    assert np.array_equal(before, copy)
    assert np.array_equal(held, stored[1]["head/kernel"])


KINDS = ["float32", "float16", "bfloat16", "float64", "int8", "uint8", "int32", "bool", "int64",
         "float8_e4m3fn", "float8_e5m2"]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(), (7,), (3, 0), (4, 6)])
def test_every_dtype_bit_for_bit(tmp_path: Path, kind: str, shape: tuple[int, ...]) -> None:
    try:
        layer = one(shape, kind)
    except Exception:
        pytest.skip("Keras makes no such variable")
    (weight,) = layer.weights
    if keras.backend.standardize_dtype(weight.value.dtype) != kind:
        pytest.skip("JAX without 64 bits")
    values = samples.numbers(shape, np.dtype(kind), 3)
    path = samples.save(tmp_path / "x.safetensors", {weight.path: values})
    mfload.load_into(layer, path)
    assert bits(weight) == values.tobytes()
    if len(shape) == 2 and values.size:
        turned = mfload.rule(weight.path, transpose=(1, 0), reshape=shape)
        mfload.load_into(layer, path, mapping={weight.path: turned})
        assert bits(weight) == values.T.reshape(shape).tobytes()


def bits(weight: Any) -> bytes:
    if IN_PLACE:
        import torch

        units = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
        return weight.value.detach().view(units[weight.value.element_size()]).numpy().tobytes()
    return np.asarray(weight.value).tobytes()


@pytest.mark.parametrize("stored_as", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("held", ["float32", "bfloat16", "float16"])
def test_becomes_the_dtype_of_the_model(tmp_path: Path, stored_as: str, held: str) -> None:
    layer = one((9, 5), held)
    (weight,) = layer.weights
    values = np.random.rand(9, 5).astype(np.dtype(stored_as))
    mfload.load_into(layer, samples.save(tmp_path / "x.safetensors", {weight.path: values}))
    assert bits(weight) == values.astype(np.dtype(held)).tobytes()


def test_rules_stack_join_and_scale(tmp_path: Path) -> None:
    layer = one((3, 4, 12))
    (weight,) = layer.weights
    names = [f"layers.{n}.{name}" for n in range(3) for name in ("q", "kk")]
    arrays = {name: np.random.rand(6, 4).astype(np.float16) for name in names}
    path = samples.save(tmp_path / "x.safetensors", arrays)
    rule = mfload.rule(weight.path, transpose=(1, 0), concat=(1, 2, ("q", "kk")), stack=1, scale=2)
    mfload.load_into(layer, path, mapping={r"layers\.(\d)\.(.*)": rule})
    pairs = zip(names[::2], names[1::2], strict=True)
    made = [np.concatenate([arrays[q].T, arrays[k].T], 1) for q, k in pairs]
    assert same(weight, np.stack(made).astype(np.float32) * 2)


def test_everything_wrong_in_one_error(stored: Any, tmp_path: Path) -> None:
    model, arrays = network(), dict(stored[1])
    arrays["head/kernel"] = arrays["head/kernel"].T.copy()
    arrays["more"] = arrays.pop("shared/bias")
    arrays["norm/beta"] = arrays["norm/beta"].astype(np.int64)
    state = model.get_layer("drop").seed_generator.state
    arrays[state.path] = np.zeros(2, np.int64)
    before = [value(each).copy() for each in model.weights]
    with pytest.raises(errors.MappingError) as caught:
        mfload.load_into(model, samples.save(tmp_path / "x.safetensors", arrays))
    text = "\n".join(caught.value.problems)
    for words in (
        "wrong shape: head/kernel: wants [24, 5]",
        "wrong dtype: norm/beta: wants F32",
        "missing: shared/bias [24]",
        "extra: more [24]",
        f"'{state.path}' can't hold a tensor",
    ):
        assert words in text
    assert all(same(each, old) for each, old in zip(model.weights, before, strict=True))
    with pytest.raises(errors.MappingError, match="keeps it, BF16 is asked for"):
        mfload.load_into(model, stored[0], dtype="bfloat16")


def test_lenient(stored: Any, tmp_path: Path) -> None:
    arrays, model, report = dict(stored[1]), network(), mfload.Report()
    del arrays["norm/moving_mean"]
    arrays["more"] = np.zeros(3)
    path = samples.save(tmp_path / "x.safetensors", arrays)
    mfload.load_into(model, path, strict=False, report=report)
    assert not value(model.get_layer("norm").moving_mean).any()
    assert same(model.get_layer("norm").gamma, arrays["norm/gamma"])
    assert "norm/moving_mean" in " ".join(report.notes)
    assert "more" in " ".join(report.notes)


class Late(keras.Model):
    """Has no weights before its first call."""

    def __init__(self) -> None:
        super().__init__(name="late")
        self.blocks = [layers.Dense(4, name=f"block_{n}") for n in range(2)]

    def call(self, x: Any) -> Any:
        for block in self.blocks:
            x = block(x)
        return x


def test_models_that_are_not_built(tmp_path: Path) -> None:
    model = Late()
    with pytest.raises(errors.UsageError, match=r"not built: late, block_0, block_1"):
        mfload.load_into(model, tmp_path / "none.safetensors")
    model(np.zeros((1, 4), np.float32))
    arrays = numbers(model)
    assert next(iter(arrays)) == "late/block_0/kernel"
    mfload.load_into(model, samples.save(tmp_path / "x.safetensors", arrays))
    assert all(same(each, arrays[each.path]) for each in model.weights)
    with mock.patch.object(keras.Model, "_flatten_layers", side_effect=AttributeError):
        mfload.load_into(model, tmp_path / "x.safetensors")


def test_paths_that_several_weights_have(tmp_path: Path) -> None:
    class Both(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.parts = [network(), network()]

        def call(self, x: Any) -> Any:
            return [part(x) for part in self.parts]

    model = Both()
    model(np.zeros((1, 24), np.float32))
    with pytest.raises(errors.UsageError, match=r"the same path.*shared/kernel"):
        mfload.load_into(model, tmp_path / "none.safetensors")


def large() -> Any:
    return Own({f"w{n}": (2048, 1024) for n in range(4)})


def test_little_lies_beside_the_model(tmp_path: Path) -> None:
    """What is replaced goes batch by batch; what a rule makes takes no more than the overhead."""
    model, report = large(), mfload.Report()
    arrays = numbers(model)
    path = samples.save(tmp_path / "x.safetensors", arrays)
    options = mfload.Options(max_host_overhead=12 << 20, threads=1)
    for _ in range(2):  # The second time, the old values may lie in memory of mfload's.
        gc.collect()
        buffers.peak_bytes(reset=True)
        mfload.load_into(model, path, options=options)
        held = 0 if IN_PLACE else 32 << 20
        assert buffers.peak_bytes() <= held + (12 << 20) + (1 << 16)
        assert all(same(each, arrays[each.path]) for each in model.weights)
    shape = (2048, 1024)
    rule = mfload.rule(r"\1", transpose=(1, 0), reshape=shape)
    mfload.load_into(model, path, mapping={"(.*)": rule}, options=options, report=report)
    assert all(same(each, arrays[each.path].T.reshape(shape)) for each in model.weights)


def test_new_arrays_replace_the_old_ones_in_small_batches(tmp_path: Path) -> None:
    model = large()
    arrays = numbers(model)
    path = samples.save(tmp_path / "x.safetensors", arrays)
    for _ in range(2):
        gc.collect()
        buffers.peak_bytes(reset=True)
        mfload.load_into(model, path)
    held = 0 if IN_PLACE else 32 << 20
    assert buffers.peak_bytes() <= held + (17 << 20)  # Two of 8 MiB at once.
    assert all(same(each, arrays[each.path]) for each in model.weights)


@pytest.mark.parametrize("given", [4 << 20, 9 << 20])
def test_limits_that_are_too_small_name_one_that_is_not(tmp_path: Path, given: int) -> None:
    """What a rule makes is put together before it is assigned, and counts."""
    shape, layer = (2048, 1024), one((2048, 1024))
    (weight,) = layer.weights
    values = samples.numbers(shape, np.float32, 3)
    path = samples.save(tmp_path / "x.safetensors", {weight.path: values})
    mapping = {weight.path: mfload.rule(weight.path, transpose=(1, 0), reshape=shape)}
    limit = given
    if not IN_PLACE:
        options = mfload.Options(max_host_overhead=limit, threads=1)
        with pytest.raises(errors.MemoryLimitError, match="too small for what the tensor") as found:
            mfload.load_into(layer, path, mapping=mapping, options=options)
        assert not value(weight).any()
        assert found.value.tensor == weight.path
        limit = int(str(found.value.expected).split()[0])
        assert limit < 12 << 20
    tracemalloc.start()
    options = mfload.Options(max_host_overhead=limit, threads=1)
    mfload.load_into(layer, path, mapping=mapping, options=options)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    copied = values.nbytes if BACKEND == "tensorflow" else 0  # By TensorFlow, when it is assigned.
    assert peak <= limit + copied + (1 << 20)
    assert bits(weight) == values.T.tobytes()


def test_a_fault_in_the_middle_says_so(tmp_path: Path) -> None:
    model = large()
    arrays = numbers(model)
    path = samples.save(tmp_path / "x.safetensors", arrays)
    true, read = os.preadv, [0]

    def preadv(*args: Any) -> int:
        if read[0] > 9 << 20:  # More than what is read at once.
            raise OSError(errno.EIO, "Input/output error")
        read[0] += (got := true(*args))
        return got

    options = mfload.Options(engine="pread", threads=1, max_host_overhead=9 << 20)
    with (
        mock.patch.object(pread, "_ROWS_A_MAP", 1 << 60),
        mock.patch.object(os, "preadv", preadv),
        pytest.raises(errors.MfloadError) as caught,
    ):
        mfload.load_into(model, path, options=options)
    assert "some may hold new values" in " ".join(caught.value.__notes__)
    assert model.mfload_torn
    before = [bits(weight) for weight in model.weights]
    read[0] = 0
    with (
        mock.patch.object(pread, "_ROWS_A_MAP", 1 << 60),
        mock.patch.object(os, "preadv", preadv),
        pytest.raises(errors.MfloadError) as caught,
    ):
        mfload.load_into(
            model, path, atomic=True, options=dataclasses.replace(options, max_host_overhead=None)
        )
    assert not hasattr(caught.value, "__notes__")
    assert before == [bits(weight) for weight in model.weights]
    mfload.load_into(model, path, atomic=True)
    assert all(same(weight, arrays[weight.path]) for weight in model.weights)
    assert not hasattr(model, "mfload_torn")


@pytest.mark.parametrize("argument", ["mesh", "shardings", "logical_axis_rules"])
def test_what_is_for_jax_is_refused(stored: Any, argument: str) -> None:
    with pytest.raises(errors.UsageError, match=f"{argument}="):
        mfload.load_into(network(), stored[0], **{argument: [1]})


def test_an_exchange_is_refused(stored: Any) -> None:
    with pytest.raises(errors.UsageError, match="exchange='once'"):
        mfload.load_into(network(), stored[0], options=mfload.Options(exchange="once"))


def test_a_model_is_saved_by_its_paths_and_comes_back(tmp_path: Path) -> None:
    net, other = network(), network()
    mfload.save(net, tmp_path / "net.safetensors")
    mfload.load_into(other, tmp_path / "net.safetensors")
    assert set(mfload.load(tmp_path / "net.safetensors", "numpy")) == {v.path for v in net.weights}
    for ours, theirs in zip(net.get_weights(), other.get_weights(), strict=True):
        assert np.array_equal(ours, theirs)
