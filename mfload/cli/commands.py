"""The commands: their options, and the public function that each calls.

Each imports what it needs when it runs. `mfload bench` has a module of its own.
"""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mfload.cli import failures, options
from mfload.cli.options import library_options
from mfload.cli.output import print_json, print_table, write
from mfload.cli.terminal import bar

if TYPE_CHECKING:
    from mfload.report import Report


def ls(
    path: options.Checkpoint,
    names: options.Names = None,
    dtype: Annotated[
        list[str] | None,
        typer.Option(
            "--dtype", metavar="DTYPE", help="Only this dtype; may be given several times."
        ),
    ] = None,
    shard: Annotated[
        str | None, typer.Option(metavar="FILE", help="Only tensors of this file; * and ? match.")
    ] = None,
    larger_than: Annotated[
        int | None, options.sized("--larger-than", "Only tensors above this size.")
    ] = None,
    smaller_than: Annotated[
        int | None, options.sized("--smaller-than", "Only tensors below this size.")
    ] = None,
    sort: Annotated[
        str,
        typer.Option(
            metavar="KEY",
            help="offset (the order of the files), name, or size.",
            autocompletion=options.offered("offset", "name", "size"),
        ),
    ] = "offset",
    limit: Annotated[
        int | None, typer.Option(min=0, metavar="N", help="Only the first N rows; totals of all.")
    ] = None,
    tree: Annotated[bool, typer.Option("--tree", help="Group by the dots in names.")] = False,
    depth: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Levels of the tree; all.")
    ] = None,
    summary: Annotated[bool, typer.Option("--summary", help="Totals only, of each file.")] = False,
    metadata: Annotated[
        bool, typer.Option("--metadata", help="Show the metadata of the headers as well.")
    ] = False,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Rows only: no head, no totals.")
    ] = False,
    exact: Annotated[bool, typer.Option("--bytes", "-b", help="Sizes in bytes.")] = False,
    as_json: options.Json = False,
) -> None:
    """List the tensors of a checkpoint; reads headers only.

    Prints dtype, shape, bytes and name of each tensor, then totals by dtype and by file. Names
    come last on their lines and are never cut; what can't be printed in them is escaped.
    """
    given = locals()
    from mfload.cli import ls

    ls.ls(**given)


def plan(
    path: options.Checkpoint,
    framework: options.Framework = "numpy",
    device: options.Device = None,
    names: options.Names = None,
    dtype: options.Dtypes = None,
    engine: options.Engine = "auto",
    allocator: options.Allocator = "auto",
    max_host_overhead: options.Overhead = None,
    max_device_overhead: options.DeviceOverhead = None,
    threads: options.Threads = None,
    timeout: options.Timeout = None,
    as_json: options.Json = False,
) -> None:
    """Say what a load would do; reads headers only.

    Prints what would be read, how and into what memory, for this machine as it is now.
    """
    from mfload import api

    preview = api.plan(
        path,
        framework,
        device=options.devices(device),
        names=names,
        dtype=options.dtypes(dtype),
        options=library_options(
            engine=engine,
            allocator=allocator,
            threads=threads,
            timeout=timeout,
            max_host_overhead=max_host_overhead,
            max_device_overhead=max_device_overhead,
        ),
    )
    _print(preview, as_json)


