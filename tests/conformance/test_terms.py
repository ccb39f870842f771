"""What holds for every registered distillation term, in one compiled program.

All terms are in one objective whose scales are an argument: a scale of one for a term
and zero for the others gives that term's loss and gradient.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import distill
from specjax.distill import Batch, Models, Objective, Policy
from tests.conformance.term_cases import (
    STUDENT,
    TEACHER,
    all_cases,
    batch,
    sharp,
)

CASES = all_cases()
OBJECTIVE = Objective(*[(1.0, term) for _, term in CASES], chunk=16)
NAMES = OBJECTIVE.names
# Their loss of a batch is not made of the losses of its rows.
COMPARES_ROWS = ("relational_kd",)

# One program of all terms: its compilation alone takes half a minute.
pytestmark = pytest.mark.full

INDICES = range(len(NAMES))
each_term = pytest.mark.parametrize("index", INDICES, ids=NAMES)


def flat(tree):
    leaves = [np.asarray(x, np.float64).ravel() for x in jax.tree.leaves(tree)]
    return np.concatenate([np.zeros(0), *leaves])


def relative(a, b):
    a, b = flat(a), flat(b)
    return np.linalg.norm(a - b) / max(np.linalg.norm(a), 1e-9)


@functools.partial(jax.jit, static_argnums=(0, 1))
def measure(student, teacher, trained, others, batch, scales):
    """Loss, sums, and the gradients of what is trained and of what is not."""

    def loss(trained, others):
        (params, aux), (p_params, r_params) = trained, others
        models = Models(
            Policy(params, student),
            Policy(p_params, teacher),
            Policy(r_params, student),
        )
        return OBJECTIVE(models, aux, batch, scales)

    return jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(trained, others)


def make_models():
    """What is trained, student and projections, and what is not."""
    aux = OBJECTIVE.init(jax.random.key(3), STUDENT, TEACHER)
    return (sharp(STUDENT, 0), aux), (sharp(TEACHER, 1), sharp(STUDENT, 2))


def loss_and_gradient(trained, others, rows: Batch, index: int):
    """Mean loss of one term, its gradient, and the tokens that it counts."""
    count = int(OBJECTIVE.count(rows)[NAMES[index]])
    scales = [0.0] * len(NAMES)
    scales[index] = 1 / max(count, 1)
    scales = tuple(jnp.asarray(scale, jnp.float32) for scale in scales)
    out = measure(STUDENT, TEACHER, trained, others, rows, scales)
    (loss, _), (gradient, of_others) = out
    assert not flat(of_others).any(), "teacher and reference get no gradient"
    assert np.isfinite(flat(gradient)).all()
    return float(loss), gradient, count


@pytest.fixture(scope="module")
def models():
    return make_models()


@pytest.fixture(scope="module")
def run(models):
    def run(index, rows: Batch, trained=models[0]):
        return loss_and_gradient(trained, models[1], rows, index)

    return run


def masked(rows: Batch, mask) -> Batch:
    behaviour = jax.tree.map(lambda x: np.where(mask, x, 0), rows.behaviour)
    return Batch(rows.tokens, mask, rows.prompt_length, rows.on_policy, behaviour, None)


@each_term
def test_padding_changes_nothing(run, index):
    """https://github.com/peremartra/optipfair/issues/34"""
    loss, gradient, _ = run(index, batch())
    padded_loss, padded, _ = run(index, batch(width=21))
    assert loss != 0
    assert padded_loss == pytest.approx(loss, rel=1e-5)
    assert relative(gradient, padded) < 1e-5


@each_term
def test_what_follows_a_row_changes_nothing(run, index):
    rows = batch()
    behind = np.cumsum(rows.mask[:, ::-1], 1)[:, ::-1] == 0
    assert behind.any()
    tokens = np.where(behind, (rows.tokens + 5) % 13, rows.tokens)
    other = Batch(tokens, rows.mask, rows.prompt_length, rows.on_policy, rows.behaviour)
    loss, gradient, _ = run(index, rows)
    other_loss, other, _ = run(index, other)
    assert other_loss == pytest.approx(loss, rel=1e-6)
    assert relative(gradient, other) < 1e-6


@each_term
def test_a_batch_is_made_of_its_rows(run, index):
    """Prompts of many lengths share a batch; the mean is over all counted tokens."""
    rows = batch()
    loss, gradient, count = run(index, rows)
    total, summed = 0.0, jax.tree.map(jnp.zeros_like, gradient)
    for row in range(4):
        alone = np.arange(4)[:, None] == row
        part, of_part, tokens = run(index, masked(rows, rows.mask & alone))
        total += part * tokens
        add = functools.partial(lambda a, b, n: a + n * b, n=tokens / count)
        summed = jax.tree.map(add, summed, of_part)
    if CASES[index][0] in COMPARES_ROWS:
        assert abs(total / count - loss) > 1e-2 * loss  # of one row there is none
    else:
        assert total / count == pytest.approx(loss, rel=1e-5)
        assert relative(gradient, summed) < 1e-5


