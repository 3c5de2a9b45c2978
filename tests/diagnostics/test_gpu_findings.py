"""What stands between a disk and a GPU: each symptom on a made-up machine, with what to do."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import samples
from diagnostics.machines import CARD, ONE, machine, named

import mfload
from mfload import errors
from mfload.cuda import gds
from mfload.diagnostics import doctor, gpu
from mfload.diagnostics.host import Mount
from mfload.io.route import Leg
from mfload.io.subprocess_probe import Probed

EXT4 = Mount("ext4", frozenset({"rw", "data=ordered"}), "259:1")
UDEV = {"run/udev/data/x": "", "proc/version": "Linux version 6.8"}
NVIDIA_FS = UDEV | {"proc/driver/nvidia-fs/version": "version: 2.26\n", "dev/nvidia-fs0": ""}


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("KVIKIO_COMPAT_MODE", "CUFILE_FORCE_COMPAT_MODE", "CUFILE_USE_PCIP2PDMA",
                 "CUFILE_ENV_PATH_JSON"):  # fmt: skip
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("resource", "found", "level"),
    [
        ("0x00 0x0ffffff 0x40200\n0x1000000000 0x100fffffff 0x14220c\n", "BAR1 256 MiB", "note"),
        ("0x00 0x0ffffff 0x40200\n0x2000000000 0x3fffffffff 0x14220c\n", "BAR1 128 GiB", "ok"),
        ("0x00 0x0ffffff 0x40200\n0x0 0x0 0x0\n", "", "ok"),
        ("no number\n", "", "ok"),
        ("x y z\nx y z\n", "", "ok"),
    ],
)
def test_what_other_devices_see_of_a_card(
    tmp_path: Path, resource: str, found: str, level: str
) -> None:
    files = CARD | {"sys/bus/pci/devices/0000:1b:00.0/resource": resource}
    card = named(gpu.look(machine(tmp_path, files), Probed(ONE)), "0000:1b:00.0")
    assert card.level == level
    assert found in card.found
    assert ("BAR1" in card.found) is bool(found)
    assert ("5016" in card.advice) is (level == "note")


def test_cufile_is_not_asked_about_without_a_gpu(tmp_path: Path) -> None:
    (found,) = gpu.cufile(machine(tmp_path, {"etc/cufile.json": "{"}), 0, EXT4)
    assert "no GPU" in found.found


def test_a_machine_that_lacks_all(tmp_path: Path) -> None:
    overlay = Mount("overlay", frozenset(), "0:1")
    findings = list(gpu.cufile(machine(tmp_path, {"proc/version": "Linux"}), 1, overlay))
    assert "5008" in named(findings, "nvidia-fs").advice
    reasons = {each.found: each.advice for each in findings if each.what == "in the way"}
    assert any("-v /run/udev" in advice for advice in reasons.values())
    assert "volume" in named(findings, "file system").advice
    assert all(each.level != "trouble" for each in findings)


@pytest.mark.parametrize(
    ("where", "says"),
    [
        (EXT4, ""),
        (Mount("ext4", frozenset({"data=journal"}), ""), "data=ordered"),
        (Mount("ext4", frozenset({"rw"}), ""), "does not say"),
        (Mount("overlay", frozenset(), ""), "5027"),
        (Mount("nfs4", frozenset({"proto=tcp"}), ""), "RDMA"),
        (Mount("lustre", frozenset(), ""), ""),
        (Mount("fuse.x", frozenset(), ""), "fuse.x"),
    ],
)
def test_file_systems(tmp_path: Path, where: Mount, says: str) -> None:
    findings = list(gpu.cufile(machine(tmp_path, NVIDIA_FS), 1, where))
    told = [each.found for each in findings if each.what == "file system"]
    assert bool(told) is bool(says)
    assert says in "".join(told)


def test_nvidia_fs_and_who_else_holds_registered_memory(tmp_path: Path) -> None:
    stats = (
        "NVFS statistics(ver: 4.0)\nActive Process: 2\n"
        "GPU 0000:be:00.0  uuid:87e5 : Registered_MiB=64 Cache_MiB=0 max_pinned_MiB=64\n"
        "GPU 0000:e7:00.0  uuid:029f : Registered_MiB=16 Cache_MiB=0 max_pinned_MiB=64\n"
    )
    system = machine(tmp_path, NVIDIA_FS)
    assert named(gpu.cufile(system, 1, EXT4), "nvidia-fs").found == "version: 2.26"
    machine(tmp_path, {"proc/driver/nvidia-fs/stats": stats})
    found = named(gpu.cufile(system, 1, EXT4), "nvidia-fs")
    assert found.data == {"processes": 2, "mib": 80}
    assert "5016" in found.advice
    assert not [each for each in gpu.cufile(system, 1, EXT4) if each.what == "in the way"]


def test_containers_need_the_devices_of_nvidia_fs(tmp_path: Path) -> None:
    files = {name: text for name, text in NVIDIA_FS.items() if not name.startswith("dev")}
    found = named(gpu.cufile(machine(tmp_path, files), 1, EXT4), "nvidia-fs")
    assert "--device" in found.advice


def test_cores_that_are_not_for_this_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = "sys/devices/system/node"
    files = CARD | {f"{base}/node0/cpulist": "0-3\n", f"{base}/node1/cpulist": "4-7\n"}
    files[f"{base}/online"] = "0-1\n"
    system = machine(tmp_path, files)
    for cpus, says in (({0, 1}, "no core"), ({3, 4}, "")):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, cpus=cpus: cpus, raising=False)
        card = named(gpu.look(system, Probed(ONE)), "0000:1b:00.0")
        assert bool(card.advice) is bool(says)
        assert says in card.advice


def test_virtual_machines(tmp_path: Path) -> None:
    files = {
        "proc/cpuinfo": "processor\t: 0\nflags\t\t: fpu hypervisor sse\n",
        "sys/class/dmi/id/product_name": "Some VM\n",
    }
    found = named(gpu.cufile(machine(tmp_path, NVIDIA_FS | files), 1, EXT4), "inside")
    assert "Some VM" in found.found
    assert "hangs" in found.advice
    real = machine(tmp_path / "real", NVIDIA_FS | {"proc/cpuinfo": "flags\t: fpu sse\n"})
    assert not [each for each in gpu.cufile(real, 1, EXT4) if each.what == "inside"]


@pytest.mark.parametrize(
    ("verdict", "level", "says"),
    [
        (gds.Verdict(True, "counters"), "ok", ""),
        (gds.Verdict(False, "a probe of cuFile: no answer within 9 s"), "note", "hangs"),
        (gds.Verdict(False, "could not open (5030)"), "note", "volume"),
        (gds.Verdict(False, "kvikio is not installed"), "note", ""),
        (gds.Verdict(False, "not verified"), "note", ""),
    ],
)
def test_verdicts(verdict: gds.Verdict, level: str, says: str) -> None:
    found = gpu.verdict(verdict, "cuda:0")
    assert (found.level, found.data["real"]) == (level, verdict.real)
    assert says in found.advice
    assert bool(found.advice) is (level == "note")


def test_warm_files_are_faster_by_way_of_the_cache() -> None:
    legs = tuple(Leg("f", "pread", "", share) for share in (1.0, 0.1, None))
    (found,) = gpu.warm(legs)
    assert "1 of 3" in found.found
    assert "slower" in found.advice
    assert list(gpu.warm(legs[1:])) == []


@pytest.mark.parametrize(
    ("answer", "level", "says"),
    [
        (None, "note", "pip install"),
        (Probed(None, "crashed with SIGSEGV"), "trouble", "hang"),
        (Probed({"error": "no libcudart"}), "trouble", "driver"),
        (Probed({"version": "14.2"}), "ok", ""),
    ],
)
def test_cupy(answer: Probed | None, level: str, says: str) -> None:
    found = gpu.cupy(answer)
    assert found.level == level
    assert says in found.advice


def test_a_cupy_that_can_not_be_imported(tmp_path: Path) -> None:
    (tmp_path / "cupy.py").write_text("raise OSError('libnvrtc is not there')")
    done = subprocess.run(
        [sys.executable, "-c", "from mfload.diagnostics import probe; probe.main('cupy')"],
        env={"PYTHONPATH": f"{tmp_path}:{':'.join(sys.path)}"}, capture_output=True, timeout=60,
    )  # fmt: skip
    assert json.loads(done.stdout)["error"] == "libnvrtc is not there"


@pytest.mark.parametrize(
    ("environment", "found"),
    [
        ({}, "75% of each card"),
        ({"XLA_PYTHON_CLIENT_MEM_FRACTION": ".4"}, "40% of each card"),
        ({"XLA_PYTHON_CLIENT_MEM_FRACTION": "much"}, "75% of each card"),
        ({"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}, "grows"),
        ({"XLA_PYTHON_CLIENT_ALLOCATOR": "platform"}, "grows"),
    ],
)
def test_what_xla_takes(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], found: str
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    (told,) = gpu.xla(environment)
    assert found in told.found
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name if name == "jax" else None)
    (told,) = gpu.xla(environment)
    assert "jax[cuda13]" in told.advice
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    assert list(gpu.xla(environment)) == []


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A machine with a GPU, as its probes tell; which were asked."""
    asked: list[str] = []

    def ask(module: str, *arguments: str, timeout: float | None) -> Probed:
        asked.append(" ".join((module, *arguments)))
        if "cuda" in arguments:
            return Probed(ONE)
        return Probed({"version": "14.2"})

    monkeypatch.setattr(doctor, "ask", ask)
    return asked


