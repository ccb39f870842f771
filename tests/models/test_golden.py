"""Logits and rotations equal those of transformers, by values that a script wrote.

`tests/golden/make_golden.py` made them; nothing here needs torch.
"""

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

import specjax.io
from specjax.models import config_from_hf
from specjax.ops import apply_rope, rope_frequencies
from tests.marks import sampled

GOLDEN = Path(__file__).parents[1] / "golden"
LOGITS = load_file(GOLDEN / "logits.safetensors")
TOKENS = LOGITS.pop("tokens")
ROPES = json.loads((GOLDEN / "rope.json").read_text())


def load(name, **options):
    return specjax.io.load(GOLDEN / "models" / name, dtype="float32", **options)


@pytest.mark.parametrize(
    ("name", "kernel_layout"),
    [(name, "io") for name in sorted(LOGITS)]
    + [("llama_bias", "oi"), ("llama_head_dim", "oi")],
)
def test_logits_equal_those_of_transformers(name, kernel_layout):
    """Also https://github.com/AI-Hypercomputer/maxtext/pull/581 (halves of q and k),
    https://github.com/huggingface/transformers/pull/29557 (grouped heads)."""
    checkpoint = load(name, kernel_layout=kernel_layout)
    out, _ = checkpoint.model.apply(checkpoint.params, TOKENS[None])
    np.testing.assert_allclose(out.logits[0], LOGITS[name], atol=1e-4)


@pytest.mark.parametrize(
    "name", sampled(["mistral_window", "rope_dynamic"], "rope_dynamic")
)
@pytest.mark.full
def test_cached_logits_equal_those_of_transformers(name):
    """Three calls behind a cache, as decoding makes them."""
    checkpoint = load(name)
    cache, parts = checkpoint.model.init_cache(1, 64), []
    for part in np.split(TOKENS, [30, 33]):
        out, cache = checkpoint.model.apply(checkpoint.params, part[None], cache)
        parts.append(out.logits[0])
    np.testing.assert_allclose(np.concatenate(parts), LOGITS[name], atol=1e-4)


def test_the_cache_keeps_key_value_heads_only():
    """https://github.com/NVIDIA/TensorRT-LLM/issues/5912"""
    cache = load("llama_head_dim").model.init_cache(3, 10)
    assert cache.keys[0].shape == (3, 2, 10, 16)


def test_positions_matter_in_the_golden_models():
    """The negative control: without its RoPE scaling a model is far off."""
    plain, scaled = load("llama_gqa"), load("rope_yarn")
    out, _ = plain.model.apply(scaled.params, TOKENS[None])
    assert np.abs(out.logits[0] - LOGITS["rope_yarn"]).max() > 1


def rope_of(case, **changes):
    config = config_from_hf(
        {
            "architectures": ["LlamaForCausalLM"],
            "vocab_size": 8,
            "hidden_size": 2 * case["head_dim"],
            "intermediate_size": 8,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "max_position_embeddings": case["max_position_embeddings"],
            **changes,
        }
    )
    return config, rope_frequencies(
        head_dim=config.head_dim,
        base=config.rope_theta,
        max_positions=config.max_position_embeddings,
        scaling=dict(config.rope_scaling),
    )


@pytest.mark.parametrize("name", sorted(ROPES))
def test_rotations_equal_those_of_transformers_far_from_the_start(name):
    """https://github.com/Blaizzy/mlx-vlm/pull/1710 had no error at 0, much at 8192."""
    case = ROPES[name]
    config, (frequencies, scale) = rope_of(
        case, rope_parameters=case["rope_parameters"]
    )
    np.testing.assert_allclose(frequencies, case["inv_freq"], rtol=2e-6)
    half = case["head_dim"] // 2
    x = jnp.concatenate([jnp.ones(half), jnp.zeros(half)])
    positions = jnp.array([case["positions"]])
    x = jnp.broadcast_to(x, (1, positions.size, 1, 2 * half))
    dynamic = None
    if name == "dynamic":
        factor = dict(config.rope_scaling)["factor"]
        dynamic = (config.rope_theta, factor, config.max_position_embeddings)
    turned = apply_rope(x, positions, frequencies, scale, dynamic)[0, :, 0]
    # A float32 angle of 8000 is exact to 5e-4.
    expected = np.concatenate([case["cos"], case["sin"]], axis=-1)
    np.testing.assert_allclose(turned[:3], expected[:3], atol=1.5e-4)
    np.testing.assert_allclose(turned[3], expected[3], atol=2e-3)


@pytest.mark.parametrize("name", sorted(ROPES))
def test_old_and_new_spellings_of_rope_settings_agree(name):
    case = ROPES[name]
    settings = dict(case["rope_parameters"])
    new, _ = rope_of(case, rope_parameters=settings)
    theta = settings.pop("rope_theta")
    old, _ = rope_of(case, rope_theta=theta, rope_scaling=settings)
    settings["type"] = settings.pop("rope_type")
    older, _ = rope_of(case, rope_theta=theta, rope_scaling=settings)
    assert new == old == older


def test_yarn_takes_its_factor_from_the_two_lengths():
    case = ROPES["yarn"]
    settings = {**case["rope_parameters"], "factor": None}
    config, _ = rope_of(case, rope_parameters=settings)
    assert dict(config.rope_scaling)["factor"] == 4.0
