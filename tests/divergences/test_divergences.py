"""Divergences: closed forms, an oracle in float64, gradients, and what masks do."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import divergences

P, Q = [0.7, 0.2, 0.1], [0.1, 0.3, 0.6]

# Every registered divergence with the options that the conformance tests use.
CASES = [divergences.resolve(name) for name in divergences.names()]
CASES += [divergences.resolve("jsd", beta=beta) for beta in (0.1, 0.9)]


def case_id(case):
    return case.name + "".join(f"-{v}" for _, v in case.options)


each = pytest.mark.parametrize("divergence", CASES, ids=case_id)


def log(x):
    return jnp.log(jnp.asarray(x, jnp.float32))


def oracle(name, p, q, beta=0.5):
    """The definitions in float64, with 0 log 0 = 0."""
    p, q = np.asarray(p, np.float64), np.asarray(q, np.float64)

    def kl(a, b):
        some = a > 0
        return float(np.sum(a[some] * np.log(a[some] / b[some])))

    mixture = beta * p + (1 - beta) * q
    return {
        "forward_kl": lambda: kl(p, q),
        "reverse_kl": lambda: kl(q, p),
        "jsd": lambda: beta * kl(p, mixture) + (1 - beta) * kl(q, mixture),
        "tvd": lambda: 0.5 * float(np.abs(p - q).sum()),
    }[name]()


def test_closed_forms_on_three_tokens_tell_the_directions_apart():
    """https://github.com/huggingface/trl/pull/3043"""
    forward = 0.7 * math.log(7) + 0.2 * math.log(2 / 3) + 0.1 * math.log(1 / 6)
    reverse = 0.1 * math.log(1 / 7) + 0.3 * math.log(3 / 2) + 0.6 * math.log(6)
    assert divergences.forward_kl(log(P), log(Q)) == pytest.approx(forward, rel=1e-6)
    assert divergences.reverse_kl(log(P), log(Q)) == pytest.approx(reverse, rel=1e-6)
    assert divergences.tvd(log(P), log(Q)) == pytest.approx(0.6, rel=1e-6)
    for beta in (0.1, 0.5, 0.9):
        value = divergences.jsd(log(P), log(Q), beta=beta)
        assert value == pytest.approx(oracle("jsd", P, Q, beta), rel=1e-5)
    # The negative control: swapped arguments differ, so a swap cannot pass.
    assert abs(forward - reverse) > 0.05
    for beta in (0.1, 0.9):
        swapped = divergences.jsd(log(Q), log(P), beta=beta)
        assert abs(swapped - oracle("jsd", P, Q, beta)) > 1e-3


@each
def test_equals_the_float64_oracle(divergence):
    rng = np.random.default_rng(0)
    p, q = rng.dirichlet([0.3] * 7, (2, 5)), rng.dirichlet([0.3] * 7, (2, 5))
    value = divergence(log(p), log(q))
    assert value.shape == (2, 5) and value.dtype == jnp.float32
    for index in np.ndindex(2, 5):
        expected = oracle(
            divergence.name, p[index], q[index], **dict(divergence.options)
        )
        assert value[index] == pytest.approx(expected, rel=2e-5, abs=1e-6)


@each
def test_is_zero_between_equals_and_not_negative(divergence):
    rng = np.random.default_rng(1)
    p, q = log(rng.dirichlet([1.0] * 50, 20)), log(rng.dirichlet([1.0] * 50, 20))
    np.testing.assert_allclose(divergence(p, p), 0, atol=1e-6)
    assert (divergence(p, q) > 0).all()


@each
def test_gradient_equals_finite_differences(divergence):
    """https://github.com/huggingface/trl/pull/3043"""
    rng = np.random.default_rng(2)
    with jax.enable_x64(True):
        log_p = jax.nn.log_softmax(jnp.asarray(rng.normal(size=5)))
        logits = jnp.asarray(rng.normal(size=5))

        def loss(logits):
            return divergence(log_p, jax.nn.log_softmax(logits))

        gradient = jax.grad(loss)(logits)
        step = 1e-6
        for i in range(5):
            up, down = logits.at[i].add(step), logits.at[i].add(-step)
            slope = float(loss(up) - loss(down)) / (2 * step)
            assert float(gradient[i]) == pytest.approx(slope, rel=1e-4, abs=1e-7)


def hard_cases():
    inf = -np.inf
    base, other = [1.0, 2.0, 0.5, -1.0], [0.0, -1.0, 3.0, 1.0]
    return {
        "both exclude a token": ([1.0, 2.0, inf, 0.5], [0.3, 1.0, inf, 0.1]),
        "only the target excludes it": ([1.0, 2.0, inf, 0.5], base),
        "only the draft excludes it": (base, [1.0, 2.0, inf, 0.5]),
        "disjoint supports": ([1.0, 2.0, inf, inf], [inf, inf, 1.0, 0.0]),
        "one-hot target": ([inf, 0.0, inf, inf], base),
        "one-hot draft": (base, [inf, 0.0, inf, inf]),
        "temperature 0.05": ([x / 0.05 for x in base], [20 * x for x in other]),
        "far apart": ([0.0, 300.0, 0.0, 0.0], [300.0, 0.0, 0.0, 0.0]),
    }


