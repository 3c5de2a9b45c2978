"""Whether cuFile is used: plain facts on made-up machines, and probes with stubs of its parts."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conformance.suite import no_gpu

from mfload.cuda import cufile, discovery, gds
from mfload.io.subprocess_probe import Probed
from mfload.planning.blocks import Block
from mfload.sources.local import LocalFile


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    gds._known.clear()
    for name in ("KVIKIO_COMPAT_MODE", "CUFILE_FORCE_COMPAT_MODE", "CUFILE_USE_PCIP2PDMA",
                 "CUFILE_ENV_PATH_JSON"):  # fmt: skip
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "weights"
    path.write_bytes(os.urandom((1 << 20) + 77))
    return str(path)


NVIDIA_FS = {"proc/driver/nvidia-fs/version": "version: 2.26.6\n", "run/udev/data/x": ""}


def machine(root: Path, files: dict[str, str]) -> Path:
    root = root / "machine"
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def asking(configuration: str) -> dict[str, str]:
    return {"run/udev/data/x": "", "etc/cufile.json": configuration}


def said() -> Probed:
    return Probed({"real": True, "why": "bypassed the page cache", "works": True})


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """Probes that were asked for; none runs."""
    calls: list[tuple[str, ...]] = []

    def ask(*arguments: str, timeout: float | None, environment: dict[str, str]) -> Probed:
        assert environment["CUFILE_ALLOW_COMPAT_MODE"] == "false"
        assert environment["KVIKIO_COMPAT_MODE"] == "OFF"
        calls.append(arguments)
        return said()

    monkeypatch.setattr(gds, "ask", ask)
    monkeypatch.setattr(cufile, "installed", lambda: True)
    return calls


@pytest.mark.parametrize(
    ("files", "why"),
    [
        ({"run/udev/data/x": ""}, "neither nvidia-fs"),
        ({"proc/driver/nvidia-fs/version": "2"}, "/run/udev"),
        (NVIDIA_FS | {"etc/cufile.json": '{"properties": {"force_compat_mode": true}}'},
         "force_compat_mode"),
        (NVIDIA_FS | {"etc/cufile.json": '{\n// "force_compat_mode": true\n}'}, ""),
        (NVIDIA_FS, ""),
        # P2PDMA needs no module of its own, and is asked for.
        (asking('{"properties": {"use_pci_p2pdma": true}}'), ""),
        (asking('{"block": {"nvme": {"use_pci_p2pdma": true}}}'), ""),
        (asking('{"properties": {"use_pci_p2pdma": false}}'), "use_pci_p2pdma"),
        (asking('{"properties": {"use_pci_p2pdma": "false"}}'), "use_pci_p2pdma"),
    ],
)  # fmt: skip
def test_plain_facts_come_before_a_probe(
    tmp_path: Path, file: str, asked: list[tuple[str, ...]], files: dict[str, str], why: str
) -> None:
    found = gds.verdict(file, 0, root=machine(tmp_path, files))
    assert found.real is (not why)
    assert why in found.why
    assert len(asked) == found.real


def test_a_configuration_that_is_no_file_is_none(
    tmp_path: Path, file: str, asked: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An open of a FIFO would wait for somebody who writes."""
    root = machine(tmp_path, NVIDIA_FS)
    os.mkfifo(root / "pipe")
    (root / "folder").mkdir()
    for name in ("pipe", "folder", "none"):
        monkeypatch.setenv("CUFILE_ENV_PATH_JSON", f"/{name}")
        assert gds.verdict(file, 0, root=root).real


