"""ROUGE-L against the textbook table."""

import numpy as np
import pytest

from specjax.evals import rouge_l


def by_table(a, b):
    """The longest common subsequence by dynamic programming."""
    table = np.zeros((len(a) + 1, len(b) + 1), int)
    for i, x in enumerate(a):
        for j, y in enumerate(b):
            longer = max(table[i, j + 1], table[i + 1, j])
            table[i + 1, j + 1] = table[i, j] + 1 if x == y else longer
    return table[-1, -1]


@pytest.mark.parametrize("sizes", [(1, 1), (5, 9), (70, 64), (64, 65), (130, 3)])
def test_it_is_the_f1_of_the_longest_common_subsequence(sizes):
    rng = np.random.default_rng(sum(sizes))
    for _ in range(5):
        a, b = (rng.integers(0, 6, size).tolist() for size in sizes)
        assert rouge_l(a, b) == pytest.approx(2 * by_table(a, b) / sum(sizes))


def test_its_ends():
    assert rouge_l([1, 2, 3], [1, 2, 3]) == 1
    assert rouge_l([1, 2], [3]) == 0
    assert rouge_l([], [3]) == 0 and rouge_l([], []) == 1
