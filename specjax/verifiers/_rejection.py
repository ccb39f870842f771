"""Speculative sampling by rejection, of chains and of trees.

Leviathan et al., arXiv 2211.17192, algorithm 1; Miao et al. (SpecInfer), arXiv
2305.09781, algorithm 2.
"""

import dataclasses
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from specjax.core import Proposal, Verdict
from specjax.ops import fold, parent_rows, sample
from specjax.verifiers._common import (
    accept_ratio,
    corrected,
    draft_at,
    draft_law,
    drafted,
    path_verdict,
    pick,
    row_at,
)
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

    In a tree the children of the last accepted node are tried in turn, and the residual
    of one is the p of the next (multi-round speculative sampling). That is exact for
    siblings of every kind, each with the law that it was drawn from given those before
    it: see `Proposal`.

    Reference: Leviathan et al., Fast Inference from Transformers via Speculative
    Decoding, arXiv 2211.17192, algorithm 1; theorem 3.5 for the acceptance rate. Trees:
    Miao et al., SpecInfer, arXiv 2305.09781, algorithm 2 and theorem 4.2.
    """

    lossless: ClassVar[bool] = True
    trees: ClassVar[bool] = True

    def __call__(self, keys: Array, proposal: Proposal, log_p: Array) -> Verdict:
        """See `specjax.core.Verifier`."""
        if not proposal.is_chain:
            return _verify_tree(keys, proposal, log_p)
        accept = accept_ratio(keys, proposal, log_p)
        return corrected(keys, proposal, accept, log_p, log_p)


class _Walk(NamedTuple):
    """Where each row stands in its tree."""

    node: Array  # [B], the last accepted node, -1 for the root
    tried: Array  # [B], the last node that was looked at
    num_accepted: Array  # [B]
    path: Array  # [B, G]
    # [B, V], what is left of the target's law behind `node`, not normalised.
    law: Array


def _verify_tree(keys: Array, proposal: Proposal, log_p: Array) -> Verdict:
    """Every step looks at one more child in each row that still has one."""
    batch, nodes = proposal.tokens.shape
    size = log_p.shape[-1]
    parents, there = parent_rows(proposal.parents, batch), drafted(proposal)
    log_q, number = draft_at(proposal), jnp.arange(nodes)[None, :]
    uniform = jax.vmap(lambda key: jax.random.uniform(key, (nodes,)))(fold(keys, 0))

    def left(walk: _Walk) -> Array:
        """The children of the last accepted node that were not tried, `[B, M]`."""
        child = (parents == walk.node[:, None]) & there
        deeper = walk.num_accepted < proposal.depth
        return child & (number > walk.tried[:, None]) & deeper[:, None]

    def step(walk: _Walk) -> _Walk:
        candidates = left(walk)
        running = jnp.any(candidates, axis=1)
        child = jnp.argmax(candidates, axis=1).astype(jnp.int32)
        mass = jnp.sum(walk.law, axis=1)
        p = pick(walk.law, pick(proposal.tokens, child))
        # u < (p / mass) / q; strict: what the target cannot emit is never accepted.
        bound = pick(uniform, child) * jnp.exp(pick(log_q, child)) * mass
        accept = running & (bound < p)
        reject = running & ~accept

        q = draft_law(proposal, child, size)
        residual = jnp.maximum(walk.law - mass[:, None] * q, 0.0)
        # Nothing left but rounding, or a law of NaN: as if it had not been drafted.
        some = jnp.sum(residual, axis=1) > 0.0
        law = jnp.where((reject & some)[:, None], residual, walk.law)
        below = jnp.exp(row_at(log_p, child + 1))
        depth = jnp.arange(proposal.depth)[None, :]
        here = accept[:, None] & (depth == walk.num_accepted[:, None])
        return _Walk(
            node=jnp.where(accept, child, walk.node),
            tried=jnp.where(running, child, walk.tried),
            num_accepted=walk.num_accepted + accept,
            path=jnp.where(here, child[:, None], walk.path),
            law=jnp.where(accept[:, None], below, law),
        )

    root = jnp.full((batch,), -1, jnp.int32)
    none = jnp.zeros((batch,), jnp.int32)
    path = jnp.zeros((batch, proposal.depth), jnp.int32)
    walk = _Walk(root, root, none, path, jnp.exp(log_p[:, 0]))
    walk = jax.lax.while_loop(lambda walk: jnp.any(left(walk)), step, walk)
    last = sample(fold(keys, 1), jnp.log(walk.law))
    return path_verdict(proposal, walk.num_accepted, walk.path, last)
