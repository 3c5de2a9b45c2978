"""Random reads: how fast this machine gives small blocks, by their size and by how many at once.

What stays on a disk until it is needed is read like that (see `mfload.ondemand`). The engine is the
one that reads it there, `mfload.io.gather`, always past the page cache.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from mfload import errors
from mfload.bench import machine
from mfload.bench.measuring import Watch
from mfload.diagnostics import host
from mfload.io import buffers
from mfload.io.gather import Gather, ReadColumns, open_gather
from mfload.io.subprocess_probe import ask
from mfload.report import human
from mfload.sources.local import LocalFile

ENGINES = ("io_uring", "threads")
BLOCKS = tuple(4096 << n for n in range(9))
DEPTHS = tuple(1 << n for n in range(8))
_QUICK = BLOCKS[::2], (1, 8, 32, 128)
_BRIEF = BLOCKS[::4], (1, 16, 128)
_SECONDS, _QUICK_SECONDS = 28.0, 7.0
_WRITING = 10.0  # Seconds that a scratch file may take.
_ROUNDS = 2
_ENOUGH = 256 << 20  # Of a smaller file, a disk may still know what it has read.
_CHILD = "mfload.bench.random_reads"

Found = dict[str, Any]
"""What `bench` gives; docs/performance/bench.md describes it."""


def bench(
    paths: Sequence[str],
    watch: Watch,
    *,
    folder: str | None = None,
    engines: Sequence[str] = ENGINES,
    quick: bool = False,
    max_bytes: int = 4 << 30,
    timeout: float | None = None,
) -> Found:
    """Measures random reads of files, or of a scratch file in `folder`, which is deleted.

    Raises:
        UsageError: An engine is unknown, or the files lie in memory.
        TargetError: The scratch file can't be written.
    """
    for engine in engines:
        errors.check_choice("engine", engine, ENGINES)
    place = folder or paths[0]
    kind = machine.file_system(place)
    if kind in machine.MEMORY_FILE_SYSTEMS:
        what = f"{kind} keeps its files in memory, so there is no disk to measure"
        raise errors.UsageError(what, file=place, expected="a place on a disk")
    run = machine.begun(quick=quick)
    blocks, depths = _QUICK if quick else (BLOCKS, DEPTHS)
    seconds = (_QUICK_SECONDS if quick else _SECONDS) / len(engines)
    points: list[dict[str, Any]] = []
    impossible: dict[str, str] = {}
    with _files(paths, folder, max_bytes, watch) as files:
        nbytes = sum(map(os.path.getsize, files))
        for number, engine in enumerate(engines):
            watch(number, len(engines), engine)
            given = {"files": files, "engine": engine, "blocks": blocks, "depths": depths,
                     "seconds": seconds, "seed": run["seed"]}  # fmt: skip
            taken, why = ask(_CHILD, given=given, timeout=timeout)
            if why or taken["why"]:
                impossible[engine] = why or taken["why"]
            points += [] if why else taken["points"]
    found: Found = {
        "schema": 1,  # Counts up when a field changes its meaning or goes.
        "kind": "random reads",
        "machine": machine.facts(place),
        "run": run,
        "file": {"path": os.path.abspath(place), "nbytes": nbytes, "scratch": folder is not None},
        "conditions": [],
        "impossible": impossible,
        "points": points,
    }
    run["ended"] = machine.moment()
    found["conditions"] = _conditions(found)
    return found


@contextmanager
def _files(
    paths: Sequence[str], folder: str | None, nbytes: int, watch: Watch
) -> Generator[Sequence[str]]:
    if folder is None:
        yield paths
        return
    watch(0, 0, "writing a scratch file")
    # It has no name, so that nothing is left of it, however this process ends.
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        left = min(nbytes, shutil.disk_usage(folder).free // 4)
        rng, end = np.random.Generator(np.random.SFC64()), time.monotonic() + _WRITING
        with errors.AsTarget(folder, "write a scratch file"):
            while left > 0 and (time.monotonic() < end or file.tell() < _ENOUGH):
                left -= file.write(rng.bytes(min(left, 16 << 20)))
            os.fsync(file.fileno())
        yield [f"/proc/{os.getpid()}/fd/{file.fileno()}"]


def measure(
    files: Sequence[str],
    engine: Any = "auto",
    blocks: Sequence[int] = _BRIEF[0],
    depths: Sequence[int] = _BRIEF[1],
    seconds: float = 2.0,
    seed: int = 0,
) -> dict[str, Any]:
    """Measures an engine in this process, the best of two rounds.

    Args:
        files: What is read; the page cache is bypassed.
        blocks: Bytes of a read, multiples of 4 KiB.
        depths: Reads under way at once.
        seconds: How long all of it takes, at least.

    Returns:
        `points`, with `engine`, `block`, `depth`, `gb_per_s`, `cpu_us` (microseconds of CPU time a
        read) and `reads`; and `why` there is none, else "".
    """
    sources = [LocalFile(each) for each in files]
    sizes = np.array([source.size for source in sources])
    whole = [block for block in blocks if sizes.max() >= block]
    if not whole:
        return {"points": [], "why": f"the files are shorter than {human(min(blocks))}"}
    limit = seconds / _ROUNDS / len(whole) / len(depths)
    memory = buffers.allocate(max(whole) * max(depths))
    rng = np.random.default_rng(seed)
    best: dict[tuple[int, int], dict[str, Any]] = {}
    try:
        for _, depth in itertools.product(range(_ROUNDS), rng.permutation(depths).tolist()):
            how: Any = {"files": "direct", "page_cache": "bypass", "depth": depth}
            with open_gather(sources, engine=engine, **how) as gather:
                if not gather.direct:
                    return {"points": [], "why": gather.why}
                if depth > gather.depth:
                    continue
                for block in rng.permutation(whole).tolist():
                    point = _point(gather, sizes, memory, block, depth, limit, rng)
                    kept = best.get((block, depth))
                    if kept is None or point["gb_per_s"] > kept["gb_per_s"]:
                        best[block, depth] = point
    except errors.UsageError as error:  # The engine does not work here.
        return {"points": [], "why": str(error.found or error)}
    return {"points": [best[case] for case in sorted(best)], "why": ""}


def _point(
    gather: Gather, sizes: Any, memory: Any, block: int, depth: int, limit: float, rng: Any
) -> dict[str, Any]:
    ends = np.cumsum(sizes // block)
    count, total, seconds, cpu = 4 * depth, 0, 0.0, 0.0
    warm = False  # The first batch makes what the engine reads with.
    while seconds < limit:
        drawn = rng.integers(0, ends[-1], count)
        source = np.searchsorted(ends, drawn, "right")
        offset = (drawn - (ends - sizes // block)[source]) * block
        address = memory.ctypes.data + np.arange(count) % depth * block
        reads = ReadColumns.of(source, offset, address, np.full(count, block))
        before, start = time.process_time(), time.perf_counter()
        gather.read(reads)
        if warm:
            took = time.perf_counter() - start
            seconds, cpu, total = seconds + took, cpu + time.process_time() - before, total + count
            if took < limit / 4:
                count *= 2  # Beginning and end of a batch are not at full depth.
        warm = True
    return {
        "engine": gather.name,
        "block": block,
        "depth": depth,
        "gb_per_s": round(total * block / seconds / 1e9, 5),
        "cpu_us": round(cpu / total * 1e6, 3),
        "reads": total,
    }


def _conditions(found: Found) -> list[str]:
    about, run = found["file"], found["run"]
    what = "a scratch file of random bytes, deleted since" if about["scratch"] else about["path"]
    said = [
        "; ".join(f"{what}: {found}" for what, found in found["machine"].items()) + ".",
        f"{human(about['nbytes'])} of {what}, read with O_DIRECT, so past the page cache; each "
        f"engine in a fresh process, the best of {_ROUNDS} rounds in random order.",
    ]
    if about["nbytes"] < _ENOUGH:
        said.append(f"It has less than {human(_ENOUGH)}: the disk may answer from a cache.")
    if host.virtual(Path("/")):
        said.append("This is a virtual machine: its host may answer from memory.")
    said += [f"{engine}: not measured: {why}." for engine, why in found["impossible"].items()]
    return [*said, f"The load average was {run['load_average']} at the start."]


def draw(found: Found, path: Path) -> bool:
    """Draws GB/s over the size of a block, a panel an engine and a line a depth.

    Returns:
        Whether there was anything to draw.
    """
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    points = found["points"]
    engines = list(dict.fromkeys(point["engine"] for point in points))
    if not engines:
        return False
    figure = Figure(figsize=(8, 0.5 + 2.8 * len(engines)), layout="constrained")
    depths = sorted({point["depth"] for point in points})
    panels = figure.subplots(len(engines), 1, squeeze=False, sharex=True, sharey=True)[:, 0]
    for axes, engine in zip(panels, engines, strict=True):
        for number, depth in enumerate(depths):
            own = [p for p in points if (p["engine"], p["depth"]) == (engine, depth)]
            colour = colormaps["viridis"](number / max(1, len(depths)))
            x, y = [p["block"] / 1024 for p in own], [p["gb_per_s"] for p in own]
            axes.plot(x, y, marker="o", ms=3.5, color=colour, label=str(depth))
        blocks = sorted({point["block"] // 1024 for point in points})
        axes.set_xscale("log", base=2)
        axes.set_xticks(blocks, [f"{block}" if block < 1024 else "1M" for block in blocks])
        axes.set_ylabel("GB/s")
        axes.set_title(engine, loc="left", fontweight="bold")
        axes.grid(color="#e4e6ea")
        axes.spines[["top", "right"]].set_visible(False)
    panels[-1].set_xlabel("KiB a read")
    panels[0].set_ylim(bottom=0)
    panels[0].legend(title="at once")
    m = found["machine"]
    figure.suptitle(f"Random reads; {m['processor']}, {m['file system']}", fontsize=10)
    figure.savefig(path, dpi=150)
    return True


if __name__ == "__main__":
    print("\n" + json.dumps(measure(**json.load(sys.stdin))), flush=True)
