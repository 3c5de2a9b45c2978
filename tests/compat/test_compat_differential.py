"""mfload and the package safetensors are called alike, and do the same."""

from __future__ import annotations

import gc
import importlib
import inspect
import os
import pickle
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import reference
import safetensors
import safetensors.numpy
import safetensors.torch
import torch
from devices.fake import FakeDevice
from hypothesis import example, given, strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

import mfload
from mfload import dtypes
from mfload.compat import safetensors as ours
from mfload.compat.safetensors import numpy as ours_numpy, torch as ours_torch
from mfload.cuda.device import MemoryInfo
from mfload.frameworks import torch_adapter
from mfload.frameworks.base import Pool
from mfload.io import route

SHAPES = st.lists(st.integers(0, 4), max_size=3).map(tuple)
TORCH = [name for name in dtypes.TABLE if not name.startswith("F6")]
NAMES = st.text(st.characters(codec="utf-8"), min_size=1, max_size=4).filter(
    lambda name: name != "__metadata__"
)
METADATA = st.none() | st.dictionaries(
    st.text(max_size=3), st.text(max_size=3), min_size=1, max_size=1
)


@st.composite
def tensors(draw: st.DrawFn, names: list[str] = TORCH) -> dict[str, reference.Tensor]:
    made = {}
    for name in draw(st.lists(NAMES, unique=True, max_size=4)):
        dtype, shape = draw(st.sampled_from(names)), draw(SHAPES)
        if dtype == "F4":
            shape = (*shape, 2)
        nbytes = dtypes.TABLE[dtype].size_of(shape) or 0
        # Booleans of 0 and 1.
        data = draw(st.binary(min_size=nbytes, max_size=nbytes)) if dtype != "BOOL" else None
        made[name] = reference.Tensor(dtype, shape, data or bytes(nbytes))
    return made


def outcome(call: Callable[[], Any]) -> tuple[str, Any]:
    """What a call returns, as bytes, or the built-in kind of its error."""
    try:
        found = call()
    except safetensors.SafetensorError:
        return "error", "SafetensorError"
    except Exception as error:
        kinds = [kind for kind in type(error).__mro__ if kind.__module__ == "builtins"]
        return "error", kinds[0].__name__
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        return "error", "panic"  # The original's numbers may overflow.
    return "value", plain(found)


def layout(made: Any) -> Any:
    """How a tensor lies in its memory, and how long that is."""
    return made.stride(), made.storage_offset(), made.untyped_storage().nbytes()


def plain(found: Any) -> Any:
    if isinstance(found, dict):
        return {key: plain(value) for key, value in found.items()}
    if isinstance(found, torch.Tensor):
        held = found.contiguous()
        if held.numel() == 1:  # Contiguous with any strides.
            held = held.as_strided((1,), (1,))
        data = held.reshape(-1).view(torch.uint8).numpy().tobytes() if held.numel() else b""
        return str(found.dtype), tuple(found.shape), data
    if isinstance(found, np.ndarray):
        return str(found.dtype), found.shape, found.tobytes()
    return found


@given(tensors(), METADATA)
def test_torch_reads_alike(
    tmp_path_factory: Any, held: dict[str, reference.Tensor], metadata: Any
) -> None:
    path = tmp_path_factory.mktemp("x") / "x.safetensors"
    path.write_bytes(data := reference.write(held, metadata))
    for backend in ("mmap", "pread"):
        with (
            safetensors.safe_open(path, "pt", backend=backend) as theirs,
            ours.safe_open(path, "pt", backend=backend) as mine,
        ):
            assert mine.keys() == theirs.keys()
            # The order of several at one offset, as empty ones are, is not told.
            one, other = mine.offset_keys(), theirs.offset_keys()
            assert sorted(one) == sorted(other)
            assert [n for n in one if held[n].data] == [n for n in other if held[n].data]
            assert mine.metadata() == theirs.metadata()
            for name, tensor in held.items():
                # The original can't read an F4 in this way.
                if backend == "mmap" or tensor.dtype != "F4":
                    wanted = outcome(lambda: theirs.get_tensor(name))  # noqa: B023
                    assert outcome(lambda: mine.get_tensor(name)) == wanted  # noqa: B023
                one, other = mine.get_slice(name), theirs.get_slice(name)
                assert one.get_shape() == other.get_shape()
                assert one.get_dtype() == other.get_dtype()
    assert outcome(lambda: ours_torch.load_file(path)) == outcome(
        lambda: safetensors.torch.load_file(path)
    )
    if not {"F4", "F8_E8M0"} & {tensor.dtype for tensor in held.values()}:
        wanted = outcome(lambda: safetensors.torch.load(data))
        assert outcome(lambda: ours_torch.load(data)) == wanted
    by_name = dict(ours.deserialize(data))
    assert by_name == dict(safetensors.deserialize(data))


