"""Whether a device converts numbers as NumPy does: it converts samples, and bits are compared."""

from __future__ import annotations

import contextlib
import logging
from typing import Any

import numpy as np

from mfload.cuda.device import Device, Rows
from mfload.io import buffers
from mfload.planning.steps import Copy

_log = logging.getLogger("mfload")
_SPREAD = 1 << 16


def agrees(device: Device, source: np.dtype[Any], target: np.dtype[Any]) -> bool:
    """Whether all results are NumPy's, whichever NaN becomes which.

    Tried forwards and backwards through memory. A device that can't convert is logged, and is a no:
    the host converts then.
    """
    try:
        given = numbers(source)
        with np.errstate(all="ignore"):
            wanted = given.astype(target), given[::-1].astype(target)
        return all(map(same, _converted(device, given, target), wanted))
    except Exception as error:  # noqa: BLE001 - compilers, headers, drivers: each has its own.
        # As text: an error that a log keeps would keep the memory that was tried.
        _log.info("%s does not convert %s to %s: %s", device.name, source, target, str(error))
        return False


def numbers(dtype: np.dtype[Any]) -> Any:
    """Values to try: all of them up to 16 bits, else a spread.

    The spread has numbers that narrower types hold, those halfway between, the neighbours of both
    (where rounding errs), zeros, infinities, NaN, subnormals, and integers of any length.
    """
    if dtype == np.bool_:
        return np.array([False, True])
    if dtype.kind == "c":
        parts = numbers(np.dtype(f"f{dtype.itemsize // 2}"))
        return np.stack([parts, np.roll(parts, 7)], -1).reshape(-1).view(dtype)
    width = 8 * dtype.itemsize
    if width <= 16:
        return np.arange(1 << width, dtype=f"u{dtype.itemsize}").view(dtype)
    chance = np.random.default_rng(0)
    bits = chance.integers(0, 1 << width, _SPREAD, np.uint64)
    cleared = chance.integers(0, width, _SPREAD).astype(np.uint64)
    # A number that a type with fewer bits holds is halfway between two of one with fewer still.
    short = bits >> cleared << cleared
    one = np.uint64(1)
    found = np.concatenate([bits, short, short + one, short - one])
    if dtype.kind != "f":
        small = bits >> cleared
        found = np.concatenate([found, small, np.uint64(0) - small])
    return found.astype(f"u{dtype.itemsize}").view(dtype)


def same(made: Any, right: Any) -> bool:
    """Whether two arrays have the same bits except in NaN."""
    if made.dtype.kind == "c":
        part = f"f{made.dtype.itemsize // 2}"
        made, right = made.view(part), right.view(part)
    unlike = made.view(f"u{made.dtype.itemsize}") != right.view(f"u{made.dtype.itemsize}")
    with np.errstate(invalid="ignore"):  # ml_dtypes warns where NaN is compared.
        return not (unlike & ((right == right) | (made == made))).any()


def _converted(device: Device, given: Any, target: np.dtype[Any]) -> list[Any]:
    """What the device makes of the values, in order and in reverse."""
    stage = buffers.allocate(given.nbytes)
    stage[:] = given.view(np.uint8)
    unit, count = given.itemsize, given.size
    here, there = device.allocate(given.nbytes), device.allocate(count * target.itemsize)
    made = [np.empty(count, target), np.empty(count, target)]
    device.pin(stage)
    try:
        with contextlib.closing(device.stream()) as stream:
            stream.copy_in(here, 0, stage, Rows.one(given.nbytes))
            for back, start, step in (made[0], 0, unit), (made[1], (count - 1) * unit, -unit):
                copy = Copy((count,), (step,), start, given.dtype, target)
                stream.convert(there, 0, here, 0, copy)
                stream.copy_out(back.view(np.uint8), there, 0)
            stream.synchronize()
    finally:
        device.unpin(stage)
    return made
