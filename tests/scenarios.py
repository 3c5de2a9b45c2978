"""Saves over old checkpoints: what was there, what comes, and what must be found in between."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import crashes
import numpy as np
from faults import MODES
from recorder import Recorder, tree

import mfload

Arrays = Mapping[str, Any]


def arrays(seed: int, count: int = 6, size: int = 5000) -> dict[str, Any]:
    """Tensors that no other seed has, and names that some other seeds have."""
    rng = np.random.default_rng(seed)
    made = {f"w{n}": rng.integers(0, 255, size + n, dtype=np.uint8) for n in range(count)}
    made[f"only.{seed}"] = rng.standard_normal((3, 5))
    return made


class Scenario(NamedTuple):
    """One call that writes a checkpoint.

    To add one: a line in `CALLS`, and whatever it needs that no other does in `begin` and
    `save`. Kills, crashes and errors of the system are then tried on it in all the ways there are.

    Attributes:
        old: Shard size of the old checkpoint; None for one file, 0 for nothing there.
        new: Shard size of the new one.
        name: What the file is called; the directory is named where None.
        index: Whether the old checkpoint keeps its index.
        both: Whether a stale single file lies beside the old shards.
        sums: Which have a manifest: "", "old", "new" or "both".
        link: A symbolic link to `name` (or to the directory), through which the call goes.
        cut: The part of its changes after which a save before was killed, of the old checkpoint or,
            where there is none, of another.
        call: What is called: "save"; "verify", which writes a manifest; "align", in place;
            "convert", also from a source with a manifest ("convert-summed"), of compressed tensors
            with one ("convert-npz"), or of a model with a tokenizer ("convert-model").
        hub: Whether all files are links to blobs beside the directory, as in the hub's cache.
    """

    old: int | None
    new: int | None
    name: str | None = None
    index: bool = True
    both: bool = False
    sums: str = ""
    link: str | None = None
    cut: float = 0.0
    call: str = "save"
    hub: bool = False

    @property
    def sharded(self) -> bool:
        """Whether shards are replaced, or replace something: that takes hard links."""
        return self.old != 0 and bool(self.old or self.new)

    @property
    def summed(self) -> bool:
        """Whether a manifest lies beside the new checkpoint."""
        return self.sums in ("new", "both")

    @property
    def keeps(self) -> bool:
        """Whether the new arrays are the old ones."""
        return self.call in ("align", "verify")

    def path(self, folder: Path) -> Path:
        """Where the save goes."""
        name = self.link or self.name
        return folder if name is None else folder / name

    def begin(self, folder: Path, old: Arrays) -> None:
        """Lays out what is there before."""
        folder.mkdir()
        (folder / "config.json").write_text('{"keep": true}')
        if self.link is not None:
            target = folder / (self.name or "store")
            (target.parent if self.name else target).mkdir(exist_ok=True)
            (folder / self.link).symlink_to(self.name or "store")
        if self.old != 0:
            sums = self.sums in ("old", "both")
            # So that `align` has something to do.
            begin = 8 if self.call == "align" else 4096
            given = arrays(9) if self.cut else old
            mfload.save(
                given, self.path(folder), max_shard_size=self.old, checksums=sums, align=begin
            )
        if self.cut:
            given = arrays(9) if self.old == 0 else old
            with Recorder(folder) as seen:
                self._replace(new=self.old or self.new).save(folder, given)
            shutil.rmtree(folder)
            crashes.killed(seen, self.cut).lay_out(folder)
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

    def save(self, folder: Path, new: Arrays, *, overwrite: bool = True) -> mfload.Saved:
        """Saves the new checkpoint."""
        path, size = self.path(folder), self.new
        if self.call == "save":
            return mfload.save(
                new, path, max_shard_size=size, checksums=self.summed, overwrite=overwrite
            )
        if self.call == "align":
            return mfload.align(path, overwrite=True)
        if self.call == "verify":
            mfload.verify(path, mode="write", overwrite=overwrite)
            return mfload.Saved((str(path / "model.safetensors"),), 0, 0, 0)
        return mfload.convert(self.source(folder, new), path, max_shard_size=size,
                              overwrite=overwrite)  # fmt: skip

    def again(self, folder: Path, way: str, new: Arrays, third: Arrays, *, overwrite: bool) -> None:
        """Saves once more after a crash, in one of the ways of `AGAIN`.

        Raises:
            AssertionError: Something else lies there then than what was saved.
        """
        if self.call == "align" and mfload.verify(self.path(folder)).manifest is None:
            self = self._replace(sums="")  # The crash took the manifest: it goes before the data.
        if way == "one file":
            self = self._replace(new=None)
            saved = self.save(folder, third)
        else:
            third = third if way == "other arrays" else new
            saved = self.save(folder, third, overwrite=overwrite or third is not new)
        assert check(folder, self, third, third) == "new", way
        final(folder, self, saved)

    def source(self, folder: Path, new: Arrays) -> Path:
        """What is converted, outside of the directory that is written; made once."""
        source = folder.parent / f"source-{self.call}"
        file = source / ("model.npz" if self.call == "convert-npz" else "model.safetensors")
        if not source.exists():
            source.mkdir()
            if self.call == "convert-npz":
                np.savez_compressed(file, **new)
            else:
                mfload.save(new, file)
            if self.summed:
                mfload.verify(file, mode="write")
            if self.call == "convert-model":
                (source / "config.json").write_text('{"keep": true}')
                (source / "tokenizer.json").write_text("{}")
        return source if self.call == "convert-model" else file


SCENARIOS = {
    "nothing-single": Scenario(0, None),
    "nothing-sharded": Scenario(0, 9000),
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
"""Saves of a checkpoint alone."""

CALLS = SCENARIOS | {
    "nothing-deeper": Scenario(0, None, "deep/er/model.safetensors"),
    "nothing-summed": Scenario(0, None, sums="new"),
    "nothing-sharded-summed": Scenario(0, 14000, sums="new"),
    "single-summed": Scenario(None, None, sums="both"),
    "single-summed-first": Scenario(None, None, sums="new"),
    "single-summed-no-more": Scenario(None, None, sums="old"),
    "sharded-summed": Scenario(14000, 14000, sums="both"),
    "sharded-summed-no-more": Scenario(14000, 14000, sums="old"),
    "single-sharded-summed": Scenario(None, 14000, sums="both"),
    "sharded-single-summed": Scenario(14000, None, sums="both"),
    "nothing-converted": Scenario(0, 14000, call="convert-model"),
    "nothing-cut-off": Scenario(0, 14000, cut=0.8),
    "sharded-cut-off": Scenario(14000, 14000, cut=0.8),
    "hub-summed": Scenario(None, None, hub=True, sums="both"),
    "link": Scenario(None, None, "store/w.safetensors", link="to.safetensors"),
    "link-summed": Scenario(None, None, "store/w.safetensors", link="to.safetensors", sums="both"),
    "link-nothing-summed": Scenario(
        0, None, "store/w.safetensors", link="to.safetensors", sums="new"
    ),
    "link-directory": Scenario(14000, None, link="to", sums="both"),
    "verify": Scenario(None, None, call="verify", sums="new"),
    "verify-again": Scenario(None, None, call="verify", sums="both"),
    "align": Scenario(None, None, call="align"),
    "align-summed": Scenario(None, None, call="align", sums="both"),
    "align-sharded": Scenario(14000, None, call="align"),
    "align-sharded-summed": Scenario(14000, None, call="align", sums="both"),
    "convert": Scenario(0, None, call="convert"),
    "convert-sharded": Scenario(0, 14000, call="convert"),
    "convert-single-single": Scenario(None, None, call="convert", sums="old"),
    "convert-sharded-sharded": Scenario(14000, 14000, call="convert"),
    "convert-summed": Scenario(None, None, call="convert-summed", sums="both"),
    "convert-summed-first": Scenario(0, None, call="convert-summed", sums="new"),
    "convert-npz": Scenario(None, None, call="convert-npz", sums="both"),
    "convert-model": Scenario(None, None, call="convert-model"),
}
"""All calls that write a checkpoint, and what lies round it."""

AGAIN = ("the same", "other arrays", "one file")
"""What is saved after a crash: by the same call, and over all that is there."""


def cases(of: Mapping[str, Scenario]) -> list[tuple[str, str]]:
    """Names of scenarios, and the file systems on which they are possible: see `faults.MODES`."""
    return [
        (name, mode)
        for name, scenario in of.items()
        for mode in MODES
        if mode != "no-links" or not scenario.sharded  # What is refused has a test of its own.
    ]


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
        AssertionError: Something is neither old nor new, another file was touched, or a check says
            that something is wrong.
    """
    assert (folder / "config.json").read_text() == '{"keep": true}'
    for blob in folder.parent.glob("blobs/*"):
        assert hashlib.sha256(blob.read_bytes()).hexdigest() == blob.name
    choices = {"new": new} if old is new else {"old": old, "new": new}
    apart = scenario.link or "/" in (scenario.name or "")
    whole = found(scenario.path(folder) if apart else folder, choices)
    assert whole != "nothing" or scenario.old == 0, "nothing is there any more"
    if whole != "nothing":
        # A manifest is of what it lies beside, or there is none.
        seen = mfload.verify(scenario.path(folder) if apart else folder)
        assert seen.ok, f"verify: {seen.problems[0]}"
    if apart:
        return whole
    path = folder / (scenario.name or "model.safetensors")
    index = folder / "model.safetensors.index.json"
    if scenario.old == 0 and scenario.new:
        assert index.exists() == (whole == "new")
    if index.exists():
        assert found(index, choices) == whole
    if path.exists():
        # Whoever names the file may find the new one a little earlier.
        assert found(path, choices) in choices
    return whole


def strays(folder: Path, scenario: Scenario, saved: mfload.Saved) -> set[str]:
    """Relative paths of files that are neither what was saved nor what was never touched.

    Raises:
        AssertionError: Some of these is missing, or the manifest is.
    """
    root = os.path.realpath(folder)
    names = {os.path.relpath(os.path.realpath(file), root) for file in saved.files}
    names |= {"config.json", *filter(None, [scenario.link])}
    if scenario.call == "convert-model":
        names.add("tokenizer.json")
    if scenario.summed:
        seen = mfload.verify(scenario.path(folder), mode="check")
        assert seen.ok, f"verify: {seen.problems[0]}"
        names.add(os.path.relpath(os.path.realpath(str(seen.manifest)), root))
    there = {name for name, node in tree(root)[0].names.items() if node.kind != "directory"}
    assert names <= there, f"missing: {sorted(names - there)}"
    return there - names


def final(folder: Path, scenario: Scenario, saved: mfload.Saved) -> None:
    """Nothing lies there but what was saved, and what was never touched."""
    left = strays(folder, scenario, saved)
    assert not left, f"too many: {sorted(left)}"
