"""What `mfload.load_into` does: a checkpoint into a tree of the user's own."""

# Arrays of a framework that is not installed have no known type.
# pyright: reportUnknownParameterType=false

from __future__ import annotations

import contextlib
import importlib
import os
import time
from collections.abc import Collection, Sequence
from typing import Any

from mfload import errors, frameworks, sources as places
from mfload.formats import checkpoint
from mfload.loading.session import verifying
from mfload.options import UNMATCHED, LoadOptions, Options, started
from mfload.progress import shown
from mfload.report import Report, cleared
from mfload.runtime import gc_paused
from mfload.sources import PathOrBytes
from mfload.trees import matching, outline
from mfload.trees.matching import Wishes
from mfload.trees.recipe import Leaf, brief, new_row


def fill(
    target: Any,
    asked: Wishes,
    path: PathOrBytes | Sequence[PathOrBytes],
    *,
    options: Options | None,
    whole: bool = False,
) -> Any:
    """`mfload.load_into`; with `whole`, `mfload.restore` with a target.

    Then nothing of the target may stay as it is but what `names` does not ask for; plain numbers
    and PRNG keys are loaded too, and names match in the ways that Flax and Orbax write them.
    """
    if (framework := outline.framework_of(target)) is not None:
        from mfload.trees import filling

        kind = importlib.import_module(f"mfload.trees.{framework}_modules")
        with contextlib.ExitStack() as paused:
            paused.enter_context(gc_paused())
            filling.load_into(target, kind.make(target), asked, path, options, paused.close)
        return target
    try:
        frameworks.require("jax", "mfload.trees.jax_trees")  # Says how to install JAX.
    except errors.FrameworkMissingError:
        _check_order(target)
        raise
    from mfload.mesh import load as mesh_load
    from mfload.mesh.jax_backend import JaxBackend
    from mfload.trees import jax_shardings, jax_trees

    tree: jax_trees.Tree | None = None
    how, wrong = LoadOptions(), None
    backend = JaxBackend()
    try:
        with gc_paused():
            _check_order(target)
            tree = jax_trees.take_apart_target(target, numbered=whole)
    except Exception as error:  # noqa: BLE001 - raised where the other processes hear of it
        wrong = error
    ranks = jax_shardings.processes(asked.mesh, asked.shardings, tree and tree.leaves)
    try:
        cleared(asked.report)
        how = started(options)
    except Exception as error:  # noqa: BLE001 - as above
        wrong = wrong or error
    done, values = Report(processes=len(ranks)), list[Any]()
    try:
        with mesh_load.together(backend, ranks, how.deadline) as group:
            if wrong is not None or tree is None:
                raise wrong or AssertionError("a target without leaves")
            values = _values(target, tree.leaves, asked, path, how, done, backend, group, whole)
    except BaseException as error:
        errors.let_go(error)
        raise
    if asked.report is not None:
        done.notes = tuple(dict.fromkeys(done.notes))
        vars(asked.report).update(vars(done))
    return tree.rebuild(values)


