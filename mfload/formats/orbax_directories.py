"""Which directory of Orbax's is meant: steps of a training, and the items of a checkpoint.

    root/[prefix]<step>/<item>/     of a CheckpointManager, a v1 Checkpointer, or Flax
    <checkpoint>/<item>/            of v1's `save`; the item is `state` unless named
    <checkpoint>/                   of a v0 Checkpointer: the item itself

While a checkpoint is written, its name has `.orbax-checkpoint-tmp` behind it, or its
`_CHECKPOINT_METADATA` no time of a commit.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from mfload import errors
from mfload.formats import ocdbt, strict_json
from mfload.formats.strict_json import bad, brief
from mfload.sources.base import Source, read_whole
from mfload.sources.directories import Directory

TREE = "_METADATA"
"""The file of an item that has its tree."""

CHECKPOINT = "_CHECKPOINT_METADATA"
"""The file of a checkpoint that says when it was written, and what its items are."""

ARRAYS = "array_metadatas"
"""The directory of an item with what its writer noted of arrays."""

MAX_METADATA = 100_000_000
"""Bytes of a file of JSON: as many as a safetensors header may have."""

LONG = "the metadata is over the limit"
"""What an error says of a longer one."""

Number = int | float
"""A step; Flax's may be floats."""

_TEMPORARY = ".orbax-checkpoint-tmp"
_COMMITTED = "commit_success.txt"
_MARKS = frozenset({TREE, CHECKPOINT, "orbax.checkpoint", ARRAYS, ocdbt.MANIFEST})
_UNSIGNED = r"(?:\d{1,18}(?:\.\d{0,30})?|\.\d{1,30})(?:[eE][-+]?\d{1,3})?"
_NUMBER = f"[-+]?{_UNSIGNED}"
_NUMBERED = re.compile(rf"(?s)(?P<prefix>.*?)(?<!\d)(?P<step>(?:(?<![A-Za-z])[-+])?{_UNSIGNED})")
# As Flax takes names apart, so that their order is the same here.
_NUMBERS = re.compile(f"({_NUMBER})")
_USUAL = ("", "checkpoint_")  # Prefixes that Orbax and Flax look for unless told another.
_METRICS = "metrics"
_JSON = ("metadata", "data.json", _METRICS)  # What Orbax's handlers of JSON call their file.
_KEYS = ("jax_random_key", "np_random_key")  # Where its handlers of random keys put the item.
_SHOWN = 20


class Step(NamedTuple):
    """A checkpoint in the directory of a training; `name` is a file or a directory there."""

    prefix: str
    number: Number
    name: str
    finished: bool = True


class Items(NamedTuple):
    """The items of a checkpoint by name.

    Attributes:
        trees: The directory that has an item's tree and arrays.
        plain: The name of the file of an item that is JSON.
        other: Items that other libraries or handlers wrote.
    """

    trees: dict[str, Directory]
    plain: dict[str, str]
    other: list[str]


# -- steps -----------------------------------------------------------------------------------


def numbered(name: str, prefix: str | None = None) -> tuple[str, Number] | None:
    """Takes the name of a step apart: checkpoint_0.5 → "checkpoint_", 0.5; None if it is none."""
    found = _NUMBERED.fullmatch(name)
    if prefix is not None:
        found = re.fullmatch(f"(?P<prefix>{re.escape(prefix)})(?P<step>{_NUMBER})", name)
    if found is None:
        return None
    text = found["step"]
    return found["prefix"], int(text) if text.isdecimal() else float(text)


def recognise_directory(directory: Directory, names: Iterable[str]) -> bool:
    """Whether a directory with such names looks like a checkpoint of Orbax, a step or a root."""
    names = [*names]
    if not _MARKS.isdisjoint(names) or _TEMPORARY in _base(directory):
        return True
    if any(_TEMPORARY in name for name in names):
        return True
    some = [name for name in names if _NUMBERED.fullmatch(name)][-_SHOWN:]
    return any(
        directory.is_file(f"{name}/{mark}") for name in (*some, *names[:_SHOWN]) for mark in _MARKS
    ) or any(_trees(directory.below(name)) for name in some)


def is_checkpoint(names: Iterable[str]) -> bool:
    """Whether such names are those of a checkpoint or an item, and not of a root."""
    return not _MARKS.isdisjoint(names)


