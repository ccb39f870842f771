"""The one function that makes probabilities from logits.

Draft, target, plain decoding, training and tests all call it: speculative decoding is
exact only if p and q went through the same adjustment (Leviathan et al.,
arXiv 2211.17192, section 2.2).
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int, Num

from specjax.core import Sampling


def warp(logits: Float[Array, "*B V"], sampling: Sampling) -> Float[Array, "*B V"]:
    """Returns the normalised float32 log-probabilities that tokens are drawn from.

    Temperature, then top-k, then top-p, then min-p; each filter sees what the one
    before it kept, renormalised. Filters keep *every* token that ties with the last one
    kept, so the result does not depend on the order of the vocabulary. Temperature 0 is
    a one-hot arg max (the first of ties): 0 there, `-inf` elsewhere.

    Args:
        logits: raw scores in any float type; `-inf` is a token that cannot be drawn.
        sampling: settings, scalar or one for each entry of the first batch axis.

    Returns:
        Log-probabilities: they sum to one after `exp`, filtered tokens are `-inf`.
    """
    logits = logits.astype(jnp.float32)
    temperature = _over(sampling.temperature, logits)
    greedy = temperature == 0
    # Subtracting the maximum first keeps a tiny temperature from making inf - inf.
    scaled = logits - jnp.max(logits, axis=-1, keepdims=True)
    scaled = scaled / jnp.where(greedy, 1.0, temperature)
    if sampling.top_k is not None:
        scaled = _keep_top(scaled, jnp.ones_like, _over(sampling.top_k, logits))
    if sampling.top_p is not None:
        scaled = _keep_top(scaled, jax.nn.softmax, _over(sampling.top_p, logits))
    if sampling.min_p is not None:
        # scaled is 0 at the most likely token.
        keep = scaled >= jnp.log(_over(sampling.min_p, logits))
        scaled = jnp.where(keep, scaled, -jnp.inf)
    log_p = jax.nn.log_softmax(scaled, axis=-1)
    return jnp.where(
        greedy, one_hot_log(jnp.argmax(logits, -1), logits.shape[-1]), log_p
    )


def one_hot_log(token: Int[Array, "*B"], vocab_size: int) -> Float[Array, "*B V"]:
    """The log of a point mass: 0 at `token`, `-inf` elsewhere, float32."""
    hit = jax.nn.one_hot(token, vocab_size, dtype=bool)
    return jnp.where(hit, 0.0, -jnp.inf).astype(jnp.float32)


def fit_vocabulary(logits: Float[Array, "*B V"], size: int) -> Float[Array, "*B W"]:
    """Logits over `size` ids: ids that the model lacks get `-inf`, surplus ones go.

    Only ever for a draft: masking the target's logits would change its law.
    """
    missing = size - logits.shape[-1]
    if missing <= 0:
        return logits[..., :size]
    padding = [(0, 0)] * (logits.ndim - 1) + [(0, missing)]
    return jnp.pad(logits, padding, constant_values=-jnp.inf)


def _over(value: float | Num[Array, "..."], logits: Array) -> Array:
    """Shapes a scalar or `[B]` setting to broadcast over `logits [B, ..., V]`."""
    value = jnp.asarray(value, jnp.float32)
    return value.reshape(value.shape + (1,) * (logits.ndim - value.ndim))


def _keep_top(
    scores: Float[Array, "*B V"],
    weigh: Callable[[Array], Array],
    enough: Array,
) -> Float[Array, "*B V"]:
    """Masks all but the best tokens whose weights first sum to `enough`.

    The threshold is the largest score t with `sum(weight where score >= t) >= enough`,
    found by bisection over the ordered integer image of float32: exact, and on a CPU 14
    times faster than sorting 49,152 scores (1.0 against 13.3 ms a row).
    """
    weights = weigh(scores)
    order = _ordered_int(scores)
    low = jnp.full((*scores.shape[:-1], 1), jnp.iinfo(jnp.int32).min, jnp.int32)
    high = jnp.max(order, axis=-1, keepdims=True)  # the best token is always kept

    def halve(_, bounds):
        low, high = bounds
        # The average rounded up, without overflow.
        middle = (low | high) - ((low ^ high) >> 1)
        mass = jnp.sum(jnp.where(order >= middle, weights, 0.0), -1, keepdims=True)
        reached = mass >= enough
        return jnp.where(reached, middle, low), jnp.where(reached, high, middle - 1)

    low, _ = jax.lax.fori_loop(0, 32, halve, (low, high))
    return jnp.where(order >= low, scores, -jnp.inf)


def _ordered_int(x: Float[Array, "*B V"]) -> Array:
    """An int32 image of float32 that orders as the floats do (0.0 above -0.0)."""
    bits = jax.lax.bitcast_convert_type(x, jnp.int32)
    return jnp.where(bits >= 0, bits, jnp.iinfo(jnp.int32).min - bits - 1)
