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
CASES += [divergences.resolve("skew_forward_kl", lam=0.5)]
CASES += [divergences.resolve("skew_reverse_kl", lam=0.5)]
CASES += [divergences.resolve("lk", kl_scale=0.5, kl_decay=1.0)]
CASES += [divergences.resolve("l1_ce", ce_weight=0.5)]

SYMMETRIC = [divergences.resolve(name) for name in ("jsd", "tvd", "lk_alpha")]


def case_id(case):
    return case.name + "".join(f"-{v}" for _, v in case.options)


each = pytest.mark.parametrize("divergence", CASES, ids=case_id)


def log(x):
    return jnp.log(jnp.asarray(x, jnp.float32))


def oracle(case, p, q):
    """The definitions in float64, with 0 log 0 = 0, and the defaults of the papers."""
    p, q = np.asarray(p, np.float64), np.asarray(q, np.float64)
    options = dict(case.options)

    def cross_entropy(a, b):
        some = a > 0
        return -float(np.sum(a[some] * np.log(b[some])))

    def kl(a, b):
        return cross_entropy(a, b) - cross_entropy(a, a)

    def jsd(beta=0.5):
        mixture = beta * p + (1 - beta) * q
        return beta * kl(p, mixture) + (1 - beta) * kl(q, mixture)

    def skew(a, b, lam=0.1):
        return kl(a, lam * a + (1 - lam) * b)

    def lk(kl_scale=1.0, kl_decay=3.0):
        w = kl_scale * math.exp(-kl_decay * alpha)
        return w * kl(p, q) + (1 - w) * (1 - alpha)

    def l1_ce(ce_weight=0.1):
        l1 = float(np.abs(p - q).sum())
        return (1 - ce_weight) * l1 + ce_weight * cross_entropy(p, q)

    alpha = float(np.minimum(p, q).sum())
    return {
        "forward_kl": lambda: kl(p, q),
        "reverse_kl": lambda: kl(q, p),
        "jsd": lambda: jsd(**options),
        "tvd": lambda: 1 - alpha,
        "skew_forward_kl": lambda: skew(p, q, **options),
        "skew_reverse_kl": lambda: skew(q, p, **options),
        "lk_alpha": lambda: -math.log(alpha),
        "lk": lambda: lk(**options),
        "l1_ce": lambda: l1_ce(**options),
    }[case.name]()


def test_closed_forms_on_three_tokens_tell_the_directions_apart():
    """https://github.com/huggingface/trl/pull/3043"""
    forward = 0.7 * math.log(7) + 0.2 * math.log(2 / 3) + 0.1 * math.log(1 / 6)
    reverse = 0.1 * math.log(1 / 7) + 0.3 * math.log(3 / 2) + 0.6 * math.log(6)
    assert divergences.forward_kl(log(P), log(Q)) == pytest.approx(forward, rel=1e-6)
    assert divergences.reverse_kl(log(P), log(Q)) == pytest.approx(reverse, rel=1e-6)
    assert divergences.tvd(log(P), log(Q)) == pytest.approx(0.6, rel=1e-6)
    for beta in (0.1, 0.5, 0.9):
        value = divergences.jsd(log(P), log(Q), beta=beta)
        expected = oracle(divergences.resolve("jsd", beta=beta), P, Q)
        assert value == pytest.approx(expected, rel=1e-5)
    # The negative control: swapped arguments differ, so a swap cannot pass.
    assert abs(forward - reverse) > 0.05


def test_closed_forms_of_the_skew_lk_and_l1_losses():
    p, q = log(P), log(Q)
    # 0.1 p + 0.9 q = (.16, .29, .55) and 0.9 p + 0.1 q = (.64, .21, .15).
    forward = (
        0.7 * math.log(70 / 16) + 0.2 * math.log(20 / 29) + 0.1 * math.log(10 / 55)
    )
    reverse = (
        0.1 * math.log(10 / 64) + 0.3 * math.log(30 / 21) + 0.6 * math.log(60 / 15)
    )
    assert divergences.skew_forward_kl(p, q) == pytest.approx(forward, rel=1e-5)
    assert divergences.skew_reverse_kl(p, q) == pytest.approx(reverse, rel=1e-5)
    # alpha = .1 + .2 + .1
    assert divergences.lk_alpha(p, q) == pytest.approx(-math.log(0.4), rel=1e-6)
    kl = 0.7 * math.log(7) + 0.2 * math.log(2 / 3) + 0.1 * math.log(1 / 6)
    w = math.exp(-3 * 0.4)
    expected = w * kl + (1 - w) * 0.6
    assert divergences.lk(p, q) == pytest.approx(expected, rel=1e-6)
    ce = -0.7 * math.log(0.1) - 0.2 * math.log(0.3) - 0.1 * math.log(0.6)
    expected = 0.9 * 1.2 + 0.1 * ce
    assert divergences.l1_ce(p, q) == pytest.approx(expected, rel=1e-6)


@each
def test_a_swap_of_target_and_draft_shows(divergence):
    p, q = [0.8, 0.15, 0.05], [0.3, 0.3, 0.4]
    swapped, expected = divergence(log(q), log(p)), oracle(divergence, p, q)
    if divergence in SYMMETRIC:
        assert swapped == pytest.approx(expected, rel=1e-5)
    else:
        assert abs(swapped - expected) > 1e-3


@each
def test_equals_the_float64_oracle(divergence):
    rng = np.random.default_rng(0)
    p, q = rng.dirichlet([0.3] * 7, (2, 5)), rng.dirichlet([0.3] * 7, (2, 5))
    value = divergence(log(p), log(q))
    assert value.shape == (2, 5) and value.dtype == jnp.float32
    for index in np.ndindex(2, 5):
        expected = oracle(divergence, p[index], q[index])
        assert value[index] == pytest.approx(expected, rel=2e-5, abs=1e-6)


