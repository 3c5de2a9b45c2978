"""How a checkpoint is loaded: `mfload.Options`, the same for every call, and those of one call."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, get_args

from mfload import errors
from mfload.runtime import Deadline

if TYPE_CHECKING:
    from mfload.peer_options import PeerOptions

Engine = Literal["auto", "mmap", "pread", "direct", "pinned", "gds"]
Allocator = Literal["auto", "mfload", "framework"]
Exchange = Literal["auto", "never", "once"]
PageCache = Literal["auto", "keep", "bypass"]
ENGINES: tuple[str, ...] = get_args(Engine)
ALLOCATORS: tuple[str, ...] = get_args(Allocator)
EXCHANGES: tuple[str, ...] = get_args(Exchange)
PAGE_CACHES: tuple[str, ...] = get_args(PageCache)
Unmatched = Literal["replicate", "error"]
UNMATCHED: tuple[str, ...] = get_args(Unmatched)

OVERHEAD = 256 << 20
"""Default of both memory limits, in bytes beside the result."""

_CHOICES = {
    "engine": ENGINES,
    "allocator": ALLOCATORS,
    "exchange": EXCHANGES,
    "page_cache": PAGE_CACHES,
}
_SIZES = {"max_host_overhead": 0, "max_device_overhead": 0, "max_bandwidth": 1, "cache_size": 0}
# Engines that can't do what is asked of the page cache.
_AGAINST = {"keep": ("direct", "gds"), "bypass": ("pread", "mmap")}


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How a checkpoint is loaded. Every field is validated when the object is made.

    Attributes:
        engine: How bytes are read. "pread" reads through the page cache, "direct" past it
            (O_DIRECT), "mmap" maps the file privately and copies nothing: a file truncated later
            kills the process that touches it. "auto" takes pread where the page cache holds the
            file or is to keep it, else direct. Onto a CUDA device: "pinned" (through page-locked
            memory) or "gds" (through cuFile); "pread" and "direct" say how pinned memory is filled,
            and with "mmap" the framework copies from the map.
        allocator: Whose memory holds the arrays: "mfload", "framework" (which JAX on a CPU can
            donate), or "auto": mfload's on the host; on a CUDA device XLA's pool for JAX, and the
            framework's own for the others.
        exchange: Whether processes read for each other. "never": each reads its own shards;
            "once": every byte is read by one process and sent on; "auto": decided by how many
            bytes would be read more than once.
        page_cache: Whether the next load is to find in the page cache what this one reads from the
            disk. "keep": yes; "bypass": no, it is read with O_DIRECT where the file takes it;
            "auto": yes if the load reads at most a quarter of the available memory, and O_DIRECT
            does not prove much faster while it reads.
        threads: Number of reader threads. Default: chosen from the cores and the engine; of large
            cold files, the number that is fastest while they are read.
        timeout: Seconds after which a call raises LoadTimeoutError; of what was opened, for each
            request. Readers that hang keep the buffers that they fill until their reads return.
            Default: never.
        max_host_overhead: Bytes of host memory beside the result, as a number or a text such as
            "256MiB". Default: 256 MiB, or one tensor where a framework must copy a larger one.
        max_device_overhead: The same for the memory of each device.
        headers: Names and values that are sent with each request for a URL, to its own server
            alone, such as `{"Authorization": "Bearer …"}`. Never shown.
        ca_file: Certificates of the authority that signed those of `https://` servers, in place of
            the system's, and of seeds, which are then read over TLS. Default: the system's, or
            those that the environment variables SSL_CERT_FILE and SSL_CERT_DIR name.
        cert_file: This process's own certificate, for servers and seeds that ask for one.
        key_file: Its key. Default: in `cert_file`.
        peer: How `peer://` is read.
        store: Settings of the object store of `s3://`, `gs://`, `az://`: names and values as the
            package obstore takes them, such as `{"endpoint": "https://…", "region": "eu-west-1"}`;
            and `profile`, one of AWS. Never shown. Default: what the environment, profiles and the
            machine's identity say.
        cache: A directory that keeps what is read of files behind URLs, for the next load and for
            other processes (see `docs/how-to/cache.md`).
        cache_size: Bytes that it may keep; what was used longest ago goes. Default: a tenth of its
            file system.
        max_bandwidth: Bytes a second that a load takes from servers and stores, at most, as a
            number or a text such as "500MB". Loads of this process with the same number share it.
            Default: any.

    Raises:
        UsageError: A value is invalid.
    """

    engine: Literal["auto", "mmap", "pread", "direct", "pinned", "gds"] = "auto"
    allocator: Literal["auto", "mfload", "framework"] = "auto"
    exchange: Literal["auto", "never", "once"] = "auto"
    page_cache: Literal["auto", "keep", "bypass"] = "auto"
    threads: int | None = None
    timeout: float | None = None
    max_host_overhead: int | str | None = None
    max_device_overhead: int | str | None = None
    headers: Mapping[str, str] | tuple[tuple[str, str], ...] | None = field(
        default=None, repr=False
    )
    ca_file: str | os.PathLike[str] | None = None
    cert_file: str | os.PathLike[str] | None = None
    key_file: str | os.PathLike[str] | None = None
    peer: PeerOptions | None = None
    # Settings may hold what has no hash.
    store: Mapping[str, Any] | tuple[tuple[str, Any], ...] | None = field(
        default=None, repr=False, hash=False
    )
    cache: str | os.PathLike[str] | None = None
    cache_size: int | str | None = None
    max_bandwidth: int | str | None = None

    def __post_init__(self) -> None:
        for name, known in _CHOICES.items():
            if getattr(self, name) not in known:
                errors.check_choice(name, getattr(self, name), known)
        if self.engine in _AGAINST.get(self.page_cache, ()):
            past = "past" if self.engine in _AGAINST["keep"] else "through"
            raise errors.UsageError(
                f"engine={self.engine!r} reads {past} the page cache",
                expected=f"another engine, or none, beside page_cache={self.page_cache!r}",
            )
        if self.threads is not None:
            _check_count("threads", self.threads, 1)
        if self.timeout is not None:
            Deadline(self.timeout)
            if not isinstance(self.timeout, int | float):  # pyright: ignore - NumPy's, say
                object.__setattr__(self, "timeout", float(self.timeout))
        for name, least in _SIZES.items():
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, byte_count(name, value, least))
        if self.store is not None:
            object.__setattr__(self, "store", _checked_settings(self.store))
        if self.cache is not None:
            object.__setattr__(self, "cache", _checked_cache(self.cache))
        if self.headers is not None:
            object.__setattr__(self, "headers", _checked_headers(self.headers))
        certificates = {name: getattr(self, name) for name in ("ca_file", "cert_file", "key_file")}
        if self.peer is not None or any(each is not None for each in certificates.values()):
            from mfload.peer_options import checked  # Late: a dataclass takes 0.7 ms to import.

            object.__setattr__(self, "peer", checked(self.peer, certificates))


