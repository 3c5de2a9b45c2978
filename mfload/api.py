"""What users call. Wiring only: every decision is made further down the street."""

# Arrays of a framework that is not installed have no known type.
# pyright: reportUnknownParameterType=false

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from operator import attrgetter
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar, overload

from mfload import errors, frameworks
from mfload.formats import checkpoint, discovery
from mfload.index import Columns, Index
from mfload.loading.session import Loader, verifying
from mfload.options import UNMATCHED, LoadOptions, Options, Unmatched, started
from mfload.planning import request as requesting
from mfload.planning.request import Request
from mfload.runtime import Deadline, gc_paused
from mfload.sources.base import Source

# What only some calls need is imported where it is used: or else the first load of a process would
# spend most of its time on imports.
if TYPE_CHECKING:
    from typing import TypeAlias, TypedDict, Unpack

    from mfload.checking.manifest import Manifest
    from mfload.dtypes import DTypeLike
    from mfload.frameworks import Cupy, Framework, Jax, Numpy, Paddle, Tensorflow, Torch
    from mfload.frameworks.arrays import (
        CupyArray,
        JaxArray,
        NumpyArray,
        PaddleTensor,
        ShapeDtypeStruct,
        TensorflowTensor,
        TorchTensor,
    )
    from mfload.loading.attempts import Prefer
    from mfload.loading.lazy import LazyCheckpoint
    from mfload.loading.preview import Preview
    from mfload.loading.stream import Stream
    from mfload.mesh.base import MeshArguments
    from mfload.mesh.load import Chosen, MeshCall
    from mfload.options import Options
    from mfload.planning.selection import Dtypes, Names, Regex
    from mfload.progress import Progress
    from mfload.report import Report
    from mfload.saving.background import PendingSave
    from mfload.saving.save import Saved
    from mfload.sources import PathOrBytes

    Paths = PathOrBytes | Sequence[PathOrBytes]
    Named = Framework | ModuleType
    Device = Hashable | Mapping[str, object]
    """One device, or those of exact names: no list, since a list can't be hashed."""
    Rules = Device | Sequence[tuple[Regex, object]]

    class OpenArguments(TypedDict, total=False):
        """What `open` and all other calls that read take, beside path, framework and device."""

        names: Names
        verify: str | os.PathLike[str] | Manifest | None
        report: Report | None
        fallback: Paths | None
        prefer: Prefer
        options: Options | None

    class Arguments(OpenArguments, total=False):
        """What `load` and `stream` have in common."""

        dtype: Dtypes
        mesh: Any
        shardings: Any
        shard: tuple[int, int] | None
        unmatched: Unmatched
        progress: Progress

    class StreamArguments(Arguments, total=False):
        """Those of `stream`, whose lazy tensors are arrays only in PyTorch."""

        order: Sequence[str] | None
        lazy: bool

    class EagerArguments(Arguments, total=False):
        """The same for tensors that are arrays."""

        order: Sequence[str] | None
        lazy: Literal[False]

    Structs: TypeAlias = Mapping[str, "ShapeDtypeStruct | Structs"]
    """A target without arrays, which come back in it."""

    class IntoArguments(OpenArguments, total=False):
        """What `load_into` and `restore` have in common, beside path and target."""

        mapping: Any
        mesh: Any
        shardings: Any
        unmatched: Unmatched
        logical_axis_rules: Any
        dtype: DTypeLike
        strict: bool
        atomic: bool
        progress: Progress

    class RestoreArguments(IntoArguments, total=False):
        """Those of `restore`."""

        step: float | None
        prefix: str | None
        framework: Named

    class SaveArguments(TypedDict, total=False):
        """Arguments of `save` but arrays, path and background."""

        metadata: Mapping[str, str] | None
        align: int | str
        max_shard_size: int | str | None
        checksums: bool | Literal["xxh3", "sha256", "both"]
        overwrite: bool
        progress: Progress
        timeout: float | None
        options: Options | None


T = TypeVar("T")


