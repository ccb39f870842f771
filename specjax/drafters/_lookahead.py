"""Lookahead: the target guesses several tokens ahead in the pass that verifies.

Axes: B rows, W columns of the window, N the level (n of the n-grams), R = N - 1 rows of
the window, C guesses, P n-grams in a pool, V vocabulary.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from specjax.core import (
    Checkpoint,
    Context,
    Feedback,
    LMOutput,
    Params,
    Proposal,
    record,
)
from specjax.drafters._registry import registry


@record
class _Pool:
    """The newest n-grams of each row, in a ring."""

    first: Array  # [B, P] int32, the token that each begins with; -1: none here
    rest: Array  # [B, P, R] int32, what came behind it
    count: Array  # [B] int32, how many were ever added


@record
class _State:
    """Between rounds; see `Lookahead`."""

    window: Array  # [B, R, W] int32
    filled: Array  # [] int32, rows of the window that hold guesses of the target
    pool: _Pool


@registry.register("lookahead")
@dataclasses.dataclass(frozen=True)
class Lookahead:
    """Drafts n-grams that the target itself guessed in earlier rounds.

    Beside the drafts the target reads a window of R = N - 1 rows of W tokens, guesses
    of what lies ahead. Row r, column j stands r + j tokens behind the last committed
    one, which is (0, 0) itself. Row 0 is read as one chain; below, (r, j) sees the
    column above it and row 0 up to j. The arg maxima behind the last row are the next
    row: a step of Jacobi iteration, in which each row follows from the one before.
    Then column j from top to bottom, with the new token at its end, is an n-gram of N
    tokens that the target has just written. It goes into a pool, and the oldest row
    leaves the window, which always moves on by one token as in the authors' code.

    What is drafted are the newest n-grams of the pool that begin with the last token,
    as a tree in which common beginnings are one branch. Nothing is drawn: drafts are
    point masses, at any temperature. The window lies in the same pass, behind the
    drafts, as nodes that no verifier looks at. So a round costs one target pass of
    C * R + R * W tokens, and no draft.

    The window begins with tokens of the prompt in an order of no meaning, and fills by
    a row a round; until then no n-gram is added.

    Attributes:
        window: W, columns of the window.
        level: N, at least 2: an n-gram has N tokens, of which N - 1 are drafted.
        guesses: C, the most n-grams that are drafted in a round.
        pool: P, the n-grams kept a row; the oldest go.
        prompt_as_reference: begin with the n-grams of the prompt in the pool.

    Reference: Fu et al., Break the Sequential Dependency of LLM Inference Using
    Lookahead Decoding, arXiv 2402.02057, algorithm 2 and section 3.

    Example:
        >>> Lookahead(window=3, level=3, guesses=2).num_nodes  # 2 * 2 + 2 * 3 - 1
        9
    """

    window: int = 7
    level: int = 5
    guesses: int = 7
    pool: int = 1024
    prompt_as_reference: bool = False

    def __post_init__(self):
        for name, least in (("window", 1), ("level", 2), ("guesses", 1), ("pool", 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(
                    f"Lookahead needs {name}, a whole number >= {least}, got {value!r}"
                )
        if self.pool < max(self.window, self.guesses):
            raise ValueError(
                "Lookahead's pool must hold the n-grams of one round at least, "
                f"{max(self.window, self.guesses)} of them, got pool={self.pool}"
            )

    @property
    def gamma(self) -> int:
        """G = N - 1: what is drafted of an n-gram."""
        return self.level - 1

    @property
    def num_nodes(self) -> int:
        """M: the guesses and, behind them, the window without its first token."""
        return self.gamma * (self.guesses + self.window) - 1

    @property
    def reach(self) -> int:
        """The depth of the deepest token of the window."""
        return max(self.gamma, self.gamma - 1 + self.window - 1)

    def bind(self, target: Checkpoint, max_length: int) -> tuple["Lookahead", Params]:
        """See `Drafter.bind`: any target will do."""
        return self, ()

    def init(
        self,
        params: Params,
        tokens: Array,
        length: Array,
        capacity: int,
        target: LMOutput,
    ) -> _State:
        """A window of tokens of the prompt, and its n-grams if they are wanted."""
        batch, rows = tokens.shape[0], self.gamma
        noise = jax.random.bits(jax.random.key(0), (1, rows * self.window)) >> 1
        place = noise.astype(jnp.int32) % length[:, None]
        window = jnp.take_along_axis(tokens, place, axis=1)
        pool = _Pool(
            first=jnp.full((batch, self.pool), -1, jnp.int32),
            rest=jnp.zeros((batch, self.pool, rows), jnp.int32),
            count=jnp.zeros((batch,), jnp.int32),
        )
        if self.prompt_as_reference:
            pool = self._add_prompt(pool, tokens, length)
        window = window.reshape(batch, rows, self.window)
        return _State(window, jnp.ones((), jnp.int32), pool)

    def propose(
        self, params: Params, keys: Array, state: _State, context: Context
    ) -> tuple[Proposal, _State]:
        """The pool's guesses, and the window behind them."""
        last = context.token_at(context.length - 1)
        window = state.window.at[:, 0, 0].set(last)
        guesses, found = _look_up(state.pool, last, self.guesses)
        batch = last.shape[0]
        tokens = [guesses, window.reshape(batch, -1)[:, 1:]]
        beside = jnp.asarray(_window_parents(self), jnp.int32)
        beside = jnp.broadcast_to(beside, (batch, beside.shape[1]))
        parents = [_merged(guesses), beside]
        proposal = Proposal.tree(
            jnp.concatenate([x.reshape(batch, -1) for x in tokens], axis=1),
            None,
            found * self.gamma,
            jnp.concatenate([x.reshape(batch, -1) for x in parents], axis=1),
            self.gamma,
        )
        return proposal, dataclasses.replace(state, window=window)

    def commit(self, params: Params, state: _State, feedback: Feedback) -> _State:
        """The window's next row, and the n-grams that it completes."""
        rows, window = self.gamma, state.window
        # Entries of the target's output: 0 is the last token, which is (0, 0).
        entry = np.arange(rows * self.window) + rows * self.guesses
        entry[0] = 0
        entry = jnp.asarray(entry.reshape(rows, self.window))[state.filled - 1]
        guess = jnp.argmax(feedback.target.logits[:, entry], -1).astype(jnp.int32)

        full = state.filled == rows
        shifted = jnp.concatenate([window[:, 1:], guess[:, None]], axis=1)
        pool = _add(
            state.pool,
            window[:, 0],
            jnp.swapaxes(shifted, 1, 2),
            jnp.broadcast_to(jnp.where(full, self.window, 0), window.shape[:1]),
        )
        row = jnp.arange(rows)[None, :, None]
        begun = jnp.where(row == state.filled, guess[:, None], window)
        return _State(
            window=jnp.where(full, shifted, begun),
            filled=jnp.minimum(state.filled + 1, rows),
            pool=pool,
        )

    def _add_prompt(self, pool: _Pool, tokens: Array, length: Array) -> _Pool:
        """Adds all n-grams of the prompts, W at a time, the last as the newest."""
        batch, width = tokens.shape
        steps = -(-width // self.window)
        tokens = jnp.pad(
            tokens, ((0, 0), (0, steps * self.window + self.level - width))
        )
        offset = jnp.arange(self.window)[:, None] + jnp.arange(self.level)[None, :]

        def add(step: Array, pool: _Pool) -> _Pool:
            start = step * self.window
            grams = tokens[:, (start + offset).reshape(-1)]
            grams = grams.reshape(batch, self.window, self.level)
            there = length - self.gamma - start  # n-grams that end within the prompt
            there = jnp.clip(there, 0, self.window)
            return _add(pool, grams[:, :, 0], grams[:, :, 1:], there)

        return jax.lax.fori_loop(0, steps, add, pool)


@functools.lru_cache(maxsize=64)
def _window_parents(drafter: Lookahead) -> np.ndarray:
    """The parents `[1, R * W - 1]` of the window's nodes, row by row."""
    rows, columns = drafter.gamma, drafter.window
    node = np.arange(rows * columns).reshape(rows, columns)
    node += rows * drafter.guesses - 1  # behind the guesses; (0, 0) is no node
    node[0, 0] = -1
    parents = np.empty_like(node)
    parents[0, 1:] = node[0, :-1]
    parents[1:] = node[:-1]
    return parents.reshape(1, -1)[:, 1:]


def _merged(guesses: Array) -> Array:
    """Parents `[B, C, R]` of guesses `[B, C, R]`: what begins alike is one branch.

    A token hangs on the first guess that agrees with all before it. Of the same token
    twice there the later one is never needed: no verifier goes down to it.
    """
    count, rows = guesses.shape[1:]
    same = guesses[:, :, None] == guesses[:, None, :]  # [B, C, C, R]
    alike = jnp.cumprod(same.astype(jnp.int32), axis=3)
    earliest = jnp.argmax(alike, axis=2).astype(jnp.int32)  # agree up to and with r
    above = earliest[:, :, :-1] * rows + jnp.arange(rows - 1)[None, None, :]
    root = jnp.full((guesses.shape[0], count, 1), -1, jnp.int32)
    return jnp.concatenate([root, above.astype(jnp.int32)], axis=2)


def _look_up(pool: _Pool, token: Array, most: int) -> tuple[Array, Array]:
    """The newest n-grams that begin with `token [B]`: `[B, C, R]`, and how many."""
    size = pool.first.shape[1]
    age = (pool.count[:, None] - 1 - jnp.arange(size)[None, :]) % size  # 0: the newest
    rank = jnp.where(pool.first == token[:, None], size - age, 0)
    rank, place = jax.lax.top_k(rank, most)
    rest = jnp.take_along_axis(pool.rest, place[:, :, None], axis=1)
    return rest, jnp.sum(rank > 0, axis=1, dtype=jnp.int32)


def _add(pool: _Pool, first: Array, rest: Array, number: Array) -> _Pool:
    """Adds the first `number [B]` of W n-grams; one that is there already moves up.

    Args:
        pool: the pool.
        first: `[B, W]`.
        rest: `[B, W, R]`.
        number: `[B]`, how many of the W count.
    """
    size, columns = pool.first.shape[1], first.shape[1]
    new = jnp.arange(columns)[None, :] < number[:, None]

    def equal(first_a: Array, rest_a: Array) -> Array:
        """Which new ones `[B, n, W]` are the same n-gram as one of n."""
        same = jnp.all(rest_a[:, :, None] == rest[:, None], axis=3)
        return same & (first_a[:, :, None] == first[:, None]) & new[:, None]

    known = jnp.where(jnp.any(equal(pool.first, pool.rest), 2), -1, pool.first)
    column = jnp.arange(columns)
    later = equal(first, rest) & (column[None, :] > column[:, None])[None]
    first = jnp.where(jnp.any(later, axis=2), -1, first)
    slot = (pool.count[:, None] + column[None, :]) % size
    slot = jnp.where(new, slot, size + column[None, :])  # dropped

    def put(buffer: Array, slot: Array, values: Array) -> Array:
        return buffer.at[slot].set(values, mode="drop", unique_indices=True)

    return _Pool(
        first=jax.vmap(put)(known, slot, first),
        rest=jax.vmap(put)(pool.rest, slot, rest),
        count=pool.count + number,
    )
