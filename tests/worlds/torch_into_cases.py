"""What each process does in a test of modules whose parameters are sharded (see `launching`).

python torch_into_cases.py RANK COUNT PORT DIRECTORY CASE…
"""

from __future__ import annotations

import copy
import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import safetensors.torch
import torch
import torch.distributed as dist
import world
from calls import as_options
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from world import World, io_error

import mfload
from mfload.mesh import base

WIDTH, HIDDEN = 64, 152


class Block(torch.nn.Module):
    """Two layers, a norm, and a table that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.up = torch.nn.Linear(WIDTH, HIDDEN)
        self.down = torch.nn.Linear(HIDDEN, WIDTH, bias=False)
        self.register_buffer("count", torch.zeros(3, dtype=torch.int64))

    def forward(self, x: Any) -> Any:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Net(torch.nn.Module):
    """Blocks, and a head that is tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(51, WIDTH)
        self.blocks = torch.nn.ModuleList([Block() for _ in range(2)])
        self.head = torch.nn.Linear(WIDTH, 51, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Any) -> Any:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Hooked(Net):
    """Blocks that load names from before, and rows in another order; one is told of afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].register_load_state_dict_pre_hook(self._before)
        self.blocks[0].told = self.blocks[1].told = 0
        self.blocks[1].register_load_state_dict_post_hook(self._after)

    @staticmethod
    def _before(_: Any, state: Any, prefix: str, *more: Any) -> None:
        state[f"{prefix}up.weight"] = state.pop(f"{prefix}fc.weight").flip(0)

    @staticmethod
    def _after(module: Any, _: Any) -> None:
        module.told += 1


def fsdp(net: Any, mesh: Any) -> None:
    for block in net.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(net, mesh=mesh)


def tensor_parallel(net: Any, mesh: Any) -> None:
    for block in net.blocks:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def both(net: Any, mesh: Any) -> None:
    tensor_parallel(net, mesh["tp"])
    fsdp(net, mesh["dp"])


def hybrid(net: Any, mesh: Any) -> None:
    """Replicated over the first dim of the mesh, sharded over the second."""
    fsdp(net, mesh)


def distributed(net: Any, mesh: Any) -> None:
    """All parameters by their last dim."""

    def split(_: str, module: Any, on: Any) -> None:
        for name, each in list(module.named_parameters(recurse=False)):
            placements = [Shard(each.dim() - 1)] if each.dim() > 1 else [Replicate()]
            made = torch.distributed.tensor.distribute_tensor(each.detach(), on, placements)
            setattr(module, name, torch.nn.Parameter(made))

    distribute_module(net, mesh, split)
    net.head.weight = net.embed.weight


def mesh_for(count: int, how: str) -> Any:
    if how in ("both", "hybrid"):
        return init_device_mesh("cpu", (2, count // 2), mesh_dim_names=("dp", "tp"))
    return init_device_mesh("cpu", (count,), mesh_dim_names=("dp",))


def sharded(count: int, how: str, *, meta: bool = False) -> Any:
    with torch.device("meta" if meta else "cpu"):
        net = Net()
    globals()[how](net, mesh_for(count, how))
    return net


def values(here: World, how: str, where: str, exchange: str, atomic: str = "") -> dict[str, Any]:
    """Loads, and compares with PyTorch's own way of loading a whole state dict."""
    net = sharded(here.count, how, meta=where == "meta")
    before = dict(net.named_parameters())
    report = mfload.Report()
    with here.counted():
        found = mfload.load_into(
            net,
            here.directory / "net.safetensors",
            report=report,
            atomic=bool(atomic),
            **as_options({"timeout": 30, "exchange": exchange, "engine": "pread"}),
        )
    assert found is net
    like = sharded(here.count, how)
    state = safetensors.torch.load_file(here.directory / "net.safetensors")
    state["head.weight"] = state["embed.weight"]
    set_model_state_dict(like, state, options=StateDictOptions(full_state_dict=True))
    compare(net, like)
    assert net.head.weight is net.embed.weight
    if where == "held":
        assert all(p is before[name] for name, p in net.named_parameters())
    tokens = torch.arange(12).reshape(3, 4) * 4
    if how != "distributed":
        ours, theirs = net(tokens), like(tokens)
        assert torch.equal(ours, theirs)
        ours.sum().backward()
        assert net.blocks[0].up.weight.grad is not None
    mine = sum(part(each).nbytes for each in dict(net.state_dict()).values())
    mine -= part(net.head.weight).nbytes
    return {"counted": here.read, "read": report.read_bytes, "mine": mine,
            "over": report.over_read_bytes, "exchanged": report.exchanged_bytes}  # fmt: skip


def compare(net: Any, like: Any) -> None:
    ours, theirs = net.state_dict(), like.state_dict()
    assert list(ours) == list(theirs)
    for name, mine in ours.items():
        his = theirs[name]
        assert type(mine) is type(his), name
        assert mine.shape == his.shape, name
        if isinstance(mine, DTensor):
            assert mine.placements == his.placements, name
            assert mine.device_mesh == his.device_mesh, name
            assert mine.stride() == his.stride(), name
        assert torch.equal(part(mine), part(his)), name
    for (name, mine), (_, his) in zip(net.named_parameters(), like.named_parameters(), strict=True):
        assert mine.requires_grad == his.requires_grad, name
        assert type(mine) is type(his), name


