"""Which process has the other end of a connection within this machine, as the kernel says."""

from __future__ import annotations

import os
import socket
import struct
from typing import Any

from mfload.peer.transports import Remote

# A request of the kernel about one socket (sock_diag(7)), and its answer up to the socket's number.
_REQUEST, _ANSWER = struct.Struct("=IHHII2BxxI2s2s16s16s3I"), struct.Struct("=IHHII2B66xI")
_SOCK_DIAG, _BY_FAMILY, _ASKS, _ANY, _ESTABLISHED = 4, 20, 1, 0xFFFFFFFF, 1
_WAIT = 1.0  # Seconds for the kernel's answer.


def held_by(pid: int, remote: Remote) -> str:
    """Why a process is not known to be the seed that is asked; "" if it is.

    It must have the other end of a connection to the seed, and belong to this process's user. What
    a seed says of itself does not count: one that relays the answers of another seed is itself at
    the other end. So is a proxy of this user, which a seed behind it can name: what is read of the
    process must still be compared with checksums, or be handed over by it.
    """
    for _ in range(2):
        ends = remote.client.ends()
        try:
            inode = None if ends is None else at_other_end(*ends)
        except OSError as error:
            return f"the kernel does not tell of connections: {error}"
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


def at_other_end(own: Any, other: Any) -> int | None:
    """The number of the socket at the other end of a connection; None if it is not here."""
    family = socket.AF_INET6 if ":" in own[0] else socket.AF_INET
    ports = [struct.pack("!H", end[1]) for end in (other, own)]
    hosts = [socket.inet_pton(family, end[0].partition("%")[0]) for end in (other, own)]
    scope = other[3] if family == socket.AF_INET6 else 0
    head = _REQUEST.size, _BY_FAMILY, _ASKS, 0, 0, family, socket.IPPROTO_TCP
    asked = _REQUEST.pack(*head, 1 << _ESTABLISHED, *ports, *hosts, scope, _ANY, _ANY)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, _SOCK_DIAG) as kernel:
        kernel.settimeout(_WAIT)
        kernel.sendto(asked, (0, 0))
        answer = kernel.recv(1 << 12)
    if len(answer) < _ANSWER.size:  # There is no such socket.
        return None
    _, kind, *_, state, inode = _ANSWER.unpack_from(answer)
    return inode if (kind, state) == (_BY_FAMILY, _ESTABLISHED) else None
