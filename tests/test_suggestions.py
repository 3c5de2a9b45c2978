"""Names like the one that was typed."""

from __future__ import annotations

import re
import time
from random import Random

import pytest
from hypothesis import given, strategies as st

from mfload import dtypes, errors, options, suggestions


def test_the_likest_come_first() -> None:
    names = ["model.q_proj.weight", "model.k_proj.weight", "lm_head"]
    assert errors.close_names("model.q_proj.wieght", names)[0] == "model.q_proj.weight"
    assert errors.close_names("MODEL.K_PROJ.WEIGHT", names)[0] == "model.k_proj.weight"
    assert errors.close_names("lm_haed", names, 1) == ["lm_head"]
    assert errors.close_names("zzz", names) == []


def test_what_was_meant() -> None:
    assert errors.did_you_mean("pytroch", {"pytorch": "torch", "numpy": "numpy"}) == (
        ", did you mean 'torch'?"
    )
    assert errors.did_you_mean("dierct", ("auto", "direct")) == ", did you mean 'direct'?"
    assert errors.did_you_mean("zzz", ("auto", "direct")) == ""


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("bfloat", "bfloat16"),
        ("bfloat61", "bfloat16"),
        ("flaot32", "float32"),
        ("bf61", "bf16"),
        ("float8", "float8_e4m3fn"),
        ("float8e5m2", "float8_e5m2"),
        ("int5", None),
        ("int46", "int64"),
        ("fp8", None),
        ("q4", None),
        ("float23", "float32"),
        ("float33", None),
        ("complex", "complex64"),
    ],
)
def test_dtypes(typed: str, meant: str | None) -> None:
    with pytest.raises(errors.UsageError) as caught:
        dtypes.resolve(typed)
    assert caught.value.message == "unknown dtype" + (f", did you mean {meant!r}?" if meant else "")


NEAR = [
    ("model.layers.0.self_attn.q_proj.wieght", "model.layers.0.self_attn.q_proj.weight"),
    ("layers.0.q.weight", "model.layers.0.self_attn.q_proj.weight"),
    ("h.0.attn.c_attn.weight", "transformer.h.0.attn.c_attn.weight"),
    ("model.embed.weight", "model.embed_tokens.weight"),
    ("lmhead.weight", "lm_head.weight"),
    ("norm.weight", "model.norm.weight"),
    ("bert.encoder.layers.3.output.dense.bias", "bert.encoder.layer.3.output.dense.bias"),
    ("unet.down_blocks.1.resnet.0.conv1.weight", "unet.down_blocks.1.resnets.0.conv1.weight"),
    ("params.layers_0.attn.kernal", "params.layers_0.attn.kernel"),
    ("visual/blocks/3/norm1/wieght", "visual/blocks/3/norm1/weight"),
    ("base.q_proj.lora_A.weight", "base.q_proj.lora_A.default.weight"),
]
FAR = [
    ("blocks.2.down.bias", "blocks.1.drop.rngs.key"),
    ("blocks.2.down.bias", "blocks.1.down.bias"),
    ("blocks.2.down.bias", "blocks.2.up.bias"),
    ("blocks.2.down.bias", "blocks.2.down.kernel"),
    ("model.layers.12.input_layernorm.weight", "model.layers.21.input_layernorm.weight"),
    ("model.layers.0.self_attn.q_proj.weight", "model.layers.0.self_attn.k_proj.weight"),
    ("model.layers.0.mlp.gate_proj.weight", "model.layers.0.mlp.up_proj.weight"),
    ("model.layers.0.mlp.down_proj.weight", "model.layers.0.mlp.down_proj.weight_scale"),
    ("bert.encoder.layer.0.weight", "bert.decoder.layer.0.weight"),
    ("layer.0.attention.self.query.weight", "layer.0.attention.self.key.weight"),
    ("h.0.attn.c_attn.weight", "h.0.attn.c_proj.weight"),
    ("layers.0.feed_forward.w1.weight", "layers.0.feed_forward.w3.weight"),
    ("bn1.running_mean", "bn1.running_var"),
    ("rnn.weight_ih_l0", "rnn.weight_hh_l0"),
    ("base.q_proj.lora_A.weight", "base.q_proj.lora_B.weight"),
    ("blocks.0.norm1.weight", "blocks.0.norm2.weight"),
    ("lm_head.weight", "model.norm.weight"),
    ("weight", "lm_head.weight"),
    ("wte.weight", "wpe.weight"),
]


@pytest.mark.parametrize(("typed", "there"), NEAR)
def test_names_of_tensors_that_are_near(typed: str, there: str) -> None:
    others = [pair[1] for pair in NEAR + FAR if pair[1] != there]
    assert errors.close_names(typed, [*others, there])[0] == there
    assert suggestions.likeness(there, typed)


@pytest.mark.parametrize(("typed", "there"), FAR)
def test_names_of_other_tensors_are_far(typed: str, there: str) -> None:
    assert errors.close_names(typed, [there]) == errors.close_names(there, [typed]) == []


def test_beside_all_the_words_there_are_no_others() -> None:
    names = [f"layers.0.self_attn.{each}_proj.weight" for each in "kqv"]
    assert errors.close_names("layers.0.self_attn.qproj.weight", names) == [names[1]]
    names = ["h.0.attn.bias", "h.0.attn.c_attn.bias"]
    assert errors.close_names("h.0.attn.c_attn.bisa", names) == names[1:]


def test_fields_that_are_half_remembered() -> None:
    fields = [*options.Options.__dataclass_fields__]
    assert errors.close_names("num_threads", fields) == ["threads"]
    assert errors.close_names("max_overhead", fields)[0] == "max_host_overhead"
    assert errors.close_names("page", fields) == ["page_cache"]
    assert errors.close_names("backend", fields) == []


_NAMES = [name for pair in NEAR + FAR for name in pair]


@given(st.sampled_from(_NAMES), st.randoms())
def test_a_slip_is_near_and_another_number_is_far(name: str, random: Random) -> None:
    words = re.findall(r"[a-z]{4,}", name)
    word = random.choice(words)
    at = random.randrange(len(word) - 1)
    slip = word[:at] + word[at + 1] + word[at] + word[at + 2 :]
    assert suggestions.likeness(name.replace(word, slip, 1), name)
    assert suggestions.likeness(name, name) == (1.0, 1.0)
    number = random.randrange(100, 200)
    for other in (f"{name}.{number}", re.sub(r"\d+", str(number), name, count=1)):
        assert other == name or errors.close_names(other, [name]) == []


@given(st.text(), st.lists(st.text()))
def test_any_text(word: str, choices: list[str]) -> None:
    assert {*errors.close_names(word, choices)} <= {*choices}
    errors.did_you_mean(word, choices)


def test_many_and_long_names_take_no_time() -> None:
    names = iter(f"{n:06}{'y' * 1000}" for n in range(6000))
    start = time.perf_counter()
    errors.close_names("x" * 10**6, names)
    assert time.perf_counter() - start < 5
    assert next(names).startswith("005000")
