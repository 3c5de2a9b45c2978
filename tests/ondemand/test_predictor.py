"""Predictors: what they learn, what they are told to name, and that they come back from a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import mfload
from mfload import errors
from mfload.ondemand import (
    Predictor,
    load_predictors,
    predictor,
    save_predictors,
    train_predictor,
)

WIDTH, NEURONS = 48, 160


def activations(tokens: int = 1500, rank: int = 6, seed: int = 0) -> tuple[Any, Any]:
    """Inputs near a plane of low rank, off centre and of uneven scale; a tenth of neurons fires."""
    random = np.random.default_rng(seed)
    plane = random.standard_normal((rank, WIDTH))
    x = random.standard_normal((tokens, rank)) @ plane
    x = (x + 0.05 * random.standard_normal(x.shape)) * np.geomspace(0.01, 100, WIDTH) + 3
    weights = random.standard_normal((WIDTH, NEURONS)) / np.geomspace(0.01, 100, WIDTH)[:, None]
    before = (x - 3) @ weights
    return x.astype(np.float32), before > np.quantile(before, 0.9)


@pytest.fixture(scope="module")
def trained() -> Predictor:
    return train_predictor(*activations(), rank=8, epochs=30)


def test_it_learns_what_fires(trained: Predictor) -> None:
    x, fired = activations()
    named = trained.scores(x) >= trained.threshold
    recall = np.count_nonzero(named & fired) / np.count_nonzero(fired)
    over = np.count_nonzero(named) / np.count_nonzero(fired)
    assert recall == pytest.approx(trained.recall, abs=0.02)
    assert over == pytest.approx(trained.over_prediction, abs=0.1)
    assert 0.95 <= trained.recall < 0.96
    assert trained.over_prediction < 1.6  # To name all would be 10.
    assert trained.first.shape == (WIDTH, 8)
    assert trained.second.shape == (8, NEURONS)


def test_what_is_held_out_is_not_trained_on() -> None:
    """Noise can be learnt by heart, and not be told for what is held out."""
    random = np.random.default_rng(1)
    x, fired = random.standard_normal((60, 64)), random.random((60, 40)) < 0.2
    made = train_predictor(x, fired, 32, epochs=200, held_out=0.3)
    assert made.over_prediction > 2.5


@pytest.mark.parametrize("recall", [0.5, 0.9, 0.99])
def test_recall_is_what_is_asked_for(recall: float) -> None:
    made = train_predictor(*activations(), rank=8, epochs=8, recall=recall)
    assert recall <= made.recall < recall + 0.01


def test_the_best_are_named_if_there_is_no_room_for_all(trained: Predictor) -> None:
    x, fired = activations()
    for some_x in (x[fired.sum(1).argmax()], x[:50]):
        named = trained.predict(some_x)
        assert named.size > 10
        best = trained.scores(some_x).reshape(-1, NEURONS).max(0)
        some = trained.predict(some_x, 10)
        assert some.tolist() == sorted(np.argsort(best)[-10:].tolist())
        assert np.array_equal(trained.predict(some_x, named.size), named)
    assert trained.predict(x[:0], 3).size == trained.predict(x[:0]).size == 0
    with pytest.raises(errors.UsageError, match="most"):
        trained.predict(x[7], 0)


def test_it_is_deterministic(trained: Predictor) -> None:
    again = train_predictor(*activations(), rank=8, epochs=30)
    other = train_predictor(*activations(), rank=8, epochs=30, seed=1)
    for name in ("first", "second", "bias", "threshold", "recall", "over_prediction"):
        assert np.array_equal(getattr(again, name), getattr(trained, name)), name
    assert not np.array_equal(other.first, trained.first)


def test_the_loss_is_balanced(monkeypatch: pytest.MonkeyPatch) -> None:
    """At a score of 0 for all, what fires pulls as much as what does not."""
    x, fired = activations(tokens=400)
    seen: list[Any] = []
    real = predictor._gradients  # pyright: ignore[reportPrivateUsage]

    def gradients(*given: Any) -> Any:
        seen.append(real(*given))
        return seen[-1]

    monkeypatch.setattr(predictor, "_gradients", gradients)
    train_predictor(x, fired, 4, epochs=1, batch=400)
    assert seen[0][2].sum() == pytest.approx(0, abs=1e-3)
    assert np.abs(seen[0][2]).max() > 0.01


def test_gradients_are_those_of_the_loss() -> None:
    random = np.random.default_rng(2)
    x, labels = random.standard_normal((7, 5)), random.random((7, 6)) < 0.3
    shapes = ((5, 3), (3, 6), (6,))
    values: list[Any] = [random.standard_normal(shape) for shape in shapes]
    weigh = 2.5, 0.75

    def loss() -> float:
        scores = x @ values[0] @ values[1] + values[2]
        each = np.where(labels, 2.5 * np.log1p(np.exp(-scores)), 0.75 * np.log1p(np.exp(scores)))
        return float(each.sum() / len(x))

    found: Any = predictor._gradients(x, labels, values, weigh)  # type: ignore
    for value, gradient in zip(values, found, strict=True):
        assert gradient.shape == value.shape
        for place in np.ndindex(*value.shape):
            before = value[place]
            value[place] = before + 1e-6
            high = loss()
            value[place] = before - 1e-6
            assert gradient[place] == pytest.approx((high - loss()) / 2e-6, abs=1e-5)
            value[place] = before


def test_rows_of_one_token_and_of_several(trained: Predictor) -> None:
    x, _ = activations(tokens=6, seed=3)
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
    with np.errstate(all="ignore"), pytest.raises(errors.UsageError, match="NaN or infinite"):
        train_predictor(*activations(50), rank=4, rate=1e38)


def test_nothing_that_fires_is_held_out() -> None:
    x, fired = np.eye(20, dtype=np.float32), np.zeros((20, 3), bool)
    order = np.random.default_rng(0).permutation(20)
    fired[order[-1], 1] = True  # The first ones are held out.
    made = train_predictor(x, fired, 4, epochs=50)
    assert made.predict(x[order[-1]]).tolist() == [1]
    assert (made.recall, np.isfinite(made.threshold)) == (1, True)
    assert made.over_prediction >= 1


@pytest.mark.parametrize("fires", [False, True])
def test_nothing_and_everything(fires: bool) -> None:
    x, fired = activations(tokens=50)
    made = train_predictor(x, np.full_like(fired, fires), 4, epochs=3)
    rows = made.predict(x[0])
    assert rows.size == (NEURONS if fires else 0)
    assert made.recall >= 0.95
    assert made.over_prediction == (made.recall if fires else 0)


@settings(max_examples=30, deadline=None)
@given(
    tokens=st.integers(2, 9), width=st.integers(1, 5), neurons=st.integers(1, 5),
    rank=st.integers(1, 4), held_out=st.sampled_from([0.01, 0.5, 0.99]), batch=st.integers(1, 20),
    seed=st.integers(0, 99),
)  # fmt: skip
def test_small_ones(
    tokens: int, width: int, neurons: int, rank: int, held_out: float, batch: int, seed: int
) -> None:
    random = np.random.default_rng(seed)
    x = np.round(random.standard_normal((tokens, width)))  # Some inputs never change.
    fired = random.random((tokens, neurons)) < 0.5
    made = train_predictor(x, fired, rank, epochs=2, batch=batch, held_out=held_out, seed=seed)
    assert np.isfinite(made.scores(x)).all()
    assert 0 <= made.recall <= 1


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
    x, _ = activations(tokens=3)
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


X, FIRED = np.zeros((5, 4), np.float32), np.zeros((5, 6), np.bool_)


@pytest.mark.parametrize(
    ("x", "fired", "more"),
    [
        (X[:1], FIRED[:1], {}), (X[:4], FIRED, {}), (X[0], FIRED, {}), (X, FIRED[0], {}),
        (X[:, :0], FIRED, {}), (X, FIRED[:, :0], {}), (X, FIRED.astype(np.int8), {}),
        (np.full_like(X, np.nan), FIRED, {}), (X, FIRED, {"rank": 0}), (X, FIRED, {"epochs": 0}),
        (X, FIRED, {"batch": -1}), (X, FIRED, {"recall": 1.0}), (X, FIRED, {"held_out": 0}),
        (X, FIRED, {"recall": "a"}), (X, FIRED, {"held_out": None}), (X, FIRED, {"rate": -1.0}),
    ],
)  # fmt: skip
def test_what_can_not_be_trained_on(x: Any, fired: Any, more: dict[str, Any]) -> None:
    with pytest.raises(errors.UsageError):
        train_predictor(x, fired, **more)
