"""Names like the one that was typed."""

from __future__ import annotations

import time

from hypothesis import given, strategies as st

from mfload import spelling


def test_the_likest_come_first() -> None:
    names = ["model.q_proj.weight", "model.k_proj.weight", "lm_head"]
    assert spelling.close("model.q_proj.wieght", names)[0] == "model.q_proj.weight"
    assert spelling.close("MODEL.K_PROJ.WEIGHT", names)[0] == "model.k_proj.weight"
    assert spelling.close("lm_haed", names, 1) == ["lm_head"]
    assert spelling.close("zzz", names) == []
    assert spelling.close("lm_hd_x", ["lm_head"], cutoff=0.95) == []


def test_what_was_meant() -> None:
    assert spelling.meant("pytroch", {"pytorch": "torch", "numpy": "numpy"}) == (
        ", did you mean 'torch'?"
    )
    assert spelling.meant("dierct", ("auto", "direct")) == ", did you mean 'direct'?"
    assert spelling.meant("zzz", ("auto", "direct")) == ""


@given(st.text(), st.lists(st.text()))
def test_any_text(word: str, choices: list[str]) -> None:
    assert {*spelling.close(word, choices)} <= {*choices}
    spelling.meant(word, choices)


def test_nobody_waits() -> None:
    names = iter(f"{n:06}{'y' * 1000}" for n in range(6000))
    start = time.perf_counter()
    spelling.close("x" * 10**6, names)
    assert time.perf_counter() - start < 5
    assert next(names).startswith("005000")
