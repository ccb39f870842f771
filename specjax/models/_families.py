"""The Hugging Face architectures that are known, and what sets each apart."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from specjax.core import Registry
from specjax.models._config import ModelConfig


@dataclasses.dataclass(frozen=True)
class Family:
    """What sets one Hugging Face architecture apart from the others.

    Attributes:
        model_type: the `model_type` of its config.json.
        defaults: what transformers assumes for keys that config.json leaves out.
        read: config.json -> the options of `ModelConfig` that differ by family.
        write: `ModelConfig` -> the keys that `read` looks at.
    """

    model_type: str
    defaults: Mapping[str, Any]
    read: Callable[[Mapping[str, Any]], dict[str, Any]]
    write: Callable[[ModelConfig], dict[str, Any]]


families: Registry[Family] = Registry("model architecture")


def _one_window(hf: Mapping[str, Any]) -> int | None:
    """The sliding window of a Qwen, which must be the same in all layers."""
    window = hf.get("sliding_window") if hf.get("use_sliding_window") else None
    num_layers, first = hf["num_hidden_layers"], hf.get("max_window_layers", 28)
    kinds = hf.get("layer_types") or [
        "sliding_attention" if window and i >= first else "full_attention"
        for i in range(num_layers)
    ]
    if len(set(kinds)) > 1:
        raise ValueError(
            "sliding windows that differ by layer are not implemented, got "
            f"layer_types with {', '.join(sorted(set(kinds)))}"
        )
    return window if kinds[0] == "sliding_attention" else None


def _window_to_hf(config: ModelConfig) -> dict[str, Any]:
    window = config.sliding_window
    kind = "full_attention" if window is None else "sliding_attention"
    return {
        "use_sliding_window": window is not None,
        "sliding_window": window,
        "max_window_layers": config.num_layers if window is None else 0,
        "layer_types": [kind] * config.num_layers,
    }


def _read_bias(hf: Mapping[str, Any]) -> dict[str, Any]:
    bias = bool(hf.get("attention_bias", False))
    return {"qkv_bias": bias, "out_bias": bias}


def _register(name: str, family: Family) -> None:
    families.register(name)(family)


_register(
    "LlamaForCausalLM",
    Family(
        "llama",
        {},
        lambda hf: {**_read_bias(hf), "mlp_bias": bool(hf.get("mlp_bias", False))},
        lambda c: {"attention_bias": c.qkv_bias, "mlp_bias": c.mlp_bias},
    ),
)
_register(
    "MistralForCausalLM",
    Family(
        "mistral",
        {
            "num_key_value_heads": 8,
            "max_position_embeddings": 4096 * 32,
            "sliding_window": 4096,
        },
        lambda hf: {"sliding_window": hf.get("sliding_window")},
        lambda c: {"sliding_window": c.sliding_window},
    ),
)
_register(
    "Qwen2ForCausalLM",
    Family(
        "qwen2",
        {"max_position_embeddings": 32768},
        lambda hf: {"qkv_bias": True, "sliding_window": _one_window(hf)},
        _window_to_hf,
    ),
)
_register(
    "Qwen3ForCausalLM",
    Family(
        "qwen3",
        {"head_dim": 128, "max_position_embeddings": 32768},
        lambda hf: {
            **_read_bias(hf),
            "qk_norm": True,
            "sliding_window": _one_window(hf),
        },
        lambda c: {"attention_bias": c.qkv_bias, **_window_to_hf(c)},
    ),
)
