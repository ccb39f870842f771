"""MiniLLM's gradient against the exact one, and the parts that it is made of."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import distill
from specjax.distill import (
    Batch,
    Behaviour,
    CrossEntropy,
    FixedCorpus,
    MiniLLM,
    Mixture,
    Models,
    Objective,
    Policy,
    TeacherMixed,
    TokenView,
)

VOCAB, LENGTH = 4, 3
ALL = np.asarray(list(itertools.product(range(VOCAB), repeat=LENGTH)))
ROWS = np.concatenate([np.ones((len(ALL), 1), int), ALL], 1)  # behind one prompt


class Myopic(MiniLLM):
    """The negative control: what follows a token is nobody's business."""

    def _returns(self, reward, counted):
        return jnp.zeros_like(reward)


@functools.partial(jax.jit, static_argnums=0)
def token_laws(model, params):
    """Log-probabilities `[rows, LENGTH]` of each token of each sequence."""
    law = jax.nn.log_softmax(model.apply(params, jnp.asarray(ROWS))[0].logits)[:, :-1]
    return jnp.take_along_axis(law, jnp.asarray(ALL)[..., None], -1)[..., 0]


@functools.partial(jax.jit, static_argnums=(0, 1))
def expected_gradient(term, model, q_params, p_params, behaviour, weight):
    """The term's gradient in expectation: sequences weighed by how likely they are."""

    def loss(params):
        def one(tokens, behaviour):
            mask = jnp.arange(LENGTH + 1) > 0
            row = tokens, mask, jnp.ones((), int), jnp.ones((), bool), behaviour
            batch = jax.tree.map(lambda x: x[None], Batch(*row))
            models = Models(Policy(params, model), Policy(p_params, model))
            return Objective.of(term)(models, ((),), batch, (jnp.ones(()),))[0]

        return jnp.vdot(weight, jax.vmap(one)(jnp.asarray(ROWS), behaviour))

    return jax.grad(loss)(q_params)


@pytest.fixture(scope="module")
def exact(toys):
    """Two models of four tokens, and the gradient of the KL of their sequences."""
    model = toys.language_model(vocab_size=VOCAB)
    q_params, p_params = toys.sharp(model, 3), toys.sharp(model, 4)

    @jax.jit
    @jax.grad
    def gradient(params):
        log_q = token_laws(model, params).sum(1)
        log_p = token_laws(model, p_params).sum(1)
        return jnp.sum(jnp.exp(log_q) * (log_q - log_p))

    log_q, log_p = token_laws(model, q_params), token_laws(model, p_params)
    assert float(jnp.exp(log_q.sum(1)).sum()) == pytest.approx(1, abs=1e-5)
    return model, q_params, p_params, log_q, log_p, gradient(q_params)


def behaviour(log_prob, log_q):
    """As a rollout tells it: nothing of the prompt."""
    return Behaviour(*(jnp.pad(x, ((0, 0), (1, 0))) for x in (log_prob, log_q)))


def error(a, b):
    a, b = (
        np.concatenate([np.ravel(x) for x in jax.tree.leaves(tree)]) for tree in (a, b)
    )
    return np.linalg.norm(a - b) / np.linalg.norm(b)


PLAIN = dict(length_norm=False, reward_clip=None)


@pytest.mark.parametrize("single_step", [True, False])
@pytest.mark.full
def test_the_gradient_is_that_of_the_sequences_kl(exact, single_step):
    """With its own samples (alpha = 0) and plain returns, in exact expectation."""
    model, q_params, p_params, log_q, _, gradient = exact
    told, likely = behaviour(log_q, log_q), jnp.exp(log_q.sum(1))
    models = model, q_params, p_params
    term = MiniLLM(single_step=single_step, **PLAIN)
    assert error(expected_gradient(term, *models, told, likely), gradient) < 1e-4
    if single_step:
        # Another target is another gradient, whatever the defaults are.
        other = model, q_params, jax.tree.map(jnp.negative, p_params)
        assert error(expected_gradient(term, *other, told, likely), gradient) > 0.05
        term = Myopic(**PLAIN)
        assert error(expected_gradient(term, *models, told, likely), gradient) > 0.05


def test_mixed_samples_are_unbiased_with_the_weight_of_the_whole_sequence(exact):
    """The paper's, of one token alone, is biased: the class says so."""
    model, q_params, p_params, log_q, log_p, gradient = exact
    log_mix = jnp.logaddexp(log_q + jnp.log(0.6), log_p + jnp.log(0.4))
    whole = (log_q - log_mix).sum(1, keepdims=True)
    likely = jnp.exp(log_mix.sum(1))
    models, term = (model, q_params, p_params), MiniLLM(**PLAIN)

    def off_by(log_weight):
        told = behaviour(log_q - log_weight, log_q)
        return error(expected_gradient(term, *models, told, likely), gradient)

    assert off_by(jnp.broadcast_to(whole, log_q.shape)) < 1e-4
    assert off_by(log_q - log_mix) > 0.01


def rewards(log_p, log_q, mask, log_mix=None, **options):
    """What `weigh` makes of log-probabilities of tokens 1, 2, ..."""
    mask = np.asarray([[False, *mask]])
    told = behaviour(
        jnp.asarray([log_q if log_mix is None else log_mix]), jnp.asarray([log_q])
    )
    batch = Batch(mask.astype(int), mask, np.ones(1, int), np.ones(1, bool), told)
    weights = MiniLLM(**options).weigh(jnp.asarray([log_p]), batch)
    return [np.asarray(x)[0].tolist() for x in weights]


