"""What is wrong with a checkpoint; one that is sound does without this module."""

from __future__ import annotations

from typing import NamedTuple

from mfload import errors


class Problem(NamedTuple):
    """Something that is wrong with a checkpoint."""

    what: str
    file: str | None = None
    tensor: str | None = None
    expected: object = None
    found: object = None

    @staticmethod
    def of(error: errors.MfloadError) -> Problem:
        """An error as a problem."""
        values = [
            value if isinstance(value, int | None) else str(value)
            for value in (error.expected, error.found)
        ]
        return Problem(error.message, error.file, error.tensor, *values)

    def __str__(self) -> str:
        what, file, tensor, expected, found = self
        return str(
            errors.MfloadError(what, file=file, tensor=tensor, expected=expected, found=found)
        )
