"""Counting tokens, and choosing those that come most often."""

import numpy as np
import pytest

from specjax.data import count_tokens, frequent_tokens

COUNTS = np.array([0, 5, 0, 2, 2, 9, 0, 2])


def test_every_token_is_counted_once():
    sequences = [[3, 1, 3], np.array([0], np.int32), [], (3, 5)]
    counts = count_tokens(sequences, 6)
    assert counts.tolist() == [1, 1, 0, 3, 0, 1]
    assert counts.dtype == np.int64
    rng = np.random.default_rng(0)
    rows = rng.integers(0, 50, (20, 30))
    np.testing.assert_array_equal(
        count_tokens(rows, 50), np.bincount(rows.ravel(), minlength=50)
    )


@pytest.mark.parametrize("wrong", [[-1, 2], [6]])
def test_a_token_outside_the_vocabulary_is_named(wrong):
    with pytest.raises(ValueError, match=r"must be 0..5, got .* in sequence 1"):
        count_tokens([[0], wrong], 6)


def test_the_commonest_are_chosen_and_of_equals_the_lower():
    found = frequent_tokens(COUNTS, 4)
    assert found.ids.tolist() == [1, 3, 4, 5]
    assert found.ids.dtype == np.int32
    assert found.mass == pytest.approx(18 / 20)
    # Fewer tokens were seen than there is room for.
    assert frequent_tokens(COUNTS, 6).ids.tolist() == [0, 1, 3, 4, 5, 7]
    assert frequent_tokens(COUNTS, 6).mass == 1.0
    assert frequent_tokens(COUNTS, 8).ids.tolist() == list(range(8))


def test_some_ids_are_there_whatever_they_count():
    found = frequent_tokens(COUNTS, 3, always=[2, 6, 2])
    assert found.ids.tolist() == [2, 5, 6]
    assert found.mass == pytest.approx(9 / 20)
    assert frequent_tokens(COUNTS, 2, always=(5,)).ids.tolist() == [1, 5]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((COUNTS, 0), "size must be 1..8, the vocabulary, got 0"),
        ((COUNTS, 9), "size must be 1..8, the vocabulary, got 9"),
        ((COUNTS, 1, (2, 3)), "size must hold the 2 ids in always, got 1"),
        ((COUNTS, 3, (8,)), r"in always must be 0..7, got 8..8"),
        ((COUNTS, 3, (-1, 2)), r"in always must be 0..7, got -1..2"),
        ((np.zeros(4, int), 2), "count at least one token"),
        ((-COUNTS, 2), r"must be \[V\] whole numbers >= 0"),
        ((COUNTS / 2, 2), r"must be \[V\] whole numbers >= 0.*float64"),
        ((COUNTS[None], 2), r"must be \[V\] whole numbers"),
    ],
)
def test_what_cannot_be_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        frequent_tokens(*arguments)
