"""Drafters one at a time: what they propose, which law they say it came from."""

import dataclasses
import functools
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import drafters
from specjax.core import Checkpoint, Context, Feedback, LMOutput, Sampling
from specjax.ops import row_keys
from specjax.testing import TabularLM, chi_square, next_token_laws
from tests.conformance.drafter_factories import (
    FACTORIES,
    GAMMA,
    make_drafter,
    target_for,
)
from tests.marks import sampled

MODEL = TabularLM(5, order=2)
TARGET = Checkpoint(MODEL, MODEL.init(jax.random.key(0)))
PROMPT = [1, 2, 0, 1, 2]
FILTERED = Sampling(0.7, top_k=3, top_p=0.9, min_p=0.02)

LIGHT = ("two_model", "prompt_lookup")
each = pytest.mark.parametrize("name", sampled(drafters.names(), *LIGHT))


def has_gamma(name):
    """Whether gamma is a setting: of a static tree it is the depth."""
    return "gamma" in {f.name for f in dataclasses.fields(drafters.get(name))}


def context(rows, sampling=FILTERED, width=16):
    tokens = np.zeros((len(rows), width), np.int32)
    for row, text in enumerate(rows):
        tokens[row, : len(text)] = text
    return Context(
        jnp.asarray(tokens), jnp.array([len(text) for text in rows]), sampling
    )


def propose(drafter, params, keys, context, target=TARGET):
    return _propose(target.model, drafter, target.params, params, keys, context)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _propose(model, drafter, target_params, params, keys, context):
    """The first round, behind the target's prefill."""
    tokens = context.tokens[:, :-4]
    cache = model.init_cache(tokens.shape[0], 16)
    features = tuple(getattr(drafter, "features", ()))
    asked = {"features": features} if features else {}
    out, cache = model.apply(target_params, tokens[:, :-1], cache, **asked)
    cache = cache.with_length(context.length - 1)
    context = dataclasses.replace(context, cache=cache)
    state = drafter.init(params, tokens, context.length, 16, out)
    return drafter.propose(params, keys, state, context)


def test_every_registered_drafter_has_a_factory():
    assert set(FACTORIES) >= set(drafters.names())
    with pytest.raises(pytest.fail.Exception, match="'novel' is registered but never"):
        make_drafter("novel", TARGET, 16)


@each
def test_the_law_handed_over_is_one_that_the_drafts_can_come_from(name):
    """https://github.com/huggingface/transformers/issues/47932"""
    drafter, params = make_drafter(name, TARGET, 16)
    rows, keys = context([PROMPT] * 256), row_keys(jnp.arange(256))
    proposal, _ = propose(drafter, params, keys, rows, target_for(name, TARGET))
    assert drafter.gamma == GAMMA == proposal.depth
    nodes = getattr(drafter, "num_nodes", drafter.gamma)
    assert proposal.tokens.shape == (256, nodes)
    drafted = np.arange(nodes) < np.asarray(proposal.num_drafted)[:, None]
    assert drafted.any()
    if proposal.log_q is None:
        return
    assert proposal.log_q.shape == (256, nodes, MODEL.vocab_size)
    q = np.exp(proposal.log_q)
    np.testing.assert_allclose(q.sum(-1), 1, atol=1e-5)
    chosen = np.take_along_axis(q, np.asarray(proposal.tokens)[..., None], -1)[..., 0]
    assert (chosen[drafted] > 0).all()
    assert ((q > 0).sum(-1) <= 3).all()  # top-k holds for the draft too


@each
def test_a_row_drafts_the_same_beside_any_other(name):
    drafter, params = make_drafter(name, TARGET, 16)
    rows, keys = [PROMPT, [3], [0, 1, 0, 1, 0], [2, 2]], row_keys(jnp.arange(4))
    order = jnp.array([2, 0, 3, 1])
    one, two = (
        propose(drafter, params, keys[n], context(texts), target_for(name, TARGET))[0]
        for n, texts in ((jnp.arange(4), rows), (order, [rows[i] for i in order]))
    )
    np.testing.assert_array_equal(one.tokens[order], two.tokens)
    np.testing.assert_array_equal(one.num_drafted[order], two.num_drafted)
    if one.log_q is not None:
        np.testing.assert_array_equal(one.log_q[order], two.log_q)


