"""Losses against an oracle, and what must not change them."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import distill, divergences
from specjax.distill import Batch, Models, Objective, Policy
from tests.marks import sampled


def relative(a, b):
    """The distance of two pytrees over the norm of the first."""

    def flat(tree):
        return np.concatenate(
            [np.asarray(x, np.float64).ravel() for x in jax.tree.leaves(tree)]
        )

    a, b = flat(a), flat(b)
    return np.linalg.norm(a - b) / np.linalg.norm(a)


def log_softmax(x):
    x = np.asarray(x, np.float64)
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def loss_and_gradient(step, state, batch, teacher_params):
    gradient, sums = step.gradients(state, batch, teacher_params)
    return float(sums.mean_loss), gradient


@pytest.fixture
def fixed(toys, step_of):
    """Loss and gradient of a batch, at given fields of the step."""

    def run(batch, **fields):
        step = step_of(**fields)
        state = step.init(jax.random.key(0), toys.draft_params)
        return loss_and_gradient(step, state, batch, toys.target_params)

    return run


LENGTHS = [2, 2, 16, 16]  # completion tokens behind a prompt of 3


@pytest.fixture
def uneven(toys):
    lengths = np.asarray(LENGTHS) + 3
    return Batch.of(toys.corpus(), length=lengths, prompt_length=3)


ORACLES = {
    "forward_kl": lambda p, q: np.sum(np.exp(p) * (p - q), -1),
    "reverse_kl": lambda p, q: np.sum(np.exp(q) * (q - p), -1),
    "tvd": lambda p, q: 0.5 * np.sum(np.abs(np.exp(p) - np.exp(q)), -1),
}


@pytest.mark.parametrize(
    "name, temperature",
    sampled(
        [("forward_kl", 1.0), ("forward_kl", 2.5), ("reverse_kl", 1.0), ("tvd", 0.5)],
        ("forward_kl", 2.5),
    ),
)
def test_loss_equals_a_float64_oracle(toys, fixed, uneven, name, temperature):
    """Logits at t predict token t + 1, and the temperature reaches both laws."""
    objective = distill.Distill(divergences.resolve(name), temperature=temperature)
    loss, _ = fixed(uneven, objective=objective)

    tokens = uneven.tokens
    p_logits = toys.target.apply(toys.target_params, tokens)[0].logits
    q_logits = toys.draft.apply(toys.draft_params, tokens)[0].logits
    log_p, log_q = (
        log_softmax(p_logits / temperature),
        log_softmax(q_logits / temperature),
    )
    total = count = 0
    for row, length in enumerate(LENGTHS):
        for i in range(3, 3 + length):  # token i, predicted at i - 1
            total += ORACLES[name](log_p[row, i - 1], log_q[row, i - 1])
            count += 1
    assert loss == pytest.approx(total / count, rel=1e-5)
    # The negative control: one position off is another number.
    shifted = [
        ORACLES[name](log_p[r, 3 : 3 + n], log_q[r, 3 : 3 + n]).sum()
        for r, n in enumerate(LENGTHS)
    ]
    assert abs(sum(shifted) / count - loss) > 1e-3 * loss


def test_cross_entropy_equals_a_float64_oracle(toys, fixed, uneven):
    loss, _ = fixed(uneven, objective=distill.CrossEntropy(), teacher=None)
    log_q = log_softmax(toys.draft.apply(toys.draft_params, uneven.tokens)[0].logits)
    rows, columns = np.nonzero(uneven.mask)
    expected = -log_q[rows, columns - 1, uneven.tokens[rows, columns]].mean()
    assert loss == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("accumulate", sampled([2, 4], 4))
def test_gradients_do_not_depend_on_the_split_into_micro_batches(
    fixed, uneven, accumulate
):
    """https://github.com/huggingface/trl/issues/4719"""
    loss, gradient = fixed(uneven)
    split_loss, split_gradient = fixed(uneven, accumulate=accumulate)
    assert split_loss == pytest.approx(loss, rel=1e-6)
    assert relative(gradient, split_gradient) < 1e-6


def test_a_mean_of_means_would_be_another_loss(fixed, uneven):
    """The negative control of the test above."""
    rows = [jax.tree.map(lambda x, r=r: x[r : r + 1], uneven) for r in range(4)]
    of_means = np.mean([fixed(row)[0] for row in rows])
    assert abs(of_means - fixed(uneven)[0]) > 1e-2 * of_means


@pytest.mark.parametrize("chunk", sampled([1, 28], 1))
@pytest.mark.parametrize("term", [distill.Distill, distill.CrossEntropy])
def test_chunks_change_nothing(fixed, uneven, term, chunk):
    loss, gradient = fixed(uneven, objective=term())
    chunked = Objective((1.0, term()), chunk=chunk)
    chunked_loss, chunked = fixed(uneven, objective=chunked)
    assert chunked_loss == pytest.approx(loss, rel=1e-6)
    assert relative(gradient, chunked) < 2e-6


