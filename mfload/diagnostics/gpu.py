"""GPUs: driver, devices, packages, and whether cuFile goes from the disk to them."""

from __future__ import annotations

import importlib.util
import platform
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mfload.cuda import gds, numa
from mfload.cuda.cufile import MEANINGS, error_code
from mfload.diagnostics.findings import Finding, Machine
from mfload.diagnostics.host import Mount, installed
from mfload.io.route import Leg
from mfload.io.subprocess_probe import SENSELESS, Answer
from mfload.report import human

_CPUS = 1 << 16  # More than any kernel is built for.
_NVIDIA = "0x10de"
_DISPLAY = "0x03"  # PCI class of what drives displays, 3-D controllers among them.
_POOL = 0.75  # XLA's share of a card by default.
_WARM = 0.5
_CUFILE_KINDS = ("ext4", "xfs", "nfs", "nfs4", "lustre", "wekafs", "beegfs", "gpfs", "scatefs",
                 "panfs", "virtiofs")  # fmt: skip


def checked(answer: Answer) -> Answer:
    """What the probe of the driver said, if it makes sense."""
    answer = answer.of(driver=str, devices=list)
    if answer.trouble or "error" in answer.data:
        return answer
    devices = [Answer(each).of(name=str, memory=int, pci=str) for each in answer.data["devices"]]
    pairs: Any = answer.data.get("pairs", [])
    sound = isinstance(pairs, list) and all(isinstance(p, list) and len(p) == 4 for p in pairs)  # pyright: ignore
    return SENSELESS if any(each.trouble for each in devices) or not sound else answer


def look(machine: Machine, answer: Answer) -> Iterator[Finding]:
    """Findings about driver and devices, given the `checked` answer of the probe."""
    if answer.trouble:
        advice = (
            "the driver does not answer as it should; see dmesg for lines of NVRM and Xid, then "
            "reload the driver or restart the machine"
        )
        yield Finding("gpu", "driver", answer.trouble, "trouble", advice)
        return
    if "error" in answer.data:
        yield _without_driver(machine, answer.data["error"], bool(answer.data.get("missing")))
        return
    driver: str = answer.data["driver"]
    devices: Sequence[dict[str, Any]] = answer.data["devices"]
    yield Finding("gpu", "driver", f"CUDA {driver}", data=driver)
    if not devices:
        advice = (
            "the driver is there and shows no device: see CUDA_VISIBLE_DEVICES, or --gpus of the "
            "container"
        )
        yield Finding("gpu", "devices", "none", "note", advice)
    for device in devices:
        yield _device(machine, device)
    if len(devices) > 1:
        pairs: Sequence[Sequence[Any]] = answer.data.get("pairs", ())
        direct = sum(bool(access) for _, _, access, _ in pairs)
        atomic = sum(bool(access and atomics) for _, _, access, atomics in pairs)
        found = f"{direct} of {len(pairs)} ways are direct, {atomic} with atomics, as over NVLink"
        advice = "copies the other ways go through host memory; see nvidia-smi topo -p2p r"
        level, advice = ("note", advice) if direct < len(pairs) else ("ok", "")
        data = [list(pair) for pair in pairs]
        yield Finding("gpu", "between devices", found, level, advice, data)


def _without_driver(machine: Machine, error: str, missing: bool) -> Finding:
    base = "sys/bus/pci/devices"
    cards = [
        address
        for address in machine.names(base)
        if machine.text(f"{base}/{address}/vendor") == _NVIDIA
        and (machine.text(f"{base}/{address}/class") or "").startswith(_DISPLAY)
    ]
    if missing and not cards:
        return Finding("gpu", "devices", "none: the PCI bus has no card of NVIDIA's")
    # With the library there, a card may be there that no PCI bus shows, as in WSL.
    where = f"; cards at {', '.join(cards)}" if cards else ""
    advice = "the kernel module and the library may be of different versions: see nvidia-smi"
    if missing:
        advice = "install NVIDIA's driver: its libcuda.so.1 is not found"
        if machine.exists(".dockerenv"):
            advice = "the container has no driver library: run it with --gpus all"
    return Finding("gpu", "driver", f"{error}{where}", "trouble", advice)


