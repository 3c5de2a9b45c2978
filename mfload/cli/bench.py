"""`mfload bench`: this machine's ceilings, and mfload against them."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer

from mfload import errors
from mfload.bench import measuring, outputs, plot, rows as tabled, summary
from mfload.bench.measuring import Bench
from mfload.bench.options import CASES, Options
from mfload.bench.results import write_json
from mfload.bench.rows import Row
from mfload.cli import exits, options, streams
from mfload.cli.failures import AfterResultError
from mfload.cli.output import print_json, print_table, write
from mfload.cli.steps import steps
from mfload.cli.text import clean
from mfload.formats import discovery

EPILOG = "Example: mfload bench model/ --frameworks jax,torch --plot bench.png"
_QUICK_BYTES, _MOST_BYTES = 512 << 20, 4 << 30


def command(
    path: options.Checkpoint,
    frameworks: Annotated[
        str | None,
        typer.Option(metavar="NAMES", help="With commas; all that are installed if not given."),
    ] = None,
    engines: Annotated[
        str, typer.Option(metavar="NAMES", help="With commas: auto, pread, direct, mmap.")
    ] = "auto",
    rounds: Annotated[
        int | None, typer.Option(metavar="N", help="Rounds of each case; 5, or 2 with --quick.")
    ] = None,
    cold: Annotated[bool, typer.Option("--cold", help="Only with an empty page cache.")] = False,
    warm: Annotated[bool, typer.Option("--warm", help="Only with a full page cache.")] = False,
    names: options.Names = None,
    threads: options.Threads = None,
    peers: Annotated[
        bool, typer.Option("--peers", help="Other loaders too, where installed.")
    ] = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="Fewer rounds, patterns and bytes.")
    ] = False,
    max_bytes: Annotated[
        int | None,
        options.sized("--max-bytes", "Most to measure; 4GiB, or 512MiB with --quick."),
    ] = None,
    timeout: Annotated[
        float, typer.Option(metavar="SECONDS", help="Limit of each measuring process.")
    ] = 120.0,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the JSON there as well.")
    ] = None,
    picture: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE", help="Draw a picture, such as a PNG.")
    ] = None,
    as_json: options.Json = False,
) -> int:
    """Measure this machine's ceilings, and mfload against them.

    Loads the checkpoint into each installed framework, with its files in the page cache (warm)
    and with none of them in it (cold), a fresh process each time, and compares with the fastest
    way to read the same bytes. Nothing is written to the checkpoint; to measure cold, the system
    is asked to drop these files from its page cache, and no others. Host memory is measured.
    Takes minutes, and wants a machine that does nothing else.
    """
    _check_targets(out, picture, path)
    wanted = Options(
        frameworks=_listed(frameworks),
        engines=_listed(engines) or ("auto",),
        cases=tuple(c for c, on in zip(CASES, (warm, cold), strict=True) if on) or CASES,
        rounds=(2 if quick else 5) if rounds is None else rounds,
        threads=threads,
        names=names,
        peers=peers,
        quick=quick,
        max_bytes=(_QUICK_BYTES if quick else _MOST_BYTES) if max_bytes is None else max_bytes,
        timeout=timeout,
    )
    with steps() as watch:
        made = measuring.bench(path, wanted, watch)
    # Minutes were spent on it: whatever fails, the others are tried. The last one goes first.
    with ExitStack() as acts:
        if picture is not None:
            acts.callback(_draw, made, picture)
        acts.callback(_print, made, as_json)
        if out is not None:
            acts.callback(_written, out, lambda: write_json(out, summary.as_dict(made)))
    return exits.FINE


def _listed(given: str | None) -> tuple[str, ...]:
    return tuple(filter(None, (part.strip() for part in (given or "").split(","))))


def _check_targets(out: Path | None, picture: Path | None, path: str) -> None:
    """Refuses, before minutes are spent, what could not be written or must not be."""
    if out is None and picture is None:
        return
    found = discovery.find(path)
    files = [*found.files, *([found.name] if found.name else [])]
    if out is not None:
        outputs.check(out, files)
        outputs.check_json(out)
    if picture is not None:
        outputs.check(picture, files)
        outputs.check_picture(picture)
        if out is not None and out.resolve() == picture.resolve():
            raise errors.UsageError("--out and --plot are one file", file=out)


def _written(target: Path, act: Any) -> None:
    try:
        act()
    except OSError as error:
        raise AfterResultError from errors.from_os(error, target, "write")
    except Exception as error:
        raise AfterResultError from error


def _draw(made: Bench, picture: Path) -> None:
    drawn = [False]

    def draw() -> None:
        drawn[0] = plot.draw(made.results, summary.title(made), picture)

    _written(picture, draw)
    if not drawn[0]:
        streams.say("mfload: nothing was measured that could be drawn")


def _print(made: Bench, as_json: bool) -> None:
    if as_json:
        print_json(summary.as_dict(made))
        return
    found = tabled.rows(made)
    for case in CASES:
        lines = [row for row in found if row.case == case]
        if lines:
            heads = [case, "best s", "median s", "÷ ceiling", "GB/s", "CPU s", "MiB beside"]
            print_table(heads, map(_cells, lines), right=range(1, 7))
            write(["", *(clean(f"{row.label}: {row.explanation}.") for row in lines), ""])
    write([clean(sentence) for sentence in summary.conditions(made)])


def _cells(row: Row) -> list[str]:
    beside = None if row.peak_over_bytes is None else row.peak_over_bytes / 2**20
    return [
        row.label,
        *(_figure(x, 4) for x in (row.best_s, row.median_s)),
        *(_figure(x, 2) for x in (row.over_ceiling, row.gb_per_s)),
        _figure(row.cpu_s, 3),
        _figure(beside, 0),
    ]


def _figure(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:.{digits}f}"
