"""AdaSPEC: which tokens are taken, and that nothing else counts."""

import functools

import jax
import numpy as np
import pytest

from specjax import distill, divergences
from specjax.distill import AdaSPEC, Batch, Distill, Models, Objective, Policy

LENGTHS = np.asarray([3, 20, 9, 13])  # of rows whose prompt is 2 tokens
PROMPT = 2


@functools.partial(jax.jit, static_argnums=(0, 1))
def measure(objective, models, params, batch):
    """Loss, sums and the draft's gradient; `models` and `params`: q, p, reference."""

    def loss(q_params):
        given = (q_params, *params[1:])
        policies = [Policy(x, model) for x, model in zip(given, models, strict=True)]
        return objective.measure(Models(*policies), batch)

    return jax.value_and_grad(loss, has_aux=True)(params[0])


@pytest.fixture(scope="module")
def trio(toys):
    """Draft, target and reference draft, the reference's vocabulary with padding."""
    other = toys.language_model(vocab_size=16)
    models = toys.draft, toys.target, other
    return models, (toys.draft_params, toys.target_params, toys.sharp(other, 2))


@pytest.fixture(scope="module")
def batch(toys):
    return Batch.of(toys.corpus(), length=LENGTHS, prompt_length=PROMPT)


def log_laws(model, params, tokens, temperature):
    logits = np.asarray(jax.jit(model.apply)(params, tokens)[0].logits, np.float64)
    logits = logits[..., :13] / temperature
    logits -= logits.max(-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def test_the_loss_is_the_mean_over_the_tokens_that_trail_most(trio, batch):
    """A float64 oracle: the best `ceil(0.4 n)` of each row's n, by loss gap."""
    models, params = trio
    log_q, log_p, log_r = (
        log_laws(model, x, batch.tokens, 2.0)
        for model, x in zip(models, params, strict=True)
    )
    loss = np.sum(np.exp(log_p) * (log_p - log_q), -1)
    gap = loss - np.sum(np.exp(log_p) * (log_p - log_r), -1)
    best, worst = [], []
    for row, length in enumerate(LENGTHS):
        counted = np.arange(PROMPT, length) - 1  # token i is predicted at i - 1
        order = counted[np.argsort(-gap[row, counted])]
        kept = int(np.ceil(0.4 * len(counted) - 1e-9))
        best += list(loss[row, order[:kept]])
        worst += list(loss[row, order[-kept:]])
    assert len(best) == 1 + 8 + 3 + 5

    objective = Objective((1.0, AdaSPEC(temperature=2.0)), chunk=12)
    (value, sums), gradient = measure(objective, models, params, batch)
    assert float(value) == pytest.approx(np.mean(best), rel=1e-5)
    assert abs(np.mean(worst) / np.mean(best) - 1) > 0.1  # the control
    counts = sums.as_dict()
    assert (counts["tokens/adaspec"], counts["tokens"]) == (17, 37)
    assert counts["loss"] == pytest.approx(np.mean(best), rel=1e-5)
    assert any(x.any() for x in jax.tree.leaves(gradient))


def test_all_tokens_are_plain_distillation(trio, batch):
    (all_tokens, sums), gradient = measure(
        Objective((1.0, AdaSPEC(keep=1.0))), *trio, batch
    )
    (plain, _), of_plain = measure(Objective((1.0, Distill())), *trio, batch)
    assert float(all_tokens) == pytest.approx(float(plain), rel=1e-6)
    for a, b in zip(*map(jax.tree.leaves, (gradient, of_plain)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)
    assert "tokens/adaspec" not in sums.as_dict()  # all of them


def test_ties_take_no_more_tokens_than_asked_for(toys, batch):
    """A draft that is its own reference trails nowhere."""
    term = distill.terms.get("adaspec")(divergences.resolve("jsd"), keep=0.5)
    taken = np.asarray(term.weigh(np.zeros((4, 19), np.float32), batch))
    assert taken.sum(1).tolist() == [1, 9, 4, 6]
    assert not taken[~np.asarray(batch.mask)[:, 1:]].any()
    assert int(term.count(batch)) == taken.sum()


@pytest.mark.parametrize("keep", [0.1, 0.3, 0.4, 0.7])
def test_a_share_is_rounded_up_from_its_exact_value(toys, keep):
    """In float32, 0.4 of 5 tokens would be a little more than 2."""
    rows = np.arange(1, 101)
    batch = Batch.of(np.zeros((100, 101)), length=rows + 1)
    term = AdaSPEC(keep=keep)
    taken = np.asarray(term.weigh(np.zeros((100, 100), np.float32), batch)).sum(1)
    assert taken.tolist() == [-(-round(10 * keep) * n // 10) for n in rows]


def test_it_needs_a_reference(step_of):
    with pytest.raises(ValueError, match="the objective needs reference="):
        step_of(objective=distill.terms.get("adaspec")())
    with pytest.raises(ValueError, match="AdaSPEC needs teacher="):
        step_of(objective=AdaSPEC(), teacher=None, reference=step_of().student)


@pytest.mark.parametrize(
    "options, match",
    [
        (dict(keep=0.0), r"keep must be in \(0, 1\], got 0"),
        (dict(keep=1.1), r"keep must be in \(0, 1\]"),
        (dict(temperature=0.0), "temperature must be > 0"),
    ],
)
def test_wrong_settings_are_refused(options, match):
    with pytest.raises(ValueError, match=match):
        AdaSPEC(**options)
