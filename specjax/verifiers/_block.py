"""Block verification: how many drafts stay is decided for the block as a whole."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax import Array

from specjax.core import Proposal, Verdict
from specjax.ops import fold, sample
from specjax.verifiers._common import (
    at,
    chain_verdict,
    draft_at,
    draft_law,
    drafted,
    require_chain,
    row_at,
)
from specjax.verifiers._registry import registry


@registry.register("block")
@dataclasses.dataclass(frozen=True)
class Block:
    """Keeps the longest part of the block that any of G coins lets stay.

    With b_0 = 1, b_i = min(1, b_{i-1} p_i(x_i) / q_i(x_i)) and the mass
    r_i = sum_v max(0, b_i p_{i+1}(v) - q_{i+1}(v)), the first i drafts may stay with
    the chance h_i = r_i / (r_i + 1 - b_i), and h_G = b_G. Every coin is thrown, and the
    longest part that one of them allows stays: a draft that came too often can be made
    good by those behind it. Then follows a draw from norm(max(0, b p - q)) there, or
    from p behind the whole block.

    The output follows p exactly, and of all verifiers that look at one chain none keeps
    more drafts on average. At temperature 0 it is `Rejection`.

    Reference: Sun et al., Block Verification Accelerates Speculative Decoding, arXiv
    2403.10444, algorithm 2.
    """

    lossless: ClassVar[bool] = True
    trees: ClassVar[bool] = False

    def __call__(self, keys: Array, proposal: Proposal, log_p: Array) -> Verdict:
        """See `specjax.core.Verifier`."""
        require_chain(self, proposal)
        gamma, size = proposal.tokens.shape[1], log_p.shape[-1]
        ratio = jnp.exp(at(log_p[:, :gamma], proposal.tokens) - draft_at(proposal))
        # Behind padding, or a law of NaN, b and so h are 0. (0 * inf would be NaN.)
        there = drafted(proposal) & (ratio > 0)
        ratio = jnp.where(there, jnp.minimum(ratio, 1e30), 0.0)
        weight = jnp.ones(ratio.shape[:1])
        weights, chances = [weight], [jnp.ones_like(weight)]  # of keeping none
        for index in range(gamma):
            weight = jnp.minimum(1.0, weight * ratio[:, index])
            mass = _residual_mass(proposal, log_p, index + 1, weight)
            rest = mass + 1.0 - weight
            # 0 / 0: the laws are equal, and the coin of the next draft decides.
            chance = jnp.where(rest > 0.0, mass / jnp.maximum(rest, 1e-30), 0.0)
            # Behind the last draft q is zero: the chance is the weight (but rounded).
            more = index + 1 < proposal.num_drafted
            chances.append(jnp.where(more, chance, weight))
            weights.append(weight)
        coins = jax.vmap(lambda key: jax.random.uniform(key, (gamma + 1,)))(
            fold(keys, 0)
        )
        stays = coins < jnp.stack(chances, axis=1)  # [B, G+1], the first always
        num_accepted = gamma - jnp.argmax(stays[:, ::-1], axis=1).astype(jnp.int32)

        weight = jnp.take_along_axis(jnp.stack(weights, 1), num_accepted[:, None], 1)
        p = jnp.exp(row_at(log_p, num_accepted))
        q = draft_law(proposal, num_accepted, size)
        residual = jnp.maximum(weight * p - q, 0.0)
        empty = ~(jnp.sum(residual, axis=1, keepdims=True) > 0.0)
        last = sample(fold(keys, 1), jnp.log(jnp.where(empty, p, residual)))
        return chain_verdict(num_accepted, proposal.tokens, last)


def _residual_mass(
    proposal: Proposal, log_p: Array, index: int, weight: Array
) -> Array:
    """The sum of max(0, b p - q) behind the first `index` drafts: `[B]`."""
    place = jnp.full(weight.shape, index, jnp.int32)
    q = draft_law(proposal, place, log_p.shape[-1])
    p = jnp.exp(log_p[:, index])
    return jnp.sum(jnp.maximum(weight[:, None] * p - q, 0.0), axis=1)
