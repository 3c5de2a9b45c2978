"""Which neurons of a layer are about to fire, told from its input by two small matrices.

As "LLM in a flash" (Alizadeh et al., 2024) has it: a matrix of low rank for each layer.
`examples/neurons_from_flash.py` trains them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from mfload import api, errors
from mfload.options import byte_count

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from mfload.saving.save import Saved
    from mfload.sources import PathOrBytes

_FIELDS = ("first", "second", "bias")
_FIGURES = ("threshold", "recall", "over_prediction")
_NAME = re.compile(rf"layers\.(\d{{1,9}})\.({'|'.join((*_FIELDS, 'figures'))})")


@dataclass(frozen=True, slots=True)
class Predictor:
    """Tells from the input of a layer which of its neurons will fire.

    A neuron's score is `x @ first @ second + bias`; it is expected to fire from `threshold` on.

    Attributes:
        first: float32[width, rank].
        second: float32[rank, neurons].
        bias: float32[neurons].
        threshold: The least score; infinite if no neuron fired in training.
        recall: Share of the neurons that fired, in activations not trained on, that it names; in
            all of them if nothing fired in those.
        over_prediction: How many it names for each that fired.
    """

    first: NDArray[np.float32]
    second: NDArray[np.float32]
    bias: NDArray[np.float32]
    threshold: float
    recall: float
    over_prediction: float

    def scores(self, x: Any) -> NDArray[np.float32]:
        """A number for each neuron, float32[..., neurons], of inputs [..., width].

        Raises UsageError if the last dim is not the width, or a score is NaN or infinite.
        """
        given = np.asarray(x)
        if given.ndim == 0 or given.shape[-1] != self.first.shape[0]:
            raise errors.UsageError(
                "inputs of another layer",
                expected=f"[..., {self.first.shape[0]}]",
                found=list(given.shape),
            )
        with np.errstate(over="ignore", invalid="ignore"):  # It says so itself.
            made: Any = given.astype(np.float32, copy=False) @ self.first @ self.second
            made += self.bias
        if not np.isfinite(made).all():
            what = "scores are NaN or infinite"
            raise errors.UsageError(what, expected="finite inputs, and training that converged")
        return made

    def predict(self, x: Any, most: int | None = None) -> NDArray[np.int64]:
        """The neurons that will fire for an input [width], or for one of several [..., width].

        Args:
            x: The input of the layer.
            most: How many at most, those with the highest scores, such as what a cache has room
                for: `cache.capacity[layer]`. Default: all that reach the threshold.

        Raises:
            UsageError: As `scores`, since of a NaN no neuron would seem to fire; or `most` is no
                number.
        """
        scores = self.scores(x)
        best = scores.reshape(-1, scores.shape[-1]).max(0, initial=-np.inf)
        named = np.flatnonzero(best >= self.threshold)
        if most is not None and named.size > byte_count("most", most, 1):
            named = np.sort(named[np.argpartition(best[named], -most)[-most:]])
        return named


def save_predictors(
    predictors: Mapping[int, Predictor], path: str | os.PathLike[str], *, overwrite: bool = False
) -> Saved:
    """Saves the predictors of layers, by their numbers, as safetensors (errors: `mfload.save`)."""
    arrays: dict[str, Any] = {}
    for layer, each in predictors.items():
        arrays |= {f"layers.{layer}.{name}": getattr(each, name) for name in _FIELDS}
        arrays[f"layers.{layer}.figures"] = np.array([getattr(each, name) for name in _FIGURES])
    return api.save(arrays, path, overwrite=overwrite)


def load_predictors(path: PathOrBytes) -> dict[int, Predictor]:
    """Loads what `save_predictors` saved: predictors by layer.

    Raises:
        FormatError: The file is malformed, or holds something else.
        SourceError: It can't be read.
    """
    found: dict[int, dict[str, Any]] = {}
    for name, array in api.load(path, "numpy").items():
        match = _NAME.fullmatch(name)
        if match is None:
            raise errors.FormatError("no tensor of a predictor", file=str(path), tensor=name)
        found.setdefault(int(match[1]), {})[match[2]] = array
    made: dict[int, Predictor] = {}
    for layer, parts in sorted(found.items()):
        shapes = {name: array.shape for name, array in parts.items()}
        width, rank = (*shapes.get("first", ()), 0, 0)[:2]
        neurons = (*shapes.get("bias", ()), 0)[0]
        wanted: dict[str, tuple[int, ...]] = {"first": (width, rank), "second": (rank, neurons)}
        wanted |= {"bias": (neurons,), "figures": (len(_FIGURES),)}
        dtypes = {parts[name].dtype.name for name in shapes if name != "figures"}
        if shapes != wanted or dtypes != {"float32"} or parts["figures"].dtype != np.float64:
            raise errors.FormatError(
                f"the tensors of layer {layer} make no predictor",
                file=str(path),
                expected="float32: first [width, rank], second [rank, neurons], bias [neurons]; "
                f"float64: figures [{len(_FIGURES)}]",
                found=shapes,
            )
        figures = dict(zip(_FIGURES, parts["figures"].tolist(), strict=True))
        made[layer] = Predictor(**{name: parts[name] for name in _FIELDS}, **figures)
    return made