@overload
def load(
    path: Paths, framework: Numpy = ..., *, device: Device = ..., **more: Unpack[Arguments]
) -> dict[str, NumpyArray]: ...
@overload
def load(
    path: Paths, framework: Jax, *, device: Device = ..., **more: Unpack[Arguments]
) -> dict[str, JaxArray]: ...
@overload
def load(
    path: Paths, framework: Torch, *, device: Device = ..., **more: Unpack[Arguments]
) -> dict[str, TorchTensor]: ...
@overload
def load(
    path: Paths, framework: Tensorflow, *, device: Device = ..., **more: Unpack[Arguments]
) -> dict[str, TensorflowTensor]: ...
@overload
def load(
    path: Paths, framework: Paddle, *, device: Device = ..., **more: Unpack[Arguments]
) -> dict[str, PaddleTensor]: ...
@overload
def load(
    path: Paths, framework: Cupy, *, device: Device = ..., **more: Unpack[Arguments]
) -> dict[str, CupyArray]: ...
@overload
def load(
    path: Paths, framework: Named = ..., *, device: Rules = ..., **more: Unpack[Arguments]
) -> dict[str, Any]: ...
@overload
def load(
    path: Paths, framework: Named = ..., *, device: list[T], **more: Unpack[Arguments]
) -> dict[str, list[Any]]: ...
def load(
    path: PathOrBytes | Sequence[PathOrBytes],
    framework: Framework | ModuleType = "numpy",
    *,
    device: object = None,
    names: Regex | Iterable[str] | Callable[[str], bool] | None = None,
    dtype: DTypeLike | Sequence[tuple[Regex, DTypeLike]] | Mapping[str, DTypeLike] | None = None,
    mesh: Any = None,
    shardings: Any = None,
    shard: tuple[int, int] | None = None,
    unmatched: Literal["replicate", "error"] = "replicate",
    verify: str | os.PathLike[str] | Manifest | None = None,
    progress: bool | Callable[[int, int], None] = False,
    report: Report | None = None,
    fallback: PathOrBytes | Sequence[PathOrBytes] | None = None,
    prefer: Literal["path", "fallback"] = "path",
    options: Options | None = None,
) -> dict[str, Any]:
    """Loads a checkpoint into arrays of a framework.

    Args:
        path: A `.safetensors` file, a directory, a `.safetensors.index.json`, or a list of
            files. Of a directory with an index, the files that this names are loaded, with all that
            they hold; otherwise all its files.
            A file or an index may be an http:// or https:// URL; these and a directory may be URLs
            of a store (s3://, gs://, az://) or of the hub (hf://). A file may be bytes in memory,
            which are copied.
        framework: "numpy", "jax", "torch", "tensorflow", "paddle" or "cupy", an alias ("np",
            "flax", "pt", "pytorch", "tf"), or the module itself (`torch`, `jax.numpy`). Default:
            "numpy".
        device: A name such as "cpu:1" or "cuda:0", or the framework's own device object. Default:
            the framework's default device, to which JAX's arrays are not committed. A list of
            devices puts every tensor on each of them, as a list of arrays. A list of (regex,
            device) pairs puts a tensor on the device of the first regex found in its name;
            `{name: device}` takes exact names.
        names: Which tensors: a regex that is searched for, a list of exact names, or a
            function from a name to bool. One that chooses none is refused. Default: all.
        dtype: A dtype (of any framework, or its name) for all floating tensors, or rules: a list of
            (regex, dtype) pairs, of which the first regex found in the name counts, or a mapping
            from exact names. A conversion that loses values (float to int, 64 to 32 bit ints) must
            be asked for by a rule, and a value outside an integer dtype's range still stops the
            load. Narrower floats round, and overflow to infinity; a value beyond the range of a
            float8 without infinity stops the load.
        mesh: The framework's own mesh of devices: the arrays are sharded over it, or replicated if
            `shardings` has no rule for them. A `jax.sharding.Mesh` (default: that of
            `jax.set_mesh`, if `shardings` names no devices); a PyTorch `DeviceMesh` or a
            TensorFlow `dtensor.Mesh`, for DTensors; a Paddle `ProcessMesh`. With several processes,
            each that has devices of the mesh makes the same call.
        shardings: How tensors are split: a spec for all of them; `[(regex, spec)]`, of which the
            first regex found in the name counts; a function from a tensor's name and info (it has
            `shape` and `dtype`) to a spec; or a mapping from names to specs, also nested. None is
            replicated. For JAX a spec is a PartitionSpec or a Sharding (an abstract mesh in it is
            replaced by `mesh`); for PyTorch and Paddle a placement or a list of them, one for each
            dim of the mesh; for TensorFlow a Layout, or a list of its specs, one for each dim of
            the tensor; with `shard=` the number of a dim. Dims count elements as they are stored,
            also of tensors that arrive as bytes; elements that share a byte stay together.
        shard: `(rank, size)`: plain arrays of this process's chunks of the dims in `shardings=`,
            as torch.chunk cuts them (a rank beyond the last chunk gets an empty one). Each process
            reads its own chunks by itself, unless `Options(exchange="once")` has the processes of
            the framework's group, of the same rank and size, read for each other.
        unmatched: What becomes of tensors that no rule matches: "replicate", or "error".
        verify: A manifest of checksums (see `mfload.verify`), or its path: the stored bytes are
            compared with it as they arrive, before any conversion. With shardings, on one process
            whose shards make up whole tensors.
        progress: True for a bar, or a function of (bytes done, bytes in all).
        report: Filled with what happened.
        fallback: Another place of the same checkpoint, such as the files of a model that a peer
            has. It is loaded if the first is missing, damaged, or not there in time (half of the
            timeout, or that of `PeerOptions`), and the report notes why.
        prefer: Which of the two is tried first, "path" or "fallback".
        options: Engine, allocator, memory limits, threads, timeout, and headers for URLs; see
            `mfload.Options`.

    Returns:
        The arrays by name, in the order of the files: to a type checker `dict[str, jax.Array]`,
        `dict[str, torch.Tensor]` and so on, of a framework that is given by name. A dtype that the
        framework lacks arrives as uint8 bytes (see `mfload.unpack` and the dtype table).

    Raises:
        MfloadError: One of the tree in `mfload.errors`; nothing is left half loaded.
    """
    if fallback is not None or getattr(options, "peer", None) is not None:
        given = dict(locals())  # Who looks at the frame changes the one that it has.
        from mfload.loading import attempts

        if attempts.needed(fallback, options):
            return attempts.again(load, given, whole=names is None and dtype is None)
    call = _Call(path, framework, device, names, dtype, mesh, shardings, shard, unmatched)
    if call.on_mesh(options):
        from mfload.mesh import load as mesh_load

        return mesh_load.load(call.for_mesh(verify, report, options), progress=progress)
    if report is not None:
        from mfload.report import cleared

        cleared(report)
    index, sources, adapter, how, requests = call.begin(verify, report, options)
    loader = Loader(index, sources, adapter, how)
    shows = nullcontext()
    if progress:
        from mfload.progress import shown

        shows = shown(progress, requesting.stored_bytes(requests))
    with shows as advance:
        arrays = loader.load(requests, report=report, advance=advance)
    if how.check is not None:
        how.check.tell(report)
    return dict(zip(requesting.names(requests), arrays, strict=True))


