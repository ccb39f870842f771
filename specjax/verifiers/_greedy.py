"""Token matching: draw from the target, keep the drafts that it would have drawn."""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from jax import Array

from specjax.core import Proposal, Verdict
from specjax.ops import fold, sample
from specjax.verifiers._common import leading, row_at, verdict
from specjax.verifiers._registry import registry


@registry.register("greedy")
@dataclasses.dataclass(frozen=True)
class GreedyMatch:
    """Accepts a draft where it equals the target's own token at that position.

    At temperature 0 that token is the arg max: greedy matching. Above, it is a draw
    from p, made whether or not anything was drafted, so the output follows p whatever
    the draft: lossless, though it accepts less often than `Rejection` (p(x) instead of
    min(1, p(x) / q(x))).

    Reference: Stern et al., Blockwise Parallel Decoding, arXiv 1811.03115, section 3
    (greedy); with a sampled target, p's draw takes the place of the arg max.
    """

    lossless: ClassVar[bool] = True

    def __call__(self, keys: Array, proposal: Proposal, log_p: Array) -> Verdict:
        """See `specjax.core.Verifier`."""
        gamma = proposal.tokens.shape[1]
        own = jnp.stack(
            [sample(fold(keys, i), log_p[:, i]) for i in range(gamma + 1)], axis=1
        )
        drafted = jnp.arange(gamma)[None, :] < proposal.num_drafted[:, None]
        num_accepted = leading(drafted & (proposal.tokens == own[:, :gamma]))
        last = row_at(own[..., None], num_accepted)[:, 0]
        return verdict(num_accepted, proposal.tokens, last)