@pytest.mark.parametrize("real", [False, True])
def test_the_route_onto_a_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, card: list[str], real: bool
) -> None:
    monkeypatch.setattr(gds, "verdict", lambda *_, **__: gds.Verdict(real, "as told"))
    monkeypatch.setattr("mfload.io.route.SMALL", 0)
    monkeypatch.setattr("mfload.io.probes.cached_share", lambda *_: 0.0)
    monkeypatch.setattr("mfload.io.probes.direct_alignment", lambda _: (512, 512))
    monkeypatch.setattr("mfload.io.probes.memory_room", lambda *_, **__: (100, "test machine"))
    path = samples.save(tmp_path / "m.safetensors", {"w": np.zeros(8, np.float32)})
    found = mfload.doctor(path)
    (leg,) = found.onto_device
    assert leg.engine == ("gds" if real else "pinned")
    assert "as told" in leg.why
    assert [each.engine for each in found.route] == ["direct"]
    assert "to cuda:0" in str(found)
    assert json.loads(json.dumps(found.as_dict()))["onto_device"][0]["engine"] == leg.engine
    assert named(found.findings, "disk to cuda:0").data["real"] is real


def test_without_a_path_cufile_is_not_tried(
    monkeypatch: pytest.MonkeyPatch, card: list[str]
) -> None:
    monkeypatch.setattr(gds, "verdict", None)
    found = mfload.doctor()
    assert found.onto_device == ()
    assert "mfload.diagnostics.probe cuda" in card


