"""The parts of a round can be timed for every drafter, and leave the job as it was."""

import pytest

from specjax import drafters, evals
from specjax.core import Sampling
from specjax.decoding import collect, prepare


@pytest.mark.full
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_parts_of_a_round_have_costs_and_leave_the_job_as_it_was(temperature, pair):
    target, draft = pair

    def job():
        return prepare(
            target,
            [[1, 2, 3, 4], [5, 6]],
            drafter=drafters.TwoModel(draft, gamma=2),
            sampling=Sampling(temperature),
            max_new_tokens=6,
        )

    timed = job()
    costs = evals.round_costs(timed, repeats=2, passes=3)
    assert set(costs) == {"target", "verify", "propose"}
    assert all(t.best_s > 0 and len(t.seconds) == 2 for t in costs.values())
    after = collect(target, timed, timed.run(timed.start())).tokens
    fresh = job()
    assert after == collect(target, fresh, fresh.run(fresh.start())).tokens


def test_plain_decoding_has_no_round_to_take_apart(pair):
    job = prepare(pair[0], [[1, 2]], max_new_tokens=2)
    with pytest.raises(ValueError, match="needs a job with a drafter"):
        evals.round_costs(job)
