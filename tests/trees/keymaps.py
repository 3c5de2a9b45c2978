"""Key maps as their users write them, for small made-up checkpoints, and what comes of them.

The names and shapes are those of Llama-like and Qwen-like checkpoints on one side, and of models
as Tunix and Bonsai lay them out on the other. What is expected is computed here with NumPy alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from mfload.trees.keymap import rule

# Layer 10 comes after layer 2, and not before it.
LAYERS, EXPERTS = 12, 4
VOCAB, WIDTH, HEADS, KV_HEADS, HEAD, HIDDEN = 64, 32, 8, 2, 16, 48

Array = np.ndarray[Any, Any]
Arrays = dict[str, Array]


class Case(NamedTuple):
    """A checkpoint, a key map, and what the leaves of the target must hold.

    Names of leaves have dots between their parts; a part of digits is a place in a list.
    """

    checkpoint: Arrays
    mapping: Any
    expected: Arrays


@dataclass(frozen=True)
class Made:
    """What kind of checkpoint it is."""

    norms: bool = False
    biases: bool = False
    experts: bool = False
    fused: bool = False
    dtype: Any = ml_dtypes.bfloat16


LLAMA = Made()
QWEN = Made(norms=True, biases=True)
QWEN_EXPERTS = Made(norms=True, experts=True)


def checkpoint(made: Made, seed: int = 0) -> Arrays:
    """A checkpoint with names as Hugging Face writes them."""
    rng = np.random.default_rng(seed)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB, WIDTH)}
    for layer in range(LAYERS):
        at = f"model.layers.{layer}."
        shapes |= {f"{at}{name}.weight": shape for name, shape in _layer(made).items()}
        if made.biases:
            for name, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
                shapes[f"{at}self_attn.{name}_proj.bias"] = (heads * HEAD,)
    shapes["model.norm.weight"] = (WIDTH,)
    shapes["lm_head.weight"] = (VOCAB, WIDTH)
    return {
        name: rng.standard_normal(shape, dtype=np.float32).astype(made.dtype)
        for name, shape in shapes.items()
    }


def _layer(made: Made) -> dict[str, tuple[int, ...]]:
    attention = {
        "self_attn.q_proj": (HEADS * HEAD, WIDTH),
        "self_attn.k_proj": (KV_HEADS * HEAD, WIDTH),
        "self_attn.v_proj": (KV_HEADS * HEAD, WIDTH),
    }
    if made.fused:
        attention = {"self_attn.qkv_proj": ((HEADS + 2 * KV_HEADS) * HEAD, WIDTH)}
    attention["self_attn.o_proj"] = (WIDTH, HEADS * HEAD)
    if made.norms:
        attention |= {"self_attn.q_norm": (HEAD,), "self_attn.k_norm": (HEAD,)}
    into, out = (HIDDEN, WIDTH), (WIDTH, HIDDEN)
    mlp = {"mlp.gate_proj": into, "mlp.up_proj": into, "mlp.down_proj": out}
    if made.experts:
        one = {f"mlp.experts.{n}.{name[4:]}": s for n in range(EXPERTS) for name, s in mlp.items()}
        mlp = {"mlp.gate": (EXPERTS, WIDTH), **one}
    norms = {"input_layernorm": (WIDTH,), "post_attention_layernorm": (WIDTH,)}
    return attention | mlp | norms


def tunix() -> dict[str, Any]:
    """A map in Tunix's form; as theirs do, it serves checkpoints that lack some of it."""
    layer = r"model\.layers\.([0-9]+)\."
    heads = {"q": HEADS, "k": KV_HEADS, "v": KV_HEADS}
    return {
        r"model\.embed_tokens\.weight": ("embedder.input_embedding", None),
        **{
            rf"{layer}self_attn\.{name}_proj\.weight": (
                rf"layers.\1.attn.{name}_proj.w",
                ((1, 0), (WIDTH, count, HEAD)),
            )
            for name, count in heads.items()
        },
        **{
            rf"{layer}self_attn\.{name}_proj\.bias": (rf"layers.\1.attn.{name}_bias", None)
            for name in heads
        },
        rf"{layer}self_attn\.o_proj\.weight": (
            r"layers.\1.attn.o_proj.w",
            ((1, 0), (HEADS, HEAD, WIDTH)),
        ),
        rf"{layer}self_attn\.(q|k)_norm\.weight": (r"layers.\1.attn.\2_norm.w", None),
        rf"{layer}mlp\.(gate|up|down)_proj\.weight": (
            r"layers.\1.mlp.\2_proj.kernel",
            ((1, 0), None),
        ),
        rf"{layer}mlp\.gate\.weight": (r"layers.\1.mlp.router.kernel", ((1, 0), None)),
        rf"{layer}mlp\.experts\.([0-9]+)\.(gate|up|down)_proj\.weight": (
            r"layers.\1.mlp.experts.\2.\3_proj.kernel",
            ((1, 0), None),
        ),
        rf"{layer}(input|post_attention)_layernorm\.weight": (r"layers.\1.\2_layernorm.w", None),
        r"model\.norm\.weight": ("final_norm.w", None),
        r"lm_head\.weight": ("lm_head.w", ((1, 0), None)),
    }


