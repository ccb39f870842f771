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
    slots then reads memory in order. The queries of a group are rows of one product.
    Scores and softmax are float32. A query that may look at nothing gets the mean of
    the values. What is masked has weight 0 exactly, so its value may be any finite
    number (masking the values too would copy them: half as slow again at batch 8).

    `jax.nn.dot_product_attention` is the oracle in the tests.
    """
    batch, length, num_heads, head_dim = query.shape
    num_kv_heads = key.shape[1]
    group = num_heads // num_kv_heads
    query = (query * head_dim**-0.5).reshape(
        batch, length, num_kv_heads, group, head_dim
    )
    rows = jnp.einsum("BTKGH->BKGTH", query).reshape(
        batch, num_kv_heads, group * length, head_dim
    )
    scores = jnp.einsum(
        "BKRH,BKSH->BKRS", rows, key, preferred_element_type=jnp.float32
    )
    scores = scores.reshape(batch, num_kv_heads, group, length, key.shape[2])
    lowest = jnp.finfo(jnp.float32).min
    scores = jnp.where(mask[:, None, None], scores, lowest)
    weights = jax.nn.softmax(scores, axis=-1).astype(value.dtype)
    weights = weights.reshape(rows.shape[:3] + key.shape[2:3])
    out = jnp.einsum("BKRS,BKSH->BKRH", weights, value)
    out = out.reshape(batch, num_kv_heads, group, length, head_dim)
    return jnp.einsum("BKGTH->BTKGH", out).reshape(batch, length, num_heads, head_dim)
