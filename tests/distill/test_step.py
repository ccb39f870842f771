"""The step: what it counts, what it leaves alone, and that it learns."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import distill, divergences
from specjax.distill import Batch


def equal(a, b):
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(np.array_equal(x, y) for x, y in pairs)


def test_a_batch_without_loss_tokens_is_counted_and_changes_nothing(toys, step_of):
    """https://github.com/huggingface/trl/issues/2217"""
    step = step_of()
    state = step.init(jax.random.key(0), toys.draft_params)
    before = jax.device_get((state.params, state.opt_state))
    state, sums = step(state, Batch.of(toys.corpus(), length=0), toys.target_params)
    assert float(sums.mean_loss) == 0 and float(sums.grad_norm) == 0
    counts = sums.as_dict()
    assert (counts["tokens"], counts["empty_rows"], counts["skipped"]) == (0, 4, 1)
    assert all(np.isfinite(value) for value in counts.values())
    assert equal(before, (state.params, state.opt_state))
    assert int(state.step) == 1


def test_empty_rows_of_a_batch_are_counted(toys, step_of):
    step = step_of()
    state = step.init(jax.random.key(0), toys.draft_params)
    batch = Batch.of(toys.corpus(), length=[0, 20, 1, 20])
    _, sums = step(state, batch, toys.target_params)
    counts = sums.as_dict()
    assert (counts["rows"], counts["empty_rows"], counts["tokens"]) == (4, 2, 38)


def test_evaluation_of_the_training_batch_is_the_training_loss(toys, step_of):
    """https://github.com/axolotl-ai-cloud/axolotl/issues/3270"""
    step = step_of(accumulate=2)
    state = step.init(jax.random.key(0), toys.draft_params)
    batch = Batch.of(toys.corpus(), length=[4, 20, 9, 20])
    parts = [jax.tree.map(lambda x, i=i: x[i : i + 2], batch) for i in (0, 2)]
    evaluated = step.evaluate(state.params, parts, toys.target_params)
    _, sums = step(state, batch, toys.target_params)
    assert float(evaluated.mean_loss) == pytest.approx(float(sums.mean_loss), rel=1e-6)
    assert evaluated.as_dict()["tokens"] == sums.as_dict()["tokens"]


def test_the_starting_parameters_stay_the_callers(toys, step_of):
    """Every step donates its state."""
    step = step_of()
    key = jax.random.key(0)
    before = jax.device_get(toys.draft_params)
    step(step.init(key, toys.draft_params), Batch.of(toys.corpus()), toys.target_params)
    assert equal(before, toys.draft_params)
    jax.random.uniform(key)  # not deleted


def test_equal_steps_share_one_compilation(toys):
    def make():
        return distill.TrainStep(
            toys.language_model(),
            distill.Distill(divergences.resolve("jsd", beta=0.3)),
            distill.make_optimizer("adamw", learning_rate=1e-2),
            teacher=toys.language_model(num_layers=2, width=12),
            source=distill.Mixture(
                distill.FixedCorpus(), distill.StudentGenerated(4, 8), per="split"
            ),
        )

    assert make() == make() and hash(make()) == hash(make())


@pytest.mark.parametrize("objective", ["cross-entropy", "distillation"])
def test_overfitting_one_sequence_drives_agreement_to_one(toys, step_of, objective):
    adam = distill.make_optimizer(
        "adamw", learning_rate=1e-2, schedule="cosine", steps=300
    )
    fields = dict(student=toys.language_model(width=16), optimizer=adam)
    if objective == "cross-entropy":
        fields |= dict(objective=distill.CrossEntropy(), teacher=None)
    step = step_of(**fields)
    batch = Batch.of(toys.corpus(rows=1, width=12, seed=3))
    state = step.init(jax.random.key(0))
    for _ in range(300):
        state, sums = step(state, batch, toys.target_params)
    counts = sums.as_dict()
    assert counts["agreement"] == 1
    assert counts["loss"] < 0.05


@pytest.mark.parametrize("name", distill.optimizer_names())
@pytest.mark.full
def test_every_optimiser_learns(toys, step_of, name):
    rate = {"muon": 2e-2}.get(name, 5e-3)
    optimizer = distill.make_optimizer(
        name, learning_rate=rate, warmup=3, schedule="cosine", steps=40
    )
    step = step_of(optimizer=optimizer)
    batch = Batch.of(toys.corpus())
    state = step.init(jax.random.key(0))
    losses = []
    for _ in range(40):
        state, sums = step(state, batch, toys.target_params)
        losses.append(float(sums.mean_loss))
    assert losses[-1] < 0.9 * losses[0]


