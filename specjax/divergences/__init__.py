"""Divergences of a draft q from its target p: `(log_p, log_q) -> [*B]` (level 1).

Example:
    >>> import jax.numpy as jnp
    >>> from specjax import divergences
    >>> log_p, log_q = jnp.log(jnp.array([0.5, 0.5])), jnp.log(jnp.array([0.75, 0.25]))
    >>> round(float(divergences.tvd(log_p, log_q)), 3)
    0.25
"""

from specjax.divergences._divergences import (
    FLOOR,
    forward_kl,
    jsd,
    registry,
    reverse_kl,
    tvd,
)
from specjax.divergences._l1_ce import l1_ce
from specjax.divergences._lk import lk, lk_alpha
from specjax.divergences._resolve import Divergence, get, names, parse, resolve
from specjax.divergences._skew import skew_forward_kl, skew_reverse_kl

__all__ = [
    "FLOOR",
    "Divergence",
    "forward_kl",
    "get",
    "jsd",
    "l1_ce",
    "lk",
    "lk_alpha",
    "names",
    "parse",
    "registry",
    "resolve",
    "reverse_kl",
    "skew_forward_kl",
    "skew_reverse_kl",
    "tvd",
]
