"""The figures of loading shards into processes of PyTorch: targets, tables, plots."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchmarks import described, markdown, plot, tables, timings
from benchmarks.mesh_processes import PROCESSES
from benchmarks.plot import OURS, PEER, Bar
from benchmarks.results import MIB, Results
from benchmarks.targets import Target
from mfload import dtypes
from mfload.index import Piece, TensorInfo
from mfload.mesh import base, load as mesh_load, specs
from mfload.options import LoadOptions
from mfload.planning.request import Request
from mfload.planning.slicing import boxed
from mfload.report import human
from mfload.sources.base import Costs

CEILING, FLOOR = BARE = "ceiling", "floor"  # They know no tensors.
LABELS = {
    CEILING: "one process, plain reads",
    FLOOR: "bare reads and bare sends",
    "mfload/never": "mfload, never",
    "mfload/once": "mfload, once",
    "fastsafetensors": "fastsafetensors",
    "torch": "HuggingFaceStorageReader",
}
_OURS, _PEERS = ("mfload/never", "mfload/once"), ("fastsafetensors", "torch")
CASES = {
    "rows": (CEILING, *_OURS, *_PEERS),
    "columns": (CEILING, *_OURS, *_PEERS),
    "replicated": (CEILING, FLOOR, *_OURS, *_PEERS),
    "rows-cold": (*_OURS, *_PEERS),
    "replicated-cold": (FLOOR, *_OURS, *_PEERS),
}
"""What is measured in each case."""
TITLES = {case: case.replace("-cold", ", page cache empty") for case in CASES}
_OVERHEAD = 256


def _times(results: Results, case: str, slower: str, faster: str) -> float | None:
    ours, theirs = results.best(case, faster), results.best(case, slower)
    return theirs / ours if ours and theirs else None


def _worst(results: Results, case: str, name: str) -> float | None:
    """The most that a process held beside its shards in any sample, in MiB."""
    peak = results.worst([case], name, "peak_over")
    return None if peak is None else max(0.0, peak / MIB)


def judge(results: Results) -> Iterator[Target]:
    """Every target with what was found."""
    ratio = _times(results, "rows", "mfload/never", CEILING)
    yield Target("rows, `never`: time over one process's plain reads", 1.5, ratio)
    for case in ("replicated", "replicated-cold"):
        found = _times(results, case, "fastsafetensors", "mfload/once")
        yield Target(f"{TITLES[case]}, `once`: faster than broadcasts", 2, found, at_least=True)
    found = _times(results, "replicated-cold", "torch", "mfload/once")
    what = "replicated, page cache empty, `once`: faster than HuggingFaceStorageReader"
    yield Target(what, 1, found, at_least=True)
    peaks = [_worst(results, case, name) for case in CASES for name in _OURS]
    worst = max((peak for peak in peaks if peak is not None), default=None)
    yield Target("resident memory beside the shards", _OVERHEAD, worst, " MiB")


def _table(results: Results, case: str) -> str:
    rows: list[list[str]] = []
    for name in timings.measured(results, case, LABELS):
        found = [s for s in results.samples if (s["case"], s["name"]) == (case, name)]
        peak = _worst(results, case, name)
        rows.append(
            [
                timings.cell(name, LABELS),
                markdown.seconds(results.best(case, name)),
                markdown.seconds(results.median(case, name)),
                markdown.seconds(results.best(case, name, "cpu_s")),
                ", ".join(f"{nbytes / 1e6:.0f}" for nbytes in found[-1]["read"]),
                ", ".join(f"{nbytes / 1e6:.0f}" for nbytes in found[-1]["exchanged"]),
                "–" if peak is None or name in BARE else f"{peak:.0f}",
            ]
        )
    head = ("", "best s", "median s", "CPU s of both", "MB read by each", "MB that came to each",
            "MiB beside the shards")  # fmt: skip
    return markdown.table(head, rows)


def page(results: Results) -> str:
    """The figures as Markdown, under headings of the third level."""
    m, found = results.machine, results.checkpoints["large"]
    host = " (its host may still hold the file)" if m["virtual"] else ""
    starts = ", ".join(map(str, found["starts"]))
    parts = [
        f"{described.sentence(m)}. {found['nbytes'] / 1e9:.2f} GB of bf16, {found['tensors']} "
        f"tensors in {found['files']} files, shapes {found['drawn']}, data starting at {starts} "
        f"mod 64. {timings.busy(results)}. Cold: none of it in this machine's page cache{host}. "
        f"{described.versions_sentence(m)}.",
        "### Targets",
        tables.targets(list(judge(results))),
    ]
    for case in timings.cases(results):
        parts += [f"### {TITLES[case].capitalize()}", _table(results, case)]
    return "\n\n".join([*parts, *timings.skipped(results)])


def draw(results: Results, path: Path) -> None:
    """Draws a panel a case, and in a picture of its own what the plan chooses."""
    cases = timings.cases(results)
    drawn, panels = plot.figure([len(timings.measured(results, case, LABELS)) for case in cases])
    for axes, case in zip(panels, cases, strict=True):
        bars = timings.bars(results, case, LABELS, BARE)
        read = {s["name"]: max(s["read"]) for s in results.samples if s["case"] == case}
        kept = timings.measured(results, case, LABELS)
        bars = [
            bar._replace(text=f"{bar.text}, {read[name] / 1e6:.0f} MB read")
            for name, bar in zip(kept, bars, strict=True)
        ]
        limit = max(bar.middle for bar in bars) * 1.05
        plot.panel(axes, bars, title=TITLES[case], unit="seconds", limit=limit)
    m, found = results.machine, results.checkpoints["large"]
    title = (
        f"{found['nbytes'] / 1e9:.2f} GB of bf16 into {PROCESSES} processes of PyTorch, "
        f"{m['cpu']}, {m['cores']} cores, {m['file_system']}; bar: best, tick: median; most bytes "
        "that a process reads"
    )
    plot.finish(drawn, title, path)
    draw_choice(path.with_name("shards-choice.png"))


_RANKS, _TENSORS, _SIDE = 8, 32, 4096


def _requests(layout: str) -> dict[int, list[Request]]:
    """What eight processes want of a GiB of bf16."""
    dtype = dtypes.TABLE["BF16"]
    made: dict[int, list[Request]] = {rank: [] for rank in range(_RANKS)}
    for n in range(_TENSORS):
        nbytes = 2 * _SIDE * _SIDE
        info = TensorInfo(f"w{n}", dtype, (_SIDE, _SIDE), (Piece(0, n * nbytes, nbytes),))
        for rank, requests in made.items():
            box = [(0, _SIDE), (0, _SIDE)]
            if layout != "replicated":
                box[layout == "columns"] = specs.chunk(_SIDE, _RANKS, rank)
            requests.append(Request(info, dtype, boxed(info, tuple(box))))
    return made


def draw_choice(path: Path) -> None:
    """Draws what each layout costs either way, and which way the plan chooses."""
    from mfload.mesh.torch_backend import TorchBackend

    kinds: dict[str, tuple[str, Any]] = {
        "PyTorch, a file on the host": ("cpu", None),
        "PyTorch, behind a URL": ("cpu", SimpleNamespace(costs=Costs(concurrency=8))),
        "JAX, onto accelerators": ("cuda", None),
    }
    layouts, ways = ("rows", "columns", "replicated"), ("never", "once")
    drawn, panels = plot.figure([len(layouts) * len(ways)] * len(kinds))
    for axes, (title, (platform, source)) in zip(panels, kinds.items(), strict=True):
        backend: Any = SimpleNamespace(platform=lambda p=platform: p)
        backend.transport = TorchBackend.transport if platform == "cpu" else base.GLOO
        price, _ = mesh_load.price(backend, 2.0 if source else 1.0)
        bars: list[Bar] = []
        for layout in layouts:
            requests, sources = _requests(layout), [source] if source else []
            width, _ = mesh_load.exchanged(requests, LoadOptions(), backend, sources)
            rows = bool(source) or platform != "cpu"
            own, share, came = mesh_load.amounts(requests, rows=rows)
            costs = own, share + price * came
            texts = f"{human(own)} read", f"{human(share)} read, {human(came)} moved"
            for how, cost, text in zip(ways, costs, texts, strict=True):
                chosen = (how == "once") == (width is not None)
                colour = OURS if chosen else PEER
                label = f"{layout}, {how}"
                bars.append(Bar(label, cost / MIB, cost / MIB, text, colour, bold=chosen))
        limit = max(bar.best for bar in bars) * 1.05
        unit = f"MiB read, at most a process; a moved byte counts {price:g}"
        plot.panel(axes, bars, title=title, unit=unit, limit=limit)
    title = f"What {_RANKS} processes read and move of 1 GiB; blue: chosen by auto"
    plot.finish(drawn, title, path)
