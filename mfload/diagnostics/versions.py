"""Versions of the frameworks against those that mfload is tested with."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple

from mfload.diagnostics.findings import Finding


class Tested(NamedTuple):
    """What mfload is tested with.

    Attributes:
        packages: Names of the distributions, of which one is installed.
        oldest: The oldest that is accepted.
        newest: The newest that the tests ran with.
    """

    packages: tuple[str, ...]
    oldest: str
    newest: str


TESTED = {
    "numpy": Tested(("numpy",), "2.0", "2.5"),
    "jax": Tested(("jax",), "0.5.3", "0.11"),
    "torch": Tested(("torch",), "2.4", "2.13"),
    "tensorflow": Tested(("tensorflow", "tensorflow-cpu"), "2.19", "2.21"),
    "paddle": Tested(("paddlepaddle", "paddlepaddle-gpu"), "3.0", "3.3"),
    "cupy": Tested(("cupy-cuda13x", "cupy-cuda12x", "cupy"), "14.2", "14.2"),
}
"""As docs/dtypes.md has them, which is checked."""


def look() -> Iterator[Finding]:
    """Findings about installed frameworks; imports none."""
    for name, tested in TESTED.items():
        found = _installed(tested.packages)
        if found is None:
            yield Finding("frameworks", name, "not installed")
        elif _numbers(found) < _numbers(tested.oldest):
            advice = f"mfload needs {tested.oldest} or newer"
            yield Finding("frameworks", name, found, "trouble", advice, found)
        elif _numbers(found)[:2] > _numbers(tested.newest):
            advice = f"newer than what is tested, up to {tested.newest}"
            yield Finding("frameworks", name, found, "note", advice, found)
        else:
            yield Finding("frameworks", name, found, data=found)


def _installed(packages: tuple[str, ...]) -> str | None:
    for package in packages:
        try:
            return version(package)
        except PackageNotFoundError:
            continue
    return None


def _numbers(text: str) -> tuple[int, ...]:
    numbers: list[int] = []
    for part in text.split("+")[0].split("."):
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        numbers.append(int(digits))
    return tuple(numbers)
