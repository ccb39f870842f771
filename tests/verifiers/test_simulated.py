"""Simulated acceptance gives the rates that it was asked for, in the loop's counts."""

import jax
import numpy as np
import pytest

from specjax import generate
from specjax.core import Checkpoint, Sampling
from specjax.drafters import Placeholder
from specjax.evals import block_efficiency_by_position
from specjax.testing import TabularLM, chi_square
from specjax.verifiers import Simulated

MODEL = TabularLM(5, order=1)
TARGET = Checkpoint(MODEL, MODEL.init(jax.random.key(0)))


def counted(rates, gamma=4, rows=64):
    return generate(
        TARGET,
        [[row % 5] for row in range(rows)],
        drafter=Placeholder(gamma=gamma),
        verifier=Simulated(rates),
        sampling=Sampling(0.0),
        max_new_tokens=200,
    ).stats


def test_counts_are_those_of_a_draft_with_these_rates():
    rates = (0.9, 0.5, 0.7)
    stats = counted(rates)
    evaluated = np.asarray(stats.evaluated_at).sum(0)
    accepted = np.asarray(stats.accepted_at).sum(0)
    for place, rate in enumerate((0.9, 0.5, 0.7, 0.7)):
        counts = [accepted[place], evaluated[place] - accepted[place]]
        assert chi_square(counts, [rate, 1 - rate]) > 1e-3
        wrong = 0.9 * rate  # the negative control
        if place < 2:
            assert chi_square(counts, [wrong, 1 - wrong]) < 1e-6
    tau = block_efficiency_by_position([0.9, 0.5, 0.7, 0.7])
    assert stats.block_efficiency == pytest.approx(tau, rel=0.03)


@pytest.mark.full
@pytest.mark.parametrize("rate", [0.0, 1.0])
def test_none_and_all_are_exact(rate):
    stats = counted((rate,))
    assert stats.acceptance_rate == rate
    assert stats.block_efficiency == 1 + 4 * rate


@pytest.mark.parametrize("rates", [(), (0.5, 1.1), (-0.1,), (float("nan"),)])
def test_rates_out_of_range_are_refused(rates):
    with pytest.raises(ValueError, match=r"one or more acceptance rates in \[0, 1\]"):
        Simulated(rates)
