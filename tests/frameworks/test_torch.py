"""PyTorch against the suite that all adapters share, and what is its own."""

from __future__ import annotations

import gc
import random
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import safetensors.torch
import samples
import sending
import torch
from conformance import material
from conformance.device_memory import DeviceMemoryConformance, Ground, lent, request, wrapped
from conformance.export import ExportConformance, give, read
from conformance.material import BITS, COMMON, FLOATS8, Stored, save
from conformance.suite import ENGINES, WritableConformance, no_gpu
from devices.entered import entered
from devices.fake import FakeDevice
from hypothesis import given, strategies as st
from hypothesis.extra import numpy as arrays
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import mfload
from mfload import dtypes, errors, frameworks
from mfload.cuda import discovery, memory
from mfload.cuda.device import Device
from mfload.dlpack import Views
from mfload.frameworks import torch_adapter
from mfload.frameworks.base import Adapter
from mfload.io import convert
from mfload.planning import plan as planning

MIB = 1 << 20


class TestTorch(WritableConformance):
    framework = "torch"
    narrow = ()
    lists_lead = False
    bfloat16 = torch.bfloat16
    # What a version has no name for arrives as bytes.
    own: ClassVar = {
        key: name
        for key, name in (COMMON | FLOATS8 | {"F4": "float4_e2m1fn_x2"}).items()
        if hasattr(torch, name)
    }

    def type_name(self, array: Any) -> str:
        assert type(array) is torch.Tensor
        return str(array.dtype).removeprefix("torch.")

    def raw(self, array: Any) -> bytes:
        return array.contiguous().reshape(-1).view(torch.uint8).cpu().numpy().tobytes()

    def address(self, array: Any) -> int:
        return array.data_ptr()

    def overwrite(self, array: Any) -> None:
        array.fill_(1)

    def read(self, lazy: Any) -> Any:
        return lazy.clone()

    @pytest.mark.parametrize("engine", ENGINES)
    def test_training_changes_no_file(self, tmp_path: Any, engine: str) -> None:
        row = material.Stored("w", "F32", (8, 8), np.ones(64, np.float32).tobytes())
        path = save(tmp_path / "w.safetensors", [row])
        before = path.read_bytes()
        weight = mfload.load(path, framework="pt", options=mfload.Options(engine=engine))[
            "w"
        ].requires_grad_()
        (weight * 3).sum().backward()
        with torch.no_grad():
            weight -= weight.grad
        assert weight.detach().unique().tolist() == [-2.0]
        assert path.read_bytes() == before

    def test_views_of_views(self, aligned: Any) -> None:
        path, rows = aligned
        row = next(row for row in rows if row.dtype == "I32")
        part = mfload.load(path, framework="torch", options=mfload.Options(engine="pread"))[
            "I32"
        ].T[3:, 1:][-1, -1]
        gc.collect()
        assert mfload.live_bytes() > 0
        assert part.item() == int(np.frombuffer(row.raw, np.int32).reshape(row.shape)[-1, -1])

    def test_devices(self, aligned: Any) -> None:
        path, rows = aligned
        self.assert_loaded(mfload.load(path, framework="torch", device=torch.device("cpu")), rows)
        nowhere = mfload.load(path, framework="torch", device="meta", names=["F32"])["F32"]
        assert nowhere.is_meta
        for gpu in ("gpu:0", "GPU"):
            with pytest.raises(errors.DeviceError, match=f"'{gpu}'.*name for GPUs is 'cuda'"):
                mfload.load(path, framework="torch", device=gpu)

    def test_the_meta_device_as_a_default_is_refused(self, aligned: Any) -> None:
        with torch.device("meta"):
            with pytest.raises(errors.DeviceError, match=r"'meta'.*no weights") as caught:
                mfload.load(aligned[0], framework="torch", names=["F32"])
            assert not mfload.load(aligned[0], framework="torch", device="cpu")["F32"].is_meta
        assert "device='cpu'" in str(caught.value)


