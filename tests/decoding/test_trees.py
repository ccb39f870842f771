"""Trees in the loop: every branch, every length, the caches behind it."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import generate, verifiers
from specjax.core import Checkpoint, KVCache, Proposal, Sampling
from specjax.decoding import Decoder, make_rules, prepare
from specjax.ops import lineage, row_keys
from specjax.testing import (
    DraftTree,
    Scripted,
    ScriptedTree,
    TabularLM,
    check_cache,
    greedy_reference,
    poison,
)
from tests.decoding.conftest import sharp, small_model
from tests.decoding.test_caches import padded
from tests.decoding.test_greedy_equality import cut_at, scripts

pytestmark = pytest.mark.full

GREEDY = Sampling(temperature=0.0)
# Neither level by level nor branch by branch; five leaves, at depths 2 and 3.
STATIC = ((-1, 0, -1, 2, 2, 1, 0, 1, 3),)
DYNAMIC = (*STATIC, (-1, 0, 1), (-1, -1, -1, 0, 1))
LEAVES, GAMMA, NODES = 5, 3, 9
kinds = pytest.mark.parametrize("trees", [STATIC, DYNAMIC], ids=["static", "dynamic"])


@kinds
@pytest.mark.parametrize("right", [-1, 3])
@pytest.mark.parametrize("verifier", ["rejection", "greedy", "typical"])
def test_greedy_output_is_the_targets(target, prompts, greedy, trees, right, verifier):
    """https://github.com/huggingface/transformers/issues/30042"""
    out = generate(
        target,
        prompts,
        drafter=ScriptedTree(trees, scripts(prompts, greedy), right),
        sampling=GREEDY,
        max_new_tokens=24,
        verifier=verifier,
    )
    assert out.tokens == [text[:24] for text in greedy]
    stats = out.stats
    assert (np.asarray(stats.emitted) == 24).all()
    assert (stats.accepted <= stats.evaluated).all()
    assert (stats.evaluated <= GAMMA * stats.rounds).all()
    if trees is STATIC:
        np.testing.assert_array_equal(stats.drafted, NODES * stats.rounds)
        # Whole branches of 2 or 3 stay; else as many as the script was right about.
        assert (stats.acceptance_rate == 1.0) == (right == 3)
        assert stats.block_efficiency > (3 if right == 3 else 2)


def test_a_tree_of_depth_one(target, prompts, greedy):
    drafter = ScriptedTree(((-1, -1, -1),), scripts(prompts, greedy))
    out = generate(target, prompts, drafter=drafter, sampling=GREEDY, max_new_tokens=24)
    assert out.tokens == [text[:24] for text in greedy]
    assert 0 < out.stats.acceptance_rate < 1


def test_nothing_is_compiled_again(target, prompts, greedy, caplog):
    """https://github.com/sgl-project/sglang-jax/pull/1188"""

    def call(number):
        return generate(
            target,
            [prompt[: number % 3 + 1] for prompt in prompts],
            drafter=ScriptedTree(DYNAMIC, scripts(prompts, greedy), number % 4),
            sampling=Sampling(0.3 * number),
            max_new_tokens=40 - number,
            seed=number,
        )

    call(0)
    with jax.log_compiles(), caplog.at_level("WARNING"):
        rounds = sum(int(call(n).stats.rounds.max()) for n in range(1, 5))
    assert [r for r in caplog.messages if "Compiling" in r] == [] and rounds >= 100


@pytest.mark.parametrize("fault", ["positions", "mask", "path"])
def test_a_wrong_position_mask_or_slot_would_be_seen(
    target, prompts, greedy, fault, monkeypatch
):
    """The negative controls of the test before."""
    if fault == "path":
        monkeypatch.setattr(KVCache, "compact", lambda self, start, path: self)
    else:

        def wrong(parents, depth):
            mask, depths = lineage(parents, depth)
            if fault == "mask":
                mask = jnp.broadcast_to(jnp.tri(mask.shape[1], dtype=bool), mask.shape)
            else:
                depths = jnp.broadcast_to(jnp.arange(depths.shape[1]), depths.shape)
            return mask, depths

        monkeypatch.setattr("specjax.decoding._loop.lineage", wrong)
    out = generate(
        target,
        prompts,
        drafter=ScriptedTree((*STATIC, STATIC[0]), scripts(prompts, greedy)),
        sampling=GREEDY,
        max_new_tokens=23,  # a shape of its own: nothing is compiled for it yet
    )
    assert out.tokens != [text[:23] for text in greedy]


