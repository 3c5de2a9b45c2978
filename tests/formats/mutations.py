"""Ways to damage a safetensors file, each driven by a `random.Random` (Hypothesis has one)."""

from __future__ import annotations

import copy
import json
import random
import struct
from collections.abc import Callable
from typing import Any

from reference import join

from mfload import dtypes


class Object(list[Any]):
    """A JSON object as [name, value] lists, so that a name can come twice."""


def parse(text: str) -> Object:
    return json.loads(text, object_pairs_hook=lambda pairs: Object([k, v] for k, v in pairs))


class Raw(str):
    """JSON text that goes out as it stands."""


def dump(value: Any) -> str:
    if isinstance(value, Raw):
        return value
    if isinstance(value, Object):
        return "{" + ",".join(f"{dump(name)}:{dump(item)}" for name, item in value) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(dump, value)) + "]"
    return json.dumps(value)


NUMBERS = [
    *map(Raw, ("-0", "-1", "1e2", "1.0", "0.5", "1E400", "NaN", "Infinity", "-Infinity", "007",
               "1e-400", "+1", "0x10", "1_0", "9" * 30, "9" * 308, "9" * 309, "9" * 5000)),
    0, 1, 2, 3, 7, 8, 255, 2**31, 2**32, 2**53 + 1, 2**61, 2**62, 2**63 - 1, 2**63, 2**64 - 1,
    2**64,
]  # fmt: skip

JUNK = [
    None, True, False, "", "0", "F32", [], [0], [[]], [None], Object(), Object([["a", 1]]),
    Object([["F32", None]]), Object([["U8", None]]), Object([["a", 1], ["a", 2]]),
    Raw("[" * 125 + "]" * 125), Raw("[" * 126 + "]" * 126), Raw("[" * 2000 + "]" * 2000),
    Raw('{"a":' * 130 + "1" + "}" * 130), Raw('"\\ud800"'), Raw('"\\ud83d\\ude00"'),
    Raw('"\\u0000"'), Raw('"\x01"'), Raw("tru"), Raw(""), Raw("1,"), Raw('"a":'), *NUMBERS,
]  # fmt: skip

NAMES = ["", "__metadata__", "a", "b", "dtype", "shape", "data_offsets", "é", "x", "\x00", "a\nb",
         "a/b", "../a", "👍", "\\u0061", "DTYPE"]  # fmt: skip
FIELDS = ["dtype", "shape", "data_offsets"]
DTYPES = [*dtypes.TABLE, "F31", "f32", "", "F128", "I4", " F32", "F32\x00"]


def _junk(rng: random.Random) -> Any:
    return copy.deepcopy(rng.choice(JUNK))


def _objects(rng: random.Random, header: Object) -> Object:
    """Some object: the header itself, an entry, or what an entry holds."""
    inner = [value for _, value in header if isinstance(value, Object)]
    return rng.choice([header, *inner]) if inner else header


def _entry(rng: random.Random, header: Object) -> Object | None:
    inner = [v for name, v in header if isinstance(v, Object) and name != "__metadata__"]
    return rng.choice(inner) if inner else None


def _field(rng: random.Random, header: Object, name: str) -> list[Any] | None:
    """One [name, value] of one entry."""
    entry = _entry(rng, header)
    found = [pair for pair in entry or () if pair[0] == name]
    return rng.choice(found) if found else None


def remove(rng: random.Random, header: Object) -> None:
    chosen = _objects(rng, header)
    if chosen:
        chosen.pop(rng.randrange(len(chosen)))


def duplicate(rng: random.Random, header: Object) -> None:
    chosen = _objects(rng, header)
    if chosen:
        chosen.insert(rng.randrange(len(chosen) + 1), copy.deepcopy(rng.choice(chosen)))


def swap(rng: random.Random, header: Object) -> None:
    chosen = _objects(rng, header)
    if len(chosen) > 1:
        a, b = rng.sample(range(len(chosen)), 2)
        chosen[a][1], chosen[b][1] = chosen[b][1], chosen[a][1]


def shuffle(rng: random.Random, header: Object) -> None:
    rng.shuffle(_objects(rng, header))


def rename(rng: random.Random, header: Object) -> None:
    chosen = _objects(rng, header)
    if chosen:
        chosen[rng.randrange(len(chosen))][0] = rng.choice(NAMES)


def junk(rng: random.Random, header: Object) -> None:
    chosen = _objects(rng, header)
    if chosen:
        chosen[rng.randrange(len(chosen))][1] = _junk(rng)


def add(rng: random.Random, header: Object) -> None:
    chosen = _objects(rng, header)
    chosen.insert(rng.randrange(len(chosen) + 1), [rng.choice(NAMES), _junk(rng)])


def number(rng: random.Random, header: Object) -> None:
    pair = _field(rng, header, rng.choice(["shape", "data_offsets"]))
    if pair is None or not isinstance(pair[1], list):
        return
    values = pair[1] = list(pair[1])
    what = rng.randrange(5)
    if what == 0 or not values:
        values.insert(rng.randrange(len(values) + 1), rng.choice([0, 1, *NUMBERS]))
    elif what == 1:
        values.pop(rng.randrange(len(values)))
    elif what == 2:
        rng.shuffle(values)
    else:
        at = rng.randrange(len(values))
        old = values[at] if type(values[at]) is int else 0
        near = [old + 1, old - 1, old + 8, old * 2, -old, old + 2**64, float(old), str(old)]
        values[at] = rng.choice(near) if what == 3 else _junk(rng)


