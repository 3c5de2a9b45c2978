"""What guards a listener and a connection: tokens, certificates, addresses."""

from __future__ import annotations

import ipaddress
import os
import re
import socket
import ssl
from dataclasses import dataclass

from mfload import errors
from mfload.options import PeerOptions

_TOKEN = re.compile(r"[!-~]{8,512}")
_LABEL = "[A-Za-z0-9_-]{1,63}"  # Longer ones Python does not look up.
_ADDRESS = re.compile(rf"(?:\[([0-9A-Fa-f:.]+)\]|({_LABEL}(?:\.{_LABEL})*\.?)):(\d{{1,5}})")


def credentials(given: PeerOptions) -> tuple[str | None, Tls | None]:
    """The token and the certificates that options name; raises UsageError as `read_token`."""
    token = None if given.token_file is None else read_token(given.token_file)
    if given.ca_file is None and given.cert_file is None:
        return token, None
    return token, Tls(given.cert_file, given.key_file, given.ca_file)


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

    @staticmethod
    def of_server(*files: str | os.PathLike[str] | None) -> Tls | None:
        """That of a server with these files, in their order; None if none is given."""
        return Tls(*files) if any(each is not None for each in files) else None

    def context(self, server: bool) -> ssl.SSLContext:
        """The context of a server, which asks for certificates if `ca_file` is set; or a client's.

        Raises UsageError for files that hold no certificate.
        """
        if server and self.cert_file is None:
            raise errors.UsageError("TLS needs a certificate", expected="cert_file=")
        try:
            purpose = ssl.Purpose.CLIENT_AUTH if server else ssl.Purpose.SERVER_AUTH
            context = ssl.create_default_context(purpose, cafile=self.ca_file)
            if self.cert_file is not None:
                context.load_cert_chain(self.cert_file, self.key_file)
        except (ssl.SSLError, OSError) as error:
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


def resolved(address: str) -> list[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    """The IP addresses of "host:port"; raises UsageError for a host that is unknown."""
    host, port = split_address(address)
    try:
        rows = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise errors.UsageError("the address is unknown", found=address) from error
    found = [ipaddress.ip_address(str(row[4][0]).partition("%")[0]) for row in rows]
    return [getattr(each, "ipv4_mapped", None) or each for each in found]


def check_exposure(address: str, token: str | None, tls: Tls | None) -> None:
    """Raises UsageError for an address beyond this machine that nothing guards."""
    if all(each.is_loopback for each in resolved(address)):
        return
    if token is None and (tls is None or not tls.mutual):
        raise errors.UsageError(
            "a listener that other machines reach needs a token or mutual TLS",
            expected="token_file=, or cert_file= and ca_file=; or an address such as 127.0.0.1:0",
            found=address,
        )
