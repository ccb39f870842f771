"""Simulated acceptance: how fast the loop would be with a draft of given quality."""

import dataclasses
import numbers
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax import Array

from specjax.core import Proposal, Verdict
from specjax.ops import fold, sample
from specjax.verifiers._common import (
    chain_verdict,
    drafted,
    leading,
    require_chain,
    row_at,
)
from specjax.verifiers._registry import registry


@registry.register("simulated")
@dataclasses.dataclass(frozen=True)
class Simulated:
    """Accepts drafts at given rates, whatever they are: for benchmarks, not for text.

    Draft i stays with probability `rates[i]`, given that those before it have stayed,
    and the token behind them is drawn from p. So the counts are those of a draft with
    these acceptance rates by position, and every pass is made as it would be; what is
    written means nothing. With `drafters.Placeholder` that needs no draft at all.

    Attributes:
        rates: acceptance rates in [0, 1], one a position; the last one holds for all
            positions behind it too.

    Example:
        >>> Simulated(rates=(0.8, 0.7)).at_positions(4)
        (0.8, 0.7, 0.7, 0.7)
    """

    rates: tuple[float, ...] = (0.8,)

    lossless: ClassVar[bool] = False
    trees: ClassVar[bool] = False

    def __post_init__(self):
        rates = tuple(self.rates) if isinstance(self.rates, list | tuple) else ()
        fine = [isinstance(r, numbers.Real) and 0 <= float(r) <= 1 for r in rates]
        if not rates or not all(fine):
            raise ValueError(
                "Simulated needs rates, one or more acceptance rates in [0, 1], got "
                f"{self.rates!r}"
            )
        object.__setattr__(self, "rates", rates)

    def at_positions(self, gamma: int) -> tuple[float, ...]:
        """The rates of `gamma` positions."""
        return tuple(self.rates[min(i, len(self.rates) - 1)] for i in range(gamma))

    def __call__(self, keys: Array, proposal: Proposal, log_p: Array) -> Verdict:
        """See `specjax.core.Verifier`."""
        require_chain(self, proposal)
        gamma = proposal.tokens.shape[1]
        rates = jnp.asarray(self.at_positions(gamma), jnp.float32)
        coins = jax.vmap(lambda key: jax.random.uniform(key, (gamma,)))(fold(keys, 0))
        num_accepted = leading(drafted(proposal) & (coins < rates[None, :]))
        last = sample(fold(keys, 1), row_at(log_p, num_accepted))
        return chain_verdict(num_accepted, proposal.tokens, last)
