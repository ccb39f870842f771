"""After every round both caches hold what a fresh prefill would write, and no more."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import drafters, verifiers
from specjax.core import Checkpoint, Sampling
from specjax.decoding import Decoder, decode, make_rules
from specjax.ops import row_keys
from specjax.testing import TabularLM, check_cache, poison, reference_logits
from tests.decoding.conftest import sharp, small_model
from tests.marks import sampled

GAMMA, CAPACITY = 4, 64


@functools.partial(jax.jit, static_argnums=0)
def poisoned_round(decoder, params, drafter_params, rules, state):
    """A round, then garbage in every slot that it left behind."""
    state = decoder.round(params, drafter_params, rules, state)
    drafter = state.drafter
    return state.__class__(
        **{
            **vars(state),
            "cache": poison(state.cache),
            "drafter": poison(drafter) if hasattr(drafter, "length") else drafter,
        }
    )


@functools.partial(jax.jit, static_argnums=(0, 5))
def start(decoder, params, drafter_params, prompts, length, capacity):
    return decoder.start(params, drafter_params, prompts, length, capacity)


def padded(prompts, width=9):
    rows = np.zeros((len(prompts), width), np.int32)
    for row, prompt in enumerate(prompts):
        rows[row, : len(prompt)] = prompt
    return jnp.asarray(rows), jnp.array([len(p) for p in prompts])


def job(
    target,
    draft,
    prompts,
    new_tokens,
    temperature=1.0,
    capacity=CAPACITY,
    verifier="rejection",
):
    drafter, drafter_params = drafters.TwoModel(draft, gamma=GAMMA).bind(
        target, capacity
    )
    decoder = Decoder(target.model, drafter, verifiers.get(verifier)())
    tokens, length = padded(prompts)
    rules = make_rules(
        target.model,
        length,
        row_keys(jnp.arange(len(prompts))),
        max_new_tokens=new_tokens,
        sampling=Sampling(jnp.float32(temperature)),
    )
    state = start(decoder, target.params, drafter_params, tokens, length, capacity)
    return decoder, target.params, drafter_params, rules, state


def test_both_caches_equal_a_fresh_prefill_after_every_round(target, similar, prompts):
    """https://github.com/lablup/mlxcel/pull/1002

    The draft's cache holds all but the last two tokens (see TwoModel).
    """
    decoder, params, drafter_params, rules, state = job(target, similar, prompts, 50)
    accepted_counts, lengths = set(), np.asarray(state.length)
    shapes = jax.tree.map(jnp.shape, state)
    for _ in range(60):
        if (np.asarray(state.finish) != 0).all():
            break
        before = np.asarray(state.stats.accepted)
        state = poisoned_round(decoder, params, drafter_params, rules, state)
        assert jax.tree.map(jnp.shape, state) == shapes
        running = np.asarray(state.finish) == 0
        accepted_counts |= set(
            (np.asarray(state.stats.accepted) - before)[running].tolist()
        )
        check_cache(target.model, params, state.tokens, state.length - 1, state.cache)
        check_cache(
            similar.model, drafter_params, state.tokens, state.length - 2, state.drafter
        )
        assert (np.asarray(state.length) >= lengths).all()
    assert (np.asarray(state.finish) != 0).all()
    assert accepted_counts == set(range(GAMMA + 1))
    assert np.isfinite(np.asarray(state.log_probs)).all()


def test_garbage_behind_the_length_changes_nothing(target, similar, prompts):
    """https://github.com/huggingface/transformers/issues/30312"""
    decoder, params, drafter_params, rules, state = job(target, similar, prompts, 20)
    clean = jax.jit(Decoder.run, static_argnums=0)(
        decoder, params, drafter_params, rules, state
    )
    while (np.asarray(state.finish) == 0).any():
        state = poisoned_round(decoder, params, drafter_params, rules, state)
    np.testing.assert_array_equal(state.length, clean.length)
    there = np.arange(CAPACITY)[None] < np.asarray(clean.length)[:, None]
    np.testing.assert_array_equal(
        np.where(there, state.tokens, 0), np.where(there, clean.tokens, 0)
    )


def test_a_slot_too_many_would_be_seen(target, similar, prompts):
    """The negative control: a rollback by one too few lets the garbage in."""
    decoder, params, drafter_params, rules, state = job(target, similar, prompts, 20)
    state = poisoned_round(decoder, params, drafter_params, rules, state)
    wrong = state.cache.with_length(state.length)
    with pytest.raises(AssertionError, match="differ from a fresh prefill"):
        check_cache(target.model, params, state.tokens, state.length, wrong)
    shifted = state.__class__(**{**vars(state), "cache": wrong})
    right = poisoned_round(decoder, params, drafter_params, rules, state)
    wrong = poisoned_round(decoder, params, drafter_params, rules, shifted)
    assert not np.array_equal(right.tokens, wrong.tokens)


@pytest.mark.full
def test_acceptance_does_not_drift_when_the_target_drafts_for_itself(prompts):
    """https://github.com/lablup/mlxcel/pull/1002"""
    model = small_model(max_position_embeddings=256)
    target = Checkpoint(model, sharp(model, 0))
    decoder, params, drafter_params, rules, state = job(
        target, target, prompts, 200, capacity=256
    )
    rounds = 200 // (GAMMA + 1)
    for number in range(rounds):
        state = poisoned_round(decoder, params, drafter_params, rules, state)
        assert (np.asarray(state.stats.accepted) == GAMMA * (number + 1)).all()
    assert (np.asarray(state.stats.emitted) == 200).all()


