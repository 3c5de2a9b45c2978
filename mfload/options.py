"""`mfload.Options`: how a checkpoint is loaded, the same object for every call."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from mfload import errors
from mfload.runtime import Deadline

Engine = Literal["auto", "mmap", "pread", "direct", "pinned", "gds"]
Allocator = Literal["auto", "mfload", "framework"]
Exchange = Literal["auto", "never", "once"]
Unmatched = Literal["replicate", "error"]
ENGINES: tuple[str, ...] = get_args(Engine)
ALLOCATORS: tuple[str, ...] = get_args(Allocator)
EXCHANGES: tuple[str, ...] = get_args(Exchange)
UNMATCHED: tuple[str, ...] = get_args(Unmatched)
_CHOICES = {"engine": ENGINES, "allocator": ALLOCATORS, "exchange": EXCHANGES}

OVERHEAD = 256 << 20
"""Default of both memory limits, in bytes beside the result."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How a checkpoint is loaded. Every field is validated when the object is made.

    Attributes:
        engine: How bytes are read. "pread" reads through the page cache, "direct" past it
            (O_DIRECT), "mmap" maps the file privately and copies nothing: a file truncated later
            kills the process that touches it. "auto" takes pread where the page cache holds the
            file, else direct. Onto a CUDA device: "pinned" (through page-locked memory) or "gds"
            (through cuFile); "pread" and "direct" say how pinned memory is filled, and with "mmap"
            the framework copies from the map.
        allocator: Whose memory holds the arrays: "mfload", "framework" (JAX can donate such
            arrays), or "auto": mfload's on the host; on a CUDA device XLA's pool for JAX, the
            framework's own for TensorFlow and Paddle, mfload's for PyTorch and CuPy.
        exchange: Whether processes read for each other. "never": each reads its own shards;
            "once": every byte is read by one process and sent on; "auto": decided by how many
            bytes would be read more than once.
        threads: Number of reader threads. Default: chosen from the cores and the engine.
        timeout: Seconds after which a call raises LoadTimeoutError. Default: never.
        max_host_overhead: Bytes of host memory beside the result, as a number or a text such as
            "256MiB". Default: 256 MiB, or one tensor where a framework must copy a larger one.
        max_device_overhead: The same for the memory of each device.

    Raises:
        UsageError: A value is invalid.
    """

    engine: Engine = "auto"
    allocator: Allocator = "auto"
    exchange: Exchange = "auto"
    threads: int | None = None
    timeout: float | None = None
    max_host_overhead: int | str | None = None
    max_device_overhead: int | str | None = None

    def __post_init__(self) -> None:
        for name, known in _CHOICES.items():
            if getattr(self, name) not in known:
                check_choice(name, getattr(self, name), known)
        if self.threads is not None:
            _check_count("threads", self.threads, 1)
        if self.timeout is not None:
            Deadline(self.timeout)
        for name in ("max_host_overhead", "max_device_overhead"):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, byte_count(name, value, 0))


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions(Options):
    """Options of one call.

    Attributes:
        deadline: When `timeout` has run out.
        merge_gap: Unwanted bytes that are read over rather than skipped. Default: the source's.
        by_host: Whether all arrays pass through host memory.
    """

    max_host_overhead: int | None = None
    max_device_overhead: int | None = None
    deadline: Deadline = field(default_factory=lambda: Deadline(None))
    merge_gap: int | None = None
    by_host: bool = False

    @property
    def lands_on_devices(self) -> bool:
        """Whether arrays may land in device memory directly."""
        return not self.by_host and self.engine != "mmap"


def started(options: Options | None, deadline: Deadline | None = None) -> LoadOptions:
    """The options of a call that begins now, or began with `deadline`."""
    if options is None:
        return LoadOptions(deadline=deadline or Deadline(None))
    if not isinstance(options, Options):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise errors.UsageError(
            "options must be an mfload.Options",
            expected="options=mfload.Options(engine=…, threads=…, …)",
            found=repr(options),
        )
    given = {name: getattr(options, name) for name in Options.__dataclass_fields__}
    return LoadOptions(**given, deadline=deadline or Deadline(options.timeout))


def check_choice(name: str, value: object, known: tuple[str, ...]) -> None:
    """Raises UsageError, with a close name, for a value that is not among the known ones."""
    if value not in known:
        meant = errors.did_you_mean(value, known) if isinstance(value, str) else ""
        raise errors.UsageError(f"unknown {name}{meant}", expected=" | ".join(known), found=value)


def _check_count(name: str, value: object, least: int) -> None:
    # NumPy's integers count; booleans are ints by accident.
    if isinstance(value, bool) or not hasattr(value, "__index__") or value < least:  # pyright: ignore
        raise errors.UsageError(
            f"{name} must be {least} or more", expected="a whole number", found=repr(value)
        )


_UNITS = {"": 1}
for _n, _prefix in enumerate("kmgtp", 1):
    _UNITS[_prefix], _UNITS[f"{_prefix}i"] = 1000**_n, 1024**_n
_SIZE = re.compile(r"(\d{1,99}(?:\.\d{1,99})?)\s*([kmgtp]?i?)b?", re.IGNORECASE | re.ASCII)


def byte_count(name: str, value: Any, least: int) -> int:
    """Bytes that an argument gives, as a whole number or as a size; `least` or more."""
    number = size(value, name) if isinstance(value, str) else value
    _check_count(name, number, least)
    return int(number)


def size(text: str, name: str = "value") -> int:
    """Bytes of a size such as "4096", "256MiB", "1.5GB" or "64k"; units with an i are binary."""
    match = _SIZE.fullmatch(text.strip())
    if match is None or match[2].lower() not in _UNITS:
        raise errors.UsageError(
            f"{name} is not a size", expected="bytes, or a size as 256MiB or 1.5GB", found=text
        )
    whole, _, part = match[1].partition(".")
    unit = _UNITS[match[2].lower()]
    return int(whole) * unit + (int(part) * unit // 10 ** len(part) if part else 0)
