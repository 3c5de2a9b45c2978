"""`names=` and `dtype=`: what is chosen, what is converted, what is refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import samples

import mfload
from mfload import dtypes, errors
from mfload.dtypes import DType
from mfload.index import Index, Piece, TensorInfo
from mfload.planning import selection

NAMES = ["b.weight", "a.weight", "a.bias", "c"]


def _info(name: str, dtype: str = "F32") -> TensorInfo:
    return TensorInfo(name, dtypes.TABLE[dtype], (1,), (Piece(0, 0, dtypes.TABLE[dtype].nbytes),))


INDEX = Index(("file",), {name: _info(name) for name in NAMES})


def _chosen(names: selection.Names) -> list[str]:
    return [row.name for row in selection.select(INDEX, names)]


def test_names_are_chosen_in_the_order_of_the_file() -> None:
    assert _chosen(None) == NAMES
    assert _chosen("weight") == ["b.weight", "a.weight"]
    assert _chosen(re.compile("^A", re.I)) == ["a.weight", "a.bias"]
    assert _chosen(["c", "a.bias", "c"]) == ["a.bias", "c"]
    assert _chosen(name for name in ["c", "b.weight"]) == ["b.weight", "c"]
    assert _chosen({"c": 1}) == ["c"]
    assert _chosen(lambda name: name.startswith("a")) == ["a.weight", "a.bias"]


@pytest.mark.parametrize("names", [[], lambda _: False, "nothing"])
def test_nothing_chosen_is_an_error(names: Any) -> None:
    with pytest.raises(errors.TensorNotFoundError, match="no tensor matches"):
        _chosen(names)


def test_a_missing_name_is_an_error_with_near_ones() -> None:
    with pytest.raises(errors.TensorNotFoundError, match=r"a\.weight") as info:
        _chosen(["c", "a.wight"])
    assert info.value.tensor == "a.wight"
    with pytest.raises(errors.TensorNotFoundError, match="nothing like this") as info:
        _chosen("nothing like this")
    with pytest.raises(KeyError):
        _chosen("nothing like this")


@pytest.mark.parametrize("names", ["(", 5, [["a"]], [1], 1.5, re.compile(b"a")])
def test_senseless_names_are_refused(names: Any) -> None:
    with pytest.raises((errors.UsageError, errors.TensorNotFoundError)):
        _chosen(names)


def _target(stored: str, dtype: Any, name: str = "w") -> str:
    return _target_of(_info(name, stored), dtype)[0].name


def _target_of(info: TensorInfo, dtype: Any) -> tuple[DType, bool]:
    return selection.target(info, selection.read_dtype(dtype))


FLOATS = ["F16", "BF16", "F32", "F64", "F8_E4M3", "F8_E5M2"]
INTS = ["U8", "I8", "U16", "I16", "U32", "I32", "U64", "I64"]


@pytest.mark.parametrize("to", FLOATS)
def test_a_float_dtype_takes_floats_alone(to: str) -> None:
    for stored in FLOATS:
        assert _target(stored, to) == to
    for stored in [*INTS, "BOOL", "C64", "F4", "F6_E2M3", "F8_E8M0"]:
        assert _target(stored, to) == stored


@pytest.mark.parametrize("stored", [*INTS, "BOOL"])
@pytest.mark.parametrize("to", [*INTS, "BOOL"])
def test_integers_go_where_every_value_fits(stored: str, to: str) -> None:
    held = np.can_cast(dtypes.TABLE[stored].numpy, dtypes.TABLE[to].numpy, "safe")
    if held:
        assert _target_of(_info("w", stored), to) == (dtypes.TABLE[to], False)
        return
    with pytest.raises(errors.LossyCastError, match="ask for it by name") as info:
        _target(stored, to)
    assert (info.value.tensor, info.value.found) == ("w", stored)
    assert to in str(info.value)
    # By name it is asked for, and checked value by value.
    assert _target_of(_info("w", stored), {"w": to}) == (dtypes.TABLE[to], True)


def test_integers_of_2_and_4_bits_become_wider_ones() -> None:
    narrow = list(dtypes.NARROW.values())
    for given in (*narrow, *(dtypes.TABLE[name] for name in INTS)):
        for wanted in (*narrow, *(dtypes.TABLE[name] for name in INTS)):
            few, many = (ml_dtypes.iinfo(each.numpy) for each in (given, wanted))
            fits = int(many.min) <= int(few.min) and int(few.max) <= int(many.max)
            if wanted in narrow:  # What becomes narrower is asked for by name.
                fits = wanted is given
            assert selection.holds(wanted, given) == fits, (wanted, given)
    assert selection.holds(dtypes.TABLE["C64"], dtypes.NARROW["int4"])


@pytest.mark.parametrize("stored", FLOATS)
@pytest.mark.parametrize("to", [*INTS, "BOOL"])
def test_floats_become_integers_only_by_name(stored: str, to: str) -> None:
    with pytest.raises(errors.LossyCastError):
        _target(stored, to)
    assert _target_of(_info("w", stored), {"w": to}) == (dtypes.TABLE[to], True)


@pytest.mark.parametrize("stored", ["F8_E8M0", "F4", "F6_E2M3", "F6_E3M2"])
def test_scales_and_packed_types_take_no_part(stored: str) -> None:
    assert _target(stored, "I32") == stored
    assert _target(stored, {"other": "F32"}) == stored
    assert _target(stored, {"w": stored}) == stored
    for dtype in ({"w": "F32"}, {"w": "U8"}):
        with pytest.raises(errors.UnsupportedDtypeError, match="no conversion"):
            _target(stored, dtype)
    with pytest.raises(errors.UnsupportedDtypeError):
        _target("F32", {"w": stored})


def test_complex_numbers_stay_complex() -> None:
    assert _target("F32", "C64") == "C64"
    assert _target("BOOL", "C64") == "C64"
    with pytest.raises(errors.LossyCastError):
        _target("F64", "C64")
    with pytest.raises(errors.LossyCastError):
        _target("I64", "C64")
    with pytest.raises(errors.UnsupportedDtypeError):
        _target("C64", {"w": "F32"})
    with pytest.raises(errors.UnsupportedDtypeError):
        _target("C64", "I32")


def test_the_first_matching_pattern_counts() -> None:
    table = [(r"bias$", "F64"), (r"^a\.", "BF16"), (re.compile("C", re.I), "F16")]
    targets = {name: _target_of(INDEX[name], table)[0].name for name in NAMES}
    assert targets == {"b.weight": "F32", "a.weight": "BF16", "a.bias": "F64", "c": "F16"}
    with pytest.raises(errors.UsageError, match="regular expression"):
        _target("F32", [("(", "F64")])
    with pytest.raises(errors.UsageError, match="regular expression"):
        _target("F32", [(5, "F64")])


@pytest.mark.parametrize(
    ("spelling", "row"),
    [
        ("bfloat16", "BF16"), ("BF16", "BF16"), ("bf16", "BF16"), ("torch.bfloat16", "BF16"),
        (ml_dtypes.bfloat16, "BF16"), (np.dtype(ml_dtypes.bfloat16), "BF16"),
        ("float32", "F32"), ("F32", "F32"), ("fp32", "F32"), (np.float32, "F32"),
        (np.dtype("f4"), "F32"), ("half", "F16"), ("paddle.float16", "F16"), ("F64", "F64"),
        (ml_dtypes.float8_e4m3fn, "F8_E4M3"), ("float8_e5m2", "F8_E5M2"),
    ],
)  # fmt: skip
def test_dtypes_are_spelled_in_many_ways(spelling: Any, row: str) -> None:
    assert _target("F32" if row != "F32" else "F64", spelling) == row


@pytest.mark.parametrize("spelling", ["float31", "", 7, object(), {"w": "nonsense"}])
def test_what_is_no_dtype_is_refused(spelling: Any) -> None:
    with pytest.raises(errors.UsageError, match="unknown dtype"):
        _target("F32", spelling)


def test_rules_that_match_nothing_are_refused_and_one_among_others_warns(tmp_path: Path) -> None:
    path = samples.save(tmp_path / "a.safetensors", {"q.weight": np.zeros(3, np.float32)})
    for dtype, said in (
        ([("wieght", "bfloat16")], "match no tensor: 'wieght'"),
        ({"q.wieght": "bfloat16"}, "did you mean 'q.weight'"),
        ({r"q\..*": "bfloat16"}, "list of pairs"),
    ):
        with pytest.raises(errors.TensorNotFoundError, match=re.escape(said)):
            mfload.load(path, "numpy", dtype=dtype)
        more: Any = (
            [*dtype, ("q", "float16")] if isinstance(dtype, list) else dtype | {"q.weight": "F16"}
        )
        with pytest.warns(UserWarning, match=re.escape(said)) as caught:
            loaded = mfload.load(path, "numpy", dtype=more)
        assert caught[0].filename == __file__
        assert loaded["q.weight"].dtype == np.float16
    with pytest.raises(errors.TensorNotFoundError, match="exact names"):
        mfload.load(path, "numpy", names=[r"q\..*"])


def test_only_names_that_are_shown_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """A map for another checkpoint has thousands of names, and each comparison takes a while."""
    compared: list[object] = []
    monkeypatch.setattr(errors, "did_you_mean", lambda name, _: compared.append(name) or "")
    for rules in ({f"q{n}": "F16" for n in range(99)}, [(f"q{n}$", "F16") for n in range(99)]):
        compared.clear()
        made = [*rules, ("", "F16")] if isinstance(rules, list) else {**rules, NAMES[0]: "F16"}
        with pytest.warns(UserWarning, match="and 91 more"):
            selection.Rules("dtype=", made).warn_of_unmatched(NAMES)
        assert len(compared) == 8


@pytest.mark.parametrize("rules", [[], (), {}])
def test_no_rules_leave_all_as_stored(rules: Any) -> None:
    assert _target("F32", rules) == "F32"


def test_a_mapping_holds_exact_names() -> None:
    table = {"c": "F16", "weight": "BF16"}
    targets = {name: _target_of(INDEX[name], table)[0].name for name in NAMES}
    assert targets == {"b.weight": "F32", "a.weight": "F32", "a.bias": "F32", "c": "F16"}