class Transform(Enum):
    """Transforms as Bonsai names them; members with one value are one member."""

    BIAS = None
    EMBED = None
    SCALE = None
    LINEAR = ((1, 0), None, False)
    ATTN_Q = ((2, 0, 1), (HEADS, HEAD, WIDTH), True)
    ATTN_KV = ((2, 0, 1), (KV_HEADS, HEAD, WIDTH), True)
    ATTN_OUT = ((1, 0), (HEADS, HEAD, WIDTH), False)


def bonsai() -> dict[str, Any]:
    r"""A map in Bonsai's form: with an enum, anchors, and `\.` in replacements here and there."""
    layer = r"^model\.layers\.(\d+)\."
    return {
        r"^model\.embed_tokens\.weight$": (r"embedder\.embedding", Transform.EMBED),
        layer + r"self_attn\.q_proj\.weight$": (r"layers.\1.attn.q_proj.kernel", Transform.ATTN_Q),
        layer + r"self_attn\.(k|v)_proj\.weight$": (
            r"layers\.\1\.attn\.\2_proj\.kernel",
            Transform.ATTN_KV,
        ),
        layer + r"self_attn\.o_proj\.weight$": (
            r"layers.\1.attn.o_proj.kernel",
            Transform.ATTN_OUT,
        ),
        layer + r"self_attn\.(q|k|v)_proj\.bias$": (
            r"layers.\1.attn.\2_proj.bias",
            Transform.BIAS,
        ),
        layer + r"self_attn\.(q|k)_norm\.weight$": (
            r"layers.\1.attn.\2_norm.scale",
            Transform.SCALE,
        ),
        layer + r"mlp\.(gate|up|down)_proj\.weight$": (
            r"layers.\1.mlp.\2_proj.kernel",
            Transform.LINEAR,
        ),
        layer + r"mlp\.gate\.weight$": (r"layers.\1.mlp.router.kernel", Transform.LINEAR),
        layer + r"mlp\.experts\.(\d+)\.(gate|up|down)_proj\.weight$": (
            r"layers.\1.mlp.experts.\2.\3_proj.kernel",
            Transform.LINEAR,
        ),
        layer + r"(input|post_attention)_layernorm\.weight$": (
            r"layers.\1.\2_layernorm.scale",
            Transform.SCALE,
        ),
        r"^model\.norm\.weight$": ("final_norm.scale", Transform.SCALE),
        r"^lm_head\.weight$": ("lm_head.kernel", Transform.LINEAR),
    }


def scanned(made: Made) -> dict[str, Any]:
    """A map for a model that scans over its layers: every leaf has a dim of layers in front."""
    layer = r"model\.layers\.([0-9]+)\."
    heads = {"q": HEADS, "k": KV_HEADS, "v": KV_HEADS}
    found: dict[str, Any] = {
        r"model\.embed_tokens\.weight": "embedder.embedding",
        **{
            rf"{layer}self_attn\.{name}_proj\.weight": rule(
                f"layers.attn.{name}_proj.kernel",
                transpose=(1, 0),
                reshape=(WIDTH, count, HEAD),
                stack=1,
            )
            for name, count in heads.items()
        },
        rf"{layer}self_attn\.o_proj\.weight": rule(
            "layers.attn.o_proj.kernel", transpose=(1, 0), reshape=(HEADS, HEAD, WIDTH), stack=1
        ),
        rf"{layer}(input|post_attention)_layernorm\.weight": rule(
            r"layers.\2_layernorm.scale", stack=1
        ),
        r"model\.norm\.weight": "final_norm.scale",
        r"lm_head\.weight": rule("lm_head.kernel", transpose=(1, 0)),
    }
    if made.biases:
        for name, count in heads.items():
            found[rf"{layer}self_attn\.{name}_proj\.bias"] = rule(
                f"layers.attn.{name}_proj.bias", reshape=(count, HEAD), stack=1
            )
    if made.norms:
        found[rf"{layer}self_attn\.(q|k)_norm\.weight"] = rule(
            r"layers.attn.\2_norm.scale", stack=1
        )
    if made.experts:
        found[rf"{layer}mlp\.gate\.weight"] = rule(
            "layers.mlp.router.kernel", transpose=(1, 0), stack=1
        )
        found[rf"{layer}mlp\.experts\.([0-9]+)\.(gate|up|down)_proj\.weight"] = rule(
            r"layers.mlp.\3_proj", transpose=(1, 0), stack=(1, 2)
        )
    else:
        found[rf"{layer}mlp\.(gate|up|down)_proj\.weight"] = rule(
            r"layers.mlp.\2_proj.kernel", transpose=(1, 0), stack=1
        )
    return found


