"""What each process of PyTorch does in a test (see `launching`).

python torch_cases.py RANK COUNT PORT DIRECTORY CASE…
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
import world
from calls import as_options
from samples import save_raw
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from world import at_swap, io_error, kill, press

import mfload
from mfload import errors
from mfload.dtypes import TABLE
from mfload.frameworks import private_api
from mfload.loading import allocate
from mfload.mesh import shard, torch_backend
from mfload.sources.http import HttpSource

SPECS: dict[str, Any] = {
    "rows": [Shard(0)],
    "columns": [Shard(-1)],
    "replicated": [Replicate()],
}


class World(world.World):
    """A process of PyTorch."""

    def __init__(self, rank: int, count: int, directory: Path) -> None:
        super().__init__(rank, count, directory)
        self.mesh = init_device_mesh("cpu", (count,), mesh_dim_names=("tp",))

    def load(self, spec: Any, path: Path | None = None, **options: Any) -> dict[str, Any]:
        """Loads with one spec for all tensors of two dims."""
        return mfload.load(
            path or self.model,
            "torch",
            mesh=self.mesh,
            shardings=[("^t", spec)],
            **as_options({"timeout": 20, **options}),
        )

    def stream(self, spec: Any, **given: Any) -> Any:
        """The same as a stream."""
        return mfload.stream(self.model, "torch", mesh=self.mesh, shardings=[("^t", spec)], **given)

    def check(self, arrays: dict[str, Any], spec: Any) -> None:
        """Compares the part of this process with what PyTorch itself makes of the file."""
        held: dict[str, Any] = {}
        for file in sorted(self.model.glob("*.safetensors")):
            held |= safetensors.torch.load_file(file)
        assert set(arrays) == set(held)
        for name, array in arrays.items():
            placements = spec if name.startswith("t.") else [Replicate()]
            like = distribute_tensor(held[name], self.mesh, placements, src_data_rank=None)
            assert array.shape == like.shape
            assert array.stride() == like.stride()
            assert array.placements == like.placements
            mine, theirs = array.to_local(), like.to_local()
            assert mine.shape == theirs.shape, name
            assert torch.equal(_bits(mine), _bits(theirs)), name


def _bits(tensor: Any) -> Any:
    return tensor.contiguous().view(-1).view(torch.uint8) if tensor.numel() else torch.empty(0)


def values(here: World, name: str, exchange: str, _number: str = "") -> dict[str, Any]:
    report = mfload.Report()
    with here.counted():
        arrays = here.load(SPECS[name], exchange=exchange, engine="pread", report=report)
    here.check(arrays, SPECS[name])
    fields = ("read_bytes", "exchanged_bytes", "over_read_bytes", "notes")
    return {each: getattr(report, each) for each in fields} | {"counted": here.read}


def of_a_store(here: World, name: str, port: str) -> dict[str, Any]:
    """Loads from a server what is read as a store is."""
    report = mfload.Report()
    url = f"http://127.0.0.1:{port}/model.safetensors.index.json"
    with mock.patch.object(HttpSource, "shared_link", True, create=True):
        given = {"mesh": here.mesh, "shardings": [("^t", SPECS[name])], "report": report}
        arrays = mfload.load(url, "torch", **given)
    here.check(arrays, SPECS[name])
    return {"read_bytes": report.read_bytes, "notes": report.notes}


def peers(here: World, first: str, second: str) -> dict[str, Any]:
    return here.peers(SPECS[first], SPECS[second], f"{first}-{second}")


def missing(here: World) -> None:
    path = here.own()
    if here.rank == 1:
        (path / "model-00002-of-00002.safetensors").unlink()
    here.load([Shard(0)], path)


def disk(here: World, exchange: str, after: str) -> None:
    with here.failing(int(after), io_error):
        here.load([Shard(1)], exchange=exchange, engine="pread")


def full(here: World) -> None:
    """Process 1 has too little memory for its part."""
    fails = mock.patch.object(
        allocate, "check_host", side_effect=errors.MemoryLimitError("no memory")
    )
    with fails if here.rank == 1 else contextlib.nullcontext():
        here.load([Shard(1)], exchange="once")


def killed_reading(here: World) -> None:
    here.load([Shard(0)])
    with here.failing(1 << 20, kill):
        here.load([Shard(1)], exchange="once", engine="pread")


def _in_batches(exchange: Any, **given: Any) -> mfload.Options:
    """Batches of 1 MiB at most."""
    return mfload.Options(exchange=exchange, timeout=20, max_host_overhead="4MiB", **given)


def stream(here: World, name: str, exchange: str) -> dict[str, Any]:
    """A shared stream, in batches of 1 MiB, with other loads between its batches."""
    report = mfload.Report()
    options = mfload.Options(
        exchange=exchange, timeout=20, max_host_overhead="4MiB", engine="pread"
    )  # pyright: ignore
    order = ["t.e", "t.d", "scalar", "odd", "t.a", "norm", "t.c", "empty", "t.b"]
    rows = here.stream(SPECS[name], report=report, options=options, order=order)
    arrays = dict([next(rows), next(rows)])
    again = here.load(SPECS[name], exchange=exchange)
    assert torch.equal(_bits(again["t.d"].to_local()), _bits(arrays["t.d"].to_local()))
    arrays |= rows
    assert list(arrays) == order
    here.check(arrays, SPECS[name])
    return {"read_bytes": report.read_bytes, "processes": report.processes}


def stream_leaves(here: World, exchange: str, how: str) -> None:
    """Process 1 leaves after its first tensor."""
    options = _in_batches(exchange)
    rows = here.stream([Shard(0)], options=options)
    if here.rank == 1 and how == "unbegun":
        return
    for name, _ in rows:
        if here.rank == 1 and how == "break":
            break
        if here.rank == 1 and how == "raise":
            raise KeyError(name)


def stream_collected(here: World, exchange: str) -> None:
    """The collector drops the stream of process 1, where the store is slow: it does not wait."""
    gc.collect()
    gc.freeze()  # What was there takes a collector of a busy machine longer than the store.
    rows = here.stream([Shard(0)], options=_in_batches(exchange))
    next(rows)
    if here.rank != 1:
        dict(rows)
    true = torch_backend.TorchStore.first

    def slow(*given: Any) -> str:
        time.sleep(0.7)
        return true(*given)

    cycle: list[Any] = [rows]
    cycle.append(cycle)
    del rows
    with mock.patch.object(torch_backend.TorchStore, "first", slow):
        start = time.monotonic()
        del cycle
        gc.collect()
        assert time.monotonic() - start < 0.5
        gc.unfreeze()
        time.sleep(1)


def stream_disk(here: World, exchange: str) -> None:
    options = _in_batches(exchange, engine="pread")
    with here.failing(1 << 20, io_error):
        dict(here.stream([Shard(0)], options=options))


def stream_all_leave(here: World, exchange: str) -> None:
    """All leave at the same place: that is no error."""
    options = _in_batches(exchange)
    for _ in here.stream([Shard(0)], options=options):
        break


def stream_orders(here: World) -> None:
    names = ["t.a", "t.b"]
    here.stream([Shard(0)], order=names if here.rank else names[::-1], options=None)


def stream_killed(here: World) -> None:
    options = _in_batches("auto")
    for _ in here.stream([Shard(0)], options=options):
        if here.rank == 1:
            kill()


def stream_shards(here: World, exchange: str) -> None:
    """Plain shards, in one order."""
    options = _in_batches(exchange)
    given: dict[str, Any] = {
        "shardings": [("^t", -1)],
        "shard": (here.rank, here.count),
        "options": options,
    }
    streamed = dict(mfload.stream(here.model, "torch", **given))
    loaded = mfload.load(here.model, "torch", **given)
    assert list(streamed) == list(loaded)
    for name, tensor in streamed.items():
        assert torch.equal(_bits(tensor), _bits(loaded[name]))


def shards(here: World, exchange: str) -> None:
    """Plain shards of each dim, as torch.chunk cuts them."""
    whole = torch.arange(5 * 7 * 3, dtype=torch.float32).reshape(5, 7, 3)
    path = here.directory / "five.safetensors"
    for dim in itertools.chain(range(-3, 3)):
        made = mfload.load(
            path,
            "torch",
            shardings=[("w", dim)],
            shard=(here.rank, here.count),
            options=mfload.Options(exchange=exchange, timeout=20),  # pyright: ignore
        )["w"]
        chunks = whole.chunk(here.count, dim)
        empty = whole.narrow(dim, 0, 0)
        like = chunks[here.rank] if here.rank < len(chunks) else empty
        assert made.shape == like.shape
        assert torch.equal(made, like)


def same(mine: Any, theirs: Any) -> bool:
    """Equal in shape, dtype and every bit."""
    alike = mine.shape == theirs.shape and mine.dtype == theirs.dtype
    return alike and torch.equal(_bits(mine), _bits(theirs))


def part(whole: Any, mesh: Any, placements: list[Any]) -> Any:
    """What PyTorch makes of a tensor on this rank."""
    if not any(isinstance(each, _StridedShard) for each in placements):
        return distribute_tensor(whole, mesh, placements, src_data_rank=None).to_local()
    for n, each in enumerate(placements):  # distribute_tensor takes even ones only.
        if not isinstance(each, Replicate):
            pieces, _ = each._split_tensor(whole, mesh.size(n), with_padding=False)
            whole = pieces[mesh.get_coordinate()[n]]
    return whole


def zoo(directory: Path) -> None:
    """Every dtype in shapes that few worlds divide."""
    save_raw(
        directory / "zoo.safetensors",
        [
            (f"{dtype}.{'x'.join(map(str, shape))}", dtype, shape, _random(dtype, nbytes))
            for dtype, row in TABLE.items()
            for shape in SHAPES
            if (nbytes := row.size_of(shape)) is not None
        ],
    )


def _random(dtype: str, nbytes: int) -> bytes:
    given = os.urandom(nbytes)
    return bytes(byte & 1 for byte in given) if dtype == "BOOL" else given


def on_mesh(here: World, mesh: Any, spec: list[Any], exchange: str) -> int:
    """Loads every dtype on a mesh and compares with PyTorch; the wanted bytes that were read."""
    path = here.directory / "zoo.safetensors"
    report = mfload.Report()
    packed = "^F(4|6_)"
    rules: Any = [(packed, None), (r"x", spec)]
    if not any(isinstance(each, _StridedShard) or each == Shard(1) for each in spec):
        rules = [(r"x", spec)]
    options: Any = mfload.Options(exchange=exchange, engine="pread", timeout=30)  # pyright: ignore
    with here.counted():
        made = mfload.load(
            path, "torch", mesh=mesh, shardings=rules, report=report, options=options
        )
    assert here.read == report.read_bytes, (here.read, report.read_bytes, spec)
    if "zoo" not in vars(here):
        here.zoo = mfload.load(path, "torch")
    assert set(made) == set(here.zoo)
    wanted = 0
    for name, array in made.items():
        whole = here.zoo[name]
        cut = "x" in name and (len(rules) == 1 or not name.startswith(("F4", "F6_")))
        placements = spec if cut else [Replicate()] * mesh.ndim
        bits = whole.view(torch.uint8) if name.startswith("F4") else whole
        theirs = part(bits, mesh, placements).view(whole.dtype)
        assert (array.shape, array.stride()) == (whole.shape, whole.stride()), name
        assert list(array.placements) == placements, name
        assert same(array.to_local(), theirs), (name, spec)
        wanted += theirs.nbytes
    read = here.read - report.over_read_bytes
    assert exchange == "once" or read == wanted, (read, wanted, spec)
    return read


SHAPES = [(), (7,), (5, 24), (1, 8), (0, 8), (12, 1, 16), (6, 4, 4)]
R = Replicate()
GRIDS: dict[int, list[tuple[int, ...]]] = {
    1: [(1,), (1, 1)],
    2: [(2,), (1, 2)],
    4: [(4,), (2, 2), (2, 1, 2)],
    8: [(8,), (2, 4), (2, 2, 2)],
}
SPECS_OF: dict[int, list[list[Any]]] = {
    1: [[Shard(0)], [R]],
    2: [[Shard(0), R], [Shard(0), Shard(0)], [Shard(0), Shard(1)], [Shard(1), Shard(0)]],
    3: [[Shard(0), R, Shard(1)], [Shard(0), Shard(0), Shard(0)], [R, Shard(1), Shard(0)]],
}


def grids(here: World) -> dict[str, Any]:
    """Every dtype on 1-D to 3-D meshes, read by each for itself and by one for all."""
    read: list[int] = []
    for sizes in GRIDS[here.count]:
        mesh = init_device_mesh("cpu", sizes)
        for spec in SPECS_OF[len(sizes)]:
            on_mesh(here, mesh, spec, "never")
            read.append(on_mesh(here, mesh, spec, "once"))
    return {"read": read}


def five_rows_over_four_ranks(here: World) -> None:
    whole = torch.arange(5 * 7 * 3, dtype=torch.float32).reshape(5, 7, 3)
    for exchange in ("never", "once"):
        made = here.load([Shard(0)], here.directory / "five.safetensors", exchange=exchange)
        assert made["t.w"].shape == (5, 7, 3)
        mine = [(0, 2), (2, 4), (4, 5), (5, 5)][here.rank]
        assert torch.equal(made["t.w"].to_local(), whole[slice(*mine)])
        assert torch.equal(made["t.w"].full_tensor(), whole)


def strided(here: World) -> None:
    """`_StridedShard` beside the Shard that leaves one stretch of it; others by name."""
    mesh = init_device_mesh("cpu", (2, 2))
    stretch = [_StridedShard(0, split_factor=2), Shard(0)]
    rules = [("12x1x16|1x8|0x8", stretch)]
    path = here.directory / "zoo.safetensors"
    held = mfload.load(path, "torch")
    for exchange in ("never", "once"):
        options: Any = mfload.Options(exchange=exchange, timeout=30)  # pyright: ignore
        made = mfload.load(path, "torch", mesh=mesh, shardings=rules, options=options)
        for name, array in made.items():
            placements = stretch if name.endswith(("12x1x16", "1x8", "0x8")) else [R, R]
            bits = held[name].view(torch.uint8) if name.startswith("F4") else held[name]
            assert same(array.to_local(), part(bits, mesh, placements).view(held[name].dtype))
            assert list(array.placements) == placements
    with pytest.raises(errors.ShardingError, match="rows that lie apart"):
        mfload.load(path, "torch", mesh=mesh, shardings=[("12x", [stretch[0], R])])


def fsdp(here: World) -> None:
    """The parameters of FSDP2 over tensor parallelism."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = torch.nn.Sequential(torch.nn.Linear(16, 24), torch.nn.Linear(24, 12))
    path = here.directory / "linear.safetensors"
    held = safetensors.torch.load_file(path)
    model.load_state_dict(held)
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    rules = {name: each.placements for name, each in model.named_parameters()}
    assert any(isinstance(p, _StridedShard) for each in rules.values() for p in each)
    for exchange in ("never", "once"):
        options: Any = mfload.Options(exchange=exchange, timeout=30)  # pyright: ignore
        made = mfload.load(path, "torch", mesh=mesh, shardings=rules, options=options)
        for name, theirs in model.named_parameters():
            assert made[name].placements == theirs.placements
            assert made[name].device_mesh == theirs.device_mesh
            assert same(made[name].to_local(), theirs.to_local().detach()), name


