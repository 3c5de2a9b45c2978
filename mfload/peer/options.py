"""`mfload.PeerOptions`: how weights come from running processes, and what guards a listener."""

from __future__ import annotations

import ipaddress
import os
import re
import socket
import ssl
from dataclasses import dataclass, field

from mfload import errors

_TOKEN = re.compile(r"[!-~]{8,512}")
_ADDRESS = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([A-Za-z0-9._-]+)):(\d{1,5})")


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerOptions:
    """How `peer://` is read. Every field is validated when the object is made.

    Attributes:
        planner: Where to ask for seeds: "http://host:port", "https://…" or "etcd://host:port".
        token_file: File with the token that is sent to seeds and planner, at least 8 characters.
        publish: Whether the arrays of a load become a seed, so that others read from this process.
        checksums: Whether bytes are compared with the checksums of the seed as they arrive.
        transports: Names of the transports to use, best first. Default: all that need no consent:
            "memory", "memfd", "http".
        timeout: Seconds that peers have in all, before a fall-back is taken. Default: half of
            `Options.timeout`, or no limit.
        stalled: Seconds without progress after which a peer is given up.
        ca_file: Certificates of the authority that signed those of seeds; with it, connections use
            TLS.
        cert_file: This process's own certificate, for seeds that ask for it, and for its own seed.
        key_file: Its key. Default: in `cert_file`.

    Raises:
        UsageError: A value is invalid.
    """

    planner: str | None = None
    token_file: str | os.PathLike[str] | None = field(default=None, repr=False)
    publish: bool = False
    checksums: bool = True
    transports: tuple[str, ...] | None = None
    timeout: float | None = None
    stalled: float = 1.5
    ca_file: str | os.PathLike[str] | None = None
    cert_file: str | os.PathLike[str] | None = None
    key_file: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        for name in ("timeout", "stalled"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, int | float) and value > 0):
                what = f"{name} must be positive"
                raise errors.UsageError(what, expected="seconds above 0", found=repr(value))
        if isinstance(self.transports, str):
            object.__setattr__(self, "transports", (self.transports,))
        elif self.transports is not None:
            object.__setattr__(self, "transports", tuple(self.transports))
        if self.key_file is not None and self.cert_file is None:
            raise errors.UsageError("key_file= has no certificate", expected="cert_file=")
        if self.planner is not None and "://" not in self.planner:
            expected = "http://host:port, https://host:port or etcd://host:port"
            raise errors.UsageError("planner is not a URL", expected=expected, found=self.planner)

    @property
    def token(self) -> str | None:
        """The token of `token_file`."""
        return None if self.token_file is None else read_token(self.token_file)

    @property
    def tls(self) -> Tls | None:
        """The certificates; None for connections without TLS."""
        if self.ca_file is None and self.cert_file is None:
            return None
        return Tls(self.cert_file, self.key_file, self.ca_file)


def read_token(path: str | os.PathLike[str]) -> str:
    """The token in a file; an error does not show it."""
    try:
        with open(path, encoding="ascii") as file:
            token = file.read(1024).strip()
    except UnicodeDecodeError:
        token = ""
    except OSError as error:
        raise errors.from_os(error, os.fspath(path), "read") from error
    if not _TOKEN.fullmatch(token):
        what = "the token file holds no token"
        expected = "one line of 8 to 512 printable ASCII characters"
        raise errors.UsageError(what, file=path, expected=expected)
    return token


@dataclass(frozen=True, slots=True)
class Tls:
    """Certificates by file: one's own, its key, and those of the authority that others need."""

    cert_file: str | os.PathLike[str] | None = None
    key_file: str | os.PathLike[str] | None = None
    ca_file: str | os.PathLike[str] | None = None

    def context(self, server: bool) -> ssl.SSLContext:
        """The context of a server, which asks for certificates if `ca_file` is set; or a client's.

        Raises UsageError for files that hold no certificate.
        """
        try:
            purpose = ssl.Purpose.CLIENT_AUTH if server else ssl.Purpose.SERVER_AUTH
            context = ssl.create_default_context(purpose, cafile=self.ca_file)
            if self.cert_file is not None:
                context.load_cert_chain(self.cert_file, self.key_file)
            elif server:
                raise errors.UsageError("TLS needs a certificate", expected="cert_file=")
        except (ssl.SSLError, OSError) as error:
            if isinstance(error, errors.MfloadError):
                raise
            files = ", ".join(str(each) for each in (self.cert_file, self.ca_file) if each)
            what = "a certificate can't be used"
            raise errors.UsageError(what, file=files, found=str(error)) from error
        if server and self.ca_file is not None:
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    @property
    def mutual(self) -> bool:
        """Whether a server asks clients for certificates."""
        return self.cert_file is not None and self.ca_file is not None


def split_address(address: str) -> tuple[str, int]:
    """Host and port of "host:port" or "[v6]:port"; raises UsageError for anything else."""
    match = _ADDRESS.fullmatch(address) if isinstance(address, str) else None  # pyright: ignore
    if match is None or int(match[3]) > 65535:
        raise errors.UsageError(
            "not an address", expected="host:port", found=errors.shown(address, 80)
        )
    return match[1] or match[2], int(match[3])


def join_address(host: str, port: int) -> str:
    """The text of a host and a port."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def check_exposure(address: str, token: str | None, tls: Tls | None) -> None:
    """Raises UsageError for an address beyond this machine that nothing guards."""
    host, port = split_address(address)
    try:
        found = {str(row[4][0]) for row in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)}
    except OSError as error:
        raise errors.UsageError("the address is unknown", found=address) from error
    if all(ipaddress.ip_address(each.partition("%")[0]).is_loopback for each in found):
        return
    if token is None and (tls is None or not tls.mutual):
        raise errors.UsageError(
            "a listener that other machines reach needs a token or mutual TLS",
            expected="token_file=, or cert_file= and ca_file=; or an address such as 127.0.0.1:0",
            found=address,
        )
