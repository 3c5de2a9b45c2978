"""GPUs: driver, devices, and how each hangs on the machine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from mfload.cuda import numa
from mfload.cuda.system import System
from mfload.diagnostics.findings import Finding
from mfload.io.subprocess_probe import SENSELESS, Answer
from mfload.report import human

_NVIDIA = "0x10de"
_DISPLAY = "0x03"  # PCI class of what drives displays, 3-D controllers among them.


def checked(answer: Answer) -> Answer:
    """What `probe_cuda` said, if it makes sense.

    Args:
        answer: What it said.
    """
    answer = answer.of(driver=str, devices=list)
    if answer.trouble or "error" in answer.data:
        return answer
    devices = [Answer(each).of(name=str, memory=int, pci=str) for each in answer.data["devices"]]
    pairs: Any = answer.data.get("pairs", [])
    whole = isinstance(pairs, list) and all(isinstance(p, list) and len(p) == 4 for p in pairs)  # pyright: ignore
    return SENSELESS if any(each.trouble for each in devices) or not whole else answer


def look(system: System, answer: Answer) -> Iterator[Finding]:
    """Findings about GPUs.

    Args:
        system: The machine.
        answer: What `probe_cuda` said, `checked`.
    """
    cards = list(_cards(system))
    if answer.trouble:
        yield Finding(
            "gpu", "driver", answer.trouble, "trouble",
            "the driver does not answer as it should; see dmesg for lines of NVRM and Xid, then "
            "reload the driver or restart the machine",
        )  # fmt: skip
        return
    error = answer.data.get("error")
    if error is not None:
        yield _without_driver(system, cards, error, missing=bool(answer.data.get("missing")))
        return
    devices: Sequence[dict[str, Any]] = answer.data["devices"]
    yield Finding("gpu", "driver", f"CUDA {answer.data['driver']}", data=answer.data["driver"])
    if not devices:
        yield Finding(
            "gpu", "devices", "none", "note",
            "the driver is there and shows no device: see CUDA_VISIBLE_DEVICES, or --gpus of the "
            "container",
        )  # fmt: skip
    for device in devices:
        yield _device(system, device)
    if len(devices) > 1:
        yield _between(answer.data.get("pairs", ()))


def _cards(system: System) -> Iterator[str]:
    """PCI addresses of NVIDIA's cards, seen without their driver."""
    base = "sys/bus/pci/devices"
    for address in system.names(base):
        kind = system.text(f"{base}/{address}/class") or ""
        if system.text(f"{base}/{address}/vendor") == _NVIDIA and kind.startswith(_DISPLAY):
            yield address


def _without_driver(system: System, cards: Sequence[str], error: str, *, missing: bool) -> Finding:
    if missing and not cards:
        return Finding("gpu", "devices", "none: no card of NVIDIA's on the PCI bus")
    # Where the library is there, a card may be that no PCI bus shows, as in WSL.
    where = f"; cards at {', '.join(cards)}" if cards else ""
    if missing and system.exists(".dockerenv"):
        advice = "the container has no driver library: run it with --gpus all"
    elif missing:
        advice = "install NVIDIA's driver: its libcuda.so.1 is not found"
    else:
        advice = "the kernel module and the library may be of different versions: see nvidia-smi"
    return Finding("gpu", "driver", f"{error}{where}", "trouble", advice)


def _device(system: System, device: dict[str, Any]) -> Finding:
    base = f"sys/bus/pci/devices/{_address(device['pci'])}"
    parts = [human(device["memory"])]
    speed, width = system.text(f"{base}/max_link_speed"), system.text(f"{base}/max_link_width")
    data = dict(device)
    advice: list[str] = []
    if speed and width:
        parts.append(f"PCIe x{width} at {speed.removesuffix(' PCIe')}")
        data |= {"link_width": width, "link_speed": speed}
        now = system.text(f"{base}/current_link_width")
        if now and now != width:
            advice.append(
                f"the link runs on {now} of {width} lanes: see the slot, and its neighbours"
            )
    window = _bar1(system, base)
    if window is not None:
        data["bar1"] = window
        parts.append(f"BAR1 {human(window)}")
        if window < device["memory"]:
            advice.append(
                "BAR1 shows other devices a part of the memory, which the registrations of all "
                "processes share (cuFile's 5016, 5036): turn on Resizable BAR in the firmware"
            )
    node = system.number(f"{base}/numa_node")
    if node is not None and node >= 0:
        parts.append(f"on NUMA node {node}")
        data["numa_node"] = node
        if _far(system, device["pci"]):
            advice.append(
                "this process may use no core of that node, so its reads go the long way: see "
                "taskset, numactl or the control group"
            )
    found = f"{device['name']}, {', '.join(parts)}"
    level = "note" if advice else "ok"
    return Finding("gpu", device["pci"], found, level, "; ".join(advice), data)


def _far(system: System, pci: str) -> bool:
    """Whether a device hangs on a node whose cores are there and not for this process."""
    address = _address(pci)
    there = numa.near(address, system.root, range(numa.MOST))
    return there is not None and numa.near(address, system.root) is None


def _bar1(system: System, base: str) -> int | None:
    """Bytes of a card's memory that other devices on the bus can reach."""
    # A line a region: first address, last address, flags. The second is NVIDIA's BAR1.
    lines = (system.text(f"{base}/resource") or "").splitlines()
    try:
        first, last, _ = (int(word, 16) for word in lines[1].split())
    except (IndexError, ValueError):
        return None
    return last - first + 1 if last > first else None


def _between(pairs: Sequence[Sequence[Any]]) -> Finding:
    """How devices reach each other, each way counted."""
    direct = sum(bool(access) for _, _, access, _ in pairs)
    atomic = sum(bool(access and atomics) for _, _, access, atomics in pairs)
    found = f"{direct} of {len(pairs)} ways are direct, {atomic} with atomics, as over NVLink"
    advice = ""
    if direct < len(pairs):
        advice = "copies the other ways go through host memory; see nvidia-smi topo -p2p r"
    level = "note" if advice else "ok"
    return Finding("gpu", "between devices", found, level, advice, [list(pair) for pair in pairs])


def _address(pci: str) -> str:
    """A bus id as sysfs spells it: CUDA writes the domain with four digits, or with eight."""
    domain, _, rest = pci.partition(":")
    return f"{domain.lstrip('0'):0>4}:{rest}"