class TestTorchLanding(DeviceMemoryConformance):
    look = TestTorch()

    @pytest.fixture
    def gpu(self) -> Any:
        if reason := no_gpu():
            pytest.skip(reason)
        if not torch.cuda.is_available():
            pytest.skip("this torch has no GPU")
        return torch.device("cuda:0")

    def adapter(self, land: Device) -> Adapter:
        return torch_adapter.TorchAdapter(torch.device("cpu"), land)

    def test_8_bit_types_that_are_not_imported(
        self, ground: Ground, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # As in the versions that have them and take them as bytes alone.
        kinds = {key: getattr(torch, name) for key, name in FLOATS8.items()}
        monkeypatch.setattr(torch_adapter, "_VIEWED", kinds)
        rows = material.aligned(FLOATS8)
        self.check(rows, wrapped(ground, rows))

    @pytest.mark.parametrize("seed", range(30))
    def test_parts_of_storages_are_made_at_once(self, seed: int) -> None:
        """They are what they are one by one: in any order, with gaps and empty ones between."""
        rng, land = random.Random(seed), FakeDevice()
        adapter = self.adapter(land)
        sizes = [rng.choice([4096, 50_001, 1 << 16]) for _ in range(rng.randint(1, 4))]
        held = [*map(adapter.allocator(0, sizes), sizes)]
        for each in held:
            each.owner.random_()
        shapes = [(), (0,), (3,), (2, 0, 3), (7, 5), (1, 1), (2, 3, 4)]
        names = rng.sample(["U8", "BF16", "F32", "F64", "C64", "F4", "F8_E4M3"], 4)
        kinds = [(dtypes.TABLE[rng.choice(names)], rng.choice(shapes)) for _ in "12345"]
        kinds = [(d, (*s, d.elements) if d.elements > 1 else s) for d, s in kinds]
        kind, buffers, at = list[int](), list[int](), list[int]()
        for number, nbytes in enumerate(sizes):
            cursor, tidy = 0, rng.random() < 0.5
            while len(at) < 100 * (number + 1):
                which = rng.randrange(1 + (0 if tidy else 4))
                end = cursor + (kinds[which][0].size_of(kinds[which][1]) or 0)
                if end > nbytes:
                    break
                kind, buffers, at = [*kind, which], [*buffers, number], [*at, cursor]
                cursor = -(-end // 16) * 16 + rng.choice([0, 0, 16])
        order = list(range(len(at)))
        if seed % 2:
            rng.shuffle(order)
        kind, buffers, at = ([each[n] for n in order] for each in (kind, buffers, at))
        given = [f"{n}" for n in order], kinds, kind, held, np.array(buffers), np.array(at)
        views = Views(*given)
        ours, theirs = adapter.wrap(views), adapter.wrap(list(views))
        for one, other in zip(ours, theirs, strict=True):
            for each in ("dtype", "shape", "device", "requires_grad", "is_leaf"):
                assert getattr(one, each) == getattr(other, each)
            assert one.stride() == other.stride()
            assert one.storage_offset() == other.storage_offset()
            assert one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
            assert one.untyped_storage().nbytes() == other.untyped_storage().nbytes()
            assert not one._is_view()
        before = [each._version for each in ours]
        number = max(range(len(ours)), key=lambda n: ours[n].numel())
        ours[number].zero_()
        after = [each._version - then for each, then in zip(ours, before, strict=True)]
        assert after == [n == number for n in range(len(ours))]
        ours[number].t_() if ours[number].ndim == 2 else ours[number].resize_(0)

    def test_what_a_gpu_is_asked(self, monkeypatch: pytest.MonkeyPatch) -> None:
        land, gpu, asked = FakeDevice(total=1000), SimpleNamespace(type="cuda", index=3), []
        monkeypatch.setattr(discovery, "find", lambda number: asked.append(number) or land)
        monkeypatch.setattr(torch.version, "cuda", None)
        assert list(torch_adapter._at(gpu).devices) == []  # As in a build that is not for CUDA.
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        adapter = torch_adapter._at(gpu)
        assert list(adapter.devices) == [land]
        assert not adapter.on_host
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 300)
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 100)
        pool = adapter.pool(0)
        assert pool is not None
        assert pool.free == 1200
        assert "the 200 bytes that torch keeps for itself" in pool.advice
        made = torch.empty
        monkeypatch.setattr(torch, "empty", lambda shape, dtype, device: asked.append(device)
                            or made(shape, dtype=dtype))  # fmt: skip
        stream = SimpleNamespace(synchronize=lambda: asked.append("wait"))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        adapter.lend([request(material.stored("w", "U8", (3,)))] * 2)
        assert asked == [3, gpu, gpu, "wait"]
        with adapter.allocating():
            assert entered() == [land]
            held = adapter.allocator(0, [100])(100), adapter.allocator(0, [0])(0)
            assert asked == [3, gpu, gpu, "wait", gpu, gpu]  # One wait for all.
        assert asked.pop() == "wait"
        assert [each.nbytes for each in held] == [100, 0]
        assert held[1].address == held[1].owner.data_ptr() != 0
        assert memory.live_bytes() == 0
        adapter.allocator(0, [2 << 20, 2 << 20])(2 << 20)  # Before the first, it asks for both.
        assert [asked.pop(), asked.pop()] == [gpu, gpu]
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        with adapter.allocating():
            own = adapter.allocator(0, [100])(100)
        with pytest.raises(errors.UsageError, match="a CUDA graph is being captured"):
            adapter.lend([request(material.stored("w", "U8", (3,)))])
        assert asked == [3, gpu, gpu, "wait", gpu, gpu]
        assert memory.live_bytes() == own.nbytes
        del own
        monkeypatch.setattr(torch.cuda, "stream", lambda entered: (entered,))
        assert adapter.follow() == (stream,)

    def test_an_allocator_that_keeps_no_count(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(_: Any) -> Any:
            raise RuntimeError("CUDAPluggableAllocator does not yet support getDeviceStats")

        monkeypatch.setattr(torch.cuda, "memory_reserved", refuse)
        adapter = torch_adapter.TorchAdapter(SimpleNamespace(type="cuda"), FakeDevice())
        assert adapter.pool(0) is None

    def test_a_device_that_is_full(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def empty(*_: Any, **__: Any) -> Any:
            raise torch.cuda.OutOfMemoryError("tried to allocate 7 GiB\nand more")

        monkeypatch.setattr(torch, "empty", empty)
        with pytest.raises(errors.MemoryLimitError, match="no room") as caught:
            lent(Ground(self.adapter(FakeDevice()), FakeDevice()), [material.stored("w", "U8", ())])
        assert caught.value.found == "tried to allocate 7 GiB"

    def test_a_buffer_that_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def empty(*_: Any, **__: Any) -> Any:
            raise torch.cuda.OutOfMemoryError("tried to allocate 7 GiB")

        monkeypatch.setattr(torch, "empty", empty)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        adapter = torch_adapter.TorchAdapter(SimpleNamespace(type="cuda"), FakeDevice())
        with pytest.raises(errors.MemoryLimitError, match="torch has no room"):
            adapter.allocator(0, [7 << 30, 7 << 30])(7 << 30)

    def test_what_is_taken_together(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A block for what follows is given back at once, so that torch cuts that out of it."""
        taken: list[int] = []
        made = torch.empty

        def empty(shape: Any, *, dtype: Any, device: Any) -> Any:
            taken.append(shape if isinstance(shape, int) else -shape[0])
            if shape == 255 * MIB:
                raise torch.cuda.OutOfMemoryError("as there is no such block")
            return made(1, dtype=dtype)

        monkeypatch.setattr(torch, "empty", empty)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        adapter = torch_adapter.TorchAdapter(SimpleNamespace(type="cuda"), FakeDevice())
        sizes = [100 * MIB, 155 * MIB, MIB, 255 * MIB, 300 * MIB, 4 * MIB, 5 * MIB]
        allocate = adapter.allocator(0, sizes)
        held = [allocate(nbytes) for nbytes in sizes]
        assert [each.nbytes for each in held] == sizes
        assert taken == [
            255 * MIB, -100 * MIB, -155 * MIB, -MIB, -255 * MIB, -300 * MIB, 9 * MIB, -4 * MIB,
            -5 * MIB,
        ]  # fmt: skip
        taken.clear()  # Blocks that are not cut would be taken beside the tensors.
        monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "backend:native,max_split_size_mb: 128")
        allocate = adapter.allocator(0, sizes)
        assert [allocate(nbytes).nbytes for nbytes in sizes] == sizes
        assert taken == [-nbytes for nbytes in sizes]

    def model(self, tmp_path: Any) -> tuple[Any, dict[str, Any]]:
        numbers = {f"{n}.{kind}": np.arange(size, dtype=np.float32) + n for n in range(4)
                   for kind, size in [("a", 2 << 18), ("norm", 100), ("b", 3 << 18)]}  # fmt: skip
        return samples.save(tmp_path / "m.safetensors", numbers), numbers

    def agree(self, loaded: dict[str, Any], numbers: dict[str, Any]) -> None:
        assert loaded.keys() == numbers.keys()
        for name, tensor in loaded.items():
            assert np.array_equal(tensor.cpu().numpy(), numbers[name])

    def test_memory_of_torchs(
        self, ground: Ground, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Large ones of many tensors have their own storages, small ones share one of theirs."""
        monkeypatch.setattr(frameworks, "get", lambda *_: ground.adapter)
        monkeypatch.setattr(planning, "FEW", 11)
        path, numbers = self.model(tmp_path)
        report = mfload.Report()
        loaded = mfload.load(path, "torch", report=report)
        assert report.device_peak_bytes == memory.live_bytes() == 0
        self.agree(loaded, numbers)
        for name, tensor in loaded.items():
            held = tensor.untyped_storage()
            if "norm" not in name:
                assert (held.nbytes(), tensor.storage_offset()) == (tensor.nbytes, 0)
        norms = [loaded[f"{n}.norm"] for n in range(4)]
        (slab,) = {each.untyped_storage().data_ptr() for each in norms}
        assert [each.data_ptr() - slab for each in norms] == [0, 512, 1024, 1536]
        # A backward pass refuses what was changed since the forward one, by this count.
        before = [each._version for each in norms]
        norms[0].add_(1)
        changed = zip([each._version for each in norms], before, strict=True)
        assert [now - then for now, then in changed] == [1, 0, 0, 0]
        assert not any(each._is_view() for each in norms)
        written = tmp_path / "one.pt"
        torch.save(loaded["0.a"], written)
        assert written.stat().st_size < loaded["0.a"].nbytes + 8192
        own = mfload.load(path, "torch", options=mfload.Options(allocator="mfload"))
        assert memory.live_bytes() >= sum(each.nbytes for each in own.values())

    @pytest.mark.parametrize("allocator", ["auto", "framework", "mfload"])
    def test_modes_of_users_are_no_matter(
        self, ground: Ground, tmp_path: Any, monkeypatch: pytest.MonkeyPatch, allocator: Any
    ) -> None:
        """As on the host, where tensors that are loaded inside a mode have numbers, too."""
        monkeypatch.setattr(frameworks, "get", lambda *_: ground.adapter)
        path, numbers = self.model(tmp_path)
        found: list[dict[str, Any]] = []

        def traced(given: Any) -> Any:
            found.append(mfload.load(path, "torch", options=mfload.Options(allocator=allocator)))
            return given + 1

        with FakeTensorMode():
            traced(1)
        make_fx(traced)(torch.ones(3))
        for each in found:
            assert {type(tensor) for tensor in each.values()} == {torch.Tensor}
            self.agree(each, numbers)

    def test_storages_of_few_tensors(
        self, ground: Ground, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Each has its own, as tensors that torch made: none is written, kept or moved with it."""
        monkeypatch.setattr(frameworks, "get", lambda *_: ground.adapter)
        names = {"weight": (5, 3), "bias": (5,), "empty": (0, 5), "none": (0,), "one": ()}
        numbers = {name: samples.numbers(shape, "f4", 3) for name, shape in names.items()}
        path = samples.save(tmp_path / "m.safetensors", numbers)
        weights = mfload.load(path, "torch")
        model = torch.nn.Module()
        for name, tensor in weights.items():
            model.register_buffer(name, tensor)
        safetensors.torch.save_model(model, tmp_path / "saved.safetensors")
        self.agree(safetensors.torch.load_file(tmp_path / "saved.safetensors"), numbers)
        safetensors.torch.load_model(model, path)
        for name, tensor in weights.items():
            assert tensor.untyped_storage().nbytes() == tensor.nbytes
            assert tuple(tensor.shape) == names[name]
        weights["weight"].untyped_storage().resize_(0)  # As FSDP frees what it put together.
        assert np.array_equal(weights["bias"].cpu(), numbers["bias"])
        weights["none"].resize_(4096).fill_(9.0)
        assert np.array_equal(weights["bias"].cpu(), numbers["bias"])

    @pytest.mark.gpu
    def test_a_reload_takes_nothing_from_cuda(self, gpu: Any, tmp_path: Any) -> None:
        path, numbers = self.model(tmp_path)
        nbytes, held = sum(each.nbytes for each in numbers.values()), torch.cuda.memory_allocated
        gc.collect()
        torch.cuda.empty_cache()
        begun, counts = held(gpu), set[tuple[int, int]]()
        for _ in range(3):
            loaded = mfload.load(path, "torch", device=gpu)
            assert nbytes <= held(gpu) - begun < nbytes + (4 << 20)
            self.agree(loaded, numbers)
            loaded = {"0.a": loaded["0.a"], "3.norm": loaded["3.norm"]}
            gc.collect()
            # The rest is torch's again.
            kept = loaded["0.a"].nbytes + 512
            assert kept <= held(gpu) - begun < kept + (1 << 20)
            del loaded
            assert held(gpu) == begun
            told = torch.cuda.memory_stats(gpu)
            counts.add((told["num_device_alloc"], told["num_device_free"]))
        assert len(counts) == 1

    @pytest.mark.gpu
    def test_large_tensors_come_out_of_few_allocations(self, gpu: Any, tmp_path: Any) -> None:
        numbers = {f"{n:02}": np.full(5 << 20, n, np.uint8) for n in range(40)}
        path = samples.save(tmp_path / "m.safetensors", numbers)
        gc.collect()
        torch.cuda.empty_cache()
        made = torch.cuda.memory_stats(gpu)["num_device_alloc"]
        loaded = mfload.load(path, "torch", device=gpu)
        assert torch.cuda.memory_stats(gpu)["num_device_alloc"] - made == 1
        self.agree(loaded, numbers)

    @pytest.mark.gpu
    def test_tensors_are_sent_to_another_process(self, gpu: Any, tmp_path: Any) -> None:
        path, numbers = self.model(tmp_path)
        loaded = mfload.load(path, "torch", device=gpu)
        context = torch.multiprocessing.get_context("spawn")
        given, results = context.Queue(), context.Queue()
        child = context.Process(target=sending.total, args=(given, results), daemon=True)
        child.start()
        try:
            given.put(list(loaded.values()))
            wanted = [int(numbers[name].view(np.uint8).sum(dtype="i8")) for name in loaded]
            assert results.get(timeout=60) == wanted
            given.put(None)
            child.join(60)
        finally:
            child.kill()

    @pytest.mark.gpu
    def test_a_load_minds_no_capture(self, gpu: Any, tmp_path: Any) -> None:
        """Neither of another thread, nor of its own, which would write to the memory."""
        path, numbers = self.model(tmp_path)

        def load() -> dict[str, Any]:
            return mfload.load(path, "torch", device=gpu)

        ones = torch.ones(100, device=gpu)
        torch.cuda.synchronize(gpu)
        graph, loaded = torch.cuda.CUDAGraph(), list[dict[str, Any]]()
        with ThreadPoolExecutor(1) as pool, torch.cuda.graph(graph):
            made = ones + 1
            loaded += [pool.submit(load).result(), load()]
            made += ones
        graph.replay()
        torch.cuda.synchronize(gpu)
        assert made.unique().tolist() == [3.0]
        for each in loaded:
            self.agree(each, numbers)

    def test_writing_in_place(self, ground: Ground) -> None:
        row = material.stored("w", "F32", (64, 3))
        for way in (wrapped, lent):
            (array,) = way(ground, [row])
            array.fill_(2).add_(array[0].clone())
            assert array.unique().tolist() == [4.0]


class TestTorchGives(ExportConformance):
    framework = "torch"
    gives = tuple(key for key in BITS if key in TestTorch.own)
    refused: ClassVar = {
        "complex128": "no dtype",
        "complex32": "no dtype",
        "meta": "materialise",
        "sparse": "to_dense",
        "csr": "to_dense",
        "nested": "unbind",
        "jagged": "unbind",
        "quantised": "int_repr",
        "fake": "fake",
        "DTensor": "full_tensor",
        "lazy": "run the model",
        "wrapped": "without memory",
        "module": "state_dict",
        "dtype": "state_dict",
    }

    def made(self, array: np.ndarray) -> Any:
        units = torch.from_numpy(array.view(f"u{array.itemsize}").copy())
        if array.dtype.kind == "c":
            return units.view(torch.complex64)
        return units.view(getattr(torch, array.dtype.name))

    def packs(self, dtype: str, array: np.ndarray) -> Any:
        return torch.from_numpy(array.copy()).view(torch.float4_e2m1fn_x2)

    def address(self, array: Any) -> int:
        return array.data_ptr()

    def turn(self, array: Any, axes: tuple[int, ...]) -> Any:
        return array.permute(axes)

    def reference_save(self, arrays: dict[str, Any]) -> bytes:
        return safetensors.torch.save(arrays)

    def refusal(self, word: str) -> Any:
        ones = torch.ones(2, 2)
        if word.startswith("complex"):
            return torch.ones(2, dtype=getattr(torch, word))
        if word == "fake":
            with torch._subclasses.FakeTensorMode():
                return torch.ones(2)
        if word == "DTensor":
            return dtensor()
        if word == "wrapped":
            kept: list[Any] = []
            torch.func.grad(lambda x: kept.append(x) or x.sum())(torch.ones(3))
            return kept[0]
        made = {
            "meta": lambda: ones.to("meta"),
            "sparse": ones.to_sparse,
            "csr": ones.to_sparse_csr,
            "nested": lambda: torch.nested.nested_tensor([ones, ones[:1]]),
            "jagged": lambda: torch.nested.nested_tensor([ones, ones[:1]], layout=torch.jagged),
            "quantised": lambda: torch.quantize_per_tensor(ones, 0.1, 0, torch.qint8),
            "lazy": lambda: torch.nn.LazyLinear(3).weight,
            "module": lambda: torch.nn.Linear(2, 2),
            "dtype": lambda: torch.float32,
        }
        return made[word]()

    @given(data=st.data())
    def test_steps_and_repeats(self, data: st.DataObject) -> None:
        shape = data.draw(arrays.array_shapes(min_dims=1, max_dims=3, max_side=5))
        array = self.numbers(data.draw(st.sampled_from(["BF16", "F32", "F8_E5M2"])), shape)[1]
        made = self.made(array)
        index = tuple(slice(data.draw(st.integers(0, n)), n, data.draw(st.integers(1, 3)))
                      for n in shape)  # fmt: skip
        copies = data.draw(st.integers(1, 3))
        part = made[index].expand(copies, *made[index].shape)
        wanted = np.broadcast_to(array[index], part.shape)
        assert read(give(part)).raw == wanted.tobytes()
        first, past = give(part).span or (0, 0)
        if part.numel():
            assert (first, past) == np.lib.array_utils.byte_bounds(
                part.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[part.itemsize]).numpy()
            )

    def test_what_is_to_be_conjugated_or_negated(self) -> None:
        numbers = np.array([[1 + 2j, 3 - 4j], [0j, -5 + 6j]], np.complex64)
        tensor = torch.from_numpy(numbers.copy())
        for lazy, wanted in (
            (tensor.conj(), numbers.conj()),
            (tensor.conj().T, numbers.conj().T),
            (tensor.conj().imag, -numbers.imag),
            (tensor.conj().imag.T, -numbers.imag.T),
            (torch._neg_view(tensor), -numbers),
        ):
            assert lazy.is_conj() or lazy.is_neg()
            given = give(lazy)
            assert read(given).raw == np.ascontiguousarray(wanted).tobytes()
            assert given.span is not None
            assert tensor.data_ptr() <= given.span[0] < given.span[1] <= tensor.data_ptr() + 32
        assert torch.equal(tensor, torch.from_numpy(numbers))

    def test_parameters_and_subclasses(self) -> None:
        class Own(torch.Tensor):
            pass

        weight = torch.nn.Linear(3, 2).weight
        for tensor in (weight, torch.ones(2).as_subclass(Own)):
            assert read(give(tensor)).raw == tensor.detach().numpy().tobytes()
        assert weight.requires_grad
        with torch.inference_mode():
            assert read(give(torch.ones(2))).raw == np.ones(2, np.float32).tobytes()

    def test_views_of_packed_elements(self) -> None:
        if not hasattr(torch, "float4_e2m1fn_x2"):
            pytest.skip("this version has no such type")
        raw = np.arange(12, dtype=np.uint8).reshape(3, 4)
        tensor = self.packs("F4", raw)
        part = np.ascontiguousarray(raw[1:, ::2])
        assert read(give(tensor[1:, ::2])) == Stored("w", "F4", (2, 4), part.tobytes())
        assert read(give(tensor.T)) == Stored("w", "F4", (4, 6), raw.T.tobytes())
        with pytest.raises(errors.UnsupportedArrayError, match="two elements"):
            give(tensor[0, 0])

    @pytest.mark.gpu
    def test_tensors_on_a_gpu(self) -> None:
        if reason := no_gpu():
            pytest.skip(reason)
        for dtype in self.gives:
            if BITS[dtype] < 8:
                continue
            row, array = self.numbers(dtype, (5, 3))
            given = give(self.made(array).cuda())
            assert (read(given), given.span) == (row, None)
            assert read(give(self.made(array).cuda().T)).raw == array.T.tobytes()


def dtensor() -> Any:
    """A tensor of one process that forms a group alone."""
    from torch.distributed import device_mesh

    try:
        from torch.distributed.tensor import Shard, distribute_tensor
    except ImportError:  # Older versions keep it here.
        from torch.distributed._tensor import Shard, distribute_tensor
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    try:
        mesh = device_mesh.init_device_mesh("cpu", (1,))
        return distribute_tensor(torch.ones(2, 2), mesh, [Shard(0)])
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("kind", ["float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_conversions_have_the_bits_of_numpy(tmp_path: Any, kind: str) -> None:
    """Also of NaN and, where there is infinity, of numbers out of range, in which torch differs."""
    first = np.arange(1 << 19, dtype=np.uint32) << 13
    rest = np.array([0, 1, 0xFFF, 0x1000, 0x1001, 0x1FFF], np.uint32)
    sound = np.random.default_rng(0).standard_normal(1 << 19).astype(np.float32)
    numbers = np.concatenate([np.ravel(first[:, None] | rest).view(np.float32), sound])
    file = tmp_path / "w.safetensors"
    row = dtypes.resolve(kind).numpy
    if kind == "float8_e4m3fn":
        with np.errstate(all="ignore"):
            numbers = numbers[np.isnan(numbers) | ~np.isnan(numbers.astype(row))]
    save(file, [Stored("w", "F32", numbers.shape, numbers.tobytes())])
    with np.errstate(all="ignore"):
        narrow = numbers.astype(row)
        wide = np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)
    made = mfload.load(file, "torch", dtype=kind)["w"]
    assert made.dtype is getattr(torch, kind)
    assert made.view(torch.uint8).numpy().tobytes() == narrow.tobytes()
    halves = np.arange(1 << 16, dtype=np.uint16)
    save(file, [Stored("w", "F16", halves.shape, halves.tobytes())])
    made = mfload.load(file, "torch", dtype="float32")["w"]
    assert made.view(torch.uint8).numpy().tobytes() == wide.tobytes()


def test_torch_does_conversions_where_it_agrees() -> None:
    for kind in ("float16", "float8_e4m3fn", "float8_e5m2"):
        target = dtypes.resolve(kind).numpy
        assert target is not None
        with np.errstate(all="ignore"):
            assert convert._agrees(torch_adapter._convert, np.dtype(np.float32), target)
    assert convert._agrees(torch_adapter._convert, np.dtype(np.float16), np.dtype(np.float32))


@pytest.mark.parametrize("first", [False, True], ids=["known", "first"])
def test_conversions_inside_a_mode_of_torch(first: bool) -> None:
    """There a copy may be recorded, and not made."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    numbers = np.random.default_rng(0).standard_normal(100_000).astype(np.float32)
    made = np.empty(numbers.shape, np.float16)

    def conversion(given: Any = None) -> Any:
        made[:] = 0
        convert.convert(numbers, made, converter=torch_adapter._convert)
        return given

    def faked() -> None:
        with FakeTensorMode():
            conversion()

    ones = torch.ones(2)
    for call in (
        faked,
        lambda: make_fx(conversion)(ones),
        lambda: torch.func.functionalize(conversion)(ones),
    ):
        convert._kernel.cache_clear()
        if not first:
            conversion()
        call()
        assert made.tobytes() == numbers.astype(np.float16).tobytes()
    convert._kernel.cache_clear()
