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
from specjax.divergences._resolve import Divergence, get, names, parse, resolve

__all__ = [
    "FLOOR",
    "Divergence",
    "forward_kl",
    "get",
    "jsd",
    "names",
    "parse",
    "registry",
    "resolve",
    "reverse_kl",
    "tvd",
]