@functools.partial(jax.jit, static_argnums=0)
def poisoned_round(decoder, params, drafter_params, rules, state):
    state = decoder.round(params, drafter_params, rules, state)
    return state.__class__(**{**vars(state), "cache": poison(state.cache)})


def start(target, drafter, prompts, new_tokens, capacity=64, sampling=GREEDY):
    drafter, drafter_params = drafter.bind(target, capacity)
    decoder = Decoder(target.model, drafter, verifiers.Rejection())
    tokens, length = padded(prompts)
    rules = make_rules(
        target.model,
        length,
        row_keys(jnp.arange(len(prompts))),
        max_new_tokens=new_tokens,
        sampling=sampling,
    )
    begin = jax.jit(Decoder.start, static_argnums=(0, 5))
    state = begin(decoder, target.params, drafter_params, tokens, length, capacity)
    return decoder, target.params, drafter_params, rules, state


@kinds
def test_the_cache_equals_a_fresh_prefill_after_every_round(
    target, prompts, greedy, trees
):
    """https://github.com/lablup/mlxcel/pull/1002

    Slots behind the length are poisoned, those of the branches not taken among them.
    """
    drafter = ScriptedTree(trees, scripts(prompts, greedy))
    decoder, params, drafter_params, rules, state = start(
        target, drafter, prompts, new_tokens=38
    )
    assert state.cache.capacity == 64 + NODES - 1
    seen = set()
    while (np.asarray(state.finish) == 0).any():
        before, shapes = state, jax.tree.map(jnp.shape, state)
        state = poisoned_round(decoder, params, drafter_params, rules, state)
        assert jax.tree.map(jnp.shape, state) == shapes
        there = KVCache(
            tuple(x[:, :, :64] for x in state.cache.keys),
            tuple(x[:, :, :64] for x in state.cache.values),
            state.cache.length,
        )
        check_cache(target.model, params, state.tokens, state.length - 1, there)
        accepted = np.asarray(state.stats.accepted - before.stats.accepted)
        leaf = np.asarray(before.length) % LEAVES
        running = np.asarray(state.finish) == 0
        seen |= {*zip(leaf[running].tolist(), accepted[running].tolist(), strict=True)}
    expected = [[*p, *text[:38]] for p, text in zip(prompts, greedy, strict=True)]
    for row, text in enumerate(expected):
        assert state.tokens[row, : len(text)].tolist() == text
    if trees is STATIC:  # every number of drafts on every branch
        assert {count for _, count in seen} == set(range(GAMMA + 1))
        assert {branch for branch, count in seen if count} == set(range(LEAVES))


@kinds
def test_a_table_that_reads_its_cache_alone(trees):
    """Sampled, with logits that are NaN as soon as a slot is wrong."""
    model = TabularLM(5, order=3)
    target = Checkpoint(model, model.init(jax.random.key(0)))
    near = jax.tree.map(
        lambda x: x + 0.4 * jax.random.normal(jax.random.key(1), x.shape),
        target.params,
    )
    drafter = DraftTree(Checkpoint(model, near), trees, "without_replacement", 3)
    prompts = [[1], [2, 3], [4, 0, 1], [0, 0, 0, 0]]
    decoder, params, drafter_params, rules, state = start(
        target, drafter, prompts, new_tokens=40, sampling=Sampling()
    )
    while (np.asarray(state.finish) == 0).any():
        state = poisoned_round(decoder, params, drafter_params, rules, state)
        assert np.isfinite(np.asarray(state.log_probs)).all()
    assert (np.asarray(state.stats.accepted_at).sum(0) > 0).all()


def test_end_of_text_at_every_offset_of_every_branch(target, prompts, greedy):
    """https://github.com/huggingface/transformers/issues/47912

    Four prompts whose first round takes another branch each, and the fifth's.
    """
    drafter = ScriptedTree(STATIC, scripts(prompts, greedy), 3)
    branches = {(len(p)) % LEAVES for p in prompts}
    assert branches == set(range(LEAVES))
    settings = dict(drafter=drafter, sampling=GREEDY, max_new_tokens=24)
    for step in range(GAMMA + 2):
        eos = [text[step] for text in greedy[:LEAVES]]
        out = generate(target, prompts, eos_token_ids=eos, **settings)
        expected = [cut_at(text, eos, 24) for text in greedy]
        assert out.tokens == expected
        ended = [row[-1] in eos for row in expected]
        assert out.finish_reasons == ["eos" if end else "length" for end in ended]
        np.testing.assert_array_equal(out.stats.emitted, [len(r) for r in expected])
        assert all(ended[:LEAVES])