def submeshes(here: World) -> None:
    """Slices of a mesh, ranks in another order, and a mesh that not all are in."""
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    shuffled = DeviceMesh("cpu", [3, 1, 0, 2])
    turned = DeviceMesh("cpu", [[2, 0], [3, 1]])
    some = DeviceMesh("cpu", [2, 3])
    for exchange in ("never", "once"):
        on_mesh(here, grid["tp"], [Shard(0)], exchange)
        on_mesh(here, grid["dp"], [Shard(1)], exchange)
        on_mesh(here, shuffled, [Shard(0)], exchange)
        on_mesh(here, turned, [Shard(0), Shard(0)], exchange)
        if here.rank > 1:
            on_mesh(here, some, [Shard(0)], exchange)
    if here.rank < 2:
        with pytest.raises(errors.UsageError, match="takes no part"):
            mfload.load(here.model, "torch", mesh=some)


def lopsided(here: World) -> None:
    """Processes that are in different numbers of groups."""
    if here.rank == 0:
        for _ in range(3):
            dist.new_group([0], use_local_synchronization=True)
    mesh = DeviceMesh("cpu", [0, 1], _init_backend=False)
    if here.rank < 2:
        on_mesh(here, mesh, [Shard(0)], "once")


def beside(here: World) -> None:
    """A collective of the user's is under way all the time."""
    for exchange in ("never", "once"):
        numbers = torch.full((1 << 20,), here.rank + 1.0)
        works = [dist.all_reduce(numbers, async_op=True)]
        waits = dist.new_group()
        if here.rank:
            works.append(dist.barrier(group=waits, async_op=True))
        here.check(here.load(SPECS["columns"], exchange=exchange), SPECS["columns"])
        if not here.rank:
            works.append(dist.barrier(group=waits, async_op=True))
        for work in works:
            work.wait()
        assert numbers[0] == sum(range(here.count + 1))


