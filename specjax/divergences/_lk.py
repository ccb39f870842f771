"""LK losses: they raise the acceptance itself, alpha = sum min(p, q).

Total variation is 1 - alpha, but its gradient does not grow as acceptance falls: a
small draft that is hardly ever accepted hardly learns. These two mend that.

Reference: LK losses, arXiv 2602.23881.
"""

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from specjax.divergences._divergences import (
    finite,
    forward_kl,
    registry,
    tvd,
    widen,
)


@registry.register("lk_alpha")
def lk_alpha(
    log_p: Float[Array, "*B V"], log_q: Float[Array, "*B V"]
) -> Float[Array, "*B"]:
    """-log alpha, alpha = sum min(p, q): the gradient of total variation over alpha.

    In log space, so that it still learns where alpha itself underflows. Disjoint
    supports (true value: infinite) count as if every min(p, q) were exp(`FLOOR`), and
    have no gradient.

    Args:
        log_p: the target's log-probabilities.
        log_q: the draft's.

    Returns:
        Nats, one value for each entry of the batch axes. Symmetric in p and q.

    Reference: arXiv 2602.23881, the loss LK-alpha.
    """
    log_p, log_q = widen(log_p), widen(log_q)
    return -jax.nn.logsumexp(finite(jnp.minimum(log_p, log_q)), axis=-1)


@registry.register("lk")
def lk(
    log_p: Float[Array, "*B V"],
    log_q: Float[Array, "*B V"],
    kl_scale: float = 1.0,
    kl_decay: float = 3.0,
) -> Float[Array, "*B"]:
    """The mix w KL(p || q) + (1 - w) (1 - alpha): first the KL, then the acceptance.

    w = kl_scale exp(-kl_decay alpha), token by token. **No gradient flows through w**:
    the gradient is that of the mix with w as it is, not the derivative of the value.

    Args:
        log_p: the target's log-probabilities.
        log_q: the draft's.
        kl_scale: w where nothing is accepted, in [0, 1].
        kl_decay: eta of the paper, how fast w falls as alpha grows, at least 0.

    Returns:
        One value for each entry of the batch axes.

    Raises:
        ValueError: an option is out of range.

    Reference: arXiv 2602.23881, the loss LK-lambda; the defaults are the paper's.
    """
    if not 0 <= kl_scale <= 1:
        raise ValueError(f"kl_scale must be in [0, 1], got {kl_scale}")
    if not 0 <= kl_decay < float("inf"):
        raise ValueError(f"kl_decay must be a number >= 0, got {kl_decay}")
    missed = tvd(log_p, log_q)  # 1 - alpha
    alpha = 1 - jax.lax.stop_gradient(missed)
    w = kl_scale * jnp.exp(-kl_decay * alpha)
    return w * forward_kl(log_p, log_q) + (1 - w) * missed
