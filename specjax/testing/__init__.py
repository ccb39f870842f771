"""Tools to test drafters, verifiers and caches with, your own among them (level 3).

Language models that are tables, their exact laws, exact laws of verifiers, a chi-square
test, uncached references, and a check of a cache against a fresh prefill.
"""

from specjax.testing._caches import check_cache, poison
from specjax.testing._chi_square import chi_square, count_sequences
from specjax.testing._laws import (
    enumerate_verifier,
    expected_accepted,
    match_outcomes,
    next_token_laws,
    rejection_outcomes,
    sequence_law,
)
from specjax.testing._references import greedy_reference, reference_logits
from specjax.testing._scripted import Scripted
from specjax.testing._tabular import TabularLM
from specjax.testing._trees import DraftTree

__all__ = [
    "DraftTree",
    "Scripted",
    "TabularLM",
    "check_cache",
    "chi_square",
    "count_sequences",
    "enumerate_verifier",
    "expected_accepted",
    "greedy_reference",
    "match_outcomes",
    "next_token_laws",
    "poison",
    "reference_logits",
    "rejection_outcomes",
    "sequence_law",
]
