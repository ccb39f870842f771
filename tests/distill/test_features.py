"""Feature-based terms against float64 oracles, closed forms, and what they refuse."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import distill
from specjax.core import LMOutput
from specjax.distill import Batch

pytestmark = pytest.mark.full

PAIRS = (("layers.0", "layers.1"), ("layers.2", "layers.2"))
ROWS, WIDTH = 3, 7
BATCH = Batch.of(np.zeros((ROWS, WIDTH)), length=[7, 4, 0], prompt_length=2)
TOKENS = [[2, 3, 4, 5, 6], [2, 3]]  # of each row those that count


def output(seed, size=5, rows=ROWS):
    """Three layers of random features, by themselves: terms read nothing else."""
    keys = jax.random.split(jax.random.key(seed), 3)
    features = {
        f"layers.{n}": jax.random.normal(key, (rows, WIDTH, size))
        for n, key in enumerate(keys)
    }
    return LMOutput(jnp.zeros(()), jnp.zeros(()), features)


@functools.partial(jax.jit, static_argnums=0)
def mean(term, student, teacher, aux=(), batch=BATCH):
    total = term.per_batch(aux, student, teacher, batch)
    return total / jnp.sum(term.mask(batch))


def read(out, name):
    return np.asarray(out.features[name], np.float64)


def unit(x):
    return x / np.linalg.norm(x)


def over_tokens(loss, student, teacher, tokens=TOKENS):
    """The mean over tokens of the sum over pairs of `loss(u, v)`."""
    found = [
        sum(loss(read(student, a)[b, t], read(teacher, c)[b, t]) for a, c in PAIRS)
        for b, row in enumerate(tokens)
        for t in row
    ]
    return np.mean(found)


@pytest.mark.parametrize(
    "distance, oracle",
    [
        ("mse", lambda u, v: np.mean((u - v) ** 2)),
        ("cosine", lambda u, v: 1 - unit(u) @ unit(v)),
    ],
)
def test_hidden_states_equal_a_float64_oracle(distance, oracle):
    term = distill.HiddenState(PAIRS, distance)
    student, teacher = output(0), output(1)
    expected = over_tokens(oracle, student, teacher)
    assert mean(term, student, teacher) == pytest.approx(expected, rel=1e-5)


def test_projected_hidden_states_equal_a_float64_oracle():
    term = distill.HiddenState(PAIRS, project=True)
    student, teacher = output(0, size=3), output(1)
    aux = tuple(jax.random.normal(jax.random.key(n), (3, 5)) for n in (7, 8))
    expected = np.mean(
        [
            sum(
                np.mean((read(student, a)[b, t] @ w - read(teacher, c)[b, t]) ** 2)
                for (a, c), w in zip(PAIRS, np.asarray(aux, np.float64), strict=True)
            )
            for b, row in enumerate(TOKENS)
            for t in row
        ]
    )
    assert mean(term, student, teacher, aux) == pytest.approx(expected, rel=1e-5)


def test_hints_equal_a_float64_oracle():
    """The sum over D, half of it."""
    term = distill.Hint((("layers.0", "layers.1"),))
    student, teacher = output(0, size=3), output(1)
    aux = (jax.random.normal(jax.random.key(7), (3, 5)),)
    weight = np.asarray(aux[0], np.float64)
    u, v = read(student, "layers.0") @ weight, read(teacher, "layers.1")
    losses = [
        0.5 * np.sum((u - v)[b, t] ** 2) for b, row in enumerate(TOKENS) for t in row
    ]
    assert mean(term, student, teacher, aux) == pytest.approx(np.mean(losses), rel=1e-5)


def test_attention_transfer_equals_a_float64_oracle():
    term = distill.AttentionTransfer(PAIRS)
    student, teacher = output(0), output(1, size=9)
    total = 0.0
    for b, row in enumerate(TOKENS):
        for ours, theirs in PAIRS:
            maps = [
                unit(np.mean(read(out, name)[b, row] ** 2, axis=-1))
                for out, name in ((student, ours), (teacher, theirs))
            ]
            total += np.sum((maps[0] - maps[1]) ** 2)
    expected = total / sum(map(len, TOKENS))
    assert mean(term, student, teacher) == pytest.approx(expected, rel=1e-5)


def test_disjoint_attention_is_two_for_a_row():
    """Maps of length 1 that share no position are at a squared distance of 2."""
    here, there = (np.zeros((1, WIDTH, 5), np.float32) for _ in range(2))
    here[0, 2], there[0, 5] = 3, -0.1
    batch = Batch.of(np.zeros((1, WIDTH)), prompt_length=2)
    outs = [
        LMOutput(jnp.zeros(()), jnp.zeros(()), {"layers.0": jnp.asarray(x)})
        for x in (here, there)
    ]
    term = distill.AttentionTransfer((("layers.0", "layers.0"),))
    assert mean(term, *outs, batch=batch) == pytest.approx(2 / 5, rel=1e-6)


@pytest.mark.parametrize("positions", ["last", "all"])
@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("normalize", [True, False])
def test_patient_kd_equals_a_float64_oracle(positions, reduction, normalize):
    term = distill.PatientKD(
        PAIRS, positions=positions, reduction=reduction, normalize=normalize
    )
    student, teacher = output(0), output(1)

    def oracle(u, v):
        u, v = (unit(u), unit(v)) if normalize else (u, v)
        return np.sum((u - v) ** 2) / (1 if reduction == "sum" else 5 * len(PAIRS))

    tokens = TOKENS if positions == "all" else [row[-1:] for row in TOKENS]
    expected = over_tokens(oracle, student, teacher, tokens)
    assert mean(term, student, teacher) == pytest.approx(expected, rel=1e-5)
    # The negative control: other positions are another number.
    moved = [[t - 1 for t in row] for row in tokens]
    assert abs(over_tokens(oracle, student, teacher, moved) / expected - 1) > 1e-3


def test_patient_kd_of_opposite_states_is_four_a_layer():
    student = output(0)
    opposite = jax.tree.map(lambda x: -2 * x, student)
    same = tuple((f"layers.{n}", f"layers.{n}") for n in range(3))
    assert mean(distill.PatientKD(same), student, opposite) == pytest.approx(12)
    term = distill.HiddenState(same, "cosine")
    assert mean(term, student, opposite) == pytest.approx(2 * 3)


def model(toys, layers, width=8):
    return toys.language_model(num_layers=layers, width=width)


@pytest.mark.parametrize(
    "layers, depths, chosen",
    [
        ("skip", (6, 12), [1, 3, 5, 7, 9]),
        ("last", (6, 12), [6, 7, 8, 9, 10]),
        ("skip", (3, 12), [3, 7]),
        ("last", (3, 12), [9, 10]),
        ("skip", (4, 4), [0, 1, 2]),
        ("skip", (4, 6), [0, 2, 3]),
    ],
)
def test_patient_kd_chooses_layers_as_the_paper(toys, layers, depths, chosen):
    student, teacher = (model(toys, depth) for depth in depths)
    bound = distill.PatientKD(layers).bind(student, teacher)
    ours = tuple(f"layers.{n}" for n in range(depths[0] - 1))
    assert bound.features() == (ours, tuple(f"layers.{n}" for n in chosen))


def test_layers_are_counted_from_either_end(toys):
    student, teacher = model(toys, 2), model(toys, 5)
    pairs = [["layers.-1", "layers.-5"], ["embedding", "layers.middle"]]
    bound = distill.HiddenState(pairs).bind(student, teacher)
    assert bound.features() == (("layers.1", "embedding"), ("layers.0", "layers.2"))
    assert hash(bound) == hash(distill.HiddenState(bound.layers))


@pytest.mark.parametrize(
    "term",
    [
        distill.HiddenState(PAIRS),
        distill.HiddenState(PAIRS, "cosine"),
        distill.AttentionTransfer(PAIRS),
        distill.PatientKD(PAIRS, positions="all"),
        distill.RelationalKD(PAIRS),
        distill.RelationalKD(PAIRS, pooling="last"),
    ],
    ids=lambda term: type(term).__name__,
)
@pytest.mark.parametrize("zero", [False, True])
def test_equal_models_lose_nothing_and_gradients_are_finite(term, zero):
    same = output(0)
    features = {name: same.features["layers.0"] for name in same.features}
    scale = 0.0 if zero else 1.0

    def loss(features):
        student = LMOutput(same.logits, same.hidden, features)
        return term.per_batch((), student, jax.lax.stop_gradient(student), BATCH)

    features = jax.tree.map(lambda x: scale * x, features)
    value, gradient = jax.jit(jax.value_and_grad(loss))(features)
    assert value == 0
    assert all(not x.any() for x in jax.tree.leaves(gradient))


def test_positions_are_those_of_the_counted_tokens(toys, step_of):
    """Through the step: the state of a counted token, not of the one before it."""
    term = distill.HiddenState([["layers.-1", "embedding"]])
    student = toys.language_model(num_layers=2, width=12)
    step = step_of(student=student, objective=term)
    state = step.init(jax.random.key(0), toys.sharp(student, 5))
    batch = Batch.of(toys.corpus(), length=[4, 20, 9, 20], prompt_length=3)
    _, sums = step.gradients(state, batch, toys.target_params)
    u = student.apply(state.params, batch.tokens, features=("layers.1",))[0]
    v = np.asarray(toys.target_params["embed_tokens"])[batch.tokens]
    losses = np.mean((np.asarray(u.features["layers.1"]) - v) ** 2, axis=-1)
    assert float(sums.mean_loss) == pytest.approx(losses[batch.mask].mean(), rel=1e-5)
    before = np.roll(batch.mask, -1, axis=1)
    assert abs(losses[before].mean() / losses[batch.mask].mean() - 1) > 1e-3


def test_a_stage_on_hints_leaves_what_is_above_alone(toys, step_of):
    """FitNets' first stage: only the guided layer and what is below it learn."""
    student = toys.language_model(num_layers=3)
    step = step_of(student=student, objective=distill.Hint())
    start = toys.sharp(student, 5)
    state = step.init(jax.random.key(0), start)
    losses = []
    for _ in range(20):
        state, sums = step(state, Batch.of(toys.corpus()), toys.target_params)
        losses.append(float(sums.mean_loss))
    assert losses[-1] < 0.8 * losses[0]

    def moved(name):
        trees = state.params[name], start[name]
        pairs = zip(*map(jax.tree.leaves, trees), strict=True)
        return any((a != b).any() for a, b in pairs)

    names = ("embed_tokens", "layers_0", "layers_1", "layers_2", "norm")
    assert [moved(name) for name in names] == [True, True, True, False, False]


