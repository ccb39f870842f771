"""attention: the same numbers as JAX's own, and masks that hold."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import ops

attention = jax.jit(ops.attention)


def inputs(heads, kv_heads, batch=2, length=5, slots=9, size=8, dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(heads + kv_heads), 4)
    query = jax.random.normal(keys[0], (batch, length, heads, size), dtype)
    key = jax.random.normal(keys[1], (batch, kv_heads, slots, size), dtype)
    value = jax.random.normal(keys[2], (batch, kv_heads, slots, size), dtype)
    mask = jax.random.bernoulli(keys[3], 0.6, (batch, length, slots))
    return query, key, value, mask.at[..., 0].set(True)


@pytest.mark.parametrize("heads,kv_heads", [(4, 4), (4, 2), (4, 1)])
def test_equals_jax_for_all_groupings(heads, kv_heads):
    query, key, value, mask = inputs(heads, kv_heads)
    expected = jax.nn.dot_product_attention(
        query, jnp.swapaxes(key, 1, 2), jnp.swapaxes(value, 1, 2), mask=mask[:, None]
    )
    np.testing.assert_allclose(attention(query, key, value, mask), expected, atol=2e-6)


def test_one_mask_serves_all_rows():
    query, key, value, mask = inputs(4, 2)
    one = attention(query, key, value, mask[:1])
    each = attention(query, key, value, jnp.tile(mask[:1], (2, 1, 1)))
    np.testing.assert_array_equal(one, each)


def test_masked_slots_may_hold_anything_finite_and_keys_nan():
    """https://github.com/huggingface/transformers/issues/30312"""
    query, key, value, mask = inputs(4, 2)
    hidden = (jnp.arange(9) >= 6)[None, None, :]
    mask = mask & ~hidden
    expected = attention(query, key, value, mask)
    stale = hidden[..., None]
    got = attention(
        query, jnp.where(stale, jnp.nan, key), jnp.where(stale, 1e30, value), mask
    )
    np.testing.assert_array_equal(got, expected)
    # The negative control: the same garbage where it is seen.
    seen = attention(query, key, jnp.where(stale, 1e30, value), mask | hidden)
    assert np.abs(seen - expected).max() > 1e20


def test_a_query_that_sees_nothing_is_no_nan():
    query, key, value, mask = inputs(4, 2)
    out = attention(query, key, value, mask.at[0, 1].set(False))
    assert np.isfinite(out).all()
    rest = attention(query, key, value, mask)
    np.testing.assert_array_equal(out[1], rest[1])


def test_bfloat16_scores_are_summed_in_float32():
    query, key, value, mask = inputs(4, 2, dtype=jnp.bfloat16)
    exact = attention(*(x.astype(jnp.float32) for x in (query, key, value)), mask)
    out = attention(query, key, value, mask)
    assert out.dtype == jnp.bfloat16
    np.testing.assert_allclose(out.astype(jnp.float32), exact, atol=0.03)
