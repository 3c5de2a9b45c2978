"""The commands: their options, and the public function that each calls.

Each imports what it needs when it runs. `mfload bench` has a module of its own.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mfload.cli import failures, ls as listing, options
from mfload.cli.options import argument, command, flag, option, sized
from mfload.cli.output import print_json, print_table, write
from mfload.cli.spelling import spoken
from mfload.cli.terminal import bar, remark
from mfload.errors import check_choice, counted
from mfload.options import Options
from mfload.peer_options import PeerOptions
from mfload.report import human

if TYPE_CHECKING:
    from mfload.report import Report


@command(network=options.network)
def request(
    path: options.Checkpoint,
    framework: options.Framework = "numpy",
    device: options.Device = None,
    names: options.Names = None,
    dtype: options.Dtypes = None,
    engine: options.Engine = "auto",
    page_cache: options.PageCache = "auto",
    allocator: options.Allocator = "auto",
    max_host_overhead: options.HostOverhead = None,
    max_device_overhead: options.DeviceOverhead = None,
    threads: options.Threads = None,
    timeout: options.Timeout = None,
    fallback: options.Fallback = None,
    prefer: options.Prefer = "path",
    *,
    network: dict[str, Any],
) -> dict[str, Any]:
    """What `mfload.plan` and `mfload.load` are called with."""
    given = locals()
    given |= given.pop("network")
    check_choice("value of --prefer", prefer, ("path", "fallback"))
    same = ("path", "framework", "names", "fallback", "prefer")
    return {
        **{name: given.pop(name) for name in same},
        "device": options.by_name("--device", given.pop("device"), several=True),
        "dtype": options.by_name("--dtype", given.pop("dtype")),
        "options": Options(**given),
    }


@command(network=options.network)
def limits(
    threads: options.Threads = None, timeout: options.Timeout = None, *, network: dict[str, Any]
) -> Options:
    """How other commands read."""
    return Options(threads=threads, timeout=timeout, **network)


ls = command(how=limits)(listing.ls)


@command(how=limits)
def bounds(max_host_overhead: options.HostOverhead = None, *, how: Options) -> Options:
    """The same, with a limit for memory."""
    return replace(how, max_host_overhead=max_host_overhead)


@command(given=request)
def plan(given: dict[str, Any], as_json: options.Json = False) -> None:
    """Say what a load would do; reads headers only.

    Prints what would be read, how and into what memory, for this machine as it is now.
    """
    from mfload import api

    _print(api.plan(**given), as_json)


_REPEAT = "Load that often, one after the other."
_WHILE = "Check the bytes, as they come, against this manifest."

Repeat = Annotated[int, typer.Option(min=1, metavar="N", help=_REPEAT)]
Manifest = Annotated[str | None, option("MANIFEST", _WHILE)]


@command(given=request)
def load(
    given: dict[str, Any],
    repeat: Repeat = 1,
    verify: Manifest = None,
    as_json: options.Json = False,
) -> None:
    """Load a checkpoint, drop the arrays, and report what happened.

    Shows whether a checkpoint loads here, and how fast: the bytes read, the seconds of each
    stage, and the engine of each file with the reason for it. With --repeat, the first load may
    read from the disk what the later ones find in the page cache.
    """
    from mfload import api
    from mfload.report import Report

    reports: list[Report] = []
    for number in range(repeat):
        reports.append(Report())
        with bar("loading" if repeat == 1 else f"loading, {number + 1} of {repeat}") as progress:
            api.load(**given, verify=verify, progress=progress, report=reports[-1])
    if as_json:
        print_json({"runs": [report.as_dict() for report in reports]})
        return
    _print_rows(reports[-1])
    if repeat > 1:
        write([""])
        _print_runs(reports)


def _print_runs(reports: list[Report]) -> None:
    """Every run and the medians; the first may import, read a disk, and be handed new pages."""
    heads = ["run", "seconds", "GiB/s", "import", "user", "system", "page faults"]
    digits = [".4f", ".2f", ".4f", ".3f", ".3f", ".0f"]
    runs: list[tuple[float, ...]] = []
    for report in reports:
        imported = report.stages.get("import", 0.0)
        times = (report.user_seconds, report.system_seconds)
        runs.append(
            (report.seconds - imported, report.gib_per_s, imported, *times, report.page_faults)
        )
    runs.append(tuple(map(statistics.median, zip(*runs, strict=True))))
    names = [*range(1, len(runs)), "median"]
    rows = [[name, *map(format, run, digits)] for name, run in zip(names, runs, strict=True)]
    print_table(heads, rows, right=range(1, 7))


_AGAINST = "Another checkpoint that must hold the same tensors, bit for bit."
_MODE = (
    "auto: compare with the manifest if there is one. write: hash every tensor and file into a "
    "manifest. check: fail without a manifest."
)
_CHECKSUMS = (
    "xxh3: the hash of each tensor, as fast as memory is read. sha256: that of each file. both: "
    "write both, or compare what the manifest has."
)
_NONE = "Ignore the manifest, and the checksums of archives and seeds."
_SUMS = "The manifest. Default: beside the checkpoint, such as a.npz.checksums.json for a.npz."
_SHA256 = (
    "What the files' SHA-256 must be: the digits for one file, a list as sha256sum writes it, or "
    "auto for what a download by the Hugging Face client says."
)

Against = Annotated[str | None, option("OTHER", _AGAINST)]
Mode = Annotated[str, option("MODE", _MODE, offers=("auto", "write", "check"))]
Which = Annotated[str, option("NAME", _CHECKSUMS, "--checksums", offers=("xxh3", "sha256", "both"))]
Unchecked = Annotated[bool, flag(_NONE, "--no-checksums")]
Algorithm = Annotated[str | None, typer.Option("--algorithm", hidden=True)]  # Of old.
Sums = Annotated[str | None, option("FILE", _SUMS)]
Sha256 = Annotated[str | None, option("auto|HEX|FILE", _SHA256)]
Anew = Annotated[bool, flag("Replace a manifest.", "--overwrite")]


@command(how=limits)
def verify(
    path: options.Checkpoint,
    *,
    against: Against = None,
    mode: Mode = "auto",
    checksums: Which = "both",
    no_checksums: Unchecked = False,
    algorithm: Algorithm = None,
    manifest: Sums = None,
    sha256: Sha256 = None,
    overwrite: Anew = False,
    how: Options,
    as_json: options.Json = False,
) -> int:
    """Check headers, index and checksums, or equality with another.

    Headers are always checked, by every rule of the format, and the index against its shards. A
    manifest beside the checkpoint is compared with. The rest is done where it is asked for; all
    that is hashed is read once. Exit code 1 says that something is wrong.
    """
    given = locals()
    from mfload import deprecated
    from mfload.checking.verify import verify

    if given.pop("no_checksums"):
        given["checksums"] = False
    if algorithm is None:
        del given["algorithm"]
    found = _run("verifying", verify, deprecated.renewed("mfload.verify", given) or given)
    return failures.FINE if found.ok else failures.DIFFERENT


Other = Annotated[str, argument("OTHER", "The checkpoint to compare with.")]
Every = Annotated[bool, flag("Show the tensors that are the same, too.", "--all")]
_RELATIVE = "With --atol: elements are equal up to ATOL + RTOL * |b|, whatever the dtypes."
_ABSOLUTE = "See --rtol. Default: every bit counts, or 0 beside --rtol."
Relative = Annotated[float | None, option("RTOL", _RELATIVE)]
Absolute = Annotated[float | None, option("ATOL", _ABSOLUTE)]


@command(how=limits)
def diff(
    path: options.Checkpoint,
    other: Other,
    *,
    names: options.Names = None,
    rtol: Relative = None,
    atol: Absolute = None,
    every: Every = False,
    how: Options,
    as_json: options.Json = False,
) -> int:
    """Compare two checkpoints: names, dtypes, shapes, values.

    Values are compared as numbers, whatever dtypes they are stored in. The absolute difference is
    |a - b|, the relative one |a - b| / max(|a|, |b|); NaN against NaN is no difference, NaN
    against a number is counted apart. The largest change comes first. Exit code 1 says that there
    is a difference.
    """
    from mfload.checking.diff import HEADS, diff

    with bar("comparing") as progress:
        given: dict[str, Any] = {"names": names, "rtol": rtol, "atol": atol}
        found = diff(path, other, **given, progress=progress, options=how)
    shown = found.tensors if every else found.changed
    if as_json:
        print_json(found.as_dict() | {"tensors": [each._asdict() for each in shown]})
    else:
        _print_rows(found)
        if shown:
            write([""])
            print_table(HEADS, [each.row() for each in shown], right=[0, 1, 2, 3])
    return failures.FINE if found.equal else failures.DIFFERENT


_TARGET = "A file or a directory. Default: the source is replaced, which takes --overwrite."
_SHARD = (
    "Bytes of tensors a file, such as 5GB. Default: one file for a target that is one, else as "
    "many as there are."
)
_ALONE = "Leave config, tokenizer and the like behind."

Target = Annotated[str | None, argument("TARGET", _TARGET)]
Align = Annotated[int, sized("--align", "The data of each file begins on a multiple of this.")]
OnlyWeights = Annotated[bool, flag(_ALONE, "--only-weights")]
ShardSize = Annotated[int | None, sized("--max-shard-size", _SHARD)]


@command(how=limits)
def align(
    source: options.Checkpoint,
    target: Target = None,
    *,
    alignment: Align = 4096,
    max_shard_size: ShardSize = None,
    only_weights: OnlyWeights = False,
    overwrite: options.Overwrite = False,
    how: Options,
    as_json: options.Json = False,
) -> None:
    """Rewrite a checkpoint for zero-copy and direct reads.

    Bytes are streamed, hashed on the way, and read back from the disk before the new files take
    their names. Until then the old ones are untouched: so a checkpoint can be aligned in place.
    """
    given = locals()
    from mfload.checking import convert

    _run("aligning", convert.align, given, align=given.pop("alignment"))


_INTO = "A file, or a directory: one that exists, or with a slash at its end."
_PARTS = (
    "Bytes of tensors a file, such as 5GB. Default: one file; in a directory, without --names, as "
    "many as a safetensors source has."
)
_RENAME = (
    "New names for tensors whose whole name matches, with \\1 for groups; may be given several "
    "times."
)

Into = Annotated[str, argument("TARGET", _INTO)]
PartSize = Annotated[int | None, sized("--max-shard-size", _PARTS)]
Renames = Annotated[list[str] | None, option("REGEX=NAME", _RENAME, "--rename")]


@command(how=bounds)
def convert(
    source: options.Checkpoint,
    target: Into,
    *,
    names: options.Names = None,
    dtype: options.Dtypes = None,
    rename: Renames = None,
    alignment: Align = 4096,
    max_shard_size: PartSize = None,
    only_weights: OnlyWeights = False,
    overwrite: options.Overwrite = False,
    how: Options,
    as_json: options.Json = False,
) -> None:
    """Turn a checkpoint of any format into safetensors.

    Streams in bounded memory, and reads the new files back from the disk before they take their
    names. After a kill or Ctrl-C, the same command goes on where it ended. Config, tokenizer and
    the like of a Hugging Face model go to a directory as well.
    """
    given = locals()
    from mfload.checking import convert

    given["dtype"] = options.by_name("--dtype", dtype)
    given["mapping"] = options.pairs("--rename", given.pop("rename"))
    _run("converting", convert.convert, given, align=given.pop("alignment"))


_LAYER = "its group is the number of the layer: 'layers\\.(\\d+)\\.fc1\\.weight'."
_UP = f"Regular expression for names of the up-projections [neurons, width]; {_LAYER}"
_DOWN = "The same for the down-projections [width, neurons]."
_ONE_FILE = "Bytes of tensors a file, such as 5GB. Default: a single file."

Up = Annotated[str, option("REGEX", _UP, "--up")]
Down = Annotated[str, option("REGEX", _DOWN, "--down")]
Gate = Annotated[str | None, option("REGEX", "The same for gates [neurons, width].", "--gate")]
OneFile = Annotated[int | None, sized("--max-shard-size", _ONE_FILE)]


@command(how=bounds)
def bundle(
    source: options.Checkpoint,
    target: Into,
    *,
    up: Up,
    down: Down,
    gate: Gate = None,
    max_shard_size: OneFile = None,
    overwrite: options.Overwrite = False,
    how: Options,
    as_json: options.Json = False,
) -> None:
    """Lay feed-forward layers out for reading on demand.

    What a neuron needs of the projections becomes one range of bytes; the file is safetensors.
    Streams and compares as `convert` does.
    """
    given = locals()
    from mfload import ondemand

    _run("bundling", ondemand.bundle, given)


@command(how=bounds)
def unbundle(
    source: options.Checkpoint,
    target: Into,
    *,
    max_shard_size: OneFile = None,
    overwrite: options.Overwrite = False,
    how: Options,
    as_json: options.Json = False,
) -> None:
    """Undo what `bundle` did: the same tensors in the same order."""
    given = locals()
    from mfload import ondemand

    _run("unbundling", ondemand.unbundle, given)


_ACTION = "ls: list what it holds; clear: remove it."
_FILES = "Only files with a match of this regular expression in their URLs."

Action = Annotated[str, argument("ACTION", _ACTION)]
CacheDirectory = Annotated[str, argument("DIRECTORY", "The cache, as --cache names it.")]
CachedNames = Annotated[str | None, option("REGEX", _FILES, "--names")]


def cache(
    action: Action,
    directory: CacheDirectory,
    names: CachedNames = None,
    as_json: options.Json = False,
) -> None:
    """List or clear a cache of files behind URLs.

    Prints when each file was read last, what the cache holds of it, its size and URL.
    """
    from mfload.sources.cache import Cache

    check_choice("action", action, ("ls", "clear"))
    found = Cache(directory)
    chosen = found.matching(names)
    files = found.clear(chosen) if action == "clear" else [*filter(chosen, found.files())]
    if as_json:
        print_json({"files": [each._asdict() for each in files]})
        return
    rows = [
        (datetime.fromtimestamp(each.used).strftime("%Y-%m-%d %H:%M"), human(each.held),
         human(each.size), each.name) for each in files
    ]  # fmt: skip
    if rows:
        print_table(("used", "held", "size", "file"), rows, right=(1, 2))
    held = human(sum(each.held for each in files))
    did = "removed" if action == "clear" else "in the cache"
    _say(f"{counted(len(files), 'file')}, {held} {did}")


_LOOK = "A checkpoint, to look at its disk and its files too."

Look = Annotated[str | None, argument("[PATH]", _LOOK)]
Patience = Annotated[float, option("SECONDS", "For each question that could hang.")]


def doctor(path: Look = None, timeout: Patience = 20.0, as_json: options.Json = False) -> int:
    """Say what this machine can do, and what is in the way.

    Looks at the host, GPUs and their driver, cuFile, the frameworks, and the disk of a checkpoint.
    Ends with 1 where something makes loads fail or crawl.
    """
    from mfload.diagnostics.doctor import doctor

    found = doctor(path, timeout=timeout)
    if as_json:
        print_json(found.as_dict())
    else:
        rows = [tuple(map(spoken, map(str, row))) for row in found.rows()]
        print_table(("part", "what", "found"), rows)
        if found.well:
            write(["nothing stands in the way"])
    return failures.FINE if found.well else failures.DIFFERENT


_CERT = "This server's certificate: clients connect by TLS."
_CA = "With it, clients need a certificate that this authority signed."
_RUN = (
    "Name of the run that the weights belong to. Seeds of one run are read together. Default: the "
    "same for all seeds with the same bytes."
)
_READERS = "Readers at once that the planner sends here."
_TRANSPORTS = (
    "What is offered to readers, with commas between. Default: memory,memfd,http, or with --device "
    "cuda_ipc,http."
)
_HELD = (
    "GPU that holds the weights, such as cuda:0; with several, cuda:0,cuda:1, each has a chunk of "
    "the first dim of every tensor. Default: host memory."
)

Where = Annotated[str, option("HOST:PORT", "Where to listen, host:port; port 0 takes a free one.")]
TokenFile = Annotated[str | None, option("FILE", "File with the token that clients must send.")]
CertFile = Annotated[str | None, option("FILE", _CERT)]
KeyFile = Annotated[str | None, option("FILE", "Its key. Default: in --cert-file.")]
CaFile = Annotated[str | None, option("FILE", _CA)]
Model = Annotated[str, option("NAME", "The model's name, such as org/name.")]
Revision = Annotated[str, option("NAME", "Which version of the model.")]
Planner = Annotated[str | None, option("URL", "URL of the planner to register with.")]
Run = Annotated[str | None, option("NAME", _RUN)]
Readers = Annotated[int, typer.Option(min=1, metavar="N", help=_READERS)]
Transports = Annotated[str | None, option("NAMES", _TRANSPORTS)]
HeldOn = Annotated[str | None, option("DEVICE", _HELD)]
Compared = Annotated[bool, flag("Whether readers compare checksums.", "--checksums/--no-checksums")]


@command()
def serve(
    path: options.Checkpoint,
    *,
    model: Model,
    revision: Revision = "",
    address: Where = "127.0.0.1:0",
    token_file: TokenFile = None,
    cert_file: CertFile = None,
    key_file: KeyFile = None,
    ca_file: CaFile = None,
    planner: Planner = None,
    max_readers: Readers = 3,
    run: Run = None,
    checksums: Compared = True,
    device: HeldOn = None,
    transports: Transports = None,
    headers: options.Headers = None,
    threads: options.Threads = None,
    as_json: options.Json = False,
) -> None:
    """Serve a checkpoint from memory to other processes.

    It is loaded first, and served until interrupted. Readers load it from the URL that is
    printed, as from any checkpoint: `mfload load peer://…`, or
    `mfload.load("peer://…", "jax")`.

    With `--device`, readers of the same user on this machine have arrays in its memory, if they
    name the transport: `Options(peer=PeerOptions(transports=("cuda_ipc",)))`. When it is
    interrupted, it waits until these arrays are gone.
    """
    from mfload.peer import seed, serve as serving

    own: Any = {"planner": planner, "token_file": token_file, "ca_file": ca_file}
    peer = PeerOptions(**own, cert_file=cert_file, key_file=key_file)
    how = Options(threads=threads, headers=options.by_line(headers), peer=peer)
    with bar("loading") as progress:
        held, metadata = serving.stored(path, how, progress, _names(device or ""))
    names = _names(transports or ("cuda_ipc,http" if device else "memory,memfd,http"))
    peer = replace(peer, address=address, checksums=checksums, transports=tuple(names))
    named: Any = {"model": model, "revision": revision, "run": run, "metadata": metadata}
    made = seed.publish(held, **named, max_readers=max_readers, peer=peer)
    leases: Callable[[], int] = int
    if "cuda_ipc" in names:
        from mfload.peer.cuda_ipc import leases
    serving.run(serving.told(made, _say, leases), lambda: _started(made.url, as_json))


def _names(text: str) -> list[str]:
    return [each.strip() for each in text.split(",") if each.strip()]


@command()
def planner(
    address: Where = "127.0.0.1:0",
    token_file: TokenFile = None,
    cert_file: CertFile = None,
    key_file: KeyFile = None,
    ca_file: CaFile = None,
    as_json: options.Json = False,
) -> None:
    """Tell readers which processes serve a model.

    Runs until interrupted. Seeds register with the URL that is printed,
    `mfload.publish(…, peer=mfload.PeerOptions(planner=URL))`, and readers ask it, `mfload load
    peer:///org/name --planner URL`.
    """
    from mfload.peer import security, serve as serving
    from mfload.peer.planner_http import PlannerServer

    token = None if token_file is None else security.read_token(token_file)
    tls = security.Tls.of(cert_file, key_file, ca_file)
    made = PlannerServer(address, token=token, tls=tls)
    serving.run(made, lambda: _started(made.url, as_json))


def _started(url: str, as_json: bool) -> None:
    if as_json:
        print_json({"url": url})
    else:
        write([url])
    _say("ready; Ctrl-C ends it")


def _say(text: str) -> None:
    remark(f"mfload: {text}")


def _run(what: str, call: Callable[..., Any], given: dict[str, Any], **more: Any) -> Any:
    """Calls a function with the arguments of a command, with a bar, and prints what it returns."""
    as_json, how = given.pop("as_json"), given.pop("how")
    with bar(what) as progress:
        found = call(**given, **more, progress=progress, options=how)
    _print(found, as_json)
    return found


def _print(found: Any, as_json: bool) -> None:
    if as_json:
        print_json(found.as_dict())
    else:
        _print_rows(found)


def _print_rows(found: Any) -> None:
    """Names and values, the library's notes among them."""
    print_table(None, [(name, spoken(str(value))) for name, value in found.rows()])
