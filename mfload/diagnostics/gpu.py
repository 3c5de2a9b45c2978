"""GPUs: driver, devices, packages, and whether cuFile goes from the disk to them."""

from __future__ import annotations

import importlib.util
import platform
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mfload import errors
from mfload.cuda import gds, numa
from mfload.cuda.cufile import MEANINGS, error_code
from mfload.diagnostics.findings import Finding, number, text
from mfload.diagnostics.host import Mount, installed, virtual
from mfload.io.route import Leg
from mfload.io.subprocess_probe import Probed
from mfload.report import human

_CPUS = 1 << 16  # More than any kernel is built for.
_NVIDIA = "0x10de"
_DISPLAY = "0x03"  # PCI class of what drives displays, 3-D controllers among them.
_POOL = 0.75  # XLA's share of a card by default.
_WARM = 0.5
_OTHERWISE = "loads go through pinned host memory"
_CUFILE_KINDS = ("ext4", "xfs", "nfs", "nfs4", "lustre", "wekafs", "beegfs", "gpfs", "scatefs",
                 "panfs", "virtiofs")  # fmt: skip


def look(root: Path, answer: Probed) -> Iterator[Finding]:
    """Findings about driver and devices, given the answer of the probe."""
    if answer.trouble:
        advice = "see dmesg for lines of NVRM and Xid; reload the driver, or restart the machine"
        yield Finding("driver", answer.trouble, advice, trouble=True)
        return
    if "error" in answer.data:
        yield _without_driver(root, answer.data["error"], bool(answer.data.get("missing")))
        return
    yield Finding("driver", f"CUDA {answer.data['driver']}", data=answer.data["driver"])
    if not answer.data["devices"]:
        advice = "the driver shows none: see CUDA_VISIBLE_DEVICES, or --gpus of the container"
        yield Finding("devices", "none", advice)
    for device in answer.data["devices"]:
        yield _device(root, device)


def _without_driver(root: Path, error: str, missing: bool) -> Finding:
    cards = [
        card.name
        for card in sorted((root / "sys/bus/pci/devices").glob("*"))
        if text(card, "vendor") == _NVIDIA and text(card, "class").startswith(_DISPLAY)
    ]
    if missing and not cards:
        return Finding("devices", "none: the PCI bus has no card of NVIDIA's")
    # With the library there, a card may be there that no PCI bus shows, as in WSL.
    where = f"; cards at {', '.join(cards)}" if cards else ""
    advice = "the kernel module and the library may be of different versions: see nvidia-smi"
    if missing and (root / ".dockerenv").exists():
        advice = "the container has no driver library: run it with --gpus all"
    elif missing:
        advice = "install NVIDIA's driver: its libcuda.so.1 is not found"
    return Finding("driver", f"{error}{where}", advice, trouble=True)


def _device(root: Path, device: dict[str, Any]) -> Finding:
    # CUDA writes the domain with four digits, or with eight; sysfs with four.
    domain, _, rest = device["pci"].partition(":")
    address = f"{domain.lstrip('0'):0>4}:{rest}"
    card = root / "sys/bus/pci/devices" / address
    parts, advice, data = [device["name"], human(device["memory"])], list[str](), dict(device)
    speed, width = text(card, "max_link_speed"), text(card, "max_link_width")
    if speed and width:
        parts.append(f"PCIe x{width} at {speed.removesuffix(' PCIe')}")
        data |= {"link_width": width, "link_speed": speed}
        now = text(card, "current_link_width") or width
        if now != width:
            advice.append(f"the link runs on {now} of {width} lanes: see the slot")
    # A line a region: first address, last address, flags. The second is NVIDIA's BAR1: the memory
    # that other devices on the bus can reach.
    region = re.match(r".*\n(0x[0-9a-f]+) (0x[0-9a-f]+) ", text(card, "resource"))
    window = int(region[2], 16) - int(region[1], 16) + 1 if region else 0
    if window > 1:
        data["bar1"] = window
        parts.append(f"BAR1 {human(window)}")
        if window < device["memory"]:
            # All processes share it; cuFile says 5016 or 5036 once it is used up.
            advice.append("BAR1 is smaller than the memory (5016, 5036): turn on Resizable BAR")
    node = number(card, "numa_node")
    if node is not None and node >= 0:
        parts.append(f"on NUMA node {node}")
        data["numa_node"] = node
        any_core = numa.cpus(address, root, range(_CPUS))
        if any_core is not None and numa.cpus(address, root) is None:
            advice.append("this process may use no core of that node: see taskset and numactl")
    return Finding(device["pci"], ", ".join(parts), "; ".join(advice), data)


def cupy(answer: Probed | None) -> Finding:
    """The finding about CuPy, given the answer of its probe; None if it is not installed."""
    if answer is None:
        advice = "pip install cupy-cuda13x: loads onto the GPU go through host arrays without it"
        return Finding("CuPy", "not installed", advice)
    if answer.trouble:
        advice = "loads onto the GPU may hang or fail with it"
        return Finding("CuPy", answer.trouble, advice, trouble=True)
    if "error" in answer.data:
        advice = "it does not fit this driver, or two of its packages are installed (pip list)"
        return Finding("CuPy", answer.data["error"], advice, trouble=True)
    return Finding("CuPy", answer.data["version"], data=answer.data["version"])