@overload
def open(
    path: Paths, framework: Numpy = ..., device: Device = ..., **more: Unpack[OpenArguments]
) -> LazyCheckpoint[NumpyArray]: ...
@overload
def open(
    path: Paths, framework: Jax, device: Device = ..., **more: Unpack[OpenArguments]
) -> LazyCheckpoint[JaxArray]: ...
@overload
def open(
    path: Paths, framework: Torch, device: Device = ..., **more: Unpack[OpenArguments]
) -> LazyCheckpoint[TorchTensor]: ...
@overload
def open(
    path: Paths, framework: Tensorflow, device: Device = ..., **more: Unpack[OpenArguments]
) -> LazyCheckpoint[TensorflowTensor]: ...
@overload
def open(
    path: Paths, framework: Paddle, device: Device = ..., **more: Unpack[OpenArguments]
) -> LazyCheckpoint[PaddleTensor]: ...
@overload
def open(
    path: Paths, framework: Cupy, device: Device = ..., **more: Unpack[OpenArguments]
) -> LazyCheckpoint[CupyArray]: ...
@overload
def open(
    path: Paths, framework: Named = ..., device: Rules = ..., **more: Unpack[OpenArguments]
) -> LazyCheckpoint[Any]: ...
@overload
def open(
    path: Paths, framework: Named = ..., *, device: list[T], **more: Unpack[OpenArguments]
) -> LazyCheckpoint[list[Any]]: ...
def open(
    path: PathOrBytes | Sequence[PathOrBytes],
    framework: Framework | ModuleType = "numpy",
    device: object = None,
    *,
    names: Regex | Iterable[str] | Callable[[str], bool] | None = None,
    verify: str | os.PathLike[str] | Manifest | None = None,
    report: Report | None = None,
    fallback: PathOrBytes | Sequence[PathOrBytes] | None = None,
    prefer: Literal["path", "fallback"] = "path",
    options: Options | None = None,
) -> LazyCheckpoint[Any]:
    """Opens a checkpoint to take tensors and slices from; reads headers only.

    If an index file says which shard holds each tensor, a shard's header is read when it is needed,
    and what is wrong with it is found then. `keys()` looks at all shards.

    Takes the place of `safetensors.safe_open`, for whole checkpoints too. The arguments are those
    of `load`, for all that is taken from the checkpoint:

    - `names` are those that it has: others are not found.
    - `verify` compares a tensor each time it is read. One of which a slice is taken is read whole
      before, once.
    - `report` adds up what is read; small reads take longer with it.
    - `fallback` is opened when the first place can't be, or when a read of that fails, and is used
      from then on.
    - The timeout is for the headers, and for each request.

    Returns:
        A context manager; usable from several threads, after a fork, and pickled, without the
        report. It keeps files open from their first use until it is closed.

    Raises:
        MfloadError: As `load` does.
    """
    from mfload.loading import lazy
    from mfload.report import cleared

    if isinstance(names, Iterator):
        names = list(names)
    first, second = (path, fallback) if prefer == "path" else (fallback, path)
    other = None if fallback is None else second
    asked = lazy.Asked(device, options, names, verify, report, other)

    def begin(place: Any, options: Options | None) -> LazyCheckpoint[Any]:
        if report is not None:
            cleared(report)
        wanted = asked if place is first else asked._replace(fallback=None)
        return lazy.opened(place, framework, wanted, started(options))

    if fallback is None:
        return begin(path, options)
    from mfload.loading import attempts

    return attempts.run(begin, path, fallback, prefer, options, report, whole=False)


@overload
def stream(
    path: Paths, framework: Numpy = ..., *, device: Device = ..., **more: Unpack[EagerArguments]
) -> Stream[NumpyArray]: ...
@overload
def stream(
    path: Paths, framework: Jax, *, device: Device = ..., **more: Unpack[EagerArguments]
) -> Stream[JaxArray]: ...
@overload
def stream(
    path: Paths, framework: Torch, *, device: Device = ..., **more: Unpack[StreamArguments]
) -> Stream[TorchTensor]: ...
@overload
def stream(
    path: Paths, framework: Tensorflow, *, device: Device = ..., **more: Unpack[EagerArguments]
) -> Stream[TensorflowTensor]: ...
@overload
def stream(
    path: Paths, framework: Paddle, *, device: Device = ..., **more: Unpack[EagerArguments]
) -> Stream[PaddleTensor]: ...
@overload
def stream(
    path: Paths, framework: Cupy, *, device: Device = ..., **more: Unpack[EagerArguments]
) -> Stream[CupyArray]: ...
@overload
def stream(
    path: Paths, framework: Named = ..., *, device: Rules = ..., **more: Unpack[StreamArguments]
) -> Stream[Any]: ...
@overload
def stream(
    path: Paths, framework: Named = ..., *, device: list[T], **more: Unpack[StreamArguments]
) -> Stream[list[Any]]: ...
def stream(
    path: PathOrBytes | Sequence[PathOrBytes],
    framework: Framework | ModuleType = "numpy",
    *,
    device: object = None,
    names: Regex | Iterable[str] | Callable[[str], bool] | None = None,
    dtype: DTypeLike | Sequence[tuple[Regex, DTypeLike]] | Mapping[str, DTypeLike] | None = None,
    mesh: Any = None,
    shardings: Any = None,
    shard: tuple[int, int] | None = None,
    unmatched: Literal["replicate", "error"] = "replicate",
    order: Sequence[str] | None = None,
    lazy: bool = False,
    verify: str | os.PathLike[str] | Manifest | None = None,
    progress: bool | Callable[[int, int], None] = False,
    report: Report | None = None,
    fallback: PathOrBytes | Sequence[PathOrBytes] | None = None,
    prefer: Literal["path", "fallback"] = "path",
    options: Options | None = None,
) -> Stream[Any]:
    """Iterates over the tensors of a checkpoint, in bounded memory; reads ahead in a thread.

    The arguments are those of `load`; these mean more here:

    - `max_host_overhead` bounds what the stream holds: tensors that are not handed out yet, and
      slots of the readers. Tensors are read in batches of at most 64 MiB or a quarter of it, in a
      buffer that lives as long as any of them; a larger tensor is read alone, beside that bound.
    - `timeout` is for the headers, and for each batch.
    - `verify` compares a batch before any tensor of it is handed out.
    - `fallback` is also read for the rest, in the same order, if the first place fails in the
      middle; not for lazy tensors, which are read where the stream was opened.
    - Several processes agree on each batch, and with `Options(exchange="once")` read it for each
      other when it is asked for. If one leaves before the end, the others raise ProcessError.

    Args:
        order: The names of the tensors, each once, in the order to come in; without `names=` only
            these come. Default: the order of the files.
        lazy: Whether to hand out tensors that are read when they are used, on one device. For
            PyTorch they are of a subclass of `torch.Tensor`: views, such as `narrow`, `chunk` and
            slices, are lazy again, `copy_` reads into the memory of its target, and anything else
            reads all of it, which a `Report` counts (`whole_reads`). Others have `shape`, `dtype`,
            indexing, `read()` and `__array__`. They outlive the iteration, not `close()`.

    Returns:
        An iterator of (name, tensor) with `close()`, and a context manager. Closing it ends what is
        read ahead, and waits for that, 5 seconds at most; dropping it does not wait.

    Raises:
        MfloadError: As `load` does; what comes after the headers, from the iteration.
    """
    order = list(order) if isinstance(order, Iterator) else order
    names = list(names) if isinstance(names, Iterator) else names
    if lazy and (mesh is not None or shardings is not None or shard is not None):
        message, expected = "lazy tensors are not sharded", "slices of them, and no mesh="
        raise errors.UsageError(message, expected=expected)
    wanted = framework, device, order if names is None else names, dtype
    given = _Call(path, *wanted, mesh, shardings, shard, unmatched, order)
    call = partial(_stream, given, verify, progress, report, lazy=lazy)
    if fallback is None:
        return call(path, options=options)
    from mfload.loading import attempts

    if lazy:  # They are read where the stream was opened.
        return attempts.run(call, path, fallback, prefer, options, report, whole=False)
    return attempts.stream(call, path, fallback, prefer, options, report)


