"""What cuFile means by its errors, and what to do about each.

Numbers and wording are those of cufile.h 1.20; kvikio passes on the wording alone.
"""

from __future__ import annotations

import errno
import os
import re
from typing import NamedTuple

from mfload import errors


class Meaning(NamedTuple):
    """One error of cuFile.

    Attributes:
        says: Its wording, or how that begins.
        advice: What to do.
        file: Whether the file is to blame; else the device, its driver or a limit of them.
    """

    says: str
    advice: str
    file: bool = False


_LOAD = "load nvidia-fs, or set use_pci_p2pdma in cufile.json where kernel and driver have P2PDMA"
_VOLUME = (
    "files of a container's own layers (overlayfs) can't be registered: mount a volume for the "
    "weights"
)
MEANINGS = {
    5001: Meaning("nvidia-fs driver is not loaded", _LOAD),
    5004: Meaning(
        "nvidia-fs driver version mismatch", "update nvidia-fs and libcufile to one release"
    ),
    5007: Meaning(
        "GPUDirect Storage not supported on current platform",
        "WSL and most virtual machines have none of it",
    ),
    5008: Meaning(
        "GPUDirect Storage not supported on current file",
        "its disk or file system has no way to the GPU: local NVMe with ext4 or xfs has, with "
        "nvidia-fs or P2PDMA",
        file=True,
    ),
    5009: Meaning("GPUDirect Storage not supported on current GPU", "data-center cards have it"),
    5010: Meaning("nvidia-fs driver ioctl error", "see dmesg for lines of nvidia-fs"),
    5016: Meaning(
        "access beyond maximum pinned size",
        "processes on one GPU share what can be pinned (BAR1): fewer of them at once, or a greater "
        "max_device_pinned_mem_size_kb in cufile.json",
    ),
    5018: Meaning("unsupported file type", _VOLUME, file=True),
    5025: Meaning("driver or file access error", "see the rights on /dev/nvidia-fs*", file=True),
    5027: Meaning("file descriptor is not registered", _VOLUME, file=True),
    5030: Meaning("internal error", _VOLUME, file=True),
    5033: Meaning("NVFS driver initialization error", "see dmesg for lines of nvidia-fs"),
    5034: Meaning(
        "GPUDirect Storage disabled by config on current file", "see cufile.json", file=True
    ),
    5036: Meaning(
        "failed to allocate pinned GPU Memory", "the GPU's memory or its BAR1 is used up"
    ),
}
"""Those that are met in practice, by their number."""

_NUMBER = re.compile(r"\b(50[0-5]\d)\b")


def code(text: str) -> int | None:
    """The number of the error that a message speaks of, None where it is none of `MEANINGS`."""
    for found in _NUMBER.findall(text):
        if int(found) in MEANINGS:
            return int(found)
    # After "cuFile error at: file:line: "; some wordings are parts of others.
    says = text.rsplit(": ", 1)[-1].strip()
    return next((n for n, each in MEANINGS.items() if says.startswith(each.says)), None)


def translate(error: Exception, file: str | None, action: str) -> errors.MfloadError:
    """The error to raise for one of kvikio's.

    Args:
        error: What kvikio raised.
        file: The path concerned, None for none.
        action: What was being done, for the message ("open", "read").
    """
    text = str(error) or type(error).__name__
    number = code(text)
    if number is not None:
        meaning = MEANINGS[number]
        what = f"cuFile could not {action}: {meaning.says} ({number}): {meaning.advice}"
        what += "; engine='pinned' reads without cuFile"
        kind = errors.SourceError if meaning.file else errors.DeviceError
        return kind(what, file=file)
    for failed in (errno.EIO, errno.ENOSPC, errno.EACCES, errno.ENOENT, errno.EPERM):
        if file is not None and os.strerror(failed) in text:
            return errors.from_os(OSError(failed, os.strerror(failed)), file, action)
    if file is None or "CUDA" in text:
        return errors.DeviceError(f"cuFile could not {action}: {text}", file=file)
    return errors.ReadError(f"cuFile could not {action}: {text}", file=file)
