"""A drafter that is right as often as it is told to be."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import Array

from specjax.core import Checkpoint, Context, Params, Proposal, Stateless


@dataclasses.dataclass(frozen=True, eq=False)
class Scripted:
    """Drafts what a script says, the first `right` tokens of a round correctly.

    With the greedy continuation as the script, exactly `right` of `gamma` drafts stay
    in every round: the accepted counts 0..gamma can each be tested on purpose.

    Attributes:
        gamma: G, drafts a round.
        tokens: `[B, S]`, the whole text of each row as it will be, prompt included.
        right: `[B]` or one number, how many drafts of a round follow the script; those
            behind are the script's token plus one. Negative: as many as the row's
            length modulo G + 1, so that a run goes through all counts.
    """

    gamma: int
    tokens: Any
    right: Any

    def bind(self, target: Checkpoint, max_length: int) -> tuple["_Bound", Params]:
        """See `Drafter.bind`."""
        tokens = jnp.asarray(self.tokens, jnp.int32)
        right = jnp.broadcast_to(jnp.asarray(self.right, jnp.int32), tokens.shape[:1])
        return _Bound(self.gamma, target.model.vocab_size), (tokens, right)


@dataclasses.dataclass(frozen=True)
class _Bound(Stateless):
    gamma: int
    vocab_size: int

    def propose(
        self, params: Params, keys: Array, state: Params, context: Context
    ) -> tuple[Proposal, Params]:
        script, right = params
        offset = jnp.arange(self.gamma)[None, :]
        cycle = context.length % (self.gamma + 1)
        right = jnp.where(right < 0, cycle, right)[:, None]
        slot = jnp.minimum(context.length[:, None] + offset, script.shape[1] - 1)
        tokens = jnp.take_along_axis(script, slot, axis=1)
        tokens = jnp.where(offset < right, tokens, (tokens + 1) % self.vocab_size)
        drafted = jnp.full(context.length.shape, self.gamma, jnp.int32)
        return Proposal.chain(tokens, None, drafted), state
