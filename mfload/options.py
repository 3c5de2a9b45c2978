"""`mfload.Options`: how a checkpoint is loaded, the same object for every call."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from mfload import errors
from mfload.runtime import Deadline

Engine = Literal["auto", "mmap", "pread", "direct", "pinned", "gds"]
Allocator = Literal["auto", "mfload", "framework"]
Exchange = Literal["auto", "never", "once"]
PageCache = Literal["auto", "keep", "bypass"]
ENGINES: tuple[str, ...] = get_args(Engine)
ALLOCATORS: tuple[str, ...] = get_args(Allocator)
EXCHANGES: tuple[str, ...] = get_args(Exchange)
PAGE_CACHES: tuple[str, ...] = get_args(PageCache)
_CHOICES = {
    "engine": ENGINES,
    "allocator": ALLOCATORS,
    "exchange": EXCHANGES,
    "page_cache": PAGE_CACHES,
}
# Engines that can't do what is asked of the page cache.
_AGAINST = {"keep": ("direct", "gds"), "bypass": ("pread", "mmap")}


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerOptions:
    """How `peer://` is read, and how a seed of this process serves.

    Every field is validated when the object is made.

    Attributes:
        planner: Where to ask for seeds, and where a seed registers: "http://host:port",
            "https://…" or "etcd://host:port".
        token_file: File with the token that is sent to seeds and planner, and that readers of a
            seed must send; at least 8 characters.
        publish: Whether the arrays of a load become a seed, so that others read from this process
            until it ends.
        address: Where a seed listens, "host:port"; port 0 takes a free one. Others than loopback
            addresses (127.0.0.1) need a token or mutual TLS.
        checksums: Whether bytes are compared with the checksums of the seed as they arrive; and
            whether a seed makes them, at the speed of memory.
        transports: Names of the transports to use, best first, or that a seed of `mfload.publish`
            offers, such as "http" and "nixl". With "cuda_ipc", "nixl" or "collective", its arrays
            on CUDA devices stay there. Default: all that need no consent: "memory", "memfd",
            "http".
        copy: Whether arrays never lie in the device memory of a seed. Default: over "cuda_ipc"
            they do where the seed holds them on the device that they are loaded to, and must not
            be written to.
        timeout: Seconds that peers have in all, before a fall-back is taken. Default: half of
            `Options.timeout`, or no limit.
        stalled: Seconds without progress after which a peer is given up. A peer on this machine has
            six times as long to begin an answer.
        ca_file: Certificates of the authority that signed those of seeds; with it, connections use
            TLS, and readers of a seed need a certificate that it signed. Default of this and the
            next two: those of `Options`.
        cert_file: This process's own certificate, for seeds that ask for it, and for its own seed,
            to which readers then connect by TLS.
        key_file: Its key. Default: in `cert_file`.

    Raises:
        UsageError: A value is invalid.
    """

    planner: str | None = None
    token_file: str | os.PathLike[str] | None = field(default=None, repr=False)
    publish: bool = False
    address: str = "127.0.0.1:0"
    checksums: bool = True
    transports: tuple[str, ...] | None = None
    copy: bool = False
    timeout: float | None = None
    stalled: float = 1.5
    ca_file: str | os.PathLike[str] | None = None
    cert_file: str | os.PathLike[str] | None = None
    key_file: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        Deadline(self.timeout)
        if Deadline(self.stalled).seconds is None:
            what, expected = "stalled has no end", "seconds, such as 1.5"
            raise errors.UsageError(what, expected=expected, found=repr(self.stalled))
        for name, kind in _PEER_KINDS.items():
            if type(value := getattr(self, name)) is not kind:
                what, expected = f"{name} is invalid", f"a {kind.__name__}"
                raise errors.UsageError(what, expected=expected, found=repr(value))
        given: Any = self.transports
        if given is not None:
            several = isinstance(given, Iterable) and not isinstance(given, str)
            names: tuple[Any, ...] = tuple(given) if several else (given,)
            if not all(isinstance(each, str) for each in names):
                what, expected = "transports are invalid", "names, such as 'memory' and 'http'"
                raise errors.UsageError(what, expected=expected, found=repr(given))
            object.__setattr__(self, "transports", names)
        _check_certificate(self)
        for name in ("publish", "checksums", "copy"):
            if type(found := getattr(self, name)) is not bool:
                what = f"{name} is not a bool"
                raise errors.UsageError(what, expected="True or False", found=repr(found))
        if self.publish and self.ca_file is not None and self.cert_file is None:
            what = "a seed among those with certificates needs its own"
            raise errors.UsageError(what, expected="cert_file= beside publish=True and ca_file=")
        if self.planner is not None and "://" not in str(self.planner):
            expected = "http://host:port, https://host:port or etcd://host:port"
            found = str(self.planner).rpartition("@")[2]  # Before it there may be a password.
            raise errors.UsageError("planner is not a URL", expected=expected, found=found)


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
        for name in ("max_host_overhead", "max_device_overhead"):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, byte_count(name, value, 0))
        if self.headers is not None:
            object.__setattr__(self, "headers", _checked_headers(self.headers))
        if self.peer is not None and not isinstance(self.peer, PeerOptions):  # pyright: ignore
            what, expected = "peer must be an mfload.PeerOptions", "mfload.PeerOptions(…)"
            raise errors.UsageError(what, expected=expected, found=repr(self.peer))
        _check_certificate(self)
        given = {name: getattr(self, name) for name in _CERTIFICATES if getattr(self, name)}
        peer = self.peer or PeerOptions()
        if given and not (peer.ca_file or peer.cert_file):
            object.__setattr__(self, "peer", replace(peer, **given))


_CERTIFICATES = ("ca_file", "cert_file", "key_file")
_PEER_KINDS = {"publish": bool, "checksums": bool, "copy": bool, "address": str}


def _check_certificate(given: Options | PeerOptions) -> None:
    for name in (*_CERTIFICATES, "token_file"):
        file = getattr(given, name, None)
        if file is not None and not isinstance(file, str | os.PathLike):
            what, found = f"{name} is not a path", type(file).__name__
            raise errors.UsageError(what, expected="the path of a file", found=found)
    if given.key_file is not None and given.cert_file is None:
        raise errors.UsageError("key_file= has no certificate", expected="cert_file=")


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
        valid = isinstance(name, str) and _HEADER.fullmatch(name)
        if not valid or name.lower() in _OWN_HEADERS:
            # A value may stand in the place of the name.
            what, found = "the header can't be set", name if valid else None
            raise errors.UsageError(what, expected="a name such as Authorization", found=found)
        if not isinstance(value, str) or not _HEADER_VALUE.fullmatch(value):
            what = f"the value of the header {name} is invalid"
            raise errors.UsageError(what, expected="printable text in Latin-1, on one line")
    return pairs


_HEADER = re.compile(r"[\w!#$%&'*+.^`|~-]+", re.ASCII)
_HEADER_VALUE = re.compile(r"[\t -~\xa0-\xff]*")
_OWN_HEADERS = {"accept-encoding", "connection", "content-length", "host", "if-range", "range",
                "te", "transfer-encoding"}  # fmt: skip

_UNITS = {"": 1}
for _n, _prefix in enumerate("kmgtp", 1):
    _UNITS[_prefix], _UNITS[f"{_prefix}i"] = 1000**_n, 1024**_n
_SIZE = re.compile(r"(\d{1,99}(?:\.\d{1,99})?)\s*([kmgtp]?i?)b?", re.IGNORECASE | re.ASCII)


def byte_count(name: str, value: Any, least: int) -> int:
    """Bytes that an argument gives, as a whole number or as a size; `least` or more."""
    number = size(value, name) if isinstance(value, str) else value
    _check_count(name, number, least)
    return number if isinstance(number, errors.Size) else int(number)


def size(text: str, name: str = "value") -> int:
    """Bytes of a size such as "4096", "256MiB", "1.5GB" or "64k"; units with an i are binary.

    With a unit it is an `errors.Size`.
    """
    match = _SIZE.fullmatch(text.strip())
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