def _stream(
    given: _Call,
    verify: str | os.PathLike[str] | Manifest | None,
    progress: Progress,
    report: Report | None,
    path: PathOrBytes | Sequence[PathOrBytes],
    *,
    lazy: bool,
    options: Options | None,
    left: Sequence[str] | None = None,
) -> Stream[Any]:
    """A stream of one place.

    `left`: the names that come, after others of another place, which the report has.
    """
    from mfload.report import cleared

    call = given._replace(path=path)
    if left is not None:
        call = call._replace(names=left, order=left)
    else:
        cleared(report)
    if call.on_mesh(options):
        from mfload.mesh import stream as mesh_stream

        made = call.for_mesh(verify, None, options)
        return mesh_stream.stream(made._replace(report=report), progress)
    from mfload.loading import stream as streaming

    index, sources, adapter, how, requests = call.begin(verify, report, options)
    if not lazy:
        every = index, sources, adapter, how, requests, requesting.sizes(requests), report
        return streaming.stream(streaming.Tensors(*every), progress)
    if progress:
        raise errors.UsageError("lazy tensors show no progress", expected="no progress=")
    from mfload.loading.lazy import Asked, LazyCheckpoint

    sources = streaming.ahead(sources, requests, how)
    opened = LazyCheckpoint(index, sources, adapter, Asked(call.device, options), check=how.check)
    return streaming.lazily(opened, index, sources, adapter, requests, report)


def plan(
    path: PathOrBytes | Sequence[PathOrBytes],
    framework: Framework | ModuleType | None = None,
    *,
    device: object = None,
    names: Regex | Iterable[str] | Callable[[str], bool] | None = None,
    dtype: DTypeLike | Sequence[tuple[Regex, DTypeLike]] | Mapping[str, DTypeLike] | None = None,
    mesh: Any = None,
    shardings: Any = None,
    shard: tuple[int, int] | None = None,
    unmatched: Literal["replicate", "error"] = "replicate",
    fallback: PathOrBytes | Sequence[PathOrBytes] | None = None,
    prefer: Literal["path", "fallback"] = "path",
    options: Options | None = None,
) -> Preview:
    """Says what `load` would do with the same arguments; reads headers only.

    If shards are missing and no names are given, it is the plan for those that exist, and the notes
    name the others.

    The framework need not be installed for a plan onto the host without a mesh or shardings; a
    note says so.

    Returns:
        The plan and this machine's route; prints well, and has `as_dict()`. Of several processes
        each gets its own.

    Raises:
        MfloadError: As `load` does.
    """
    if fallback is not None:
        given = dict(locals())  # Who looks at the frame changes the one that it has.
        from mfload.loading import attempts

        return attempts.again(plan, given)
    how = started(options)
    sharded = mesh is not None or shardings is not None or shard is not None
    if framework is None:
        framework = "numpy"
        if sharded and shard is None:
            from mfload import deprecated

            framework = deprecated.jax("mfload.plan(path, mesh=…)", "mfload.plan(path, {}, mesh=…)")
    call = _Call(path, framework, device, names, dtype, mesh, shardings, shard, unmatched)
    name = call.check()
    choose = partial(call.choose, how, missing_ok=names is None)
    if call.on_mesh(options):
        from mfload.mesh import load as mesh_load

        backend = mesh_load.backend(name, device, shard)
        chosen = mesh_load.Chosen(*choose(), how)
        return mesh_load.preview(chosen, backend, call.placed())
    with gc_paused():
        index, sources, requests = choose()
        requests = call.parts(requests, index, how)
        adapter = frameworks.planned(framework, device, index.names)
        return Loader(index, sources, adapter, how).preview(requests)


