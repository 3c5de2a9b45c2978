"""Small files kept as they are, and what they load as (see make.py)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import reference

import mfload
from mfload import dtypes

HERE = Path(__file__).parent
EXPECTED: dict[str, Any] = json.loads((HERE / "expected.json").read_text())


def test_every_file_is_expected_and_small_and_every_dtype_is_there() -> None:
    files = {path.relative_to(HERE).parts[0]: path for path in HERE.rglob("*.safetensors")}
    assert files.keys() == EXPECTED.keys()
    assert max(path.stat().st_size for path in HERE.rglob("*.safetensors")) < 2048
    assert {f"{name.lower()}.safetensors" for name in dtypes.TABLE} <= EXPECTED.keys()


@pytest.mark.parametrize("name", EXPECTED)
def test_bytes_dtypes_shapes_and_metadata(name: str) -> None:
    expected = {
        tensor: reference.Tensor(row["dtype"], tuple(row["shape"]), bytes.fromhex(row["data"]))
        for tensor, row in EXPECTED[name]["tensors"].items()
    }
    assert reference.ours(HERE / name) == expected
    with mfload.open(HERE / name) as opened:
        assert opened.metadata() == EXPECTED[name]["metadata"]
    assert sorted(mfload.load(HERE / name, framework="numpy")) == sorted(expected)


def value(number: Any) -> complex:
    return complex(*number) if isinstance(number, list) else complex(float(number))


@pytest.mark.parametrize("dtype", dtypes.TABLE)
@pytest.mark.parametrize("engine", ["pread", "direct", "mmap"])
def test_numbers(dtype: str, engine: Any) -> None:
    """As worked out from the bytes by the formulas, without NumPy or ml_dtypes."""
    name = f"{dtype.lower()}.safetensors"
    row = EXPECTED[name]["tensors"]["w"]
    array = mfload.load(HERE / name, framework="numpy", options=mfload.Options(engine=engine))["w"]
    numbers = mfload.unpack(array, dtype, row["shape"])
    assert numbers.shape == tuple(row["shape"])
    if numbers.dtype.kind in "iu":
        assert numbers.reshape(-1).tolist() == row["values"]
        return
    found = [complex(each) for each in numbers.reshape(-1).astype(np.complex128)]
    wanted = [value(each) for each in row["values"]]
    # NaN is like NaN; a zero has a sign.
    assert [repr(each) for each in found] == [repr(each) for each in wanted]
