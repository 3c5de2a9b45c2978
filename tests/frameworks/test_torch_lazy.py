"""Lazy tensors of PyTorch: what stays lazy, what is read for it, and copies into parameters."""

from __future__ import annotations

import copy
import errno
import os
import pickle
import resource
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import serving as servers
import torch
from conformance import material
from conformance.suite import no_gpu
from devices.fake import FakeDevice
from devices.queues import MODES
from hypothesis import given, strategies as st
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional

import mfload
from mfload import errors, runtime
from mfload.compat import serving
from mfload.cuda import staging
from mfload.cuda.engine import DeviceWorker
from mfload.frameworks import torch_lazy, torch_memory
from mfload.frameworks.torch_lazy import LazyTensor
from mfload.io import buffers, probes
from mfload.io.pread import FETCHED
from mfload.loading import execute, lazy as opened_lazily
from mfload.planning import extents
from mfload.sources.local import OpenFile

SHAPE = (64, 96)
MODEL = {
    "w": torch.randn(*SHAPE).to(torch.bfloat16),
    "bias": torch.randn(64),
    "scalar": torch.tensor(3.5),
    "empty": torch.empty(0, 4),
    "cube": torch.arange(4 * 6 * 8, dtype=torch.int32).reshape(4, 6, 8),
}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("lazy") / "model.safetensors"
    save_file(MODEL, made)
    return made


class Opened:
    """The lazy tensors of a stream, and its report."""

    def __init__(self, path: Path | str, **given: Any) -> None:
        self.report = mfload.Report()
        self.stream = mfload.stream(path, "torch", lazy=True, report=self.report, **given)
        self.tensors: dict[str, Any] = dict(self.stream)

    def read_by(self, act: Callable[[], Any]) -> tuple[Any, int, int]:
        """What an act returns, the bytes that it read, and its reads of unknown need."""
        nbytes, whole = self.report.read_bytes, self.report.whole_reads
        made = act()
        return made, self.report.read_bytes - nbytes, self.report.whole_reads - whole


@pytest.fixture
def opened(path: Path) -> Iterator[Opened]:
    made = Opened(path)
    yield made
    made.stream.close()


def test_shape_dtype_and_device_at_once(opened: Opened) -> None:
    assert list(opened.tensors) == list(mfload.load(_path(opened), "torch"))
    for name, lazy in opened.tensors.items():
        like = MODEL[name]
        assert isinstance(lazy, torch.Tensor)
        assert isinstance(lazy, LazyTensor)
        for each in ("shape", "dtype", "device", "ndim", "layout", "is_meta", "is_cpu", "is_cuda",
                     "requires_grad", "grad", "is_leaf", "itemsize", "nbytes"):  # fmt: skip
            assert getattr(lazy, each) == getattr(like, each), each
        for each in ("size", "numel", "dim", "stride", "element_size", "is_contiguous",
                     "is_floating_point"):  # fmt: skip
            assert getattr(lazy, each)() == getattr(like, each)(), each
        if like.ndim:
            assert len(lazy) == len(like)
            assert lazy.size(0) == like.size(0)
        assert f"{name}: " in repr(lazy)
        assert "not read" in repr(lazy)
    assert opened.report.read_bytes == 0


def _path(opened: Opened) -> Any:
    return opened.tensors["w"].whole.part._file


