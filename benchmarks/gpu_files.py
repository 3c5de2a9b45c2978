"""The checkpoints of a run: written when first asked for, and how large they may be."""

from __future__ import annotations

import os
import select
import shutil
import subprocess
import sys
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks import ROOT
from benchmarks.checkpoint import Checkpoint, write_experts, write_llama, write_single
from benchmarks.gpu_memory import HOST
from benchmarks.gpu_steps import TENSORS
from benchmarks.process import environment
from benchmarks.subject import Subject, whole
from mfload.io import probes

GIB = 1 << 30
_READY = 60.0
"""Seconds until a seed must have loaded."""


def room(folder: Path, gpu: dict[str, Any]) -> tuple[float, str]:
    """The bytes that a checkpoint may have, and what limits it."""
    found = probes.memory_room()
    limits = {"disk": shutil.disk_usage(folder).free * 0.3}
    if found is not None:
        limits[found[1]] = found[0] * 0.25
    if gpu:
        limits["device memory"] = gpu["memory"] * 0.15
    what, most = min(limits.items(), key=lambda pair: pair[1])
    return most, what


class Files:
    """Checkpoints by the names that steps have for them.

    Args:
        folder: Where they are written.
        seed: What they follow from.
        nbytes: Of the largest.
        env: What processes are run with.
        noted: Called with a name and what is told of it.
    """

    def __init__(
        self,
        folder: Path,
        seed: int,
        nbytes: int,
        env: Mapping[str, str],
        noted: Callable[[str, dict[str, Any]], None],
    ) -> None:
        self._folder, self._seed, self._nbytes, self._noted = folder, seed, nbytes, noted
        self._env = env
        self._made: dict[str, Subject] = {}

    def get(self, name: str) -> Subject:
        """A checkpoint: `large`, `many`, `single` or `model`."""
        if name not in self._made:
            into = self._folder / name
            if name == "model":
                self._made[name] = self._model(into)
            else:
                self._made[name] = self._written(name, into)
        return self._made[name]

    @contextmanager
    def lent(self, name: str, device: str) -> Generator[Subject]:
        """A checkpoint for a step; `served` is the large one, held by a seed on the device."""
        if name != "served":
            yield self.get(name)
            return
        large = self.get("large")
        command = [sys.executable, "-P", "-m", "mfload", "serve", str(self._folder / "large")]
        command += ["--model", "benchmark", "--no-checksums"]
        command += [] if device == HOST else ["--device", device]
        env = environment(self._env, [str(ROOT)])
        seed = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
        )
        assert seed.stdout is not None
        try:
            ready = select.select([seed.stdout], [], [], _READY)[0]
            url = seed.stdout.readline().strip() if ready else ""
            yield replace(large, path=url or "no seed")
        finally:
            seed.kill()
            seed.communicate()

    def _written(self, name: str, into: Path) -> Subject:
        half = self._nbytes // 2
        made: Checkpoint
        if name == "large":
            made = write_llama(into, self._seed, self._nbytes)
        elif name == "many":
            made = write_experts(into, self._seed, min(TENSORS, max(1, half // 4096)), half)
        else:
            made = write_single(into, self._seed, half)
        self._noted(name, {
            "nbytes": made.nbytes, "tensors": made.tensors, "files": len(made.paths),
            "starts": list(made.starts), "drawn": made.drawn,
        })  # fmt: skip
        return made.subject()

    def _model(self, into: Path) -> Subject:
        code = "import sys; from pathlib import Path; from benchmarks import seams; "
        code += "seams.write(Path(sys.argv[1]), float(sys.argv[2]))"
        command = [sys.executable, "-c", code, str(into), str(self._nbytes / 4e9)]
        subprocess.run(command, cwd=ROOT, env=environment({}, [str(ROOT)]), check=True)
        files = sorted(map(str, into.glob("*.safetensors")))
        nbytes = sum(map(os.path.getsize, files))
        about = f"transformers' Llama in {len(files)} files"
        self._noted("model", {"nbytes": nbytes, "tensors": 0, "files": len(files), "starts": [],
                              "drawn": about})  # fmt: skip
        return Subject(files, files, whole(files), nbytes, 0)
