"""Where the results of a bench may be written: told before minutes are spent, not after."""

from __future__ import annotations

import importlib.util
import json
import os
import stat
from collections.abc import Sequence
from pathlib import Path

from mfload import errors

_RESERVED = (".safetensors", ".safetensors.index.json")
_MOST_BYTES = 256 << 20
"""Largest file that is read to see whether it is an earlier result."""


def check(target: Path, files: Sequence[str]) -> None:
    """Refuses what could not be written, or is of a checkpoint.

    Args:
        target: Where something is to be written.
        files: The files of the checkpoint that is measured.

    Raises:
        SourceError: It can't be written.
        UsageError: It is a file of a checkpoint, or named like one.
    """
    folder = target.absolute().parent
    if not folder.is_dir():
        raise errors.SourceNotFoundError("there is no such directory to write to", file=folder)
    there = target.exists()
    if target.is_dir() or not os.access(target if there else folder, os.W_OK):
        raise errors.SourcePermissionError("can't be written", file=target)
    if there and any(os.path.exists(file) and target.samefile(file) for file in files):
        raise errors.UsageError("this is a file of the checkpoint", file=target)
    # A link's own name may say less than that of what it leads to.
    if any(path.name.lower().endswith(_RESERVED) for path in (target, target.resolve())):
        raise errors.UsageError(
            "results are not written under the name of a checkpoint's file", file=target
        )


def check_json(target: Path) -> None:
    """Refuses to replace what is no earlier result.

    Raises:
        SourceError: What is there can't be read.
        UsageError: It is something else.
    """
    if not target.exists():
        return
    try:
        status = target.stat()
        kept = status.st_size > 0 if stat.S_ISREG(status.st_mode) else target.is_block_device()
        if kept and not _is_result(target, status.st_size):
            raise errors.UsageError(
                "something else is there, and it is kept",
                file=target,
                expected="a new name, or the JSON of an earlier bench",
            )
    except OSError as error:
        raise errors.from_os(error, target, "read") from error


def _is_result(target: Path, size: int) -> bool:
    if target.is_block_device() or size > _MOST_BYTES:
        return False
    try:
        found = json.loads(target.read_bytes())
    except (ValueError, RecursionError):
        return False
    return isinstance(found, dict) and {"machine", "run", "samples"} <= found.keys()


def check_picture(target: Path) -> None:
    """Refuses a picture that can't be drawn.

    Raises:
        FrameworkMissingError: There is no matplotlib.
        UsageError: It knows no such format.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise errors.FrameworkMissingError(
            "the plot needs matplotlib; pip install 'mfload[bench]'",
            expected="matplotlib",
            found="no such module",
        )
    from matplotlib.backend_bases import FigureCanvasBase

    known = FigureCanvasBase.get_supported_filetypes()
    if target.suffix[1:].lower() not in known:
        expected = " | ".join(f".{each}" for each in sorted(known))
        found = target.suffix or "no suffix"
        raise errors.UsageError(
            "unknown format of a picture", file=target, expected=expected, found=found
        )