@given(tensors([*TORCH]), METADATA)
def test_torch_writes_the_same_bytes(
    tmp_path_factory: Any, held: dict[str, reference.Tensor], metadata: Any
) -> None:
    path = tmp_path_factory.mktemp("x") / "x.safetensors"
    arrays = ours_torch.load(reference.write(held))
    wanted = safetensors.torch.save(arrays, metadata)
    assert ours_torch.save(arrays, metadata) == wanted
    for _ in range(2):  # The second replaces the first.
        ours_torch.save_file(arrays, path, metadata)
        assert path.read_bytes() == wanted
    assert os.listdir(path.parent) == [path.name]


INDEX = st.one_of(
    st.integers(-4, 5),
    st.builds(slice, st.none() | st.integers(-2, 5), st.none() | st.integers(-2, 5)),
    st.sampled_from([None, Ellipsis, [], [0], "a", 1.0, True, np.int64(1), np.array([0, 1])]),
)


@given(
    INDEX | st.lists(INDEX, max_size=2).map(tuple),
    st.sampled_from(["pt", "np"]),
    st.sampled_from(["mmap", "pread"]),
)
@example((..., ...), "pt", "pread")
def test_slices_are_alike(tmp_path_factory: Any, index: Any, framework: str, backend: str) -> None:
    path = tmp_path_factory.getbasetemp() / "slices.safetensors"
    if not path.exists():
        safetensors.numpy.save_file({"x": np.arange(12.0).reshape(3, 4)}, path)
    items = index if isinstance(index, tuple) else (index,)
    turned = any(
        isinstance(i, slice) and min(i.start or 0, i.stop or 0) >= 0 and i.stop is not None
        and (i.start or 0) > i.stop for i in items
    )  # fmt: skip
    with (
        safetensors.safe_open(path, framework) as theirs,  # With "pread" it takes fewer indices.
        ours.safe_open(path, framework, backend=backend) as mine,
    ):
        one, other = mine.get_slice("x"), theirs.get_slice("x")
    wanted = outcome(lambda: other[index])  # After the end of the context.
    if framework == "np" and (turned or wanted[0] == "error"):  # The original may overflow.
        wanted = "error", "SafetensorError"
    for small in (0, 1 << 20):  # Columns come out of the map, or of all of the tensor.
        with mock.patch.object(ours, "_NEAR", small):
            found = outcome(lambda: one[index])
            assert found == wanted or (backend == "pread" and found[0] == wanted[0] == "error")


def _both(call: Callable[[Any], Any]) -> tuple[Any, Any]:
    return outcome(lambda: call(ours)), outcome(lambda: call(safetensors))


@pytest.mark.parametrize(
    "arguments",
    [
        ("x", "nothing"), ("x", None), ("x", 3), ("x", "np", "cuda:0"), ("x", "np", 0),
        ("x", "pt", "cuda:a"), ("x", "pt", "bad"), ("x", "pt", 1.5), ("x", "pt", -1),
        ("x", "pt", "cpu:0"), ("x", "pt", None), (b"x", "np"), (3, "np"), (None, "np"),
        ("gone", "np"), ("empty", "np"), ("short", "np"), ("x", "torch"), ("x", "pytorch"),
        ("x", "jax", "cuda"), ("x", "numpy", None),
    ],
)  # fmt: skip
def test_arguments_are_refused_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    safetensors.numpy.save_file({"a": np.zeros(2)}, "x")
    Path("short").write_bytes(Path("x").read_bytes()[:-1])
    Path("empty").touch()
    mine, theirs = _both(lambda module: module.safe_open(*arguments).keys())
    assert mine == theirs


def test_names_and_closed_files_are_refused_alike(tmp_path: Path) -> None:
    path = tmp_path / "x"
    safetensors.numpy.save_file({"a": np.zeros(2)}, path)
    for name in ("b", 3, None, ["a"]):
        for method in ("get_tensor", "get_slice"):
            mine, theirs = _both(lambda m: getattr(m.safe_open(path, "np"), method)(name))  # noqa: B023
            assert mine == theirs

    def closed(module: Any) -> Any:
        with module.safe_open(path, "np") as opened:
            pass
        return opened.keys()

    assert _both(closed) == (("error", "SafetensorError"),) * 2
    for module in (safetensors, ours):
        with pytest.raises(TypeError):
            module.deserialize(bytearray(path.read_bytes()))
        with pytest.raises(safetensors.SafetensorError):
            module.deserialize(b"12345678")


