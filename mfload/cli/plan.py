"""`mfload plan`: what a load would do."""

from __future__ import annotations

from typing import Any

from mfload import api
from mfload.cli import options
from mfload.cli.output import print_json, print_pairs
from mfload.options import Options

EPILOG = "Example: mfload plan model/ --framework torch --names 'layers\\.0\\.'"


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
    as_json: options.Json = False,
) -> None:
    """Say what a load would do; reads headers only.

    Prints what would be read, how and into what memory, for this machine as it is now.
    """
    chosen: Any = {"engine": engine, "allocator": allocator}
    how = Options(
        **chosen,
        threads=threads,
        timeout=timeout,
        max_host_overhead=max_host_overhead,
        max_device_overhead=max_device_overhead,
    )
    preview = api.plan(
        path,
        framework=framework,
        device=options.devices(device),
        names=names,
        dtype=options.dtypes(dtype),
        options=how,
    )
    if as_json:
        print_json(preview.as_dict())
    else:
        print_pairs(preview.rows())