@pytest.mark.full
def test_muon_turns_with_the_layout_of_the_kernels(toys, step_of):
    """The same numbers, transposed, whichever way a model keeps its weights."""
    results = []
    for layout in ("io", "oi"):
        model = toys.language_model(layout=layout)
        turn = (lambda x: x.T) if layout == "oi" else (lambda x: x)

        def turned(params, turn=turn):
            layers = jax.tree.map(
                lambda x: turn(x) if x.ndim == 2 else x, params["layers_0"]
            )
            return params | {"layers_0": layers}

        optimizer = distill.make_optimizer(
            "muon", learning_rate=1e-2, kernel_layout=layout, weight_decay=0.1
        )
        step = step_of(student=model, optimizer=optimizer, kernel_layout=layout)
        state = step.init(jax.random.key(0), turned(toys.draft_params))
        state, _ = step(state, Batch.of(toys.corpus()), toys.target_params)
        results.append(turned(state.params))
    for a, b in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_muon_leaves_embedding_and_norms_to_adam(toys):
    optimizer = distill.make_optimizer("muon", learning_rate=1e-2, clip=None)
    state = optimizer.init(toys.draft_params)
    momenta = state.inner_states["muon"].inner_state[0].mu
    named = jax.tree_util.tree_leaves_with_path(momenta)
    names = [
        jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in named
    ]
    assert len(names) == 7 and all(name.endswith("kernel") for name in names)


def test_masters_stay_float32_when_the_pass_is_bfloat16(toys, step_of):
    step = step_of(compute_dtype=jnp.bfloat16)
    low = jax.tree.map(lambda x: x.astype(jnp.bfloat16), toys.draft_params)
    state = step.init(jax.random.key(0), low)
    state, sums = step(state, Batch.of(toys.corpus()), toys.target_params)
    leaves = jax.tree.leaves(state.params)
    assert {x.dtype for x in leaves} == {jnp.dtype("float32")}
    # They hold what bfloat16 would have lost.
    assert any((x.astype(jnp.bfloat16) != x).any() for x in leaves)
    assert sums.mean_loss.dtype == jnp.float32
    plain = step_of()
    state = plain.init(jax.random.key(0), low)
    _, exact = plain(state, Batch.of(toys.corpus()), toys.target_params)
    assert float(sums.mean_loss) == pytest.approx(float(exact.mean_loss), rel=1e-2)
    assert float(sums.grad_norm) == pytest.approx(float(exact.grad_norm), rel=5e-2)
    assert sums.mean_loss != exact.mean_loss  # it is really another pass


@pytest.mark.parametrize("schedule", distill.schedule_names())
def test_schedules_warm_up_and_decay(schedule):
    rate = distill.make_schedule(
        schedule, learning_rate=1.0, warmup=4, steps=20, final=0.1
    )
    assert rate(0) == pytest.approx(0.2)
    assert rate(4) == pytest.approx(1.0)
    assert rate(20) == pytest.approx(1.0 if schedule == "constant" else 0.1)


@pytest.mark.parametrize(
    "wrong, match",
    [
        (dict(name="adamv"), "unknown optimiser 'adamv'; did you mean 'adamw'"),
        (dict(schedule="cosin"), "unknown schedule 'cosin'"),
        (dict(schedule="cosine"), "needs steps > warmup"),
        (dict(learning_rate=0.0), "learning_rate must be > 0"),
        (dict(clip=0.0), "clip must be > 0"),
    ],
)
def test_wrong_optimiser_settings_are_refused(wrong, match):
    with pytest.raises(ValueError, match=match):
        distill.make_optimizer(**(dict(learning_rate=1e-3) | wrong))


def test_wrong_steps_are_refused(toys, step_of):
    with pytest.raises(ValueError, match="Distill needs teacher="):
        step_of(teacher=None)
    with pytest.raises(ValueError, match="accumulate must be"):
        step_of(accumulate=0)
    step = step_of(accumulate=3)
    state = step.init(jax.random.key(0), toys.draft_params)
    with pytest.raises(ValueError, match="multiple of accumulate=3, got 4"):
        step.gradients(state, Batch.of(toys.corpus()), toys.target_params)
    with pytest.raises(ValueError, match="teacher_params must be given"):
        step_of().gradients(state, Batch.of(toys.corpus()))
