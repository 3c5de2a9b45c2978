"""Lazy tensors in the hands of loaders that keep tensors: there they are read, once."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import distributed, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import mfload
from mfload.compat import serving
from mfload.frameworks.torch_lazy import LazyTensor

SHAPE = (6, 8)
LIKE = torch.arange(1.0, 49).reshape(SHAPE)
Act = Callable[[Any], Any]


class Weight(nn.Parameter):  # pyright: ignore[reportUntypedBaseClass]
    """A parameter as serving systems have them: its class takes more than data."""

    def __new__(cls, data: Any, **_: Any) -> Any:
        return super().__new__(cls, data, requires_grad=False)

    def __init__(self, data: Any, loader: str) -> None:  # pyright: ignore
        self.loader = loader


def _module(kind: str, shape: Any, device: str = "cpu") -> Any:
    made, like = nn.Module(), torch.zeros(shape, device=device)
    if kind == "parameter":
        made.w = nn.Parameter(like, requires_grad=False)
    else:
        made.register_buffer("w", like)
    return made


def _assign(kind: str, device: str) -> Act:
    def act(x: Any) -> Any:
        module = _module(kind, x.shape, device)
        module.load_state_dict({"w": x}, assign=True)
        return module.w

    return act


def _swapped(x: Any) -> Any:
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        module = _module("parameter", x.shape)
        module.load_state_dict({"w": x}, assign=True)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    return module.w


def _data(x: Any, target: Any = None) -> Any:
    target = nn.Parameter(torch.zeros(1)) if target is None else target
    target.data = x
    return target


def _within(mode: Any, act: Act) -> Act:
    def within(x: Any) -> Any:
        with mode():
            return act(x)

    return within


def _registered(x: Any) -> Any:
    module = nn.Module()
    module.register_buffer("w", x)
    return module.w


def _set_buffer(x: Any) -> Any:
    module = _module("buffer", x.shape)
    module.w = x
    return module.w


def _new_buffer(x: Any) -> Any:
    module = nn.Module()
    module.w = nn.Buffer(x, persistent=False)
    assert dict(module.named_buffers()).keys() == {"w"}
    assert not module.state_dict()
    return module.w


def _set_parameter(x: Any) -> Any:
    layer = nn.Linear(8, 6, bias=False)
    layer.weight = nn.Parameter(x)
    assert [*layer.parameters()] == [layer.weight]
    return layer.weight


def _vector(x: Any) -> Any:
    target = nn.Parameter(torch.zeros(x.shape))
    nn.utils.vector_to_parameters(x.reshape(-1), [target])
    return target


def _dcp(x: Any) -> Any:
    module = _module("parameter", x.shape)
    set_model_state_dict(module, {"w": x}, options=StateDictOptions(full_state_dict=True))
    return module.w


KEPT: dict[str, Act] = {
    "Parameter": lambda x: nn.Parameter(x, requires_grad=False),
    "Parameter with gradients": nn.Parameter,
    "Parameter of data": lambda x: nn.Parameter(x.data),
    "a class of parameters": lambda x: Weight(x, loader="rows"),
    "Buffer": _new_buffer,
    "register_buffer": _registered,
    "a buffer is set": _set_buffer,
    "a parameter is set": _set_parameter,
    "ParameterList": lambda x: nn.ParameterList([x])[0],
    "ParameterDict": lambda x: nn.ParameterDict({"w": x})["w"],
    "Embedding": lambda x: nn.Embedding.from_pretrained(x).weight,
    "data": _data,
    "data of data": lambda x: _data(x.data),
    "data of a tensor": lambda x: _data(x, torch.zeros(3)),
    "data without gradients": _within(torch.no_grad, _data),
    "data in inference mode": _within(torch.inference_mode, lambda x: _data(x, torch.zeros(3))),
    "a parameter's data in inference mode": _within(torch.inference_mode, _data),
    "Parameter in inference mode": _within(torch.inference_mode, nn.Parameter),
    "vector_to_parameters": _vector,
    "assigned parameter": _assign("parameter", "cpu"),
    "assigned to a meta parameter": _assign("parameter", "meta"),
    "assigned buffer": _assign("buffer", "cpu"),
    "assigned to a meta buffer": _assign("buffer", "meta"),
    "assigned by swapping": _swapped,
    "set_model_state_dict": _dcp,
    "requires_grad": lambda x: x.requires_grad_() * 1,
    "share_memory_": lambda x: x.share_memory_(),
    "resize_": lambda x: x.resize_(3),
}
COPIED: dict[str, Act] = {
    "set_": lambda x: torch.zeros(3).set_(x),
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
}
PARTS: dict[str, Act] = {
    "whole": lambda x: x,
    "rows": lambda x: x.narrow(0, 2, 3),
    "transposed": lambda x: x.t(),
}


class Opened:
    """A lazy tensor, and the report of its reads."""

    def __init__(self, path: Path) -> None:
        self.report = mfload.Report()
        self.stream = mfload.stream(path, "torch", lazy=True, report=self.report)
        self.lazy: Any = dict(self.stream)["w"]


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Opened]:
    save_file({"w": LIKE}, tmp_path / "w.safetensors")
    made = Opened(tmp_path)
    yield made
    made.stream.close()
    del made.lazy  # As the data of another tensor it has memory.


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("way", [*KEPT, *COPIED])
def test_what_is_kept_is_read_once(opened: Opened, way: str, part: str) -> None:
    """As the same loader keeps a plain tensor, without the file."""
    like = PARTS[part](LIKE.clone())
    lazy, act = PARTS[part](opened.lazy), {**KEPT, **COPIED}[way]
    wanted, kept = act(like), act(lazy)
    read = opened.report.read_bytes
    opened.stream.close()
    assert type(kept) is type(wanted)
    assert vars(kept).keys() == vars(wanted).keys()
    assert (kept.shape, kept.device) == (wanted.shape, wanted.device)
    assert (kept.requires_grad, kept.is_leaf) == (wanted.requires_grad, wanted.is_leaf)
    assert kept.data_ptr() != 0
    assert torch.equal(kept.detach(), wanted.detach())
    with torch.inference_mode():
        kept.add_(1)
    assert torch.equal(kept.detach(), wanted.detach() + 1)
    if way in KEPT:
        assert read == LIKE.nbytes * (3 if part == "rows" else 6) // 6
        assert opened.report.whole_reads == 0


def test_a_module_is_trained_with_what_it_keeps(opened: Opened) -> None:
    layer = nn.Linear(8, 6, bias=False)
    layer.weight = nn.Parameter(opened.lazy)
    layer(torch.ones(8)).sum().backward()
    assert torch.equal(layer.weight.grad, torch.ones(SHAPE))
    lazy = opened.lazy.detach().requires_grad_()
    assert (type(lazy), lazy.requires_grad, lazy.is_leaf) == (torch.Tensor, True, True)
    (torch.ones(8) * lazy).sum().backward()
    assert torch.equal(lazy.grad, torch.ones(SHAPE))
    target = torch.zeros(SHAPE)
    grown = opened.lazy.detach().requires_grad_()
    target.copy_(grown).sum().backward()
    assert torch.equal(grown.grad, torch.ones(SHAPE))


@pytest.mark.parametrize("placement", [Shard(0), Replicate()])
def test_a_dtensor_keeps_what_was_read(opened: Opened, placement: Any) -> None:
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        made = distribute_tensor(opened.lazy.detach(), mesh, [placement], src_data_rank=None)
        assert opened.report.read_bytes == LIKE.nbytes
        opened.stream.close()
        assert (made.device.type, type(made.to_local())) == ("cpu", torch.Tensor)
        assert torch.equal(made.full_tensor(), LIKE)
    finally:
        distributed.destroy_process_group()


def test_what_was_kept_leaves_the_tensor_lazy(opened: Opened) -> None:
    kept = [nn.Parameter(opened.lazy), _data(opened.lazy), _registered(opened.lazy)]
    for each in kept:
        each.data.zero_()
    assert type(opened.lazy) is LazyTensor
    assert not opened.lazy.requires_grad
    assert torch.equal(opened.lazy.clone(), LIKE)
    assert torch.equal(opened.lazy.narrow(0, 1, 2).clone(), LIKE[1:3])


def test_data_of_other_kinds_is_refused_as_before(opened: Opened) -> None:
    for other in (torch.zeros(3, device="meta"), torch.zeros(3).to_sparse()):
        with pytest.raises(RuntimeError, match="incompatible tensor type"):
            _data(other)
    module = nn.Linear(2, 2).to("meta").to(torch.bfloat16)
    assert module.weight.is_meta
    with pytest.raises(TypeError, match="cannot assign"):
        module.weight = opened.lazy
    with pytest.raises(RuntimeError, match="floating point"):
        nn.Parameter(opened.lazy.view(torch.int32))


def test_rows_of_serving_systems_are_kept(tmp_path: Path) -> None:
    """The small vectors too, which have memory that a model reloads from."""
    save_file({"norm": torch.ones(8), "w": LIKE}, tmp_path / "w.safetensors")
    weights, kept = serving.Weights({}), dict[str, Any]()
    for name, row in weights.rows(str(tmp_path)):
        kept[name] = nn.Parameter(row, requires_grad=False), _data(row), _registered(row)
        for each in kept[name]:
            each.data.mul_(2)
    for name, like in {"norm": torch.ones(8), "w": LIKE}.items():
        assert all(torch.equal(each.detach(), like * 2) for each in kept[name])
    assert weights.report.whole_reads == 0