def _check_count(name: str, value: object, least: int) -> None:
    # NumPy's integers count; booleans are ints by accident.
    if isinstance(value, bool) or not hasattr(value, "__index__") or value < least:  # pyright: ignore
        raise errors.UsageError(
            f"{name} must be {least} or more", expected="a whole number", found=repr(value)
        )


def _checked_headers(given: Any) -> tuple[tuple[str, str], ...]:
    """Headers as pairs, which can be hashed; an error shows no value."""
    try:
        pairs = tuple(dict(given).items())
    except (TypeError, ValueError):
        what, found = "headers are invalid", type(given).__name__
        raise errors.UsageError(what, expected="{name: value}", found=found) from None
    for name, value in pairs:
        valid = isinstance(name, str) and re.fullmatch(_HEADER, name)
        if not valid or name.lower() in _OWN_HEADERS:
            # A value may stand in the place of the name.
            what, found = "the header can't be set", name if valid else None
            raise errors.UsageError(what, expected="a name such as Authorization", found=found)
        if not isinstance(value, str) or not re.fullmatch(_HEADER_VALUE, value):
            what = f"the value of the header {name} is invalid"
            raise errors.UsageError(what, expected="printable text in Latin-1, on one line")
    return pairs


def _checked_settings(given: Any) -> tuple[tuple[str, Any], ...]:
    """Settings of a store as pairs; an error shows no value."""
    try:
        pairs = tuple(dict(given).items())
    except (TypeError, ValueError):
        pairs = ((None, None),)
    if not all(isinstance(name, str) for name, _ in pairs):
        what, found = "the settings of the store are invalid", type(given).__name__
        raise errors.UsageError(what, expected='{"region": "…"}', found=found)
    return pairs


