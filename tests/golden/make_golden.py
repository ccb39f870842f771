"""Writes the golden values of this folder with transformers on torch.

Run `python tests/golden/make_golden.py` (extra `parity`); made with transformers 5.24
and torch 2.13. The default tests read what it wrote and need neither.

    models/NAME/        a tiny random model as `save_pretrained` writes it
    logits.safetensors  NAME -> its logits [64, V] in float32, and "tokens" [64]
    rope.json           NAME -> its settings, and the cos, sin and inverse frequencies
"""

import copy
import json
import shutil
from pathlib import Path

import torch
import transformers as tf
from safetensors.torch import save_file
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

HERE = Path(__file__).parent
NUM_TOKENS = 64
TINY = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
_YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "rope_theta": 10000.0,
}
# name -> (configuration class, options, dtype on disk)
MODELS = {
    "llama_mha": (tf.LlamaConfig, {"num_key_value_heads": 4}, torch.float32),
    "llama_gqa": (tf.LlamaConfig, {}, torch.float16),
    "llama_mqa": (tf.LlamaConfig, {"num_key_value_heads": 1}, torch.bfloat16),
    "llama_untied": (tf.LlamaConfig, {"tie_word_embeddings": False}, torch.float16),
    "llama_bias": (
        tf.LlamaConfig,
        {"attention_bias": True, "mlp_bias": True},
        torch.float16,
    ),
    "llama_head_dim": (tf.LlamaConfig, {"head_dim": 16}, torch.float16),
    "mistral_window": (tf.MistralConfig, {"sliding_window": 8}, torch.bfloat16),
    "qwen2": (tf.Qwen2Config, {}, torch.bfloat16),
    "qwen3": (tf.Qwen3Config, {"head_dim": 16}, torch.bfloat16),
    "rope_linear": (
        tf.LlamaConfig,
        {
            "rope_parameters": {
                "rope_type": "linear",
                "factor": 4.0,
                "rope_theta": 1e4,
            }
        },
        torch.float16,
    ),
    "rope_dynamic": (
        tf.LlamaConfig,
        {
            "max_position_embeddings": 32,
            "rope_parameters": {
                "rope_type": "dynamic",
                "factor": 4.0,
                "rope_theta": 1e4,
            },
        },
        torch.float16,
    ),
    "rope_yarn": (tf.LlamaConfig, {"rope_parameters": _YARN}, torch.float16),
    "rope_yarn_factor": (
        tf.LlamaConfig,
        {"rope_parameters": {**_YARN, "attention_factor": 0.8}},
        torch.float16,
    ),
    "rope_llama3": (
        tf.LlamaConfig,
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 16,
                "rope_theta": 1e4,
            }
        },
        torch.float16,
    ),
}
ROPES = {
    "default": {"rope_type": "default", "rope_theta": 1e4},
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
    "yarn": {**_YARN, "original_max_position_embeddings": 1024},
    "yarn_attention_factor": {
        **_YARN,
        "original_max_position_embeddings": 1024,
        "attention_factor": 1.3,
    },
    "yarn_mscale": {
        **_YARN,
        "original_max_position_embeddings": 1024,
        "mscale": 0.7,
        "mscale_all_dim": 1.1,
        "truncate": False,
    },
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 1024,
    },
}
POSITIONS = (0, 1, 1000, 8000)


class OneByOne(torch.nn.Module):
    """Rotates each position as if it came alone, in order.

    Only dynamic scaling sees a difference: transformers takes the longest position of a
    call for all of its tokens, specjax each token's own.
    """

    def __init__(self, rotary):
        super().__init__()
        self.rotary = rotary

    def forward(self, x, position_ids):
        parts = [self.rotary(x, column) for column in position_ids.split(1, dim=1)]
        return tuple(torch.cat(values, dim=1) for values in zip(*parts, strict=True))


def make_model(kind, options, dtype, seed):
    """A tiny model, its weights exact in `dtype` and so large that positions matter."""
    torch.manual_seed(seed)
    model = tf.AutoModelForCausalLM.from_config(
        kind(**{**TINY, **options}), attn_implementation="eager"
    )
    with torch.no_grad():
        for name, weight in model.named_parameters():
            random = torch.randn_like(weight)
            is_norm = name.endswith("norm.weight")
            value = 1 + 0.2 * random if is_norm else 0.25 * random
            # Not model.to(dtype): that would round the rotary frequencies too.
            weight.copy_(value.to(dtype))
    return model.eval()


def write_models():
    """Writes the models and their logits."""
    torch.manual_seed(0)
    tokens = torch.randint(0, TINY["vocab_size"], (1, NUM_TOKENS))
    logits = {"tokens": tokens[0].to(torch.int32)}
    for seed, (name, (kind, options, dtype)) in enumerate(MODELS.items()):
        model = make_model(kind, options, dtype, seed)
        folder = HERE / "models" / name
        shutil.rmtree(folder, ignore_errors=True)
        copy.deepcopy(model).to(dtype).save_pretrained(folder)
        if name == "rope_dynamic":
            model.model.rotary_emb = OneByOne(model.model.rotary_emb)
        with torch.no_grad():
            logits[name] = model(tokens).logits[0].contiguous()
    save_file(logits, HERE / "logits.safetensors")


def write_ropes():
    """Writes cos and sin as transformers rotates with them, one position a call."""
    found = {}
    for name, settings in ROPES.items():
        config = tf.LlamaConfig(
            hidden_size=128,
            num_attention_heads=2,
            max_position_embeddings=4096,
            rope_parameters=dict(settings),
        )
        rotary = OneByOne(LlamaRotaryEmbedding(config))
        frequencies = rotary.rotary.inv_freq.tolist()
        cos, sin = rotary(torch.zeros(1, 1), torch.tensor([POSITIONS]))
        half = config.head_dim // 2
        found[name] = {
            "rope_parameters": settings,
            "head_dim": config.head_dim,
            "max_position_embeddings": config.max_position_embeddings,
            "positions": POSITIONS,
            "inv_freq": frequencies,
            "cos": cos[0, :, :half].tolist(),
            "sin": sin[0, :, :half].tolist(),
        }
    text = json.dumps(found, default=float)
    (HERE / "rope.json").write_text(text + "\n")


if __name__ == "__main__":
    write_models()
    write_ropes()
