"""Names like the one that was typed."""

from __future__ import annotations

import time

from hypothesis import given, strategies as st

from mfload import errors


def test_the_likest_come_first() -> None:
    names = ["model.q_proj.weight", "model.k_proj.weight", "lm_head"]
    assert errors.close_names("model.q_proj.wieght", names)[0] == "model.q_proj.weight"
    assert errors.close_names("MODEL.K_PROJ.WEIGHT", names)[0] == "model.k_proj.weight"
    assert errors.close_names("lm_haed", names, 1) == ["lm_head"]
    assert errors.close_names("zzz", names) == []
    assert errors.close_names("lm_hd_x", ["lm_head"], cutoff=0.95) == []


def test_what_was_meant() -> None:
    assert errors.did_you_mean("pytroch", {"pytorch": "torch", "numpy": "numpy"}) == (
        ", did you mean 'torch'?"
    )
    assert errors.did_you_mean("dierct", ("auto", "direct")) == ", did you mean 'direct'?"
    assert errors.did_you_mean("zzz", ("auto", "direct")) == ""


@given(st.text(), st.lists(st.text()))
def test_any_text(word: str, choices: list[str]) -> None:
    assert {*errors.close_names(word, choices)} <= {*choices}
    errors.did_you_mean(word, choices)


def test_nobody_waits() -> None:
    names = iter(f"{n:06}{'y' * 1000}" for n in range(6000))
    start = time.perf_counter()
    errors.close_names("x" * 10**6, names)
    assert time.perf_counter() - start < 5
    assert next(names).startswith("005000")