def locate(
    directory: Directory,
    step: Number | None = None,
    prefix: str | None = None,
    files: Sequence[Step] = (),
) -> Any:
    """What is read: a directory with a tree or with several items, or one of the files.

    Args:
        directory: An item, a step with items in it, or the root of a manager with steps.
        step: Which step of a root. Default: the newest that is complete.
        prefix: What the names of its steps begin with. Default: any, if all have the same; of
            several, none or Flax's `checkpoint_`.
        files: Steps of a root that are files.

    Raises:
        SourceNotFoundError: There is no such step; the error lists those there are.
        CheckpointError: The checkpoint was not finished, or has no arrays; or the steps of several
            trainings lie side by side.
        UsageError: A step or a prefix is asked for, and the path is not that of a root.
        SourceError: A directory can't be listed.
    """
    _check_finished(directory)
    names = directory.names()
    found = [] if is_checkpoint(names) else [*_steps(directory, names, prefix), *files]
    if found:
        chosen = _choose(directory, found, step)
        if chosen in files:
            return directory.at(chosen.name)
        place = directory.below(chosen.name)
        return _content(place, place.names())
    if prefix is not None and not is_checkpoint(names):
        what = f"there is no step with the prefix {prefix!r}"
        raise errors.SourceNotFoundError(what, file=directory.name, found=", ".join(names[:8]))
    for argument, value in (("step", step), ("prefix", prefix)):
        if value is not None:
            what = "the directory has no steps: it is a checkpoint itself"
            expected = f"{argument}=None"
            raise errors.UsageError(what, file=directory.name, expected=expected, found=value)
    return _content(directory, names)


def _steps(directory: Directory, names: Sequence[str], prefix: str | None) -> list[Step]:
    """The steps of a root that are directories; none if it is not a root."""
    found: list[Step] = []
    last, told = set[str](), set[str]()  # Steps that have the file that is written last, or another
    for name in names:
        made = numbered(name.partition(_TEMPORARY)[0], prefix)
        if made is None or not directory.is_directory(name):
            continue
        place = directory.below(name)
        if place.is_file(".zarray"):
            continue
        # Without a file of its own, `layer1` may be an item as well as a step.
        clear = prefix is not None or made[0] in _USUAL or made[0].endswith("_")
        if not clear and not place.is_file(CHECKPOINT):
            continue
        whole = place.is_file(TREE) or bool(_trees(place))
        found.append(Step(*made, name, _TEMPORARY not in name and whole and _committed(place)))
        last |= {name} if place.is_file(_COMMITTED) else set()
        told |= {name} if place.is_file(CHECKPOINT) else set()  # that says the same.
    if not last:
        return found
    return [each._replace(finished=each.finished and each.name in last | told) for each in found]


def _choose(directory: Directory, found: Sequence[Step], step: Number | None) -> Step:
    """The step that is asked for; by default the newest finished one."""

    def asked(each: Step) -> bool:
        return step is None or each.number == step or each.name == f"{each.prefix}{step}"

    prefixes = {each.prefix for each in found if each.finished} or {each.prefix for each in found}
    for some in ({*_USUAL}, {each.prefix for each in found if asked(each)}):
        if len(prefixes) > 1:
            prefixes = (prefixes & some) or prefixes
    mine = sorted((each for each in found if each.prefix in prefixes), key=_age)
    if len(prefixes) > 1:
        what = "steps of several trainings side by side; name one, or give the prefix"
        newest = sorted({each.prefix: each.name for each in mine}.values())
        raise errors.CheckpointError(what, file=directory.name, problems=tuple(newest))
    wanted = [each for each in mine if asked(each)]
    finished = [each for each in wanted if each.finished]
    if not finished and wanted:
        place = directory.below(wanted[-1].name)
        if _committed(place):
            _content(place, place.names())  # It may say that there are no arrays.
        raise _unfinished(place)
    if not finished:
        there = sorted({each.number for each in mine if each.finished})[-_SHOWN:]
        what, expected = f"there is no step {step}", ", ".join(map(str, there)) or "a step"
        raise errors.SourceNotFoundError(what, file=directory.name, expected=expected)
    exact = [each for each in finished if each.name == f"{each.prefix}{step}"] or finished
    chosen = exact[-1]
    same = [each.name for each in exact if each.number == chosen.number]
    if len(same) > 1:
        what = f"several checkpoints of step {chosen.number}; name one of them"
        raise errors.CheckpointError(what, file=directory.name, problems=tuple(same))
    return chosen