@pytest.mark.parametrize(
    "make",
    [
        lambda: {"a": torch.zeros(4, 4).t()},
        lambda: {"a": (x := torch.zeros(4)), "b": x},
        lambda: {"a": (x := torch.zeros(4)), "b": x[1:]},
        lambda: {"a": (x := torch.zeros(4))[:2], "b": x[2:]},
        lambda: {"a": torch.zeros(2, device="meta")},
        lambda: {"a": torch.zeros(2).to_sparse()},
        lambda: {"a": [1.0]},
        lambda: [torch.zeros(2)],
        lambda: {3: torch.zeros(2)},
        lambda: {"a": torch.zeros(0), "b": torch.zeros(0)},
    ],
)
def test_torch_saves_are_refused_alike(make: Callable[[], Any], tmp_path: Path) -> None:
    wanted = outcome(lambda: safetensors.torch.save(make()))
    assert outcome(lambda: ours_torch.save(make())) == wanted
    assert outcome(lambda: ours_torch.save_file(make(), tmp_path / "x"))[0] == wanted[0]
    wrong: list[Any] = [{"a": 3}, {3: "a"}, ["a"], "ab", 3, (), {}]
    for metadata in wrong:
        good = {"a": torch.zeros(2)}
        assert outcome(lambda: ours_torch.save(good, metadata)) == outcome(  # noqa: B023
            lambda: safetensors.torch.save(good, metadata)  # noqa: B023
        )


def test_models_with_shared_tensors(tmp_path: Path) -> None:
    class Tied(torch.nn.Module):  # pyright: ignore[reportUntypedBaseClass]
        def __init__(self) -> None:
            super().__init__()
            self.a = torch.nn.Linear(3, 3)
            self.b = self.a
            self.c = torch.nn.Linear(3, 2)

    model, other = Tied(), Tied()
    ours_torch.save_model(model, str(tmp_path / "ours"))
    safetensors.torch.save_model(model, str(tmp_path / "theirs"))
    assert ours_torch.load_file(tmp_path / "ours").keys() == {
        "a.bias",
        "a.weight",
        "c.bias",
        "c.weight",
    }
    for name in ("ours", "theirs"):
        found = ours_torch.load_model(other, tmp_path / name)
        assert found == (set(), [])
        assert all(map(torch.equal, model.state_dict().values(), other.state_dict().values()))
    both = ours_torch, safetensors.torch
    one, two = (
        outcome(lambda m=m: m.load_model(torch.nn.Linear(2, 2), tmp_path / "ours")) for m in both
    )
    assert one == two == ("error", "RuntimeError")
    assert ours_torch.load_model(torch.nn.Linear(2, 2), tmp_path / "ours", strict=False)[0] == {
        "weight", "bias"
    }  # fmt: skip
    shared = model.state_dict()
    for name in ("_find_shared_tensors", "_remove_duplicate_names"):  # transformers calls them.
        one, two = (getattr(module, name)(shared) for module in both)
        assert one == two


def test_dtypes_are_listed_alike() -> None:
    """vLLM and diffusers use what is private in the original."""
    theirs, mine = (dict(getattr(each, "_TYPES")) for each in (safetensors.torch, ours_torch))  # noqa: B009
    assert mine == theirs
    sizes = (getattr(each, "_getdtype")("BF16") for each in (safetensors.torch, ours_torch))  # noqa: B009
    assert [*sizes] == [torch.bfloat16] * 2
    size = getattr(ours_torch, "_SIZE")  # noqa: B009
    assert all(size[kind] == kind.itemsize for kind in mine.values())


@pytest.mark.parametrize("name", ["", ".torch", ".numpy"])
def test_what_libraries_import_is_there(name: str) -> None:
    theirs, mine = (
        importlib.import_module(at + name) for at in (safetensors.__name__, ours.__name__)
    )
    for key in ("safe_open", "deserialize", "serialize", "serialize_file", "TensorSpec"):
        assert hasattr(theirs, key)
        assert getattr(mine, key) is getattr(ours, key)
    for key in ("load_file", "load", "save_file", "save"):
        if name:
            wanted = inspect.signature(getattr(theirs, key)).parameters
            # More arguments at the end do no harm.
            assert {*wanted} <= {*inspect.signature(getattr(mine, key)).parameters}


