"""Tiny models with sharp laws, so that a wrong mask or direction shows."""

import types

import jax
import numpy as np
import pytest

from specjax import distill, divergences
from specjax.models import CausalLM, ModelConfig

VOCAB = 13


def language_model(vocab_size=VOCAB, num_layers=1, width=8, layout="io", tied=True):
    return CausalLM(
        ModelConfig(
            vocab_size=vocab_size,
            hidden_size=width,
            intermediate_size=2 * width,
            num_layers=num_layers,
            num_heads=2,
            num_kv_heads=1,
            head_dim=4,
            max_position_embeddings=64,
            kernel_layout=layout,
            tie_word_embeddings=tied,
        )
    )


def sharp(model, seed, scale=12.0):
    """Parameters whose next-token laws are far from uniform, and from each other."""
    params = jax.jit(model.init)(jax.random.key(seed))
    return jax.tree.map(lambda x: x * scale if x.ndim == 2 else x, params)


def corpus(rows=4, width=20, seed=0, vocab_size=VOCAB):
    return np.random.default_rng(seed).integers(0, vocab_size, (rows, width))


@pytest.fixture(scope="session")
def toys():
    draft, target = language_model(), language_model(num_layers=2, width=12)
    return types.SimpleNamespace(
        draft=draft,
        target=target,
        draft_params=sharp(draft, 0),
        target_params=sharp(target, 1),
        language_model=language_model,
        sharp=sharp,
        corpus=corpus,
        vocab=VOCAB,
        adam=distill.make_optimizer("adamw", learning_rate=1e-2),
        kl=distill.Distill(divergences.resolve("forward_kl")),
    )


@pytest.fixture
def step_of(toys):
    """A train step of the toy draft and target; keyword arguments replace fields."""

    def make(**fields):
        settings = dict(
            student=toys.draft,
            objective=toys.kl,
            optimizer=toys.adam,
            teacher=toys.target,
        )
        return distill.TrainStep(**(settings | fields))

    return make
