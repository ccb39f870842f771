"""Verifiers: their exact laws, and that the code follows them draw by draw."""

import functools
from fractions import Fraction as F

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import testing, verifiers
from specjax.core import Proposal, Sampling
from specjax.ops import one_hot_log, row_keys, warp
from tests.marks import sampled

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


LOSSLESS = {
    "rejection": testing.rejection_outcomes,
    "greedy": testing.match_outcomes,
    "block": testing.block_outcomes,
}
# At the settings that the classes have by default.
LOSSY = {
    "lossy_lin": testing.lossy_outcomes(lambda p: p / 0.5),
    "lossy_sq": testing.lossy_outcomes(lambda p: p / 0.25),
    "lossy_exp": testing.lossy_outcomes(lambda p: p**0.5),
    "lenience": testing.lossy_outcomes(lambda p: p / 0.5),
    "typical": testing.typical_outcomes(0.3, 0.09),
    "simulated": testing.simulated_outcomes([F(4, 5)]),
}
OUTCOMES = {**LOSSLESS, **LOSSY}


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


def block_with_the_residual_of_a_token(drafts, q, p):
    """Block verification that corrects with max(0, p - q), not max(0, b p - q)."""
    exact, law = testing.block_outcomes(drafts, q, p), {}
    for index in range(len(drafts) + 1):
        chance = sum(mass for (a, _), mass in exact.items() if a == index)
        left = p[index]
        if index < len(drafts):
            left = [max(a - b, 0) for a, b in zip(left, q[index], strict=True)]
        for last, mass in enumerate(left):
            law[index, last] = chance * mass / (sum(left) or 1)
    return law


WRONG = [always_accept, without_subtraction, block_with_the_residual_of_a_token]


def test_every_registered_verifier_has_an_exact_law():
    assert set(OUTCOMES) == set(verifiers.names())
    assert {name for name in OUTCOMES if verifiers.get(name).lossless} == set(LOSSLESS)


def targets_law(target, num_tokens):
    wanted = {(): F(1)}
    for _ in range(num_tokens):
        wanted = {
            (*tokens, v): chance * mass
            for tokens, chance in wanted.items()
            for v, mass in enumerate(target(tokens))
            if mass
        }
    return wanted


def is_targets_law(outcomes, target, draft, gamma, num_tokens, **settings):
    law = testing.enumerate_verifier(
        outcomes, draft, target, gamma=gamma, num_tokens=num_tokens, **settings
    )
    assert float(sum(law.values())) == pytest.approx(1, abs=1e-12)
    return law == targets_law(target, num_tokens)


@pytest.mark.parametrize("name", LOSSLESS)
@pytest.mark.parametrize("gamma", [1, 2, 3])
def test_output_law_is_the_targets_exactly(name, gamma):
    """Jointly, of as many tokens as a round may emit."""
    target, draft = random_law(4), random_law(5)
    assert is_targets_law(LOSSLESS[name], target, draft, gamma, gamma + 1)


def unsure(tokens):
    """Stops where the draft is not sure: a rule that looks at earlier drafts alone."""
    return len(tokens) > 0 and max(random_law(5)(tokens)) < F(3, 4)


@pytest.mark.parametrize("name", LOSSLESS)
def test_output_law_is_the_targets_if_the_draft_decides_how_long_it_is(name):
    target, draft = random_law(4), random_law(5)
    assert {unsure(tokens) for tokens in [(0,), (1,), (2,)]} == {True, False}
    assert is_targets_law(LOSSLESS[name], target, draft, 3, 3, stop=unsure)


@pytest.mark.parametrize("wrong", [*WRONG, *LOSSY.values()])
def test_wrong_rules_do_not_give_the_targets_law(wrong):
    """The negative controls of the enumeration, and what lossy means."""
    assert not is_targets_law(wrong, random_law(4), random_law(5), 2, 2)


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
GOLDEN = [
    (HALF, HALF[::-1], 2, F(10, 9), F(11, 9)),
    (HALF, HALF[::-1], 3, F(38, 27), F(5, 3)),
    (HALF, HALF[::-1], 4, F(130, 81), F(166, 81)),
    (SIXTH, [F(1, 5), F(1, 5), F(3, 5)], 2, F(799, 900), F(24, 25)),
]


