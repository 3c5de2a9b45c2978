"""A BERT sentence encoder in Flax NNX, spelt like the all-MiniLM-L6-v2 checkpoint.

Every attribute below carries the name that the checkpoint gives it, so the path of a parameter in
the module *is* its name in the file, and every weight keeps the layout it has there. No name map
and no transposition is needed: the arrays that were loaded are the parameters.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx


@dataclass(frozen=True, slots=True)
class Config:
    """The sizes of the network, by their names in the model's `config.json`."""

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_hidden_layers: int
    vocab_size: int
    max_position_embeddings: int
    type_vocab_size: int
    layer_norm_eps: float


class Linear(nnx.Module):
    """`x @ W.T + b`, with W stored (outputs, inputs) as in the checkpoint."""

    def __init__(self, inputs: int, outputs: int):
        self.weight = nnx.Param(jnp.zeros((outputs, inputs)))
        self.bias = nnx.Param(jnp.zeros(outputs))

    def __call__(self, x: jax.Array) -> jax.Array:
        return x @ self.weight.T + self.bias


class LayerNorm(nnx.Module):
    """Normalises the last axis, then scales and shifts it."""

    def __init__(self, size: int, eps: float):
        self.eps = eps
        self.weight = nnx.Param(jnp.ones(size))
        self.bias = nnx.Param(jnp.zeros(size))

    def __call__(self, x: jax.Array) -> jax.Array:
        return jax.nn.standardize(x, epsilon=self.eps) * self.weight + self.bias


class Table(nnx.Module):
    """Rows looked up by id."""

    def __init__(self, rows: int, size: int):
        self.weight = nnx.Param(jnp.zeros((rows, size)))

    def __call__(self, ids: jax.Array) -> jax.Array:
        return self.weight[ids]


class Embeddings(nnx.Module):
    """Word, position and segment vectors, summed and normalised."""

    def __init__(self, config: Config):
        size = config.hidden_size
        self.word_embeddings = Table(config.vocab_size, size)
        self.position_embeddings = Table(config.max_position_embeddings, size)
        self.token_type_embeddings = Table(config.type_vocab_size, size)
        self.LayerNorm = LayerNorm(size, config.layer_norm_eps)

    def __call__(self, ids: jax.Array) -> jax.Array:
        positions = jnp.arange(ids.shape[1])
        # A sentence on its own is always segment 0.
        segment = self.token_type_embeddings(jnp.zeros((), jnp.int32))
        return self.LayerNorm(
            self.word_embeddings(ids) + self.position_embeddings(positions) + segment
        )


class SelfAttention(nnx.Module):
    """Each token looks at all real tokens, in several heads."""

    def __init__(self, config: Config):
        size = config.hidden_size
        self.heads = config.num_attention_heads
        self.query = Linear(size, size)
        self.key = Linear(size, size)
        self.value = Linear(size, size)

    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        query, key, value = (
            part(x).reshape(*x.shape[:2], self.heads, -1)
            for part in (self.query, self.key, self.value)
        )
        # (batch, 1, 1, token): the same keys are hidden from every head and every query.
        mixed = jax.nn.dot_product_attention(query, key, value, mask=mask[:, None, None, :])
        return mixed.reshape(x.shape)


class Residual(nnx.Module):
    """A projection, added to what came before and normalised."""

    def __init__(self, inputs: int, config: Config):
        self.dense = Linear(inputs, config.hidden_size)
        self.LayerNorm = LayerNorm(config.hidden_size, config.layer_norm_eps)

    def __call__(self, x: jax.Array, before: jax.Array) -> jax.Array:
        return self.LayerNorm(self.dense(x) + before)


class Attention(nnx.Module):
    """Self-attention and its residual."""

    def __init__(self, config: Config):
        self.self = SelfAttention(config)
        self.output = Residual(config.hidden_size, config)

    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        return self.output(self.self(x, mask), x)


class Intermediate(nnx.Module):
    """The widening half of the feed-forward block."""

    def __init__(self, config: Config):
        self.dense = Linear(config.hidden_size, config.intermediate_size)

    def __call__(self, x: jax.Array) -> jax.Array:
        # The model was trained with the exact GELU; JAX's default is the tanh approximation.
        return jax.nn.gelu(self.dense(x), approximate=False)


class Layer(nnx.Module):
    """One transformer layer: attention, then feed-forward."""

    def __init__(self, config: Config):
        self.attention = Attention(config)
        self.intermediate = Intermediate(config)
        self.output = Residual(config.intermediate_size, config)

    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        x = self.attention(x, mask)
        return self.output(self.intermediate(x), x)


class Stack(nnx.Module):
    """The layers, one after the other."""

    def __init__(self, config: Config):
        self.layer = nnx.List([Layer(config) for _ in range(config.num_hidden_layers)])

    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        for layer in self.layer:
            x = layer(x, mask)
        return x


class SentenceEncoder(nnx.Module):
    """Token ids in, one unit vector a sentence out."""

    def __init__(self, config: Config):
        self.embeddings = Embeddings(config)
        self.encoder = Stack(config)

    def __call__(self, ids: jax.Array, mask: jax.Array) -> jax.Array:
        """Embeds a padded batch.

        Args:
            ids: token ids, int32, shape (batch, tokens).
            mask: true where a token is real, bool, shape (batch, tokens).

        Returns:
            Vectors of length 1, float32, shape (batch, hidden_size).
        """
        tokens = self.encoder(self.embeddings(ids), mask)
        mean = tokens.mean(axis=1, where=mask[:, :, None])
        return mean / jnp.linalg.norm(mean, axis=1, keepdims=True)


def from_weights(weights: Mapping[str, jax.Array], config: Config) -> SentenceEncoder:
    """Makes an encoder whose parameters are the given arrays themselves, not copies.

    Args:
        weights: arrays by checkpoint name; names that the encoder does not use are left alone.
        config: the sizes of the network.

    Returns:
        The encoder, ready to call.

    Raises:
        KeyError: the checkpoint lacks a parameter.
        ValueError: a parameter has another shape or dtype than the encoder needs.
    """
    # Only shapes are traced here: no placeholder weights are ever allocated.
    graph, wanted = nnx.split(nnx.eval_shape(lambda: SentenceEncoder(config)))
    filled = []
    for path, parameter in nnx.to_flat_state(wanted):
        name = ".".join(map(str, path))
        if name not in weights:
            raise KeyError(f"the checkpoint lacks {name!r}")
        have, want = weights[name], parameter.get_value()
        if (have.shape, have.dtype) != (want.shape, want.dtype):
            raise ValueError(
                f"{name!r}: expected {want.dtype}{want.shape}, found {have.dtype}{have.shape}"
            )
        filled.append((path, parameter.replace(have)))
    return nnx.merge(graph, nnx.from_flat_state(filled))


@nnx.jit
def embed(encoder: SentenceEncoder, ids: jax.Array, mask: jax.Array) -> jax.Array:
    """Calls the encoder, compiled once for each shape of batch; see `SentenceEncoder.__call__`."""
    # Accelerators multiply float32 in fewer bits unless told not to, which costs three digits.
    with jax.default_matmul_precision("highest"):
        return encoder(ids, mask)
