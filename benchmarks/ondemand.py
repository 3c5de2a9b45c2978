"""Measure weights that stay on the disk: random reads, experts, layers, and policies.

    python -m benchmarks.ondemand

Writes `ondemand.json`, `ondemand*.png` and the figures of `ondemand.md`.
Ways take turns, a fresh process each, under the same limit of memory, page cache included where the
system lets a control group be made. accelerate needs PyTorch; an environment that has both is named
by `--accelerate PYTHON`, and all ways of that case run there.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import (
    ROOT,
    arguments,
    capped,
    described,
    markdown,
    ondemand_process,
    ondemand_table,
    plot,
    process,
    tables,
    timings,
)
from benchmarks.ondemand_costs import BudgetCost, OndemandPlan, plan
from benchmarks.replay import belady, replay
from benchmarks.results import MIB, Results
from benchmarks.run import Run
from benchmarks.runner import Sample
from benchmarks.subject import whole
from benchmarks.targets import Target
from mfload.bench import machine, random_reads
from mfload.ondemand import policies

CASES = ("curve", "policies", "experts", "layers")
LABELS = {
    "mfload-lru": "ExpertCache",
    "memmap": "numpy.memmap",
    "memmap-random": "numpy.memmap, MADV_RANDOM",
    "safetensors-tensor": "safetensors, get_tensor",
    "safetensors-slice": "safetensors, get_slice",
    "mfload-stream": "LayerStream",
    "accelerate-folder": "accelerate, disk_offload",
    "accelerate-safetensors": "accelerate, dispatch_model from safetensors",
}
_WAYS = {"experts": [*LABELS][:5], "layers": [*LABELS][5:]}
_LIMITS = {"experts": 3.0, "layers": 1.5}
_LAYERS, _EXPERTS, _CHOSEN = 8, 32, 4
_TOKENS, _WARM_UP = 48, 16
_REPEATED = 0.5  # Of the experts of a token, how many were chosen for the one before.
_DEPTH, _PASSES, _BATCH = 16, 3, 4
_SHARE = 0.25  # Of the model: the budget.
_BESIDE = {"experts": 32 << 20, "layers": 96 << 20}
"""Bytes of the limit beside the budget: what each way needs beside weights."""
_POLICIES = ("window(4)", "lru", "lfu", "pin+lru")
_TIMEOUT = 600
# Without it, malloc keeps what accelerate frees, in pieces, until the limit ends the process.
_MALLOC = {"MALLOC_MMAP_THRESHOLD_": "1048576"}


def trace_of(rng: Any, tokens: int) -> list[list[list[int]]]:
    """What a router chooses: by Zipf's law in an order of each layer's own, half as before."""
    ranks = 1.0 / np.arange(1, _EXPERTS + 1)
    weights = [rng.permutation(ranks / ranks.sum()) for _ in range(_LAYERS)]
    before: list[list[int]] = [[] for _ in range(_LAYERS)]
    made: list[list[list[int]]] = []
    for _ in range(tokens):
        for layer in range(_LAYERS):
            kept = [each for each in before[layer] if rng.random() < _REPEATED]
            left = weights[layer].copy()
            left[kept] = 0
            more = rng.choice(_EXPERTS, _CHOSEN - len(kept), replace=False, p=left / left.sum())
            before[layer] = [*kept, *more.tolist()]
        made.append([sorted(each) for each in before])
    return made


def write_experts(path: Path, rng: Any, nbytes: int) -> dict[str, Any]:
    """A model of experts of about so many bytes, in float32."""
    width = max(64, int((nbytes / _LAYERS / _EXPERTS / 3 / 4 / 1.5) ** 0.5) // 64 * 64)
    shape, tensors = (width * 3 // 2, width), dict[str, Any]()
    for layer in range(_LAYERS):
        for number in range(_EXPERTS):
            for name in ondemand_process.NAMES:
                key = ondemand_process.expert(layer, number, name)
                tensors[key] = rng.standard_normal(shape, np.float32)
    return _written(path, tensors)


def write_layers(path: Path, rng: Any, nbytes: int) -> dict[str, Any]:
    """A model of layers that widen by four and narrow again, in float32."""
    width = max(64, int((nbytes / _DEPTH / 32) ** 0.5) // 64 * 64)
    tensors: dict[str, Any] = {}
    for layer in range(_DEPTH):
        for name, shape in (("up", (4 * width, width)), ("down", (width, 4 * width))):
            weight = rng.standard_normal(shape, np.float32) / shape[1] ** 0.5
            tensors[f"layers.{layer}.{name}.weight"] = weight.astype(np.float32)
    return {**_written(path, tensors), "width": width}


def _written(path: Path, tensors: dict[str, Any]) -> dict[str, Any]:
    from safetensors.numpy import save_file

    save_file(tensors, path)
    nbytes = sum(each.nbytes for each in tensors.values())
    return {"nbytes": nbytes, "tensors": len(tensors), "budget": int(nbytes * _SHARE)}


def _cap(about: dict[str, Any], case: str) -> int:
    return about["budget"] + _BESIDE[case]


def _take(name: str, job: dict[str, Any], python: str, totals: set[Any]) -> Sample:
    machine.fill_or_drop(whole([job["path"]]), cold=True)
    cap = _cap(job, job["case"])
    with capped.group(cap) as group:
        given = {**job, "way": name, "group": group, "cap": cap}
        try:
            made = subprocess.run(
                [python, "-P", "-m", "benchmarks.ondemand_process"],
                input=json.dumps(given),
                env=process.environment(_MALLOC if job["case"] == "layers" else {}, [str(ROOT)]),
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
    totals.add(sample["total"])
    if len(totals) > 1:
        raise process.ChildError("it found other weights than the others")
    return {"case": job["case"], "name": name, "cap": capped.described(group), **sample}


def measure(
    folder: Path, cases: Sequence[str], rounds: int, seed: int, gb: float, python: str
) -> Results:
    """Writes models, one after the other, and measures each case."""
    rng = np.random.default_rng(seed)
    results = timings.begun(folder, seed, rounds, {})
    run = Run(results, random.Random(seed), lambda name: LABELS[name])
    longer = trace_of(rng, 4 * _TOKENS)
    trace = longer[:_TOKENS]
    path = folder / "model.safetensors"
    if "curve" in cases:
        found = random_reads.bench([], _say, folder=str(folder), max_bytes=int(gb * 4e9))
        results.run["curve"] = found
    if "policies" in cases:
        results.run["policies"] = hit_rates(longer)
    for case, write in (("experts", write_experts), ("layers", write_layers)):
        if case not in cases:
            continue
        about = results.checkpoints[case] = write(path, rng, int(gb * 1e9))
        about["read_ahead"] = machine.facts(str(folder)).get("read-ahead", "unknown")
        job = {**about, "case": case, "path": str(path), "trace": trace, "warm_up": _WARM_UP}
        job |= {"layers": _DEPTH, "passes": _PASSES, "batch": _BATCH}
        job["folder"] = str(folder / "offload")
        # Two more are in memory while one is replaced by the next.
        job["resident"] = int(_DEPTH * _SHARE) - 1
        own = python if case == "layers" else sys.executable
        take = partial(_take, job=job, python=own, totals=set[Any]())
        run.take(case, _WAYS[case], take, rounds)
        if case == "experts":
            curve = results.run.get("curve")
            planned = plan(path, budget=about["budget"], trace=longer, curve=curve)
            results.run["plan"] = planned.as_dict()
        path.unlink()
    return results


def _say(_done: int, _total: int, what: str) -> None:
    print(f"random reads: {what}")


def hit_rates(trace: Sequence[Any]) -> dict[str, list[float]]:
    """By policy, the share of experts that are there, for budgets of growing shares."""
    keys = [np.array(ids) + _EXPERTS * n for token in trace for n, ids in enumerate(token)]
    asked, found = len(trace) * _LAYERS * _CHOSEN, dict[str, list[float]]()
    for share in shares():
        slots = int(share * _LAYERS * _EXPERTS)
        for name in _POLICIES:
            misses = replay(keys, slots, partial(_shared, name)).sum()
            found.setdefault(name, []).append(1 - int(misses) / asked)
        found.setdefault("optimum", []).append(1 - int(belady(keys, slots).sum()) / asked)
    return found


def _shared(name: str, keys: int, slots: int) -> Any:
    """A policy for slots that all layers share, as in `ExpertCache`."""
    return policies.make(name, keys, slots, np.arange(keys) // _EXPERTS)


def shares() -> list[float]:
    """Budgets as shares of the model."""
    return [n / 16 for n in range(1, 17)]


def _judged(results: Results) -> list[Target]:
    made: list[Target] = []
    for case, limit in _LIMITS.items():
        ours, *theirs = _WAYS[case]
        best = results.best(case, ours)
        for name in theirs:
            other = results.best(case, name)
            text = f"{case}: {LABELS[ours]} faster than {LABELS[name]}"
            found = other / best if best and other else None
            made.append(Target(text, limit, found, at_least=True))
    return made


def page(results: Results, out: Path) -> str:
    """The figures as Markdown, with those of `benchmarks.ondemand_table` if they are there."""
    parts = [f"{described.sentence(results.machine)}. {timings.busy(results)}."]
    if results.run.get("curve"):
        parts += ["### Random reads", "![GB/s over bytes of a read](ondemand-curve.png)"]
        parts.append(_curve_table(results.run["curve"]))
    if results.run.get("plan"):
        parts += ["### Memory against latency", "![ms over memory](ondemand-budget.png)"]
        parts.append(_plan_table(_planned(results), results.checkpoints["experts"]))
    if results.run.get("policies"):
        parts += ["### Hit rate by policy", "![Hit rate over budget](ondemand-policies.png)"]
        rates = results.run["policies"]
        head = ("policy", *(f"{share:.0%}" for share in shares()[1::2]))
        rows = [[name, *(f"{rate:.1%}" for rate in of[1::2])] for name, of in rates.items()]
        parts.append(markdown.table(head, rows))
    if timings.cases(results):
        parts += ["### Against other ways", "![Seconds a step](ondemand.png)"]
    for case in timings.cases(results):
        parts += [_about(results, case), _ways_table(results, case)]
    parts.append(tables.targets(_judged(results)))
    table = out / "ondemand_table.json"
    if table.exists():
        found = json.loads(table.read_text())
        parts += ["### Neurons, step by step", f"{described.sentence(found['machine'])}."]
        parts.append(ondemand_table.tables(found))
    return "\n\n".join([*parts, *timings.skipped(results)])


def _about(results: Results, case: str) -> str:
    about = results.checkpoints[case]
    cap = next(each["cap"] for each in results.samples if each["case"] == case)
    what = (
        f"{_LAYERS} layers of {_EXPERTS} experts, {_CHOSEN} of them a token"
        if case == "experts"
        else f"{_DEPTH} layers of PyTorch, batches of {_BATCH}"
    )
    return (
        f"{case.capitalize()}: {about['nbytes'] / 1e9:.2f} GB of float32, {what}; budget "
        f"{about['budget'] / MIB:.0f} MiB, limit {_cap(about, case) / MIB:.0f} MiB by {cap}. "
        f"Figures a {'token' if case == 'experts' else 'pass'}. Read-ahead of the disk: "
        f"{about.get('read_ahead', 'unknown')}; maps and safetensors read as much around a fault."
    )


def _ways_table(results: Results, case: str) -> str:
    ours, rows = results.best(case, _WAYS[case][0]), list[list[str]]()
    for name in timings.measured(results, case, LABELS):
        best = results.best(case, name)
        read, peak = results.median(case, name, "read_bytes"), results.worst([case], name, "peak")
        cells = [timings.cell(name, LABELS), markdown.seconds(best)]
        cells.append(markdown.seconds(results.median(case, name)))
        cells.append(markdown.seconds(results.best(case, name, "cpu_s")))
        cells.append(markdown.times(best / ours if best and ours else None))
        cells.append("–" if read is None else f"{read / 1e6:.1f}")
        rows.append([*cells, "–" if peak is None else f"{peak / MIB:.0f}"])
    head = ("", "best s", "median s", "CPU s", "÷ mfload", "MB read", "peak MiB of the limit")
    return markdown.table(head, rows)


def _curve_table(found: dict[str, Any]) -> str:
    depths = sorted({point["depth"] for point in found["points"]})
    rows: list[list[str]] = []
    cells = {(p["engine"], p["block"], p["depth"]): p for p in found["points"]}
    for engine in dict.fromkeys(point["engine"] for point in found["points"]):
        for block in sorted({block for name, block, _ in cells if name == engine}):
            own = [cells.get((engine, block, depth)) for depth in depths]
            speeds = ["–" if each is None else f"{each['gb_per_s']:.2f}" for each in own]
            deepest = [each for each in own if each is not None][-1]
            rows.append([f"{engine}, {block // 1024} KiB", *speeds, f"{deepest['cpu_us']:.1f}"])
    said = " ".join(found["conditions"][1:])
    head = ("GB/s", *(f"{depth} at once" for depth in depths), "µs of CPU a read, deepest")
    return f"{said}\n\n{markdown.table(head, rows)}"


def _plan_table(planned: OndemandPlan, about: dict[str, Any]) -> str:
    rows: list[list[str]] = []
    for each in planned.budgets:
        cells = [f"{each.memory_bytes / about['nbytes']:.0%}", f"{each.memory_bytes / MIB:.0f}"]
        cells += [f"{each.hit_rate:.1%}", f"{each.read_bytes / 1e6:.1f}", f"{each.reads:.1f}"]
        cells.append("–" if each.io_ms is None else f"{each.io_ms:.1f}")
        rows.append([*cells, "–" if each.least_bytes is None else f"{each.least_bytes / 1e6:.1f}"])
    head = ("of the model", "MiB", "hit rate", "MB a token", "reads a token", "ms of I/O a token",
            "MB a token, optimum")  # fmt: skip
    return markdown.table(head, rows)


def _planned(results: Results) -> OndemandPlan:
    found = results.run["plan"]
    costs = tuple(BudgetCost(**each) for each in found["budgets"])
    given: dict[str, Any] = {**found, "budget": BudgetCost(**found["budget"]), "budgets": costs}
    return OndemandPlan(**given)


def draw(results: Results, path: Path) -> None:
    """Draws the curve, what budgets buy, hit rates, and a panel a case."""
    if results.run.get("curve"):
        random_reads.draw(results.run["curve"], path.with_name("ondemand-curve.png"))
    if results.run.get("plan"):
        _planned(results).plot(path.with_name("ondemand-budget.png"))
    if results.run.get("policies"):
        _draw_rates(results.run["policies"], path.with_name("ondemand-policies.png"))
    some = timings.cases(results)
    if not some:
        return
    drawn, panels = plot.figure([len(timings.measured(results, case, LABELS)) for case in some])
    for axes, case in zip(panels, some, strict=True):
        bars = timings.bars(results, case, LABELS, (), _WAYS[case][0])
        limit = max(max(bar.best, bar.middle) for bar in bars) * 1.05
        unit = f"seconds a {'token' if case == 'experts' else 'pass'}"
        plot.panel(axes, bars, title=case, unit=unit, limit=limit)
    m = results.machine
    title = (
        f"A quarter of the model in memory, {m['cpu']}, {m['cores']} cores; bar: best, tick: median"
    )
    plot.finish(drawn, title, path)


def _draw_rates(rates: dict[str, list[float]], path: Path) -> None:
    drawn, (axes,) = plot.figure([11])
    for name, of in rates.items():
        style = {"color": plot.CEILING, "ls": "--"} if name == "optimum" else {"marker": "o"}
        axes.plot([100 * share for share in shares()], [100 * rate for rate in of], ms=3.5,
                  label="Belady's optimum" if name == "optimum" else name, **style)  # fmt: skip
    axes.set(xlabel="% of the experts have slots", ylabel="% of uses find theirs there")
    axes.grid(color="#e4e6ea")
    axes.legend(frameon=False)
    plot.finish(drawn, "Hit rate by policy", path)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit status, 0."""
    parser = arguments.parser("ondemand", __doc__)
    parser.add_argument("--gb", type=float, default=1.0, help="size of each model in GB (1)")
    parser.add_argument("--accelerate", default=sys.executable, help="a Python with accelerate")
    args = arguments.parsed(parser, CASES, argv)

    def measured(folder: Path, seed: int) -> Results:
        given = args.cases, args.rounds, seed, args.gb, args.accelerate
        return measure(folder, *given)

    timings.carry_out(args, "ondemand", measured, partial(page, out=args.out), draw)
    return 0


if __name__ == "__main__":
    sys.exit(main())