def _unscanned(stored: Arrays, made: Made, weight: str, scale: str) -> Arrays:
    """The leaves of a model with a list of layers, kernels as (in, out)."""
    found: Arrays = {}
    for layer in range(LAYERS):
        at, to = f"model.layers.{layer}.", f"layers.{layer}."
        for name, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            kernel = stored[f"{at}self_attn.{name}_proj.weight"].T.reshape(WIDTH, heads, HEAD)
            found[f"{to}attn.{name}_proj.{weight}"] = kernel
            if made.biases:
                key = f"{name}_bias" if weight == "w" else f"{name}_proj.bias"
                found[f"{to}attn.{key}"] = stored[f"{at}self_attn.{name}_proj.bias"]
        out = stored[f"{at}self_attn.o_proj.weight"].T.reshape(HEADS, HEAD, WIDTH)
        found[f"{to}attn.o_proj.{weight}"] = out
        if made.norms:
            for name in ("q_norm", "k_norm"):
                found[f"{to}attn.{name}.{scale}"] = stored[f"{at}self_attn.{name}.weight"]
        for name in ("gate_proj", "up_proj", "down_proj"):
            if not made.experts:
                found[f"{to}mlp.{name}.kernel"] = stored[f"{at}mlp.{name}.weight"].T
                continue
            for n in range(EXPERTS):
                kernel = stored[f"{at}mlp.experts.{n}.{name}.weight"].T
                found[f"{to}mlp.experts.{n}.{name}.kernel"] = kernel
        if made.experts:
            found[f"{to}mlp.router.kernel"] = stored[f"{at}mlp.gate.weight"].T
        for name in ("input_layernorm", "post_attention_layernorm"):
            found[f"{to}{name}.{scale}"] = stored[f"{at}{name}.weight"]
    found[f"final_norm.{scale}"] = stored["model.norm.weight"]
    found[f"lm_head.{weight}"] = stored["lm_head.weight"].T
    embedding = "input_embedding" if weight == "w" else "embedding"
    found[f"embedder.{embedding}"] = stored["model.embed_tokens.weight"]
    return found


def _scanned(stored: Arrays, made: Made) -> Arrays:
    """The same leaves with the layers in front, and the experts after them."""
    flat = _unscanned(stored, made, "kernel", "scale")
    found = {name: leaf for name, leaf in flat.items() if not name.startswith("layers.")}
    for name in (n.removeprefix("layers.0.") for n in flat if n.startswith("layers.0.")):
        if ".experts." not in name:
            found[f"layers.{name}"] = np.stack([flat[f"layers.{n}.{name}"] for n in range(LAYERS)])
    for name in ("q", "k", "v") if made.biases else ():
        key = f"layers.attn.{name}_proj.bias"
        found[key] = found[key].reshape(LAYERS, -1, HEAD)
    for name in ("gate_proj", "up_proj", "down_proj") if made.experts else ():
        key = "layers.{}.mlp.experts.{}." + name + ".kernel"
        rows = [np.stack([flat[key.format(n, m)] for m in range(EXPERTS)]) for n in range(LAYERS)]
        found[f"layers.mlp.{name}"] = np.stack(rows)
    return found


def tunix_case(made: Made) -> Case:
    """Tunix's form, with a list of layers."""
    stored = checkpoint(made)
    return Case(stored, tunix(), _unscanned(stored, made, "w", "w"))


def bonsai_case(made: Made) -> Case:
    """Bonsai's form, with a list of layers."""
    stored = checkpoint(made)
    return Case(stored, bonsai(), _unscanned(stored, made, "kernel", "scale"))


def scanned_case(made: Made) -> Case:
    """Rules that stack layers, and experts."""
    stored = checkpoint(made)
    return Case(stored, scanned(made), _scanned(stored, made))


