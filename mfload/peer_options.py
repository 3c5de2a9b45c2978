"""`mfload.PeerOptions`: how weights are read from other processes, and served to them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from mfload import errors
from mfload.runtime import Deadline

_KINDS = {"publish": bool, "checksums": bool, "copy": bool, "address": str}


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
        for name, kind in _KINDS.items():
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
        names = ("ca_file", "cert_file", "key_file", "token_file")
        _check_files({name: getattr(self, name) for name in names})
        if self.publish and self.ca_file is not None and self.cert_file is None:
            what = "a seed among those with certificates needs its own"
            raise errors.UsageError(what, expected="cert_file= beside publish=True and ca_file=")
        if self.planner is not None and "://" not in str(self.planner):
            expected = "http://host:port, https://host:port or etcd://host:port"
            found = str(self.planner).rpartition("@")[2]  # Before it there may be a password.
            raise errors.UsageError("planner is not a URL", expected=expected, found=found)


def checked(peer: Any, certificates: Mapping[str, Any]) -> PeerOptions | None:
    """How peers are read in a call with its own certificates, where `peer` names no others.

    Raises:
        UsageError: One of the files is not a path, or `peer` is not a PeerOptions.
    """
    if peer is not None and not isinstance(peer, PeerOptions):
        what, expected = "peer must be an mfload.PeerOptions", "mfload.PeerOptions(…)"
        raise errors.UsageError(what, expected=expected, found=repr(peer))
    _check_files(certificates)
    given = {name: file for name, file in certificates.items() if file}
    if not given or (peer is not None and (peer.ca_file or peer.cert_file)):
        return peer
    return replace(peer or PeerOptions(), **given)


def _check_files(files: Mapping[str, Any]) -> None:
    for name, file in files.items():
        if file is not None and not isinstance(file, str | os.PathLike):
            what, found = f"{name} is not a path", type(file).__name__
            raise errors.UsageError(what, expected="the path of a file", found=found)
    if files["key_file"] is not None and files["cert_file"] is None:
        raise errors.UsageError("key_file= has no certificate", expected="cert_file=")
