"""`mfload.load_into`: a checkpoint into a tree of the user's own."""

from __future__ import annotations

import os
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from mfload import errors, frameworks
from mfload.formats import checkpoint
from mfload.index import Index
from mfload.loading.session import Loader, let_go
from mfload.mesh import fetching
from mfload.mesh.barrier import meeting, seen
from mfload.mesh.fingerprints import fingerprint
from mfload.mesh.group import Party
from mfload.options import UNMATCHED, LoadOptions, Options, Unmatched, check_choice, started
from mfload.planning.requests import Request
from mfload.progress import Progress, shown
from mfload.report import Report, cleared
from mfload.runtime import Deadline, gc_paused
from mfload.sources.local import LocalFile
from mfload.trees import staying, targets
from mfload.trees.assemble import Fetch, Filling
from mfload.trees.targets import Goal

Path = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


def load_into(
    target: Any,
    path: Path,
    *,
    mapping: Any = None,
    mesh: Any = None,
    shardings: Any = None,
    unmatched: Unmatched = "replicate",
    logical_axis_rules: Any = None,
    dtype: Any = "target",
    strict: bool = True,
    progress: Progress = False,
    report: Report | None = None,
    options: Options | None = None,
) -> Any:
    r"""Loads a checkpoint into a tree of JAX: its names, shapes, dtypes and shardings.

    The target is a mould: it is left as it is, and a new tree of the same type comes back. Its
    leaves go by their paths, joined by dots ("layers.0.attn.kernel"); what Flax calls the value of
    a variable or a box is no part of the name.

    Args:
        target: A pytree of `jax.ShapeDtypeStruct`s or arrays: dicts, lists, named tuples,
            dataclasses, Flax modules (also from `nnx.eval_shape`), states, variables, Linen's
            params and boxes, a `TrainState`. Random keys, batch statistics and plain numbers that
            the checkpoint lacks stay as they are, and so do leaves that are no arrays, and the
            state of an optimizer where the checkpoint has none of it.
        path: As for `mfload.load`.
        mapping: From names in the checkpoint to names in the target; None where they are the
            same. `{regex: replacement}`, the regex for the whole stored name, with `\1` for what
            its groups hold; `{regex: (replacement, (permute, reshape))}`;
            `{regex: mfload.rule(...)}`; `{regex: [...]}` with any of these for a tensor that
            goes to several leaves; `{regex: None}` for what is left out, which any other regex
            goes before. Or a function from a name to a name, or to None.
        mesh: The `jax.sharding.Mesh` on which leaves lie that name no devices; that of
            `jax.set_mesh` where None.
        shardings: As for `mfload.load`, for names of the target; goes before what leaves say.
        unmatched: What becomes of leaves for which neither a rule nor the leaf itself says
            anything: "replicate" or "error".
        logical_axis_rules: [(logical axis, axis of the mesh), …] for variables and boxes that
            name logical axes.
        dtype: "target" (what each leaf holds), "stored", one dtype for all as for `mfload.load`,
            or `{regex: dtype}`, searched for in names of the target, first match first: leaves
            that none matches get what they hold.
        strict: Whether every leaf must be filled and every stored tensor used. Where False, what
            fits is loaded and the other leaves stay as they are; something must fit.
        progress: As for `mfload.load`.
        report: As for `mfload.load`.
        options: As for `mfload.load`; what a rule transforms lies in JAX's memory in any case.

    Returns:
        A tree of the target's type, with arrays in place. Which leaves stayed as they were is
        noted in the report; a `UserWarning` names those that have no value.

    Raises:
        UsageError: The target has no leaf that could hold a tensor, or an argument makes no
            sense.
        MappingError: Checkpoint and target do not fit; everything that is wrong, in one error,
            before data is read.
        ShardingError: A sharding does not fit its leaf.
        MfloadError: Any other of the tree in `mfload.errors`; nothing is left half loaded.
    """
    where = _Where(mesh, shardings, unmatched, logical_axis_rules)
    trees = frameworks.module("jax", "trees")
    placing = frameworks.module("jax", "placing")
    tree: Any = None
    taking_part: tuple[int, ...] = ()
    how, wrong = LoadOptions(), None
    try:
        tree = trees.mould(target)
    except Exception as error:  # noqa: BLE001 - raised where the other processes hear of it
        wrong = error
    try:
        taking_part = placing.processes(mesh, shardings, tree.leaves if tree else None)
        cleared(report)
        how = started(options)
    except Exception as error:  # noqa: BLE001 - as above
        wrong = wrong or error
    done = Report(processes=len(taking_part))
    try:
        with meeting(taking_part, how.deadline, wrong) as party:
            _check_choices(strict, unmatched)
            asked = _Asked(mapping, strict, dtype, how.exchange, where)
            values = _fill(tree.leaves, path, asked, how, party, progress, done)
    except BaseException as error:
        let_go(error)
        raise
    if report is not None:
        for name, value in vars(done).items():
            setattr(report, name, value)
    return tree.rebuild(values)


