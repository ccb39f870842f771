"""Students whose head lacks ids: what they learn from, and what is not counted."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import distill, divergences
from specjax.distill import Models, Objective, Policy
from specjax.models import CausalLM, reduce_head
from tests.conformance.term_cases import batch
from tests.marks import sampled

IDS = [0, 2, 3, 7, 8, 12]  # of 13
TERMS = ("distill", "cross_entropy", "adaspec", "minillm")


@pytest.fixture(scope="module")
def student(toys):
    def reduce(ids):
        config, params = reduce_head(toys.draft.config, toys.draft_params, ids)
        return CausalLM(config), params

    return reduce


@pytest.fixture(scope="module")
def measure(toys):
    """Loss, gradient and sums of a student on the batch of the conformance tests."""

    def run(objective, student, rows=None):
        model, params = student
        rows = (batch() if rows is None else rows).for_head(model.head)
        aux = ((),) * len(objective.terms)
        scales = objective.scales(objective.count(rows))

        @jax.jit
        def go(params):
            everyone = Models(
                Policy(params, model),
                Policy(toys.target_params, toys.target),
                Policy(params, model),
            )
            return objective(everyone, aux, rows, scales)

        (loss, sums), gradient = jax.value_and_grad(go, has_aux=True)(params)
        return float(loss), gradient, sums

    return run


def log_softmax(x):
    x = np.asarray(x, np.float64)
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def logits(toys, student):
    """Of target and student, at the positions that predict something, in float64."""
    model, params = student
    tokens = batch().tokens
    return [
        np.asarray(m.apply(p, tokens)[0].logits, np.float64)[:, :-1]
        for m, p in ((toys.target, toys.target_params), (model, params))
    ]


@pytest.mark.parametrize("temperature", sampled([1.0, 2.5], 2.5))
@pytest.mark.full
def test_both_laws_are_over_the_ids_of_the_head(toys, student, measure, temperature):
    """Li et al., EAGLE-3, arXiv 2503.01840: the target's law is renormalised."""
    reduced = student(IDS)
    kl = distill.Distill(divergences.resolve("forward_kl"), temperature=temperature)
    loss, _, sums = measure(Objective((1.0, kl), chunk=8), reduced)
    p_logits, q_logits = logits(toys, reduced)
    p = log_softmax(p_logits[..., IDS] / temperature)
    q = log_softmax(q_logits[..., IDS] / temperature)
    mask = batch().mask[:, 1:]
    expected = np.sum(np.exp(p) * (p - q), -1)[mask].mean()
    assert loss == pytest.approx(expected, rel=1e-5)

    # What is monitored is not renormalised: such drafts are never accepted.
    p, q = np.exp(log_softmax(p_logits)), np.exp(log_softmax(q_logits))
    shown = sums.as_dict()
    assert shown["overlap"] == pytest.approx(
        np.minimum(p, q).sum(-1)[mask].mean(), rel=1e-5
    )
    outside = 1 - p[..., IDS].sum(-1)
    assert shown["outside"] == pytest.approx(outside[mask].mean(), rel=1e-4)
    same = p.argmax(-1) == q.argmax(-1)
    assert shown["agreement"] == pytest.approx(same[mask].mean())


def test_labels_outside_the_head_are_not_counted(toys, student, measure):
    reduced = student(IDS)
    ce = Objective((1.0, distill.CrossEntropy()), chunk=8)
    loss, _, sums = measure(ce, reduced)
    rows = batch()
    there = rows.mask & ~rows.on_policy[:, None]
    counted = there & np.isin(rows.tokens, IDS)
    assert 0 < counted.sum() < there.sum()
    assert sums.counts["cross_entropy"] == sums.tokens == counted.sum()
    q = log_softmax(logits(toys, reduced)[1])
    row, column = np.nonzero(counted)
    expected = -q[row, column - 1, rows.tokens[row, column]].mean()
    assert loss == pytest.approx(expected, rel=1e-5)


def test_a_step_without_a_label_inside_changes_nothing(student, step_of):
    model, params = student(IDS)
    step = step_of(student=model, objective=distill.CrossEntropy(), teacher=None)
    tokens = np.full((2, 6), 5)
    state, sums = step(step.init(jax.random.key(0), params), distill.Batch.of(tokens))
    assert sums.skipped == 1 and sums.tokens == 0
    jax.tree.map(np.testing.assert_array_equal, state.params, params)


@pytest.fixture(scope="module")
def all_terms():
    return Objective(*[(1.0, distill.make_term(name)) for name in TERMS], chunk=8)


@pytest.mark.full
def test_a_head_of_all_ids_is_a_full_head(toys, student, measure, all_terms):
    """Every term that reads logits: the same losses and the same slopes."""
    reduced = student(range(13))
    config = dataclasses.replace(reduced[0].config, head=None)
    whole = measure(all_terms, (CausalLM(config), reduced[1]))
    loss, gradient, sums = measure(all_terms, reduced)
    assert loss == pytest.approx(whole[0], rel=1e-5)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6),
        gradient,
        whole[1],
    )
    assert abs(float(sums.outside)) < 1e-4 and whole[2].outside == 0


@pytest.mark.full
def test_losses_and_slopes_of_a_reduced_head_are_finite(student, measure, all_terms):
    loss, gradient, sums = measure(all_terms, student(IDS))
    assert np.isfinite(loss) and sums.outside > 0
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(gradient))
    assert all(np.isfinite(x) and x != 0 for x in sums.parts.values())


def test_ids_that_the_teacher_lacks_are_refused(toys, measure):
    draft = toys.language_model(15)
    config, params = reduce_head(draft.config, toys.sharp(draft, 0), [0, 3, 13])
    with pytest.raises(ValueError, match="writes ids up to 13, but only those below"):
        measure(Objective((1.0, distill.Distill())), (CausalLM(config), params))


@pytest.mark.full
def test_the_chance_of_acceptance_comes_to_what_the_head_allows(toys, student, step_of):
    """Overfitting: alpha ends at the mass that the target has on the ids."""
    model, params = student(IDS)
    step = step_of(student=model, optimizer=distill.make_optimizer(learning_rate=3e-2))
    rows = distill.Batch.of(toys.corpus(rows=1, width=6))
    state = step.init(jax.random.key(0), params)
    for _ in range(250):
        state, sums = step(state, rows, toys.target_params)
    p = jax.nn.softmax(toys.target.apply(toys.target_params, rows.tokens)[0].logits)
    bound = float(p[0, :-1][:, jnp.array(IDS)].sum(-1).mean())
    assert sums.as_dict()["overlap"] == pytest.approx(bound, abs=0.02)
    assert bound < 0.9