@each
def test_is_least_between_equals_where_all_but_one_are_zero(divergence):
    rng = np.random.default_rng(1)
    p, q = log(rng.dirichlet([1.0] * 50, 20)), log(rng.dirichlet([1.0] * 50, 20))
    least = np.zeros(20)
    if divergence.name == "l1_ce":
        entropy = -jnp.sum(jnp.exp(p) * p, axis=-1)
        least = dict(divergence.options).get("ce_weight", 0.1) * entropy
    np.testing.assert_allclose(divergence(p, p), least, rtol=1e-5, atol=1e-6)
    assert (divergence(p, q) > least).all()


def with_frozen_weight(divergence, log_p, log_q):
    """The adaptive mix with its weight as it is here: what its gradient is of."""
    if divergence.name != "lk":
        return divergence
    options = {"kl_scale": 1.0, "kl_decay": 3.0, **dict(divergence.options)}
    alpha = jnp.sum(jnp.exp(jnp.minimum(log_p, log_q)))
    w = options["kl_scale"] * jnp.exp(-options["kl_decay"] * alpha)
    return lambda p, q: (
        w * divergences.forward_kl(p, q) + (1 - w) * divergences.tvd(p, q)
    )


@each
def test_gradient_equals_finite_differences(divergence):
    """https://github.com/huggingface/trl/pull/3043"""
    rng = np.random.default_rng(2)
    with jax.enable_x64(True):
        log_p = jax.nn.log_softmax(jnp.asarray(rng.normal(size=5)))
        logits = jnp.asarray(rng.normal(size=5))

        def loss(logits):
            return frozen(log_p, jax.nn.log_softmax(logits))

        frozen = with_frozen_weight(divergence, log_p, jax.nn.log_softmax(logits))
        gradient = jax.grad(
            lambda x: divergence(log_p, jax.nn.log_softmax(x)),
        )(logits)
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
        forward = oracle(divergences.resolve("forward_kl"), P, Q)
        reverse = oracle(divergences.resolve("reverse_kl"), P, Q)
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


@pytest.mark.parametrize(
    ("name", "option", "values"),
    [
        ("skew_forward_kl", "lam", (0, 1, -0.1, 1.5, float("nan"))),
        ("skew_reverse_kl", "lam", (0, 1, -0.1, 1.5, float("nan"))),
        ("lk", "kl_scale", (-0.1, 1.1, float("nan"))),
        ("lk", "kl_decay", (-0.1, float("inf"), float("nan"))),
        ("l1_ce", "ce_weight", (-0.1, 1.1, float("nan"))),
    ],
)
def test_options_out_of_range_are_refused(name, option, values):
    for value in values:
        with pytest.raises(ValueError, match=f"{option} must be .*, got {value}"):
            divergences.get(name)(log(P), log(Q), **{option: value})
        with pytest.raises(ValueError, match=f"{option} must be"):
            divergences.resolve(name, **{option: value})


@pytest.mark.parametrize("side", ["forward", "reverse"])
def test_skew_kls_tend_to_the_kls_and_are_bounded(side):
    skew, kl = divergences.get(f"skew_{side}_kl"), divergences.get(f"{side}_kl")
    value = skew(log(P), log(Q), lam=1e-6)
    assert value == pytest.approx(float(kl(log(P), log(Q))), rel=1e-5)
    p, q = log([0.5, 0.5, 0.0, 0.0]), log([0.0, 0.0, 0.5, 0.5])
    for lam in (0.1, 0.5):
        assert skew(p, q, lam=lam) == pytest.approx(-math.log(lam), rel=1e-6)


def test_lk_alpha_scales_the_gradient_of_total_variation_by_the_acceptance():
    """Where acceptance underflows, total variation learns nothing and this does."""
    log_p = log(P)

    def gradient(divergence, logits):
        logits = jnp.asarray(logits, jnp.float32)
        return jax.grad(lambda x: divergence(log_p, jax.nn.log_softmax(x)))(logits)

    logits = np.log(Q)
    np.testing.assert_allclose(
        gradient(divergences.lk_alpha, logits),
        gradient(divergences.tvd, logits) / 0.4,
        rtol=1e-5,
    )
    one_hot = log([1.0, 0.0, 0.0])
    for divergence, least in ((divergences.lk_alpha, 0.9), (divergences.tvd, 0.0)):
        slope = jax.grad(lambda x, d=divergence: d(one_hot, jax.nn.log_softmax(x)))
        moved = abs(slope(jnp.asarray([-200.0, 0.0, -200.0]))).max()
        assert moved >= least and (least or moved < 1e-30)


def test_no_gradient_flows_through_the_weight_of_lk():
    """Its derivative differs from that of the value, which a swap would show."""
    log_p = log(P)

    def value(logits):
        log_q = jax.nn.log_softmax(logits)
        alpha = jnp.sum(jnp.exp(jnp.minimum(log_p, log_q)))
        w = jnp.exp(-3 * alpha)
        return w * divergences.forward_kl(log_p, log_q) + (1 - w) * (1 - alpha)

    logits = log(Q)
    through = jax.grad(value)(logits)
    ours = jax.grad(lambda x: divergences.lk(log_p, jax.nn.log_softmax(x)))(logits)
    assert abs(through - ours).max() > 0.02
    # At the ends it is the KL, and what is left over of total variation.
    assert divergences.lk(log_p, log(Q), kl_decay=0) == pytest.approx(
        float(divergences.forward_kl(log_p, log(Q)))
    )
    assert divergences.lk(log_p, log(Q), kl_scale=0) == pytest.approx(0.6)


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
