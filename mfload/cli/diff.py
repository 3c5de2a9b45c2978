"""`mfload diff`: what differs between two checkpoints."""

from __future__ import annotations

from typing import Annotated

import typer

from mfload.checking import comparing
from mfload.checking.difference import HEADS
from mfload.cli import exits, options
from mfload.cli.output import print_json, print_pairs, print_table, write
from mfload.cli.progress import bar
from mfload.options import Options

EPILOG = "Example: mfload diff base/ finetuned/ --names 'layers\\.0\\.'"


def command(
    path: options.Checkpoint,
    other: Annotated[str, typer.Argument(metavar="OTHER", help="The checkpoint to compare with.")],
    names: options.Names = None,
    every: Annotated[
        bool, typer.Option("--all", help="Show the tensors that are the same, too.")
    ] = False,
    threads: options.Threads = None,
    timeout: options.Timeout = None,
    as_json: options.Json = False,
) -> int:
    """Compare two checkpoints: names, dtypes, shapes, values.

    Values are compared as numbers, whatever dtypes they are stored in. The absolute difference is
    |a - b|, the relative one |a - b| / max(|a|, |b|); NaN against NaN is no difference, NaN
    against a number is counted apart. The largest change comes first. Exit code 1 says that there
    is a difference.
    """
    with bar("comparing") as progress:
        found = comparing.diff(
            path,
            other,
            names=names,
            progress=progress,
            options=Options(threads=threads, timeout=timeout),
        )
    shown = found.tensors if every else found.changed
    if as_json:
        print_json(found.as_dict() | {"tensors": [each._asdict() for each in shown]})
    else:
        print_pairs(found.rows())
        if shown:
            write([""])
            print_table(HEADS, [each.row() for each in shown], right=[0, 1, 2, 3])
    return exits.FINE if found.same else exits.DIFFERENT
