"""`mfload.load_into`: a checkpoint into a tree of the user's own."""

# Arrays of a framework that is not installed have no known type.
# pyright: reportUnknownParameterType=false

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypedDict, TypeVar, Unpack, overload

from mfload import errors, frameworks, sources as places
from mfload.dtypes import DTypeLike
from mfload.formats import checkpoint
from mfload.load_options import UNMATCHED, LoadOptions, Unmatched, started
from mfload.loading import attempts
from mfload.loading.session import let_go
from mfload.options import Options
from mfload.planning.selection import Names, Regex
from mfload.progress import Progress, shown
from mfload.report import Report, cleared
from mfload.runtime import gc_paused
from mfload.sources import PathOrBytes
from mfload.trees import matching, outline
from mfload.trees.matching import Wishes
from mfload.trees.recipe import Leaf, brief, new_row

T = TypeVar("T")

if TYPE_CHECKING:
    from mfload.frameworks.arrays import ShapeDtypeStruct
    from mfload.loading.attempts import Prefer

    Paths = PathOrBytes | Sequence[PathOrBytes]
    Structs: TypeAlias = Mapping[str, "ShapeDtypeStruct | Structs"]
    """A target without arrays, which come back in it."""

    class IntoArguments(TypedDict, total=False):
        """What `load_into` and `restore` have in common, beside path and target."""

        mapping: Any
        mesh: Any
        shardings: Any
        unmatched: Unmatched
        logical_axis_rules: Any
        names: Names
        dtype: DTypeLike
        strict: bool
        atomic: bool
        progress: Progress
        report: Report | None
        fallback: Paths | None
        prefer: Prefer
        options: Options | None


@overload
def load_into(target: Structs, path: Paths, **more: Unpack[IntoArguments]) -> dict[str, Any]: ...
@overload
def load_into(target: T, path: Paths, **more: Unpack[IntoArguments]) -> T: ...
def load_into(
    target: Any,
    path: PathOrBytes | Sequence[PathOrBytes],
    *,
    mapping: Any = None,
    mesh: Any = None,
    shardings: Any = None,
    unmatched: Literal["replicate", "error"] = "replicate",
    logical_axis_rules: Any = None,
    names: Regex | Iterable[str] | Callable[[str], bool] | None = None,
    dtype: DTypeLike | Sequence[tuple[Regex, DTypeLike]] | Mapping[str, DTypeLike] = "target",
    strict: bool = True,
    atomic: bool = False,
    progress: bool | Callable[[int, int], None] = False,
    report: Report | None = None,
    fallback: PathOrBytes | Sequence[PathOrBytes] | None = None,
    prefer: Literal["path", "fallback"] = "path",
    options: Options | None = None,
) -> Any:
    r"""Loads a checkpoint into a module or a tree of JAX: its names, shapes and dtypes.

    A `torch.nn.Module` is filled in place and returned: its parameters and the buffers that it
    saves, by their names in `state_dict()`. What lies on the meta device gets memory; DTensors
    (`fully_shard`, `distribute_module`) are filled with the part of this process, and all processes
    of their meshes must call this together. Modules in it that have load hooks are loaded through
    these, by `load_state_dict`. A `paddle.nn.Layer` is filled likewise, with its distributed
    tensors; parameters that were made under `paddle.LazyGuard` get memory. Of a `keras.Model` or
    another layer of Keras, which must be built, the weights are filled, by `variable.path`
    ("dense/kernel"): where TensorFlow or JAX is under Keras, they are assigned new arrays.

    A tree of JAX is a template: it is left as it is, and a new tree of the same type is returned.
    Its leaves are named by their paths, joined by dots ("layers.0.attn.kernel"); what Flax calls
    the value of a variable or a box is not part of the name.

    Args:
        target: A module as above; or a pytree of `jax.ShapeDtypeStruct`s or arrays: dicts, lists,
            named tuples, dataclasses, Flax modules (also from `nnx.eval_shape`), states, variables,
            Linen's params and boxes, a `TrainState`. A leaf keeps its type: an array or a scalar of
            NumPy's and a plain number come back as such, and a `Format` in a
            `jax.ShapeDtypeStruct` says the layout. What the checkpoint lacks of these stays as it
            is: PRNG keys, batch statistics, plain numbers, leaves that are not arrays, and an
            optimizer's state as a whole (with a warning). Typed PRNG keys are never loaded: put
            `jax.random.key_data(key)` into the target, and wrap what is loaded with
            `jax.random.wrap_key_data`.
        path: As for `mfload.load`.
        mapping: From names in the checkpoint to names in the target. Default: they are the same.
            `{regex: replacement}`, where the regex must match the whole stored name and `\1`
            stands for its group; `{regex: (replacement, (permute, reshape))}`;
            `{regex: mfload.rule(...)}`; `{regex: [...]}` with any of these for a tensor that goes
            to several leaves; `{regex: None}` for tensors that are left out, unless another regex
            matches them. Or a function from a name to a name, or to None.
        mesh: Of JAX alone, as the next three: the `jax.sharding.Mesh` for leaves of JAX that name
            no devices. Default: that of `jax.set_mesh`. Without a mesh they lie where the array of
            the target does, else on the default device, and are not committed to it.
        shardings: As for `mfload.load`, for names of the target. It takes precedence over the
            shardings of the leaves, and makes arrays of JAX of NumPy's.
        unmatched: What becomes of leaves for which neither a rule nor the leaf itself gives a
            sharding: "replicate" or "error".
        logical_axis_rules: [(logical axis, axis of the mesh), …] for variables and boxes that
            name logical axes.
        names: Which tensors are loaded, by their names in the checkpoint, as for `mfload.load`.
            What the others would fill stays as it is. Refused for modules of PyTorch with load
            hooks.
        dtype: "target" (what each leaf holds), "stored", or as for `mfload.load`, for names of
            the target; leaves that no entry matches get what they hold. What a module holds in
            memory keeps its dtype, and another is refused.
        strict: Whether every leaf must be filled and every stored tensor used. If False, what
            fits is loaded and the other leaves stay as they are; something must fit.
        atomic: Whether a module keeps all of its old values if the load fails. The new values are
            loaded beside it, into as many bytes of host memory, and copied once all processes have
            theirs. Refused for PyTorch modules with load hooks. JAX trees are new in any case.
        progress: As for `mfload.load`.
        report: As for `mfload.load`.
        fallback: As for `mfload.load`.
        prefer: As for `mfload.load`.
        options: As for `mfload.load`; what a rule transforms lies in JAX's memory in any case.

    Returns:
        The module itself, or a tree of the target's type with arrays in place. The report notes
        which leaves stayed as they were; a `UserWarning` names those that have no value, such as
        buffers on the meta device that a module does not save.

    Raises:
        UsageError: The target has no leaf that could hold a tensor, though the checkpoint has
            tensors, or an argument is invalid.
        MappingError: Checkpoint and target do not fit; everything that is wrong, in one error,
            before data is read. What load hooks refuse is known once they have run.
        ShardingError: A sharding does not fit its leaf.
        MfloadError: Any other of the tree in `mfload.errors`. No tree is left half loaded. A
            module that is filled in place may be, unless `atomic`: the exception has a note, and
            `mfload_torn` of the module names what may hold old or new values, until it is loaded.
    """
    placed = mesh, shardings, unmatched, logical_axis_rules
    names = list(names) if isinstance(names, Iterator) else names
    asked = Wishes(mapping, *placed, dtype, strict, progress, report, names, atomic)
    call = functools.partial(fill, target, asked)
    if not attempts.needed(fallback, options):
        return call(path, options=options)
    whole = mapping is None and names is None
    return attempts.run(call, path, fallback, prefer, options, report, whole=whole)


