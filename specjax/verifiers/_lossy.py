"""Lossy verification: drafts are held to a loosened law of the target."""

import dataclasses
import math
from typing import ClassVar

from jax import Array

from specjax.core import Proposal, Verdict
from specjax.verifiers._common import (
    accept_ratio,
    corrected,
    require_chain,
    require_fraction,
)
from specjax.verifiers._registry import registry


@dataclasses.dataclass(frozen=True)
class Lossy:
    """Accepts draft x with probability min(1, f(p(x)) / q(x)), where f(p) >= p.

    The first rejected draft is replaced by a draw from norm(max(0, f(p) - q)): so no
    token comes more often than with f(p) of its probability in the target. If all
    drafts stay, or none was made, the token behind them is drawn from p itself. At
    `epsilon` 1, f(p) is p, and this is `Rejection`. At temperature 0 a token has the
    probability 1 or 0, and f changes nothing: `Lenience` does.

    Attributes:
        epsilon: in (0, 1]; the smaller it is, the more drafts stay, and the further
            the output may stray from the target's law.

    Reference: Zhou et al., DistillSpec, arXiv 2310.08461, on lossy speculative
    decoding: f_lin = p / epsilon, f_sq = p / epsilon^2, f_exp = p^epsilon. (What a
    rejected position is drawn from is our choice: see above.)
    """

    epsilon: float = 0.5

    lossless: ClassVar[bool] = False
    trees: ClassVar[bool] = False

    def __post_init__(self):
        require_fraction(self, "epsilon")

    def loosen(self, log_p: Array) -> Array:
        """The log of f(p), for log-probabilities of any shape."""
        raise NotImplementedError

    def __call__(self, keys: Array, proposal: Proposal, log_p: Array) -> Verdict:
        """See `specjax.core.Verifier`."""
        require_chain(self, proposal)
        log_f = self.loosen(log_p)
        accept = accept_ratio(keys, proposal, log_f)
        return corrected(keys, proposal, accept, log_f, log_p)


@registry.register("lossy_lin")
class LossyLinear(Lossy):
    """f(p) = p / epsilon, see `Lossy`: Leviathan's lenience, but for temperature 0."""

    def loosen(self, log_p: Array) -> Array:
        """See `Lossy.loosen`."""
        return log_p - math.log(self.epsilon)


@registry.register("lossy_sq")
class LossySquare(Lossy):
    """f(p) = p / epsilon^2, see `Lossy`."""

    def loosen(self, log_p: Array) -> Array:
        """See `Lossy.loosen`."""
        return log_p - 2 * math.log(self.epsilon)


@registry.register("lossy_exp")
class LossyExponential(Lossy):
    """f(p) = p^epsilon, see `Lossy`: lenient with rare tokens, strict with likely ones.

    In the paper this one alone gives a usable trade-off of quality against latency.
    """

    def loosen(self, log_p: Array) -> Array:
        """See `Lossy.loosen`."""
        return log_p * self.epsilon
