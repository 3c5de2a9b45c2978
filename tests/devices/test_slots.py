"""What a slot is made of when the device locks its pages: speed and forks hang on that."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path
from typing import Any

import pytest
import samples
from devices import arrays
from devices.fake import FakeDevice

import mfload
from mfload.io import buffers
from mfload.planning import memory

MODEL = {"w": samples.numbers((32 << 20,), "u1")}
_MAPS = Path("/proc/self/smaps")


class Looking(FakeDevice):
    """Looks at memory before its pages are locked."""

    def __init__(self) -> None:
        super().__init__()
        self.flags: list[set[str]] = []
        self.there: list[bool] = []

    def pin(self, array: Any) -> None:
        self.flags.append(_flags(array.ctypes.data))
        self.there.append(_resident(array))
        super().pin(array)


def _flags(address: int) -> set[str]:
    """What the kernel says of the map that an address lies in."""
    inside = False
    for line in _MAPS.read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(found[1], 16) <= address < int(found[2], 16)
        elif inside and line.startswith("VmFlags:"):
            return set(line.split()[1:])
    return set()


def _resident(array: Any) -> bool:
    pages = -(-array.nbytes // buffers.PAGE)
    seen = (ctypes.c_ubyte * pages)()
    libc = ctypes.CDLL(None, use_errno=True)
    where = ctypes.c_void_p(array.ctypes.data), ctypes.c_size_t(array.nbytes)
    assert libc.mincore(*where, seen) == 0, ctypes.get_errno()
    return all(each & 1 for each in seen)


@pytest.mark.skipif(not _MAPS.exists(), reason="the system does not tell of its maps")
def test_a_slot_is_huge_pages_that_are_there_and_stay_out_of_forks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver would make the pages of one slot after another; a fork may get them written to."""
    device = Looking()
    arrays.take(monkeypatch, arrays.Arrays(device))
    path = samples.save(tmp_path / "m.safetensors", MODEL)
    monkeypatch.setattr(memory, "_PINNED", 1)  # Of a model as large as others.
    found = mfload.load(path, framework="numpy", options=mfload.Options(threads=1))
    samples.assert_same(found, MODEL)
    del found
    assert device.flags
    for flags in device.flags:
        assert {"hg", "dc"} <= flags
    assert all(device.there)
    device.assert_clean()
