"""`mfload verify`: whether a checkpoint is whole."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from mfload import errors
from mfload.checking import verifying
from mfload.cli import exits, options
from mfload.cli.output import print_json, print_pairs
from mfload.cli.progress import bar
from mfload.options import Options

EPILOG = "Example: mfload verify model/ --checksums check"

_WAYS = ("write", "check")


def command(
    path: options.Checkpoint,
    against: Annotated[
        str | None,
        typer.Option(
            metavar="OTHER", help="Another checkpoint that must hold the same tensors, bit for bit."
        ),
    ] = None,
    checksums: Annotated[
        str | None,
        typer.Option(
            metavar="WAY",
            help="write: hash every tensor and file into a manifest. check: compare with it.",
            autocompletion=lambda: list(_WAYS),
        ),
    ] = None,
    manifest: Annotated[
        str | None,
        typer.Option(
            metavar="FILE", help="The manifest; NAME.checksums.json beside the checkpoint if none."
        ),
    ] = None,
    sha256: Annotated[
        str | None,
        typer.Option(
            metavar="auto|HEX|FILE",
            help="What the files' SHA-256 must be: the digits for one file, a list as sha256sum "
            "writes it, or auto for what a download by the Hugging Face client says.",
        ),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a manifest.")] = False,
    threads: options.Threads = None,
    timeout: options.Timeout = None,
    as_json: options.Json = False,
) -> int:
    """Check headers, index and checksums, or equality with another.

    Headers are always checked, by every rule of the format, and the index against its shards. The
    rest is done where it is asked for; all that is asked for is hashed in one read. Exit code 1
    says that something is wrong.
    """
    if checksums is not None and checksums not in _WAYS:
        raise errors.UsageError("--checksums", expected="write or check", found=checksums)
    way: Any = checksums
    with bar("verifying") as progress:
        found = verifying.verify(
            path,
            against=against,
            checksums=way,
            manifest=manifest,
            sha256=sha256,
            overwrite=overwrite,
            progress=progress,
            options=Options(threads=threads, timeout=timeout),
        )
    if as_json:
        print_json(found.as_dict())
    else:
        print_pairs(found.rows())
    return exits.FINE if found.ok else exits.DIFFERENT
