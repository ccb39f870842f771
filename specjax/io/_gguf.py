"""Reads the configuration and the weights of a GGUF file, without torch."""

import dataclasses
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from specjax.core import near
from specjax.models import ModelConfig, freeze
from specjax.ops import rope_frequencies

# GGUF architecture -> what Hugging Face calls it.
_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ROPE_FACTORS = "rope_freqs.weight"


@dataclasses.dataclass(frozen=True, eq=False)
class GGUFFile:
    """An open GGUF file: its metadata as plain values, and its tensors.

    Attributes:
        path: the file.
        fields: metadata by key.
        tensors: the reader's tensors by GGUF name; their data stays on disk.
    """

    path: Path
    fields: Mapping[str, Any]
    tensors: Mapping[str, gguf.ReaderTensor]

    def get(self, key: str, default: Any = None) -> Any:
        """Metadata of the architecture, `get("block_count")` for `llama.block_count`.

        Raises:
            ValueError: it is absent and there is no default.
        """
        key = f"{self.fields['general.architecture']}.{key}"
        value = self.fields.get(key, default)
        if value is None:
            raise ValueError(
                f"{str(self.path)!r} lacks the metadata {key!r}, which its "
                "architecture needs; convert the model again with a current llama.cpp"
            )
        return value


def open_gguf(path: Path) -> GGUFFile:
    """Opens a GGUF file and reads its metadata.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is not GGUF, or truncated, or of an unknown architecture.
    """
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {str(path)!r}")
    with path.open("rb") as file:
        magic = file.read(4)
    if magic != b"GGUF":
        raise ValueError(f"{str(path)!r} is not a GGUF file: it begins with {magic!r}")
    try:
        reader = gguf.GGUFReader(path)
        fields = {
            key: field.contents()
            for key, field in reader.fields.items()
            if not key.startswith("GGUF.")
        }
    except (ValueError, IndexError, KeyError, struct.error, OverflowError) as error:
        raise ValueError(
            f"{str(path)!r} is not a whole GGUF file ({error}); download it again"
        ) from None
    architecture = fields.get("general.architecture")
    if architecture not in _ARCHITECTURES:
        raise ValueError(
            f"{str(path)!r}: unknown GGUF architecture {architecture!r}; "
            f"{near(str(architecture), _ARCHITECTURES)}"
        )
    return GGUFFile(path, fields, {t.name: t for t in reader.tensors})