def damaged(here: World) -> None:
    path = here.own()
    if here.rank == 1:
        with (path / "model-00002-of-00002.safetensors").open("r+b") as file:
            file.seek(9)
            file.write(b"!!!!")
    here.load([Shard(0)], path, exchange="once")


def alike(here: World) -> None:
    """Files of one name, size and header, with other numbers at the end of one."""
    path = here.own()
    if here.rank == 1:
        with (path / "model-00001-of-00002.safetensors").open("r+b") as file:
            file.seek(-1000, os.SEEK_END)
            file.write(b"\x01" * 1000)
    here.load([Shard(0)], path, exchange="once")


def other_arguments(here: World) -> None:
    here.load([Shard(here.rank)])


def other_exchange(here: World) -> None:
    here.load([Shard(0)], exchange="once" if here.rank else "never")


WRONG: dict[str, dict[str, Any]] = {
    "options": {"options": {"threads": 1}},
    "framework": {"framework": "jax"},
    "device": {"device": "cpu"},
    "mesh": {"mesh": 7},
    "placement": {"shardings": [Partial()]},
    "dim": {"shardings": Shard(5)},
    "unmatched": {"unmatched": "no"},
}
WRONG_SHARD: dict[str, dict[str, Any]] = {
    "rank": {"shard": (0, 2)},
    "size": {"shard": (1, 4)},
    "float": {"shard": (1.0, 2)},
    "dim": {"shardings": 9},
    "placement": {"shardings": [Shard(0)]},
    "device": {"device": ["cpu", "cpu"]},
    "none": {"shardings": None},
    "unmatched": {"unmatched": "no"},
}


