"""Speculative sampling by rejection (Leviathan et al., 2211.17192, algorithm 1)."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax import Array

from specjax.core import Proposal, Verdict
from specjax.ops import fold, sample
from specjax.verifiers._common import at, leading, row_at, verdict
from specjax.verifiers._registry import registry


@registry.register("rejection")
@dataclasses.dataclass(frozen=True)
class Rejection:
    """Accepts draft x with probability min(1, p(x) / q(x)), else corrects it.

    The first rejected draft is replaced by a draw from the residual
    norm(max(0, p - q)); if all stay, a bonus token is drawn from p. Whatever q is, the
    emitted tokens follow p exactly, as long as q is the law that was drawn from: a
    deterministic drafter's q is a point mass, so a draft is accepted with probability
    p(x) and the residual is p without x.

    Reference: Leviathan et al., Fast Inference from Transformers via Speculative
    Decoding, arXiv 2211.17192, algorithm 1; theorem 3.5 for the acceptance rate.
    """

    lossless: ClassVar[bool] = True

    def __call__(self, keys: Array, proposal: Proposal, log_p: Array) -> Verdict:
        """See `specjax.core.Verifier`."""
        tokens, log_q = proposal.tokens, proposal.log_q
        batch, gamma = tokens.shape
        drafted = jnp.arange(gamma)[None, :] < proposal.num_drafted[:, None]
        # What was not drafted has no mass: never accepted, and its residual is p.
        log_q = jnp.where(drafted[..., None], log_q, -jnp.inf)

        ratio = at(log_p[:, :gamma], tokens) - at(log_q, tokens)
        uniform = jax.vmap(lambda key: jax.random.uniform(key, (gamma,)))(fold(keys, 0))
        # Strict: a draft that the target cannot emit (ratio -inf) is never accepted.
        accept = drafted & (jnp.log(uniform) < ratio)
        num_accepted = leading(accept)

        none = jnp.full((batch, 1, log_p.shape[-1]), -jnp.inf)
        p = jnp.exp(row_at(log_p, num_accepted))
        q = jnp.exp(row_at(jnp.concatenate([log_q, none], axis=1), num_accepted))
        residual = jnp.maximum(p - q, 0.0)
        # p == q leaves nothing but rounding to draw from: then p itself is the law.
        # (Not `<= 0`: a draft that overflowed to NaN is refused, and p is the law too.)
        empty = ~(jnp.sum(residual, axis=-1, keepdims=True) > 0.0)
        last = sample(fold(keys, 1), jnp.log(jnp.where(empty, p, residual)))
        return verdict(num_accepted, tokens, last)
