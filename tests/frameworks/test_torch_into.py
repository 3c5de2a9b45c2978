"""`load_into` for modules of PyTorch, against `load_state_dict`."""

from __future__ import annotations

import copy
import gc
import io
import os
import tracemalloc
import warnings
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint
from conformance.suite import no_gpu
from devices.fake import FakeDevice
from devices.queues import MODES
from hypothesis import HealthCheck, given, settings, strategies as st

import mfload
from mfload import errors
from mfload.compat.dcp import HuggingFaceReader
from mfload.frameworks import torch_memory
from mfload.io import buffers, pread, probes
from mfload.options import OVERHEAD
from mfload.trees import filling
from mfload.trees.torch_modules import TorchModule

F8 = torch.float8_e4m3fn


class Net(torch.nn.Module):
    """Tied weights, statistics, a recurrent layer, buffers that are saved and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(40, 16)
        self.rnn = torch.nn.LSTM(16, 16)
        self.norm = torch.nn.BatchNorm1d(16)
        self.head = torch.nn.Linear(16, 40)
        self.head.weight = self.embed.weight
        self.register_buffer("steps", torch.arange(3))
        self.register_buffer("table", torch.arange(4.0), persistent=False)


def write(path: Path, module: Any, *without: str) -> Path:
    """The state of a module, a tied tensor once."""
    state = {name: each for name, each in module.state_dict().items() if name not in without}
    safetensors.torch.save_file({n: each.contiguous() for n, each in state.items()}, path)
    return path


def make(seed: int = 0, kind: Any = Net) -> Any:
    torch.manual_seed(seed)
    net = kind()
    with torch.no_grad():
        for each in net.state_dict().values():
            each.copy_(torch.randint(1, 9, each.shape) + seed)
    return net


def on_meta(kind: Any = Net) -> Any:
    with torch.device("meta"):
        return kind()


def same(left: Any, right: Any) -> bool:
    """Equal in dtype, shape and every bit."""
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    return raw(left) == raw(right)


def raw(tensor: Any) -> bytes:
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.detach().view(kinds[tensor.element_size()]).numpy().tobytes()


def check(net: Any, like: Any) -> None:
    ours, theirs = net.state_dict(), like.state_dict()
    assert list(ours) == list(theirs)
    assert [name for name in ours if not same(ours[name], theirs[name])] == []


@pytest.fixture(autouse=True)
def no_buffers_left() -> Iterator[None]:
    gc.collect()
    before = buffers.live_bytes()
    yield
    gc.collect()
    assert buffers.live_bytes() == before


def quietly(net: Any, path: Any, **given: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return mfload.load_into(net, path, **given)


# -- in place --------------------------------------------------------------------------------


def test_parameters_and_buffers_are_filled_where_they_lie(tmp_path: Path) -> None:
    path = write(tmp_path / "net.safetensors", make(1), "head.weight")
    net = make(2)
    held = net.state_dict(keep_vars=True)
    addresses = {name: each.data_ptr() for name, each in held.items()}
    report = mfload.Report()
    with mock.patch.object(torch.Tensor, "copy_", None):  # Nothing is copied.
        assert mfload.load_into(net, path, report=report) is net
    check(net, make(1))
    found = net.state_dict(keep_vars=True)
    assert all(found[name] is each for name, each in held.items())
    assert addresses == {name: each.data_ptr() for name, each in found.items()}
    nbytes = sum(each.nbytes for name, each in found.items() if name != "head.weight")
    assert (report.read_bytes, report.result_bytes, report.aliased_bytes) == (nbytes,) * 3
    assert report.framework == "torch"
    assert report.tensors == len(found) - 1


@pytest.mark.parametrize("engine", ["pread", "direct", "mmap"])
@pytest.mark.parametrize("allocator", ["mfload", "framework"])
def test_engines_and_allocators(tmp_path: Path, engine: Any, allocator: Any) -> None:
    path = write(tmp_path / "net.safetensors", make(1), "head.weight")
    options = mfload.Options(engine=engine, allocator=allocator)
    for net in (make(2), on_meta()):
        check(quietly(net, path, options=options), make(1))


def test_a_tie_is_filled_from_whichever_name_is_stored(tmp_path: Path) -> None:
    for absent in ("embed.weight", "head.weight"):
        path = write(tmp_path / f"{absent}.safetensors", make(1), absent)
        for net in (make(2), on_meta()):
            check(quietly(net, path), make(1))
            assert net.head.weight is net.embed.weight
    both = dict(make(1).state_dict())
    both["head.weight"] = both["head.weight"] + 1
    safetensors.torch.save_file(both, tmp_path / "both.safetensors")
    like = make(2)
    like.load_state_dict(both)  # Copies one after the other.
    for net in (make(2), on_meta()):
        report, net.table = mfload.Report(), torch.zeros(4)
        with pytest.warns(UserWarning, match="embed.weight and head.weight are one variable"):
            mfload.load_into(net, tmp_path / "both.safetensors", report=report)
        check(net, like)
        assert any("embed.weight was not loaded" in note for note in report.notes)
    both["embed.weight"] = both["head.weight"].clone()
    safetensors.torch.save_file(both, tmp_path / "both.safetensors")
    check(mfload.load_into(make(2), tmp_path / "both.safetensors"), like)  # No warning.


@pytest.mark.parametrize("shape", [(700_000,), (1, 700_000), (3, 5, 50_000), (900, 1000), (), (0,)])
@pytest.mark.parametrize("meta", [False, True])
def test_ties_of_any_size_are_compared(tmp_path: Path, shape: tuple[int, ...], meta: bool) -> None:
    one = torch.rand(shape)
    for last in (one.clone(), one + 1):
        safetensors.torch.save_file({"a": one, "b": last}, tmp_path / "tied.safetensors")
        net = torch.nn.Module()
        net.a = net.b = torch.nn.Parameter(torch.zeros(shape, device="meta" if meta else "cpu"))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            mfload.load_into(net, tmp_path / "tied.safetensors")
        assert len(caught) == (not torch.equal(one, last))
        assert torch.equal(net.a, last)
        assert net.a is net.b


def test_parameters_over_the_same_memory_are_one(tmp_path: Path) -> None:
    path = write(tmp_path / "net.safetensors", make(1), "head.weight")
    net = make(2)
    net.head.weight = torch.nn.Parameter(net.embed.weight.data)
    assert net.head.weight is not net.embed.weight
    check(mfload.load_into(net, path), make(1))


def test_autograd_knows_that_values_changed(tmp_path: Path) -> None:
    path = write(tmp_path / "net.safetensors", torch.nn.Linear(4, 4))
    layer = torch.nn.Linear(4, 4)
    made = layer(torch.ones(2, 4, requires_grad=True)).sum()
    mfload.load_into(layer, path)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        made.backward()


def test_dtypes_are_converted_as_they_land(tmp_path: Path) -> None:
    like = make(1).to(torch.float16)
    path = write(tmp_path / "net.safetensors", make(1), "head.weight")
    check(mfload.load_into(make(2).to(torch.float16), path), like)
    net = quietly(on_meta(), path, dtype="float16")
    assert net.head.weight.dtype == torch.float16
    with pytest.raises(errors.MappingError, match="holds F32 and keeps it, F16 is asked for"):
        mfload.load_into(make(2), path, dtype="float16")
    net = quietly(on_meta().half(), path, dtype="stored")
    check(net, make(1))


class Own(torch.Tensor):
    """A tensor of a class of its own, which lies where its maker chose."""


class Closed(Own):
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.copy_:
            raise NotImplementedError("no copies")
        return super().__torch_function__(func, types, args, kwargs or {})


def test_classes_of_tensors_are_copied_to_by_their_own_code(tmp_path: Path) -> None:
    state = {"w": torch.rand(3, 4).bfloat16()}
    safetensors.torch.save_file(state, tmp_path / "own.safetensors")
    module = torch.nn.Module()
    module.register_buffer("w", torch.zeros(3, 4, dtype=torch.bfloat16).as_subclass(Own))
    mfload.load_into(module, tmp_path / "own.safetensors")
    assert type(module.w) is Own
    assert same(module.w.as_subclass(torch.Tensor), state["w"])
    module.w = torch.zeros(3, 4, dtype=torch.bfloat16).as_subclass(Closed)
    with pytest.raises(errors.UnsupportedArrayError, match="Closed does not take values") as raised:
        mfload.load_into(module, tmp_path / "own.safetensors")
    assert raised.value.tensor == "w"


def test_inference_tensors(tmp_path: Path) -> None:
    path = write(tmp_path / "net.safetensors", make(1), "head.weight")
    with torch.inference_mode():
        net = make(2)
        net.embed.weight = torch.nn.Parameter(torch.zeros(16, 40).T, requires_grad=False)
        net.head.weight = net.embed.weight
    check(mfload.load_into(net, path), make(1))
    with torch.inference_mode():
        check(mfload.load_into(make(2), path), make(1))
        check(quietly(on_meta(), path), make(1))


# -- what is copied --------------------------------------------------------------------------


def strided(shape: tuple[int, ...], dtype: Any, seed: int) -> Any:
    """A tensor with gaps in its memory."""
    generator = torch.Generator().manual_seed(seed)
    wide = (*shape[:-1], shape[-1] * 2) if shape else (2,)
    raw = torch.randint(0, 100, wide, generator=generator).to(dtype)
    return raw[..., ::2] if shape else raw[1]


class Loose(torch.nn.Module):
    """Parameters of given shapes, dtypes and strides; some of them under two names."""

    def __init__(self, kinds: Any, seed: int) -> None:
        super().__init__()
        self.kinds = kinds
        for n, (shape, dtype, gaps, tied) in enumerate(kinds):
            made = strided(shape, dtype, seed + n)
            whole = made if gaps else made.contiguous()
            trains = dtype.is_floating_point and seed % 2 == 0
            self.register_parameter(f"w{n}", torch.nn.Parameter(whole, requires_grad=trains))
            if tied:
                self.register_parameter(f"tied{n}", getattr(self, f"w{n}"))


KINDS = st.lists(
    st.tuples(
        st.lists(st.integers(0, 5), max_size=3).map(tuple),
        st.sampled_from(
            [torch.float32, torch.bfloat16, torch.int64, torch.uint8, F8, torch.complex64]
        ),
        st.booleans(),
        st.booleans(),
    ),
    min_size=1,
    max_size=6,
)


@settings(max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(KINDS, st.booleans(), st.sampled_from(["auto", "framework"]), st.booleans())
def test_random_modules(
    tmp_path: Path, kinds: Any, meta: bool, allocator: Any, atomic: bool
) -> None:
    like, net = Loose(kinds, 0), Loose(kinds, 100)
    if meta:
        net = net.to("meta")
        for n, (*_, tied) in enumerate(kinds):
            if tied:
                net.register_parameter(f"tied{n}", getattr(net, f"w{n}"))
    trains = {name: each.requires_grad for name, each in net.named_parameters()}
    ties = [f"tied{n}" for n in range(len(kinds))]
    path = write(tmp_path / "random.safetensors", like, *ties)
    mfload.load_into(net, path, atomic=atomic, options=mfload.Options(allocator=allocator))
    check(net, like)
    assert trains == {name: each.requires_grad for name, each in net.named_parameters()}
    assert all(type(each) is torch.nn.Parameter for each in net.parameters())
    for n, (*_, tied) in enumerate(kinds):
        assert not tied or getattr(net, f"w{n}") is getattr(net, f"tied{n}")


def test_what_is_copied_waits_within_the_overhead(tmp_path: Path) -> None:
    nbytes = 32 << 20
    state = {f"w{n}": torch.rand(1024, nbytes // 4096) for n in range(4)}
    safetensors.torch.save_file(state, tmp_path / "large.safetensors")
    net = torch.nn.ParameterDict({name: each.T.contiguous().T for name, each in state.items()})
    expected = {name: each.clone() for name, each in state.items()}
    for each in net.parameters():
        each.data.zero_()
    for options, limit in ((mfload.Options(max_host_overhead="16MiB", threads=2), 16 << 20),
                           (None, OVERHEAD)):  # fmt: skip
        report = mfload.Report()
        gc.collect()
        tracemalloc.start()
        buffers.peak_bytes(reset=True)
        mfload.load_into(net, tmp_path / "large.safetensors", options=options, report=report)
        arrays = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert buffers.peak_bytes() + arrays <= limit
        assert all(torch.equal(net[name], each) for name, each in expected.items())
        assert report.read_bytes == 4 * nbytes


def test_the_overhead_that_an_error_names_is_enough(tmp_path: Path) -> None:
    state = {"w": torch.rand(64, 8192)}
    safetensors.torch.save_file(state, tmp_path / "wide.safetensors")
    net = torch.nn.ParameterDict({"w": torch.zeros(8192, 64).T})
    small = mfload.Options(max_host_overhead=60_000, threads=1)
    with pytest.raises(errors.UsageError, match="bytes or more") as raised:
        mfload.load_into(net, tmp_path / "wide.safetensors", options=small)
    enough = int(str(raised.value.expected).split()[0])
    del raised
    options = mfload.Options(max_host_overhead=enough, threads=1)
    mfload.load_into(net, tmp_path / "wide.safetensors", options=options)
    assert torch.equal(net["w"], state["w"])


def test_in_place_takes_no_second_copy(tmp_path: Path) -> None:
    state = {f"w{n}": torch.rand(1 << 20) for n in range(8)}
    safetensors.torch.save_file(state, tmp_path / "flat.safetensors")
    net = torch.nn.ParameterDict({name: torch.zeros(1 << 20) for name in state})
    report = mfload.Report()
    mfload.load_into(net, tmp_path / "flat.safetensors", report=report)
    assert report.peak_bytes <= 1 << 20
    assert all(torch.equal(net[name], each) for name, each in state.items())


# -- rules -----------------------------------------------------------------------------------


def test_rules_move_join_and_scale(tmp_path: Path) -> None:
    random = torch.Generator().manual_seed(0)
    state = {
        f"layers.{n}.{x}": torch.randn(6, 4, generator=random) for n in range(3) for x in "qkv"
    }
    state["fused"] = torch.randn(10, 4, generator=random).to(torch.bfloat16)
    safetensors.torch.save_file(state, tmp_path / "parts.safetensors")
    shapes = {"qkv": (3, 4, 18), "up": (4, 7), "down": (12,)}
    kinds = {"qkv": torch.float32, "up": torch.bfloat16, "down": torch.float32}
    mapping = {
        r"layers\.(\d)\.(q|k|v)": mfload.rule(
            "qkv", transpose=(1, 0), concat=(1, 2, ("q", "k", "v")), stack=1
        ),
        "fused": [
            mfload.rule(["up", None], split=(0, (7, 3)), transpose=(1, 0), scale=0.3),
            mfload.rule([None, "down"], split=(0, (7, 3)), reshape=(-1,)),
        ],
    }
    stack = [torch.cat([state[f"layers.{n}.{x}"].T for x in "qkv"], 1) for n in range(3)]
    fused = state["fused"].float()
    expected = {
        "qkv": torch.stack(stack),
        "up": (fused[:7].T * 0.3).to(torch.bfloat16),
        "down": fused[7:].reshape(-1),
    }
    for device in ("cpu", "meta"):
        net = torch.nn.ParameterDict(
            {name: torch.zeros(s, dtype=kinds[name], device=device) for name, s in shapes.items()}
        )
        mfload.load_into(net, tmp_path / "parts.safetensors", mapping=mapping)
        assert [name for name in shapes if not same(net[name], expected[name])] == []


def test_one_stored_tensor_fills_several(tmp_path: Path) -> None:
    safetensors.torch.save_file({"w": torch.rand(4, 6)}, tmp_path / "one.safetensors")
    net = torch.nn.ParameterDict({"a": torch.zeros(4, 6), "b": torch.zeros(6, 4)})
    mapping = {"w": ["a", mfload.rule("b", transpose=(1, 0))]}
    mfload.load_into(net, tmp_path / "one.safetensors", mapping=mapping)
    assert torch.equal(net["a"], net["b"].T)
    assert net["a"].any()


# -- names -----------------------------------------------------------------------------------


def test_everything_that_is_wrong_comes_at_once_and_nothing_is_read(tmp_path: Path) -> None:
    state = dict(make(1).state_dict())
    for name in ("head.weight", "rnn.weight_ih_l0"):
        del state[name]
    state |= {"more": torch.zeros(2), "head.bias": torch.zeros(41), "table": torch.zeros(4)}
    state["steps"] = torch.zeros(3)
    safetensors.torch.save_file(state, tmp_path / "bad.safetensors")
    net = make(2)
    with (
        mock.patch.object(pread.PreadReader, "fill", None),
        pytest.raises(errors.MappingError) as raised,
    ):
        mfload.load_into(net, tmp_path / "bad.safetensors")
    text = str(raised.value)
    assert "1 wrong shape, 1 wrong dtype, 1 missing, 2 extra" in text.replace("s, ", ", ") or text
    for part in (
        "wrong shape: head.bias: wants [40], but head.bias is [41]",
        "wrong dtype: steps: wants I64, stored is F32",
        "missing: rnn.weight_ih_l0 [64, 16]: nothing in the checkpoint goes there",
        "extra: more [2]: the target has no 'more'",
        "extra: table [4]: 'table' can't hold a tensor; it is a buffer that the module does not",
    ):
        assert part in text, text
    assert getattr(raised.value, "__notes__", []) == []
    check(net, make(2))


def test_lenient(tmp_path: Path) -> None:
    state = {"embed.weight": make(1).embed.weight.detach(), "other": torch.zeros(1)}
    safetensors.torch.save_file(state, tmp_path / "some.safetensors")
    like = make(2)
    like.load_state_dict(state, strict=False)
    report = mfload.Report()
    check(
        mfload.load_into(make(2), tmp_path / "some.safetensors", strict=False, report=report), like
    )
    assert any("has nothing for" in note for note in report.notes)
    assert any("no place for: other" in note for note in report.notes)
    with pytest.raises(errors.MappingError, match="nothing in the checkpoint goes into"):
        mfload.load_into(make(2), tmp_path / "some.safetensors", mapping={".*": None}, strict=False)


def test_old_files_without_counts_of_batches(tmp_path: Path) -> None:
    absent = ("head.weight", "norm.num_batches_tracked")
    path = write(tmp_path / "old.safetensors", make(1), *absent)
    net = make(2)
    mfload.load_into(net, path)
    assert net.norm.num_batches_tracked == make(2).norm.num_batches_tracked
    assert same(net.norm.weight, make(1).norm.weight)


# -- meta ------------------------------------------------------------------------------------


class Marked(torch.nn.Parameter):
    """A parameter of a class of its own, as projects have them."""


class Custom(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = Marked(torch.zeros(3, 4), requires_grad=False)
        self.w.loader = "shards"
        self.b = torch.nn.Parameter(torch.zeros(4))
        self.register_buffer("table", torch.ones(5), persistent=False)


def test_what_lies_on_meta_gets_memory(tmp_path: Path) -> None:
    path = write(tmp_path / "net.safetensors", make(1), "head.weight")
    net = on_meta()
    with pytest.warns(UserWarning, match="1 tensor without memory: table") as raised:
        mfload.load_into(net, path)
    assert raised[0].filename == __file__
    check(net, make(1))
    net.rnn(torch.zeros(2, 3, 16))  # Its flat weights are the new ones.
    net.head(torch.zeros(2, 16)).sum().backward()
    assert net.head.weight.grad is not None
    some = {"embed.weight": net.embed.weight.detach()}
    safetensors.torch.save_file(some, tmp_path / "some.safetensors")
    with pytest.warns(UserWarning, match="without memory: rnn.weight_ih_l0, "):
        mfload.load_into(on_meta(), tmp_path / "some.safetensors", strict=False)


def test_classes_and_attributes_of_parameters_stay(tmp_path: Path) -> None:
    path = write(tmp_path / "own.safetensors", make(1, Custom))
    net = quietly(on_meta(Custom), path)
    assert type(net.w) is Marked
    assert net.w.loader == "shards"
    assert (net.w.requires_grad, net.b.requires_grad) == (False, True)
    check(net, make(1, Custom))


def test_a_module_that_is_half_on_meta(tmp_path: Path) -> None:
    path = write(tmp_path / "net.safetensors", make(1), "head.weight")
    net = make(2)
    net.rnn.to("meta")
    check(mfload.load_into(net, path), make(1))


# -- failures --------------------------------------------------------------------------------


@pytest.mark.parametrize("rules", [False, True])
def test_a_failure_in_the_middle_says_what_may_be_half_filled(tmp_path: Path, rules: bool) -> None:
    path = write(tmp_path / "net.safetensors", make(1), "head.weight")
    mapping = {"embed.weight": mfload.rule("embed.weight", scale=2.0)} if rules else {}
    mapping |= {r"((?!embed).*)": r"\1"} if rules else {r"(.*)": r"\1"}
    for net, held in ((make(2), True), (on_meta(), False)):
        with (
            mock.patch.object(
                pread.PreadReader, "fill", mock.Mock(side_effect=OSError(5, "Input/output error"))
            ),
            pytest.raises(errors.ReadError) as raised,
        ):
            mfload.load_into(net, path, mapping=mapping)
        notes = getattr(raised.value, "__notes__", [])
        assert len(notes) == held
        assert not held or "of the module in place (" in notes[0]
        assert not held or "some may hold new values" in notes[0]
        assert held or all(each.is_meta for each in net.state_dict().values())
        del raised


RULES = {"embed.weight": mfload.rule("embed.weight", scale=2.0), r"((?!embed).*)": r"\1"}


def failing_at(call: int) -> Any:
    """The reads of a disk that fails at one of them."""
    true, seen = os.preadv, []

    def preadv(*given: Any) -> int:
        seen.append(1)
        if len(seen) > call:
            raise OSError(5, "Input/output error")
        return true(*given)

    return mock.patch.object(os, "preadv", preadv)


@pytest.mark.parametrize("mapping", [None, RULES])
def test_an_atomic_load_leaves_the_old_values_or_the_new(tmp_path: Path, mapping: Any) -> None:
    paths = [tmp_path / f"{n}.safetensors" for n in range(4)]
    state = [(name, each) for name, each in make(1).state_dict().items() if name != "head.weight"]
    for n, path in enumerate(paths):  # A disk may fail at each of them.
        safetensors.torch.save_file(dict(state[n::4]), path)
    like, net = mfload.load_into(make(), paths, mapping=mapping), make(2)
    net.rnn.weight_hh_l0.data = net.rnn.weight_hh_l0.data.T.contiguous().T  # With gaps.
    held = {n: (id(each), each.data_ptr()) for n, each in net.state_dict(keep_vars=True).items()}
    old = {name: each.clone() for name, each in net.state_dict().items()}
    options = mfload.Options(engine="pread", threads=1)
    for call in range(4):
        with failing_at(call), pytest.raises(errors.ReadError) as caught:
            mfload.load_into(net, paths, mapping=mapping, atomic=True, options=options)
        assert not hasattr(caught.value, "__notes__")
        del caught
        assert all(same(old[name], each) for name, each in net.state_dict().items())
        assert not hasattr(net, "mfload_torn")
    mfload.load_into(net, paths, mapping=mapping, atomic=True, options=options)
    check(net, like)
    now = net.state_dict(keep_vars=True)
    assert held == {name: (id(each), each.data_ptr()) for name, each in now.items()}


@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_while_an_atomic_load_ends(tmp_path: Path, times: int) -> None:
    path = write(tmp_path / "net.safetensors", make(1), "head.weight")
    net, true, calls = make(2), TorchModule.put, []

    def put(*given: Any) -> None:
        calls.append(1)
        if len(calls) in (3, 5)[:times]:
            raise KeyboardInterrupt
        true(*given)

    with mock.patch.object(TorchModule, "put", put), pytest.raises(KeyboardInterrupt) as caught:
        mfload.load_into(net, path, atomic=True)
    assert hasattr(net, "mfload_torn") == hasattr(caught.value, "__notes__") == (times == 2)
    if times == 1:
        check(net, make(1))


def test_what_an_atomic_load_needs(tmp_path: Path) -> None:
    path = write(tmp_path / "net.safetensors", make(1), "head.weight")
    large = write(tmp_path / "large.safetensors", torch.nn.Linear(999, 500))
    nbytes = 4 * 500 * 1000
    less = mfload.Options(max_host_overhead=nbytes - 1)
    with pytest.raises(errors.MemoryLimitError, match="atomic=True"):
        mfload.load_into(torch.nn.Linear(999, 500), large, atomic=True, options=less)
    report, enough = mfload.Report(), mfload.Options(max_host_overhead=nbytes)
    mfload.load_into(torch.nn.Linear(999, 500), large, atomic=True, report=report, options=enough)
    assert report.peak_bytes >= nbytes
    for wrong in (1, None, "yes"):
        with pytest.raises(errors.UsageError, match="atomic is invalid"):
            mfload.load_into(make(2), path, atomic=wrong)  # pyright: ignore
    hooked = make(2)
    hooked.rnn.register_load_state_dict_pre_hook(lambda *_: None)
    with pytest.raises(errors.UsageError, match=r"load hooks.*found: rnn"):
        mfload.load_into(hooked, path, atomic=True)
    check(hooked, make(2))
    check(mfload.load_into(make(2), path, atomic=True), make(1))
    check(quietly(on_meta(), path, atomic=True), make(1))
    check(mfload.restore(path, make(2), atomic=True), make(1))


def test_a_torn_module_is_marked_until_it_is_loaded(tmp_path: Path) -> None:
    path = write(tmp_path / "net.safetensors", make(1), "head.weight")
    net, part = (
        make(2),
        write(tmp_path / "part.safetensors", torch.nn.ModuleDict({"rnn": make().rnn})),
    )
    options = mfload.Options(engine="pread", threads=1)
    with (
        mock.patch.object(pread, "_ROWS_A_MAP", 1 << 60),
        failing_at(0),
        pytest.raises(errors.ReadError),
    ):
        mfload.load_into(net, path, options=options)
    assert "embed.weight" in net.mfload_torn
    assert copy.deepcopy(net).mfload_torn == net.mfload_torn
    assert list(net.state_dict()) == list(make().state_dict())
    for call in (
        lambda: mfload.save(net, tmp_path / "torn.safetensors"),
        lambda: mfload.publish(net, model="m"),
    ):
        with pytest.raises(errors.UsageError, match="old and new values in the module"):
            call()
    quietly(net, part, strict=False)
    assert not any(name.startswith("rnn") for name in net.mfload_torn)
    assert "embed.weight" in net.mfload_torn
    mfload.load_into(net, path)
    assert not hasattr(net, "mfload_torn")
    mfload.save(net, tmp_path / "whole.safetensors")


def test_a_torn_part_of_a_module_is_torn_in_the_whole(tmp_path: Path) -> None:
    net, path = make(2), write(tmp_path / "net.safetensors", make(1), "head.weight")
    part = write(tmp_path / "part.safetensors", make(1).rnn)
    fails = mock.patch.object(filling.Filling, "finish", side_effect=OSError)
    for owner, file in ((net.rnn, part), (net, path)):
        with fails, pytest.raises(OSError):
            mfload.load_into(owner, file)
        with pytest.raises(errors.UsageError, match=r"old and new values in the module.*\brnn\."):
            mfload.save(net, tmp_path / "torn.safetensors")
    mfload.load_into(net, path)
    mfload.save(net.rnn, tmp_path / "part.again.safetensors")
    mfload.save(net, tmp_path / "whole.safetensors")


def test_arguments_that_are_for_jax_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "net.safetensors", torch.nn.Linear(4, 4))
    layer = torch.nn.Linear(4, 4)
    for wrong in (
        {"mesh": object()},
        {"shardings": [("w", 0)]},
        {"unmatched": "error"},
        {"logical_axis_rules": []},
    ):
        (name,) = wrong
        with pytest.raises(errors.UsageError, match=f"{name}= is for trees of JAX") as raised:
            mfload.load_into(layer, path, **wrong)
        assert "fully_shard" in str(raised.value)
    for wrong in ({"strict": 1}, {"options": 3}, {"report": 4}, {"dtype": "nope"}):
        with pytest.raises(errors.UsageError):
            mfload.load_into(layer, path, **wrong)  # pyright: ignore
    with pytest.raises(errors.SourceNotFoundError):
        mfload.load_into(layer, tmp_path / "none.safetensors")


def test_what_can_not_be_filled_is_named(tmp_path: Path) -> None:
    lazy = torch.nn.Module()
    lazy.weight = torch.nn.UninitializedParameter()
    path = write(tmp_path / "net.safetensors", torch.nn.Linear(4, 4))
    with pytest.raises(errors.MappingError, match="not initialised yet: run the module once"):
        mfload.load_into(lazy, path)
    wide = torch.nn.Linear(4, 4)
    wide.weight = torch.nn.Parameter(torch.zeros(1, 4).expand(4, 4))
    with pytest.raises(errors.MappingError, match="an expanded tensor"):
        mfload.load_into(wide, path)
    for shape, strides in (((4, 4), (2, 1)), ((4, 4), (1, 1)), ((4, 4), (1, 3))):
        wide.weight = torch.nn.Parameter(torch.zeros(40).as_strided(shape, strides))
        with pytest.raises(errors.MappingError, match="several items share their memory") as raised:
            mfload.load_into(wide, path)
        assert f"(strides {list(strides)})" in str(raised.value)
        assert not wide.weight.any()
    with pytest.raises(errors.UsageError, match="exchange='once' needs other processes"):
        mfload.load_into(lazy, path, options=mfload.Options(exchange="once"))
    freed = torch.nn.Linear(4, 4)
    freed.weight.untyped_storage().resize_(0)
    with pytest.raises(errors.MappingError, match="memory was given back"):
        mfload.load_into(freed, path)


def test_a_damaged_file_is_refused_before_the_module_is_touched(tmp_path: Path) -> None:
    path = write(tmp_path / "net.safetensors", make(1), "head.weight")
    raw = path.read_bytes()
    path.write_bytes(raw[: len(raw) // 2])
    net = make(2)
    with pytest.raises(errors.HeaderError):
        mfload.load_into(net, path)
    check(net, make(2))


def test_a_load_does_not_ask_for_memory_that_is_there(tmp_path: Path) -> None:
    state = {"w": torch.rand(8 << 20)}
    safetensors.torch.save_file(state, tmp_path / "flat.safetensors")
    room = mock.Mock(return_value=(1 << 20, "machine"))
    with mock.patch.object(probes, "memory_room", room):
        held = torch.nn.ParameterDict({"w": torch.zeros(8 << 20)})
        mfload.load_into(held, tmp_path / "flat.safetensors")
        assert torch.equal(held["w"], state["w"])
        bare = torch.nn.ParameterDict({"w": torch.zeros(8 << 20, device="meta")})
        with pytest.raises(errors.MemoryLimitError):
            mfload.load_into(bare, tmp_path / "flat.safetensors")


def test_stored_in_pieces_and_packed(tmp_path: Path) -> None:
    """Files of NumPy's, whose arrays may be in another order; two elements in a byte."""
    array = np.asfortranarray(np.arange(24.0, dtype=np.float32).reshape(4, 6))
    np.savez(tmp_path / "w.npz", w=array)
    net = torch.nn.ParameterDict({"w": torch.zeros(4, 6)})
    mfload.load_into(net, tmp_path / "w.npz")
    assert torch.equal(net["w"], torch.from_numpy(np.ascontiguousarray(array)))
    if hasattr(torch, "float4_e2m1fn_x2"):
        whole = torch.randint(0, 255, (4, 3), dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
        safetensors.torch.save_file({"w": whole}, tmp_path / "f4.safetensors")
        for target in (torch.zeros(4, 3, dtype=torch.uint8).view(whole.dtype),
                       torch.zeros(4, 6, dtype=torch.uint8)[:, ::2].view(whole.dtype),
                       torch.empty_like(whole, device="meta")):  # fmt: skip
            module = torch.nn.Module()
            module.register_buffer("w", target)
            mfload.load_into(module, tmp_path / "f4.safetensors")
            assert same(module.w, whole)


def test_restore_fills_a_module_in_place(tmp_path: Path) -> None:
    module, path = torch.nn.Linear(3, 2), tmp_path / "x.safetensors"
    safetensors.torch.save_file({"weight": torch.ones(2, 3), "bias": torch.ones(2)}, path)
    assert mfload.restore(path, module) is module
    assert module.weight.sum() == 6


@pytest.mark.parametrize("mode", MODES)
def test_a_module_on_a_device_is_filled_in_place(
    tmp_path: Path, mode: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = FakeDevice(mode=mode)
    monkeypatch.setattr(torch_memory, "device_of", lambda _: device)
    like, net = make(1), make(2)
    path = write(tmp_path / "m.safetensors", like, "head.weight")
    placed = {name: each.data_ptr() for name, each in net.state_dict().items()}
    mfload.load_into(net, path)
    check(net, like)
    assert {name: each.data_ptr() for name, each in net.state_dict().items()} == placed
    tied = like.head.weight.nbytes
    assert device.nbytes["copy_in"] == sum(t.nbytes for t in like.state_dict().values()) - tied
    device.assert_clean()


def write_npz(path: Path, arrays: dict[str, Any], *deflated: str) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, array in arrays.items():
            held = io.BytesIO()
            np.save(held, array)
            how = zipfile.ZIP_DEFLATED if name in deflated else zipfile.ZIP_STORED
            archive.writestr(f"{name}.npy", held.getvalue(), how)
    return path


@pytest.mark.parametrize("way", ["load_into", "dcp"])
@pytest.mark.parametrize(
    ("fortran", "deflated"),
    [(True, []), (False, ["weight"]), (True, ["weight"]), (False, ["weight", "bias"])],
)
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_what_the_host_puts_together_is_copied_onto_a_device(
    tmp_path: Path, way: str, fortran: bool, deflated: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    device = FakeDevice()
    monkeypatch.setattr(torch_memory, "device_of", lambda _: device)
    weight = np.arange(64 * 40, dtype=np.float32).reshape(40, 64).T
    given = {"weight": weight if fortran else weight.copy("C"), "bias": np.arange(64.0, dtype="f")}
    path = write_npz(tmp_path / "w.npz", given, *deflated)
    net = torch.nn.Linear(40, 64).requires_grad_(False)
    state = dict(net.state_dict())
    if way == "load_into":
        mfload.load_into(net, path)
    else:
        torch.distributed.checkpoint.load(state, storage_reader=HuggingFaceReader(path))
    assert torch.equal(net.weight, torch.tensor(weight))
    assert torch.equal(net.bias, torch.tensor(given["bias"]))
    assert device.nbytes["copy_in"] == (0 if "bias" in deflated else net.bias.nbytes)
    device.assert_clean()


@pytest.mark.gpu
def test_a_module_on_a_gpu(tmp_path: Path) -> None:
    if reason := no_gpu():
        pytest.skip(reason)
    like, net = make(1), make(2).cuda()
    path = write(tmp_path / "m.safetensors", like, "head.weight")
    mfload.load_into(net, path)
    check(net.cpu(), like)


def test_a_module_is_saved_as_its_state_and_comes_back(tmp_path: Path) -> None:
    net, other = make(1), make(2)
    saved = mfload.save(net, tmp_path / "net.safetensors")
    assert any("embed.weight, head.weight" in note for note in saved.notes)
    loaded = mfload.load(tmp_path / "net.safetensors", "torch")
    assert loaded.keys() == net.state_dict().keys()
    del loaded
    mfload.load_into(other, tmp_path / "net.safetensors")
    assert other.head.weight is other.embed.weight
    for name, tensor in net.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[name]), name


def test_shards_that_nothing_is_taken_from_may_be_missing(tmp_path: Path) -> None:
    full = {f"{n}.weight": torch.full((4, 4), float(n)) for n in range(3)}
    mfload.save(full, tmp_path / "model.safetensors", max_shard_size=64)
    with mfload.open(tmp_path) as opened:
        os.unlink(opened.file_of(opened.info("1.weight")))
    report = mfload.Report()
    for more in ({"mapping": {r"([02]\..*)": r"\1", ".*": None}}, {"strict": False}):
        module = torch.nn.ModuleDict({n: torch.nn.Linear(4, 4, bias=False) for n in "02"})
        mfload.load_into(module, tmp_path, report=report, **more)
        assert all(torch.equal(each, full[name]) for name, each in module.state_dict().items())
        assert any("a shard is missing" in note for note in report.notes)
    module = torch.nn.ModuleDict({n: torch.nn.Linear(4, 4, bias=False) for n in "012"})
    for strict in (True, False):
        with pytest.raises(errors.ShardNotFoundError, match="shards are missing") as caught:
            mfload.load_into(module, tmp_path, strict=strict)
        assert caught.value.tensor == "1.weight"


def test_names_leave_the_rest_as_it_is(tmp_path: Path) -> None:
    module = torch.nn.Linear(2, 2)
    before = module.bias.detach().clone()
    mfload.save({"weight": np.ones((2, 2), "f4"), "bias": np.ones(2, "f4")}, tmp_path / "a")
    mfload.load_into(module, tmp_path / "a", names=iter(["weight"]))
    assert module.weight.sum().item() == 4
    assert torch.equal(module.bias, before)