@pytest.mark.parametrize("temperature", sampled([0.0, 1.0], 1.0))
def test_a_cache_without_slack_keeps_its_last_slots(
    target, similar, prompts, temperature
):
    """https://github.com/jax-ml/jax/issues/9083

    The longest row ends at the last slot of a buffer of exactly prompt + new tokens.
    """
    tokens, length = padded(prompts)
    drafter, drafter_params = drafters.TwoModel(similar, gamma=6).bind(target, 64)
    out = _exact(
        target.model,
        drafter,
        target.params,
        drafter_params,
        tokens,
        length,
        Sampling(jnp.float32(temperature)),
    )
    assert out.tokens.shape[1] == 9 + 12
    np.testing.assert_array_equal(out.length, length + 12)
    for row in (0, 5, 8):
        start, end = int(length[row]), int(out.length[row])
        text = out.tokens[row, :end].tolist()
        raw = reference_logits(target.model, target.params, text)
        if temperature == 0:
            assert text[start:] == raw[start - 1 : end - 1].argmax(-1).tolist()
            continue
        log_p = np.asarray(jax.nn.log_softmax(raw, -1))
        expected = [log_p[i - 1, text[i]] for i in range(start, end)]
        np.testing.assert_allclose(out.log_probs[row, start:end], expected, atol=2e-5)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _exact(model, drafter, params, drafter_params, tokens, length, sampling):
    return decode(
        model,
        params,
        tokens,
        length,
        row_keys(jnp.arange(tokens.shape[0])),
        max_new_tokens=12,
        sampling=sampling,
        drafter=drafter,
        drafter_params=drafter_params,
    )


@pytest.mark.parametrize(
    "verifier",
    sampled(
        [name for name in verifiers.names() if verifiers.get(name).lossless],
        "rejection",
    ),
)
def test_a_table_that_reads_its_cache_alone_goes_through_all_counts(verifier):
    """The loop with a model whose logits are NaN as soon as a slot is wrong."""
    model = TabularLM(5, order=3)
    target = Checkpoint(model, model.init(jax.random.key(0)))
    draft = Checkpoint(model, model.init(jax.random.key(1)))
    prompts = [[1], [2, 3], [4, 0, 1], [0, 0, 0, 0]]
    decoder, params, drafter_params, rules, state = job(
        target, draft, prompts, 40, verifier=verifier
    )
    while (np.asarray(state.finish) == 0).any():
        state = poisoned_round(decoder, params, drafter_params, rules, state)
        check_cache(model, params, state.tokens, state.length - 1, state.cache)
        check_cache(model, params, state.tokens, state.length - 2, state.drafter)
    assert (np.asarray(state.stats.accepted_at).sum(0)[:3] > 0).all()
    assert np.isfinite(np.asarray(state.log_probs)).all()


@pytest.fixture(scope="module")
def prefix_logits(target):
    """The same five tokens, uncached and without padding."""
    tokens = [7, 3, 9, 1, 4]
    return tokens, reference_logits(target.model, target.params, tokens)


@pytest.mark.parametrize("pads", range(6))
def test_padding_on_the_left_with_positions_and_mask(target, prefix_logits, pads):
    """https://github.com/TransformerLensOrg/TransformerLens/issues/1609

    With and without a cache; a row of padding alone makes no NaN elsewhere.
    """
    tokens, expected = prefix_logits
    width = 10  # one shape for all: the rest is padding on the right
    row = [0] * pads + tokens + [0] * (width - 5 - pads)
    real = np.array([False] * pads + [True] * 5 + [False] * (width - 5 - pads))
    position = np.maximum(np.arange(width) - pads, 0)
    mask = np.tril(np.ones((width, width), bool)) & real[None, :]
    batch = jnp.array([row, [0] * width])
    masks = jnp.array([mask, np.zeros_like(mask)])
    positions = jnp.array([position, np.zeros_like(position)])
    cached, uncached = _both(target.model, target.params, batch, positions, masks)
    for logits in (cached, uncached):
        assert np.isfinite(logits).all()
        np.testing.assert_allclose(logits[0, pads : pads + 5], expected, atol=1e-5)
    if pads:  # the negative control: default positions shift every rotation
        wrong, _ = _both(
            target.model,
            target.params,
            batch,
            jnp.tile(jnp.arange(width)[None] * 2, (2, 1)),
            masks,
        )
        assert np.abs(wrong[0, pads : pads + 5] - expected).max() > 1e-2


@functools.partial(jax.jit, static_argnums=0)
def _both(model, params, tokens, positions, mask):
    cache = model.init_cache(tokens.shape[0], 12)
    settings = dict(positions=positions, mask=mask)
    cached = model.apply(params, tokens, cache, **settings)[0].logits
    return cached, model.apply(params, tokens, **settings)[0].logits


def test_right_padding_does_not_reach_the_real_tokens(target, prefix_logits):
    tokens, expected = prefix_logits
    for pads in range(6):
        row = tokens + [63] * pads + [0] * (5 - pads)
        logits = _plain(target.model, target.params, jnp.array([row]))
        np.testing.assert_allclose(logits[0, :5], expected, atol=1e-5)


_plain = jax.jit(
    lambda model, params, t: model.apply(params, t)[0].logits, static_argnums=0
)