class _Where(NamedTuple):
    """What was asked for about devices."""

    mesh: Any
    shardings: Any
    unmatched: str
    rules: Any


class _Asked(NamedTuple):
    """What was asked for about names and processes."""

    mapping: Any
    strict: bool
    dtype: Any
    exchange: str
    where: _Where


def _fill(
    leaves: Sequence[Any],
    path: Path,
    asked: _Asked,
    options: LoadOptions,
    party: Party,
    progress: Progress,
    report: Report,
) -> list[Any]:
    """A value for each leaf: the array that it became, or what it was."""
    key_map, strict, dtype, exchange, where = asked
    with _stage(report, "headers"):
        index, sources = _read_index(path, options.deadline)
    with _stage(report, "matching"), gc_paused():
        filled = targets.match(index, leaves, key_map, strict=strict, dtype=dtype)
        notes = list(filled.notes)
        staying.tell(leaves, filled.recipes, notes)
        wanted = _goals(leaves, filled, where, notes)
        filling = Filling(index, sources, wanted, options)
    if len(party.ranks) > 1:
        party.agree("files", fingerprint(seen(index, sources, options.deadline)))
        party.agree("arguments", fingerprint([f"exchange={exchange!r}", *filling.lines()]))
    fetch = _fetch(party, exchange, wanted, options.deadline)
    with shown(progress, filling.stored_bytes) as advance:
        arrays = filling.run(fetch, report, advance)
    values = [leaf.value for leaf in leaves]
    for goal, array in zip(wanted, arrays, strict=True):
        values[goal.number] = array
    report.notes = tuple(dict.fromkeys((*notes, *report.notes)))
    return values


def _check_choices(strict: object, unmatched: object) -> None:
    check_choice("unmatched", unmatched, UNMATCHED)
    if not isinstance(strict, bool):
        raise errors.UsageError("strict", expected="True or False", found=repr(strict))


@contextmanager
def _stage(report: Report, name: str) -> Generator[None]:
    start = time.perf_counter()
    yield
    report.stages[name] = time.perf_counter() - start


def _goals(
    leaves: Sequence[Any], filled: targets.Filled, where: _Where, notes: list[str]
) -> list[Goal]:
    """The leaves that are filled, with a sharding for each."""
    placing = frameworks.module("jax", "placing")
    chosen = [(n, leaves[n], recipe) for n, recipe in filled.recipes.items()]
    stored = [info.name for _, _, recipe in chosen for info in recipe.tensors]
    known = [name for leaf in leaves for name in leaf.names]
    found = placing.shardings([leaf for _, leaf, _ in chosen], *where, notes, known, stored)
    return [
        Goal(n, recipe.aim.name, recipe, sharding)
        for (n, _, recipe), sharding in zip(chosen, found, strict=True)
    ]


def _fetch(party: Party, exchange: str, wanted: Sequence[Goal], deadline: Deadline) -> Fetch:
    """Fetching together with the other processes."""
    links: fetching.Links | None = None
    if len(party.ranks) > 1 and wanted:
        platform = next(iter(wanted[0].sharding.device_set)).platform
        links = frameworks.module("jax", "processes").Links(party.ranks, platform, deadline)

    def fetch(
        requests: Mapping[int, Sequence[Request]], rank: int, loader: Loader, **keywords: Any
    ) -> list[tuple[Any, ...]]:
        every = {each: requests.get(each, []) for each in party.ranks}
        return fetching.fetch(
            every, rank, loader, exchange=exchange, party=party, links=links, **keywords
        )

    return fetch


def _read_index(path: Path, deadline: Deadline) -> tuple[Index, list[LocalFile]]:
    what = os.fspath(path) if isinstance(path, str | os.PathLike) else None
    return deadline.bound(lambda: checkpoint.read(path), "reading headers", what)