def fill(
    target: Any,
    asked: Wishes,
    path: PathOrBytes | Sequence[PathOrBytes],
    *,
    options: Options | None,
    whole: bool = False,
) -> Any:
    """`load_into`; with `whole`, `mfload.restore` with a target.

    Then nothing of the target may stay as it is but what `names` does not ask for; plain numbers
    and PRNG keys are loaded too, and names match in the ways that Flax and Orbax write them.
    """
    if (framework := outline.framework_of(target)) is not None:
        from mfload.trees import modules

        kind = importlib.import_module(f"mfload.trees.{framework}_modules")
        with contextlib.ExitStack() as paused:
            paused.enter_context(gc_paused())
            modules.load_into(target, kind.make(target), asked, path, options, paused.close)
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
        let_go(error)
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
    from mfload.frameworks.jax_adapter import JaxAdapter
    from mfload.mesh import load as mesh_load
    from mfload.trees import assemble, jax_shardings, jax_trees, ties
    from mfload.trees.saved_state import PlainNumbers, SavedState

    errors.check_choice("unmatched", asked.unmatched, UNMATCHED)
    asked.check_bools()
    placed = asked.mesh, asked.shardings, asked.unmatched, asked.logical_axis_rules
    start = time.perf_counter()
    index, sources = checkpoint.read_every(path, how)
    read = time.perf_counter()
    done.add_stage("headers", start, read)
    if whole:
        state = SavedState(index, leaves, asked.names, mapped=asked.mapping is not None)
    else:
        state = PlainNumbers(index, leaves, asked.names)
    index, leaves, notes = state.index, state.leaves, state.notes
    if index.tensors:
        jax_trees.check_places(target, leaves)
    with gc_paused():
        found = matching.match(
            index,
            leaves,
            asked.mapping,
            strict=asked.strict,
            dtype=asked.dtype,
            arrays={name for name, form in JaxAdapter.forms.items() if form.how != "bytes"},
            **state.matching(),
        )
        notes += found.notes
        if found.ties:
            ties.warn(found.ties, index, sources, how)
        _tell_what_stays(leaves, found.recipes, notes)
        numbers = state.numbers(found.recipes)
        chosen = jax_shardings.resolve(leaves, found.recipes, *placed)
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
    return [made.get(n, leaf.value) for n, leaf in enumerate(leaves)]


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
