"""One bench: a checkpoint, this machine's ceilings, and loaders in turns, warm and cold.

Each sample is taken in a fresh process. Noise then falls on all loaders alike, and it only adds, so
the best of several rounds says most.
"""

from __future__ import annotations

import json
import math
import os
import random
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mfload import errors, frameworks
from mfload.bench import ceilings, loaders, machine
from mfload.bench.ceilings import PATTERNS, Extent
from mfload.bench.child import Job
from mfload.bench.loaders import LOADERS, SPAN, BenchLoader
from mfload.formats import checkpoint
from mfload.index import TensorInfo
from mfload.io import probes
from mfload.options import ENGINES, check_choice
from mfload.planning import selection
from mfload.planning.selection import Names
from mfload.report import human

CASES = ("warm", "cold")
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

Sample = dict[str, Any]
"""What `child.measure` gives, with `case`, `name` and `round`."""
Watch = Callable[[int, int, str], None]
"""Told of progress: measurements done, measurements in all, and what is measured now."""


class ChildError(Exception):
    """A measuring process failed or hung; the message says why, or is the end of its log."""


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """What to measure; `mfload bench --help` describes the fields.

    Raises:
        UsageError: A value is invalid.
    """

    frameworks: tuple[str, ...] = ()
    engines: tuple[str, ...] = ("auto",)
    cases: tuple[str, ...] = CASES
    rounds: int = 5
    threads: int | None = None
    names: Names = None
    peers: bool = False
    quick: bool = False
    max_bytes: int = 4 << 30
    timeout: float = 300.0

    def __post_init__(self) -> None:
        for name in self.frameworks:
            frameworks.resolve(name)
        for engine in self.engines:
            check_choice("engine", engine, ENGINES)
        for what in ("rounds", "threads", "max_bytes", "timeout"):
            value = getattr(self, what)
            # NaN is not above 0, either.
            if value is not None and not 0 < value < math.inf:
                raise errors.UsageError(what, expected="a finite number above 0", found=value)


@dataclass(frozen=True, slots=True)
class Subject:
    """What every loader loads (files, and names of tensors or None for all) and ceilings read."""

    path: str
    files: list[str]
    extents: list[Extent]
    nbytes: int
    tensors: int
    names: list[str] | None


@dataclass
class Bench:
    """What was measured.

    Attributes:
        run: Seed, rounds, times, and how busy the machine was.
        notes: What to know of it, such as that not all is measured.
        entrants: Every loader asked for, and why it can't take part (None: it does).
        impossible: Why a case could not be measured, by its name.
        failed: (case, name, reason) of those that failed.
    """

    machine: dict[str, Any]
    run: dict[str, Any]
    subject: Subject
    notes: list[str]
    entrants: list[tuple[BenchLoader, str | None]]
    impossible: dict[str, str] = field(default_factory=dict[str, str])
    samples: list[Sample] = field(default_factory=list[Sample])
    failed: list[tuple[str, str, str]] = field(default_factory=list[tuple[str, str, str]])

    def of(self, case: str, name: str) -> list[Sample]:
        """The samples of a name in a case, the fastest first."""
        found = [s for s in self.samples if s["case"] == case and s["name"] == name]
        return sorted(found, key=lambda sample: sample["seconds"])

    def names(self, case: str) -> list[str]:
        """What was measured in a case: ceilings, then loaders, the fastest first."""
        names = {s["name"] for s in self.samples if s["case"] == case}
        best = {name: self.of(case, name)[0]["seconds"] for name in names}
        return sorted(names, key=lambda name: (name not in PATTERNS, best[name]))


def bench(path: str, options: BenchOptions, watch: Watch) -> Bench:
    """Measures; takes seconds to minutes and writes nothing but a tiny file elsewhere."""
    if not sys.platform.startswith("linux"):
        raise errors.DeviceError(
            "mfload bench needs Linux: no other system says what it caches",
            expected="linux",
            found=sys.platform,
        )
    watch(0, 0, "reading headers")
    subject, notes = choose(path, options.names, options.max_bytes)
    run = {
        "seed": random.SystemRandom().randrange(2**32),
        "rounds": options.rounds,
        "threads": options.threads,
        "quick": options.quick,
        "busy_share": {},
        "started": time.strftime("%Y-%m-%d %H:%M"),
    }
    entrants = entrants_of(options, everything=subject.names is None)
    made = Bench(machine.describe(subject.files[0]), run, subject, notes, entrants)
    with tempfile.TemporaryDirectory(prefix="mfload-bench-") as folder:
        header = json.dumps({"w": {"dtype": "F32", "shape": [1024], "data_offsets": [0, 4096]}})
        tiny = Path(folder, "tiny.safetensors")
        tiny.write_bytes(struct.pack("<Q", len(header)) + header.encode() + bytes(4096))
        for case in options.cases:
            why = machine.why_not(subject.extents, cold=case == "cold")
            if why is None:
                _measure_case(made, case, options, str(tiny), watch)
            else:
                made.impossible[case] = why
    run["ended"] = time.strftime("%Y-%m-%d %H:%M")
    return made


