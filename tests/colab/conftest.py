"""A checkpoint small enough to run in a second, with tokeniser and chat template."""

import jax
import pytest

from specjax.core import Checkpoint
from specjax.data import train_bpe
from specjax.io import export
from specjax.models import CausalLM, ModelConfig

TEXTS = ["One day the sky was blue, the next day the sky was grey.\n"] * 20
TEMPLATE = (
    "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory):
    tokenizer = train_bpe(TEXTS, vocab_size=300)
    tokenizer.chat_template = TEMPLATE
    config = ModelConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=32,
        num_layers=2,
        num_heads=2,
        num_kv_heads=1,
        head_dim=8,
        max_position_embeddings=256,
    )
    params = CausalLM(config).init(jax.random.key(0))
    # Larger weights than a fresh model's: its text is then not one token for ever.
    params = jax.tree.map(lambda x: 8 * x if x.ndim > 1 else x, params)
    checkpoint = Checkpoint(CausalLM(config), params, tokenizer, config)
    return export(checkpoint, tmp_path_factory.mktemp("tiny") / "model")