def abstract(
    path: PathOrBytes | Sequence[PathOrBytes],
    *,
    mesh: Any = None,
    shardings: Any = None,
    unmatched: Literal["replicate", "error"] = "replicate",
    names: Regex | Iterable[str] | Callable[[str], bool] | None = None,
    dtype: DTypeLike | Sequence[tuple[Regex, DTypeLike]] | Mapping[str, DTypeLike] | None = None,
    fallback: PathOrBytes | Sequence[PathOrBytes] | None = None,
    prefer: Literal["path", "fallback"] = "path",
    options: Options | None = None,
) -> dict[str, ShapeDtypeStruct]:
    """Says what arrays `load` would make for JAX with the same arguments; reads headers only.

    The result can be given to `jax.eval_shape`, `jax.jit(...).lower` and the like.

    Returns:
        A `jax.ShapeDtypeStruct` for each name, in the order of the files; with its sharding
        if a mesh or shardings are given.

    Raises:
        MfloadError: As `load` does.
    """
    if fallback is not None:
        given = dict(locals())  # Who looks at the frame changes the one that it has.
        from mfload.loading import attempts

        return attempts.again(abstract, given)
    from mfload.mesh import load as mesh_load

    jax = frameworks.ON_MESHES[0]
    call = _Call(path, jax, None, names, dtype, mesh, shardings, None, unmatched)
    name, how = call.check(), started(options)
    return mesh_load.abstract(mesh_load.Chosen(*call.choose(how), how), name, call.placed())


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
    verify: str | os.PathLike[str] | Manifest | None = None,
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
        verify: As for `mfload.load`, in one process. A tensor that is read in parts for leaves at
            different times is read whole before. A module keeps what was found to be damaged,
            unless `atomic`.
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
    from mfload.loading import attempts
    from mfload.trees import load_into as filling

    placed = mesh, shardings, unmatched, logical_axis_rules
    names = list(names) if isinstance(names, Iterator) else names
    wanted: Any = mapping, *placed, dtype, strict, progress, report, names, atomic, verify
    asked = filling.Wishes(*wanted)
    call = partial(filling.fill, target, asked)
    if not attempts.needed(fallback, options):
        return call(path, options=options)
    whole = mapping is None and names is None and _as_stored(dtype)
    return attempts.run(call, path, fallback, prefer, options, report, whole=whole)


