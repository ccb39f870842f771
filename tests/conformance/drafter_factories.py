"""One small drafter of every registered kind, bound to a target that is a table.

Or to a small transformer over the same vocabulary, where it is made of layers of it.
"""

import functools

import jax
import pytest

from specjax import drafters
from specjax.core import Checkpoint
from specjax.models import CausalLM, ModelConfig

GAMMA = 3


def _two_model(target: Checkpoint):
    draft = target.model.init(jax.random.key(5))
    return drafters.TwoModel(Checkpoint(target.model, draft), gamma=GAMMA)


def _prompt_lookup(target: Checkpoint):
    return drafters.PromptLookup(gamma=GAMMA, max_ngram=2)


def _medusa(target: Checkpoint):
    """Random heads (D = V: the hidden state of a table is its logits) and a tree."""
    medusa = drafters.Medusa(num_heads=GAMMA, tree=(2, 2, 1))
    own = medusa.init_params(jax.random.key(0), target)
    noise = jax.random.normal(jax.random.key(6), own["w1"].shape)
    return medusa.with_params({"w1": own["w1"] + noise})


def _eagle(target: Checkpoint):
    """Random weights that draft a chain."""
    return _random(drafters.Eagle(gamma=GAMMA), target)


def _eagle3(target: Checkpoint):
    """Random weights that draft a tree, over some of the ids."""
    ids = range(target.model.vocab_size - 1)
    tree = dict(gamma=GAMMA, nodes=6, top_k=2)
    return _random(drafters.Eagle3(vocabulary=ids, **tree), target)


def _lookahead(target: Checkpoint):
    return drafters.Lookahead(
        window=3, level=GAMMA + 1, guesses=3, pool=16, prompt_as_reference=True
    )


def _fallback(target: Checkpoint):
    lookup = drafters.PromptLookup(gamma=GAMMA, min_ngram=2, max_ngram=2)
    return drafters.Fallback(lookup, _two_model(target))


def _self_speculative(target: Checkpoint):
    return drafters.SelfSpeculative(early_exit=1, gamma=GAMMA)


def _placeholder(target: Checkpoint):
    return drafters.Placeholder(gamma=GAMMA)


FACTORIES = {
    "eagle": _eagle,
    "eagle3": _eagle3,
    "fallback": _fallback,
    "lookahead": _lookahead,
    "medusa": _medusa,
    "placeholder": _placeholder,
    "prompt_lookup": _prompt_lookup,
    "self_speculative": _self_speculative,
    "two_model": _two_model,
}


OF_LAYERS = {"eagle", "eagle3", "self_speculative"}


@functools.cache
def _random(drafter, target: Checkpoint):
    """The drafter with fresh weights and noise on them."""

    @jax.jit
    def draw(params):
        own = drafter.init_params(jax.random.key(0), Checkpoint(target.model, params))
        leaves, tree = jax.tree.flatten(own)
        keys = jax.random.split(jax.random.key(6), len(leaves))
        noise = [
            jax.random.normal(k, x.shape) for k, x in zip(keys, leaves, strict=True)
        ]
        return jax.tree.unflatten(
            tree, [a + b for a, b in zip(leaves, noise, strict=True)]
        )

    return drafter.with_params(draw(target.params))


def target_for(name: str, table: Checkpoint) -> Checkpoint:
    """The target that a drafter is tested with: the table, or one of layers."""
    return _layered(table.model.vocab_size) if name in OF_LAYERS else table


@functools.cache
def _layered(vocab_size: int) -> Checkpoint:
    config = ModelConfig(
        vocab_size=vocab_size,
        hidden_size=8,
        intermediate_size=8,
        num_layers=2,
        num_heads=1,
        num_kv_heads=1,
        head_dim=8,
        max_position_embeddings=64,
        tie_word_embeddings=False,
    )
    params = jax.jit(CausalLM(config).init)(jax.random.key(0))
    # Larger than fresh weights: laws that depend on the context.
    params = jax.tree.map(lambda x: 25 * x if x.ndim == 2 else x, params)
    return Checkpoint(CausalLM(config), params, config=config)


def make_drafter(name: str, table: Checkpoint, max_length: int):
    """The bound drafter and its parameters; fails for a kind without a factory."""
    if name not in FACTORIES:
        pytest.fail(
            f"the drafter {name!r} is registered but never tested: add a factory for "
            "it to tests/conformance/drafter_factories.py"
        )
    target = target_for(name, table)
    return FACTORIES[name](target).bind(target, max_length)
