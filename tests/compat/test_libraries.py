"""Libraries that load and save through the package safetensors, under `patch()`.

They are large, and `make libraries` has an environment for them; without one its tests are skipped.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mfload.compat import patch, safetensors as ours

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was opened and written through mfload."""
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    seen: list[str] = []
    for name in ("open_file", "save_file"):
        real = getattr(ours, name)

        def count(*args: Any, name: str = name, real: Any = real, **named: Any) -> Any:
            seen.append(name)
            return real(*args, **named)

        monkeypatch.setattr(ours, name, count)
    return seen


def _equal(one: dict[str, Any], other: dict[str, Any]) -> None:
    import torch

    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name


@pytest.mark.parametrize("size", ["1GB", "20KB"])
def test_transformers(tmp_path: Path, calls: list[str], size: str) -> None:
    transformers = pytest.importorskip("transformers", reason="make libraries installs it")
    config = transformers.LlamaConfig(
        vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(tmp_path / "theirs", max_shard_size=size)
    with patch():
        model.save_pretrained(tmp_path / "ours", max_shard_size=size)
        assert "save_file" in calls
        for where in ("ours", "theirs"):
            calls.clear()
            loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path / where)
            assert calls.count("open_file") >= len(list((tmp_path / where).glob("*.safetensors")))
            _equal(loaded.state_dict(), model.state_dict())
    calls.clear()
    _equal(
        transformers.LlamaForCausalLM.from_pretrained(tmp_path / "ours").state_dict(),
        model.state_dict(),
    )
    assert not calls
    for file in (tmp_path / "theirs").glob("*.safetensors"):
        assert file.read_bytes() == (tmp_path / "ours" / file.name).read_bytes()


def test_accelerate(tmp_path: Path, calls: list[str]) -> None:
    accelerate = pytest.importorskip("accelerate", reason="make libraries installs it")
    import torch

    model, other = (
        torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 4)) for _ in range(2)
    )
    with patch():
        accelerate.Accelerator(cpu=True).save_model(model, tmp_path)
        assert "save_file" in calls
        calls.clear()
        accelerate.load_checkpoint_in_model(other, tmp_path)
    assert "open_file" in calls
    _equal(model.state_dict(), other.state_dict())


def test_diffusers(tmp_path: Path, calls: list[str]) -> None:
    diffusers = pytest.importorskip("diffusers", reason="make libraries installs it")
    model = diffusers.UNet2DModel(
        sample_size=8, block_out_channels=(32, 32), layers_per_block=1,
        down_block_types=("DownBlock2D",) * 2, up_block_types=("UpBlock2D",) * 2,
    )  # fmt: skip
    with patch():
        model.save_pretrained(tmp_path)
        assert "save_file" in calls
        calls.clear()
        loaded = diffusers.UNet2DModel.from_pretrained(tmp_path)
    assert "open_file" in calls
    _equal(model.state_dict(), loaded.state_dict())


def test_keras_hub(tmp_path: Path, calls: list[str]) -> None:
    pytest.importorskip("keras_hub", reason="make libraries installs it")
    import keras_hub
    import torch
    from keras_hub.src.utils.transformers.safetensor_utils import SafetensorLoader

    from mfload.compat.safetensors import numpy

    weights = {"a.weight": torch.arange(6.0).reshape(2, 3).numpy()}
    numpy.save_file(weights, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert"}))
    assert keras_hub.__version__
    with patch(), SafetensorLoader(str(tmp_path), prefix="") as loader:
        found = loader.get_tensor("a.weight")
    assert "open_file" in calls
    assert torch.equal(torch.as_tensor(found), torch.as_tensor(weights["a.weight"]))
