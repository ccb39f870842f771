"""Look-up where it matches, a model where not: laws, caches, passes that are saved."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import generate, verifiers
from specjax.core import Checkpoint, Sampling
from specjax.decoding import Decoder, make_rules
from specjax.drafters import Fallback, Lookahead, PromptLookup, TwoModel
from specjax.ops import row_keys
from specjax.testing import TabularLM, check_cache, greedy_reference, poison
from tests.drafters.test_drafters import _Counting, context

GAMMA = 3
# Sure of itself, so that n-grams come again, but not always.
MODEL = TabularLM(8, order=3, scale=3.0)
TARGET = Checkpoint(MODEL, MODEL.init(jax.random.key(0)))
NEAR = {
    "table": TARGET.params["table"]
    + 2.0 * jax.random.normal(jax.random.key(1), TARGET.params["table"].shape)
}
PROMPTS = [[1, 2, 3, 1, 2, 3, 1], [4], [5, 6, 7, 0], [2, 2]]


def pair(model=MODEL, params=NEAR):
    lookup = PromptLookup(gamma=GAMMA, min_ngram=2)
    return Fallback(lookup, TwoModel(Checkpoint(model, params), gamma=GAMMA))


def start(drafter, sampling, new_tokens=40, capacity=56):
    bound, drafter_params = drafter.bind(TARGET, capacity)
    decoder = Decoder(MODEL, bound, verifiers.Rejection())
    length = jnp.array([len(p) for p in PROMPTS])
    tokens = np.zeros((4, 8), np.int32)
    for row, prompt in enumerate(PROMPTS):
        tokens[row, : len(prompt)] = prompt
    rules = make_rules(
        MODEL,
        length,
        row_keys(jnp.arange(4)),
        max_new_tokens=new_tokens,
        sampling=sampling,
    )
    begin = jax.jit(Decoder.start, static_argnums=(0, 5))
    tokens = jnp.asarray(tokens)
    state = begin(decoder, TARGET.params, drafter_params, tokens, length, capacity)
    return decoder, drafter_params, rules, state


@pytest.mark.full
def test_the_models_cache_holds_what_it_has_seen_and_catches_up():
    decoder, params, rules, state = start(pair(), Sampling(1.0))
    one_round = jax.jit(Decoder.round, static_argnums=0)
    lags, asked = set(), []
    while (np.asarray(state.finish) == 0).any():
        running = np.asarray(state.finish) == 0
        before = state
        state = one_round(decoder, TARGET.params, params, rules, state)
        side = state.drafter.then
        cache = poison(side.own)
        then = dataclasses.replace(side, own=cache)
        drafter = dataclasses.replace(state.drafter, then=then)
        state = dataclasses.replace(state, drafter=drafter)
        known = cache.length
        check_cache(MODEL, NEAR, state.tokens, known, cache)
        np.testing.assert_array_equal(known, side.seen - 2)
        wanted = np.asarray(state.drafter.wanted)
        np.testing.assert_array_equal(
            np.asarray(side.seen)[wanted], np.asarray(state.length)[wanted]
        )
        lags |= {*np.asarray(before.length - before.drafter.then.seen)[wanted].tolist()}
        asked.append(wanted[running])
    asked = np.concatenate(asked)
    assert asked.any() and not asked.all()
    assert max(lags) > GAMMA + 1, "it never had more than one pass to catch up on"


def test_no_pass_of_the_model_where_every_row_is_found():
    model = _Counting(8, order=2)
    params = model.init(jax.random.key(3))
    bound, params = pair(model, params).bind(TARGET, 16)
    found, unknown = [1, 2, 3, 1, 2], [1, 2, 3, 4, 5]

    @jax.jit
    def propose(params, rows):
        state = bound.init(params, rows.tokens[:, :8], rows.length, 16, None)
        return bound.propose(params, row_keys(jnp.arange(2)), state, rows)[0]

    for texts, passes in (
        ([found, found], 0),
        ([found, unknown], GAMMA),
        ([unknown, unknown], GAMMA),
    ):
        proposal = jax.block_until_ready(propose(params, context(texts)))
        jax.effects_barrier()
        assert len(model.passes) - 1 == passes  # without the prompts
        model.passes.clear()
        for row, text in enumerate(texts):
            q = np.exp(proposal.log_q[row])
            assert int(proposal.num_drafted[row]) == GAMMA
            if text is found:
                assert proposal.tokens[row].tolist() == [3, 1, 2]
                assert (q.max(-1) == 1).all()
            else:
                assert (q.max(-1) < 1).all()
    running = jnp.array([True, False])
    ended = dataclasses.replace(context([found, unknown]), running=running)
    proposal = jax.block_until_ready(propose(params, ended))
    jax.effects_barrier()
    assert len(model.passes) == 1 and proposal.num_drafted.tolist() == [GAMMA, 0]
    model.passes.clear()


@pytest.mark.full
def test_a_model_that_does_not_catch_up_would_be_seen(monkeypatch):
    """The negative control."""
    monkeypatch.setattr(
        TwoModel, "catch_up", lambda self, params, state, context: state
    )
    decoder, params, rules, state = start(pair(), Sampling(1.0), new_tokens=39)
    one_round = jax.jit(lambda *args: decoder.round(*args))
    with pytest.raises(AssertionError, match="differ from a fresh prefill"):
        while (np.asarray(state.finish) == 0).any():
            state = one_round(TARGET.params, params, rules, state)
            cache = state.drafter.then.own
            check_cache(MODEL, NEAR, state.tokens, cache.length, cache)


@pytest.mark.full
def test_greedy_output_is_the_targets():
    greedy = Sampling(temperature=0.0)
    out = generate(TARGET, PROMPTS, drafter=pair(), sampling=greedy, max_new_tokens=40)
    assert out.tokens == [
        greedy_reference(MODEL, TARGET.params, prompt, 40) for prompt in PROMPTS
    ]


@pytest.mark.full
def test_the_target_itself_behind_a_look_up_is_never_wrong():
    """Acceptance of the model's own drafts is 1 however long it was left out."""
    drafter = pair(params=TARGET.params)
    decoder, params, rules, state = start(drafter, Sampling(1.0))
    one_round = jax.jit(Decoder.round, static_argnums=0)
    while (np.asarray(state.finish) == 0).any():
        running, before = np.asarray(state.finish) == 0, state.stats.accepted
        state = one_round(decoder, TARGET.params, params, rules, state)
        accepted = np.asarray(state.stats.accepted - before)
        own = np.asarray(state.drafter.wanted) & running & (state.finish == 0)
        assert (accepted[own] == GAMMA).all()


class _NoCatchUp:
    gamma = GAMMA


@pytest.mark.parametrize(
    "first,then,words",
    [
        (PromptLookup(3), PromptLookup(4), "same gamma, got 3 and 4"),
        (Lookahead(), PromptLookup(4), "but first, a Lookahead, drafts a tree"),
        (PromptLookup(3), _NoCatchUp(), "but then, a _NoCatchUp, cannot catch up"),
    ],
)
def test_pairs_that_cannot_work_are_refused(first, then, words):
    with pytest.raises(ValueError, match=words):
        Fallback(first, then)
