"""DSpark's mix of L1 and cross-entropy, between two laws."""

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from specjax.divergences._divergences import finite, registry, tvd, widen


@registry.register("l1_ce")
def l1_ce(
    log_p: Float[Array, "*B V"], log_q: Float[Array, "*B V"], ce_weight: float = 0.1
) -> Float[Array, "*B"]:
    """(1 - ce_weight) sum |p - q| + ce_weight (-sum p log q).

    DSpark takes the cross-entropy of the token that stands there. This one is between
    the two laws: its mean over tokens that the target drew at temperature 1, with less
    noise. **It is not 0 where p = q** but ce_weight times the entropy of p, the least
    that it can be.

    Where q is 0 and p is not, log q counts as `FLOOR`.

    Args:
        log_p: the target's log-probabilities.
        log_q: the draft's.
        ce_weight: of the cross-entropy, in [0, 1]. 0 leaves the L1, which is twice the
            total variation.

    Returns:
        One value for each entry of the batch axes.

    Raises:
        ValueError: ce_weight is not in [0, 1].

    Reference: DeepSeek, DSpark, arXiv 2607.05147; 0.9 L1 + 0.1 CE are theirs.
    """
    if not 0 <= ce_weight <= 1:
        raise ValueError(f"ce_weight must be in [0, 1], got {ce_weight}")
    wide_p, wide_q = widen(log_p), widen(log_q)
    cross_entropy = -jnp.sum(jnp.exp(wide_p) * finite(wide_q), axis=-1)
    return (1 - ce_weight) * 2 * tvd(log_p, log_q) + ce_weight * cross_entropy
