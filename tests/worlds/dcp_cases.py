"""What each process does in a test of torch.distributed.checkpoint (see `launching`).

python dcp_cases.py RANK COUNT PORT DIRECTORY CASE…
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import world
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, empty
from world import World, io_error

from mfload import Options, Report
from mfload.compat.dcp import HuggingFaceReader


def state(reader: Any, world: World, how: str) -> dict[str, Any]:
    """A state dict of what a checkpoint holds, of ones."""
    mesh = init_device_mesh("cpu", (world.count,))
    grid = init_device_mesh("cpu", (2, world.count // 2)) if world.count > 2 else mesh
    made: dict[str, Any] = {}
    for n, (name, row) in enumerate(reader.read_metadata().state_dict_metadata.items()):
        kind, dims = row.properties.dtype, len(row.size)
        if "converted" in how:
            kind = torch.float32 if kind.is_floating_point else torch.int64
        if how.startswith("plain") or not dims:
            made[name] = torch.empty(row.size, dtype=kind)
        elif how.startswith("strided"):
            made[name] = torch.empty(*row.size, 2, dtype=kind)[..., 0]
        elif how.startswith("grid") and world.count > 2:
            placed = [Shard(0), Shard(dims - 1) if n % 2 else Replicate()]
            made[name] = empty(row.size, dtype=kind, device_mesh=grid, placements=placed)
        else:
            placed = [Replicate()] if how.startswith("replicated") else [Shard(n % dims)]
            made[name] = empty(row.size, dtype=kind, device_mesh=mesh, placements=placed)
    return made


def units(tensor: Any) -> Any:
    """Its bytes."""
    return tensor.clone(memory_format=torch.contiguous_format).flatten().view(torch.uint8)


def values(world: World, how: str, where: str, **options: Any) -> dict[str, Any]:
    """Loads with both readers, and compares everything."""
    path = world.directory / where
    theirs = dcp.HuggingFaceStorageReader(str(path))
    report = Report()
    ours = HuggingFaceReader(path, options=Options(timeout=20, **options), report=report)
    mine, expected = ours.read_metadata(), theirs.read_metadata()
    assert mine.state_dict_metadata == expected.state_dict_metadata
    assert mine.storage_data.keys() == expected.storage_data.keys()
    one, other = state(ours, world, how), state(ours, world, how)
    dcp.load(other, storage_reader=theirs)
    with world.counted():
        dcp.load(one, storage_reader=ours)
    held = 0
    for name, wanted in other.items():
        given = one[name]
        if isinstance(wanted, DTensor):
            given, wanted = given.to_local(), wanted.to_local()
        held += wanted.nbytes
        assert torch.equal(units(given), units(wanted)), name
    assert report.result_bytes == held
    assert "meta" not in how or report.processes == world.count
    return {
        "read": report.read_bytes,
        "held": held,
        "exchanged": report.exchanged_bytes,
        "notes": report.notes,
    }


def failed(world: World, path: Path, **options: Any) -> dict[str, Any]:
    """What a load that fails on process 1 raises on each."""
    wanted = state(HuggingFaceReader(world.model), world, "sharded")
    ours = HuggingFaceReader(path, options=Options(timeout=20, **options))
    try:
        with world.failing(0, io_error) if path == world.model else world.counted():
            dcp.load(wanted, storage_reader=ours)
    except dcp.api.CheckpointException as error:
        found = {rank: each for rank, (each, _) in error.failures.items()}
        return {
            "kinds": {rank: type(each).__name__ for rank, each in found.items()},
            "texts": [str(each) for each in found.values()],
        }
    return {"kinds": {}}


def damaged(world: World, what: str) -> dict[str, Any]:
    path = world.model
    if world.rank == 1:
        path = world.own()
        first, second = sorted(path.glob("*.safetensors"))
        if what == "missing":
            second.unlink()
        elif what == "cut":
            os.truncate(first, first.stat().st_size - 1)
        elif what == "other":
            data = bytearray(first.read_bytes())
            data[-5:] = b"other"
            first.write_bytes(data)
    return failed(world, path if world.rank == 1 else world.model.absolute() / ".", exchange="once")


def run(world: World, case: str) -> dict[str, Any] | None:
    what, *given = case.split(":")
    if what == "values":
        how, where, exchange = given
        limit = {"max_host_overhead": 8 << 20} if "converted" in how else {}
        return values(world, how, where, exchange=exchange, **limit)
    if what == "damaged":
        return damaged(world, *given)
    if what == "disk":
        return failed(world, world.model, exchange=given[0])
    raise AssertionError(case)


def main() -> None:
    rank, count, port, directory = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    dist.init_process_group("gloo", rank=rank, world_size=count)
    here = World(rank, count, Path(directory))
    world.said(here, sys.argv[5:], lambda case: run(here, case))
    world.leave(here)


if __name__ == "__main__":
    main()