def part(tensor: Any) -> Any:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def hooked(here: World, how: str, where: str, exchange: str) -> dict[str, Any]:
    """Against `load_state_dict` of a module that is not sharded."""
    with torch.device("meta" if where == "meta" else "cpu"):
        net = Hooked()
    globals()[how](net, mesh_for(here.count, how))
    path = here.directory / "hooked.safetensors"
    mfload.load_into(net, path, **as_options({"timeout": 30, "exchange": exchange}))
    like = Hooked()
    state = safetensors.torch.load_file(path)
    like.load_state_dict(state | {"head.weight": state["embed.weight"]})
    for name, each in net.state_dict().items():
        whole = each.full_tensor() if isinstance(each, DTensor) else each
        assert torch.equal(whole, like.state_dict()[name]), name
    assert [block.told for block in net.blocks] == [0, 1]
    assert all(
        type(each) is torch.nn.Parameter or isinstance(each, DTensor) for each in net.parameters()
    )
    tokens = torch.arange(12).reshape(3, 4) * 4
    ours, theirs = net(tokens), like(tokens)
    assert torch.allclose(ours, theirs, atol=1e-5)
    ours.sum().backward()
    assert net.blocks[0].up.weight.grad is not None
    return {}


def again(here: World) -> dict[str, Any]:
    """Loads into a module that has run: what FSDP2 has gathered is not what is filled."""
    net, like = sharded(here.count, "fsdp"), sharded(here.count, "fsdp", meta=True)
    tokens = torch.arange(12).reshape(3, 4) * 4
    net(tokens).sum().backward()
    path = here.directory / "net.safetensors"
    for each in (net, like):
        mfload.load_into(each, path, **as_options({"timeout": 30}))
    compare(net, like)
    assert torch.equal(net(tokens), like(tokens))
    return {}


def strided(here: World) -> dict[str, Any]:
    """Which placements FSDP2 over tensor parallelism makes."""
    net = sharded(here.count, "both")
    return {"placements": str(net.blocks[0].up.weight.placements)}


def mapped(here: World, exchange: str) -> dict[str, Any]:
    """Transposed, joined, in another dtype; uneven shards, in many batches."""
    net = torch.nn.Linear(90, 70, bias=False)
    fully_shard(net)
    mapping = {r"part\.(\d)": mfload.rule("weight", transpose=(1, 0), concat=(0, 1), scale=0.5)}
    report = mfload.Report()
    mfload.load_into(
        net,
        here.directory / "parts.safetensors",
        mapping=mapping,
        report=report,
        **as_options({"timeout": 30, "exchange": exchange, "threads": 1}),
    )
    state = safetensors.torch.load_file(here.directory / "parts.safetensors")
    whole = torch.cat([state["part.0"].T, state["part.1"].T]) * 0.5
    chunks = whole.chunk(here.count)
    assert torch.equal(part(net.weight), chunks[here.rank])
    return {"exchanged": report.exchanged_bytes, "read": report.read_bytes}


def plain(here: World) -> dict[str, Any]:
    """A plain module on all processes, each byte read once."""
    net, report = Net(), mfload.Report()
    options = mfload.Options(exchange="once", timeout=30)
    path = here.directory / "net.safetensors"
    mfload.load_into(net, path, options=options, report=report)
    state = safetensors.torch.load_file(path)
    assert all(torch.equal(net.state_dict()[name], each) for name, each in state.items())
    return {"read": report.read_bytes}


def some_ask(here: World) -> None:
    """A process that does not ask for the exchange loads alone; the others name it."""
    path, gave_up = here.directory / "net.safetensors", here.directory / "some_ask"
    if here.rank:
        mfload.load_into(Net(), path)
        while not gave_up.exists():
            time.sleep(0.05)
    try:
        with mock.patch.object(base, "ARRIVAL", 1.0):
            mfload.load_into(Net(), path, options=mfload.Options(exchange="once"))
    finally:
        gave_up.touch()


def refused(here: World) -> None:
    """Partial placements, and shards that are no boxes, in one error."""
    net = torch.nn.Linear(8, 8)
    mesh = init_device_mesh("cpu", (here.count,))
    for name, each in list(net.named_parameters()):
        made = DTensor.from_local(each.detach(), mesh, [Partial()], run_check=False)
        setattr(net, name, torch.nn.Parameter(made))
    mfload.load_into(net, here.directory / "linear.safetensors", **as_options({"timeout": 30}))


def other(here: World) -> None:
    """One process asks for something else."""
    net = sharded(here.count, "fsdp")
    mapping = {"nothing": "x"} if here.rank == 1 else None
    mfload.load_into(
        net, here.directory / "net.safetensors", mapping=mapping, **as_options({"timeout": 30})
    )


def disk(here: World, where: str, exchange: str, atomic: str = "") -> dict[str, Any]:
    """The disk fails on one process: the others raise, and what had no memory has none.

    If `atomic`, all of what has memory holds its old values still.
    """
    net = sharded(here.count, "fsdp", meta=where == "meta")
    old = copy.deepcopy([getattr(each, "_local_tensor", each) for each in net.parameters()])
    try:
        with here.failing(0, io_error):
            mfload.load_into(
                net,
                here.directory / "net.safetensors",
                atomic=bool(atomic),
                **as_options({"timeout": 30, "exchange": exchange, "engine": "pread"}),
            )
    except mfload.errors.MfloadError as error:
        if atomic:
            now = [getattr(each, "_local_tensor", each) for each in net.parameters()]
            assert all(map(torch.equal, old, now))
        assert hasattr(net, "mfload_torn") == (where == "held" and not atomic)
        left = any(each.is_meta for each in net.parameters())
        assert left == (where == "meta")
        notes = getattr(error, "__notes__", [])
        return {"error": type(error).__name__, "notes": notes}
    return {}


def main() -> None:
    rank, count, port = map(int, sys.argv[1:4])
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", rank=rank, world_size=count)
    here = World(rank, count, Path(sys.argv[4]))
    world.play(here, globals())


if __name__ == "__main__":
    main()
