"""Saves over old checkpoints: what was there, what comes, and what must be found in between."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import mfload

Arrays = Mapping[str, Any]


def arrays(seed: int, count: int = 6, size: int = 5000) -> dict[str, Any]:
    """Tensors that no other seed has, and names that some other seeds have."""
    rng = np.random.default_rng(seed)
    made = {f"w{n}": rng.integers(0, 255, size + n, dtype=np.uint8) for n in range(count)}
    made[f"only.{seed}"] = rng.standard_normal((3, 5))
    return made


class Scenario(NamedTuple):
    """One save.

    Attributes:
        old: Shard size of the old checkpoint; None for one file, 0 for nothing there.
        new: Shard size of the new one.
        name: What the file is called; the directory is named where None.
        index: Whether the old checkpoint keeps its index.
        both: Whether a stale single file lies beside the old shards.
        hub: Whether all files are links to blobs beside the directory, as in the hub's cache.
        overwrite: Whether the save may replace what is there.
        convert: Whether the arrays come from a file that is converted, with what lies beside it.
    """

    old: int | None
    new: int | None
    name: str | None = None
    index: bool = True
    both: bool = False
    hub: bool = False
    overwrite: bool = True
    convert: bool = False

    @property
    def sharded(self) -> bool:
        """Whether shards are replaced, or replace something: that takes hard links."""
        return self.old != 0 and bool(self.old or self.new)

    def path(self, folder: Path) -> Path:
        """Where the save goes."""
        return folder if self.name is None else folder / self.name

    def begin(self, folder: Path, old: Arrays) -> None:
        """Lays out what is there before."""
        folder.mkdir()
        (folder / "config.json").write_text('{"keep": true}')
        if self.old != 0:
            mfload.save(old, self.path(folder), max_shard_size=self.old)
        if not self.index:
            (folder / "model.safetensors.index.json").unlink()
        if self.both:
            files = {each.name: each.read_bytes() for each in folder.iterdir()}
            mfload.save(old, self.path(folder), overwrite=True)
            for name, raw in files.items():
                (folder / name).write_bytes(raw)
        for path in folder.iterdir() if self.hub else ():
            blob = folder.with_name("blobs") / hashlib.sha256(path.read_bytes()).hexdigest()
            blob.parent.mkdir(exist_ok=True)
            path.rename(blob)
            path.symlink_to(blob)

    def again(self, folder: Path, way: str, new: Arrays, third: Arrays) -> None:
        """Saves once more after a kill, one of `AGAIN`; nothing else is there then."""
        given, there = {"new": new, "third": third}, self.name or "model.safetensors.index.json"
        if way == "one file":
            saved = mfload.save(third, self.path(folder), overwrite=True)
        elif not self.overwrite and (folder / there).exists():
            with pytest.raises(mfload.errors.TargetExistsError, match="overwrite=True"):
                self.save(folder, new)
            return
        else:
            saved = self.save(folder, third if way == "other arrays" else new)
        assert found(folder, given) == ("new" if way == "the same" else "third")
        final(folder, self, saved)

    def save(self, folder: Path, new: Arrays) -> mfload.Saved:
        """Saves the new checkpoint."""
        given: Any = {"max_shard_size": self.new, "overwrite": self.overwrite}
        if not self.convert:
            return mfload.save(new, self.path(folder), **given)
        source = folder.parent / f"source of {list(new)[-1]}"
        if not source.exists():
            source.mkdir()
            for name, text in BESIDE.items():
                (source / name).write_text(text)
            np.savez(source / "model.npz", **new)
        return mfload.convert(source, self.path(folder), **given)


SCENARIOS = {
    "nothing-single": Scenario(0, None),
    "nothing-sharded": Scenario(0, 9000),
    "nothing-sharded-once": Scenario(0, 9000, overwrite=False),
    "nothing-converted": Scenario(0, 9000, overwrite=False, convert=True),
    "single-single": Scenario(None, None),
    "single-single-named": Scenario(None, None, "other.safetensors"),
    "sharded-same-names": Scenario(9000, 9000),
    "sharded-fewer": Scenario(6000, 14000),
    "sharded-more": Scenario(14000, 6000),
    "single-sharded": Scenario(None, 9000),
    "sharded-single": Scenario(9000, None),
    "sharded-single-named": Scenario(9000, None, "model.safetensors"),
    "no-index-single": Scenario(9000, None, index=False),
    "no-index-sharded": Scenario(9000, 9000, index=False),
    "both-single": Scenario(9000, None, both=True),
    "both-sharded": Scenario(9000, 14000, both=True),
    "hub-single": Scenario(None, None, hub=True),
    "hub-sharded": Scenario(9000, 14000, hub=True),
    "hub-sharded-single": Scenario(9000, None, hub=True),
}

AGAIN = ("other arrays", "the same", "one file")
"""What is saved after a kill: by the same call, or over all that is there."""
BESIDE = {"config.json": '{"keep": true}', "vocab.txt": "a b"}
"""What lies beside the source of a conversion."""

MODES = ["plain", "no-tmpfile", "no-links"]
CASES = [
    (name, mode)
    for name, scenario in SCENARIOS.items()
    for mode in MODES
    if mode != "no-links" or not scenario.sharded  # What is refused has a test of its own.
]
"""Scenarios and the file systems on which they are possible (see `kills.MODES`)."""


def hidden(folder: Path) -> list[str]:
    """Names in a directory that begin with a dot."""
    return sorted(name for name in os.listdir(folder) if name.startswith("."))


def found(path: Path, choices: Mapping[str, Arrays]) -> str:
    """Which of the checkpoints a load finds, bit for bit; "nothing" where there is none.

    Args:
        path: What to load.
        choices: What may be found.

    Raises:
        AssertionError: It is none of them.
        MfloadError: What is there can't be loaded.
    """
    try:
        got = mfload.load(path, framework="numpy")
    except mfload.errors.SourceNotFoundError:
        # Of a new checkpoint, the first shards are there before their index: an error says so.
        return "nothing"
    for name, each in choices.items():
        if got.keys() == each.keys() and all(same(got[key], each[key]) for key in each):
            return name
    raise AssertionError(f"{path}: neither {' nor '.join(choices)}")


def same(left: Any, right: Any) -> bool:
    """Equal in dtype, shape and every bit."""
    return bool(
        left.dtype == right.dtype
        and left.shape == right.shape
        and left.tobytes() == right.tobytes()
    )


def check(folder: Path, scenario: Scenario, old: Arrays, new: Arrays) -> str:
    """Looks at a directory from all sides; returns what a load of it finds.

    Raises:
        AssertionError: Something is neither old nor new, or another file was touched.
    """
    assert (folder / "config.json").read_text() == '{"keep": true}'
    for blob in folder.parent.glob("blobs/*"):
        assert hashlib.sha256(blob.read_bytes()).hexdigest() == blob.name
    choices = {"old": old, "new": new}
    path = folder / (scenario.name or "model.safetensors")
    whole = found(folder, choices)
    assert whole != "nothing" or scenario.old == 0
    index = folder / "model.safetensors.index.json"
    if scenario.old == 0 and scenario.new:
        assert index.exists() == (whole == "new")
    if index.exists():
        assert found(index, choices) == whole
    if path.exists():
        # Whoever names the file may find the new one a little earlier.
        assert found(path, choices) in ("old", "new")
    return whole


def final(folder: Path, scenario: Scenario, saved: mfload.Saved) -> None:
    """Nothing lies there but what was saved, and what was never touched."""
    names = {os.path.basename(file) for file in saved.files} | {"config.json"}
    beside = BESIDE.keys() if scenario.convert else set[str]()
    assert set(os.listdir(folder)) - beside == names - beside