def offsets(rng: random.Random, header: Object) -> None:
    """Exchanges the places of two tensors, or of their ends."""
    first, second = (_field(rng, header, "data_offsets") for _ in range(2))
    if first is not None and second is not None:
        if rng.random() < 0.5:
            first[1], second[1] = second[1], first[1]
        elif isinstance(first[1], list) and isinstance(second[1], list):
            first[1] = [*first[1][:1], *second[1][1:]]


def dtype(rng: random.Random, header: Object) -> None:
    pair = _field(rng, header, "dtype")
    if pair is not None:
        pair[1] = rng.choice(DTYPES)


def reshape(rng: random.Random, header: Object) -> None:
    pair = _field(rng, header, "shape")
    if pair is not None and isinstance(pair[1], list):
        big = [0, 1, 2**31, 2**40, 2**61 - 1, 2**63, 2**64 - 1]
        pair[1] = pair[1] + rng.choices(big, k=rng.choice([1, 2, 3, 70]))
        rng.shuffle(pair[1])


def empty(rng: random.Random, header: Object) -> None:
    """One more tensor of no bytes, anywhere."""
    begin = rng.choice([0, 0, 4, 8, 2**40])
    shape = rng.choice([[0], [0, 2**40], [0, 2**62], [2**62, 0], [2**40, 2**40, 0], [], [0, 3, 2]])
    fields = zip(FIELDS, (rng.choice(DTYPES), shape, [begin, begin]), strict=True)
    entry = Object([name, value] for name, value in fields)
    header.insert(rng.randrange(len(header) + 1), [rng.choice(NAMES), entry])


def positional(rng: random.Random, header: Object) -> None:
    """An entry as a list of values, or a dtype as the key of an object."""
    at = rng.randrange(len(header)) if header else 0
    if header and isinstance(header[at][1], Object):
        header[at][1] = [value for _, value in header[at][1]]
        if header[at][1] and rng.random() < 0.3 and isinstance(header[at][1][0], str):
            header[at][1][0] = Object([[header[at][1][0], rng.choice([None, None, 1])]])


def metadata(rng: random.Random, header: Object) -> None:
    twice = Object([["a", "b"], ["a", "c"]])
    some = [Object(), Object([["a", "b"]]), twice, Object([["k", _junk(rng)]]), _junk(rng)]
    value = rng.choice(some)
    header.insert(rng.randrange(len(header) + 1), ["__metadata__", value])


STRUCTURE: list[Callable[[random.Random, Object], None]] = [
    remove, duplicate, swap, shuffle, rename, junk, add, number, number, number, offsets, dtype,
    reshape, empty, positional, metadata,
]  # fmt: skip


def _bytes(rng: random.Random, text: bytes) -> bytes:
    """Damage below the level of JSON."""
    what = rng.randrange(7)
    at = rng.randrange(len(text)) if text else 0
    if what == 0:
        flipped = bytes([text[at] ^ 1 << rng.randrange(8)]) if text else b"\xff"
        return text[:at] + flipped + text[at + 1 :]
    if what == 1:
        return text[:at] + text[at + rng.randrange(1, 5) :]
    if what == 2:
        few = [b'"', b"{", b"}", b"[", b"]", b",", b":", b" ", b"\t", b"\x00", b"\\", b"0", b"-",
               b"\xff", b"\xc3\xa9", b"\xed\xa0\x80", b"\xef\xbb\xbf", b"\\u0061", b"\\ud800",
               b"1e5", b"\n", b"\x0c", b"//x", b"/"]  # fmt: skip
        return text[:at] + rng.choice(few) + text[at:]
    if what == 3:
        return rng.choice([b" ", b"\n\t\r ", b"\xef\xbb\xbf", b"\x00", b"\x0b", b"[", b"1"]) + text
    if what == 4:
        tails = [b" ", b"\n\t\r ", b"\x00", b"   \x00", b"}", b"{}", b",", b"\x0c"]
        return text + rng.choice(tails)
    if what == 5:
        return text.replace(b",", rng.choice([b", ", b" ,\n", b",,"]), rng.choice([1, -1]))
    return text.replace(b":", rng.choice([b": ", b"\t:", b"::"]), rng.choice([1, -1]))


def mutate(rng: random.Random, raw: bytes) -> bytes:
    """A damaged copy of a file; now and then one that is as good as it was."""
    (length,) = struct.unpack("<Q", raw[:8])
    text, data = raw[8 : 8 + length], raw[8 + length :]
    kind = rng.randrange(10)
    if kind < 7:
        header = parse(text.decode())
        for _ in range(rng.choice([1, 1, 1, 2, 3])):
            rng.choice(STRUCTURE)(rng, header)
        text = dump(header).encode()
    if kind in (6, 7, 8):
        text = _bytes(rng, text)
    told: int | None = None
    if kind == 9:
        what = rng.randrange(4)
        if what == 0:
            n = len(text)
            told = rng.choice([n + 1, n - 1, n + 8, 0, 2**64 - 1, 2**63, n * 2, 1, 10**8 + 1,
                               rng.randrange(2 * n + 2)]) % 2**64  # fmt: skip
        elif what == 1:
            data = data[: rng.randrange(len(data) + 1)]
        elif what == 2:
            data += bytes(rng.choice([1, 4, 8]))
        else:
            return join(text, data)[: rng.randrange(len(text) + 8)]
    return join(text, data, told)
