"""`mfload bench`: this machine's ceilings, and mfload against them."""

from __future__ import annotations

import importlib.util
import json
import os
import stat
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer

from mfload import errors
from mfload.bench import measuring, results
from mfload.bench.measuring import CASES, Bench, BenchOptions
from mfload.cli import options, terminal
from mfload.cli.failures import AfterResultError
from mfload.cli.output import print_json, print_table, write
from mfload.cli.terminal import clean, steps
from mfload.formats import discovery

_QUICK_BYTES, _MOST_BYTES = 512 << 20, 4 << 30
_RESERVED = (".safetensors", ".safetensors.index.json")
_LARGEST_RESULT = 256 << 20


def bench(
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
    ] = 300.0,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the JSON there as well.")
    ] = None,
    picture: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE", help="Draw a picture, such as a PNG.")
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Measure this machine's ceilings, and mfload against them.

    Loads the checkpoint into each installed framework, with its files in the page cache (warm)
    and with none of them in it (cold), a fresh process each time, and compares with the fastest
    way to read the same bytes. Nothing is written to the checkpoint; to measure cold, the system
    is asked to drop these files from its page cache, and no others. Host memory is measured.
    Takes minutes, and wants a machine that does nothing else.
    """
    # Refused before minutes are spent.
    if out is not None or picture is not None:
        found = discovery.find(path)
        files = [*found.files, *([found.name] if found.name else [])]
        if out is not None:
            _check_target(out, files)
            _check_json(out)
        if picture is not None:
            _check_target(picture, files)
            _check_picture(picture)
        if out is not None and picture is not None and out.resolve() == picture.resolve():
            raise errors.UsageError("--out and --plot are one file", file=out)
    wanted = BenchOptions(
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
            acts.callback(_written, picture, lambda: _draw(made, picture))
        acts.callback(_print, made, as_json)
        if out is not None:
            text = json.dumps(results.as_dict(made), indent=1, ensure_ascii=False) + "\n"
            acts.callback(_written, out, lambda: out.write_text(text))


def _listed(given: str | None) -> tuple[str, ...]:
    return tuple(filter(None, (part.strip() for part in (given or "").split(","))))


def _check_target(target: Path, files: list[str]) -> None:
    """Refuses what can't be written, or is of a checkpoint or named like one."""
    folder = target.absolute().parent
    if not folder.is_dir():
        raise errors.SourceNotFoundError("there is no such directory to write to", file=folder)
    there = target.exists()
    if target.is_dir() or not os.access(target if there else folder, os.W_OK):
        raise errors.SourcePermissionError("can't be written", file=target)
    if there and any(os.path.exists(file) and target.samefile(file) for file in files):
        raise errors.UsageError("this is a file of the checkpoint", file=target)
    # A link's own name may say less than that of what it leads to.
    if any(path.name.lower().endswith(_RESERVED) for path in (target, target.resolve())):
        raise errors.UsageError(
            "results are not written under the name of a checkpoint's file", file=target
        )


def _check_json(target: Path) -> None:
    """Refuses to replace anything but an earlier result."""
    try:
        status = target.stat() if target.exists() else None
        if status is None or stat.S_ISCHR(status.st_mode):
            return
        small = stat.S_ISREG(status.st_mode) and status.st_size <= _LARGEST_RESULT
        kept = json.loads(target.read_bytes() or b"{}") if small else None
    except (ValueError, RecursionError):
        kept = None
    except OSError as error:
        raise errors.from_os(error, target, "read") from error
    if not isinstance(kept, dict) or (kept and not {"machine", "run", "samples"} <= kept.keys()):
        raise errors.UsageError(
            "the file is not a bench result and is not replaced",
            file=target,
            expected="a new name, or the JSON of an earlier bench",
        )


def _check_picture(target: Path) -> None:
    """Refuses a picture that can't be drawn."""
    if importlib.util.find_spec("matplotlib") is None:
        raise errors.FrameworkMissingError(
            "the plot needs matplotlib; pip install 'mfload[bench]'",
            expected="matplotlib",
            found="no such module",
        )
    from matplotlib.backend_bases import FigureCanvasBase

    known = FigureCanvasBase.get_supported_filetypes()
    if target.suffix[1:].lower() not in known:
        expected = " | ".join(f".{each}" for each in sorted(known))
        found = target.suffix or "no suffix"
        raise errors.UsageError(
            "unknown format of a picture", file=target, expected=expected, found=found
        )


def _written(target: Path, act: Any) -> None:
    try:
        act()
    except OSError as error:
        raise AfterResultError from errors.from_os(error, target, "write")
    except Exception as error:
        raise AfterResultError from error


def _draw(made: Bench, picture: Path) -> None:
    if not results.draw(made, picture):
        terminal.say("mfload: nothing was measured that could be drawn")


def _print(made: Bench, as_json: bool) -> None:
    if as_json:
        print_json(results.as_dict(made))
        return
    found = results.rows(made)
    for case in CASES:
        lines = [row for row in found if row["case"] == case]
        if lines:
            heads = [case, "best s", "median s", "÷ ceiling", "GB/s", "CPU s", "MiB beside"]
            print_table(heads, map(_cells, lines), right=range(1, 7))
            said = (clean(f"{row['label']}: {row['explanation']}.") for row in lines)
            write(["", *said, ""])
    write([clean(sentence) for sentence in results.conditions(made)])


def _cells(row: results.Row) -> list[str]:
    digits = {"best_s": 4, "median_s": 4, "over_ceiling": 2, "gb_per_s": 2, "cpu_s": 3}
    figures = ["–" if row[key] is None else f"{row[key]:.{n}f}" for key, n in digits.items()]
    beside = row["peak_over_bytes"]
    return [row["label"], *figures, "–" if beside is None else f"{beside / 2**20:.0f}"]
