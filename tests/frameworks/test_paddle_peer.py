"""Tensors and layers of Paddle as seeds, and filled from them."""

from __future__ import annotations

import warnings
from typing import Any, ClassVar

import numpy as np
import pytest
from conformance.peers import PeerConformance, stored

import mfload

with warnings.catch_warnings():
    # Paddle looks for a compiler cache when it is imported, and for setuptools' old parts.
    warnings.simplefilter("ignore")
    import paddle


class Net(paddle.nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.embed = paddle.nn.Embedding(90, 24)
        self.norm = paddle.nn.BatchNorm1D(24)
        self.wide = paddle.nn.Linear(24, 48).to(dtype="bfloat16")
        self.head = paddle.nn.Linear(24, 90, bias_attr=False)
        self.head.weight = self.embed.weight


class TestPaddlePeers(PeerConformance):
    framework = "paddle"
    copied: ClassVar = ()

    def network(self, seed: int) -> Any:
        paddle.seed(seed)
        return Net()

    def state(self, module: Any) -> dict[str, Any]:
        return dict(module.state_dict())

    def overwrite(self, array: Any) -> None:
        with paddle.no_grad():
            array.fill_(3)


def test_views_with_strides() -> None:
    base = paddle.arange(30 * 40, dtype="float32").reshape([30, 40])
    arrays = {"turned": base.T, "columns": base[:, 3:9], "rows": base[3:9]}
    with mfload.publish(arrays, model="m") as seed:
        found = mfload.load(seed.url, framework="paddle")
    for name, each in arrays.items():
        np.testing.assert_array_equal(found[name].numpy(), each.numpy())


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "float8_e4m3fn", "int64", "bool"])
def test_tensors_that_lose_their_memory(kind: str) -> None:
    """What Paddle takes from its own tensors, the seed still holds."""
    base = paddle.arange(1 << 16, dtype="float32").cast(kind)
    arrays = {"whole": base, "part": base[1 << 15 :]}
    expected = stored({name: each.clone() for name, each in arrays.items()})
    with mfload.publish(arrays, model="m") as seed:
        assert seed.copied_bytes == 0
        for each in arrays.values():
            each._clear_data()
        others = [paddle.zeros([1 << 16], dtype="int64") for _ in range(4)]
        found = mfload.load(seed.url, framework="paddle")
        del others
    assert stored(found) == expected


def test_a_layer_that_gets_another_dtype() -> None:
    network = TestPaddlePeers().network(0)
    expected = stored({name: each.clone() for name, each in network.state_dict().items()})
    with mfload.publish(network, model="m") as seed:
        network.to(dtype="float16")
        found = mfload.load(seed.url, framework="paddle")
    assert stored(found) == expected
