"""cuFile: whether GPUDirect Storage could be real here. Calls nothing of it."""

from __future__ import annotations

import importlib.util
import platform
import re
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

from mfload.cuda import cufile_errors, cufile_json, gds
from mfload.cuda.cufile_json import Configuration
from mfload.cuda.mounts import Mount
from mfload.cuda.system import System
from mfload.diagnostics.findings import Finding
from mfload.io.route import Leg
from mfload.report import human

_WARM = 0.5
_LOADING = (
    "install nvidia-fs, or turn on P2PDMA: without either cuFile copies through host memory, or "
    "fails with 5001 or 5008; loads take the pinned way"
)
_STATIC_BAR1 = (
    'NVreg_RegistryDwords="RMForceStaticBar1=1;RmForceDisableIomapWC=1;" for the module nvidia'
)


def look(system: System, devices: int, where: Mount | None) -> Iterator[Finding]:
    """Findings about cuFile.

    Args:
        system: The machine.
        devices: How many GPUs there are.
        where: The mount in question, None for none.
    """
    if not devices:
        yield Finding("cufile", "GPUDirect Storage", "not asked about: there is no GPU")
        return
    found = _kvikio()
    if found is None:
        advice = "pip install kvikio-cu13 to read past the page cache into device memory"
        yield Finding("cufile", "kvikio", "not installed", "note", advice)
    else:
        yield Finding("cufile", "kvikio", found)
    configuration = cufile_json.read(system)
    yield _nvidia_fs(system, configuration)
    yield _p2pdma(system, configuration)
    yield from _inside(system)
    yield from _configuration(configuration)
    for reason in gds.without(system):
        yield Finding("cufile", "in the way", reason, "note", _advice(reason))
    if where is not None:
        yield from _file_system(where)


def verdict(found: gds.Verdict, device: str) -> Finding:
    """What a look at cuFile itself told.

    Args:
        found: The verdict.
        device: Name of the device.
    """
    data = found._asdict() | {"device": device}
    if found.real:
        return Finding("cufile", f"disk to {device}", f"direct: {found.why}", data=data)
    advice = _meaning(found.why)
    if "no answer" in found.why:
        advice = (
            "opening cuFile's driver hangs in some virtual machines and in WSL; loads take the "
            "pinned way"
        )
    what = f"through host memory: {found.why}"
    return Finding("cufile", f"disk to {device}", what, "note", advice, data)


def warm(legs: tuple[Leg, ...]) -> Iterator[Finding]:
    """Says where cuFile would be the slower way.

    Args:
        legs: The route of each file.
    """
    cached = [leg for leg in legs if (leg.cached or 0) >= _WARM]
    if cached:
        yield Finding(
            "cufile", "page cache", f"holds most of {len(cached)} of {len(legs)} files", "ok",
            "cuFile reads the disk and not the cache, so it is slower here: engine='auto' takes it "
            "for cold files alone",
        )  # fmt: skip


