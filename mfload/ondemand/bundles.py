"""Row-column bundles: what a neuron of a feed-forward network needs, in one place of the file.

The tensor of a layer is [neurons, parts, width]: row n has row n of the up-projection, column n of
the down-projection, and row n of the gate if there is one. So a neuron is one read. Which tensors
they were, and where these lay, is in the metadata of the file; the other tensors lie behind.

Bundling writes no bytes of its own: an index says that a bundle consists of two or three tensors
with strides, or a tensor of every second row of a bundle, and `convert` writes what it says.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from mfload import errors
from mfload.checking.convert import Converted
from mfload.checking.rewriting import RewriteWishes, rewrite
from mfload.formats import strict_json
from mfload.index import Index, Piece, TensorInfo
from mfload.options import Options
from mfload.planning import selection
from mfload.progress import Progress
from mfload.saving import layout, targets
from mfload.sources import PathOrBytes
from mfload.stored import Stored

KEY = "mfload.bundles"
"""In the metadata: {tensor: {"layer": number, "parts": [[name, place], …]}}, as JSON."""

SUFFIX = ".bundle"
"""With which the name of each bundle ends."""

PARTS = ("up", "down", "gate")
"""What the parts of a bundle are, in order; not all have a gate."""


ALIGN = 64 << 10
"""Multiple of which the data begins, so that neurons of so many bytes lie on multiples, too."""


class BundlePart(NamedTuple):
    """A tensor that is part of a bundle.

    Attributes:
        name: What it was called.
        place: Its number among all tensors, in the order of the file that it is from.
    """

    name: str
    place: int


class Bundle(NamedTuple):
    """What a bundled file says of a bundle.

    Attributes:
        tensor: Its name.
        layer: The number of its layer.
        parts: Those of `PARTS`, in order.
    """

    tensor: str
    layer: int
    parts: tuple[BundlePart, ...]


@dataclass(frozen=True, slots=True)
class Bundled(Converted):
    """What `mfload.ondemand.bundle` did. It prints well, and has the attributes of `Saved`."""

    VERB = "bundled"


@dataclass(frozen=True, slots=True)
class Unbundled(Converted):
    """What `mfload.ondemand.unbundle` did. It prints well, and has the attributes of `Saved`."""

    VERB = "unbundled"


def bundle(
    source: PathOrBytes | Sequence[PathOrBytes],
    target: str | os.PathLike[str],
    *,
    up: str | re.Pattern[str],
    down: str | re.Pattern[str],
    gate: str | re.Pattern[str] | None = None,
    max_shard_size: int | str | None = None,
    overwrite: bool = False,
    progress: bool | Callable[[int, int], None] = False,
    options: Options | None = None,
) -> Bundled:
    r"""Writes a checkpoint in which each neuron of the feed-forward layers is one range of bytes.

    The projections of a layer become one tensor [neurons, parts, width], `layers.3.bundle`; all
    other tensors and the metadata stay. It is valid safetensors, and `unbundle` is the way back.
    Bundles come first, and the data begins on a multiple of 64 KiB. So each bundle does if its size
    is such a multiple, as that of real layers is. In any case a neuron begins on a multiple of the
    largest power of two, up to 64 KiB, that divides its bytes.

    Memory is bounded, and files are read back before they get their names, as by `mfload.convert`,
    which also says what stays after a kill. Columns of the down-projection lie apart, so it is read
    several times, in slabs of an eighth of `max_host_overhead`.

    Args:
        source: As for `load`.
        target: Where to, as for `save`.
        up: Regular expression, searched in names, for the up-projections [neurons, width]; its one
            group is the number of the layer: r"layers\.(\d+)\.fc1\.weight".
        down: The same for the down-projections, [width, neurons].
        gate: The same for gates, [neurons, width].
        max_shard_size: Bytes of tensors a file, as for `save`. Default: a single file.
        overwrite: Whether what is there may be replaced.
        progress: True for a bar, or a function of (bytes done, bytes in all). Bytes count twice,
            once written and once read back.
        options: Threads, timeout and `max_host_overhead`; see `mfload.Options`.

    Raises:
        UsageError: A regular expression is malformed, or matches two tensors of a layer, or a layer
            lacks a part; or the source is bundled already.
        TensorNotFoundError: There is no up-projection.
        UnsupportedShapeError: The shapes of a layer's parts do not fit.
        UnsupportedDtypeError: Their dtypes differ, or pack elements into bytes.
        SourceError: The source can't be read.
        FormatError: The source is malformed.
        ChecksumError: The source differs from the manifest beside it.
        TargetError: The target is there already, is being written, or can't be written.
        FrameworkMissingError: Hashing needs the package xxhash.
        LoadTimeoutError: The timeout passed.
    """
    given = zip(PARTS, (up, down, gate), strict=True)
    patterns = {
        part: _pattern(part, each) for part, each in given if each is not None or part != "gate"
    }
    change = partial(bundled, patterns=patterns)
    return Bundled(*_rewrite(source, target, change, max_shard_size, overwrite, progress, options))


def unbundle(
    source: PathOrBytes | Sequence[PathOrBytes],
    target: str | os.PathLike[str],
    *,
    max_shard_size: int | str | None = None,
    overwrite: bool = False,
    progress: bool | Callable[[int, int], None] = False,
    options: Options | None = None,
) -> Unbundled:
    """Writes the tensors that `bundle` took, in their order, from a file that it wrote.

    Tensors and metadata are the original ones; the padding of the header may differ.

    Args:
        source: As for `load`.
        target: Where to, as for `save`.
        max_shard_size: Bytes of tensors a file, as for `save`. Default: a single file.
        overwrite: Whether what is there may be replaced.
        progress: As for `bundle`.
        options: As for `bundle`.

    Raises:
        FormatError: The source is malformed, or has no bundles.
        SourceError: The source can't be read.
        TargetError: The target is there already, is being written, or can't be written.
        LoadTimeoutError: The timeout passed.
    """
    return Unbundled(
        *_rewrite(source, target, unbundled, max_shard_size, overwrite, progress, options)
    )


def _rewrite(
    source: Any,
    target: Any,
    change: Any,
    max_shard_size: int | str | None,
    overwrite: bool,
    progress: Progress,
    options: Options | None,
) -> tuple[Any, ...]:
    targets.key_of(target)  # None is for align.
    given = layout.shard_limit(max_shard_size), ALIGN, overwrite, progress, options
    return rewrite(source, target, RewriteWishes(*given, change=change, resume=True))


def bundled(index: Index, patterns: Mapping[str, re.Pattern[str]]) -> Index:
    """The index of a checkpoint whose projections are bundled (errors: see `bundle`)."""
    if KEY in (index.metadata or {}):
        raise errors.UsageError("the source is bundled already", file=index.files[0])
    places = {name: place for place, name in enumerate(index.columns.names)}
    made: list[TensorInfo] = []
    said: dict[str, Any] = {}
    taken = set[str]()
    for layer, names in sorted(_layers(index, patterns).items()):
        parts = [index[name] for name in names]
        _check(index, parts)
        match = patterns["up"].search(names[0])
        assert match is not None
        name = names[0][: match.end(1)] + SUFFIX
        if name in places or name in said:
            what = "a tensor has the name that the bundle would have"
            raise errors.UsageError(what, file=index.files[0], tensor=name)
        made.append(_joined(name, parts))
        said[name] = {"layer": layer, "parts": [[each, places[each]] for each in names]}
        taken.update(names)
    # Those of which more lie on a multiple go first; so all of them do that can.
    made.sort(key=lambda info: -min(info.nbytes & -info.nbytes, ALIGN))
    rest = [info for info in index.columns if info.name not in taken]
    metadata = {**(index.metadata or {}), KEY: json.dumps(said, separators=(",", ":"))}
    rows = {info.name: info for info in (*made, *rest)}
    return Index(index.files, rows, metadata, index.notes)


def unbundled(index: Index) -> Index:
    """The index of the tensors that were bundled, and the others (errors: see `unbundle`)."""
    found = bundles(index)
    inside: dict[int, TensorInfo] = {}
    for each in found:
        info = index[each.tensor]
        for number, part in enumerate(each.parts):
            inside[part.place] = _taken(info, number, part.name)
    names = {each.tensor for each in found}
    rest = iter([info for info in index.columns if info.name not in names])
    count = len(index.columns) - len(names) + sum(len(each.parts) for each in found)
    made = [inside.get(place) or next(rest, None) for place in range(count)]
    rows = {info.name: info for info in made if info is not None}
    if len(rows) < count:
        raise _malformed(index, f"different names, and places from 0 to {count - 1}", "")
    metadata = {key: text for key, text in (index.metadata or {}).items() if key != KEY}
    return Index(index.files, rows, metadata or None, index.notes)


def bundles(index: Index) -> list[Bundle]:
    """What the metadata of a checkpoint says of its bundles, by layer.

    Raises FormatError if there are none, or not those that it says.
    """
    text = (index.metadata or {}).get(KEY)
    if text is None:
        raise errors.FormatError(
            "the file has no bundles; mfload.ondemand.bundle writes one that has",
            file=index.files[0],
            expected=f"{KEY!r} in the metadata",
        )
    said = strict_json.loads(text.encode(), index.files[0], "description of the bundles")
    made: list[Bundle] = []
    for name, each in said.items() if isinstance(said, dict) else [("", None)]:
        layer, parts = (each.get("layer"), each.get("parts")) if isinstance(each, dict) else (0, 0)
        if type(layer) is not int or not isinstance(parts, list) or not 2 <= len(parts) <= 3:
            raise _malformed(index, "a layer, and two or three parts", name)
        if not all(
            isinstance(p, list) and len(p) == 2 and type(p[0]) is str and type(p[1]) is int
            for p in parts
        ):
            raise _malformed(index, "a name and a place of each part", name)
        info = index[name] if name.endswith(SUFFIX) and name in index.tensors else None
        fine = info and info.simple and info.dtype.known and info.dtype.elements == 1
        shape = info.shape if info and fine else ()
        if len(shape) != 3 or shape[1] != len(parts):
            what = f"a tensor [neurons, {len(parts)}, width] of whole bytes an element"
            found = f"{info.dtype}{list(info.shape)}" if info else None
            raise _malformed(index, what, name, found)
        made.append(Bundle(name, layer, tuple(BundlePart(*part) for part in parts)))
    if len({each.layer for each in made}) < len(made):
        raise _malformed(index, "one bundle of each layer", "")
    return sorted(made, key=lambda each: each.layer)


def _malformed(
    index: Index, expected: str, tensor: str, found: object = None
) -> errors.FormatError:
    return errors.FormatError(
        "the description of the bundles in the metadata is malformed",
        file=index.files[0],
        tensor=tensor or None,
        expected=expected,
        found=found,
    )


def _pattern(part: str, given: Any) -> re.Pattern[str]:
    found = selection.compiled(given, f"{part}=")
    if found.groups != 1:
        raise errors.UsageError(
            f"{part} has to say where the number of the layer stands in a name",
            expected=r"a regular expression with one group, r'layers\.(\d+)\.fc1\.weight'",
            found=found.pattern,
        )
    return found


def _layers(index: Index, patterns: Mapping[str, re.Pattern[str]]) -> dict[int, list[str]]:
    """The names of each layer's parts, in order."""
    found: dict[str, dict[int, str]] = {part: {} for part in patterns}
    for part, pattern in patterns.items():
        for name, match in ((name, pattern.search(name)) for name in index.columns.names):
            if match is None:
                continue
            if not re.fullmatch(r"\d{1,9}", match[1] or ""):
                what = f"the group of {part} is not the number of a layer"
                raise errors.UsageError(what, tensor=name, found=match[1])
            first = found[part].setdefault(int(match[1]), name)
            if first is not name:
                what = f"{part} matches two tensors of layer {int(match[1])}"
                raise errors.UsageError(what, tensor=name, expected="one", found=first)
    selection.select(index, patterns["up"])
    layers = sorted(set[int]().union(*found.values()))
    for layer in layers:
        there = {part: names[layer] for part, names in found.items() if layer in names}
        if len(there) < len(patterns):
            (lacks, *_) = (part for part in patterns if part not in there)
            raise errors.UsageError(
                f"layer {layer} has no tensor that {lacks} matches",
                file=index.files[0],
                tensor=next(iter(there.values())),
                expected=f"a name with {patterns[lacks].pattern!r}",
            )
    names = {layer: [found[part][layer] for part in patterns] for layer in layers}
    for each in names.values():
        if len({*each}) < len(each):
            raise errors.UsageError(
                "two parts are one tensor", tensor=each[0], found=list(patterns)
            )
    return names


