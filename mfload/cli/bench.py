"""`mfload bench`: this machine's ceilings, mfload against them, and random reads."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from mfload import errors, sources
from mfload.cli import failures, options
from mfload.cli.options import flag, option, sized
from mfload.cli.output import print_json, print_table, tell, write
from mfload.cli.terminal import bar, say
from mfload.formats import discovery
from mfload.options import size
from mfload.report import human

_QUICK_BYTES, _MOST_BYTES = size("512MiB"), size("4GiB")
_RESERVED = (".safetensors", ".safetensors.index.json")
_START = b'{\n "schema"'  # Of a result that was written before.


Frameworks = Annotated[str | None, option("NAMES", "With commas. Default: all that are installed.")]
Random = Annotated[
    bool, flag("Random reads of PATH, a file, or of a scratch file in a directory.", "--random")
]
Engines = Annotated[
    str,
    option(
        "NAMES",
        "With commas: auto, pread, direct, mmap; with --random io_uring, threads, or auto for "
        "both.",
    ),
]
Rounds = Annotated[int | None, option("N", "Rounds of each case. Default: 5, or 2 with --quick.")]
Cold = Annotated[bool, flag("Only with an empty page cache.", "--cold")]
Warm = Annotated[bool, flag("Only with a full page cache.", "--warm")]
Peers = Annotated[bool, flag("Other loaders too, where installed.", "--peers")]
Quick = Annotated[bool, flag("Fewer rounds, patterns and bytes.", "--quick")]
Most = Annotated[
    int | None,
    sized("--max-bytes", "Most to measure, or to write. Default: 4GiB, or 512MiB with --quick."),
]
Limit = Annotated[float, option("SECONDS", "Limit of each measuring process.")]
Out = Annotated[Path | None, option("FILE", "Write the JSON there as well.")]
Plot = Annotated[Path | None, option("FILE", "Draw a picture, such as a PNG.", "--plot")]


def bench(
    path: options.Checkpoint,
    random: Random = False,
    frameworks: Frameworks = None,
    engines: Engines = "auto",
    rounds: Rounds = None,
    cold: Cold = False,
    warm: Warm = False,
    names: options.Names = None,
    threads: options.Threads = None,
    peers: Peers = False,
    quick: Quick = False,
    max_bytes: Most = None,
    timeout: Limit = 300.0,
    out: Out = None,
    picture: Plot = None,
    as_json: options.Json = False,
) -> int:
    """Measure this machine's ceilings, and mfload against them.

    Loads the checkpoint into each installed framework, with its files in the page cache (warm)
    and with none of them in it (cold), a fresh process each time, and compares with the fastest
    way to read the same bytes. Nothing is written to the checkpoint; to measure cold, the system
    is asked to drop these files from its page cache, and no others. Host memory is measured.
    Takes minutes, and wants a machine that does nothing else.

    With --random, half a minute: blocks of 4 KiB to 1 MiB, 1 to 128 of them at once, past the page
    cache, by each engine that mfload.ondemand reads with. The scratch file has random bytes and
    no name, and is gone in the end.
    """
    most = (_QUICK_BYTES if quick else _MOST_BYTES) if max_bytes is None else max_bytes
    say(f"mfload: {_about(path, random, quick, most, [out, picture])}")
    from mfload.bench import measuring, random_reads, results

    given: dict[str, Any] = {"quick": quick, "max_bytes": most, "timeout": timeout}
    if random:
        others = {"--frameworks": frameworks, "--rounds": rounds, "--cold": cold, "--warm": warm,
                  "--names": names, "--threads": threads, "--peers": peers}  # fmt: skip
        files, of = _files_at_random(path, others), _listed(engines)
        of = random_reads.ENGINES if of in ((), ("auto",)) else of
        folder = None if files else path
        measure: Callable[..., Any] = partial(
            random_reads.bench, folder=folder, engines=of, **given
        )
    else:
        files = [*filter(os.path.exists, discovery.find(path).names)]
        given |= {"threads": threads, "names": names, "peers": peers}
        measure = partial(
            measuring.bench,
            frameworks=_listed(frameworks),
            engines=_listed(engines) or ("auto",),
            cases=("warm", "cold") if warm == cold else ("warm",) if warm else ("cold",),
            rounds=(2 if quick else 5) if rounds is None else rounds,
            **given,
        )
    _check_targets(out, picture, files)
    with bar("", unit="it") as advance:
        found = measure(files if random else path, _watch(advance))
    text = json.dumps(found, indent=1) + "\n"
    show, draw = (_print_points, random_reads.draw) if random else (_print, results.draw)
    codes = [
        _attempt(lambda: out and out.write_text(text)),
        _attempt(lambda: print_json(found) if as_json else show(found)),
        _attempt(lambda: picture and _draw(found, picture, draw)),
    ]
    return max(codes)


def _about(path: str, random: bool, quick: bool, most: int, written: list[Path | None]) -> str:
    """What it is going to do, how long that takes, and what it writes."""
    much = errors.amount(most, most)
    if random:
        what = f"random reads of {path}, or of a scratch file of up to {much} in that directory"
        lasts = "some seconds" if quick else "half a minute"
    else:
        what = f"loads up to {much} of {sources.shown(path)} again and again, in fresh processes"
        lasts = "a minute" if quick else "some minutes"
    files = ", ".join(errors.printable(each) for each in written if each is not None)
    ends = f"writes {files or 'no file that stays'}; Ctrl-C ends it"
    return f"{errors.printable(what)}; takes {lasts} or more; {ends}"


def _files_at_random(path: str, others: dict[str, Any]) -> list[str]:
    """The file that is read at random, none for a directory; refuses `others`, by their options."""
    for name, value in others.items():
        if value:
            raise errors.UsageError(f"{name} can't be given with --random", found=value)
    if sources.is_url(path):
        what, found = "--random reads files of this machine", sources.shown(path)
        raise errors.UsageError(what, expected="a path", found=found)
    if not os.path.exists(path):
        raise errors.SourceNotFoundError("no such file or directory", file=path)
    return [] if os.path.isdir(path) else [path]


def _watch(advance: Callable[..., None] | Literal[False]) -> Callable[[int, int, str], None]:
    """What is told of progress: it moves a bar, or says once what is done now."""
    said = ""

    def watch(done: int, total: int, what: str) -> None:
        nonlocal said
        if advance:
            advance(done, total, what)
        elif what != said:
            said = what
            say(f"mfload: {what}{f' ({done} of {total} done)' if total else ''}")

    return watch


def _listed(given: str | None) -> tuple[str, ...]:
    return tuple(filter(None, (part.strip() for part in (given or "").split(","))))


def _attempt(act: Callable[[], object]) -> int:
    """Gives the exit code of an act; minutes were spent on the figures, so the others go on."""
    try:
        act()
    except Exception as error:  # noqa: BLE001
        return failures.show(error, as_json=False)
    return failures.FINE


def _check_targets(out: Path | None, picture: Path | None, files: list[str]) -> None:
    """Refuses targets that may not be written."""
    for target, check in ((out, _check_earlier), (picture, _check_picture)):
        if target is not None:
            _check_target(target, files)
            check(target)
    if out is not None and picture is not None and out.resolve() == picture.resolve():
        raise errors.UsageError("--out and --plot are one file", file=out)


def _check_target(target: Path, files: list[str]) -> None:
    """Refuses what can't be written, is a file of the checkpoint, or is named like one."""
    there = target.exists()
    if target.is_dir() or not os.access(target if there else target.absolute().parent, os.W_OK):
        raise errors.TargetError("can't be written: no such directory, or no right to", file=target)
    # A link's own name may say less than that of what it leads to.
    names = [each.name.lower() for each in (target, target.resolve())]
    if (there and any(map(target.samefile, files))) or any(
        name.endswith(_RESERVED) for name in names
    ):
        raise errors.UsageError("a checkpoint's file, or named like one", file=target)