@pytest.mark.parametrize("objective", [distill.Distill, distill.CrossEntropy])
def test_padding_changes_nothing(toys, fixed, uneven, objective):
    """https://github.com/peremartra/optipfair/issues/34"""
    loss, gradient = fixed(uneven, objective=objective())
    for pad in (7,):
        tokens = np.pad(uneven.tokens, ((0, 0), (0, 10)), constant_values=pad)
        mask = np.pad(uneven.mask, ((0, 0), (0, 10)))
        padded = Batch.of(tokens, prompt_length=3, mask=mask)
        padded_loss, padded_gradient = fixed(padded, objective=objective())
        assert padded_loss == pytest.approx(loss, rel=1e-6)
        assert relative(gradient, padded_gradient) < 2e-6


def test_what_follows_a_row_changes_nothing(toys, fixed, uneven):
    other = np.where(np.cumsum(uneven.mask[:, ::-1], 1)[:, ::-1] > 0, uneven.tokens, 5)
    assert (other != uneven.tokens).any()
    changed = Batch.of(other, prompt_length=3, mask=uneven.mask)
    assert fixed(changed)[0] == pytest.approx(fixed(uneven)[0], rel=1e-6)


@pytest.mark.full
def test_duplicating_the_batch_changes_nothing(fixed, uneven):
    """https://github.com/huggingface/trl/pull/4105"""
    twice = jax.tree.map(lambda x: np.concatenate([x, x]), uneven)
    loss, gradient = fixed(uneven)
    twice_loss, twice_gradient = fixed(twice)
    assert twice_loss == pytest.approx(loss, rel=1e-6)
    assert relative(gradient, twice_gradient) < 2e-6


def test_prompts_of_many_lengths_share_a_batch(toys, fixed):
    """Each row's prompt is left out by its own length."""
    tokens, prompts = toys.corpus(), np.asarray([1, 4, 9, 19])
    mixed, _ = fixed(Batch.of(tokens, prompt_length=prompts))
    total = 0.0
    for row, prompt in enumerate(prompts):
        alone, _ = fixed(Batch.of(tokens[row : row + 1], prompt_length=prompt))
        total += alone * (20 - prompt)
    assert mixed == pytest.approx(total / np.sum(20 - prompts), rel=1e-6)


def test_uniform_draft_of_a_certain_target_loses_log_v(toys, fixed, step_of):
    """https://github.com/huggingface/trl/pull/4105"""
    batch = Batch.of(toys.corpus())
    uniform = jax.tree.map(jnp.zeros_like, toys.draft_params)
    for objective in (distill.Distill(temperature=1e-4), distill.CrossEntropy()):
        step = step_of(objective=objective)
        sums = step.evaluate(uniform, [batch], toys.target_params)
        assert float(sums.mean_loss) == pytest.approx(math.log(toys.vocab), rel=1e-4)


@pytest.mark.parametrize(
    "sizes", [(13, 16), pytest.param((16, 13), marks=pytest.mark.full)]
)
@pytest.mark.full
def test_vocabularies_padded_to_different_sizes_compare_shared_ids(toys, sizes):
    draft, target = (toys.language_model(vocab_size=size) for size in sizes)
    q_params, p_params = toys.sharp(draft, 3), toys.sharp(target, 4)
    batch = Batch.of(toys.corpus())
    objective = Objective.of(distill.Distill(divergences.resolve("jsd", beta=0.3)))
    models = Models(Policy(q_params, draft), Policy(p_params, target))
    _, sums = objective.measure(models, batch)

    q_logits, p_logits = (
        np.asarray(model.apply(params, batch.tokens)[0].logits)[:, :-1, :13]
        for model, params in ((draft, q_params), (target, p_params))
    )
    log_p, log_q = jax.nn.log_softmax(p_logits), jax.nn.log_softmax(q_logits)
    expected = divergences.jsd(log_p, log_q, beta=0.3).mean()
    assert float(sums.mean_loss) == pytest.approx(float(expected), rel=1e-5)


@pytest.mark.full
def test_unused_vocabulary_rows_can_be_left_out(toys):
    """https://github.com/huggingface/trl/pull/4105"""
    model = toys.language_model(vocab_size=16)
    q_params, p_params = toys.sharp(model, 3), toys.sharp(model, 4)
    cut = toys.language_model(vocab_size=13)

    def rows(params):
        return params | {"embed_tokens": params["embed_tokens"][:13]}

    batch = Batch.of(toys.corpus())
    wide, _ = Objective.of(distill.Distill(shared_vocab=13)).measure(
        Models(Policy(q_params, model), Policy(p_params, model)), batch
    )
    narrow, _ = Objective.of(distill.Distill()).measure(
        Models(Policy(rows(q_params), cut), Policy(rows(p_params), cut)), batch
    )
    assert float(wide) == pytest.approx(float(narrow), rel=1e-6)


