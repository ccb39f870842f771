"""The real SmolLM2-135M, out of its GGUF file: tokeniser, template and text."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.io import export, load, token_bytes

pytestmark = pytest.mark.smollm2

QUESTION = "Explain the difference between a kernel and a hypervisor."
ANSWER = (
    "A kernel and a hypervisor are both software components designed to manage virtual "
    "machines (VMs), but they serve different purposes and"
)
TEXTS = [
    "The quick brown fox, it's 12,345.67 km  away.\n\n\tdef f(x): return x**2",
    "Ünïcödé 日本語 русский عربى 🙂🏽 ﬁ \u200b",
    " leading and trailing ",
    "<|im_start|>user\nhi<|im_end|>\r\n",
]


def prompt(tokenizer):
    return tokenizer.apply_chat_template(
        [{"role": "user", "content": QUESTION}],
        add_generation_prompt=True,
        return_dict=False,
    )


def greedy(checkpoint, ids, num_tokens):
    """A plain cached loop, so that this file tests loading and nothing else."""
    model = checkpoint.model

    @jax.jit
    def run(params, tokens):
        cache = model.init_cache(1, tokens.shape[1] + num_tokens)

        def read(cache, tokens):
            out, cache = model.apply(params, tokens, cache)
            return cache, jnp.argmax(out.logits[:, -1], -1)

        def step(carry, _):
            cache, token = carry
            return read(cache, token[:, None]), token

        return jax.lax.scan(step, read(cache, tokens), None, num_tokens)[1][:, 0]

    return np.asarray(run(checkpoint.params, jnp.array([ids])))


def test_text_survives_the_tokenizer(smollm2):
    table = token_bytes(smollm2.tokenizer, smollm2.model.vocab_size)
    for text in TEXTS:
        ids = smollm2.tokenizer(text)["input_ids"]
        assert smollm2.tokenizer.decode(ids) == text
        special = set(smollm2.tokenizer.all_special_ids)
        plain = smollm2.tokenizer.decode([i for i in ids if i not in special])
        assert b"".join(table[i] for i in ids) == plain.encode()


def test_the_tokens_are_those_of_the_published_tokenizer(smollm2):
    tokens = smollm2.tokenizer.tokenize("It's 2024,  hello\n")
    assert tokens == ["It", "'s", "Ġ", "2", "0", "2", "4", ",", "Ġ", "Ġhello", "Ċ"]


def test_the_chat_template_and_the_greedy_text(smollm2):
    ids = prompt(smollm2.tokenizer)
    assert len(ids) == 41
    assert smollm2.eos_token_ids == (2,)
    text = smollm2.tokenizer.decode(greedy(smollm2, ids, 28))
    assert text.startswith(ANSWER)


def test_an_export_comes_back_bit_for_bit(tmp_path, smollm2):
    again = load(export(smollm2, tmp_path / "out", max_shard_bytes=2 * 10**8))
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 2
    assert again.config == smollm2.config
    assert prompt(again.tokenizer) == prompt(smollm2.tokenizer)
    jax.tree.map(np.testing.assert_array_equal, again.params, smollm2.params)
