"""Lenience: the draft's law counts for less than it is."""

import dataclasses
import math
from typing import ClassVar

import jax.numpy as jnp
from jax import Array

from specjax.core import Proposal, Verdict
from specjax.verifiers._common import (
    accept_ratio,
    at,
    corrected,
    drafted,
    require_chain,
    require_fraction,
)
from specjax.verifiers._registry import registry


@registry.register("lenience")
@dataclasses.dataclass(frozen=True)
class Lenience:
    """Accepts draft x with probability min(1, p(x) / (l q(x))), l the lenience.

    The first rejected draft is replaced by a draw from norm(max(0, p / l - q)), so that
    no token is more likely than p / l; if all stay, or none was made, by one from p.

    Where the sampling leaves one token only (temperature 0, top_k 1), that ratio would
    change nothing. There a draft stays if p(x) >= l max p, with the p of the raw
    logits, before temperature and filters; what replaces a rejected one is the arg max.

    Attributes:
        lenience: l in (0, 1]; 1 is lossless.

    Reference: Leviathan et al., arXiv 2211.17192, appendix A.5.
    """

    lenience: float = 0.5

    lossless: ClassVar[bool] = False
    trees: ClassVar[bool] = False
    reads_logits: ClassVar[bool] = True

    def __post_init__(self):
        require_fraction(self, "lenience")

    def __call__(
        self,
        keys: Array,
        proposal: Proposal,
        log_p: Array,
        logits: Array | None = None,
    ) -> Verdict:
        """See `specjax.core.Verifier`; without `logits` only arg maxima stay there."""
        require_chain(self, proposal)
        gamma = proposal.tokens.shape[1]
        margin = math.log(self.lenience)
        log_f = log_p - margin
        accept = accept_ratio(keys, proposal, log_f)

        raw = (log_p if logits is None else logits)[:, :gamma]
        near = at(raw, proposal.tokens) >= jnp.max(raw, axis=-1) + margin
        greedy = jnp.max(log_p[:, :gamma], axis=-1) == 0.0
        accept = jnp.where(greedy, drafted(proposal) & near, accept)
        return corrected(keys, proposal, accept, log_f, log_p)