def test_every_limit_and_a_context_that_ends(target, prompts, greedy):
    """https://github.com/huggingface/transformers/pull/47195"""
    drafter = ScriptedTree(STATIC, scripts(prompts, greedy), 3)
    limits = [1, 2, 3, 5, 8, 13, 21, 4, 24]
    out = generate(
        target, prompts, drafter=drafter, sampling=GREEDY, max_new_tokens=limits
    )
    assert out.tokens == [
        text[:limit] for text, limit in zip(greedy, limits, strict=True)
    ]
    np.testing.assert_array_equal(out.stats.emitted, limits)

    long = [list(range(n)) for n in (63, 60, 20)]
    texts = [greedy_reference(target.model, target.params, p, 64) for p in long]
    tokens = np.zeros((3, 128), np.int32)
    for row, (prompt, text) in enumerate(zip(long, texts, strict=True)):
        tokens[row, : len(prompt) + 64] = [*prompt, *text]
    out = generate(
        target,
        long,
        drafter=ScriptedTree(STATIC, tokens, 3),
        sampling=GREEDY,
        max_new_tokens=[10, 40, 40],
    )
    assert [len(row) for row in out.tokens] == [1, 4, 40]
    assert out.finish_reasons == ["context", "context", "length"]
    assert out.tokens == [t[:n] for t, n in zip(texts, (1, 4, 40), strict=True)]


def test_a_sliding_window_counts_positions(prompts):
    """https://github.com/ml-explore/mlx-lm/issues/1914"""
    model = small_model(sliding_window=8)
    windowed = Checkpoint(model, sharp(model, 0))
    expected = [greedy_reference(model, windowed.params, p, 40) for p in prompts]
    drafter = ScriptedTree(STATIC, scripts(prompts, expected))
    out = generate(
        windowed, prompts, drafter=drafter, sampling=GREEDY, max_new_tokens=40
    )
    assert out.tokens == expected


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_each_row_of_a_ragged_batch_is_its_solo_run(
    target, prompts, greedy, temperature
):
    """https://github.com/huggingface/transformers/issues/32165"""
    texts = scripts(prompts, greedy)
    settings = dict(sampling=Sampling(temperature))
    limits = [24, 20, 16, 12, 24, 20, 16, 12, 24]
    batch = generate(
        target,
        prompts,
        drafter=ScriptedTree(DYNAMIC, texts),
        max_new_tokens=limits,
        seed=list(range(9)),
        **settings,
    )
    for row in (0, 3, 8):
        solo = generate(
            target,
            [prompts[row]],
            drafter=ScriptedTree(DYNAMIC, texts[row : row + 1]),
            max_new_tokens=limits[row],
            seed=[row],
            **settings,
        )
        assert solo.tokens[0] == batch.tokens[row]
        np.testing.assert_allclose(solo.log_probs[0], batch.log_probs[row], atol=2e-5)


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("filters", [{}, dict(top_k=3, top_p=0.8, min_p=0.01)], ids=str)
def test_the_target_as_its_own_draft_is_always_right(temperature, filters):
    """https://github.com/vllm-project/vllm/issues/40149"""
    model = TabularLM(5, order=2)
    target = Checkpoint(model, model.init(jax.random.key(0)))
    # The branch of first children is one deep chain; the others are never needed.
    tree = (-1, -1, 0, 0, 2)
    drafter = DraftTree(target, (tree,), "without_replacement", window=2)
    out = generate(
        target,
        [[1, 2], [3, 0, 4]],
        drafter=drafter,
        sampling=Sampling(temperature, **filters),
        max_new_tokens=20,
    )
    assert out.stats.acceptance_rate == 1.0 and out.stats.block_efficiency == 4.0
    assert out.stats.acceptance_by_position == [1.0] * 3


