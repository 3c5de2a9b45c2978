"""TensorFlow against the suite that all adapters share, and what is its own."""

from __future__ import annotations

import ctypes
from typing import Any, ClassVar

import ml_dtypes
import numpy as np
import tensorflow as tf
from conformance import material
from conformance.material import COMMON, FLOATS8, save
from conformance.suite import Conformance

import mfload

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
        for landing in ("mfload", "framework"):
            loaded = mfload.load(path, framework="tf", landing=landing)
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
        for landing in ("mfload", "framework"):
            for device in ("cpu:1", "/device:CPU:1"):
                names = [row.name for row in rows if row.dtype in ("F32", "I32", "BF16", "F4")]
                loaded = mfload.load(
                    path, framework="tf", device=device, landing=landing, names=names
                )
                assert {x.device.rsplit("/")[-1] for x in loaded.values()} == {"device:CPU:1"}
                self.assert_loaded(loaded, [row for row in rows if row.name in names])

    def test_tensorflows_own_names_of_a_device(self, aligned: Any) -> None:
        own = tf.config.list_logical_devices("CPU")[0]
        for device in ("/CPU:0", "/cpu:0", "/device:CPU:0", "cpu", own, own.name):
            report = mfload.Report()
            loaded = mfload.load(
                aligned[0], framework="tf", device=device, names=["F32"], report=report
            )
            assert loaded["F32"].device.endswith("CPU:0")
            assert report.aliased_share == 1

    def test_the_default_is_that_of_the_scope(self, aligned: Any) -> None:
        with tf.device("CPU:1"):
            tensor = mfload.load(aligned[0], framework="tf", names=["F32"])["F32"]
        assert tensor.device.endswith("CPU:1")


def test_lent_tensors_are_not_shared(tmp_path: Any) -> None:
    rows = [material.stored(f"w{n}", "F32", (3,), n) for n in range(4)]
    rows += [material.stored(f"s{n}", "F32", (), n) for n in range(4)]
    path = save(tmp_path / "w.safetensors", rows)
    loaded = mfload.load(path, framework="tf", landing="framework")
    TestTensorflow().assert_loaded(loaded, rows)
    assert len({TestTensorflow().address(x) for x in loaded.values()}) == 8
