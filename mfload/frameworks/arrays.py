"""Types of the frameworks' arrays, for type checkers alone: nothing is imported when mfload runs.

Of a framework that is not installed the type is Any to mypy, Unknown to pyright, without an error.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    import cupy
    import jax
    import paddle
    import tensorflow
    import torch
    from numpy.typing import NDArray

    NumpyArray: TypeAlias = NDArray[Any]
    JaxArray: TypeAlias = jax.Array
    ShapeDtypeStruct: TypeAlias = jax.ShapeDtypeStruct
    TorchTensor: TypeAlias = torch.Tensor
    TensorflowTensor: TypeAlias = tensorflow.Tensor
    PaddleTensor: TypeAlias = paddle.Tensor
    CupyArray: TypeAlias = cupy.ndarray
