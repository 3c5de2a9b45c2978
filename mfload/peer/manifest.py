"""The manifest: what a seed holds, exactly, and how its bytes can be had.

Readers take it as hostile input: everything in it is checked before anything follows from it.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple, NoReturn

from mfload import dtypes, errors
from mfload.formats import strict_json
from mfload.formats.strict_json import brief
from mfload.index import Box, Columns, Kind

BLOCK = 256 << 10
"""Bytes of data that share a checksum."""

DIGITS = 16
"""Hexadecimal digits of a checksum."""

MAX_MANIFEST = 128 << 20
MAX_PARSED = 256 << 20
"""Bytes that a manifest may take in memory while it is parsed; of a long one, four times its text.
"""

MAX_SIZE = 1 << 44
"""Bytes that the fragments of a seed have together, at most."""

MAX_RANK = 64
MAX_SHARDING = 1000
"""Characters that say how a tensor is sharded."""

_VERSION = 2
_MOST = 1 << 62
MOST_PARTS = 4096
_HEX32 = re.compile(r"[0-9a-f]{32}")
_DIGESTS = re.compile(r"(?:[0-9a-f]{16})*")
NAME = re.compile(r"[A-Za-z0-9._-]+(?:/[A-Za-z0-9._-]+)*")
"""Names of models and revisions."""

_RUN = re.compile(r"[A-Za-z0-9._-]{1,64}")


class Fragment(NamedTuple):
    """A box of a tensor, at `offset` of the seed's data."""

    box: Box
    offset: int
    nbytes: int


