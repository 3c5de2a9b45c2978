"""Measure `mfload.restore` of Orbax checkpoints beside Orbax's own restore.

    python -m benchmarks.restoring

Writes `restoring.json`, `restoring.png` and the figures of `restoring.md`. A checkpoint of matrices
in bf16 is saved by Orbax as it does by default, compressed, and again without compression; what is
restored is compared once. Each sample is a process of its own, whose clock starts when the
libraries are imported and a small checkpoint was restored, and stops when a byte of each page of
the result was read. Files are in the page cache, and memory for the result is there in small pages
and in large ones. Wants a quiet machine.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import ROOT, described, markdown, plot, process, tables, timings
from benchmarks.results import Results
from benchmarks.seams import resident
from benchmarks.targets import Target
from mfload.bench import machine

CASES = {
    "zstd": "compressed, one device",
    "zstd-rows": "compressed, rows on 8 devices",
    "zstd-columns": "compressed, columns on 8 devices",
    "raw": "not compressed, one device",
    "raw-rows": "not compressed, rows on 8 devices",
    "raw-columns": "not compressed, columns on 8 devices",
}
LABELS = {
    "mfload": "mfload.restore",
    "mfload-converted": "mfload.restore of the converted safetensors",
    "orbax": "Orbax",
}
_CHILD = (sys.executable, "-m", "benchmarks.restoring", "--child")
_SHAPE = (4096, 4096)
_WANTED = {"zstd": 1.0, "raw": 3.0}  # How many times faster than Orbax.


def write(folder: Path, count: int, seed: int) -> None:
    """Saves so many matrices, compressed and not, and as safetensors."""
    import jax
    import ml_dtypes
    import numpy as np
    import orbax.checkpoint as ocp

    import mfload

    chance = np.random.default_rng(seed)
    tree = {
        f"layer_{n}": {"kernel": jax.numpy.asarray(_numbers(chance).astype(ml_dtypes.bfloat16))}
        for n in range(count)
    }
    ocp.StandardCheckpointer().save(folder / "zstd", tree)
    handler = ocp.PyTreeCheckpointHandler(use_compression=False)
    with ocp.Checkpointer(handler) as saving:
        saving.save(folder / "raw", tree)
    ocp.StandardCheckpointer().wait_until_finished()
    mfload.convert(folder / "raw", folder / "converted.safetensors")


def _numbers(chance: Any) -> Any:
    return chance.standard_normal(_SHAPE, "float32") / 64


def restore(job: dict[str, Any], path: Path, count: int) -> Any:
    """The tree of a checkpoint, by Orbax or by mfload."""
    import jax
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

    import mfload

    case = job["case"].partition("-")[2]
    sharding: Any = SingleDeviceSharding(jax.devices()[0])
    if case:
        spec = PartitionSpec("x", None) if case == "rows" else PartitionSpec(None, "x")
        sharding = NamedSharding(Mesh(np.array(jax.devices()), ("x",)), spec)
    leaf = jax.ShapeDtypeStruct(_SHAPE, "bfloat16", sharding=sharding)
    target = {f"layer_{n}": {"kernel": leaf} for n in range(count)}
    if job["name"] != "orbax":
        return mfload.restore(path, target)
    import orbax.checkpoint as ocp

    if job["case"].startswith("zstd"):
        return ocp.StandardCheckpointer().restore(path, target)
    handler = ocp.PyTreeCheckpointHandler(use_compression=False)
    args = ocp.checkpoint_utils.construct_restore_args(target)
    with ocp.Checkpointer(handler) as reading:
        return reading.restore(path, args=ocp.args.PyTreeRestore(target, restore_args=args))


def child(job: dict[str, Any]) -> None:
    """Restores the small checkpoint, and the large one on the clock."""
    import jax
    import numpy as np

    stored = job["case"].partition("-")[0]
    stored = "converted.safetensors" if job["name"] == "mfload-converted" else stored
    restore(job, Path(job["small"]) / stored, 1)
    machine.prime((256 << 20) + 3 * job["count"] * 2 * _SHAPE[0] * _SHAPE[1] // 2)
    machine.reset_peak()
    before, used = resident("VmRSS"), time.process_time()
    start = time.perf_counter()
    made = restore(job, Path(job["large"]) / stored, job["count"])
    total = 0
    for each in jax.tree_util.tree_leaves(made):
        for shard in each.addressable_shards:
            total += int(np.asarray(shard.data).view(np.uint8).reshape(-1)[::4096].sum())
    seconds, used = time.perf_counter() - start, time.process_time() - used
    peak = resident("VmHWM")
    nbytes = sum(each.nbytes for each in jax.tree_util.tree_leaves(made))
    whole = sum(int(np.asarray(each).view(np.uint16).sum()) for each in jax.tree.leaves(made))
    said = {"seconds": seconds, "cpu_s": used, "total": whole}
    said["peak_over"] = peak - before - nbytes
    print(json.dumps(said), flush=True)
    os._exit(0)


def take(job: dict[str, Any]) -> dict[str, Any]:
    """Measures once, in a fresh process."""
    devices = 8 if "-" in job["case"] else 1
    flags = f"--xla_force_host_platform_device_count={devices}"
    environment = process.environment(
        {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}, []
    )
    made = subprocess.run(
        [*_CHILD, json.dumps(job)],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if made.returncode:
        raise process.ChildError(process.last_words(made.returncode, made.stderr))
    return json.loads(made.stdout.splitlines()[-1])


def measure(folder: Path, cases: Sequence[str], rounds: int, seed: int, gb: float) -> Results:
    """Writes the checkpoints and measures each case."""
    count = max(1, round(gb * 1e9 / (2 * _SHAPE[0] * _SHAPE[1])))
    for name, matrices in (("small", 1), ("large", count)):
        job = {"write": str(folder / name), "count": matrices, "seed": seed}
        subprocess.run([*_CHILD, json.dumps(job)], cwd=ROOT, check=True)
    about = {"nbytes": count * 2 * _SHAPE[0] * _SHAPE[1], "tensors": count}
    results = timings.begun(folder, seed, rounds, {"large": about})
    chance = random.Random(seed)
    for case in cases:
        for path in folder.glob("large/**/*"):  # Into the page cache.
            if path.is_file():
                path.read_bytes()
        names = [name for name in LABELS if name != "mfload-converted" or case.startswith("raw")]
        results.run["busy_share"][case] = round(described.busy_share(), 3)
        print(f"{case}: {len(names)} × {rounds}")
        totals: set[int] = set()
        for number in range(rounds):
            for name in chance.sample(names, len(names)):
                given = {"small": str(folder / "small"), "large": str(folder / "large")}
                sample = take({"case": case, "name": name, "count": count, **given})
                totals.add(sample["total"])
                assert len(totals) == 1, "they hold other values"
                results.samples.append({"case": case, "name": name, "round": number, **sample})
                print(f"  {number + 1} {name:20} {sample['seconds']:8.3f} s")
    return results


def page(results: Results) -> str:
    """The figures as Markdown."""
    found, rows, judged = results.checkpoints["large"], list[list[str]](), list[Target]()
    for case in timings.cases(results):
        for name in timings.measured(results, case, LABELS):
            best, middle = results.best(case, name), results.median(case, name)
            theirs = results.best(case, "orbax")
            ratio = theirs / best if theirs and best else None
            over = results.worst([case], name, "peak_over") or 0
            cells = [CASES[case], timings.cell(name, LABELS), markdown.seconds(best)]
            cells += [markdown.seconds(middle), markdown.seconds(results.best(case, name, "cpu_s"))]
            cells += [markdown.times(ratio) if name != "orbax" else "", f"{over / 2**20:.0f}"]
            rows.append(cells)
            if name != "orbax":
                limit = round(1 / _WANTED[case.partition("-")[0]], 2)
                text = f"{CASES[case]}: time of {LABELS[name]} over Orbax's"
                judged.append(Target(text, limit, best / theirs if theirs and best else None))
    head = ("", "", "best s", "median s", "CPU s", "times as fast as Orbax", "MiB beside it")
    text = (
        f"{described.sentence(results.machine)}. {found['nbytes'] / 1e9:.2f} GB of bf16, "
        f"{found['tensors']} matrices, in the page cache. {timings.busy(results)}."
    )
    parts = [text, markdown.table(head, rows), tables.targets(judged)]
    return "\n\n".join([*parts, *timings.skipped(results)])


def draw(results: Results, path: Path) -> None:
    """Draws a panel a case."""
    some = timings.cases(results)
    drawn, panels = plot.figure([len(timings.measured(results, case, LABELS)) for case in some])
    longest = max(results.median(case, name) or 0 for case in some for name in LABELS)
    for axes, case in zip(panels, some, strict=True):
        bars = timings.bars(results, case, LABELS, ())
        plot.panel(axes, bars, title=CASES[case], unit="seconds", limit=longest * 1.05)
    found, m = results.checkpoints["large"], results.machine
    title = (
        f"{found['nbytes'] / 1e9:.2f} GB on {m['cpu']}, {m['cores']} cores, {m['file_system']}; "
        "bar: best, tick: median"
    )
    plot.finish(drawn, title, path)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit status, 0."""
    given = sys.argv[1:] if argv is None else argv
    if given[:1] == ["--child"]:
        job = json.loads(given[1])
        if "write" in job:
            write(Path(job["write"]), job["count"], job["seed"])
            return 0
        child(job)
    size = "--gb", "size of the checkpoint in GB"
    return timings.command("restoring", __doc__, tuple(CASES), size, measure, page, draw, argv)


if __name__ == "__main__":
    sys.exit(main())
