"""Each operation on a lazy tensor gives what it gives on the tensor itself, or the same error."""

from __future__ import annotations

import contextlib
import copy
import io
import math
import operator
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from safetensors.torch import save_file
from torch import nn

import mfload
from mfload.frameworks.torch_lazy import LazyTensor

Act = Callable[[Any], Any]
SHAPES = [(), (0, 4), (6,), (6, 4), (4, 6, 2), (1, 1), (2, 0, 3)]
DTYPES = [torch.float32, torch.bfloat16, torch.int32, torch.uint16, torch.uint8, torch.bool,
          torch.complex64, torch.float8_e4m3fn]  # fmt: skip
CASES = [(torch.float32, shape) for shape in SHAPES] + [
    (dtype, shape) for dtype in DTYPES[1:] for shape in [(6, 4), ()]
]

# Nothing is read, and the result is lazy, or a number that shape and dtype say.
PARTS: dict[str, Act] = {
    "narrow": lambda x: x.narrow(0, 1, 2),
    "narrow from the end": lambda x: x.narrow(-1, -2, 2),
    "narrow by names": lambda x: x.narrow(dim=0, start=1, length=1),
    "narrow to nothing": lambda x: x.narrow(0, 0, 0),
    "narrow at the end": lambda x: x.narrow(0, x.shape[0], 0),
    "narrow too far": lambda x: x.narrow(0, 0, 99),
    "torch.narrow": lambda x: torch.narrow(x, 0, 1, 1),
    "select": lambda x: x.select(0, 1),
    "select the last": lambda x: torch.select(x, -1, -1),
    "step": lambda x: x[::2],
    "step and ends": lambda x: x[1:5:3],
    "step of columns": lambda x: x[..., ::2].contiguous(),
    "step back": lambda x: x[::-1],
    "step of 0": lambda x: x[::0],
    "last": lambda x: x[-1],
    "slice from the end": lambda x: x[-3:-1],
    "slice past the end": lambda x: x[2:100],
    "slice of nothing": lambda x: x[4:1],
    "ellipsis": lambda x: x[...],
    "ellipsis and number": lambda x: x[..., 0],
    "all": lambda x: x[:],
    "empty tuple": lambda x: x[()],
    "number in each dim": lambda x: x[1, 2],
    "too many": lambda x: x[0, 0, 0, 0, 0],
    "number out of range": lambda x: x[99],
    "chunk": lambda x: x.chunk(2),
    "chunk of the last dim": lambda x: x.chunk(4, -1),
    "chunk by names": lambda x: x.chunk(chunks=3, dim=0),
    "chunk into none": lambda x: x.chunk(0),
    "torch.chunk": lambda x: torch.chunk(x, 2, 1),
    "split": lambda x: x.split(2),
    "split by sizes": lambda x: x.split([1, 3, 2]),
    "split by wrong sizes": lambda x: x.split([1, 3]),
    "split of the last dim": lambda x: x.split(3, -1),
    "split by names": lambda x: x.split(split_size=2, dim=0),
    "split by 0": lambda x: x.split(0),
    "torch.split": lambda x: torch.split(x, [2, 4]),
    "split_with_sizes": lambda x: x.split_with_sizes([2, 4]),
    "tensor_split": lambda x: x.tensor_split(4),
    "tensor_split at": lambda x: x.tensor_split([1, 3]),
    "tensor_split by a tensor": lambda x: x.tensor_split(torch.tensor([1, 3])),
    "tensor_split by names": lambda x: torch.tensor_split(x, sections=2),
    "parts of parts": lambda x: x.chunk(2)[0].narrow(-1, 1, 2)[1:, ::2].contiguous(),
    "None": lambda x: x[None],
    "hsplit": lambda x: x.hsplit(2),
    "unbind": lambda x: x.unbind(),
    "torch.unbind": lambda x: torch.unbind(x, 1),
    "view": lambda x: x.view(-1),
    "view in its shape": lambda x: x.view(x.shape),
    "reshape": lambda x: x.reshape(2, -1),
    "flatten": lambda x: x.flatten(),
    "t": lambda x: x.t(),
    "T": lambda x: x.T,
    "mT": lambda x: x.mT,
    "transpose": lambda x: x.transpose(0, 1),
    "part of a transpose": lambda x: x.t().narrow(0, 1, 2),
    "permute": lambda x: x.permute(*range(x.ndim)[::-1]),
    "movedim": lambda x: x.movedim(0, -1),
    "squeeze": lambda x: x.squeeze(),
    "unsqueeze": lambda x: x.unsqueeze(0),
    "expand": lambda x: x.expand(3, *x.shape),
    "iteration": lambda x: [*x],
    "unfold": lambda x: x.unfold(0, 2, 1),
    "part of a view": lambda x: x.view(-1).narrow(0, 1, 5),
    "parts of a turned one": lambda x: [y[1:] for y in x.t().unsqueeze(0).unbind(1)],
    "step of a turned one": lambda x: x.mT[..., ::2, 1:],
    "diagonal": lambda x: x.diagonal(),
    "merged and cut": lambda x: x.unsqueeze(1).flatten(0, -1).unflatten(0, (2, -1))[1, 2:7],
    "contiguous": lambda x: x.contiguous(),
    "data": lambda x: x.data,
    "detach": lambda x: x.detach(),
    "torch.detach": torch.detach,
    "as_tensor": torch.as_tensor,
    "torch.asarray": torch.asarray,
    "numel": lambda x: (x.numel(), x.nelement(), torch.numel(x), x.nbytes),
    "element_size": lambda x: (x.element_size(), x.itemsize, x.dtype),
    "storage": lambda x: x.untyped_storage().nbytes(),
    "empty_like": lambda x: (torch.empty_like(x).shape, torch.empty_like(x).device),
    "zeros_like": lambda x: torch.zeros_like(x).float().tolist(),
    "new_zeros": lambda x: (x.new_zeros(3).dtype, x.new_zeros(3).device, x.new_zeros(3).shape),
    "sizes": lambda x: (x.shape, x.size(), x.stride(), x.ndim, x.dim(), x.storage_offset()),
    "size of a dim": lambda x: (x.size(dim=-1), x.size(0), x.shape[-1]),
    "kinds": lambda x: (x.is_floating_point(), torch.is_complex(x), x.is_signed(), x.is_sparse),
    "places": lambda x: (x.device, x.is_cpu, x.is_cuda, x.is_meta, x.is_quantized, x.layout),
    "gradients": lambda x: (x.requires_grad, x.grad, x.grad_fn, x.is_leaf),
    "is a tensor": torch.is_tensor,
    "is a parameter": lambda x: (isinstance(x, nn.Parameter), hasattr(x, "weight_loader")),
    "hash": lambda x: {x: 1}[x],
    "len": len,
}  # fmt: skip

