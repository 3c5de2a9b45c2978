"""NumPy's files, checked as hostile input: `.npy`, one array, and `.npz`, a zip archive of them.

A `.npy` file is: 6 bytes magic, 2 bytes version, the header's length, the header, data up to the
end of the file. The header is the text of a Python dict; it is matched here, never evaluated.

Members of an archive that are stored are read in place, deflated ones decoded. Every member's own
header is read too, since the offset of its data depends on it, and must agree with the directory.
CRCs are left to `mfload.verify` (docs/how-to/numpy-files.md).
"""

from __future__ import annotations

import functools
import math
import os
import re
import struct
import zlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from mfload import dtypes, errors, sources
from mfload.dtypes import DType
from mfload.formats import hints
from mfload.formats.base import Checksum
from mfload.formats.strict_json import bad, brief
from mfload.index import Piece, TensorInfo
from mfload.sources.base import Source
from mfload.stored import Encoding, Stored

MAX_HEADER = 10_000
"""Longest header in bytes; NumPy's own reader has the same limit."""

_MAGIC = b"\x93NUMPY"
_VERSIONS = (b"\1\0", b"\2\0", b"\3\0")
_FIELD = re.compile(
    r"""\s*(['"])(?P<key>\w+)\1\s*:\s*(?:
        (['"])(?P<text>[^'"\\]*)\3 | (?P<flag>True|False) | \((?P<dims>[\d\s,L]*)\)
        | (?P<list>\[.*\])
    )\s*(?:,|(?=\}))""",
    re.VERBOSE | re.DOTALL,
)
_KIND = re.compile(r"[a-zA-Z]\d{1,9}")
_DIMS = re.compile(r"\s*(\d+L?\s*(,\s*\d+L?\s*)*(,\s*)?)?")
_KINDS = {
    "b1": "BOOL", "i1": "I8", "i2": "I16", "i4": "I32", "i8": "I64", "u1": "U8", "u2": "U16",
    "u4": "U32", "u8": "U64", "f2": "F16", "f4": "F32", "f8": "F64", "c8": "C64",
}  # fmt: skip
_REFUSED = {"O": "object", "S": "bytes", "a": "bytes", "U": "str", "M": "datetime64",
            "m": "timedelta64"}  # fmt: skip

_END, _END64, _LOCATOR64 = b"PK\5\6", b"PK\6\6", b"PK\6\7"
_ENTRY, _LOCAL = b"PK\1\2", b"PK\3\4"
_TAIL = 22 + 0xFFFF  # The end of an archive, with the longest comment.
_HEAD = 512  # Most headers of a member and of its array take less.
_ASKED = 1000  # Members whose headers are held at once.
_WINDOW = 64 << 10  # Bytes that are read at once for them, at most.
_MOST = 100_000_000  # Bytes of a directory: as many as a safetensors header may have.
_WIDE = 0xFFFFFFFF  # What a field holds if the number is in the zip64 field.
_STORED, _DEFLATED = 0, 8
_METHODS = {9: "deflate64", 12: "bzip2", 14: "lzma", 93: "zstd", 95: "xz"}
_ENCRYPTED, _DESCRIBED, _UTF8 = 1 | 1 << 6 | 1 << 13, 1 << 3, 1 << 11  # Flags.
_SPARE = 1 << 16  # Bytes that a header may grow by when it is deflated.
_MOST_RATIO = 1032  # Deflate makes no more of a byte.


class Member(NamedTuple):
    """A file in a zip archive: a range of the archive, and how it is stored."""

    name: str
    method: int
    flags: int
    crc: int
    nbytes: int  # As stored.
    size: int  # Unpacked.
    offset: int  # Of its data.
    head: bytes = b""  # Its first bytes, as stored.


def recognise(head: bytes, name: str) -> bool:
    """Whether a file looks like one of NumPy's, by its first bytes."""
    if not head.startswith(_LOCAL):
        return head.startswith(_MAGIC)
    length, extra = struct.unpack_from("<2H", head.ljust(30, b"\0"), 26)
    member, data = head[30 : 30 + length], head[30 + length + extra :]
    return member.endswith(b".npy") or data.startswith(_MAGIC)


