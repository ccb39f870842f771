"""Greedy output is that of the uncached target, whoever drafts, wherever it ends."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import drafters, generate
from specjax.core import Checkpoint, Sampling
from specjax.testing import Scripted, greedy_reference, reference_logits
from tests.decoding.conftest import sharp, small_model
from tests.marks import sampled

GREEDY = Sampling(temperature=0.0)


def cut_at(tokens, eos, limit):
    """What decoding should give of a reference that goes on for ever."""
    tokens = tokens[:limit]
    ends = [i for i, token in enumerate(tokens) if token in eos]
    return tokens[: ends[0] + 1] if ends else tokens


def scripts(prompts, greedy):
    texts = np.zeros((len(prompts), 64), np.int32)
    for row, (prompt, text) in enumerate(zip(prompts, greedy, strict=True)):
        joined = [*prompt, *text]
        texts[row, : len(joined)] = joined
    return texts


def test_the_reference_is_worth_comparing_with(greedy):
    """Not one token for ever, not the same text for all."""
    assert all(len(set(text[:24])) >= 4 for text in greedy)
    assert len({tuple(text) for text in greedy}) == len(greedy)


def test_plain_decoding(target, prompts, greedy):
    out = generate(target, prompts, sampling=GREEDY, max_new_tokens=24)
    assert out.tokens == [text[:24] for text in greedy]
    assert out.finish_reasons == ["length"] * len(prompts)
    assert out.stats.block_efficiency == 1.0


@pytest.mark.parametrize("gamma", sampled(range(1, 9), 1, 4))
def test_a_random_draft_and_the_target_itself(target, draft, prompts, greedy, gamma):
    """https://github.com/huggingface/transformers/issues/30042"""
    for model in (draft, target):
        out = generate(
            target,
            prompts,
            drafter=drafters.TwoModel(model, gamma=gamma),
            sampling=GREEDY,
            max_new_tokens=24,
        )
        assert out.tokens == [text[:24] for text in greedy]
        assert (np.asarray(out.stats.emitted) == 24).all()
    # The last of the two: the target drafts for itself.
    assert out.stats.acceptance_rate == 1.0
    assert (np.asarray(out.stats.rounds) == -(-24 // (gamma + 1))).all()


@pytest.mark.parametrize("gamma", sampled([1, 3, 8], 3))
def test_a_draft_that_is_right_k_times_of_gamma(target, prompts, greedy, gamma):
    """https://github.com/huggingface/transformers/issues/30042"""
    texts, rows = scripts(prompts, greedy), np.arange(len(prompts))
    for shift in range(0, gamma + 1, len(prompts)):
        right = (rows + shift) % (gamma + 1)
        out = generate(
            target,
            prompts,
            drafter=Scripted(gamma, texts, right),
            sampling=GREEDY,
            max_new_tokens=24,
        )
        assert out.tokens == [text[:24] for text in greedy]
        rounds = -(-24 // (right + 1))  # right drafts and a correction each
        np.testing.assert_array_equal(out.stats.rounds, rounds)
    # Now each row goes through all counts, one round after the other.
    out = generate(
        target,
        prompts,
        drafter=Scripted(gamma, texts, -1),
        sampling=GREEDY,
        max_new_tokens=24,
    )
    assert out.tokens == [text[:24] for text in greedy]


def test_end_of_text_at_every_offset_of_the_block(target, prompts, greedy):
    """https://github.com/huggingface/transformers/issues/47912"""
    gamma = 8
    drafter = drafters.TwoModel(target, gamma=gamma)  # all drafts are accepted
    for step in range(gamma + 2):
        eos = [greedy[3][step]]
        out = generate(
            target,
            prompts,
            drafter=drafter,
            sampling=GREEDY,
            max_new_tokens=24,
            eos_token_ids=eos,
        )
        expected = [cut_at(text, eos, 24) for text in greedy]
        assert out.tokens == expected
        ended = [row[-1] in eos for row in expected]
        assert out.finish_reasons == ["eos" if end else "length" for end in ended]
        np.testing.assert_array_equal(out.stats.emitted, [len(r) for r in expected])
        assert ended[3]


def test_end_of_text_in_one_row_only_and_from_a_list(target, prompts, greedy):
    """https://github.com/huggingface/transformers/issues/47912"""
    others = {t for row in (*greedy[:4], *greedy[5:]) for t in row[:24]}
    own = [t for t in dict.fromkeys(greedy[4][:24]) if t not in others]
    unused = [t for t in range(64) if t not in others and t not in greedy[4]]
    for eos in ([own[0]], [unused[0], own[0], greedy[2][5]], unused[:2]):
        out = generate(
            target,
            prompts,
            drafter=drafters.TwoModel(target, gamma=8),
            sampling=GREEDY,
            max_new_tokens=24,
            eos_token_ids=eos,
        )
        assert out.tokens == [cut_at(text, eos, 24) for text in greedy]
    assert set(out.finish_reasons) == {"length"}


def test_the_checkpoints_own_ids_are_the_default(target, prompts, greedy):
    eos = (greedy[0][3],)
    checkpoint = Checkpoint(target.model, target.params, eos_token_ids=eos)
    settings = dict(
        drafter=drafters.TwoModel(target, gamma=8), sampling=GREEDY, max_new_tokens=24
    )
    out = generate(checkpoint, prompts, **settings)
    assert out.tokens == [cut_at(text, eos, 24) for text in greedy]
    out = generate(checkpoint, prompts, eos_token_ids=[], **settings)
    assert out.tokens == [text[:24] for text in greedy]


def test_prompt_lookup_emits_exactly_what_was_asked_for(target, greedy):
    """https://github.com/huggingface/transformers/pull/47195"""
    prompts = [[5, 6, 7, 5, 6, 7, 5, 6], [9], [1, 2], [3, 3, 3, 3], [8, 1, 8]]
    expected = [greedy_reference(target.model, target.params, p, 8) for p in prompts]
    for count in range(1, 7):  # gamma + 2
        out = generate(
            target,
            prompts,
            drafter=drafters.PromptLookup(gamma=4, max_ngram=3),
            sampling=GREEDY,
            max_new_tokens=count,
            eos_token_ids=[],
        )
        assert out.tokens == [text[:count] for text in expected]
    assert int(np.asarray(out.stats.drafted)[0]) > 0


@pytest.mark.parametrize("draft_size", sampled([60, 68], 60))
@pytest.mark.full
def test_vocabularies_of_different_sizes(target, prompts, greedy, draft_size):
    """https://github.com/vllm-project/vllm/issues/7252"""
    model = small_model(draft_size)
    out = generate(
        target,
        prompts,
        drafter=drafters.TwoModel(Checkpoint(model, sharp(model, 3)), gamma=3),
        sampling=GREEDY,
        max_new_tokens=24,
    )
    assert out.tokens == [text[:24] for text in greedy]


@pytest.mark.full
def test_a_sliding_window_equals_the_uncached_full_mask(prompts):
    """https://github.com/ml-explore/mlx-lm/issues/1914"""
    model = small_model(sliding_window=8)
    windowed = Checkpoint(model, sharp(model, 0))
    expected = [greedy_reference(model, windowed.params, p, 40) for p in prompts]
    drafter = Scripted(4, scripts(prompts, expected), -1)  # rejections of all counts
    out = generate(
        windowed, prompts, drafter=drafter, sampling=GREEDY, max_new_tokens=40
    )
    assert out.tokens == expected
    rates = out.stats.acceptance_by_position
    assert 0 < rates[0] < 1  # accepted and refused
    # The negative control: the window changes what comes out.
    full = small_model()
    assert expected[0] != greedy_reference(full, windowed.params, prompts[0], 40)


@pytest.mark.full
def test_bfloat16_differs_only_where_the_two_best_are_near(target, similar, prompts):
    """A pass of several tokens may round differently from one of a single token.

    https://github.com/vllm-project/vllm/issues/7627
    """

    def half(checkpoint):
        params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), checkpoint.params)
        return Checkpoint(checkpoint.model, params)

    target, similar = half(target), half(similar)
    settings = dict(sampling=GREEDY, max_new_tokens=24)
    plain = generate(target, prompts, **settings)
    drafter = drafters.TwoModel(similar, gamma=4)
    fast = generate(target, prompts, drafter=drafter, **settings)
    for prompt, one, other in zip(prompts, plain.tokens, fast.tokens, strict=True):
        differ = [i for i in range(24) if one[i] != other[i]]
        if differ:
            text = [*prompt, *one[: differ[0]]]
            best = np.sort(reference_logits(target.model, target.params, text)[-1])[-2:]
            # Two units in the last place of bfloat16's 8 bits, at the logit's size.
            margin, unit = best[1] - best[0], np.abs(best).max() * 2.0**-7
            assert margin <= 2 * unit, (margin, unit)
