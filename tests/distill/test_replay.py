"""The ring of rollouts, and DistiLLM's schedule."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.distill import (
    AdaptiveThreshold,
    Batch,
    Behaviour,
    Checkpoints,
    ReplayBuffer,
    TrainState,
)

WIDTH = 4


def batch_of(first, rows=3, behaviour=False):
    """Rows that are told apart by their tokens: `first`, `first + 1`, ..."""
    tokens = np.arange(first, first + rows)[:, None] * np.ones((1, WIDTH), int)
    batch = Batch.of(tokens, length=3, prompt_length=1)
    told = Behaviour(-jnp.asarray(tokens, jnp.float32), jnp.zeros(tokens.shape))
    fields = dict(on_policy=jnp.ones(rows, bool), behaviour=told if behaviour else None)
    return jax.tree.map(jnp.asarray, Batch(**(vars(batch) | fields)))


@functools.partial(jax.jit, donate_argnums=0)
def add(buffer, batch):
    return buffer.add(batch)


sample = jax.jit(ReplayBuffer.sample, static_argnums=2)


def held(buffer):
    return sorted(np.asarray(buffer.rows.tokens)[: int(buffer.size), 0].tolist())


def test_the_newest_rows_stay_when_the_ring_wraps_around():
    buffer = ReplayBuffer.create(WIDTH, capacity=5)
    assert (buffer.capacity, int(buffer.size)) == (5, 0)
    for first, expected in (
        (10, [10, 11, 12]),
        (20, [11, 12, 20, 21, 22]),
        (30, [21, 22, 30, 31, 32]),
        (40, [31, 32, 40, 41, 42]),
    ):
        buffer = add(buffer, batch_of(first))
        assert held(buffer) == expected
    assert int(buffer.added) == 12
    kept = buffer.rows
    assert kept.on_policy.all() and (kept.prompt_length == 1).all()
    np.testing.assert_array_equal(kept.mask, [[False, True, True, False]] * 5)


def test_more_rows_than_slots_leave_the_last_ones():
    buffer = add(ReplayBuffer.create(WIDTH, capacity=3), batch_of(0, rows=8))
    assert held(buffer) == [5, 6, 7] and int(buffer.added) == 8
    assert held(add(buffer, batch_of(8, rows=1))) == [6, 7, 8]


def test_rows_that_count_nothing_are_not_kept():
    batch = batch_of(0)
    batch = Batch(**(vars(batch) | {"mask": batch.mask.at[1].set(False)}))
    buffer = add(ReplayBuffer.create(WIDTH, capacity=5), batch)
    assert held(buffer) == [0, 2]


def test_a_sample_repeats_nothing_before_all_were_drawn():
    buffer = add(ReplayBuffer.create(WIDTH, capacity=5), batch_of(10))
    drawn = sample(buffer, jax.random.key(0), 3)
    assert sorted(drawn.tokens[:, 0].tolist()) == [10, 11, 12]
    assert drawn.mask.any(axis=1).all()
    several = sample(buffer, jax.random.key(0), 7).tokens[:, 0].tolist()
    assert sorted(several.count(x) for x in (10, 11, 12)) == [2, 2, 3]


def test_every_row_is_as_likely_as_another():
    buffer = add(ReplayBuffer.create(WIDTH, capacity=8), batch_of(0, rows=5))
    keys = jax.random.split(jax.random.key(1), 2000)
    drawn = jax.jit(jax.vmap(lambda key: buffer.sample(key, 2).tokens[:, 0]))(keys)
    counts = np.bincount(np.asarray(drawn).ravel(), minlength=5)
    assert counts.sum() == 4000
    spread = np.sum((counts - 800) ** 2 / 800)  # chi-square with 4 degrees of freedom
    assert spread < 18.5
    # The negative control: one row twice as likely would show.
    lopsided = counts * np.asarray([2, 1, 1, 1, 1]) * (4000 / (4000 + counts[0]))
    assert np.sum((lopsided - 800) ** 2 / 800) > 18.5
    same, other = (sample(buffer, jax.random.key(k), 5).tokens for k in (2, 3))
    assert not np.array_equal(same, other)
    np.testing.assert_array_equal(same, sample(buffer, jax.random.key(2), 5).tokens)


def test_an_empty_buffer_gives_rows_that_count_nothing():
    drawn = sample(ReplayBuffer.create(WIDTH, capacity=2), jax.random.key(0), 3)
    assert drawn.tokens.shape == (3, WIDTH) and not drawn.mask.any()


def test_a_behaviour_stays_with_its_row():
    buffer = ReplayBuffer.create(WIDTH, capacity=4, behaviour=True)
    buffer = add(buffer, batch_of(1, behaviour=True))
    drawn = sample(buffer, jax.random.key(0), 3)
    np.testing.assert_array_equal(drawn.behaviour.log_prob, -1.0 * drawn.tokens)


def test_what_does_not_fit_is_refused():
    buffer = ReplayBuffer.create(WIDTH, capacity=4)
    with pytest.raises(ValueError, match="holds sequences of 4 positions, got 5"):
        buffer.add(Batch.of(np.ones((1, 5))))
    with pytest.raises(ValueError, match=r"made with behaviour=False, got .* with one"):
        buffer.add(batch_of(0, behaviour=True))
    told = ReplayBuffer.create(WIDTH, behaviour=True)
    assert told.capacity == 1000
    with pytest.raises(ValueError, match="behaviour=True, got sequences without one"):
        told.add(batch_of(0))
    for name in ("width", "capacity"):
        with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
            ReplayBuffer.create(**({"width": 4, "capacity": 4} | {name: 0}))


def test_a_checkpoint_holds_it(tmp_path):
    def state_of(memory):
        return TrainState(
            params={"w": jnp.ones((2,))},
            opt_state=(),
            step=jnp.asarray(1, jnp.int32),
            key=jax.random.key(0),
            memory=memory,
        )

    fresh = functools.partial(ReplayBuffer.create, WIDTH, 5, behaviour=True)
    buffer = add(add(fresh(), batch_of(10, behaviour=True)), batch_of(20, 4, True))
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(state_of(buffer), {})
        restored = checkpoints.restore(state_of(fresh()))[0].memory
        with pytest.raises(ValueError, match="memory"):
            checkpoints.restore(state_of(ReplayBuffer.create(WIDTH, 6, behaviour=True)))
    assert isinstance(restored, ReplayBuffer)
    assert jax.tree.structure(restored) == jax.tree.structure(buffer)
    for a, b in zip(jax.tree.leaves(restored), jax.tree.leaves(buffer), strict=True):
        assert a.dtype == b.dtype and np.array_equal(a, b)
    assert held(add(restored, batch_of(30, 1, True))) == [20, 21, 22, 23, 30]


def test_the_threshold_rises_with_the_validation_loss():
    """By a tenth from the loss at the last rise, as the authors' code has it."""
    state = AdaptiveThreshold()
    seen = []
    for loss in (2.0, 1.5, 2.05, 2.1, 2.15, 2.1, 2.2, 1.0, 2.5):
        state = state.update(loss)
        seen.append((state.threshold, state.reference))
    assert seen == [
        (0.0, 2.0),  # before training
        (0.0, 2.0),
        (0.0, 2.0),
        (0.1, 2.1),
        (0.1, 2.1),
        (0.1, 2.1),
        (0.2, 2.2),
        (0.2, 2.2),
        (0.3, 2.5),
    ]
    for n in range(20):
        state = state.update(3.0 + n)
    assert state.threshold == 1.0
    assert AdaptiveThreshold(**state.as_dict()) == state


def test_new_rollouts_get_rarer_over_the_run():
    state = AdaptiveThreshold(threshold=0.4)
    shares = [state.fresh_share(done, 100) for done in (0, 50, 100, 150)]
    assert shares == pytest.approx([0.4, 0.2, 0.0, 0.0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"threshold": 1.1}, "threshold must be in"),
        ({"step": 0}, "step must be in"),
        ({"tolerance": -1}, "tolerance must be >= 0"),
        ({"tolerance": float("nan")}, "tolerance must be >= 0"),
    ],
)
def test_a_schedule_out_of_range_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        AdaptiveThreshold(**options)


def test_a_loss_that_is_not_finite_is_refused():
    for loss in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match="validation_loss must be finite"):
            AdaptiveThreshold().update(loss)