def read(file: Source, source: int = 0) -> tuple[list[TensorInfo], dict[str, str] | None]:
    """The tensors of a file, in order of offset; see `formats.base.Format`.

    Members have their names without `.npy`; the array of a `.npy` file has the file's, or is
    called "array".
    """
    head = file.read(0, min(file.size, _HEAD))
    try:
        if not head.startswith(_MAGIC):
            return [_tensor(file, source, each) for each in members(file)], None
        # Bytes in memory have no name, and a URL may have a query.
        path = file.file or file.name.partition("?")[0]
        name = os.path.basename(path).removesuffix(".npy")
        if file.file is None and not path.endswith(".npy"):
            name = "array"
        whole = Member(name, _STORED, 0, 0, file.size, file.size, 0, head)
        return [_tensor(file, source, whole)], None
    except errors.HeaderError as error:
        if recognise(head, file.name):
            raise
        raise hints.explain_file(error, file) from None


def checksums(file: Source) -> list[Checksum]:
    """The CRC of each member; a `.npy` file has none."""
    if file.read(0, min(file.size, len(_MAGIC))) == _MAGIC:
        return []
    return [
        Checksum(name, offset, nbytes, None if method == _STORED else size, f"{crc:08x}")
        for name, method, _, crc, nbytes, size, offset, _ in members(file)
    ]


def members(file: Source) -> list[Member]:
    """The arrays in a zip archive, by offset; other members are passed over.

    As in NumPy, an array is what begins with the magic, whatever its member is called; of one that
    can't be unpacked its name tells. Raises HeaderError if the directory and the members' own
    headers disagree, members overlap each other or the directory, two arrays have one name, or one
    is encrypted or compressed by anything but deflate.
    """
    start, entries = _directory(file)
    read = [each for each in entries if each.name.endswith(".npy") or _readable(each)]
    read.sort(key=lambda each: each.offset)
    found: dict[str, Member] = {}
    end = 0
    for entry, head in zip(read, _heads(file, read, start), strict=True):
        member = _located(file, entry, head, start)
        name = entry.name.removesuffix(".npy")
        array = name != entry.name or _first(file, member, len(_MAGIC)) == _MAGIC
        if array and name in found:
            raise bad(file, "the archive has two members of one name", entry.name)
        if entry.offset < end:
            raise bad(file, "the member overlaps another", entry.name, end, entry.offset)
        end = member.offset + member.nbytes
        if array:
            found[name] = member._replace(name=name)
    if entries and not found:
        what, first = "no member of the archive is an array", entries[0].name
        raise bad(file, what, None, "NAME.npy", first)
    return list(found.values())


def _readable(entry: Member) -> bool:
    return entry.method in (_STORED, _DEFLATED) and not entry.flags & _ENCRYPTED


def _first(file: Source, member: Member, length: int) -> bytes:
    """The first bytes of a member, unpacked; fewer if it has no more."""
    _, method, _, _, nbytes, _, offset, head = member
    made = _unpacked(file, member, head, length)
    if len(made) < length and len(head) < nbytes:
        spare = 0 if method == _STORED else _SPARE
        made = _unpacked(file, member, file.read(offset, min(length + spare, nbytes)), length)
    return made


def _unpacked(file: Source, member: Member, packed: bytes, length: int) -> bytes:
    if member.method == _STORED:
        return packed[:length]
    try:
        return zlib.decompressobj(-zlib.MAX_WBITS).decompress(packed, length)
    except zlib.error as error:
        raise bad(file, "malformed deflate data", member.name, None, str(error)) from None


def _directory(file: Source) -> tuple[int, list[Member]]:
    """Where the directory of an archive begins, and its entries, with offsets of local headers."""
    ahead = max(0, file.size - _TAIL)
    tail = file.read(ahead, file.size - ahead)

    def part(offset: int, nbytes: int) -> bytes:
        at = offset - ahead
        return file.read(offset, nbytes) if at < 0 else tail[at : at + nbytes]

    at = tail.rfind(_END, 0, max(0, len(tail) - 18))
    if at < 0:
        raise bad(file, "no end of a zip archive: the file is truncated, or is not one")
    disk, first, here, count, nbytes, offset, comment = struct.unpack_from("<4H2LH", tail, at + 4)
    stop = ahead + at
    if stop + 22 + comment != file.size:
        raise bad(file, "bytes follow the zip archive", None, stop + 22 + comment, file.size)
    locator = part(stop - 20, 20) if stop >= 76 else b""
    if locator.startswith(_LOCATOR64):
        stop -= 76
        record = part(stop, 56)
        if not record.startswith(_END64) or record[4:12] != (44).to_bytes(8, "little"):
            raise bad(file, "malformed zip64 end of the archive")
        disk, first, here, count, nbytes, offset = struct.unpack_from("<2L4Q", record, 16)
    start = stop - nbytes
    before = start - offset  # Bytes before the archive, which its offsets don't count.
    if disk or first or here != count or before < 0 or not 46 * count <= nbytes <= _MOST:
        held = f"{errors.counted(count, 'entry', 'entries')} in {errors.amount(nbytes)}"
        found = f"{held} from {offset} on, part {disk} from {first} on"
        expected = f"within {errors.amount(stop)}"
        raise bad(file, "malformed end of the zip archive", None, expected, found)
    raw, at = part(start, nbytes), 0
    entries: list[Member] = []
    for _ in range(count):
        if raw[at : at + 4] != _ENTRY or at + 46 > nbytes:
            raise bad(file, "malformed entry in the zip directory")
        flags, method, _, _, crc, packed, size, *lengths, _, _, _, offset = struct.unpack_from(
            "<4H3L5H2L", raw, at + 8
        )
        n, m, k = lengths
        name = _name(file, raw[at + 46 : at + 46 + n], flags)
        extra = raw[at + 46 + n : at + 46 + n + m]
        size, packed, offset = _wide(file, name, extra, size, packed, offset)
        at += 46 + n + m + k
        entries.append(Member(name, method, flags, crc, packed, size, offset + before))
    if at != nbytes:
        raise bad(file, "malformed zip directory", None, errors.amount(nbytes), at)
    return start, entries


