"""What happens to bytes between the read and their place, where a plain copy won't do."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from mfload.stored import Encoding


class Copy(NamedTuple):
    """How a segment's elements get from a slot to their place when plain bytes won't do.

    Attributes:
        strides: Bytes between elements in the slot, for each dim; may be negative.
        start: Byte of the first element, counted from the segment's offset.
        target: Element type as delivered. If the two differ, values are converted.
        checked: Whether a value that the target can't hold stops the load.
        tensor: Its name, for the error of such a value.
        into: Bytes between elements in their place; may be negative. Default: C order.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    start: int
    source: np.dtype[Any]
    target: np.dtype[Any]
    checked: bool = False
    tensor: str | None = None
    into: tuple[int, ...] | None = None


class Decode(NamedTuple):
    """How the bytes of a block become those that its segments are cut from.

    Attributes:
        tensor: Its name, for errors.
        encodings: What decodes them, step by step.
        fetched: Bytes that are fetched at once, at most.
        window: Bytes of memory for a segment that can't be decoded straight into its place.
        inline: The bytes, if the header held them.
    """

    tensor: str
    encodings: tuple[Encoding, ...]
    fetched: int
    window: int
    inline: bytes | None = None

    @property
    def held(self) -> int:
        """Bytes that a reader holds, at most, for what it fetches and for the window."""
        return (0 if self.inline is not None else self.fetched) + self.window
