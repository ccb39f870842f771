"""Logits are made where a token counts, and nothing but the cost tells of it."""

import dataclasses

import jax
import numpy as np
import pytest

from specjax import distill
from specjax.distill import Batch, Mixture, StudentGenerated
from specjax.models import CausalLM
from tests.conformance.term_cases import STUDENT, TEACHER, all_cases, batch, sharp
from tests.conformance.test_terms import make_models, measure

CASES = all_cases()


def narrow(rows: Batch) -> Batch:
    return jax.tree.map(np.asarray, rows).bounded()


def flat(tree):
    return np.concatenate([np.asarray(x).ravel() for x in jax.tree.leaves(tree)])


@pytest.mark.full
def test_losses_and_gradients_of_all_terms_are_those_of_the_whole_rows():
    (trained, others), rows = make_models(), batch(width=21)
    assert narrow(rows).loss_width < rows.tokens.shape[1] - 1
    assert len({int(n) for n in rows.mask.sum(1)}) > 1  # ragged
    scales = tuple(np.float32(1.0 / (n + 2)) for n in range(len(CASES)))
    whole = measure(STUDENT, TEACHER, trained, others, rows, scales)
    part = measure(STUDENT, TEACHER, trained, others, narrow(rows), scales)
    for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(part), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6)


@pytest.fixture(scope="module")
def steps():
    def make(**options):
        return distill.TrainStep(
            STUDENT,
            distill.Distill(),
            distill.make_optimizer(learning_rate=1e-3),
            teacher=TEACHER,
            **options,
        )

    return make


def test_a_row_that_counts_more_than_its_batch_knows_of_is_found_out(steps):
    step = steps()
    rows = dataclasses.replace(narrow(batch()), loss_width=1)
    sums = step.evaluate(sharp(STUDENT, 0), [rows], sharp(TEACHER, 1))
    assert np.isnan(sums.as_dict()["loss"])


@pytest.mark.full
def test_the_compiled_step_does_less(steps):
    """60 tokens of prompt before 4 that count: a fifteenth of the logits."""
    tokens = np.arange(4 * 64).reshape(4, 64) % 13
    rows = Batch.of(tokens, prompt_length=60)
    student, teacher = (
        CausalLM(dataclasses.replace(model.config, vocab_size=512))
        for model in (STUDENT, TEACHER)
    )
    step = dataclasses.replace(steps(), student=student, teacher=teacher)
    state = jax.eval_shape(step.init, jax.random.key(0))
    theirs = jax.eval_shape(teacher.init, jax.random.key(1))

    def flops(rows):
        return (
            jax.jit(lambda s, b, t: step.gradients(s, b, t))
            .lower(state, rows, theirs)
            .compile()
            .cost_analysis()["flops"]
        )

    assert rows.bounded().loss_width == 4
    assert flops(rows.bounded()) < 0.6 * flops(rows)


@pytest.mark.parametrize("per", ["split", "row", "step"])
def test_mixtures_know_the_larger_of_the_two(per):
    rollout = StudentGenerated(4, 6)
    corpus = Batch.of(np.zeros((4, 12), int), prompt_length=9).bounded()
    mixture = Mixture(distill.FixedCorpus(), rollout, per=per)
    models = distill.Models(distill.Policy(sharp(STUDENT, 0), STUDENT))

    def draw(corpus):
        keys = jax.random.split(jax.random.key(1), 4)
        return mixture.draw(jax.random.key(0), keys, corpus, models, ((), ()))[0]

    assert jax.eval_shape(draw, corpus).loss_width == 6
    unknown = dataclasses.replace(corpus, loss_width=None)
    assert jax.eval_shape(draw, unknown).loss_width is None
