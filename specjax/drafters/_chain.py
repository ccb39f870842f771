"""Drawing a chain of drafts, one pass of a model after the other.

Axes: B rows, G draft length, V the target's vocabulary.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from specjax.core import Context, Params, Proposal
from specjax.ops import fold, sample, warp


def require_confidence(least: float | None) -> None:
    """Raises a ValueError unless `least` is a probability to stop below, or None."""
    if least is not None and not 0 < least <= 1:
        raise ValueError(
            "min_confidence, the least probability of a draft's best token, must "
            f"be in (0, 1] or None, got {least!r}"
        )


def draw_chain(
    read: Callable[[Array, Params], tuple[Array, Params]],
    keys: Array,
    first: Array,
    cache: Params,
    context: Context,
    *,
    gamma: int,
    min_confidence: float | None,
) -> tuple[Proposal, Params]:
    """Draws up to G tokens, each from the law behind the last one.

    Args:
        read: `(token [B, 1], cache) -> (logits [B, V], cache)`, a pass of the draft
            over one token more, over the target's vocabulary.
        keys: `[B]`, one a row.
        first: `[B, V]`, the logits behind the last committed token.
        cache: the draft's, with all that these logits rest on.
        context: for its sampling, and which rows run.
        gamma: G.
        min_confidence: a row stops where no token has this probability (before
            temperature and filters), the loop where all rows have. None: never.

    Returns:
        A chain, and the cache with all drafts but the last.
    """
    batch, size = first.shape
    put = jax.lax.dynamic_update_index_in_dim  # a scatter would copy the buffer

    def draw(chain: _Chain, logits: Array, cache: Params) -> _Chain:
        """One draft more, from the law behind the last."""
        log_q = warp(logits, context.sampling)
        token = sample(fold(keys, chain.index), log_q)
        going = chain.going
        if min_confidence is not None:
            best = jnp.max(jax.nn.softmax(logits.astype(jnp.float32)), axis=-1)
            going &= best >= min_confidence
        return _Chain(
            index=chain.index + 1,
            cache=cache,
            token=token,
            going=going,
            num_drafted=chain.num_drafted + going,
            tokens=put(chain.tokens, token, chain.index, 1),
            log_q=put(chain.log_q, log_q, chain.index, 1),
        )

    def more(chain: _Chain) -> Array:
        left = chain.index < gamma
        return left if min_confidence is None else left & jnp.any(chain.going)

    def step(chain: _Chain) -> _Chain:
        logits, cache = read(chain.token[:, None], chain.cache)
        return draw(chain, logits, cache)

    none = jnp.zeros((batch,), jnp.int32)
    running = context.running
    if running is None:
        running = jnp.ones((batch,), bool)
    chain = _Chain(
        index=jnp.zeros((), jnp.int32),
        cache=cache,
        token=none,
        going=running,
        num_drafted=none,
        tokens=jnp.zeros((batch, gamma), jnp.int32),
        log_q=jnp.zeros((batch, gamma, size)),
    )
    chain = jax.lax.while_loop(more, step, draw(chain, first, cache))
    proposal = Proposal.chain(chain.tokens, chain.log_q, chain.num_drafted)
    return proposal, chain.cache


class _Chain(NamedTuple):
    """Drafts so far, in buffers of G."""

    index: Array  # how many there are
    cache: Params
    token: Array  # [B], the last of them
    going: Array  # [B], whether the row still drafts
    num_drafted: Array  # [B]
    tokens: Array  # [B, G]
    log_q: Array  # [B, G, V]