def wrong(here: World, what: str) -> None:
    """An argument of process 1 makes no sense."""
    right: dict[str, Any] = {"framework": "torch", "mesh": here.mesh, "shardings": [R]}
    right["options"] = mfload.Options(timeout=20)
    mfload.load(here.model, **(right | (WRONG[what] if here.rank == 1 else {})))


def wrong_shard(here: World, what: str) -> None:
    """The same where plain shards are exchanged."""
    right: dict[str, Any] = {"framework": "torch", "shard": (here.rank, here.count)}
    right |= {"shardings": [("^t", 0)], "options": mfload.Options(exchange="once", timeout=20)}
    mfload.load(here.model, **(right | (WRONG_SHARD[what] if here.rank == 1 else {})))


def some_ask(here: World) -> None:
    """A rank that does not ask for the exchange reads alone; the others wait no full timeout."""
    given: dict[str, Any] = {"shardings": [("^t", 0)], "shard": (here.rank, here.count)}
    once = mfload.Options(exchange="once")
    gave_up = here.directory / "some_ask"
    if here.rank:
        mfload.load(here.model, "torch", **given)
        while not gave_up.exists():
            time.sleep(0.05)
    try:
        with mock.patch.object(shard.ShardBackend, "arrival", 1.0):
            mfload.load(here.model, "torch", options=once, **given)
    finally:
        gave_up.touch()


