"""Seams of other libraries that are given the URL of a bucket."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import servers

import mfload
from mfload import errors

torch: Any = pytest.importorskip("torch")

ARRAYS = {
    f"l{n}.w": np.random.default_rng(n).standard_normal((64, 32), np.float32) for n in range(5)
}


@pytest.fixture(scope="module")
def url(moto: servers.Store) -> str:
    place = moto.url("seams/m")
    mfload.save(ARRAYS, place, max_shard_size="20kB", options=mfload.Options(store=moto.options))
    return place


@pytest.mark.parametrize("cached", [False, True])
def test_what_serves_models(moto: servers.Store, url: str, tmp_path: Path, cached: bool) -> None:
    """Of vLLM and SGLang, by `model_loader_extra_config`."""
    from mfload.compat.serving import Weights

    extra = {"cache": str(tmp_path / "cache")} if cached else {}
    for _ in range(2):
        weights = Weights({"path": url, "store": moto.options, **extra})
        found = dict(weights.rows(weights.path("org/model") or ""))
        assert {*found} == {*ARRAYS}
        for name, array in ARRAYS.items():
            np.testing.assert_array_equal(np.asarray(found[name]), array)
    assert weights.report.route[0][1].startswith("http")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_checkpoints_of_torch(moto: servers.Store, url: str) -> None:
    from torch.distributed import checkpoint as dcp

    from mfload.compat.dcp import HuggingFaceReader

    state = {name: torch.zeros(array.shape) for name, array in ARRAYS.items()}
    reader = HuggingFaceReader(url, options=mfload.Options(store=moto.options))
    dcp.load(state, storage_reader=reader, no_dist=True)
    for name, array in ARRAYS.items():
        np.testing.assert_array_equal(state[name].numpy(), array)


def test_transformers_are_given_a_directory(url: str) -> None:
    pytest.importorskip("transformers")
    from mfload.compat import transformers

    with pytest.raises(errors.MfloadError):
        transformers.from_pretrained(object, url)


def test_safetensors_by_the_drop_in(
    moto: servers.Store, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    del url
    from mfload.compat import safetensors

    for name, value in moto.environment.items():
        monkeypatch.setenv(name, value)
    place = moto.url("seams/one.safetensors")
    mfload.save(ARRAYS, place)
    with safetensors.safe_open(place, "np") as opened:
        np.testing.assert_array_equal(opened.get_tensor("l1.w"), ARRAYS["l1.w"])
        np.testing.assert_array_equal(opened.get_slice("l2.w")[3:9, ::5], ARRAYS["l2.w"][3:9, ::5])
