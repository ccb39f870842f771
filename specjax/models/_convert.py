"""Hugging Face configurations and tensor names, to and from ours.

Everything here works on plain dicts and one numpy array at a time, so a loader never
holds more than one tensor twice.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from specjax.models._config import ModelConfig, freeze
from specjax.models._families import families
from specjax.models._head import HeadVocabulary, check_head, mark_head
from specjax.ops import rope_kinds

_COMMON = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "max_position_embeddings": 2048,
}


def architectures() -> tuple[str, ...]:
    """The Hugging Face architectures that `config_from_hf` reads."""
    return families.names()


def config_from_hf(
    hf: Mapping[str, Any],
    *,
    kernel_layout: str = "io",
    source: str = "config.json",
    head: HeadVocabulary | None = None,
) -> ModelConfig:
    """Reads the dict of a config.json.

    Args:
        hf: the dict, as transformers 4 or 5 writes it.
        kernel_layout: see `ModelConfig`.
        source: where it came from, for messages.
        head: of a reduced head its ids, which lie among the weights.

    Returns:
        The configuration.

    Raises:
        ValueError: an unknown architecture, a missing key, an option that this package
            would not honour, or a head that is not the one that the dict speaks of.
    """
    name = (hf.get("architectures") or ["(none given)"])[0]
    try:
        family = families.get(name)
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from None
    # An explicit null is not a missing key: only the latter takes the default.
    hf = {**_COMMON, **family.defaults, **hf}
    hf = {key: value for key, value in hf.items() if value is not None}
    _refuse_unsupported(hf, source)
    head = check_head(hf, head, source)
    try:
        options = family.read(hf)
        num_heads = hf["num_attention_heads"]
        theta, scaling = _rope_from_hf(hf, source)
        return ModelConfig(
            vocab_size=hf["vocab_size"],
            hidden_size=hf["hidden_size"],
            intermediate_size=hf["intermediate_size"],
            num_layers=hf["num_hidden_layers"],
            num_heads=num_heads,
            num_kv_heads=hf.get("num_key_value_heads", num_heads),
            head_dim=hf.get("head_dim") or hf["hidden_size"] // num_heads,
            max_position_embeddings=hf["max_position_embeddings"],
            rms_norm_eps=float(hf["rms_norm_eps"]),
            rope_theta=theta,
            rope_scaling=freeze(scaling),
            tie_word_embeddings=bool(hf["tie_word_embeddings"]),
            kernel_layout=kernel_layout,
            head=head,
            **options,
        )
    except KeyError as missing:
        raise ValueError(f"{source} needs the key {missing} for a {name}") from None


def config_to_hf(config: ModelConfig, architecture: str | None = None) -> dict:
    """Writes the dict of a config.json that transformers 4 and 5 read alike.

    They have no reduced heads: a configuration with one gets a `model_type` that they
    refuse.

    Args:
        config: the configuration.
        architecture: the one to prefer, where it can hold the configuration.

    Returns:
        The dict, `architectures` and `model_type` included.

    Raises:
        ValueError: no known architecture has this combination of options.
    """
    if config.head is not None:
        full = dataclasses.replace(config, head=None)
        return mark_head(config_to_hf(full, architecture), config.head)
    names = ("LlamaForCausalLM", *architectures())
    if architecture in architectures():
        names = (architecture, *names)
    for name in names:
        family = families.get(name)
        hf = {
            "architectures": [name],
            "model_type": family.model_type,
            "vocab_size": config.vocab_size,
            "hidden_size": config.hidden_size,
            "intermediate_size": config.intermediate_size,
            "num_hidden_layers": config.num_layers,
            "num_attention_heads": config.num_heads,
            "num_key_value_heads": config.num_kv_heads,
            "head_dim": config.head_dim,
            "hidden_act": "silu",
            "max_position_embeddings": config.max_position_embeddings,
            "rms_norm_eps": config.rms_norm_eps,
            "tie_word_embeddings": config.tie_word_embeddings,
            **_rope_to_hf(config),
            **family.write(config),
        }
        # transformers refuses a Llama whose width the heads do not divide.
        divides = config.hidden_size % config.num_heads == 0
        if name == "LlamaForCausalLM" and not divides:
            continue
        if _same_but_rope(config_from_hf(hf), config):
            return hf
    raise ValueError(
        "no Hugging Face architecture has the options "
        f"qkv_bias={config.qkv_bias}, out_bias={config.out_bias}, "
        f"mlp_bias={config.mlp_bias}, qk_norm={config.qk_norm}, "
        f"sliding_window={config.sliding_window} together; those known: "
        + ", ".join(architectures())
    )


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Hugging Face names of all parameters and their shapes there (`[out, in]`)."""
    c = config
    width, q, kv = c.hidden_size, c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    linears = {
        "self_attn.q_proj": (q, width, c.qkv_bias),
        "self_attn.k_proj": (kv, width, c.qkv_bias),
        "self_attn.v_proj": (kv, width, c.qkv_bias),
        "self_attn.o_proj": (width, q, c.out_bias),
        "mlp.gate_proj": (c.intermediate_size, width, c.mlp_bias),
        "mlp.up_proj": (c.intermediate_size, width, c.mlp_bias),
        "mlp.down_proj": (width, c.intermediate_size, c.mlp_bias),
    }
    norms = {"input_layernorm": width, "post_attention_layernorm": width}
    if c.qk_norm:
        norms |= {"self_attn.q_norm": c.head_dim, "self_attn.k_norm": c.head_dim}
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (c.vocab_size, width)
    }
    for layer in range(c.num_layers):
        prefix = f"model.layers.{layer}."
        for name, (rows, columns, bias) in linears.items():
            shapes[f"{prefix}{name}.weight"] = (rows, columns)
            if bias:
                shapes[f"{prefix}{name}.bias"] = (rows,)
        shapes |= {f"{prefix}{name}.weight": (size,) for name, size in norms.items()}
    shapes["model.norm.weight"] = (width,)
    if not c.tie_word_embeddings:
        shapes["lm_head.weight"] = (c.head_size, width)
    return shapes