def _check_earlier(target: Path) -> None:
    """Refuses to replace anything but an earlier result."""
    if target.is_file():
        with target.open("rb") as file:
            start = file.read(len(_START))
        if start not in (b"", _START):
            raise errors.UsageError("not a bench result, so it is not replaced", file=target)


def _check_picture(target: Path) -> None:
    if importlib.util.find_spec("matplotlib") is None:
        raise errors.missing("the plot needs matplotlib", "bench")
    from matplotlib.backend_bases import FigureCanvasBase

    known = sorted(FigureCanvasBase.get_supported_filetypes())
    errors.check_choice("format of a picture", target.suffix[1:].lower(), tuple(known))


def _draw(found: dict[str, Any], picture: Path, draw: Callable[..., bool]) -> None:
    if not draw(found, picture):
        say("mfload: nothing was measured that could be drawn")


def _print(found: dict[str, Any]) -> None:
    for case in ("warm", "cold"):
        rows = [row for row in found["rows"] if row["case"] == case]
        if rows:
            heads = ["best s", "median s", "÷ ceiling", "GB/s", "CPU s", "MiB beside", case]
            print_table(heads, map(_cells, rows), right=range(6))
            said = (errors.printable(f"{row['label']}: {row['explanation']}.") for row in rows)
            tell(["", *said, ""])
    tell(map(errors.printable, found["conditions"]))


def _print_points(found: dict[str, Any]) -> None:
    points = found["points"]
    depths = sorted({point["depth"] for point in points})
    for engine in dict.fromkeys(point["engine"] for point in points):
        for what, key, digits in (("GB/s", "gb_per_s", 3), ("µs of CPU a read", "cpu_us", 1)):
            at = {(p["block"], p["depth"]): p[key] for p in points if p["engine"] == engine}
            rows = [
                [human(block), *(_figure(at.get((block, depth)), digits) for depth in depths)]
                for block in sorted({block for block, _ in at})
            ]
            write([f"{engine}, {what}, by bytes of a read and reads at once"])
            heads = ["", *map(str, depths)]
            print_table(heads, rows, right=range(1, len(heads)))
            write([""])
    tell(map(errors.printable, found["conditions"]))


def _figure(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def _cells(row: dict[str, Any]) -> list[str]:
    digits = {"best_s": 4, "median_s": 4, "over_ceiling": 2, "gb_per_s": 2, "cpu_s": 3}
    figures = [_figure(row[key], n) for key, n in digits.items()]
    beside = row["peak_over_bytes"]
    return [*figures, "–" if beside is None else f"{beside / 2**20:.0f}", row["label"]]
