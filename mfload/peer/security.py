"""What guards a listener and a connection: tokens, certificates, addresses."""

from __future__ import annotations

import ipaddress
import os
import re
import socket

from mfload import errors
from mfload.peer_options import PeerOptions
from mfload.sources.tls import Tls

_TOKEN = re.compile(r"[!-~]{8,512}")
_LABEL = "[A-Za-z0-9_-]{1,63}"  # Longer ones Python does not look up.
_ADDRESS = re.compile(rf"(?:\[([0-9A-Fa-f:.]+)\]|({_LABEL}(?:\.{_LABEL})*\.?)):(\d{{1,5}})")


def credentials(given: PeerOptions) -> tuple[str | None, Tls | None]:
    """The token and the certificates that options name; raises UsageError as `read_token`."""
    token = None if given.token_file is None else read_token(given.token_file)
    return token, Tls.of(given.cert_file, given.key_file, given.ca_file)


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


def split_address(address: str) -> tuple[str, int]:
    """Host and port of "host:port" or "[v6]:port"; raises UsageError for anything else."""
    match = _ADDRESS.fullmatch(address) if isinstance(address, str) else None  # pyright: ignore
    if match is None or int(match[3]) > 65535:
        found = re.split("[?#]", str(address).rpartition("@")[2])[0]  # The rest may be secret.
        raise errors.UsageError(
            "not an address", expected="host:port", found=errors.shown(found, 80)
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