class Entry(NamedTuple):
    """A tensor: name, dtype as formats call it, global shape, sharding for people, fragments."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    sharding: str
    fragments: tuple[Fragment, ...]


class SeedManifest(NamedTuple):
    """What a seed says of itself.

    Attributes:
        incarnation: 32 hexadecimal digits, drawn when the seed began.
        run: The run that generations belong to: a job, or a set of files. Generations of
            different runs are not compared.
        generation: Which version of the weights of the run; each update counts it up.
        part: Which part of the model this seed holds, and of how many.
        size: Bytes of data: the fragments, one after the other.
        rows: The tensors that are in parts, or share memory with others.
        metadata: Free-form strings.
        checksums: The xxh3_64 of each `BLOCK` bytes of data, 16 hexadecimal digits each; None if
            there are none.
        ways: What each transport offers, by its name.
        shared: The same sums of the parts that fragments have of blocks that several share, in the
            order of the data: they tell which one changed. Empty if there are none.
        whole: The other tensors: the data begins with them, one after the other.
    """

    model: str
    revision: str
    incarnation: str
    run: str
    generation: int
    part: tuple[int, int]
    size: int
    rows: tuple[Entry, ...]
    metadata: dict[str, str]
    checksums: str | None
    ways: dict[str, Any]
    shared: str = ""
    whole: Columns = Columns()

    @property
    def entries(self) -> Iterator[Entry]:
        """All tensors."""
        for name, dtype, shape, ((_, offset, nbytes, _),) in self.whole:
            box = tuple([(0, length) for length in shape])
            yield Entry(name, dtype.name, shape, "", (Fragment(box, offset, nbytes),))
        yield from self.rows

    @property
    def contents(self) -> tuple[Any, ...]:
        """The same for seeds that hold the same bytes in the same places, whatever the sharding."""
        return self.size, self.checksums, *(row._replace(sharding="") for row in self.entries)

    @property
    def layout(self) -> str:
        """The fingerprint of names, dtypes and shapes, whatever the sharding."""
        rows = sorted((each.name, each.dtype, each.shape) for each in self.entries)
        return hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:32]

    def parts(self, block: int) -> list[tuple[int, int, list[str], str]]:
        """The fragments that have parts of a block: first and past last byte, names and checksum.

        The checksum is empty if it is unknown.
        """
        held, sums = self._held(block), self.sums()
        return [(*row, sums.get(row[:2], "")) for row in held.get(block, ())]

    def sums(self) -> dict[tuple[int, int], str]:
        """The checksums of the parts that fragments have of the blocks at their edges.

        By first and past last byte, as far as they are known.
        """
        held = self._held().items()
        shared = [(low, high) for _, rows in held if len(rows) > 1 for low, high, _ in rows]
        if len(self.shared) != DIGITS * len(shared):
            shared = []
        found = {row: self.shared[DIGITS * n : DIGITS * (n + 1)] for n, row in enumerate(shared)}
        for number, rows in held:
            low, high, _ = rows[0]
            if (low, high) == (number * BLOCK, min(low + BLOCK, self.size)):
                found[low, high] = (self.checksums or "")[DIGITS * number : DIGITS * (number + 1)]
        return found

    def _held(self, *blocks: int) -> dict[int, list[tuple[int, int, list[str]]]]:
        """Parts of blocks with their names: of those at edges of fragments, and those given."""
        places: dict[tuple[int, int], list[str]] = {}
        for entry in self.entries:
            for _, offset, nbytes in entry.fragments:
                if nbytes:
                    places.setdefault((offset, offset + nbytes), []).append(entry.name)
        held: dict[int, list[tuple[int, int, list[str]]]] = {}
        for (start, stop), names in sorted(places.items()):
            for number in sorted({start // BLOCK, *blocks, (stop - 1) // BLOCK}):
                low, high = max(start, number * BLOCK), min(stop, (number + 1) * BLOCK)
                if low < high:
                    held.setdefault(number, []).append((low, high, names))
        return held

    def to_json(self) -> bytes:
        """The manifest as it is sent."""
        fields = self._asdict()
        rows, whole = fields.pop("rows"), self.whole
        kinds = [(dtype.name, shape) for dtype, shape in whole.kinds]
        fields["whole"] = whole.names, kinds, whole.kind.tolist()
        given = {"mfload_seed": _VERSION, **fields, "block": BLOCK, "tensors": rows}
        return json.dumps(given, separators=(",", ":")).encode()


def from_json(data: Any, name: str) -> SeedManifest:
    """The manifest of parsed JSON, that the peer `name` sent.

    Raises:
        HeaderError: It breaks a rule: of its fields, sizes, boxes, names.
    """
    check = _Checked(name)
    given = check.of(data, dict, "a manifest")
    spoken = check.field(given, "mfload_seed", int)
    if spoken != _VERSION:
        check.fail("the seed runs another version of mfload", f"format {_VERSION}", spoken)
    model = check.field(given, "model", str, lambda text: bool(NAME.fullmatch(text)))
    revision = check.field(given, "revision", str, lambda v: not v or bool(NAME.fullmatch(v)))
    incarnation = check.field(given, "incarnation", str, lambda v: bool(_HEX32.fullmatch(v)))
    run = check.field(given, "run", str, is_run)
    generation = check.field(given, "generation", int, is_generation)
    part, parts = check.field(given, "part", list, is_part)
    size = check.field(given, "size", int, _is_count)
    if size > MAX_SIZE:
        check.fail("it promises too much", f"at most {errors.amount(MAX_SIZE)}", size)
    metadata = check.field(given, "metadata", dict, lambda v: {*map(type, v.values())} <= {str})
    ways = check.field(given, "ways", dict, lambda v: len(v) <= 32)
    checksums = given.get("checksums")
    if checksums is not None:
        blocks = -(-size // BLOCK)
        check.field(given, "block", int, lambda value: value == BLOCK)
        check.of(checksums, str, "checksums", lambda v: len(v) == 16 * blocks)
        check.of(checksums, str, "checksums", lambda v: bool(_DIGESTS.fullmatch(v)))
    shared = check.of(given.get("shared", ""), str, "shared", lambda v: bool(_DIGESTS.fullmatch(v)))
    whole = _whole(check.field(given, "whole", list), size, check)
    rows = tuple(_entry(row, check) for row in check.field(given, "tensors", list))
    check.tensor = None
    count = len(whole) + len(rows)
    if len(names := {*whole.names, *(each.name for each in rows)}) < count:
        check.fail("tensors share a name", errors.counted(count, "name"), len(names))
    _check_places(whole, rows, size, check)
    return SeedManifest(
        model,
        revision,
        incarnation,
        run,
        generation,
        (part, parts),
        size,
        rows,
        metadata,
        checksums,
        ways,
        shared,
        whole,
    )


def in_turn(names: list[str], kinds: list[Kind], kind: Sequence[int]) -> Columns:
    """Tensors that lie one after the other from the first byte on."""
    sizes = [dtype.size_of(shape) or 0 for dtype, shape in kinds]
    nbytes = array("q", map(sizes.__getitem__, kind))
    offsets = array("q", accumulate(nbytes, initial=0))[:-1]
    return Columns(names, kinds, array("q", kind), array("q", [0]) * len(names), offsets, nbytes)


def is_part(value: Any) -> bool:
    """Whether it is (rank, size), of at most `MOST_PARTS`."""
    fine = isinstance(value, list | tuple) and [*map(type, value)] == [int, int]
    return fine and 0 <= value[0] < value[1] <= MOST_PARTS


def is_run(value: Any) -> bool:
    """Whether it can name a run."""
    return type(value) is str and bool(_RUN.fullmatch(value))


def is_generation(value: Any) -> bool:
    """Whether it can be the number of a version of the weights."""
    return type(value) is int and _is_count(value)


def _is_count(value: int) -> bool:
    return 0 <= value < _MOST


class _Checked:
    """Takes values apart, or raises HeaderError that names the peer."""

    def __init__(self, name: str) -> None:
        self.name: str = name
        self.tensor: str | None = None

    def fail(self, what: str, expected: object, found: object) -> NoReturn:
        message = f"the seed's manifest is malformed: {what}"
        raise errors.HeaderError(
            message, file=self.name, tensor=self.tensor, expected=expected, found=brief(found)
        )

    def of(
        self, value: Any, kind: type, what: str, fine: Callable[[Any], bool] | None = None
    ) -> Any:
        if type(value) is not kind:
            self.fail(f"{what} is of another type", kind.__name__, value)
        if fine is not None and not fine(value):
            self.fail(f"{what} is wrong", f"{kind.__name__} within its limits", value)
        return value

    def field(
        self,
        given: Mapping[str, Any],
        key: str,
        kind: type,
        fine: Callable[[Any], bool] | None = None,
    ) -> Any:
        return self.of(given.get(key), kind, key, fine)

    def row(self, value: Any, length: int, what: str) -> Sequence[Any]:
        return self.of(value, list, what, lambda row: len(row) == length)


def _whole(given: Any, size: int, check: _Checked) -> Columns:
    """The tensors that the data begins with: names, kinds, and the number of each one's kind."""
    names, kinds, kind = check.row(given, 3, "the whole tensors")
    for what, each, one in (("the names", names, str), ("the kinds", kind, int)):
        check.of(each, list, what, lambda values, one=one: {*map(type, values)} <= {one})
    check.of(names, list, "the names", lambda values: strict_json.encodable("".join(values)))
    found: list[Kind] = []
    for each in check.of(kinds, list, "the kinds"):
        dtype, shape = check.row(each, 2, "a kind")
        found.append(_kind(dtype, shape, check))
    if len(kind) != len(names) or not {*kind} <= {*range(len(found))}:
        expected = f"{errors.counted(len(names), 'number')} below {len(found)}"
        check.fail("the kinds are not those of the names", expected, kind)
    sizes = [dtype.size_of(shape) or 0 for dtype, shape in found]
    if (total := sum(map(sizes.__getitem__, kind))) > size:
        check.fail("it promises too much", f"at most {errors.amount(size)}", total)
    return in_turn(names, found, kind)