def _values(
    target: Any,
    leaves: Sequence[Leaf],
    asked: Wishes,
    path: Any,
    how: LoadOptions,
    done: Report,
    backend: Any,
    group: Any,
    whole: bool,
) -> list[Any]:
    """The values of all leaves of a target, and what `done` reports of them."""
    from mfload.mesh import load as mesh_load
    from mfload.trees import assemble, jax_shardings, jax_trees, ties
    from mfload.trees.saved_state import PlainNumbers, SavedState

    errors.check_choice("unmatched", asked.unmatched, UNMATCHED)
    asked.check_bools()
    placed = mesh_load.MeshArguments(asked.mesh, asked.shardings, asked.unmatched)
    start = time.perf_counter()
    index, sources = checkpoint.read_every(path, how)
    read = time.perf_counter()
    done.add_stage("headers", start, read)
    if whole:
        state = SavedState(index, leaves, asked.names, mapped=asked.mapping is not None)
    else:
        state = PlainNumbers(index, leaves, asked.names)
    stored, index, leaves, notes = index, state.index, state.leaves, state.notes
    if index.tensors:
        jax_trees.check_places(target, leaves)
    with gc_paused():
        found = _matched(state, asked)
        notes += found.notes
        if found.ties:
            ties.warn(found.ties, index, sources, how)
        _tell_what_stays(leaves, found.recipes, notes)
        numbers = state.numbers(found.recipes)
        chosen = jax_shardings.resolve(leaves, found.recipes, placed, asked.logical_axis_rules)
        # Numbers of the tree are no tensors of a file.
        kept = lambda: [each for each in found.requests() if each.info.name in stored]  # noqa: E731
        how = verifying(asked.verify, how, stored, sources, kept)
        mesh_load.check_whole(how, done.processes)
        pairs = zip(found.recipes.values(), chosen, strict=True)
        goals = [new_row(assemble.Goal, (recipe, *place)) for recipe, place in pairs]
        assembly = assemble.Assembly(index, sources, goals, how, backend)
    done.add_stage("matching", read, time.perf_counter())
    if group is not None:
        arguments = list(assembly.arguments())
        mesh_load.agree_on_inputs(group, index.columns, sources, how, arguments)
    with shown(asked.progress, assembly.stored_bytes if asked.progress else 0) as advance:
        loaded = assembly.run(group, done, advance)
    done.notes = (*notes, *done.notes)
    made = {n: state.finished(n, array) for n, array in zip(found.recipes, loaded, strict=True)}
    made |= state.read(numbers, sources, how)
    if how.check is not None:
        how.check.tell(done)
    return [made.get(n, leaf.value) for n, leaf in enumerate(leaves)]


def _matched(state: Any, asked: Wishes) -> matching.Matched:
    """How the leaves of a `PlainNumbers` or a `SavedState` are made of its index."""
    from mfload.frameworks.jax_adapter import JaxAdapter

    return matching.match(
        state.index,
        state.leaves,
        asked.mapping,
        strict=asked.strict,
        dtype=asked.dtype,
        arrays={name for name, form in JaxAdapter.forms.items() if form.how != "bytes"},
        **state.matching(),
    )


def _check_order(target: Any) -> None:
    if isinstance(target, str | bytes | os.PathLike):
        raise errors.UsageError(
            "the arguments are swapped: load_into(target, path), restore(path, target)",
            expected="a tree",
            found=repr(places.shown(target) or target),
        )


def _tell_what_stays(leaves: Sequence[Leaf], filled: Collection[int], notes: list[str]) -> None:
    """Notes the leaves that nothing fills; warns of those without a value, and of optimizers."""
    stay = [leaf for n, leaf in enumerate(leaves) if n not in filled and leaf.counts]
    bare = [leaf for leaf in stay if leaf.abstract]
    optimizer = [leaf for leaf in stay if leaf.optimizer and not leaf.abstract]
    if stay:
        notes.append(f"the checkpoint has nothing for {_brief(stay)}: they stay as they are")
    if bare:
        errors.warn(
            f"the checkpoint has nothing for {_brief(bare)}, and the target has only shapes for "
            "them (jax.ShapeDtypeStruct): what was loaded can't be called before they are set; "
            "or build the target with values, not by nnx.eval_shape or jax.eval_shape"
        )
    if optimizer:
        errors.warn(
            f"the checkpoint has nothing for {_brief(optimizer)} of the optimizer's state: it "
            "stays as it is in the target, and does not go on from where the checkpoint was saved"
        )


def _brief(leaves: Sequence[Leaf]) -> str:
    names = brief([leaf.name or "the target" for leaf in leaves], 3)
    return f"{len(leaves)} {'leaf' if len(leaves) == 1 else 'leaves'} ({names})"
