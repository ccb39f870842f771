"""A target and a draft of a few thousand parameters."""

import jax
import pytest

from specjax.core import Checkpoint
from specjax.models import CausalLM, ModelConfig


def checkpoint(seed: int, scale: float = 6.0) -> Checkpoint:
    config = ModelConfig(
        vocab_size=23,
        hidden_size=16,
        intermediate_size=16,
        num_layers=1,
        num_heads=2,
        num_kv_heads=1,
        head_dim=8,
        max_position_embeddings=64,
    )
    model = CausalLM(config)
    params = jax.tree.map(lambda x: x * scale, model.init(jax.random.key(seed)))
    return Checkpoint(model, params, config=config)


@pytest.fixture(scope="session")
def pair():
    return checkpoint(0), checkpoint(1)