def _name(file: Source, text: bytes, flags: int) -> str:
    try:
        return text.decode("utf-8" if flags & _UTF8 else "cp437")
    except UnicodeDecodeError:
        what = "a name in the zip directory is not UTF-8"
        raise bad(file, what, None, None, repr(text[:99])) from None


def _wide(file: Source, name: str, extra: bytes, *numbers: int) -> list[int]:
    """Numbers of a header; those that don't fit 32 bits are in its zip64 field."""
    found = list(numbers)
    wide = [n for n, number in enumerate(numbers) if number == _WIDE]
    at = 4  # The first byte of a field, behind its kind and length.
    while wide and at <= len(extra):
        kind, length = struct.unpack_from("<2H", extra, at - 4)
        if kind == 1:
            if not 8 * len(wide) <= length <= len(extra) - at:
                raise bad(file, "malformed zip64 field", name)
            for n, value in zip(wide, struct.unpack_from(f"<{len(wide)}Q", extra, at), strict=True):
                found[n] = value
            break
        at += length + 4
    return found


def _heads(file: Source, entries: Sequence[Member], stop: int) -> Iterator[bytes]:
    """The first bytes of each member; none of one that does not begin before `stop`.

    Those of members that lie together are read at once, with the data between them if that takes
    less time than to ask anew.
    """
    costs = file.costs
    gap = costs.merge_gap if costs.row_gap is None else costs.row_gap
    found: dict[int, bytes] = {}

    def ask(group: list[int]) -> None:
        start = group[0]
        raw = file.read(start, min(group[-1] + _HEAD, stop) - start) if start < stop else b""
        for at in group:
            found[at] = raw[at - start : at - start + _HEAD]

    for first in range(0, len(entries), _ASKED):
        groups, some = list[list[int]](), entries[first : first + _ASKED]
        for entry in some:
            end = entry.offset + _HEAD
            if (
                groups
                and entry.offset < groups[-1][-1] + _HEAD + gap
                and end <= groups[-1][0] + _WINDOW
            ):
                groups[-1].append(entry.offset)
            else:
                groups.append([entry.offset])
        sources.at_once(ask, groups, file.costs.concurrency or 1)
        for entry in some:
            yield found[entry.offset]
        found.clear()


def _located(file: Source, entry: Member, head: bytes, stop: int) -> Member:
    """A member with the offset of its data, once its local header agrees with the directory."""
    name, method, flags, crc, nbytes, size, at, _ = entry
    if flags & _ENCRYPTED:
        raise bad(file, "the member is encrypted", name, "no encryption")
    if method not in (_STORED, _DEFLATED):
        method = _METHODS.get(method, method)
        raise bad(file, "mfload can't decompress the member", name, "stored | deflate", method)
    most = nbytes * (1 if method == _STORED else _MOST_RATIO)
    if size > most or (method == _STORED and size < nbytes):
        raise bad(file, "the member can't have the size it declares", name, most, size)
    if len(head) < 30 or not head.startswith(_LOCAL):
        raise bad(file, "the zip directory leads to no member", name, "a local header", at)
    own = struct.unpack_from("<2H4x3L2H", head, 6)
    here, own_method, own_crc, own_nbytes, own_size, n, m = own
    rest = head[30 : 30 + n + m]
    if len(rest) < n + m:
        rest = file.read(at + 30, min(n + m, stop - at - 30))
    own_size, own_nbytes = _wide(file, name, rest[n:], own_size, own_nbytes)
    known = (own_crc, own_nbytes, own_size)
    if here & _DESCRIBED and flags & _DESCRIBED:
        known = (crc, nbytes, size)  # They follow the data.
    mine = (_name(file, rest[:n], here), own_method, here & _ENCRYPTED, *known)
    listed = (name, method, 0, crc, nbytes, size)
    if mine != listed:
        raise bad(file, "the member's header differs from the directory", name, listed, mine)
    data = at + 30 + n + m
    if data + nbytes > stop:
        raise bad(file, "the member reaches out of the archive", name, stop, data + nbytes)
    head = head[30 + n + m :] if len(head) > 30 + n + m else b""
    return entry._replace(offset=data, head=head[:nbytes])


