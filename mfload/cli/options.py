"""The options that commands share, so that they mean the same everywhere."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from mfload import errors
from mfload.cli import completing
from mfload.options import size


def _size(value: Any) -> int:
    # Typer hands a default through the parser as well.
    try:
        return value if isinstance(value, int) else size(value)
    except errors.UsageError as error:
        raise typer.BadParameter(f"{error.found!r} is no size: {error.expected}") from None


Checkpoint = Annotated[
    str,
    typer.Argument(
        metavar="PATH",
        help="A .safetensors file, a directory, or a .safetensors.index.json.",
        show_default=False,
    ),
]
Framework = Annotated[
    str,
    typer.Option(
        "--framework",
        "-f",
        metavar="NAME",
        help="numpy, jax, torch, tensorflow, paddle or cupy.",
        autocompletion=completing.frameworks,
    ),
]
Device = Annotated[
    list[str] | None,
    typer.Option(
        "--device",
        metavar="[REGEX=]DEVICE",
        help="Such as cpu:1 or cuda:0; the framework's own default. Given several times, all "
        "tensors go to all of them, or with a REGEX those whose names match.",
    ),
]
Names = Annotated[
    str | None,
    typer.Option(
        metavar="REGEX",
        help="Only tensors with a match of this regular expression in their names.",
        autocompletion=completing.names,
    ),
]
Dtypes = Annotated[
    list[str] | None,
    typer.Option(
        "--dtype",
        metavar="[REGEX=]DTYPE",
        help="Convert floats to this dtype, or the tensors whose names match to theirs; "
        "may be given several times.",
        autocompletion=completing.dtypes,
    ),
]
Engine = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="auto, pread, direct or mmap; onto GPUs pinned or gds as well.",
        autocompletion=completing.engines,
    ),
]
Landing = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="Whose memory holds the arrays: auto, mfload or framework.",
        autocompletion=completing.landings,
    ),
]
Overhead = Annotated[
    int | None,
    typer.Option(
        "--max-host-overhead",
        metavar="SIZE",
        parser=_size,
        help="Host memory beside the result, such as 256MiB.",
    ),
]
DeviceOverhead = Annotated[
    int | None,
    typer.Option(
        "--max-device-overhead",
        metavar="SIZE",
        parser=_size,
        help="Memory of a GPU beside the result, such as 256MiB.",
    ),
]
Threads = Annotated[
    int | None, typer.Option(metavar="N", help="Readers at once; chosen where not given.")
]
Timeout = Annotated[float | None, typer.Option(metavar="SECONDS", help="Give up after that long.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for machines.")]
Size = Annotated[int | None, typer.Option(metavar="SIZE", parser=_size)]
"""To be joined with a help of one's own: `Annotated[int | None, sized("--x", "Help.")]`."""


def sized(name: str, text: str) -> Any:
    """An option that takes a size such as 4096, 256MiB or 1.5GB."""
    return typer.Option(name, metavar="SIZE", parser=_size, help=text)


def dtypes(given: list[str] | None) -> Any:
    """What `--dtype` means to the library: a name, or names by regex.

    Raises:
        UsageError: Several dtypes for all were given, or some beside one for all.
    """
    if not given:
        return None
    if len(given) == 1 and "=" not in given[0]:
        return given[0]
    return _ruled("--dtype", "DTYPE", given)


def devices(given: list[str] | None) -> Any:
    """What `--device` means to the library: a name, several, or names by regex.

    Raises:
        UsageError: Both devices for all tensors and for some were given.
    """
    if not given:
        return None
    if all("=" not in each for each in given):
        return given[0] if len(given) == 1 else given
    return _ruled("--device", "DEVICE", given)


def _ruled(option: str, what: str, given: list[str]) -> dict[str, str]:
    rules = [each.rpartition("=") for each in given]
    for whole, (regex, _, name) in zip(given, rules, strict=True):
        if not regex or not name:
            raise errors.UsageError(
                f"{option} takes a regex each time, or none at all",
                expected=f"REGEX={what}",
                found=whole,
            )
    return {regex: name for regex, _, name in rules}
