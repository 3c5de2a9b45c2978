"""Streams on a mesh: batches of sharded arrays, on one process or on several at once."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection
from typing import Any

from mfload import errors
from mfload.loading.session import Loader
from mfload.loading.stream import Stream, Tensors, stream as streamed
from mfload.mesh import load as mesh_load
from mfload.mesh.base import MeshBackend
from mfload.mesh.load import Chosen, MeshCall, MeshLoad
from mfload.progress import Progress
from mfload.report import Report
from mfload.runtime import Deadline, gc_paused


class Sharded(Tensors):
    """What a stream on a mesh hands out, on this process (see `Tensors`).

    Each batch is a step on which the processes agree. What they read for each other is not read
    ahead: collectives are called in the thread that iterates.
    """

    def __init__(
        self,
        job: MeshLoad,
        chosen: Chosen,
        backend: MeshBackend,
        ranks: tuple[int, ...],
        report: Report | None,
        lying: Collection[str] = (),
    ) -> None:
        self._job, self._backend, self._ranks = job, backend, ranks
        loader = job.loader
        given = loader.index, loader.sources, loader.adapter, chosen.options, chosen.requests
        super().__init__(*given, job.nbytes(), report)
        self.late = not loader.adapter.devices  # Parts on several devices become one array there.
        if len(ranks) > 1:
            requests = {rank: job.requests.get(rank, []) for rank in ranks}
            given = requests, self.options, backend, loader.sources, lying
            width, _ = mesh_load.exchanged(*given)
            self.ahead = width is None
            self.options = self.options.replace(exchange="never" if self.ahead else "once")
        self._left = len(self.batches)  # Batches that the processes have still to agree on.

    def read(self, batch: range, deadline: Deadline) -> list[Any]:
        """Reads this process's parts (see `Tensors`)."""
        return self._load(self._job.part(batch).mine, deadline)

    def arrays(self, batch: range, take: Callable[[], list[Any]]) -> list[Any]:
        """The sharded arrays of a batch (see `Tensors`)."""
        self._left, left = 0, self._left - 1  # An error here reaches the others.
        deadline = Deadline(self.options.timeout)
        with mesh_load.together(self._backend, self._ranks, deadline) as group:
            job = self._job.part(batch)
            if self.ahead:
                fetched = self._wrap(take())
            else:
                loader = job.loader
                options = self.options.replace(deadline=deadline)
                loader = Loader(loader.index, loader.sources, loader.adapter, options)
                with self._reported() as one:
                    given = job.requests, loader, self._backend
                    fetched = mesh_load.fetch(*given, group=group, report=one)
            with gc_paused():
                made = list(job.assemble(fetched).values())
        if self._report is not None:
            self._report.processes = len(self._ranks)
        self._left = left
        return made

    def leave(self, may_wait: bool) -> None:
        """Tells the other processes that this one takes no further batch.

        Without a store that takes collectives. If it may not wait for these, the others find out
        when this process loads something else or ends, or at their deadline.
        """
        left, self._left = self._left, 0
        if not left or len(self._ranks) == 1:
            return
        error = errors.ProcessError("it left a stream before the end")
        if self._backend.store() is not None:
            from mfload.mesh import agree

            agree.fail_next(self._backend, self._ranks, error)
        elif may_wait:
            deadline = Deadline(self.options.timeout)
            together = mesh_load.together(self._backend, self._ranks, deadline)
            with contextlib.suppress(errors.MfloadError), together:
                raise error


def stream(call: MeshCall, progress: Progress) -> Stream[Any]:
    """A stream onto the devices of this process, together with the other processes."""
    ranks = call.backend.processes(call.asked)
    with mesh_load.together(call.backend, ranks, call.deadline) as group:
        chosen, job = mesh_load.prepared(call, group)
        told = None if group is None else (group, chosen.sources, chosen.options)
        lying = () if told is None else mesh_load.told_where(*told)
        tensors = Sharded(job, chosen, call.backend, ranks, call.report, lying)
    return streamed(tensors, progress)
