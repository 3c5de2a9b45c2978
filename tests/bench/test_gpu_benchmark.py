"""The GPU benchmark without a GPU: its plumbing on host arrays, and tables of made-up results.

No figure in here was measured on anything.
"""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
import types
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from devices.fake import FakeDevice
from matplotlib import image

import mfload
from benchmarks import (
    described,
    gpu,
    gpu_checks,
    gpu_facts,
    gpu_files,
    gpu_given,
    gpu_peers,
    gpu_python,
    gpu_rounds,
    gpu_run,
    gpu_seams,
    gpu_steps,
    gpu_streams,
    gpu_stress,
    gpu_tables,
    gpu_tasks,
)
from benchmarks.checkpoint import write_llama
from benchmarks.gpu_budget import Budget
from benchmarks.gpu_ceilings import DEVICE_COPY, PEAK, cached, direct, maps
from benchmarks.gpu_given import landings
from benchmarks.gpu_rounds import Rounds, Step
from benchmarks.gpu_steps import COLD, MANY, OTHERS, RING, SEAMS, WARM
from benchmarks.gpu_tasks import Way
from benchmarks.process import ChildError
from benchmarks.results import Results
from benchmarks.runner import Bed
from mfload import frameworks
from mfload.bench.machine import MEMORY_FILE_SYSTEMS, file_system
from mfload.cuda import staging
from mfload.frameworks.torch_adapter import TorchAdapter
from mfload.io import probes
from mfload.planning import memory as limits

ROOT = gpu_run.ROOT
MADE_UP = {"name": "Made-up GPU of a test", "memory": 48 << 30, "pci": "0000:00:00.0",
           "cuda": "0.0", "count": 2}  # fmt: skip
PLAIN, FAST = "safetensors.torch", "fastsafetensors"


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves out what only matters to figures, and where CI's results go."""
    monkeypatch.setattr(described, "busy_share", lambda seconds=0: 0.0)
    monkeypatch.delenv("OUT", raising=False)


# The whole, on host arrays -------------------------------------------------------------------