def load(
    path: options.Checkpoint,
    framework: options.Framework = "numpy",
    device: options.Device = None,
    names: options.Names = None,
    dtype: options.Dtypes = None,
    engine: options.Engine = "auto",
    allocator: options.Allocator = "auto",
    max_host_overhead: options.Overhead = None,
    max_device_overhead: options.DeviceOverhead = None,
    threads: options.Threads = None,
    timeout: options.Timeout = None,
    repeat: Annotated[
        int, typer.Option(min=1, metavar="N", help="Load that often, one after the other.")
    ] = 1,
    verify: Annotated[
        str | None,
        typer.Option(
            metavar="MANIFEST", help="Check the bytes, as they come, against this manifest."
        ),
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Load a checkpoint, let go of the arrays, and say what happened.

    Shows whether a checkpoint loads here, and how fast: the bytes read, the seconds of each
    stage, and the engine of each file with the reason for it. With --repeat, the first load may
    read from the disk what the later ones find in the page cache.
    """
    from mfload import api
    from mfload.report import Report

    how = library_options(
        engine=engine,
        allocator=allocator,
        threads=threads,
        timeout=timeout,
        max_host_overhead=max_host_overhead,
        max_device_overhead=max_device_overhead,
    )
    reports: list[Report] = []
    for number in range(repeat):
        report = Report()
        with bar("loading" if repeat == 1 else f"loading, {number + 1} of {repeat}") as progress:
            api.load(
                path,
                framework,
                device=options.devices(device),
                names=names,
                dtype=options.dtypes(dtype),
                verify=verify,
                progress=progress,
                report=report,
                options=how,
            )
        reports.append(report)
    if as_json:
        print_json({"runs": reports})
        return
    print_table(None, reports[-1].rows())
    if repeat > 1:
        write([""])
        _print_runs(reports)


def _print_runs(reports: list[Report]) -> None:
    """Every run, since the first may import a framework, read a disk, and be handed new pages."""
    rows = [
        (
            n,
            f"{report.seconds:.4f}",
            f"{report.gib_per_s:.2f}",
            f"{report.stages.get('import', 0.0):.4f}",
            f"{report.user_seconds:.3f}",
            f"{report.system_seconds:.3f}",
            report.page_faults,
        )
        for n, report in enumerate(reports, 1)
    ]
    middle = statistics.median(report.seconds for report in reports)
    speed = statistics.median(report.gib_per_s for report in reports)
    median = ("median", f"{middle:.4f}", f"{speed:.2f}", "", "", "", "")
    heads = ["run", "seconds", "GiB/s", "import", "user", "system", "page faults"]
    print_table(heads, [*rows, median], right=range(1, 7))


def verify(
    path: options.Checkpoint,
    against: Annotated[
        str | None,
        typer.Option(
            metavar="OTHER", help="Another checkpoint that must hold the same tensors, bit for bit."
        ),
    ] = None,
    checksums: Annotated[
        str,
        typer.Option(
            metavar="WAY",
            help="auto: compare with the manifest if there is one. write: hash every tensor and "
            "file into a manifest. check: fail without a manifest. never: ignore it.",
            autocompletion=options.offered("auto", "write", "check", "never"),
        ),
    ] = "auto",
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

    Headers are always checked, by every rule of the format, and the index against its shards. A
    manifest beside the checkpoint is compared with. The rest is done where it is asked for; all
    that is hashed is read once. Exit code 1 says that something is wrong.
    """
    from mfload.checking.verify import verify

    way: Any = checksums
    with bar("verifying") as progress:
        found = verify(
            path,
            against=against,
            checksums=way,
            manifest=manifest,
            sha256=sha256,
            overwrite=overwrite,
            progress=progress,
            options=library_options(threads=threads, timeout=timeout),
        )
    _print(found, as_json)
    return failures.FINE if found.ok else failures.DIFFERENT


def diff(
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
    from mfload.checking.diff import HEADS, diff

    how = library_options(threads=threads, timeout=timeout)
    with bar("comparing") as progress:
        found = diff(path, other, names=names, progress=progress, options=how)
    shown = found.tensors if every else found.changed
    if as_json:
        print_json(found.as_dict() | {"tensors": [each._asdict() for each in shown]})
    else:
        print_table(None, found.rows())
        if shown:
            write([""])
            print_table(HEADS, [each.row() for each in shown], right=[0, 1, 2, 3])
    return failures.FINE if found.same else failures.DIFFERENT


def align(
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
    alignment: Annotated[
        int, options.sized("--align", "The data of each file begins on a multiple of this.")
    ] = 4096,
    max_shard_size: Annotated[
        int | None,
        options.sized("--max-shard-size", "Tensors a file, such as 5GB; as it is if none."),
    ] = None,
    overwrite: options.Overwrite = False,
    threads: options.Threads = None,
    timeout: options.Timeout = None,
    as_json: options.Json = False,
) -> None:
    """Rewrite a checkpoint for zero-copy and direct reads.

    Bytes are streamed, hashed on the way, and read back from the disk before the new files take
    their names. Until then the old ones are untouched: so a checkpoint can be aligned in place.
    """
    from mfload.checking.align import align

    with bar("aligning") as progress:
        done = align(
            source,
            target,
            align=alignment,
            max_shard_size=max_shard_size,
            overwrite=overwrite,
            progress=progress,
            options=library_options(threads=threads, timeout=timeout),
        )
    _print(done, as_json)


def doctor(
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
) -> int:
    """Say what this machine can do, and what is in the way.

    Looks at the host, GPUs and their driver, cuFile, the frameworks, and the disk of a checkpoint.
    Ends with 1 where something makes loads fail or crawl.
    """
    from mfload.diagnostics.doctor import doctor

    found = doctor(path, timeout=timeout)
    if as_json:
        print_json(found.as_dict())
    else:
        print_table(("part", "what", "found"), found.rows())
        if found.well:
            write(["nothing stands in the way"])
    return failures.FINE if found.well else failures.DIFFERENT


def _print(found: Any, as_json: bool) -> None:
    if as_json:
        print_json(found.as_dict())
    else:
        print_table(None, found.rows())
