"""Models and layers of Keras: their weights, by the paths of the variables.

With PyTorch under it, weights are filled where they lie; with TensorFlow and JAX, they are assigned
new arrays.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import keras
import numpy as np

from mfload import errors, frameworks
from mfload.frameworks import base, private_api
from mfload.trees.landing import Target
from mfload.trees.modules import Module, New, overlapping, unfit
from mfload.trees.recipe import Leaf, brief

_BACKEND = keras.backend.backend()


class KerasModule(Module):
    """A `keras.Model` or `keras.layers.Layer`, taken apart (see `modules.Module`)."""

    framework = "keras"
    sharded_by = "keras.distribution, set before the model is made"

    def __init__(self, layer: Any) -> None:
        unbuilt = [each.name for each in private_api.keras_layers(layer) if not each.built]
        if unbuilt:
            raise errors.UsageError(
                "the model is not built, so that it lacks weights",
                expected="model.build(input_shape), or a call of the model, before load_into",
                found=f"not built: {brief(unbuilt)}",
            )
        self.variables: Sequence[Any] = layer.weights
        counts = Counter(variable.path for variable in self.variables)
        if same := [path for path, count in counts.items() if count > 1]:
            raise errors.UsageError(
                "several weights of the model have the same path; give their layers other names",
                expected="a path for each weight",
                found=brief(same),
            )
        self.leaves: Sequence[Leaf] = list(map(_leaf, self.variables))
        self.leaves += [
            unfit((variable.path,), "the state of a seed generator, which stays as it is", True)
            for variable in layer.variables
            if variable.path not in counts
        ]
        self._gathered: dict[int, Any] = {}  # Arrays that are not complete.
        in_place = _BACKEND == "torch" and all(v.value.device.type == "cpu" for v in self.variables)
        self.replaces = not in_place

    def mesh(self, *, once: bool) -> tuple[None, tuple[int, ...]]:
        """There is none; `once` is refused, since nothing would be exchanged."""
        if once:
            message = "exchange='once' is not for models of Keras: each process fills its own"
            raise errors.UsageError(message, expected="exchange='auto' or 'never'", found="once")
        return None, ()

    def memory(self, number: int) -> Any:
        """Of contiguous tensors of PyTorch in host memory."""
        units = self._units(number)
        if units is None or not units.flags.c_contiguous:
            return None
        return base.memory_at(self.variables[number].value, units.ctypes.data, units.nbytes)

    def target(self, number: int) -> Target | None:
        """Of tensors of PyTorch in host memory."""
        units = self._units(number)
        if units is None:
            return None
        strides = self.variables[number].value.stride()
        return Target(units, units.ctypes.data, tuple(strides))

    def _units(self, number: int) -> Any:
        """The memory of a leaf as a NumPy array that can be written to."""
        value = self.variables[number].value
        if _BACKEND != "torch" or value.device.type != "cpu":
            return None
        plain = value.detach()
        return base.host_units(plain, plain.stride(), plain.element_size())

    def adapter(self) -> base.Adapter:
        """On the backend's default device; assigned, an array goes to that of the variable."""
        return frameworks.get(_BACKEND)

    def put(self, number: int, start: tuple[int, ...], array: Any) -> None:
        """Copies in place, or gathers an array that is assigned once it is complete."""
        shape, variable, units = (
            self.leaves[number].shape,
            self.variables[number],
            self._units(number),
        )
        stop = tuple(at + n for at, n in zip(start, array.shape, strict=True))
        part = tuple(map(slice, start, stop)) or ...
        if units is not None:
            units[part] = array.view(units.dtype)
            self._written(number)
        elif array.shape == shape:
            variable.assign(array)
        else:
            if number not in self._gathered:
                self._gathered[number] = np.empty(shape, array.dtype)
            self._gathered[number][part] = array
            if stop == shape:  # The parts of a leaf come in order.
                variable.assign(self._gathered.pop(number))

    def install(self, made: Mapping[int, New], written: Iterable[int]) -> None:
        """Assigns new arrays."""
        for number, new in made.items():
            self.variables[number].assign(new.array)
        for number in written:
            self._written(number)

    def _written(self, number: int) -> None:
        """Has PyTorch's autograd refuse what it kept of the values from before."""
        if _BACKEND == "torch":
            import torch

            torch.autograd.graph.increment_version(self.variables[number].value)


make = KerasModule


def _leaf(variable: Any) -> Leaf:
    kind = keras.backend.standardize_dtype(variable.dtype)
    if kind not in base.ROWS:
        return unfit((variable.path,), kind)
    why = (
        overlapping(variable.value.shape, variable.value.stride()) if _BACKEND == "torch" else None
    )
    if why is not None:
        return unfit((variable.path,), why)
    return Leaf((variable.path,), tuple(map(int, variable.shape)), base.ROWS[kind], variable)