def gguf_config(file: GGUFFile, kernel_layout: str) -> tuple[ModelConfig, str]:
    """The configuration, and the Hugging Face architecture it belongs to.

    Which biases and norms there are is read off the tensors: GGUF has no key for it.

    Raises:
        ValueError: missing metadata, or an option that is not implemented.
    """
    num_heads = _whole(file, "attention.head_count")
    num_kv_heads = _whole(file, "attention.head_count_kv", num_heads)
    width = _whole(file, "embedding_length")
    head_dim = _whole(file, "attention.key_length", width // num_heads)
    max_positions = _whole(file, "context_length")
    for key, expected in {
        "rope.dimension_count": head_dim,
        "attention.value_length": head_dim,
        "expert_count": 0,
    }.items():
        value = _whole(file, key, expected)
        if value != expected:
            raise ValueError(
                f"{str(file.path)!r}: {key} must be {expected}, got {value}, which is "
                "not implemented"
            )
    base = float(file.get("rope.freq_base", 10000.0))
    window = file.get("attention.sliding_window", 0)
    has = file.tensors.keys().__contains__
    if "token_embd.weight" not in file.tensors:
        raise ValueError(
            f"{str(file.path)!r} lacks the tensor 'token_embd.weight'; the file is "
            "incomplete"
        )
    config = ModelConfig(
        vocab_size=int(file.tensors["token_embd.weight"].shape[1]),
        hidden_size=width,
        intermediate_size=_whole(file, "feed_forward_length"),
        num_layers=_whole(file, "block_count"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position_embeddings=max_positions,
        # Stored as float32: 1e-5 comes back as 9.99999974e-06.
        rms_norm_eps=float(
            str(np.float32(file.get("attention.layer_norm_rms_epsilon")))
        ),
        rope_theta=base,
        rope_scaling=freeze(_rope_scaling(file, base, head_dim, max_positions)),
        tie_word_embeddings=not has("output.weight"),
        qkv_bias=has("blk.0.attn_q.bias"),
        out_bias=has("blk.0.attn_output.bias"),
        mlp_bias=has("blk.0.ffn_down.bias"),
        qk_norm=has("blk.0.attn_q_norm.weight"),
        sliding_window=int(window) if 0 < window < max_positions else None,
        kernel_layout=kernel_layout,
    )
    return config, _ARCHITECTURES[file.fields["general.architecture"]]


def gguf_tensors(
    file: GGUFFile, config: ModelConfig
) -> Iterator[tuple[str, np.ndarray]]:
    """Yields the tensors under Hugging Face names and in its layout.

    llama.cpp interleaves the two halves of each query and key head for the architecture
    "llama"; that is undone. Its other architectures keep the halves apart.
    """
    interleaved = file.fields["general.architecture"] == "llama"
    num_heads = {"attn_q": config.num_heads, "attn_k": config.num_kv_heads}
    for name, tensor in file.tensors.items():
        if name == _ROPE_FACTORS:
            continue
        part = name.split(".")[-2]
        array = _floats(tensor)
        if interleaved and part in num_heads:
            array = deinterleave(array, num_heads[part])
        yield _hf_name(name), array


def gguf_dtype(file: GGUFFile) -> np.dtype:
    """The dtype that holds the weights exactly: float32 where they are quantised."""
    return _floats_dtype(file.tensors["token_embd.weight"])


def deinterleave(array: np.ndarray, num_heads: int) -> np.ndarray:
    """Undoes llama.cpp's RoPE order: pairs `(0, H/2), (1, H/2+1)` back to halves."""
    half = array.shape[0] // num_heads // 2
    pairs = array.reshape(num_heads, half, 2, *array.shape[1:])
    return np.swapaxes(pairs, 1, 2).reshape(array.shape)


def _hf_name(name: str) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`."""
    *block, part, leaf = name.split(".")
    prefix = f"model.layers.{block[1]}." if block[:1] == ["blk"] else ""
    # An unknown name stays as it is: the shape check reports it.
    return f"{prefix}{_NAMES[part]}.{leaf}" if part in _NAMES else name


def _floats_dtype(tensor: gguf.ReaderTensor) -> np.dtype:
    kinds = gguf.GGMLQuantizationType
    if tensor.tensor_type == kinds.BF16:
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(np.float16 if tensor.tensor_type == kinds.F16 else np.float32)


def _floats(tensor: gguf.ReaderTensor) -> np.ndarray:
    """The tensor `[out, in]` as floats; a copy, for the reader maps the file."""
    try:
        array = gguf.dequantize(tensor.data, tensor.tensor_type)
    except NotImplementedError:
        raise ValueError(
            f"the tensor {tensor.name!r} is stored as {tensor.tensor_type.name}, which "
            "the gguf package cannot read; convert the model to Q8_0 or F16"
        ) from None
    array = np.array(array, dtype=_floats_dtype(tensor))
    return array.reshape(tuple(int(size) for size in tensor.shape[::-1]))


def _whole(file: GGUFFile, key: str, default: Any = None) -> int:
    """A whole number, which some converters write once a layer."""
    value = file.get(key, default)
    if isinstance(value, list):
        if len(set(value)) > 1:
            raise ValueError(
                f"{str(file.path)!r}: {key} differs by layer ({value}), which is not "
                "implemented"
            )
        value = value[0]
    return int(value)


def _rope_scaling(
    file: GGUFFile, base: float, head_dim: int, max_positions: int
) -> dict[str, Any] | None:
    if _ROPE_FACTORS in file.tensors:
        return _llama3_scaling(file, base, head_dim)
    kind = file.get("rope.scaling.type", "none")
    factor = float(file.get("rope.scaling.factor", file.get("rope.scale_linear", 1.0)))
    if kind == "none" or (kind == "linear" and factor == 1.0):
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind != "yarn":
        raise ValueError(
            f"{str(file.path)!r}: unknown rope.scaling.type {kind!r}; known: none, "
            "linear, yarn"
        )
    attention = float(file.get("rope.scaling.attn_factor", 1.0))
    original = file.get("rope.scaling.original_context_length", max_positions)
    return {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": int(original),
        # llama.cpp multiplies its factor with the paper's.
        "attention_factor": attention * (0.1 * np.log(factor).item() + 1.0)
        if factor > 1
        else attention,
        "beta_fast": float(file.get("rope.scaling.yarn_beta_fast", 32.0)),
        "beta_slow": float(file.get("rope.scaling.yarn_beta_slow", 1.0)),
    }


def _llama3_scaling(file: GGUFFile, base: float, head_dim: int) -> dict[str, Any]:
    """The llama3 settings behind the divisors that a GGUF file holds in their place.

    llama.cpp writes `default / scaled` frequencies. The largest is the factor; the
    other settings are those of Llama 3, which must give the same divisors.
    """
    divisors = _floats(file.tensors[_ROPE_FACTORS]).astype(np.float64)
    scaling = {
        "rope_type": "llama3",
        "factor": float(divisors.max()),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    sizes = {"head_dim": head_dim, "base": base, "max_positions": 8192}
    plain, _ = rope_frequencies(**sizes)
    scaled, _ = rope_frequencies(**sizes, scaling=scaling)
    if divisors.shape != plain.shape or not np.allclose(
        plain / scaled, divisors, rtol=1e-3
    ):
        raise ValueError(
            f"{str(file.path)!r}: its RoPE divisors ({_ROPE_FACTORS}) are not those of "
            "Llama 3, which is all that is implemented"
        )
    return scaling