def choose(path: str, names: Names, max_bytes: int) -> tuple[Subject, list[str]]:
    """The first tensors that fit into `max_bytes` and into memory, and what to say of that."""
    index, _ = checkpoint.read(path)
    selected = selection.select(index, names)
    wanted = [row for row in selected if row.dtype.known]
    unknown = len(selected) - len(wanted)
    notes = [f"{unknown} tensors left out: mfload does not know their dtypes"] if unknown else []
    if not any(row.nbytes for row in wanted):
        raise errors.UsageError("nothing to measure: no tensor holds any bytes", file=path)
    room = probes.memory_room()
    limit, why = max_bytes, f"--max-bytes {human(max_bytes)}"
    if room is not None and room[0] * _SHARE < max_bytes:
        limit, why = int(room[0] * _SHARE), f"{human(room[0])} are left in the {room[1]}"
    rows: list[TensorInfo] = []
    nbytes = 0
    for row in wanted:
        if nbytes + row.nbytes <= limit:
            rows.append(row)
            nbytes += row.nbytes
    if not rows:
        raise errors.MemoryLimitError(
            "no tensor fits in what may be measured",
            file=path,
            expected=f"a tensor of at most {limit} bytes ({why})",
            found=f"{len(wanted)} tensors, the smallest of {min(r.nbytes for r in wanted)} bytes",
        )
    if len(rows) < len(wanted):
        everything = sum(row.nbytes for row in wanted)
        notes.append(
            f"measured: {len(rows)} of {len(wanted)} tensors, {human(nbytes)} of "
            f"{human(everything)}, since {why}"
        )
    whole = len(rows) == len(index)
    extents = ceilings.extents_of(index, rows)
    files = list(index.files) if whole else ceilings.paths_of(extents)
    listed = None if whole else [row.name for row in rows]
    return Subject(os.path.abspath(path), files, extents, nbytes, len(rows), listed), notes


def entrants_of(options: BenchOptions, *, everything: bool) -> list[tuple[BenchLoader, str | None]]:
    """The loaders that the options ask for, and why some can't be measured."""
    wanted = [frameworks.resolve(name) for name in options.frameworks] or list(frameworks.NAMES)
    found = [loaders.ours(name, e) for name in dict.fromkeys(wanted) for e in options.engines]
    if options.peers:
        found += [each for each in LOADERS.values() if not each.ours and each.framework in wanted]

    def why_not(loader: BenchLoader) -> str | None:
        if missing := loader.missing():
            return f"not installed: {', '.join(missing)}"
        if loader.framework not in SPAN:
            return "its arrays live on a GPU, and this measures host memory"
        if not loader.ours and not everything:
            return "it loads whole files only, and not all was measured"
        return None

    return [(each, why_not(each)) for each in found]


def _measure_case(made: Bench, case: str, options: BenchOptions, tiny: str, watch: Watch) -> None:
    """Measures the ceilings' patterns once each, then the best of them and loaders in turns."""
    job: Job = {**asdict(made.subject), "cold": case == "cold", "warmup": tiny,
                "threads": options.threads}  # fmt: skip
    rng = random.Random(made.run["seed"])
    names = [loader.name for loader, why_not in made.entrants if why_not is None]
    patterns = ceilings.trial(probes.cores(), cold=job["cold"], quick=options.quick)
    tried = [pattern.name for pattern in patterns]
    total = len(tried) + options.rounds * (len(names) + min(_KEPT, len(tried)))
    done = 0

    def take_rounds(label: str, left: list[str], count: int) -> None:
        nonlocal done
        for number in range(count):
            rng.shuffle(left)
            for name in list(left):
                watch(min(done, total), total, label)
                done += 1
                try:
                    taken = run_child(job | {"name": name}, options.timeout)
                except ChildError as error:
                    left.remove(name)
                    made.failed.append((case, name, str(error)))
                else:
                    made.samples.append({"case": label, "name": name, "round": number, **taken})

    busy = machine.busy_share(0.3)
    take_rounds(f"{case} trial", tried, 1)
    take_rounds(case, [*_best(made.names(f"{case} trial")), *names], options.rounds)
    made.run["busy_share"][case] = round(max(busy, machine.busy_share(0.3)), 3)


def _best(order: list[str]) -> list[str]:
    """The fastest pattern, and the fastest of those that keep what they read."""
    fresh = [name for name in order if not PATTERNS[name].reuse]
    return list(dict.fromkeys([*order[:1], *fresh[:1], *order]))[:_KEPT]


def run_child(job: Job, timeout: float) -> Sample:
    """Measures once, in a fresh process."""
    env = {} if job["name"] in PATTERNS else loaders.find(job["name"]).env
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
            env={**os.environ, **ENV, **env, **({"PYTHONPATH": path} if path else {})},
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