# All of it is read, as it must be.
NEEDS_ALL: dict[str, Act] = {
    "to a dtype": lambda x: x.to(torch.float32),
    "to the same": lambda x: x.to(x.dtype),
    "to a device": lambda x: x.to("cpu"),
    "to both": lambda x: x.to("cpu", torch.float64),
    "to a copy": lambda x: x.to(torch.float16, copy=True),
    "to another's": lambda x: x.to(torch.empty(1, dtype=torch.float32)),
    "to a format": lambda x: x.to(memory_format=torch.contiguous_format),
    "cpu": lambda x: x.cpu(),
    "clone": lambda x: x.clone(),
    "torch.clone": torch.clone,
    "numpy": lambda x: x.numpy(),
    "asarray": np.asarray,
    "np.array": np.array,
    "copy_ into rows": lambda x: _into(x, lambda t: t[1 : x.shape[0] + 1].copy_(x)),
    "param.data[…].copy_": lambda x: _into(x, lambda t: _parameter(t).data[: len(x)].copy_(x)),
    "param[n].copy_": lambda x: _into(x, lambda t: _parameter(t)[1].copy_(x[0])),
    "copy_ into a wider dtype": lambda x: torch.zeros(x.shape, dtype=torch.float64).copy_(x),
    "copy_ into more": lambda x: torch.zeros((2, *x.shape), dtype=x.dtype).copy_(x),
    "copy_ by halves": lambda x: [_zeros(each).copy_(each) for each in x.chunk(2)],
    "copy_ into columns": lambda x: _zeros(x)[:, 1:3].copy_(x[:, 1:3]),
    "copy_ of a step": lambda x: _zeros(x[::2]).copy_(x[::2]),
    "copy_ of a transpose": lambda x: torch.zeros(x.shape[::-1], dtype=x.dtype).copy_(x.t()),
    "copy_ by name": lambda x: _zeros(x).copy_(src=x, non_blocking=True),
    "copy_ of another shape": lambda x: torch.zeros(7, 7, 7).copy_(x),
    "Tensor.copy_": lambda x: torch.Tensor.copy_(_zeros(x), x),
    "param[…] =": lambda x: _into(x, lambda t: operator.setitem(t, slice(0, len(x)), x)),
    "param[n] =": lambda x: _into(x, lambda t: operator.setitem(t, 1, x[0])),
    "load_state_dict": lambda x: _state(x, assign=False),
    "load_state_dict, a buffer that stays lazy": lambda x: _state(x, assign=True),
}

