"""Registry, Sampling, records, statistics and the cache: the types of level 0."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.core import (
    Context,
    Feedback,
    KVCache,
    LanguageModel,
    LMOutput,
    Proposal,
    Registry,
    Sampling,
    SpecStats,
    near,
    record,
    static_field,
)
from specjax.testing import TabularLM


class TestRegistry:
    def test_names_are_sorted_and_entries_come_back(self):
        registry = Registry("shape")
        registry.register("b")(2)
        registry.register("a")(1)
        assert registry.names() == ("a", "b")
        assert registry.get("b") == 2

    def test_an_unknown_name_says_what_is_near(self):
        registry = Registry("shape")
        registry.register("square")(4)
        with pytest.raises(
            ValueError, match="unknown shape 'sqare'; did you mean 'squ"
        ):
            registry.get("sqare")
        with pytest.raises(ValueError, match="known: square"):
            registry.get("zzz")

    def test_a_name_is_taken_once(self):
        registry = Registry("shape")
        registry.register("a")(1)
        with pytest.raises(ValueError, match="shape 'a' is registered already"):
            registry.register("a")(2)

    def test_near(self):
        assert near("alpah", ["alpha", "beta"]) == "did you mean 'alpha'?"


class TestSampling:
    @pytest.mark.parametrize(
        "settings,message",
        [
            (dict(temperature=-0.1), "temperature must be a number >= 0"),
            (dict(temperature=float("nan")), "temperature must be"),
            (dict(temperature=float("inf")), "temperature must be"),
            (dict(temperature="hot"), "temperature must be a number >= 0, got 'hot'"),
            (dict(temperature=None), "temperature must be"),
            (dict(temperature=True), "temperature must be"),
            (dict(top_k=0), "top_k must be a whole number >= 1 or None, got 0"),
            (dict(top_k=2.5), "top_k must be"),
            (dict(top_p=0.0), "top_p must be in"),
            (dict(top_p=1.1), r"top_p must be in \(0, 1\] or None, got 1.1"),
            (dict(top_p=float("nan")), "top_p must be"),
            (dict(min_p=-0.1), "min_p must be in"),
            (dict(min_p=1.5), r"min_p must be in \[0, 1\]"),
        ],
        ids=str,
    )
    def test_values_out_of_range_are_refused(self, settings, message):
        with pytest.raises(ValueError, match=message):
            Sampling(**settings)

    def test_an_option_that_does_not_exist_is_not_dropped(self):
        """https://github.com/sgl-project/sglang/pull/33643"""
        with pytest.raises(TypeError, match="repetition_penalty"):
            Sampling(repetition_penalty=1.1)

    def test_values_may_be_traced(self):
        double = jax.jit(lambda s: s.temperature * 2)
        assert float(double(Sampling(0.5, top_k=3))) == 1.0


class TestRecord:
    def test_static_fields_are_structure(self):
        @record
        class Pair:
            x: jax.Array
            name: str = static_field(default="a")

        leaves, tree = jax.tree.flatten(Pair(1.0, "b"))
        assert leaves == [1.0] and "b" in str(tree)
        with pytest.raises(dataclasses.FrozenInstanceError):
            Pair(1.0).x = 2


class TestSpecStats:
    def test_counts_what_was_reached_and_kept(self):
        """https://github.com/vllm-project/vllm/issues/56101"""
        stats = SpecStats.zeros(4, 3).count(
            active=jnp.array([True, True, True, False]),
            drafted=jnp.array([3, 3, 0, 3]),
            reached=jnp.array([3, 2, 0, 3]),
            accepted=jnp.array([3, 1, 0, 3]),
            emitted=jnp.array([2, 2, 1, 4]),  # the first row: cut behind two drafts
        )
        assert stats.rounds.tolist() == [1, 1, 1, 0]
        assert stats.drafted.tolist() == [3, 3, 0, 0]
        assert stats.evaluated.tolist() == [2, 2, 0, 0]
        assert stats.accepted.tolist() == [2, 1, 0, 0]
        assert stats.emitted.tolist() == [2, 2, 1, 0]
        assert stats.evaluated_at.sum(0).tolist() == [2, 2, 0]
        assert stats.accepted_at.sum(0).tolist() == [2, 1, 0]
        assert stats.acceptance_rate == 3 / 4
        assert stats.block_efficiency == 5 / 3
        assert stats.acceptance_by_position[:2] == [1.0, 0.5]

    def test_a_rejection_is_evaluated_even_if_its_correction_ends_the_text(self):
        stats = SpecStats.zeros(1, 2).count(
            active=jnp.array([True]),
            drafted=jnp.array([2]),
            reached=jnp.array([1]),
            accepted=jnp.array([0]),
            emitted=jnp.array([1]),
        )
        assert stats.evaluated.tolist() == [1] and stats.accepted.tolist() == [0]

    def test_ratios_are_of_sums_and_sums_join_rows(self):
        def one(accepted, emitted):
            return SpecStats.zeros(1, 4).count(
                active=jnp.array([True]),
                drafted=jnp.array([4]),
                reached=jnp.array([min(accepted + 1, 4)]),
                accepted=jnp.array([accepted]),
                emitted=jnp.array([emitted]),
            )

        both = one(4, 5) + one(0, 1)
        assert both.rounds.shape == (2,)
        assert both.acceptance_rate == 4 / 5  # not the mean of 1 and 0
        assert both.block_efficiency == 3.0

    def test_no_drafts_no_rate(self):
        """https://github.com/ggml-org/llama.cpp/issues/3919"""
        stats = SpecStats.zeros(2, 0)
        assert np.isnan(stats.acceptance_rate)
        as_dict = stats.as_dict()
        assert as_dict["acceptance_rate"] is None and as_dict["drafted"] == 0


