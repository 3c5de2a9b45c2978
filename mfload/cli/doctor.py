"""`mfload doctor`: what this machine can do."""

from __future__ import annotations

from typing import Annotated

import typer

from mfload.cli import exits, options
from mfload.cli.output import print_json, print_table, write
from mfload.diagnostics.doctor import doctor

EPILOG = "Example: mfload doctor model/"


def command(
    path: Annotated[
        str | None,
        typer.Argument(
            metavar="[PATH]",
            help="A checkpoint, to look at its disk and its files too.",
            show_default=False,
        ),
    ] = None,
    timeout: Annotated[
        float, typer.Option(metavar="SECONDS", help="For each question that could hang.")
    ] = 20.0,
    as_json: options.Json = False,
) -> None:
    """Say what this machine can do, and what is in the way.

    Looks at the host, GPUs and their driver, cuFile, the frameworks, and the disk of a checkpoint.
    Ends with 1 where something makes loads fail or crawl.
    """
    found = doctor(path, timeout=timeout)
    if as_json:
        print_json(found.as_dict())
    else:
        print_table(("part", "what", "found"), found.rows())
        if found.well:
            write(["nothing stands in the way"])
    if not found.well:
        raise typer.Exit(exits.DIFFERENT)
