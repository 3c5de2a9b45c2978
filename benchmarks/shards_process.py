"""One of several processes of PyTorch that load a checkpoint together.

Each is forked from a process that has imported PyTorch and done nothing else. It loads a tiny
checkpoint, says `ready`, waits for `go`, and answers.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypedDict

from benchmarks.mesh_layouts import LAYOUTS
from benchmarks.process import ENV, ChildError
from benchmarks.runner import Case, prepare
from benchmarks.subject import Subject
from mfload.bench import machine

IMPORTED = ("torch.distributed.tensor", "torch.distributed.checkpoint", "torch._dynamo",
            "fastsafetensors", "mfload.mesh.torch_backend")  # fmt: skip
_TIMEOUT = 120.0
BLOCK = 16 << 20
Loaded = tuple[dict[str, Any], int, int, list[str]]
"""Arrays of this process, bytes that it read and that came from others, and notes."""


class Job(TypedDict):
    """What a process is told."""

    rank: int
    processes: int
    port: int
    layout: str
    loader: str
    folder: str
    warmup: str


class Answer(TypedDict):
    """What it answers. Seconds, and bytes."""

    seconds: float
    cpu_s: float
    read: int
    exchanged: int
    notes: list[str]
    total: int
    """The sum of its shards' pages."""
    peak_over: int
    """Peak of resident memory, less that before, less its shards."""


def dim_of(layout: str, name: str) -> int | None:
    """Along which dim a tensor is cut."""
    spec = LAYOUTS[layout].spec(name)
    return spec.index("tp") if "tp" in spec else None