class TestKVCache:
    def make(self, capacity=6):
        return KVCache.create(
            num_layers=2,
            batch=2,
            num_kv_heads=1,
            capacity=capacity,
            head_dim=1,
            dtype=jnp.float32,
        )

    def block(self, start, tokens=3):
        values = start + jnp.arange(2 * tokens, dtype=jnp.float32)
        return values.reshape(2, tokens, 1, 1)

    def test_each_row_writes_at_its_own_length(self):
        cache = self.make().with_length(jnp.array([0, 2]))
        cache, keys, _ = cache.update(1, self.block(1), self.block(1))
        assert keys[:, 0, :, 0].tolist() == [[1, 2, 3, 0, 0, 0], [0, 0, 4, 5, 6, 0]]
        assert not cache.keys[0].any()
        assert cache.length.tolist() == [0, 2]
        assert cache.advance(3).length.tolist() == [3, 5]

    @pytest.mark.parametrize("under", [lambda f: f, jax.jit], ids=["eager", "jit"])
    def test_a_write_past_the_end_is_dropped_not_moved(self, under):
        """https://github.com/jax-ml/jax/issues/9083"""
        cache = self.make(4).with_length(jnp.array([0, 0]))
        cache, *_ = cache.update(0, self.block(1, 4), self.block(1, 4))
        cache = cache.with_length(jnp.array([3, 2]))
        write = under(lambda c: c.update(0, self.block(91), self.block(91))[1])
        assert write(cache)[:, 0, :, 0].tolist() == [[1, 2, 3, 91], [5, 6, 94, 95]]

    def test_a_negative_slot_is_dropped_too(self):
        cache = self.make().with_length(jnp.array([-1, -2]))
        _, keys, _ = cache.update(0, self.block(1), self.block(1))
        assert keys[:, 0, :, 0].tolist() == [[2, 3, 0, 0, 0, 0], [6, 0, 0, 0, 0, 0]]

    @pytest.mark.parametrize("batch", [1, 2])
    def test_a_block_may_be_longer_than_the_cache(self, batch):
        cache = self.make(4)
        row = jax.tree.map(lambda x: x[:batch], cache).with_length(jnp.ones(batch))
        block = self.block(1, 6)[:batch]
        _, keys, _ = row.update(0, block, block)
        assert keys[0, 0, :, 0].tolist() == [0, 1, 2, 3]

    def test_visible_is_causal_behind_what_is_there(self):
        cache = self.make().with_length(jnp.array([2, 0]))
        seen = cache.visible(2, None, None).astype(int).tolist()
        assert seen[0] == [[1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 0, 0]]
        assert seen[1] == [[1, 0, 0, 0, 0, 0], [1, 1, 0, 0, 0, 0]]

    def test_visible_follows_the_mask_of_a_tree_and_a_window(self):
        cache = self.make().with_length(jnp.array([2, 3]))
        siblings = jnp.array([[[1, 0, 0], [1, 1, 0], [1, 0, 1]]] * 2, bool)
        seen = cache.visible(3, siblings, None).astype(int).tolist()
        assert seen[0][2] == [1, 1, 1, 0, 1, 0]
        assert seen[1][2] == [1, 1, 1, 1, 0, 1]
        near = cache.visible(2, None, 2).astype(int).tolist()
        assert near[0] == [[0, 1, 1, 0, 0, 0], [0, 0, 1, 1, 0, 0]]

    def test_a_window_counts_positions_not_slots(self):
        """Siblings have one position: both see as far back as the only child would."""
        cache = self.make().with_length(jnp.array([2, 3]))
        siblings = jnp.array([[[1, 0, 0], [1, 1, 0], [1, 0, 1]]] * 2, bool)
        positions = jnp.array([[7, 8, 8], [0, 1, 1]])  # only differences count
        seen = cache.visible(3, siblings, 3, positions).astype(int).tolist()
        assert seen[0] == [
            [1, 1, 1, 0, 0, 0],
            [0, 1, 1, 1, 0, 0],
            [0, 1, 1, 0, 1, 0],
        ]
        assert seen[1][2] == [0, 0, 1, 1, 0, 1]
        chain = jnp.array([[2, 3, 4], [3, 4, 5]])
        np.testing.assert_array_equal(
            cache.visible(3, None, 2, chain), cache.visible(3, None, 2)
        )

    @pytest.mark.parametrize("batch", [1, 2])
    def test_compact_makes_a_chain_of_a_path(self, batch):
        cache = self.make(8).with_length(jnp.array([2, 1]))
        cache, *_ = cache.update(0, self.block(1, 5), self.block(11, 5))
        cache, *_ = cache.update(1, self.block(21, 5), self.block(31, 5))
        cache = jax.tree.map(lambda x: x[:batch], cache)
        path = jnp.array([[1, 3, 0], [0, 4, 4]])[:batch]
        moved = cache.compact(cache.length, path)
        assert moved.length.tolist() == cache.length.tolist()
        for old, new in zip(
            (*cache.keys, *cache.values), (*moved.keys, *moved.values), strict=True
        ):
            for row in range(batch):
                start = int(cache.length[row])
                kept = new[row, 0, start : start + 3, 0].tolist()
                assert kept == old[row, 0, start + path[row], 0].tolist()
                np.testing.assert_array_equal(new[row, 0, :start], old[row, 0, :start])

    def test_compact_drops_what_falls_behind_the_last_slot(self):
        cache = self.make(6).with_length(jnp.array([4, 3]))
        cache, *_ = cache.update(0, self.block(1, 3), self.block(1, 3))
        moved = cache.compact(cache.length, jnp.array([[1, 2, 2], [0, 2, 2]]))
        assert moved.keys[0][:, 0, :, 0].tolist()[1] == [0, 0, 0, 4, 6, 6]
        assert moved.keys[0][:, 0, :4, 0].tolist()[0] == [0, 0, 0, 0]


