"""Exact laws of what a verifier makes of a tree of drafts.

The arithmetic is plain Python, so laws of `Fraction`s give rational results. Nodes and
`parents` are as in `specjax.core.Proposal`.
"""

from collections.abc import Callable, Sequence
from typing import Any

Number = Any  # float or Fraction
Law = Callable[[tuple[int, ...]], Sequence[Number]]
Parents = Sequence[int]
# (parents, token of each node, q of each node given its earlier siblings, p behind the
#  root and behind each node) -> {(accepted nodes, token behind them): probability}
TreeOutcomes = Callable[
    [Parents, Sequence[int], Sequence[Sequence[Number]], Sequence[Sequence[Number]]],
    dict[tuple[tuple[int, ...], int], Number],
]
# (tokens from the text's end to the parent, tokens of the earlier siblings) -> the law
# that a node is drawn from
NodeLaw = Callable[[tuple[int, ...], tuple[int, ...]], Sequence[Number]]


def tree_rejection_outcomes(parents, tokens, q, p):
    """The exact law of `verifiers.Rejection` for a given tree.

    The children of the last accepted node are tried in turn; child x stays with
    probability min(1, p(x) / q(x)), else norm(max(0, p - q)) takes the place of p.

    Returns:
        `{(accepted nodes, last token): probability}`.

    Reference: Miao et al., SpecInfer, arXiv 2305.09781, algorithm 2.
    """
    outcomes: dict[tuple[tuple[int, ...], int], Number] = {}

    def walk(path: tuple[int, ...], reached: Number) -> None:
        node = path[-1] if path else -1
        law = p[node + 1]
        for child, parent in enumerate(parents):
            if parent != node or reached <= 0:
                continue
            token = tokens[child]
            accept = min(1, law[token] / q[child][token])
            walk((*path, child), reached * accept)
            residual = [max(a - b, 0) for a, b in zip(law, q[child], strict=True)]
            if sum(residual) > 0:
                law = [mass / sum(residual) for mass in residual]
            reached = reached * (1 - accept)
        _draw(outcomes, path, reached, law)

    walk((), 1)
    return outcomes


def tree_match_outcomes(parents, tokens, q, p):
    """The exact law of `verifiers.GreedyMatch`: see `tree_rejection_outcomes`.

    A draw from p decides which child stays: the first that equals it, if there is one.
    """
    outcomes: dict[tuple[tuple[int, ...], int], Number] = {}

    def walk(path: tuple[int, ...], reached: Number) -> None:
        node = path[-1] if path else -1
        children = [c for c, parent in enumerate(parents) if parent == node]
        left = list(p[node + 1])
        for child in children:
            walk((*path, child), reached * left[tokens[child]])
            left[tokens[child]] = 0  # a second child of the same token is never reached
        _draw(outcomes, path, reached, left)

    walk((), 1)
    return outcomes


def enumerate_tree(
    outcomes: TreeOutcomes,
    draft: NodeLaw,
    target: Law,
    parents: Parents,
    *,
    num_tokens: int,
    said: NodeLaw | None = None,
) -> dict[tuple[int, ...], Number]:
    """The exact law of the first tokens, where one round is followed by the target.

    Every tree of drafts that can be drawn and every outcome of verifying it. A lossless
    verifier gives the target's own law, and then so do any number of rounds.

    Args:
        outcomes: the verifier's law, such as `tree_rejection_outcomes`.
        draft: the law that each node is drawn from.
        target: the target's law.
        parents: the tree.
        num_tokens: how many tokens to look at.
        said: the law that the verifier is told; default the true one, `draft`.

    Returns:
        `{tokens: probability}`.
    """
    law: dict[tuple[int, ...], Number] = {}
    for tokens, drawn in _trees(draft, parents):
        q = [(said or draft)(*_before(parents, tokens, n)) for n in range(len(parents))]
        paths = [(), *(_path(parents, tokens, node) for node in range(len(parents)))]
        p = [target(path) for path in paths]
        for (path, last), mass in outcomes(parents, tokens, q, p).items():
            emitted = (*(tokens[node] for node in path), last)
            _complete(law, emitted, drawn * mass, target, num_tokens)
    return law


def node_law(draft: Law, siblings: str) -> NodeLaw:
    """What each node of a tree is drawn from, for the ways that `DraftTree` knows."""

    def law(path: tuple[int, ...], earlier: tuple[int, ...]) -> Sequence[Number]:
        q = draft(path)
        if siblings == "with_replacement":
            return q
        rest = [0 if token in earlier else mass for token, mass in enumerate(q)]
        if siblings == "without_replacement":
            total = sum(rest)
            return [mass / total for mass in rest] if total > 0 else q
        order = sorted(range(len(q)), key=lambda token: (-q[token], token))
        return [int(token == order[len(earlier) % len(q)]) for token in range(len(q))]

    return law


def _draw(outcomes, path, reached, law) -> None:
    for last, mass in enumerate(law):
        if reached * mass > 0:
            outcomes[path, last] = reached * mass


def _trees(draft: NodeLaw, parents: Parents):
    """Every assignment of tokens to the nodes, and how likely it is."""
    trees: list[tuple[tuple[int, ...], Number]] = [((), 1)]
    for node in range(len(parents)):
        trees = [
            ((*tokens, token), drawn * mass)
            for tokens, drawn in trees
            for token, mass in enumerate(draft(*_before(parents, tokens, node)))
            if mass > 0
        ]
    return trees


def _before(parents: Parents, tokens: Sequence[int], node: int):
    """The tokens above `node`, and those of its earlier siblings."""
    parent = parents[node]
    path = _path(parents, tokens, parent) if parent >= 0 else ()
    earlier = tuple(tokens[n] for n in range(node) if parents[n] == parent)
    return path, earlier


def _path(parents: Parents, tokens: Sequence[int], node: int) -> tuple[int, ...]:
    above = _path(parents, tokens, parents[node]) if parents[node] >= 0 else ()
    return (*above, tokens[node])


def _complete(law, tokens, mass, target: Law, num_tokens: int) -> None:
    """Adds `mass` to what begins with `tokens` and goes on as the target does."""
    if len(tokens) >= num_tokens:
        key = tokens[:num_tokens]
        law[key] = law.get(key, 0) + mass
        return
    for token, chance in enumerate(target(tokens)):
        if chance > 0:
            _complete(law, (*tokens, token), mass * chance, target, num_tokens)
