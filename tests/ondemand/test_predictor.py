"""Predictors: what they name, and that they come back from a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mfload
from mfload import errors
from mfload.ondemand import Predictor, load_predictors, save_predictors

WIDTH, NEURONS = 48, 160


def inputs(tokens: int = 1500, seed: int = 0) -> Any:
    """Of six dims in truth."""
    plane = np.random.default_rng(0).standard_normal((6, WIDTH), np.float32)
    return np.random.default_rng(seed).standard_normal((tokens, 6), np.float32) @ plane


@pytest.fixture(scope="module")
def trained() -> Predictor:
    """Of a layer with random weights, a tenth of whose neurons fires."""
    first = np.linalg.svd(inputs(), full_matrices=False)[2][:6].T
    second = np.random.default_rng(1).standard_normal((6, NEURONS), np.float32)
    bias = -np.quantile(inputs() @ first @ second, 0.9, axis=0).astype(np.float32)
    return Predictor(first, second, bias, 0.0, 1.0, 1.0)


def test_the_best_are_named_if_there_is_no_room_for_all(trained: Predictor) -> None:
    x = inputs()
    busiest = (trained.scores(x) >= 0).sum(1).argmax()
    for some_x in (x[busiest], x[:50]):
        named = trained.predict(some_x)
        assert named.size > 10
        best = trained.scores(some_x).reshape(-1, NEURONS).max(0)
        some = trained.predict(some_x, 10)
        assert some.tolist() == sorted(np.argsort(best)[-10:].tolist())
        assert np.array_equal(trained.predict(some_x, named.size), named)
    assert trained.predict(x[:0], 3).size == trained.predict(x[:0]).size == 0
    with pytest.raises(errors.UsageError, match="most"):
        trained.predict(x[7], 0)


def test_rows_of_one_token_and_of_several(trained: Predictor) -> None:
    x = inputs(tokens=6, seed=3)
    each = [trained.predict(token) for token in x]
    assert all(rows.dtype == np.int64 and (np.diff(rows) > 0).all() for rows in each)
    assert len({rows.size for rows in each}) > 1
    union = np.unique(np.concatenate(each))
    assert np.array_equal(trained.predict(x), union)
    assert np.array_equal(trained.predict(x.reshape(2, 3, WIDTH)), union)
    assert trained.predict(x[:0]).size == 0
    with pytest.raises(errors.UsageError, match=rf"expected: \[..., {WIDTH}\]"):
        trained.predict(x[:, 1:])
    with pytest.raises(errors.UsageError, match="another layer"):
        trained.predict(1.0)


def test_scores_that_are_no_numbers(trained: Predictor) -> None:
    """Else of NaN no neuron would fire, and the output be zeros."""
    for value in (np.nan, np.inf):
        x = np.full(WIDTH, value)
        with pytest.raises(errors.UsageError, match="NaN or infinite"):
            trained.predict(x)


def test_they_come_back_from_a_file(tmp_path: Path, trained: Predictor) -> None:
    never = Predictor(trained.first, trained.second, trained.bias, float("inf"), 1.0, 0.0)
    path = tmp_path / "predictors.safetensors"
    save_predictors({7: trained, 12: never}, path)
    found = load_predictors(path)
    assert list(found) == [7, 12]
    for wanted, each in ((trained, found[7]), (never, found[12])):
        for name in ("first", "second", "bias"):
            assert np.array_equal(getattr(each, name), getattr(wanted, name))
        assert (each.threshold, each.recall, each.over_prediction) == (
            wanted.threshold, wanted.recall, wanted.over_prediction,
        )  # fmt: skip
    x = inputs(tokens=3)
    assert np.array_equal(found[7].predict(x), trained.predict(x))
    with pytest.raises(errors.TargetExistsError):
        save_predictors({7: trained}, path)
    save_predictors({}, path, overwrite=True)
    assert load_predictors(path) == {}


_GOOD = {
    "layers.0.first": np.zeros((4, 2), np.float32), "layers.0.second": np.zeros((2, 6), np.float32),
    "layers.0.bias": np.zeros(6, np.float32), "layers.0.figures": np.zeros(3),
}  # fmt: skip


@pytest.mark.parametrize(
    "changed",
    [
        {"x": np.zeros(1)}, {"layers.0.first": None}, {"layers.0.bias": None},
        {"layers.0.second": np.zeros((3, 6), np.float32)}, {"layers.0.figures": np.zeros(2)},
        {"layers.0.bias": np.zeros((6, 1), np.float32)}, {"layers.0.bias": np.zeros(6)},
        {"layers.0.figures": np.zeros(3, np.float32)}, {"layers.1.bias": np.zeros(6, np.float32)},
        {"layers.0.first": np.float32(0)},
    ],
)  # fmt: skip
def test_files_that_hold_something_else(tmp_path: Path, changed: dict[str, Any]) -> None:
    arrays = {name: array for name, array in (_GOOD | changed).items() if array is not None}
    mfload.save(_GOOD, tmp_path / "good.safetensors")
    assert list(load_predictors(tmp_path / "good.safetensors")) == [0]
    mfload.save(arrays, tmp_path / "a.safetensors")
    with pytest.raises(errors.FormatError, match="predictor"):
        load_predictors(tmp_path / "a.safetensors")
