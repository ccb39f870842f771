"""warp: the one function that makes probabilities from logits, against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import ops
from specjax.core import Sampling

warp = jax.jit(ops.warp)


def oracle(logits, temperature, top_k=None, top_p=None, min_p=None):
    """One row in float64: temperature, top-k, top-p, min-p; ties stay together."""
    logits = np.asarray(logits, np.float64)
    if temperature == 0:
        p = np.zeros(len(logits))
        p[np.argmax(logits)] = 1
        return p
    scaled = (logits - logits.max()) / temperature
    if top_k is not None:
        kth = np.sort(scaled)[::-1][min(top_k, len(scaled)) - 1]
        scaled = np.where(scaled >= kth, scaled, -np.inf)
    if top_p is not None:
        p = np.exp(scaled) / np.exp(scaled).sum()
        order = np.argsort(-p, kind="stable")
        enough = np.cumsum(p[order]) >= top_p - 1e-9
        last = order[np.argmax(enough)] if enough.any() else order[-1]
        scaled = np.where(scaled >= scaled[last], scaled, -np.inf)
    if min_p is not None:
        p = np.exp(scaled) / np.exp(scaled).sum()
        scaled = np.where(p >= min_p * p.max(), scaled, -np.inf)
    return np.exp(scaled) / np.exp(scaled).sum()


SETTINGS = [
    dict(temperature=1.0),
    dict(temperature=0.0),
    dict(temperature=0.7, top_k=5),
    dict(temperature=1.5, top_p=0.8),
    dict(temperature=1.0, min_p=0.1),
    dict(temperature=0.6, top_k=7, top_p=0.9, min_p=0.05),
    dict(temperature=2.0, top_k=1),
    dict(temperature=1.0, top_k=1000, top_p=1.0, min_p=0.0),
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_equals_a_float64_oracle(settings):
    logits = 3 * np.random.default_rng(0).normal(size=(8, 37)).astype(np.float32)
    p = np.exp(warp(logits, Sampling(**settings)))
    expected = [oracle(row, **settings) for row in logits]
    np.testing.assert_allclose(p, expected, atol=2e-6)
    np.testing.assert_allclose(p.sum(-1), 1, atol=1e-6)


def test_filters_apply_in_order():
    """Top-p of what top-k left, renormalised: any other order keeps something else."""
    logits = jnp.log(jnp.array([0.4, 0.3, 0.2, 0.1]))
    both = np.exp(warp(logits, Sampling(1.0, top_k=2, top_p=0.55)))
    # .4 and .3 become .571 and .429: the first alone reaches .55. Top-p first would
    # have kept both of them.
    np.testing.assert_allclose(both, [1, 0, 0, 0], atol=1e-6)
    # Temperature comes before top-p: at T = 0.5 the first holds .533 already.
    cold = np.exp(warp(logits, Sampling(0.5, top_p=0.5)))
    np.testing.assert_allclose(cold, [1, 0, 0, 0], atol=1e-6)
    warm = np.exp(warp(logits, Sampling(1.0, top_p=0.5)))
    np.testing.assert_allclose(warm, [4 / 7, 3 / 7, 0, 0], atol=1e-6)


def test_ties_stay_together_wherever_they_stand():
    logits = jnp.array([1.0, 3.0, 2.0, 2.0, -1.0, 2.0])
    for name, value in (("top_k", 2), ("top_p", 0.6)):
        p = np.exp(warp(logits, Sampling(1.0, **{name: value})))
        assert (p > 0).tolist() == [False, True, True, True, False, True]
        turned = np.exp(warp(logits[::-1], Sampling(1.0, **{name: value})))
        np.testing.assert_allclose(turned[::-1], p, atol=1e-7)


def test_temperature_zero_takes_the_first_of_ties():
    log_p = warp(jnp.array([[0.0, 5.0, 5.0], [2.0, 2.0, 2.0]]), Sampling(0.0))
    assert np.exp(log_p).tolist() == [[0, 1, 0], [1, 0, 0]]


@pytest.mark.parametrize("temperature", [1e-30, 1e-6, 1e6])
def test_extreme_temperatures_stay_finite(temperature):
    logits = jnp.array([1e4, 1e4 - 1.0, -1e4, 0.0])
    log_p = warp(logits, Sampling(temperature))
    assert not np.isnan(log_p).any()
    assert np.exp(log_p).sum() == pytest.approx(1, abs=1e-6)
    assert np.argmax(log_p) == 0


def test_tokens_at_minus_infinity_stay_impossible():
    logits = jnp.array([-jnp.inf, 0.0, 1.0, -jnp.inf])
    every = Sampling(1.0, top_k=4, top_p=1.0, min_p=0.0)
    for sampling in (Sampling(1.0), Sampling(0.0), Sampling(0.5, top_k=3), every):
        p = np.exp(warp(logits, sampling))
        assert p[0] == 0 and p[3] == 0 and not np.isnan(p).any()
        assert p.sum() == pytest.approx(1, abs=1e-6)


def test_each_row_has_its_own_settings():
    logits = np.random.default_rng(1).normal(size=(4, 3, 11)).astype(np.float32)
    temperature, top_k, top_p = [0.0, 0.5, 1.0, 2.0], [11, 3, 5, 1], [1, 1, 0.7, 0.5]
    rows = warp(
        logits,
        Sampling(
            jnp.array(temperature), jnp.array(top_k), jnp.array(top_p, jnp.float32)
        ),
    )
    for row in range(4):
        alone = warp(logits[row], Sampling(temperature[row], top_k[row], top_p[row]))
        np.testing.assert_allclose(rows[row], alone, atol=1e-6)


def test_bfloat16_logits_are_taken_as_they_are():
    logits = jnp.asarray(np.random.default_rng(2).normal(size=(2, 9)), jnp.bfloat16)
    log_p = warp(logits, Sampling(0.7, top_p=0.9))
    assert log_p.dtype == jnp.float32
    np.testing.assert_array_equal(
        log_p, warp(logits.astype(jnp.float32), Sampling(0.7, top_p=0.9))
    )


def test_one_token_vocabulary():
    for sampling in (Sampling(1.0, top_k=1, top_p=0.5, min_p=1.0), Sampling(0.0)):
        assert float(warp(jnp.array([[3.0]]), sampling)[0, 0]) == 0.0
