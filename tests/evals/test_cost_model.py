"""The cost model against the published values (METHODS: Leviathan et al.)."""

import itertools
import math

import pytest

from specjax import evals


def test_block_efficiency_and_speedup_have_their_published_values():
    assert evals.block_efficiency(0.8, 7) == pytest.approx(4.1611, abs=1e-4)
    assert evals.block_efficiency(0.6, 4) == pytest.approx(2.3056, abs=1e-4)
    tau = evals.block_efficiency(0.9, 7)
    assert evals.speedup(tau, 7, 0.05) == pytest.approx(4.2188, abs=1e-4)
    tau = evals.block_efficiency(0.75, 7)
    assert evals.speedup(tau, 7, 0.015) == pytest.approx(3.2575, abs=1e-4)


@pytest.mark.parametrize(
    ("alpha", "gammas"),
    [
        (0.5, [5, 3, 2, 2, 1]),
        (0.6, [7, 4, 3, 2, 1]),
        (0.7, [9, 6, 4, 3, 2]),
        (0.8, [14, 8, 6, 4, 2]),
        (0.9, [24, 13, 10, 7, 4]),
    ],
)
def test_the_best_gamma_has_its_published_values(alpha, gammas):
    costs = (0.01, 0.05, 0.1, 0.2, 0.4)
    assert [evals.best_gamma(alpha, c) for c in costs] == gammas


def test_nothing_is_drafted_where_nothing_can_be_won():
    assert evals.best_gamma(0.3, 0.5) == 0
    assert evals.break_even_alpha(4, 1.5) == float("inf")


def test_break_even_is_where_the_speedup_is_one():
    alpha = evals.break_even_alpha(5, 0.6)
    assert alpha == pytest.approx(0.832, abs=0.01)  # a published null result
    tau = evals.block_efficiency(alpha, 5)
    assert evals.speedup(tau, 5, 0.6) == pytest.approx(1.0)


def test_positions_of_equal_acceptance_agree_with_the_formula():
    by_position = evals.block_efficiency_by_position([0.7] * 5)
    assert by_position == pytest.approx(evals.block_efficiency(0.7, 5))
    assert evals.block_efficiency_by_position([0.9, 0.1]) != pytest.approx(
        evals.block_efficiency(0.5, 2)
    )


@pytest.mark.parametrize(("alpha", "gamma"), [(-0.1, 3), (1.1, 3), (0.5, -1)])
def test_values_out_of_range_are_refused(alpha, gamma):
    with pytest.raises(ValueError, match=r"alpha|gamma"):
        evals.block_efficiency(alpha, gamma)


def test_the_best_gamma_looks_at_what_verifying_costs():
    costs = {1: 1.0, 2: 1.6, 3: 1.8, 5: 2.2}
    gains = [
        evals.speedup(
            evals.block_efficiency(0.8, gamma), gamma, 0.05, evals.pass_cost(costs, g)
        )
        for gamma, g in ((n, n + 1) for n in range(1, 9))
    ]
    assert evals.best_gamma(0.8, 0.05, 8, costs) == 1 + gains.index(max(gains))
    assert evals.best_gamma(0.8, 0.05, 8) == 8  # were all passes equal
    assert evals.best_gamma(0.3, 0.05, 8, costs) == 0
    # By position: nothing behind a draft that never stays.
    assert evals.best_gamma([0.9, 0.9, 0.0, 0.9], 0.05) == 2
    assert evals.best_gamma([0.8] * 4, 0.05) == evals.best_gamma(0.8, 0.05, 4)


def test_costs_between_and_past_those_measured():
    costs = {1: 1.0, 2: 2.0, 4: 3.0}
    found = [evals.pass_cost(costs, n) for n in range(1, 7)]
    assert found == [1.0, 2.0, 2.5, 3.0, 3.5, 4.0]
    assert evals.pass_cost({1: 1.0}, 9) == 1.0
    for wrong in ({2: 1.0}, {1: 0.0}):
        with pytest.raises(ValueError, match="that of a pass of one token"):
            evals.pass_cost(wrong, 2)


def test_the_best_tree_is_the_best_of_all_trees():
    """Against every tree that a table of two depths and two candidates allows."""
    table, costs = [[0.5, 0.3], [0.6, 0.2]], {1: 1.0, 3: 1.3, 8: 1.9}
    nodes = [(i,) for i in range(2)] + [(i, j) for i in range(2) for j in range(2)]

    def gain(paths, draft):
        tau = 1 + sum(math.prod(table[i][r] for i, r in enumerate(p)) for p in paths)
        depth = max(map(len, paths))
        return tau / (draft[depth - 1] + evals.pass_cost(costs, len(paths) + 1))

    for draft in ([0.1, 0.1], [0.1, 0.6], [0.9, 0.9]):
        trees = [
            tree
            for n in range(1, 7)
            for tree in itertools.combinations(nodes, n)
            if all(p[:-1] in tree for p in tree if len(p) > 1)
        ]
        best = max(gain(tree, draft) for tree in trees)
        found = evals.best_tree(table, draft, costs)
        if best <= 1:
            assert found == evals.TreeChoice((), 1.0, 1.0)
        else:
            assert found.speedup == pytest.approx(best)
            assert gain(found.paths, draft) == pytest.approx(best)
    assert evals.best_tree(table, 0.1, costs) == evals.best_tree(
        table, [0.1] * 2, costs
    )
    assert not evals.best_tree(table, [0.9, 0.9], costs).paths
    assert {len(p) for p in evals.best_tree(table, [0.1, 0.6], costs).paths} == {1}
    with pytest.raises(ValueError, match="one for each of 2 depths, got 1"):
        evals.best_tree(table, [0.1], costs)
