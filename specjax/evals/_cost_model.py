"""What speculative decoding should buy, from acceptance and measured costs.

Reference: Leviathan et al., arXiv 2211.17192, equation 1 and theorem 3.8.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence

from specjax.drafters import sparse_tree


def block_efficiency(alpha: float, gamma: int) -> float:
    """Tokens a target call if each draft is accepted with probability `alpha`.

    (1 - alpha^(gamma+1)) / (1 - alpha): equation 1, which takes acceptances to be
    independent.

    Example:
        >>> round(block_efficiency(0.8, 7), 4)
        4.1611
    """
    _check(alpha, gamma)
    if alpha == 1:
        return gamma + 1.0
    return (1 - alpha ** (gamma + 1)) / (1 - alpha)


def block_efficiency_by_position(alphas: Sequence[float]) -> float:
    """The same from the acceptance at each position, given those before it.

    1 + sum over k of the product of the first k: exact whatever the dependence.
    """
    total, survive = 1.0, 1.0
    for alpha in alphas:
        survive *= alpha
        total += survive
    return total


def speedup(
    tau: float, gamma: int, draft_cost: float, verify_cost: float = 1.0
) -> float:
    """Speed-up over plain decoding, theorem 3.8 with the cost of verifying set free.

    Args:
        tau: tokens a target call.
        gamma: drafts a round.
        draft_cost: c, one draft pass over one target pass of one token.
        verify_cost: a target pass of gamma + 1 tokens over one of one token. At 1 (a
            memory-bound accelerator at batch 1) this is the paper's formula.

    Example:
        >>> round(speedup(block_efficiency(0.9, 7), 7, 0.05), 4)
        4.2188
    """
    return tau / (draft_cost * gamma + verify_cost)


def best_gamma(
    alpha: float | Sequence[float],
    draft_cost: float,
    most: int = 64,
    verify_costs: Mapping[int, float] | None = None,
) -> int:
    """The draft length with the highest predicted speed-up; 0: do not draft.

    Args:
        alpha: acceptance, or acceptance by position (then no longer than that).
        draft_cost: c, one draft pass over one target pass of one token.
        most: the longest draft to consider.
        verify_costs: see `pass_cost`; None: a target pass costs 1 whatever its length.

    Example:
        >>> [best_gamma(0.8, c) for c in (0.01, 0.05, 0.1, 0.2, 0.4)]
        [14, 8, 6, 4, 2]
        >>> best_gamma(0.8, 0.05, verify_costs={1: 1.0, 2: 1.6, 3: 1.8, 5: 2.2})
        4
    """
    by_position = None if isinstance(alpha, int | float) else list(alpha)
    if by_position is not None:
        most = min(most, len(by_position))
    best, gain = 0, 1.0
    for gamma in range(1, most + 1):
        if by_position is None:
            tau = block_efficiency(float(alpha), gamma)  # pyright: ignore[reportArgumentType]
        else:
            tau = block_efficiency_by_position(by_position[:gamma])
        verify = 1.0 if verify_costs is None else pass_cost(verify_costs, gamma + 1)
        value = speedup(tau, gamma, draft_cost, verify)
        if value > 1 and value >= gain - 1e-12:  # of equally good ones the longer
            best, gain = gamma, value
    return best


def pass_cost(costs: Mapping[int, float], num_tokens: int) -> float:
    """The cost of a pass of so many tokens, from those of some lengths.

    Between two lengths on the line through them, past the last one as the last two go.

    Args:
        costs: cost by number of tokens, 1 among them, such as `time_passes` measures,
            over that of one token.
        num_tokens: the length in question.

    Example:
        >>> pass_cost({1: 1.0, 3: 2.0, 5: 2.5}, 4), pass_cost({1: 1.0, 3: 2.0}, 5)
        (2.25, 3.0)
    """
    if 1 not in costs or min(costs.values()) <= 0:
        raise ValueError(
            "pass costs must be above 0 and tell that of a pass of one token, got "
            f"{dict(costs)}"
        )
    known = sorted(costs)
    if num_tokens in costs or len(known) == 1:
        return costs[min(num_tokens, known[-1])]
    above = next((i for i, n in enumerate(known) if n > num_tokens), len(known) - 1)
    low, high = known[above - 1], known[above]
    slope = (costs[high] - costs[low]) / (high - low)
    return costs[low] + slope * (num_tokens - low)


@dataclasses.dataclass(frozen=True)
class TreeChoice:
    """A tree of drafts and what it should buy."""

    paths: tuple[tuple[int, ...], ...]  # see `drafters.sparse_tree`; (): do not draft
    tau: float  # tokens a target call
    speedup: float  # over plain decoding


def best_tree(
    accuracies: Sequence[Sequence[float]],
    draft_cost: float | Sequence[float],
    verify_costs: Mapping[int, float],
    most: int = 64,
) -> TreeChoice:
    """The static tree with the highest predicted speed-up, of all sizes and depths.

    Args:
        accuracies: of each depth, how often its i-th best candidate is right; see
            `drafters.sparse_tree`, which makes the best tree of each size.
        draft_cost: of drafting in one round, over a target pass of one token: one
            number (heads that are all computed at once), or one for each depth.
        verify_costs: of target passes, see `pass_cost`.
        most: the most nodes.

    Returns:
        The tree; one of no nodes where none beats plain decoding.

    Example:
        >>> best_tree([[0.6, 0.2], [0.5]], 0.1, {1: 1.0, 9: 1.8}).paths
        ((0,), (1,), (0, 0))
    """
    depths = range(1, len(accuracies) + 1)
    costs = (
        [float(draft_cost)] * len(accuracies)
        if isinstance(draft_cost, int | float)
        else list(draft_cost)
    )
    if len(costs) != len(accuracies):
        raise ValueError(
            f"draft_cost must be one number or one for each of {len(accuracies)} "
            f"depths, got {len(costs)}"
        )
    best = TreeChoice((), 1.0, 1.0)
    for depth in depths:
        table = accuracies[:depth]
        total = sum(
            math.prod(len(row) for row in table[:n]) for n in range(1, depth + 1)
        )
        for size in range(depth, min(most, total) + 1):
            paths = sparse_tree(table, size)
            tau = 1.0 + sum(
                math.prod(table[i][rank] for i, rank in enumerate(path))
                for path in paths
            )
            gain = tau / (costs[depth - 1] + pass_cost(verify_costs, size + 1))
            if gain > best.speedup + 1e-12:  # of equally good ones the smaller
                best = TreeChoice(paths, tau, gain)
    return best


def break_even_alpha(gamma: int, draft_cost: float, verify_cost: float = 1.0) -> float:
    """The acceptance at which drafting neither wins nor loses; inf: it never wins."""
    low, high = 0.0, 1.0
    if speedup(gamma + 1.0, gamma, draft_cost, verify_cost) < 1:
        return float("inf")
    for _ in range(50):
        middle = (low + high) / 2
        tau = block_efficiency(middle, gamma)
        if speedup(tau, gamma, draft_cost, verify_cost) < 1:
            low = middle
        else:
            high = middle
    return high


def _check(alpha: float, gamma: int) -> None:
    if not 0 <= alpha <= 1:
        raise ValueError(f"alpha, an acceptance rate, must be in [0, 1], got {alpha}")
    if gamma < 0:
        raise ValueError(f"gamma, drafts a round, must be >= 0, got {gamma}")
