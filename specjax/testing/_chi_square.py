"""Pearson's chi-square test, and the counts that go into it."""

import jax.numpy as jnp
import numpy as np
from jax.scipy.special import gammaincc


def chi_square(observed_counts, expected_probabilities, *, rare: float = 5.0) -> float:
    """The p-value of counts under a law: small if they do not follow it.

    Cells are pooled, the least likely first, until each expects at least `rare`: the
    statistic follows the chi-square law only where enough is expected. A count where
    the law says *never* gives 0.

    Args:
        observed_counts: any shape.
        expected_probabilities: the same shape, summing to one.
        rare: the least that a cell must expect.

    Returns:
        A number in [0, 1]. Tests should use fixed seeds and a bound such as 1e-3, and
        come with a control that fails.

    Raises:
        ValueError: shapes differ, the law does not sum to one, or nothing was counted.

    Example:
        >>> chi_square([510, 490], [0.5, 0.5]) > 0.5
        True
        >>> chi_square([600, 400], [0.5, 0.5]) < 1e-6
        True
    """
    observed = np.asarray(observed_counts, np.float64)
    law = np.asarray(expected_probabilities, np.float64)
    if observed.shape != law.shape:
        raise ValueError(
            "observed_counts and expected_probabilities must have one shape, got "
            f"{observed.shape} and {law.shape}"
        )
    if not (np.all(law >= 0) and abs(law.sum() - 1) < 1e-5):
        raise ValueError(
            f"expected_probabilities must be a law, but they sum to {law.sum()}"
        )
    total = observed.sum()
    if total <= 0:
        raise ValueError("observed_counts must hold something, got nothing")
    if np.any(observed[law == 0] > 0):
        return 0.0
    order = np.argsort(law, axis=None)
    wanted, seen = (total * law / law.sum()).ravel()[order], observed.ravel()[order]
    # The fewest least likely cells that expect enough together, and those behind them.
    pooled = 1 + int(np.searchsorted(np.cumsum(wanted), rare))
    while pooled < len(wanted) and wanted[pooled] < rare:
        pooled += 1
    wanted = np.append(wanted[:pooled].sum(), wanted[pooled:])
    seen = np.append(seen[:pooled].sum(), seen[pooled:])
    if len(wanted) < 2:
        return 1.0
    statistic = np.sum((seen - wanted) ** 2 / wanted)
    freedom = len(wanted) - 1
    return float(gammaincc(jnp.float32(freedom / 2), jnp.float32(statistic / 2)))


def count_sequences(tokens, vocab_size: int) -> np.ndarray:
    """How often each sequence occurs among `tokens [B, n]`: `[V, ..., V]`, n axes."""
    tokens = np.asarray(tokens)
    if tokens.size and not (tokens.min() >= 0 and tokens.max() < vocab_size):
        raise ValueError(
            f"tokens must be in the vocabulary of {vocab_size}, got "
            f"{tokens.min()} to {tokens.max()}"
        )
    counts = np.zeros((vocab_size,) * tokens.shape[1], np.int64)
    np.add.at(counts, tuple(tokens.T), 1)
    return counts