def param_path(name: str) -> tuple[str, ...]:
    """Where a Hugging Face tensor lies in the parameter tree.

    Example:
        >>> param_path("model.layers.0.self_attn.q_proj.weight")
        ('layers_0', 'self_attn', 'q_proj', 'kernel')
        >>> param_path("model.norm.weight"), param_path("lm_head.weight")
        (('norm', 'scale'), ('lm_head',))
    """
    *path, leaf = name.removeprefix("model.").replace("layers.", "layers_").split(".")
    if path[-1] in ("embed_tokens", "lm_head"):
        return tuple(path)
    if leaf == "bias":
        return (*path, "bias")
    return (*path, "scale" if "norm" in path[-1] else "kernel")


def tensor_from_hf(name: str, array: np.ndarray, config: ModelConfig) -> np.ndarray:
    """A Hugging Face tensor in our layout (kernels transposed for `"io"`)."""
    is_kernel = param_path(name)[-1] == "kernel"
    return array.T if is_kernel and config.kernel_layout == "io" else array


def tensor_to_hf(name: str, array: np.ndarray, config: ModelConfig) -> np.ndarray:
    """The inverse of `tensor_from_hf`, contiguous."""
    return np.ascontiguousarray(tensor_from_hf(name, array, config))


def _refuse_unsupported(hf: Mapping[str, Any], source: str) -> None:
    """Raises for settings that would change the output and are not implemented."""
    if hf["hidden_act"] not in ("silu", "swish"):
        raise ValueError(
            f"{source}: hidden_act must be 'silu', got {hf['hidden_act']!r}, which is "
            "not implemented"
        )
    rope = hf.get("rope_parameters") or {}
    rotary = rope.get("partial_rotary_factor", hf.get("partial_rotary_factor", 1.0))
    if rotary != 1.0:
        raise ValueError(
            f"{source}: partial_rotary_factor must be 1, got {rotary}, which is not "
            "implemented"
        )
    if "quantization_config" in hf:
        method = hf["quantization_config"].get("quant_method", "unnamed")
        raise ValueError(
            f"{source}: the weights are quantised ({method}), expected plain float32, "
            "float16 or bfloat16; load the original checkpoint or a .gguf file"
        )


def _rope_from_hf(
    hf: Mapping[str, Any], source: str
) -> tuple[float, dict[str, Any] | None]:
    """The base and the scaling settings, from `rope_parameters` or `rope_scaling`."""
    settings = dict(hf.get("rope_scaling") or hf.get("rope_parameters") or {})
    if any(isinstance(value, Mapping) for value in settings.values()):
        raise ValueError(
            f"{source}: RoPE settings differ by layer ({', '.join(settings)}), which "
            "is not implemented"
        )
    theta = float(settings.pop("rope_theta", hf.get("rope_theta", 10000.0)))
    settings.pop("partial_rotary_factor", None)
    kind = settings.pop("type", "default")
    kind = settings.setdefault("rope_type", kind)
    if kind not in rope_kinds():
        raise ValueError(
            f"{source}: unknown rope_type {kind!r}; known: {', '.join(rope_kinds())}"
        )
    if kind == "default":
        return theta, None
    max_positions = hf["max_position_embeddings"]
    if kind == "dynamic":
        # As transformers does: dynamic scaling starts where the context ends.
        settings.pop("original_max_position_embeddings", None)
    elif kind in ("llama3", "yarn"):
        name = "original_max_position_embeddings"
        settings.setdefault(name, max_positions)
        settings[name] = hf.get(name, settings[name])
        if settings.get("factor") is None:
            settings["factor"] = max_positions / settings[name]
    return theta, settings


def _rope_to_hf(config: ModelConfig) -> dict[str, Any]:
    """Both spellings: `rope_parameters` (transformers 5) and the older pair."""
    scaling = {
        key: list(value) if isinstance(value, tuple) else value
        for key, value in config.rope_scaling
    }
    kind = scaling.setdefault("rope_type", scaling.pop("type", "default"))
    return {
        "rope_theta": config.rope_theta,
        "rope_scaling": None if kind == "default" else scaling,
        "rope_parameters": {**scaling, "rope_theta": config.rope_theta},
    }


def _same_but_rope(one: ModelConfig, other: ModelConfig) -> bool:
    """Whether two are equal; RoPE settings, written alike by all families, aside."""
    other = dataclasses.replace(other, kernel_layout=one.kernel_layout)
    return one == dataclasses.replace(other, rope_scaling=one.rope_scaling)
