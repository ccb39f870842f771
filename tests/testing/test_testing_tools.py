"""The tools themselves: they must see what they are there to see."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.core import Checkpoint, Context, Sampling
from specjax.ops import row_keys
from specjax.testing import (
    DraftTree,
    TabularLM,
    check_cache,
    chi_square,
    count_sequences,
    greedy_reference,
    next_token_laws,
    poison,
    sequence_law,
)

MODEL = TabularLM(3, order=2)
PARAMS = MODEL.init(jax.random.key(0))
TOKENS = jnp.array([[0, 1, 2, 2, 1], [2, 0, 0, 1, 1]])
apply = jax.jit(MODEL.apply)


def test_tabular_looks_up_the_last_tokens():
    logits = apply(PARAMS, TOKENS)[0].logits
    table = PARAMS["table"]
    np.testing.assert_array_equal(logits[0, 0], table[3, 0])
    np.testing.assert_array_equal(logits[0, 3], table[2, 2])
    np.testing.assert_array_equal(logits[1, 4], table[1, 1])


def test_tabular_cache_equals_no_cache_and_rolls_back():
    whole = apply(PARAMS, TOKENS)[0].logits
    cache = MODEL.init_cache(2, 6)
    _, cache = apply(PARAMS, TOKENS[:, :3] * 0, cache)
    cache = poison(cache.with_length(jnp.array([0, 0])))
    first, cache = apply(PARAMS, TOKENS[:, :2], cache)
    # Rows go on from lengths of their own: the second reads its last token again.
    cache = cache.with_length(jnp.array([2, 1]))
    second, _ = apply(PARAMS, jnp.stack([TOKENS[0, 2:5], TOKENS[1, 1:4]]), cache)
    np.testing.assert_array_equal(first.logits, whole[:, :2])
    np.testing.assert_array_equal(second.logits[0], whole[0, 2:5])
    np.testing.assert_array_equal(second.logits[1], whole[1, 1:4])


@pytest.mark.parametrize("value", [1e9, float("nan")])
def test_tabular_shows_a_poisoned_slot(value):
    _, cache = apply(PARAMS, TOKENS[:, :3], MODEL.init_cache(2, 6))
    wrong = poison(cache.with_length(jnp.array([1, 3])), value)
    out, _ = apply(PARAMS, TOKENS[:, 3:4], wrong.with_length(jnp.array([3, 3])))
    assert np.isnan(out.logits[0]).all() and np.isfinite(out.logits[1]).all()


def test_tabular_follows_the_mask_of_a_tree():
    tree = jnp.array([[[1, 0, 0], [1, 1, 0], [1, 0, 1]]] * 2, bool)
    out, _ = MODEL.apply(PARAMS, TOKENS[:, :3], mask=tree)
    np.testing.assert_array_equal(
        out.logits[0, 2], PARAMS["table"][TOKENS[0, 0], TOKENS[0, 2]]
    )


def test_tabular_refuses_to_look_ahead():
    ahead = jnp.ones((2, 3, 3), bool)
    with pytest.raises(ValueError, match="TabularLM is causal"):
        MODEL.apply(PARAMS, TOKENS[:, :3], mask=ahead)
    traced = jax.jit(lambda mask: MODEL.apply(PARAMS, TOKENS[:, :3], mask=mask)[0])
    logits = traced(ahead).logits
    assert np.isnan(logits[:, :2]).all() and np.isfinite(logits[:, 2]).all()


def test_sequence_law_is_the_product_of_next_token_laws():
    sampling = Sampling(0.8, top_p=0.9)
    law = sequence_law(MODEL, PARAMS, [1, 2], 3, sampling)
    step = next_token_laws(MODEL, PARAMS, [1, 2], 3, sampling)
    assert law.shape == (3, 3, 3) and law.sum() == pytest.approx(1, abs=1e-12)
    for index in np.ndindex(3, 3, 3):
        product = np.prod([step(index[:i])[index[i]] for i in range(3)])
        assert law[index] == pytest.approx(product, abs=1e-12)


def test_greedy_reference_is_the_mode_of_the_greedy_law():
    law = sequence_law(MODEL, PARAMS, [0], 4, Sampling(0.0))
    best = np.unravel_index(np.argmax(law), law.shape)
    assert greedy_reference(MODEL, PARAMS, [0], 4) == [int(x) for x in best]


class TestDraftTree:
    TREES = ((-1, -1, -1, 0, 0, 1),)

    def go(self, siblings, trees=TREES, rows=4096, temperature=1.0):
        checkpoint = Checkpoint(MODEL, PARAMS)
        drafter, params = DraftTree(checkpoint, trees, siblings).bind(checkpoint, 8)
        tokens = jnp.tile(jnp.array([[1, 2, 0, 0]]), (rows, 1))
        context = Context(tokens, jnp.full(rows, 2), Sampling(temperature))
        proposal, _ = drafter.propose(params, row_keys(jnp.arange(rows)), (), context)
        return proposal

    @pytest.mark.full
    def test_siblings_follow_the_laws_that_are_said(self):
        law = next_token_laws(MODEL, PARAMS, [1, 2], 2, Sampling())
        for siblings in ("with_replacement", "without_replacement"):
            proposal = self.go(siblings)
            tokens, q = np.asarray(proposal.tokens), np.exp(proposal.log_q)
            np.testing.assert_allclose(q.sum(-1), 1, atol=1e-5)
            np.testing.assert_allclose(q[0, 0], law(()), atol=1e-6)
            np.testing.assert_allclose(q[0, 3], law((tokens[0, 0],)), atol=1e-6)
            pair = count_sequences(tokens[:, :2], 3)
            rest = np.array(law(()))
            expected = np.outer(rest, rest)
            if siblings == "without_replacement":
                assert len({*tokens[0, :3].tolist()}) == 3  # all there are
                expected = expected / (1 - rest)[:, None] * (1 - np.eye(3))
            assert chi_square(pair, expected) > 1e-3
            assert chi_square(pair, expected[::-1, ::-1]) < 1e-6  # a control

    def test_the_best_are_in_order_and_point_masses(self):
        proposal = self.go("best", rows=2)
        best = np.argsort(-np.asarray(PARAMS["table"][1, 2])).tolist()
        assert proposal.tokens[0, :3].tolist() == best and proposal.log_q is None
        assert proposal.parents == self.TREES[0] and proposal.depth == 2

    def test_where_no_sibling_is_left_one_comes_again(self):
        proposal = self.go("without_replacement", rows=2, temperature=0.0)
        assert len({*proposal.tokens[0, :3].tolist()}) == 1
        np.testing.assert_allclose(np.exp(proposal.log_q).sum(-1), 1)

    def test_each_row_may_have_a_tree_of_its_own(self):
        proposal = self.go("best", ((-1, 0), (-1, -1, 0), (-1, -1, -1)), rows=2)
        assert proposal.parents.tolist() == [[-1, -1, -1]] * 2  # of length 2
        assert proposal.num_drafted.tolist() == [3, 3] and proposal.depth == 2


class TestChiSquare:
    def test_p_values_are_uniform_under_the_law(self):
        rng = np.random.default_rng(0)
        law = rng.dirichlet(np.ones(10))
        values = [chi_square(rng.multinomial(5000, law), law) for _ in range(300)]
        assert 0.45 < np.mean(values) < 0.55
        assert 0.02 < np.mean(np.array(values) < 0.05) < 0.09

    def test_equals_scipy(self):
        scipy_stats = pytest.importorskip("scipy.stats")
        observed, law = np.array([48, 35, 17]), np.array([0.5, 0.3, 0.2])
        expected = scipy_stats.chisquare(observed, 100 * law).pvalue
        assert chi_square(observed, law) == pytest.approx(expected, rel=1e-5)

    def test_rare_cells_are_pooled_and_impossible_ones_condemn(self):
        law = [0.5, 0.494, 0.003, 0.003, 0.0]
        assert chi_square([500, 492, 2, 6, 0], law) > 0.1
        assert chi_square([500, 499, 0, 0, 1], law) == 0.0
        assert chi_square([500, 440, 30, 30, 0], law) < 1e-6

    def test_a_certain_law(self):
        assert chi_square([100, 0], [1.0, 0.0]) == 1.0
        assert chi_square([99, 1], [1.0, 0.0]) == 0.0

    @pytest.mark.parametrize(
        "observed,law,message",
        [
            ([1, 2], [0.5, 0.3, 0.2], "must have one shape"),
            ([1, 2], [0.5, 0.4], "must be a law"),
            ([0, 0], [0.5, 0.5], "must hold something"),
        ],
    )
    def test_refuses_nonsense(self, observed, law, message):
        with pytest.raises(ValueError, match=message):
            chi_square(observed, law)

    def test_count_sequences(self):
        counts = count_sequences([[0, 1], [0, 1], [1, 1]], 2)
        assert counts.tolist() == [[0, 2], [0, 1]]
        with pytest.raises(ValueError, match="must be in the vocabulary of 2"):
            count_sequences([[0, 2]], 2)


class TestCheckCache:
    def cache(self):
        return apply(PARAMS, TOKENS, MODEL.init_cache(2, 6))[1]

    def test_accepts_a_prefill_with_garbage_behind_it(self):
        cache = poison(self.cache().with_length(jnp.array([2, 4])), float("nan"))
        check_cache(MODEL, PARAMS, TOKENS, jnp.array([2, 4]), cache)

    def test_sees_a_wrong_length(self):
        with pytest.raises(
            AssertionError, match="row 1: the cache should hold 4 token"
        ):
            check_cache(MODEL, PARAMS, TOKENS, jnp.array([5, 4]), self.cache())

    def test_sees_a_wrong_slot_and_a_poisoned_one(self):
        wrong = TOKENS.at[1, 2].set(2)
        with pytest.raises(AssertionError, match="row 1: the first 5 slots"):
            check_cache(MODEL, PARAMS, wrong, jnp.array([5, 5]), self.cache())
        hole = poison(self.cache().with_length(jnp.array([4, 5])), float("nan"))
        with pytest.raises(AssertionError, match="row 0"):
            check_cache(
                MODEL,
                PARAMS,
                TOKENS,
                jnp.array([5, 5]),
                hole.with_length(jnp.array([5, 5])),
            )
