"""The proof of losslessness must pass for the loop and fail for what is wrong."""

import numpy as np
import pytest

from specjax import drafters, evals
from specjax.core import Sampling
from tests.marks import sampled

FILTERED = Sampling(temperature=0.8, top_k=9, top_p=0.9)


@pytest.fixture(scope="module")
def prompts():
    return np.random.default_rng(0).integers(0, 23, (256, 5)).tolist()


@pytest.mark.parametrize(
    "sampling",
    sampled([Sampling(), FILTERED], FILTERED),
)
@pytest.mark.full
def test_the_loop_follows_the_target_and_its_control_does_not(pair, prompts, sampling):
    target, draft = pair
    p_value, control = evals.chi_square_of_loop(
        target,
        drafters.TwoModel(draft, gamma=3),
        prompts,
        max_new_tokens=24,
        sampling=sampling,
    )
    assert p_value > 1e-3
    assert control < 1e-6


@pytest.mark.full
def test_greedy_rows_are_equal_and_counted(pair, prompts):
    target, draft = pair
    equal = evals.greedy_equality(
        target, drafters.TwoModel(draft, gamma=3), prompts[:8], max_new_tokens=12
    )
    assert equal == (8, 8)