@each
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("case", hard_cases())
def test_values_and_gradients_are_finite(divergence, case, dtype):
    p_logits, q_logits = (jnp.asarray(x, dtype) for x in hard_cases()[case])

    def loss(p_logits, q_logits):
        return divergence(jax.nn.log_softmax(p_logits), jax.nn.log_softmax(q_logits))

    value, gradients = jax.value_and_grad(loss, (0, 1))(p_logits, q_logits)
    assert value.dtype == jnp.float32 and jnp.isfinite(value) and value >= -1e-2
    for gradient in gradients:
        assert jnp.isfinite(gradient.astype(jnp.float32)).all()


def test_an_excluded_token_of_the_target_costs_the_floor():
    only_first, both = log([1.0, 0.0]), log([0.5, 0.5])
    expected = 0.5 * (math.log(0.5) - divergences.FLOOR) + 0.5 * math.log(0.5)
    value = divergences.forward_kl(both, only_first)
    assert value == pytest.approx(expected, rel=1e-6)
    assert divergences.reverse_kl(only_first, both) == pytest.approx(expected, rel=1e-6)


def test_disjoint_supports_reach_the_bounds():
    p, q = log([0.5, 0.5, 0.0, 0.0]), log([0.0, 0.0, 0.5, 0.5])
    assert divergences.tvd(p, q) == pytest.approx(1)
    for beta in (0.1, 0.5):
        bound = -beta * math.log(beta) - (1 - beta) * math.log1p(-beta)
        assert divergences.jsd(p, q, beta=beta) == pytest.approx(bound, rel=1e-6)


def test_a_draft_that_is_wrong_by_hundreds_of_nats_still_learns():
    """A floor near the smallest float32 would silence exactly the worst tokens."""

    def loss(q_logits):
        return divergences.forward_kl(log([0.5, 0.5]), jax.nn.log_softmax(q_logits))

    gradient = jax.grad(loss)(jnp.asarray([300.0, 0.0]))
    np.testing.assert_allclose(gradient, [0.5, -0.5], rtol=1e-5)


def test_jsd_vanishes_at_both_ends_and_its_ratio_is_a_kl():
    """https://github.com/modelscope/ms-swift/issues/10078"""
    with jax.enable_x64(True):
        p, q = jnp.log(jnp.asarray(P)), jnp.log(jnp.asarray(Q))
        forward, reverse = oracle("forward_kl", P, Q), oracle("reverse_kl", P, Q)
        small = 1e-6
        left = divergences.jsd(p, q, beta=small)
        right = divergences.jsd(p, q, beta=1 - small)
        assert left < 1e-5 and right < 1e-5
        assert left / small == pytest.approx(forward, rel=1e-4)
        assert right / small == pytest.approx(reverse, rel=1e-4)


@pytest.mark.parametrize("beta", [0, 1, 0.0, 1.0, -0.1, 1.5, float("nan")])
def test_jsd_refuses_its_end_points(beta):
    """https://github.com/huggingface/trl/pull/3043"""
    with pytest.raises(ValueError, match="beta must be inside"):
        divergences.jsd(log(P), log(Q), beta=beta)
    with pytest.raises(ValueError, match="beta must be inside"):
        divergences.resolve("jsd", beta=beta)


def test_uniform_against_one_hot_is_log_v():
    """https://github.com/huggingface/trl/pull/4105"""
    one_hot, uniform = log([0.0, 1.0, 0.0, 0.0, 0.0]), log([0.2] * 5)
    value = divergences.forward_kl(one_hot, uniform)
    assert value == pytest.approx(math.log(5), rel=1e-6)


def test_resolve_binds_options_and_hashes_by_value():
    bound = divergences.resolve("jsd", beta=0.1)
    assert bound(log(P), log(Q)) == divergences.jsd(log(P), log(Q), beta=0.1)
    assert bound == divergences.resolve("jsd", beta=0.1)
    assert hash(bound) == hash(divergences.resolve("jsd", beta=0.1))
    assert bound != divergences.resolve("jsd", beta=0.2)


def test_unknown_names_and_options_are_named():
    with pytest.raises(ValueError, match="did you mean 'forward_kl'"):
        divergences.get("foward_kl")
    with pytest.raises(ValueError, match="no option 'betta'; did you mean 'beta'"):
        divergences.resolve("jsd", betta=0.1)
    with pytest.raises(ValueError, match="'tvd' has no option 'beta'; it has none"):
        divergences.resolve("tvd", beta=0.1)


def test_the_registry_holds_the_public_functions():
    assert set(divergences.names()) >= {"forward_kl", "reverse_kl", "jsd", "tvd"}
    for name in divergences.names():
        assert divergences.get(name) is getattr(divergences, name)