def test_projections_belong_to_the_evaluation(toys, step_of):
    step = step_of(objective=distill.HiddenState(project=True))
    state = step.init(jax.random.key(0), toys.draft_params)
    batches = [Batch.of(toys.corpus())]
    given = step.evaluate(state.params, batches, toys.target_params, aux=state.aux)
    assert given.mean_loss > 0
    with pytest.raises(ValueError, match=r"learns 1 projections, got 0: give Train"):
        step.evaluate(state.params, batches, toys.target_params)


def test_projections_resume_with_the_student(toys, step_of, tmp_path):
    """Two steps straight equal one, a checkpoint, and one more: bit for bit."""
    both = [(1.0, distill.CrossEntropy()), (1.0, distill.HiddenState(project=True))]
    step, batch = step_of(objective=distill.Objective(*both)), Batch.of(toys.corpus())

    def after(state):
        return step(state, batch, toys.target_params)[0]

    start = step.init(jax.random.key(0), toys.draft_params)
    before = jax.device_get(start.aux)
    first = after(start)
    with distill.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(first, {})
        fresh = step.init(jax.random.key(1), toys.draft_params)
        restored, _ = checkpoints.restore(fresh)
    straight, resumed = after(first), after(restored)
    assert (straight.aux[1][0] != before[1][0]).all()
    for name in ("params", "aux", "opt_state"):
        trees = getattr(straight, name), getattr(resumed, name)
        for a, b in zip(*map(jax.tree.leaves, trees), strict=True):
            assert np.array_equal(a, b), name


