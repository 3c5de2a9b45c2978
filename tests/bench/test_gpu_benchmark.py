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
    gpu_facts,
    gpu_given,
    gpu_peers,
    gpu_plan,
    gpu_python,
    gpu_rounds,
    gpu_run,
    gpu_tables,
    gpu_tasks,
)
from benchmarks.checkpoint import write_llama
from benchmarks.gpu_budget import Budget
from benchmarks.gpu_ceilings import PEAK, cached, direct
from benchmarks.gpu_given import landings
from benchmarks.gpu_plan import COLD, FAST, PLAIN, SWEEP, WARM, Plan
from benchmarks.gpu_rounds import Rounds, Step
from benchmarks.gpu_tasks import Way
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


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves out what only matters to figures, and where CI's results go."""
    monkeypatch.setattr(described, "busy_share", lambda seconds=0: 0.0)
    monkeypatch.delenv("OUT", raising=False)


# The whole, on host arrays -------------------------------------------------------------------


@pytest.mark.slow
def test_a_rehearsal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if file_system(tmp_path) in MEMORY_FILE_SYSTEMS:
        pytest.skip("a file system in memory")
    missing = [name for name in ("torch", "jax") if find_spec(name) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")
    monkeypatch.setattr(gpu_run.Run, "_ahead", lambda *_: 2)  # As where there are more cores.
    # Less of what is alike: each sample starts a framework.
    monkeypatch.setattr(gpu_facts, "cores", lambda: 1)
    monkeypatch.setattr(gpu_plan, "landings", lambda name: landings(name)[-1:])
    whole = Plan.rest
    monkeypatch.setattr(Plan, "rest", lambda plan: whole(plan)[:-2])
    out = tmp_path / "out"
    arguments = ["--device", "cpu", "--gib", "0.005", "--rounds", "1", "--out", str(out)]
    arguments += ["--workdir", str(tmp_path / "work"), "--trials", "mesh|failing|xla"]
    assert gpu.main(arguments) == 0
    printed = capsys.readouterr().out
    assert "FAILED" not in printed
    assert "checks that failed: none" in printed
    assert "  blocks of up to " in printed
    found = json.loads((out / "gpu-rehearsal.json").read_text())
    statuses = {each["name"]: each["status"] for each in found["run"]["trials"]}
    assert statuses == {"mesh": "pass", "failing/torch": "pass", "xla-owned/off": "pass"}
    assert set(found["summary"]) == set(gpu_tables.TITLES)
    assert {PEAK, cached(1), PLAIN, *(Way(f).name for f in ("torch", "jax", "numpy"))} <= set(
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
    assert list((tmp_path / "work").iterdir()) == []
    picture = (out / "gpu-rehearsal.png").read_bytes()
    assert gpu.main(["--redraw", "--out", str(out)]) == 0
    assert (out / "gpu-rehearsal.md").read_text() == page
    assert (out / "gpu-rehearsal.png").read_bytes() == picture


def test_a_rehearsal_without_time_leaves_all_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--device", "cpu", "--gib", "0.005", "--minutes", "0.1", "--trials", "mesh"]
    assert gpu.main([*arguments, "--out", str(tmp_path), "--workdir", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "gpu-rehearsal.json").read_text())
    assert found["samples"] == []
    assert found["run"]["left_out"][0] == "trial mesh"
    assert any(what.startswith("warm: rounds 1 to ") for what in found["run"]["left_out"])
    assert "### Left out for want of time" in (tmp_path / "gpu-rehearsal.md").read_text()
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


def test_a_rehearsal_is_not_written_among_the_figures(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        gpu.main(["--device", "cpu"])
    assert stopped.value.code == 2
    assert "--out" in capsys.readouterr().err


def test_the_page_claims_nothing_that_was_not_measured() -> None:
    folder = ROOT / "docs" / "performance"
    measured = sorted(path.name for path in folder.glob("gpu-*.json"))
    assert "gpu-rehearsal.json" not in measured
    text = (folder / "gpu.md").read_text()
    assert ("Not yet measured" in text) == (not measured)
    for name in measured:
        assert Results.read(folder / name).run["gpu"]["name"]


# Time ----------------------------------------------------------------------------------------


def test_a_budget_says_what_it_left_out() -> None:
    now = 100.0
    budget = Budget(60, lambda: now)
    assert budget.allows(60, "all of it")
    now += 30
    assert budget.left == 30
    assert budget.used == 30
    assert not budget.allows(31, "the rest")
    assert budget.left_out == ["the rest"]
    assert budget.cost("x", 5) == 5
    budget.note("x", 2)
    assert budget.cost("x", 5) == 2


class _Counting(Rounds):
    """Rounds that take ten seconds a sample and measure nothing."""

    now = 0.0
    order: list[tuple[str, ...]]

    def _batch(self, case: Any, names: Any, number: int) -> None:
        self.order.append(tuple(names))
        for name in names:
            _Counting.now += 10
            self.budget.note(f"{case.name}/{name}", 10)
            sample = {"case": case.name, "name": name, "seconds": 1.0, "round": number}
            self.results.samples.append(sample)


def _made_up(**run: Any) -> Results:
    """Results of a machine that is none."""
    machine = described.describe(".", 0.01) | {"cpu": "made-up CPU of a test"}
    known = {"gpu": MADE_UP, "cores": 16, "minutes": 10.0, "seconds": 1.0, "seed": 1, "rounds": 2,
             "busy_share": {}, "trials": [], "left_out": []}  # fmt: skip
    about = {"nbytes": 8_000_000_000, "tensors": 3, "files": 3, "starts": [8], "drawn": "made up"}
    return Results(machine, known | run, {"large": about})


def test_rounds_are_taken_as_far_as_the_time_goes() -> None:
    _Counting.now = 0.0
    budget = Budget(100, lambda: _Counting.now)
    written: list[int] = []
    results = _made_up()
    rounds = _Counting(
        results, "cpu", None, Bed([]), {}, budget, random.Random(1), 2,  # type: ignore[arg-type]
        lambda: written.append(len(results.samples)),
    )  # fmt: skip
    rounds.order = []
    rounds.take(Step(WARM, [PEAK, PLAIN, FAST], 7))
    assert len(results.samples) == 9
    assert written == [3, 6, 9]
    assert len(budget.left_out) == 1
    assert budget.left_out[0].startswith("warm: rounds 4 to 7 of ")
    for number in range(3):
        taken = {s["name"] for s in results.samples if s["round"] == number}
        assert taken == {PEAK, PLAIN, FAST}
    # A step with the same names goes on where that one ended; one that is cheaper still fits.
    rounds.take(Step(WARM, [PEAK], 4))
    assert [s["round"] for s in results.samples if s["name"] == PEAK] == [0, 1, 2, 3]


def test_a_batch_holds_jax_once() -> None:
    jax, others = [Way("jax").name, "orbax"], [PEAK, PLAIN, FAST]
    assert gpu_rounds.batches([jax[0], *others, jax[1]], 6) == [[jax[0], *others], [jax[1]]]
    assert gpu_rounds.batches(others, 2) == [others[:2], others[2:]]
    assert gpu_rounds.batches([], 2) == []


def test_batches_are_filled() -> None:
    jax, others = [Way("jax").name, "orbax"], [PEAK, PLAIN, FAST]
    assert gpu_rounds.batches([*jax, *others], 3) == [[jax[0], *others[:2]], [jax[1], others[2]]]


def test_a_loader_that_fails_is_told_and_left_out(tmp_path: Path) -> None:
    made = write_llama(tmp_path / "c", 1, 1_000_000)
    results = _made_up()
    bed = Bed(made.paths, gpu_tasks.__name__, [str(ROOT)], explain=True)
    rounds = Rounds(
        results, "cpu", made.subject(), bed, {}, Budget(600), random.Random(1), 2, lambda: None
    )
    broken = Way("numpy", "no such engine").name
    rounds.take(Step(WARM, [broken, cached(1)], 2))
    assert [s["name"] for s in results.samples] == [cached(1)] * 2
    [(case, label, why)] = results.skipped
    assert (case, label) == ("warm", gpu_tasks.label(broken))
    assert "no such engine" in why


# Names and plans -----------------------------------------------------------------------------


def test_ways_have_names() -> None:
    way = Way("torch", "pinned", "framework", slot=4, threads=1)
    assert way.name == "mfload:torch:pinned:framework:slot=4,threads=1"
    assert gpu_tasks.way(way.name) == way
    assert gpu_tasks.way(Way("jax").name) == Way("jax")
    assert gpu_tasks.label(way.name) == (
        "mfload → torch, engine pinned, landing framework, slots of 4 MiB, 1 reader"
    )
    for name in (PEAK, cached(4), direct(1, 16), *gpu_peers.PEERS):
        assert gpu_tasks.label(name)
        assert gpu_tasks.framework(name) in ("", "torch", "jax")


def test_a_ring_is_varied_in_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    ring = types.SimpleNamespace(SLOT=1, DEPTH=2)
    monkeypatch.setitem(sys.modules, "mfload.cuda.staging", ring)
    beside = types.SimpleNamespace(_LEAST_SLOT=1)
    monkeypatch.setitem(sys.modules, "mfload.planning.memory", beside)
    gpu_tasks.find(f"cpu/{Way('numpy', slot=4).name}")
    assert (ring.SLOT, ring.DEPTH, beside._LEAST_SLOT) == (4 << 20, 2, 4 << 20)
    gpu_tasks.find(f"cpu/{Way('numpy', depth=8).name}")
    assert (ring.SLOT, ring.DEPTH) == (4 << 20, 8)
    del ring.DEPTH
    with pytest.raises(RuntimeError, match="no DEPTH"):
        gpu_tasks.find(f"cpu/{Way('numpy', depth=8).name}")


@pytest.mark.parametrize(
    ("varied", "block"),
    [({"slot": 1}, 1), ({"slot": 32}, 32), ({"depth": 8}, 8), ({"threads": 40}, 8)],
)
def test_a_ring_is_what_its_label_says(
    varied: dict[str, int], block: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Whatever mfload would have chosen for so small a checkpoint and so many slots."""
    torch = pytest.importorskip("torch")
    made = TorchAdapter(torch.device("cpu"), FakeDevice())
    monkeypatch.setattr(frameworks, "get", lambda *_: made)
    for module, name in ((staging, "SLOT"), (staging, "DEPTH"), (limits, "_LEAST_SLOT")):
        monkeypatch.setattr(module, name, getattr(module, name))
    path = tmp_path / "w.safetensors"
    gpu_given.write(path, [gpu_given.Row("w", "U8", (70 << 20,))], 1)
    task = gpu_tasks.find(f"cpu/{Way('torch', 'pinned', 'mfload', **varied).name}")
    found = task.find(task.run({"path": str(path)}))  # type: ignore[typeddict-item]
    assert found.report is not None
    assert f"blocks of up to {block} MiB" in found.report.notes
    assert varied.get("depth", 2) == staging.DEPTH


def test_a_second_load_of_a_process_is_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[str] = []
    monkeypatch.setattr(mfload, "load", lambda path, **_: loaded.append(path) or {})
    for way in (Way("numpy"), Way("numpy", again=1)):
        task = gpu_tasks.find(f"cpu/{way.name}")
        task.prepare({"path": "large"})  # type: ignore[typeddict-item]
    assert loaded == ["large"]
    assert gpu_tasks.label(way.name) == "mfload → numpy, second load of the process"


def test_a_plan_puts_first_what_the_targets_are_about(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_tasks, "why_not", lambda name, device: None)
    results = _results()
    plan = gpu_plan.Plan(results, "cuda:0", 16, gds=True, rounds=7)
    assert plan.warm_ceilings().names == [PEAK, *(cached(n) for n in (1, 2, 4, 8, 16))]
    steps = plan.rest()
    warm, cold = steps[0], steps[1]
    assert warm.names[:2] == [PEAK, cached(8)]
    assert {Way("torch").name, Way("jax").name, Way("cupy").name, PLAIN, FAST} < set(warm.names)
    assert cold.case == COLD
    assert direct(8, 16) in cold.names
    assert Way("torch", "gds", "mfload").name in cold.names
    sweep = next(step for step in steps if step.case == SWEEP)
    assert Way("cupy", "pinned", "mfload", slot=16).name in sweep.names
    readers = next(step for step in steps[steps.index(sweep) + 1 :] if step.case == SWEEP)
    assert Way("cupy", "pinned", "mfload", threads=16).name in readers.names
    assert max(step.rounds for step in steps if step.case == WARM) == 7
    others = next(step for step in steps if Way("jax", "pinned", "framework").name in step.names)
    assert Way("jax", "pinned", "framework", again=1).name in others.names
    # Slots and how many of them come before the others, readers after them.
    assert steps.index(sweep) < steps.index(others)
    varied = [gpu_tasks.way(name) for name in sweep.names]
    assert any(way.slot for way in varied)
    assert any(way.depth for way in varied)
    assert not any(way.threads for way in varied)


def test_nothing_is_varied_before_it_was_measured_as_it_comes() -> None:
    results = _results()
    results.samples[:] = [s for s in results.samples if s["name"] == PEAK]
    assert gpu_plan.too_early(Step(SWEEP, [], 1), results)
    assert not gpu_plan.too_early(Step(WARM, [], 1), results)
    results.samples.append({"case": "warm", "name": Way("torch").name, "seconds": 1.0})
    assert not gpu_plan.too_early(Step(SWEEP, [], 1), results)


def test_a_ceiling_is_not_taken_to_need_what_a_load_does() -> None:
    budget = Budget(50)
    rounds = Rounds(_results(), "cuda:0", None, None, {}, budget, random.Random(0), 1, lambda: None)
    assert rounds._cost("warm", [PEAK, cached(8)]) == 2 * gpu_rounds._GUESS_CEILING
    assert rounds._cost("warm", [PEAK, Way("torch").name]) > gpu_rounds._GUESS


def test_what_is_not_installed_is_noted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_peers, "find_spec", lambda name: None)
    results = _made_up()
    plan = gpu_plan.Plan(results, "cpu", 2, gds=False, rounds=1)
    plan.rest()
    plan.rest()
    noted = [each for each in results.skipped if each[1] == gpu_tasks.label(PLAIN)]
    assert ("warm", gpu_tasks.label(PLAIN), "not installed: torch, safetensors") in noted
    assert len(noted) == len(set(noted))


@pytest.mark.parametrize("limit", ["disk", "memory", "card", "none"])
def test_the_checkpoint_fits(limit: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    gib = gpu_run.GIB
    free = 5 * gib if limit == "disk" else 100 * gib
    room = 20 * gib if limit == "memory" else 100 * gib
    card = {**MADE_UP, "memory": (40 if limit == "card" else 100) * gib}
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(1, 1, free))
    monkeypatch.setattr(probes, "memory_room", lambda: (room, "system"))
    setting = gpu_run.Setting("cuda:0", card, 16, 10, 10, 7, 1, "", tmp_path / "x")
    run = gpu_run.Run(setting, tmp_path)
    expected = {"disk": 4, "memory": 8, "card": 8, "none": 10}[limit]
    assert run._size() == pytest.approx(expected * gib)
    assert len(run._budget.left_out) == (limit != "none")


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
        "warm": [PEAK, cached(4), cached(8), PLAIN, FAST, Way("torch").name, Way("jax").name],
        "cold": [direct(4, 4), direct(8, 16), PLAIN, Way("torch").name],
        "sweep": [Way("cupy", "pinned", "mfload", depth=2).name],
    }
    keys = {cached(8): "cached", direct(8, 16): "direct", Way("torch").name: "ours"}
    for case, listed in names.items():
        for name in listed:
            key = f"{case}_{keys.get(name, name)}"
            seconds = best.get(key, 0.9 if name in keys and not key.endswith("ours") else 1.0)
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
    found = _results(warm_peak=0.8, warm_ours=0.9, cold_direct=0.95, cold_ours=1.0)
    found.samples += [
        {"case": "warm", "name": PLAIN, "seconds": 0.9 * 4.0},
    ]
    judged = {target.what: target for target in gpu_tables.judge(found)}
    peak = judged["warm, torch: share of the pinned host-to-device peak, 16 cores"]
    assert peak.found == pytest.approx(0.8 / 0.9)
    assert peak.reached
    assert judged["warm, jax: share of the pinned host-to-device peak, 16 cores"].reached is False
    assert judged["warm, cupy: share of the pinned host-to-device peak, 16 cores"].reached is None
    plain = judged["warm, torch: faster than safetensors.torch.load_file"]
    assert plain.found == pytest.approx(1 / 0.9)
    assert plain.reached is False
    assert judged["cold, torch: share of the file ceiling"].found == pytest.approx(0.95)
    found.run["gpu"] = {}
    assert all(target.reached is None for target in gpu_tables.judge(found))


def test_the_page_of_made_up_results(tmp_path: Path) -> None:
    results = _results()
    gpu_run.put(results, tmp_path / "gpu-made-up")
    page = (tmp_path / "gpu-made-up.md").read_text()
    assert "Made-up GPU of a test, 48 GiB, the first of 2" in page
    assert gpu_tables.REHEARSAL not in page
    assert "| **mfload → torch** | 1.000 | 1.050 | 8.00 | 1.00 | 1.0 | 0.500 | 2 |" in page
    assert page.index("`streams/jax`: **crash**: SIG ABRT") < page.index("`mesh`: pass")
    assert "- `gds`: skip: no" in page
    assert "- made up: a thing" in page
    assert "warm, mfload → torch: pinned (made up), 4 readers; n" in page
    gpu.redraw(tmp_path)
    assert (tmp_path / "gpu-made-up.md").read_text() == page
    assert image.imread(tmp_path / "gpu-made-up.png").shape[1] > 1000


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


@pytest.mark.skipif(find_spec("torch") is None, reason="needs PyTorch")
def test_seams_are_rehearsed_on_the_host() -> None:
    code = (
        "import sys, warnings; warnings.simplefilter('ignore'); from benchmarks import gpu_seams; "
        "sys.exit(gpu_seams.main(['--device', 'cpu', '--gib', '0.01', '--rounds', '1']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [line for line in done.stdout.splitlines() if line.startswith("| ")]
    assert len(rows) >= 7
    assert all(row.endswith("| True |") for row in rows[1:]), rows


def test_seams_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    from benchmarks import gpu_seams

    monkeypatch.setattr(gpu_facts, "look", lambda: "no driver")
    assert gpu_seams.main([]) == 2
