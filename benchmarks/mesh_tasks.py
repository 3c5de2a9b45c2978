"""Ways to load a checkpoint onto a mesh of eight CPU devices; each measured in its own process.

A task is called `case/way`, `columns/orbax` for instance; a ceiling by the name of its pattern.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from benchmarks import tasks
from benchmarks.calls import as_options
from benchmarks.compared import WARM
from benchmarks.mesh_layouts import DEVICES, LAYOUTS, Layout
from benchmarks.results import is_ceiling
from benchmarks.tasks import Found, Job, Task
from mfload.bench.loaders import Span

LABELS = {
    WARM.name: f"ceiling: {WARM.label}",
    "ceiling-direct-4x16-fresh": "ceiling: O_DIRECT, 4 threads, 16 MiB, fresh 2 MiB pages",
    "mfload": "mfload",
    "plain": "safetensors.numpy, then jax.device_put",
    "orbax": "Orbax, safetensors layout",
}
"""Every way, in the order of the tables."""
CEILINGS = tuple(name for name in LABELS if name.startswith("ceiling"))

Arrays = dict[str, Any]


def mesh_of(layout: Layout) -> Any:
    """The mesh of a layout, over all devices that there are."""
    import jax
    import numpy as np

    return jax.sharding.Mesh(np.array(jax.devices()).reshape(layout.shape), layout.axes)


def rules_of(layout: Layout) -> list[tuple[str, Any]]:
    """Its rules as `mfload.load` takes them."""
    from jax.sharding import PartitionSpec

    return [(regex, PartitionSpec(*spec)) for regex, spec in layout.rules]


def spans_of(arrays: Arrays) -> tuple[list[Span], list[Span]]:
    """Where the shards on this process's devices lie.

    Returns:
        One span for each part of a tensor, and the other places where the same part lies.
    """
    first: list[Span] = []
    copies: list[Span] = []
    for array in arrays.values():
        places: dict[str, dict[int, int]] = {}
        for shard in array.addressable_shards:
            where = shard.data.unsafe_buffer_pointer()
            places.setdefault(str(shard.index), {})[where] = shard.data.nbytes
        for same in places.values():
            # Devices may share the memory of one part.
            one, *others = same.items()
            first.append(one)
            copies += others
    return first, copies


def _folder(job: Job) -> str:
    return os.path.dirname(job["files"][0])


class _Loading:
    """Loads by one way; what a user has at hand before the call is made before the clock starts.

    Args:
        layout: The sharding.
        load: Called with the job and what `make` gave.
        make: Makes what the call is given beside the path.
    """

    def __init__(
        self,
        layout: Layout,
        load: Callable[[Job, Any], Arrays],
        make: Callable[[Layout, Job], Any],
    ) -> None:
        self._layout, self._load, self._make = layout, load, make
        self._made: Any = None

    def prepare(self, job: Job) -> None:
        """Make what the call is given."""
        self._made = self._make(self._layout, job)

    def run(self, job: Job) -> Arrays:
        """Load."""
        if self._made is None:  # The tiny one, before anything is prepared.
            self.prepare(job)
        import jax

        return jax.block_until_ready(self._load(job, self._made))

    def find(self, arrays: Arrays) -> Found:
        """The shards."""
        spans, copies = spans_of(arrays)
        return Found(arrays, spans, len(arrays), copies=copies)


def _mesh_and_rules(layout: Layout, job: Job) -> Any:
    del job
    return {"mesh": mesh_of(layout), "shardings": rules_of(layout)}


def _shardings(layout: Layout, job: Job) -> dict[str, tuple[tuple[int, ...], Any]]:
    """Shape and sharding of every tensor."""
    from jax.sharding import NamedSharding, PartitionSpec

    from mfload.formats import checkpoint

    mesh = mesh_of(layout)
    index, _ = checkpoint.read(job["files"])
    return {
        name: (row.shape, NamedSharding(mesh, PartitionSpec(*layout.spec(name))))
        for name in index
        for row in [index[name]]
    }


def _targets(layout: Layout, job: Job) -> Any:
    import jax
    import jax.numpy as jnp

    return {
        name: jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=sharding)
        for name, (shape, sharding) in _shardings(layout, job).items()
    }


def _mfload(job: Job, given: Any) -> Arrays:
    import mfload

    return mfload.load(_folder(job), framework="jax", **as_options(given))


def _orbax(job: Job, targets: Any) -> Arrays:
    import orbax.checkpoint.experimental.v1 as ocp

    context = ocp.Context()
    context.checkpoint_layout = ocp.options.CheckpointLayout.SAFETENSORS
    with context:
        return ocp.load(_folder(job), targets)


def _plain(job: Job, shardings: Any) -> Arrays:
    import jax
    import ml_dtypes  # NumPy knows bfloat16 only after this
    from safetensors.numpy import load_file

    del ml_dtypes
    arrays: Arrays = {}
    for path in job["files"]:
        arrays.update(load_file(path))
    return jax.device_put(arrays, {name: shardings[name][1] for name in arrays})


_WAYS = {
    "mfload": (_mfload, _mesh_and_rules),
    "orbax": (_orbax, _targets),
    "plain": (_plain, _shardings),
}


def find(name: str) -> Task:
    """The task of a name."""
    if is_ceiling(name):
        return tasks.find(name)
    # Before JAX is imported, which is when the first task runs.
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={DEVICES}"
    case, _, way = name.partition("/")
    load, make = _WAYS[way]
    made = _Loading(LAYOUTS[case], load, make)
    return Task(made.run, made.find, made.prepare)
