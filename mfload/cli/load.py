"""`mfload load`: loads, lets go, and says what happened."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from mfload import api
from mfload.cli import options
from mfload.cli.output import print_json, print_pairs, print_table, write
from mfload.cli.progress import bar
from mfload.options import Options
from mfload.report import Report

EPILOG = "Example: mfload load model/ --framework jax --dtype bfloat16 --repeat 3"


def command(
    path: options.Checkpoint,
    framework: options.Framework = "numpy",
    device: options.Device = None,
    names: options.Names = None,
    dtype: options.Dtypes = None,
    engine: options.Engine = "auto",
    allocator: options.Landing = "auto",
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
    chosen: Any = {"engine": engine, "allocator": allocator}
    how = Options(
        **chosen,
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
                framework=framework,
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
    print_pairs(reports[-1].rows())
    if repeat > 1:
        _print_runs(reports)


def _print_runs(reports: Sequence[Report]) -> None:
    write([""])
    rows = [(n, *_speed(report.seconds, report)) for n, report in enumerate(reports, 1)]
    middle = statistics.median(report.seconds for report in reports)
    print_table(
        ["run", "seconds", "GiB/s"],
        [*rows, ("median", *_speed(middle, reports[0]))],
        right=[1, 2],
    )


def _speed(seconds: float, report: Report) -> tuple[str, str]:
    rate = report.result_bytes / seconds / 2**30 if seconds else 0.0
    return f"{seconds:.4f}", f"{rate:.2f}"