@pytest.mark.parametrize(
    "make, match",
    [
        (lambda: distill.HiddenState(distance="cosin"), "'cosin'; did you mean 'cos"),
        (lambda: distill.PatientKD("skp"), "unknown choice of layers 'skp'; did you"),
        (lambda: distill.PatientKD(positions="first"), "'first'; known: all, last"),
        (lambda: distill.PatientKD(reduction="mena"), "did you mean 'mean'"),
        (lambda: distill.Hint(()), "layers must be pairs of names"),
        (lambda: distill.Hint("layers.1"), "layers must be pairs of names"),
        (lambda: distill.Hint(("layers.1", "layers.2")), "layers must be pairs"),
        (lambda: distill.Hint((("layers.1",),)), "layers must be pairs of names"),
    ],
)
def test_wrong_settings_are_refused(make, match):
    with pytest.raises(ValueError, match=match):
        make()


@pytest.mark.parametrize(
    "term, match",
    [
        (
            distill.HiddenState([["layers.4", "layers.0"]]),
            "the student, of 1 layers, has no layer 'layers.4'; did you mean 'layers.0",
        ),
        (
            distill.AttentionTransfer([["layers.0", "layer.1"]]),
            "the teacher, of 2 layers, has no layer 'layer.1'; did you mean 'layers.1'",
        ),
        (distill.Hint([["layers.-2", "layers.0"]]), "has no layer 'layers.-2'"),
        (
            distill.HiddenState(),
            "student's 'layers.0' is 8 wide and the teacher's 'layers.1' is 12",
        ),
        (distill.PatientKD([["layers.0", "layers.0"]]), "project=True"),
        (distill.PatientKD(), "student of at least 2 layers .*, got 1 and 2"),
    ],
)
def test_what_does_not_fit_the_models_is_refused(step_of, term, match):
    with pytest.raises(ValueError, match=match):
        step_of(objective=term)