@each_term
def test_without_counted_tokens_there_is_no_loss(run, index):
    loss, gradient, count = run(index, masked(batch(), np.zeros((4, 14), bool)))
    assert loss == 0 and count == 0
    assert not flat(gradient).any()


@each_term
def test_descending_lowers_the_loss_and_moves_the_projections(run, models, index):
    rows, trained = batch(), models[0]
    losses = []
    for _ in range(12):
        loss, gradient, _ = run(index, rows, trained)
        losses.append(loss)
        size = 0.1 / max(np.linalg.norm(flat(gradient)), 1e-9)
        step = functools.partial(lambda x, g, size: x - size * g, size=size)
        trained = jax.tree.map(step, trained, gradient)
    assert losses[-1] < losses[0]
    learned, start = trained[1][index], models[0][1][index]
    assert all((a != b).all() for a, b in zip(learned, start, strict=True))


def test_losses_are_float32_where_the_models_are_bfloat16(models):
    low = jax.tree.map(lambda x: x.astype(jnp.bfloat16), (models[0][0], models[1]))
    trained, scales = (low[0], models[0][1]), (jnp.zeros(()),) * len(NAMES)
    made = jax.eval_shape(
        functools.partial(measure, STUDENT, TEACHER),
        trained,
        low[1],
        batch(),
        scales,
    )
    (loss, sums), _ = made
    assert {x.dtype for x in (loss, *sums.parts.values())} == {jnp.dtype("float32")}


def test_a_swap_of_teacher_and_student_is_another_loss():
    """Of two models of one shape, all terms at once."""
    aux = OBJECTIVE.init(jax.random.key(3), TEACHER, TEACHER)
    rows, scales = batch(), (jnp.zeros(()),) * len(NAMES)

    @jax.jit
    def parts(params, p_params):
        models = [Policy(x, TEACHER) for x in (params, p_params, params)]
        return OBJECTIVE(Models(*models), aux, rows, scales)[1].parts

    one, other = sharp(TEACHER, 1), sharp(TEACHER, 4)
    there, back = parts(one, other), parts(other, one)
    for name in NAMES:
        assert there[name] != 0, name
        assert abs(back[name] / there[name] - 1) > 1e-3, name


def test_micro_batches_add_up_to_the_batch(run, models):
    """https://github.com/huggingface/trl/issues/4719"""
    (params, aux), others = models
    chosen = [n for n in INDICES if CASES[n][0] not in COMPARES_ROWS]
    step = distill.TrainStep(
        STUDENT,
        Objective(*[OBJECTIVE.terms[n] for n in chosen], chunk=16),
        distill.make_optimizer(learning_rate=1e-3),
        teacher=TEACHER,
        reference=STUDENT,
        accumulate=2,
    )
    state = step.init(jax.random.key(0), params)
    state = dataclasses.replace(state, aux=tuple(aux[n] for n in chosen))
    gradient, sums = step.gradients(state, batch(), *others)
    whole = [run(n, batch()) for n in chosen]
    for name, (loss, _, count) in zip(step.loss.names, whole, strict=True):
        assert sums.counts[name] == count > 0
        assert float(sums.parts[name]) / count == pytest.approx(loss, rel=1e-5), name
    added = jax.tree.map(lambda *x: sum(x), *[of_one[0] for _, of_one, _ in whole])
    assert relative(gradient, added) < 1e-5


@pytest.fixture(scope="module")
def slopes(models):
    """A direction, and how steep the loss of each term is along it: measured."""
    keys = iter(jax.random.split(jax.random.key(5), 99))
    direction = jax.tree.map(
        lambda x: jax.random.normal(next(keys), x.shape), models[0]
    )
    rows = batch()
    with jax.enable_x64(True):
        trained, others, along = jax.tree.map(
            lambda x: jnp.asarray(x, jnp.float64), (*models, direction)
        )
        scales = OBJECTIVE.scales(OBJECTIVE.count(rows))

        @jax.jit
        def parts(trained):
            (params, aux), (p_params, r_params) = trained, others
            models = Models(
                Policy(params, STUDENT),
                Policy(p_params, TEACHER),
                Policy(r_params, STUDENT),
            )
            sums = OBJECTIVE(models, aux, rows, scales)[1]
            return {name: x / sums.counts[name] for name, x in sums.parts.items()}

        # Softmax is float32 whatever the parameters are: a step well above its noise.
        size = 3e-4
        up, down = (
            parts(jax.tree.map(lambda x, d, s=s: x + s * size * d, trained, along))
            for s in (1, -1)
        )
    return direction, {name: float(up[name] - down[name]) / (2 * size) for name in up}


@each_term
def test_gradient_equals_finite_differences(run, slopes, index):
    """Through models, projections, chunks and the mean, along a random direction."""
    direction, measured = slopes
    _, gradient, _ = run(index, batch())
    slope = flat(gradient) @ flat(direction)
    assert slope == pytest.approx(measured[NAMES[index]], rel=1e-2)
