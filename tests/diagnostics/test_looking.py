"""Made-up machines: what each look makes of them."""

from __future__ import annotations

import ctypes
import os
import resource
from pathlib import Path
from typing import Any

import pytest
from diagnostics.machines import CARD, ONE, machine, named

from mfload.diagnostics import gpu, host, probe
from mfload.diagnostics.findings import Finding
from mfload.diagnostics.host import mount
from mfload.io.subprocess_probe import Probed


def test_a_bare_tree_is_no_trouble(tmp_path: Path) -> None:
    missing = Probed({"error": "no", "missing": True})
    findings = [*host.look(tmp_path), *gpu.look(tmp_path, missing)]
    assert all(each.level != "trouble" for each in findings)
    assert named(findings, "NUMA nodes").found == "1"
    assert "no card" in named(findings, "devices").found


@pytest.mark.parametrize(
    ("chosen", "level"), [("always [madvise] never", "ok"), ("always madvise [never]", "note")]
)
def test_huge_pages(tmp_path: Path, chosen: str, level: str) -> None:
    system = machine(tmp_path, {"sys/kernel/mm/transparent_hugepage/enabled": chosen})
    found = named(host.look(system), "huge pages")
    assert found.level == level
    assert bool(found.advice) == (level == "note")


def test_nodes_and_their_cores(tmp_path: Path) -> None:
    base = "sys/devices/system/node"
    files = {f"{base}/node{n}/cpulist": f"{8 * n}-{8 * n + 7}\n" for n in range(2)}
    found = named(host.look(machine(tmp_path, files | {f"{base}/online": "0-1"})), "NUMA nodes")
    assert found.data == {"node0": "0-7", "node1": "8-15"}


@pytest.mark.parametrize(
    ("file", "name"), [(".dockerenv", "Docker"), ("run/.containerenv", "Podman")]
)
def test_containers(tmp_path: Path, file: str, name: str) -> None:
    """What cuFile misses in one is told where there is a GPU, and not here."""
    found = named(host.look(machine(tmp_path, {file: ""})), "inside")
    assert (found.found, found.level, found.advice) == (f"a container ({name})", "ok", "")


def test_wsl_is_told(tmp_path: Path) -> None:
    system = machine(tmp_path, {"proc/version": "Linux version 6.6.87.2-Microsoft-standard-WSL2"})
    assert "hangs" in named(host.look(system), "inside").advice


@pytest.mark.parametrize(
    ("answer", "files", "level", "says"),
    [
        (Probed(None, "no answer within 10 s"), {}, "trouble", "dmesg"),
        (Probed(None, "crashed with SIGSEGV"), {}, "trouble", "dmesg"),
        (Probed({"error": "libcuda.so.1: no", "missing": True}), {}, "ok", ""),
        (Probed({"error": "libcuda.so.1: no", "missing": True}), CARD, "trouble", "install"),
        (Probed({"error": "libcuda.so.1: no", "missing": True}), CARD | {".dockerenv": ""},
         "trouble", "--gpus all"),
        (Probed({"error": "cuInit: CUDA_ERROR_X (803)"}), CARD, "trouble", "nvidia-smi"),
        # Cards that no PCI bus shows: WSL, a masked /sys, a chip's own GPU.
        (Probed({"error": "cuInit: CUDA_ERROR_X (999)"}), {}, "trouble", "nvidia-smi"),
        (Probed({"driver": "13.0", "devices": []}), CARD, "note", "CUDA_VISIBLE_DEVICES"),
    ],
)  # fmt: skip
def test_drivers(
    tmp_path: Path, answer: Probed, files: dict[str, str], level: str, says: str
) -> None:
    last = list(gpu.look(machine(tmp_path, files), answer))[-1]
    assert last.level == level
    assert says in last.advice
    if level == "trouble":
        assert (answer.trouble or answer.data["error"]) in last.found
    if files and level == "trouble":
        assert "0000:1b:00.0" in last.found
        assert "0000:1c:00.0" not in last.found