def _age(step: Step) -> tuple[list[str | float], Number]:
    """A key that sorts steps of one prefix as Flax does, by the numbers in their names."""
    parts = enumerate(_NUMBERS.split(step.name))
    return [float(part) if n % 2 else part for n, part in parts], step.number


# -- what is finished ------------------------------------------------------------------------


def _check_finished(directory: Directory) -> None:
    """Raises CheckpointError for a directory that is still being written, or is in one."""
    above = directory.above
    for each in (directory, *(above or ())[:1]):
        if _TEMPORARY in _base(each) or not _committed(each):
            raise _unfinished(each)


def _base(directory: Directory) -> str:
    """The name of a directory in the one that holds it."""
    above = directory.above
    return above[1] if above else ""


def _committed(directory: Directory) -> bool:
    """Whether its writer came to an end.

    Where directories can't be renamed, as in buckets, a checkpoint has its name from the start, and
    the time of its commit at the end.
    """
    if directory.is_file(_COMMITTED):
        return True
    try:
        written = read_table(directory, CHECKPOINT)
    except errors.FormatError:
        return False  # Its writer is at work.
    return written.get("commit_timestamp_nsecs", 0) is not None


def _unfinished(directory: Directory) -> errors.CheckpointError:
    return errors.CheckpointError(
        "the checkpoint was not finished: its writer was stopped, or is at work",
        file=directory.name,
        expected=f"no {_TEMPORARY} in its name, the time of its commit, and {TREE}",
    )


# -- items -----------------------------------------------------------------------------------


def items(directory: Directory) -> Items:
    """The items of a checkpoint. Metrics beside a single other item are not one of them."""
    trees, plain, other = _trees(directory), dict[str, str](), list[str]()
    for name in directory.names():
        if name in trees or _TEMPORARY in name or not directory.is_directory(name):
            continue
        files = [f"{name}/{each}" for each in _JSON]
        if file := next(filter(directory.is_file, files), None):
            plain[name] = file
        else:
            other.append(name)
    if other:  # Orbax may have directories of its own there.
        handlers = read_table(directory, CHECKPOINT).get("item_handlers")
        other = [name for name in other if not isinstance(handlers, dict) or name in handlers]
    if len(trees) + len(plain) == 2:
        plain.pop(_METRICS, None)
    return Items(trees, plain, other)


def _trees(directory: Directory) -> dict[str, Directory]:
    """The items of a directory that have a tree, by name, and where that lies."""
    try:
        names = directory.names()
    except errors.SourceError:
        return {}
    found: dict[str, Directory] = {}
    for name in names:
        places = [name, *(f"{name}/{below}" for below in _KEYS)]
        place = next((each for each in places if directory.is_file(f"{each}/{TREE}")), None)
        if place is not None and _TEMPORARY not in name:
            found[name] = directory.below(place)
    return found


def _content(directory: Directory, names: Sequence[str]) -> Directory:
    """The only item of a checkpoint, or the directory itself, which is one or has several."""
    if TREE in names:
        return directory
    unfinished = [name for name in names if _TEMPORARY in name]
    if unfinished:
        raise _unfinished(directory.below(unfinished[0]))
    trees, plain, other = items(directory)
    if trees:
        alone = len(trees) == 1 and not plain and not other
        return next(iter(trees.values())) if alone else directory
    what = f"the checkpoint has no {TREE}: it was not finished, or holds no arrays"
    raise errors.CheckpointError(
        what, file=directory.name, expected=TREE, found=", ".join(names[:8]) or "an empty directory"
    )


# -- files -----------------------------------------------------------------------------------


def read_json(file: Source) -> dict[str, object]:
    """The object in a file of Orbax's metadata; raises HeaderError if it is malformed."""
    text = read_whole(file, MAX_METADATA, LONG)
    found: object = strict_json.loads(text, file.name, "metadata")
    if not isinstance(found, dict):
        raise bad(file, "malformed metadata", None, "an object", brief(found))
    strict_json.check(found, file.name)
    return found  # pyright: ignore[reportUnknownVariableType]


def read_table(directory: Directory, name: str) -> dict[str, object]:
    """The object in a file of a directory; an empty dict if the file does not exist."""
    return read_json(directory.file(name)) if directory.is_file(name) else {}
