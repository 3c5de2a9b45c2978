"""TensorFlow against the suite that all adapters share, and what is its own."""

from __future__ import annotations

import ctypes
import functools
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import ml_dtypes
import numpy as np
import pytest
import safetensors.tensorflow
import samples
import tensorflow as tf
from conformance import material
from conformance.device_memory import DeviceMemoryConformance, request
from conformance.export import ExportConformance, give, read
from conformance.material import BITS, COMMON, FLOATS8, NARROW, Stored, save
from conformance.suite import ROOT, Conformance, no_gpu
from devices.fake import FakeDevice
from samples import save_raw

import mfload
from mfload import errors
from mfload.cuda.device import Device
from mfload.errors import ShardingError
from mfload.frameworks import tensorflow_adapter
from mfload.frameworks.base import Adapter
from mfload.frameworks.tensorflow_adapter import TensorflowAdapter

# A second CPU, to see that tensors go where they are sent.
_CPU = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(_CPU, [tf.config.LogicalDeviceConfiguration()] * 2)

_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype = ctypes.c_void_p
_pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]


class TestTensorflow(Conformance):
    framework = "tensorflow"
    bfloat16 = tf.bfloat16
    own = COMMON
    copied: ClassVar = {key: name for key, name in FLOATS8.items() if key != "F8_E8M0"}
    narrow = frozenset(filter(functools.partial(hasattr, tf.dtypes.experimental), NARROW))
    parts_alias = False
    no_device = ("cuda:0", "gpu:0", "cpu:99", "nonsense", "no:such:device", "")

    def type_name(self, array: Any) -> str:
        assert tf.is_tensor(array)
        return array.dtype.name

    def raw(self, array: Any) -> bytes:
        return array.numpy().tobytes()

    def address(self, array: Any) -> int:
        if array.dtype.name in self.copied.values():
            # TensorFlow exports no 8-bit floats; NumPy sees them without a copy this way.
            return array._numpy_internal().__array_interface__["data"][0]
        exported = tf.experimental.dlpack.to_dlpack(array)
        return ctypes.c_uint64.from_address(_pointer(exported, b"dltensor")).value

    def test_computing(self, tmp_path: Any) -> None:
        numbers = np.random.default_rng(5).normal(size=(70, 33)).astype(np.float32)
        short = numbers.astype(ml_dtypes.bfloat16)
        rows = [
            material.stored("odd", "U8", (3,)),
            material.Stored("w", "F32", numbers.shape, numbers.tobytes()),
            material.Stored("h", "BF16", short.shape, short.tobytes()),
        ]
        path = save(tmp_path / "w.safetensors", rows, 8)
        for allocator in ("mfload", "framework"):
            loaded = mfload.load(path, framework="tf", options=mfload.Options(allocator=allocator))
            np.testing.assert_allclose(
                tf.matmul(loaded["w"], loaded["w"], transpose_b=True), numbers @ numbers.T, 1e-3
            )
            product = tf.matmul(loaded["h"], loaded["h"], transpose_b=True)
            wanted = short.astype(np.float32) @ short.astype(np.float32).T
            np.testing.assert_allclose(tf.cast(product, tf.float32), wanted, 0.1, 0.5)
            assert np.isclose(tf.reduce_sum(loaded["w"]), numbers.sum(), atol=1e-2)
        with mfload.open(path, framework="tensorflow") as opened:
            for name, whole in (("w", numbers), ("h", short.astype(np.float32))):
                for index in ((slice(1, 60, 7),), (slice(None), slice(3, 30)), (5,)):
                    part = tf.cast(opened.get_slice(name)[index], tf.float32)
                    np.testing.assert_allclose(tf.reduce_max(part), whole[index].max())
                    np.testing.assert_allclose(
                        tf.reduce_sum(part * part), (whole[index] ** 2).sum(), 1e-3
                    )

    def test_computing_in_a_graph(self, tmp_path: Any) -> None:
        row = material.Stored("w", "F32", (3, 5), np.arange(15, dtype=np.float32).tobytes())
        path = save(tmp_path / "w.safetensors", [row], 13)
        loaded = mfload.load(path, framework="tf")
        double = tf.function(lambda x: x + x)
        assert double(loaded["w"]).numpy().tolist() == (2 * np.arange(15).reshape(3, 5)).tolist()
        variable = tf.Variable(loaded["w"])
        variable.assign_add(tf.ones((3, 5)))
        assert self.found(loaded["w"]) == self.expected(row)

    def test_the_second_cpu(self, aligned: Any) -> None:
        path, rows = aligned
        for allocator in ("mfload", "framework"):
            for device in ("cpu:1", "/device:CPU:1"):
                names = [row.name for row in rows if row.dtype in ("F32", "I32", "BF16", "F4")]
                loaded = mfload.load(
                    path,
                    framework="tf",
                    device=device,
                    names=names,
                    options=mfload.Options(allocator=allocator),
                )
                assert {x.device.rsplit("/")[-1] for x in loaded.values()} == {"device:CPU:1"}
                self.assert_loaded(loaded, [row for row in rows if row.name in names])

    @pytest.mark.parametrize("allocator", ["auto", "framework"])
    def test_within_a_function_numbers_are_loaded(self, allocator: Any, tmp_path: Path) -> None:
        arrays = {"w": np.arange(6, dtype=np.float32), "f": np.ones(3, ml_dtypes.float8_e5m2)}
        path = samples.save(tmp_path / "m.safetensors", arrays)
        options = mfload.Options(allocator=allocator)
        seen: list[Any] = []

        def function() -> Any:
            seen.append(mfload.load(path, "tensorflow", options=options))
            seen.append(dict(mfload.stream(path, "tensorflow", options=options)))
            return seen[0]["w"] * 2

        made = tf.function(function, autograph=False)()
        assert made.numpy().tolist() == (2 * arrays["w"]).tolist()
        for loaded in seen:
            found = {name: x.numpy().tobytes() for name, x in loaded.items()}
            assert found == {name: array.tobytes() for name, array in arrays.items()}

    def test_a_graph_is_refused(self, tmp_path: Path) -> None:
        path = samples.save(tmp_path / "m.safetensors", {"w": np.ones(3, np.float32)})
        held, lent = mfload.open(path, "tensorflow"), mfload.Options(allocator="framework")
        held.get_tensor("w")
        calls: list[Any] = [
            lambda: mfload.load(path, "tensorflow"),
            lambda: mfload.load(path, "tensorflow", options=lent),
            lambda: list(mfload.stream(path, "tensorflow")),
            lambda: mfload.plan(path, "tensorflow"),
            lambda: held.get_tensor("w"),
        ]
        for call in calls:
            with tf.Graph().as_default(), pytest.raises(errors.UsageError, match="a graph"):
                call()

    def test_tensorflows_own_names_of_a_device(self, aligned: Any) -> None:
        own = tf.config.list_logical_devices("CPU")[0]
        for device in ("/CPU:0", "/cpu:0", "/device:CPU:0", "cpu", own, own.name):
            report = mfload.Report()
            loaded = mfload.load(
                aligned[0], framework="tf", device=device, names=["F32"], report=report
            )
            assert loaded["F32"].device.endswith("CPU:0")
            assert report.aliased_share == 1

    def test_whole_names_are_matched_whole(self, aligned: Any) -> None:
        for device in (
            "/job:localhost/replica:0/task:0/device:CPU:1",
            "/job:localhost/task:0/cpu:1",
            "/job:localhost/device:CPU:1",
            "/task:0/device:CPU:1",
        ):
            tensor = mfload.load(aligned[0], framework="tf", device=device, names=["F32"])["F32"]
            assert tensor.device == "/job:localhost/replica:0/task:0/device:CPU:1"
        for device in (
            "/job:worker/task:1/device:CPU:0",
            "/job:worker/replica:0/task:0/device:CPU:0",
            "/job:localhost/replica:0/task:1/device:CPU:0",
            "/job:localhost/replica:1/task:0/device:CPU:0",
            "/nonsense:3/device:CPU:0",
            "/job:worker/task:x/device:CPU:0",
        ):
            with pytest.raises(errors.DeviceError) as caught:
                mfload.load(aligned[0], framework="tf", device=device, names=["F32"])
            assert device in str(caught.value)

    def test_a_device_of_another_process(self, aligned: Any) -> None:
        done = subprocess.run(
            [sys.executable, "-c", REMOTE, str(aligned[0])],
            capture_output=True,
            text=True,
            check=False,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
        )
        assert (done.returncode, done.stdout.split()[-1:]) == (0, ["done"]), done.stderr[-3000:]

    def test_the_default_is_that_of_the_scope(self, aligned: Any) -> None:
        with tf.device("CPU:1"):
            tensor = mfload.load(aligned[0], framework="tf", names=["F32"])["F32"]
        assert tensor.device.endswith("CPU:1")


