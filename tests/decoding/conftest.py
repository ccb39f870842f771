"""A small transformer as target, another as draft, and prompts of several lengths.

All tests here use batches of nine rows where they can, so that programs are shared.
"""

import jax
import numpy as np
import pytest

from specjax.core import Checkpoint
from specjax.models import CausalLM, ModelConfig
from specjax.testing import greedy_reference

ROWS = 9


def small_model(vocab_size=64, **options):
    settings = dict(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=64,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        max_position_embeddings=64,
        tie_word_embeddings=False,
    )
    return CausalLM(ModelConfig(**{**settings, **options}))


def sharp(model, seed):
    """Parameters large enough for laws that depend on the context."""
    params = jax.jit(model.init)(jax.random.key(seed))
    return jax.tree.map(lambda x: 12 * x if x.ndim == 2 else x, params)


@pytest.fixture(scope="session")
def target():
    return Checkpoint(small_model(), sharp(small_model(), 0))


@pytest.fixture(scope="session")
def draft():
    """A draft that knows nothing of the target."""
    return Checkpoint(small_model(), sharp(small_model(), 1))


@pytest.fixture(scope="session")
def similar(target):
    """A draft that is right often, not always: the target and some noise."""
    noise = sharp(target.model, 2)
    params = jax.tree.map(lambda a, b: a + 0.12 * b, target.params, noise)
    return Checkpoint(target.model, params)


@pytest.fixture(scope="session")
def prompts():
    """Lengths 1 to 9: up to gamma + 1 for a gamma of 8."""
    rng = np.random.default_rng(0)
    return [rng.integers(0, 64, n + 1).tolist() for n in range(ROWS)]


@pytest.fixture(scope="session")
def greedy(target, prompts):
    """The first 40 tokens behind each prompt, arg max, without a cache."""
    return [greedy_reference(target.model, target.params, p, 40) for p in prompts]