# Short rows, of which columns are read with what lies between; long ones, of which they are read
# apart; experts.
SPLIT = {"short": (64, 96), "long": (8, 1 << 18), "experts": (4, 8, 1 << 16)}
WAYS: dict[str, Callable[[Any, int, int, int], Any]] = {
    "narrow": lambda x, dim, n, of: x.narrow(dim, n * (x.shape[dim] // of), x.shape[dim] // of),
    "chunk": lambda x, dim, n, of: x.chunk(of, dim)[n],
    "split": lambda x, dim, n, of: x.split(x.shape[dim] // of, dim=dim)[n],
    "tensor_split": lambda x, dim, n, of: torch.tensor_split(x, of, dim)[n],
    "index": lambda x, dim, n, of: x[_stretch(x, dim, n, of)],
}


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", SPLIT)
def test_a_rank_reads_its_part_and_what_the_plan_names(
    tmp_path: Path, name: str, ranks: int
) -> None:
    """Of dim 0 exactly its share of the bytes; elsewhere, the over-read of the plan beside that."""
    numbers = torch.arange(np.prod(SPLIT[name])).to(torch.int16)
    like = numbers.reshape(SPLIT[name]).view(torch.bfloat16)
    path = tmp_path / "w.safetensors"
    save_file({"first": torch.zeros(3), "w": like}, path)
    opened = Opened(path)
    lazy, mine = opened.tensors["w"], like.numel() * 2 // ranks
    over_reads = set()
    for dim in range(like.ndim):
        for rank in range(ranks):
            how: dict[str, Any] = {"names": ["w"], "shard": (rank, ranks)}
            over = mfload.plan(path, "torch", shardings=[("w", dim)], **how).over_read_bytes
            over_reads.add(over)
            for way in WAYS.values():
                given = dim, rank, ranks
                part, nbytes, unknown = opened.read_by(lambda w=way, g=given: w(lazy, *g))
                assert (nbytes, unknown, type(part)) == (0, 0, LazyTensor)
                target = torch.empty(part.shape, dtype=part.dtype)
                _, nbytes, unknown = opened.read_by(lambda p=part, t=target: t.copy_(p))
                assert _same(target, way(like, *given))
                assert unknown == 0
                assert mine <= nbytes <= mine + over
                assert dim or nbytes == mine
    # So that both kinds were among them.
    assert 0 in over_reads
    assert name != "short" or max(over_reads) > 0


def _stretch(x: Any, dim: int, rank: int, ranks: int) -> Any:
    length = x.shape[dim] // ranks
    return (*[slice(None)] * dim, slice(rank * length, (rank + 1) * length), ...)


def _slices(length: int) -> st.SearchStrategy[slice]:
    ends = st.one_of(st.none(), st.integers(-length, length))
    return st.builds(slice, ends, ends, st.one_of(st.none(), st.integers(1, 3)))


@given(st.data())
def test_parts_of_parts(path: Path, data: st.DataObject) -> None:
    opened = Opened(path)
    lazy, like = opened.tensors["cube"], MODEL["cube"]
    for _ in range(3):
        if not like.ndim or not like.numel():
            break
        dim = data.draw(st.integers(-like.ndim, like.ndim - 1))
        length = like.shape[dim]
        kind = data.draw(st.sampled_from(["narrow", "chunk", "split", "tensor_split", "index"]))
        if kind == "narrow":
            start = data.draw(st.integers(-length, length - 1))
            size = data.draw(st.integers(0, length - start % length))
            lazy, like = (each.narrow(dim, start, size) for each in (lazy, like))
        elif kind == "index":
            items = tuple(
                data.draw(st.one_of(st.integers(-n, n - 1), _slices(n)))
                for n in like.shape[: data.draw(st.integers(1, like.ndim))]
            )
            lazy, like = lazy[items], like[items]
        else:
            count = data.draw(st.integers(1, 5))
            made, pieces = (getattr(each, kind)(count, dim=dim) for each in (lazy, like))
            assert len(made) == len(pieces)
            at = data.draw(st.integers(0, len(pieces) - 1))
            lazy, like = made[at], pieces[at]
        assert type(lazy) is LazyTensor
        assert lazy.shape == like.shape
    assert opened.report.read_bytes == 0
    assert torch.equal(lazy.clone(), like)
    assert opened.report.whole_reads == 0


UNKNOWN: dict[str, Callable[[Any], Any]] = {
    "add": lambda x: x + 1,
    "float": lambda x: x.float(),
    "sum": lambda x: x.sum(),
    "list": lambda x: x[[3, 1]],
    "index tensor": lambda x: x[torch.tensor([1, 2])],
    "cat": lambda x: torch.cat([x[:2], MODEL["w"]]),
    "linear": lambda x: functional.linear(MODEL["w"], x),
    "tolist": lambda x: x[0].tolist(),
    "item": lambda x: x[3, 4].item(),
    "bool": lambda x: bool(x[3, 4] == x[3, 4].clone()),
    "format": lambda x: f"{x[0, 0]}",
    "pickled": lambda x: pickle.loads(pickle.dumps(x)),
    "deepcopied": copy.deepcopy,
    "by keyword": lambda x: torch.narrow(input=x, dim=0, start=1, length=2),
    "past the function protocol": lambda x: torch.tensor(x),
    "dlpack": torch.from_dlpack,
    "stacked": lambda x: torch.stack((x[0], x[1])),
}


@pytest.mark.parametrize("act", UNKNOWN.values(), ids=UNKNOWN)
@pytest.mark.filterwarnings("ignore:To copy construct:UserWarning")
def test_unknown_operations_read_the_whole_and_are_counted(
    opened: Opened, act: Callable[[Any], Any]
) -> None:
    made, nbytes, unknown = opened.read_by(lambda: act(opened.tensors["w"]))
    like = act(MODEL["w"])
    assert nbytes > 0
    assert unknown > 0
    if isinstance(like, torch.Tensor):
        assert type(made) is torch.Tensor
        assert made.device.type == "cpu"
        assert torch.equal(made, like)
    else:
        assert made == like
    assert "read whole" in str(opened.report)


def test_what_needs_all_of_it_is_not_counted(opened: Opened) -> None:
    lazy, like = opened.tensors["w"], MODEL["w"]
    acts: list[Callable[[Any], Any]] = [
        lambda x: x.to(torch.float64),
        lambda x: x.to("cpu"),
        lambda x: x.clone(),
        lambda x: x.cpu(),
        lambda x: torch.zeros(SHAPE).copy_(x),
        lambda x: torch.zeros(2, *SHAPE).copy_(x)[1],
    ]
    for act in acts:
        made, nbytes, unknown = opened.read_by(lambda act=act: act(lazy))
        assert torch.equal(made, act(like))
        assert (nbytes, unknown) == (like.numel() * 2, 0)
    assert np.array_equal(opened.tensors["bias"].numpy(), MODEL["bias"].numpy())
    assert np.array_equal(np.asarray(opened.tensors["cube"]), MODEL["cube"].numpy())
    assert opened.report.whole_reads == 0


def test_what_is_lazy_still(opened: Opened) -> None:
    lazy = opened.tensors["w"]
    for same in (lazy.data, lazy.contiguous()):
        assert same is lazy
    assert type(lazy.detach()) is LazyTensor
    assert opened.report.read_bytes == 0


def test_copies_read_into_parameters(opened: Opened) -> None:
    """Into the memory of the parameter itself, where nothing is in between."""
    layer = nn.Linear(96, 64, dtype=torch.bfloat16)
    lazy, like = opened.tensors["w"], MODEL["w"]
    with _NoArrays(opened):
        layer.weight.data.copy_(lazy)
        assert torch.equal(layer.weight.data, like)
        layer.weight.data.zero_()
        version = layer.weight._version
        with torch.no_grad():
            assert layer.weight.copy_(lazy) is layer.weight
            layer.weight[3:9].copy_(lazy[10:16])
            assert layer.weight._version == version + 2
        assert torch.equal(layer.weight[3:9], like[10:16])
        layer.weight.data.copy_(lazy[:, 0:96])
        # A rank's part of a row-parallel and of a column-parallel weight.
        mine = torch.empty(64, 48, dtype=torch.bfloat16)
        mine.copy_(lazy.narrow(1, 48, 48))
        assert torch.equal(mine, like[:, 48:])
    layer.load_state_dict({"weight": lazy, "bias": opened.tensors["bias"]})
    assert torch.equal(layer.weight.data, like)
    assert torch.equal(layer.bias.data, MODEL["bias"].to(torch.bfloat16))
    assert opened.report.whole_reads == 0


class _NoArrays:
    """Refuses to make arrays of views: what is read lands elsewhere."""

    def __init__(self, opened: Opened) -> None:
        self._adapter = opened.tensors["w"].whole.part.adapter

    def __enter__(self) -> None:
        def refuse(views: Any) -> Any:
            assert not views, "it was not read in place"
            return []

        self._adapter.wrap = refuse

    def __exit__(self, *_: object) -> None:
        del self._adapter.wrap


def test_copies_to_other_layouts_and_dtypes(opened: Opened) -> None:
    lazy, like = opened.tensors["w"], MODEL["w"]
    turned = torch.empty(96, 64, dtype=torch.bfloat16)
    turned.t().copy_(lazy)
    assert torch.equal(turned.t(), like)
    strided = torch.zeros(64, 192, dtype=torch.bfloat16)
    strided[:, ::2].copy_(lazy)
    assert torch.equal(strided[:, ::2], like)
    wide = torch.empty(SHAPE)
    wide.copy_(lazy, non_blocking=True)
    assert torch.equal(wide, like.float())
    rows = torch.zeros(3, 96, dtype=torch.bfloat16)
    rows.copy_(lazy[5])
    assert torch.equal(rows[2], like[5])
    with pytest.raises(RuntimeError, match="leaf Variable"):
        nn.Linear(96, 64, dtype=torch.bfloat16).weight.copy_(lazy)
    with pytest.raises(RuntimeError, match="size"):
        torch.empty(5, 5).copy_(lazy)
    empty = torch.empty(0, 4)
    assert empty.copy_(opened.tensors["empty"]) is empty
    assert torch.zeros(()).copy_(opened.tensors["scalar"]) == 3.5


def test_copies_to_the_meta_device_read_nothing(opened: Opened) -> None:
    target = torch.empty(32, 96, device="meta")
    lazy = opened.tensors["w"].narrow(0, 32, 32)
    made, *read = opened.read_by(lambda: target.copy_(lazy))
    assert made is target
    assert read == [0, 0]
    made, *read = opened.read_by(lambda: target.copy_(other=lazy, non_blocking=True))
    assert made is target
    assert read == [0, 0]
    with pytest.raises(RuntimeError, match="must match"):
        target.copy_(opened.tensors["w"])


def test_a_read_that_fails_names_file_and_tensor(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    save_file({"w": MODEL["w"]}, path)
    opened = Opened(path)
    with path.open("r+b") as file:
        file.truncate(4000)
    for act in (lambda x: x.clone(), lambda x: torch.empty(SHAPE, dtype=x.dtype).copy_(x)):
        with pytest.raises(errors.SourceError) as info:
            act(opened.tensors["w"])
        assert (info.value.file, info.value.tensor) == (str(path), "w")


def _removed(path: Path, _: Any) -> None:
    os.replace(path.with_name("other.safetensors"), path)


def _truncated(path: Path, _: Any) -> None:
    os.truncate(path, path.stat().st_size - 100)


def _touched(path: Path, _: Any) -> None:
    os.utime(path, ns=(1, 1))


def _fails(
    path: Path, patch: pytest.MonkeyPatch, after: Callable[[], object] | None = None
) -> None:
    """The second read fails, or comes after something else."""
    true, reads = os.preadv, []

    def read(*given: Any) -> int:
        reads.append(given)
        if len(reads) > 1 and after is None:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        done = true(given[0], [given[1][0][: 16 << 10]], *given[2:])  # A short one.
        if after is not None:
            after()
        return done

    patch.setattr(os, "preadv", read)


def _changed_meanwhile(path: Path, patch: pytest.MonkeyPatch) -> None:
    _fails(path, patch, lambda: _touched(path, None))


FAULTS: list[tuple[Callable[[Path, Any], None], type[errors.MfloadError]]] = [
    (_removed, errors.SourceChangedError), (_truncated, errors.SourceError),
    (_touched, errors.SourceChangedError), (_fails, errors.ReadError),
    (_changed_meanwhile, errors.SourceChangedError),
]  # fmt: skip


@pytest.mark.parametrize(("fault", "error"), FAULTS)
@pytest.mark.parametrize("name", ["w", "large"])
def test_a_file_that_fails_or_changes_before_its_tensors_are_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Any, error: Any, name: str
) -> None:
    """The error names both, and says that a target that was read into may hold new values."""
    model = {"w": torch.ones(128, 128), "large": torch.ones(1024, 1024)}
    path = tmp_path / "model.safetensors"
    save_file(model, path)
    save_file({"w": torch.zeros(128, 128), "other": torch.ones(9)}, tmp_path / "other.safetensors")
    target = torch.zeros(model[name].shape)
    version, turned = target._version, torch.zeros(model[name].shape).t()
    acts: dict[str, Callable[[Any], Any]] = {
        "in place": lambda x: target.copy_(x),
        "part in place": lambda x: target[3:].copy_(x[3:]),
        "copied": lambda x: turned.copy_(x),
        "to": lambda x: x.to(torch.float64),
        "clone": lambda x: x.clone(),
        "add": lambda x: x + 1,
    }
    lazy = Opened(path, options=mfload.Options(engine="pread")).tensors[name]
    fault(path, monkeypatch)
    for way, act in acts.items():
        if fault in (_fails, _changed_meanwhile):
            monkeypatch.undo()
            save_file(model, path)
            lazy = Opened(path, options=mfload.Options(engine="pread")).tensors[name]
            fault(path, monkeypatch)
        with pytest.raises(error) as info:
            act(lazy)
        assert info.value.file == str(path)
        assert info.value.tensor in (name, None if error is errors.SourceChangedError else name)
        notes = " ".join(getattr(info.value, "__notes__", ()))
        assert ("may hold some of the new values" in notes) == ("in place" in way), way
    assert target._version == version + 2
    assert not turned.any()  # It was not reached.


def test_other_memory_is_its_own(opened: Opened) -> None:
    other = MODEL["w"].clone()
    opened.tensors["w"].detach().data = other
    assert opened.report.read_bytes == other.nbytes
    opened.tensors["bias"].detach().grad = torch.ones(64)
    assert opened.report.read_bytes == other.nbytes + MODEL["bias"].nbytes


def test_what_cannot_be_is_refused_and_reads_nothing(opened: Opened) -> None:
    with pytest.raises(errors.UsageError, match="no memory of its own"):
        opened.tensors["w"].data_ptr()
    with pytest.raises(IndexError):
        opened.tensors["w"][64]
    with pytest.raises(RuntimeError, match="exceeds"):
        opened.tensors["w"].narrow(0, 60, 9)
    assert (opened.tensors["w"].get_device(), opened.tensors["w"].is_pinned()) == (-1, False)
    assert opened.report.read_bytes == 0


@pytest.mark.parametrize("where", [[3, 1], [9, 2, 4], (-2,), [70]])
def test_pieces_of_tensor_split_may_overlap(opened: Opened, where: Any) -> None:
    pieces = opened.tensors["w"].tensor_split(where)
    for found, expected in zip(pieces, MODEL["w"].tensor_split(where), strict=True):
        assert torch.equal(found.clone(), expected)


def test_there_is_no_address(opened: Opened, tmp_path: Path) -> None:
    with pytest.raises(errors.UsageError, match="has no memory of its own"):
        opened.tensors["w"].data_ptr()
    with pytest.raises(errors.UsageError, match="has no memory of its own"):
        save_file({"w": opened.tensors["w"]}, tmp_path / "lazy.safetensors")
    read = opened.tensors["w"].clone()
    assert read.data_ptr() != 0
    assert torch.equal(read, MODEL["w"])


def test_they_outlive_the_iteration_but_not_the_stream(path: Path) -> None:
    with mfload.stream(path, "torch", lazy=True) as stream:
        kept = dict(stream)
        assert torch.equal(kept["bias"].clone(), MODEL["bias"])
    for act in (lambda x: x.clone(), lambda x: x + 1, lambda x: x[:3].clone()):
        with pytest.raises(errors.UsageError, match="its stream was closed") as info:
            act(kept["w"])
        assert info.value.tensor == "w"
    assert kept["w"].shape == SHAPE


def test_conversions(path: Path) -> None:
    opened = Opened(path, dtype="float32", names="w|bias")
    lazy = opened.tensors["w"]
    assert lazy.dtype == torch.float32
    target = torch.empty(64, 48)
    target.copy_(lazy.chunk(2, 1)[1])
    assert torch.equal(target, MODEL["w"].float()[:, 48:])


def test_every_dtype(zoo: Callable[[int], tuple[Path, list[material.Stored]]]) -> None:
    path, _ = zoo(13)
    like = mfload.load(path, "torch")
    opened = Opened(path)
    assert list(opened.tensors) == list(like)
    for name, lazy in opened.tensors.items():
        assert (lazy.dtype, lazy.shape) == (like[name].dtype, like[name].shape)
        assert _same(lazy.clone(), like[name]), name
        target = torch.empty_like(like[name])
        target.copy_(lazy)
        assert _same(target, like[name]), name
        for dim, length in enumerate(like[name].shape):
            part = lazy.narrow(dim, length // 2, length - length // 2)
            assert _same(part.clone(), like[name].narrow(dim, length // 2, length - length // 2))


def test_packed_elements_are_cut_as_the_tensor_counts_them(tmp_path: Path) -> None:
    """Its items may be two elements each: what would cut otherwise is read whole."""
    rows = [material.stored(f"w.{kind}", kind, (4, 32)) for kind in ("F4", "F6_E2M3", "F8_E4M3")]
    path = material.save(tmp_path / "packed.safetensors", rows, 8)
    opened = Opened(path)
    for name, like in mfload.load(path, "torch").items():
        lazy = opened.tensors[name]
        for start, length in ((4, 4), (8, 8), (0, 8)):
            assert _same(lazy.narrow(1, start, length).clone(), like.narrow(1, start, length))
            assert _same(
                lazy[1:3, start : start + length].clone(), like[1:3, start : start + length]
            )
        assert _same(lazy[:, 4].clone(), like[:, 4])
        assert type(lazy.narrow(0, 1, 2)) is LazyTensor
        for mine, theirs in zip(lazy.chunk(2, 1), like.chunk(2, 1), strict=True):
            assert _same(mine.clone(), theirs)


def _same(one: Any, other: Any) -> bool:
    bits = [each.contiguous().reshape(-1).view(torch.uint8) for each in (one, other)]
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(*bits)


def test_streams_of_whole_tensors(path: Path) -> None:
    streamed = dict(mfload.stream(path, "torch", order=list(MODEL)[::-1]))
    assert list(streamed) == list(MODEL)[::-1]
    for name, tensor in streamed.items():
        assert type(tensor) is torch.Tensor
        assert torch.equal(tensor, MODEL[name])


def test_threads_count_what_they_used_themselves(tmp_path: Path) -> None:
    save_file({str(n): torch.ones(1 << 20) for n in range(64)}, tmp_path / "w.safetensors")
    report = mfload.Report()
    lazy = [each for _, each in mfload.stream(tmp_path, "torch", lazy=True, report=report)]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    with ThreadPoolExecutor(16) as threads:
        kept = list(threads.map(lambda each: torch.empty(1 << 20).copy_(each), lazy))
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    assert len(kept) == 64
    assert 0 < report.page_faults <= faults + 1000


def test_with_a_timeout_a_small_copy_waits_for_no_disk(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the page cache lacks is read where the timeout holds."""
    how, real = set[tuple[int, ...]](), os.preadv

    def preadv(fd: int, vector: Any, offset: int, *flags: int) -> int:
        how.add(flags)
        return real(fd, vector, offset, *flags)

    monkeypatch.setattr(os, "preadv", preadv)
    with mfload.stream(path, "torch", lazy=True, options=mfload.Options(timeout=60)) as stream:
        for name, lazy in stream:
            target = torch.zeros(lazy.shape, dtype=lazy.dtype)
            if 0 < target.nbytes <= 1 << 20:
                assert torch.equal(target.copy_(lazy), MODEL[name])
    assert how == {(os.RWF_NOWAIT,)}


@pytest.fixture
def long(tmp_path: Path) -> tuple[Path, torch.Tensor]:
    whole = torch.arange((9 << 20) + 1, dtype=torch.int32).view(torch.uint8)[3:]
    save_file({"w": whole}, tmp_path / "long.safetensors")
    return tmp_path / "long.safetensors", whole


def test_a_long_copy_is_read_by_the_threads_that_are_allowed(
    long: tuple[Path, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, whole = long
    path.read_bytes()  # Into the page cache.
    for threads in (1, 2, 3):
        report, by = mfload.Report(), set[int]()
        real = OpenFile.read

        def read(self: Any, *given: Any, by: set[int] = by, real: Any = real) -> int:
            by.add(threading.get_ident())
            time.sleep(0.01)  # The others begin.
            return real(self, *given)

        monkeypatch.setattr(OpenFile, "read", read)
        options = mfload.Options(threads=threads)
        with mfload.stream(path, "torch", lazy=True, report=report, options=options) as tensors:
            (_, lazy), target = next(iter(tensors)), torch.empty_like(whole)
            by.clear()
            target.copy_(lazy)
        monkeypatch.setattr(OpenFile, "read", real)
        assert torch.equal(target, whole)
        assert len(by) == report.threads == threads


def test_a_long_copy_that_fails_in_another_thread(
    long: tuple[Path, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, whole = long
    path.read_bytes()
    caller, real = threading.get_ident(), OpenFile.read

    def read(self: Any, *given: Any) -> int:
        if threading.get_ident() != caller:
            raise OSError(errno.EIO, "broken")
        time.sleep(0.02)
        return real(self, *given)

    options = mfload.Options(threads=2)
    with mfload.stream(path, "torch", lazy=True, options=options) as tensors:
        _, lazy = next(iter(tensors))
        with monkeypatch.context() as patch:
            patch.setattr(OpenFile, "read", read)
            with pytest.raises(errors.ReadError, match=r"long\.safetensors.*w") as caught:
                torch.empty_like(whole).copy_(lazy)
        assert any("may hold some" in note for note in caught.value.__notes__)
        assert torch.equal(torch.empty_like(whole).copy_(lazy), whole)


MIB = 1 << 20


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch) -> list[range]:
    """The ranges that the kernel is asked to fetch of files, none of which it caches."""
    asked: list[range] = []
    real = opened_lazily.fetch

    def fetch(fd: int, starts: range) -> None:
        if starts:
            asked.append(starts)
        real(fd, starts)

    monkeypatch.setattr(opened_lazily, "fetch", fetch)
    monkeypatch.setattr(probes, "cached_share", lambda fd, size: 0.0)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    return asked


def rows_of(path: Path, count: int = 16) -> dict[str, Any]:
    model = {f"{n:02}": torch.randint(0, 99, (256, 4096), dtype=torch.uint8) for n in range(count)}
    save_file(model, path)
    return model


def test_of_a_cold_file_as_much_is_fetched_ahead_as_was_read(
    tmp_path: Path, fetched: list[range]
) -> None:
    model = rows_of(tmp_path / "model.safetensors")
    begin = (tmp_path / "model.safetensors").stat().st_size - 16 * MIB
    ends: list[int] = []
    for name, tensor in Opened(tmp_path).tensors.items():
        assert torch.equal(torch.empty_like(model[name]).copy_(tensor), model[name])
        ends.append(max((each.stop for each in fetched), default=0))
    size = begin + 16 * MIB
    # The first might be the only one.
    assert ends == [min(begin + (2 * n - 1) * MIB, size) for n in range(1, 17)]
    starts = [start for each in fetched for start in each]
    assert {each.step for each in fetched} == {FETCHED}
    assert starts == sorted(starts)
    assert len(set(starts)) == len(starts) >= 16 * MIB // FETCHED


def test_what_is_left_out_of_a_cold_file_is_not_fetched(
    tmp_path: Path, fetched: list[range]
) -> None:
    rows_of(tmp_path / "model.safetensors")
    opened = Opened(tmp_path)
    begin = (tmp_path / "model.safetensors").stat().st_size - 16 * MIB
    for n in (0, 4, 8, 12):  # As experts of which others are on other machines.
        fetched.clear()
        torch.empty(256, 4096, dtype=torch.uint8).copy_(opened.tensors[f"{n:02}"])
        (asked,) = fetched
        assert (asked.start, asked.stop) == (begin + n * MIB, begin + (n + 1) * MIB)


@pytest.mark.parametrize(("processes", "most"), [("1", 0), ("2", 2.5)])
def test_processes_of_a_machine_fetch_for_each_other(
    tmp_path: Path,
    fetched: list[range],
    monkeypatch: pytest.MonkeyPatch,
    processes: str,
    most: float,
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", processes)
    model = rows_of(tmp_path / "model.safetensors")
    opened = Opened(tmp_path)
    begin = (tmp_path / "model.safetensors").stat().st_size - 16 * MIB
    for n in range(6):  # The upper half of each, and the left one.
        name, half = f"{n:02}", torch.empty(128, 4096, dtype=torch.uint8)
        assert torch.equal(half.copy_(opened.tensors[name][:128]), model[name][:128])
    assert max(each.stop for each in fetched) == begin + (5.5 + most) * MIB
    fetched.clear()
    for first in (0, 2048):  # Columns need the whole of it, which is fetched once.
        part = torch.empty(256, 2048, dtype=torch.uint8)
        part.copy_(opened.tensors["06"][:, first : first + 2048])
        assert torch.equal(part, model["06"][:, first : first + 2048])
    assert len(fetched) == int(processes) - 1
    assert len(opened.report.route) == 1


def test_huge_pages_are_asked_for_within_what_is_filled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = {"w": torch.randint(0, 99, (9 * MIB,), dtype=torch.uint8)}
    save_file(model, tmp_path / "model.safetensors")
    (lazily,) = Opened(tmp_path).tensors.values()
    target = torch.empty(9 * MIB, dtype=torch.uint8)
    asked: list[tuple[int, int]] = []
    real = buffers.madvise

    def madvise(address: int, nbytes: int, advice: int) -> None:
        if advice == 14:
            asked.append((address, address + nbytes))
        real(address, nbytes, advice)

    monkeypatch.setattr(buffers, "madvise", madvise)
    assert torch.equal(target.copy_(lazily), model["w"])
    ((start, stop),) = asked
    assert start % buffers.HUGE == stop % buffers.HUGE == 0
    assert 0 <= start - target.data_ptr() < buffers.HUGE
    assert 0 <= target.data_ptr() + target.nbytes - stop < buffers.HUGE
    # Each may cost maps, of which a process has so many; one that was asked for costs no more.
    monkeypatch.setattr(buffers, "_MOST_ASKED", 0)
    target.copy_(lazily)
    assert len(asked) == 2
    monkeypatch.setattr(buffers._Asked, "ranges", set())
    monkeypatch.setattr(buffers, "_MOST_MAPS", 0)
    target.copy_(lazily)
    assert len(asked) == 2
    monkeypatch.setattr(buffers, "_MOST_MAPS", 1 << 30)
    buffers._Asked.ranges.clear()
    target.copy_(lazily)
    assert len(asked) == 3


def test_huge_pages_reach_beyond_a_part_as_far_as_its_storage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = {"w": torch.randint(0, 99, (MIB,), dtype=torch.uint8)}
    save_file(model, tmp_path / "model.safetensors")
    (lazily,) = Opened(tmp_path).tensors.values()
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(buffers._Asked, "ranges", set())

    def madvise(address: int, nbytes: int, advice: int) -> None:
        if advice == 14:
            asked.append((address, address + nbytes))

    monkeypatch.setattr(buffers, "madvise", madvise)
    whole = torch.empty(9 * MIB, dtype=torch.uint8)
    inner = -whole.data_ptr() % buffers.HUGE + buffers.HUGE // 4  # Amid the first huge page.
    for first in (inner, 0, 8 * MIB):
        part = whole[first : first + MIB]
        assert torch.equal(part.copy_(lazily), model["w"])
        for start, stop in asked:
            assert whole.data_ptr() <= start < stop <= whole.data_ptr() + whole.nbytes
    start, stop = asked[0]
    first = whole.data_ptr() + inner
    assert start <= first
    assert stop >= first + MIB
    # Many small parts of one tensor leave some for others.
    for n in range(64):
        whole[inner + n : inner + n + MIB].copy_(lazily)
    assert len(buffers._Asked.ranges) < 8


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.complex64]
)
def test_items_that_follow_each_other_are_read_alone(tmp_path: Path, dtype: torch.dtype) -> None:
    whole = (torch.arange(240).reshape(4, 6, 10) % 2).to(dtype)
    save_file({"w": whole}, tmp_path / "model.safetensors")
    opened = Opened(tmp_path)
    # From the middle of a row to that of another, over several dims.
    cuts: list[Callable[[Any], Any]] = [
        lambda each: each.view(-1)[57:143],
        lambda each: each[1:3],
        lambda each: each[2, 1:4],
        lambda each: each[3, 5, 2:9],
        lambda each: each[3, 5, 9],
    ]
    for cut in cuts:
        expected, target = cut(whole), torch.zeros_like(cut(whole))
        read, nbytes, _ = opened.read_by(lambda cut=cut: cut(opened.tensors["w"]).clone())
        assert (read.shape, read.stride()) == (expected.shape, expected.stride())
        assert read.tolist() == expected.tolist()
        assert nbytes == expected.nbytes
        lent = opened.read_by(lambda cut=cut, to=target: to.copy_(cut(opened.tensors["w"])))
        assert target.tolist() == expected.tolist()
        assert lent[1] == expected.nbytes


def test_columns_of_tensors_that_are_alike_are_planned_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = {f"{n:03}": torch.randn(16 + n // 2, 64) for n in range(200)}
    save_file(model, tmp_path / "model.safetensors")
    planned: list[Any] = []
    real = extents.of_tensor

    def of_tensor(requests: Any, costs: Any) -> Any:
        planned.append(requests)
        return real(requests, costs)

    monkeypatch.setattr(extents, "of_tensor", of_tensor)
    opened = Opened(tmp_path)
    for name, lazily in opened.tensors.items():
        for columns in (slice(0, 32), slice(32, 64)):
            part = torch.empty(len(model[name]), 32)
            assert torch.equal(part.copy_(lazily[:, columns]), model[name][:, columns])
    assert 200 <= len(planned) <= 205  # And those between two of which all are forgotten.
    checkpoint = opened.tensors["000"].whole.part._opened
    assert 0 < len(checkpoint._cells) <= 65
    opened.stream.close()
    assert not checkpoint._cells


def test_views_say_what_was_changed_in_place(path: Path) -> None:
    opened = Opened(path)
    whole, view = opened.tensors["cube"], opened.tensors["cube"][:, 0:2]
    whole.add_(100)
    assert torch.equal(view.contiguous(), (MODEL["cube"] + 100)[:, 0:2])


def test_what_is_like_a_lazy_tensor_reads_nothing(path: Path) -> None:
    opened = Opened(path)
    lazy, whole = opened.tensors["w"], MODEL["w"]
    for act in (
        torch.empty_like, torch.zeros_like, torch.rand_like, lambda x: torch.full_like(x, 3),
        lambda x: x.new_empty(3), lambda x: x.new_zeros((2, 3)), lambda x: x.new_tensor([1, 2]),
        lambda x: torch.ones_like(x, dtype=torch.float64), lambda x: x[3:, 4:].new_ones(2),
        lambda x: torch.empty_like(x.t()), lambda x: torch.empty_like(x, device="meta"),
        lambda x: torch.zeros_like(x, device=None), lambda x: x.new_empty((2, 3), device=None),
    ):  # fmt: skip
        made, wanted = act(lazy), act(whole)
        assert type(made) is torch.Tensor
        assert (made.shape, made.dtype, made.device) == (wanted.shape, wanted.dtype, wanted.device)
        assert made.stride() == wanted.stride()
    assert torch.equal(torch.zeros_like(lazy), torch.zeros_like(whole))
    assert lazy.untyped_storage().nbytes() == whole.untyped_storage().nbytes()
    assert lazy[2:].untyped_storage().nbytes() == whole.untyped_storage().nbytes()
    lazy.untyped_storage().resize_(0)
    assert lazy.untyped_storage().nbytes() == whole.untyped_storage().nbytes()
    assert opened.report.read_bytes == 0
    with pytest.warns(UserWarning, match="copy construct"):
        assert torch.equal(lazy.new_tensor(lazy), whole)
    with pytest.raises(TypeError):
        lazy.view(lazy)
    lazy.add_(1)
    assert lazy.untyped_storage().data_ptr() != 0
    opened.stream.close()


@pytest.mark.parametrize("index", [1, (1, slice(8, 72)), ..., slice(1, 2)])
def test_items_are_read_into_place(path: Path, index: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    opened, filled, real = Opened(path), list[Any](), torch_lazy._fill
    monkeypatch.setattr(
        torch_lazy, "_fill", lambda *given, **how: filled.append(given) or real(*given, **how)
    )
    target = torch.zeros(3, *SHAPE, dtype=torch.bfloat16)
    if index == (1, slice(8, 72)):
        target = torch.zeros(3, 80, SHAPE[1], dtype=torch.bfloat16)
    elif index is ...:
        target = torch.zeros(SHAPE, dtype=torch.bfloat16)
    wanted, version = target.clone(), target._version
    wanted[index] = MODEL["w"]
    target[index] = opened.tensors["w"]
    assert torch.equal(target, wanted)
    assert target._version > version
    assert len(filled) == (index != slice(1, 2))  # PyTorch adds the dim.
    leaf = nn.Parameter(torch.zeros(3, *SHAPE, dtype=torch.bfloat16))
    with pytest.raises(RuntimeError, match="leaf"):
        leaf[1] = opened.tensors["w"]
    opened.stream.close()


def test_parts_of_small_vectors_that_serving_keeps(tmp_path: Path) -> None:
    scales = torch.arange(8.0)
    save_file({"scales": scales}, tmp_path / "model.safetensors")
    ((_, kept),) = serving.Weights({}).rows(str(tmp_path))
    for _ in range(2):  # The second time they are not read.
        assert float(kept[2]) == 2.0
        assert kept[3].clone() == 3.0
        assert torch.zeros(()).copy_(kept[4]) == 4.0
        assert torch.equal(torch.zeros(3).copy_(kept[5:]), scales[5:])
        assert torch.equal(kept.view(2, 4).clone(), scales.view(2, 4))
        assert torch.equal(torch.zeros(2, 4).copy_(kept.view(2, 4)), scales.view(2, 4))


def test_lists_of_columns_are_not_kept(tmp_path: Path) -> None:
    whole = torch.randn(40, 64)
    save_file({"w": whole}, tmp_path / "model.safetensors")
    with mfload.open(tmp_path, "torch") as opened:
        part = opened.get_slice("w")
        assert torch.equal(part[:, [3, 50, 9]], whole[:, [3, 50, 9]])
        assert not opened._cells
        assert torch.equal(part[:, 3:9], whole[:, 3:9])
        assert opened._cells


@pytest.fixture(params=MODES)
def device(request: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDevice]:
    """A device that the CPU's tensors lie on, and nothing left of loads onto it."""
    made = FakeDevice(mode=request.param)
    monkeypatch.setattr(torch_lazy, "_DEVICES", ("cpu",))
    monkeypatch.setattr(torch_lazy, "_SMALL", 0)
    monkeypatch.setattr(torch_memory, "device_of", lambda _: made)
    monkeypatch.setattr(staging, "SLOT", 64 << 10)
    yield made
    made.assert_clean()


TAKEN: dict[str, Callable[[Any], Any]] = {
    "all": lambda x: x,
    "rows": lambda x: x.narrow(0, 16, 32),
    "columns": lambda x: x.narrow(1, 32, 48),
    "chunk": lambda x: x.chunk(4, 0)[3],
    "few columns": lambda x: x[:, 5:8],
    "steps": lambda x: x[::2, ::3],
    "transposed": lambda x: x.t(),
    "flat": lambda x: x.view(-1)[100:3000],
    "within one": lambda x: x.unsqueeze(0)[:, 3:60],
    "a row": lambda x: x[7],
    "merged": lambda x: x.view(8, -1, x.shape[1])[:, :, :32].flatten(0, 1),
    "parted": lambda x: x.view(x.shape[0], -1, 8)[:, :4],
}
WHOLE = ("transposed",)


@pytest.mark.parametrize("way", TAKEN)
def test_copies_onto_a_device(path: Path, device: FakeDevice, way: str) -> None:
    take, whole = TAKEN[way], MODEL["w"]
    wanted = take(whole)
    target = nn.Parameter(torch.zeros(wanted.shape, dtype=whole.dtype), requires_grad=False)
    opened = Opened(path)
    place, version = target.data_ptr(), target._version
    for _ in range(3):
        target.zero_()
        target.copy_(take(opened.tensors["w"]))
        assert torch.equal(target, wanted)
    assert (target.data_ptr(), target._version > version) == (place, True)
    assert opened.report.result_bytes == 3 * wanted.nbytes
    assert opened.report.tensors == 3
    # PyTorch arranges what is read of a transposed one.
    assert device.calls["pin"] == (way not in WHOLE)
    assert device.nbytes["copy_in"] == (0 if way in WHOLE else 3 * wanted.nbytes)
    opened.stream.close()
    with pytest.raises(errors.UsageError, match="stream was closed"):
        target.copy_(take(opened.tensors["w"]))


def test_a_copy_onto_a_device_is_shared_out(
    tmp_path: Path, device: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tensor is in one slot's bytes, but read by all readers."""
    monkeypatch.setattr(staging, "SLOT", 16 << 20)
    monkeypatch.setattr(execute, "share_of_cores", lambda: 12)
    whole = torch.randn(16 << 20, dtype=torch.float32).to(torch.bfloat16).view(4096, -1)
    save_file({"w": whole}, tmp_path / "w.safetensors")
    taken: set[int] = set()
    real = DeviceWorker.fill

    def fill(self: Any, block: Any) -> None:
        taken.add(block.offset)
        real(self, block)

    monkeypatch.setattr(DeviceWorker, "fill", fill)
    opened = Opened(tmp_path / "w.safetensors")
    target = torch.zeros_like(whole)
    for part in (slice(None), slice(0, 2048)):
        taken.clear()
        target[part].copy_(opened.tensors["w"][part])
        assert torch.equal(target[part], whole[part])
        assert 8 <= len(taken) <= 16
    opened.stream.close()


@pytest.mark.parametrize("name", ["scalar", "empty", "cube", "bias"])
def test_others_onto_a_device(path: Path, device: FakeDevice, name: str) -> None:
    opened = Opened(path)
    target = torch.zeros_like(MODEL[name])
    target.copy_(opened.tensors[name])
    assert torch.equal(target, MODEL[name])
    other = torch.zeros(MODEL[name].shape, dtype=torch.float64)
    other.copy_(opened.tensors[name])
    assert torch.equal(other, MODEL[name].double())
    opened.stream.close()


@pytest.mark.parametrize(("world", "gpus", "local"), [(4, 0, 4), (8, 4, 4), (2, 8, 2), (4, 1, 1)])
def test_ranks_of_a_server_count_as_processes_of_this_machine(
    path: Path, monkeypatch: pytest.MonkeyPatch, world: int, gpus: int, local: int
) -> None:
    """With one GPU in sight, each of them may be of a machine of its own."""
    monkeypatch.setattr(runtime, "_beside", 1)
    monkeypatch.setattr(runtime, "_among", 0)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: world)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    _, tensor = next(serving.Weights({}).rows(str(path)))
    assert runtime.local_processes() == local
    assert tensor.whole.part._opened._shared == (local > 1)


def test_small_vectors_that_serving_keeps_on_a_device(tmp_path: Path, device: FakeDevice) -> None:
    test_parts_of_small_vectors_that_serving_keeps(tmp_path)


def test_what_a_store_serves_lands_on_a_device(tmp_path: Path, device: FakeDevice) -> None:
    whole = torch.arange(3 << 18, dtype=torch.float32).view(768, -1)
    save_file({"w": whole}, tmp_path / "m.safetensors")
    with servers.serving({"/m.safetensors": (tmp_path / "m.safetensors").read_bytes()}) as server:
        opened = Opened(server.url("/m.safetensors"))
        assert torch.equal(torch.zeros_like(whole).copy_(opened.tensors["w"]), whole)
        opened.stream.close()
    assert device.nbytes["copy_in"] == whole.nbytes


def test_a_copy_onto_a_device_that_fails(
    path: Path, device: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = Opened(path)
    target = torch.zeros(SHAPE, dtype=torch.bfloat16)
    with monkeypatch.context() as patch:
        patch.setattr(OpenFile, "read", _refused)
        with pytest.raises(errors.ReadError) as caught:
            target.copy_(opened.tensors["w"])
    assert caught.value.tensor == "w"
    assert "the target of w may hold some of the new values" in caught.value.__notes__
    device.fail_later["copy_in"] = device.ran["copy_in"] + 1
    with pytest.raises(errors.DeviceError) as failed:
        target.copy_(opened.tensors["w"])
    assert failed.value.tensor == "w"
    target.copy_(opened.tensors["w"])
    assert torch.equal(target, MODEL["w"])
    opened.stream.close()


def test_threads_that_copy_onto_a_device_share_slots(path: Path, device: FakeDevice) -> None:
    opened = Opened(path)

    def copy(n: int) -> bool:
        target = torch.zeros(32, 96, dtype=torch.bfloat16)
        for _ in range(20):
            target.copy_(opened.tensors["w"][n : n + 32])
        return torch.equal(target, MODEL["w"][n : n + 32])

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(copy, range(32)))
    assert device.pinned <= 4 * staging.DEPTH
    opened.stream.close()


def test_memory_that_can_not_be_locked(path: Path, device: FakeDevice) -> None:
    device.fail["pin"] = 1
    opened = Opened(path)
    target = torch.zeros(SHAPE, dtype=torch.bfloat16).copy_(opened.tensors["w"])
    assert torch.equal(target, MODEL["w"])
    assert "from pageable memory" in str(opened.report)
    opened.stream.close()


@pytest.mark.parametrize(
    "given", [{"max_host_overhead": "32MiB"}, {"timeout": 60}, {"engine": "direct"}]
)
def test_options_hold_for_copies_onto_a_device(
    path: Path, device: FakeDevice, given: dict[str, Any]
) -> None:
    opened = Opened(path, options=mfload.Options(**given))
    target = torch.zeros(SHAPE, dtype=torch.bfloat16).copy_(opened.tensors["w"])
    assert torch.equal(target, MODEL["w"])
    assert device.nbytes["copy_in"] == target.nbytes
    opened.stream.close()


@pytest.mark.parametrize("kind", ["deflated", "Fortran"])
def test_what_is_unpacked_whole_comes_by_the_host(
    tmp_path: Path, device: FakeDevice, kind: str
) -> None:
    whole = np.random.default_rng(0).integers(0, 9, (512, 1024)).astype(np.float32)
    given = np.asfortranarray(whole) if kind == "Fortran" else whole
    (np.savez if kind == "Fortran" else np.savez_compressed)(tmp_path / "x.npz", w=given)
    opened = Opened(tmp_path / "x.npz")
    target = torch.zeros(whole.shape).copy_(opened.tensors["w"])
    assert torch.equal(target, torch.from_numpy(whole))
    assert opened.report.read_bytes <= (tmp_path / "x.npz").stat().st_size
    opened.stream.close()


@pytest.mark.parametrize("move", [
    lambda x: x.to("cpu"), lambda x: x.to(torch.device("cpu"), non_blocking=True),
    lambda x: x.to(device="cpu", dtype=torch.bfloat16, copy=True),
    lambda x: x[3:40].to("cpu"), lambda x: x[:, 5:9].to("cpu"),
])  # fmt: skip
def test_moves_onto_a_device(path: Path, device: FakeDevice, move: Any) -> None:
    opened = Opened(path)
    found = move(opened.tensors["w"])
    assert type(found) is torch.Tensor
    assert torch.equal(found, move(MODEL["w"]))
    assert device.nbytes["copy_in"] == found.nbytes
    assert opened.report.result_bytes == found.nbytes
    opened.stream.close()


@pytest.mark.parametrize("move", [
    lambda x: x.to(torch.float32), lambda x: x.to("cpu", torch.float32), lambda x: x.to("meta"),
    lambda x: x.to(device="cpu", dtype=torch.float64), lambda x: x.to(torch.zeros(2)),
    lambda x: x.to("cpu", memory_format=torch.contiguous_format),
    lambda x: x.to(True), lambda x: x.to(False, copy=True),
])  # fmt: skip
def test_other_moves(path: Path, device: FakeDevice, move: Any) -> None:
    opened = Opened(path)
    found, wanted = move(opened.tensors["w"]), move(MODEL["w"])
    assert (found.dtype, found.device, found.shape) == (wanted.dtype, wanted.device, wanted.shape)
    assert found.is_meta or torch.equal(found, wanted)
    opened.stream.close()


@pytest.mark.parametrize("dtype", ["F4", "F6_E2M3"])
def test_elements_that_share_bytes_onto_a_device(
    tmp_path: Path, device: FakeDevice, dtype: str
) -> None:
    rows = [material.stored("w", dtype, (200, 80))]
    material.save(tmp_path / "w.safetensors", rows)
    with mfload.stream(tmp_path / "w.safetensors", "torch", lazy=True) as tensors:
        lazy = dict(tensors)["w"]
        target = torch.zeros(lazy.shape, dtype=torch.uint8).view(lazy.dtype)
        target.copy_(lazy)
    assert target.view(torch.uint8).numpy().tobytes() == rows[0].raw


def test_memory_that_a_reader_left_behind_may_write_to_is_not_used_again(
    path: Path, device: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A read that hangs outlives its error."""
    opened = Opened(path)
    targets = [torch.zeros(SHAPE, dtype=torch.bfloat16) for _ in range(2)]
    real, written = OpenFile.read, list[Any]()

    def late(self: Any, vector: list[Any], offset: int, least: int | None = None) -> int:
        written.extend(vector)
        raise OSError(errno.EIO, "Input/output error")

    for _ in range(3):
        with monkeypatch.context() as patch:
            patch.setattr(OpenFile, "read", late)
            with pytest.raises(errors.ReadError):
                targets[0].copy_(opened.tensors["w"])
        read = OpenFile.read

        def meanwhile(self: Any, vector: list[Any], offset: int, least: Any = None) -> int:
            got = real(self, vector, offset, least)
            for each in written:
                each[:] = 255
            return got

        with monkeypatch.context() as patch:
            patch.setattr(OpenFile, "read", meanwhile)
            targets[1].copy_(opened.tensors["w"])
        assert torch.equal(targets[1], MODEL["w"])
        assert OpenFile.read is read
    opened.stream.close()


def _refused(*_: Any) -> None:
    raise OSError(errno.EIO, "Input/output error")


@pytest.mark.gpu
@pytest.mark.parametrize("way", TAKEN)
def test_copies_onto_a_gpu(tmp_path: Path, way: str) -> None:
    """Behind kernels of the stream that use the target, and before those that follow."""
    if reason := no_gpu():
        pytest.skip(reason)
    take, whole = TAKEN[way], torch.randn(2048, 1536).to(torch.bfloat16)
    save_file({"pad": torch.zeros(3), "w": whole}, tmp_path / "w.safetensors")
    wanted = take(whole)
    target = torch.zeros(wanted.shape, dtype=torch.bfloat16, device="cuda:0")
    square = torch.randn(4096, 4096, device="cuda:0")
    streams = torch.cuda.default_stream(), torch.cuda.Stream()
    report = mfload.Report()
    with mfload.stream(tmp_path / "w.safetensors", "torch", lazy=True, report=report) as tensors:
        lazy = dict(tensors)["w"]
        for turn in range(6):
            torch.cuda.synchronize()
            with torch.cuda.stream(streams[turn % 2]):
                for _ in range(10):
                    square = square @ square / 64
                seen = target + square[0, 0].to(torch.bfloat16) * 0
                target.fill_(7)
                target.copy_(take(lazy))
                sums = target.double().sum()
                assert torch.equal(target.cpu(), wanted)
                assert sums.item() == wanted.double().sum().item()
                del seen
    assert report.read_bytes > 0


@pytest.mark.gpu
def test_tensors_of_an_open_checkpoint_on_a_gpu(tmp_path: Path) -> None:
    if reason := no_gpu():
        pytest.skip(reason)
    rows = {f"w{n}": torch.randn(500 + n, 700) for n in range(40)}
    save_file(rows, tmp_path / "w.safetensors")
    with mfload.open(tmp_path / "w.safetensors", "torch", device="cuda:0") as opened:
        for name, each in rows.items():
            assert torch.equal(opened.get_tensor(name).cpu(), each)
            assert torch.equal(opened.get_slice(name)[3:, ::2].cpu(), each[3:, ::2])