def _device(machine: Machine, device: dict[str, Any]) -> Finding:
    # CUDA writes the domain with four digits, or with eight; sysfs with four.
    domain, _, rest = device["pci"].partition(":")
    address = f"{domain.lstrip('0'):0>4}:{rest}"
    base = f"sys/bus/pci/devices/{address}"
    parts, advice, data = [human(device["memory"])], list[str](), dict(device)
    speed, width = machine.text(f"{base}/max_link_speed"), machine.text(f"{base}/max_link_width")
    if speed and width:
        parts.append(f"PCIe x{width} at {speed.removesuffix(' PCIe')}")
        data |= {"link_width": width, "link_speed": speed}
        now = machine.text(f"{base}/current_link_width")
        if now and now != width:
            advice.append(
                f"the link runs on {now} of {width} lanes: see the slot and its neighbours"
            )
    window = _bar1(machine.text(f"{base}/resource") or "")
    if window is not None:
        data["bar1"] = window
        parts.append(f"BAR1 {human(window)}")
        if window < device["memory"]:
            advice.append(
                "BAR1 shows other devices a part of the memory, which the registrations of all "
                "processes share (cuFile's 5016, 5036): turn on Resizable BAR in the firmware"
            )
    node = machine.number(f"{base}/numa_node")
    if node is not None and node >= 0:
        parts.append(f"on NUMA node {node}")
        data["numa_node"] = node
        near = numa.cpus(address, machine.root)
        if near is None and numa.cpus(address, machine.root, range(_CPUS)) is not None:
            advice.append(
                "this process may use no core of that node, so its reads go the long way: see "
                "taskset, numactl or the control group"
            )
    level = "note" if advice else "ok"
    found = f"{device['name']}, {', '.join(parts)}"
    return Finding("gpu", device["pci"], found, level, "; ".join(advice), data)


def _bar1(resources: str) -> int | None:
    """Bytes of a card's memory that other devices on the bus can reach."""
    # A line a region: first address, last address, flags. The second is NVIDIA's BAR1.
    try:
        first, last, _ = (int(word, 16) for word in resources.splitlines()[1].split())
    except (IndexError, ValueError):
        return None
    return last - first + 1 if last > first else None


def cupy(answer: Answer | None) -> Finding:
    """The finding about CuPy, given the answer of its probe; None if it is not installed."""
    if answer is None:
        advice = "pip install cupy-cuda13x: loads onto the GPU go through host arrays without it"
        return Finding("gpu", "CuPy", "not installed", "note", advice)
    answer = answer.of(version=str, compiling=str | None)
    if answer.trouble:
        advice = "loads onto the GPU may hang or fail with it"
        return Finding("gpu", "CuPy", answer.trouble, "trouble", advice)
    if "error" in answer.data:
        advice = "it does not fit this driver, or two of its packages are installed (pip list)"
        return Finding("gpu", "CuPy", answer.data["error"], "trouble", advice)
    found, failed = answer.data["version"], answer.data["compiling"]
    if not failed:
        return Finding("gpu", "CuPy", found, data=found)
    advice = (
        "dtypes are converted on the host then, and not on the device: pip install "
        "nvidia-cuda-runtime brings the headers that its compiler looks for"
    )
    return Finding("gpu", "CuPy", f"{found}; compiles no kernels: {failed}", "note", advice)


def xla(environment: Mapping[str, str]) -> Iterator[Finding]:
    """The finding about the share of a card that JAX takes."""
    if importlib.util.find_spec("jax") is None:
        return
    if not any(importlib.util.find_spec(f"jax_cuda{n}_plugin") for n in (13, 12)):
        advice = "JAX has no CUDA plugin here: pip install 'jax[cuda13]' has it use the card"
        yield Finding("gpu", "XLA's pool", "none", "ok", advice)
        return
    eager = environment.get("XLA_PYTHON_CLIENT_PREALLOCATE", "").lower() not in ("false", "0")
    if environment.get("XLA_PYTHON_CLIENT_ALLOCATOR", "").lower() == "platform" or not eager:
        yield Finding("gpu", "XLA's pool", "grows as needed")
        return
    try:
        # May have a dot in front, as in ".9", and be above 1 for cards that can page.
        share = float(environment.get("XLA_PYTHON_CLIENT_MEM_FRACTION") or _POOL)
    except ValueError:
        share = _POOL
    advice = (
        "JAX takes it with its first array; allocator='framework' lands in it, and what lands "
        "elsewhere has the rest: XLA_PYTHON_CLIENT_PREALLOCATE=false or "
        "XLA_PYTHON_CLIENT_MEM_FRACTION=0.4 leave more"
    )
    yield Finding("gpu", "XLA's pool", f"{share:.0%} of each card, at once", "ok", advice, share)