def test_specs_are_alike() -> None:
    data = np.arange(4, dtype=np.uint8)
    cases = [
        ("uint8", (2, 2)), ("float4_e2m1fn_x2", (1, 4)), ("float32", ()), ("x", (4,)),
        ("float4_e2m1fn", (8,)), ("float6_e2m3fn", (4,)), ("float32", (3,)),
    ]  # fmt: skip
    for dtype, shape in cases:

        def write(module: Any, dtype: str = dtype, shape: tuple[int, ...] = shape) -> Any:
            spec = module.TensorSpec(
                dtype=dtype, shape=shape, data_ptr=data.ctypes.data, data_len=4
            )
            return spec.dtype, spec.shape, module.serialize({"a": spec}, {"k": "v"})

        mine, theirs = _both(write)
        assert mine == theirs, dtype
    with pytest.raises(TypeError):
        ours.serialize({"a": {"dtype": "uint8"}})  # pyright: ignore


def test_tensors_are_writable_and_outlive_the_file(tmp_path: Path) -> None:
    path = tmp_path / "x"
    safetensors.torch.save_file({"a": torch.arange(5000.0), "b": torch.ones(3)}, path)
    before = path.read_bytes()
    for backend in ("mmap", "pread"):
        with ours.safe_open(path, "pt", backend=backend) as opened:
            kept, part = opened.get_tensor("a"), opened.get_slice("a")
        ours_torch.save_file({"z": torch.zeros(1)}, path)
        gc.collect()
        assert torch.equal(kept, torch.arange(5000.0))
        kept[0] = 7
        path.write_bytes(before)
        assert torch.equal(ours_torch.load_file(path)["a"], torch.arange(5000.0))
        del part
    array = ours_numpy.load_file(path)["a"]
    array[0] = 1
    assert path.read_bytes() == before


@pytest.mark.parametrize("cold", [False, True])
def test_what_the_page_cache_lacks_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cold: bool
) -> None:
    path = tmp_path / "x"
    safetensors.torch.save_file({"a": torch.arange(5000.0), "b": torch.ones(3)}, path)
    if cold:
        legs = (route.Leg(str(path), "pread", "", cold=True),)
        monkeypatch.setattr(route, "choose", lambda *_, **__: legs)
    found = ours_torch.load_file(path)
    assert torch.equal(found["a"], torch.arange(5000.0))
    assert (str(path) in Path("/proc/self/maps").read_text()) != cold


KEPT: dict[str, Callable[[Any, Path], Any]] = {
    "load_file": lambda module, path: _sub(module, "torch").load_file(path),
    "load_file of NumPy": lambda module, path: _sub(module, "numpy").load_file(path),
    "safe_open": lambda module, path: module.safe_open(path, "pt"),
    "safe_open of NumPy": lambda module, path: module.safe_open(path, "np"),
    "get_slice": lambda module, path: module.safe_open(path, "pt").get_slice("a"),
    "get_tensor": lambda module, path: module.safe_open(path, "pt").get_tensor("a"),
}


def _sub(module: Any, name: str) -> Any:
    return importlib.import_module(f"{module.__name__}.{name}")


@pytest.mark.parametrize("act", KEPT.values(), ids=KEPT)
def test_more_files_than_descriptors(tmp_path: Path, act: Any) -> None:
    paths = [tmp_path / str(n) for n in range(120)]
    for n, path in enumerate(paths):
        safetensors.numpy.save_file({"a": np.full(3, n)}, path)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    for module in (safetensors, ours):
        act(module, paths[0])  # What it imports needs descriptors.
        resource.setrlimit(
            resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 60, before[1])
        )
        try:
            kept = [act(module, path) for path in paths]
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
        assert len(kept) == len(paths)


PARTS = st.tuples(
    *[st.integers(0, 9) | st.builds(slice, st.integers(0, 5), st.integers(5, 10))] * 2
)


