"""How far a draft's law q is from its target's law p, for one token.

Every function takes normalised log-probabilities `log_p` (target, teacher) and `log_q`
(draft, student) and sums over the last axis, V. Log space inside, at least float32.

Tokens of probability zero (`-inf`) are exact where a limit exists: `0 log 0 = 0`, and a
token that both exclude counts nothing. Where a divergence is infinite, the logarithm
in the denominator is floored at `FLOOR`: a huge finite value. Gradients with respect to
both arguments are finite everywhere, and so are those to logits through a log-softmax.

Reference: Zhou et al., DistillSpec, arXiv 2310.08461, section 3 and appendix A.
"""

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from specjax.core import Registry

# Below every log-probability that finite logits of a working model give, at
# temperature 0.05 too: a higher floor would stop the gradient that raises a token the
# draft excludes by mistake.
FLOOR = -1e4

registry: Registry = Registry("divergence")


@registry.register("forward_kl")
def forward_kl(
    log_p: Float[Array, "*B V"], log_q: Float[Array, "*B V"]
) -> Float[Array, "*B"]:
    """KL(p || q) = sum p log(p / q): the draft has to cover all that the target does.

    Where q is 0 and p is not, the true value is infinite: log q counts as `FLOOR`, and
    the gradient of that token's log q is 0.

    Args:
        log_p: the target's log-probabilities.
        log_q: the draft's.

    Returns:
        Nats, one value for each entry of the batch axes.
    """
    log_p, log_q = widen(log_p), widen(log_q)
    return jnp.sum(jnp.exp(log_p) * (finite(log_p) - finite(log_q)), axis=-1)


@registry.register("reverse_kl")
def reverse_kl(
    log_p: Float[Array, "*B V"], log_q: Float[Array, "*B V"]
) -> Float[Array, "*B"]:
    """KL(q || p) = sum q log(q / p): the draft keeps to the target's modes.

    Where p is 0 and q is not (a target at temperature 0, say) the true value is
    infinite: log p counts as `FLOOR`.

    Args:
        log_p: the target's log-probabilities.
        log_q: the draft's.

    Returns:
        Nats, one value for each entry of the batch axes.
    """
    return forward_kl(log_q, log_p)


@registry.register("jsd")
def jsd(
    log_p: Float[Array, "*B V"], log_q: Float[Array, "*B V"], beta: float = 0.5
) -> Float[Array, "*B"]:
    """Generalised Jensen-Shannon: beta KL(p || m) + (1 - beta) KL(q || m).

    m = beta p + (1 - beta) q. It is bounded, by log 2 at beta = 1/2, and finite for any
    supports.

    **The end points are not the KLs.** As beta tends to 0 or 1 the divergence tends to
    0, and its gradient with it. What tends to a KL is its ratio: JSD / beta to KL(p ||
    q) as beta -> 0, JSD / (1 - beta) to KL(q || p) as beta -> 1. To train on a KL, use
    `forward_kl` or `reverse_kl`; beta outside (0, 1) is an error.

    Args:
        log_p: the target's log-probabilities.
        log_q: the draft's.
        beta: the weight of p in the mixture, 0 < beta < 1.

    Returns:
        Nats, one value for each entry of the batch axes.

    Raises:
        ValueError: beta is not inside (0, 1).

    Reference: Agarwal et al., GKD, arXiv 2306.13649, equation 1.
    """
    if not 0 < beta < 1:
        raise ValueError(
            f"beta must be inside (0, 1), got {beta}: the divergence is 0 at both ends;"
            " its limits are forward_kl (JSD / beta) and reverse_kl (JSD / (1 - beta))"
        )
    log_p, log_q = widen(log_p), widen(log_q)
    p, q = jnp.exp(log_p), jnp.exp(log_q)
    # Where the mixture underflows so do p and q, and the token counts nothing. (The
    # logaddexp of the logarithms costs half as much again.)
    mixture = beta * p + (1 - beta) * q
    log_m = jnp.log(jnp.maximum(mixture, jnp.finfo(mixture.dtype).tiny))
    from_p = jnp.sum(p * (finite(log_p) - log_m), axis=-1)
    from_q = jnp.sum(q * (finite(log_q) - log_m), axis=-1)
    return beta * from_p + (1 - beta) * from_q


@registry.register("tvd")
def tvd(log_p: Float[Array, "*B V"], log_q: Float[Array, "*B V"]) -> Float[Array, "*B"]:
    """Total variation: 1/2 sum |p - q|, one minus the chance that a draft is accepted.

    1 - TVD = sum min(p, q) is the acceptance of speculative decoding (Leviathan et al.,
    arXiv 2211.17192, theorem 3.5). Disjoint supports give 1 and, as q is flat there,
    hardly a gradient.

    Args:
        log_p: the target's log-probabilities.
        log_q: the draft's.

    Returns:
        A number in [0, 1] for each entry of the batch axes.
    """
    log_p, log_q = widen(log_p), widen(log_q)
    return 0.5 * jnp.sum(jnp.abs(jnp.exp(log_p) - jnp.exp(log_q)), axis=-1)


def widen(log_x: Array) -> Array:
    """At least float32."""
    return log_x.astype(jnp.promote_types(log_x.dtype, jnp.float32))


def finite(log_x: Array) -> Array:
    """Floors `-inf`, so that no product or difference of it is NaN."""
    return jnp.maximum(log_x, FLOOR)
