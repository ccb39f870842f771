"""Drafters that need no training, on a transformer: tokens, rows and caches."""

import functools

import jax
import numpy as np
import pytest

from specjax import drafters, generate
from specjax.core import KVCache, Sampling
from specjax.testing import check_cache, poison
from tests.decoding.test_greedy_equality import cut_at
from tests.decoding.test_trees import start

pytestmark = pytest.mark.full
GREEDY, NEW = Sampling(temperature=0.0), 24


def fallback(draft):
    lookup = drafters.PromptLookup(gamma=3, max_ngram=2)
    return drafters.Fallback(lookup, drafters.TwoModel(draft, gamma=3))


MAKE = {
    "early exit": lambda draft: drafters.SelfSpeculative(early_exit=1, gamma=3),
    "lookahead": lambda draft: drafters.Lookahead(window=4, level=4, guesses=3),
    "fallback": fallback,
}
each = pytest.mark.parametrize("name", MAKE)


@each
def test_tokens_are_the_targets_and_end_where_they_should(
    target, similar, prompts, greedy, name
):
    """Prompts of one token and more, and ends of text at many places.

    https://github.com/huggingface/transformers/issues/30042
    """
    drafter = MAKE[name](similar)
    settings = dict(drafter=drafter, sampling=GREEDY, max_new_tokens=NEW)
    out = generate(target, prompts, **settings)
    assert out.tokens == [text[:NEW] for text in greedy]
    assert out.stats.drafted.sum() > 0
    for step in range(5):
        eos = [text[step] for text in greedy[::2]]
        out = generate(target, prompts, eos_token_ids=eos, **settings)
        assert out.tokens == [cut_at(text, eos, NEW) for text in greedy]


@each
def test_each_row_of_a_ragged_batch_is_its_solo_run(target, similar, prompts, name):
    """https://github.com/huggingface/transformers/issues/32165"""
    drafter, limits = MAKE[name](similar), [24, 20, 16, 12, 24, 20, 16, 12, 24]
    settings = dict(drafter=drafter, sampling=Sampling(0.8))
    batch = generate(
        target, prompts, max_new_tokens=limits, seed=list(range(9)), **settings
    )
    for row in (0, 8):
        solo = generate(
            target,
            [prompts[row]],
            max_new_tokens=limits[row],
            seed=[row],
            **settings,
        )
        assert solo.tokens[0] == batch.tokens[row]


@functools.partial(jax.jit, static_argnums=0)
def _poisoned_round(decoder, params, drafter_params, rules, state):
    state = decoder.round(params, drafter_params, rules, state)
    return state.__class__(**{**vars(state), "cache": poison(state.cache)})


@each
def test_the_targets_cache_equals_a_fresh_prefill_after_every_round(
    target, similar, prompts, name
):
    """https://github.com/lablup/mlxcel/pull/1002"""
    decoder, params, drafter_params, rules, state = start(
        target, MAKE[name](similar), prompts, new_tokens=30, sampling=Sampling(0.8)
    )
    while (np.asarray(state.finish) == 0).any():
        state = _poisoned_round(decoder, params, drafter_params, rules, state)
        there = KVCache(
            tuple(x[:, :, :64] for x in state.cache.keys),
            tuple(x[:, :, :64] for x in state.cache.values),
            state.cache.length,
        )
        check_cache(target.model, params, state.tokens, state.length - 1, there)
        assert np.isfinite(np.asarray(state.log_probs)).all()


@each
def test_nothing_is_compiled_again(target, similar, prompts, caplog, name):
    """https://github.com/sgl-project/sglang-jax/pull/1188"""
    drafter = MAKE[name](similar)

    def call(number):
        return generate(
            target,
            [prompt[: number % 3 + 1] for prompt in prompts],
            drafter=drafter,
            sampling=Sampling(0.3 * number),
            max_new_tokens=40 - number,
            seed=number,
        )

    call(0)
    with jax.log_compiles(), caplog.at_level("WARNING"):
        rounds = sum(int(call(n).stats.rounds.max()) for n in range(1, 5))
    assert [r for r in caplog.messages if "Compiling" in r] == [] and rounds >= 40