def test_lent_tensors_are_not_shared(tmp_path: Any) -> None:
    rows = [material.stored(f"w{n}", "F32", (3,), n) for n in range(4)]
    rows += [material.stored(f"s{n}", "F32", (), n) for n in range(4)]
    path = save(tmp_path / "w.safetensors", rows)
    loaded = mfload.load(path, framework="tf", options=mfload.Options(allocator="framework"))
    TestTensorflow().assert_loaded(loaded, rows)
    assert len({TestTensorflow().address(x) for x in loaded.values()}) == 8


# A server of a cluster, which is another process to TensorFlow also where it is in this one.
REMOTE = """
import os, socket, sys
import numpy as np, tensorflow as tf
import mfload
from mfload import errors
from mfload.saving.export import TensorToSave, export

with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    address = f"127.0.0.1:{probe.getsockname()[1]}"
server = tf.distribute.Server({"worker": [address]}, job_name="worker", task_index=0)
tf.config.experimental_connect_to_host(address, job_name="worker")
remote = "/job:worker/replica:0/task:0/device:CPU:0"
here = mfload.load(sys.argv[1], framework="tf")
for allocator in ("mfload", "framework"):
    how = mfload.Options(allocator=allocator)
    for device in (remote, "/job:worker/task:0/cpu:0"):
        there = mfload.load(sys.argv[1], framework="tf", device=device, options=how)
        assert {x.device for x in there.values()} == {remote}
    with tf.device(remote):
        default = mfload.load(sys.argv[1], framework="tf", options=how)
        back = mfload.load(sys.argv[1], framework="tf", options=how, device="cpu")
    assert {x.device for x in default.values()} == {remote}
    assert {x.device for x in back.values()} == {"/job:localhost/replica:0/task:0/device:CPU:0"}
given = export(there)
assert {one.span for one in given} == {None}
for one in given:
    assert one.fetch().tobytes() == np.asarray(here[one.name]).tobytes(), one.name
try:
    mfload.load(sys.argv[1], framework="tf", device="/job:worker/task:1/device:CPU:0")
except errors.DeviceError as error:
    assert remote in str(error)
    print("done", flush=True)
os._exit(0)  # The server has no end of its own.
"""


