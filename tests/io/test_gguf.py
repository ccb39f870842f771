"""GGUF files: weights, configurations and tokenisers, without torch."""

from pathlib import Path

import gguf
import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from specjax.io import export, load, token_bytes
from specjax.models import config_from_hf

GOLDEN = Path(__file__).parents[1] / "golden"
LOGITS = load_file(GOLDEN / "logits.safetensors")
GGUF_NAMES = {
    "embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def permute(weights, n_head):
    """As llama.cpp's convert_hf_to_gguf.py does for its architecture "llama"."""
    shape = (n_head, 2, weights.shape[0] // n_head // 2, *weights.shape[1:])
    return weights.reshape(shape).swapaxes(1, 2).reshape(weights.shape)


def gguf_name(name):
    for theirs, ours in GGUF_NAMES.items():
        if theirs in name:
            layer = name.split(".")[2] if ".layers." in name else None
            prefix = "" if layer is None else f"blk.{layer}."
            return f"{prefix}{ours}.{name.rsplit('.', 1)[1]}"
    raise AssertionError(name)


def write_gguf(path, name, arch, extra=(), change=lambda tensors: None, quantise=None):
    """Writes a golden model as GGUF, as llama.cpp's converter would."""
    checkpoint = load(GOLDEN / "models" / name, dtype="float32")
    config = checkpoint.config
    tensors = load_file(GOLDEN / "models" / name / "model.safetensors")
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_theta)
    for method, *arguments in extra:
        getattr(writer, method)(*arguments)
    found = {}
    for hf_name, array in tensors.items():
        array = array.astype(np.float32)
        if arch == "llama" and ".q_proj" in hf_name:
            array = permute(array, config.num_heads)
        if arch == "llama" and ".k_proj" in hf_name:
            array = permute(array, config.num_kv_heads)
        found[gguf_name(hf_name)] = array
    change(found)
    for tensor_name, array in found.items():
        if quantise is not None and array.ndim == 2:
            packed = gguf.quantize(array, quantise)
            writer.add_tensor(tensor_name, packed, raw_dtype=quantise)
        else:
            writer.add_tensor(tensor_name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def logits_of(checkpoint):
    out, _ = checkpoint.model.apply(checkpoint.params, LOGITS["tokens"][None])
    return out.logits[0]


@pytest.mark.parametrize(
    ("name", "arch"),
    [
        ("llama_gqa", "llama"),
        ("llama_untied", "llama"),
        ("llama_bias", "llama"),
        ("llama_head_dim", "llama"),
        ("qwen2", "qwen2"),
        ("qwen3", "qwen3"),
    ],
)
@pytest.mark.full
def test_logits_equal_those_of_transformers(tmp_path, name, arch):
    """llama.cpp interleaves query and key heads for "llama" only."""
    checkpoint = load(write_gguf(tmp_path / "m.gguf", name, arch))
    original = load(GOLDEN / "models" / name)
    assert checkpoint.config == original.config
    jax.tree.map(np.testing.assert_array_equal, checkpoint.params, original.params)
    np.testing.assert_allclose(logits_of(checkpoint), LOGITS[name], atol=1e-4)
    assert checkpoint.metadata["architecture"] == original.metadata["architecture"]


def test_without_undoing_the_interleaving_the_logits_are_wrong(tmp_path):
    """The negative control of the test above."""

    def change(tensors):
        for name in tensors:
            if name.endswith("attn_q.weight"):
                tensors[name] = permute(tensors[name], 4)

    path = write_gguf(tmp_path / "m.gguf", "llama_gqa", "llama", change=change)
    assert np.abs(logits_of(load(path)) - LOGITS["llama_gqa"]).max() > 0.5


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0"])
def test_stored_kinds_are_read_and_dtype_is_obeyed(tmp_path, kind, monkeypatch):
    kind = gguf.GGMLQuantizationType[kind]

    def change(tensors):  # rows of a multiple of 32, as blocks need
        for name in [n for n in tensors if "ffn_down" in n]:
            tensors[name] = np.pad(tensors[name], ((0, 0), (0, 24)))
        for name in [n for n in tensors if "ffn_up" in n or "ffn_gate" in n]:
            tensors[name] = np.pad(tensors[name], ((0, 24), (0, 0)))

    wide = [("add_feed_forward_length", 64)]
    path = write_gguf(tmp_path / "m.gguf", "llama_gqa", "llama", wide, change, kind)
    logits = logits_of(load(path))
    exact = kind == gguf.GGMLQuantizationType.F16
    assert np.abs(logits - LOGITS["llama_gqa"]).mean() < (1e-4 if exact else 0.3)
    for dtype in ("float32", "bfloat16"):
        leaves = jax.tree.leaves(load(path, dtype=dtype).params)
        assert {str(leaf.dtype) for leaf in leaves} == {dtype}
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    own = {"F16": "float16", "BF16": "bfloat16", "Q8_0": "float32"}[kind.name]
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(load(path).params)} == {own}


def test_rope_scaling_is_read(tmp_path):
    linear = [
        ("add_rope_scaling_type", gguf.RopeScalingType.LINEAR),
        ("add_rope_scaling_factor", 4.0),
    ]
    path = write_gguf(tmp_path / "a.gguf", "rope_linear", "llama", linear)
    np.testing.assert_allclose(logits_of(load(path)), LOGITS["rope_linear"], atol=1e-4)

    yarn = [
        ("add_rope_scaling_type", gguf.RopeScalingType.YARN),
        ("add_rope_scaling_factor", 4.0),
        ("add_rope_scaling_orig_ctx_len", 16),
    ]
    path = write_gguf(tmp_path / "b.gguf", "rope_yarn", "llama", yarn)
    np.testing.assert_allclose(logits_of(load(path)), LOGITS["rope_yarn"], atol=1e-4)


def test_llama3_scaling_is_read_off_the_divisors(tmp_path):
    """llama.cpp keeps no settings, only default / scaled frequencies."""
    settings = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    base, half = 10000.0, 4
    plain = base ** -(np.arange(half) / half)
    wavelength = 2 * np.pi / plain
    smooth = np.clip((8192 / wavelength - 1) / 3, 0, 1)
    divisors = (1 / ((1 - smooth) / 8 + smooth)).astype(np.float32)

    def add(scale):
        return lambda tensors: tensors.update(
            {"rope_freqs.weight": (divisors * scale).astype(np.float32)}
        )

    # A base of 10,000 with heads of 8 reaches no wavelength that Llama 3 would scale.
    wide = [("add_rope_freq_base", 5e6)]
    plain = 5e6 ** -(np.arange(half) / half)
    smooth = np.clip((8192 / (2 * np.pi / plain) - 1) / 3, 0, 1)
    divisors = (1 / ((1 - smooth) / 8 + smooth)).astype(np.float32)
    assert divisors.max() == 8
    path = write_gguf(tmp_path / "a.gguf", "llama_gqa", "llama", wide, add(1))
    found = load(path).config
    hf = {"rope_theta": 5e6, "rope_scaling": settings}
    assert found.rope_scaling == config_from_hf({**HF, **hf}).rope_scaling
    path = write_gguf(
        tmp_path / "b.gguf", "llama_gqa", "llama", wide, add([1, 1, 2, 1])
    )
    with pytest.raises(ValueError, match="not those of Llama 3"):
        load(path)


HF = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 8,
    "hidden_size": 16,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}


