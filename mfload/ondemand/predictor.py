"""Which neurons of a layer are about to fire, told from its input by two small matrices.

As "LLM in a flash" (Alizadeh et al., 2024) has it: a matrix of low rank for each layer, trained
with a loss in which the few neurons that fire weigh as much as the many that do not.
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

    Floats = NDArray[np.float32]

_MOST = 1 << 22  # Scores that are held at once.
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


def train_predictor(
    x: Any,
    fired: Any,
    rank: int = 128,
    *,
    recall: float = 0.95,
    epochs: int = 10,
    batch: int = 64,
    rate: float = 3e-3,
    held_out: float = 0.1,
    seed: int = 0,
) -> Predictor:
    """Trains a predictor on activations of a layer; equal arguments give an equal one.

    The loss is logistic. The neurons that fired weigh as much, all together, as those that did not.
    It is minimised by Adam on mini-batches. What is held out decides the threshold.

    Args:
        x: Inputs of the layer for n tokens, float[n, width].
        fired: Which neurons fired, bool[n, neurons].
        rank: Of the two matrices; a few percent of the width.
        recall: Share of the neurons that fire that it is to name, in what is held out.
        epochs: How often it goes through the tokens.
        batch: Tokens a step.
        rate: Adam's, at the start; it falls to 0.
        held_out: Share of the tokens that is not trained on.
        seed: Of the random numbers.

    Raises:
        UsageError: An argument is invalid, or shapes do not fit.
    """
    inputs, labels = _checked(x, fired)
    (count, width), neurons = inputs.shape, labels.shape[1]
    for name, value in (("rank", rank), ("epochs", epochs), ("batch", batch)):
        byte_count(name, value, 1)
    for name, share in (("recall", recall), ("held_out", held_out)):
        errors.number(name, share, "more than 0 and less than 1", lambda each: 0 < each < 1)
    rate = errors.number("rate", rate, "more than 0, and finite", lambda each: 0 < each < np.inf)
    random = np.random.default_rng(seed)
    order = random.permutation(count)
    kept = min(count - 1, max(1, round(count * held_out)))
    test, train = order[:kept], order[kept:]
    # In units of its own, each input counts as much; the matrices take them as they come.
    middle, scale = inputs[train].mean(0), inputs[train].std(0)
    scale = np.where(scale > 0, scale, 1).astype(np.float32)
    first = random.standard_normal((width, rank), np.float32) / np.float32(np.sqrt(width))
    values = [first, np.zeros((rank, neurons), np.float32), np.zeros(neurons, np.float32)]
    share = labels[train].mean()
    weigh = np.float32(0.5 / max(share, 1e-9)), np.float32(0.5 / max(1 - share, 1e-9))
    adam = _Adam(values, rate, epochs * -(-train.size // batch))
    for _ in range(epochs):
        random.shuffle(train)
        for start in range(0, train.size, batch):
            some = train[start : start + batch]
            adam.step(_gradients((inputs[some] - middle) / scale, labels[some], values, weigh))
    first = values[0] / scale[:, None]
    bias = values[2] - middle @ first @ values[1]
    made = Predictor(first, values[1], bias, np.inf, 1.0, 0.0)
    measured = test if labels[test].any() else order
    return _measured(made, inputs[measured], labels[measured], recall)


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


def _checked(x: Any, fired: Any) -> tuple[Floats, NDArray[np.bool_]]:
    inputs, labels = np.asarray(x), np.asarray(fired)
    shapes = inputs.ndim == labels.ndim == 2 and len(inputs) == len(labels) > 1
    if not shapes or 0 in (*inputs.shape, *labels.shape) or labels.dtype != np.bool_:
        raise errors.UsageError(
            "activations to train on",
            expected="x float[n, width] and fired bool[n, neurons], of two tokens or more",
            found=f"{inputs.dtype}{list(inputs.shape)} and {labels.dtype}{list(labels.shape)}",
        )
    inputs = inputs.astype(np.float32, copy=False)
    if not np.isfinite(inputs).all():
        raise errors.UsageError("x has NaN or infinity", expected="finite numbers")
    return inputs, labels


def _gradients(
    x: Floats, labels: NDArray[np.bool_], values: list[Floats], weigh: tuple[Any, Any]
) -> list[Floats]:
    """Of the mean loss of some tokens, for each of the values."""
    first, second, bias = values
    inner = x @ first
    scores = inner @ second
    scores += bias
    # d/dz of log(1 + exp(-z)) for those that fired, of log(1 + exp(z)) for the others.
    np.tanh(scores / 2, out=scores)
    error = np.where(labels, weigh[0] * (scores - 1), weigh[1] * (scores + 1))
    error *= np.float32(0.5 / len(x))
    return [x.T @ (error @ second.T), inner.T @ error, error.sum(0)]


class _Adam:
    """Adam (Kingma and Ba, 2015), with a rate that falls to 0 evenly; changes values in place."""

    def __init__(self, values: list[Floats], rate: float, steps: int) -> None:
        self._values, self._rate, self._steps, self._done = values, rate, steps, 0
        self._means = [np.zeros_like(each) for each in values]
        self._squares = [np.zeros_like(each) for each in values]

    def step(self, gradients: list[Floats]) -> None:
        self._done += 1
        rate = self._rate * (1 - (self._done - 1) / self._steps)
        first, second = (np.float32(1 - decay**self._done) for decay in (0.9, 0.999))
        for value, mean, square, gradient in zip(
            self._values, self._means, self._squares, gradients, strict=True
        ):
            mean += np.float32(0.1) * (gradient - mean)
            square += np.float32(0.001) * (gradient * gradient - square)
            value -= np.float32(rate) * (mean / first) / (np.sqrt(square / second) + 1e-8)


def _measured(made: Predictor, x: Floats, fired: NDArray[np.bool_], recall: float) -> Predictor:
    """The predictor with the highest threshold that names a share `recall` of what fired."""
    rows = max(1, _MOST // fired.shape[1])
    parts = [slice(start, start + rows) for start in range(0, len(x), rows)]
    hits = [made.scores(x[part])[fired[part]] for part in parts]
    scores = np.sort(np.concatenate(hits))
    if not scores.size:
        return made
    threshold = float(scores[int(scores.size * (1 - recall))])
    named = sum(np.count_nonzero(made.scores(x[part]) >= threshold) for part in parts)
    found = np.count_nonzero(scores >= threshold)
    figures = threshold, found / scores.size, named / scores.size
    return Predictor(made.first, made.second, made.bias, *map(float, figures))
