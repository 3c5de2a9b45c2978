"""Paddle against the suite that all adapters share, and what is its own."""

from __future__ import annotations

import gc
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import samples
from conformance import material
from conformance.device_memory import DeviceMemoryConformance, request
from conformance.export import ExportConformance, give, read
from conformance.material import BITS, COMMON, save
from conformance.suite import ENGINES, WritableConformance, no_gpu
from devices.fake import FakeDevice
from hypothesis import given, strategies as st
from hypothesis.extra import numpy as arrays
from samples import save_raw

import mfload
from mfload.cuda.device import Device
from mfload.errors import ShardingError
from mfload.frameworks.base import Adapter

with warnings.catch_warnings():
    # Paddle looks for a compiler cache when it is imported, and for setuptools' old parts.
    warnings.simplefilter("ignore")
    import paddle
    import safetensors.paddle

    from mfload.frameworks import paddle_adapter, private_api

# Paddle has them since 3.3.
UNSIGNED = ("U32", "U64") if hasattr(paddle, "uint32") else ()


@pytest.fixture
def static() -> Any:
    paddle.enable_static()
    yield
    paddle.disable_static()


def test_static_mode_is_asked_for_before_a_private_constructor_is_tried(
    tmp_path: Path, static: Any
) -> None:
    """The constructors end the process there."""
    private_api.paddle_constructor.cache_clear()
    private_api.paddle_sharder.cache_clear()
    path = samples.save(tmp_path / "w.safetensors", {"w": np.ones((3, 4), np.float32)})
    calls: list[Any] = [
        private_api.paddle_constructor,
        private_api.paddle_sharder,
        lambda: mfload.load(path, "paddle"),
        lambda: mfload.plan(path, "paddle"),
        lambda: list(mfload.stream(path, "paddle")),
        lambda: mfload.load(path, "paddle", options=mfload.Options(allocator="framework")),
    ]
    for call in calls:
        with pytest.raises(mfload.errors.UsageError, match="static mode"):
            call()
    paddle.disable_static()
    layer, held = paddle.nn.Linear(4, 3), mfload.open(path, "paddle")
    tensor = held.get_tensor("w")
    paddle.enable_static()
    for call in (lambda: held.get_tensor("w"), lambda: mfload.load_into(layer, path)):
        with pytest.raises(mfload.errors.UsageError, match="static mode"):
            call()
    with pytest.raises(mfload.errors.UnsupportedArrayError, match="static mode"):
        mfload.save({"w": tensor}, tmp_path / "x.safetensors")


class TestPaddle(WritableConformance):
    framework = "paddle"
    narrow = ()
    lists_lead = False
    bfloat16 = paddle.bfloat16
    own: ClassVar = {
        key: name
        for key, name in COMMON.items()
        # U16 would be taken for bfloat16.
        if key not in ("U16", "U32", "U64") or key in UNSIGNED
    } | {"F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2"}
    parts_alias = False

    def type_name(self, array: Any) -> str:
        assert isinstance(array, paddle.Tensor)
        return str(array.dtype).removeprefix("paddle.")

    def raw(self, array: Any) -> bytes:
        return array.numpy().tobytes()

    def address(self, array: Any) -> int:
        return array.data_ptr()

    def overwrite(self, array: Any) -> None:
        array.fill_(1)

    @pytest.mark.parametrize("engine", ENGINES)
    @pytest.mark.parametrize("allocator", ["mfload", "framework"])
    def test_u16_is_never_taken_for_bfloat16(
        self, tmp_path: Any, engine: str, allocator: str
    ) -> None:
        numbers = np.array([[0x3F80, 0x4000], [1, 65535]], np.uint16)
        row = material.Stored("n", "U16", (2, 2), numbers.tobytes())
        path = save(tmp_path / "n.safetensors", [row], 8)
        tensor = mfload.load(
            path, framework="paddle", options=mfload.Options(engine=engine, allocator=allocator)
        )["n"]
        assert tensor.dtype == paddle.uint8
        assert mfload.unpack(tensor, "U16", (2, 2)).tolist() == numbers.tolist()
        with mfload.open(path, framework="paddle", options=mfload.Options(engine=engine)) as opened:
            column = opened.get_slice("n")[:, 1]
        assert column.dtype == paddle.uint8
        assert mfload.unpack(column, "uint16", (2,)).tolist() == [0x4000, 65535]

    @pytest.mark.parametrize("engine", ENGINES)
    def test_tensors_of_no_size_keep_nothing(self, tmp_path: Any, engine: str) -> None:
        rows = [
            material.stored("a", "F32", (0, 3)),
            material.stored("b", "U8", (6,)),
            material.stored("c", "U8", (0,)),
            material.stored("d", "BF16", (64,)),
        ]
        path = save(tmp_path / "empty.safetensors", rows)
        for order in ("abcd", "dcba", "cabd"):
            loaded = mfload.load(path, framework="paddle", options=mfload.Options(engine=engine))
            self.assert_loaded(loaded, rows)
            for name in order:
                del loaded[name]
            gc.collect()
            assert mfload.live_bytes() == 0

    def test_training_changes_no_file(self, tmp_path: Any) -> None:
        row = material.Stored("w", "F32", (8, 8), np.ones(64, np.float32).tobytes())
        path = save(tmp_path / "w.safetensors", [row])
        before = path.read_bytes()
        for engine in ENGINES:
            weight = mfload.load(path, framework="paddle", options=mfload.Options(engine=engine))[
                "w"
            ]
            weight.stop_gradient = False
            (weight * 3).sum().backward()
            with paddle.no_grad():
                weight.subtract_(weight.grad)
            assert float(weight.sum()) == -128.0
            assert path.read_bytes() == before

    def test_computing(self, tmp_path: Any) -> None:
        numbers = np.random.default_rng(5).normal(size=(70, 33)).astype(np.float32)
        rows = [
            material.stored("odd", "U8", (3,)),
            material.Stored("w", "F32", numbers.shape, numbers.tobytes()),
        ]
        path = save(tmp_path / "w.safetensors", rows, 8)
        for allocator in ("mfload", "framework"):
            tensor = mfload.load(
                path, framework="paddle", options=mfload.Options(allocator=allocator)
            )["w"]
            product = paddle.matmul(tensor, tensor, transpose_y=True).numpy()
            np.testing.assert_allclose(product, numbers @ numbers.T, 1e-3, 1e-4)

    def test_devices(self, aligned: Any) -> None:
        path, rows = aligned
        loaded = mfload.load(path, framework="paddlepaddle", device=paddle.CPUPlace())
        self.assert_loaded(loaded, rows)


