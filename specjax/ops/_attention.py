"""Attention over grouped heads with an explicit mask."""

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float


def attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B K S H"],
    value: Float[Array, "B K S H"],
    mask: Bool[Array, "#B T S"],
) -> Float[Array, "B T N H"]:
    """Softmax attention; N query heads share K key/value heads in groups of N / K.

    Keys and values come as the cache keeps them, heads before slots: a product over
    slots then reads memory in order. Scores and softmax are float32. A query that may
    look at nothing gets the mean of the values, never NaN.

    `jax.nn.dot_product_attention` is the oracle in the tests.
    """
    batch, length, num_heads, head_dim = query.shape
    num_kv_heads = key.shape[1]
    group = num_heads // num_kv_heads
    query = query * (head_dim**-0.5)
    query = query.reshape(batch, length, num_kv_heads, group, head_dim)
    scores = jnp.einsum(
        "BTKGH,BKSH->BKGTS", query, key, preferred_element_type=jnp.float32
    )
    lowest = jnp.finfo(jnp.float32).min
    scores = jnp.where(mask[:, None, None], scores, lowest)
    weights = jax.nn.softmax(scores, axis=-1).astype(value.dtype)
    # Stale slots may hold anything, NaN too, and 0 * NaN is NaN.
    seen = jnp.any(mask, axis=1)[:, None, :, None]
    value = jnp.where(seen, value, 0)
    out = jnp.einsum("BKGTS,BKSH->BTKGH", weights, value)
    return out.reshape(batch, length, num_heads, head_dim)