def test_a_chain_that_is_written_as_a_tree_is_a_chain(target, prompts, greedy):
    """No mask, no slots for branches, no compaction: nothing that it would pay for."""
    texts = scripts(prompts, greedy)
    tree, _ = ScriptedTree(((-1, 0, 1),), texts).bind(target, 64)
    decoder = Decoder(target.model, tree, verifiers.Rejection())
    _, _, _, _, state = start(
        target, ScriptedTree(((-1, 0, 1),), texts), prompts, new_tokens=8
    )
    assert decoder.num_nodes == 3 and state.cache.capacity == 64
    settings = dict(sampling=Sampling(0.8), max_new_tokens=24, seed=5)
    one, other = (
        generate(target, prompts, drafter=drafter, **settings)
        for drafter in (
            ScriptedTree(((-1, 0, 1),), texts, 3),
            Scripted(3, texts, 3),
        )
    )
    assert one.tokens == other.tokens


@pytest.mark.parametrize("verifier", ["block", "lossy_lin", "lenience"])
def test_a_verifier_of_chains_is_refused_beside_a_tree(target, prompts, verifier):
    drafter = ScriptedTree(STATIC, np.zeros((9, 64), np.int32))
    with pytest.raises(ValueError, match=r"takes chains of drafts only, but .* a tree"):
        prepare(target, prompts, drafter=drafter, verifier=verifier)
    prepare(target, prompts, drafter=drafter, verifier="typical")


class _Misstating:
    """Says one thing of itself and proposes another."""

    gamma, num_nodes = 2, 3

    def __init__(self, parents, depth=2, nodes=3):
        self.parents, self.depth, self.nodes = parents, depth, nodes

    def bind(self, target, max_length):
        return self, ()

    def init(self, params, tokens, length, capacity, target):
        return ()

    def propose(self, params, keys, state, context):
        tokens = jnp.zeros((context.length.shape[0], self.nodes), jnp.int32)
        count = jnp.full_like(context.length, self.nodes)
        return Proposal.tree(tokens, None, count, self.parents, self.depth), state

    def commit(self, params, state, feedback):
        return state


@pytest.mark.parametrize(
    "drafter,message",
    [
        (_Misstating((-1, 2, 0)), "parents must be topologically ordered"),
        (_Misstating((-1, 0)), "its parents are .*, 2 nodes of the depth 2"),
        (_Misstating((-1, -1, -1)), "a tree of the depth 2, but .* the depth 1"),
        (_Misstating((-1, 0, 1), depth=3), "set its num_nodes and gamma"),
        (_Misstating((-1, 0, 0, 0), nodes=4), "its proposal has 4 tokens"),
        (_Misstating(jnp.array([-1, 0, 0])), "a tuple of 3 or an array of that shape"),
    ],
)
def test_a_drafter_is_held_to_what_it_says(target, drafter, message):
    with pytest.raises(ValueError, match=message):
        generate(target, [[1]], drafter=drafter, max_new_tokens=4)


@dataclasses.dataclass(frozen=True)
class _Pathless(verifiers.Rejection):
    def __call__(self, keys, proposal, log_p):
        return dataclasses.replace(super().__call__(keys, proposal, log_p), path=None)


def test_a_verifier_of_trees_must_say_the_path(target):
    with pytest.raises(ValueError, match="_Pathless takes trees, but its verdict"):
        generate(
            target,
            [[1]],
            drafter=_Misstating([-1, 0, 0]),
            verifier=_Pathless(),
            max_new_tokens=4,
        )


class _Listening(_Misstating):
    """Writes down the shapes of what it is told."""

    features = ("embedding", "layers.1", "layers.0.key")

    def init(self, params, tokens, length, capacity, target):
        self.first = jax.tree.map(jnp.shape, target)
        return ()

    def propose(self, params, keys, state, context):
        self.cache = jax.tree.map(jnp.shape, context.cache)
        return super().propose(params, keys, state, context)

    def commit(self, params, state, feedback):
        self.told = jax.tree.map(jnp.shape, feedback)
        return state


def test_a_drafter_is_told_what_it_asks_for(target):
    drafter = _Listening((-1, -1, 0))
    generate(target, [[1, 2], [3]], drafter=drafter, max_new_tokens=4)
    assert set(drafter.first.features) == set(drafter.features)
    assert drafter.first.hidden == drafter.first.features["layers.1"] == (2, 15, 32)
    assert drafter.told.target.features["layers.0.key"] == (2, 4, 2, 8)
    assert drafter.told.path == (2, 2) and drafter.told.length == (2,)
    assert drafter.cache.length == (2,)