@overload
def restore(path: Paths, target: None = None, **more: Unpack[RestoreArguments]) -> Any: ...
@overload
def restore(path: Paths, target: Structs, **more: Unpack[RestoreArguments]) -> dict[str, Any]: ...
@overload
def restore(path: Paths, target: T, **more: Unpack[RestoreArguments]) -> T: ...
def restore(
    path: PathOrBytes | Sequence[PathOrBytes],
    target: Any = None,
    *,
    mesh: Any = None,
    shardings: Any = None,
    mapping: Any = None,
    step: float | None = None,
    prefix: str | None = None,
    names: Regex | Iterable[str] | Callable[[str], bool] | None = None,
    dtype: DTypeLike | Sequence[tuple[Regex, DTypeLike]] | Mapping[str, DTypeLike] = "target",
    strict: bool = True,
    atomic: bool = False,
    framework: Framework | ModuleType | None = None,
    unmatched: Literal["replicate", "error"] = "replicate",
    logical_axis_rules: Any = None,
    verify: str | os.PathLike[str] | Manifest | None = None,
    progress: bool | Callable[[int, int], None] = False,
    report: Report | None = None,
    fallback: PathOrBytes | Sequence[PathOrBytes] | None = None,
    prefer: Literal["path", "fallback"] = "path",
    options: Options | None = None,
) -> Any:
    r"""Restores a model or a train state from a checkpoint, on the devices of the target.

    How the arrays are sharded is said by `shardings=`, the target or `mesh=`, in this order, and
    never by the topology on which they were saved: without any of them they come to the default
    device.

    Args:
        path: A checkpoint as `mfload.load` takes it: safetensors, Flax's msgpack, or Orbax: an item
            directory, a step directory, or the root of a manager, of which the newest complete step
            is restored; or a directory with the steps of `flax.training.checkpoints`. Of a step
            with several items all are restored: the target has the items as its keys, or, if only
            one of them holds arrays, is for that item alone.
        target: A pytree of arrays or `jax.ShapeDtypeStruct`s: an `nnx.Module`, an `nnx.State`,
            Linen's params or boxes, a `TrainState` with optax's state, dicts, lists, dataclasses.
            All of it is restored: the optimizer's state, steps, batch statistics, PRNG keys, also
            typed ones from their data, and plain numbers. Names are paths joined by dots, as for
            `mfload.load_into`; fields of named tuples may be stored as numbers, keys that are
            integers as strings, and values of variables with `value` in their names or without. A
            module of PyTorch, Paddle or Keras is filled in place, as by `mfload.load_into`.
            Default: nested dicts come back, as the checkpoint has them.
        mesh: The `jax.sharding.Mesh` for leaves that name no devices. Default: that of
            `jax.set_mesh`. Without a target: as for `mfload.load`.
        shardings: As for `mfload.load`, for names of the target, or without one for those of the
            checkpoint.
        mapping: From names in the checkpoint to names in the target, as for `mfload.load_into`.
        step: The step to restore from a directory with several. Flax's steps may be floats.
        prefix: What the names of the steps begin with, as for Flax's `restore_checkpoint`. Default:
            any, if all have the same; of several, none or `checkpoint_`.
        names: Which tensors are restored, by their names in the checkpoint: a regex that is
            searched for, a list of exact names, or a function from a name to bool. What the others
            would fill stays as it is in the target, or is left out of the dicts.
        dtype: "target" (what each leaf holds), "stored", or as for `mfload.load`, for names of the
            target. Without a target, "target" means as stored.
        strict: Whether every leaf must be filled and all that is stored be used. If False, what
            fits is restored and the other leaves stay as they are, which the report notes.
        atomic: As for `mfload.load_into`, for a module.
        framework: Whose arrays come back if there is no target, as for `mfload.load`. Until the
            next version the default is "jax", with a DeprecationWarning.
        unmatched: What becomes of arrays for which neither a rule nor the target gives a sharding:
            "replicate" or "error".
        logical_axis_rules: [(logical axis, axis of the mesh), …] for variables and boxes of the
            target that name logical axes.
        verify: As for `mfload.load_into`.
        progress: As for `mfload.load`.
        report: As for `mfload.load`; notes what was left as it was.
        fallback: As for `mfload.load`.
        prefer: As for `mfload.load`.
        options: As for `mfload.load`.

    Returns:
        A tree of the target's type; the target itself is left as it is, but for a module that is
        filled in place. Without a target: the tree that was saved, as dicts, lists and plain values
        with arrays in them, and what Orbax calls a scalar as a number of Python's. Several items
        come as a dict by item. Of a checkpoint that holds no tree the names are split at dots.

    Raises:
        MappingError: Checkpoint and target do not fit: wrong shapes, wrong dtypes, missing and
            extra names, all in one error, before data is read.
        SourceNotFoundError: There is no checkpoint, or no such step.
        CheckpointError: The checkpoint is unfinished; several of its items hold arrays, and the
            target has none of them as a key; the steps of several trainings lie side by side; or
            without a target its names are no tree.
        ShardingError: A sharding does not fit its leaf.
        MfloadError: Any other of the tree in `mfload.errors`. No tree is half restored; of a module
            that is filled in place a note of the error says so.
    """
    if fallback is not None or getattr(options, "peer", None) is not None:
        given = dict(locals())  # Who looks at the frame changes the one that it has.
        from mfload.loading import attempts

        if attempts.needed(fallback, options):
            whole = names is None and mapping is None and _as_stored(dtype)
            return attempts.again(restore, given, whole=whole)
    from mfload.formats import steps
    from mfload.trees import load_into as filling, nested

    names = list(names) if isinstance(names, Iterator) else names
    locate = partial(steps.locate, step=step, prefix=prefix)
    if target is not None:
        placed = mesh, shardings, unmatched, logical_axis_rules
        wanted: Any = mapping, *placed, dtype, strict, progress, report, names, atomic, verify
        asked = filling.Wishes(*wanted)
        opening = discovery.Opening(path, locate)
        return filling.fill(target, asked, opening, options=options, whole=True)
    for name, value in {"mapping": mapping, "logical_axis_rules": logical_axis_rules}.items():
        if value is not None:
            raise errors.UsageError(f"{name}= is for a target", expected="target=", found=value)
    if framework is None:
        from mfload import deprecated

        framework = deprecated.jax("mfload.restore(path)", "mfload.restore(path, framework={})")
    tree: list[Any] = []
    opening = discovery.Opening(
        path, locate, lambda index: tree.append(nested.tree_of(index, names))
    )
    more: dict[str, Any] = {"names": names, "mesh": mesh, "shardings": shardings}
    more |= {
        "unmatched": unmatched,
        "dtype": None if _as_stored(dtype) else dtype,
        "verify": verify,
    }
    more |= {"progress": progress, "report": report, "options": options}
    arrays = load(opening, framework, **more)
    how = verifying(verify, started(options), *opening.opened)
    arrays |= nested.scalars(tree[-1], *opening.opened, arrays, how)
    return nested.filled(tree[-1], arrays, plain=names is None)


