"""Verifiers: their exact laws, and that the code follows them draw by draw."""

import functools
from fractions import Fraction as F

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import testing, verifiers
from specjax.core import Proposal
from specjax.ops import row_keys

# Laws of the first token, the second, ... that look at what came before.
SIZE, GAMMA = 3, 2


def random_law(seed, size=SIZE):
    """A law over fractions that depends on the last token and on the position."""
    rng = np.random.default_rng(seed)
    table = rng.integers(0, 7, size=(4, size + 1, size)) + np.eye(size, dtype=int)[0]

    def law(tokens):
        row = table[len(tokens) % 4, tokens[-1] if tokens else size]
        return [F(int(x), int(row.sum())) for x in row]

    return law


OUTCOMES = {
    "rejection": testing.rejection_outcomes,
    "greedy": testing.match_outcomes,
}


def always_accept(drafts, q, p):
    return {(len(drafts), last): mass for last, mass in enumerate(p[-1])}


def without_subtraction(drafts, q, p):
    """The residual is p itself: a fault that looks right at a glance."""
    exact = testing.rejection_outcomes(drafts, q, p)
    law = {}
    for index in range(len(drafts) + 1):
        mass = sum(chance for (a, _), chance in exact.items() if a == index)
        for last, chance in enumerate(p[index]):
            law[index, last] = mass * chance
    return law


def is_targets_law(outcomes, target, draft, gamma, num_tokens):
    law = testing.enumerate_verifier(
        outcomes, draft, target, gamma=gamma, num_tokens=num_tokens
    )
    assert sum(law.values()) == 1
    wanted = {(): F(1)}
    for _ in range(num_tokens):
        wanted = {
            (*tokens, v): chance * mass
            for tokens, chance in wanted.items()
            for v, mass in enumerate(target(tokens))
            if mass
        }
    return law == wanted


@pytest.mark.parametrize("name", sorted(OUTCOMES))
@pytest.mark.parametrize("gamma", [1, 2, 3])
def test_output_law_is_the_targets_exactly(name, gamma):
    target, draft = random_law(0), random_law(1)
    assert is_targets_law(OUTCOMES[name], target, draft, gamma, 3)


@pytest.mark.parametrize("wrong", [always_accept, without_subtraction])
def test_wrong_rules_do_not_give_the_targets_law(wrong):
    """The negative controls of the enumeration."""
    assert not is_targets_law(wrong, random_law(0), random_law(1), 2, 3)


def test_a_greedy_draft_is_a_point_mass():
    """https://github.com/jaymody/speculative-sampling/issues/3"""
    p, q = [F(5, 10), F(3, 10), F(2, 10)], [F(45, 100), F(35, 100), F(20, 100)]
    point = [F(1), F(0), F(0)]
    assert is_targets_law(
        testing.rejection_outcomes, lambda t: p, lambda t: point, 2, 2
    )

    def raw_softmax(drafts, law, target):
        return testing.rejection_outcomes(drafts, [q] * len(drafts), target)

    assert not is_targets_law(raw_softmax, lambda t: p, lambda t: point, 2, 2)


HALF, SIXTH = [F(1, 3), F(2, 3)], [F(1, 2), F(1, 3), F(1, 6)]


@pytest.mark.parametrize(
    "p,q,gamma,expected",
    [
        (HALF, HALF[::-1], 2, F(10, 9)),
        (HALF, HALF[::-1], 3, F(38, 27)),
        (HALF, HALF[::-1], 4, F(130, 81)),
        (SIXTH, [F(1, 5), F(1, 5), F(3, 5)], 2, F(799, 900)),
    ],
)
def test_golden_expected_accepted_drafts(p, q, gamma, expected):
    """Token verification in Sun et al., arXiv 2403.10444, by hand and by the code."""
    assert (
        testing.expected_accepted(
            testing.rejection_outcomes, lambda t: q, lambda t: p, gamma=gamma
        )
        == expected
    )
    _, verdict = run(
        "rejection",
        [[float(x) for x in q]] * gamma,
        [[float(x) for x in p]] * (gamma + 1),
    )
    accepted = np.asarray(verdict.num_accepted)
    error = accepted.std() / np.sqrt(len(accepted))
    assert abs(accepted.mean() - float(expected)) < 4 * error
    assert abs(accepted.mean() - float(expected) * 1.08) > 4 * error  # a control


