"""Exact laws of what a verifier makes of a given chain of drafts.

The arithmetic is plain Python, so laws of `Fraction`s give rational results.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

Number = Any  # float or Fraction
# (drafts, q before each draft, p before each draft and after the last)
#   -> {(num_accepted, the token behind them): probability}
Outcomes = Callable[
    [tuple[int, ...], Sequence[Sequence[Number]], Sequence[Sequence[Number]]],
    dict[tuple[int, int], Number],
]


def rejection_outcomes(drafts, q, p) -> dict[tuple[int, int], Number]:
    """The exact law of `verifiers.Rejection` for given drafts.

    Draft x stays with probability min(1, p(x) / q(x)); the first that does not is
    replaced by a draw from norm(max(0, p - q)); if all stay, one from p is added.

    Args:
        drafts: G token ids.
        q: G laws that they were drawn from.
        p: G + 1 laws of the target.

    Returns:
        `{(num_accepted, last token): probability}`.

    Reference: Leviathan et al., arXiv 2211.17192, algorithm 1.
    """
    outcomes: dict[tuple[int, int], Number] = {}
    reached = 1
    for index, token in enumerate(drafts):
        accept = min(1, p[index][token] / q[index][token])
        residual = [max(a - b, 0) for a, b in zip(p[index], q[index], strict=True)]
        total = sum(residual)
        if reached > 0 and accept < 1 and total > 0:
            for last, mass in enumerate(residual):
                if mass > 0:
                    outcomes[index, last] = reached * (1 - accept) * mass / total
        reached = reached * accept
    return outcomes | _bonus(len(drafts), reached, p)


def match_outcomes(drafts, q, p) -> dict[tuple[int, int], Number]:
    """The exact law of `verifiers.GreedyMatch`: see `rejection_outcomes`.

    A draft stays if a draw from p equals it; the first draw that does not is emitted.
    """
    outcomes: dict[tuple[int, int], Number] = {}
    reached = 1
    for index, token in enumerate(drafts):
        for last, mass in enumerate(p[index]):
            if last != token and reached * mass > 0:
                outcomes[index, last] = reached * mass
        reached = reached * p[index][token]
    return outcomes | _bonus(len(drafts), reached, p)


def block_outcomes(drafts, q, p) -> dict[tuple[int, int], Number]:
    """The exact law of `verifiers.Block`: see `rejection_outcomes`.

    The first i drafts stay if the coin of i allows it and no longer part's does.

    Reference: Sun et al., arXiv 2403.10444, algorithm 2.
    """
    weights: list[Number] = [1]
    for token, law, target in zip(drafts, q, p, strict=False):
        weights.append(min(1, weights[-1] * target[token] / law[token]))
    outcomes: dict[tuple[int, int], Number] = {}
    refused: Number = 1  # the chance that no longer part may stay
    for index in range(len(drafts), -1, -1):
        law, weight = p[index], weights[index]
        chance = weight
        if index < len(drafts):
            law = [max(weight * a - b, 0) for a, b in zip(law, q[index], strict=True)]
            rest = sum(law) + 1 - weight
            chance = sum(law) / rest if rest > 0 else 0
        chance = chance if index else 1
        if refused * chance > 0:
            law = law if sum(law) > 0 else p[index]
            for last, mass in enumerate(law):
                if mass > 0:
                    outcomes[index, last] = refused * chance * mass / sum(law)
        refused = refused * (1 - chance)
    return outcomes


def lossy_outcomes(loosen: Callable[[Number], Number]) -> Outcomes:
    """The exact law of a lossy verifier with f(p) = `loosen(p)`: see there.

    Draft x stays with probability min(1, f(p(x)) / q(x)); the first that does not is
    replaced by a draw from norm(max(0, f(p) - q)); if all stay, one from p is added.
    """

    def outcomes(drafts, q, p) -> dict[tuple[int, int], Number]:
        loose = [[loosen(x) for x in law] for law in p[:-1]]
        return rejection_outcomes(drafts, q, [*loose, p[-1]])

    return outcomes


def typical_outcomes(epsilon: float, delta: float) -> Outcomes:
    """The exact law of `verifiers.Typical`, of which nothing is random."""

    def outcomes(drafts, q, p) -> dict[tuple[int, int], Number]:
        accepted = 0
        for token, law in zip(drafts, p, strict=False):
            entropy = -sum(x * math.log(x) for x in law if x > 0)
            if not law[token] > min(epsilon, delta * math.exp(-entropy)):
                break
            accepted += 1
        return {(accepted, max(range(len(p[0])), key=lambda v: p[accepted][v])): 1}

    return outcomes


def simulated_outcomes(rates: Sequence[Number]) -> Outcomes:
    """The exact law of `verifiers.Simulated`; `rates` as there."""

    def outcomes(drafts, q, p) -> dict[tuple[int, int], Number]:
        found: dict[tuple[int, int], Number] = {}
        reached: Number = 1
        for index in range(len(drafts)):
            rate = rates[min(index, len(rates) - 1)]
            for last, mass in enumerate(p[index]):
                if reached * (1 - rate) * mass > 0:
                    found[index, last] = reached * (1 - rate) * mass
            reached = reached * rate
        return found | _bonus(len(drafts), reached, p)

    return outcomes


def _bonus(count: int, reached: Number, p) -> dict[tuple[int, int], Number]:
    return {
        (count, last): reached * mass
        for last, mass in enumerate(p[count])
        if reached > 0 and mass > 0
    }
