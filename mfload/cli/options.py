"""The options that commands share, and what a shell offers for them when the tab key is pressed."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable
from typing import Annotated, Any

import typer

from mfload import errors
from mfload.options import ALLOCATORS, ENGINES, Options, size

_MOST_BYTES = 4 << 20
"""Largest headers that are read while somebody waits for the tab key."""
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
    try:
        found = _tensor_names()
    except Exception:  # noqa: BLE001  A shell that waits for the tab key wants no error.
        return []
    return [re.escape(name) for name in found if name.startswith(incomplete)][:_MOST_NAMES]


def _tensor_names() -> list[str]:
    from mfload.formats import checkpoint, discovery
    from mfload.sources.local import LocalFile

    # The parser gives up on an option without its value, so it knows no path by now. These are
    # the variables in which shells hand over the line.
    line = os.environ.get("_TYPER_COMPLETE_ARGS") or os.environ.get("COMP_WORDS", "")
    path = next(word for word in shlex.split(line)[2:] if os.path.exists(word))
    # Not by `open`, which waits at a FIFO for a writer.
    heads = (LocalFile(file).read(0, 8) for file in discovery.find(path).files)
    if sum(int.from_bytes(head, "little") for head in heads) > _MOST_BYTES:
        return []
    index, _ = checkpoint.read(path)
    return [name for name in index if name.isprintable()]


def _size(value: Any) -> int:
    # Typer hands a default through the parser as well.
    try:
        return value if isinstance(value, int) else size(value)
    except errors.UsageError as error:
        raise typer.BadParameter(f"{error.found!r} is no size: {error.expected}") from None


def sized(name: str, text: str) -> Any:
    """An option that takes a size such as 4096, 256MiB or 1.5GB."""
    return typer.Option(name, metavar="SIZE", parser=_size, help=text)


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
        autocompletion=offered("numpy", "jax", "torch", "tensorflow", "paddle", "cupy"),
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
        autocompletion=_offered_names,
    ),
]
Dtypes = Annotated[
    list[str] | None,
    typer.Option(
        "--dtype",
        metavar="[REGEX=]DTYPE",
        help="Convert floats to this dtype, or the tensors whose names match to theirs; "
        "may be given several times.",
        autocompletion=_offered_dtypes,
    ),
]
Engine = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="auto, pread, direct or mmap; onto GPUs pinned or gds as well.",
        autocompletion=offered(*ENGINES),
    ),
]
Allocator = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="Whose memory holds the arrays: auto, mfload or framework.",
        autocompletion=offered(*ALLOCATORS),
    ),
]
Overhead = Annotated[
    int | None, sized("--max-host-overhead", "Host memory beside the result, such as 256MiB.")
]
DeviceOverhead = Annotated[
    int | None,
    sized("--max-device-overhead", "Memory of a GPU beside the result, such as 256MiB."),
]
Threads = Annotated[
    int | None, typer.Option(metavar="N", help="Number of reader threads; chosen if not given.")
]
Timeout = Annotated[float | None, typer.Option(metavar="SECONDS", help="Give up after that long.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace what is there already.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for machines.")]


def library_options(**given: Any) -> Options:
    """The `mfload.Options` that options of the command line stand for."""
    return Options(**given)


def dtypes(given: list[str] | None) -> Any:
    """What `--dtype` means to the library: a name, or (regex, name) pairs."""
    if not given:
        return None
    if len(given) == 1 and "=" not in given[0]:
        return given[0]
    return _ruled("--dtype", "DTYPE", given)


def devices(given: list[str] | None) -> Any:
    """What `--device` means to the library: a name, several, or (regex, name) pairs."""
    if not given:
        return None
    if all("=" not in each for each in given):
        return given[0] if len(given) == 1 else given
    return _ruled("--device", "DEVICE", given)


def _ruled(option: str, what: str, given: list[str]) -> list[tuple[str, str]]:
    rules = [each.rpartition("=") for each in given]
    for whole, (regex, _, name) in zip(given, rules, strict=True):
        if not regex or not name:
            raise errors.UsageError(
                f"{option} takes a regex each time, or none at all",
                expected=f"REGEX={what}",
                found=whole,
            )
    return [(regex, name) for regex, _, name in rules]