def _kind(dtype: Any, shape: Any, check: _Checked) -> Kind:
    kind = dtypes.TABLE.get(check.of(dtype, str, "the dtype"))
    if kind is None:
        check.fail("the dtype is unknown", "a dtype of the table", dtype)
    dims = tuple(check.of(n, int, "a dim", _is_count) for n in check.of(shape, list, "the shape"))
    if len(dims) > MAX_RANK or math.prod(n or 1 for n in dims) >= _MOST:
        check.fail(
            "the shape is over the limit", f"at most {MAX_RANK} dims and 2^62 elements", shape
        )
    if kind.size_of(dims) is None:
        check.fail("the elements fill no whole bytes", f"a multiple of {kind.elements}", shape)
    return kind, dims


def _entry(row: Any, check: _Checked) -> Entry:
    check.tensor = None
    name, dtype, shape, sharding, given = check.row(row, 5, "a tensor")
    check.of(name, str, "a name", strict_json.encodable)
    check.tensor = name
    check.of(sharding, str, "the sharding", lambda text: len(text) <= MAX_SHARDING)
    kind, dims = _kind(dtype, shape, check)
    fragments: list[Fragment] = []
    for each in check.of(given, list, "the fragments"):
        spans, offset, nbytes = check.row(each, 3, "a fragment")
        check.of(offset, int, "an offset", _is_count)
        check.of(nbytes, int, "a size", _is_count)
        check.of(spans, list, "a box", lambda box: len(box) == len(dims))
        box: list[tuple[int, int]] = []
        for span, length in zip(spans, dims, strict=True):
            low, high = check.row(span, 2, "a box")
            check.of(low, int, "a box", _is_count)
            check.of(high, int, "a box", lambda stop, low=low, most=length: low <= stop <= most)
            box.append((low, high))
        expected = kind.size_of(tuple(high - low for low, high in box))
        packs = kind.elements > 1 and box and (box[-1][0] % kind.elements or expected is None)
        if packs or nbytes != expected:
            check.fail("a fragment has another size than its box", expected, nbytes)
        fragments.append(Fragment(tuple(box), offset, nbytes))
    return Entry(name, dtype, dims, sharding, tuple(fragments))


def _check_places(whole: Columns, rows: Sequence[Entry], size: int, check: _Checked) -> None:
    """Fragments lie within the data; two may share bytes only if they are the same ones."""
    places = [(each.offset, each.nbytes, row.name) for row in rows for each in row[-1]]
    if places:  # Whole tensors by themselves follow each other.
        places += zip(whole.offsets, whole.nbytes, whole.names, strict=True)
    places.sort()
    total = sum(nbytes for _, nbytes, _ in places)
    if total > MAX_SIZE:
        check.fail("it promises too much", f"at most {errors.amount(MAX_SIZE)}", total)
    end, last = 0, (-1, -1)
    for offset, nbytes, check.tensor in places:
        if offset + nbytes > size:
            check.fail(
                "a fragment lies outside the data", f"within {errors.amount(size)}", offset + nbytes
            )
        if nbytes and offset < end and (offset, nbytes) != last:
            check.fail("fragments overlap", f"from byte {end} on", offset)
        if nbytes:
            end, last = max(end, offset + nbytes), (offset, nbytes)
