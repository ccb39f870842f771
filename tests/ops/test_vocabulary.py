"""Laws over some ids: spread out, restricted, and found again."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.ops import locate, restrict, spread

IDS = np.array([1, 4, 5], np.int32)
LOG_P = jnp.log(jnp.array([[0.1, 0.2, 0.05, 0.05, 0.5, 0.1], [1, 0, 0, 0, 0, 0.0]]))


def test_spread_logits_stand_where_their_ids_are():
    x = jnp.arange(12.0).reshape(2, 2, 3)
    full = spread(x, IDS, 7)
    assert full.shape == (2, 2, 7)
    np.testing.assert_array_equal(full[..., IDS], x)
    others = np.setdiff1d(np.arange(7), IDS)
    assert (full[..., others] == -jnp.inf).all()
    assert spread(x.astype(jnp.bfloat16), IDS, 7).dtype == jnp.bfloat16


def test_the_gradient_of_spread_logits_is_that_of_the_logits():
    x, label = jnp.array([0.3, -1.0, 2.0]), 1

    def through_all(x):
        return -jax.nn.log_softmax(spread(x, IDS, 7))[IDS[label]]

    ours = jax.value_and_grad(through_all)(x)
    plain = jax.value_and_grad(lambda x: -jax.nn.log_softmax(x)[label])(x)
    np.testing.assert_allclose(ours[0], plain[0], rtol=1e-6)
    np.testing.assert_allclose(ours[1], plain[1], rtol=1e-6)
    hlo = jax.jit(jax.grad(through_all)).lower(x).as_text()
    assert "stablehlo.gather" in hlo, "the way back must not be a loop over ids"


def test_a_restricted_law_is_the_conditional_one():
    law, log_mass = restrict(LOG_P[:1], IDS)
    np.testing.assert_allclose(np.exp(law[0]), [0.25, 0.625, 0.125], rtol=1e-6)
    np.testing.assert_allclose(np.exp(log_mass), [0.8], rtol=1e-6)


def test_a_law_without_mass_on_the_ids_is_finite_and_says_so():
    law, log_mass = restrict(LOG_P, IDS)
    np.testing.assert_allclose(np.exp(law[1]), np.full(3, 1 / 3), rtol=1e-6)
    assert log_mass[1] == -jnp.inf
    slope = jax.grad(lambda x: jnp.sum(restrict(x, IDS)[0]))(LOG_P)
    assert jnp.isfinite(slope).all()


def test_all_ids_restrict_nothing():
    law, log_mass = restrict(LOG_P, np.arange(6, dtype=np.int32))
    np.testing.assert_allclose(np.exp(law), np.exp(LOG_P), atol=1e-7)
    np.testing.assert_allclose(log_mass, 0, atol=1e-6)
    assert (log_mass <= 0).all()


def test_an_id_past_the_vocabulary_is_refused():
    with pytest.raises(ValueError, match="below the vocabulary of 6, got 6"):
        restrict(LOG_P, np.array([1, 6], np.int32))


@pytest.mark.parametrize("kind", [np.asarray, jnp.asarray])
def test_tokens_are_found_among_the_ids(kind):
    tokens = kind([[0, 1, 2], [4, 5, 6]])
    index, inside = locate(tokens, IDS)
    expected = np.isin(np.asarray(tokens), IDS)
    np.testing.assert_array_equal(inside, expected)
    assert (IDS[index] == np.asarray(tokens))[expected].all()
    assert (0 <= index).all() and (index < 3).all()