def _tensor(file: Source, source: int, member: Member) -> TensorInfo:
    """The tensor in a `.npy` file, or in a member that is one."""
    name, method, _, _, nbytes, size, offset, _ = member
    begin = _first(file, member, 12)
    if not begin.startswith(_MAGIC) or len(begin) < 12 or begin[6:8] not in _VERSIONS:
        raise bad(file, "not a NumPy array", name, "\\x93NUMPY, version 1 to 3", repr(begin[:8]))
    wide = 2 if begin[6] == 1 else 4
    length = int.from_bytes(begin[8 : 8 + wide], "little")
    if length > MAX_HEADER:
        raise bad(file, "the array's header is over the limit", name, MAX_HEADER, length)
    ahead = 8 + wide + length
    raw = _first(file, member, ahead)[8 + wide :]
    if len(raw) < length:
        raise bad(file, "the file ends within the array's header", name, ahead, size)
    parsed = _parse(raw)
    if parsed is None:
        expected = "{'descr': …, 'fortran_order': …, 'shape': (…)}"
        text = raw.decode("latin-1").strip(" \n\0")[:200]
        raise bad(file, "malformed header of a NumPy array", name, expected, text)
    dtype, shape, big, fortran = parsed
    needed = (dtype.size_of(shape) or 0) if dtype.known else size - ahead
    if needed != size - ahead:
        what = "bytes follow the array"
        if needed > size - ahead:
            what = "the array is truncated, or its shape wrong"
        raise bad(file, what, name, f"as many bytes as {dtype} {brief(shape)} takes", size - ahead)
    if method == _STORED:
        offset, nbytes = offset + ahead, needed
    strides = None
    if fortran and sum(n != 1 for n in shape) > 1:  # Else both orders are the same.
        strides = tuple(math.prod(shape[:dim]) for dim in range(len(shape)))
    encodings = () if method == _STORED else (Encoding("deflate", size, ahead),)
    stored = Stored(strides=strides, big_endian=big and dtype.bits > 8, encodings=encodings)
    piece = Piece(source, offset, nbytes, None if stored == Stored() else stored)
    if not needed:
        piece = Piece(source, offset, 0)
    return TensorInfo(name, dtype, shape, (piece,))


@functools.lru_cache(256)  # Arrays of one archive are often alike.
def _parse(raw: bytes) -> tuple[DType, tuple[int, ...], bool, bool] | None:
    """Dtype, shape, whether big-endian and in Fortran order; None of a malformed header."""
    text = raw.decode("latin-1").strip(" \n\0")
    found: dict[str, Any] = {}
    at = 1
    while text.startswith("{") and (field := _FIELD.match(text, at)) is not None:
        key, at = field["key"], field.end()
        if key in found:
            return None
        found[key] = field
    whole = text[at:].strip() == "}"
    if not whole or found.keys() != {"descr", "fortran_order", "shape"}:
        return None
    flag, dims = found["fortran_order"]["flag"], found["shape"]["dims"]
    descr = found["descr"]["text"]
    if flag is None or dims is None or not _DIMS.fullmatch(dims):
        return None
    numbers = [each.strip(" \n\tL") for each in dims.split(",")]
    # One number without a comma is no tuple.
    if (len(numbers) == 1 and numbers[0]) or any(len(each) > 18 for each in numbers):
        return None
    shape = tuple(int(each) for each in numbers if each)
    if descr is None:
        structured = dtypes.lookup("structured"), shape, False, flag == "True"
        return structured if found["descr"]["list"] else None
    kind = descr.lstrip("<>|=")
    known = _KINDS.get(kind) or _REFUSED.get(kind[:1])
    if known is None and (kind in dtypes.TABLE or not _KIND.fullmatch(kind)):
        return None
    dtype = dtypes.lookup(known or kind)
    return dtype, shape, descr.startswith(">"), flag == "True"
