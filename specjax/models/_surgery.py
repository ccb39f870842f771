"""Models made of other models: fewer layers, more, or a smaller head."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from specjax.core import Params
from specjax.models._config import ModelConfig
from specjax.models._head import HeadVocabulary


def pick_layers(
    config: ModelConfig, params: Params, layers: Sequence[int]
) -> tuple[ModelConfig, Params]:
    """A smaller model of chosen layers, with the embedding, head and final norm.

    Args:
        config: of the large model.
        params: its parameters.
        layers: which layers, from 0, in the order that they get.

    Returns:
        The smaller model's configuration and its parameters: the same arrays, no copy.

    Raises:
        ValueError: no layer, or one that is not there.
    """
    layers = tuple(layers)
    missing = [n for n in layers if not 0 <= n < config.num_layers]
    if not layers or missing:
        raise ValueError(
            f"layers must be some of 0..{config.num_layers - 1}, got {layers}"
        )
    small = {k: v for k, v in params.items() if not k.startswith("layers_")}
    small |= {f"layers_{i}": params[f"layers_{n}"] for i, n in enumerate(layers)}
    return dataclasses.replace(config, num_layers=len(layers)), small


def take_layers(
    config: ModelConfig, params: Params, layers: Sequence[int]
) -> tuple[ModelConfig, Params]:
    """As `pick_layers`, with a copy of the parameters: a draft to train."""
    small, picked = pick_layers(config, params, layers)
    return small, jax.tree.map(jnp.array, picked)


def grow(
    config: ModelConfig, params: Params, num_layers: int
) -> tuple[ModelConfig, Params]:
    """A deeper model that computes the same: copies of layers that add nothing yet.

    Each layer is followed by its copies, whose two output projections are zero: the
    residual stream passes through, and the gradient wakes them.

    Args:
        config: of the shallow model.
        params: its parameters.
        num_layers: a multiple of its layers.

    Returns:
        The deeper model's configuration and parameters.

    Reference: Shen et al., Staged Training for Transformer Language Models,
    arXiv 2203.06211 (function-preserving growth in depth).
    """
    if num_layers < config.num_layers or num_layers % config.num_layers:
        raise ValueError(
            f"num_layers must be a multiple of the model's {config.num_layers}, got "
            f"{num_layers}"
        )
    copies = num_layers // config.num_layers
    deep = {k: v for k, v in params.items() if not k.startswith("layers_")}
    for index in range(num_layers):
        layer = jax.tree.map(jnp.array, params[f"layers_{index // copies}"])
        if index % copies:
            for block, name in (("self_attn", "o_proj"), ("mlp", "down_proj")):
                layer[block][name] = jax.tree.map(jnp.zeros_like, layer[block][name])
        deep[f"layers_{index}"] = layer
    return dataclasses.replace(config, num_layers=num_layers), deep


def reduce_head(
    config: ModelConfig, params: Params, ids: Sequence[int] | np.ndarray
) -> tuple[ModelConfig, Params]:
    """The same model with a head over chosen ids: a cheaper draft.

    It reads every id as before and gives the chosen ones the same logits; the others
    get `-inf`. (`data.frequent_tokens` chooses.)

    Args:
        config: of a model with a full head, its own or the embedding.
        params: its parameters.
        ids: what the head shall have rows for, ascending.

    Returns:
        The configuration and a copy of the parameters, where `lm_head` has one row an
        id.

    Raises:
        ValueError: ids that do not ascend or that the vocabulary lacks, or a head that
            is reduced already.
    """
    if config.head is not None:
        raise ValueError(
            f"the head is reduced to {config.head.size} ids already, and rows that it "
            "lacks cannot be had back: reduce the model that it came from"
        )
    head = HeadVocabulary(ids)
    reduced = dataclasses.replace(config, head=head, tie_word_embeddings=False)
    rows = params["embed_tokens" if config.tie_word_embeddings else "lm_head"]
    copied = jax.tree.map(
        jnp.array, {k: v for k, v in params.items() if k != "lm_head"}
    )
    return reduced, {**copied, "lm_head": jnp.asarray(rows)[head.ids]}