def test_context_reads_tokens_at_absolute_positions():
    context = Context(jnp.array([[5, 6, 7], [8, 9, 0]]), jnp.array([3, 2]), Sampling())
    assert context.token_at(context.length - 1).tolist() == [7, 9]
    back = context.length[:, None] + jnp.array([[-2, -1]])
    assert context.token_at(back).tolist() == [[6, 7], [8, 9]]
    assert context.token_at(jnp.array([-4, 9])).tolist() == [5, 0]  # clipped


def test_a_chain_is_a_tree_of_first_children():
    proposal = Proposal.chain(jnp.zeros((1, 3), int), jnp.zeros((1, 3, 4)), jnp.ones(1))
    assert proposal.parents == (-1, 0, 1)


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_proposal_goes_through_jit_with_its_tree(dynamic):
    parents = (-1, -1, 0)
    rows = jnp.array([parents] * 2) if dynamic else parents
    tokens = jnp.zeros((2, 3), int)
    proposal = Proposal.tree(tokens, None, jnp.array([3, 2]), rows, depth=2)
    again = jax.jit(lambda x: x)(proposal)
    assert again.depth == 2 and again.log_q is None and not again.is_chain
    assert isinstance(again.parents, tuple) != dynamic
    assert np.asarray(again.parents).tolist() == np.asarray(rows).tolist()
    assert len(jax.tree.leaves(proposal)) == 2 + dynamic


def test_feedback_reads_along_the_path():
    hidden = jnp.arange(2 * 5).reshape(2, 5, 1)
    feedback = Feedback(
        length=jnp.array([9, 9]),
        num_accepted=jnp.array([2, 0]),
        target=LMOutput(hidden, hidden),
        path=jnp.array([[1, 3], [0, 0]]),
    )
    assert feedback.along_path(hidden)[0, :, 0].tolist() == [0, 2, 4]
    assert feedback.along_path(hidden)[1, 0, 0] == 5
    assert feedback.at_end(hidden)[:, 0].tolist() == [4, 5]


def test_protocols_are_met():
    assert isinstance(TabularLM(3), LanguageModel)


@pytest.mark.parametrize("num_tokens", [1, 3, 6])
@pytest.mark.full
def test_one_row_is_written_as_many_are_also_past_both_ends(num_tokens):
    """One row takes a slice update, more a scatter. Writes outside are dropped:

    https://github.com/jax-ml/jax/issues/9083
    """
    held = jax.random.normal(jax.random.key(0), (1, 2, 6, 3))
    new = jax.random.normal(jax.random.key(1), (1, num_tokens, 2, 3))
    for start in range(-2, 8):
        cache = KVCache((held,), (held,), jnp.array([start]))
        twice = jax.tree.map(lambda x: jnp.concatenate([x, x]), cache)
        one = cache.update(0, new, new)[1]
        two = twice.update(0, jnp.tile(new, (2, 1, 1, 1)), jnp.tile(new, (2, 1, 1, 1)))[
            1
        ]
        assert (one[0] == two[0]).all() and (one[0] == two[1]).all()
        expected = held[0]
        for token in range(num_tokens):
            if 0 <= start + token < 6:
                expected = expected.at[:, start + token].set(new[0, token])
        assert (one[0] == expected).all()
