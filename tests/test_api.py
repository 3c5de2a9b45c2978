"""`load`, `open` and `plan`: every argument, and what each refuses."""

from __future__ import annotations

import inspect
import os
import re
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
import samples
from calls import as_options

import mfload
from mfload import errors

MODEL = samples.model()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return samples.save(tmp_path / "model.safetensors", MODEL, {"format": "pt"})


def _load(path: Any, **options: Any) -> dict[str, Any]:
    return mfload.load(path, framework="numpy", **as_options(options))


def test_what_safetensors_loads_is_what_is_loaded(path: Path) -> None:
    loaded = _load(path)
    samples.assert_same(loaded, MODEL)
    with mfload.open(path) as opened:
        assert list(loaded) == opened.offset_keys()
    reference = safetensors.numpy.load_file(path)
    samples.assert_same(
        {name: array.view(reference[name].dtype) for name, array in loaded.items()}, reference
    )


def test_a_path_is_a_string_a_path_a_directory_or_a_list(path: Path, tmp_path: Path) -> None:
    other = samples.save(tmp_path / "more.safetensors", {"more": np.arange(3)})
    for given in (path, os.fspath(path), [path], (os.fspath(path),)):
        samples.assert_same(_load(given), MODEL)
    both = {**MODEL, "more": np.arange(3)}
    samples.assert_same(_load([other, path]), both)
    assert next(iter(_load([other, path]))) == "more"
    other.unlink()
    samples.assert_same(_load(tmp_path), MODEL)
    for nothing in ([], (), iter(()), {}, lambda _: False, "nothing"):
        with pytest.raises(errors.TensorNotFoundError, match="no tensor matches"):
            _load(path, names=nothing)
    with pytest.raises(errors.UsageError):
        _load([])


def test_bare_names_are_relative_to_here(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(path.parent)
    samples.assert_same(_load("model.safetensors"), MODEL)
    samples.assert_same(_load("."), MODEL)


@pytest.mark.parametrize("name", ["numpy", "np", "NumPy", "NP"])
def test_frameworks_have_other_names(path: Path, name: str) -> None:
    assert isinstance(mfload.load(path, framework=name)["odd"], np.ndarray)


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (r"layer\.0\.", {"layer.0.q", "layer.0.norm"}),
        (re.compile("NORM", re.I), {"layer.0.norm"}),
        (["odd", "embed"], {"odd", "embed"}),
        (lambda name: "." not in name, {n for n in MODEL if "." not in n}),
    ],
)
def test_names_choose(path: Path, names: Any, expected: set[str]) -> None:
    loaded = _load(path, names=names)
    samples.assert_same(loaded, {name: MODEL[name] for name in expected})
    assert len(mfload.plan(path, names=names).plan.places) == len(expected)


def test_a_missing_name_is_named(path: Path) -> None:
    for load in (_load, mfload.plan):
        with pytest.raises(errors.TensorNotFoundError, match="embed") as info:
            load(path, names=["odd", "embd"])
        assert info.value.tensor == "embd"
        assert info.value.file == os.fspath(path)


def test_one_dtype_for_all_floats(path: Path) -> None:
    loaded = _load(path, dtype="float64")
    for name, array in MODEL.items():
        expected = array
        if array.dtype.kind not in "iub":
            with np.errstate(all="ignore"):
                expected = array.astype(np.float64)
        assert samples.same(loaded[name], expected), name


@pytest.mark.parametrize(
    "spelling",
    ["bfloat16", "BF16", "bf16", "torch.bfloat16", ml_dtypes.bfloat16,
     np.dtype(ml_dtypes.bfloat16)],
)  # fmt: skip
def test_dtypes_are_spelled_in_many_ways(path: Path, spelling: Any) -> None:
    loaded = _load(path, names=["layer.0.norm"], dtype=spelling)["layer.0.norm"]
    with np.errstate(all="ignore"):
        assert samples.same(loaded, MODEL["layer.0.norm"].astype(ml_dtypes.bfloat16))


