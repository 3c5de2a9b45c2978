"""What a file takes over from the one it replaces: owner, permissions, extended attributes."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable, Iterable
from typing import NamedTuple

_ACL = "system.posix_acl_access"
_LABEL = "security.selinux"


class Attributes(NamedTuple):
    """Attributes that a file takes over from the one that it replaces.

    Attributes:
        mode: Permission bits.
        owner: User ID.
        group: Group ID.
        extended: The access control list, the label of SELinux and the `user.*` attributes, by
            name.
    """

    mode: int
    owner: int
    group: int
    extended: dict[str, bytes]

    @staticmethod
    def of(paths: Iterable[str]) -> Attributes | None:
        """Those of the first regular file among these paths; None if there is none.

        Of the permissions, those that all of them give: what was private stays so.
        """
        made: Attributes | None = None
        for path in paths:
            with contextlib.suppress(OSError):
                found = os.stat(path)  # Of a link into a cache, the blob's.
                mode = stat.S_IMODE(found.st_mode) & 0o777
                if made is not None and stat.S_ISREG(found.st_mode):
                    made = made._replace(mode=made.mode & mode)
                elif stat.S_ISREG(found.st_mode):
                    made = Attributes(mode, found.st_uid, found.st_gid, _extended(path))
        return made

    def give(self, fd: int) -> None:
        """Sets them on an open file of mode 0600.

        What the system refuses is left out. If the group can't be set, group and others get the
        permissions that both had, and none if there was an access control list: at no moment does
        anyone get more than with the old file.
        """
        made, mode = os.fstat(fd), self.mode
        acl = self.extended.get(_ACL)
        others = {name: value for name, value in self.extended.items() if name != _ACL}
        whole = made.st_gid == self.group or _granted(os.fchown, fd, -1, self.group)
        if acl is not None:
            whole = whole and _granted(os.setxattr, fd, _ACL, acl)
        elif _ACL in _extended(fd):  # The directory's default.
            whole = _granted(os.removexattr, fd, _ACL) and whole
        if not whole:
            both = mode >> 3 & mode & 7 if acl is None else 0
            mode = mode & 0o700 | both << 3 | both
        for name, value in others.items():
            _granted(os.setxattr, fd, name, value)
        # Some file systems have the same permissions for all files.
        _granted(os.fchmod, fd, mode)
        if made.st_uid != self.owner:  # Last: after it, the caller may not change the file.
            _granted(os.fchown, fd, self.owner, -1)


def _extended(file: str | int) -> dict[str, bytes]:
    """The access control list of a file, its label of SELinux, the user's extended attributes."""
    found: dict[str, bytes] = {}
    names = list[str]()
    with contextlib.suppress(OSError):
        listed = os.listxattr(file)
        names = [n for n in listed if n in (_ACL, _LABEL) or n.startswith("user.")]
    for name in names:
        with contextlib.suppress(OSError):
            found[name] = os.getxattr(file, name)
    return found


def _granted(call: Callable[..., object], *args: object) -> bool:
    try:
        call(*args)
    except OSError:
        return False
    return True
