"""Tools to test drafters, verifiers and caches with, your own among them (level 3).

Language models that are tables, their exact laws, exact laws of verifiers, a chi-square
test, uncached references, and a check of a cache against a fresh prefill.
"""

from specjax.testing._caches import check_cache, poison
from specjax.testing._chi_square import chi_square, count_sequences
from specjax.testing._laws import (
    enumerate_verifier,
    expected_accepted,
    next_token_laws,
    sequence_law,
)
from specjax.testing._outcomes import (
    block_outcomes,
    lossy_outcomes,
    match_outcomes,
    rejection_outcomes,
    simulated_outcomes,
    typical_outcomes,
)
from specjax.testing._references import greedy_reference, reference_logits
from specjax.testing._scripted import Scripted
from specjax.testing._tabular import TabularLM
from specjax.testing._tree_laws import (
    enumerate_tree,
    node_law,
    tree_match_outcomes,
    tree_rejection_outcomes,
)
from specjax.testing._trees import DraftTree, ScriptedTree

__all__ = [
    "DraftTree",
    "Scripted",
    "ScriptedTree",
    "TabularLM",
    "block_outcomes",
    "check_cache",
    "chi_square",
    "count_sequences",
    "enumerate_tree",
    "enumerate_verifier",
    "expected_accepted",
    "greedy_reference",
    "lossy_outcomes",
    "match_outcomes",
    "next_token_laws",
    "node_law",
    "poison",
    "reference_logits",
    "rejection_outcomes",
    "sequence_law",
    "simulated_outcomes",
    "tree_match_outcomes",
    "tree_rejection_outcomes",
    "typical_outcomes",
]
