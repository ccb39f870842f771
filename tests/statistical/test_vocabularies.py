"""Sampled output follows the target whatever the size of the draft's vocabulary."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import drafters
from specjax.core import Checkpoint, Sampling
from specjax.decoding import decode
from specjax.models import (
    CausalLM,
    HeadVocabulary,
    IntersectedModel,
    ModelConfig,
    VocabularyMap,
)
from specjax.ops import row_keys
from specjax.testing import TabularLM, chi_square, count_sequences, sequence_law

pytestmark = pytest.mark.full

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


def table(size):
    return TabularLM(size, order=1)


def reduced(size, ids):
    """A transformer whose head lacks ids; its last ones may be padding."""
    config = ModelConfig(
        vocab_size=size,
        hidden_size=8,
        intermediate_size=8,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=8,
        tie_word_embeddings=False,
        head=HeadVocabulary(ids),
    )
    return CausalLM(config)


DRAFTS = {  # and the ids that it can write
    "smaller": (table(3), [0, 1, 2]),
    "larger": (table(5), [0, 1, 2, 3]),
    "reduced head": (reduced(4, [0, 2]), [0, 2]),
    "reduced and padded": (reduced(7, [1, 2, 5]), [1, 2]),
    "another tokeniser": (
        IntersectedModel(table(5), VocabularyMap([4, -1, 2, 0], [4, 3, 2, 0])),
        [0, 2, 3],
    ),
}


@pytest.mark.parametrize("name", DRAFTS)
def test_another_draft_vocabulary_is_lossless(name):
    """https://github.com/vllm-project/vllm/issues/7252

    The control: a target without ids that the draft lacks is told apart.
    """
    model, ids = DRAFTS[name]
    draft = Checkpoint(model, model.init(jax.random.key(3)))
    drafter, drafter_params = drafters.TwoModel(draft, gamma=2).bind(TARGET, 4)
    rows = tokens(drafter, TARGET.params, drafter_params, row_keys(jnp.arange(ROWS)))
    counts = count_sequences(np.asarray(rows), 4)
    law = sequence_law(MODEL, TARGET.params, PROMPT, 2, Sampling(1.0))
    assert chi_square(counts, law) > 1e-3
    lost = [3] if len(ids) == 4 else [i for i in range(4) if i not in ids]
    masked = {"table": TARGET.params["table"].at[..., jnp.array(lost)].set(-jnp.inf)}
    masked_law = sequence_law(MODEL, masked, PROMPT, 2, Sampling(1.0))
    assert chi_square(counts, masked_law) < 1e-6