@pytest.mark.parametrize(
    ("arch", "extra", "message"),
    [
        ("lama", [], "unknown GGUF architecture 'lama'; did you mean 'llama'"),
        ("llama", [("add_expert_count", 8)], "expert_count must be 0, got 8"),
        ("llama", [("add_rope_dimension_count", 4)], "rope.dimension_count must be 8"),
        ("llama", [("add_head_count_kv", [1, 2])], r"head_count_kv differs by layer"),
        (
            "llama",
            [("add_rope_scaling_type", gguf.RopeScalingType.LONGROPE)],
            "unknown rope.scaling.type 'longrope'; known: none, linear, yarn",
        ),
        ("llama", [("add_block_count", 3)], "lacks 9 of 29 tensors, the first is"),
    ],
)
def test_what_is_not_implemented_is_named(tmp_path, arch, extra, message):
    path = write_gguf(tmp_path / "m.gguf", "llama_gqa", arch, extra)
    with pytest.raises(ValueError, match=message):
        load(path)


def test_damaged_files_are_named(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", "llama_gqa", "llama")
    whole = path.read_bytes()
    for size in (20, 400, len(whole) // 2, len(whole) - 500):
        path.write_bytes(whole[:size])
        with pytest.raises(ValueError, match="is not a whole GGUF file"):
            load(path)
    path.write_bytes(b"nope" + whole[4:])
    with pytest.raises(ValueError, match=r"not a GGUF file: it begins with b'nope'"):
        load(path)


def test_a_missing_tensor_or_key_is_named(tmp_path):
    path = write_gguf(
        tmp_path / "m.gguf",
        "llama_gqa",
        "llama",
        change=lambda tensors: tensors.pop("output_norm.weight"),
    )
    with pytest.raises(ValueError, match=r"lacks 1 of 20 tensors.*'model.norm.weight'"):
        load(path)
    path = write_gguf(
        tmp_path / "n.gguf",
        "llama_gqa",
        "llama",
        change=lambda tensors: tensors.pop("token_embd.weight"),
    )
    with pytest.raises(ValueError, match=r"lacks the tensor 'token_embd.weight'"):
        load(path)
    writer = gguf.GGUFWriter(tmp_path / "o.gguf", "llama")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ValueError, match=r"metadata 'llama.embedding_length'"):
        load(tmp_path / "o.gguf")


def byte_level_metadata(tokenizer, pre, **more):
    """The metadata of a byte-level BPE, as llama.cpp's converter writes it."""
    import json

    model = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    kinds = [3 if token in ("<pad>", "<s>", "</s>") else 1 for token in tokens]
    tokens, kinds = [*tokens, "<tool>", "[PAD0]"], [*kinds, 4, 5]
    return [
        ("add_tokenizer_model", "gpt2"),
        ("add_tokenizer_pre", pre),
        ("add_token_list", tokens),
        ("add_token_types", kinds),
        ("add_token_merges", [" ".join(pair) for pair in model["merges"]]),
        ("add_bos_token_id", tokens.index("<s>")),
        ("add_eos_token_id", tokens.index("</s>")),
        ("add_pad_token_id", tokens.index("<pad>")),
        *((f"add_{key}", value) for key, value in more.items()),
    ]


def test_a_byte_level_tokenizer_is_built_from_the_metadata(tmp_path, tokenizer):
    template = "{% for m in messages %}<s>{{ m['content'] }}</s>{% endfor %}"
    extra = byte_level_metadata(
        tokenizer, "gpt-2", chat_template=template, add_bos_token=True
    )
    checkpoint = load(write_gguf(tmp_path / "m.gguf", "llama_gqa", "llama", extra))
    found = checkpoint.tokenizer
    assert checkpoint.eos_token_ids == (tokenizer.eos_token_id,)
    assert (found.bos_token, found.eos_token, found.pad_token) == (
        "<s>",
        "</s>",
        "<pad>",
    )
    for text in ["the cat  sat, it's\n\n 12 é 日本", " <s>the</s>"]:
        ids = found(text, add_special_tokens=False)["input_ids"]
        assert ids == tokenizer(text, add_special_tokens=False)["input_ids"]
        assert found.decode(ids) == text
        assert found(text)["input_ids"] == [found.bos_token_id, *ids]
    assert found.tokenize("the<tool>cat")[1] == "<tool>"
    assert found.decode(found("a <tool></s>")["input_ids"], skip_special_tokens=True)
    assert "[PAD0]" not in found.get_vocab()
    chat = found.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False)
    assert chat == "<s>x</s>"
    # And the whole of it survives an export.
    again = load(export(checkpoint, tmp_path / "out"))
    assert again.tokenizer.get_vocab() == found.get_vocab()
    assert again.tokenizer("the cat")["input_ids"] == found("the cat")["input_ids"]
    assert again.tokenizer.chat_template == template


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("gpt-2", ["a", "12345", " b", "\n\n", " c", "'", "LL"]),
        ("smollm", ["a", "1", "2", "3", "4", "5", " b", "\n\n", " c", "'", "LL"]),
        ("qwen2", ["a", "1", "2", "3", "4", "5", " b", "\n\n", " c", "'LL"]),
        ("llama-bpe", ["a", "123", "45", " b", "\n\n", " c", "'LL"]),
        ("default", ["a", "123", "45", " b", "\n\n", " c", "'", "LL"]),
    ],
)
def test_text_is_cut_as_the_metadata_says(tmp_path, tokenizer, pre, expected):
    extra = byte_level_metadata(tokenizer, pre)
    found = load(write_gguf(tmp_path / "m.gguf", "llama_gqa", "llama", extra)).tokenizer
    text = "a12345 b\n\n c'LL"
    pieces = found.backend_tokenizer.pre_tokenizer.pre_tokenize_str(text)
    assert [text[start:end] for _, (start, end) in pieces] == expected
    assert found.decode(found(text)["input_ids"]) == text


