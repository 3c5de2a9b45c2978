"""Ways to save while the program goes on; each measured in a process of its own."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.tasks import Found, Job, Task

LABELS = {
    "mfload-torch": "mfload.save, torch",
    "mfload-torch-first": "mfload.save(background=True), torch, first",
    "mfload-torch-later": "mfload.save(background=True), torch, later",
    "dcp-torch-first": "torch.distributed.checkpoint.async_save, first",
    "dcp-torch-later": "torch.distributed.checkpoint.async_save, later",
    "mfload-jax": "mfload.save, jax",
    "mfload-jax-first": "mfload.save(background=True), jax, first",
    "mfload-jax-later": "mfload.save(background=True), jax, later",
    "orbax-jax-first": "orbax AsyncCheckpointer, jax, first",
    "orbax-jax-later": "orbax AsyncCheckpointer, jax, later",
}
"""Every task, in the order of the tables."""
WRITTEN = "written-seconds"
"""The file beside the checkpoint that says when it was written, in seconds from the call."""

Begin = Callable[[dict[str, Any], str], Callable[[], object]]
"""Begins to save arrays to a path; what it returns waits for the end."""


class _Saving:
    """Saves arrays that are in the framework's own memory before the clock starts.

    Args:
        framework: Whose.
        begin: Begins to save.
        later: Whether the process has saved the same before.
    """

    def __init__(self, framework: Any, begin: Begin, *, later: bool) -> None:
        self._framework, self._begin, self._later = framework, begin, later
        self._arrays: dict[str, Any] | None = None
        self._nbytes, self._started = 0, 0.0

    def prepare(self, job: Job) -> None:
        """Load what is to be saved, and save it once if it is to be saved again."""
        import mfload

        loaded: Any = mfload.load(job["files"], framework=self._framework)
        # Copies: as a framework lays its arrays out, not as mfload does.
        own = "clone" if self._framework == "torch" else "copy"
        self._arrays = {name: getattr(array, own)() for name, array in loaded.items()}
        self._nbytes = sum(array.nbytes for array in self._arrays.values())
        del loaded
        if self._later:
            path = f"{_target(job)}-before"
            self._begin(self._arrays, path)()
            _remove(path)
        os.sync()

    def run(self, job: Job) -> tuple[str, Callable[[], object]]:
        """Begin to save it."""
        if self._arrays is None:  # The tiny one, before anything is prepared.
            self.prepare(job)
        assert self._arrays is not None
        path = _target(job)
        self._started = time.perf_counter()
        return path, self._begin(self._arrays, path)

    def find(self, made: tuple[str, Callable[[], object]]) -> Found:
        """Wait for the end, note it, and look at the size."""
        path, wait = made
        wait()
        took = time.perf_counter() - self._started
        Path(path).with_name(WRITTEN).write_text(str(took), "utf-8")
        files = Path(path).rglob("*") if os.path.isdir(path) else [Path(path)]
        written = sum(file.stat().st_size for file in files)
        nbytes, self._arrays = self._nbytes, None
        _remove(path)
        if written < nbytes * 0.5:  # Orbax compresses.
            raise RuntimeError(f"{written} bytes of {nbytes} were written")
        return Found(None, [])


def _target(job: Job) -> str:
    return str(Path(job["files"][0]).parent / f"written-{os.getpid()}")


def _remove(path: str) -> None:
    if os.path.isdir(path):
        shutil.rmtree(path)
    else:
        os.unlink(path)


def _mfload(arrays: dict[str, Any], path: str, *, background: bool) -> Callable[[], object]:
    import mfload

    saved = mfload.save(arrays, path, background=background)
    return saved.result if isinstance(saved, mfload.PendingSave) else lambda: saved


def _dcp(arrays: dict[str, Any], path: str) -> Callable[[], object]:
    import torch.distributed.checkpoint as dcp

    return dcp.async_save(arrays, checkpoint_id=path, no_dist=True).result


def _orbax() -> Begin:
    import orbax.checkpoint as ocp

    checkpointer = ocp.AsyncCheckpointer(ocp.StandardCheckpointHandler())

    def begin(arrays: dict[str, Any], path: str) -> Callable[[], object]:
        checkpointer.save(path, args=ocp.args.StandardSave(arrays))
        return checkpointer.wait_until_finished

    return begin


def find(name: str) -> Task:
    """The task of a name."""
    library, framework, *when = name.split("-")
    if library == "mfload":
        begin: Begin = partial(_mfload, background=bool(when))
    else:
        begin = _dcp if library == "dcp" else _orbax()
    made = _Saving(framework, begin, later=when == ["later"])
    return Task(made.run, made.find, made.prepare)
