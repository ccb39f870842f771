"""Laws over some ids and a tail: what they are, and how they bound the full laws."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import divergences
from specjax.distill import CachedLaw, bucketed

VOCAB = 12
BOUNDED = ("forward_kl", "reverse_kl", "jsd", "tvd")


def laws(rows=64, seed=0, sharpness=2.0):
    rng = np.random.default_rng(seed)
    logits = sharpness * rng.normal(size=(2, 1, rows, VOCAB))
    p, q = jax.nn.log_softmax(jnp.asarray(logits, jnp.float32), axis=-1)
    return p, q


@pytest.mark.parametrize("name", divergences.names())
@pytest.mark.full
def test_all_ids_give_the_full_divergence(name):
    p, q = laws()
    law = CachedLaw.of(p, VOCAB)
    assert (law.log_tail == -jnp.inf).all()
    divergence = divergences.get(name)
    value = divergence(*law.laws(q))
    np.testing.assert_allclose(value, divergence(p, q), rtol=1e-5, atol=1e-6)

    def bucket_loss(logits):
        return divergence(*law.laws(jax.nn.log_softmax(logits))).sum()

    def full_loss(logits):
        return divergence(p, jax.nn.log_softmax(logits)).sum()

    np.testing.assert_allclose(
        jax.grad(bucket_loss)(q), jax.grad(full_loss)(q), rtol=1e-4, atol=1e-6
    )


@pytest.mark.parametrize("name", BOUNDED)
@pytest.mark.parametrize("top_k", [1, 3, VOCAB - 1])
@pytest.mark.full
def test_merging_ids_never_adds_to_a_divergence(name, top_k):
    """Data processing. Renormalising over the ids, the negative control, does add."""
    p, q = laws(rows=500)
    law = CachedLaw.of(p, top_k)
    divergence = divergences.get(name)
    full, merged = divergence(p, q), divergence(*law.laws(q))
    assert (merged <= full * (1 + 1e-5) + 1e-6).all()
    assert (merged >= -1e-6).all()
    inside = jnp.take_along_axis(q, law.ids, axis=-1)
    subset = [x - jax.nn.logsumexp(x, -1, keepdims=True) for x in (law.log_p, inside)]
    assert top_k == 1 or (divergence(*subset) > full + 1e-3).any()


def test_the_buckets_sum_to_one_and_the_tail_is_exact_where_it_is_small():
    p, q = laws()
    law = CachedLaw.of(p, 4)
    for log_x in law.laws(q):
        np.testing.assert_allclose(jnp.exp(log_x).sum(-1), 1.0, rtol=1e-6)
    np.testing.assert_allclose(law.captured_mass, jnp.exp(law.log_p).sum(-1), rtol=1e-6)
    # One minus the captured mass would be 0, or noise, in float32.
    logits = jnp.asarray([0.0, -1.0, -40.0, -41.0])
    log_q = jax.nn.log_softmax(logits)[None, None]
    tail = bucketed(log_q, jnp.asarray([[[0, 1]]]))[0, 0, 2]
    expected = np.log(np.exp(-40.0) + np.exp(-41.0)) - np.log(1 + np.exp(-1.0))
    assert tail == pytest.approx(expected, rel=1e-6)


def test_the_students_own_mass_outside_the_ids_is_in_the_loss():
    """A student that is right on the ids relative to each other, and hardly there."""
    p = jnp.log(jnp.asarray([0.6, 0.3, 0.05, 0.05]))[None, None]
    q = jnp.log(jnp.asarray([0.02, 0.01, 0.485, 0.485]))[None, None]
    law = CachedLaw.of(p, 2)
    value = divergences.forward_kl(*law.laws(q))
    expected = 0.9 * np.log(0.9 / 0.03) + 0.1 * np.log(0.1 / 0.97)
    assert value == pytest.approx(expected, rel=1e-5)


def edge_cases():
    inf = -np.inf
    return {
        "nothing outside": ([0.0, 1.0, inf, inf], [0.5, 0.1, inf, inf]),
        "the student is outside only": ([0.0, 1.0, inf, inf], [inf, inf, 1.0, 0.0]),
        "hardly anything outside": ([0.0, 1.0, -80.0, -90.0], [0.0, 1.0, -80.0, -70.0]),
        "the teacher is one-hot": ([inf, 0.0, inf, inf], [1.0, 2.0, 0.5, 0.0]),
        "the student is one-hot inside": ([1.0, 2.0, 0.5, 0.0], [inf, 0.0, inf, inf]),
        "the student is one-hot outside": ([2.0, 1.0, 0.5, 0.0], [inf, inf, 0.0, inf]),
        "temperature 0.05": ([20.0, 40.0, 10.0, -20.0], [0.0, -20.0, 60.0, 20.0]),
    }


@pytest.mark.parametrize("case", edge_cases())
@pytest.mark.parametrize("name", divergences.names())
@pytest.mark.full
def test_values_and_gradients_are_finite(name, case):
    p, q = (jnp.asarray(x, jnp.float32)[None, None] for x in edge_cases()[case])
    law = CachedLaw.of(jax.nn.log_softmax(p), 2)

    def loss(q):
        return divergences.get(name)(*law.laws(jax.nn.log_softmax(q))).sum()

    value, gradient = jax.value_and_grad(loss)(q)
    assert jnp.isfinite(value) and jnp.isfinite(gradient).all()


@pytest.mark.parametrize("name", BOUNDED)
@pytest.mark.full
def test_gradient_equals_finite_differences(name):
    with jax.enable_x64(True):
        rng = np.random.default_rng(3)
        p = jax.nn.log_softmax(jnp.asarray(rng.normal(size=(1, 1, 6))))
        law = CachedLaw.of(p, 3)
        logits = jnp.asarray(rng.normal(size=(1, 1, 6)))

        def loss(x):
            return divergences.get(name)(*law.laws(jax.nn.log_softmax(x))).sum()

        gradient = jax.grad(loss)(logits)
        for i in range(6):
            up, down = (logits.at[0, 0, i].add(s) for s in (1e-6, -1e-6))
            slope = float(loss(up) - loss(down)) / 2e-6
            assert float(gradient[0, 0, i]) == pytest.approx(slope, rel=1e-4, abs=1e-7)


def test_padding_gives_finite_numbers():
    """What a chunk is filled up with: zeros, ids several times over."""
    zeros = CachedLaw(
        jnp.zeros((1, 1, 3), jnp.int32), jnp.zeros((1, 1, 3)), jnp.zeros((1, 1))
    )
    q = jnp.log(jnp.asarray([[[0.5, 0.5, 0.0]]]))
    for name in divergences.names():

        def loss(q, name=name):
            return divergences.get(name)(*zeros.laws(q)).sum()

        value, gradient = jax.value_and_grad(loss)(q)
        assert jnp.isfinite(value) and jnp.isfinite(gradient).all()