@pytest.mark.parametrize("name", ["rejection", "block"])
@pytest.mark.parametrize("p,q,gamma,token,block", sampled(GOLDEN, *GOLDEN[::3]))
def test_golden_expected_accepted_drafts(name, p, q, gamma, token, block):
    """Sun et al., arXiv 2403.10444, by hand and by the code."""
    expected = block if name == "block" else token
    assert (
        testing.expected_accepted(LOSSLESS[name], lambda t: q, lambda t: p, gamma=gamma)
        == expected
    )
    _, verdict = run(
        name,
        [[float(x) for x in q]] * gamma,
        [[float(x) for x in p]] * (gamma + 1),
    )
    accepted = np.asarray(verdict.num_accepted)
    error = accepted.std() / np.sqrt(len(accepted))
    assert abs(accepted.mean() - float(expected)) < 4 * error
    # Two controls: a little more, and what the other verifier gives.
    other = token if name == "block" else block
    for wrong in (float(expected) * 1.08, float(other)):
        assert abs(accepted.mean() - wrong) > 4 * error


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
@pytest.mark.parametrize(
    "drafts",
    [(0, 1), *(pytest.param(d, marks=pytest.mark.full) for d in [(2, 2), (1, 0)])],
)
def test_code_follows_the_exact_law_of_its_outcomes(name, drafts):
    """Jointly: how many drafts stay, and which token comes behind them."""
    q = [[0.6, 0.1, 0.3], [0.5, 0.4, 0.1]]
    p = [[0.15, 0.6, 0.25], [0.1, 0.3, 0.6], [0.3, 0.3, 0.4]]
    _, verdict = run(name, q, p, drafts=drafts)
    accepted, tokens = np.asarray(verdict.num_accepted), np.asarray(verdict.tokens)
    last = np.take_along_axis(tokens, accepted[:, None], 1)[:, 0]
    counts = testing.count_sequences(np.stack([accepted, last], 1), 3)

    def p_value(outcomes):
        law = np.zeros((3, 3))
        for outcome, chance in outcomes(drafts, q, p).items():
            law[outcome] = chance
        return testing.chi_square(counts, law), law

    fits, law = p_value(OUTCOMES[name])
    assert fits > 1e-3
    # The controls: every other rule, where it says something else.
    others = [p_value(other) for other in (*OUTCOMES.values(), without_subtraction)]
    others = [fit for fit, other in others if np.abs(other - law).max() > 0.05]
    assert len(others) >= 2 and max(others) < 1e-6
    for row in range(3):  # accepted drafts come first, as they are
        np.testing.assert_array_equal(
            tokens[accepted > row, row], drafts[row] if row < 2 else 0
        )


each = pytest.mark.parametrize(
    "name", sampled(verifiers.names(), "rejection", "greedy", "lossy_exp")
)


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


@pytest.mark.parametrize(
    "name",
    sampled(
        [n for n in verifiers.names() if n != "simulated"],
        "rejection",
        "greedy",
        "lossy_exp",
    ),
)
def test_a_token_that_the_target_cannot_emit_is_never_kept(name):
    q, p = [[0.5, 0.5, 0.0]] * 2, [[0.0, 0.5, 0.5]] * 3
    _, verdict = run(name, q, p, count=512)
    accepted, tokens = np.asarray(verdict.num_accepted), np.asarray(verdict.tokens)
    for position in range(3):
        assert (tokens[accepted >= position, position] != 0).all()


@pytest.mark.parametrize("name", ["rejection", "block"])
def test_a_draft_that_agrees_is_always_kept(name):
    p = [[0.2, 0.5, 0.3]] * 3
    _, verdict = run(name, p[:2], p)
    assert (np.asarray(verdict.num_accepted) == 2).all()


@pytest.mark.parametrize("name", sorted(OUTCOMES))
@pytest.mark.full
def test_point_masses_may_be_left_unsaid(name):
    """`log_q=None` is what a one-hot law is, draw by draw."""
    p = jnp.log(jnp.asarray([[[0.5, 0.2, 0.3], [0.1, 0.3, 0.6], [0.3, 0.3, 0.4]]]))
    p, keys = jnp.tile(p, (512, 1, 1)), row_keys(jnp.arange(512))
    tokens = jax.random.randint(jax.random.key(0), (512, 2), 0, 3)
    verify = jax.jit(verifiers.get(name)())
    said, unsaid = (
        verify(keys, Proposal.chain(tokens, log_q, jnp.arange(512) % 3), p)
        for log_q in (one_hot_log(tokens, 3), None)
    )
    jax.tree.map(np.testing.assert_array_equal, said, unsaid)
    assert len({*np.asarray(said.num_accepted).tolist()}) == 3


def random_block(rows, gamma=3, size=5, seed=0):
    """Keys, a proposal and the target's law, all of them random."""
    p, q, t = jax.random.split(jax.random.key(seed), 3)
    log_p = jax.nn.log_softmax(2 * jax.random.normal(p, (rows, gamma + 1, size)))
    log_q = jax.nn.log_softmax(2 * jax.random.normal(q, (rows, gamma, size)))
    tokens = jax.random.categorical(t, log_q).astype(jnp.int32)
    proposal = Proposal.chain(tokens, log_q, jnp.full(rows, gamma))
    return row_keys(jnp.arange(rows)), proposal, log_p


