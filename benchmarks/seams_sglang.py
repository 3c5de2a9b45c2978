"""A Llama of SGLang's layers, made and filled on a CPU by SGLang's loaders.

Its own model class wants a server's arguments and kernels; the layers, which hold the weights and
their loaders, do without. For torchvision, which SGLang imports for images, there is a stub.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from benchmarks import ROOT

# Of the names in a checkpoint: the layer that holds the weight, and as which of its parts.
PARTS = {
    "q_proj": ("qkv", ("q",)),
    "k_proj": ("qkv", ("k",)),
    "v_proj": ("qkv", ("v",)),
    "gate_proj": ("gate_up", (0,)),
    "up_proj": ("gate_up", (1,)),
    "o_proj": ("o", ()),
    "down_proj": ("down", ()),
}


def layers(config: dict[str, Any], rank: int, ranks: int) -> Any:
    """The layers of a model that hold weights, without values, of one process of several."""
    import torch
    from sglang.srt.layers import linear, vocab_parallel_embedding

    width, middle, heads = (
        config[key] for key in ("hidden_size", "intermediate_size", "num_attention_heads")
    )
    group = SimpleNamespace(rank_in_group=rank, world_size=ranks)
    parallel = SimpleNamespace(tp_group=group, tp_rank=rank, tp_size=ranks)
    given: dict[str, Any] = {"bias": False, "params_dtype": torch.bfloat16}
    made: Any = torch.nn.Module()
    made.layers = torch.nn.ModuleList()
    with (
        mock.patch.object(linear, "get_parallel", return_value=parallel),
        mock.patch.object(vocab_parallel_embedding, "get_parallel", return_value=parallel),
    ):
        embed = vocab_parallel_embedding.VocabParallelEmbedding
        for name in ("embed_tokens", "lm_head"):
            setattr(made, name, embed(config["vocab_size"], width, params_dtype=torch.bfloat16))
        for _ in range(config["num_hidden_layers"]):
            layer: Any = torch.nn.Module()
            layer.qkv = linear.QKVParallelLinear(width, width // heads, heads, **given)
            layer.o = linear.RowParallelLinear(width, width, **given)
            layer.gate_up = linear.MergedColumnParallelLinear(width, [middle] * 2, **given)
            layer.down = linear.RowParallelLinear(middle, width, **given)
            for name in ("input_layernorm", "post_attention_layernorm"):
                setattr(layer, name, torch.nn.LayerNorm(width, bias=False, dtype=torch.bfloat16))
            made.layers.append(layer)
    made.norm = torch.nn.LayerNorm(width, bias=False, dtype=torch.bfloat16)
    return made.requires_grad_(False)


def fill(model: Any, weights: Any) -> None:
    """Gives weights to the loaders of their layers, as the models of SGLang do."""
    from sglang.srt.model_loader.weight_utils import default_weight_loader

    found = dict(model.named_parameters())
    for name, weight in weights:
        path, _, kind = name.removeprefix("model.").rpartition(".")
        part = path.rpartition(".")[2]
        own, which = PARTS.get(part, (part, ()))
        block = ".".join(path.split(".")[:2]) + "." if path.startswith("layers.") else ""
        parameter = found[f"{block}{own}.{kind}"]
        getattr(parameter, "weight_loader", default_weight_loader)(parameter, weight, *which)


def load(ours: bool, path: Path, ranks: int) -> list[Any]:
    """The weights of this process, by mfload or by SGLang's default loader."""
    if importlib.util.find_spec("torchvision") is None:
        sys.path.append(str(ROOT / "tests" / "compat" / "stubs"))
    import torch.distributed as dist
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.model_loader import loader as loaders
    from sglang.srt.plugins.hook_registry import HookRegistry

    from mfload.compat import sglang

    sglang.register()
    HookRegistry.apply_hooks()
    names = "disable_mmap", "prefetch_checkpoints", "drop_cache_after_load"
    asked = SimpleNamespace(**{f"weight_loader_{name}": False for name in names})
    asked.weight_loader_prefetch_num_threads = 1
    config = json.loads((path / "config.json").read_text())
    rank = dist.get_rank() if dist.is_initialized() else 0
    with (
        mock.patch.object(loaders, "get_server_args", return_value=None),
        mock.patch.object(loaders, "get_model", return_value=asked),
    ):
        given: Any = {"load_format": "mfload" if ours else "safetensors"}
        made: Any = loaders.get_model_loader(LoadConfig(**given))
        model = layers(config, rank, ranks)
        source = loaders.DefaultModelLoader.Source(str(path), None)
        fill(model, made._get_weights_iterator(source))
    return [each.data for each in model.parameters()]
