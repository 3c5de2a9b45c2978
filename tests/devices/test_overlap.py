"""What a load overlaps, by a clock that only reads and copies move (see `clock`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import samples
from devices import arrays
from devices.clock import Clock, TimedDevice

import mfload
from mfload.cuda import staging
from mfload.loading import execute
from mfload.sources.local import OpenFile

BLOCK = 1 << 20
BLOCKS = 48
MODEL = {f"w{n}": samples.numbers((BLOCK,), ("u1", "i1")[n % 2], n) for n in range(BLOCKS)}


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(staging, "SLOT", BLOCK)
    return samples.save(tmp_path / "m.safetensors", MODEL)


def slow_reads(monkeypatch: pytest.MonkeyPatch, clock: Clock, seconds: float) -> None:
    """Has a reader take so long for a block of the file."""
    real = OpenFile.read

    def read(self: Any, vector: list[Any], offset: int, least: int | None = None) -> int:
        nbytes = sum(memoryview(part).nbytes for part in vector)
        if nbytes > BLOCK // 16:  # Not of headers.
            clock.sleep(seconds * nbytes / BLOCK)
        return real(self, vector, offset, least)

    monkeypatch.setattr(OpenFile, "read", read)


def load(path: Path, **options: Any) -> mfload.Report:
    report = mfload.Report()
    found = mfload.load(
        path, framework="numpy", report=report, options=mfload.Options(engine="pread", **options)
    )
    samples.assert_same(found, MODEL)
    return report


# Seconds of a reader and of the device for a block.
@pytest.mark.parametrize(
    ("readers", "reads", "copies"),
    [(1, 1, 1), (1, 3, 1), (1, 1, 3), (2, 1, 0.5), (2, 2, 0.2), (4, 1, 1), (4, 8, 1), (8, 8, 1),
     (12, 12, 1), (16, 12, 1)],
)  # fmt: skip
def test_readers_and_copies_overlap(
    path: Path, monkeypatch: pytest.MonkeyPatch, readers: int, reads: float, copies: float
) -> None:
    """The slower of both is never idle, but for the first read and the last copy."""
    clock = Clock(readers)
    slow_reads(monkeypatch, clock, reads)
    device = TimedDevice(clock, BLOCK / copies)
    arrays.take(monkeypatch, arrays.Arrays(device))
    load(path, threads=readers)
    least = max(BLOCKS * reads / readers, BLOCKS * copies)
    assert least <= clock.now <= least + 1.5 * (reads + copies)
    assert not clock.stuck
    device.assert_clean()


def test_a_load_has_readers_by_itself(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as there are cores for, and as one device of today keeps busy."""
    monkeypatch.setattr(execute, "share_of_cores", lambda: 16)
    clock = Clock(execute.reader_threads(direct=False, devices=1))
    slow_reads(monkeypatch, clock, 10)
    device = TimedDevice(clock, BLOCK)
    arrays.take(monkeypatch, arrays.Arrays(device))
    load(path)
    assert clock.now <= BLOCKS + 1.5 * (10 + 1)
    device.assert_clean()


def test_devices_copy_at_once(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has a link of its own: a load onto two takes no longer than the half onto one."""
    clock = Clock(4)
    slow_reads(monkeypatch, clock, 1)
    devices = [TimedDevice(clock, BLOCK, name=f"fake:{n}", place=(1, n)) for n in range(2)]
    made = arrays.Arrays(*devices)
    monkeypatch.setattr(made, "lands", lambda request: int(request.dtype.name == "I8"))
    arrays.take(monkeypatch, made)
    load(path, threads=4)
    assert clock.now <= BLOCKS / 2 + 4
    for device in devices:
        device.assert_clean()


def test_memory_is_made_while_the_first_slots_fill(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(2 + 1)  # Two readers, and the thread that loads.
    slow_reads(monkeypatch, clock, 1)
    device = TimedDevice(clock, BLOCK / 0.4, allocation=0.9)
    arrays.take(monkeypatch, arrays.Arrays(device))
    load(path, threads=2)
    assert device.calls["allocate"] == 1
    assert clock.now < BLOCKS / 2 + 1.5  # And not another second.
    device.assert_clean()


def test_the_next_load_has_slots(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(4)
    slow_reads(monkeypatch, clock, 1)
    device = TimedDevice(clock, 16 * BLOCK, locks=BLOCK / 4)
    arrays.take(monkeypatch, arrays.Arrays(device))
    took: list[float] = []
    for _ in range(2):
        begun = clock.now
        load(path, threads=4)
        took.append(clock.now - begun)
    assert took[1] <= BLOCKS / 4 + 2
    assert took[0] >= took[1] + 2 * 4 - 2  # Two slots of each reader were locked.
    device.assert_clean()
