"""One bench: a checkpoint, this machine's ceilings, and loaders in turns, warm and cold.

Each sample is taken in a fresh process. Noise then falls on all loaders alike, and it only adds, so
the best of several rounds says most.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from mfload import api, errors, frameworks
from mfload.bench import ceilings, loaders, machine, results
from mfload.bench.ceilings import PATTERNS, Pattern
from mfload.bench.child import Job
from mfload.bench.loaders import LOADERS, SPAN
from mfload.formats import checkpoint
from mfload.index import TensorInfo
from mfload.io import probes
from mfload.options import Options
from mfload.planning import selection
from mfload.planning.selection import Names
from mfload.report import human
from mfload.runtime import Deadline

_SHARE = 0.35  # Of the memory left: the page cache holds the bytes once, a loader maybe twice.
_KEPT = 2  # Of the patterns that were tried, how many take turns with the loaders.
ENV = {
    # Host memory is what is measured, also where there is a GPU.
    "JAX_PLATFORMS": "cpu",
    "CUDA_VISIBLE_DEVICES": "",
    "TF_CPP_MIN_LOG_LEVEL": "2",
    "RUNAI_STREAMER_LOG_LEVEL": "WARNING",
}
ROOT = Path(__file__).parents[2]

Watch = Callable[[int, int, str], None]
"""Told of progress: measurements done, measurements in all, and what is measured now."""


class ChildError(Exception):
    """A measuring process failed or hung; the message says why, or is the end of its log."""


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
    if not sys.platform.startswith("linux"):
        raise errors.DeviceError(
            "mfload bench needs Linux: no other system says what it caches",
            expected="linux",
            found=sys.platform,
        )
    for engine in engines:
        Options(engine=engine, threads=threads, timeout=timeout)  # Validates them.
    if rounds < 1:
        raise errors.UsageError("rounds must be 1 or more", found=rounds)
    watch(0, 0, "reading headers")
    job, notes = choose(path, names, max_bytes)
    entrants = entrants_of(frameworks, engines, peers=peers, everything=job["names"] is None)
    found: dict[str, Any] = {
        "schema": 1,  # Counts up when a field changes its meaning or goes.
        "machine": machine.describe(job["files"][0]),
        "run": {
            "seed": random.SystemRandom().randrange(2**32),
            "rounds": rounds,
            "threads": threads,
            "quick": quick,
            "busy_share": {},
            "started": time.strftime("%Y-%m-%d %H:%M"),
        },
        "checkpoint": {
            "path": job["path"],
            "files": len(job["files"]),
            "nbytes": job["nbytes"],
            "tensors": job["tensors"],
            "read_bytes": sum(stop - start for _, start, stop in job["extents"]),
            "whole": job["names"] is None,
            "notes": notes,
        },
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
            if why := machine.why_not(job["extents"], cold=cold):
                found["impossible"][case] = why
                continue
            trial = ceilings.trial(probes.cores(), cold=cold, quick=quick)
            _measure_case(found, case, job | {"cold": cold}, trial, able, limit, watch)
    found["run"]["ended"] = time.strftime("%Y-%m-%d %H:%M")
    found["rows"] = [row for case in cases for row in results.rows(found, case, entrants)]
    found["conditions"] = results.conditions(found)
    return found


def choose(path: str, names: Names, max_bytes: int) -> tuple[Job, list[str]]:
    """What is read: the first tensors of known dtypes that fit; and what to say if not all do."""
    index, _ = checkpoint.read(path)
    selected = selection.select(index, names)
    room = probes.memory_room()
    limit, why = max_bytes, f"--max-bytes {human(max_bytes)}"
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
        raise errors.UsageError(
            "nothing to measure: no tensor of a known dtype has bytes that fit",
            file=path,
            expected=f"a tensor of 1 to {limit} bytes ({why})",
            found=f"{len(selected)} tensors of {everything} bytes",
        )
    part = f"{len(rows)} of {len(selected)} tensors, {human(nbytes)} of {human(everything)}"
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
        theirs = (each for each in LOADERS.values() if not each.ours)
        entrants += [each for each in theirs if each.framework in wanted]
    found: dict[str, str | None] = {}
    for each in entrants:
        found[each.name] = None
        if missing := each.missing():
            found[each.name] = f"not installed: {', '.join(missing)}"
        elif each.framework not in SPAN:
            found[each.name] = "its arrays live on a GPU, and this measures host memory"
        elif not each.ours and not everything:
            found[each.name] = "it loads whole files only, and not all was measured"
    return found


def _measure_case(
    found: dict[str, Any],
    case: str,
    job: Job,
    trial: Sequence[Pattern],
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
                try:
                    taken = run_child(job | {"name": name}, limit)
                except ChildError as error:
                    left.remove(name)
                    found["failed"].append({"case": case, "name": name, "why": str(error)})
                else:
                    sample = {"case": label, "name": name, "round": number, **taken}
                    found["samples"].append(sample)

    busy = machine.busy_share(0.3)
    take_rounds(f"{case} trial", [pattern.name for pattern in trial], 1)
    # The fastest pattern, and the fastest of those that keep what they read.
    order = list(results.ranked(found["samples"], f"{case} trial"))
    fresh = [name for name in order if not PATTERNS[name].reuse]
    best = list(dict.fromkeys([*order[:1], *fresh[:1], *order]))[:_KEPT]
    take_rounds(case, [*best, *names], rounds)
    found["run"]["busy_share"][case] = round(max(busy, machine.busy_share(0.3)), 3)


def run_child(job: Job, timeout: float | None) -> dict[str, Any]:
    """Measures once, in a fresh process."""
    # An installed mfload is found without help, a source tree is not.
    paths = [] if ROOT.name.endswith("-packages") else [str(ROOT)]
    path = os.pathsep.join([*paths, *filter(None, [os.getenv("PYTHONPATH")])])
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        # A session of its own: Ctrl-C reaches this process, which then ends it and all it started.
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "mfload.bench.child", str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env={**os.environ, **ENV, **({"PYTHONPATH": path} if path else {})},
            start_new_session=True,
        )
        with process:
            try:
                out, _ = process.communicate(json.dumps(job), timeout)
            except subprocess.TimeoutExpired:
                raise ChildError(f"no answer within {timeout:g} s") from None
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        if process.returncode:
            log.seek(0)
            raise ChildError(last_words(process.returncode, log.read()))
    return json.loads(out)


def last_words(code: int, log: str) -> str:
    """Why a process ended: the last line that it printed, or the signal."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    if code > 0 and lines:
        return lines[-1][:300]
    # What a signal ends has had no last words; what it printed before says little.
    how = f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
    return f"{how}, perhaps since memory ran out" if code == -signal.SIGKILL else how