def alone(here: World) -> None:
    """Process 0 loads, the other does not come in time; then both go on."""
    if here.rank == 0:
        try:
            here.load([Shard(0)], timeout=1.0)
        except errors.LoadTimeoutError:
            (here.directory / "gave-up").touch()
            raise
    while not (here.directory / "gave-up").exists():
        time.sleep(0.05)
    here.load([Shard(0)], timeout=10.0)


def interrupted(here: World) -> None:
    """Ctrl-C in process 1, in the middle of an exchange."""
    with at_swap(here, 1, press):
        here.load([Shard(1)], exchange="once", max_host_overhead=4 << 20)


def signalled(here: World, times: str) -> None:
    load = lambda: here.load([Shard(1)], exchange="once", max_host_overhead=4 << 20)  # noqa: E731
    world.signalled(here, load, lambda: here.check(load(), [Shard(1)]), times)


def killed_exchanging(here: World) -> None:
    here.load([Shard(0)])
    with at_swap(here, 2, kill):
        here.load([Shard(1)], exchange="once", max_host_overhead=4 << 20)


def silent(here: World) -> None:
    """Process 1 stops in the middle of an exchange, and is not dead."""
    with here.failing(1 << 20, lambda: time.sleep(4)):
        here.load([Shard(1)], exchange="once", engine="pread", timeout=1.5)


