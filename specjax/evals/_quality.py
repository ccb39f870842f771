"""How near a text comes to a reference."""

from collections.abc import Sequence


def rouge_l(tokens: Sequence[int], reference: Sequence[int]) -> float:
    """ROUGE-L: F1 of the longest common subsequence, in [0, 1].

    Taken over token ids, so that it needs no tokeniser of words and holds for code.
    The subsequence is found bit-parallel: a row of the table is one whole number.

    Args:
        tokens: what was written.
        reference: what it is compared with; two empty texts are equal.

    Example:
        >>> round(rouge_l([1, 2, 3, 4], [1, 3, 5]), 4)  # common: 1, 3
        0.5714

    Reference: Lin, ROUGE (2004), section 3.2; Hyyro, Bit-parallel LCS-length
    computation revisited (2004).
    """
    if not len(tokens) or not len(reference):
        return float(len(tokens) == len(reference))
    places: dict[int, int] = {}
    for i, token in enumerate(reference):
        places[token] = places.get(token, 0) | 1 << i
    everywhere = (1 << len(reference)) - 1
    row = everywhere
    for token in tokens:
        found = row & places.get(token, 0)
        row = (row + found) | (row - found)
    common = len(reference) - (row & everywhere).bit_count()
    return 2 * common / (len(tokens) + len(reference))
