"""`mfload align`: a checkpoint written anew for zero-copy and direct reads."""

from __future__ import annotations

from typing import Annotated

import typer

from mfload.checking import align as aligning
from mfload.cli import options
from mfload.cli.output import print_json, print_pairs
from mfload.cli.progress import bar
from mfload.options import Options

EPILOG = "Example: mfload align model/ aligned/ --max-shard-size 5GB"


def command(
    source: options.Checkpoint,
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="TARGET",
            help="A file or a directory; the source itself where not given, which takes "
            "--overwrite.",
            show_default=False,
        ),
    ] = None,
    align: Annotated[
        int, options.sized("--align", "The data of each file begins on a multiple of this.")
    ] = 4096,
    max_shard_size: Annotated[
        int | None,
        options.sized("--max-shard-size", "Tensors a file, such as 5GB; as it is if none."),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace what is there already.")
    ] = False,
    threads: options.Threads = None,
    timeout: options.Timeout = None,
    as_json: options.Json = False,
) -> None:
    """Rewrite a checkpoint for zero-copy and direct reads.

    Bytes are streamed, hashed on the way, and read back from the disk before the new files take
    their names. Until then the old ones are untouched: so a checkpoint can be aligned in place.
    """
    with bar("aligning") as progress:
        done = aligning.align(
            source,
            target,
            align=align,
            max_shard_size=max_shard_size,
            overwrite=overwrite,
            progress=progress,
            options=Options(threads=threads, timeout=timeout),
        )
    if as_json:
        print_json(done.as_dict())
    else:
        print_pairs(done.rows())
