"""Sampled output follows the target whatever the size of the draft's vocabulary."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import drafters
from specjax.core import Checkpoint, Sampling
from specjax.decoding import decode
from specjax.ops import row_keys
from specjax.testing import TabularLM, chi_square, count_sequences, sequence_law

ROWS, PROMPT = 6000, [1, 2]
MODEL = TabularLM(4, order=1)
TARGET = Checkpoint(MODEL, MODEL.init(jax.random.key(0)))


@functools.partial(jax.jit, static_argnums=0)
def tokens(drafter, params, drafter_params, keys):
    prompts = jnp.tile(jnp.array([PROMPT]), (ROWS, 1))
    out = decode(
        MODEL,
        params,
        prompts,
        jnp.full((ROWS,), 2),
        keys,
        max_new_tokens=2,
        sampling=Sampling(1.0),
        drafter=drafter,
        drafter_params=drafter_params,
    )
    return out.tokens[:, 2:]


@pytest.mark.parametrize("size", [3, 5])
def test_a_smaller_and_a_larger_draft_vocabulary_are_lossless(size):
    """https://github.com/vllm-project/vllm/issues/7252

    The control: a target without the ids that the draft lacks is told apart.
    """
    model = TabularLM(size, order=1)
    draft = Checkpoint(model, model.init(jax.random.key(3)))
    drafter, drafter_params = drafters.TwoModel(draft, gamma=2).bind(TARGET, 4)
    rows = tokens(drafter, TARGET.params, drafter_params, row_keys(jnp.arange(ROWS)))
    counts = count_sequences(np.asarray(rows), 4)
    law = sequence_law(MODEL, TARGET.params, PROMPT, 2, Sampling(1.0))
    assert chi_square(counts, law) > 1e-3
    masked = {"table": TARGET.params["table"].at[..., 3:].set(-jnp.inf)}
    masked_law = sequence_law(MODEL, masked, PROMPT, 2, Sampling(1.0))
    assert chi_square(counts, masked_law) < 1e-6
