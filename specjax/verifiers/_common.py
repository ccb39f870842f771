"""What verifiers share: reading laws at tokens, and putting a verdict together.

Axes: B rows, G draft length, V vocabulary.
"""

import jax.numpy as jnp
from jax import Array

from specjax.core import Verdict


def at(log_probs: Array, tokens: Array) -> Array:
    """`log_probs [B, G, V]` at `tokens [B, G]`."""
    return jnp.take_along_axis(log_probs, tokens[..., None], axis=-1)[..., 0]


def row_at(x: Array, index: Array) -> Array:
    """`x [B, G+1, V]` at position `index [B]`: `[B, V]`."""
    return jnp.take_along_axis(x, index[:, None, None], axis=1)[:, 0]


def leading(accept: Array) -> Array:
    """How many of `accept [B, G]` are true before the first that is not."""
    return jnp.sum(jnp.cumprod(accept.astype(jnp.int32), axis=1), axis=1)


def verdict(num_accepted: Array, tokens: Array, last: Array) -> Verdict:
    """The drafts `tokens [B, G]` with `last [B]` behind those that were accepted."""
    slot = jnp.arange(tokens.shape[1] + 1)[None, :]
    padded = jnp.pad(tokens, ((0, 0), (0, 1)))
    emitted = jnp.where(slot == num_accepted[:, None], last[:, None], padded)
    return Verdict(num_accepted, emitted)
