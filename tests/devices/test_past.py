"""Loads past host memory: the route takes it when it is real and cold, and says so if not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import samples
from devices import arrays
from devices.fake import FakeDevice
from devices.queues import MODES
from devices.stub_kvikio import Kvikio

import mfload
from mfload import errors
from mfload.devices import gds, slots
from mfload.devices.gds import Verdict
from mfload.io import probes

MODEL = samples.model()


@pytest.fixture(autouse=True)
def says(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """What was asked of the look whether it is real, which says yes."""
    asked: list[tuple[str, Any]] = []

    def verdict(path: Any, device: Any, *, timeout: float | None, cold: int | None) -> Verdict:
        asked.append((device.name, cold))
        return Verdict(True, "seen to be real")

    monkeypatch.setattr(gds, "verdict", verdict)
    monkeypatch.setattr(slots, "SLOT", 64 << 10)
    return asked


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return samples.save(tmp_path / "model.safetensors", MODEL)


def _load(path: Path, device: Any, monkeypatch: pytest.MonkeyPatch, **how: Any) -> Any:
    arrays.take(monkeypatch, arrays.Arrays(device))
    report = mfload.Report()
    found = mfload.load(path, framework="numpy", report=report, threads=2, **how)
    return found, report


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [None, "float16"])
def test_bit_for_bit(
    path: Path, monkeypatch: pytest.MonkeyPatch, kvikio: Kvikio, mode: Any, dtype: Any
) -> None:
    plain = mfload.load(path, framework="numpy", dtype=dtype)
    expected = {name: array.copy() for name, array in plain.items()}
    del plain
    device = FakeDevice((2, 0), "cuda:0", mode=mode)
    found, report = _load(path, device, monkeypatch, engine="gds", dtype=dtype)
    samples.assert_same(found, expected)
    assert report.route == ((str(path), "gds", "small read; seen to be real"),)
    assert kvikio.reads
    assert not device.calls["copy_in"]
    assert report.peak_bytes == 0
    assert not report.notes
    del found
    device.assert_clean()


def test_what_the_device_can_not_do_goes_by_the_host(
    path: Path, monkeypatch: pytest.MonkeyPatch, kvikio: Kvikio
) -> None:
    device = FakeDevice((2, 0), "cuda:0", converts=lambda *_: False)
    with np.errstate(over="ignore"):
        expected = {"embed": MODEL["embed"].astype("float16"), "odd": MODEL["odd"]}
    found, _ = _load(
        path, device, monkeypatch, engine="gds", dtype={"embed": "float16"}, names=["embed", "odd"]
    )
    samples.assert_same(found, expected)
    assert device.calls["copy_in"]
    assert device.calls["copy_within"]


@pytest.mark.parametrize("verb", ["open", "read", "register"])
def test_falling_back(
    path: Path, monkeypatch: pytest.MonkeyPatch, kvikio: Kvikio, verb: str
) -> None:
    kvikio.fails[verb] = RuntimeError("cuFile error 5030")
    device = FakeDevice((2, 0), "cuda:0")
    found, report = _load(path, device, monkeypatch, engine="gds")
    samples.assert_same(found, MODEL)
    assert report.notes
    start = f"{path}: fell back from gds to pinned: cuFile could not {verb}"
    assert all(note.startswith(start) for note in report.notes)
    del found
    device.assert_clean()


def test_falling_back_in_the_middle(
    path: Path, monkeypatch: pytest.MonkeyPatch, kvikio: Kvikio
) -> None:
    def before() -> None:
        if len(kvikio.reads) == 5:
            kvikio.fails["read"] = RuntimeError("cuFile gave up")

    kvikio.before_read = before
    device = FakeDevice((2, 0), "cuda:0", mode="thread")
    found, report = _load(path, device, monkeypatch, engine="gds")
    samples.assert_same(found, MODEL)
    assert any("fell back from gds to pinned" in note for note in report.notes)
    assert device.calls["copy_in"]
    assert device.calls["copy_within"]
    del found
    device.assert_clean()


def test_a_copy_that_fails_is_no_reason_to_fall_back(
    path: Path, monkeypatch: pytest.MonkeyPatch, kvikio: Kvikio
) -> None:
    device = FakeDevice((2, 0), "cuda:0", fail_later={"copy_within": 2})
    with pytest.raises(errors.DeviceError) as caught:
        _load(path, device, monkeypatch, engine="gds")
    assert caught.value.tensor in MODEL
    del caught
    device.assert_clean()


class TestRoute:
    @pytest.fixture(autouse=True)
    def large(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("mfload.io.route._SMALL", 0)

    def _cached(self, monkeypatch: pytest.MonkeyPatch, share: float) -> None:
        monkeypatch.setattr(probes, "cached_share", lambda *_: share)

    def test_cold(
        self, path: Path, monkeypatch: pytest.MonkeyPatch, kvikio: Kvikio, says: Any
    ) -> None:
        self._cached(monkeypatch, 0.1)
        device = FakeDevice((2, 0), "cuda:0")
        _, report = _load(path, device, monkeypatch)
        assert report.route[0][1:] == ("gds", "10% in the page cache; seen to be real")
        assert says == [("cuda:0", sum(a.nbytes for a in MODEL.values()))]

    def test_warm(
        self, path: Path, monkeypatch: pytest.MonkeyPatch, kvikio: Kvikio, says: Any
    ) -> None:
        self._cached(monkeypatch, 0.9)
        device = FakeDevice((2, 0), "cuda:0")
        _, report = _load(path, device, monkeypatch)
        assert report.route[0][1:] == ("pinned", "buffered: 90% in the page cache")
        assert not says
        assert not kvikio.reads

    def test_not_real(self, path: Path, monkeypatch: pytest.MonkeyPatch, kvikio: Kvikio) -> None:
        self._cached(monkeypatch, 0.0)
        monkeypatch.setattr(gds, "verdict", lambda *_, **__: Verdict(False, "no nvidia-fs"))
        device = FakeDevice((2, 0), "cuda:0")
        for engine, said in (("auto", "no gds: no nvidia-fs"), ("gds", "gds asked for, but no n")):
            found, report = _load(path, device, monkeypatch, engine=engine)
            samples.assert_same(found, MODEL)
            ((_, took, why),) = report.route
            assert took == "pinned"
            assert why.startswith("O_DIRECT: 0% in the page cache; " + said)
        assert not kvikio.reads

    def test_somebody_sees_the_bytes(
        self, path: Path, monkeypatch: pytest.MonkeyPatch, kvikio: Kvikio
    ) -> None:
        mfload.verify(path, checksums="write")
        device = FakeDevice((2, 0), "cuda:0")
        manifest = path.with_name("model.checksums.json")
        found, report = _load(path, device, monkeypatch, engine="gds", verify=manifest)
        samples.assert_same(found, MODEL)
        assert report.route[0][1] == "pinned"
        assert "verify=" in report.route[0][2]

    @pytest.mark.parametrize("engine", ["pinned", "gds"])
    def test_nothing_lands_on_a_device(
        self, path: Path, monkeypatch: pytest.MonkeyPatch, engine: Any
    ) -> None:
        self._cached(monkeypatch, 1.0)
        report = mfload.Report()
        found = mfload.load(path, framework="numpy", engine=engine, report=report)
        samples.assert_same(found, MODEL)
        assert report.route[0][1] == "pread"
        assert report.route[0][2].startswith(f"{engine} asked for, and nothing lands on a device")


def test_the_overhead_holds_the_slots(
    path: Path, monkeypatch: pytest.MonkeyPatch, kvikio: Kvikio
) -> None:
    monkeypatch.setattr(slots, "SLOT", 8 << 20)
    device = FakeDevice((2, 0), "cuda:0")
    arrays.take(monkeypatch, arrays.Arrays(device))
    stated = mfload.plan(path, engine="gds", threads=2, max_device_overhead=1 << 20)
    found, report = _load(path, device, monkeypatch, engine="gds", max_device_overhead=1 << 20)
    samples.assert_same(found, MODEL)
    assert 0 < stated.device_overhead_bytes <= 1 << 20
    held = sum(a.nbytes for a in MODEL.values()) + 256 * len(MODEL)
    assert report.device_peak_bytes <= held + stated.device_overhead_bytes
