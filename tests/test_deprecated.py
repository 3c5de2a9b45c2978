"""mfload/deprecated.py: old spellings of public calls, which work for one version and warn."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mfload

ARRAYS = {"x": np.arange(6, dtype=np.float32)}
public: Any = mfload  # Type checkers know the new spellings alone.


def _published(path: Path, **given: Any) -> None:
    with public.publish(ARRAYS, model="m", **given) as seed:
        assert mfload.load(seed.url, "numpy")["x"].tolist() == ARRAYS["x"].tolist()
        assert seed.manifest.checksums is None or given.get("checksums", True)


PEER = "mfload.PeerOptions"
# What is called, and what its warning says of the old spelling and of the new one.
CALLS: dict[str, tuple[Callable[[Path], Any], str, str]] = {
    "publish": (
        lambda path: _published(path, address="127.0.0.1:0", checksums=False, transports="memory"),
        "mfload.publish(address=…, checksums=…, transports=…)",
        f"mfload.publish(peer={PEER}(address=…, checksums=…, transports=…))",
    ),
    "publish beside peer=": (
        lambda path: _published(path, checksums=False, peer=mfload.PeerOptions(stalled=3)),
        "mfload.publish(checksums=…)",
        f"mfload.publish(peer={PEER}(checksums=…))",
    ),
    "verify that writes": (
        lambda path: public.verify(path, checksums="write"),
        "mfload.verify(checksums='write')",
        "mfload.verify(mode='write')",
    ),
    "verify without checksums": (
        lambda path: public.verify(path, checksums="never"),
        "mfload.verify(checksums='never')",
        "mfload.verify(checksums=False)",
    ),
    "verify of one kind": (
        lambda path: public.verify(path, algorithm="xxh3"),
        "mfload.verify(algorithm='xxh3')",
        "mfload.verify(checksums='xxh3')",
    ),
    "verify that writes one kind": (
        lambda path: public.verify(path, checksums="write", algorithm="xxh3"),
        "mfload.verify(checksums='write', algorithm='xxh3')",
        "mfload.verify(mode='write', checksums='xxh3')",
    ),
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    mfload.save(ARRAYS, tmp_path / "x.safetensors")
    return tmp_path / "x.safetensors"


@pytest.mark.parametrize("name", CALLS)
def test_an_old_spelling_works_and_warns(path: Path, name: str) -> None:
    call, old, new = CALLS[name]
    with pytest.warns(DeprecationWarning, match="is deprecated; write mfload") as said:
        call(path)
    assert [str(each.message) for each in said] == [f"{old} is deprecated; write {new}"]
    assert said[0].filename == __file__


def test_what_is_wrong_beside_an_old_spelling_is_told() -> None:
    warns = pytest.warns(DeprecationWarning, match="planner")
    with warns, pytest.raises(mfload.errors.ArgumentError) as caught:
        public.publish(ARRAYS, planner=None, modell="m")
    assert "did you mean model=?" in str(caught.value)
