"""One bench: a checkpoint, this machine's ceilings, and loaders in turns, warm and cold.

Each sample is taken in a fresh process. Noise then falls on all loaders alike, and it only adds, so
the best of several rounds says most.
"""

from __future__ import annotations

import os
import random
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mfload import api, errors, frameworks
from mfload.bench import ceilings, loaders, machine, results
from mfload.diagnostics import host
from mfload.errors import counted
from mfload.formats import checkpoint
from mfload.index import TensorInfo
from mfload.io import probes
from mfload.io.subprocess_probe import ask
from mfload.options import Options
from mfload.planning import selection
from mfload.planning.selection import Names
from mfload.report import human
from mfload.runtime import Deadline, cores

_PACKAGES = ("mfload", "safetensors", "fastsafetensors", "runai-model-streamer")
_SHARE = 0.35  # Of the memory left: the page cache holds the bytes once, a loader maybe twice.
_KEPT = 2  # Of the patterns that were tried, how many take turns with the loaders.
_CHILD = "mfload.bench.child"
ENV = {
    # Host memory is what is measured, also where there is a GPU.
    "JAX_PLATFORMS": "cpu",
    "CUDA_VISIBLE_DEVICES": "",
    "TF_CPP_MIN_LOG_LEVEL": "2",
    "RUNAI_STREAMER_LOG_LEVEL": "WARNING",
}

Watch = Callable[[int, int, str], None]
"""Told of progress: measurements done, measurements in all, and what is measured now."""


def bench(
    path: str,
    watch: Watch,
    *,
    frameworks: Sequence[str] = (),
    engines: Sequence[Any] = ("auto",),
    cases: Sequence[str] = results.CASES,
    rounds: int = 5,
    threads: int | None = None,
    names: Names = None,
    peers: bool = False,
    quick: bool = False,
    max_bytes: int = 4 << 30,
    timeout: float | None = None,
) -> dict[str, Any]:
    """Measures what `mfload bench --help` describes; writes nothing but a tiny file elsewhere.

    Returns:
        Plain data; docs/performance/bench.md describes the fields.

    Raises:
        UsageError: An argument is invalid, or there is nothing to measure.
    """
    for engine in engines:
        Options(engine=engine, threads=threads, timeout=timeout)  # Validates them.
    if rounds < 1:
        raise errors.UsageError("rounds must be 1 or more", found=rounds)
    watch(0, 0, "reading headers")
    job, notes = choose(path, names, max_bytes)
    entrants = entrants_of(frameworks, engines, peers=peers, everything=job["names"] is None)
    run = {"rounds": rounds, "threads": threads, "quick": quick}
    found: dict[str, Any] = {
        "schema": 3,  # Counts up when a field changes its meaning or goes.
        "machine": _machine(job["files"][0]),
        "run": machine.begun(**run),
        "checkpoint": _checkpoint(job, notes),
        "conditions": [],
        "impossible": {},
        "rows": [],
        "samples": [],
        "failed": [],
    }
    with tempfile.TemporaryDirectory(prefix="mfload-bench-") as folder:
        tiny = os.path.join(folder, "tiny.safetensors")
        api.save({"w": np.zeros(1024, np.float32)}, tiny)
        job |= {"warmup": tiny, "threads": threads}
        able = [name for name, why in entrants.items() if why is None]
        limit = Deadline(timeout).seconds
        for case in cases:
            cold = case == "cold"
            try:
                machine.fill_or_drop(job["extents"], cold=cold)
            except machine.UnfitError as error:
                found["impossible"][case] = str(error)
                continue
            trial = ceilings.trial(cores(), cold=cold, quick=quick)
            _measure_case(found, case, job | {"cold": cold}, trial, able, limit, watch)
    found["run"]["ended"] = machine.moment()
    found["rows"] = [row for case in cases for row in results.rows(found, case, entrants)]
    found["conditions"] = results.conditions(found)
    return found


def _checkpoint(job: dict[str, Any], notes: Sequence[str]) -> dict[str, Any]:
    """What is measured."""
    return {
        "path": job["path"],
        "files": len(job["files"]),
        "nbytes": job["nbytes"],
        "tensors": job["tensors"],
        "read_bytes": sum(stop - start for _, start, stop in job["extents"]),
        "whole": job["names"] is None,
        "notes": notes,
    }


