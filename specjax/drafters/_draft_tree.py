"""A tree that grows where the draft is sure: EAGLE-2's dynamic draft tree.

Axes: B rows, k candidates of a node and nodes of a level, G levels, C all candidates,
M nodes that are kept, D width, V vocabulary.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from specjax.core import Params

# `(tokens, guess, number, seen, cache) -> (guess, cache)`: reads the tokens [B, k] of
# level `number` (from 0), each behind the guess [B, k, D] of its parent. A node looks
# at the text, and at `seen` of the slots behind it [B, k, (G - 1) * k].
ReadLevel = Callable[[Array, Array, Array, Array, Params], tuple[Array, Params]]


class _Level(NamedTuple):
    """The k nodes of a level, which the draft reads next."""

    tokens: Array  # [B, k] int32
    guess: Array  # [B, k, D], the feature before each
    score: Array  # [B, k], the logarithm of the draft's probability of its path
    candidate: Array  # [B, k], its number among all candidates
    seen: Array  # [B, k, (G - 1) * k], the slots of its ancestors
    cache: Params


def num_candidates(depth: int, top_k: int) -> int:
    """C: k at the first level, k for each of k nodes at the others."""
    return top_k + (depth - 1) * top_k**2


def grow_tree(
    read: ReadLevel,
    logits: Callable[[Array], Array],
    guess: Array,
    cache: Params,
    *,
    depth: int,
    top_k: int,
    nodes: int,
) -> tuple[Array, Array]:
    """Expands the k likeliest nodes of each level, then keeps the M likeliest of all.

    A node's score is the product of the draft's probabilities along its path, before
    temperature and filters: about as likely as that the target accepts it. No child
    has more than its parent, and of equal scores the earlier number wins, so what is
    kept is a tree. Nothing is drawn.

    Args:
        read: see `ReadLevel`.
        logits: the draft's `[*B, V]` of guesses `[*B, D]`.
        guess: `[B, D]`, behind the last committed token.
        cache: the draft's, with all that it rests on; it is written behind, in a copy.
        depth: G.
        top_k: k.
        nodes: M.

    Returns:
        Tokens and parents `[B, M]` int32, parents before children.

    Reference: Li et al., EAGLE-2, arXiv 2406.16858, section 4.
    """
    batch = guess.shape[0]
    slots = max(depth - 1, 1) * top_k
    first = _best(logits(guess[:, None]), jnp.zeros((batch, 1)), top_k)
    root = jnp.full((batch, top_k), -1, jnp.int32)
    level = _Level(
        tokens=first[0],
        guess=jnp.repeat(guess[:, None], top_k, axis=1),
        score=first[1],
        candidate=jnp.broadcast_to(jnp.arange(top_k)[None], (batch, top_k)),
        seen=jnp.zeros((batch, top_k, slots), bool),
        cache=cache,
    )
    own = jnp.arange(slots)[None, :] - jnp.arange(top_k)[:, None]

    def expand(level: _Level, number: Array):
        """All children of a level, and the best of them as the next one."""
        seen = level.seen | (own == number * top_k)[None]
        guess, cache = read(level.tokens, level.guess, number, seen, level.cache)
        tokens, scores = _best(logits(guess), level.score, top_k)
        score, best = jax.lax.top_k(scores, top_k)
        parent = best // top_k
        start = top_k + number * top_k**2
        below = _Level(
            tokens=jnp.take_along_axis(tokens, best, axis=1),
            guess=_rows(guess, parent),
            score=score,
            candidate=start + best,
            seen=_rows(seen, parent),
            cache=cache,
        )
        parents = jnp.repeat(level.candidate, top_k, axis=1)
        return below, (tokens, scores, parents)

    _, below = jax.lax.scan(expand, level, jnp.arange(depth - 1))
    tokens, scores, parents = (
        jnp.concatenate([x, jnp.swapaxes(y, 0, 1).reshape(batch, -1)], axis=1)
        for x, y in zip((*first, root), below, strict=True)
    )
    return _keep(tokens, scores, parents, nodes)


def _best(logits: Array, score: Array, top_k: int) -> tuple[Array, Array]:
    """Of logits `[B, n, V]` the k likeliest tokens of each and the scores, `[B, nk]`.

    `score [B, n]` is that of the n nodes.
    """
    log_q = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
    best, tokens = jax.lax.top_k(log_q, top_k)
    # (A rounded logarithm must not lift a child above its parent.)
    scores = score[..., None] + jnp.minimum(best, 0.0)
    shape = (logits.shape[0], -1)
    return tokens.astype(jnp.int32).reshape(shape), scores.reshape(shape)


def _keep(tokens: Array, scores: Array, parents: Array, nodes: int):
    """The M best of C candidates in their order, parents by their new numbers."""
    _, kept = jax.lax.top_k(scores, nodes)
    kept = jnp.sort(kept, axis=1)
    number = jnp.arange(scores.shape[1])[None, None, :]
    is_kept = jnp.any(kept[:, :, None] == number, axis=1)
    new_number = jnp.cumsum(is_kept, axis=1) - 1
    parent = jnp.take_along_axis(parents, kept, axis=1)
    moved = jnp.take_along_axis(new_number, jnp.maximum(parent, 0), axis=1)
    parent = jnp.where(parent >= 0, moved, -1).astype(jnp.int32)
    return jnp.take_along_axis(tokens, kept, axis=1), parent


def _rows(x: Array, index: Array) -> Array:
    """`x [B, n, W]` at `index [B, k]`: `[B, k, W]`."""
    return jnp.take_along_axis(x, index[:, :, None], axis=1)
