"""What each process of Paddle does in a test (see `launching`).

python paddle_cases.py RANK COUNT PORT DIRECTORY CASE…
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import samples
import world
from calls import as_options
from world import io_error, kill

import mfload
from mfload import errors

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Of compilers that Paddle does not find.
    import paddle
    import paddle.distributed as dist
from paddle.distributed import ProcessMesh, Replicate, Shard

HOWS = ["held:0", "held:1", "held:whole", "lazy:0", "lazy:1", "lazy:whole", "turned:0", "turned:1"]
SPECS: dict[str, Any] = {
    "rows": [Shard(0)],
    "columns": [Shard(-1)],
    "replicated": [Replicate()],
}
DTYPES = (np.float32, np.int16, ml_dtypes.bfloat16, np.uint8, np.complex64, ml_dtypes.float8_e4m3fn)


class World(world.World):
    """A process of Paddle."""

    def __init__(self, rank: int, count: int, directory: Path) -> None:
        super().__init__(rank, count, directory)
        self.mesh = ProcessMesh(list(range(count)))

    def check(self, arrays: dict[str, Any], spec: Any) -> None:
        """Compares the part of this process with what Paddle itself makes of the file."""
        plain = mfload.load(self.model, "paddle")
        assert set(arrays) == set(plain)
        for key, array in arrays.items():
            columns = [Shard(len(plain[key].shape) - 1)]
            by = {id(SPECS["rows"]): [Shard(0)], id(SPECS["columns"]): columns}
            placements = by.get(id(spec) if key.startswith("t.") else 0, [Replicate()])
            same(array, plain[key], paddles(plain[key], self.mesh, placements))

    def load(self, spec: Any, path: Path | None = None, **options: Any) -> dict[str, Any]:
        """Loads with one spec for all tensors of two dims."""
        return mfload.load(
            path or self.model,
            "paddle",
            mesh=self.mesh,
            shardings=[("^t", spec)],
            **as_options({"timeout": 20, **options}),
        )


def paddles(whole: Any, mesh: Any, placements: Any) -> Any:
    """What Paddle itself makes of a whole tensor: of its bits, since it can't slice all types."""
    kinds = {1: paddle.uint8, 2: paddle.int16, 4: paddle.int32, 8: paddle.int64}
    bits = whole.view(kinds[whole.element_size()]) if whole.shape and whole.size else whole
    return dist.shard_tensor(bits, mesh, placements)


def same(mine: Any, whole: Any, theirs: Any) -> None:
    """Compares a distributed tensor with what Paddle itself made (see `paddles`)."""
    assert mine.is_dist()
    assert (mine.shape, mine.dtype) == (theirs.shape, whole.dtype)
    assert mine.placements == theirs.placements
    assert mine.process_mesh == theirs.process_mesh
    local = mine._local_value()
    assert local.shape == mine._local_shape
    try:
        assert local.shape == theirs._local_shape
    except NotImplementedError:  # Paddle made an empty one of an empty one, without a shape.
        assert not local.size
    else:
        assert _bytes(local) == _bytes(theirs._local_value())


def _bytes(tensor: Any) -> bytes:
    tensor = tensor.contiguous()
    length = tensor.size * tensor.element_size()
    return ctypes.string_at(tensor.data_ptr(), length) if length else b""


def values(here: World, name: str, exchange: str) -> dict[str, Any]:
    report = mfload.Report()
    with here.counted():
        arrays = here.load(SPECS[name], exchange=exchange, engine="pread", report=report)
    here.check(arrays, SPECS[name])
    fields = ("read_bytes", "exchanged_bytes", "over_read_bytes", "notes")
    return {each: getattr(report, each) for each in fields} | {"counted": here.read}


def dtypes(here: World, name: str, exchange: str) -> dict[str, Any]:
    """Every dtype, bit for bit."""
    report = mfload.Report()
    path = here.directory / "dtypes.safetensors"
    arrays = here.load(SPECS[name], path, exchange=exchange, report=report)
    kinds: dict[str, str] = {}
    for key, (kind, _, raw) in world.every_dtype().items():
        kinds[kind] = str(arrays[key].dtype)
        like = np.split(raw, here.count, SPECS[name][0].get_dim())[here.rank]
        assert _bytes(arrays[key]._local_value()) == like.tobytes(), key
    return {"exchanged": report.exchanged_bytes, "kinds": kinds}


def network() -> Any:
    """Layers, a head that is tied to the embedding, and a buffer."""
    net = paddle.nn.Layer()
    net.embed = paddle.nn.Embedding(36, 500)
    net.up, net.down = paddle.nn.Linear(500, 72), paddle.nn.Linear(72, 500, bias_attr=False)
    net.head = paddle.nn.Linear(500, 36, bias_attr=False)
    net.head.weight = net.embed.weight
    net.one = paddle.nn.Linear(500, 1)
    net.register_buffer("steps", paddle.arange(3))
    return net