def _headers(folder: str) -> dict[str, dict[str, tuple[list[int], int]]]:
    """Shape and bytes of each tensor of each file."""
    found: dict[str, dict[str, tuple[list[int], int]]] = {}
    for path in sorted(Path(folder).glob("*.safetensors")):
        with open(path, "rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        header.pop("__metadata__", None)
        found[str(path)] = {
            name: (each["shape"], each["data_offsets"][1] - each["data_offsets"][0])
            for name, each in header.items()
        }
    return found


def _ceiling(job: Job, mesh: Any) -> Loaded:
    """One process reads all the bytes, from two threads into fresh huge pages."""
    import torch

    from mfload.io import buffers

    made: dict[str, Any] = {}
    if job["rank"]:
        return made, 0, 0, []
    for path in sorted(Path(job["folder"]).glob("*.safetensors")):
        memory, size = buffers.allocate(path.stat().st_size), path.stat().st_size
        fd = os.open(path, os.O_RDONLY)

        def read(first: int, fd: int = fd, memory: Any = memory, size: int = size) -> None:
            for start in range(first, size, 2 * BLOCK):
                os.preadv(fd, [memory[start : start + BLOCK]], start)

        threads = [threading.Thread(target=read, args=(n * BLOCK,)) for n in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        os.close(fd)
        made[str(path)] = torch.from_numpy(memory)
    return made, sum(each.numel() for each in made.values()), 0, []


def _floor(job: Job, mesh: Any) -> Loaded:
    """Each of two processes reads half of the bytes, and sends it to the other meanwhile."""
    import torch
    import torch.distributed as dist

    from mfload.io import buffers

    made, blocks = dict[str, Any](), list[tuple[int, int, Any]]()
    for path in sorted(Path(job["folder"]).glob("*.safetensors")):
        fd, size = os.open(path, os.O_RDONLY), path.stat().st_size
        memory = buffers.allocate(size)
        blocks += [(fd, at, memory[at : at + BLOCK]) for at in range(0, size, BLOCK)]
        made[str(path)] = torch.from_numpy(memory)
    rank, ready = job["rank"], queue.SimpleQueue[Any]()
    mine, theirs = blocks[rank::2], blocks[1 - rank :: 2]

    def read() -> None:
        for fd, start, memory in mine:
            os.preadv(fd, [memory], start)
            ready.put(torch.from_numpy(memory))

    thread = threading.Thread(target=read)
    thread.start()
    for number in range(max(len(mine), len(theirs))):
        works: list[Any] = []
        if number < len(theirs):
            works.append(dist.irecv(torch.from_numpy(theirs[number][2]), 1 - rank))
        if number < len(mine):
            works.append(dist.isend(ready.get(), 1 - rank))
        for work in works:
            work.wait()
    thread.join()
    for fd in {fd for fd, _, _ in blocks}:
        os.close(fd)
    own, came = (sum(memory.size for _, _, memory in some) for some in (mine, theirs))
    return made, own, came, []


def _mfload(exchange: str) -> Callable[[Job, Any], Loaded]:
    def load(job: Job, mesh: Any) -> Loaded:
        from torch.distributed.tensor import Replicate, Shard

        import mfload

        report = mfload.Report()
        names = [name for each in _headers(job["folder"]).values() for name in each]
        dims = {name: dim_of(job["layout"], name) for name in names}
        made = mfload.load(
            job["folder"],
            "torch",
            mesh=mesh,
            shardings={n: Replicate() if d is None else Shard(d) for n, d in dims.items()},
            options=mfload.Options(exchange=exchange, timeout=100),  # pyright: ignore
            report=report,
        )
        arrays = {name: array.to_local() for name, array in made.items()}
        return arrays, report.read_bytes, report.exchanged_bytes, list(report.notes)

    return load


def _fastsafetensors(job: Job, mesh: Any) -> Loaded:
    """Files are dealt out; a tensor is broadcast or scattered by the process that has its file."""
    import torch.distributed as dist
    from fastsafetensors import SafeTensorsFileLoader

    headers = _headers(job["folder"])
    count = job["processes"]
    dealt = {rank: list(headers)[rank::count] for rank in range(count)}
    loader = SafeTensorsFileLoader(dist.group.WORLD, "cpu", nogds=True)
    loader.add_filenames({rank: files for rank, files in dealt.items() if files})
    buffers = loader.copy_files_to_device()
    made: dict[str, Any] = {}
    came = 0
    for path, tensors in headers.items():
        for name, (_, nbytes) in tensors.items():
            dim = dim_of(job["layout"], name)
            whole = dim is None
            made[name] = buffers.get_tensor(name) if whole else buffers.get_sharded(name, dim)
            if path not in dealt[job["rank"]]:
                came += nbytes if whole else nbytes // count
    made[""] = buffers  # What it holds counts as held.
    own = sum(os.path.getsize(path) for path in dealt[job["rank"]])
    return made, own, came, []


def _storage_reader(job: Job, mesh: Any) -> Loaded:
    """torch.distributed.checkpoint into DTensors that are made for it."""
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import HuggingFaceStorageReader
    from torch.distributed.tensor import DTensor, Replicate, Shard

    target: dict[str, Any] = {}
    own = 0
    for tensors in _headers(job["folder"]).values():
        for name, (shape, nbytes) in tensors.items():
            dim, local = dim_of(job["layout"], name), list(shape)
            if dim is not None:
                local[dim] //= job["processes"]
                nbytes //= job["processes"]
            own += nbytes
            spec = Replicate() if dim is None else Shard(dim)
            part = torch.empty(local, dtype=torch.bfloat16)
            target[name] = DTensor.from_local(part, mesh, [spec], run_check=False)
    dcp.load(target, storage_reader=HuggingFaceStorageReader(job["folder"]))
    return {name: array.to_local() for name, array in target.items()}, own, 0, []


LOADERS: dict[str, Callable[[Job, Any], Loaded]] = {
    "ceiling": _ceiling,
    "floor": _floor,
    "mfload/never": _mfload("never"),
    "mfload/once": _mfload("once"),
    "fastsafetensors": _fastsafetensors,
    "torch": _storage_reader,
}


def _touch(arrays: dict[str, Any]) -> int:
    """Reads a byte of each page; the same for the same values, however they lie."""
    import torch

    shaped = (array.reshape(array.shape or (1,)) for array in arrays.values())
    rows = (array.view(torch.uint8) for array in shaped)
    return sum(int(each[..., ::4096].sum(dtype=torch.int64)) for each in rows)


def _measure(job: Job, parent: Any) -> Answer:
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    torch.set_num_threads(1)
    place = f"tcp://127.0.0.1:{job['port']}"
    dist.init_process_group(
        "gloo", init_method=place, rank=job["rank"], world_size=job["processes"]
    )
    mesh, load = init_device_mesh("cpu", (job["processes"],)), LOADERS[job["loader"]]
    load({**job, "folder": job["warmup"]}, mesh)
    gc.collect()
    parent.send("ready")
    parent.recv()
    before = machine.memory_status("VmRSS")
    machine.reset_peak()
    dist.barrier()
    start, cpu = time.perf_counter(), time.process_time()
    arrays, read, came, notes = load(job, mesh)
    kept = arrays.pop("", None)
    total = _touch(arrays)
    end, cpu_end = time.perf_counter(), time.process_time()
    peak = machine.memory_status("VmHWM")
    del kept
    return {
        "seconds": end - start,
        "cpu_s": cpu_end - cpu,
        "read": read,
        "exchanged": came,
        "notes": notes,
        "total": total,
        "peak_over": peak - before - sum(each.numel() * each.itemsize for each in arrays.values()),
    }


def serve(job: Job, parent: Any) -> None:
    """Does one job, in a process of its own, which it ends."""
    try:
        parent.send(_measure(job, parent))
        parent.recv()  # All stay until each is done: the others would be told to end.
    except Exception as error:  # noqa: BLE001 - the parent tells of it
        parent.send(f"{type(error).__name__}: {error}"[:300])
    os._exit(0)


def answers(jobs: Sequence[Job], case: Case, subject: Subject) -> tuple[list[Answer], float | None]:
    """What processes answer, each to its job, and the share in the page cache before.

    Raises ChildError if one fails or hangs.
    """
    os.environ.update(ENV)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["__main__", __name__, *IMPORTED])
    with ExitStack() as stack:
        started: list[tuple[Any, Any]] = []
        for job in jobs:
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(job, theirs), daemon=True)
            process.start()
            theirs.close()
            started.append((process, ours))
            stack.callback(process.join)
            stack.callback(process.kill)

        def hear() -> list[Any]:
            until, heard = time.monotonic() + _TIMEOUT, list[Any]()
            for process, pipe in started:
                if not pipe.poll(max(0.0, until - time.monotonic())):
                    raise ChildError(f"no answer within {_TIMEOUT:g} s")
                try:
                    heard.append(pipe.recv())
                except EOFError:
                    process.join()
                    raise ChildError(f"ended with status {process.exitcode}") from None
                if isinstance(heard[-1], str) and heard[-1] != "ready":
                    raise ChildError(heard[-1])
            return heard

        hear()
        cached = prepare(case, subject)
        for _, pipe in started:
            pipe.send("go")
        found = hear()
        for _, pipe in started:
            pipe.send("done")
    return found, cached
