"""torch.distributed.checkpoint in one process: mfload's reader against torch's."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from conformance.suite import no_gpu
from devices.fake import FakeDevice
from devices.queues import MODES
from hypothesis import given, settings, strategies as st
from safetensors.torch import save_file
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem

import mfload
from mfload import errors
from mfload.compat import dcp as compat
from mfload.compat.dcp import HuggingFaceReader
from mfload.cuda.device import MemoryInfo
from mfload.cuda.staging import KITS
from mfload.frameworks import torch_adapter, torch_memory
from mfload.frameworks.base import Pool

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def empty(reader: Any) -> dict[str, Any]:
    rows = reader.read_metadata().state_dict_metadata.items()
    return {name: torch.empty(row.size, dtype=row.properties.dtype) for name, row in rows}


def test_what_torch_writes(tmp_path: Path) -> None:
    whole = {"w": torch.randn(6, 4), "b": torch.randn(3)}
    writer = dcp.HuggingFaceStorageWriter(str(tmp_path), save_distributed=True)
    dcp.save(whole, storage_writer=writer)
    state = empty(HuggingFaceReader(tmp_path))
    dcp.load(state, storage_reader=HuggingFaceReader("elsewhere"), checkpoint_id=tmp_path)
    assert all(torch.equal(state[name], each) for name, each in whole.items())


def save_parts(directory: Path, bounds: list[int]) -> None:
    """Files of parts, as HuggingFaceStorageWriter(save_distributed=True) writes them."""
    for start, stop in itertools.pairwise(bounds):
        said = {"w": {"saved_offsets": [start, 0]}}
        path = directory / f"shard-0000{start + 1}-model-00001-of-00001.safetensors"
        save_file(
            {"w": torch.zeros(stop - start, 4)}, path, {"DCP_SHARDING_INFO": json.dumps(said)}
        )


@pytest.mark.parametrize("bounds", [[0, 2, 5], [2, 5], [10, 12]])
def test_files_of_parts_are_refused(tmp_path: Path, bounds: list[int]) -> None:
    save_parts(tmp_path, bounds)
    with pytest.raises(errors.CheckpointError, match=r"two files hold|parts of tensors") as caught:
        HuggingFaceReader(tmp_path).read_metadata()
    assert caught.value.file == str(tmp_path)


def test_what_an_index_leaves_out_and_what_it_chooses(tmp_path: Path) -> None:
    """torch reads all that lies in the directory; of a copy, the index says which is meant."""
    a, b, c, copy = torch.randn(4, 4)
    save_file({"a": a.clone(), "b": b.clone()}, tmp_path / "1.safetensors")
    save_file({"a": copy.clone(), "c": c.clone()}, tmp_path / "2.safetensors")
    index = {"weight_map": {"a": "1.safetensors", "c": "2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    expected = {"a": a, "b": b, "c": c}
    state = empty(HuggingFaceReader(tmp_path))
    report = mfload.Report()
    dcp.load(state, storage_reader=HuggingFaceReader(tmp_path, report=report))
    module = torch.nn.Module()
    for name in expected:
        module.register_buffer(name, torch.zeros(4))
    mfload.load_into(module, tmp_path, report=(into := mfload.Report()))
    for found in (state, module.state_dict()):
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], each) for name, each in expected.items())
    for notes in (report.notes, into.notes):
        assert any("not in the index: 1 tensor" in note for note in notes)
        assert any("the index does not choose" in note for note in notes)


class Planner(dcp.DefaultLoadPlanner):  # pyright: ignore[reportUntypedBaseClass]
    """Notes what is committed."""

    def __init__(self) -> None:
        super().__init__()
        self.committed: list[str] = []

    def commit_tensor(self, read_item: Any, tensor: Any) -> None:
        self.committed.append(read_item.dest_index.fqn)


def test_tensors_are_filled_in_place(tmp_path: Path) -> None:
    stored = {"w": torch.randn(64, 32), "v": torch.randn(8), "none": torch.zeros(0, 3)}
    save_file(stored, tmp_path / "a.safetensors")
    report, planner = mfload.Report(), Planner()
    state = {name: torch.zeros_like(each) for name, each in stored.items()}
    placed = {name: each.data_ptr() for name, each in state.items()}
    versions = {name: each._version for name, each in state.items()}
    reader = HuggingFaceReader(tmp_path, report=report)
    dcp.load(state, storage_reader=reader, planner=planner)
    assert all(torch.equal(state[name], each) for name, each in stored.items())
    assert {name: each.data_ptr() for name, each in state.items()} == placed
    assert all(state[name]._version > versions[name] for name in ("w", "v"))
    assert sorted(planner.committed) == sorted({"w", "v"} | set(planner.committed))
    assert report.result_bytes == sum(each.nbytes for each in stored.values())
    assert report.read_bytes >= report.result_bytes


@pytest.mark.parametrize("shape", [(4096, 1024), (2, 1 << 21)])
def test_what_is_copied_stays_within_the_overhead(tmp_path: Path, shape: tuple[int, ...]) -> None:
    stored = {"w": torch.randn(shape), "v": torch.randn(1 << 20).bfloat16()}
    save_file(stored, tmp_path / "a.safetensors")
    report = mfload.Report()
    options = mfload.Options(max_host_overhead="8MiB", threads=1)
    state = {name: torch.empty(each.shape, dtype=torch.float64) for name, each in stored.items()}
    dcp.load(state, storage_reader=HuggingFaceReader(tmp_path, options=options, report=report))
    assert all(torch.equal(state[name], each.double()) for name, each in stored.items())
    assert report.peak_bytes <= 8 << 20


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float64])
def test_what_a_float_without_infinity_can_not_hold_is_refused(tmp_path: Path, kind: Any) -> None:
    whole = torch.tensor([3.0, torch.nan, -448, 448], dtype=kind)
    for n, value in enumerate((460.0, 1024.0, torch.inf)):
        save_file({"w": whole}, tmp_path / "a.safetensors")
        state = {"w": torch.zeros(4, dtype=torch.float8_e4m3fn)}
        dcp.load(state, storage_reader=HuggingFaceReader(tmp_path))
        assert torch.equal(state["w"].float()[[0, 2, 3]], whole.float()[[0, 2, 3]])
        save_file({"w": whole.index_fill(0, torch.tensor([2]), value)}, tmp_path / "a.safetensors")
        if not n:  # It rounds to the largest number.
            dcp.load(state, storage_reader=HuggingFaceReader(tmp_path))
            continue
        with pytest.raises(CheckpointException) as raised:
            dcp.load(state, storage_reader=HuggingFaceReader(tmp_path))
        (error, _), *_ = raised.value.failures.values()
        assert isinstance(error, errors.LossyCastError)
        assert (error.tensor, error.found) == ("w", value)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_box_of_a_tensor(tmp_path_factory: Any, data: Any) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 7), max_size=4)))
    whole = torch.arange(torch.Size(shape).numel()).reshape(shape)
    path = tmp_path_factory.mktemp("box")
    save_file({"w": whole}, path / "a.safetensors")
    starts = [data.draw(st.integers(0, n - 1)) for n in shape]
    lengths = [data.draw(st.integers(1, n - a)) for n, a in zip(shape, starts, strict=True)]
    kind = data.draw(st.sampled_from([torch.int64, torch.float32]))
    target = torch.zeros(lengths, dtype=kind)
    reader = HuggingFaceReader(path)
    (index,) = reader.read_metadata().storage_data
    sizes = {"storage_offsets": torch.Size(starts), "dest_offsets": torch.Size([0] * len(shape))}
    item = ReadItem(
        LoadItemType.TENSOR, index, storage_index=index, **sizes, lengths=torch.Size(lengths)
    )

    class Given(Planner):
        def resolve_tensor(self, read_item: Any) -> Any:
            return target

    reader.read_data(LoadPlan([item]), Given()).wait()
    box = tuple(slice(a, a + n) for a, n in zip(starts, lengths, strict=True))
    assert torch.equal(target, whole[box].to(kind))


@pytest.mark.parametrize(("start", "shape"), [(6, (4, 4)), (0, (1, 4))])
def test_a_planner_that_asks_for_what_does_not_fit(
    tmp_path: Path, start: int, shape: tuple[int, ...]
) -> None:
    save_file({"v": torch.zeros(8, 4), "w": torch.zeros(8, 4)}, tmp_path / "a.safetensors")
    reader = HuggingFaceReader(tmp_path)
    index = next(each for each in reader.read_metadata().storage_data if each.fqn == "v")
    sizes = {"storage_offsets": torch.Size([start, 0]), "dest_offsets": torch.Size([0, 0])}
    lengths = torch.Size([4, 4])
    item = ReadItem(LoadItemType.TENSOR, index, storage_index=index, lengths=lengths, **sizes)

    class Given(Planner):
        def resolve_tensor(self, read_item: Any) -> Any:
            return torch.ones(shape)

    with pytest.raises(errors.UnsupportedShapeError, match="does not fit") as caught:
        reader.read_data(LoadPlan([item]), Given())
    assert caught.value.tensor == "v"


def test_refusals(tmp_path: Path) -> None:
    save_file({"w": torch.zeros(4, 4)}, tmp_path / "a.safetensors")
    once = HuggingFaceReader(tmp_path, options=mfload.Options(exchange="once"))
    with pytest.raises(dcp.api.CheckpointException, match="UsageError"):
        dcp.load({"w": torch.zeros(4, 4)}, storage_reader=once)
    with pytest.raises(dcp.api.CheckpointException, match="Missing key"):
        dcp.load({"v": torch.zeros(4)}, storage_reader=HuggingFaceReader(tmp_path))
    with pytest.raises(dcp.api.CheckpointException, match="Size mismatch"):
        dcp.load({"w": torch.zeros(4)}, storage_reader=HuggingFaceReader(tmp_path))
    with pytest.raises(errors.SourceNotFoundError):
        HuggingFaceReader(tmp_path / "none").read_metadata()
    assert HuggingFaceReader.validate_checkpoint_id("https://host/model.safetensors")
    assert not HuggingFaceReader.validate_checkpoint_id(3)  # pyright: ignore[reportArgumentType]


def test_a_file_that_is_cut_meanwhile(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    save_file({"w": torch.zeros(4096, 64)}, path)

    class Cutting(Planner):
        def create_local_plan(self) -> Any:
            with path.open("r+b") as file:
                file.truncate(path.stat().st_size // 2)
            return super().create_local_plan()

    with pytest.raises(dcp.api.CheckpointException, match=r"a\.safetensors") as caught:
        dcp.load(
            {"w": torch.ones(4096, 64)},
            storage_reader=HuggingFaceReader(tmp_path),
            planner=Cutting(),
        )
    ((error, _),) = caught.value.failures.values()
    assert isinstance(error, errors.SourceError)
    assert any("being filled" in note for note in error.__notes__)


def test_targets_that_inference_mode_made(tmp_path: Path) -> None:
    save_file({"w": torch.ones(3, 4)}, tmp_path / "a.safetensors")
    for dtype in (torch.float32, torch.float64):
        with torch.inference_mode():
            state = {"w": torch.zeros(3, 4, dtype=dtype)}
        dcp.load(state, storage_reader=HuggingFaceReader(tmp_path))
        assert state["w"].sum() == 12


@pytest.mark.parametrize("mode", MODES)
def test_tensors_on_a_device_are_filled_in_place(
    tmp_path: Path, mode: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = FakeDevice(mode=mode)
    monkeypatch.setattr(torch_memory, "device_of", lambda _: device)
    stored = {"w": torch.randn(64, 32), "v": torch.randn(8), "none": torch.zeros(0, 3)}
    stored["x"] = torch.randn(16, 32)
    save_file(stored, tmp_path / "a.safetensors")
    state = {name: torch.zeros_like(each) for name, each in stored.items()}
    state["x"] = torch.zeros(16, 32, dtype=torch.float64)  # Copied, as `copy_` converts.
    placed = {name: each.data_ptr() for name, each in state.items()}
    dcp.load(state, storage_reader=HuggingFaceReader(tmp_path))
    assert all(torch.equal(state[name], each) for name, each in stored.items())
    assert {name: each.data_ptr() for name, each in state.items()} == placed
    assert device.nbytes["copy_in"] == stored["w"].nbytes + stored["v"].nbytes
    device.assert_clean()


def test_batches_onto_a_device_share_what_they_land_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device, pinned = FakeDevice(), list[int]()
    real = device.pin
    monkeypatch.setattr(torch_memory, "device_of", lambda _: device)
    monkeypatch.setattr(device, "pin", lambda memory: pinned.append(memory.nbytes) or real(memory))
    monkeypatch.setattr(compat, "_BATCH", 1 << 20)
    stored = {f"w{n}": torch.full((512, 512), float(n)) for n in range(16)}
    save_file(stored, tmp_path / "a.safetensors")
    counts: list[int] = []
    for dtype in (torch.float32, torch.float64):  # The last makes it batches.
        state = {name: torch.zeros_like(each) for name, each in stored.items()}
        state["w3"] = state["w3"].to(dtype)
        KITS.give_back()
        pinned.clear()
        options = mfload.Options(threads=1)
        dcp.load(state, storage_reader=HuggingFaceReader(tmp_path, options=options))
        assert all(torch.equal(state[name], each) for name, each in stored.items())
        counts.append(len(pinned))
    assert 0 < counts[1] <= counts[0]
    device.assert_clean()


def test_what_is_copied_lands_in_memory_that_pytorch_has_set_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = FakeDevice()
    monkeypatch.setattr(device, "memory_info", lambda: MemoryInfo(1 << 10, 80 << 30))
    monkeypatch.setattr(torch_memory, "device_of", lambda _: device)

    class Cached(torch_adapter.TorchAdapter):
        def pool(self, number: int) -> Pool:
            return Pool(70 << 30, "torch.cuda.empty_cache() gives it back")

    monkeypatch.setattr(torch_adapter, "make", lambda _: Cached(torch.device("cpu"), device))
    stored = {"w": torch.randn(64, 32)}
    save_file(stored, tmp_path / "a.safetensors")
    state = {"w": torch.zeros(64, 32, dtype=torch.float64)}
    dcp.load(state, storage_reader=HuggingFaceReader(tmp_path))
    assert torch.equal(state["w"], stored["w"].double())
    options = mfload.Options(allocator="mfload")
    with pytest.raises(CheckpointException, match="does not fit"):
        dcp.load(state, storage_reader=HuggingFaceReader(tmp_path, options=options))


@pytest.mark.gpu
def test_tensors_on_a_gpu(tmp_path: Path) -> None:
    if reason := no_gpu():
        pytest.skip(reason)
    stored = {f"w{n}": torch.randn(300 + n, 800) for n in range(20)}
    save_file(stored, tmp_path / "a.safetensors")
    state = {name: torch.zeros_like(each, device="cuda:0") for name, each in stored.items()}
    state["w1"] = torch.zeros(301, 800, dtype=torch.float64, device="cuda:0")
    placed = {name: each.data_ptr() for name, each in state.items()}
    dcp.load(state, storage_reader=HuggingFaceReader(tmp_path))
    assert all(torch.equal(state[name].cpu(), each) for name, each in stored.items())
    assert {name: each.data_ptr() for name, each in state.items()} == placed