def _rehearse(out: Path, steps: str, *more: str) -> dict[str, Any]:
    arguments = ["--device", "cpu", "--gib", "0.005", "--rounds", "1", "--out", str(out)]
    assert gpu.main([*arguments, "--workdir", str(out.parent), "--steps", steps, *more]) == 0
    return json.loads((out / "gpu-rehearsal.json").read_text())


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_rehearsal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if file_system(tmp_path) in MEMORY_FILE_SYSTEMS:
        pytest.skip("a file system in memory")
    missing = [name for name in ("torch", "jax") if find_spec(name) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")
    monkeypatch.setattr(gpu_run.Run, "_ahead", lambda *_: 2)  # As where there are more cores.
    # Less of what is alike: each trial and each sample starts a framework.
    monkeypatch.setattr(gpu_facts, "cores", lambda: 1)
    monkeypatch.setattr(gpu_checks, "names", lambda *_, **__: ["mesh"])
    monkeypatch.setattr(gpu_streams, "names", lambda *_: ["streams/torch/framework"])
    monkeypatch.setattr(gpu_stress, "alone", lambda *_: ["failing/torch"])
    monkeypatch.setattr(gpu_steps, "landings", lambda name: landings(name)[-1:])
    out = tmp_path / "work" / "out"
    every = ",".join(map(str, gpu_steps.PARTS))
    found = _rehearse(out, every)
    printed = capsys.readouterr().out
    assert "FAILED" not in printed
    assert "checks that failed: none" in printed
    assert "  blocks of up to " in printed
    statuses = {each["name"]: each["status"] for each in found["run"]["trials"]}
    assert set(statuses.values()) == {"pass"}
    measured = set(gpu_tables.TITLES) - ({"model"} if not find_spec("transformers") else set())
    assert set(found["summary"]) == measured
    assert {PEAK, cached(2), *(Way(f).name for f in ("torch", "jax", "numpy"))} <= set(
        found["summary"]["warm"]
    )
    assert found["run"]["left_out"] == []
    assert all(target["found"] is None for target in found["targets"])
    page = (out / "gpu-rehearsal.md").read_text()
    assert gpu_tables.REHEARSAL in page
    assert "| **mfload → torch** |" in page
    assert "- `mesh`: pass: 1 device" in page
    drawn = image.imread(out / "gpu-rehearsal.png")
    assert drawn.shape[0] > 400
    assert any(name.endswith(":again=1") for name in found["summary"]["warm"])
    assert " readers; blocks of up to " in page
    assert list((tmp_path / "work").iterdir()) == [out]
    picture = (out / "gpu-rehearsal.png").read_bytes()
    assert gpu.main(["--redraw", "--out", str(out)]) == 0
    assert (out / "gpu-rehearsal.md").read_text() == page
    assert (out / "gpu-rehearsal.png").read_bytes() == picture


def test_a_second_run_goes_on_from_the_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = _rehearse(tmp_path / "out", "4", "--seed", "3")
    names = [PEAK, *(maps(1, mib) for mib in (16, 64, 256))]
    assert sorted(each["name"] for each in first["samples"]) == sorted(names)
    assert not list(tmp_path.glob("mfload-bench-*"))
    capsys.readouterr()
    second = _rehearse(tmp_path / "out", "4", "--rounds", "2")
    samples = second["samples"]
    assert samples[: len(names)] == first["samples"]
    assert [each["round"] for each in samples[len(names) :]] == [1] * len(names)
    assert (second["run"]["seed"], second["run"]["steps"]) == (3, [4])
    assert len(_rehearse(tmp_path / "out", "4", "--rounds", "2")["samples"]) == len(samples)
    with pytest.raises(SystemExit, match="another --out"):
        _rehearse(tmp_path / "out", "4", "--rounds", "3", "--gib", "0.01")


def test_a_check_that_failed_is_tried_again(tmp_path: Path) -> None:
    results = _results()
    gpu_run.put(results, tmp_path / "gpu-x")
    setting = gpu_run.Setting("cpu", {}, 1, (4,), 1, 8, 7, 1, tmp_path / "gpu-x")
    run = gpu_run.Run(setting, tmp_path)
    assert [each["name"] for each in run._results.run["trials"]] == ["mesh", "gds"]
    assert len(run._results.samples) == len(results.samples)


def test_a_rehearsal_without_time_leaves_all_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = _rehearse(tmp_path / "out", "0,4", "--minutes", "0.1")
    assert found["samples"] == []
    tests, measured = found["run"]["left_out"]
    assert tests.startswith("step 0: streams/")
    assert measured.startswith("step 4, maps: round 1 of ")
    assert "### Left out for want of time" in (tmp_path / "out" / "gpu-rehearsal.md").read_text()
    capsys.readouterr()


def test_what_was_found_is_said_without_matplotlib(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Ran:
        def __init__(self, setting: gpu_run.Setting, folder: Path) -> None:
            self.out = setting.out

        def all(self) -> Results:
            results = _results()
            gpu_run.put(results, self.out)
            return results

    monkeypatch.setattr(gpu, "Run", Ran)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert gpu.main(["--device", "cpu", "--out", str(tmp_path), "--workdir", str(tmp_path)]) == 1
    said = capsys.readouterr().out
    assert said.index("checks that failed: streams/jax") < said.index("nothing is drawn: ")
    assert gpu.main(["--redraw", "--out", str(tmp_path)]) == 0
    assert "nothing is drawn: " in capsys.readouterr().out
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".json", ".md"]


def test_without_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_facts, "look", lambda: "there is none")
    assert gpu.main(["--out", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert said == "benchmarks.gpu needs an NVIDIA GPU: there is none\n"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "said"), [(["--device", "cpu"], "--out"), (["--steps", "3,9"], "no such step: 9")]
)
def test_wrong_arguments(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A rehearsal, for one, is not written among the figures."""
    with pytest.raises(SystemExit) as stopped:
        gpu.main(arguments)
    assert stopped.value.code == 2
    assert said in capsys.readouterr().err


def test_the_page_claims_nothing_that_was_not_measured() -> None:
    folder = ROOT / "docs" / "performance"
    measured = sorted(path.name for path in folder.glob("gpu-*.json"))
    assert "gpu-rehearsal.json" not in measured
    text = (folder / "gpu.md").read_text()
    assert ("Not yet measured" in text) == (not measured)
    for name in measured:
        assert Results.read(folder / name).run["gpu"]["name"]


# Time ----------------------------------------------------------------------------------------


def test_a_step_has_its_own_minutes_within_the_whole() -> None:
    now = 100.0
    budget = Budget(60, lambda: now)
    step = budget.part(20)
    assert (budget.left, step.left) == (60, 20)
    now += 15
    assert (budget.left, step.left, step.used) == (45, 5, 15)
    assert budget.part(100).left == 45
    step.note("x", 2)
    assert budget.cost("x", 5) == 2
    assert budget.cost("y", 5) == 5


class _Device:
    """Processes that measure in ten seconds each; those whose task ends with ! fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.started: list[list[str]] = []
        self.checked: list[bool] = []
        self.ended = 0
        device = self

        class Process:
            def __init__(self, *_: object) -> None:
                self.jobs: list[str] = []
                device.started.append(self.jobs)

            def get_ready(self, job: Any) -> None:
                self.jobs.append(job["name"].partition("/")[2])
                device.checked.append(job["page_sum"] is not None)

            def run(self) -> dict[str, Any]:
                device.now += 10
                if self.jobs[-1] in device.broken:
                    raise ChildError("made up")
                return {"seconds": 1.0, "explained": None}

            def end(self) -> None:
                device.ended += 1

        self.broken: set[str] = set()
        monkeypatch.setattr(gpu_rounds, "Child", Process)
        monkeypatch.setattr(gpu_rounds.runner, "prepare", lambda *_: 1.0)
        monkeypatch.setattr(gpu_rounds.time, "monotonic", lambda: self.now)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> _Device:
    return _Device(monkeypatch)


def _made_up(**run: Any) -> Results:
    """Results of a machine that is none."""
    machine = described.describe(".", 0.01) | {"cpu": "made-up CPU of a test"}
    known = {"gpu": MADE_UP, "cores": 16, "seconds": 1.0, "seed": 1, "rounds": 2, "steps": [3],
             "gib": 8, "ended": "now", "busy_share": {}, "trials": [], "left_out": []}  # fmt: skip
    about = {"nbytes": 8_000_000_000, "tensors": 3, "files": 3, "starts": [8], "drawn": "made up"}
    return Results(machine, known | run, {"large": about, "single": about})


def _rounds(results: Results, tmp_path: Path) -> tuple[Rounds, Any, list[int]]:
    """Rounds, what they are about, and how many samples there were at each writing."""
    written: list[int] = []
    rounds = Rounds(
        results, "cpu", Bed([]), {}, random.Random(1), 2,
        lambda: written.append(len(results.samples)),
    )  # fmt: skip
    return rounds, write_llama(tmp_path / "c", 1, 100_000).subject(), written


def test_rounds_are_taken_as_far_as_the_time_goes(device: _Device, tmp_path: Path) -> None:
    results = _made_up()
    rounds, subject, written = _rounds(results, tmp_path)
    step = Step(3, WARM, [[PEAK], [PLAIN], [FAST]], 7)
    assert not rounds.take(step, subject, Budget(100, lambda: device.now))
    done = len(results.samples)
    assert 7 <= done <= 10
    assert written == list(range(1, done + 1))
    assert device.ended == len(device.started) == done
    for name in (PEAK, PLAIN, FAST):
        count = rounds.done("warm", name)
        assert [s["round"] for s in results.samples if s["name"] == name] == list(range(count))
    # What is on the device is summed up in the first round.
    assert device.checked.count(True) == 3
    # A step with the same names goes on where that one ended.
    assert rounds.take(Step(3, WARM, [[PEAK]], 4), subject, Budget(100, lambda: device.now))
    assert rounds.done("warm", PEAK) == 4


def test_a_process_loads_for_the_first_time_and_again(device: _Device, tmp_path: Path) -> None:
    results = _made_up()
    rounds, subject, _ = _rounds(results, tmp_path)
    group = [Way("torch").name, Way("torch", again=1).name]
    results.samples.append({"case": "warm", "name": group[0], "seconds": 1.0, "round": 0})
    assert rounds.take(Step(3, WARM, [group], 1), subject, Budget(600))
    assert device.started == [group]  # The next load has a first one before it.
    assert rounds.take(Step(3, WARM, [group], 1), subject, Budget(600))
    assert device.started == [group]


def test_a_step_in_one_process(device: _Device, tmp_path: Path) -> None:
    rounds, subject, _ = _rounds(_made_up(), tmp_path)
    names = [PEAK, Way("torch").name, Way("torch", threads=4).name]
    step = Step(2, RING, [names], 3, fresh=False)
    assert rounds.take(step, subject, Budget(600))
    [jobs] = device.started
    assert len(jobs) == 9
    assert all(sorted(jobs[at : at + 3]) == sorted(names) for at in (0, 3, 6))
    assert device.ended == 1


@pytest.mark.parametrize("fresh", [True, False])
def test_what_fails_has_no_further_turn(fresh: bool, device: _Device, tmp_path: Path) -> None:
    results = _made_up()
    rounds, subject, _ = _rounds(results, tmp_path)
    device.broken = {PLAIN}
    names = [PLAIN, PEAK]
    groups = [[name] for name in names] if fresh else [names]
    assert rounds.take(Step(3, WARM, groups, 3, fresh=fresh), subject, Budget(600))
    assert [s["name"] for s in results.samples] == [PEAK] * 3
    assert results.skipped == [("warm", gpu_tasks.label(PLAIN), "made up")]
    assert device.ended == len(device.started) <= (4 if fresh else 2)


def test_a_loader_that_fails_is_told_and_left_out(tmp_path: Path) -> None:
    made = write_llama(tmp_path / "c", 1, 1_000_000)
    results = _made_up()
    bed = Bed(made.paths, gpu_tasks.__name__, [str(ROOT)], explain=True)
    rounds = Rounds(results, "cpu", bed, {}, random.Random(1), 2, lambda: None)
    broken = Way("numpy", "no such allocator").name
    step = Step(3, WARM, [[broken], [cached(1)]], 2)
    assert rounds.take(step, made.subject(), Budget(600))
    assert [s["name"] for s in results.samples] == [cached(1)] * 2
    [(case, label, why)] = results.skipped
    assert (case, label) == ("warm", gpu_tasks.label(broken))
    assert "no such allocator" in why


def test_a_batch_holds_jax_once() -> None:
    jax, others = [[Way("jax").name], ["orbax"]], [[PEAK], [PLAIN], [FAST]]
    assert gpu_rounds.batches([jax[0], *others, jax[1]], 6) == [[jax[0], *others], [jax[1]]]
    assert gpu_rounds.batches(others, 2) == [others[:2], others[2:]]
    assert gpu_rounds.batches([], 2) == []


def test_batches_are_filled() -> None:
    jax, others = [[Way("jax").name], ["orbax"]], [[PEAK], [PLAIN], [FAST]]
    assert gpu_rounds.batches([*jax, *others], 3) == [[jax[0], *others[:2]], [jax[1], others[2]]]


# Names and steps -----------------------------------------------------------------------------


def test_ways_have_names() -> None:
    way = Way("torch", "framework", slot=4, threads=1, cache="bypass")
    assert way.name == "mfload:torch:framework:slot=4,threads=1,cache=bypass"
    assert gpu_tasks.way(way.name) == way
    assert gpu_tasks.way(Way("jax").name) == Way("jax")
    assert gpu_tasks.label(way.name) == (
        "mfload → torch, allocator framework, slots of 4 MiB, 1 reader, page cache bypass"
    )
    ceilings = (PEAK, DEVICE_COPY, cached(4), direct(1, 16), maps(8, 64))
    for name in (*ceilings, *gpu_peers.PEERS, *gpu_seams.names("rows")):
        assert gpu_tasks.label(name)
        assert gpu_tasks.framework(name) in ("", "torch", "jax")


def test_a_ring_is_varied_in_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """For one load: the next has what was there at first."""
    ring = types.SimpleNamespace(SLOT=1, DEPTH=2, KEPT=3)
    monkeypatch.setitem(sys.modules, "mfload.cuda.staging", ring)
    beside = types.SimpleNamespace(_LEAST_SLOT=1)
    monkeypatch.setitem(sys.modules, "mfload.planning.memory", beside)
    monkeypatch.setattr(gpu_tasks, "_defaults", {})
    gpu_tasks.find(f"cpu/{Way('numpy', slot=4).name}")
    assert (ring.SLOT, ring.DEPTH, beside._LEAST_SLOT) == (4 << 20, 2, 4 << 20)
    gpu_tasks.find(f"cpu/{Way('numpy', depth=8, kept=0).name}")
    assert (ring.SLOT, ring.DEPTH, ring.KEPT) == (1, 8, 0)
    gpu_tasks.find(f"cpu/{Way('numpy').name}")
    assert (ring.SLOT, ring.DEPTH, ring.KEPT, beside._LEAST_SLOT) == (1, 2, 3, 1)
    del ring.DEPTH
    with pytest.raises(RuntimeError, match="no DEPTH"):
        gpu_tasks.find(f"cpu/{Way('numpy', depth=8).name}")


@pytest.mark.parametrize(
    ("varied", "block"),
    [({"slot": 1}, 1), ({"slot": 32}, 32), ({"depth": 8}, None), ({"threads": 40}, None)],
)
def test_a_ring_is_what_its_label_says(
    varied: dict[str, int], block: int | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Whatever mfload would have chosen for so small a checkpoint and so many slots."""
    torch = pytest.importorskip("torch")
    made = TorchAdapter(torch.device("cpu"), FakeDevice())
    monkeypatch.setattr(frameworks, "get", lambda *_: made)
    for module, name in ((staging, "SLOT"), (staging, "DEPTH"), (limits, "_LEAST_SLOT")):
        monkeypatch.setattr(module, name, getattr(module, name))
    path = tmp_path / "w.safetensors"
    gpu_given.write(path, [gpu_given.Row("w", "U8", (70 << 20,))], 1)
    task = gpu_tasks.find(f"cpu/{Way('torch', 'mfload', **varied).name}")  # type: ignore[arg-type]
    found = task.find(task.run({"path": str(path)}))  # type: ignore[typeddict-item]
    assert found.report is not None
    assert f"blocks of up to {block or staging.SLOT >> 20} MiB" in found.report.notes
    assert varied.get("depth", 2) == staging.DEPTH


def test_a_second_load_of_a_process_is_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once: where the process has loaded so before, that was it."""
    loaded: list[str] = []
    monkeypatch.setattr(mfload, "load", lambda path, **_: loaded.append(path) or {})
    monkeypatch.setattr(gpu_tasks, "_loaded", set())
    for way in (Way("numpy", again=1), Way("numpy"), Way("numpy", again=1)):
        task = gpu_tasks.find(f"cpu/{way.name}")
        task.prepare({"path": "large", "page_sum": None})  # type: ignore[typeddict-item]
    assert loaded == ["large"]
    assert gpu_tasks.label(way.name) == "mfload → numpy, next load of the process"


@pytest.mark.skipif(find_spec("torch") is None, reason="needs PyTorch")
def test_nothing_is_loaded_before_the_first_load(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[str] = []
    monkeypatch.setattr(mfload, "load", lambda path, **_: loaded.append(path) or {})
    task = gpu_tasks.find(f"cpu/{Way('torch', again=0).name}")
    for path in ("tiny", "large"):
        task.run({"path": path})  # type: ignore[typeddict-item]
    assert loaded == ["large"]


def test_the_steps_measure_what_the_targets_are_about(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = {n: gpu_steps.steps(n, "cuda:0", 16) for n in gpu_steps.PARTS}
    assert sorted(gpu_steps.ORDER) == list(gpu_steps.PARTS)
    assert sum(part.minutes for part in gpu_steps.PARTS.values()) == 15

    def named(number: int, case: Any) -> set[str]:
        groups = [group for step in steps[number] if step.case == case for group in step.groups]
        return {name for group in groups for name in group}

    ring = named(2, RING)
    assert {cached(n) for n in (8, 12, 16)} < ring
    varied = [gpu_tasks.way(name) for name in ring if gpu_tasks.is_ours(name)]
    assert {6, 8, 10, 12, 16} == {way.threads for way in varied} - {None}
    assert {1, 2, 4, 8, 16} == {way.slot for way in varied} - {None}
    assert {2, 3} == {way.depth for way in varied} - {None}
    for framework in ("cupy", "torch", "jax"):
        ways = {
            Way(framework, each, again=again).name
            for each in ("auto", "mfload", "framework")
            for again in (None, 1)
        }
        ways.add(Way(framework, again=0).name)  # fmt: skip
        assert ways < named(3, WARM)
        assert Way(framework).name in named(3, MANY)
    assert {direct(n, mib) for n in (2, 4, 8) for mib in (4, 8, 16)} < named(5, COLD)
    assert {Way("torch").name, Way("torch", cache="bypass").name} < named(5, COLD)
    assert set(gpu_steps.RIVALS) < named(7, OTHERS)
    assert set(gpu_steps.RIVALS) <= set(gpu_peers.PEERS)
    assert maps(16, 256) in named(4, gpu_steps.MAPS)
    for step in (step for each in steps.values() for step in each):
        assert step.case.name in gpu_tables.TITLES
        assert step.fresh or len(step.groups) == 1
    monkeypatch.setattr(gpu_tasks, "why_not", lambda name, device: None)
    assert named(6, SEAMS) | named(6, gpu_steps.MODEL) == {
        name for what in gpu_seams.WHAT for name in gpu_seams.names(what)
    }


def test_what_is_not_installed_is_noted_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(gpu_peers, "find_spec", lambda name: None)
    setting = gpu_run.Setting("cpu", {}, 2, (7,), 1, 0.01, 7, 1, tmp_path / "gpu-x")
    run = gpu_run.Run(setting, tmp_path)
    run._measured(7)
    skipped = run._results.skipped
    noted = [each for each in skipped if each[1] == gpu_tasks.label(PLAIN)]
    assert ("others", gpu_tasks.label(PLAIN), "not installed: torch, safetensors") in noted
    assert len(skipped) == len(set(skipped))


@pytest.mark.parametrize("limit", ["disk", "system", "device memory"])
def test_the_checkpoint_fits(limit: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    gib = gpu_files.GIB
    free = 10 * gib if limit == "disk" else 100 * gib
    room = 20 * gib if limit == "system" else 100 * gib
    card = {**MADE_UP, "memory": (40 if limit == "device memory" else 100) * gib}
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(1, 1, free))
    monkeypatch.setattr(probes, "memory_room", lambda: (room, "system"))
    most, what = gpu_files.room(tmp_path, card)
    assert what == limit
    assert most / gib == pytest.approx({"disk": 3, "system": 5, "device memory": 6}[limit])
    setting = gpu_run.Setting("cuda:0", card, 16, (4,), 10, 8, 7, 1, tmp_path / "x")
    run = gpu_run.Run(setting, tmp_path)
    assert run._short == [f"a checkpoint of 8 GiB: {limit} has room for {most / gib:.2f} GiB"]


# Seams ---------------------------------------------------------------------------------------


@pytest.mark.skipif(find_spec("torch") is None, reason="needs PyTorch")
def test_seams_are_rehearsed_on_the_host(tmp_path: Path) -> None:
    code = """if True:
        import sys, warnings
        warnings.simplefilter("ignore")
        from benchmarks import gpu_seams
        for what in gpu_seams.WHAT:
            for name in gpu_seams.names(what):
                task = gpu_seams.find(name, "cpu")
                task.prepare({"files": sys.argv[1:]})
                print(name, len(task.run({"files": sys.argv[1:]})))
        gpu_seams._PAIRS["wrong"] = lambda path, device: (
            lambda: gpu_seams._load_file(path, device)[0](),
            lambda: {k: v + 1 for k, v in gpu_seams._load_file(path, device)[1]().items()},
        )
        gpu_seams.find("seam:wrong:ours", "cpu").prepare({"files": sys.argv[1:]})
    """
    made = gpu_files.write_single(tmp_path / "c", 1, 2_000_000)
    done = subprocess.run(
        [sys.executable, "-c", code, *made.paths], capture_output=True, text=True, cwd=ROOT,
        check=False,
    )  # fmt: skip
    assert "AssertionError: wrong: other values of " in done.stderr, done.stderr[-2000:]
    lines = done.stdout.splitlines()
    assert len(lines) == 2 * len(gpu_seams.WHAT)
    assert not any(line.endswith(" 0") for line in lines)


# Tables of made-up results ---------------------------------------------------------------------


def _results(**best: float) -> Results:
    """Made-up seconds, two rounds each; what is not named takes one second."""
    results = _made_up(
        trials=[
            {"kind": "check", "name": "mesh", "status": "pass", "said": "1 device"},
            {"kind": "check", "name": "streams/jax", "status": "crash", "said": "SIG\nABRT"},
            {"kind": "question", "name": "gds", "status": "skip", "said": "no"},
        ],
        left_out=["made up: a thing"],
    )
    names = {
        "warm": [
            PEAK,
            cached(4),
            *(Way("torch", again=n).name for n in (None, 0, 1)),
            Way("jax", again=0).name,
        ],
        "cold": [direct(4, 4), direct(8, 16), Way("torch").name],
        "ring": [Way("cupy", depth=2, again=1).name],
        "others": [PLAIN, FAST, Way("torch").name],
        "seams": gpu_seams.names("rows"),
    }
    keys = {direct(8, 16): "direct", Way("torch").name: "ours", Way("jax", again=0).name: "jax"}
    keys |= dict(zip(gpu_seams.names("rows"), ("theirs", "ours"), strict=True))
    for case, listed in names.items():
        for name in listed:
            key = f"{case}_{keys.get(name, name)}"
            seconds = best.get(key, 1.0)
            explained = None
            if gpu_tasks.is_ours(name):
                explained = {"route": [("pinned", "made up", 3)], "threads": 4, "notes": ["n"]}
            for number, more in enumerate((0.1, 0.0)):
                results.samples.append(
                    {"case": case, "name": name, "round": number, "seconds": seconds + more,
                     "cpu_s": 0.5, "peak_over": 0, "explained": explained}
                )  # fmt: skip
    return results


def test_targets_are_judged() -> None:
    found = _results(
        warm_peak=0.8, warm_ours=0.9, cold_direct=0.95, warm_jax=1.2, seams_theirs=2.0,
        **{f"others_{PLAIN}": 4.0},
    )  # fmt: skip
    judged = {target.what: target for target in gpu_tables.judge(found)}
    peak = judged["warm into PyTorch: share of the pinned peak"]
    assert peak.found == pytest.approx(0.8 / 0.9)
    assert peak.reached is False
    assert judged["warm into JAX, first load of a process: share of the pinned peak"].reached is (
        False
    )
    assert judged["warm into CuPy: share of the pinned peak"].reached is None
    assert judged["cold into PyTorch: share of the best file ceiling"].found == pytest.approx(0.95)
    assert judged["cold into PyTorch: share of the best file ceiling"].reached
    rows = judged["rows into parameters, as vLLM does: of the library's own time"]
    assert (rows.found, rows.reached) == (0.5, True)
    assert judged["warm: faster than safetensors.torch.load_file"].found == pytest.approx(4.0)
    assert judged["warm: faster than fastsafetensors, nogds"].found == pytest.approx(1.0)
    found.run["gpu"] = {}
    assert all(target.reached is None for target in gpu_tables.judge(found))


def test_the_page_of_made_up_results(tmp_path: Path) -> None:
    results = _results()
    gpu_run.put(results, tmp_path / "gpu-made-up")
    page = (tmp_path / "gpu-made-up.md").read_text()
    assert "Made-up GPU of a test, 48 GiB, the first of 2" in page
    assert gpu_tables.REHEARSAL not in page
    assert "| **mfload → torch** | 1.000 | 1.050 | 8.00 | 1.00 | 0.500 | 2 |" in page
    assert page.index("`streams/jax`: **crash**: SIG ABRT") < page.index("`mesh`: pass")
    assert "- `gds`: skip: no" in page
    assert "- made up: a thing" in page
    assert "warm, mfload → torch: pinned (made up), 4 readers; n" in page
    front = tmp_path / "README.md"
    about = tmp_path / "docs" / "performance" / "gpu.md"
    about.parent.mkdir(parents=True)
    about.write_text("# GPU\n<!-- figures: begin -->\n<!-- figures: end -->\n## Steps\n")
    front.write_text("before\n<!-- figures: begin -->\nformer\n<!-- figures: end -->\nafter\n")
    (tmp_path / "gpu-older.json").write_text((tmp_path / "gpu-made-up.json").read_text().replace(
        '"steps"', '"other"').replace('"now"', '"then"'))  # fmt: skip
    gpu.redraw(tmp_path, tmp_path)
    assert (tmp_path / "gpu-made-up.md").read_text() == page
    assert image.imread(tmp_path / "gpu-made-up.png").shape[1] > 1000
    assert not (tmp_path / "gpu-older.md").exists()
    text = front.read_text()
    assert "8.0 GB of bf16 onto one Made-up GPU of a test, 16 cores" in text
    assert "| mfload into PyTorch | 1.000 | 1.050 | 1.00 | 1.000 | 1.000 | 8.00 |" in text
    assert "| safetensors.torch.load_file | 1.000 | 1.050 | 1.00 | – | – | – |" in text
    assert text.startswith("before\n")
    assert "former" not in text
    text = about.read_text()
    assert text.startswith("# GPU\n")
    assert "](gpu-made-up.png)" in text
    assert "| cold into PyTorch: share of the best file ceiling | ≥ 0.95 | 1.00 | reached |" in text
    assert text.endswith("## Steps\n")


def test_a_page_of_nothing_yet(tmp_path: Path) -> None:
    results = _made_up()
    gpu_run.put(results, tmp_path / "gpu-none")
    assert "not measured" in (tmp_path / "gpu-none.md").read_text()
    gpu_tables.draw(results, tmp_path / "gpu-none.png")
    assert not (tmp_path / "gpu-none.png").exists()


def test_the_script_runs_from_the_root_alone() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", "--help"], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0
    assert "--minutes" in done.stdout


def test_pythons_share_is_timed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_python, "GIB", 1)
    monkeypatch.setattr(gpu_python, "ROUNDS", 1)
    gpu_python.main()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines[1:]] == [
        f"blocks of {slot:2} MiB" for slot in gpu_python.SLOTS
    ]