@pytest.mark.full
def test_two_model_drafts_follow_the_drafts_own_law():
    drafter, params = make_drafter("two_model", TARGET, 16)
    rows = 8192
    proposal, _ = propose(
        drafter, params, row_keys(jnp.arange(rows)), context([PROMPT] * rows)
    )
    law = next_token_laws(MODEL, params, PROMPT, 2, FILTERED)
    first = np.asarray(proposal.tokens[:, 0])
    assert chi_square(np.bincount(first, minlength=5), law(())) > 1e-3
    np.testing.assert_allclose(np.exp(proposal.log_q[0, 0]), law(()), atol=1e-6)
    best = int(np.argmax(law(())))
    second = np.asarray(proposal.tokens[:, 1])[first == best]
    assert chi_square(np.bincount(second, minlength=5), law((best,))) > 1e-3
    wrong = next_token_laws(MODEL, TARGET.params, PROMPT, 1, FILTERED)(())
    assert chi_square(np.bincount(first, minlength=5), wrong) < 1e-6  # a control


def test_two_model_reads_all_but_the_last_two_tokens():
    drafter, params = make_drafter("two_model", TARGET, 16)
    tokens = context([PROMPT]).tokens[:, :5]
    state = drafter.init(params, tokens, jnp.array([5]), 16, None)
    assert state.length.tolist() == [3]
    output = LMOutput(jnp.zeros((1, GAMMA + 1, 5)), jnp.zeros((1, GAMMA + 1, 5)))
    path = jnp.arange(GAMMA)[None]
    feedback = Feedback(jnp.array([8]), jnp.array([2]), output, path)
    state = drafter.commit(params, state, feedback)
    assert state.length.tolist() == [6]


@pytest.mark.parametrize("size", [3, 7])
def test_two_model_maps_another_vocabulary_onto_the_targets(size):
    """https://github.com/vllm-project/vllm/issues/7252"""
    model = TabularLM(size, order=2)
    draft = Checkpoint(model, model.init(jax.random.key(3)))
    drafter, params = drafters.TwoModel(draft, gamma=2).bind(TARGET, 16)
    proposal, _ = propose(
        drafter,
        params,
        row_keys(jnp.arange(64)),
        context([[1, 2, 0, 1, 2]] * 64, Sampling(1.0)),
    )
    q = np.exp(proposal.log_q)
    assert q.shape[-1] == 5
    np.testing.assert_allclose(q.sum(-1), 1, atol=1e-5)
    assert (q[..., size:] == 0).all()
    assert np.asarray(proposal.tokens).max() < min(size, 5)


@dataclasses.dataclass(frozen=True)
class _Counting(TabularLM):
    """Counts its passes while they run."""

    passes: ClassVar[list] = []

    def apply(self, params, tokens, cache=None, **settings):
        jax.debug.callback(lambda: self.passes.append(1))
        return super().apply(params, tokens, cache, **settings)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.full
def test_two_model_stops_where_the_draft_is_not_sure(temperature):
    """Of the law before temperature; https://github.com/ggml-org/llama.cpp/issues/3919"""
    model = _Counting(5, order=2, scale=2.0)
    draft = Checkpoint(model, model.init(jax.random.key(3)))
    bold, params = drafters.TwoModel(draft, gamma=6).bind(TARGET, 16)
    wary = dataclasses.replace(bold, min_confidence=0.6)
    rows, keys = context([PROMPT, [3], [0, 1, 0], [2, 2]] * 4), row_keys(jnp.arange(16))
    sampling = Sampling(temperature)
    rows = dataclasses.replace(rows, sampling=sampling)
    found, passes = [], []
    for drafter in (bold, wary):
        proposal, _ = jax.block_until_ready(propose(drafter, params, keys, rows))
        jax.effects_barrier()
        found.append(proposal)
        passes.append(len(model.passes) - 1)  # without the prompts
        model.passes.clear()
    assert passes[0] == 6 and (found[0].num_drafted == 6).all()
    # The same drafts, as far as they go; the longest row says how many passes it takes.
    counts = np.asarray(found[1].num_drafted)
    there = np.arange(6)[None] < counts[:, None]
    np.testing.assert_array_equal(
        np.where(there, found[0].tokens, 0), np.where(there, found[1].tokens, 0)
    )
    assert passes[1] == min(counts.max() + 1, 6) and len({*counts.tolist()}) > 1
    raw = np.asarray(params["table"])
    for row, text in enumerate([PROMPT, [3], [0, 1, 0], [2, 2]] * 4):
        text, sure = [5, *text], 0
        while sure < 6:
            logits = raw[text[-2], text[-1]]
            if np.exp(logits).max() / np.exp(logits).sum() < 0.6:
                break
            text.append(int(found[0].tokens[row, sure]))
            sure += 1
        assert counts[row] == sure


