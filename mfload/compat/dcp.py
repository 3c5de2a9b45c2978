"""torch.distributed.checkpoint: a storage reader for Hugging Face checkpoints."""

from __future__ import annotations

import dataclasses
import itertools
import os
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from mfload import errors
from mfload.formats import checkpoint
from mfload.frameworks import torch_adapter, torch_memory
from mfload.frameworks.several import InPlaceAdapter
from mfload.index import Box, Index
from mfload.loading.session import Loader, Shared
from mfload.mesh import base, load as mesh_load
from mfload.mesh.torch_backend import TorchBackend
from mfload.options import LoadOptions, Options, started
from mfload.planning.memory import Ledger, grouped
from mfload.planning.request import Request
from mfload.planning.slicing import boxed, intersection, shape_of, slabs
from mfload.report import Report, cleared
from mfload.runtime import gc_paused
from mfload.sources import PathOrBytes
from mfload.sources.base import Source
from mfload.trees.filling import gather_rows

_FORMS = torch_adapter.TorchAdapter.forms
_BATCH, _PARTS = 64 << 20, 4  # What waits to be copied is at most a fourth of the overhead.
# What HuggingFaceStorageWriter says of the parts that a file holds, and how one that is not the
# first is known.
_SHARDING, _PARTS_OF = "DCP_SHARDING_INFO", r'"saved_offsets":\s*\[[^\]]*[1-9]'

_Part = tuple[int, str, Box]
"""The number of a read item, the name of a stored tensor, and the box of it that is wanted."""
_Wanted = dict[int, list[_Part]]
"""What each process wants, by rank."""