def _checked_cache(given: Any) -> str:
    """The directory of a cache as absolute text: the process may change its own."""
    try:
        path = os.fsdecode(given)
    except (TypeError, UnicodeError):
        path = ""
    if not path or "\0" in path or "://" in path:
        what = "the cache is not a directory"
        raise errors.UsageError(what, expected="a local path", found=repr(given))
    return os.path.abspath(path)


_HEADER = r"[A-Za-z0-9_!#$%&'*+.^`|~-]+"
_HEADER_VALUE = r"[\t -~\xa0-\xff]*"
_OWN_HEADERS = {"accept-encoding", "connection", "content-length", "host", "if-range", "range",
                "te", "transfer-encoding"}  # fmt: skip

_UNITS = {"": 1}
for _n, _prefix in enumerate("kmgtp", 1):
    _UNITS[_prefix], _UNITS[f"{_prefix}i"] = 1000**_n, 1024**_n
_SIZE = r"(?ai)(\d{1,99}(?:\.\d{1,99})?)\s*([kmgtp]?i?)b?"


def byte_count(name: str, value: Any, least: int) -> int:
    """Bytes that an argument gives, as a whole number or as a size; `least` or more."""
    number = size(value, name) if isinstance(value, str) else value
    _check_count(name, number, least)
    return number if isinstance(number, errors.Size) else int(number)


def size(text: str, name: str = "value") -> int:
    """Bytes of a size such as "4096", "256MiB", "1.5GB" or "64k"; units with an i are binary.

    With a unit it is an `errors.Size`.
    """
    match = re.fullmatch(_SIZE, text.strip())
    if match is None or match[2].lower() not in _UNITS:
        raise errors.UsageError(
            f"{name} is not a size", expected="bytes, or a size as 256MiB or 1.5GB", found=text
        )
    whole, _, part = match[1].partition(".")
    prefix = match[2].lower()
    unit = _UNITS[prefix]
    nbytes = int(whole) * unit + (int(part) * unit // 10 ** len(part) if part else 0)
    if not prefix:
        return nbytes
    shown = prefix if prefix == "k" else prefix[0].upper() + prefix[1:]
    return errors.Size(nbytes, f"{shown}B", unit)


class LoadOptions(Options):
    """The options of a call that has begun.

    Attributes:
        deadline: When `timeout` has run out.
        by_host: Whether all arrays pass through host memory.
        check: Compares what is read with a manifest, where `verify=` asks for it (see
            `loading.session.verifying`).
    """

    __slots__ = ("by_host", "check", "deadline")

    if TYPE_CHECKING:  # They were sizes, mappings and a path.
        max_host_overhead: int | None  # pyright: ignore
        max_device_overhead: int | None  # pyright: ignore
        headers: tuple[tuple[str, str], ...] | None  # pyright: ignore
        store: tuple[tuple[str, Any], ...] | None  # pyright: ignore
        cache: str | None  # pyright: ignore
        cache_size: int | None  # pyright: ignore
        max_bandwidth: int | None  # pyright: ignore

    deadline: Deadline
    by_host: bool
    check: Any

    def __init__(
        self,
        *,
        deadline: Deadline | None = None,
        by_host: bool = False,
        check: Any = None,
        **given: Any,
    ) -> None:
        super().__init__(**given)
        object.__setattr__(self, "check", check)
        object.__setattr__(self, "deadline", deadline or Deadline(None))
        object.__setattr__(self, "by_host", by_host)

    @classmethod
    def of(cls, options: Options, **changes: Any) -> LoadOptions:
        """The fields of valid options, some of them changed, without another check."""
        made = object.__new__(cls)
        for name in _FIELDS:
            value = changes[name] if name in changes else getattr(options, name)
            object.__setattr__(made, name, value)
        return made

    def replace(self, **changes: Any) -> LoadOptions:
        """The same options with some of them changed."""
        return LoadOptions.of(self, **changes)


_FIELDS = (*Options.__dataclass_fields__, *LoadOptions.__slots__)
_DEFAULT = LoadOptions()


def started(options: Options | None, deadline: Deadline | None = None) -> LoadOptions:
    """The options of a call that begins now, or began with `deadline`."""
    if options is None:
        return _DEFAULT.replace(deadline=deadline) if deadline else _DEFAULT
    if not isinstance(options, Options):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise errors.UsageError(
            "options must be an mfload.Options",
            expected="options=mfload.Options(engine=…, threads=…, …)",
            found=repr(options),
        )
    return LoadOptions.of(
        options, deadline=deadline or Deadline(options.timeout), by_host=False, check=None
    )
