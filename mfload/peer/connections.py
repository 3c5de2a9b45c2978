"""Which process has the other end of a connection within this machine, as the kernel says."""

from __future__ import annotations

import os
import struct
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Any

from mfload.peer.transports import Remote

_ESTABLISHED = "01"


def held_by(pid: int, remote: Remote) -> str:
    """Why a process is not known to be the seed that is asked; "" if it is.

    It must have the other end of a connection to the seed, and belong to this process's user. What
    a seed says of itself does not count: one that relays the answers of another seed is itself at
    the other end. So is a proxy of this user, which a seed behind it can name: what is read of the
    process must still be compared with checksums, or be handed over by it.
    """
    for _ in range(2):
        ends = remote.client.ends()
        inode = None if ends is None else _inode(*ends)
        if inode is not None:
            break
        remote.check()  # By a new connection, if the seed closed the one that was there.
    else:
        return "the seed runs on another machine, or apart from this process"
    try:
        if os.stat(f"/proc/{pid}").st_uid != os.geteuid():
            return "the seed's process belongs to another user"
        with os.scandir(f"/proc/{pid}/fd") as rows:
            for row in rows:
                if _link(row.path) == f"socket:[{inode}]":
                    return ""
    except OSError as error:
        return f"can't inspect the seed's process: {os.strerror(error.errno or 0)}"
    return "the process of that number is not the seed"


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:  # It was closed meanwhile.
        return ""


def _inode(own: Any, other: Any) -> str | None:
    """The number of the socket at the other end of a connection; None if it is not here."""
    local, peer = (ip_address(str(end[0]).partition("%")[0]) for end in (other, own))
    for table in ("tcp", "tcp6"):
        ends = f"{_text(local, other[1], table)} {_text(peer, own[1], table)}"
        wanted = f" {ends} {_ESTABLISHED} "
        try:
            with open(f"/proc/self/net/{table}", encoding="ascii") as file:
                for line in file:
                    if wanted in line:
                        return line.split()[9]
        except OSError:  # No such protocol, or no /proc.
            continue
    return None


def _text(address: IPv4Address | IPv6Address, port: int, table: str) -> str:
    """An end of a connection as /proc shows it: words of 32 bits in the machine's order."""
    packed = address.packed
    if table == "tcp" and len(packed) == 16:
        packed = packed[12:] if packed[:12] == bytes(10) + b"\xff\xff" else b""
    elif table == "tcp6" and len(packed) == 4:
        packed = bytes(10) + b"\xff\xff" + packed
    words = struct.unpack(f"={len(packed) // 4}I", packed)
    return "".join(f"{word:08X}" for word in words) + f":{port:04X}"
