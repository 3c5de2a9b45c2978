"""Hostile and damaged safetensors files, and odd ones that are whole (see README.md here)."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from reference import join

DATA = bytes(range(4))


class Hostile(NamedTuple):
    """A file that must be refused.

    Attributes:
        raw: Its bytes.
        says: What the message must say.
        tensor: The tensor that the error must name.
        fields: Whether `expected` and `found` have something to say.
        ours: Whether it is mfload's own choice, which the reference does not share.
    """

    raw: bytes
    says: str
    tensor: str | None = None
    fields: bool = True
    ours: bool = False


HOSTILE: dict[str, Hostile] = {}
ODD: dict[str, bytes] = {}


def entry(dtype: Any = "F32", shape: Any = (1,), offsets: Any = (0, 4), **more: Any) -> str:
    """The JSON of one tensor; strings in place of shape and offsets go in as they are."""
    parts = {
        "dtype": json.dumps(dtype),
        "shape": shape if isinstance(shape, str) else json.dumps(list(shape)),
        "data_offsets": offsets if isinstance(offsets, str) else json.dumps(list(offsets)),
        **more,
    }
    return "{" + ",".join(f'"{key}":{value}' for key, value in parts.items()) + "}"


def header(**tensors: str) -> str:
    return "{" + ",".join(f"{json.dumps(name)}:{text}" for name, text in tensors.items()) + "}"


GOOD = header(w=entry())


def refused(name: str, raw: bytes | str, says: str, tensor: str | None = None, **more: Any) -> None:
    """A file with four bytes of data, unless its bytes are given whole."""
    assert name not in HOSTILE
    whole = raw if isinstance(raw, bytes) else join(raw, DATA)
    HOSTILE[name] = Hostile(whole, says, tensor, **more)


# --- the first eight bytes -----------------------------------------------------------------

refused("empty-file", b"", "too short")
refused("seven-bytes", b"\x02\0\0\0\0\0\0", "too short")
refused("length-without-header", join("", b""), "not JSON")
refused("length-u64-max", join(GOOD, DATA, 2**64 - 1), "over the format's limit")
refused("length-2-63", join(GOOD, DATA, 2**63), "over the format's limit")
refused("length-over-cap", join(GOOD, DATA, 100_000_001), "over the format's limit")
refused("length-at-cap", join(GOOD, DATA, 100_000_000), "ends within its header")
refused("length-past-end", join(GOOD, DATA, len(GOOD) + 5), "ends within its header")
refused("length-one-more", join(GOOD, b"", len(GOOD) + 1), "ends within its header")
refused("length-eats-data", join(GOOD, DATA, len(GOOD) + 1), "not JSON")
refused("length-one-less", join(GOOD, DATA, len(GOOD) - 1), "not JSON")
refused("length-zero", join(GOOD, DATA, 0), "not JSON")
refused("header-truncated", join(GOOD, DATA)[:30], "ends within its header")
refused("pickle", b"\x80\x04\x95\x10\0\0\0\0\0\0\0}" + bytes(64), "over the format's limit")
refused("zip", b"PK\x03\x04\x14\0\0\0" + bytes(64), "over the format's limit")
refused("html", b"<!DOCTYPE html><html></html>", "over the format's limit")
refused(
    "git-lfs-pointer",
    b"version https://git-lfs.github.com/spec/v1\noid x",
    "over the format's limit",
)
refused("zeros", bytes(64), "not JSON")

# --- not JSON, or JSON of another kind -----------------------------------------------------

for _label, _text in (("list", "[]"), ("number", "1"), ("string", '"{}"'), ("null", "null"),
                      ("true", "true")):  # fmt: skip
    refused(f"json-{_label}", _text, "not a JSON object")
refused("json-garbage", "{oops}", "not JSON")
refused("json-unfinished", GOOD[:-1], "not JSON")
refused("json-twice", GOOD + "{}", "not JSON")
refused("json-comma", GOOD[:-1] + ",}", "not JSON")
refused("json-comment", GOOD[:-1] + "/* */}", "not JSON")
refused("json-single-quotes", GOOD.replace('"', "'"), "not JSON")
refused("nul-padding", GOOD + "\0\0", "not JSON")
refused("bom", "\ufeff" + GOOD, "not JSON")
refused("vertical-tab", "\v" + GOOD, "not JSON")
refused("control-character", header(w=entry()).replace('"w"', '"w\x01"'), "not JSON")
refused("not-utf8", join(GOOD.encode().replace(b'"w"', b'"\xff"'), DATA), "not UTF-8")
refused("overlong-utf8", join(GOOD.encode().replace(b'"w"', b'"\xc0\xaf"'), DATA), "not UTF-8")
refused("utf16", join(GOOD.encode("utf-16"), DATA), "not UTF-8")
refused("utf8-surrogate", join(GOOD.encode().replace(b'"w"', b'"\xed\xa0\x80"'), DATA), "not UTF-8")
refused("surrogate-name", GOOD.replace('"w"', '"\\ud800"'), "surrogate")
refused("surrogate-dtype", GOOD.replace('"F32"', '"\\uDFFF"'), "surrogate")
refused("surrogate-unknown-field", header(w=entry(x='"\\ud800"')), "surrogate")
refused("surrogate-metadata", GOOD[:-1] + ',"__metadata__":{"a":"\\udc00"}}', "surrogate")
refused("surrogates-reversed", GOOD.replace('"w"', '"\\ude00\\ud83d"'), "surrogate")

# --- names -------------------------------------------------------------------------------------

refused("name-twice", f'{{"w":{entry()},"w":{entry()}}}', "name twice", "w", ours=True)
refused(
    "name-twice-escaped", f'{{"w":{entry()},"\\u0077":{entry()}}}', "name twice", "w", ours=True
)
refused("name-twice-different", f'{{"w":{entry("F64", (1,), (0, 8))},"w":{entry()}}}',
        "name twice", "w", ours=True)  # fmt: skip
refused("field-twice", header(w=entry()[:-1] + ',"dtype":"F32"}'), "name twice")
refused("offsets-twice", header(w='{"data_offsets":[0,0],' + entry()[1:]), "name twice")
refused("unknown-field-twice", header(w=entry(x="1")[:-1] + ',"x":2}'), "name twice", ours=True)
refused("metadata-twice", '{"__metadata__":{},"__metadata__":{},' + GOOD[1:], "name twice")
refused("metadata-null-twice", '{"__metadata__":{"":null,"":""},' + GOOD[1:], "name twice")

# --- fields of a wrong type ------------------------------------------------------------------

_WRONG = {"null": "null", "true": "true", "false": "false", "float": "1.5",
          "string": '"1"', "object": '{"a":1}', "nested": "[[[1]]]",
          "empty-object": "{}"}  # fmt: skip
for _label, _text in _WRONG.items():
    refused(f"entry-{_label}", header(w=_text), "malformed tensor entry", "w")
    refused(f"shape-{_label}", header(w=entry(shape=_text)), "malformed tensor entry", "w")
    refused(f"dim-{_label}", header(w=entry(shape=f"[{_text}]")), "malformed tensor entry", "w")
    refused(f"offsets-{_label}", header(w=entry(offsets=_text)), "malformed tensor entry", "w")
    refused(f"begin-{_label}", header(w=entry(offsets=f"[{_text},4]")), "malformed", "w")
    refused(f"end-{_label}", header(w=entry(offsets=f"[0,{_text}]")), "malformed", "w")
    if _label != "string":  # A string is a dtype, though an unknown one.
        text = entry().replace('"F32"', _text)
        refused(f"dtype-{_label}", header(w=text), "malformed tensor entry", "w")
refused("dtype-number", header(w=entry(1)), "malformed tensor entry", "w")
refused("dtype-two-keys", header(w=entry({"F32": None, "F16": None})), "malformed", "w")
refused("dtype-key-with-value", header(w=entry({"F32": 1})), "malformed tensor entry", "w")
refused("shape-number", header(w=entry(shape="1")), "malformed tensor entry", "w")
refused("offsets-none", header(w=entry(offsets="[]")), "malformed tensor entry", "w")
refused("offsets-one", header(w=entry(offsets="[4]")), "malformed tensor entry", "w")
refused("offsets-three", header(w=entry(offsets="[0,4,4]")), "malformed tensor entry", "w")
refused("entry-list-of-four", header(w='["F32",[1],[0,4],0]'), "malformed tensor entry", "w")
refused("entry-list-misordered", header(w='[[1],"F32",[0,4]]'), "malformed tensor entry", "w")
for _field in ("dtype", "shape", "data_offsets"):
    _less = {k: v for k, v in json.loads(entry()).items() if k != _field}
    refused(f"without-{_field}", header(w=json.dumps(_less)), "malformed tensor entry", "w")
    _other = entry().replace(_field, _field.upper())
    refused(f"capital-{_field}", header(w=_other), "malformed tensor entry", "w")
refused("no-fields", header(w="{}"), "malformed tensor entry", "w")
for _label, _text in (("null-value", '{"a":null}'), ("number-value", '{"a":1}'),
                      ("list-value", '{"a":["b"]}'), ("object-value", '{"a":{"b":"c"}}'),
                      ("list", "[]"), ("string", '"a"'), ("number", "1"),
                      ("tensor", entry())):  # fmt: skip
    refused(f"metadata-{_label}", f'{{"__metadata__":{_text},{GOOD[1:]}', "__metadata__")

# --- numbers ---------------------------------------------------------------------------------

for _label, _text in (("minus-zero", "-0"), ("negative", "-1"), ("exponent", "1e0"),
                      ("point", "1.0"), ("2-64", str(2**64)), ("5000-digits", "9" * 5000),
                      ("leading-zero", "01"), ("plus", "+1"), ("hex", "0x1"), ("nan", "NaN"),
                      ("infinity", "Infinity"), ("minus-infinity", "-Infinity"),
                      ("out-of-range", "1e400")):  # fmt: skip
    for _place, _entry in (("dim", entry(shape=f"[{_text}]")),
                           ("begin", entry(offsets=f"[{_text},4]")),
                           ("end", entry(offsets=f"[0,{_text}]"))):  # fmt: skip
        # 2^64 is refused as a number, or as an end that the file does not have.
        refused(f"{_place}-{_label}", header(w=_entry), "", fields=False)
for _label, _text in (("nan", "NaN"), ("infinity", "-Infinity"), ("float-out-of-range", "1e400"),
                      ("int-out-of-range", "9" * 400), ("5000-digits", "9" * 5000)):  # fmt: skip
    refused(f"unknown-field-{_label}", header(w=entry(x=_text)), "JSON", fields=False)

# --- shapes ----------------------------------------------------------------------------------

_MISFIT = "malformed tensor entry"
refused("shape-too-large", header(w=entry(shape=(2,))), _MISFIT, "w")
refused("shape-too-small", header(w=entry("F16", (1,))), _MISFIT, "w")
refused("shape-empty-for-two", header(w=entry("F16", ())), _MISFIT, "w")
refused("shape-zero-with-bytes", header(w=entry(shape=(0,))), _MISFIT, "w")
refused("shape-overflow", header(w=entry(shape=(2**32, 2**32))), "malformed", "w")
refused("shape-overflow-to-fit", header(w=entry("U8", (2**62, 4, 2))), "malformed", "w")
refused("shape-overflow-wraps-to-4", header(w=entry("U8", (2**63 + 2, 2))), "malformed", "w")
refused("size-overflow", header(w=entry("F64", (2**61,))), _MISFIT, "w")
refused("shape-huge-then-zero", header(z=entry(shape=(2**40, 2**40, 0), offsets=(0, 0)), w=entry()),
        "malformed", "z")  # fmt: skip
refused("shape-zero-then-2-64", header(z=entry(shape=(0, 2**64), offsets=(0, 0)), w=entry()),
        "malformed", "z")  # fmt: skip
refused("shape-million-dims", header(w=entry(shape=[2**63] * 100_000)), "malformed", "w")
refused("shape-negative-pair", header(w=entry(shape=(-1, -1))), "malformed", "w")
refused("f4-odd", join(header(w=entry("F4", (3,), (0, 2))), b"12"), "malformed", "w")
refused("f4-one-byte-short", join(header(w=entry("F4", (4,), (0, 1))), b"1"), "malformed", "w")
refused("f6-three", join(header(w=entry("F6_E2M3", (3,), (0, 3))), b"123"), "malformed", "w")
refused("f6-two", join(header(w=entry("F6_E3M2", (2,), (0, 2))), b"12"), "malformed", "w")

# --- offsets -----------------------------------------------------------------------------------

refused("begin-after-end", header(w=entry(offsets=(4, 0))), "malformed tensor entry", "w")
refused("begin-after-end-by-overflow", header(w=entry(offsets=(2**64 - 4, 0))), "malformed", "w")
refused("negative-length-to-hide-what-is-missing",
        join(header(a=entry(), b=entry("F31", (1,), (4, 0)))), "malformed", "b")  # fmt: skip
refused("begin-not-zero", join(header(w=entry(offsets=(1, 5))), b"12345"), "leaves a hole", "w")
refused("hole", join(header(a=entry(), b=entry(offsets=(8, 12))), bytes(12)), "leaves a hole", "b")
refused("overlap", join(header(a=entry(), b=entry(offsets=(2, 6))), bytes(6)), "overlaps", "b")
refused("overlap-same", join(header(a=entry(), b=entry()), bytes(8)), "overlaps", "b")
refused("overlap-inside", join(header(a=entry("F64", (1,), (0, 8)), b=entry("U8", (1,), (3, 4))),
                               bytes(8)), "overlaps", "b")  # fmt: skip
refused("empty-inside", join(header(a=entry(), z=entry(shape=(0,), offsets=(2, 2))), DATA),
        "overlaps", "z")  # fmt: skip
refused("empty-past-end", join(header(a=entry(), z=entry(shape=(0,), offsets=(9, 9))), DATA),
        "leaves a hole", "z")  # fmt: skip
refused("data-truncated", join(GOOD, DATA[:3]), "truncated")
refused("data-missing", join(GOOD), "truncated")
refused("data-too-long", join(GOOD, DATA + b"!"), "bytes past")
refused("data-without-tensors", join("{}", b"payload"), "bytes past")
refused("offsets-past-end", header(w=entry("U8", (2**40,), (0, 2**40))), "truncated")
refused("offsets-2-63", header(w=entry("U8", (2**63,), (0, 2**63))), "truncated")
refused("offsets-u64-max", header(w=entry("U8", (2**64 - 1,), (0, 2**64 - 1))), "truncated")

# --- bombs -----------------------------------------------------------------------------------

_DEEP = 100_000
refused("nested-lists", "[" * _DEEP + "]" * _DEEP, "nested too deep", fields=False)
refused("nested-lists-open", "[" * _DEEP, "nested too deep", fields=False)
refused("nested-objects", '{"a":' * _DEEP + "1" + "}" * _DEEP, "nested too deep", fields=False)
refused("nested-entry", header(w="[" * 900 + "]" * 900), "malformed", "w")
refused("nested-shape", header(w=entry(shape="[" * 900 + "]" * 900)), "malformed", "w")
refused("nested-unknown-field", header(w=entry(x="[" * 126 + "]" * 126)), "nested too deep",
        fields=False)  # fmt: skip
refused("nested-metadata", '{"__metadata__":' + '{"a":' * 900 + '"b"' + "}" * 901, "__metadata__")
refused("many-dims-of-zero", header(w=entry(shape=[0] * 100_000)), _MISFIT, "w")
refused("many-empty-lists", header(w="[" + "[]," * 300_000 + "[]]"), "malformed", "w")
refused("many-names", "{" + ",".join(f'"{n}":0' for n in range(100_000)) + "}", "malformed", "0")
refused("long-dtype", header(w=entry(["x" * 1_000_000])), "malformed", "w")
refused("long-name", header(**{"n" * 1_000_000: "null"}), "malformed", "n" * 1_000_000)
refused("escapes-for-the-terminal", header(w=entry("\x1b[2J", "null")), "malformed", "w")


# --- odd, and whole --------------------------------------------------------------------------


def odd(name: str, raw: bytes | str) -> None:
    assert name not in ODD
    ODD[name] = raw if isinstance(raw, bytes) else join(raw, DATA)


odd("empty-checkpoint", join("{}"))
odd("empty-checkpoint-padded", join("{}      "))
odd("metadata-only", join('{"__metadata__":{"a":"b"}}'))
odd("metadata-null", '{"__metadata__":null,' + GOOD[1:])
odd("metadata-empty", '{"__metadata__":{},' + GOOD[1:])
odd("metadata-key-twice", '{"__metadata__":{"a":"b","d":"","a":"c"},' + GOOD[1:])
odd("metadata-key-twice-escaped", '{"__metadata__":{"a":"b","\\u0061":"c"}, ' + GOOD[1:])
odd("metadata-unicode", '{"__metadata__":{"é\\n":"\\ud83d\\ude00","":""},' + GOOD[1:])
odd("scalar", header(w=entry(shape=())))
odd("zero-size", header(z=entry(shape=(0,), offsets=(0, 0)), w=entry()))
odd("zero-size-at-end", header(w=entry(), z=entry(shape=(3, 0, 2), offsets=(4, 4))))
odd("zero-size-many", header(w=entry(), **{n: entry("F64", (0,), (4, 4)) for n in "abc"}))
odd("zero-size-between", join(header(a=entry(), z=entry("I8", (0,), (4, 4)),
                                     b=entry(offsets=(4, 8))), bytes(range(8))))  # fmt: skip
odd("zero-size-only", join(header(z=entry(shape=(0,), offsets=(0, 0)))))
odd("zero-times-huge", header(z=entry(shape=(0, 2**60), offsets=(0, 0)), w=entry()))
odd("zero-size-f4-odd", header(z=entry("F4", (3, 0), (0, 0)), w=entry()))
odd("rank-64", header(w=entry(shape=[1] * 64)))
odd("leading-whitespace", " \n\t\r" + GOOD)
odd("trailing-whitespace", GOOD + " \n\t\r")
odd("inner-whitespace", GOOD.replace(":", " :\n").replace(",", "\t, "))
for _start in (1, 7, 31, 63):
    odd(f"data-starts-at-{_start}-mod-64", GOOD + " " * ((_start - 8 - len(GOOD)) % 64))
odd("odd-sizes", join(header(a=entry("U8", (3,), (0, 3)), b=entry("F64", (1,), (3, 11)),
                             c=entry("BF16", (1,), (11, 13))), bytes(range(13))))  # fmt: skip
odd("order-of-names", join(header(z=entry(), a=entry(offsets=(4, 8))), bytes(range(8))))
odd("order-against-offsets", join(header(a=entry(offsets=(4, 8)), z=entry()), bytes(range(8))))
odd("unknown-field", header(w=entry(x='{"a":[1,null,true,1.5e3,"x"]}', y="null", z="-0")))
odd("unknown-field-deep", header(w=entry(x="[" * 125 + "]" * 125)))
odd("unknown-field-308-digits", header(w=entry(x="9" * 308)))
odd("fields-in-any-order", header(w='{"data_offsets":[0,4],"shape":[1],"dtype":"F32"}'))
odd("fields-as-list", header(w='["F32",[1],[0,4]]'))
odd("dtype-as-key", header(w=entry({"F32": None})))
odd("fields-escaped", header(w=entry()).replace("dtype", "\\u0064type"))
odd("bool-beyond-one", header(w=entry("BOOL", (4,))))
for _label, _name in (("empty", ""), ("space", " "), ("newline", "a\nb"), ("nul", "a\0b"),
                      ("slashes", "../../etc/passwd"), ("unicode", "élan/层/👍"), ("dot", "."),
                      ("reserved", "__metadata"), ("field", "dtype"), ("delete", "\x7f"),
                      ("long", "n" * 100_000), ("right-to-left", "\u202eabc"),
                      ("composed", "\u00e9"), ("decomposed", "e\u0301")):  # fmt: skip
    odd(f"name-{_label}", header(**{_name: entry()}))
_both = header(**{"\u00e9": entry(), "e\u0301": entry(offsets=(4, 8))})
odd("names-equal-when-composed", join(_both, bytes(range(8))))
odd("many-tensors", join(header(**{f"t{n}": entry("U8", (1,), (n, n + 1)) for n in range(5000)}),
                         bytes(n % 251 for n in range(5000))))  # fmt: skip