@given(PARTS | PARTS.map(lambda index: index[0]) | PARTS.map(lambda index: (..., index[1])))
@example((slice(None), slice(0, 10, 2)))
def test_slices_that_are_read_are_contiguous(tmp_path_factory: Any, index: Any) -> None:
    path = tmp_path_factory.getbasetemp() / "parts.safetensors"
    if not path.exists():
        safetensors.numpy.save_file({"x": np.arange(100.0).reshape(10, 10)}, path)
    one, other = (
        m.safe_open(path, "pt", backend="pread").get_slice("x") for m in (ours, safetensors)
    )
    for small in (0, 1 << 20):
        with mock.patch.object(ours, "_NEAR", small):
            found = one[index]
            assert torch.equal(found, other[index])
            if found.numel() > 1:
                assert layout(found) == layout(other[index])


@pytest.mark.parametrize("backend", ["mmap", "pread"])
@pytest.mark.parametrize("dtype", ["F32", "F64", "U8", "BF16", "F8_E4M3"])
def test_empty_tensors_of_any_length(tmp_path: Path, dtype: str, backend: str) -> None:
    """PyTorch takes lengths that NumPy does not."""
    shapes = {"a": (0, 2**62), "b": (2**62, 0), "c": (0, 2**63 - 1), "d": (3, 0)}
    held = {name: reference.Tensor(dtype, shape, b"") for name, shape in shapes.items()}
    (path := tmp_path / "x.safetensors").write_bytes(reference.write(held))
    one, other = (m.safe_open(path, "pt", backend=backend) for m in (ours, safetensors))
    for name, shape in shapes.items():
        made, wanted = one.get_tensor(name), other.get_tensor(name)
        assert made.shape == wanted.shape == shape
        assert (made.dtype, made.stride()) == (wanted.dtype, wanted.stride())
    assert one.get_slice("a")[:, 5:9].shape == (0, 4)  # The original's fails with "pread".
    loaded = ours_torch.load_file(path, backend=backend)
    assert {name: tuple(each.shape) for name, each in loaded.items()} == shapes
    assert {name: tuple(each.shape) for name, each in mfload.load(path, "torch").items()} == shapes
    if dtype == "F32":
        with pytest.raises(ours.SafetensorError, match="no array can have this shape"):
            ours.safe_open(path, "np", backend=backend).get_tensor("a")


def test_metadata_keys_that_come_twice(tmp_path: Path) -> None:
    entry = b'{"dtype":"U8","shape":[1],"data_offsets":[0,1]}'
    text = b'{"__metadata__":{"a":"1","b":"0","a":"2"},"w":%b}' % entry
    path = tmp_path / "x.safetensors"
    for each in (text, text.replace(b'"a":"1"', b'"\\u0061":"1"'), text.replace(b",", b", ")):
        path.write_bytes(len(each).to_bytes(8, "little") + each + b"x")
        found, wanted = (m.safe_open(path, "np").metadata() for m in (ours, safetensors))
        assert found == wanted == {"a": "2", "b": "0"}
        assert mfload.open(path).metadata() == wanted


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor:UserWarning")
def test_tensors_are_saved_under_the_mode_of_fake_ones(tmp_path: Path) -> None:
    held = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(3, dtype=torch.bfloat16)}
    wanted = safetensors.torch.save(held)
    with FakeTensorMode():
        assert ours_torch.save(held) == wanted
        ours_torch.save_file(held, tmp_path / "x.safetensors")
        mfload.save(held, tmp_path / "y.safetensors")
        fake = {"a": torch.ones(2)}
        for module in (ours_torch, safetensors.torch):
            with pytest.raises(safetensors.SafetensorError):
                module.save(fake)
    assert (tmp_path / "x.safetensors").read_bytes() == wanted
    for name, tensor in mfload.load(tmp_path / "y.safetensors", "torch").items():
        assert torch.equal(tensor, held[name])


@pytest.mark.parametrize("framework", ["pt", "np"])
def test_handles_are_not_pickled(tmp_path: Path, framework: str) -> None:
    safetensors.numpy.save_file({"x": np.ones((2, 3))}, tmp_path / "a.safetensors")
    with ours.safe_open(tmp_path / "a.safetensors", framework) as opened:
        for each in (opened, opened.get_slice("x")):
            with pytest.raises(TypeError, match="cannot pickle"):
                pickle.dumps(each)


@pytest.mark.parametrize("framework", ["pt", "np"])
def test_archives_are_not_mapped(tmp_path: Path, framework: str) -> None:
    held = {"a": np.arange(12.0).reshape(3, 4), "b": np.asfortranarray(np.arange(6).reshape(2, 3))}
    for save in (np.savez, np.savez_compressed):
        save(path := tmp_path / "x.npz", **held)  # pyright: ignore
        with ours.safe_open(path, framework) as opened:
            for name, array in held.items():
                assert np.array_equal(opened.get_tensor(name), array)
                assert np.array_equal(opened.get_slice(name)[:, 1:], array[:, 1:])