@pytest.mark.parametrize(
    "strict",
    [
        verifiers.LossyLinear(1.0),
        verifiers.LossySquare(1.0),
        verifiers.LossyExponential(1.0),
        verifiers.Lenience(1.0),
    ],
    ids=lambda v: type(v).__name__,
)
@pytest.mark.full
def test_without_slack_lossy_verifiers_are_rejection_bit_for_bit(strict):
    block = random_block(512)
    exact, same = (jax.jit(v)(*block) for v in (verifiers.Rejection(), strict))
    jax.tree.map(np.testing.assert_array_equal, exact, same)
    loose = jax.jit(type(strict)(0.3))(*block)  # the negative control
    assert (loose.num_accepted > exact.num_accepted).any()
    assert (loose.num_accepted >= exact.num_accepted).all()


@pytest.mark.parametrize(
    "name", [name for name in LOSSY if name not in ("typical", "simulated")]
)
@pytest.mark.parametrize("seed", range(5))
def test_a_lossy_verifier_never_exceeds_its_bound(name, seed):
    """The first token x comes with at most f(p(x)); the whole law in closed form."""
    loosen = {"lossy_sq": lambda p: p / F(1, 4), "lossy_exp": lambda p: p**0.5}
    loosen = loosen.get(name, lambda p: p / F(1, 2))
    p, q = random_law(seed)(()), random_law(seed + 50)(())
    law = testing.enumerate_verifier(
        testing.lossy_outcomes(loosen), lambda t: q, lambda t: p, gamma=1, num_tokens=1
    )
    kept = [min(loosen(a), b) for a, b in zip(p, q, strict=True)]
    over = [max(loosen(a) - b, 0) for a, b in zip(p, q, strict=True)]
    for token in range(SIZE):
        rest = (1 - sum(kept)) * over[token] / (sum(over) or 1)
        found = law.get((token,), 0)
        assert float(found) == pytest.approx(float(kept[token] + rest), abs=1e-12)
        assert found <= loosen(p[token]) + 1e-12


@pytest.mark.parametrize("lenience", [1.0, 0.6, 0.3, 0.05])
@pytest.mark.full
def test_lenience_at_temperature_0_compares_with_the_best_token(lenience):
    """Leviathan et al., arXiv 2211.17192, appendix A.5, with p before the arg max."""
    p = np.array([0.5, 0.3, 0.15, 0.05], np.float32)
    logits = jnp.tile(jnp.log(p)[None, None], (8, 3, 1)) + 7.0
    log_p = warp(logits, Sampling(0.0))
    tokens = jnp.array([[a, b] for a in range(4) for b in (0, 1)], jnp.int32)
    proposal = Proposal.chain(tokens, one_hot_log(tokens, 4), jnp.full(8, 2))
    verifier = verifiers.Lenience(lenience)
    verdict = verifier(row_keys(jnp.arange(8)), proposal, log_p, logits)
    for row, drafts in enumerate(tokens.tolist()):
        stay = 0
        while stay < 2 and p[drafts[stay]] >= lenience * p.max() * (1 - 1e-6):
            stay += 1
        assert verdict.num_accepted[row] == stay
        assert verdict.tokens[row, : stay + 1].tolist() == [*drafts[:stay], 0]
    # Without the raw logits, and above temperature 0, nothing but the ratio counts.
    blind = verifier(row_keys(jnp.arange(8)), proposal, log_p)
    assert blind.num_accepted.tolist() == [2, 1, 0, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("value", [0, 0.0, -0.5, 1.5, float("nan"), True])
@pytest.mark.parametrize(
    "name,setting",
    [
        ("lossy_lin", "epsilon"),
        ("lossy_sq", "epsilon"),
        ("lossy_exp", "epsilon"),
        ("lenience", "lenience"),
        ("typical", "epsilon"),
        ("typical", "delta"),
    ],
)
def test_a_setting_out_of_range_is_refused(name, setting, value):
    with pytest.raises(ValueError, match=rf"needs {setting} in \(0, 1\], got"):
        verifiers.get(name)(**{setting: value})


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


@pytest.mark.parametrize("name", LOSSLESS)
def test_a_draft_of_nan_leaves_the_targets_law(name):
    """https://github.com/youssofal/MTPLX/issues/82"""
    p = [[0.2, 0.5, 0.3]] * 3
    _, verdict = run(name, [[float("nan")] * 3] * 2, p, drafts=(1, 1))
    first = np.asarray(verdict.tokens)[:, 0]
    assert chi(first, p[0]) > 1e-3
    assert chi(first, [0.25, 0.45, 0.3]) < 1e-6


def chi(tokens, law):
    return testing.chi_square(np.bincount(tokens, minlength=len(law)), law)
