"""The options that commands share."""

from __future__ import annotations

import codecs
import functools
import inspect
import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer

from mfload import errors
from mfload.options import ALLOCATORS, ENGINES, PAGE_CACHES, size
from mfload.peer_options import PeerOptions


def _size(value: Any) -> int:
    # Typer hands a default through the parser as well.
    try:
        return value if isinstance(value, int) else size(value)
    except errors.UsageError as error:
        raise typer.BadParameter(f"{error.found!r} is no size: {error.expected}") from None


def option(metavar: str, text: str, *names: str, offers: tuple[str, ...] = ()) -> Any:
    """An option with a value; `offers` are words that the tab key completes."""

    def complete(incomplete: str) -> list[str]:
        return [each for each in offers if each.startswith(incomplete)]

    return typer.Option(*names, metavar=metavar, help=text, autocompletion=complete)


def sized(name: str, text: str) -> Any:
    """An option that takes a size such as 4096, 256MiB or 1.5GB."""
    return typer.Option(name, metavar="SIZE", parser=_size, help=text)


def flag(text: str, *names: str) -> Any:
    """An option without a value."""
    return typer.Option(*names, help=text)


def argument(metavar: str, text: str) -> Any:
    """What is given without the name of an option."""
    return typer.Argument(metavar=metavar, help=text, show_default=False)


def command(**makers: Callable[..., Any]) -> Callable[[Callable[..., Any]], Any]:
    """Makes a function a command, which has the parameters of makers in place of what they make."""

    def decorate(function: Callable[..., Any]) -> Any:
        takes = {name: _parameters(maker) for name, maker in makers.items()}
        shown: dict[str, inspect.Parameter] = {}
        for name, each in _parameters(function).items():
            shown |= takes.get(name, {name: each})

        @functools.wraps(function)
        def call(**given: Any) -> Any:
            for name, maker in makers.items():
                given[name] = maker(**{each: given.pop(each) for each in takes[name]})
            return function(**given)

        seen: Any = call  # By typer, which reads the signature.
        seen.__signature__, seen.__annotations__ = inspect.Signature([*shown.values()]), {}
        return seen

    return decorate