def test_rows_that_have_ended_keep_no_round_waiting():
    model = _Counting(5, order=2)
    draft = Checkpoint(model, model.init(jax.random.key(3)))
    drafter = drafters.TwoModel(draft, gamma=6, min_confidence=1e-6)
    bound, params = drafter.bind(TARGET, 16)
    for running, passes in (([True, False], 6), ([False, False], 1)):
        rows = context([PROMPT, PROMPT])
        rows = dataclasses.replace(rows, running=jnp.array(running))
        jax.block_until_ready(propose(bound, params, row_keys(jnp.arange(2)), rows))
        jax.effects_barrier()
        assert len(model.passes) - 1 == passes
        model.passes.clear()


@pytest.mark.parametrize("least", [0.0, -0.1, 1.5, float("nan")])
def test_a_confidence_out_of_range_is_refused(least):
    with pytest.raises(ValueError, match=r"min_confidence, .* must be in \(0, 1\] or"):
        drafters.TwoModel(TARGET, min_confidence=least)


class _Tokenizer:
    def __init__(self, vocab):
        self._vocab = vocab

    def get_vocab(self):
        return self._vocab


def test_tokenisers_of_equal_size_must_agree_on_every_id():
    """https://github.com/vllm-project/vllm/issues/7252"""
    ours, theirs = _Tokenizer({"a": 0, "b": 1}), _Tokenizer({"a": 1, "b": 0})
    target = Checkpoint(MODEL, TARGET.params, tokenizer=ours)
    draft = Checkpoint(MODEL, TARGET.params, tokenizer=theirs)
    with pytest.raises(ValueError, match="'a' has id 0 in the target"):
        drafters.TwoModel(draft).bind(target, 16)
    drafters.TwoModel(target).bind(target, 16)


@pytest.mark.parametrize("gamma", [0, -1, 2.0, "4", True, None])
@pytest.mark.parametrize("name", [n for n in drafters.names() if has_gamma(n)])
def test_a_draft_length_that_is_none_is_refused(name, gamma):
    with pytest.raises(ValueError, match="gamma, the tokens drafted in a round, must"):
        dataclasses.replace(FACTORIES[name](target_for(name, TARGET)), gamma=gamma)


def test_two_model_needs_a_checkpoint_in_generate():
    with pytest.raises(ValueError, match="needs a checkpoint to draft with"):
        drafters.TwoModel(MODEL).bind(TARGET, 16)


class TestPromptLookup:
    """https://github.com/huggingface/transformers/pull/46790"""

    def look_up(self, text, **settings):
        drafter = drafters.PromptLookup(gamma=4, **settings)
        drafter, params = drafter.bind(TARGET, 16)
        proposal, _ = propose(drafter, params, row_keys(jnp.arange(1)), context([text]))
        return proposal.tokens[0, : int(proposal.num_drafted[0])].tolist()

    @pytest.mark.parametrize(
        "text,expected",
        [
            ([1, 2, 3, 4, 0, 1, 2], [3, 4, 0, 1]),
            # Of two matches of two tokens the later one.
            ([1, 2, 3, 1, 2, 4, 4, 0, 1, 2], [4, 4, 0, 1]),
            # A longer match, though it is the earlier one.
            ([0, 1, 2, 3, 3, 4, 1, 2, 4, 0, 1, 2], [3, 3, 4, 1]),
            ([1, 0, 1, 0], [1, 0, 1, 0]),  # the copy runs on periodically
            ([3, 3], [3, 3, 3, 3]),
            ([1, 2, 3], []),  # no match
            ([1], []),  # shorter than any n-gram
        ],
    )
    def test_copies_what_followed_the_longest_then_latest_match(self, text, expected):
        assert self.look_up(text) == expected

    def test_equals_a_search_on_the_host(self):
        def search(text, longest=3, gamma=4):
            last = len(text) - 1
            for size in range(min(longest, last), 0, -1):
                for end in range(last - 1, size - 2, -1):
                    if text[end - size + 1 : end + 1] == text[last - size + 1 :]:
                        copied = list(text)
                        for offset in range(gamma):
                            copied.append(copied[end + 1 + offset])
                        return copied[len(text) :]
            return []

        rng = np.random.default_rng(0)
        for _ in range(40):
            text = rng.integers(0, 3, rng.integers(1, 13)).tolist()
            assert self.look_up(text) == search(text), text

    def test_a_least_match_can_be_asked_for(self):
        assert self.look_up([1, 2, 3, 1], min_ngram=2) == []
        assert self.look_up([1, 2, 3, 1, 2], min_ngram=2) == [3, 1, 2, 3]
        with pytest.raises(ValueError, match="1 <= min_ngram <= max_ngram"):
            drafters.PromptLookup(min_ngram=4, max_ngram=3)
