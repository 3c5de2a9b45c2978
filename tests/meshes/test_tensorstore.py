"""OCDBT stores and Zarr arrays against TensorStore, which wrote them."""

from __future__ import annotations

import json
import math
import tempfile
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tensorstore as ts
from hypothesis import HealthCheck, given, settings, strategies as st

import mfload
from mfload import errors
from mfload.formats import ocdbt, orbax
from mfload.sources.directories import LocalDirectory

few = settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow], deadline=None)


def _content(directory: str, value: ocdbt.Value) -> bytes:
    if value.inline is not None:
        return value.inline
    return Path(directory, value.file).read_bytes()[value.offset : value.offset + value.nbytes]


@few
@given(
    st.lists(
        st.tuples(st.text("ab/.é", min_size=1, max_size=6), st.integers(0, 3000)), max_size=60
    ),
    st.sampled_from([None, {"id": "zstd"}]),
    st.integers(1, 600),
    st.integers(0, 1024),
    st.integers(1, 4),
)
def test_stores_of_any_height(
    pairs: list[tuple[str, int]], packed: Any, node: int, inline: int, rounds: int
) -> None:
    with tempfile.TemporaryDirectory() as directory:
        config = {"compression": packed, "max_decoded_node_bytes": node,
                  "max_inline_value_bytes": inline}  # fmt: skip
        base = {"driver": "file", "path": f"{directory}/"}
        store = ts.KvStore.open({"driver": "ocdbt", "base": base, "config": config}).result()
        wanted: dict[str, bytes] = {}
        for first in range(rounds):  # Each makes a version.
            with ts.Transaction() as transaction:
                for key, size in pairs[first::rounds]:
                    wanted[key] = np.random.default_rng(size).bytes(size)
                    store.with_transaction(transaction).write(key, wanted[key]).result()
        if not pairs:
            return
        found, files = ocdbt.read(LocalDirectory(directory))
        assert {key: _content(directory, value) for key, value in found.items()} == wanted
        assert next(iter(files)) == "manifest.ocdbt"


DTYPES = ["bool", "int8", "uint16", "int32", "uint64", "float16", "float32", "float64",
          "complex64", "bfloat16", "float8_e4m3fn", "float8_e5m2"]  # fmt: skip


@st.composite
def arrays(draw: Any) -> tuple[dict[str, Any], Any, list[Any]]:
    """The metadata of an array, its fill value, and what is written to it."""
    shape = draw(st.lists(st.integers(1, 9), max_size=3))
    chunk = [draw(st.integers(1, n + 2)) for n in shape]
    dtype = draw(st.sampled_from(DTYPES))
    pack = draw(st.sampled_from([None, "zstd", "gzip"]))
    big = draw(st.booleans())
    fill: Any = draw(st.sampled_from([0, 1]))
    if dtype == "bool":
        fill = bool(fill)
    elif dtype == "complex64":
        fill = [float(fill), 2.0]
    elif "float" in dtype:
        fill = draw(st.sampled_from([0.0, 1.5, "NaN", "Infinity"][: 3 if "e4m3" in dtype else 4]))
    elif dtype.startswith("int"):
        fill = -fill
    writes = [
        tuple(slice(*sorted(draw(st.tuples(st.integers(0, n), st.integers(0, n))))) for n in shape)
        for _ in range(draw(st.integers(0, 2)))
    ]
    if draw(st.booleans()):
        kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
        name = kind.str.replace("<", ">" if big else "<") if kind.isbuiltin == 1 else dtype
        compressor = {
            None: None,
            "zstd": {"id": "zstd", "level": 1},
            "gzip": {"id": "zlib", "level": 1},
        }
        metadata = {"zarr_format": 2, "shape": shape, "chunks": chunk, "dtype": name,
                    "compressor": compressor[pack], "filters": None,
                    "order": draw(st.sampled_from("CF")),
                    "fill_value": draw(st.sampled_from([None, fill])),
                    "dimension_separator": draw(st.sampled_from("./"))}  # fmt: skip
        return {"driver": "zarr", "metadata": metadata}, dtype, writes
    steps: list[Any] = [{"name": "bytes", "configuration": {"endian": "big" if big else "little"}}]
    if draw(st.booleans()):
        order = draw(st.permutations(range(len(shape))))
        steps.insert(0, {"name": "transpose", "configuration": {"order": order}})
    checks = draw(st.sampled_from([(), ("before",), ("after",), ("before", "after")]))
    if "before" in checks:
        steps.append({"name": "crc32c"})
    if pack is not None:
        steps.append({"name": pack, "configuration": {"level": 1}})
    if "after" in checks:
        steps.append({"name": "crc32c"})
    outer = chunk
    if draw(st.booleans()):
        outer = [n * draw(st.integers(1, 3)) for n in chunk]
        index: list[Any] = [{"name": "bytes", "configuration": {"endian": "little"}}]
        if draw(st.booleans()):
            index.append({"name": "crc32c"})
        steps = [{"name": "sharding_indexed", "configuration": {
            "chunk_shape": chunk, "codecs": steps, "index_codecs": index,
            "index_location": draw(st.sampled_from(["start", "end"]))}}]  # fmt: skip
    metadata = {"zarr_format": 3, "node_type": "array", "shape": shape, "data_type": dtype,
                "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": outer}},
                "chunk_key_encoding": {"name": draw(st.sampled_from(["default", "v2"]))},
                "codecs": steps, "fill_value": fill}  # fmt: skip
    return {"driver": "zarr3", "metadata": metadata}, dtype, writes