def _parameters(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    # `ls` names the options of this module without importing it, since typer takes long.
    known = {**function.__globals__, "options": sys.modules[__name__]}
    found = inspect.signature(function, globals=known, eval_str=True).parameters
    return {name: each.replace(kind=each.KEYWORD_ONLY) for name, each in found.items()}


_PATH = (
    "A .safetensors, .npz or .npy file, a directory, an index; a URL of one, such as https://, "
    "s3://, gs://, az:// or hf://; or peer://HOST:PORT/MODEL."
)
_FRAMEWORKS = ("numpy", "jax", "torch", "tensorflow", "paddle", "cupy")
_FRAMEWORK = "numpy, jax, torch, tensorflow, paddle or cupy."
_DEVICE = (
    "Such as cpu:1 or cuda:0; the framework's own default. Given several times, all tensors go to "
    "all of them, or with a REGEX those whose names match."
)
_NAMES = "Only tensors with a match of this regular expression in their names."
_DTYPE = (
    "Convert floats to this dtype, or the tensors whose names match to theirs; may be given "
    "several times."
)
_ENGINE = "auto, pread, direct or mmap; onto GPUs pinned or gds as well."
_PAGE_CACHE = "What is read from the disk is kept in the page cache or not: auto, keep or bypass."
_ALLOCATOR = "Whose memory holds the arrays: auto, mfload or framework."
_STORE = (
    "'name: value', a setting of the object store as the package obstore takes it, such as "
    "'region: eu-west-1'; may be given several times. @FILE reads a secret, one setting a line."
)
_CACHE = "Keep what is read of files behind URLs there, for the next load."
_CACHE_SIZE = "What it may keep. Default: a tenth of its file system."
_BANDWIDTH = "Bytes a second from servers and stores, at most."
_HEADER = (
    "'Name: value', sent with each request for a URL, to its own server alone; may be given "
    "several times. Other users of the machine see a command's arguments: @FILE reads a secret, "
    "one header a line."
)
_AUTHORITY = (
    "Certificates of the authority that signed those of https:// servers, in place of the "
    "system's, and of seeds, which are then read over TLS."
)
_CERTIFICATE = "A certificate of one's own, for servers and seeds that ask for one."
_FALLBACK = "Another place of the same checkpoint, taken where PATH can't be read."
_LONGEST = 1 << 16  # Bytes of a file of headers.
_HOST = "Host memory beside the result, such as 256MiB."
_GPU = "Memory of a GPU beside the result, such as 256MiB."

Checkpoint = Annotated[str, argument("PATH", _PATH)]
Framework = Annotated[str, option("NAME", _FRAMEWORK, "--framework", "-f", offers=_FRAMEWORKS)]
Device = Annotated[list[str] | None, option("[REGEX=]DEVICE", _DEVICE, "--device")]
Names = Annotated[str | None, option("REGEX", _NAMES)]
Dtypes = Annotated[list[str] | None, option("[REGEX=]DTYPE", _DTYPE, "--dtype")]
Engine = Annotated[str, option("NAME", _ENGINE, offers=ENGINES)]
PageCache = Annotated[str, option("HOW", _PAGE_CACHE, "--page-cache", offers=PAGE_CACHES)]
Allocator = Annotated[str, option("NAME", _ALLOCATOR, offers=ALLOCATORS)]
HostOverhead = Annotated[int | None, sized("--max-host-overhead", _HOST)]
DeviceOverhead = Annotated[int | None, sized("--max-device-overhead", _GPU)]
Threads = Annotated[int | None, option("N", "Number of reader threads. Default: chosen.")]
Timeout = Annotated[float | None, option("SECONDS", "Give up after that long.")]
Fallback = Annotated[str | None, option("OTHER", _FALLBACK)]
Prefer = Annotated[str, option("path|fallback", "Tried first.", offers=("path", "fallback"))]
Planner = Annotated[str | None, option("URL", "Who knows the seeds of peer:///MODEL.")]
Token = Annotated[str | None, option("FILE", "The token for seeds and their planner.")]
Headers = Annotated[list[str] | None, option("HEADER", _HEADER, "--header")]
Store = Annotated[list[str] | None, option("SETTING", _STORE, "--store")]
Cache = Annotated[str | None, option("DIRECTORY", _CACHE)]
CacheSize = Annotated[int | None, sized("--cache-size", _CACHE_SIZE)]
Bandwidth = Annotated[int | None, sized("--max-bandwidth", _BANDWIDTH)]
Authority = Annotated[str | None, option("FILE", _AUTHORITY)]
Certificate = Annotated[str | None, option("FILE", _CERTIFICATE)]
Key = Annotated[str | None, option("FILE", "Its key. Default: in --cert-file.")]
Overwrite = Annotated[bool, flag("Replace what is there already.", "--overwrite")]
Json = Annotated[bool, flag("Print JSON for machines.", "--json")]

# Of `ls` alone:
_ONLY_DTYPE = "Only this dtype; may be given several times."
_ORDERS = "offset (the order of the files), name, or size."
_LIMIT = "Only the first N rows; totals of all."
_DEPTH = "Levels of the tree. Default: all."

Only = Annotated[list[str] | None, option("DTYPE", _ONLY_DTYPE, "--dtype")]
Above = Annotated[int | None, sized("--larger-than", "Only tensors above this size.")]
Below = Annotated[int | None, sized("--smaller-than", "Only tensors below this size.")]
Sort = Annotated[str, option("KEY", _ORDERS, offers=("offset", "name", "size"))]
Limit = Annotated[int | None, typer.Option(min=0, metavar="N", help=_LIMIT)]
Tree = Annotated[bool, flag("Group by the dots in names.", "--tree")]
Depth = Annotated[int | None, typer.Option(min=1, metavar="N", help=_DEPTH)]
Summary = Annotated[bool, flag("Totals only, of each file.", "--summary")]
Metadata = Annotated[bool, flag("Show the metadata of the headers as well.", "--metadata")]
Quiet = Annotated[bool, flag("Rows only: no head, no totals.", "--quiet", "-q")]
Exact = Annotated[bool, flag("Sizes in bytes.", "--bytes", "-b")]


def network(
    planner: Planner = None,
    token_file: Token = None,
    headers: Headers = None,
    ca_file: Authority = None,
    cert_file: Certificate = None,
    key_file: Key = None,
    store: Store = None,
    cache: Cache = None,
    cache_size: CacheSize = None,
    max_bandwidth: Bandwidth = None,
) -> dict[str, Any]:
    """How URLs and `peer://` are read, as arguments of `Options`."""
    return {
        "peer": PeerOptions(planner=planner, token_file=token_file),
        "headers": by_line(headers),
        "store": by_line(store, "--store"),
        "cache": cache,
        "cache_size": cache_size,
        "max_bandwidth": max_bandwidth,
        "ca_file": ca_file,
        "cert_file": cert_file,
        "key_file": key_file,
    }


def by_line(given: list[str] | None, option: str = "--header") -> dict[str, str] | None:
    """Values by name, from `Name: value` or the lines of `@FILE`."""
    lines: list[str] = []
    for each in given or ():
        lines += _lines(each[1:]) if each.startswith("@") else [each]
    pairs = [line.partition(":") for line in lines]
    if not all(colon for _, colon, _ in pairs):
        what = f"{option} takes a name and a value"
        raise errors.UsageError(what, expected="'Name: value', or @FILE with such lines")
    return {name.strip(): value.strip() for name, _, value in pairs} or None


def _lines(path: str) -> list[str]:
    try:
        with open(path, "rb") as file:
            raw = file.read(_LONGEST + 1)
    except OSError as error:
        raise errors.from_os(error, path, "read") from error
    if len(raw) > _LONGEST:
        expected = f"at most {errors.amount(_LONGEST)}"
        raise errors.UsageError(
            "the file of names and values is over the limit", file=path, expected=expected
        )
    lines = raw.removeprefix(codecs.BOM_UTF8).decode("latin-1").split("\n")
    return [line for line in lines if line.strip()]


def by_name(option: str, given: list[str] | None, *, several: bool = False) -> Any:
    """What `--dtype` and `--device` mean to the library: a value, several, or (regex, value)."""
    if not given:
        return None
    if not any("=" in each for each in given) and (several or len(given) == 1):
        return given if len(given) > 1 else given[0]
    return pairs(option, given, ", or none at all")


def pairs(option: str, given: list[str] | None, otherwise: str = "") -> list[Any] | None:
    """The pairs of a regex and a value that an option was given."""
    if not given:
        return None
    rules = [(regex, value) for regex, _, value in (each.rpartition("=") for each in given)]
    if not all(regex and value for regex, value in rules):
        raise errors.UsageError(
            f"{option} takes a regex each time{otherwise}",
            expected=f"REGEX={option[2:].upper()}",
            found=" ".join(given),
        )
    return rules