ROWS = {"embed.weight": (36, 500), "up.weight": (500, 72), "up.bias": (72,), "steps": (3,),
        "down.weight": (72, 500), "one.weight": (500, 1), "one.bias": (1,)}  # fmt: skip


def stored(turned: bool) -> dict[str, Any]:
    """What each of its tensors is to hold; some of them are stored the other way."""
    held = {
        name: samples.numbers(shape, np.int64 if name == "steps" else np.float32, len(name))
        for name, shape in ROWS.items()
    }
    return {n: a.T.copy() if turned and "down" in n else a for n, a in held.items()}


def sharded(here: World, dim: int) -> Any:
    """The network with each parameter cut along a dim that it has, where Paddle can."""
    net, cut = network(), dict[int, Any]()
    for layer in [net, *net.sublayers()]:
        for name, each in list(layer.named_parameters(include_sublayers=False)):
            axis = min(dim, len(each.shape) - 1)
            placement = Replicate() if name == "bias" and dim else Shard(axis)
            if id(each) not in cut:
                cut[id(each)] = dist.shard_tensor(each, here.mesh, [placement])
            setattr(layer, name, cut[id(each)])
    return net


def into(here: World, how: str, dim: str, exchange: str) -> dict[str, Any]:
    """Fills a sharded layer, against what `shard_tensor` makes of the whole values."""
    report, turned = mfload.Report(), "turned" in how
    with paddle.LazyGuard() if "lazy" in how else contextlib.nullcontext():
        net = sharded(here, int(dim)) if dim != "whole" else network()
    held, mapping = dict(net.state_dict()), None
    if turned:
        mapping = {r"(down.*)": mfload.rule(r"\1", transpose=(1, 0)), "(?!down)(.*)": r"\1"}
    path = here.directory / f"net.{turned}.safetensors"
    given = as_options({"timeout": 20, "exchange": exchange, "engine": "pread"})
    with here.counted():
        mfload.load_into(net, path, mapping=mapping, report=report, **given)
    assert all(each is held[name] for name, each in net.state_dict().items())
    for name, whole in stored(turned=False).items():
        tensor = held[name]
        if tensor.is_dist():
            like = dist.shard_tensor(paddle.to_tensor(whole), here.mesh, tensor.placements)
            assert (tensor.shape, tensor._local_value().shape) == (
                list(whole.shape),
                like._local_value().shape,
            )
            assert tensor.stop_gradient is False
            assert _bytes(tensor._local_value()) == _bytes(like._local_value()), name
        else:
            assert tensor.numpy().tobytes() == whole.tobytes(), name
    return {"counted": here.read, "read": report.read_bytes, "over": report.over_read_bytes,
            "exchanged": report.exchanged_bytes}  # fmt: skip


def into_disk(here: World, exchange: str) -> dict[str, Any]:
    """The disk fails on one process: all raise, and say what may be half filled."""
    net = sharded(here, 0)
    try:
        with here.failing(0, io_error):
            given = as_options({"timeout": 20, "exchange": exchange, "engine": "pread"})
            mfload.load_into(net, here.directory / "net.False.safetensors", **given)
    except errors.MfloadError as error:
        return {"error": type(error).__name__, "notes": getattr(error, "__notes__", [])}
    return {}


