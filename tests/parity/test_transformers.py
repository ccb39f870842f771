"""Live comparison with transformers on torch (extra `parity`)."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.core import Checkpoint
from specjax.io import export, load
from specjax.models import CausalLM, ModelConfig

pytestmark = pytest.mark.parity
torch = pytest.importorskip("torch", reason="needs the extra `parity`")
transformers = pytest.importorskip("transformers")

GOLDEN = Path(__file__).parents[1] / "golden" / "models"
TOKENS = np.random.default_rng(1).integers(0, 64, (2, 64))


def theirs(folder, tokens=TOKENS):
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        return model.eval()(torch.tensor(tokens)).logits.numpy()


def ours(checkpoint, tokens=TOKENS):
    return checkpoint.model.apply(checkpoint.params, jnp.asarray(tokens))[0].logits


@pytest.mark.parametrize("name", sorted(path.name for path in GOLDEN.iterdir()))
def test_an_exported_model_has_the_same_logits_in_transformers(tmp_path, name):
    checkpoint = load(GOLDEN / name, dtype="float32")
    folder = export(checkpoint, tmp_path / "out", max_shard_bytes=20_000)
    # Dynamic scaling: the longest position of their call decides, so stay inside.
    tokens = TOKENS[:, :32] if name == "rope_dynamic" else TOKENS
    exported = theirs(folder, tokens)
    np.testing.assert_allclose(ours(checkpoint, tokens), exported, atol=1e-4)
    np.testing.assert_array_equal(exported, theirs(GOLDEN / name, tokens))


OPTIONS = {
    "heads_of_odd_number": {"num_heads": 3, "num_kv_heads": 3},
    "qwen2": {"qkv_bias": True, "sliding_window": 8},
    "qwen3": {"qk_norm": True, "sliding_window": 8},
    "qwen3_bias": {"qk_norm": True, "qkv_bias": True, "out_bias": True},
    "mistral": {"sliding_window": 8, "head_dim": 16},
    "untied": {"tie_word_embeddings": False, "mlp_bias": True},
    "yarn": {
        "rope_scaling": (
            ("attention_factor", 1.2),
            ("factor", 4.0),
            ("original_max_position_embeddings", 16),
            ("rope_type", "yarn"),
        )
    },
}


def shaken(params, dtype):
    """Weights so large that positions matter; norms and biases that are not plain."""
    random = np.random.default_rng(0)

    def shake(x):
        return (x + 0.2 * random.normal(size=x.shape)).astype(dtype)

    return jax.tree.map(shake, params)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", sorted(OPTIONS))
def test_a_model_of_ones_own_has_the_same_logits_in_transformers(tmp_path, name, dtype):
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 40}
    heads = {"num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8}
    config = ModelConfig(**{**sizes, **heads, **OPTIONS[name]})
    model = CausalLM(config)
    params = shaken(model.init(jax.random.key(0)), dtype)
    checkpoint = Checkpoint(model, params, config=config)
    folder = export(checkpoint, tmp_path / "out")
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), params)
    np.testing.assert_allclose(
        ours(dataclasses.replace(checkpoint, params=wide)), theirs(folder), atol=1e-4
    )


@pytest.mark.smollm2
def test_the_real_model_exported_has_the_same_logits_and_text(tmp_path, smollm2):
    folder = export(smollm2, tmp_path / "out")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    text = "Why is the sky  blue? 1234\n\ndef f(x):\n    return x"
    ids = tokenizer(text)["input_ids"]
    assert ids == smollm2.tokenizer(text)["input_ids"]
    tokens = np.array([ids])
    np.testing.assert_allclose(
        ours(smollm2, tokens), theirs(folder, tokens), atol=1e-3, rtol=1e-4
    )
    chat = [{"role": "user", "content": "What is 2 + 2?"}]
    options = {"add_generation_prompt": True, "tokenize": False}
    assert tokenizer.apply_chat_template(chat, **options) == (
        smollm2.tokenizer.apply_chat_template(chat, **options)
    )
