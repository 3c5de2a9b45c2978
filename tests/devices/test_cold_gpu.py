"""Cold files onto a GPU: readers come and go, and reads change their way, while copies run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import samples
import watch
from conformance.suite import no_gpu

import mfload
from mfload.cuda import staging
from mfload.io import engine, probes, route, trial

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(no_gpu() is not None, reason=str(no_gpu()))]


@pytest.mark.parametrize("worth", [0.0, 1e9])
def test_trials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, worth: float) -> None:
    for name, value in {"WORTH": worth, "_SECONDS": 0.0, "_BLOCKS": 1, "_LEFT": 0}.items():
        monkeypatch.setattr(trial, name, value)
    monkeypatch.setattr(route, "TRIED", 1 << 20)
    monkeypatch.setattr(engine, "_REPORTED_BYTES", 1)
    monkeypatch.setattr(staging, "SLOT", 1 << 20)  # Many blocks.
    whole = samples.numbers((64 << 20,), np.uint32)
    path = samples.save(tmp_path / "cold.safetensors", {"a": whole, "b": whole[:1000]})
    watch.drop_cache(path)
    with path.open("rb") as file:
        if (
            probes.cached_share(file.fileno(), path.stat().st_size) != 0.0
            or probes.direct_alignment(file.fileno()) is None
        ):
            pytest.skip("the kernel can't say or forget what it caches, or there is no O_DIRECT")
    report = mfload.Report()
    found: Any = mfload.load(path, "cupy", report=report)
    assert samples.same(found["a"].get(), whole)
    assert samples.same(found["b"].get(), whole[:1000])
    ((_, name, why),) = report.route
    assert name == "pinned"
    assert "O_DIRECT was " in why
    assert ("took over" in why) == (worth == 0.0)
