"""What the GPU benchmark tries and reaches, without a GPU: facts, memory, ceilings, trials."""

from __future__ import annotations

import ctypes
import os
import re
import stat
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import (
    child,
    gpu_ceilings,
    gpu_facts,
    gpu_given,
    gpu_memory,
    gpu_questions,
    gpu_stress,
    gpu_tables,
    gpu_tasks,
    gpu_trial,
    gpu_trials,
)
from benchmarks.checkpoint import write_llama
from benchmarks.gpu_budget import Budget
from benchmarks.gpu_ceilings import DEVICE_COPY, PEAK, cached, direct, maps
from benchmarks.gpu_given import Given, Row, SkipError
from benchmarks.gpu_tasks import Way
from benchmarks.process import environment
from benchmarks.runner import Bed
from mfload import dtypes
from mfload.bench.loaders import PAGE, touch
from mfload.io.subprocess_probe import Probed

# What is known of the GPU --------------------------------------------------------------------


def test_facts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    device = {"name": "Made-up", "memory": 1 << 30, "pci": "0000:01:00.0"}
    answers = iter(
        [
            Probed(None, "timeout"),
            Probed({"error": "no libcuda"}),
            Probed({"driver": "1.2", "devices": []}),
            Probed({"driver": "1.2", "devices": [device]}),
            Probed({"driver": "1.2", "devices": [device, device]}),
        ]
    )
    monkeypatch.setattr(gpu_facts, "ask", lambda *_, **__: next(answers))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "timeout" in str(gpu_facts.look())
    assert gpu_facts.look() == "no libcuda"
    assert gpu_facts.look() == "the driver shows no device"
    assert gpu_facts.look() == {**device, "cuda": "1.2", "count": 1}
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho '9.9, 5, 16, 1, 16'\n")
    smi.chmod(smi.stat().st_mode | stat.S_IEXEC)
    found = gpu_facts.look()
    assert isinstance(found, dict)
    assert found["driver"] == "9.9"
    assert "the first of 2, PCIe 5 x16 (1 x16 when asked), driver 9.9" in gpu_facts.sentence(found)


def test_names_of_files() -> None:
    assert gpu_facts.slug("NVIDIA H100 80GB HBM3") == "h100-80gb-hbm3"
    assert gpu_facts.slug("NVIDIA") == "gpu"


def test_children_see_the_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert gpu_facts.environment(0) == {}
    assert gpu_facts.environment(2)["CUDA_VISIBLE_DEVICES"] == "0,1"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert environment(gpu_facts.environment(1), [])["CUDA_VISIBLE_DEVICES"] == "1"


# On a device that is none ----------------------------------------------------------------------


class _Stub:
    """As much of CuPy as the ceilings use, on host memory; copies run when they are waited for."""

    uint8 = np.uint8

    def __init__(self) -> None:
        self.locked: dict[int, int] = {}
        self.copied = 0
        self.waiting: list[tuple[int, int, int]] = []
        runtime = types.SimpleNamespace(
            hostRegister=lambda at, nbytes, flags: self.locked.update({at: nbytes}),
            hostUnregister=self.locked.pop,
            eventCreateWithFlags=lambda flags: flags,
            eventRecord=lambda event, stream: None,
            eventSynchronize=lambda event: self._wait(),
            eventQuery=lambda event: self._wait(),
            eventBlockingSync=1,
            eventDisableTiming=2,
            memcpyAsync=self._later,
            memcpy=lambda to, at, nbytes, kind: ctypes.memmove(to, at, nbytes),
            memGetInfo=lambda: (5, 9),
        )
        device = types.SimpleNamespace(synchronize=self._wait, use=lambda: None)
        stream = types.SimpleNamespace(ptr=1, synchronize=self._wait)
        self.cuda = types.SimpleNamespace(
            runtime=runtime, Device=lambda number: device, Stream=lambda non_blocking: stream
        )

    def _later(self, to: int, at: int, nbytes: int, kind: int, stream: int) -> None:
        if kind == 1:
            assert any(low <= at and at + nbytes <= low + n for low, n in self.locked.items())
        assert (kind, stream) in ((1, 1), (3, 0))
        self.waiting.append((to, at, nbytes))

    def _wait(self) -> None:
        for to, at, nbytes in self.waiting:
            ctypes.memmove(to, at, nbytes)
            self.copied += nbytes
        self.waiting.clear()

    def zeros(self, count: int, dtype: Any) -> Any:
        array = np.zeros(count, dtype)
        return types.SimpleNamespace(data=types.SimpleNamespace(ptr=array.ctypes.data), keep=array)


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> _Stub:
    made = _Stub()
    monkeypatch.setattr(gpu_memory, "cupy", lambda: made)
    return made


