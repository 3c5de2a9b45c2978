"""Models of Keras and tensors of TensorFlow as seeds; runs once for each backend of Keras."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any, ClassVar

import pytest
from conformance.peers import PeerConformance, stored

os.environ.setdefault("KERAS_BACKEND", "tensorflow")

import keras
from keras import layers

import mfload
from mfload import errors

BACKEND = keras.backend.backend()
# Keras calls NumPy as it was before 2.0.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation")


@pytest.mark.skipif(BACKEND != "tensorflow", reason="started by the suite of TensorFlow")
@pytest.mark.parametrize("backend", ["jax", "torch"])
def test_other_backends(backend: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "--no-header", __file__]
    done = subprocess.run(
        command, env=os.environ | {"KERAS_BACKEND": backend}, capture_output=True, timeout=300
    )
    assert done.returncode == 0, done.stdout.decode()[-5000:]


class TestKerasPeers(PeerConformance):
    framework = BACKEND
    # JAX has a byte for each of them.
    copied: ClassVar = ("F4",) if BACKEND == "jax" else ()
    tied = False

    def network(self, seed: int) -> Any:
        keras.utils.set_random_seed(seed)
        shared = layers.Dense(96, name="shared")
        inputs = keras.Input((96,))
        x = layers.BatchNormalization(name="norm")(shared(shared(inputs)))
        x = layers.Dropout(0.1, name="drop")(x)  # Its seed is no weight.
        outputs = layers.Dense(5, name="head", use_bias=False, dtype="bfloat16")(x)
        return keras.Model(inputs, outputs)

    def state(self, module: Any) -> dict[str, Any]:
        return {each.path: each.value for each in module.weights}

    def overwrite(self, array: Any) -> None:
        pytest.skip("arrays of Keras are replaced, not written to")


def test_weights_of_a_training_step() -> None:
    """A step gives variables new arrays, and the seed has the old ones; PyTorch's are changed."""
    network = TestKerasPeers().network(0)
    before = stored(TestKerasPeers().state(network))
    with mfload.publish(network, model="m") as seed:
        for each in network.trainable_variables:
            each.assign(each.value + 1)
        if BACKEND == "torch":
            with pytest.raises(errors.ChecksumError):
                mfload.load(seed.url, framework=BACKEND)
        else:
            assert stored(mfload.load(seed.url, framework=BACKEND)) == before
        seed.update(network)
        found = mfload.load(seed.url, framework=BACKEND)
    assert stored(found) == stored(TestKerasPeers().state(network))
    assert stored(found) != before


@pytest.mark.skipif(BACKEND != "tensorflow", reason="variables of TensorFlow")
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int64"])
def test_variables_that_are_assigned(kind: str) -> None:
    """What a seed holds is what a variable had when it was published."""
    import tensorflow as tf

    variable = tf.Variable(tf.cast(tf.reshape(tf.range(64 * 96), (64, 96)), kind))
    before = stored({"v": variable.value()})
    with mfload.publish({"v": variable}, model="m") as seed:
        assert seed.copied_bytes == 0
        variable.assign_add(tf.ones_like(variable))
        variable.scatter_nd_update([[0]], tf.zeros((1, 96), variable.dtype))
        assert stored(mfload.load(seed.url, framework="tensorflow")) == before
        seed.update({"v": variable})
        assert stored(mfload.load(seed.url, framework="tensorflow")) == stored({"v": variable})


def test_weights_of_one_path_are_refused() -> None:
    class Twins(layers.Layer):
        def __init__(self) -> None:
            super().__init__(name="twins")
            self.pair = [self.add_weight(shape=(2,), name="w") for _ in range(2)]
            self.build(())

    with pytest.raises(errors.UsageError, match="same path"):
        mfload.publish(Twins(), model="m")
