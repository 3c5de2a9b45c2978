"""Made-up machines, as files in a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mfload.diagnostics.findings import Finding


def machine(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def named(findings: Any, what: str) -> Finding:
    return next(each for each in findings if each.what == what)


CARD = {
    "sys/bus/pci/devices/0000:1b:00.0/vendor": "0x10de\n",
    "sys/bus/pci/devices/0000:1b:00.0/class": "0x030200\n",
    "sys/bus/pci/devices/0000:1b:00.0/max_link_speed": "32.0 GT/s PCIe\n",
    "sys/bus/pci/devices/0000:1b:00.0/max_link_width": "16\n",
    "sys/bus/pci/devices/0000:1b:00.0/current_link_width": "16\n",
    "sys/bus/pci/devices/0000:1b:00.0/numa_node": "1\n",
    # Neither a network card of NVIDIA's nor another's display is one.
    "sys/bus/pci/devices/0000:1c:00.0/vendor": "0x10de\n",
    "sys/bus/pci/devices/0000:1c:00.0/class": "0x020700\n",
    "sys/bus/pci/devices/0000:1d:00.0/vendor": "0x1002\n",
    "sys/bus/pci/devices/0000:1d:00.0/class": "0x030000\n",
}
ONE = {"driver": "13.0", "devices": [{"name": "G", "memory": 80 << 30, "pci": "0000:1b:00.0"}]}
