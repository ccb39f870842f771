"""Trees of every kind through the real loop, against the exact law of three tokens.

As `test_laws_of_the_loop`, with drafters that draft nothing but trees: candidates,
siblings drawn with and without replacement, and a tree of each row's own.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import verifiers
from specjax.core import Checkpoint
from specjax.ops import fold
from specjax.testing import DraftTree
from tests.conformance.test_laws_of_the_loop import (
    LOSSLESS,
    MODEL,
    NUM_TOKENS,
    SETTINGS,
    TARGET,
    loop,
    p_value,
)

pytestmark = pytest.mark.full

# Trees of every kind, as (parents, how siblings come about).
TREES = {
    "candidates": (((-1, -1, 0, 0, 1),), "best"),
    "with replacement": (((-1, -1, -1, 0, 0),), "with_replacement"),
    "without replacement": (((-1, -1, 0, 0, 2),), "without_replacement"),
    "dynamic": (((-1, 0, -1, 1, 2), (-1, -1, -1), (-1, 0)), "without_replacement"),
}
OF_TREES = [name for name in LOSSLESS if verifiers.get(name).trees]


@functools.cache
def of_tree(kind, verifier, drafter=DraftTree):
    draft = Checkpoint(MODEL, MODEL.init(jax.random.key(5)))
    bound = drafter(draft, *TREES[kind]).bind(TARGET, 100)
    return loop(bound, verifiers.get(verifier)())


# The default run tries each kind and each verifier, `.ci/run` all pairs.
PAIRS = [
    pytest.param(
        kind,
        verifier,
        marks=[] if "rejection" == verifier or kind == "dynamic" else pytest.mark.full,
    )
    for verifier in OF_TREES
    for kind in TREES
]


@pytest.mark.parametrize("kind,verifier", PAIRS)
@pytest.mark.parametrize("setting", SETTINGS)
def test_trees_leave_the_targets_law(kind, verifier, setting):
    """https://github.com/SafeAILab/EAGLE/issues/329"""
    tokens, stats = of_tree(kind, verifier)
    assert p_value(tokens, setting) > 1e-3
    assert (stats.emitted == NUM_TOKENS).all()
    assert (stats.accepted <= stats.evaluated).all()
    np.testing.assert_array_equal(stats.accepted_at.sum(-1), stats.accepted)
    assert (stats.accepted_at.sum((0, 1))[:2] > 0).all()


@dataclasses.dataclass(frozen=True)
class _MisstatedTree(DraftTree):
    """Says that all siblings, drawn or not, come from the draft's law independently."""

    def _draw(self, keys, law, tokens, twin):
        token, _ = super()._draw(keys, law, tokens, twin)
        return token, law

    def propose(self, params, keys, state, context):
        proposal, state = super().propose(params, keys, state, context)
        if self.siblings == "best":  # so that laws are handed over at all
            drawn = dataclasses.replace(self, siblings="with_replacement")
            laws, _ = drawn.propose(params, keys, state, context)
            proposal = dataclasses.replace(proposal, log_q=laws.log_q)
        if self.siblings == "with_replacement":  # each child is the best of two draws
            again, _ = DraftTree.propose(self, params, fold(keys, 99), state, context)
            tokens = jnp.minimum(proposal.tokens, again.tokens)
            proposal = dataclasses.replace(proposal, tokens=tokens)
        return proposal, state


@pytest.mark.parametrize("kind", TREES)
def test_a_tree_that_misstates_its_law_is_found_out(kind):
    """The negative controls of every kind of tree."""
    tokens, _ = of_tree(kind, "rejection", _MisstatedTree)
    assert p_value(tokens, "plain") < 1e-6