@functools.partial(jax.jit, static_argnums=(0, 3))
def _run(verifier, log_q, log_p, count, drafts, drafted):
    """`count` rows of one block; drafts are drawn from q unless given."""
    gamma, size = log_q.shape
    keys = jax.random.split(jax.random.key(5), gamma)
    if drafts is None:
        drafts = jnp.stack(
            [
                jax.random.categorical(key, row, shape=(count,))
                for key, row in zip(keys, log_q, strict=True)
            ],
            axis=1,
        ).astype(jnp.int32)
    proposal = Proposal.chain(
        drafts,
        jnp.broadcast_to(log_q, (count, gamma, size)),
        jnp.full((count,), drafted, jnp.int32),
    )
    log_p = jnp.broadcast_to(log_p, (count, gamma + 1, size))
    return drafts, verifier(row_keys(jnp.arange(count)), proposal, log_p)


def run(name, q, p, count=20_000, drafts=None, drafted=None):
    with np.errstate(divide="ignore"):
        log_q, log_p = np.log(np.float32(q)), np.log(np.float32(p))
    if drafts is not None:
        drafts = jnp.tile(jnp.array([drafts], jnp.int32), (count, 1))
    drafted = len(q) if drafted is None else drafted
    return _run(
        verifiers.get(name)(),
        jnp.array(log_q),
        jnp.array(log_p),
        count,
        drafts,
        drafted,
    )


@pytest.mark.parametrize("name", sorted(OUTCOMES))
@pytest.mark.parametrize("drafts", [(0, 1), (2, 2), (1, 0)])
def test_code_follows_the_exact_law_of_its_outcomes(name, drafts):
    """Jointly: how many drafts stay, and which token comes behind them."""
    q = [[0.2, 0.5, 0.3], [0.6, 0.3, 0.1]]
    p = [[0.5, 0.2, 0.3], [0.1, 0.3, 0.6], [0.3, 0.3, 0.4]]
    _, verdict = run(name, q, p, drafts=drafts)
    accepted, tokens = np.asarray(verdict.num_accepted), np.asarray(verdict.tokens)
    last = np.take_along_axis(tokens, accepted[:, None], 1)[:, 0]
    counts = testing.count_sequences(np.stack([accepted, last], 1), 3)
    law = np.zeros((3, 3))
    for outcome, chance in OUTCOMES[name](drafts, q, p).items():
        law[outcome] = chance
    assert testing.chi_square(counts, law) > 1e-3
    wrong = np.zeros((3, 3))
    for outcome, chance in without_subtraction(drafts, q, p).items():
        wrong[outcome] = chance
    if name == "rejection" and (wrong != law).any():
        assert testing.chi_square(counts, wrong) < 1e-6
    for row in range(3):  # accepted drafts come first, as they are
        np.testing.assert_array_equal(
            tokens[accepted > row, row], drafts[row] if row < 2 else 0
        )


each = pytest.mark.parametrize("name", verifiers.names())


@each
def test_says_whether_it_is_lossless(name):
    assert isinstance(verifiers.get(name).lossless, bool)
    assert verifiers.get(name)() == verifiers.get(name)()  # hashable, comparable
    assert hash(verifiers.get(name)()) == hash(verifiers.get(name)())


@each
def test_padding_is_never_accepted(name):
    p = [[1.0, 0, 0]] * 3
    _, verdict = run(name, p[:2], p, count=64, drafts=(0, 0), drafted=1)
    assert (np.asarray(verdict.num_accepted) <= 1).all()
    _, verdict = run(name, p[:2], p, count=64, drafts=(0, 0), drafted=0)
    assert (np.asarray(verdict.num_accepted) == 0).all()
    assert (np.asarray(verdict.tokens)[:, 0] == 0).all()


@each
def test_a_token_that_the_target_cannot_emit_is_never_kept(name):
    q, p = [[0.5, 0.5, 0.0]] * 2, [[0.0, 0.5, 0.5]] * 3
    _, verdict = run(name, q, p, count=512)
    accepted, tokens = np.asarray(verdict.num_accepted), np.asarray(verdict.tokens)
    for position in range(3):
        assert (tokens[accepted >= position, position] != 0).all()


def test_a_draft_that_agrees_is_always_kept_by_rejection():
    p = [[0.2, 0.5, 0.3]] * 3
    _, verdict = run("rejection", p[:2], p)
    assert (np.asarray(verdict.num_accepted) == 2).all()