def _check(index: Index, parts: Sequence[TensorInfo]) -> None:
    """Refuses parts that make no bundle."""
    up = parts[0]
    for info in parts:
        file = index.files[info.pieces[0].source]
        if len(up.shape) != 2 or info.shape != (up.shape[::-1] if info is parts[1] else up.shape):
            raise errors.UnsupportedShapeError(
                "the parts of a bundle do not fit each other",
                file=file,
                tensor=info.name,
                expected=f"up [neurons, width], gate the same, down [width, neurons]; {up.name!r} "
                f"has {list(up.shape)}",
                found=list(info.shape),
            )
        if info.dtype != up.dtype or not info.dtype.known or info.dtype.elements > 1:
            raise errors.UnsupportedDtypeError(
                "the parts of a bundle have one dtype, whose elements have bytes of their own",
                file=file,
                tensor=info.name,
                expected=f"that of {up.name!r}, {up.dtype}, and not a packed or unknown one",
                found=info.dtype.name,
            )
        if not info.simple:
            raise errors.UsageError(
                "a part is encoded, or not in C order; mfload.convert makes it safetensors",
                file=file,
                tensor=info.name,
            )


def _joined(name: str, parts: Sequence[TensorInfo]) -> TensorInfo:
    """The bundle of tensors: where each of them goes, and how it is stored."""
    neurons, width = parts[0].shape
    pieces: list[Piece] = []
    for number, info in enumerate(parts):
        box = (0, neurons), (number, number + 1), (0, width)
        stored = Stored(box, strides=(1, 0, neurons) if number == 1 else (width, 0, 1))
        pieces.append(info.pieces[0]._replace(stored=stored))
    return TensorInfo(name, parts[0].dtype, (neurons, len(parts), width), tuple(pieces))


def _taken(info: TensorInfo, number: int, name: str) -> TensorInfo:
    """A tensor that is part of a bundle: every second or third row of it."""
    neurons, parts, width = info.shape
    shape, strides = (neurons, width), (parts * width, 1)
    if number == 1:
        shape, strides = shape[::-1], strides[::-1]
    stored = Stored(strides=strides, start=number * width)
    return TensorInfo(name, info.dtype, shape, (info.pieces[0]._replace(stored=stored),))
