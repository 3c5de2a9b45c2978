"""Whether cuFile is real: plain facts on made-up machines, and probes with stubs of its parts."""

from __future__ import annotations

import inspect
import json
import os
import struct
import sys
import tempfile
import textwrap
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from conformance.suite import no_gpu

from mfload.cuda import cufile, cufile_json, finding, gds, mounts, probe_cufile
from mfload.cuda.system import System
from mfload.io.subprocess_probe import Answer
from mfload.planning.blocks import Block
from mfload.sources.local import LocalFile


class Place(NamedTuple):
    name: str = "cuda:0"
    place: tuple[int, int] = (2, 0)


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    gds.forget()
    for name in ("KVIKIO_COMPAT_MODE", "CUFILE_FORCE_COMPAT_MODE", "CUFILE_USE_PCIP2PDMA",
                 "CUFILE_ENV_PATH_JSON"):  # fmt: skip
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "weights"
    path.write_bytes(os.urandom((1 << 20) + 77))
    return path


NVIDIA_FS = {"proc/driver/nvidia-fs/version": "version: 2.26.6\n", "run/udev/data/x": ""}


def machine(root: Path, files: dict[str, str], *, kind: str = "ext4", options: str = "rw") -> Path:
    root = root / "machine"
    mounts = {"proc/self/mountinfo": f"1 1 259:0 / / rw - {kind} /dev/x {options}\n"}
    for name, text in (mounts | {"proc/version": "Linux version 6.8"} | files).items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def asking(configuration: str) -> dict[str, str]:
    return {"run/udev/data/x": "", "etc/cufile.json": configuration}


def deep(levels: int) -> str:
    return '{"a":' * levels + "{}" + "}" * levels


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """Probes that were asked for; none runs."""
    calls: list[tuple[str, ...]] = []

    def ask(*arguments: str, timeout: float | None, environment: dict[str, str]) -> Answer:
        options = json.loads(Path(environment["CUFILE_ENV_PATH_JSON"]).read_text())
        assert options["properties"]["allow_compat_mode"] is False
        assert environment["KVIKIO_COMPAT_MODE"] == "OFF"
        calls.append(arguments)
        return Answer({"same": True, "direct": 1, "posix": 0, "nvidia_fs": True})

    monkeypatch.setattr(gds, "ask", ask)
    monkeypatch.setattr(cufile, "installed", lambda: True)
    return calls


@pytest.mark.parametrize(
    ("files", "mount", "why"),
    [
        ({"run/udev/data/x": ""}, {}, "neither nvidia-fs"),
        ({"proc/driver/nvidia-fs/version": "2"}, {}, "/run/udev"),
        (NVIDIA_FS | {"proc/version": "Linux 6.6-Microsoft-standard-WSL2"}, {}, "WSL"),
        (NVIDIA_FS | {"etc/cufile.json": "{"}, {}, "malformed"),
        (NVIDIA_FS | {"etc/cufile.json": "[1]"}, {}, "malformed"),
        (NVIDIA_FS | {"etc/cufile.json": "[" * 200_000}, {}, "malformed"),
        (NVIDIA_FS | {"etc/cufile.json": deep(500)}, {}, "malformed"),
        (NVIDIA_FS | {"etc/cufile.json": deep(100_000)}, {}, "malformed"),
        (NVIDIA_FS | {"etc/cufile.json": deep(20)}, {}, ""),
        (NVIDIA_FS | {"etc/cufile.json": '{"properties": {"force_compat_mode": true}}'}, {},
         "force_compat_mode"),
        (NVIDIA_FS, {"kind": "overlay"}, "5027"),
        (NVIDIA_FS, {"kind": "tmpfs"}, "memory"),
        (NVIDIA_FS, {"kind": "btrfs"}, "btrfs"),
        (NVIDIA_FS, {"options": "rw,data=journal"}, "data=ordered"),
        (NVIDIA_FS, {"kind": "nfs4", "options": "rw,proto=tcp"}, "RDMA"),
        (NVIDIA_FS, {}, ""),
        (NVIDIA_FS, {"options": "rw,data=ordered"}, ""),
        (NVIDIA_FS, {"kind": "xfs"}, ""),
        (NVIDIA_FS, {"kind": "nfs4", "options": "rw,proto=rdma"}, ""),
        # P2PDMA needs no module of its own, and is asked for.
        (asking('{"properties": {"use_pci_p2pdma": true}}'), {}, ""),
        (asking('{"block": {"nvme": {"use_pci_p2pdma": true}}}'), {}, ""),
        (asking('{"properties": {"use_pci_p2pdma": false}}'), {}, "use_pci_p2pdma"),
        (asking('{"properties": {"use_pci_p2pdma": "false"}}'), {}, "use_pci_p2pdma"),
    ],
)  # fmt: skip
def test_plain_facts_come_before_a_probe(
    tmp_path: Path,
    file: Path,
    asked: list[tuple[str, ...]],
    files: dict[str, str],
    mount: dict[str, str],
    why: str,
) -> None:
    found = gds.verdict(file, Place(), root=machine(tmp_path, files, **mount))
    assert found.real is (not why)
    assert why in found.why
    assert len(asked) == found.real


