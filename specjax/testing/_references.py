"""Uncached references: every step reads the whole text again."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from specjax.core import LanguageModel, Params

_BUCKET = 64  # texts are padded to a multiple, so that few programs are compiled


def greedy_reference(
    model: LanguageModel, params: Params, prompt: Sequence[int], num_tokens: int
) -> list[int]:
    """The arg max continuation of `prompt`, without a cache: what decoding must equal.

    Args:
        model: the target.
        params: its parameters.
        prompt: at least one token id.
        num_tokens: how many to add.
    """
    buffer = _padded(prompt, len(prompt) + num_tokens)
    text = _continue(model, params, buffer, len(prompt), len(prompt) + num_tokens)
    return np.asarray(text)[0, len(prompt) : len(prompt) + num_tokens].tolist()


def reference_logits(
    model: LanguageModel, params: Params, tokens: Sequence[int]
) -> np.ndarray:
    """Raw logits `[T, V]` behind each of `tokens`, in one uncached pass."""
    return np.asarray(
        _logits(model, params, _padded(tokens, len(tokens)))[0, : len(tokens)]
    )


def _padded(tokens: Sequence[int], size: int):
    buffer = np.zeros((1, -(-size // _BUCKET) * _BUCKET), np.int32)
    buffer[0, : len(tokens)] = tokens
    return jnp.asarray(buffer)


@functools.partial(jax.jit, static_argnums=0)
def _continue(model, params, buffer, start, end):
    def step(length, buffer):
        # What is behind `length` is padding: a causal model does not look there.
        logits = model.apply(params, buffer)[0].logits[:, length - 1]
        return buffer.at[:, length].set(jnp.argmax(logits, -1).astype(buffer.dtype))

    return jax.lax.fori_loop(start, end, step, buffer)


@functools.partial(jax.jit, static_argnums=0)
def _logits(model, params, tokens):
    return model.apply(params, tokens)[0].logits.astype(jnp.float32)
