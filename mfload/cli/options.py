"""The options that commands share, and what a shell offers for them when the tab key is pressed."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable
from typing import Annotated, Any

import typer

from mfload import errors
from mfload.options import ALLOCATORS, ENGINES, size

_MOST_NAMES = 200


def offered(*choices: str) -> Callable[[str], list[str]]:
    """Completes one of a few words."""
    return lambda incomplete: [each for each in choices if each.startswith(incomplete)]


def _offered_dtypes(incomplete: str) -> list[str]:
    from mfload.dtypes import TABLE

    before, equals, begun = incomplete.rpartition("=")
    names = sorted({alias for row in TABLE.values() for alias in row.aliases[:1]})
    return [before + equals + name for name in names if name.startswith(begun)]


def _offered_names(incomplete: str) -> list[str]:
    from mfload.formats import checkpoint

    # The parser gives up on an option without its value, so it knows no path by now. These are
    # the variables in which shells hand over the line.
    line = os.environ.get("_TYPER_COMPLETE_ARGS") or os.environ.get("COMP_WORDS", "")
    try:
        path = next(word for word in shlex.split(line)[2:] if os.path.exists(word))
        index, _ = checkpoint.read(path)
    except Exception:  # noqa: BLE001  A shell that waits for the tab key wants no error.
        return []
    names = (name for name in index if name.startswith(incomplete) and name.isprintable())
    return [re.escape(name) for name in names][:_MOST_NAMES]


def _size(value: Any) -> int:
    # Typer hands a default through the parser as well.
    try:
        return value if isinstance(value, int) else size(value)
    except errors.UsageError as error:
        raise typer.BadParameter(f"{error.found!r} is no size: {error.expected}") from None


def option(metavar: str, text: str, *names: str, offers: Any = None) -> Any:
    """An option with a value; `offers` has what the tab key completes."""
    complete = offered(*offers) if isinstance(offers, tuple) else offers
    return typer.Option(*names, metavar=metavar, help=text, autocompletion=complete)


def sized(name: str, text: str) -> Any:
    """An option that takes a size such as 4096, 256MiB or 1.5GB."""
    return typer.Option(name, metavar="SIZE", parser=_size, help=text)


def flag(text: str, *names: str) -> Any:
    """An option without a value."""
    return typer.Option(*names, help=text)


def argument(metavar: str, text: str) -> Any:
    """What is given without the name of an option."""
    return typer.Argument(metavar=metavar, help=text, show_default=False)


_PATH = "A .safetensors file, a directory, or a .safetensors.index.json."
_FRAMEWORKS = ("numpy", "jax", "torch", "tensorflow", "paddle", "cupy")
_FRAMEWORK = "numpy, jax, torch, tensorflow, paddle or cupy."
_DEVICE = (
    "Such as cpu:1 or cuda:0; the framework's own default. Given several times, all tensors go to "
    "all of them, or with a REGEX those whose names match."
)
_NAMES = "Only tensors with a match of this regular expression in their names."
_DTYPE = (
    "Convert floats to this dtype, or the tensors whose names match to theirs; may be given "
    "several times."
)
_ENGINE = "auto, pread, direct or mmap; onto GPUs pinned or gds as well."
_ALLOCATOR = "Whose memory holds the arrays: auto, mfload or framework."
_HOST = "Host memory beside the result, such as 256MiB."
_GPU = "Memory of a GPU beside the result, such as 256MiB."
_THREADS = "Number of reader threads. Default: chosen."

Checkpoint = Annotated[str, argument("PATH", _PATH)]
Framework = Annotated[str, option("NAME", _FRAMEWORK, "--framework", "-f", offers=_FRAMEWORKS)]
Device = Annotated[list[str] | None, option("[REGEX=]DEVICE", _DEVICE, "--device")]
Names = Annotated[str | None, option("REGEX", _NAMES, offers=_offered_names)]
Dtypes = Annotated[
    list[str] | None, option("[REGEX=]DTYPE", _DTYPE, "--dtype", offers=_offered_dtypes)
]
Engine = Annotated[str, option("NAME", _ENGINE, offers=ENGINES)]
Allocator = Annotated[str, option("NAME", _ALLOCATOR, offers=ALLOCATORS)]
HostOverhead = Annotated[int | None, sized("--max-host-overhead", _HOST)]
DeviceOverhead = Annotated[int | None, sized("--max-device-overhead", _GPU)]
Threads = Annotated[int | None, option("N", _THREADS)]
Timeout = Annotated[float | None, option("SECONDS", "Give up after that long.")]
Overwrite = Annotated[bool, flag("Replace what is there already.", "--overwrite")]
Json = Annotated[bool, flag("Print JSON for machines.", "--json")]


def by_name(option: str, given: list[str] | None, *, several: bool = False) -> Any:
    """What `--dtype` and `--device` mean to the library: a value, several, or (regex, value)."""
    if not given:
        return None
    if not any("=" in each for each in given) and (several or len(given) == 1):
        return given if len(given) > 1 else given[0]
    rules = [(regex, value) for regex, _, value in (each.rpartition("=") for each in given)]
    if not all(regex and value for regex, value in rules):
        raise errors.UsageError(
            f"{option} takes a regex each time, or none at all",
            expected=f"REGEX={option[2:].upper()}",
            found=" ".join(given),
        )
    return rules