@pytest.mark.parametrize(
    "part", ["host.look", "gpu.look", "gpu.cufile", "host.frameworks", "host.disk", "host.files"]
)
def test_a_look_that_fails_is_a_finding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, card: list[str], part: str
) -> None:
    def look(*_: object) -> Any:
        yield from ()
        raise ZeroDivisionError("oh")

    monkeypatch.setattr(f"mfload.diagnostics.{part}", look)
    path = samples.save(tmp_path / "m.safetensors", {"w": np.zeros(8, np.float32)})
    found = mfload.doctor(path)
    assert "ZeroDivisionError: oh" in named(found.findings, "the rest").found


@pytest.fixture
def cufile_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, card: list[str]
) -> Iterator[Path]:
    """The card on a machine where no plain fact rules cuFile out."""
    system = machine(tmp_path / "machine", NVIDIA_FS | {
        "proc/self/mountinfo": "1 1 259:0 / / rw - ext4 /dev/x rw,data=ordered\n",
    })  # fmt: skip
    real = gds.verdict

    def verdict(path: str, number: int, **how: Any) -> gds.Verdict:
        return real(path, number, root=system, **how)

    monkeypatch.setattr(gds, "verdict", verdict)
    monkeypatch.setattr("mfload.cuda.cufile.installed", lambda: True)
    gds._known.clear()
    yield system
    gds._known.clear()


def _shards(folder: Path, count: int) -> Path:
    folder.mkdir()
    for n in range(count):
        samples.save(folder / f"m-{n}.safetensors", {f"w{n}": np.zeros(5000, np.float32)})
    return folder


def test_a_probe_that_hangs_is_asked_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cufile_there: Path
) -> None:
    """A hundred files may lie on one file system."""
    asked: list[float | None] = []

    def ask(*_: str, timeout: float | None, environment: Any) -> Probed:
        asked.append(timeout)
        return Probed(None, "no answer within 6 s")

    monkeypatch.setattr(gds, "ask", ask)
    found = mfload.doctor(_shards(tmp_path / "model", 6), timeout=6)
    assert len(asked) == 1
    assert [leg.engine for leg in found.onto_device] == ["pinned"] * 6
    assert "hangs" in named(found.findings, "disk to cuda:0").advice


def test_a_look_at_cufile_that_fails_is_a_finding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, card: list[str]
) -> None:
    path = _shards(tmp_path / "model", 1)
    for error, raised in ((ZeroDivisionError("oh"), None), (errors.ReadError("gone"),) * 2):

        def verdict(*_: Any, error: Exception = error, **__: Any) -> Any:
            raise error

        monkeypatch.setattr(gds, "verdict", verdict)
        if raised is None:
            found = mfload.doctor(path)
            assert "ZeroDivisionError: oh" in named(found.findings, "the rest").found
            assert found.onto_device == ()
            assert named(found.findings, "numpy")
        else:
            with pytest.raises(errors.ReadError):
                mfload.doctor(path)


def test_no_bound_on_questions(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[float | None] = []

    def ask(*_: str, timeout: float | None) -> Probed:
        given.append(timeout)
        return Probed({"error": "no", "missing": True})

    monkeypatch.setattr(doctor, "ask", ask)
    for timeout in (float("inf"), None, 1e300):
        mfload.doctor(timeout=timeout)
    assert given == [None] * 3


def test_an_empty_tree_is_no_crash(tmp_path: Path) -> None:
    assert list(gpu.cufile(tmp_path, 1, None))