def test_the_public_way_gives_the_same(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        material.stored("w", "F32", (3, 5), 1),
        material.stored("b", "BF16", (7,), 2),
        material.stored("e", "F8_E4M3", (4,), 3),
        material.stored("u", "U64", (2,), 4),
    ]
    path = save(tmp_path / "w.safetensors", rows)
    monkeypatch.setattr("mfload.frameworks.private_api.paddle_constructor", lambda: None)
    loaded = mfload.load(path, framework="paddle")
    assert mfload.live_bytes() == 0  # Copies: nothing of ours is held.
    TestPaddle().assert_loaded(loaded, rows)


class TestPaddleLanding(DeviceMemoryConformance):
    look = TestPaddle()
    landings = ("framework",)
    allocator = "framework"

    def adapter(self, land: Device) -> Adapter:
        return paddle_adapter.PaddleAdapter(paddle.CPUPlace(), land)

    def test_what_a_gpu_is_asked(self, monkeypatch: pytest.MonkeyPatch) -> None:
        place, told = SimpleNamespace(get_device_id=lambda: 3), []
        monkeypatch.setattr(paddle, "set_device", told.append)
        monkeypatch.setattr(paddle.device, "synchronize", told.append)
        monkeypatch.setattr(paddle.device.cuda, "memory_reserved", lambda device: 300)
        monkeypatch.setattr(paddle.device.cuda, "memory_allocated", lambda device: 100)
        adapter = paddle_adapter.PaddleAdapter(place, FakeDevice(total=1000))
        pool = adapter.pool(0)
        assert pool is not None
        assert pool.free == 1200
        adapter.lend([request(material.stored("w", "U8", (3,)))])
        assert told == ["gpu:3", "cpu", place]

    def test_new_tensors_lie_where_they_did(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def empty(*_: Any, **__: Any) -> Any:
            raise ValueError("no shape")

        told: list[str] = []
        monkeypatch.setattr(paddle, "empty", empty)
        monkeypatch.setattr(paddle, "get_device", lambda: "gpu:1")
        monkeypatch.setattr(paddle, "set_device", told.append)
        adapter = paddle_adapter.PaddleAdapter(paddle.CPUPlace())
        with pytest.raises(ValueError, match="no shape"):
            adapter.lend([request(material.stored("w", "U8", (3,)))])
        assert told == ["cpu", "gpu:1"]


class TestPaddleGives(ExportConformance):
    framework = "paddle"
    gives = tuple(key for key in BITS if key in TestPaddle.own)
    reference_lacks = UNSIGNED
    refused: ClassVar = {
        "complex128": "no dtype",
        "coo": "to_dense",
        "csr": "to_dense",
        "dist": "replicated",
        "lazy": "not initialised",
        "static": "dynamic mode",
        "layer": "state_dict",
        "place": "not a tensor",
    }

    def made(self, array: np.ndarray) -> Any:
        name = array.dtype.name
        taken = {
            "bfloat16": "uint16",
            "float8_e4m3fn": "uint8",
            "float8_e5m2": "uint8",
            "uint32": "int32",
            "uint64": "int64",
        }.get(name)
        if taken is None:
            return paddle.to_tensor(array)
        tensor = paddle.to_tensor(array.view(taken))
        return tensor if taken == "uint16" else tensor.view(getattr(paddle, name))

    def address(self, array: Any) -> int:
        return array.data_ptr()

    def turn(self, array: Any, axes: tuple[int, ...]) -> Any:
        return array.transpose(axes)

    def reference_save(self, arrays: dict[str, Any]) -> bytes:
        return safetensors.paddle.save(arrays)

    def refusal(self, word: str) -> Any:
        ones = paddle.ones([2, 2])
        if word == "lazy":
            with paddle.LazyGuard():
                return paddle.nn.Linear(2, 2).weight
        if word == "static":
            paddle.enable_static()
            try:
                return paddle.static.data("x", [2])
            finally:
                paddle.disable_static()
        if word == "dist":
            mesh = paddle.distributed.ProcessMesh([0], dim_names=["x"])
            whole = [paddle.distributed.Replicate()]
            return paddle.distributed.shard_tensor(ones, mesh, whole)
        made = {
            "complex128": lambda: ones.astype("complex128"),
            "coo": lambda: ones.to_sparse_coo(2),
            "csr": ones.to_sparse_csr,
            "layer": lambda: paddle.nn.Linear(2, 2),
            "place": paddle.CPUPlace,
        }
        return made[word]()

    @given(data=st.data())
    def test_steps_and_repeats(self, data: st.DataObject) -> None:
        shape = data.draw(arrays.array_shapes(min_dims=1, max_dims=3, max_side=5))
        array = self.numbers(data.draw(st.sampled_from(["I32", "F32", "F64"])), shape)[1]
        index = tuple(
            data.draw(st.slices(n).filter(lambda s, n=n: len(range(n)[s]) > 0)) for n in shape
        )
        part = self.made(array)[index]
        assert read(give(part)).raw == np.ascontiguousarray(array[index]).tobytes()
        many = paddle.as_strided(self.made(array), [3, 2], [0, 0])
        assert read(give(many)).raw == array.reshape(-1)[:1].tobytes() * 6

    def test_views_of_one_memory(self) -> None:
        tensor = self.made(np.arange(24, dtype=np.int32).reshape(4, 6))
        part = tensor[1:3, ::2]
        given = give(part)
        start = tensor.data_ptr()
        assert given.span == (start + 4 * 6, start + 4 * (6 * 2 + 4 + 1))
        assert read(given).raw == np.array([6, 8, 10, 12, 14, 16], np.int32).tobytes()

    def test_parameters(self) -> None:
        weight = paddle.nn.Linear(3, 2).weight
        assert not weight.stop_gradient
        assert read(give(weight)).raw == weight.numpy().tobytes()

    @pytest.mark.gpu
    def test_tensors_on_a_gpu(self) -> None:
        if no_gpu() or not paddle.is_compiled_with_cuda():
            pytest.skip("needs a GPU, and Paddle built for it")
        for dtype in self.gives:
            row, array = self.numbers(dtype, (5, 3))
            given = give(self.made(array).cuda())
            assert (read(given), given.span) == (row, None)


def test_5_rows_over_4_ranks(tmp_path: Path) -> None:
    whole = np.arange(15, dtype=np.float32).reshape(5, 3)
    raw = whole.tobytes()
    path = save_raw(tmp_path / "m.safetensors", [("w", "F32", (5, 3), raw)])
    for dim in (0, -2, 1):
        parts = [
            mfload.load(path, "paddle", shardings=[("w", dim)], shard=(rank, 4))["w"]
            for rank in range(4)
        ]
        sizes = [2, 2, 1, 0] if dim != 1 else [1, 1, 1, 0]
        assert [part.shape[dim] for part in parts] == sizes
        found = np.concatenate([part.numpy() for part in parts], dim)
        assert np.array_equal(found, whole)
    with pytest.raises(ShardingError, match="no dim 2"):
        mfload.load(path, "paddle", shardings=[("w", 2)], shard=(0, 4))