def test_what_would_lose_values_has_to_be_asked_for_by_name(tmp_path: Path) -> None:
    arrays = {
        "weight": np.array([1.0, -2.0, 100.0], np.float32),
        "ids": np.array([1, -(2**31), 2**31 - 1], np.int64),
        "large": np.array([2**31], np.int64),
        "nan": np.array([np.nan, 1], np.float32),
    }
    path = samples.save(tmp_path / "a.safetensors", arrays)
    for dtype, tensor in (("int32", "weight"), ("int8", "weight"), ("int64", "weight")):
        with pytest.raises(errors.LossyCastError) as info:
            _load(path, names=[tensor], dtype=dtype)
        assert info.value.tensor == tensor
    with pytest.raises(errors.LossyCastError) as info:
        _load(path, names=["ids"], dtype=np.int32)
    assert (info.value.tensor, info.value.found) == ("ids", "I64")
    # By name, and what fits is exact.
    loaded = _load(path, names=["weight", "ids"], dtype={"weight": "int8", "ids": "int32"})
    assert loaded["weight"].tolist() == [1, -2, 100]
    assert (loaded["ids"].dtype, loaded["ids"].tolist()) == (np.int32, arrays["ids"].tolist())
    del loaded
    # What does not, is refused all the same, with the tensor's name.
    for tensor, dtype in (("large", "int32"), ("nan", "int32"), ("weight", "uint8")):
        with pytest.raises(errors.LossyCastError) as info:
            _load(path, dtype={tensor: dtype})
        assert info.value.tensor == tensor
        assert info.value.file == os.fspath(path)
        assert mfload.live_bytes() == 0


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("engine", "fast"), ("engine", ""), ("engine", None), ("engine", 3),
        ("allocator", "elsewhere"), ("allocator", None),
        ("threads", 0), ("threads", -1), ("threads", 1.5), ("threads", "2"), ("threads", True),
        ("timeout", 0), ("timeout", -1), ("timeout", float("nan")), ("timeout", "1"),
        ("max_host_overhead", -1), ("max_host_overhead", 1), ("max_host_overhead", "much"),
        ("max_host_overhead", 1e9),
        ("names", "("), ("names", 5), ("dtype", "float31"), ("dtype", [("(", "float32")]),
        ("dtype", 5), ("exchange", "twice"), ("exchange", None), ("unmatched", "ignore"),
        ("unmatched", None), ("unmatched", []),
    ],
)  # fmt: skip
def test_senseless_arguments_are_refused(path: Path, option: str, value: Any) -> None:
    fields = mfload.Options.__dataclass_fields__
    calls: list[Any] = [
        _load,
        mfload.plan,
        *([mfload.open] if option in fields and value != 1 else []),
    ]
    for call in calls:
        with pytest.raises(errors.UsageError):
            call(path, **as_options({option: value}))


@pytest.mark.parametrize("value", ["numbers", "", None, 5])
def test_frameworks_that_are_none_are_refused(path: Path, value: Any) -> None:
    calls: list[Any] = [mfload.load, mfload.open, *([] if value is None else [mfload.plan])]
    for call in calls:
        with pytest.raises(errors.UsageError, match="unknown framework") as info:
            call(path, framework=value)
        assert "jax" in str(info.value.expected)


def test_arguments_in_the_wrong_order_are_named(path: Path) -> None:
    arrays = mfload.load(path, "numpy")
    with pytest.raises(errors.UsageError, match=r"load_into\(target, path\)"):
        mfload.load(path, arrays)  # pyright: ignore[reportArgumentType]
    with pytest.raises(errors.UsageError, match="a path comes first"):
        mfload.load("numpy", os.fspath(path))
    with pytest.raises(errors.UsageError) as info:
        mfload.save(os.fspath(path), arrays)  # pyright: ignore[reportArgumentType]
    assert (info.value.expected, info.value.found) == ("save(arrays, path)", "dict")


def test_senseless_arguments_are_refused_before_anything_is_read(tmp_path: Path) -> None:
    nowhere = tmp_path / "nowhere"
    for call in (_load, mfload.plan, mfload.open):
        with pytest.raises(errors.UsageError, match=r"mfload\.Options"):
            call(nowhere, options={"threads": 2})
    for call in (_load, mfload.plan):
        with pytest.raises(errors.UsageError, match="unmatched"):
            call(nowhere, unmatched="ignore")


@pytest.mark.parametrize("device", ["cuda:0", "gpu", "tpu:1", object()])
def test_numpy_knows_the_host_alone(path: Path, device: Any) -> None:
    with pytest.raises(
        errors.DeviceError, match=re.escape(f"no device {str(device)!r} here")
    ) as info:
        _load(path, device=device)
    assert (info.value.expected, info.value.found) == (None, "cpu")
    samples.assert_same(_load(path, device="cpu"), MODEL)