def test_facts_of_this_process(
    tmp_path: Path, file: str, asked: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    root = machine(tmp_path, NVIDIA_FS)
    for name, value in (("KVIKIO_COMPAT_MODE", "ON"), ("CUFILE_FORCE_COMPAT_MODE", "true")):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            assert not gds.verdict(file, 0, root=root).real
    monkeypatch.setattr(cufile, "installed", lambda: False)
    assert "not installed" in gds.verdict(file, 0, root=root).why
    assert asked == []


def test_a_probe_is_asked_once_for_each_device_and_disk(
    tmp_path: Path, file: str, asked: list[tuple[str, ...]]
) -> None:
    root = machine(tmp_path, NVIDIA_FS)
    other = str(tmp_path / "other")
    Path(other).write_bytes(bytes(5000))
    assert "too few" in gds.verdict(file, 0, root=root, cold=1000).why
    assert asked == []
    for path in (file, other, file):
        assert gds.verdict(path, 0, root=root, cold=1 << 40).real
    assert gds.verdict(file, 0, root=root, cold=1000).real  # It is known by now.
    assert gds.verdict(file, 1, root=root).real
    assert asked == [("mfload.cuda.gds", os.path.realpath(file), n) for n in "01"]
    assert "looked at" in gds.verdict(str(tmp_path / "none"), 0, root=root).why


class Clock:
    """Probes that hang, and how long each was let."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.given: list[float | None] = []
        self.answer = Probed(None, "no answer within so long")
        monkeypatch.setattr(gds, "ask", self._ask)
        monkeypatch.setattr(cufile, "installed", lambda: True)

    def _ask(self, *_: str, timeout: float | None, environment: Any) -> Probed:
        self.given.append(timeout)
        return self.answer


def test_no_answer_is_an_answer(tmp_path: Path, file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    root = machine(tmp_path, NVIDIA_FS)
    clock = Clock(monkeypatch)
    for timeout in (6.0, 20.0, None, 0.1):
        found = gds.verdict(file, 0, root=root, timeout=timeout)
        assert (found.real, "no answer" in found.why) == (False, True)
    assert len(clock.given) == 1


def test_a_crash_is_an_answer(tmp_path: Path, file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    root = machine(tmp_path, NVIDIA_FS)
    clock = Clock(monkeypatch)
    clock.answer = Probed(None, "crashed with SIGSEGV")
    for timeout in (6, None):
        assert "SIGSEGV" in gds.verdict(file, 0, root=root, timeout=timeout).why
    assert len(clock.given) == 1


def test_what_a_library_prints_last_is_no_answer(
    tmp_path: Path, file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)
    clock.answer = Probed({"level": "info"})
    assert "makes no sense" in gds.verdict(file, 0, root=machine(tmp_path, NVIDIA_FS)).why


def test_too_little_time_for_a_look(
    tmp_path: Path, file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)
    root = machine(tmp_path, NVIDIA_FS)
    for timeout in (0.0, 4.9, -1.0):
        assert "too little time" in gds.verdict(file, 0, root=root, timeout=timeout).why
    assert clock.given == []


def test_another_thread_that_looks_holds_nobody_up(
    tmp_path: Path, file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = machine(tmp_path, NVIDIA_FS)
    inside, go = threading.Event(), threading.Event()

    def ask(*_: str, timeout: float | None, environment: Any) -> Probed:
        if not inside.is_set():
            inside.set()
            go.wait(20)
        return said()

    monkeypatch.setattr(gds, "ask", ask)
    monkeypatch.setattr(cufile, "installed", lambda: True)
    found: list[gds.Verdict] = []
    other = threading.Thread(target=lambda: found.append(gds.verdict(file, 0, root=root)))
    other.start()
    assert inside.wait(60)
    waited = gds.verdict(file, 0, root=root, timeout=6.0)
    go.set()
    other.join()
    assert waited.real
    assert found[0].real
    assert gds.verdict(file, 0, root=root, timeout=6.0).real


def test_what_says_nothing_of_a_file_system_is_not_kept(
    tmp_path: Path, file: str, asked: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    root = machine(tmp_path, NVIDIA_FS)
    small = tmp_path / "small"
    small.write_bytes(b"x" * 4095)
    assert "too small" in gds.verdict(str(small), 0, root=root).why
    assert asked == []
    with monkeypatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(tmp_path / "none"))
        assert "can't be prepared" in gds.verdict(file, 0, root=root).why
    assert gds.verdict(file, 0, root=root).real
    assert gds.verdict(str(small), 0, root=root).real  # Known by now.


# What a probe's process finds in the place of CUDA, CuPy, kvikio and the kernel's page cache.
PARTS = """
    import json, os, sys, types
    knobs = json.loads(os.environ["KNOBS"])
    if os.environ.get("KVIKIO_COMPAT_MODE") == "OFF":
        from devices.fake import FakeDevice
        from devices.stub_kvikio import Kvikio
        from mfload.io import probes
        kvikio = Kvikio()
        kvikio.install()
        def act():
            if knobs.get("hang"):
                while True: pass
            if knobs.get("crash"):
                os.kill(os.getpid(), 11)
            if knobs.get("short"):
                kvikio.short = 0
        kvikio.before_read = act
        if knobs.get("fails"):
            kvikio.fails = {"open": RuntimeError("cuFile error at: x:1: " + knobs["fails"])}
        discovery = types.ModuleType("mfload.cuda.discovery")
        discovery.count = lambda: 1
        discovery.find = lambda number: FakeDevice((2, number), f"cuda:{number}")
        sys.modules["mfload.cuda.discovery"] = discovery
        import mfload.cuda
        mfload.cuda.discovery = discovery
        if knobs.get("other"):
            from mfload.sources.local import LocalFile
            LocalFile.read = lambda *_: b"other"
        probes.cached_share = lambda *_: knobs["cached"].pop(0)
"""


@pytest.mark.parametrize(
    ("knobs", "real", "why"),
    [
        ({"cached": [0.0, 0.0]}, True, "bypassed"),
        ({"cached": [0.0, 1.0]}, False, "went through the page cache"),
        ({"cached": [0.5, 0.0]}, False, "not verified"),
        ({"cached": [None, None]}, False, "not verified"),
        ({"other": True}, False, "other bytes"),
        ({"hang": True}, False, "no answer within"),
        ({"crash": True}, False, "SIGSEGV"),
        ({"short": True}, False, "no further"),
        ({"fails": "file descriptor is not registered"}, False, "5027"),
        ({"fails": "internal error"}, False, "5030"),
        ({"fails": "GPUDirect Storage not supported on current file"}, False, "5008"),
    ],
)
def test_probes(
    tmp_path: Path,
    file: str,
    monkeypatch: pytest.MonkeyPatch,
    knobs: dict[str, Any],
    real: bool,
    why: str,
) -> None:
    parts = tmp_path / "parts"
    parts.mkdir()
    (parts / "sitecustomize.py").write_text(textwrap.dedent(PARTS))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(parts), *sys.path]))
    monkeypatch.setenv("KNOBS", json.dumps({"cached": [0.0, 0.0]} | knobs))
    monkeypatch.setattr(cufile, "installed", lambda: True)
    root = machine(tmp_path, NVIDIA_FS)
    start = time.monotonic()
    limit = 1.0 if "hang" in knobs else 60.0
    monkeypatch.setattr(gds, "LEAST", 0)
    found = gds.verdict(file, 0, timeout=limit, root=root)
    assert found.real is real, found
    assert why in found.why
    assert time.monotonic() - start < limit + 10
    monkeypatch.setattr(gds, "ask", lambda *_, **__: pytest.fail("it is known"))
    assert gds.verdict(file, 0, root=root) == found


@pytest.mark.gpu
def test_on_a_real_gpu(file: str) -> None:
    """Real or not, it answers in time; and where it is real, whole files come through it."""
    why = no_gpu()
    if why is not None:
        pytest.skip(why)
    device = discovery.find(0)
    found = gds.verdict(file, 0, timeout=120)
    assert found.why
    if not found.real:
        pytest.skip(f"cuFile is not real here: {found.why}")
    nbytes = os.path.getsize(file)
    slot = cufile.CufileSlot(device, nbytes)
    reader = cufile.CufileReader(LocalFile(file), device)
    start = reader.land(Block(0, 0, nbytes, ()), slot.buffer)
    landed = np.empty(nbytes, np.uint8)
    stream = device.stream()
    stream.copy_out(landed, slot.buffer, start)
    stream.synchronize()
    stream.close()
    reader.close()
    slot.close()
    assert landed.tobytes() == Path(file).read_bytes()