@overload
def save(
    arrays: Any,
    path: str | os.PathLike[str],
    *,
    background: Literal[False] = ...,
    **more: Unpack[SaveArguments],
) -> Saved: ...
@overload
def save(
    arrays: Any,
    path: str | os.PathLike[str],
    *,
    background: Literal[True],
    **more: Unpack[SaveArguments],
) -> PendingSave: ...
@overload
def save(
    arrays: Any, path: str | os.PathLike[str], *, background: bool, **more: Unpack[SaveArguments]
) -> Saved | PendingSave: ...
def save(
    arrays: Any,
    path: str | os.PathLike[str],
    *,
    metadata: Mapping[str, str] | None = None,
    align: int | str = 4096,
    max_shard_size: int | str | None = None,
    checksums: bool | Literal["xxh3", "sha256", "both"] = False,
    overwrite: bool = False,
    progress: bool | Callable[[int, int], None] = False,
    timeout: float | None = None,
    background: bool = False,
    options: Options | None = None,
) -> Saved | PendingSave:
    """Saves arrays as a safetensors checkpoint, all of it or nothing.

    A file gets its final name when it is whole and on disk: after an error, Ctrl-C, a kill or a
    full disk, what was there before is still there. When the call returns, the new checkpoint
    outlives a loss of power.

    Global arrays of several processes of JAX, sharded or replicated, take the same call in each of
    these processes, on a file system that they share. Every part of such an array is written by one
    process; what each process made for itself must be the same in all, and is written by the first.
    The checkpoint appears whole or not at all, in all processes. To save from a single process,
    give it `jax.device_get(arrays)`: without global arrays, a save is the caller's alone.

    With `background=True` the call returns as soon as the arrays may be changed, donated or freed,
    and a thread writes them. Arrays that can change are copied, those on devices to the host;
    arrays of JAX on CPUs and eager tensors of TensorFlow are held. Errors of arguments are raised
    by the call. Errors of writing are logged and raised by `result()`; if the program does not ask
    for the result, the next save of the process raises them, or Python prints them at exit. A save
    waits for one of the same process that is pending at its target. Loads see the old checkpoint
    until the new one is complete. Python waits for pending saves at exit; a process that is killed
    leaves the old checkpoint.

    Args:
        arrays: Arrays by name, of any of the frameworks, also of several at once. They may be
            strided, share memory (each is written in full), or lie in the very file that is
            replaced. Or a tree: nested dicts, lists and tuples, an nnx.Module, an nnx.State, linen
            params, a TrainState, any pytree of JAX; or a module of PyTorch, Paddle or Keras, whose
            names `mfload.load_into` takes. Names of a tree are the paths, joined by dots
            (`params.layers.0.kernel`), and the tree itself, with its numbers, strings and Nones, is
            kept in the metadata, from which `mfload.restore` rebuilds it. Boxes and variables are
            saved as their arrays, typed PRNG keys as their data, shared variables once, integers of
            2 and 4 bits as 8-bit ones, with a note.
        path: A file; or a directory, which exists or ends with a slash, for a `model.safetensors`
            in it; or the URL of either in an object store (`s3://`, `gs://`, `az://`). Missing
            directories are made. If it is a symbolic link, the file that it leads to is replaced; a
            link into a content-addressed cache, such as that of Hugging Face, is itself replaced by
            a file. A name that ends as another format's, such as `x.pt`, is refused.
        metadata: Strings for the header.
        align: The data of each file begins on a multiple of so many bytes: a power of two, at
            least 8, also as a text such as "4KiB".
        max_shard_size: Bytes of tensors in a file, or "5GB", "500MiB". A larger checkpoint goes to
            files named as in `model-00001-of-00003.safetensors`, with an index beside them. A
            larger tensor has a file of its own.
        checksums: Whether to write a manifest of checksums beside the checkpoint, after the files
            were read back from the disk and compared with what was written (on a mesh they are
            read back, but not compared); or which checksums: "xxh3" of each tensor, "sha256" of
            each file, or "both", the same as True.
        overwrite: Whether an existing checkpoint is replaced: the file, the index, the shards
            that it names (without an index, one complete set of them), and manifests that name any
            of these. Other files are never touched; the notes name those that were removed. The new
            files keep owner, group, permissions, access control list, SELinux label and `user.*`
            attributes of the old one, if the system allows it. What a killed save left at the
            target is removed in any case.
        progress: True for a bar, or a function of (bytes done, bytes in all).
        timeout: Seconds to wait for another writer of the target. Default: raise TargetError at
            once, but wait without a limit for a pending save of this process. On a mesh, seconds
            for the whole save. Default: ten minutes until all processes have made the call, then no
            limit; a process that fails or is gone ends the save in all.
        background: Whether to return as soon as the arrays are kept in memory. A thread writes
            them, and calls a `progress` function.
        options: How an object store is reached (`Options(store=)`).

    Returns:
        A `Saved`: files, bytes, seconds and notes; prints well, and has `as_dict()`. With
        `background=True` a `PendingSave`, which is a `concurrent.futures.Future` of it.

    Raises:
        TargetExistsError: A checkpoint or its manifest exists, and `overwrite` is not set.
        UnsupportedArrayError: An array, or a leaf of the tree, can't be saved; nothing was written.
        ProcessError: Another process failed or is gone, saves something else, or made no call.
        UsageError: An argument is invalid, or two leaves of the tree have the same name.
        TargetError: Another process or thread is writing the target, or it can't be written; also
            if files of a sharded checkpoint are symbolic links, unless into a cache.
        WriteError: The disk is full, or failed, or returned other bytes than were written.
        MfloadError: Any other of the tree in `mfload.errors`.
    """
    from mfload.saving import save as saving
    from mfload.trees import outline

    pending = take_turn = None
    if background or "mfload.saving.background" in sys.modules:
        from mfload.saving.background import Work, take_turn

        if background:
            take_turn = (pending := Work()).claim

    def prepare() -> tuple[Mapping[str, Any], Mapping[str, str] | None, saving.Sealing | None]:
        seal = None
        if take_turn is not None:
            take_turn(path, timeout)
        if checksums:
            from mfload.checking.sealing import Seal

            seal = Seal.of(checksums)
        return *outline.by_name(arrays, metadata), seal

    wishes = saving.SaveWishes(path, align, max_shard_size, overwrite, progress, timeout, options)
    if ranks := outline.processes(arrays):
        from mfload.saving import together

        begin = partial(together.begin, prepare, wishes, ranks)
    else:
        begin = partial(saving.begin, prepare, wishes)
    return begin()() if pending is None else pending.start(begin)


def _as_stored(dtype: Any) -> bool:
    """Whether `dtype=` of `restore` or `load_into` names none but the target's, or the stored."""
    return dtype is None or (isinstance(dtype, str) and dtype in ("target", "stored"))


