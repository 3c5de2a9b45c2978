"""TensorFlow on weights that are read on demand; it copies 8-bit floats."""

from __future__ import annotations

import ctypes
from typing import Any

import tensorflow as tf
from conformance.ondemand import Ondemand

_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype = ctypes.c_void_p
_pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]


class TestTensorflow(Ondemand):
    framework = "tensorflow"
    same_as_loaded = False  # F4 takes a byte an element when it is loaded; here it stays packed.

    def raw(self, array: Any) -> bytes:
        return array.numpy().tobytes()

    def address(self, array: Any) -> int:
        exported = tf.experimental.dlpack.to_dlpack(array)
        return ctypes.c_uint64.from_address(_pointer(exported, b"dltensor")).value

    def copied(self, array: Any) -> bool:
        return array.dtype.name.startswith("float8")

    def capsule(self, array: Any) -> Any:
        return tf.experimental.dlpack.to_dlpack(array)

    def view(self, array: Any) -> Any:
        return tf.reshape(array, [-1])

    def product(self, x: Any, matrix: Any) -> Any:
        return tf.matmul(x, matrix, transpose_b=True)

    def expert(self, x: Any, arrays: Any) -> Any:
        hidden = tf.nn.relu(self.product(x, arrays["up_proj"]))
        return self.product(hidden, arrays["down_proj"])
