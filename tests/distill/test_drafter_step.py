"""Training a drafter beside its target: one step, and a whole run."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import distill, drafters
from specjax.core import Checkpoint
from specjax.distill import Batch, Batches
from specjax.ops import row_keys

MEDUSA = drafters.Medusa(2, (2, 1))


@pytest.fixture(scope="module")
def target(toys):
    return Checkpoint(toys.target, toys.target_params)


@pytest.fixture(scope="module")
def sgd():
    return distill.make_optimizer("adamw", learning_rate=1e-2)


def own_params(target):
    own = MEDUSA.init_params(jax.random.key(0), target)
    return {
        "w1": own["w1"] + 0.3 * jax.random.normal(jax.random.key(1), own["w1"].shape)
    }


def batch_of(toys):
    return Batch.of(
        toys.corpus(rows=4, width=12), length=[12, 9, 12, 5], prompt_length=[1, 3, 6, 4]
    )


def bits(tree):
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(tree)]


def test_medusa_1_moves_the_heads_and_leaves_the_target(toys, target, sgd):
    step = distill.DrafterStep(MEDUSA, target.model, sgd)
    own, before = own_params(target), bits(target.params)
    state, sums = step(step.init(jax.random.key(0), own), batch_of(toys), target.params)
    assert bits(target.params) == before
    assert jax.tree.structure(state.params) == jax.tree.structure(own)
    assert not np.array_equal(state.params["w1"], own["w1"])
    assert int(state.step) == 1
    line = sums.as_dict()
    assert {"agreement/head_1", "agreement/head_2", "loss/head_2"} <= line.keys()
    assert "overlap" not in line and "agreement" not in line

    # The mean loss is what the drafter says of the whole batch.
    bound, params = MEDUSA.with_params(own).bind(target, 16)
    batch = batch_of(toys)

    @jax.jit
    def measure(params, tokens, mask):
        out, _ = target.model.apply(params["target"], tokens)
        return bound.loss(params, row_keys(jnp.arange(4)), tokens, mask, out)

    loss, named = measure(params, batch.tokens, batch.mask)
    np.testing.assert_allclose(line["loss"], loss / named["tokens"], rtol=1e-5)
    again = step.evaluate(own, [batch, batch], target.params).as_dict()
    np.testing.assert_allclose(again["loss"], line["loss"], rtol=1e-5)
    assert again["tokens"] == 2 * line["tokens"]


def joint(target, sgd, **settings):
    step = distill.DrafterStep(MEDUSA, target.model, sgd, train_target=True, **settings)
    params = {"own": own_params(target), "target": target.params}
    return step, step.init(jax.random.key(0), params)


@pytest.mark.full
def test_medusa_2_moves_both_at_rates_of_their_own(toys, target, sgd):
    step, state = joint(target, sgd, target_rate=0.1)
    before, start = bits(target.params), jax.tree.map(jnp.copy, state.params)
    state, sums = step(state, batch_of(toys))
    assert bits(target.params) == before  # the state is a copy
    moved = jax.tree.map(lambda a, b: float(jnp.abs(a - b).max()), state.params, start)
    # Adam's first step is the rate, wherever there is a gradient.
    assert moved["own"]["w1"] == pytest.approx(1e-2, rel=1e-2)
    for size in jax.tree.leaves(moved["target"]):
        assert size == pytest.approx(1e-3, rel=1e-2)
    line = sums.as_dict()
    assert line["loss"] == pytest.approx(line["loss/drafter"] + line["loss/target"])
    assert line["tokens/target"] > line["tokens"]

    # The target's part is its cross-entropy.
    lm = distill.TrainStep(target.model, distill.CrossEntropy(), sgd)
    alone = lm.evaluate(target.params, [batch_of(toys)]).as_dict()
    assert line["loss/target"] == pytest.approx(alone["loss"], rel=1e-5)


@pytest.mark.full
@pytest.mark.parametrize("train_target", [False, True])
def test_micro_batches_change_nothing(toys, target, train_target):
    optimizer = distill.make_optimizer("adamw", learning_rate=1e-2, clip=None)
    after = []
    for accumulate in (1, 2):
        step = distill.DrafterStep(
            MEDUSA, target.model, optimizer, accumulate, train_target
        )
        own = own_params(target)
        params = {"own": own, "target": target.params} if train_target else own
        state = step.init(jax.random.key(0), params)
        theirs = None if train_target else target.params
        _, sums = step(state, batch_of(toys), theirs)
        after.append(sums.as_dict())
    assert after[0].keys() == after[1].keys()
    for name, value in after[0].items():
        assert after[1][name] == pytest.approx(value, rel=1e-4), name


@pytest.mark.full
def test_a_batch_without_tokens_changes_nothing(toys, target, sgd):
    step = distill.DrafterStep(MEDUSA, target.model, sgd)
    own = own_params(target)
    state = step.init(jax.random.key(0), own)
    batch = dataclasses.replace(batch_of(toys), mask=np.zeros((4, 12), bool))
    state, sums = step(state, batch, target.params)
    assert bits(state.params) == bits(own)
    assert int(sums.skipped) == 1 and int(sums.updates) == 0
    assert int(sums.empty_rows) == 4


@pytest.mark.full
def test_a_run_of_it_resumes_to_the_same_bits(toys, target, sgd, tmp_path):
    step = distill.DrafterStep(MEDUSA, target.model, sgd)
    batches = Batches(batch_of(toys), batch_size=2, seed=1)

    def run(steps, folder):
        return distill.train(
            step,
            step.init(jax.random.key(3), own_params(target)),
            batches,
            steps=steps,
            teacher_params=target.params,
            workdir=tmp_path / folder,
            log_every=2,
            progress=False,
        )

    straight = run(6, "straight")
    run(3, "resumed")
    resumed = run(6, "resumed")
    assert bits(resumed.state.params) == bits(straight.state.params)
    first, *_, last = straight.metrics
    assert last["loss"] < first["loss"]
    assert last["agreement/head_1"] >= 0 and last["tokens_per_s"] is not None
    bad = distill.BatchFunction(lambda n: Batch.of([[1, toys.vocab]]), {})
    with pytest.raises(ValueError, match=r"token ids must be 0\.\.12"):
        distill.train(
            step,
            step.init(jax.random.key(3), own_params(target)),
            bad,
            steps=1,
            teacher_params=target.params,
            progress=False,
        )


def test_what_would_do_nothing_is_refused(toys, target, sgd):
    def step(**settings):
        return distill.DrafterStep(MEDUSA, target.model, sgd, **settings)

    for name in ("drafter_weight", "target_rate"):
        with pytest.raises(ValueError, match=f"{name} does nothing without train_t"):
            step(**{name: 0.5})
        with pytest.raises(ValueError, match=f"{name} must be > 0, got 0"):
            step(train_target=True, **{name: 0.0})
    with pytest.raises(ValueError, match="accumulate must be at least 1"):
        step(accumulate=0)
    own = own_params(target)
    with pytest.raises(ValueError, match="trains two parts"):
        step(train_target=True).init(jax.random.key(0), own)
    state, batch = step().init(jax.random.key(0), own), batch_of(toys)
    with pytest.raises(ValueError, match="teacher_params must be given"):
        step()(state, batch)
    with pytest.raises(ValueError, match="compared with nothing"):
        step()(state, batch, target.params, target.params)
    both, state = joint(target, sgd)
    with pytest.raises(ValueError, match="teacher_params must be None"):
        both(state, batch, target.params)
    with pytest.raises(ValueError, match="multiple of accumulate=3"):
        step(accumulate=3)(step().init(jax.random.key(0), own), batch, target.params)
    with pytest.raises(ValueError, match="at least one batch"):
        step().evaluate(own, [], target.params)