class _Call(NamedTuple):
    """A call for arrays: what is wanted of a checkpoint, and where it is to lie."""

    path: Any
    framework: Any
    device: Any = None
    names: Any = None
    dtype: Any = None
    mesh: Any = None
    shardings: Any = None
    shard: Any = None
    unmatched: Any = "replicate"
    order: Any = None

    def on_mesh(self, options: Options | None) -> bool:
        """Whether devices of a mesh, or processes that exchange what they read, load together."""
        if self.shard is not None:
            return getattr(options, "exchange", None) == "once"
        return self.mesh is not None or self.shardings is not None

    def placed(self, known: Iterable[str] = ()) -> MeshArguments:
        """What only a backend of meshes looks into."""
        from mfload.mesh.base import MeshArguments

        return MeshArguments(self.mesh, self.shardings, self.unmatched, known)

    def check(self) -> str:
        """Refuses arguments that exclude each other; returns the framework's name."""
        name, mesh, device = frameworks.resolve(self.framework), self.mesh, self.device
        if self.unmatched != "replicate":
            errors.check_choice("unmatched", self.unmatched, UNMATCHED)
        if mesh is None and self.shardings is None and self.shard is None:
            return name
        if self.shard is not None:
            if device is not None and isinstance(device, list | tuple | Mapping):
                message, expected = "shard= is for one device", "one device="
                raise errors.UsageError(message, expected=expected, found=repr(device))
            return name
        if name not in frameworks.ON_MESHES:
            choices = " | ".join(f"framework={each!r}" for each in frameworks.ON_MESHES)
            raise errors.UsageError(
                f"{name} has no meshes",
                expected=f"{choices}, or shardings=[(regex, dim)] with shard=(rank, size)",
                found=self.framework,
            )
        if (owner := _owner(mesh)) in frameworks.ON_MESHES and owner != name:
            expected = f"framework={owner!r}, or a mesh of {name}"
            raise errors.UsageError(
                f"the mesh is one of {owner}", expected=expected, found=self.framework
            )
        if device is not None:
            what = "the devices are those of the mesh or the shardings"
            raise errors.UsageError(what, expected="no device=", found=repr(device))
        return name

    def choose(
        self, how: LoadOptions, *, missing_ok: bool = False
    ) -> tuple[Index, list[Source], Sequence[Request]]:
        """The index, its sources, and what is requested; reads the headers that it takes.

        `missing_ok`: see `checkpoint.choose`.
        """
        names, dtype, order = self.names, self.dtype, self.order
        select: Callable[[Index], Columns] = attrgetter("columns")
        if names is not None:
            from mfload.planning import selection

            if isinstance(names, Iterator):
                names = list(names)  # They may be gone through again.
            select = partial(selection.select, names=names)
        with gc_paused():
            infos, index, sources = checkpoint.choose(self.path, how, select, missing_ok=missing_ok)
            rows = requesting.whole(infos) if dtype is None else _converted(infos, index, dtype)
            return index, sources, rows if order is None else requesting.ordered(rows, order)

    def parts(self, whole: Sequence[Request], index: Index, how: LoadOptions) -> Sequence[Request]:
        """Requests for what `shard=` takes of each whole tensor, if it is given."""
        if self.shard is None:
            return whole
        from mfload.mesh import shard as chunks
        from mfload.mesh.load import check_whole

        with gc_paused():
            made = chunks.cut(whole, self.shard, self.placed(index.names))
            if how.check is not None:
                stored = sum(request.info.nbytes for request in whole)
                check_whole(how, 1, stored - requesting.stored_bytes(made))
            return made

    def read(
        self, how: LoadOptions, verify: Any
    ) -> tuple[Index, list[Source], Sequence[Request], LoadOptions]:
        """What `choose` gives, and the options of what is read, once arguments are checked."""
        discovery.check_path(self.path)
        self.check()
        index, sources, requests = self.choose(how)
        return index, sources, requests, verifying(verify, how, index, sources, lambda: requests)

    def begin(
        self, verify: Any, report: Report | None, options: Options | None
    ) -> tuple[Index, list[Source], Any, LoadOptions, Sequence[Request]]:
        """Checks arguments, reads headers and imports the framework."""
        start = time.perf_counter()
        index, sources, requests, how = self.read(started(options), verify)
        requests = self.parts(requests, index, how)
        read = time.perf_counter()
        adapter = frameworks.get(self.framework, self.device, index.names)
        if report is not None:
            report.add_stage("headers", start, read)
            report.add_stage("import", read, time.perf_counter())
        return index, sources, adapter, how, requests

    def for_mesh(self, verify: Any, report: Report | None, options: Options | None) -> MeshCall:
        """A load on a mesh, of which checks and headers reach all processes."""
        from mfload.mesh import load as mesh_load

        valid = options if isinstance(options, Options) else Options()
        imported = [name for name in frameworks.ON_MESHES if name in sys.modules]
        # What is wrong is told to all processes, if there are more.
        if self.shard is not None:
            name = frameworks.resolve(self.framework)
        else:
            name = _meant(self.framework, self.mesh, imported) if imported else self.check()
        deadline = Deadline(valid.timeout)

        def choose() -> Chosen:
            if report is not None:
                from mfload.report import cleared

                cleared(report)
            return mesh_load.Chosen(*self.read(started(options, deadline), verify))

        backend = mesh_load.backend(name, self.device, self.shard)
        return mesh_load.MeshCall(backend, self.placed(), choose, deadline, report)


def _converted(infos: Columns, index: Index, dtype: Dtypes) -> list[Request]:
    """Requests for tensors in what `dtype=` says of each."""
    from mfload.planning import selection

    wish = selection.read_dtype(dtype)
    if isinstance(wish, selection.Rules):
        wish.warn_of_unmatched([*index.names, *infos.names])
    requests: list[Request] = []
    for info in infos:
        with errors.about(file=index.files[info.pieces[0].source]):
            wanted, checked = selection.target(info, wish)
        requests.append(Request(info, wanted, None, checked))
    return requests


def _meant(framework: Any, mesh: Any, imported: Sequence[str]) -> str:
    """The backend that an invalid argument is told by: the mesh's, else the framework's own."""
    if (owner := _owner(mesh)) in imported:
        return owner
    try:
        name = frameworks.resolve(framework)
    except errors.UsageError:
        return imported[0]
    return name if name in frameworks.ON_MESHES else imported[0]


def _owner(mesh: Any) -> str:
    """The package that a mesh is of."""
    return type(mesh).__module__.partition(".")[0]
