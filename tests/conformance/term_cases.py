"""Options with which each registered distillation term is tested, and two tiny models.

A term that needs no options is tested by being registered. Layers are paired so that a
swap of the models is another loss where the distance itself is symmetric.
"""

import jax
import numpy as np

from specjax import distill
from specjax.distill import Batch, Behaviour
from specjax.models import CausalLM, ModelConfig

VOCAB = 13

CASES: dict[str, list[dict]] = {
    "hidden_state": [
        {"project": True},
        {
            "distance": "cosine",
            "project": True,
            "layers": [["layers.0.query", "layers.1.key"]],
        },
    ],
    "attention_transfer": [{"layers": [["layers.0", "layers.2"]]}],
    "minilm_v2": [{"chunk": 5}],
    "patient_kd": [
        {"project": True},
        {"project": True, "positions": "all", "layers": "last", "reduction": "mean"},
    ],
    "relational_kd": [
        {"layers": [["layers.0", "layers.2"]]},
        {"layers": [["layers.0", "layers.1"]], "pooling": "last"},
    ],
}


def all_cases() -> list[tuple[str, distill.Term]]:
    """`(name, term)` of every case of every registered term."""
    return [
        (name, distill.make_term(name, **options))
        for name in distill.terms.names()
        for options in CASES.get(name, [{}])
    ]


def _model(**sizes) -> CausalLM:
    return CausalLM(
        ModelConfig(
            vocab_size=VOCAB,
            intermediate_size=16,
            max_position_embeddings=64,
            **sizes,
        )
    )


STUDENT = _model(num_layers=2, hidden_size=8, num_heads=2, num_kv_heads=1, head_dim=4)
TEACHER = _model(num_layers=3, hidden_size=12, num_heads=4, num_kv_heads=2, head_dim=4)


def sharp(model, seed):
    """Parameters whose next-token laws are far from uniform, and from each other."""
    params = jax.jit(model.init)(jax.random.key(seed))
    return jax.tree.map(lambda x: 12 * x if x.ndim == 2 else x, params)


def batch(width=14, rows=4, vocab=VOCAB) -> Batch:
    """Rows of several lengths and prompts, half of them written by the student."""
    rng = np.random.default_rng(0)
    length, prompt = np.resize([14, 9, 6, 12], rows), np.resize([1, 4, 3, 5], rows)
    tokens = np.full((rows, width), 7)
    tokens[:, :14] = rng.integers(0, vocab, (rows, 14))
    given = Batch.of(tokens, length=length, prompt_length=prompt)
    drawn = np.zeros((rows, width), np.float32)
    drawn[:, :14] = -rng.uniform(0.5, 3, (rows, 14))
    drawn = np.where(given.mask, drawn, 0)
    return Batch(
        given.tokens,
        given.mask,
        given.prompt_length,
        np.resize([False, False, True, True], rows),
        Behaviour(drawn, (0.9 * drawn).astype(np.float32)),
    )
