"""Tensors to fill a checkpoint with, drawn per run, so that no loader is tuned to one file."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

Shapes = list[tuple[str, tuple[int, ...]]]
"""Names and shapes, in the order of the model."""


@dataclass(frozen=True, slots=True)
class Family:
    """Widths of one published family of decoder models.

    Args:
        name: What the family is like.
        hidden: Width of the residual stream.
        inner: Width of the feed-forward layer.
        kv: Width of keys and of values, all heads together.
    """

    name: str
    hidden: int
    inner: int
    kv: int

    def halved(self) -> Family:
        """The same proportions at half the width, for checkpoints too small for the whole."""
        return Family(f"{self.name}/2", self.hidden // 2, self.inner // 2, self.kv // 2)

    def layer(self, number: int) -> Shapes:
        """Names and shapes of one decoder layer."""
        at = f"model.layers.{number}"
        return [
            (f"{at}.self_attn.q_proj.weight", (self.hidden, self.hidden)),
            (f"{at}.self_attn.k_proj.weight", (self.kv, self.hidden)),
            (f"{at}.self_attn.v_proj.weight", (self.kv, self.hidden)),
            (f"{at}.self_attn.o_proj.weight", (self.hidden, self.hidden)),
            (f"{at}.mlp.gate_proj.weight", (self.inner, self.hidden)),
            (f"{at}.mlp.up_proj.weight", (self.inner, self.hidden)),
            (f"{at}.mlp.down_proj.weight", (self.hidden, self.inner)),
            (f"{at}.input_layernorm.weight", (self.hidden,)),
            (f"{at}.post_attention_layernorm.weight", (self.hidden,)),
        ]


FAMILIES = (
    Family("Llama-3.2-1B", 2048, 8192, 512),
    Family("TinyLlama-1.1B", 2048, 5632, 256),
    Family("Llama-3.2-3B", 3072, 8192, 1024),
    Family("Llama-2-7B", 4096, 11008, 4096),
    Family("Llama-3-8B", 4096, 14336, 1024),
)


def bytes_of(shapes: Shapes) -> int:
    """Bytes of bf16 tensors of these shapes."""
    return sum(2 * int(np.prod(shape, dtype=np.int64)) for _, shape in shapes)


def draw(
    rng: np.random.Generator,
    nbytes: int,
    vocabulary: tuple[float, float] = (0.08, 0.2),
    *,
    tied: bool | None = None,
    multiple: int = 1,
) -> tuple[Family, Shapes]:
    """Draw the tensors of a decoder.

    Args:
        rng: What they follow from.
        nbytes: Bytes of bf16 to come close to.
        vocabulary: The least and the greatest share of the bytes that embeddings take.
        tied: Whether there is one embedding and no head; drawn where None.
        multiple: What the rows of embeddings are a multiple of.

    Returns:
        The family drawn, and its tensors with a few odd-sized ones among them.
    """
    family = FAMILIES[rng.integers(len(FAMILIES))]
    while bytes_of(family.layer(0)) > nbytes / 5:
        family = family.halved()
    drawn = bool(rng.integers(2))
    tied = drawn if tied is None else tied
    wanted = rng.uniform(*vocabulary) * nbytes
    layers = int((nbytes - wanted) // bytes_of(family.layer(0)))
    # What whole layers leave over goes to the vocabulary, so that the total is met closely.
    left = nbytes - layers * bytes_of(family.layer(0))
    rows = int(left // (2 * family.hidden * (1 if tied else 2))) // multiple * multiple
    shapes: Shapes = [("model.embed_tokens.weight", (rows, family.hidden))]
    odd = _odd(rng, layers)
    for number in range(layers):
        shapes += family.layer(number)
        shapes += [(name, shape) for at, name, shape in odd if at == number]
    shapes.append(("model.norm.weight", (family.hidden,)))
    if not tied:
        shapes.append(("lm_head.weight", (rows, family.hidden)))
    return family, shapes


def _odd(rng: np.random.Generator, layers: int) -> list[tuple[int, str, tuple[int, ...]]]:
    """Draw a few tensors of odd sizes and the layers they belong to."""
    odd: list[tuple[int, ...]] = [(), (1,)]
    odd += [(2 * int(rng.integers(1, 1024)) + 1,) for _ in range(2)]
    odd += [tuple(2 * int(n) + 1 for n in rng.integers(1, 256, 2)) for _ in range(2)]
    return [
        (at, f"model.layers.{at}.adapter.{i}", shape)
        for i, shape in enumerate(odd)
        for at in [int(rng.integers(layers))]
    ]