def noisy(p, scale=1e-9):
    """p with the rounding of bfloat16 on top."""
    noise = np.random.default_rng(0).normal(size=np.shape(p)) * scale
    return np.float32(jnp.asarray(np.array(p) + noise, jnp.bfloat16))


ONE_HOT, UNIFORM = [0.0, 1.0, 0.0], [1 / 3] * 3


@pytest.mark.parametrize(
    "p,q",
    [
        (ONE_HOT, ONE_HOT),
        (UNIFORM, UNIFORM),
        ([0.2, 0.5, 0.3], noisy([0.2, 0.5, 0.3])),
        (UNIFORM, noisy(UNIFORM)),
    ],
)
def test_an_empty_residual_falls_back_to_the_target(p, q, monkeypatch):
    """https://github.com/jaymody/speculative-sampling/issues/5

    The uniform is forced to its largest value, so that rounding alone rejects.
    """
    real = jax.random.uniform
    largest = float(np.nextafter(np.float32(1), np.float32(0)))

    def uniform(key, shape=(), *args, **kwargs):
        # The accept test asks for gamma numbers, a draw for two.
        if shape == (3,):
            return jnp.full(shape, largest)
        return real(key, shape, *args, **kwargs)

    monkeypatch.setattr(jax.random, "uniform", uniform)
    with np.errstate(divide="ignore"):
        log_q = jnp.log(jnp.asarray([[q] * 3] * 64, jnp.float32))
        log_p = jnp.log(jnp.asarray([[p] * 4] * 64, jnp.float32))
    drafts = jnp.full((64, 3), 1, jnp.int32)
    verdict = verifiers.Rejection()(
        row_keys(jnp.arange(64)), Proposal.chain(drafts, log_q, jnp.full(64, 3)), log_p
    )
    accepted, tokens = np.asarray(verdict.num_accepted), np.asarray(verdict.tokens)
    last = np.take_along_axis(tokens, accepted[:, None], 1)[:, 0]
    assert ((last >= 0) & (last < 3)).all()
    assert (np.asarray(p)[last] > 0).all()


def test_forced_rejection_of_an_agreeing_draft_still_draws_from_the_target():
    """p == q, all drafts refused: what is drawn instead must follow p."""
    p = np.array([0.2, 0.5, 0.3], np.float32)
    # num_drafted = 0 is such a refusal: nothing was drafted, the residual is p.
    _, verdict = run("rejection", [p] * 2, [p] * 3, drafted=0)
    counts = np.bincount(np.asarray(verdict.tokens)[:, 0], minlength=3)
    assert testing.chi_square(counts, p) > 1e-3
    assert testing.chi_square(counts, [0.25, 0.45, 0.3]) < 1e-6


@each
def test_rows_do_not_depend_on_each_other(name):
    log_q = jnp.log(jnp.asarray([[[0.2, 0.5, 0.3]] * 2] * 6))
    log_p = jnp.log(jnp.asarray([[[0.5, 0.2, 0.3]] * 3] * 6))
    drafts = jnp.array([[0, 1], [1, 1], [2, 0], [1, 2], [0, 0], [2, 2]], jnp.int32)
    keys, order = row_keys(jnp.arange(6)), jnp.array([4, 2, 0, 5, 3, 1])
    verifier = jax.jit(verifiers.get(name)())

    def go(rows):
        proposal = Proposal.chain(drafts[rows], log_q[rows], jnp.full(6, 2))
        return verifier(keys[rows], proposal, log_p[rows])

    straight, shuffled = go(jnp.arange(6)), go(order)
    jax.tree.map(
        lambda a, b: np.testing.assert_array_equal(a[order], b), straight, shuffled
    )


@each
def test_a_draft_of_nan_leaves_the_targets_law(name):
    """https://github.com/youssofal/MTPLX/issues/82"""
    p = [[0.2, 0.5, 0.3]] * 3
    _, verdict = run(name, [[float("nan")] * 3] * 2, p, drafts=(1, 1))
    first = np.asarray(verdict.tokens)[:, 0]
    assert chi(first, p[0]) > 1e-3
    assert chi(first, [0.25, 0.45, 0.3]) < 1e-6


def chi(tokens, law):
    return testing.chi_square(np.bincount(tokens, minlength=len(law)), law)