def _job(tmp_path: Path, name: str) -> Any:
    found = write_llama(tmp_path / "c", 1, 3_000_000)
    warmup = write_llama(tmp_path / "w", 1, 1_000_000)
    return Bed(warmup.paths, gpu_tasks.__name__).job(f"cuda:0/{name}", found.subject())


@pytest.mark.parametrize(
    "name", [PEAK, cached(2), direct(2, 4), maps(2, 1), DEVICE_COPY, Way("numpy").name]
)
def test_what_a_process_measures_on_a_device(name: str, stub: _Stub, tmp_path: Path) -> None:
    job = _job(tmp_path, name)
    result = child.measure(job, lambda: None)
    assert result["seconds"] > 0
    assert not stub.waiting
    if name == PEAK:
        assert stub.copied > job["nbytes"]  # What was copied before the clock started, too.
    if gpu_tasks.is_ours(name):
        with pytest.raises(RuntimeError, match="the pages sum up to"):
            child.measure({**job, "page_sum": 1}, lambda: None)


def test_memory_by_address(stub: _Stub) -> None:
    values = np.arange(5000, dtype=np.uint8)
    other = np.zeros(5000, np.uint8)
    gpu_memory.write(other.ctypes.data, values, "cuda:0")
    assert gpu_memory.read(other.ctypes.data, 5000, "cuda:0") == values.tobytes()
    spans = [(values.ctypes.data, 5000), (values.ctypes.data, 0)]
    assert gpu_memory.page_sum(spans, "cuda:0") == gpu_memory.page_sum(spans, "cpu") == 0
    assert gpu_memory.page_sum([(values.ctypes.data + 3, 4098)], "cuda:0") == 3 + 3
    assert not stub.locked
    assert gpu_memory.free("cuda:0") == 5
    locked = gpu_memory.host_array(1 << 20, "cuda:0")
    assert stub.locked == {locked.ctypes.data: 1 << 20}
    assert locked.ctypes.data % (2 << 20) == 0


def test_pages_are_summed_up_piece_by_piece(stub: _Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_memory, "_CHUNK", 2 * PAGE)
    values = np.random.default_rng(1).integers(0, 256, 70_001, np.uint8)
    spans = [(values.ctypes.data + n, n * PAGE + more) for n in range(6) for more in (0, 1, 99)]
    assert gpu_memory.page_sum(spans, "cuda:0") == touch(spans)
    assert not stub.locked


