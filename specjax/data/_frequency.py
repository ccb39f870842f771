"""How often each token comes, and which come most often: a draft's vocabulary.

Axes: V vocabulary, W chosen ids.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int

from specjax.data._packing import Tokens


@dataclass(frozen=True)
class FrequentTokens:
    """Chosen ids, and what share of the counted tokens they are.

    Attributes:
        ids: `[W]` int32, ascending.
        mass: counts of the ids over all counts, in [0, 1]: no draft over these ids can
            be right more often on such text.
    """

    ids: np.ndarray
    mass: float


def count_tokens(sequences: Iterable[Tokens], vocab_size: int) -> Int[np.ndarray, " V"]:
    """How often each id comes in some sequences.

    Args:
        sequences: token ids each, without padding: every one is counted.
        vocab_size: V.

    Returns:
        `[V]` int64.

    Raises:
        ValueError: an id that is not 0..V-1.
    """
    counts = np.zeros((vocab_size,), np.int64)
    for number, sequence in enumerate(sequences):
        tokens = np.asarray(sequence, np.int64).reshape(-1)
        if tokens.size and not 0 <= tokens.min() <= tokens.max() < vocab_size:
            raise ValueError(
                f"token ids must be 0..{vocab_size - 1}, got {tokens.min()}.."
                f"{tokens.max()} in sequence {number}"
            )
        found, times = np.unique(tokens, return_counts=True)
        counts[found] += times
    return counts


def frequent_tokens(
    counts: Int[np.ndarray, " V"], size: int, always: Collection[int] = ()
) -> FrequentTokens:
    """The ids that come most often: what a draft's head should have rows for.

    Of equally frequent ids the lower goes first: in a vocabulary of byte pairs it was
    merged earlier, for it came more often in the text that the tokeniser was made from.
    That decides which ids fill the head where the counted text has fewer than it holds.

    Args:
        counts: of every id, from `count_tokens`.
        size: W, how many ids.
        always: ids that must be among them whatever their counts, such as the end of
            text: a draft without it never ends.

    Returns:
        The ids and their share of the counts.

    Raises:
        ValueError: a size out of range, more ids in `always` than that, an id that is
            not in the vocabulary, or no counts.

    Example:
        >>> counts = count_tokens([[3, 1, 3, 2], [3, 1]], vocab_size=5)
        >>> found = frequent_tokens(counts, size=3, always=[0])
        >>> found.ids.tolist(), round(found.mass, 3)
        ([0, 1, 3], 0.833)
    """
    counts = np.asarray(counts)
    if counts.ndim != 1 or counts.dtype.kind not in "iu" or (counts < 0).any():
        raise ValueError(
            "counts must be [V] whole numbers >= 0, one for each id, got "
            f"{counts.dtype} {counts.shape}"
        )
    total = int(counts.sum())
    if total == 0:
        raise ValueError("counts must count at least one token, got none")
    if not 1 <= size <= counts.size:
        raise ValueError(f"size must be 1..{counts.size}, the vocabulary, got {size}")
    forced = sorted(set(always))
    if forced and not 0 <= forced[0] <= forced[-1] < counts.size:
        raise ValueError(
            f"the ids in always must be 0..{counts.size - 1}, got {forced[0]}.."
            f"{forced[-1]}"
        )
    if len(forced) > size:
        raise ValueError(f"size must hold the {len(forced)} ids in always, got {size}")
    rank = -counts.astype(np.int64)
    rank[forced] = np.iinfo(np.int64).min
    ids = np.sort(np.argsort(rank, kind="stable")[:size]).astype(np.int32)
    return FrequentTokens(ids, int(counts[ids].sum()) / total)