# All of it is read, and counted.
OTHERS: dict[str, Act] = {
    "list": lambda x: x[[0, 1]],
    "tensor": lambda x: x[torch.tensor([1, 0])],
    "tensor of one number": lambda x: x[torch.tensor(1)],
    "array": lambda x: x[np.array([0, 1])],
    "number of NumPy": lambda x: x[np.int64(1)],
    "mask": lambda x: x[x == x],
    "list of bools": lambda x: x[[True, False]],
    "True": lambda x: x[True],
    "text": lambda x: x["a"],
    "narrow_copy": lambda x: x.narrow_copy(0, 1, 1),
    "view as bytes": lambda x: x.view(torch.uint8),
    "view_as": lambda x: x.view_as(x),
    "repeat": lambda x: x.repeat(2, *([1] * x.ndim)),
    "float": lambda x: x.float(),
    "half": lambda x: x.half(),
    "type": lambda x: x.type(torch.float32),
    "name of its type": lambda x: x.type(),
    "type_as": lambda x: torch.ones(2).type_as(x),
    "another to its dtype": lambda x: torch.ones(2).to(x),
    "contiguous in a format": lambda x: x.contiguous(memory_format=torch.channels_last),
    "view of real numbers": lambda x: x.real,
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "torch.save": lambda x: _saved(x),
    "allclose": lambda x: torch.allclose(x, x),
    "equal": lambda x: torch.equal(x, x.clone()),
    "==": lambda x: x == x,
    "other ==": lambda x: torch.ones(1) == x,
    "assert_close": lambda x: torch.testing.assert_close(x, x),
    "reversed": lambda x: [*reversed(x)],
    "in": lambda x: 1 in x,
    "bool": bool,
    "int": int,
    "float()": float,
    "index": operator.index,
    "item": lambda x: x.item(),
    "np.add": lambda x: np.add(x, 1),
    "dlpack": torch.from_dlpack,
    "torch.tensor": torch.tensor,
    "cat": lambda x: torch.cat([x, x]),
    "cat of parts": lambda x: torch.cat([*x.chunk(2)]),
    "cat by names": lambda x: torch.cat(tensors=(x, x), dim=1),
    "stack": lambda x: torch.stack([x, x]),
    "where": lambda x: torch.where(x == x, x, x),
    "add": lambda x: x + 1,
    "added to": lambda x: 1 + x,
    "neg": lambda x: -x,
    "invert": lambda x: ~x,
    "matmul": lambda x: x @ x.t(),
    "sum": lambda x: x.sum(),
    "max": lambda x: x.max(),
    "sort": lambda x: x.sort(),
    "einsum": lambda x: torch.einsum("ij,ij->i", x, x),
    "index_select": lambda x: x.index_select(0, torch.tensor([0, 1])),
    "atleast_2d": torch.atleast_2d,
    "pad": lambda x: nn.functional.pad(x, (0, 1)),
    "flip": lambda x: x.flip(0),
    "as_strided": lambda x: x.as_strided((2,), (1,)),
    "vmap": lambda x: torch.vmap(lambda y: y * 2)(x),
    "index_copy_": lambda x: _zeros(x).index_copy_(0, torch.arange(len(x)), x),
    "add_ to another": lambda x: _zeros(x).add_(x),
    "foreach": lambda x: _foreach(x),
}


