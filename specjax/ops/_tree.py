"""Trees of drafts: whether one is well formed, and who sees whom in it.

A tree of M nodes is given by each node's parent, -1 for the last committed token. The
target reads that token and the nodes, M + 1 entries: entry 0 is the root, entry i + 1
node i.
"""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool, Int


def tree_depth(parents: Sequence[int]) -> int:
    """The depth of a tree: the most drafts on a path from its root (0: no nodes).

    Raises:
        ValueError: a node's parent is neither -1 nor a node before it.

    Example:
        >>> tree_depth((-1, -1, 0, 0, 2))
        3
    """
    depths: list[int] = []
    for node, parent in enumerate(parents):
        whole = isinstance(parent, int | np.integer) and not isinstance(parent, bool)
        if not whole or not -1 <= parent < node:
            raise ValueError(
                "parents must be topologically ordered, each -1 or the number of an "
                f"earlier node, got {parent!r} for node {node} of {len(parents)}; "
                "number the nodes level by level"
            )
        depths.append(1 + (depths[parent] if parent >= 0 else 0))
    return max(depths, default=0)


def parent_rows(parents: tuple[int, ...] | Array, batch: int) -> Int[Array, "B M"]:
    """The parent of each node, a row of its own for each of `batch` texts."""
    if isinstance(parents, tuple):
        row = np.asarray(parents, np.int32).reshape(1, len(parents))
        return jnp.broadcast_to(jnp.asarray(row), (batch, len(parents)))
    return parents


def lineage(
    parents: Int[Array, "B M"], depth: int
) -> tuple[Bool[Array, "B T T"], Int[Array, "B T"]]:
    """Which entries lie on the way from the root to each, and how deep it is.

    Args:
        parents: -1 or an earlier node.
        depth: the depth of the tree; nodes that lie deeper get a wrong answer.

    Returns:
        The mask of tree attention `[B, M+1, M+1]` (entry, those that it may look at:
        itself and its ancestors, the root among them), and depths `[B, M+1]`, 0 for the
        root: a node's position is the root's plus its depth.
    """
    above = jnp.pad(parents + 1, ((0, 0), (1, 0)))  # entries; the root's is itself
    size = above.shape[1]
    mask = jnp.broadcast_to(jnp.eye(size, dtype=bool), (above.shape[0], size, size))
    # Each time the way that is known doubles: `above` is its end, one step further.
    for _ in range(depth.bit_length()):
        mask |= jnp.take_along_axis(mask, above[:, :, None], axis=1)
        above = jnp.take_along_axis(above, above, axis=1)
    return mask, jnp.sum(mask, axis=2, dtype=jnp.int32) - 1
