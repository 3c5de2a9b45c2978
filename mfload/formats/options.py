"""What a user asks of a checkpoint's files, checked: alignment, size of shards, metadata."""

from __future__ import annotations

import re
from collections.abc import Mapping
from decimal import Decimal

from mfload import errors
from mfload.formats.safetensors import MAX_HEADER

ALIGN = 4096
"""Multiple of which the data begins where nobody says otherwise: a page, and a disk's sector."""

_SIZE = re.compile(
    r"(?P<number>\d{1,20}(\.\d{1,20})?)\s*((?P<unit>[KMGTP])(?P<binary>I)?)?B?",
    re.ASCII | re.IGNORECASE,
)


def check_align(align: object) -> int:
    """The argument `align=`, checked.

    Raises:
        UsageError: It is no power of two, less than 8, or more than a header may be long.
    """
    if isinstance(align, bool) or not hasattr(align, "__index__"):
        raise _no_align(align)
    value = int(align)  # pyright: ignore
    if not 8 <= value <= MAX_HEADER or value & (value - 1):
        raise _no_align(align)
    return value


def _no_align(found: object) -> errors.UsageError:
    wanted = f"a power of two from 8 to {1 << (MAX_HEADER.bit_length() - 1)} (bytes)"
    return errors.UsageError("align", expected=wanted, found=repr(found))


def shard_limit(size: object) -> int | None:
    """The argument `max_shard_size=`, in bytes.

    Args:
        size: Bytes, or a number and a unit: "5GB" is decimal, "500MiB" binary. None for no limit.

    Raises:
        UsageError: It is no size, or none above zero.
    """
    if size is None:
        return None
    found = 0
    if isinstance(size, str):
        match = _SIZE.fullmatch(size.strip())
        if match is not None:
            base = 1024 if match["binary"] else 1000
            power = " KMGTP".index((match["unit"] or " ").upper())
            found = int(Decimal(match["number"]) * base**power)
    elif hasattr(size, "__index__") and not isinstance(size, bool):
        found = int(size)  # pyright: ignore
    if found < 1:
        wanted = 'bytes above 0, or such as "5GB" or "500MiB"'
        raise errors.UsageError("max_shard_size", expected=wanted, found=repr(size))
    return found


def checked_metadata(metadata: object) -> dict[str, str]:
    """The metadata, by name, as a reader will take it.

    Raises:
        UsageError: It is no mapping of strings to strings, or one has half of a surrogate pair.
    """
    if not isinstance(metadata, Mapping):
        raise errors.UsageError("metadata", expected="{str: str}", found=repr(metadata))
    for text in (*metadata.keys(), *metadata.values()):
        if not encodable(text):
            raise errors.UsageError(
                "metadata", expected="strings that UTF-8 can spell", found=repr(text)
            )
    return {key: metadata[key] for key in sorted(metadata)}


def encodable(text: object) -> bool:
    """Whether it is a string that UTF-8 can spell."""
    if not isinstance(text, str):
        return False
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