def drawn(here: World, seed: str) -> dict[str, Any]:
    """Random shapes, meshes and placements, against `shard_tensor` of the whole tensor."""
    random, made, refused = np.random.default_rng(int(seed)), 0, 0
    grids = [(here.count,), (1, here.count), (here.count, 1)]
    grids += [(2, here.count // 2), (here.count // 2, 1, 2)] if here.count % 2 == 0 else []
    for number in range(24):
        shape = tuple(int(n) for n in random.integers(1, 10, random.integers(1, 4)))
        grid = grids[random.integers(len(grids))]
        ids = random.permutation(here.count).reshape(grid)
        dims = random.integers(-1, len(shape), len(grid))
        whole = samples.numbers(shape, DTYPES[number % len(DTYPES)], number)
        path = here.directory / f"drawn.{seed}.{number}.safetensors"
        if here.rank == 0 and not path.exists():
            samples.save(path.with_suffix(".part"), {"w": whole})
            path.with_suffix(".part").rename(path)
        while not path.exists():
            time.sleep(0.01)
        mesh = ProcessMesh(ids)
        placements = [Replicate() if dim < 0 else Shard(int(dim)) for dim in dims]
        given = [Replicate() if dim < 0 else Shard(int(dim) - len(shape)) for dim in dims]
        plain, like = mfload.load(path, "paddle")["w"], None
        with contextlib.suppress(ValueError):
            like = paddles(plain, mesh, placements)
        failed = list[Any]()
        if here.count > 1:
            dist.all_gather(failed, paddle.to_tensor([like is None], dtype="uint8"))
        fails = any(int(each[0]) for each in failed) or like is None
        options: Any = {"exchange": ("never", "once")[number // len(DTYPES) % 2], "timeout": 20}
        rules = [("w", given)]
        try:
            array = mfload.load(
                path, "paddle", mesh=mesh, shardings=rules, options=mfload.Options(**options)
            )["w"]
        except errors.ShardingError:
            assert fails, (shape, grid, placements)
            refused += 1
        else:
            assert not fails, (shape, grid, placements)
            same(array, plain, like)
            made += 1
    return {"made": made, "refused": refused}


def uneven(here: World) -> None:
    """Rows that do not divide: as Paddle makes them, and good for its own operations."""
    whole = np.arange(7 * 3, dtype=np.float32).reshape(7, 3)
    path = here.directory / "seven.safetensors"
    for exchange in ("never", "once"):
        options: Any = {"exchange": exchange, "timeout": 20}
        array = mfload.load(
            path,
            "paddle",
            mesh=here.mesh,
            shardings=[("w", [Shard(0)])],
            options=mfload.Options(**options),
        )["w"]
        assert array.shape == [7, 3]
        back = dist.reshard(array + array, here.mesh, [Replicate()])
        assert np.array_equal(back._local_value().numpy(), whole * 2)


def shards(here: World, exchange: str) -> None:
    """Plain shards of each dim, also of five rows."""
    whole = np.arange(5 * 7 * 3, dtype=np.float32).reshape(5, 7, 3)
    path = here.directory / "five.safetensors"
    options: Any = {"exchange": exchange, "timeout": 20}
    for dim in range(-3, 3):
        made = mfload.load(
            path,
            "paddle",
            shardings=[("w", dim)],
            shard=(here.rank, here.count),
            options=mfload.Options(**options),
        )["w"]
        step = -(-whole.shape[dim] // here.count)
        start = min(here.rank * step, whole.shape[dim])
        like = np.take(whole, range(start, min(start + step, whole.shape[dim])), dim)
        assert made.shape == list(like.shape)
        assert np.array_equal(made.numpy(), like)


def refused(here: World) -> None:
    """Five rows over four ranks, and a mesh of some of the processes."""
    path = here.directory / "five.safetensors"
    for mesh, message in (
        (here.mesh, "dim 0 has too few elements"),
        (ProcessMesh(list(range(here.count - 1))), "must be all that are joined|takes no part"),
    ):
        with pytest.raises((errors.ShardingError, errors.UsageError), match=message):
            mfload.load(path, "paddle", mesh=mesh, shardings=[("w", [Shard(0)])])


def missing(here: World) -> None:
    path = here.own()
    if here.rank == 1:
        (path / "model-00002-of-00002.safetensors").unlink()
    here.load([Shard(0)], path)


def differs(here: World) -> None:
    here.load([Shard(here.rank % 2)])


def disk(here: World, exchange: str, after: str) -> None:
    with here.failing(int(after), io_error):
        here.load([Shard(1)], exchange=exchange, engine="pread")


def signalled(here: World, times: str) -> None:
    columns = SPECS["columns"]
    load = lambda: here.load(columns, exchange="once", max_host_overhead=4 << 20)  # noqa: E731
    world.signalled(here, load, lambda: here.check(load(), columns), times)


def killed_reading(here: World) -> None:
    here.load([Shard(0)])
    with here.failing(1 << 18, kill):
        here.load([Shard(1)], exchange="once", engine="pread")


def late(here: World) -> None:
    """A process that does not come: the others give up at their deadline."""
    here.load([Shard(0)])
    if here.rank == 1:
        time.sleep(6)
        return
    here.load([Shard(0)], timeout=2)


def after(here: World) -> None:
    """What follows a load that was given up."""
    here.load([Shard(0)])


def peers(here: World, first: str, second: str) -> dict[str, Any]:
    return here.peers(SPECS[first], SPECS[second], f"{first}-{second}")


def main(cases: dict[str, Any]) -> None:
    rank, count, port = map(int, sys.argv[1:4])
    addresses = [f"127.0.0.1:{port + 1 + n}" for n in range(count)]
    os.environ |= {
        "PADDLE_TRAINER_ID": str(rank),
        "PADDLE_TRAINERS_NUM": str(count),
        "PADDLE_TRAINER_ENDPOINTS": ",".join(addresses),
        "PADDLE_CURRENT_ENDPOINT": addresses[rank],
        "PADDLE_MASTER": f"127.0.0.1:{port}",
        "PADDLE_DISTRI_BACKEND": "gloo",
    }
    if count > 1:
        dist.init_parallel_env()
    here = World(rank, count, Path(sys.argv[4]))
    world.play(here, cases)


if __name__ == "__main__":
    main(globals())
