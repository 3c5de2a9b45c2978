"""Names like the one that was typed."""

from __future__ import annotations

import time

from hypothesis import given, strategies as st

from mfload import suggestions


def test_the_likest_come_first() -> None:
    names = ["model.q_proj.weight", "model.k_proj.weight", "lm_head"]
    assert suggestions.close("model.q_proj.wieght", names)[0] == "model.q_proj.weight"
    assert suggestions.close("MODEL.K_PROJ.WEIGHT", names)[0] == "model.k_proj.weight"
    assert suggestions.close("lm_haed", names, 1) == ["lm_head"]
    assert suggestions.close("zzz", names) == []
    assert suggestions.close("lm_hd_x", ["lm_head"], cutoff=0.95) == []


def test_what_was_meant() -> None:
    assert suggestions.meant("pytroch", {"pytorch": "torch", "numpy": "numpy"}) == (
        ", did you mean 'torch'?"
    )
    assert suggestions.meant("dierct", ("auto", "direct")) == ", did you mean 'direct'?"
    assert suggestions.meant("zzz", ("auto", "direct")) == ""


@given(st.text(), st.lists(st.text()))
def test_any_text(word: str, choices: list[str]) -> None:
    assert {*suggestions.close(word, choices)} <= {*choices}
    suggestions.meant(word, choices)


def test_nobody_waits() -> None:
    names = iter(f"{n:06}{'y' * 1000}" for n in range(6000))
    start = time.perf_counter()
    suggestions.close("x" * 10**6, names)
    assert time.perf_counter() - start < 5
    assert next(names).startswith("005000")