def _kvikio() -> str | None:
    if importlib.util.find_spec("kvikio") is None:
        return None
    for name in ("kvikio-cu13", "kvikio-cu12", "kvikio"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "a version that says nothing of itself"


def _nvidia_fs(system: System, configuration: Configuration) -> Finding:
    driver = system.text("proc/driver/nvidia-fs/version")
    if not driver:
        # Nothing is missing where the other way is asked for.
        level, advice = ("ok", "") if configuration.p2pdma else ("note", _LOADING)
        return Finding("cufile", "nvidia-fs", "not loaded", level, advice)
    stats = system.text("proc/driver/nvidia-fs/stats") or ""
    if not any(name.startswith("nvidia-fs") for name in system.names("dev")):
        advice = "the container has not its devices: run it with --device=/dev/nvidia-fs0 and so on"
        return Finding("cufile", "nvidia-fs", "loaded, and not to be reached", "note", advice)
    users = sum(int(n) for n in re.findall(r"^Active Process: (\d+)", stats, re.MULTILINE))
    held = sum(int(n) for n in re.findall(r"Registered_MiB=(\d+)", stats))
    found = driver.splitlines()[0]
    if not users:
        return Finding("cufile", "nvidia-fs", found)
    advice = (
        "they share each card's BAR1 with new ones; where it is used up, registering fails with "
        "5016: load in fewer processes at once"
    )
    used = f"{found}; {users} processes hold {human(held << 20)} registered"
    return Finding("cufile", "nvidia-fs", used, "ok", advice, {"processes": users, "mib": held})


def _p2pdma(system: System, configuration: Configuration) -> Finding:
    """The kernel's own peer-to-peer DMA: it needs no nvidia-fs, and several things set."""
    lacking: list[str] = []
    if not configuration.p2pdma:
        lacking.append('"use_pci_p2pdma": true among the properties of cufile.json')
    # It is what x86 needs; the driver tells its options alone.
    if platform.machine() == "x86_64":
        options = re.search(
            r'^RegistryDwords: "(.*)"', system.text("proc/driver/nvidia/params") or "", re.MULTILINE
        )
        if options is None or "rmforcestaticbar1=1" not in options[1].lower():
            lacking.append(_STATIC_BAR1)
    if "Open" not in (system.text("proc/driver/nvidia/version") or "Open"):
        lacking.append("the open kernel module of NVIDIA's driver, 570 or newer")
    if system.text("sys/module/nvme_core/parameters/multipath") == "Y":
        lacking.append("multipath=N for the module nvme_core")
    found = "all that it needs is set" if not lacking else f"{len(lacking)} settings are missing"
    advice = f"it needs {'; '.join(lacking)}" if lacking else ""
    # Only where it is wanted does it matter what it lacks.
    level = "note" if lacking and configuration.p2pdma else "ok"
    data = {"asked": configuration.p2pdma, "lacking": lacking}
    return Finding("cufile", "P2PDMA", found, level, advice, data)


def _inside(system: System) -> Iterator[Finding]:
    flags = re.search(r"^flags\s*:(.*)$", system.text("proc/cpuinfo") or "", re.MULTILINE)
    if flags is not None and "hypervisor" in flags[1].split():
        name = system.text("sys/class/dmi/id/product_name") or "of unknown kind"
        advice = (
            "few of them let disks and cards talk to each other, and opening cuFile's driver hangs "
            "in some: mfload tries it in a process of its own, for a bounded time"
        )
        yield Finding("cufile", "inside", f"a virtual machine ({name})", "ok", advice)


def _file_system(where: Mount) -> Iterator[Finding]:
    for reason in gds.file_system(where):
        yield Finding("cufile", "file system", reason, "note", _advice(reason))
    if where.kind == "ext4" and not any(each.startswith("data=") for each in where.options):
        advice = "if a look says no, mount it with -o data=ordered, which cuFile wants to see"
        yield Finding("cufile", "file system", "ext4 that does not say data=", "ok", advice)


def _configuration(configuration: Configuration) -> Iterator[Finding]:
    if configuration.path is None:
        return
    if configuration.trouble:
        advice = "cuFile takes its defaults, or none of it"
        found = f"malformed: {configuration.trouble}"
        yield Finding("cufile", configuration.path, found, "trouble", advice)
        return
    pinned = configuration.table.get("properties", {}).get("max_device_pinned_mem_size_kb")
    found = f"allow_compat_mode: {str(configuration.allowed).lower()}"
    if isinstance(pinned, int):
        found += f", at most {human(pinned << 10)} pinned for a GPU and process"
    yield Finding("cufile", configuration.path, found, data=configuration.table)


def _advice(reason: str) -> str:
    if "/run/udev" in reason:
        return "in a container: -v /run/udev:/run/udev:ro"
    return _meaning(reason)


def _meaning(reason: str) -> str:
    """What to do about an error of cuFile that a reason speaks of; empty where unknown."""
    number = cufile_errors.code(reason)
    return "" if number is None else cufile_errors.MEANINGS[number].advice