def _tree(directory: Path, names: list[str]) -> None:
    entries = {
        str((name,)): {
            "key_metadata": [{"key": name, "key_type": 2}],
            "value_metadata": {"value_type": "jax.Array", "skip_deserialize": False},
        }
        for name in names
    }
    (directory / orbax.TREE).write_text(json.dumps({"tree_metadata": entries}))


@settings(few, max_examples=300)
@given(arrays(), st.booleans(), st.randoms())
def test_arrays_of_any_kind(made: Any, in_store: bool, random: Any) -> None:
    how, dtype, writes = made
    with tempfile.TemporaryDirectory() as directory:
        base: dict[str, Any] = {"driver": "file", "path": f"{directory}/"}
        if in_store:
            base = {"driver": "ocdbt", "base": base, "path": "w/",
                    "config": {"max_inline_value_bytes": random.choice([0, 50, 1024])}}  # fmt: skip
        else:
            base["path"] += "w/"
        try:
            array = ts.open({**how, "kvstore": base}, create=True).result()
        except ValueError as error:
            if "fill_value" in str(error) or "fill value" in str(error):
                return  # Not one that the dtype has.
            raise
        kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
        for n, where in enumerate(writes):
            part = array[where] if where else array
            count = math.prod(part.shape)
            values = np.random.default_rng(n).integers(0, 2 if dtype == "bool" else 100, count)
            part.write(values.astype(kind).reshape(part.shape)).result()
        wanted = array.read().result()
        _tree(Path(directory), ["w"])
        found = mfload.load(directory, "numpy")["w"]
        assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
        assert found.tobytes() == wanted.tobytes()
        where = tuple(slice(random.randint(0, n), random.randint(0, n)) for n in wanted.shape)
        with mfload.open(directory, "numpy") as opened:
            assert opened.get_slice("w")[where].tobytes() == wanted[where].tobytes()


@pytest.mark.parametrize("compressor", ["blosc", "bz2"])
def test_other_compressors_are_refused_by_name(tmp_path: Path, compressor: str) -> None:
    metadata = {"shape": [4], "chunks": [4], "dtype": "<f4", "compressor": {"id": compressor}}
    base = {"driver": "file", "path": f"{tmp_path}/w/"}
    ts.open({"driver": "zarr", "metadata": metadata, "kvstore": base}, create=True).result()
    _tree(tmp_path, ["w"])
    with pytest.raises(errors.HeaderError, match="decompress") as caught:
        mfload.load(tmp_path, "numpy")
    assert (caught.value.tensor, caught.value.found) == ("w", repr(compressor))