def cufile(machine: Machine, devices: int, where: Mount | None) -> Iterator[Finding]:
    """Findings about cuFile that need no call of it: what stands in its way here."""
    if not devices:
        yield Finding("cufile", "GPUDirect Storage", "not asked about: there is no GPU")
        return
    kvikio = installed(("kvikio-cu13", "kvikio-cu12", "kvikio"))
    if kvikio is None and importlib.util.find_spec("kvikio") is None:
        advice = "pip install kvikio-cu13 to read past the page cache into device memory"
        yield Finding("cufile", "kvikio", "not installed", "note", advice)
    else:
        yield Finding("cufile", "kvikio", kvikio or "of unknown version")
    yield _nvidia_fs(machine)
    flags = re.search(r"^flags\s*:(.*)$", machine.text("proc/cpuinfo") or "", re.MULTILINE)
    if flags is not None and "hypervisor" in flags[1].split():
        name = machine.text("sys/class/dmi/id/product_name") or "of unknown kind"
        advice = (
            "few of them let disks and cards talk to each other, and opening cuFile's driver hangs "
            "in some: mfload tries it in a process of its own, for a bounded time"
        )
        yield Finding("cufile", "inside", f"a virtual machine ({name})", "ok", advice)
    reasons = list(gds.ruled_out(machine.root))
    if "microsoft" in (machine.text("proc/version") or platform.release()).lower():
        reasons.insert(0, "WSL has no cuFile")
    for reason in reasons:
        udev = "in a container: -v /run/udev:/run/udev:ro"
        advice = udev if "/run/udev" in reason else _advice(reason)
        yield Finding("cufile", "in the way", reason, "note", advice)
    for reason in () if where is None else _file_system(where):
        yield Finding("cufile", "file system", reason, "note", _advice(reason))


def _nvidia_fs(machine: Machine) -> Finding:
    driver = machine.text("proc/driver/nvidia-fs/version")
    if not driver:
        advice = (
            "without nvidia-fs, or P2PDMA of the kernel, cuFile copies through host memory or "
            "fails with 5001 or 5008; loads take the pinned way"
        )
        return Finding("cufile", "nvidia-fs", "not loaded", "note", advice)
    if not any(name.startswith("nvidia-fs") for name in machine.names("dev")):
        advice = "the container lacks its devices: run it with --device=/dev/nvidia-fs0 and so on"
        return Finding("cufile", "nvidia-fs", "loaded, and out of reach", "note", advice)
    stats = machine.text("proc/driver/nvidia-fs/stats") or ""
    users = sum(int(n) for n in re.findall(r"^Active Process: (\d+)", stats, re.MULTILINE))
    held = sum(int(n) for n in re.findall(r"Registered_MiB=(\d+)", stats))
    found = driver.splitlines()[0]
    if not users:
        return Finding("cufile", "nvidia-fs", found)
    advice = (
        "they share each card's BAR1 with new ones; once it is used up, registering fails with "
        "5016: load in fewer processes at once"
    )
    used = f"{found}; {users} processes hold {human(held << 20)} registered"
    return Finding("cufile", "nvidia-fs", used, "ok", advice, {"processes": users, "mib": held})


def _file_system(where: Mount) -> Iterator[str]:
    """Reasons why cuFile may not read files of a mount past host memory."""
    kind = where.kind
    if kind == "overlay":
        yield "overlayfs can't be registered with cuFile (5027, 5030): mount a volume"
    elif kind not in _CUFILE_KINDS:
        yield f"cuFile has no direct way into {kind}"
    if kind == "ext4" and "data=ordered" not in where.options:
        yield "cuFile reads ext4 with -o data=ordered alone, which the mount does not say"
    if kind.startswith("nfs") and "proto=rdma" not in where.options:
        yield "cuFile needs NFS over RDMA"


def verdict(found: gds.Verdict, device: str) -> Finding:
    """The finding that a probe of cuFile leads to."""
    data, what = found._asdict() | {"device": device}, f"disk to {device}"
    if found.real:
        return Finding("cufile", what, f"direct: {found.why}", data=data)
    hangs = (
        "opening cuFile's driver hangs in some virtual machines and in WSL; loads take the "
        "pinned way"
    )
    advice = hangs if "no answer" in found.why else _advice(found.why)
    return Finding("cufile", what, f"through host memory: {found.why}", "note", advice, data)


def warm(legs: Sequence[Leg]) -> Iterator[Finding]:
    """Says that cuFile is the slower way for files in the page cache."""
    cached = [leg for leg in legs if (leg.cached or 0) >= _WARM]
    if cached:
        advice = (
            "cuFile reads the disk and not the cache, so it is slower here: engine='auto' takes it "
            "for cold files alone"
        )
        found = f"holds most of {len(cached)} of {len(legs)} files"
        yield Finding("cufile", "page cache", found, "ok", advice)


def _advice(reason: str) -> str:
    """What to do about the error of cuFile that a reason names, if it names one."""
    number = error_code(reason)
    return "" if number is None else MEANINGS[number][1]
