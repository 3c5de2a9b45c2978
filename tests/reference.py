"""The reference reader and writer of safetensors, and what mfload may do otherwise."""

from __future__ import annotations

import ctypes
import json
import re
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import safetensors

import mfload
from mfload import dtypes, errors

# What the reference writer calls the dtypes; the two F6 it can't write yet.
WRITTEN = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "U16": "uint16",
    "I16": "int16",
    "U32": "uint32",
    "I32": "int32",
    "U64": "uint64",
    "I64": "int64",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
    "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F4": "float4_e2m1fn_x2",
}


class Tensor(NamedTuple):
    """A tensor as a file holds it."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


def join(header: bytes | str, data: bytes = b"", length: int | None = None) -> bytes:
    """The bytes of a file; `length` is what its first eight bytes say, the truth where None."""
    text = header.encode() if isinstance(header, str) else header
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def write(tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None) -> bytes:
    """A file by the reference writer."""
    held = {name: ctypes.create_string_buffer(t.data, len(t.data)) for name, t in tensors.items()}
    specs = {
        name: safetensors.TensorSpec(
            dtype=WRITTEN[tensor.dtype],
            # It takes F4 as frameworks store it: two in an element.
            shape=[*tensor.shape[:-1], tensor.shape[-1] // 2]
            if tensor.dtype == "F4"
            else list(tensor.shape),
            data_ptr=ctypes.addressof(held[name]),
            data_len=len(tensor.data),
        )
        for name, tensor in tensors.items()
    }
    return bytes(safetensors.serialize(specs, metadata=metadata))


def read(raw: bytes) -> dict[str, Tensor]:
    """What the reference's core reads.

    Raises:
        SafetensorError: It refuses the file.
    """
    found = safetensors.deserialize(raw)
    return {n: Tensor(t["dtype"], tuple(t["shape"]), bytes(t["data"])) for n, t in found}


def ours(path: Path | str, names: Iterable[str] | None = None) -> dict[str, Tensor]:
    """What mfload reads, into NumPy."""
    with mfload.open(path) as opened:
        wanted = opened.offset_keys() if names is None else list(names)
        arrays = opened.get_tensors(wanted)
        return {
            name: Tensor(
                opened.info(name).dtype.name, opened.info(name).shape, arrays[name].tobytes()
            )
            for name in wanted
        }


def disagreement(raw: bytes, path: Path) -> str | None:
    """How mfload and the reference differ on a file, None where they agree.

    The choices that are mfload's own (docs/design/format-choices.md) count as agreement.

    Args:
        raw: The file.
        path: Where it may be written.
    """
    try:
        theirs = read(raw)
    except safetensors.SafetensorError as error:
        theirs, refusal = None, str(error)
    path.write_bytes(raw)
    try:
        with mfload.open(path) as opened:
            infos = {name: opened.info(name) for name in opened.offset_keys()}
    except errors.HeaderError as error:
        if theirs is None or has_duplicate(raw):
            return None
        return f"the reference loads what mfload refuses: {error}"
    unknown = [name for name, info in infos.items() if not info.dtype.known]
    if theirs is None:
        if not unknown:
            return f"mfload loads what the reference refuses: {refusal}"
        theirs = _with_known_dtypes(raw, unknown)
        if theirs is None:
            return f"mfload opens what is malformed beside its unknown dtypes: {refusal}"
    elif unknown:
        return f"dtypes that the reference knows and mfload does not: {unknown}"
    if theirs.keys() != infos.keys():
        return f"names differ: {theirs.keys() ^ infos.keys()}"
    loadable = [name for name, tensor in theirs.items() if name not in unknown and _fits(tensor)]
    got = ours(path, loadable)
    for name in loadable:
        if got[name] != theirs[name]:
            return f"{name!r} differs: {got[name]} instead of {theirs[name]}"
    for name in infos.keys() - loadable:
        wanted = errors.UnsupportedDtypeError if name in unknown else errors.UnsupportedShapeError
        try:
            ours(path, [name])
        except wanted as error:
            if error.tensor != name:
                return f"the error names {error.tensor!r} instead of {name!r}"
        else:
            return f"{name!r} should not have loaded"
    return None


def has_duplicate(raw: bytes) -> bool:
    """Whether any object in the header gives a name twice."""
    found = False

    def look(pairs: list[tuple[str, Any]]) -> None:
        nonlocal found
        found = found or len({name for name, _ in pairs}) < len(pairs)

    (length,) = struct.unpack("<Q", raw[:8])
    json.loads(raw[8 : 8 + length], object_pairs_hook=look)
    return found


def _fits(tensor: Tensor) -> bool:
    """Whether NumPy can have an array of that shape."""
    count = dtypes.lookup(tensor.dtype).nbytes
    for dim in tensor.shape:
        count *= dim or 1
    return len(tensor.shape) <= 64 and count < 2**63


_DTYPE = re.compile(rb'("dtype"[ \t\r\n]*:[ \t\r\n]*)"[^"]*"')


def _with_known_dtypes(raw: bytes, unknown: list[str]) -> dict[str, Tensor] | None:
    """What the reference reads once every unknown dtype is U8 and its shape the bytes it has."""
    (length,) = struct.unpack("<Q", raw[:8])
    text = raw[8 : 8 + length]
    if len(unknown) == 1:
        # Where one name was altered, another in its place makes the file whole, and all
        # else stays as it was, byte by byte.
        for found in _DTYPE.finditer(text):
            for name in dtypes.TABLE:
                other = text[: found.start()] + found[1] + b'"%s"' % name.encode()
                other += text[found.end() :]
                try:
                    return read(join(other, raw[8 + length :]))
                except safetensors.SafetensorError:
                    continue
    header = json.loads(text)
    for name in unknown:
        entry = header[name]
        begin, end = entry[2] if isinstance(entry, list) else entry["data_offsets"]
        header[name] = {"dtype": "U8", "shape": [end - begin], "data_offsets": [begin, end]}
    try:
        return read(join(json.dumps(header), raw[8 + length :]))
    except safetensors.SafetensorError:
        return None
