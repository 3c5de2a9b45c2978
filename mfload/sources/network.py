"""Network disks: file systems of which a read waits for a server or for another process.

Which files lie there is read from `/proc/self/mountinfo`: `statfs` would ask the server, and says
only "FUSE" of all file systems that a process serves.
"""

from __future__ import annotations

import functools
import os
import struct
import time
from typing import NamedTuple

from mfload.runtime import local_processes
from mfload.sources.base import Costs

# One reader gets a request or two at a time: at 2 ms a request and 128 KiB, which is as far as the
# kernel reads ahead, 115 MB/s; 8 readers get 530, 16 and 32 get 680 (a FUSE, 12 in its queue). A
# wait is worth the bytes that come meanwhile.
_COSTS = Costs(block=4 << 20, merge_gap=512 << 10, staged=4 << 20, span=8 << 20)
_READERS, _FEWEST = 16, 4  # Of all processes of this machine; of one, at least.
# Types of mounts, and whether O_DIRECT is as good there as on a disk. Elsewhere it may be refused,
# come in small requests, or pass by a cache that the server of the mount keeps.
_KINDS = {
    **dict.fromkeys(("nfs", "nfs4", "lustre", "ceph", "beegfs", "gpfs", "wekafs"), True),
    **dict.fromkeys(("9p", "afs", "cifs", "fuse", "glusterfs", "orangefs", "pvfs2"), False),
    **dict.fromkeys(("smb3", "smbfs", "vboxsf", "virtiofs"), False),
}
# Served by a process, but of what lies on a disk of this machine.
_LOCAL = frozenset(
    f"fuse.{name}"
    for name in (
        *("bindfs", "encfs", "fuse-overlayfs", "gocryptfs", "lxcfs", "mergerfs", "ntfs-3g"),
        *("portal", "snapfuse", "squashfuse", "squashfuse_ll", "unionfs"),
    )
)
_MOUNTS = "/proc/self/mountinfo"
_AGE = 10  # Seconds: once a disk is unmounted, another may take its number.
_AT_FDCWD, _FORCE_SYNC, _BASIC_STATS = -100, 0x2000, 0x7FF


class Disk(NamedTuple):
    """A kind of network disk.

    Attributes:
        name: Its type, as the kernel shows it: "nfs4", "fuse.gcsfuse".
        direct: Whether O_DIRECT is as good there as on a disk of this machine.
        place: What is alike for processes that share what this machine caches of it.
    """

    name: str
    direct: bool
    costs: Costs
    place: str = ""


def disk(device: int | None, path: str) -> Disk | None:
    """The network disk with a device number, as `stat` gives it; None for any other disk.

    Without a number, that of the directory of `path`: a file that is not open yet is not asked for.
    """
    now = int(time.monotonic()) // _AGE
    if device is None:
        device = _device(os.path.dirname(path), now)
    # Only what lies on no block device has such a number.
    return None if os.major(device) else _mounted(device, now)


@functools.lru_cache(64)
def _device(directory: str, now: int) -> int:
    try:
        return os.stat(directory or ".").st_dev
    except (OSError, ValueError):
        return 0


@functools.lru_cache(64)
def _mounted(device: int, now: int) -> Disk | None:
    number = f"{os.major(device)}:{os.minor(device)}"
    try:
        with open(_MOUNTS, encoding="utf-8", errors="replace") as lines:
            for line in lines:
                # "36 35 0:39 /root /where options - type source options" (proc_pid_mountinfo(5)).
                before, _, after = line.partition(" - ")
                if before.split(" ", 3)[2] == number:
                    found = kind(after.partition(" ")[0])
                    return found and found._replace(place=f"{_machine()}/{number}")
    except (OSError, IndexError):
        pass
    return None


def _machine() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return os.uname().nodename


def kind(name: str) -> Disk | None:
    """The network disk of a type of mount; None for a type that is none."""
    if name in _LOCAL:
        return None
    direct = _KINDS.get("fuse" if name.startswith("fuse.") else name)
    if direct is None:
        return None
    readers = max(_FEWEST, _READERS // local_processes())
    return Disk(name, direct, _COSTS._replace(concurrency=readers))


def status(path: str) -> tuple[int, int, int, int]:
    """Inode, bytes, mtime in ns and device of what lies at a path, as the server has it now.

    `stat` takes them from a cache of some seconds (NFS: up to a minute).

    Raises:
        OSError: There is nothing, or the server can't be asked.
    """
    import ctypes  # Late: it is asked after a load.

    statx = getattr(ctypes.CDLL(None, use_errno=True), "statx", None)
    if statx is None:
        found = os.stat(path)
        return found.st_ino, found.st_size, found.st_mtime_ns, found.st_dev
    answer = ctypes.create_string_buffer(256)
    if statx(_AT_FDCWD, os.fsencode(path), _FORCE_SYNC, _BASIC_STATS, answer) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), path)
    inode, size = struct.unpack_from("QQ", answer, 32)
    seconds, rest = struct.unpack_from("qI", answer, 112)
    device = os.makedev(*struct.unpack_from("II", answer, 136))
    return inode, size, seconds * 10**9 + rest, device
