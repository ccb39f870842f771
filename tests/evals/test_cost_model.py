"""The cost model against the published values (METHODS: Leviathan et al.)."""

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
