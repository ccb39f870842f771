"""What speculative decoding should buy, from acceptance and measured costs.

Reference: Leviathan et al., arXiv 2211.17192, equation 1 and theorem 3.8.
"""

from collections.abc import Sequence


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


def best_gamma(alpha: float, draft_cost: float, most: int = 64) -> int:
    """The draft length with the highest predicted speed-up; 0: do not draft.

    Example:
        >>> [best_gamma(0.8, c) for c in (0.01, 0.05, 0.1, 0.2, 0.4)]
        [14, 8, 6, 4, 2]
    """
    best, gain = 0, 1.0
    for gamma in range(1, most + 1):
        value = speedup(block_efficiency(alpha, gamma), gamma, draft_cost)
        if value > 1 and value >= gain - 1e-12:  # of equally good ones the longer
            best, gain = gamma, value
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
