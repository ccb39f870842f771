"""KL divergences from a mixture of both laws, which has all of the first law's support.

So they are bounded where the KL is infinite, and their gradient stays small where the
draft excludes what the target says.

Reference: Ko et al., DistiLLM, arXiv 2402.03898.
"""

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from specjax.divergences._divergences import finite, registry, widen


@registry.register("skew_forward_kl")
def skew_forward_kl(
    log_p: Float[Array, "*B V"], log_q: Float[Array, "*B V"], lam: float = 0.1
) -> Float[Array, "*B"]:
    """KL(p || lam p + (1 - lam) q), DistiLLM's SKL; at most -log(lam).

    Args:
        log_p: the target's log-probabilities.
        log_q: the draft's.
        lam: the share of p in the mixture, 0 < lam < 1. As lam tends to 0 it tends to
            `forward_kl`, which is the function to call for that; at 1 it is 0.

    Returns:
        Nats, one value for each entry of the batch axes.

    Raises:
        ValueError: lam is not inside (0, 1).

    Reference: Ko et al., DistiLLM, arXiv 2402.03898; lam = 0.1 is theirs.
    """
    _check(lam, "forward_kl")
    return _kl_from_mixture(log_p, log_q, lam)


@registry.register("skew_reverse_kl")
def skew_reverse_kl(
    log_p: Float[Array, "*B V"], log_q: Float[Array, "*B V"], lam: float = 0.1
) -> Float[Array, "*B"]:
    """KL(q || (1 - lam) p + lam q), DistiLLM's SRKL; at most -log(lam).

    Args:
        log_p: the target's log-probabilities.
        log_q: the draft's.
        lam: the share of q in the mixture, 0 < lam < 1. As lam tends to 0 it tends to
            `reverse_kl`, which is the function to call for that; at 1 it is 0.

    Returns:
        Nats, one value for each entry of the batch axes.

    Raises:
        ValueError: lam is not inside (0, 1).

    Reference: Ko et al., DistiLLM, arXiv 2402.03898; lam = 0.1 is theirs.
    """
    _check(lam, "reverse_kl")
    return _kl_from_mixture(log_q, log_p, lam)


def _kl_from_mixture(log_a: Array, log_b: Array, share: float) -> Array:
    """KL(a || share a + (1 - share) b)."""
    log_a, log_b = widen(log_a), widen(log_b)
    a = jnp.exp(log_a)
    # Where the mixture underflows so does a, and the token counts nothing.
    mixture = share * a + (1 - share) * jnp.exp(log_b)
    log_m = jnp.log(jnp.maximum(mixture, jnp.finfo(mixture.dtype).tiny))
    return jnp.sum(a * (finite(log_a) - log_m), axis=-1)


def _check(lam: float, limit: str) -> None:
    if not 0 < lam < 1:
        raise ValueError(
            f"lam must be inside (0, 1), got {lam}: the divergence is {limit} at 0 and "
            "nothing at 1"
        )