@pytest.mark.parametrize("pci", ["0000:1b:00.0", "00000000:1b:00.0", "0:1b:00.0"])
def test_a_device_and_its_link(tmp_path: Path, pci: str) -> None:
    one = {"driver": "13.0", "devices": [ONE["devices"][0] | {"pci": pci}]}  # type: ignore[index]
    found = named(gpu.look(machine(tmp_path, CARD), Probed(one)), pci)
    assert found.found == "G, 80 GiB, PCIe x16 at 32.0 GT/s, on NUMA node 1"
    assert found.level == "ok"
    half = CARD | {"sys/bus/pci/devices/0000:1b:00.0/current_link_width": "8\n"}
    found = named(gpu.look(machine(tmp_path, half), Probed(one)), pci)
    assert (found.level, "8 of 16" in found.advice) == ("note", True)


MOUNTS = """\
22 1 253:0 / / rw,relatime shared:1 - ext4 /dev/root rw,discard
40 22 259:1 / /data rw - ext4 /dev/nvme0n1p1 rw,data=writeback
41 22 0:50 / /net rw - nfs4 host:/x rw
42 22 0:60 / /net/deep\\040one rw - lustre mds:/y rw
43 22 0:70 / /over rw - overlay overlay rw
44 40 0:80 / /data rw - xfs /dev/sdz rw
not a line
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/x", "ext4"), ("/net/a", "nfs4"), ("/network", "ext4"), ("/net/deep one/a", "lustre"),
        ("/over/a", "overlay"), ("/data", "xfs"),
    ],
)  # fmt: skip
def test_the_mount_of_a_path(tmp_path: Path, path: str, kind: str) -> None:
    found = mount(machine(tmp_path, {"proc/self/mountinfo": MOUNTS}), path)
    assert found is not None
    assert found.kind == kind


def test_limits_of_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = {resource.RLIMIT_AS: 1 << 30, resource.RLIMIT_DATA: 512 << 20}
    plain = resource.RLIM_INFINITY

    def getrlimit(kind: int) -> tuple[int, int]:
        return limits.get(kind, plain), plain

    monkeypatch.setattr(resource, "getrlimit", getrlimit)
    files = {
        "proc/self/status": f"VmSize:\t{300 << 10} kB\nVmData:\t{100 << 10} kB\n",
        "proc/self/cgroup": "0::/user/job\n",
        "sys/fs/cgroup/user/job/memory.max": f"{2 << 30}\n",
        "sys/fs/cgroup/user/job/memory.current": f"{1 << 30}\n",
        "sys/fs/cgroup/user/memory.max": "max\n",
        "sys/fs/cgroup/user/memory.current": f"{1 << 30}\n",
    }
    findings = list(host.look(machine(tmp_path, files)))
    space = named(findings, "RLIMIT_AS")
    assert (space.level, space.found) == ("note", "1 GiB, 300 MiB of it in use")
    assert space.data == {"limit": 1 << 30, "used": 300 << 20}
    assert "ulimit -v" in space.advice
    assert named(findings, "RLIMIT_DATA").found == "512 MiB, 100 MiB of it in use"
    group = named(findings, "control group /user/job")
    assert group.data == {"limit": 2 << 30, "used": 1 << 30}
    assert not [each for each in findings if each.what == "control group /user"]
    limits.clear()
    assert "RLIMIT_AS" not in [each.what for each in host.look(machine(tmp_path, files))]


def test_limits_of_older_control_groups(tmp_path: Path) -> None:
    folder = "sys/fs/cgroup/memory"
    files = {
        "proc/self/cgroup": "5:cpu,memory:/user/job\n1:name=systemd:/\n",
        f"{folder}/user/job/memory.limit_in_bytes": f"{2 << 30}\n",
        f"{folder}/user/job/memory.usage_in_bytes": f"{1 << 30}\n",
        f"{folder}/user/memory.limit_in_bytes": "9223372036854771712\n",
        f"{folder}/user/memory.usage_in_bytes": f"{1 << 30}\n",
    }
    findings = list(host.look(machine(tmp_path, files)))
    group = named(findings, "control group /user/job")
    assert group.found == "memory at most 2 GiB, 1 GiB in use, page cache included"
    assert len([each for each in findings if each.what.startswith("control group")]) == 1


def test_the_processor_is_named(tmp_path: Path) -> None:
    text = "model name\t: Made Up 3000\nflags\t\t: fpu hypervisor sse\n"
    found = named(host.look(machine(tmp_path, {"proc/cpuinfo": text})), "processor")
    assert found.found == "Made Up 3000 in a virtual machine"


def _disk(there: Path, path: str) -> list[Finding]:
    return list(host.disk(there, mount(there, path)))


def test_disks(tmp_path: Path) -> None:
    here = os.path.realpath(tmp_path)
    point, base = here.replace(" ", "\\040"), "sys/dev/block/259:0"
    files = {
        "proc/self/mountinfo": f"1 1 259:0 / {point} rw - ext4 /dev/x rw,data=journal\n",
        f"{base}/device/model": "FAST DISK   \n",
        f"{base}/queue/rotational": "0\n",
        f"{base}/queue/read_ahead_kb": "128\n",
    }
    findings = _disk(machine(tmp_path, files), here)
    assert named(findings, "file system").found == "ext4"
    assert named(findings, "device").found.startswith("FAST DISK, flash")
    assert named(findings, "read-ahead").data == 128
    assert [each.found for each in _disk(tmp_path / "none", here)] == ["unknown"]
    files["proc/self/mountinfo"] = f"1 1 0:9 / {point} rw - nfs4 h:/ rw\n"
    (found,) = _disk(machine(tmp_path, files), here)
    assert "mmap" in found.advice


def test_files_of_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(bytes(1 << 16))
    (tmp_path / "b").write_bytes(b"")
    findings = list(host.files([str(tmp_path / "a"), str(tmp_path / "b")]))
    assert "64 KiB in 2 files" in named(findings, "in the page cache").found
    assert named(findings, "O_DIRECT").found


@pytest.mark.parametrize(
    ("installed", "level"),
    [("0.4.9", "trouble"), ("0.5.3", "ok"), ("0.11.9", "ok"), ("0.12.0", "note"),
     ("1.0.0.dev3+cpu", "note")],
)  # fmt: skip
def test_versions(monkeypatch: pytest.MonkeyPatch, installed: str, level: str) -> None:
    monkeypatch.setattr(host, "version", lambda _package: installed)
    assert named(host.frameworks(), "jax").level == level


class Stub:
    """A driver library that answers; `codes` says with which errors."""

    def __init__(self, count: int, codes: dict[str, int]) -> None:
        self._count, self._codes = count, codes

    def __getattr__(self, name: str) -> Any:
        def call(*given: Any) -> int:
            if name == "cuGetErrorName":
                given[1]._obj.value = b"CUDA_ERROR_STUB"
            elif name == "cuDriverGetVersion":
                given[0]._obj.value = 13020
            elif name == "cuDeviceGetCount":
                given[0]._obj.value = self._count
            elif name == "cuDeviceTotalMem_v2":
                given[0]._obj.value = 80 << 30
            elif name in ("cuDeviceGetName", "cuDeviceGetPCIBusId"):
                ctypes.memmove(given[0], b"0000:1B:00.0", 13)
            return self._codes.get(name, 0)

        return call


def test_what_a_driver_says() -> None:
    found = probe.cuda(Stub(2, {}))
    assert found["driver"] == "13.2"
    assert [each["pci"] for each in found["devices"]] == ["0000:1b:00.0"] * 2
    assert found["devices"][0]["memory"] == 80 << 30
    assert probe.cuda(Stub(0, {}))["devices"] == []
    for call in ("cuInit", "cuDeviceGetCount"):
        assert probe.cuda(Stub(1, {call: 999})) == {"error": f"{call}: CUDA_ERROR_STUB (999)"}
    # None visible, as with an empty CUDA_VISIBLE_DEVICES, is no error.
    assert probe.cuda(Stub(0, {"cuInit": 100})) == {"driver": "13.2", "devices": []}
