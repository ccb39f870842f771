"""Layers of the target as its own draft: same parameters, same cache, any law."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import drafters, generate
from specjax.core import Checkpoint, Context, Sampling
from specjax.drafters import SelfSpeculative
from specjax.models import take_layers
from specjax.ops import row_keys
from specjax.testing import TabularLM, greedy_reference, poison, reference_logits
from tests.decoding.conftest import sharp, small_model

MODEL = small_model(vocab_size=32, num_layers=3)
TARGET = Checkpoint(MODEL, sharp(MODEL, 0), config=MODEL.config)
PROMPTS = [[1, 2, 3, 4, 5, 6], [7], [8, 9, 8]]
GREEDY, WARM = Sampling(temperature=0.0), Sampling(0.8)


def decoded(drafter, sampling=GREEDY, new_tokens=16, **settings):
    return generate(
        TARGET,
        PROMPTS,
        drafter=drafter,
        sampling=sampling,
        max_new_tokens=new_tokens,
        **settings,
    )


@pytest.fixture(scope="module")
def greedy():
    return [greedy_reference(MODEL, TARGET.params, p, 16) for p in PROMPTS]


@pytest.mark.full
def test_the_whole_target_is_always_right(greedy):
    out = decoded(SelfSpeculative(early_exit=3, gamma=3))
    assert out.tokens == greedy
    assert out.stats.acceptance_rate == 1.0 and out.stats.block_efficiency == 4.0


@pytest.mark.full
@pytest.mark.parametrize("sampling", [Sampling(0.7, top_k=5, top_p=0.8)])
def test_the_whole_target_is_always_right_when_sampled(sampling):
    out = decoded(SelfSpeculative(layers=(0, 1, 2), gamma=3), sampling)
    assert out.stats.acceptance_rate == 1.0 and out.stats.block_efficiency == 4.0


@pytest.mark.full
@pytest.mark.parametrize(
    "chosen",
    [dict(layers=(0, 2)), dict(layers=[2], min_confidence=0.3)],
)
def test_greedy_output_is_the_targets_whatever_drafts(greedy, chosen):
    out = decoded(SelfSpeculative(**chosen, gamma=4))
    assert out.tokens == greedy
    assert out.stats.acceptance_rate < 1


def poisoned_context(tokens, length):
    """As between two rounds, with garbage behind the length."""
    cache = jax.jit(prefilled)(TARGET.params, tokens)
    return Context(tokens, length, WARM, poison(cache.with_length(length - 1)))


def prefilled(params, tokens):
    return MODEL.apply(params, tokens, MODEL.init_cache(len(tokens), 16))[1]


def proposed(drafter, context):
    bound, params = drafter.bind(TARGET, 16)
    keys = row_keys(jnp.arange(context.length.shape[0]))
    return jax.jit(bound.propose)(params, keys, (), context)[0]


@pytest.mark.full
def test_an_early_exit_drafts_as_its_layers_would_alone():
    """The target's cache is the draft's own, down to every draft and its law."""
    tokens = jnp.array([[1, 2, 3, 4, 5], [6, 7, 8, 0, 0], [9, 0, 0, 0, 0]])
    length = jnp.array([5, 3, 1])
    ours = proposed(SelfSpeculative(early_exit=2), poisoned_context(tokens, length))
    config, params = take_layers(MODEL.config, TARGET.params, (0, 1))
    alone = Checkpoint(type(MODEL)(config), params)
    two, params = drafters.TwoModel(alone).bind(TARGET, 16)

    @jax.jit
    def propose(params):
        state = two.init(params, tokens, length, 16, None)
        context = Context(tokens, length, WARM)
        return two.propose(params, row_keys(jnp.arange(3)), state, context)[0]

    theirs = propose(params)
    np.testing.assert_array_equal(ours.tokens, theirs.tokens)
    np.testing.assert_allclose(
        np.exp(ours.log_q), np.exp(theirs.log_q), atol=1e-5, rtol=1e-4
    )


@pytest.mark.full
def test_skipped_layers_meet_the_whole_targets_keys_and_values():
    """The first draft's law: layer 2 on layer 0's stream, with layer 2's own cache."""
    tokens, length = jnp.array([[1, 2, 3, 4, 5]]), jnp.array([5])
    context = poisoned_context(tokens, length)
    law = np.exp(proposed(SelfSpeculative(layers=(0, 2)), context).log_q[0, 0])
    # The control: a cache that the two layers would have written themselves.
    config, params = take_layers(MODEL.config, TARGET.params, (0, 2))
    alone = reference_logits(type(MODEL)(config), params, [1, 2, 3, 4, 5])
    own = jax.nn.softmax(alone[-1] / 0.8)
    assert np.abs(law - own).max() > 1e-3
    # With one token there is no cache to differ by.
    context = poisoned_context(tokens, jnp.array([1]))
    law = np.exp(proposed(SelfSpeculative(layers=(0, 2)), context).log_q[0, 0])
    own = jax.nn.softmax(alone[0] / 0.8)
    np.testing.assert_allclose(law, own, atol=1e-5)


def test_parameters_are_the_targets_own_arrays():
    _, params = SelfSpeculative(layers=(0, 2)).bind(TARGET, 16)
    target = TARGET.params
    assert params["embed_tokens"] is target["embed_tokens"]
    ours, theirs = (
        jax.tree.leaves(p) for p in (params["layers_1"], target["layers_2"])
    )
    assert all(a is b for a, b in zip(ours, theirs, strict=True))
    assert "layers_2" not in params


@pytest.mark.parametrize(
    "wrong,words",
    [
        (dict(), "either layers, .* or early_exit"),
        (dict(layers=(0,), early_exit=1), "either layers, .* or early_exit"),
        (dict(layers=2), "whole numbers, got layers=2"),
        (dict(layers=(0, 1.0)), "whole numbers, got layers="),
        (dict(early_exit="2"), "whole numbers, got early_exit='2'"),
        (dict(early_exit=True), "whole numbers, got early_exit=True"),
        (dict(early_exit=0), "early_exit must be 1..3"),
        (dict(early_exit=4), "early_exit must be 1..3"),
        (dict(layers=(0, 3)), r"some of 0..2, got \(0, 3\)"),
        (dict(layers=()), "some of 0..2"),
        (dict(layers=(1, 0)), "must ascend"),
        (dict(layers=(1, 1)), "must ascend"),
        (dict(early_exit=1, min_confidence=2.0), "min_confidence"),
    ],
)
def test_layers_that_the_target_lacks_are_refused(wrong, words):
    with pytest.raises(ValueError, match=words):
        SelfSpeculative(**wrong).bind(TARGET, 16)


def test_a_target_without_layers_is_refused():
    table = TabularLM(4)
    with pytest.raises(ValueError, match=r"must be a models.CausalLM, got a TabularLM"):
        SelfSpeculative(early_exit=1).bind(Checkpoint(table, {}), 16)