def test_unknown_tokenizers_are_named(tmp_path, tokenizer):
    extra = byte_level_metadata(tokenizer, "smollm3")
    path = write_gguf(tmp_path / "m.gguf", "llama_gqa", "llama", extra)
    with pytest.raises(ValueError, match="pre-tokeniser 'smollm3'; did you mean 'smol"):
        load(path)
    extra = [("add_tokenizer_model", "bert"), ("add_token_list", ["a"])]
    path = write_gguf(tmp_path / "n.gguf", "llama_gqa", "llama", extra)
    with pytest.raises(ValueError, match="unknown GGUF tokeniser model 'bert'"):
        load(path)


PIECES = ["▁", "t", "h", "e", "c", "a", "he", "the", "▁the", "at", "cat", "▁c", "▁cat"]


def sentencepiece_metadata(**more):
    bytes_ = [f"<0x{b:02X}>" for b in range(256)]
    tokens = ["<unk>", "<s>", "</s>", *bytes_, *PIECES]
    kinds = [2, 3, 3, *[6] * 256, *[1] * len(PIECES)]
    scores = [0.0] * 259 + [float(-i) for i in range(len(PIECES))]
    return [
        ("add_tokenizer_model", "llama"),
        ("add_token_list", tokens),
        ("add_token_types", kinds),
        ("add_token_scores", scores),
        ("add_bos_token_id", 1),
        ("add_eos_token_id", 2),
        ("add_unk_token_id", 0),
        *((f"add_{key}", value) for key, value in more.items()),
    ]


def test_a_sentencepiece_tokenizer_is_built_from_the_scores(tmp_path):
    extra = sentencepiece_metadata()
    found = load(write_gguf(tmp_path / "m.gguf", "llama_gqa", "llama", extra)).tokenizer
    assert found.tokenize("the cat") == ["▁the", "▁cat"]
    assert found.convert_ids_to_tokens(found("the")["input_ids"]) == ["<s>", "▁the"]
    text = "the cat é\nthe"
    ids = found(text, add_special_tokens=False)["input_ids"]
    assert "<0xC3>" in found.convert_ids_to_tokens(ids)
    assert found.decode(ids) == text
    table = token_bytes(found, 300)
    assert b"".join(table[i] for i in ids) == b" " + text.encode()


def test_sentencepiece_flags_of_the_metadata_are_honoured(tmp_path):
    extra = sentencepiece_metadata(
        add_bos_token=False, add_eos_token=True, add_space_prefix=False
    )
    found = load(write_gguf(tmp_path / "m.gguf", "llama_gqa", "llama", extra)).tokenizer
    ids = found("the cat")["input_ids"]
    assert found.convert_ids_to_tokens(ids) == ["the", "▁cat", "</s>"]
    assert found.decode(ids, skip_special_tokens=True) == "the cat"