def out_of_step(here: World) -> None:
    """After a swap that was given up: by itself each may load, and is told why not otherwise."""
    here.check(here.load([Shard(0)], exchange="never"), [Shard(0)])
    with pytest.raises(errors.ProcessError, match="out of step"):
        here.load([Shard(0)], exchange="once")


def remade(here: World) -> None:
    """The process group is destroyed and made anew."""
    del here.mesh
    dist.destroy_process_group()
    where = f"file://{here.directory}/store"
    dist.init_process_group("gloo", where, rank=here.rank, world_size=here.count)
    here.mesh = init_device_mesh("cpu", (here.count,))
    for exchange in ("once", "never"):
        shards(here, exchange)
        here.check(here.load([Shard(0)], exchange=exchange), [Shard(0)])


def without_a_store(here: World) -> None:
    """As before PyTorch 2.10: processes agree by collectives."""
    with mock.patch.object(torch_backend._world(), "store", None):
        for exchange in ("never", "once"):
            here.check(here.load([Shard(1)], exchange=exchange), [Shard(1)])
        for case, error in (
            (missing, ("ProcessError", "ShardNotFoundError")),
            (other_arguments, ("ProcessError",) * 2),
            (full, ("ProcessError", "MemoryLimitError")),
            (lambda here: disk(here, "once", "0"), ("ProcessError", "ReadError")),
        ):
            with pytest.raises(errors.MfloadError) as caught:
                case(here)
            assert type(caught.value).__name__ == error[min(here.rank, 1)]
        here.check(here.load([Shard(0)], exchange="once"), [Shard(0)])


def without_gloos_group(here: World) -> None:
    """The public way to a process group."""
    with (
        mock.patch.object(torch_backend._world(), "groups", {}),
        mock.patch.object(private_api, "_torch_group_store", side_effect=ImportError),
    ):
        here.check(here.load([Shard(1)], exchange="once"), [Shard(1)])


def left(here: World) -> None:
    """Process 1 ends before the others, which were to load with it."""
    here.load([Shard(0)])
    if here.rank == 1:
        os._exit(0)
    here.load([Shard(0)], timeout=None)


def main() -> None:
    rank, count, port = map(int, sys.argv[1:4])
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=count)
    here = World(rank, count, Path(sys.argv[4]))
    world.play(here, globals())


if __name__ == "__main__":
    main()