def joining_case() -> Case:
    """q, k and v are stored apart, and are one kernel of the target, layers in front."""
    stored = checkpoint(LLAMA)
    mapping = {
        r"model\.layers\.(\d+)\.self_attn\.(q|k|v)_proj\.weight": rule(
            "layers.attn.qkv", transpose=(1, 0), concat=(-1, 2, ("q", "k", "v")), stack=1
        ),
        r"model\.embed_tokens\.weight": rule("embedding", scale=WIDTH**0.5),
        r"(lm_head|model\.norm|model\.layers\.\d+\.(?!self_attn\.[qkv]_)).*": None,
    }
    rows = [
        np.concatenate(
            [stored[f"model.layers.{n}.self_attn.{name}_proj.weight"].T for name in "qkv"], axis=-1
        )
        for n in range(LAYERS)
    ]
    embedding = stored["model.embed_tokens.weight"].astype(np.float32) * np.float32(WIDTH**0.5)
    leaves = {"layers.attn.qkv": np.stack(rows), "embedding": embedding.astype(ml_dtypes.bfloat16)}
    return Case(stored, mapping, leaves)


def splitting_case() -> Case:
    """q, k and v are stored as one tensor, and are three kernels of each layer of the target."""
    stored = {n: a for n, a in checkpoint(Made(fused=True)).items() if "qkv_proj" in n}
    mapping = {
        r"model\.layers\.(\d+)\.self_attn\.qkv_proj\.weight": rule(
            [rf"layers.\1.{name}.kernel" for name in "qkv"],
            split=0,
            transpose=(1, 0),
            reshape=(WIDTH, -1, HEAD),
        )
    }
    leaves: Arrays = {}
    for layer in range(LAYERS):
        fused = stored[f"model.layers.{layer}.self_attn.qkv_proj.weight"]
        ends = (HEADS * HEAD, (HEADS + KV_HEADS) * HEAD)
        for name, part in zip("qkv", np.split(fused, ends), strict=True):
            leaves[f"layers.{layer}.{name}.kernel"] = part.T.reshape(WIDTH, -1, HEAD)
    return Case(stored, mapping, leaves)


def tied_case() -> Case:
    """Tensors that are stored once are several leaves each, as they are and turned."""
    stored = checkpoint(LLAMA)
    layer = r"model\.layers\.(\d+)\."
    turned = ((1, 0), None)
    mapping = {
        r"model\.embed_tokens\.weight": [
            "embedder.embedding",
            rule(["lm_head.kernel", "draft.head.kernel"], transpose=(1, 0)),
        ],
        layer + r"input_layernorm\.weight": [r"layers.\1.norm.scale", r"draft.\1.norm.scale"],
        layer + r"mlp\.up_proj\.weight": [(r"layers.\1.up", turned), (r"draft.\1.up", None)],
        layer + r"mlp\.gate_proj\.weight": rule(["gates", "draft.gates"], stack=1),
        r".*": None,
    }
    embedding = stored["model.embed_tokens.weight"]
    leaves = {"embedder.embedding": embedding}
    leaves |= {"lm_head.kernel": embedding.T, "draft.head.kernel": embedding.T}
    for n in range(LAYERS):
        norm = stored[f"model.layers.{n}.input_layernorm.weight"]
        leaves |= {f"layers.{n}.norm.scale": norm, f"draft.{n}.norm.scale": norm}
        up = stored[f"model.layers.{n}.mlp.up_proj.weight"]
        leaves |= {f"layers.{n}.up": up.T, f"draft.{n}.up": up}
    gates = np.stack([stored[f"model.layers.{n}.mlp.gate_proj.weight"] for n in range(LAYERS)])
    return Case(stored, mapping, leaves | {"gates": gates, "draft.gates": gates})


CASES: dict[str, Callable[[], Case]] = {
    "tunix llama": lambda: tunix_case(LLAMA),
    "tunix qwen": lambda: tunix_case(QWEN),
    "tunix qwen experts": lambda: tunix_case(QWEN_EXPERTS),
    "bonsai llama": lambda: bonsai_case(LLAMA),
    "bonsai qwen": lambda: bonsai_case(QWEN),
    "bonsai qwen experts": lambda: bonsai_case(QWEN_EXPERTS),
    "scanned llama": lambda: scanned_case(LLAMA),
    "scanned qwen": lambda: scanned_case(QWEN),
    "scanned qwen experts": lambda: scanned_case(QWEN_EXPERTS),
    "q, k and v joined": joining_case,
    "q, k and v split": splitting_case,
    "tied": tied_case,
}
"""A function for each, as checkpoints take a moment to make."""
