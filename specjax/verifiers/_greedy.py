"""Token matching: draw from the target, keep the drafts that it would have drawn."""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from jax import Array

from specjax.core import Proposal, Verdict
from specjax.ops import fold, parent_rows, sample
from specjax.verifiers._common import drafted, path_verdict, row_at
from specjax.verifiers._registry import registry


@registry.register("greedy")
@dataclasses.dataclass(frozen=True)
class GreedyMatch:
    """Accepts a draft where it equals the target's own token at that position.

    At temperature 0 that token is the arg max: greedy matching. Above, it is a draw
    from p, made whether or not anything was drafted, so the output follows p whatever
    the draft: lossless, though it accepts less often than `Rejection` (p(x) instead of
    min(1, p(x) / q(x))). In a tree the walk goes on to the child that equals the
    target's token, if there is one.

    Reference: Stern et al., Blockwise Parallel Decoding, arXiv 1811.03115, section 3
    (greedy); with a sampled target, p's draw takes the place of the arg max. Trees:
    Miao et al., SpecInfer, arXiv 2305.09781, algorithm 2 (greedy) and section 4.3
    (naive sampling).
    """

    lossless: ClassVar[bool] = True
    trees: ClassVar[bool] = True

    def __call__(self, keys: Array, proposal: Proposal, log_p: Array) -> Verdict:
        """See `specjax.core.Verifier`."""
        batch = proposal.tokens.shape[0]
        parents, there = parent_rows(proposal.parents, batch), drafted(proposal)
        node = jnp.full((batch,), -1, jnp.int32)
        going, num_accepted = jnp.ones((batch,), bool), jnp.zeros((batch,), jnp.int32)
        last, path = num_accepted, []
        for depth in range(proposal.depth + 1):
            own = sample(fold(keys, depth), row_at(log_p, node + 1))
            last = jnp.where(going, own, last)
            if depth == proposal.depth:
                break
            equal = there & (parents == node[:, None])
            equal &= proposal.tokens == own[:, None]
            going &= jnp.any(equal, axis=1)
            child = jnp.argmax(equal, axis=1).astype(jnp.int32)
            node = jnp.where(going, child, node)
            num_accepted += going
            path.append(jnp.where(going, child, 0))
        none = jnp.zeros((batch, 0), jnp.int32)
        path = jnp.stack(path, axis=1) if path else none
        return path_verdict(proposal, num_accepted, path, last)
