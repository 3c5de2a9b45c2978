"""Lazy tensors: parts of a checkpoint that are read when they are used."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from mfload import errors
from mfload.dlpack import View
from mfload.dtypes import DType
from mfload.frameworks.base import Adapter, Lent
from mfload.frameworks.several import InPlaceAdapter
from mfload.index import Piece, TensorInfo
from mfload.io.route import Leg
from mfload.loading.lazy import LazyCheckpoint, Span, counting
from mfload.planning.request import Request
from mfload.planning.slicing import Axis, Selection, composed, laid, within
from mfload.report import Report
from mfload.runtime import Usage, usage
from mfload.stored import Stored


class LazyTensor:
    """A tensor, or a part of one, that is read anew each time it is used.

    Handed out by `mfload.stream(lazy=True)`.

    Attributes:
        name: The name of the tensor.
        shape: Shape of the array that it becomes.
        dtype: Dtype of that array, as the framework has it.
        adapter: Makes the array.
    """

    __slots__ = (
        "_file", "_form", "_opened", "_packed", "_report", "_request",
        "adapter", "dtype", "name", "shape",
    )  # fmt: skip

    def __init__(
        self,
        opened: LazyCheckpoint[Any],
        file: str,
        request: Request,
        form: tuple[Any, bool],
        adapter: Adapter,
        report: Report | None,
    ) -> None:
        self._opened, self._file, self._request, self._report = opened, file, request, report
        info, row, selection, *_ = request
        self.name, self.adapter, self._form = info.name, adapter, form
        self.dtype, self._packed = form
        shape = info.shape if selection is None else selection.shape
        self.shape = row.storage_shape(shape) if self._packed else shape

    @property
    def simple(self) -> bool:
        """Whether it is read into memory of a device, too, as the host need not put it together."""
        return not self._request.by_host

    def __getitem__(self, index: Any) -> LazyTensor:
        """A part, which is lazy too.

        Args:
            index: Integers, slices, Ellipsis, or a tuple of these.

        Raises:
            SliceError: The index does not fit, or takes a part of the last dim of elements that
                share a byte or arrive as bytes.
        """
        request = self._request
        info, whole = request.info, Axis(0, request.info.shape[-1] if request.info.shape else 1)
        with errors.about(file=self._file):
            selection = within(info, request.selection, index)
            before, after = ((each or (whole,))[-1] for each in (request.selection, selection))
            if self._packed and before != after:
                raise errors.SliceError(
                    f"{info.dtype} does not arrive as one item an element",
                    tensor=info.name,
                    expected="all of the last dim",
                    found=repr(index),
                )
        request = request._replace(selection=selection)
        return self._of(request)

    @property
    def in_order(self) -> bool:
        """Whether it lands in the order in which its tensor has it."""
        selection = self._request.selection
        return selection is None or selection.steps is None

    def run(self, first: int, shape: tuple[int, ...]) -> LazyTensor | None:
        """Items that follow each other, from one on: a tensor of their own, without a selection.

        None if they are not one raw range of a file.
        """
        return self._stored(first, math.prod(shape), shape)

    def view(
        self, shape: tuple[int, ...], strides: tuple[int, ...], first: int
    ) -> LazyTensor | None:
        """The part that a view of it takes, which is read into C order of the view.

        None if that is not one part alone. Arguments as for `slicing.laid`, in items.
        """
        request, whole = self._request, self.shape
        if not self.in_order:
            return None
        inner = laid(whole, shape, strides, first)
        if inner is None:
            reach = 1 + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
            if math.prod(shape) > reach:  # It has elements twice, which are read once.
                return None
            return self._stored(first, reach, shape, Stored(strides=strides))
        if self._packed:
            if len(whole) != len(request.shape) or inner.steps or inner[-1].size < whole[-1]:
                return None
            inner = Selection((*inner[:-1], Axis(0, request.shape[-1])))
        selection = composed(request.info, request.selection, inner)
        return self._of(request._replace(selection=selection))

    def _stored(
        self, first: int, count: int, shape: tuple[int, ...], how: Stored | None = None
    ) -> LazyTensor | None:
        """A view of raw bytes, so many items from one on, as a tensor that is stored as it is."""
        info, dtype, selection, *_ = request = self._request
        whole = selection is None and info.simple and dtype is info.dtype
        # What is compared with a manifest is read as the tensor that this has.
        if not whole or dtype.elements > 1 or self._packed or self._opened.compares:
            return None
        at, size = info.pieces[0], dtype.nbytes
        piece = Piece(at.source, at.offset + first * size, count * size, how)
        return self._of(request._replace(info=TensorInfo(info.name, dtype, shape, (piece,))))

    def _of(self, request: Request) -> LazyTensor:
        given = self._opened, self._file, request, self._form, self.adapter, self._report
        return LazyTensor(*given)

    def _check_open(self) -> None:
        if self._opened.closed:
            raise errors.UsageError(
                "the lazy tensor can't be read: its stream was closed",
                file=self._file,
                tensor=self.name,
                expected="use it before close(), or inside the with block",
            )

    def read(self, lent: Lent | None = None, *, unknown: bool = False) -> Any:
        """Reads it into a new array, or into one of the same dtype and shape that is lent.

        `unknown`: the operation that it is for may need less; the report counts it.

        Raises:
            UsageError: The stream was closed.
            MfloadError: As `mfload.load` does.
        """
        self._check_open()
        adapter, request = self.adapter, self._request
        start, before = 0.0, None
        if self._report is not None:
            start, before = time.perf_counter(), usage(thread=True)
        try:
            filled = None if lent is None else self._opened.fill(request, lent.memory)
        except BaseException as error:
            error.add_note(f"the target of {self.name} may hold some of the new values")
            raise
        if lent is not None and filled is not None:
            if before is not None:
                seconds = time.perf_counter() - start
                self._count(filled, lent.memory.nbytes, seconds, before)
            return lent.array
        if lent is not None:
            adapter = InPlaceAdapter(adapter, {0: lent.memory})
            request = request._replace(devices=(0,))
        one = None if self._report is None else Report()
        try:
            (array,) = self._opened.load([request], one, adapter)
        except BaseException as error:
            if lent is not None:
                error.add_note(f"the target of {self.name} may hold some of the new values")
            raise
        if self._report is not None and one is not None:
            one.whole_reads = int(unknown)
            self._opened.tell(self._report, one)
        return array

    def _count(
        self,
        filled: tuple[Leg, int, Sequence[Span]],
        nbytes: int,
        seconds: float,
        before: Usage,
    ) -> None:
        """Adds what was filled to the report, in a part of the time that `Report.add` takes."""
        (leg, read, used), report = filled, self._report
        used = (*used, (before, usage(thread=True)))
        assert report is not None
        with counting:
            report.framework = self.adapter.name
            report.tensors += 1
            report.result_bytes += nbytes
            report.aliased_bytes += nbytes
            report.read_bytes += read
            report.over_read_bytes += read - nbytes
            report.threads = max(report.threads, len(used))
            report.stages["transfer"] = report.stages.get("transfer", 0.0) + seconds
            for before, after in used:
                report.user_seconds += after[0] - before[0]
                report.system_seconds += after[1] - before[1]
                report.page_faults += after[2] - before[2]
            if (taken := (leg.file, leg.engine, leg.why)) not in report.route:
                report.route += (taken,)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        """The array as one of NumPy's; `copy=False` is refused."""
        if copy is False:
            raise ValueError("a lazy tensor is read, and so copied")
        return np.asarray(self.read(), dtype)

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of a tensor without dims")
        return self.shape[0]

    def __repr__(self) -> str:
        return f"<{self.name}: {self._request.dtype} {list(self.shape)}, not read>"


def form(adapter: Adapter, dtype: DType) -> tuple[Any, bool]:
    """The dtype of arrays that an adapter makes of a dtype, and whether an item is no element."""
    view = View("", dtype, (dtype.elements,), np.zeros(64, np.uint8), 0)
    how = adapter.forms[dtype.name].how
    array = adapter.wrap([view.as_bytes() if how == "bytes" else view])[0]
    return array.dtype, tuple(array.shape) != view.shape
