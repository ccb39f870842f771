"""How sure a mean of a few runs is."""

import math
from collections.abc import Sequence

import numpy as np
from scipy import stats


def interval(values: Sequence[float], level: float = 0.95) -> tuple[float, float]:
    """The mean of repeated runs, and half the width of its confidence interval.

    Give it the *differences* of two methods seed by seed for a paired comparison: what
    a seed does to both cancels.

    Args:
        values: one number a run.
        level: of confidence, in (0, 1).

    Returns:
        The mean and Student's half width; infinite for a single run.

    Raises:
        ValueError: no values, or a level outside (0, 1).

    Example:
        >>> mean, half = interval([1.0, 2.0, 3.0])
        >>> round(mean, 3), round(half, 3)
        (2.0, 2.484)
    """
    if not len(values):
        raise ValueError("interval needs at least one value, got none")
    if not 0 < level < 1:
        raise ValueError(f"level must be in (0, 1), got {level}")
    mean, count = float(np.mean(values)), len(values)
    if count == 1:
        return mean, math.inf
    quantile = stats.t.ppf(0.5 + level / 2, count - 1)
    return mean, float(quantile * np.std(values, ddof=1) / math.sqrt(count))