def test_returns_are_of_what_follows():
    log_p, log_q = [-1.0, -2.0, -0.5, -3.0], [-2.0, -1.0, -1.5, 0.0]
    # Rewards 1, -1, 1; the last token does not count.
    there = [True, True, True, False]
    _, returns, _ = rewards(log_p, log_q, there)
    assert returns == [0, 1, 0, 0]  # means of (-1, 1), (1), ()
    _, returns, _ = rewards(log_p, log_q, there, length_norm=False, reward_clip=0.5)
    assert returns == [0, 0.5, 0, 0]
    _, returns, _ = rewards(log_p, log_q, there, length_norm=False, single_step=False)
    assert returns == [1, 0, 1, 0]  # its own cost too
    _, returns, _ = rewards(log_p, log_q, [True, True, True, True])
    assert returns == pytest.approx([(-1 + 1 - 3) / 3, (1 - 3) / 2, -3, 0])


def test_weights_are_those_of_one_token_and_none_for_what_the_draft_cannot_write():
    minus = -np.inf
    log_q, log_mix = [-2.0, minus, -1.0], [-1.5, -2.0, -1.0]
    weight, returns, before = rewards([-1.0] * 3, log_q, [True] * 3, log_mix)
    assert weight == pytest.approx([np.exp(-0.5), 0, 1])
    assert returns == [0, 0, 0] and np.isfinite(before).all()


@pytest.mark.parametrize("reward, gain", [(1.0, 1.2), (-1.0, -1.5)])
def test_the_ratio_is_clipped_on_the_side_that_would_pay(reward, gain):
    """Proximal policy optimisation (arXiv 1707.06347), equation 7."""
    logits = jnp.log(jnp.asarray([[[0.3, 0.7]]]))
    weights = jnp.ones((1, 1)), jnp.full((1, 1), reward), jnp.log(jnp.full((1, 1), 0.2))

    def loss(q_logits):
        view = TokenView(jnp.zeros((1, 1), int), q_logits, logits, None, None, weights)
        return MiniLLM(single_step=False).per_token(view)[0, 0]

    value, slope = jax.value_and_grad(loss)(logits)
    assert float(value) == pytest.approx(-gain)
    assert slope.any() == (reward < 0)  # beyond the clip nothing pulls


def test_an_extreme_ratio_leaves_finite_gradients(exact):
    model, q_params, p_params, log_q, _, _ = exact
    for far in (-300.0, 300.0):
        told = behaviour(log_q, jnp.full_like(log_q, far) + log_q)
        told = dataclasses.replace(told, log_prob=told.log_q)
        gradient = expected_gradient(
            MiniLLM(**PLAIN), model, q_params, p_params, told, jnp.ones(len(ALL))
        )
        assert all(np.isfinite(x).all() for x in jax.tree.leaves(gradient))


@pytest.mark.full
def test_rollouts_beside_a_corpus_teach_the_draft(toys):
    """The paper's recipe: two updates a draw, and cross-entropy where there are labels.

    The corpus is noise, so its weight is small; acceptance on rollouts goes up.
    """
    step = distill.TrainStep(
        toys.draft,
        Objective((1.0, MiniLLM()), (0.01, CrossEntropy())),
        distill.make_optimizer("adamw", learning_rate=1e-2),
        teacher=toys.target,
        source=Mixture(FixedCorpus(), TeacherMixed(4, 8), fraction=0.5, per="split"),
        inner_steps=2,
    )
    length = [5, 20, 7, 20, 9, 20] * 2
    batch = Batch.of(toys.corpus(rows=12), length=length, prompt_length=3)
    state, told = step.init(jax.random.key(0), toys.draft_params), []
    for _ in range(50):
        state, sums = step(state, batch, toys.target_params)
        told.append(sums.as_dict())
    # The corpus keeps the even rows. Each update counts.
    counts = {"minillm": 2 * 6 * 8, "cross_entropy": 2 * 2 * (2 + 4 + 6)}
    assert told[0]["on_policy_tokens"] == counts["minillm"]
    assert told[0]["tokens"] == sum(counts.values())
    for name, count in counts.items():
        assert told[0][f"tokens/{name}"] == count
        assert told[0][f"loss/{name}"] != 0
    overlap = np.asarray([x["overlap"] for x in told])
    assert overlap[-5:].mean() > overlap[:5].mean() + 0.05


def test_rollouts_without_their_probabilities_are_refused(toys, step_of):
    step = step_of(objective=MiniLLM(), source=distill.StudentGenerated(4, 8))
    state = step.init(jax.random.key(0), toys.draft_params)
    with pytest.raises(ValueError, match="draw them with TeacherMixed"):
        step(state, Batch.of(toys.corpus(), prompt_length=3), toys.target_params)


@pytest.mark.parametrize(
    "options, match",
    [
        (dict(clip=0.0), "clip must be > 0"),
        (dict(reward_clip=-1.0), "reward_clip must be > 0 nats or None"),
    ],
)
def test_wrong_settings_are_refused(options, match):
    with pytest.raises(ValueError, match=match):
        distill.terms.get("minillm")(**options)
