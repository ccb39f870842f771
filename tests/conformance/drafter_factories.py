"""One small drafter of every registered kind, bound to a target that is a table."""

import jax
import pytest

from specjax import drafters
from specjax.core import Checkpoint

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


FACTORIES = {
    "medusa": _medusa,
    "prompt_lookup": _prompt_lookup,
    "two_model": _two_model,
}


def make_drafter(name: str, target: Checkpoint, max_length: int):
    """The bound drafter and its parameters; fails for a kind without a factory."""
    if name not in FACTORIES:
        pytest.fail(
            f"the drafter {name!r} is registered but never tested: add a factory for "
            "it to tests/conformance/drafter_factories.py"
        )
    return FACTORIES[name](target).bind(target, max_length)