def _zeros(x: Any) -> Any:
    return torch.zeros(x.shape, dtype=x.dtype)


def _into(x: Any, act: Act) -> Any:
    target = torch.zeros((x.shape[0] + 2, *x.shape[1:]), dtype=x.dtype)
    act(target)
    return target


def _parameter(x: Any) -> Any:
    return nn.Parameter(x, requires_grad=False)


def _saved(x: Any) -> Any:
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    return torch.load(file)


def _state(x: Any, *, assign: bool) -> Any:
    module = nn.Module()
    module.register_buffer("b", _zeros(x))
    module.load_state_dict({"b": x}, assign=assign)
    return module.b.clone()


def _foreach(x: Any) -> Any:
    target = _zeros(x)
    torch._foreach_copy_([target], [x])
    return target


def _stored(dtype: Any, shape: tuple[int, ...]) -> Any:
    width = torch.empty(0, dtype=dtype).element_size()
    count = int(np.prod(shape))
    numbers = torch.arange(1, 1 + count * width).to(torch.uint8)
    if dtype in (torch.float32, torch.complex64):
        numbers = torch.arange(1.0, 1 + count * width // 4).view(torch.uint8)
    if dtype is torch.bool:
        numbers = numbers % 2
    return numbers.view(dtype).reshape(shape)


@pytest.fixture(params=CASES, ids=[f"{str(d)[6:]} {list(s)}" for d, s in CASES])
def tensors(request: Any, tmp_path: Path) -> Iterator[tuple[Any, Any, mfload.Report]]:
    """A tensor, a lazy one of the same, and the report of reads."""
    like, report = _stored(*request.param), mfload.Report()
    save_file({"w": like}, tmp_path / "w.safetensors")
    with mfload.stream(tmp_path, "torch", lazy=True, report=report) as stream:
        ((_, lazy),) = stream
        yield like, lazy, report


def _outcome(act: Act, x: Any) -> Any:
    try:
        return act(x)
    except Exception as error:
        return error


def _plain(made: Any) -> Any:
    """What was made, in values that can be compared; lazy tensors are read."""
    if isinstance(made, torch.Tensor):
        read: Any = made.clone() if type(made) is LazyTensor else made
        assert type(read) in (torch.Tensor, nn.Parameter)
        assert (read.shape, read.dtype) == (made.shape, made.dtype)
        flat = torch.zeros(read.shape, dtype=read.dtype).copy_(read).reshape(-1)
        return read.dtype, read.shape, read.device, bytes(flat.untyped_storage())
    if isinstance(made, np.ndarray):
        return made.dtype, made.shape, made.tobytes()
    if isinstance(made, list | tuple) and not isinstance(made, torch.Size):
        return [_plain(each) for each in made]
    return type(made) if isinstance(made, Exception) else made


def _compare(act: Act, like: Any, lazy: Any) -> Any:
    expected, found = _outcome(act, like.clone()), _outcome(act, lazy)
    assert _plain(found) == _plain(expected), (expected, found)
    return found


def _each(acts: dict[str, Act], check: Callable[[Act], None]) -> None:
    wrong: dict[str, str] = {}
    for name, act in acts.items():
        try:
            check(act)
        except AssertionError as error:
            wrong[name] = str(error)[:120]
    assert not wrong, wrong


def test_parts_stay_lazy(tensors: Any) -> None:
    like, lazy, report = tensors

    def check(act: Act) -> None:
        before = report.read_bytes
        made = _outcome(act, lazy)
        assert report.read_bytes == before, "it was read"
        pieces = made if isinstance(made, list | tuple) else [made]
        assert all(type(x) is LazyTensor for x in pieces if isinstance(x, torch.Tensor))
        _compare(act, like, lazy)

    _each(PARTS, check)
    assert report.whole_reads == 0


@pytest.mark.filterwarnings("ignore:Casting complex values:UserWarning")
def test_what_needs_all_of_it(tensors: Any) -> None:
    like, lazy, report = tensors
    _each(NEEDS_ALL, lambda act: _compare(act, like, lazy))
    assert report.whole_reads == 0


@pytest.mark.filterwarnings("ignore")
def test_others_read_all_of_it_and_are_counted(tensors: Any) -> None:
    like, lazy, report = tensors

    def check(act: Act) -> None:
        before, counted = report.read_bytes, report.whole_reads
        made = _compare(act, like, lazy)
        # Of no items nothing is read, and to view bytes as bytes is no change.
        if not isinstance(made, Exception | LazyTensor) and like.numel():
            assert report.read_bytes > before, "it was not read"
            assert report.whole_reads > counted, "it was not counted"

    _each(OTHERS, check)


def _change(x: Any) -> Any:
    """Changes parts, and parts of parts, by all ways; returns what shows them."""
    turned, row = x.t(), x[1]
    row += 1
    turned.narrow(0, 1, 2).mul_(3)
    x.view(-1)[2:5] = 7
    torch.neg(row, out=row)
    torch._foreach_add_([x[2], x[3]], 2)
    row[0] = x[5, 1]
    del turned
    kept = x.clone()
    x.unsqueeze(0).unbind(1)[4].zero_()
    return kept, x.clone(), row + 0, x[2:].contiguous(), torch.equal(x, kept)


def test_changes_in_place_are_shared_by_all_views(tmp_path: Path) -> None:
    like = torch.arange(24, dtype=torch.float32).reshape(6, 4)
    save_file({"a": like.clone(), "w": like}, tmp_path / "w.safetensors")
    report = mfload.Report()
    lazy = dict(mfload.stream(tmp_path, "torch", lazy=True, report=report))
    expected = _change(like.clone())
    assert _plain(_change(lazy["w"])) == _plain(expected)
    assert report.read_bytes == 96  # Once; the other is as it was.
    target = torch.zeros(6, 4)
    assert torch.equal(target.copy_(lazy["w"]), expected[1])
    assert lazy["w"].data_ptr() == lazy["w"].view(-1).data_ptr()
    assert torch.equal(lazy["a"].clone(), like)
    assert torch.equal(dict(mfload.load(tmp_path, "torch"))["w"], like)


def test_a_copy_shares_nothing(tmp_path: Path) -> None:
    save_file({"w": torch.ones(4, 6)}, tmp_path / "w.safetensors")
    ((_, lazy),) = mfload.stream(tmp_path, "torch", lazy=True)
    copy = lazy[:, 1:3].contiguous()
    assert type(copy) is LazyTensor
    assert copy.is_contiguous()
    lazy.zero_()
    assert torch.equal(copy.clone(), torch.ones(4, 2))
    assert torch.equal(lazy[:, 1:3].clone(), torch.zeros(4, 2))


@given(st.data())
@settings(deadline=None, max_examples=300)
def test_any_view_is_read_and_copied(tmp_path_factory: Any, data: st.DataObject) -> None:
    """Of any view that PyTorch makes: its items, of raw tensors and of encoded ones."""
    sizes = st.lists(st.integers(1, 6), max_size=4)
    whole = torch.arange(math.prod(shape := data.draw(sizes))).reshape(shape)
    path = tmp_path_factory.mktemp("views") / data.draw(st.sampled_from(["w.safetensors", "w.npz"]))
    if path.suffix == ".npz":
        np.savez_compressed(path, w=whole.numpy())
    else:
        save_file({"w": whole}, path)
    report = mfload.Report()
    with mfload.stream(path, "torch", lazy=True, report=report) as stream:
        ((_, lazy),) = stream
        view: Any = whole
        for _ in range(data.draw(st.integers(0, 4))):
            dim = data.draw(st.integers(0, max(0, view.ndim - 1)))
            start, step = data.draw(st.integers(0, 2)), data.draw(st.integers(1, 3))
            acts: list[Act] = [
                lambda x, d=dim, a=start, b=step: x[(slice(None),) * d + (slice(a, None, b),)],
                lambda x, d=dim, a=start: x.select(d, a),
                lambda x, d=dim: x.movedim(d, 0),
                lambda x, d=dim: x.unsqueeze(d),
                lambda x: x.view(-1),
                lambda x, d=dim, b=step: x.unflatten(d, (-1, b)),
                lambda x, d=dim: x.unsqueeze(d).expand(*x.shape[:d], 2, *x.shape[d:]),
                lambda x: x.diagonal(),
                lambda x, d=dim: x.unfold(d, 2, 1),
                lambda x: x.contiguous(),
            ]
            act = data.draw(st.sampled_from(acts))
            with contextlib.suppress(RuntimeError, IndexError):
                made = act(view)
                if made.numel():
                    view, lazy = made, act(lazy)
        target = torch.zeros(view.shape, dtype=view.dtype)
        assert torch.equal(target.copy_(lazy), view)
        assert torch.equal(lazy + 0, view)


_PARTS: list[tuple[Act, int]] = [
    (lambda x: x.narrow(1, 2, 3), 4 * 3 * 8),
    (lambda x: x.permute(2, 0, 1)[1:3], 4 * 6 * 2),
    (lambda x: x.unsqueeze(0).unbind(1)[2], 6 * 8),
    (lambda x: x.view(4, 2, 3, 8)[:, 1], 4 * 3 * 8),
    (lambda x: x.view(4, 2, 3, 8).transpose(1, 2), 4 * 6 * 8),
    (lambda x: x.view(4, -1).narrow(0, 1, 2), 2 * 6 * 8),
    (lambda x: x.view(-1)[48:56], 8),
    (lambda x: x.view(-1)[44:60], 16),
    (lambda x: x.view(24, 8)[3:5], 2 * 8),
    (lambda x: x[..., ::2].mT[:, 1:], 4 * 6 * 3),
    (lambda x: x[1].unsqueeze(0).expand(5, 6, 8), 6 * 8),
    (lambda x: x[1].diagonal(), 6),
]


@pytest.mark.parametrize(("view", "items"), _PARTS)
def test_a_view_reads_no_more_than_it_holds(tmp_path: Path, view: Act, items: int) -> None:
    whole = torch.arange(4.0 * 6 * 8).view(4, 6, 8)
    save_file({"w": whole}, tmp_path / "w.safetensors")
    report = mfload.Report()
    with mfload.stream(tmp_path, "torch", lazy=True, report=report) as stream:
        ((_, lazy),) = stream
        assert torch.equal(view(lazy) + 0, view(whole))
    assert report.read_bytes - report.over_read_bytes == items * 4


def test_what_a_view_has_twice_is_held_once(tmp_path: Path) -> None:
    whole = torch.arange(4096.0).view(64, 64)
    save_file({"w": whole}, tmp_path / "w.safetensors")
    with mfload.stream(tmp_path, "torch", lazy=True) as stream:
        ((_, lazy),) = stream
        for view in (
            lambda x: x.view(-1).unfold(0, 64, 1),
            lambda x: x.unfold(1, 8, 1).unfold(0, 8, 1),
            lambda x: x.unfold(1, 8, 1).transpose(0, 2),
        ):
            read = view(lazy).read(False)
            assert torch.equal(read, view(whole))
            assert read.untyped_storage().nbytes() <= whole.nbytes


@pytest.mark.parametrize("kind", ["meta", "inference", "dtype", "no protocol"])
def test_modes_of_pytorch_do_not_matter(tmp_path: Path, kind: str) -> None:
    like = _stored(torch.bfloat16, (6, 4))
    save_file({"w": like}, tmp_path / "w.safetensors")
    modes: dict[str, Any] = {
        "meta": lambda: torch.device("meta"),
        "inference": torch.inference_mode,
        "dtype": torch.no_grad,
        "no protocol": torch._C.DisableTorchFunctionSubclass,
    }
    default = torch.get_default_dtype()
    ((_, lazy),) = mfload.stream(tmp_path, "torch", lazy=True)
    target = torch.zeros(2, 4, dtype=torch.bfloat16)
    try:
        torch.set_default_dtype(torch.float64 if kind == "dtype" else default)
        with modes[kind]():
            part, whole = lazy.narrow(0, 1, 2), lazy.clone()
            target.copy_(part)
    finally:
        torch.set_default_dtype(default)
    assert _plain(whole) == _plain(like)
    assert _plain(target) == _plain(like[1:3])
