"""Rollouts of draft and target together: which law wrote them, and what is told."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import Sampling, distill, testing
from specjax.distill import Batch, Models, Policy, StudentGenerated, TeacherMixed

PROMPT, NEW = 4, 6


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def draw(source, draft, target, q_params, p_params, batch, key=None):
    key = jax.random.key(5) if key is None else key
    models = Models(Policy(q_params, draft), Policy(p_params, target))
    keys = jax.random.split(key, batch.tokens.shape[0])
    return source.draw(key, keys, batch, models, source.memory())[0]


@functools.partial(jax.jit, static_argnums=0)
def raw(model, params, tokens):
    return model.apply(params, tokens)[0].logits


def laws(model, params, tokens, size):
    """Float64 laws `[B, T, size]` of what follows each token, without a cache."""
    logits = np.asarray(raw(model, params, tokens), np.float64)
    law = np.exp(logits[..., :size] - logits[..., :size].max(-1, keepdims=True))
    return law / law.sum(-1, keepdims=True)


@pytest.fixture(scope="module")
def pair(toys):
    """A draft whose vocabulary has padding, and its target."""
    draft, target = toys.language_model(vocab_size=16), toys.language_model()
    return draft, target, toys.sharp(draft, 3), toys.sharp(target, 4)


@pytest.mark.full
def test_each_token_is_told_with_its_probability_under_mixture_and_draft(toys, pair):
    """Over the ids that both have, and without the cache that it was drawn with."""
    draft, target, q_params, p_params = pair
    source = TeacherMixed(PROMPT, NEW, alpha=0.3, eos_ids=(3, 8), chunk=15)
    batch = Batch.of(toys.corpus(rows=5), prompt_length=[1, 2, 3, 4, 4])
    drawn = jax.device_get(draw(source, draft, target, q_params, p_params, batch))
    assert source.tells_behaviour and drawn.on_policy.all()
    assert drawn.tokens.max() < 13 and drawn.tokens.shape == (5, PROMPT + NEW)

    q = laws(draft, q_params, drawn.tokens, 13)
    p = laws(target, p_params, drawn.tokens, 13)
    told = drawn.behaviour
    assert (told.log_prob[~drawn.mask] == 0).all() and (
        told.log_q[~drawn.mask] == 0
    ).all()
    assert drawn.mask.any(1).all() and (drawn.mask.sum(1) < NEW).any()
    for row, column in zip(*np.nonzero(drawn.mask), strict=True):
        at = row, column - 1, drawn.tokens[row, column]
        mixture = 0.3 * p[at] + 0.7 * q[at]
        assert told.log_prob[row, column] == pytest.approx(np.log(mixture), abs=1e-4)
        assert told.log_q[row, column] == pytest.approx(np.log(q[at]), abs=1e-4)
        assert abs(np.log(mixture) - np.log(q[at])) > 1e-3  # the two are not one


def test_tokens_follow_the_mixture_and_not_the_draft(toys, pair):
    target, draft, p_params, q_params = pair  # now the target has the padding
    rows = 3000
    batch = Batch.of(np.tile(toys.corpus(rows=1), (rows, 1)), prompt_length=2)
    source = TeacherMixed(2, 1, alpha=0.4)
    drawn = draw(source, draft, target, q_params, p_params, batch)
    q = laws(draft, q_params, batch.tokens[:1, :2], 13)[0, 1]
    p = laws(target, p_params, batch.tokens[:1, :2], 13)[0, 1]
    counts = np.bincount(np.asarray(drawn.tokens)[:, 2], minlength=13)
    assert testing.chi_square(counts, 0.4 * p + 0.6 * q) > 1e-3
    assert testing.chi_square(counts, 0.6 * p + 0.4 * q) < 1e-6


@pytest.mark.full
def test_without_the_targets_share_it_is_the_student(toys):
    sampling = Sampling(temperature=0.6)
    batch = Batch.of(toys.corpus(rows=6), prompt_length=3)
    models = toys.draft, toys.target, toys.draft_params, toys.target_params
    alone = draw(StudentGenerated(PROMPT, NEW, sampling), *models, batch)
    source = TeacherMixed(PROMPT, NEW, sampling, alpha=0.0)
    mixed = draw(source, *models, batch)
    assert (alone.tokens == mixed.tokens).all() and (alone.mask == mixed.mask).all()
    # The probability is that of the draw, log q is the draft's own.
    told = mixed.behaviour
    assert not np.allclose(told.log_prob, told.log_q, atol=1e-2)


@pytest.mark.parametrize(
    "make, match",
    [
        (lambda: TeacherMixed(4, 6, alpha=1.0), r"alpha must be in \[0, 1\), got 1"),
        (lambda: TeacherMixed(4, 6, alpha=-0.1), r"alpha must be in \[0, 1\)"),
        (lambda: TeacherMixed(4, 6, chunk=0), "chunk must be at least 1"),
        (lambda: TeacherMixed(4, 6, Sampling(temperature=0)), "must be > 0, got 0"),
        (lambda: TeacherMixed(0, 6), "prompt_size must be"),
    ],
)
def test_wrong_settings_are_refused(make, match):
    with pytest.raises(ValueError, match=match):
        make()


def test_it_needs_a_teacher(toys):
    assert distill.get_source("teacher_mixed") is TeacherMixed
    with pytest.raises(ValueError, match="TeacherMixed needs a teacher"):
        models = Models(Policy(toys.draft_params, toys.draft))
        TeacherMixed(2, 2).draw(None, jnp.zeros(2), None, models, ())
