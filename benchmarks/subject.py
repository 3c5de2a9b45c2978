"""What is measured: files, and what must be found in them."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass

from mfload.bench.ceilings import ByteRange


def whole(paths: Iterable[str]) -> list[ByteRange]:
    """Files from their first byte to their last."""
    return [ByteRange(path, 0, os.stat(path).st_size) for path in paths]


@dataclass(frozen=True, slots=True)
class Subject:
    """What every loader and ceiling is given.

    Attributes:
        path: What a user gave.
        files: The files of it.
        extents: The bytes that a ceiling reads.
        nbytes: Bytes of tensor data.
        tensors: Number of tensors.
        names: The tensors, None for all.
        page_sum: Sum of bytes 0, 4096, … of each tensor, None where it is not known.
        file_sum: The same of each extent.
    """

    path: str | list[str]
    files: list[str]
    extents: list[ByteRange]
    nbytes: int
    tensors: int
    names: list[str] | None = None
    page_sum: int | None = None
    file_sum: int | None = None