def test_maps_are_copied_whole(
    stub: _Stub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Every byte once, a window page-locked while the one before it is copied, none at the end."""
    most = 0
    register = stub.cuda.runtime.hostRegister

    def registering(at: int, nbytes: int, flags: int) -> None:
        nonlocal most
        assert (at % PAGE, flags) == (0, gpu_ceilings._READ_ONLY)
        register(at, nbytes, flags)
        most = max(most, len(stub.locked))

    stub.cuda.runtime.hostRegister = registering
    job = _job(tmp_path, maps(1, 1))
    gpu_ceilings.find(maps(1, 1), "cuda:0").run(job)
    assert stub.copied == sum(stop - start for _, start, stop in job["extents"])
    assert (most, stub.locked) == (2, {})


def test_a_sum_that_is_not_wanted_is_not_taken(
    stub: _Stub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    job = {**_job(tmp_path, Way("numpy").name), "page_sum": None}
    sums: list[int] = []
    real = gpu_memory.page_sum
    monkeypatch.setattr(gpu_memory, "page_sum", lambda *given: sums.append(1) or real(*given))
    child.measure(job, lambda: None)  # type: ignore[arg-type]
    assert len(sums) == 1  # Of the tiny checkpoint, before the clock starts.


def test_waking_is_timed(stub: _Stub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(gpu_questions, "_COPIES", 2)
    found = gpu_trial.run("waking", Given("cuda:0", tmp_path))
    assert found["status"] == "pass"
    assert "8 MiB: asleep " in found["said"]


def test_where_cupy_compiles_no_kernels(stub: Any, tmp_path: Path) -> None:
    def kernel(*_: str) -> Any:
        raise RuntimeError("cuda_fp16.h: no such file")

    stub.__version__, stub.ElementwiseKernel = "0", kernel
    with pytest.raises(SkipError, match="compiles no kernels here: cuda_fp16"):
        gpu_given.doubled("cupy", {})
    found = gpu_trial.run("streams/cupy/mfload", Given("cuda:0", tmp_path))
    assert found["status"] == "skip"


# Trials --------------------------------------------------------------------------------------


def _ask(code: str, timeout: float = 60) -> tuple[str, str]:
    return gpu_trials.ask([sys.executable, "-c", code], dict(os.environ), timeout)


def test_a_trial_that_crashes_or_hangs_is_a_result() -> None:
    status, said = _ask("import os, sys; print('why', file=sys.stderr, flush=True); os.abort()")
    assert (status, said) == ("crash", "ended by SIGABRT; last it said: why")
    assert _ask("raise SystemExit(3)") == ("crash", "ended with status 3")
    assert _ask("import time; time.sleep(60)", 0.5)[0] == "timeout"
    answer = '{"status": "pass", "said": "well"}'
    assert _ask(f"print('{answer}')") == ("pass", "well")


def test_what_a_trial_raises_is_an_answer(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def trial(given: Given, what: str) -> str:
        assert given.folder == tmp_path
        if what == "skip":
            raise SkipError("not here")
        assert what == "pass", "wrong bits"
        return "right"

    monkeypatch.setattr(gpu_trial, "TRIALS", {"t": trial})
    given = Given("cpu", tmp_path)
    assert gpu_trial.run("t/pass", given) == {"status": "pass", "said": "right"}
    assert gpu_trial.run("t/skip", given) == {"status": "skip", "said": "not here"}
    failed = gpu_trial.run("t/other", given)
    assert failed["status"] == "fail"
    assert failed["said"].startswith("AssertionError: wrong bits")
    capsys.readouterr()


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_every_trial_is_there(device: str) -> None:
    groups = gpu_trials.groups(device, 16)
    names = [name for each in groups.values() for group in each for name in group["names"]]
    assert len(names) == len(set(names))
    known = {*gpu_trial.TRIALS, "suite"}
    assert {name.split("/")[0] for name in names} <= known
    if device != "cpu":
        assert {name.split("/")[0] for name in names} == known
        assert {f"streams/jax/{each}" for each in ("auto", "mfload", "framework")} < {*names}
        assert "suite/tests/devices" in names
        assert groups[1][0]["names"] == ["busy-mmap", "dropped", "lazy"]


def test_a_trial_of_an_engine_that_is_not_taken_is_skipped(tmp_path: Path) -> None:
    found = gpu_trial.run("truncated/numpy/direct", Given("cpu", tmp_path))
    assert found["status"] == "pass"
    found = gpu_trial.run("truncated/numpy/pinned", Given("cpu", tmp_path))
    assert found["status"] == "skip"
    assert found["said"].startswith("pinned was asked for and ")


def test_a_failed_question_is_no_failed_check() -> None:
    def outcome(kind: str, name: str, status: str) -> gpu_trials.Outcome:
        return {"kind": kind, "name": name, "status": status, "said": "", "seconds": 0.0}

    found = [outcome("question", "q", "fail"), outcome("check", "a", "crash")]
    found += [outcome("check", "b", "pass"), outcome("check", "c", "skip")]
    assert gpu_trials.failed(found) == ["a"]


def test_a_question_is_answered_by_no(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(gpu_trials, "ask", lambda *_: ("fail", "INTERNAL: unaligned"))
    noted: list[gpu_trials.Outcome] = []
    trials = gpu_trials.Trials("cpu", {}, tmp_path, tmp_path / "log", noted.append)
    for kind in (gpu_trials.QUESTION, gpu_trials.CHECK):
        assert trials.run({"kind": kind, "names": ["x"], "abreast": 1}, Budget(60))
        assert gpu_tables.trials([dict(noted[-1])], kind).startswith(
            "- `x`: no: INTERNAL" if kind == gpu_trials.QUESTION else "- `x`: **fail**"
        )
    assert not trials.run({"kind": kind, "names": ["x"], "abreast": 1}, Budget(1))
    monkeypatch.setattr(gpu_trials, "ask", lambda *_: ("timeout", "late"))
    assert not trials.run({"kind": kind, "names": ["x"], "abreast": 1}, Budget(60))
    assert trials.run({"kind": kind, "names": ["y"], "abreast": 1}, Budget(600))
    assert [each["status"] for each in noted] == ["no", "fail", "timeout"]


def test_every_test_that_needs_a_gpu_is_among_them() -> None:
    root = Path(__file__).resolve().parents[2]
    listed = [root / path for path in gpu_trials._suites()]
    assert all(path.exists() for path in listed)
    marked = re.compile(r"(^|@|= )pytest\.mark\.gpu", re.M)
    shared = root / "tests" / "conformance"  # Their subclasses are in files of their own.
    for path in (root / "tests").rglob("test_*.py"):
        if (
            marked.search(path.read_text())
            and path != Path(__file__)
            and shared not in path.parents
        ):
            assert any(each in (path, *path.parents) for each in listed), path


def test_suites_are_trials(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Their last line is the answer; what a failed one printed is kept."""
    text = """
import time, pytest
pytestmark = pytest.mark.gpu
def test_right(): pass
"""
    wrong, hangs = "def test_wrong(): assert 'seen' == ''\n", "def test_late(): time.sleep(60)\n"
    suites = {"right": text, "wrong": text + wrong, "none": "", "late": text + hangs}
    for name, code in suites.items():
        (tmp_path / f"test_{name}.py").write_text(code)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu\n")
    needs = {f"test_{name}.py": ("json",) for name in suites} | {"x": ("no_such_module",)}
    monkeypatch.setattr(gpu_trials, "_suites", lambda: needs)
    monkeypatch.setattr(gpu_trials, "ROOT", tmp_path)
    noted: list[gpu_trials.Outcome] = []
    trials = gpu_trials.Trials("cuda:0", os.environ, tmp_path, tmp_path / "log", noted.append)
    names = [f"suite/{each}" for each in needs if "late" not in each]
    assert trials.run({"kind": gpu_trials.CHECK, "names": names, "abreast": 4}, Budget(60))
    found = {each["name"]: (each["status"], each["said"]) for each in noted}
    assert found["suite/test_right.py"][0] == "pass"
    assert found["suite/test_right.py"][1].startswith("1 passed")
    status, said = found["suite/test_wrong.py"]
    assert status == "fail"
    assert said.startswith("1 failed, 1 passed")
    assert "FAILED test_wrong.py::test_wrong" in said
    assert found["suite/test_none.py"][0] == "skip"
    assert found["suite/x"] == ("skip", "not installed: no_such_module")
    assert "assert 'seen' == ''" in (tmp_path / "log").read_text()
    assert trials._suite("test_late.py", 3)[0] == "timeout"


def test_a_dtype_that_fails_keeps_no_other_from_its_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(given: Given, path: Path, framework: str, **options: Any) -> dict[str, Any]:
        if path.stem in ("F16", "bfloat16"):
            raise ValueError("the framework's own")
        return real(given, path, framework, **options)

    real = Given.load
    monkeypatch.setattr(Given, "load", load)
    for name, bad, well in (
        ("dtypes/numpy/auto/mfload", "F16", "F64"),
        ("conversion/numpy", "F32 to bfloat16", "F64 to float32"),
    ):
        found = gpu_trial.run(name, Given("cpu", tmp_path))
        assert found["status"] == "fail"
        failed, equal = found["said"].split("; ")[:2]
        assert f"failed: {bad}: ValueError: the framework's own" in failed
        assert well in equal


def test_a_trial_sees_wrong_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(given: Given, path: Path, framework: str, **options: Any) -> dict[str, Any]:
        arrays = real(given, path, framework, **options)
        wanted = next(array for array in arrays.values() if array.size)
        wanted.reshape(-1).view(np.uint8)[-1] ^= 1
        return arrays

    real = Given.load
    monkeypatch.setattr(Given, "load", load)
    for name in ("dtypes/numpy/auto/mfload", "conversion/numpy", "alignment/numpy/mfload"):
        assert gpu_trial.run(name, Given("cpu", tmp_path))["status"] == "fail"


_HOLDERS = pytest.mark.parametrize(
    "name", ["lifetime/numpy/auto", "truncated/numpy/auto", "failing/numpy"]
)


@_HOLDERS
def test_a_trial_sees_a_leak(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[Any] = []

    def load(given: Given, path: Path, framework: str, **options: Any) -> dict[str, Any]:
        arrays = real(given, path, framework, **options)
        kept.extend(arrays.values())
        return arrays

    real = Given.load
    assert gpu_trial.run(name, Given("cpu", tmp_path))["status"] == "pass"
    monkeypatch.setattr(Given, "load", load)
    monkeypatch.setattr(gpu_stress, "_PATIENCE", 0.05)
    found = gpu_trial.run(name, Given("cpu", tmp_path))
    kept.clear()
    assert found["status"] == "fail"
    assert "mfload still holds" in found["said"]


@_HOLDERS
def test_a_trial_waits_for_memory(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of XLA, which lets go of it some milliseconds later; here, when it is waited for."""
    kept: list[Any] = []
    waited: list[float] = []

    def load(given: Given, path: Path, framework: str, **options: Any) -> dict[str, Any]:
        arrays = real(given, path, framework, **options)
        kept.extend(arrays.values())
        return arrays

    def sleep(seconds: float) -> None:
        waited.append(seconds)
        kept.clear()

    real = Given.load
    monkeypatch.setattr(Given, "load", load)
    monkeypatch.setattr(gpu_stress.time, "sleep", sleep)
    assert gpu_trial.run(name, Given("cpu", tmp_path))["status"] == "pass"
    assert waited


@pytest.mark.parametrize("forgetful", [False, True])
def test_a_trial_sees_pages_that_stay_locked(
    forgetful: bool, stub: _Stub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(given: Given, path: Path, framework: str, **options: Any) -> dict[str, Any]:
        stub.cuda.runtime.hostRegister(4096, 1 << 20, 0)
        if not forgetful:
            stub.cuda.runtime.hostUnregister(4096)
        return real(given, path, framework, **options)

    real = Given.load
    monkeypatch.setattr(Given, "load", load)
    found = gpu_trial.run("pins/numpy/auto", Given("cuda:0", tmp_path))
    if forgetful:
        assert found["said"] == "AssertionError: 1048576 bytes are still registered"
    else:
        assert found == {"status": "pass", "said": "1 MiB registered during the load, 0 after"}


def test_files_of_every_dtype_hold_what_was_written(tmp_path: Path) -> None:
    import mfload

    for pad, dtype in enumerate(dtypes.TABLE):
        path = tmp_path / f"{dtype}.safetensors"
        data = gpu_given.write(path, [Row("a", dtype, (8,)), Row("b", dtype, (2, 16))], pad, pad)
        with mfload.open(path) as opened:
            assert list(opened) == ["a", "b"]
        assert path.read_bytes().endswith(data["a"] + data["b"])