def test_facts_of_this_process(
    tmp_path: Path,
    file: Path,
    asked: list[tuple[str, ...]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    root = machine(tmp_path, NVIDIA_FS)
    for name, value in (("KVIKIO_COMPAT_MODE", "ON"), ("CUFILE_FORCE_COMPAT_MODE", "true")):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            assert not gds.verdict(file, Place(), root=root).real
    assert "no CUDA device" in gds.verdict(file, Place("cpu", (1, 0)), root=root).why
    monkeypatch.setattr(cufile, "installed", lambda: False)
    assert "not installed" in gds.verdict(file, Place(), root=root).why
    assert asked == []


def test_a_probe_is_asked_once_for_each_device_and_disk(
    tmp_path: Path, file: Path, asked: list[tuple[str, ...]]
) -> None:
    root = machine(tmp_path, NVIDIA_FS)
    other = tmp_path / "other"
    other.write_bytes(bytes(5000))
    assert "too few" in gds.verdict(file, Place(), root=root, cold=1000).why
    assert asked == []
    for path in (file, other, file):
        assert gds.verdict(path, Place(), root=root, cold=1 << 40).real
    assert gds.verdict(file, Place(), root=root, cold=1000).real  # It is known by now.
    assert gds.verdict(file, Place("cuda:1", (2, 1)), root=root).real
    real = os.path.realpath(file)
    assert asked == [("mfload.cuda.probe_cufile", real, n, str(root)) for n in "01"]
    assert "looked at" in gds.verdict(tmp_path / "none", Place(), root=root).why


def said(**changed: Any) -> Answer:
    return Answer({"same": True, "direct": 2, "posix": 0, "nvidia_fs": None} | changed)


@pytest.mark.parametrize(
    ("answer", "real", "why"),
    [
        (said(), True, "2 direct reads"),
        (said(direct=None, posix=None, nvidia_fs=True), True, "nvidia-fs counted"),
        (said(direct=None, posix=None), False, "not verified"),
        (said(direct=None, posix=None, nvidia_fs=False), False, "not verified"),
        (said(direct=0, posix=0), False, "not verified"),
        # Another process may have raised the counters of nvidia-fs.
        (said(direct=0, posix=0, nvidia_fs=True), False, "not verified"),
        (said(posix=1), False, "host memory"),
        (said(direct=0, posix=3, nvidia_fs=True), False, "host memory"),
        (said(same=False), False, "other bytes"),
        (Answer({"error": "cuFile could not open: (5027)"}), False, "5027"),
        (Answer(None, "no answer within 9 s"), False, "no answer within 9 s"),
        (Answer({}), False, "no sense"),
        (Answer({"same": True}), False, "no sense"),
        (said(same=1), False, "no sense"),
        (said(direct="2"), False, "no sense"),
        (said(posix=[]), False, "no sense"),
        (said(nvidia_fs=3), False, "no sense"),
        (Answer({"error": None}), False, "no sense"),
    ],
)
def test_what_a_probe_proves(answer: Answer, real: bool, why: str) -> None:
    found = gds.judge(answer)
    assert found.real is real
    assert why in found.why


class Clock:
    """Probes that hang, and how long each was let."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.given: list[float | None] = []
        self.answer = Answer(None, "no answer within so long", late=True)
        monkeypatch.setattr(gds, "ask", self._ask)
        monkeypatch.setattr(cufile, "installed", lambda: True)

    def _ask(self, *_: str, timeout: float | None, environment: Any) -> Answer:
        self.given.append(timeout)
        return self.answer


def test_no_answer_holds_for_looks_that_would_be_no_longer(
    tmp_path: Path, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = machine(tmp_path, NVIDIA_FS)
    clock = Clock(monkeypatch)
    # The time that is left to a load is never the same to the last digit.
    for timeout in (2.0, 1.9, 2.0, 2.1, 0.1):
        found = gds.verdict(file, Place(), root=root, timeout=timeout)
        assert (found.real, "no answer" in found.why) == (False, True)
    assert len(clock.given) == 1
    gds.verdict(file, Place(), root=root, timeout=8)
    gds.verdict(file, Place(), root=root)
    assert len(clock.given) == 3
    clock.answer = said()
    assert not gds.verdict(file, Place(), root=root).real
    assert gds.verdict(file, Place(), root=root, timeout=None).real
    assert gds.verdict(file, Place(), root=root, timeout=0.1).real


def test_a_crash_is_an_answer(tmp_path: Path, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = machine(tmp_path, NVIDIA_FS)
    clock = Clock(monkeypatch)
    clock.answer = Answer(None, "crashed with SIGSEGV")
    for timeout in (1, None):
        assert "SIGSEGV" in gds.verdict(file, Place(), root=root, timeout=timeout).why
    assert len(clock.given) == 1


def test_too_little_time_for_a_look(
    tmp_path: Path, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)
    root = machine(tmp_path, NVIDIA_FS)
    for timeout in (0.0, 0.1, -1.0):
        assert "too little time" in gds.verdict(file, Place(), root=root, timeout=timeout).why
    assert clock.given == []


def test_another_thread_that_looks_holds_nobody_up(
    tmp_path: Path, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = machine(tmp_path, NVIDIA_FS)
    inside, go = threading.Event(), threading.Event()

    def ask(*_: str, timeout: float | None, environment: Any) -> Answer:
        inside.set()
        go.wait(20)
        return said()

    monkeypatch.setattr(gds, "ask", ask)
    monkeypatch.setattr(cufile, "installed", lambda: True)
    found: list[gds.Verdict] = []
    other = threading.Thread(target=lambda: found.append(gds.verdict(file, Place(), root=root)))
    other.start()
    assert inside.wait(60)
    waited = gds.verdict(file, Place(), root=root, timeout=0.6)
    go.set()
    other.join()
    assert (waited.real, "at it" in waited.why) == (False, True)
    assert found[0].real
    assert gds.verdict(file, Place(), root=root, timeout=0.6).real


def test_what_says_nothing_of_a_file_system_is_not_kept(
    tmp_path: Path, file: Path, asked: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    root = machine(tmp_path, NVIDIA_FS)
    small = tmp_path / "small"
    small.write_bytes(b"x" * 4095)
    assert "too small" in gds.verdict(small, Place(), root=root).why
    assert asked == []
    with monkeypatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(tmp_path / "none"))
        assert "can't be prepared" in gds.verdict(file, Place(), root=root).why
    assert gds.verdict(file, Place(), root=root).real
    assert gds.verdict(small, Place(), root=root).real  # Known by now.


class TestHostile:
    """Paths that environment variables and made-up trees can name."""

    def test_what_is_no_file(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        os.mkfifo(tmp_path / "fifo")
        (tmp_path / "folder").mkdir()
        (tmp_path / "loop").symlink_to("loop")
        for name in ("fifo", "folder", "loop", "none", "nul\0"):
            assert System(tmp_path).text(name) is None
        for device in ("dev/zero", "dev/tty", "dev/stdin"):
            assert System().text(device) is None
        monkeypatch.setenv("CUFILE_ENV_PATH_JSON", str(tmp_path / "fifo"))
        assert cufile_json.read(System()).path is None

    def test_what_is_long(self, tmp_path: Path) -> None:
        (tmp_path / "long").write_bytes(b"x" * (1 << 20) + "é".encode() * 9)
        assert len(System(tmp_path).text("long") or "") == 1 << 20
        (tmp_path / "long").write_bytes(b"x" * ((1 << 20) - 1) + "é".encode() * 9)
        assert len(System(tmp_path).text("long") or "") == 1 << 20

    def test_mounts_are_read_to_their_end(self, tmp_path: Path) -> None:
        lines = [f"{n} 1 0:{n} / /m/{n} rw - tmpfs tmpfs rw" for n in range(40_000)]
        lines.append("9 1 259:0 / /m/last rw - xfs /dev/x rw")
        root = machine(tmp_path, {"proc/self/mountinfo": "\n".join(lines)})
        found = mounts.mount(System(root), "/m/last/file")
        assert found is not None
        assert found.kind == "xfs"

    @pytest.mark.parametrize("part", ["/*", '\\"', '"', "/", '"\\', '"a" /*', "//", "/*/"])
    @pytest.mark.parametrize("start", ["", '"', "/*", "{"])
    def test_comments_cost_a_look_at_each_character(self, part: str, start: str) -> None:
        """Twice the text may not take four times as long; it took hours."""
        text = start + part * ((1 << 20) // len(part))
        cufile_json.plain(text)

    @pytest.mark.parametrize(
        ("text", "plain"),
        [
            ('{"a": "//" /* " */} // "', '{"a": "//" } '),
            ('"a\\"//b" // c\n1', '"a\\"//b" \n1'),
            ("1 /* // */ 2 /**/ 3 /*/ 4 */ 5", "1  2  3  5"),
            ("1 /* 2", "1 "),
            ('1 "2 // 3', '1 "2 // 3'),
            ('1 "2\\', '1 "2\\'),
        ],
    )
    def test_comments(self, text: str, plain: str) -> None:
        assert cufile_json.plain(text) == plain


def test_configurations_are_found_where_cufile_looks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A path that is not absolute counts from the working directory."""
    (tmp_path / "my.json").write_text('{"properties": {"allow_compat_mode": false}}')
    monkeypatch.chdir(tmp_path)
    found = cufile_json.read(System(), {"CUFILE_ENV_PATH_JSON": "my.json"})
    assert (found.path, found.allowed) == ("my.json", False)


def test_configurations(tmp_path: Path) -> None:
    text = '{ // "note"\n "properties": {"allow_compat_mode": false, "x": "//y"} /* */ }'
    system = System(machine(tmp_path, {"etc/cufile.json": text, "opt/my.json": "{}"}))
    found = cufile_json.read(system, {})
    assert (found.path, found.allowed, found.trouble) == ("/etc/cufile.json", False, "")
    assert found.table["properties"]["x"] == "//y"
    elsewhere = cufile_json.read(system, {"CUFILE_ENV_PATH_JSON": "/opt/none.json"})
    assert (elsewhere.path, elsewhere.allowed, elsewhere.forced) == (None, True, False)
    assert cufile_json.read(system, {"CUFILE_USE_PCIP2PDMA": "true"}).p2pdma
    assert not cufile_json.read(system, {"CUFILE_USE_PCIP2PDMA": "false"}).p2pdma


STATS = """\
GDS Version: 1.0
IO stats: {}, peer IO stats: Enabled

Reads\t\t\t\t: {}
Sparse Reads\t\t        : n=6 io=0 holes=0 pages=0
Ops\t\t\t\t: Read=0 Write=0 BatchIO=0
"""
PEERS = """\
GPU P2P DMA distribution based on pci-distance

(last column indicates p2p via root complex)
GPU :0000:ca:00.0 :{} 0 0 0
GPU :0000:65:00.0 :0 0 0 1
"""


def test_counters_of_nvidia_fs(tmp_path: Path) -> None:
    base = "proc/driver/nvidia-fs"
    assert probe_cufile.nvidia_fs(System(tmp_path)) is None
    on = STATS.format("Enabled", "n=41 ok=41 err=0 readMiB=9 io_state_err=0")
    assert probe_cufile.nvidia_fs(System(machine(tmp_path, {f"{base}/stats": on}))) == 41
    files = {
        f"{base}/stats": STATS.format("Disabled", "err=0 io_state_err=0"),
        f"{base}/peer_affinity": PEERS.format(7),
    }
    assert probe_cufile.nvidia_fs(System(machine(tmp_path, files))) == 8


def counters(basics: int, rows: list[tuple[int, int, int, int]], total: int | None = None) -> bytes:
    """CUfileStatsLevel3: basic counters, histograms and a table of GPUs."""
    answer = bytearray(1 << 16)
    struct.pack_into("=Q", answer, 96, sum(row[0] for row in rows) if total is None else total)
    struct.pack_into("=Q", answer, basics - 200, 1)  # In a histogram.
    struct.pack_into("=I", answer, basics, len(rows))
    for n, (nbytes, p2p, nvfs, posix) in enumerate(rows):
        row = basics + 8 + 248 * n
        answer[row : row + 16] = bytes(range(1, 17))
        counts = (nbytes, 5 << 20, 3, 400, p2p + nvfs + posix, p2p, nvfs, posix)
        struct.pack_into("=8Q", answer, row + 16, *counts)
    return bytes(answer)


@pytest.mark.parametrize("basics", [1024, 1136, 1200])
def test_counters_of_cufile(basics: int) -> None:
    assert probe_cufile.gpus(counters(basics, [(1 << 20, 0, 3, 0)])) == (3, 0)
    two = [(1 << 20, 1, 0, 2), (1 << 22, 4, 0, 0)]
    assert probe_cufile.gpus(counters(basics, two)) == (5, 2)
    assert probe_cufile.gpus(counters(basics, two, total=99)) == (None, None)
    assert probe_cufile.gpus(bytes(1 << 16)) == (None, None)


# What a probe's process finds in the place of CUDA, CuPy, kvikio and libcufile.
PARTS = """
    import ctypes, json, os, sys, types
    knobs = json.loads(os.environ["KNOBS"])
    if os.environ.get("KVIKIO_COMPAT_MODE") == "OFF":
        from devices.fake import FakeDevice
        from devices.stub_kvikio import Kvikio
        from test_gds_parts import counters
        kvikio = Kvikio()
        kvikio.install()
        def act():
            if knobs.get("hang"):
                while True: pass
            if knobs.get("crash"):
                os.kill(os.getpid(), 11)
            if knobs.get("wrong"):
                kvikio.short = 0
        kvikio.before_read = act
        if knobs.get("fails"):
            kvikio.fails = {"open": RuntimeError("cuFile error at: x:1: " + knobs["fails"])}
        finding = types.ModuleType("mfload.cuda.finding")
        finding.count = lambda: 1
        finding.find = lambda number: FakeDevice((2, number), f"cuda:{number}")
        sys.modules["mfload.cuda.finding"] = finding
        def status(*_):
            return types.SimpleNamespace(error=0)
        def table(answer):
            nbytes = sum(size for size, _, _ in kvikio.reads)
            answer.raw = counters(1136, [(nbytes, *knobs["reads"])])
            return status()
        cufile = types.SimpleNamespace(
            cuFileSetStatsLevel=lambda level: status(),
            cuFileStatsStart=lambda: status(),
            cuFileGetStatsL3=table,
        )
        real = ctypes.CDLL
        def library(name, *rest, **more):
            if name == "libcufile.so.0" and "reads" in knobs:
                return cufile
            return real(name, *rest, **more)
        ctypes.CDLL = library
"""


@pytest.mark.parametrize(
    ("knobs", "files", "real", "why"),
    [
        ({"reads": [0, 1, 0]}, {}, True, "1 direct reads"),
        ({"reads": [2, 0, 0]}, {}, True, "2 direct reads"),
        ({"reads": [0, 0, 1]}, {}, False, "through host memory"),
        ({"reads": [0, 0, 0]}, {}, False, "not verified"),
        ({}, {}, False, "not verified"),
        ({"hang": True}, {}, False, "no answer within"),
        ({"crash": True}, {}, False, "SIGSEGV"),
        ({"wrong": True}, {}, False, "no further"),
        ({"fails": "file descriptor is not registered"}, {}, False, "5027"),
        ({"fails": "internal error"}, {}, False, "5030"),
        ({"fails": "GPUDirect Storage not supported on current file"}, {}, False, "5008"),
    ],
)
def test_probes(
    tmp_path: Path,
    file: Path,
    monkeypatch: pytest.MonkeyPatch,
    knobs: dict[str, Any],
    files: dict[str, str],
    real: bool,
    why: str,
) -> None:
    parts = tmp_path / "parts"
    parts.mkdir()
    (parts / "sitecustomize.py").write_text(textwrap.dedent(PARTS))
    (parts / "test_gds_parts.py").write_text(
        "import struct\n" + textwrap.dedent(inspect.getsource(counters))
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(parts), *sys.path]))
    monkeypatch.setenv("KNOBS", json.dumps(knobs))
    monkeypatch.setattr(cufile, "installed", lambda: True)
    root = machine(tmp_path, NVIDIA_FS | files)
    start = time.monotonic()
    limit = 1.0 if "hang" in knobs else 60.0
    found = gds.verdict(file, Place(), timeout=limit, root=root)
    assert found.real is real, found
    assert why in found.why
    assert time.monotonic() - start < limit + 10
    # An answer is kept, a no too, and a crash. None within a short time is no answer.
    again: list[str] = []
    monkeypatch.setattr(gds, "ask", lambda *_, **__: again.append("asked") or Answer({"error": ""}))
    kept = gds.verdict(file, Place(), root=root)
    assert (kept == found) is not bool(again)
    assert bool(again) is bool("hang" in knobs)


@pytest.mark.gpu
def test_on_a_real_gpu(file: Path) -> None:
    """Real or not, it answers in time; and where it is real, whole files come through it."""
    why = no_gpu()
    if why is not None:
        pytest.skip(why)
    device = finding.find(0)
    found = gds.verdict(file, device, timeout=120)
    assert found.why
    if not found.real:
        pytest.skip(f"cuFile is not real here: {found.why}")
    nbytes = file.stat().st_size
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
    assert landed.tobytes() == file.read_bytes()