def xla(environment: Mapping[str, str]) -> Iterator[Finding]:
    """The finding about the share of a card that JAX takes."""
    if importlib.util.find_spec("jax") is None:
        return
    if not any(importlib.util.find_spec(f"jax_cuda{n}_plugin") for n in (13, 12)):
        advice = "JAX has no CUDA plugin here: pip install 'jax[cuda13]' has it use the card"
        yield Finding("XLA's pool", "none", advice)
        return
    eager = environment.get("XLA_PYTHON_CLIENT_PREALLOCATE", "").lower() not in ("false", "0")
    if environment.get("XLA_PYTHON_CLIENT_ALLOCATOR", "").lower() == "platform" or not eager:
        yield Finding("XLA's pool", "grows as needed")
        return
    given = environment.get("XLA_PYTHON_CLIENT_MEM_FRACTION", "")
    share = float(given) if re.fullmatch(r"\d*\.?\d+", given) else _POOL
    advice = "allocator='framework' loads into it; XLA_PYTHON_CLIENT_MEM_FRACTION=0.4 leaves more"
    yield Finding("XLA's pool", f"{share:.0%} of each card, at once", advice, share)


def cufile(root: Path, devices: int, where: Mount | None) -> Iterator[Finding]:
    """Findings about cuFile that need no call of it: what stands in its way here."""
    if not devices:
        yield Finding("GPUDirect Storage", "not asked about: there is no GPU")
        return
    kvikio = installed(("kvikio-cu13", "kvikio-cu12", "kvikio"))
    if kvikio is None and importlib.util.find_spec("kvikio") is None:
        advice = "pip install kvikio-cu13 to read past the page cache into device memory"
        yield Finding("kvikio", "not installed", advice)
    else:
        yield Finding("kvikio", kvikio or "of unknown version")
    yield _nvidia_fs(root)
    if virtual(root):
        name = text(root, "sys/class/dmi/id/product_name") or "of unknown kind"
        advice = "cuFile's driver hangs in some: mfload tries it in a process of its own"
        yield Finding("inside", f"a virtual machine ({name})", advice)
    wsl = "microsoft" in (text(root, "proc/version") or platform.release()).lower()
    for reason in [*(["WSL has no cuFile"] if wsl else []), *gds.ruled_out(root)]:
        advice = "in a container: -v /run/udev:/run/udev:ro"
        yield Finding("in the way", reason, advice if "/run/udev" in reason else _advice(reason))
    for reason in () if where is None else _file_system(where):
        yield Finding("file system", reason, _advice(reason))


def _nvidia_fs(root: Path) -> Finding:
    driver = text(root, "proc/driver/nvidia-fs/version")
    if not driver:
        advice = f"without it or P2PDMA, cuFile fails with 5001 or 5008, or copies; {_OTHERWISE}"
        return Finding("nvidia-fs", "not loaded", advice)
    if not any((root / "dev").glob("nvidia-fs*")):
        advice = "the container lacks its devices: run it with --device=/dev/nvidia-fs0 and so on"
        return Finding("nvidia-fs", "loaded, and out of reach", advice)
    stats = text(root, "proc/driver/nvidia-fs/stats")
    users = sum(int(n) for n in re.findall(r"^Active Process: (\d+)", stats, re.MULTILINE))
    held = sum(int(n) for n in re.findall(r"Registered_MiB=(\d+)", stats))
    found = driver.splitlines()[0]
    if not users:
        return Finding("nvidia-fs", found)
    advice = "all share each card's BAR1, and get 5016 once it is used up: load in fewer at once"
    found += (
        f"; {errors.counted(users, 'process', 'processes')} with {human(held << 20)} registered"
    )
    return Finding("nvidia-fs", found, advice, {"processes": users, "mib": held})


def _file_system(where: Mount) -> Iterator[str]:
    """Reasons why cuFile may not read files of a mount past host memory."""
    if where.kind == "overlay":
        yield "overlayfs can't be registered with cuFile (5027, 5030): mount a volume"
    elif where.kind not in _CUFILE_KINDS:
        yield f"cuFile has no direct way into {where.kind}"
    if where.kind == "ext4" and "data=ordered" not in where.options:
        yield "cuFile reads ext4 with -o data=ordered alone, which the mount does not say"
    if where.kind.startswith("nfs") and "proto=rdma" not in where.options:
        yield "cuFile needs NFS over RDMA"


def verdict(found: gds.Verdict, device: str) -> Finding:
    """The finding that a probe of cuFile leads to."""
    data, what = found._asdict() | {"device": device}, f"disk to {device}"
    if found.real:
        return Finding(what, f"direct: {found.why}", data=data)
    advice = _advice(found.why)
    if "no answer" in found.why:
        advice = f"cuFile's driver hangs in WSL and in some virtual machines; {_OTHERWISE}"
    return Finding(what, f"through host memory: {found.why}", advice, data)


def warm(legs: Sequence[Leg]) -> Iterator[Finding]:
    """Says that cuFile is the slower way for files in the page cache."""
    cached = [leg for leg in legs if (leg.cached or 0) >= _WARM]
    if cached:
        advice = (
            "cuFile reads the disk, which is slower here: engine='auto' takes it for cold files"
        )
        yield Finding(
            "page cache",
            f"holds most of {len(cached)} of {errors.counted(len(legs), 'file')}",
            advice,
        )


def _advice(reason: str) -> str:
    """What to do about the error of cuFile that a reason names, or what happens without cuFile."""
    found = error_code(reason)
    return _OTHERWISE if found is None else MEANINGS[found][1]
