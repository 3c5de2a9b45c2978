"""What `benchmarks.stores` measures: one read of a checkpoint from a bucket.

    python -m benchmarks.stores_process JOB

Prints its sample.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from mfload.bench import machine

_BLOCK, _AT_ONCE = 8 << 20, 16


def _mfload(job: dict[str, Any]) -> list[Any]:
    import mfload

    options = mfload.Options(store=job["store"], threads=job.get("threads"))
    return list(mfload.load(job["url"], "numpy", options=options).values())


def _first(job: dict[str, Any]) -> list[Any]:
    """The first tensor of a stream."""
    import mfload

    with mfload.stream(job["url"], "numpy", options=mfload.Options(store=job["store"])) as found:
        return [next(iter(found))[1]]


def _eighth(job: dict[str, Any]) -> list[Any]:
    """What one of eight processes takes that hold the rows of all tensors together."""
    import mfload

    options = mfload.Options(store=job["store"])
    how: dict[str, Any] = {"shardings": [(".*", 0)], "shard": (3, 8), "options": options}
    return list(mfload.load(job["url"], "numpy", **how).values())


def _ranges(job: dict[str, Any]) -> list[tuple[str, int, int]]:
    found: list[tuple[str, int, int]] = []
    for key, size in job["files"]:
        found += [(key, at, min(at + _BLOCK, size)) for at in range(0, size, _BLOCK)]
    return found


def _joined(job: dict[str, Any], read: Callable[[str, int, int], Any]) -> list[Any]:
    """Each file in memory, read by threads in blocks."""
    made = {key: np.empty(size, np.uint8) for key, size in job["files"]}

    def take(block: tuple[str, int, int]) -> None:
        key, start, stop = block
        made[key][start:stop] = np.frombuffer(read(key, start, stop), np.uint8)

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        list(pool.map(take, _ranges(job)))
    return list(made.values())


def _obstore(job: dict[str, Any]) -> list[Any]:
    import obstore
    import obstore.store

    plain = {"allow_http": True}
    store = obstore.store.S3Store(job["bucket"], client_options=plain, **job["store"])
    return _joined(
        job, lambda key, start, stop: obstore.get_range(store, key, start=start, end=stop)
    )


def _s3fs(job: dict[str, Any]) -> list[Any]:
    """Copies all files into a directory of memory, and maps them: SeaweedFS refuses its ranges."""
    import s3fs  # pyright: ignore[reportMissingImports]

    settings, made = job["store"], s3fs  # pyright: ignore[reportUnknownVariableType]
    system: Any = made.S3FileSystem(
        key=settings["access_key_id"],
        secret=settings["secret_access_key"],
        endpoint_url=settings["endpoint"],
    )
    with tempfile.TemporaryDirectory(dir=job["memory"]) as folder:
        keys = [f"{job['bucket']}/{key}" for key, _ in job["files"]]
        system.get(keys, [f"{folder}/{key.rpartition('/')[2]}" for key in keys])
        return _mapped(folder)


def _mapped(folder: str) -> list[Any]:
    return [np.memmap(path, np.uint8, "r") for path in sorted(Path(folder).iterdir())]


def _s5cmd(job: dict[str, Any]) -> list[Any]:
    """Copies all files into a directory of memory, and maps them."""
    with tempfile.TemporaryDirectory(dir=job["memory"]) as folder:
        command = [job["s5cmd"], "--endpoint-url", job["store"]["endpoint"], "--log", "error"]
        subprocess.run([*command, "cp", f"{job['url']}/*", folder], check=True)
        return _mapped(folder)


def _tensorstore(job: dict[str, Any]) -> list[Any]:
    """Each file whole, all at once: its bindings of Python read no ranges."""
    import tensorstore

    settings = job["store"]
    spec = {"driver": "s3", "bucket": job["bucket"], "endpoint": settings["endpoint"]}
    spec |= {"aws_region": settings["region"], "aws_credentials": {"type": "environment"}}
    store = tensorstore.KvStore.open(spec).result()
    asked = [store.read(key) for key, _ in job["files"]]
    return [np.frombuffer(each.result().value, np.uint8) for each in asked]


def _runai(job: dict[str, Any]) -> list[Any]:
    """Tensors of PyTorch, which its buffers hold."""
    import runai_model_streamer as runai  # pyright: ignore[reportMissingImports]

    streamer: Any = runai.SafetensorsStreamer()  # pyright: ignore[reportUnknownMemberType]
    with streamer:
        streamer.stream_files([f"s3://{job['bucket']}/{key}" for key, _ in job["files"]])
        return [tensor.numpy() for _, tensor in streamer.get_tensors()]


def _of_hub(job: dict[str, Any]) -> list[Any]:
    import mfload

    return list(mfload.load(f"hf://{job['model']}", "numpy").values())


def _hub(job: dict[str, Any]) -> list[Any]:
    """Downloads all files into a directory of memory, and makes arrays of them."""
    from huggingface_hub import snapshot_download
    from safetensors.numpy import load_file

    with tempfile.TemporaryDirectory(dir=job["memory"]) as folder:
        there = Path(snapshot_download(job["model"], local_dir=folder))
        loaded = [load_file(path) for path in sorted(there.glob("*.safetensors"))]
        return [array for each in loaded for array in each.values()]


WAYS: dict[str, Callable[[dict[str, Any]], list[Any]]] = {
    "mfload": _mfload,
    "mfload-first": _first,
    "mfload-eighth": _eighth,
    "mfload-hub": _of_hub,
    "hub": _hub,
    "obstore": _obstore,
    "runai": _runai,
    "s3fs": _s3fs,
    "s5cmd": _s5cmd,
    "tensorstore": _tensorstore,
}


def _touched(arrays: Sequence[Any]) -> int:
    return sum(int(each.reshape(-1).view(np.uint8)[::4096].sum(dtype=np.int64)) for each in arrays)


def main() -> None:
    """Reads the tiny checkpoint, and then the large one on the clock."""
    import resource

    job = json.loads(sys.argv[1])
    way = WAYS[job["name"]]
    _touched(way({**job, **job["tiny"]}))
    machine.prime((256 << 20) + job["nbytes"] * 3 // 2)
    machine.reset_peak()
    before = machine.memory_status("VmRSS")
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    used, start = time.process_time(), time.perf_counter()
    arrays = way(job)
    _touched(arrays)
    said: dict[str, Any] = {"seconds": time.perf_counter() - start}
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    more = after.ru_utime + after.ru_stime - children.ru_utime - children.ru_stime
    said["cpu_s"] = time.process_time() - used + more
    held = sum(each.nbytes for each in arrays)
    said["peak_over"] = machine.memory_status("VmHWM") - before - held
    said["held"] = held
    print(json.dumps(said))


if __name__ == "__main__":
    main()
