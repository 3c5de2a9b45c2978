"""Measure loads from a seed, against files and plain sockets.

    python -m benchmarks.peers

Writes `peers.json`, `peers.png` and the figures of `peers.md`. A seed holds a checkpoint of bf16 in
memory. Each sample is a process of its own: what was imported and a tiny load come before the
clock, which stops when a byte of each page of the result was read. Memory for the result is there
in small pages and in large ones. The plain sockets move the same bytes from the seed's memory into
fresh memory, over one connection. Faults come when 0.3 of the bytes are there, each to a new seed.
Wants a quiet machine.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import ROOT, described, markdown, plot, process, tables, timings
from benchmarks.checkpoint import write_llama, write_many_small
from benchmarks.results import MIB, Results
from benchmarks.run import Run
from benchmarks.runner import Sample
from benchmarks.targets import Target

CASES = {
    "host": "one machine",
    "http": "HTTP, loopback",
    "https": "HTTPS, loopback",
    "many": "10,000 tensors of 1 KiB",
    "faults": "from a fault to what follows",
}
LABELS = {
    "files": "mfload.load of files, page cache warm",
    "publish": "mfload.publish of them",
    "socket": "one plain socket",
    "tls": "one plain TLS socket",
    "mfload-memory": "process_vm_readv",
    "mfload-memfd": "memfd",
    "mfload-memfd-unchecked": "memfd, checksums not compared",
    "mfload-http": "HTTP",
    "mfload-http-unchecked": "HTTP, checksums not compared",
    "mfload-https": "HTTPS",
    "mfload-https-unchecked": "HTTPS, checksums not compared",
    "kill-memory": "seed killed, process_vm_readv: until the error",
    "kill-memory-fallback": "seed killed, process_vm_readv: until files are read",
    "kill-http": "seed killed, HTTP: until the error",
    "kill-http-fallback": "seed killed, HTTP: until files are read",
    "stop-http": "seed stopped, HTTP: until the error",
    "stop-http-fallback": "seed stopped, HTTP: until files are read",
}
_BASES = {"host": "files", "http": "socket", "https": "tls", "many": "files"}
_LIMITS = {"host": 1.1, "http": 1.3, "https": 1.2, "many": 1.5}
_PUBLISHING = 3.0  # The limit of publishing many tensors, as of the others.
_MANY = 10_000
_BESIDE = 64
_MODULE = (sys.executable, "-P", "-m", "benchmarks.peers_process")
_TIMEOUT = 300


def names_of(case: str) -> list[str]:
    """What is measured in a case."""
    if case == "faults":
        return [name for name in LABELS if name.startswith(("kill-", "stop-"))]
    if case == "many":
        return [_BASES[case], "publish", *(f"mfload-{way}" for way in ("memory", "memfd", "http"))]
    ways = {"host": ("memory", "memfd")}.get(case, (case,))
    ours = [f"mfload-{way}{more}" for way in ways for more in ("", "-unchecked")]
    return [_BASES[case], *(name for name in ours if name in LABELS)]


def certificate(folder: Path) -> dict[str, str]:
    """Makes a certificate for loopback that is its own authority; the files by their roles."""
    paths = {"cert": str(folder / "node.pem"), "key": str(folder / "node.key")}
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    command += ["-nodes", "-days", "2", "-subj", "/CN=mfload", "-addext"]
    command += ["subjectAltName=IP:127.0.0.1", "-keyout", paths["key"], "-out", paths["cert"]]
    subprocess.run(command, check=True, capture_output=True)
    return {**paths, "ca": paths["cert"]}


@contextmanager
def seeded(job: dict[str, Any]) -> Generator[dict[str, Any]]:
    """A seed in a process of its own, and what it offers."""
    started = subprocess.Popen(
        [*_MODULE, "seed", json.dumps(job)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=process.environment({}, [str(ROOT)]),
        text=True,
    )
    try:
        assert started.stdout is not None
        line = started.stdout.readline()
        if not line:
            raise process.ChildError(f"the seed ended with {started.wait()}")
        yield json.loads(line)
    finally:
        started.kill()
        started.communicate()


def ask(kind: str, job: dict[str, Any]) -> dict[str, Any]:
    """Runs a reader; returns its sample."""
    try:
        made = subprocess.run(
            [*_MODULE, kind, json.dumps(job)],
            env=process.environment({}, [str(ROOT)]),
            capture_output=True,
            text=True,
            check=False,
            timeout=_TIMEOUT,
        )
    except subprocess.TimeoutExpired:
        raise process.ChildError(f"no answer within {_TIMEOUT} s") from None
    if made.returncode:
        raise process.ChildError(process.last_words(made.returncode, made.stderr))
    return json.loads(made.stdout.splitlines()[-1])


def _take(name: str, case: str, job: dict[str, Any], totals: set[int]) -> Sample:
    sample = ask("reader", {**job, "name": name})
    totals.add(sample["total"])
    if len(totals) > 1:
        raise process.ChildError("it holds other values than the others")
    return {"case": case, "name": name, **sample}


def _strike(name: str, job: dict[str, Any]) -> Sample:
    kind, way, *fallback = name.split("-")
    given = {"name": f"mfload-{way}", "fallback": bool(fallback)}
    given["signal"] = {"kill": "SIGKILL", "stop": "SIGSTOP"}[kind]
    with seeded(job) as offers:
        sample = ask("fault", {**job, **given, "offers": offers})
    return {"case": "faults", "name": name, **sample}


def measure(folder: Path, cases: Sequence[str], rounds: int, seed: int, gb: float) -> Results:
    """Writes a checkpoint and measures each case."""
    found = write_llama(folder / "large", seed, int(gb * 1e9))
    write_many_small(folder / "tiny", seed, 3)
    many = write_many_small(folder / "many", seed, _MANY)
    about = {"nbytes": found.nbytes, "tensors": found.tensors, "files": len(found.paths)}
    results = timings.begun(folder, seed, rounds, {"large": about})
    run = Run(results, random.Random(seed), lambda name: LABELS[name])
    job: dict[str, Any] = {"nbytes": found.nbytes, "primed": True, **certificate(folder)}
    job |= {name: str(folder / name) for name in ("large", "tiny", "many")} | {"what": "large"}
    plain = [case for case in cases if case != "faults"]
    if plain:
        with seeded(job) as offers:
            given = {**job, "offers": offers}
            if "host" in plain:  # The seed makes its copy for the first reader.
                ask("reader", {**given, "name": "mfload-memfd", "primed": False})
            for case in plain:
                own = {"what": "many", "nbytes": many.nbytes} if case == "many" else {}
                take = partial(_take, case=case, job={**given, **own}, totals=set())
                run.take(case, names_of(case), take, rounds)
    if "faults" in cases:
        run.take("faults", names_of("faults"), partial(_strike, job=job), rounds)
    return results


def _judged(results: Results) -> list[Target]:
    targets: list[Target] = []
    for case, limit in _LIMITS.items():
        base = results.best(case, _BASES[case])
        for name in names_of(case)[1:]:
            best = results.best(case, name)
            text = f"{LABELS[name]}: time over that of {LABELS[_BASES[case]]}"
            most = _PUBLISHING if name == "publish" else limit
            targets.append(Target(text, most, best / base if best and base else None))
    for name in names_of("faults"):
        limit = 2 if name.endswith("fallback") or name.startswith("stop") else 1
        worst = results.worst(["faults"], name, "seconds")
        targets.append(Target(f"{LABELS[name]}, worst", limit, worst, " s"))
    peaks = [
        results.worst([case], name, "peak_over") for case in _BASES for name in names_of(case)[1:]
    ]
    found = [peak / MIB for peak in peaks if peak is not None]
    worst = max(0.0, *found) if found else None
    return [*targets, Target("memory beside the result, worst", _BESIDE, worst, " MiB")]


def page(results: Results) -> str:
    """The figures as Markdown."""
    about, rows, faults = results.checkpoints["large"], list[list[str]](), list[list[str]]()
    for case, base in _BASES.items():
        least = results.best(case, base)
        for name in timings.measured(results, case, LABELS):
            best = results.best(case, name)
            peak = results.worst([case], name, "peak_over") or 0.0
            cells = [CASES[case], timings.cell(name, LABELS), markdown.seconds(best)]
            cells.append(markdown.seconds(results.median(case, name)))
            cells.append(markdown.seconds(results.best(case, name, "cpu_s")))
            cells.append(markdown.times(best / least if best and least else None))
            rows.append([*cells, f"{max(0.0, peak / MIB):.0f}"])
    for name in timings.measured(results, "faults", LABELS):
        cells = [results.best("faults", name), results.median("faults", name)]
        cells.append(results.worst(["faults"], name, "seconds"))
        faults.append([LABELS[name], *map(markdown.seconds, cells)])
    text = (
        f"{described.sentence(results.machine)}. {about['nbytes'] / 1e9:.2f} GB of bf16, "
        f"{about['tensors']} tensors. {timings.busy(results)}."
    )
    parts = ["![Seconds to load from a running process, beside files and plain sockets](peers.png)"]
    parts.append(text)
    if rows:
        head = ("", "", "best s", "median s", "CPU s of the reader", "÷ first", "MiB beside it")
        parts.append(markdown.table(head, rows))
    if faults:
        parts.append(markdown.table(("", "best s", "median s", "worst s"), faults))
    parts.append(tables.targets(_judged(results)))
    return "\n\n".join([*parts, *timings.skipped(results)])


def draw(results: Results, path: Path) -> None:
    """Draws a panel a case."""
    some = timings.cases(results)
    drawn, panels = plot.figure([len(timings.measured(results, case, LABELS)) for case in some])
    for axes, case in zip(panels, some, strict=True):
        base = _BASES.get(case)
        bars = timings.bars(results, case, LABELS, _BASES.values(), base)
        if base is None:
            bars = [bar._replace(colour=plot.OURS) for bar in bars]
        limit = max(max(bar.best, bar.middle) for bar in bars) * 1.05
        plot.panel(axes, bars, title=CASES[case], unit="seconds", limit=limit)
    about, m = results.checkpoints["large"], results.machine
    title = (
        f"{about['nbytes'] / 1e9:.2f} GB of bf16 from a running process into NumPy, {m['cpu']}, "
        f"{m['cores']} cores; bar: best, tick: median"
    )
    plot.finish(drawn, title, path)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit status, 0."""
    size = "--gb", "size of the checkpoint in GB"
    return timings.command("peers", __doc__, tuple(CASES), size, measure, page, draw, argv)


if __name__ == "__main__":
    sys.exit(main())