def test_arguments_are_keywords_and_typed() -> None:
    calls = (mfload.load, 2), (mfload.open, 3), (mfload.plan, 2), (mfload.stream, 2)
    for call, positional in calls:
        parameters = inspect.signature(call).parameters.values()
        kinds = [parameter.kind for parameter in parameters]
        assert kinds.count(inspect.Parameter.POSITIONAL_OR_KEYWORD) == positional
        assert inspect.Parameter.VAR_KEYWORD not in kinds
        assert all(p.annotation is not inspect.Parameter.empty for p in parameters)


def test_open_and_plan_know_the_arguments_of_load() -> None:
    load = inspect.signature(mfload.load).parameters
    # What looks at bytes, or shows a load while it runs; what says how tensors are made.
    shown = {"verify", "progress", "report"}
    made = {"progress", "dtype", "mesh", "shardings", "shard", "unmatched"}
    for call, missing in ((mfload.plan, shown), (mfload.open, made)):
        parameters = inspect.signature(call).parameters
        assert parameters.keys() == load.keys() - missing
        for name in parameters.keys() - {"framework"}:
            assert parameters[name].default == load[name].default, name


def test_stream_knows_the_arguments_of_load() -> None:
    load, stream = (inspect.signature(call).parameters for call in (mfload.load, mfload.stream))
    assert stream.keys() == load.keys() | {"order", "lazy"}
    for name in load:
        assert stream[name].default == load[name].default, name
        assert stream[name].annotation == load[name].annotation, name


def test_a_mesh_is_for_few_and_no_framework_is_changed_in_silence(path: Path) -> None:
    for call in (mfload.load, mfload.plan, mfload.stream):
        for given in ({"mesh": object()}, {"shardings": []}):
            with pytest.raises(errors.UsageError, match="numpy has no meshes") as info:
                call(path, "numpy", **given)
            assert info.value.found == "numpy"
    assert mfload.plan(path).framework == "numpy"


def test_a_framework_is_its_module_too(path: Path) -> None:
    samples.assert_same(mfload.load(path, np), MODEL)
    with mfload.open(path, np) as opened:
        assert isinstance(opened.get_tensor("odd"), np.ndarray)
    assert mfload.plan(path, np).framework == "numpy"


def test_numpy_integers_are_integers(path: Path) -> None:
    loaded = _load(path, threads=np.int64(2), max_host_overhead=np.int64(64 << 20), timeout=60)
    samples.assert_same(loaded, MODEL)


def test_an_unknown_dtype_fails_only_its_tensor(tmp_path: Path) -> None:
    rows = [("known", "U8", (3,), b"abc"), ("strange", "F3", (8,), b"xyz")]
    path = samples.save_raw(tmp_path / "a.safetensors", rows)
    with pytest.raises(errors.UnsupportedDtypeError) as info:
        _load(path)
    assert (info.value.tensor, info.value.found) == ("strange", "F3")
    assert info.value.file == os.fspath(path)
    assert _load(path, names=["known"])["known"].tobytes() == b"abc"
    with mfload.open(path) as opened:
        assert opened.get_slice("strange").get_dtype() == "F3"
        with pytest.raises(errors.UnsupportedDtypeError):
            opened.get_tensor("strange")
        with pytest.raises(errors.UnsupportedDtypeError):
            opened.get_slice("strange")[0:2]


def test_two_loads_share_nothing(path: Path) -> None:
    first, second = _load(path), _load(path)
    first["embed"][:] = 0
    samples.assert_same(second, MODEL)


def test_what_is_no_report_is_refused(path: Path) -> None:
    with pytest.raises(errors.UsageError, match="not a report"):
        _load(path, report=[])


def test_the_names_of_the_package_are_the_public_ones() -> None:
    assert dir(mfload) == sorted([*mfload.__all__, "__version__"])


@pytest.mark.parametrize("framework", ["numpy", "model.safetensors"])
@pytest.mark.parametrize("tree", [{"w": np.zeros(3)}, object()])
def test_a_tree_as_path_names_load_into(tree: Any, framework: Any) -> None:
    with pytest.raises(errors.UsageError, match=r"load_into\(target, path\) fills a tree"):
        mfload.load(tree, framework)


def test_options_of_a_call_are_the_options() -> None:
    from mfload.options import LoadOptions, started

    given = {"threads": 3, "max_host_overhead": "1KiB", "page_cache": "keep"}
    options = mfload.Options(**given)  # type: ignore[arg-type]
    made = started(options)
    assert made == LoadOptions(**given)
    for name in mfload.Options.__dataclass_fields__:
        assert getattr(made, name) == getattr(options, name), name
    assert started(None) == LoadOptions()
    assert made.replace(threads=4, by_host=True).by_host
    with pytest.raises(TypeError, match="thread"):
        LoadOptions(thread=3)