def test_the_target_gets_no_gradient(toys, uneven):
    def loss(teacher_params):
        student = Policy(toys.draft_params, toys.draft)
        models = Models(student, Policy(teacher_params, toys.target))
        return Objective.of(toys.kl).measure(models, uneven)[0]

    gradient = jax.jit(jax.grad(loss))(toys.target_params)
    assert all(not x.any() for x in jax.tree.leaves(gradient))


@pytest.mark.full
def test_slopes_of_every_divergence_equal_finite_differences(toys):
    """Through the model, the chunks and the mean, along a random direction."""
    # (The weight of lk gets no gradient: here it does not move.)
    options = {"lk": {"kl_decay": 0.0}}
    terms = {
        name: distill.Distill(divergences.resolve(name, **options.get(name, {})))
        for name in divergences.names()
    }
    objective = Objective(*[(1.0, term) for term in terms.values()], chunk=16)
    with jax.enable_x64(True):

        def double(tree):
            return jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), tree)

        q_params, p_params = double(toys.draft_params), double(toys.target_params)
        batch = Batch.of(toys.corpus(rows=2, width=12), prompt_length=3)

        @jax.jit
        def losses(params):
            student, teacher = Policy(params, toys.draft), Policy(p_params, toys.target)
            _, sums = objective.measure(Models(student, teacher), batch)
            return tuple(sums.parts[name] for name in objective.names)

        keys = iter(jax.random.split(jax.random.key(5), 99))
        direction = jax.tree.map(
            lambda x: jax.random.normal(next(keys), x.shape, x.dtype), q_params
        )
        slopes = jax.jit(lambda x: jax.jvp(losses, (x,), (direction,))[1])(q_params)
        # Softmax is float32 whatever the parameters are: a step well above its noise.
        size = 3e-4
        up, down = (
            losses(
                jax.tree.map(lambda x, d, s=s: x + s * size * d, q_params, direction)
            )
            for s in (1, -1)
        )
    for name, slope, above, below in zip(terms, slopes, up, down, strict=True):
        measured = float(above - below) / (2 * size)
        assert float(slope) == pytest.approx(measured, rel=1e-2), name


def test_agreement_and_overlap_are_one_between_equals(toys, uneven):
    policy = Policy(toys.draft_params, toys.draft)
    counts = Objective.of(toys.kl).measure(Models(policy, policy), uneven)[1].as_dict()
    assert counts["agreement"] == 1
    assert counts["overlap"] == pytest.approx(1, rel=1e-6)
    assert counts["loss"] == pytest.approx(0, abs=1e-6)


def test_overlap_is_one_minus_the_total_variation(toys, uneven):
    objective = Objective.of(distill.Distill(divergences.resolve("tvd")))
    student = Policy(toys.draft_params, toys.draft)
    models = Models(student, Policy(toys.target_params, toys.target))
    ratios = objective.measure(models, uneven)[1].as_dict()
    assert ratios["overlap"] == pytest.approx(1 - ratios["loss"], rel=1e-5)


def test_monitors_do_not_touch_the_loss(fixed, uneven):
    for term in (distill.Distill, distill.CrossEntropy):
        loss, gradient = fixed(uneven, objective=term())
        unwatched = Objective((1.0, term()), monitor=False)
        plain_loss, plain = fixed(uneven, objective=unwatched)
        assert plain_loss == pytest.approx(loss, rel=1e-6)
        assert relative(gradient, plain) < 1e-6


def test_cross_entropy_is_not_applied_to_what_the_student_wrote(toys, fixed, uneven):
    """https://github.com/jongwooko/distillm/issues/16"""
    ours = Batch(uneven.tokens, uneven.mask, uneven.prompt_length, np.ones((4,), bool))
    both = Objective((1.0, distill.Distill()), (0.5, distill.CrossEntropy()))
    distilled, gradient = fixed(uneven)
    on_policy, on_policy_gradient = fixed(ours, objective=both)
    assert on_policy == pytest.approx(distilled, rel=1e-6)
    assert relative(gradient, on_policy_gradient) < 1e-6
    # The same rows as a data set: the cross-entropy is there.
    labels, _ = fixed(uneven, objective=distill.CrossEntropy(), teacher=None)
    as_data, _ = fixed(uneven, objective=both)
    assert as_data == pytest.approx(distilled + 0.5 * labels, rel=1e-5)
    assert fixed(ours, objective=distill.CrossEntropy(), teacher=None)[0] == 0


@pytest.mark.parametrize(
    "make, match",
    [
        (lambda: distill.Distill(temperature=0.0), "temperature must be > 0"),
        (lambda: Objective((1, distill.Distill()), chunk=0), "chunk must"),
        (lambda: Objective(), "at least one"),
        (lambda: Objective((-1, distill.Distill())), "weight >= 0"),
        (lambda: Objective((1, distill.Distill)), "term"),
    ],
)
def test_wrong_settings_are_refused(make, match):
    with pytest.raises(ValueError, match=match):
        make()
