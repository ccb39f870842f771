"""sample: the law it draws from, and what it must never draw."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import ops
from specjax.testing import chi_square


@functools.partial(jax.jit, static_argnums=1)
def draw(log_p, count, seed=0):
    keys = ops.row_keys(seed + jnp.arange(count))
    return ops.sample(keys, jnp.broadcast_to(log_p, (count, *log_p.shape)))


@pytest.mark.parametrize("size", [1, 2, 5, 128, 300])
def test_follows_its_law(size):
    p = np.random.default_rng(size).dirichlet([0.7] * size)
    tokens = np.asarray(draw(jnp.log(jnp.asarray(p, jnp.float32)), 20_000))
    assert tokens.dtype == np.int32
    counts = np.bincount(tokens, minlength=size)
    assert chi_square(counts, p) > 1e-3
    if size > 1:  # the negative control: a law that is a little off
        assert chi_square(counts, np.roll(p, 1)) < 1e-6


def test_does_not_need_a_normalised_law():
    p = np.array([0.5, 0.3, 0.2])
    tokens = draw(jnp.log(jnp.asarray(p, jnp.float32)) + 50.0, 20_000)
    assert chi_square(np.bincount(tokens, minlength=3), p) > 1e-3


@pytest.mark.parametrize("size", [3, 129, 50_000])
def test_never_draws_what_has_no_probability(size):
    """Blocks of zeros at both ends and in between, whatever the uniform is."""
    possible = np.unique([size // 2, size - 2])
    log_p = np.full(size, -np.inf, np.float32)
    log_p[possible] = np.log(1 / len(possible))
    tokens = draw(jnp.asarray(log_p), 200)
    assert set(np.asarray(tokens).tolist()) == set(possible.tolist())


def test_the_ends_of_the_uniform_are_safe(monkeypatch):
    log_p = jnp.log(jnp.array([[0.0, 0.5, 0.5, 0.0]]))
    keys = ops.row_keys(jnp.arange(1))
    for value in (0.0, float(np.nextafter(np.float32(1), np.float32(0)))):
        monkeypatch.setattr(
            jax.random,
            "uniform",
            lambda key, shape, value=value: jnp.full(shape, value),
        )
        assert int(ops.sample(keys, log_p)[0]) in (1, 2)


def test_large_vocabulary_keeps_its_far_end():
    """A float32 running sum over 50,000 tokens would lose the small ones."""
    size = 50_000
    p = np.full(size, 0.5 / (size - 1))
    p[0] = 0.5
    tokens = np.asarray(draw(jnp.log(jnp.asarray(p, jnp.float32)), 1_000))
    tail = tokens[tokens > 0]
    quarters = np.bincount(np.minimum((tail - 1) * 4 // (size - 1), 3), minlength=4)
    assert chi_square(quarters, [0.25] * 4) > 1e-3
    assert chi_square([len(tail), len(tokens) - len(tail)], [0.5, 0.5]) > 1e-3


def test_a_rows_draw_does_not_depend_on_its_neighbours():
    log_p = jnp.log(jnp.array([[0.2, 0.3, 0.5]] * 6))
    seeds = jnp.array([7, 1, 2, 3, 4, 5])
    together = ops.sample(ops.row_keys(seeds), log_p)
    alone = ops.sample(ops.row_keys(seeds[:1]), log_p[:1])
    assert int(together[0]) == int(alone[0])
    order = jnp.array([3, 0, 5, 1, 4, 2])
    shuffled = ops.sample(ops.row_keys(seeds[order]), log_p)
    np.testing.assert_array_equal(shuffled, together[order])


def test_fold_takes_one_number_or_one_a_row():
    keys = ops.row_keys(jnp.arange(3))
    same = ops.fold(keys, 4)
    each = ops.fold(keys, jnp.array([4, 4, 5]))
    data = [jax.random.key_data(k) for k in (same, each)]
    np.testing.assert_array_equal(data[0][:2], data[1][:2])
    assert (data[0][2] != data[1][2]).any()
