"""Checkpoints as Orbax writes them, in each of its layouts."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp
import orbax.checkpoint.experimental.v1 as ocp_v1


def _handler(**how: Any) -> Callable[[Path, Any], None]:
    def save(path: Path, state: Any) -> None:
        handler = ocp.PyTreeCheckpointHandler(**how)
        with ocp.Checkpointer(handler) as checkpointer:
            checkpointer.save(path, ocp.args.PyTreeSave(state))

    return save


def _standard(path: Path, state: Any) -> None:
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, state)


def _v1(path: Path, state: Any) -> None:
    ocp_v1.save_pytree(path, state)


def _v1_raw(path: Path, state: Any) -> None:
    context = ocp_v1.Context()
    context.array_options.saving.use_compression = False
    with context:
        ocp_v1.save_pytree(path, state)


SAVERS: dict[str, Callable[[Path, Any], None]] = {
    "standard": _standard,
    "pytree": _handler(),
    "zarr3": _handler(use_zarr3=True),
    "files": _handler(use_ocdbt=False),
    "files-zarr3": _handler(use_ocdbt=False, use_zarr3=True),
    "raw": _handler(use_compression=False),
    "raw-zarr3": _handler(use_compression=False, use_zarr3=True),
    "v1": _v1,
    "v1-raw": _v1_raw,
}


def save(name: str, path: Path, state: Any) -> None:
    """Saves a state by one of the savers."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        SAVERS[name](path, state)


def manager(path: Path, **options: Any) -> Any:
    """A manager of steps."""
    return ocp.CheckpointManager(path, options=ocp.CheckpointManagerOptions(**options))
