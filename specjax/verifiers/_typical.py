"""Typical acceptance: drafts that the target finds likely enough stay."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax import Array

from specjax.core import Proposal, Verdict
from specjax.ops import lineage, parent_rows
from specjax.verifiers._common import drafted, path_verdict, require_fraction, row_at
from specjax.verifiers._registry import registry


@registry.register("typical")
@dataclasses.dataclass(frozen=True)
class Typical:
    """Accepts draft x where p(x) > min(epsilon, delta exp(-H(p))), H the entropy of p.

    Where the target is sure of itself a draft must be likely, where it is not a rare
    one will do. Nothing is random and q is not looked at: the longest path of accepted
    drafts stays, of several the one most likely under the target, and the token behind
    it is the arg max of p. So at temperature 0 the output is the target's greedy one,
    and above it is not drawn from the target's law.

    Attributes:
        epsilon: the hard threshold, in (0, 1].
        delta: the soft one's factor, in (0, 1].

    Reference: Cai et al., Medusa, arXiv 2401.10774, section 2.3.1, whose code takes
    epsilon 0.3 and delta 0.09.
    """

    epsilon: float = 0.3
    delta: float = 0.09

    lossless: ClassVar[bool] = False
    trees: ClassVar[bool] = True

    def __post_init__(self):
        require_fraction(self, "epsilon")
        require_fraction(self, "delta")

    def __call__(self, keys: Array, proposal: Proposal, log_p: Array) -> Verdict:
        """See `specjax.core.Verifier`."""
        parents = parent_rows(proposal.parents, proposal.tokens.shape[0])
        log_x = jax.vmap(lambda row, entry, token: row[entry, token])(
            log_p, parents + 1, proposal.tokens
        )
        entropy = -jnp.sum(jnp.where(log_p > -jnp.inf, log_p * jnp.exp(log_p), 0.0), -1)
        least = jnp.minimum(self.epsilon, self.delta * jnp.exp(-entropy))
        enough = jnp.take_along_axis(least, parents + 1, axis=1)
        accept = drafted(proposal) & (jnp.exp(log_x) > enough)

        # The root and every node, each with the way to it.
        way, depth = lineage(parents, proposal.depth)
        accept = jnp.pad(accept, ((0, 0), (1, 0)), constant_values=True)
        stays = jnp.all(accept[:, None, :] | ~way, axis=2)
        stays &= way[:, :, 0] & (depth <= proposal.depth)
        length = jnp.where(stays, depth, -1)
        num_accepted = jnp.max(length, axis=1)
        log_x = jnp.pad(log_x, ((0, 0), (1, 0)))[:, None, :]
        likelihood = jnp.sum(jnp.where(way, log_x, 0.0), axis=2)
        longest = length == num_accepted[:, None]
        end = jnp.argmax(jnp.where(longest, likelihood, -jnp.inf), axis=1)

        # The nodes on the way to the end, by their depth.
        on_way = jnp.take_along_axis(way, end[:, None, None], axis=1)
        place = jnp.arange(1, proposal.depth + 1)[None, :, None]
        at_place = on_way & (depth[:, None, :] == place)  # [B, G, M+1]
        path = jnp.maximum(jnp.argmax(at_place, axis=2) - 1, 0).astype(jnp.int32)
        last = jnp.argmax(row_at(log_p, end), axis=1).astype(jnp.int32)
        return path_verdict(proposal, num_accepted, path, last)
