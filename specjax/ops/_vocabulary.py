"""Laws over some ids of a vocabulary, for heads that have rows for those alone.

Axes: V vocabulary, W chosen ids, which ascend and do not change: constants of a
program, never traced.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool, Float, Int

Tokens = Array | np.ndarray


def spread(
    logits: Float[Array, "*B W"], ids: Int[np.ndarray, " W"], size: int
) -> Float[Array, "*B V"]:
    """Logits of the chosen ids as logits over `size` ids: `-inf` at all others.

    The gradient is a gather: what comes back at the other ids is dropped.
    """
    nothing = jnp.full((*logits.shape[:-1], size), -jnp.inf, logits.dtype)
    # Saying that ids ascend and differ spares XLA a loop over them.
    return nothing.at[..., ids].set(
        logits, unique_indices=True, indices_are_sorted=True
    )


def restrict(
    log_p: Float[Array, "*B V"], ids: Int[np.ndarray, " W"]
) -> tuple[Float[Array, "*B W"], Float[Array, "*B"]]:
    """The law of a token, given that it is one of the chosen ids; and how likely so.

    What a draft with a reduced head learns is the first, as it can do nothing about the
    second: whatever q is over these ids, at most this mass of drafts is accepted. (Li
    et al., EAGLE-3, arXiv 2503.01840, train on the law renormalised over the draft's
    vocabulary.)

    Args:
        log_p: normalised log-probabilities.
        ids: the chosen ids.

    Returns:
        Normalised log-probabilities of the ids, and the logarithm of their mass. Where
        they have none, the law is uniform and the logarithm `-inf`.

    Raises:
        ValueError: an id past the vocabulary.
    """
    if ids[-1] >= log_p.shape[-1]:
        raise ValueError(
            f"the chosen ids must be below the vocabulary of {log_p.shape[-1]}, got "
            f"{ids[-1]}"
        )
    inside = jnp.take(log_p, ids, axis=-1, unique_indices=True, indices_are_sorted=True)
    some = jnp.any(inside > -jnp.inf, axis=-1)
    inside = jnp.where(some[..., None], inside, 0.0)
    log_mass = jnp.minimum(jax.nn.logsumexp(inside, axis=-1), 0.0)
    law = jax.nn.log_softmax(inside, axis=-1)
    return law, jnp.where(some, log_mass, -jnp.inf)


def locate(
    tokens: Int[Tokens, "*B"], ids: Int[np.ndarray, " W"]
) -> tuple[Int[Array, "*B"], Bool[Array, "*B"]]:
    """Which of the chosen ids each token is, and whether it is one of them at all.

    Returns:
        The index of each token among `ids` (of another token: any index), and a mask.

    Example:
        >>> index, inside = locate(jnp.array([4, 5]), np.array([1, 4]))
        >>> int(index[0]), inside.tolist()
        (1, [True, False])
    """
    index = jnp.searchsorted(ids, jnp.asarray(tokens))
    index = jnp.minimum(index, ids.size - 1).astype(jnp.int32)
    return index, jnp.asarray(ids)[index] == tokens