class HuggingFaceReader(StorageReader):  # pyright: ignore[reportUntypedBaseClass]
    """Takes the place of `torch.distributed.checkpoint.HuggingFaceStorageReader`.

    Each process reads its own slices, straight into the tensors of the state dict where these are
    contiguous, of the stored dtype, and on the CPU; with CuPy on a CUDA device too, unless
    processes read for each other. Others are read in batches within the overhead and copied in,
    which converts as `copy_` does, and refuses what a float8 without infinity can't hold. If
    several processes load together, `Options(exchange=…)` decides whether each byte is read by one
    of them and sent to the others.

    Args:
        path: As for `mfload.load`.
        options: As for `mfload.load`. The timeout is for the headers, and for the data.
        report: Filled with what happened, for each load.

    Raises:
        MfloadError: As `mfload.load` does, from the methods; `torch.distributed.checkpoint.load`
            wraps it in a CheckpointException.
    """

    def __init__(
        self,
        path: PathOrBytes | Sequence[PathOrBytes],
        *,
        options: Options | None = None,
        report: Report | None = None,
    ) -> None:
        self.path, self._options, self._report = path, options, report
        self._index = Index((), {})
        self._sources: Sequence[Source] = ()
        self._stored: dict[MetadataIndex, str] = {}
        self._landing: Shared | None = None  # What the batches of a load onto devices share.

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether it is a path or a URL."""
        return isinstance(checkpoint_id, str | os.PathLike)  # pyright: ignore

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begins a load, of another checkpoint if one is given."""
        if checkpoint_id is not None:
            self.path = checkpoint_id
        self._stored = {}

    def read_metadata(self) -> Any:
        """Reads the headers: names, shapes and dtypes."""
        with gc_paused():
            self._index, self._sources = checkpoint.read(self.path, started(self._options))
            if re.search(_PARTS_OF, (self._index.metadata or {}).get(_SHARDING, "")):
                what = "the files hold parts of tensors, each process's its own"
                expected = "consolidated files, or torch's HuggingFaceStorageReader"
                raise errors.CheckpointError(what, file=str(self.path), expected=expected)
            state: dict[str, Any] = {}
            self._stored = {}
            for name, info in self._index.tensors.items():
                kind = _FORMS[info.dtype.name].type if info.dtype.known else "uint8"
                first, size = torch.Size([0] * len(info.shape)), torch.Size(info.shape)
                given = TensorProperties(getattr(torch, kind)), size
                state[name] = TensorStorageMetadata(*given, [ChunkStorageMetadata(first, size)])
                self._stored[MetadataIndex(name, first)] = name
        return Metadata(state, storage_data=self._stored, storage_meta=StorageMeta())

    def set_up_storage_reader(self, metadata: Any, is_coordinator: bool) -> None:
        """Does nothing: each process has read the headers."""

    def prepare_local_plan(self, plan: Any) -> Any:
        """Notes the rank of this process."""
        return dataclasses.replace(plan, storage_data=TorchBackend.group()[0])

    def prepare_global_plan(self, plans: list[Any]) -> list[Any]:
        """Tells each process which of them read for each other, or why none does."""
        how = started(self._options)
        ranks: Any = tuple(plan.storage_data for plan in plans)
        # Planners that make plans of their own may leave out the ranks.
        if len(plans) == 1 or how.exchange == "never" or any(type(n) is not int for n in ranks):
            return plans
        if how.exchange == "auto":
            every = {plan.storage_data: self._parts(plan) for plan in plans}
            given = self._requests(every), how, TorchBackend(), self._sources
            width, why = mesh_load.exchanged(*given)
            ranks = why if width is None else ranks
        return [dataclasses.replace(plan, storage_data=ranks) for plan in plans]

    def read_data(self, plan: Any, planner: Any) -> Any:
        """Fills the tensors that the planner has for the items of a plan."""
        cleared(self._report)
        how, said = started(self._options), plan.storage_data
        backend: Any = TorchBackend()
        backend.arrival = base.ARRIVAL  # A planner may have failed in one of them.
        done = Report(framework="torch")
        done.notes = (said,) if isinstance(said, str) and said else ()
        ranks = tuple(sorted(said)) if isinstance(said, tuple) else (backend.rank,)
        if how.exchange == "once" and len(ranks) == 1:
            message = "exchange='once' needs several processes that load together, each with it"
            raise errors.UsageError(message, expected="exchange='auto' or 'never'", found="once")
        targets: list[Any] = []
        try:
            with mesh_load.together(backend, ranks, how.deadline) as group:
                mine = self._parts(plan)
                done.tensors = len({name for _, name, _ in mine})
                targets = [planner.resolve_tensor(item).detach() for item in plan.items]
                for part, target in zip(mine, targets, strict=True):
                    self._check(part, target)
                alone = group is None
                held = (self._memory(*each, alone) for each in zip(mine, targets, strict=True))
                copies = any(each is None for each in held)
                every: _Wanted = {backend.rank: mine}
                if group is not None:
                    given = self._index.columns, self._sources, how
                    mesh_load.agree_on_inputs(group, *given, ())
                    rows = gather_rows(group, [copies, mine])
                    copies = any(each for each, _ in rows.values())
                    for rank, (_, parts) in rows.items():
                        every[rank] = [
                            (n, name, tuple((a, b) for a, b in at)) for n, name, at in parts
                        ]
                for step in self._steps(every, how) if copies else [every]:
                    done.add(self._fill(step, mine, targets, how, copies, backend, group))
            for item, target in zip(plan.items, targets, strict=True):
                planner.commit_tensor(item, target)
        except BaseException as error:
            if targets:
                error.add_note("the state dict was being filled: some tensors may hold new values")
            errors.let_go(error)
            raise
        finally:
            for source in self._sources:
                source.keep(False)
            if self._landing is not None:
                self._landing.close()
                self._landing = None
        if self._report is not None:
            done.result_bytes = sum(target.nbytes for target in targets)
            done.processes = len(ranks)
            vars(self._report).update(vars(done))
        future: Any = Future()
        future.set_result(None)
        return future

    def _fill(
        self,
        step: _Wanted,
        mine: Sequence[_Part],
        targets: Sequence[Any],
        how: LoadOptions,
        copies: bool,
        backend: TorchBackend,
        group: Any,
    ) -> Report:
        """Reads into the targets that lend memory, and copies into the others."""
        parts, report = step[backend.rank], Report()
        views = [targets[n][_within(box, mine[n][2])] for n, _, box in parts]
        pairs, alone = zip(parts, views, strict=True), group is None
        held = enumerate(self._memory(*each, alone) for each in pairs)
        memory = {n: each for n, each in held if each is not None}
        apart = {view.device for n, view in enumerate(views) if n not in memory}
        new = torch_adapter.make(apart.pop() if len(apart) == 1 else "cpu")
        if copies:
            ledger = Ledger(how)
            left = ledger.most - ledger.share(_PARTS, _BATCH)
            how = how.replace(max_host_overhead=left)
        # What PyTorch has set aside of a device is free for it alone.
        if new.devices and how.allocator == "auto":
            how = how.replace(allocator="framework")
        loader = Loader(self._index, self._sources, InPlaceAdapter(new, memory), how)
        if loader.adapter.devices:
            loader.shared = self._landing = self._landing or Shared(None)
        given = self._requests(step), loader, backend
        arrays = mesh_load.fetch(*given, group=group, report=report)
        with torch.no_grad():
            for n, (view, array) in enumerate(zip(views, arrays, strict=True)):
                if n in memory:  # Autograd refuses what it kept of the values from before.
                    torch.autograd.graph.increment_version(view)
                else:  # What inference mode made is changed in it alone, and by views made there.
                    with torch.inference_mode(view.is_inference()):
                        info = self._index.tensors[parts[n][1]]
                        with errors.about(file=self._index.files[info.pieces[0].source]):
                            torch_adapter.check_range(info.name, array, view.dtype)
                        view[...].copy_(array)
        return report

    def _steps(self, every: _Wanted, how: LoadOptions) -> list[_Wanted]:
        """Rows of tensors in batches that fit the overhead; the same on all processes."""
        most = Ledger(how).share(_PARTS, _BATCH)  # Bytes that wait to be copied.
        wanted: dict[str, list[tuple[int, int, Box]]] = {}
        for rank, parts in every.items():
            for n, name, box in parts:
                wanted.setdefault(name, []).append((rank, n, box))
        units: list[tuple[int, list[tuple[int, _Part]]]] = []
        infos = map(self._index.tensors.__getitem__, wanted)
        for info in sorted(infos, key=lambda info: info.pieces[0][:2]):
            for slab in slabs(info, info.nbytes, most):
                unit, held = list[tuple[int, _Part]](), Counter[int]()
                for rank, n, box in wanted[info.name]:
                    if (common := intersection(box, slab)) is not None:
                        unit.append((rank, (n, info.name, common)))
                        held[rank] += info.dtype.size_of(shape_of(common)) or 0
                units.append((max(held.values(), default=0), unit))
        made: list[_Wanted] = []
        for batch in grouped(units, most, lambda each: each[0]):
            made.append({rank: [] for rank in every})
            for rank, part in itertools.chain.from_iterable(unit for _, unit in batch):
                made[-1][rank].append(part)
        return made

    def _parts(self, plan: Any) -> list[_Part]:
        """What the items of a plan want."""
        made: list[_Part] = []
        for n, item in enumerate(plan.items):
            dims = zip(item.storage_offsets, item.lengths, strict=True)
            box = tuple((start, start + length) for start, length in dims)
            made.append((n, self._stored[item.storage_index], box))
        return made

    def _requests(self, wanted: _Wanted) -> dict[int, list[Request]]:
        made: dict[int, list[Request]] = {rank: [] for rank in wanted}
        for rank, parts in wanted.items():
            for n, (_, name, box) in enumerate(parts):
                info = self._index.tensors[name]
                made[rank].append(Request(info, info.dtype, boxed(info, box), devices=(n,)))
        return made

    def _check(self, part: _Part, target: Any) -> None:
        """Refuses what can't be copied item by item, or does not fit."""
        _, name, box = part
        info, shape = self._index.tensors[name], list(target.shape)
        form, inside = _FORMS.get(info.dtype.name), zip(box, info.shape, strict=True)
        given: dict[str, Any] = {
            "file": self._index.files[info.pieces[0].source],
            "tensor": info.name,
        }
        if form is None or form.how == "bytes" or info.dtype.elements > 1:
            what = "PyTorch has no items of this dtype to copy"
            raise errors.UnsupportedDtypeError(what, **given, found=info.dtype.name)
        if shape != list(shape_of(box)) or any(b > n or a < 0 for (a, b), n in inside):
            what, expected = "the planner's tensor does not fit", f"{box} of {list(info.shape)}"
            raise errors.UnsupportedShapeError(
                what, **given, expected=expected, found=f"shape {shape}"
            )

    def _memory(self, part: _Part, target: Any, alone: bool) -> Any:
        """The memory of a tensor that a part can be read straight into; None if it can't.

        What processes exchange is put together on the host: only one alone fills devices.
        """
        info = self._index.tensors[part[1]]
        kind = _FORMS[info.dtype.name].type
        if str(target.dtype) != f"torch.{kind}":
            return None
        return torch_memory.memory_of(target, on_device=alone and info.simple)


def _within(box: Box, outer: Box) -> tuple[slice, ...]:
    return tuple(slice(a - c, b - c) for (a, b), (c, _) in zip(box, outer, strict=True))