class TestTensorflowLanding(DeviceMemoryConformance):
    look = TestTensorflow()
    stays = frozenset(TestTensorflow.copied)
    allocator = "framework"

    def adapter(self, land: Device) -> Adapter:
        local = tensorflow_adapter._local()
        return TensorflowAdapter(f"{local}/device:CPU:0", local, land)

    def test_dtypes_that_are_made_elsewhere_are_not_lent(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        made = tf.raw_ops.Empty

        def empty(shape: Any, dtype: Any, init: bool) -> Any:
            with tf.device("CPU:1" if dtype in (tf.bool, tf.uint16) else None):
                return made(shape=shape, dtype=dtype, init=init)

        monkeypatch.setattr(tf.raw_ops, "Empty", empty)
        assert self.adapter(FakeDevice())._not_lent == {"BOOL", "U16"}

    def test_what_tensorflow_still_runs_is_waited_for(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # The second CPU is a device other than the host here.
        local, asked = tensorflow_adapter._local(), []
        monkeypatch.setattr(tensorflow_adapter, "_wait", asked.append)
        adapter = TensorflowAdapter(f"{local}/device:CPU:1", local, FakeDevice())
        rows = [material.stored("w", "BF16", (3,)), material.stored("b", "F32", (2, 0))]
        given = adapter.lend([request(row) for row in rows])
        assert {each.array.backing_device for each in given} == {f"{local}/device:CPU:1"}
        assert asked == [f"{local}/device:CPU:1"]

    def test_a_device_that_is_full(self, monkeypatch: pytest.MonkeyPatch) -> None:
        adapter = self.adapter(FakeDevice())

        def empty(**_: Any) -> Any:
            raise tf.errors.ResourceExhaustedError(None, None, "OOM when allocating")

        monkeypatch.setattr(tf.raw_ops, "Empty", empty)
        with pytest.raises(errors.MemoryLimitError, match="no room"):
            adapter.lend([request(material.stored("w", "U8", (3,)))])

    def test_which_gpu_of_all_it_is(self, monkeypatch: pytest.MonkeyPatch) -> None:
        # Three are seen out of four, and the last of them is two.
        seen = [SimpleNamespace(name=f"/physical_device:GPU:{n}") for n in (3, 0, 2)]
        parts = {seen[2].name: [object()] * 2}
        monkeypatch.setattr(tf.config, "get_visible_devices", lambda kind: seen)
        monkeypatch.setattr(
            tf.config, "get_logical_device_configuration", lambda device: parts.get(device.name)
        )
        assert tensorflow_adapter._ordinals() == [3, 0, 2, 2]


class TestTensorflowGives(ExportConformance):
    framework = "tensorflow"
    gives = tuple(
        key
        for key in BITS
        if key in TestTensorflow.own
        or hasattr(tf.dtypes.experimental, FLOATS8.get(key, "float4_e2m1fn" * (key == "F4")))
    )
    unpacked = ("F4",) if "F4" in gives else ()
    loaded_as_bytes = unpacked
    reference_lacks_scalars = True
    turned = False
    frozen = True
    refused: ClassVar = {
        "complex128": "no dtype",
        "qint8": "no dtype",
        "string": "no dtype",
        "variant": "no dtype",
        "resource": "no dtype",
        "ragged": "to_tensor",
        "sparse": "to_dense",
        "slices": "convert_to_tensor",
        "symbolic": "outside tf.function",
        "uninitialised": "not initialised",
        "dtensor": "unpack",
        "model": "variables",
        "dtype": "not a tensor",
    }

    def made(self, array: np.ndarray) -> Any:
        return tf.identity(tf.convert_to_tensor(array))

    def address(self, array: Any) -> int:
        return array._numpy_internal().__array_interface__["data"][0]

    def turn(self, array: Any, axes: tuple[int, ...]) -> Any:
        if array.dtype.name.startswith("float8"):  # It has no kernels for some.
            return self.made(np.asarray(array.numpy()).transpose(axes))
        return tf.transpose(array, axes)

    def reference_save(self, arrays: dict[str, Any]) -> bytes:
        return safetensors.tensorflow.save(arrays)

    def refusal(self, word: str) -> Any:
        ones = tf.ones((2, 2))
        kept: list[Any] = []
        if word == "symbolic":
            tf.function(lambda x: kept.append(x) or x)(ones)
            return kept[0]
        if word == "dtensor":
            mesh = tf.experimental.dtensor.create_mesh([("x", 2)], devices=["CPU:0", "CPU:1"])
            layout = tf.experimental.dtensor.Layout.replicated(mesh, 2)
            return tf.experimental.dtensor.copy_to_mesh(ones, layout)
        made = {
            "complex128": lambda: tf.cast(ones, tf.complex128),
            "qint8": lambda: tf.bitcast(tf.zeros(2, tf.int8), tf.qint8),
            "string": lambda: tf.constant("x"),
            "variant": lambda: tf.raw_ops.TensorListReserve(
                element_shape=[2], num_elements=1, element_dtype=tf.float32
            ),
            "resource": lambda: tf.Variable(ones).handle,
            "ragged": lambda: tf.ragged.constant([[1], [2, 3]]),
            "sparse": lambda: tf.sparse.from_dense(ones),
            "slices": lambda: tf.IndexedSlices(ones, tf.constant([0, 1])),
            "uninitialised": lambda: uninitialised(),
            "model": lambda: tf.Module(),
            "dtype": lambda: tf.float32,
        }
        return made[word]()

    def test_variables(self) -> None:
        variable = tf.Variable(tf.ones((3, 2)))
        given = give(variable)
        assert given.fetch().ctypes.data == self.address(variable.value())
        # What was handed over is what is written, whatever becomes of the variable.
        variable.assign_add(tf.ones((3, 2)))
        variable.scatter_nd_update([[0, 0]], [7.0])
        assert read(given).raw == np.ones((3, 2), np.float32).tobytes()
        assert read(give(variable)).raw == variable.numpy().tobytes()
        assert not give(variable).frozen
        for dtype in (tf.bfloat16, tf.int64, tf.bool):
            other = tf.Variable(tf.cast(variable, dtype))
            assert read(give(other)).raw == other.numpy().tobytes()

    def test_variables_of_a_strategy(self) -> None:
        strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
        with strategy.scope():
            mirrored = tf.Variable([1.0, 2.0])
        assert read(give(mirrored)).raw == np.array([1, 2], np.float32).tobytes()

    def test_keras_variables(self) -> None:
        keras = pytest.importorskip("keras")
        variable = keras.Variable(np.arange(6, dtype=np.float32).reshape(2, 3))
        given = give(variable)
        assert read(given) == Stored("w", "F32", (2, 3), variable.numpy().tobytes())

    def test_inputs_of_a_keras_model(self) -> None:
        keras = pytest.importorskip("keras")
        with pytest.raises(errors.UnsupportedArrayError, match="symbolic") as caught:
            give(keras.Input((2,)), "x")
        assert caught.value.tensor == "x"

    def test_the_second_cpu(self) -> None:
        with tf.device("CPU:1"):
            tensor = tf.identity(tf.constant([1.0, 2.0]))
        given = give(tensor)
        assert given.span is not None
        assert read(given).raw == np.array([1, 2], np.float32).tobytes()

    @pytest.mark.gpu
    def test_tensors_on_a_gpu(self) -> None:
        if reason := no_gpu():
            pytest.skip(reason)
        row, array = self.numbers("F32", (5, 3))
        with tf.device("GPU:0"):
            given = give(tf.identity(tf.constant(array)))
        assert (read(given), given.span) == (row, None)


def uninitialised() -> Any:
    from tensorflow.python.ops import resource_variable_ops

    return resource_variable_ops.UninitializedVariable(shape=[2], dtype=tf.float32)


def test_5_rows_over_4_ranks(tmp_path: Path) -> None:
    whole = np.arange(15, dtype=np.float32).reshape(5, 3)
    raw = whole.tobytes()
    path = save_raw(tmp_path / "m.safetensors", [("w", "F32", (5, 3), raw)])
    for dim in (0, -2, 1):
        parts = [
            mfload.load(path, "tensorflow", shardings=[("w", dim)], shard=(rank, 4))["w"]
            for rank in range(4)
        ]
        sizes = [2, 2, 1, 0] if dim != 1 else [1, 1, 1, 0]
        assert [part.shape[dim] for part in parts] == sizes
        found = np.concatenate([part.numpy() for part in parts], dim)
        assert np.array_equal(found, whole)
    with pytest.raises(ShardingError, match="no dim 2"):
        mfload.load(path, "tensorflow", shardings=[("w", 2)], shard=(0, 4))