def _machine(file: str) -> dict[str, str]:
    """The machine, the frameworks, and peers there are."""
    there = (each for each in host.frameworks() if each.data)
    packages = {name: host.installed([name]) for name in _PACKAGES}
    return {
        **machine.facts(file),
        **{each.what: each.found for each in there},
        **{name: version for name, version in packages.items() if version},
    }


def choose(path: str, names: Names, max_bytes: int) -> tuple[dict[str, Any], list[str]]:
    """What is read: the first tensors of known dtypes that fit; and what to say if not all do."""
    index, sources = checkpoint.read(path)
    if any(source.file is None for source in sources):
        what = "the engines and loaders that are compared read local files"
        raise errors.UsageError(what, expected="a path", found=index.files[0])
    selected = selection.select(index, names)
    room = probes.memory_room()
    limit, why = max_bytes, f"--max-bytes {errors.amount(max_bytes, max_bytes)}"
    if room is not None and room[0] * _SHARE < max_bytes:
        limit, why = int(room[0] * _SHARE), f"{human(room[0])} are left in the {room[1]}"
    rows: list[TensorInfo] = []
    nbytes = 0
    for row in selected:
        if row.dtype.known and nbytes + row.nbytes <= limit:
            rows.append(row)
            nbytes += row.nbytes
    everything = sum(row.nbytes for row in selected)
    if not nbytes:
        message = "nothing to measure: no tensor of a known dtype has bytes that fit"
        there = f"{counted(len(selected), 'tensor')} of {errors.amount(everything)}"
        raise errors.UsageError(
            message,
            file=path,
            expected=f"at most {errors.amount(limit, max_bytes)} ({why})",
            found=there,
        )
    part = f"{len(rows)} of {counted(len(selected), 'tensor')}"
    part += f", {human(nbytes)} of {human(everything)}"
    note = f"Measured: {part}: what fits ({why}) and has a known dtype."
    whole = len(rows) == len(index)
    extents = ceilings.extents_of(index, rows)
    job = {
        "path": os.path.abspath(path),
        "files": list(index.files) if whole else ceilings.paths_of(extents),
        "extents": extents,
        "nbytes": nbytes,
        "tensors": len(rows),
        "names": None if whole else [row.name for row in rows],
    }
    return job, [note] if len(rows) < len(selected) else []


def entrants_of(
    names: Sequence[str], engines: Sequence[str], *, peers: bool, everything: bool
) -> dict[str, str | None]:
    """The loaders for frameworks, all if none is named, and why some can't be measured."""
    wanted = dict.fromkeys(map(frameworks.resolve, names)) or frameworks.NAMES
    entrants = [loaders.ours(name, engine) for name in wanted for engine in engines]
    if peers:
        entrants += [each for each in loaders.PEERS.values() if each.framework in wanted]
    found: dict[str, str | None] = {}
    for each in entrants:
        found[each.name] = None
        if missing := each.missing():
            found[each.name] = f"not installed: {', '.join(missing)}"
        elif each.framework == "cupy":
            found[each.name] = "its arrays live on a GPU, and this measures host memory"
        elif each.kind == "peer" and not everything:
            found[each.name] = "it loads whole files only, and not all was measured"
    return found


def _measure_case(
    found: dict[str, Any],
    case: str,
    job: dict[str, Any],
    trial: Sequence[str],
    names: Sequence[str],
    limit: float | None,
    watch: Watch,
) -> None:
    """Measures the ceilings' patterns once each, then the best of them and loaders in turns."""
    rng = random.Random(found["run"]["seed"])
    rounds = found["run"]["rounds"]
    total = len(trial) + rounds * (len(names) + min(_KEPT, len(trial)))
    done = 0

    def take_rounds(label: str, left: list[str], count: int) -> None:
        nonlocal done
        for number in range(count):
            rng.shuffle(left)
            for name in list(left):
                watch(min(done, total), total, label)
                done += 1
                given = job | {"name": name}
                taken, why = ask(_CHILD, given=given, timeout=limit, environment=ENV)
                if why:
                    left.remove(name)
                    found["failed"].append({"case": case, "name": name, "why": why})
                else:
                    sample = {"case": label, "name": name, "round": number, **taken}
                    found["samples"].append(sample)

    take_rounds(f"{case} trial", list(trial), 1)
    # The fastest pattern, and the fastest of those that keep what they read.
    order = list(results.ranked(found["samples"], f"{case} trial"))
    keeping = [name for name in order if loaders.find(name).keeps]
    best = list(dict.fromkeys([*order[:1], *keeping[:1], *order]))[:_KEPT]
    take_rounds(case, [*best, *names], rounds)
