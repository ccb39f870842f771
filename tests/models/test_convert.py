"""Configurations and names, to and from Hugging Face."""

import dataclasses

import jax
import numpy as np
import pytest

from specjax.models import (
    CausalLM,
    ModelConfig,
    architectures,
    config_from_hf,
    config_to_hf,
    param_path,
    tensor_from_hf,
    tensor_shapes,
    tensor_to_hf,
)

HF = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 16,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


def test_defaults_are_those_of_transformers():
    config = config_from_hf(HF)
    assert config.head_dim == 4
    assert config.rms_norm_eps == 1e-6
    assert config.max_position_embeddings == 2048
    assert config.rope_theta == 10000.0
    assert not config.tie_word_embeddings
    mistral = config_from_hf({**HF, "architectures": ["MistralForCausalLM"]})
    assert mistral.sliding_window == 4096
    no_window = config_from_hf(
        {**HF, "architectures": ["MistralForCausalLM"], "sliding_window": None}
    )
    assert no_window.sliding_window is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["LlamaForCausalML"]}, "did you mean 'LlamaForCausalLM'"),
        ({"architectures": None}, "unknown model architecture"),
        ({"hidden_act": "gelu"}, "hidden_act must be 'silu', got 'gelu'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor must be 1"),
        ({"quantization_config": {"quant_method": "gptq"}}, r"quantised \(gptq\)"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "unknown rope_type 'longrope'"),
        ({"rope_scaling": {"type": "su"}}, "unknown rope_type 'su'; known: default"),
        ({"rope_scaling": {"type": "linear"}}, "needs the setting 'factor'"),
        ({"rope_parameters": {"full": {}, "sliding": {}}}, "differ by layer"),
        ({"vocab_size": None}, "needs the key 'vocab_size'"),
        ({"num_key_value_heads": 3}, "multiple of num_kv_heads"),
    ],
)
def test_what_would_not_be_honoured_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        config_from_hf({**HF, **changes})


@pytest.mark.parametrize("name", ["Qwen2ForCausalLM", "Qwen3ForCausalLM"])
def test_sliding_windows_of_qwen(name):
    hf = {**HF, "architectures": [name], "sliding_window": 4}
    assert config_from_hf(hf).sliding_window is None
    everywhere = {**hf, "use_sliding_window": True, "max_window_layers": 0}
    assert config_from_hf(everywhere).sliding_window == 4
    with pytest.raises(ValueError, match="differ by layer"):
        config_from_hf({**everywhere, "max_window_layers": 1})
    with pytest.raises(ValueError, match="differ by layer"):
        config_from_hf(
            {**everywhere, "layer_types": ["full_attention", "sliding_attention"]}
        )


@pytest.mark.parametrize("architecture", architectures())
@pytest.mark.parametrize("rope", [{}, {"rope_type": "linear", "factor": 2.0}])
def test_configurations_survive_the_round_trip(architecture, rope):
    hf = {**HF, "architectures": [architecture], "rope_scaling": rope or None}
    config = config_from_hf(hf)
    written = config_to_hf(config, architecture)
    assert written["architectures"] == [architecture]
    assert config_from_hf(written) == config


def sized(**options):
    sizes = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 12}
    heads = {"num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "head_dim": 4}
    return ModelConfig(**{**sizes, **heads, **options})


@pytest.mark.parametrize(
    ("options", "architecture"),
    [
        ({}, "LlamaForCausalLM"),
        ({"qkv_bias": True, "out_bias": True}, "LlamaForCausalLM"),
        ({"qkv_bias": True}, "Qwen2ForCausalLM"),
        ({"qk_norm": True}, "Qwen3ForCausalLM"),
        ({"sliding_window": 4}, "MistralForCausalLM"),
        # transformers refuses a Llama of width 8 with 3 heads, not a Mistral.
        ({"num_heads": 3, "num_kv_heads": 3}, "MistralForCausalLM"),
        (
            {"rope_scaling": (("factor", 2.0), ("type", "linear"))},
            "LlamaForCausalLM",
        ),
    ],
)
def test_an_architecture_is_found_for_the_options(options, architecture):
    assert config_to_hf(sized(**options))["architectures"] == [architecture]


def test_options_that_no_architecture_has_are_refused():
    with pytest.raises(ValueError, match=r"qk_norm=True.*together"):
        config_to_hf(sized(qk_norm=True, mlp_bias=True))


@pytest.mark.parametrize("layout", ["io", "oi"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"qkv_bias": True, "out_bias": True, "mlp_bias": True, "qk_norm": True},
        {"tie_word_embeddings": False},
    ],
)
def test_names_and_shapes_cover_the_parameter_tree(layout, options):
    config = sized(kernel_layout=layout, num_layers=2, **options)
    params = jax.eval_shape(CausalLM(config).init, jax.random.key(0))
    ours = {
        tuple(key.key for key in path): leaf.shape
        for path, leaf in jax.tree.leaves_with_path(params)
    }
    theirs = {
        param_path(name): tensor_from_hf(name, np.zeros(shape), config).shape
        for name, shape in tensor_shapes(config).items()
    }
    assert ours == theirs


@pytest.mark.parametrize("layout", ["io", "oi"])
def test_tensors_survive_the_round_trip_bit_for_bit(layout):
    config = dataclasses.replace(sized(), kernel_layout=layout)
    rng = np.random.default_rng(0)
    for name, shape in tensor_shapes(config).items():
        array = rng.normal(size=shape).astype(np.float32)
        back = tensor_to_hf(name, tensor_from_hf(name, array, config), config)
        assert back.tobytes() == array.tobytes()
