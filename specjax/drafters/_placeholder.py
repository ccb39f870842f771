"""Drafts that cost nothing and mean nothing, to time the loop with."""

import dataclasses

import jax.numpy as jnp
from jax import Array

from specjax.core import Checkpoint, Context, Params, Proposal, Stateless
from specjax.drafters._registry import registry, require_gamma


@registry.register("placeholder")
@dataclasses.dataclass(frozen=True)
class Placeholder(Stateless):
    """Drafts the last token again and again, in every round and row.

    For `verifiers.Simulated`, which accepts it as often as a draft in question would
    be: what is left of a round is what verifying and the loop cost. With any other
    verifier the output is right, and hardly ever faster.

    Attributes:
        gamma: G, tokens drafted in a round.
    """

    gamma: int = 5

    def __post_init__(self):
        require_gamma(self.gamma)

    def bind(self, target: Checkpoint, max_length: int) -> tuple["Placeholder", Params]:
        """See `Drafter.bind`: any target will do."""
        return self, ()

    def propose(
        self, params: Params, keys: Array, state: Params, context: Context
    ) -> tuple[Proposal, Params]:
        """G times the last token, a point mass each."""
        last = context.token_at(context.length - 1)
        tokens = jnp.repeat(last[:, None], self.gamma, axis=1)
        return Proposal.chain(tokens, None, jnp.full_like(last, self.gamma)), state