def test_failed_writes_leave_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("directory").mkdir()
    paths: list[Any] = ["missing/x", "directory", "", "a\0b", b"x", 3]
    for path in paths:
        one, other = (
            outcome(lambda m=m, path=path: m.save_file({"a": np.zeros(2)}, path))
            for m in (ours_numpy, safetensors.numpy)
        )
        assert one == other
        assert os.listdir() == ["directory"]


def test_dropped_files_are_closed(tmp_path: Path) -> None:
    path = tmp_path / "x"
    safetensors.numpy.save_file({"a": np.zeros((3, 3))}, path)
    for framework in ("np", "pt"):
        with ours.safe_open(path, framework) as opened:
            assert opened.get_tensor("a")[0, 0] == opened.get_slice("a")[:1][0, 0]
        del opened
        gc.collect()
        links = [os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
        assert str(path) not in links


SCRIPT = """
import sys
import numpy as np
import importlib
import safetensors.numpy
name, path = sys.argv[1:]
import importlib
ours = importlib.import_module("mfload.compat.safetensors." + name)
theirs = importlib.import_module("safetensors." + name)
from mfload.compat.safetensors import safe_open
held = {
    "f": np.arange(6, dtype=np.float32).reshape(2, 3), "d": np.arange(4.0), "i": np.arange(4),
    "h": np.arange(6, dtype=np.float16), "b": np.array([True, False]), "z": np.zeros((0, 2)),
    "c": np.ones(2, np.complex64), "s": np.array(3.0, np.float32),
    "u": np.arange(9, dtype=np.uint8),
}
if name == "tensorflow":
    del held["s"]  # The original fails to save it,
if name == "paddle":
    del held["z"]  # and to load that.
safetensors.numpy.save_file(held, path)
data = open(path, "rb").read()
wanted = theirs.load_file(path)
with safe_open(path, name) as opened:
    single = {key: opened.get_tensor(key) for key in opened.keys()}
    part = opened.get_slice("f")[:, 1:2]
    assert np.array_equal(np.asarray(part), held["f"][:, 1:2])
for found in (ours.load_file(path), ours.load(data), single):
    assert found.keys() == wanted.keys()
    for key, array in found.items():
        assert type(array) is type(wanted[key]), key
        assert array.dtype == wanted[key].dtype, (key, array.dtype, wanted[key].dtype)
        assert tuple(array.shape) == tuple(wanted[key].shape), key
        assert np.array_equal(np.asarray(array), np.asarray(wanted[key])), key
wanted = theirs.save(dict(single), {"a": "b"})
assert ours.save(single, {"a": "b"}) == wanted
ours.save_file(single, path, {"a": "b"})
assert open(path, "rb").read() == wanted
print("same")
"""


@pytest.mark.parametrize("name", ["flax", "tensorflow", "paddle"])
def test_frameworks_load_and_save_alike(name: str, tmp_path: Path) -> None:
    """Each in a process of its own: TensorFlow and Paddle don't live in one."""
    command = [sys.executable, "-c", SCRIPT, name, str(tmp_path / "x")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.stdout.endswith("same\n"), done.stderr[-2000:]


def test_tensors_on_a_gpu_lie_in_memory_of_pytorch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What PyTorch has set aside of it is free for its tensors alone."""
    device = FakeDevice()
    monkeypatch.setattr(device, "memory_info", lambda: MemoryInfo(1 << 10, 80 << 30))

    class Cached(torch_adapter.TorchAdapter):
        def pool(self, number: int) -> Pool:
            return Pool(70 << 30, "torch.cuda.empty_cache() gives it back")

    monkeypatch.setattr(
        ours.frameworks, "get", lambda name, place: Cached(torch.device("cpu"), device)
    )
    held = {"a": torch.randn(64, 32), "b": torch.randn(8)}
    safetensors.torch.save_file(held, tmp_path / "x.safetensors")
    found = ours_torch.load_file(tmp_path / "x.safetensors", device="cuda:0")
    assert all(torch.equal(found[name], each) for name, each in held.items())
    with ours.safe_open(tmp_path / "x.safetensors", "pt", "cuda:0") as opened:
        assert torch.equal(opened.get_tensor("a"), held["a"])
        assert torch.equal(opened.get_slice("a")[3:9], held["a"][3:9])
    del found
    device.assert_clean()
