"""Trees of drafts: who sees whom, how deep, and what is no tree."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.ops import lineage, parent_rows, tree_depth


def way(parents, node):
    """The entries from the root to a node, itself included."""
    return {0} if node < 0 else {node + 1} | way(parents, parents[node])


def random_parents(rng, size):
    return tuple(int(rng.integers(-1, node)) for node in range(size))


def test_lineage_equals_a_walk_up_each_branch():
    rng = np.random.default_rng(0)
    for size in (1, 2, 5, 9, 16):
        rows = [random_parents(rng, size) for _ in range(8)]
        rows[0], rows[1] = tuple(range(-1, size - 1)), (-1,) * size  # a chain, a star
        depth = max(tree_depth(row) for row in rows)
        mask, depths = jax.jit(lineage, static_argnums=1)(jnp.array(rows), depth)
        assert mask.shape == (8, size + 1, size + 1)
        for row, parents in enumerate(rows):
            expected = np.zeros((size + 1, size + 1), bool)
            for node in range(-1, size):
                expected[node + 1, sorted(way(parents, node))] = True
            np.testing.assert_array_equal(mask[row], expected)
            np.testing.assert_array_equal(depths[row], expected.sum(1) - 1)
            assert tree_depth(parents) == depths[row].max()


def test_the_mask_of_a_chain_is_causal():
    mask, depths = lineage(jnp.array([[-1, 0, 1, 2]]), 4)
    np.testing.assert_array_equal(mask[0], np.tri(5, dtype=bool))
    assert depths.tolist() == [[0, 1, 2, 3, 4]]


def test_a_tree_of_nothing_is_its_root():
    assert tree_depth(()) == 0
    mask, depths = lineage(jnp.zeros((2, 0), int), 0)
    assert mask.tolist() == [[[True]]] * 2 and depths.tolist() == [[0]] * 2


def test_parents_are_rows_however_they_come():
    static = parent_rows((-1, 0, 0), 2)
    assert static.tolist() == [[-1, 0, 0]] * 2
    assert parent_rows(static, 2) is static


@pytest.mark.parametrize(
    "parents,message",
    [
        ((-1, 2, 0), "got 2 for node 1 of 3"),
        ((0,), "got 0 for node 0 of 1"),
        ((-1, 1), "got 1 for node 1 of 2"),
        ((-1, -2), "got -2 for node 1 of 2"),
        ((-1, True), "got True for node 1 of 2"),
    ],
    ids=str,
)
def test_parents_that_come_after_their_children_are_refused(parents, message):
    with pytest.raises(ValueError, match=f"topologically ordered.*{message}"):
        tree_depth(parents)
