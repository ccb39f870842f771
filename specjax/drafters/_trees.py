"""Static trees of candidates, by which candidate of each depth a node takes.

A node is written as its path: `(0, 2)` is the third best candidate at depth 2 behind
the best at depth 1.
"""

import heapq
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

Path = tuple[int, ...]


def cartesian_tree(widths: Sequence[int]) -> tuple[Path, ...]:
    """All combinations of the best `widths[i]` candidates at depth i + 1.

    Returns:
        Paths level by level, siblings from the best on.

    Raises:
        ValueError: no width, or one below 1.

    Example:
        >>> cartesian_tree((2, 1))
        ((0,), (1,), (0, 0), (1, 0))
    """
    if not widths or any(not _is_whole(w) or w < 1 for w in widths):
        raise ValueError(
            "a tree by widths needs a whole number >= 1 for each depth, got "
            f"{tuple(widths)!r}"
        )
    levels = [range(width) for width in widths]
    depths = range(1, len(levels) + 1)
    return tuple(path for n in depths for path in itertools.product(*levels[:n]))


def sparse_tree(accuracies: Sequence[Sequence[float]], num_nodes: int):
    """The tree of `num_nodes` nodes with the most accepted drafts to expect.

    A node is accepted if every candidate on its path is right; taking depths as
    independent, with the probability `prod_i accuracies[i][path[i]]`, and the expected
    number of accepted drafts is the sum of that over all nodes. No node is worth more
    than its parent, so the best nodes one by one make the best tree.

    Args:
        accuracies: of each depth, how often its i-th best candidate is right, measured:
            `Medusa.ranks` counts it.
        num_nodes: M.

    Returns:
        Paths level by level, siblings from the best on.

    Raises:
        ValueError: probabilities out of range, or fewer candidates than nodes.

    Reference: Cai et al., Medusa, arXiv 2401.10774, section 2.3.3.

    Example:
        >>> sparse_tree([[0.6, 0.2], [0.5, 0.1]], 3)
        ((0,), (1,), (0, 0))
    """
    table = [[float(a) for a in row] for row in accuracies]
    if any(not 0 <= a <= 1 for row in table for a in row) or not table:
        raise ValueError(f"accuracies must be numbers in [0, 1], got {accuracies!r}")
    if not _is_whole(num_nodes) or num_nodes < 1:
        raise ValueError(f"num_nodes must be a whole number >= 1, got {num_nodes!r}")
    waiting: list[tuple[float, int, Path]] = []

    def open_up(path: Path, worth: float) -> None:
        if len(path) < len(table):
            for rank, accuracy in enumerate(table[len(path)]):
                child = *path, rank
                heapq.heappush(waiting, (-worth * accuracy, len(child), child))

    open_up((), 1.0)
    chosen: list[Path] = []
    while waiting and len(chosen) < num_nodes:
        worth, _, path = heapq.heappop(waiting)
        chosen.append(path)
        open_up(path, -worth)
    if len(chosen) < num_nodes:
        raise ValueError(
            f"num_nodes is {num_nodes}, but these accuracies make a tree of "
            f"{len(chosen)} nodes at most"
        )
    return tuple(sorted(chosen, key=lambda path: (len(path), path)))


def as_paths(tree: Iterable[Any]) -> tuple[Path, ...]:
    """A tree given as paths, or as the widths of a Cartesian one, as ordered paths.

    Raises:
        ValueError: no node, a node twice, one without its parent, or a negative rank.
    """
    nodes: tuple[Any, ...] = tuple(
        tuple(n) if isinstance(n, list | tuple) else n for n in tree
    )
    if all(_is_whole(node) for node in nodes):
        return cartesian_tree(nodes)
    for path in nodes:
        if not isinstance(path, tuple) or not path or not all(map(_is_whole, path)):
            raise ValueError(
                "a tree is given by widths such as (3, 2, 1), or by paths such as "
                f"((0,), (1,), (0, 0)), got {path!r}"
            )
        if min(path) < 0:
            raise ValueError(f"a path takes candidates by rank >= 0, got {path!r}")
        if len(path) > 1 and path[:-1] not in nodes:
            raise ValueError(f"the tree holds {path!r}, but not its parent {path[:-1]}")
    if len(set(nodes)) < len(nodes):
        raise ValueError(f"the tree holds a node twice: {nodes!r}")
    return tuple(sorted(nodes, key=lambda path: (len(path), path)))


def parents_of(paths: Sequence[Path]) -> tuple[int, ...]:
    """The number of each node's parent, -1 for those at depth 1."""
    number = {(): -1} | {path: n for n, path in enumerate(paths)}
    return tuple(number[path[:-1]] for path in paths)


def _is_whole(value) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)
