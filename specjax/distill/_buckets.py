"""Laws that are known on some ids only: a bucket for each, and one for the rest.

Axes: B rows, T positions, K ids of a position, V vocabulary.

Teacher and student are compared over the same K + 1 buckets. Merging outcomes is a
function of the outcome, so that no divergence of this package's f-divergences can grow
by it (data processing): what is measured is a lower bound of the full divergence. The
student keeps its own mass outside the ids; renormalising it over the ids would hide
that mass from the loss.
"""

import jax
import jax.numpy as jnp
from jax import Array

from specjax.core import record


@record
class CachedLaw:
    """A teacher's law of the next token: its likeliest ids, and the mass of the others.

    `log_tail` is a logarithm made from those others themselves: one minus the mass of
    the ids would be noise where the ids have nearly all of it.
    """

    ids: Array  # [B, T, K] int32, the most likely first
    log_p: Array  # [B, T, K] float32, under the teacher's full law
    log_tail: Array  # [B, T] float32, of all other ids together; -inf: nothing

    @classmethod
    def of(cls, log_p: Array, top_k: int) -> "CachedLaw":
        """The `top_k` likeliest ids of full laws `[B, T, V]`."""
        values, ids = jax.lax.top_k(log_p, top_k)
        return cls(ids, values, _log_rest(log_p, ids))  # pyright: ignore

    @property
    def captured_mass(self) -> Array:
        """`[B, T]`, the probability of the ids."""
        return -jnp.expm1(self.log_tail)

    def laws(self, log_q: Array) -> tuple[Array, Array]:
        """Teacher and student over the same buckets.

        Args:
            log_q: `[B, T, V]` the student's full law, normalised.

        Returns:
            Log-probabilities `[B, T, K + 1]` of both, for any divergence.
        """
        log_p = jnp.concatenate([self.log_p, self.log_tail[..., None]], axis=-1)
        return log_p, bucketed(log_q, self.ids)


def bucketed(log_q: Array, ids: Array) -> Array:
    """A law over the ids, and one bucket with the mass of all others.

    Nothing is renormalised: the buckets sum to one because the tail has the rest. The
    tail is summed from the other ids, not taken as a difference, so that it is exact
    where it is nearly 0, and -inf, with finite gradients, where there is nothing.

    Args:
        log_q: `[*B, V]` log-probabilities of all ids.
        ids: `[*B, K]` int, no id twice.

    Returns:
        `[*B, K + 1]` log-probabilities, the tail last.
    """
    inside = jnp.take_along_axis(log_q, ids, axis=-1)
    return jnp.concatenate([inside, _log_rest(log_q, ids)[..., None]], axis=-1)


def _log_rest(log_q: Array, ids: Array) -> Array:
    """The logarithm of the mass outside the ids."""
    others = jnp.put_along_axis(log_q, ids, -jnp.inf, axis=-1, inplace=False)
    peak = jax.lax.stop_gradient(jnp.max(others, axis=-1, keepdims=True))
    peak = jnp.where(jnp.isfinite(peak), peak, 0.0)
    total = jnp.sum(jnp.exp(others - peak), axis=-1)
    some = total > 0
    # Inside the logarithm too: the branch not taken would have an infinite slope.
    return jnp.where(
        some, jnp.log(jnp.where(some, total, 1.0)) + peak[..., 0], -jnp.inf
    )
