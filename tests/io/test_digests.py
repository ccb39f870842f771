import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from specjax.core import Checkpoint
from specjax.io import model_digest, tokenizer_digest
from specjax.models import CausalLM, ModelConfig

CONFIG = ModelConfig(
    vocab_size=7,
    hidden_size=8,
    intermediate_size=8,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=4,
)


@pytest.fixture(scope="module")
def checkpoint():
    params = CausalLM(CONFIG).init(jax.random.key(0))
    return Checkpoint(CausalLM(CONFIG), params, config=CONFIG)


def with_params(checkpoint, change):
    return dataclasses.replace(
        checkpoint, params=jax.tree.map(change, checkpoint.params)
    )


def test_equal_models_have_equal_digests(checkpoint):
    same = with_params(checkpoint, lambda x: x + 0)
    assert model_digest(same) == model_digest(checkpoint)
    assert len(model_digest(checkpoint)) == 64


def test_the_layout_of_kernels_does_not_count(checkpoint):
    config = dataclasses.replace(CONFIG, kernel_layout="oi")

    def turn(path, x):
        return x.T if path[-1].key == "kernel" else x

    params = jax.tree_util.tree_map_with_path(turn, checkpoint.params)
    turned = Checkpoint(CausalLM(config), params, config=config)
    assert model_digest(turned) == model_digest(checkpoint)


def test_numbers_types_and_settings_count(checkpoint):
    config = dataclasses.replace(CONFIG, rope_theta=5e3)
    others = [
        with_params(checkpoint, lambda x: x * (1 + 1e-6)),
        with_params(checkpoint, lambda x: x.astype(jnp.bfloat16)),
        dataclasses.replace(checkpoint, config=config),
        dataclasses.replace(checkpoint, config=None),
    ]
    digests = {model_digest(c) for c in (checkpoint, *others)}
    assert len(digests) == 5


def test_a_tokenizer_is_its_map_from_token_to_id():
    def make(**vocab):
        return SimpleNamespace(get_vocab=lambda: vocab)

    assert tokenizer_digest(make(a=0, b=1)) == tokenizer_digest(make(b=1, a=0))
    assert tokenizer_digest(make(a=0, b=1)) != tokenizer_digest(make(a=1, b=0))
    assert tokenizer_digest(None) == ""
