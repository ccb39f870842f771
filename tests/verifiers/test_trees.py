"""Verifiers of trees: their exact laws, and that the code follows them draw by draw."""

import functools
from fractions import Fraction as F

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import testing, verifiers
from specjax.core import Proposal
from specjax.ops import one_hot_log, row_keys
from tests.marks import sampled
from tests.verifiers.test_verifiers import random_law, targets_law

SIBLINGS = ("best", "with_replacement", "without_replacement")
TREES = {
    "one of three": (-1, -1, -1),
    "binary": (-1, -1, 0, 0, 1, 1),
    "deep": (-1, -1, 0, 2, 2),
    "mixed": (-1, 0, -1, 2, 0),  # neither level by level nor branch by branch
}
OUTCOMES = {
    "rejection": testing.tree_rejection_outcomes,
    "greedy": testing.tree_match_outcomes,
}


def test_every_verifier_of_trees_that_is_lossless_has_an_exact_law():
    found = {n for n in verifiers.names() if verifiers.get(n).trees}
    assert found == {*OUTCOMES, "typical"}
    assert all(verifiers.get(name).lossless for name in OUTCOMES)


def is_targets_law(outcomes, siblings, parents, said=None, seed=4):
    target, draft = random_law(seed), random_law(seed + 1)
    depth = max(len(path(parents, node)) for node in range(len(parents)))
    said = testing.node_law(draft, said) if said else None
    law = testing.enumerate_tree(
        outcomes,
        testing.node_law(draft, siblings),
        target,
        parents,
        num_tokens=depth + 1,
        said=said,
    )
    assert sum(law.values()) == 1
    return law == targets_law(target, depth + 1)


def path(parents, node):
    return [] if node < 0 else [*path(parents, parents[node]), node]


@pytest.mark.parametrize("name", OUTCOMES)
@pytest.mark.parametrize("siblings", SIBLINGS)
@pytest.mark.parametrize("tree", TREES)
def test_output_law_is_the_targets_exactly(name, siblings, tree):
    """https://github.com/SafeAILab/EAGLE/issues/329

    Jointly, of as many tokens as a round may emit.
    """
    assert is_targets_law(OUTCOMES[name], siblings, TREES[tree])


def wrong_rejection(left):
    """Rejection where `left(p, q, token)` takes the place of the residual."""

    def outcomes(parents, tokens, q, p):
        law = {}

        def walk(nodes, reached):
            node = nodes[-1] if nodes else -1
            here = p[node + 1]
            for child, parent in enumerate(parents):
                if parent != node:
                    continue
                token = tokens[child]
                accept = min(1, here[token] / q[child][token])
                walk((*nodes, child), reached * accept)
                rest = left(here, q[child], token)
                here = [x / sum(rest) for x in rest] if sum(rest) else here
                reached *= 1 - accept
            for last, mass in enumerate(here):
                if reached * mass:
                    law[nodes, last] = reached * mass

        walk((), F(1))
        return law

    return outcomes


def subtracted(p, q, token):
    return [max(a - b, 0) for a, b in zip(p, q, strict=True)]


def kept(p, q, token):
    return p


def removed(p, q, token):
    return [0 if v == token else x for v, x in enumerate(p)]


@pytest.mark.parametrize("siblings", SIBLINGS)
def test_point_masses_are_lossless_whatever_was_drawn(siblings):
    """https://github.com/vllm-project/vllm/issues/40149

    Given its tokens a tree of point masses leaves the target's law, so it is no fault
    to leave q unsaid; it is fewer drafts that stay.
    """

    def outcomes(parents, tokens, q, p):
        q = [[F(int(v == token)) for v in range(len(p[0]))] for token in tokens]
        return testing.tree_rejection_outcomes(parents, tokens, q, p)

    assert is_targets_law(outcomes, siblings, TREES["binary"])


@pytest.mark.parametrize(
    "left,drawn,said",
    [
        # The reference of these controls is right.
        (subtracted, "without_replacement", None),
        # The next sibling is held to p again.
        (kept, "without_replacement", None),
        (kept, "with_replacement", None),
        # Drawn siblings are tried with p / q, but a rejected one is only taken out.
        (removed, "without_replacement", None),
        (removed, "with_replacement", None),
        # Drawn without replacement, but the law is that of the first sibling.
        (subtracted, "without_replacement", "with_replacement"),
        # Candidates that were not drawn come with the softmax they were chosen by.
        (subtracted, "best", "with_replacement"),
    ],
)
def test_a_wrong_residual_and_a_misstated_law_are_found_out(left, drawn, said):
    """The negative controls: https://github.com/SafeAILab/EAGLE/issues/329"""
    right = left is subtracted and said is None
    assert is_targets_law(wrong_rejection(left), drawn, TREES["binary"], said) == right


P, Q = [F(1, 2), F(1, 3), F(1, 6)], [F(1, 5), F(1, 5), F(3, 5)]
GOLDEN = {1: F(17, 30), 2: F(37, 50), 3: F(629, 750), 4: F(1633, 1875)}


@pytest.mark.parametrize("count", sampled(GOLDEN, 2))
def test_golden_chance_that_one_of_k_drafts_stays(count):
    """SpecInfer, arXiv 2305.09781, algorithm 2, by hand and by the code."""
    parents = (-1,) * count
    draft = testing.node_law(lambda tokens: Q, "with_replacement")
    accepted, law = 0, [0, 0, 0]
    for tokens in np.ndindex(*(3,) * count):
        drawn = F(1)
        for token in tokens:
            drawn *= draft((), ())[token]
        outcomes = testing.tree_rejection_outcomes(
            parents, tokens, [Q] * count, [P] * (count + 1)
        )
        for (nodes, last), mass in outcomes.items():
            first = tokens[nodes[0]] if nodes else last
            law[first] += drawn * mass
            accepted += drawn * mass * len(nodes)
    assert accepted == GOLDEN[count]
    assert law == P

    rows = 20_000
    q, p = (jnp.log(jnp.array([float(x) for x in law])) for law in (Q, P))
    tokens = jax.random.categorical(jax.random.key(1), q, shape=(rows, count))
    # One child would be a chain: another that is padding makes it a tree.
    tree = (*parents, -1)
    tokens = jnp.pad(tokens, ((0, 0), (0, 1))).astype(jnp.int32)
    verdict = verify(
        "rejection",
        tree,
        tokens,
        jnp.broadcast_to(q, (rows, count + 1, 3)),
        jnp.broadcast_to(p, (rows, count + 2, 3)),
        drafted=count,
    )
    stays = np.asarray(verdict.num_accepted)
    chance = float(GOLDEN[count])
    error = np.sqrt(chance * (1 - chance) / rows)
    assert abs(stays.mean() - chance) < 4 * error
    assert abs(stays.mean() - chance * 1.04) > 4 * error  # the negative control
    counts = np.bincount(np.asarray(verdict.tokens)[:, 0], minlength=3)
    assert testing.chi_square(counts, [float(x) for x in P]) > 1e-3
    assert testing.chi_square(counts, [0.46, 0.36, 0.18]) < 1e-6


@functools.partial(jax.jit, static_argnums=(0, 1, 6))
def _verify(verifier, static, parents, tokens, log_q, log_p, depth, drafted):
    rows = tokens.shape[0]
    proposal = Proposal.tree(
        tokens,
        log_q,
        jnp.broadcast_to(drafted, (rows,)),
        static if static is not None else parents,
        depth,
    )
    return verifier(row_keys(jnp.arange(rows)), proposal, log_p)


def verify(name, parents, tokens, log_q, log_p, drafted=None, dynamic=False):
    """A verdict for each row of `tokens [B, M]`."""
    drafted = len(parents) if drafted is None else drafted
    depth = max(len(path(parents, node)) for node in range(len(parents)))
    rows = jnp.tile(jnp.array([parents], jnp.int32), (tokens.shape[0], 1))
    return _verify(
        verifiers.get(name)(),
        None if dynamic else parents,
        rows,
        tokens,
        log_q,
        log_p,
        depth,
        drafted,
    )


def random_tree(parents, size=3, seed=0, sharp=1.5):
    """One set of tokens and laws for a tree, as numpy arrays."""
    rng = np.random.default_rng(seed)
    laws = np.exp(sharp * rng.normal(size=(2 * len(parents) + 1, size)))
    laws /= laws.sum(-1, keepdims=True)
    tokens = rng.integers(0, size, len(parents))
    return tokens, laws[: len(parents)], laws[len(parents) :]


@pytest.mark.parametrize("points", [False, True])
@pytest.mark.parametrize("name", OUTCOMES)
@pytest.mark.parametrize("tree", sampled(["binary", "mixed"], "mixed"))
def test_code_follows_the_exact_law_of_its_outcomes(name, tree, points):
    """Jointly: which node is the last to stay, and which token comes behind it."""
    parents, rows = TREES[tree], 20_000
    tokens, q, p = random_tree(parents, seed=len(tree))
    log_q = jnp.broadcast_to(jnp.log(jnp.float32(q)), (rows, *q.shape))
    log_p = jnp.broadcast_to(jnp.log(jnp.float32(p)), (rows, *p.shape))
    verdict = verify(
        name,
        parents,
        jnp.tile(jnp.asarray(tokens, jnp.int32)[None], (rows, 1)),
        None if points else log_q,
        log_p,
    )
    ends = np.asarray(node_at_end(verdict))
    last = np.asarray(last_token(verdict))
    counts = np.zeros((len(parents) + 1, 3))
    np.add.at(counts, (ends + 1, last), 1)

    def p_value(outcomes, q):
        law = np.zeros_like(counts)
        for (nodes, token), mass in outcomes(parents, tokens, q, p).items():
            law[(nodes[-1] if nodes else -1) + 1, token] += mass
        return testing.chi_square(counts, law), law

    if points:
        q = np.eye(3)[tokens]
    fits, law = p_value(OUTCOMES[name], q)
    assert fits > 1e-3
    other = "greedy" if name == "rejection" else "rejection"
    for outcomes, laws in ((OUTCOMES[other], q), (OUTCOMES[name], q[::-1])):
        with np.errstate(divide="ignore", invalid="ignore"):
            wrong, different = p_value(outcomes, np.maximum(laws, 1e-9))
        if np.abs(different - law).max() > 0.05:
            assert wrong < 1e-6
    # The path is a path, and the tokens are those along it.
    for row in range(0, rows, 997):
        count = int(verdict.num_accepted[row])
        nodes = np.asarray(verdict.path[row, :count]).tolist()
        assert nodes == (path(parents, nodes[-1]) if nodes else [])
        assert np.asarray(verdict.tokens[row, :count]).tolist() == list(tokens[nodes])


def node_at_end(verdict):
    padded = jnp.pad(verdict.path, ((0, 0), (1, 0)), constant_values=-1)
    return jnp.take_along_axis(padded, verdict.num_accepted[:, None], axis=1)[:, 0]


def last_token(verdict):
    return jnp.take_along_axis(verdict.tokens, verdict.num_accepted[:, None], 1)[:, 0]


each = pytest.mark.parametrize(
    "name", [name for name in verifiers.names() if verifiers.get(name).trees]
)


def batch(parents, rows=256, seed=0, points=False):
    """Tokens drawn from random laws, different in each row."""
    p, q, t = jax.random.split(jax.random.key(seed), 3)
    size, shape = len(parents), (rows, len(parents), 4)
    log_p = jax.nn.log_softmax(jax.random.normal(p, (rows, size + 1, 4)))
    log_q = jax.nn.log_softmax(jax.random.normal(q, shape))
    tokens = jax.random.categorical(t, log_q).astype(jnp.int32)
    return tokens, None if points else log_q, log_p


@each
@pytest.mark.parametrize("points", [False, True])
@pytest.mark.full
def test_a_dynamic_tree_of_the_same_shape_is_the_same(name, points):
    """Draw by draw; and each row may have a shape of its own."""
    parents, other = TREES["binary"], (-1, 0, 1, 2, -1, 4)
    tokens, log_q, log_p = batch(parents, points=points)
    static = verify(name, parents, tokens, log_q, log_p)
    dynamic = verify(name, parents, tokens, log_q, log_p, dynamic=True)
    jax.tree.map(np.testing.assert_array_equal, static, dynamic)
    assert len({*np.asarray(static.num_accepted).tolist()}) == 3

    alone = verify(name, other, tokens, log_q, log_p)
    odd = jnp.arange(256) % 2 == 1
    rows = jnp.where(odd[:, None], jnp.array(other)[None], jnp.array(parents)[None])
    mixed = _verify(
        verifiers.get(name)(), None, rows, tokens, log_q, log_p, 4, len(parents)
    )
    for kind, wanted in ((odd, alone), (~odd, static)):
        there = np.asarray(kind)
        np.testing.assert_array_equal(
            mixed.num_accepted[there], wanted.num_accepted[there]
        )
        width = wanted.tokens.shape[1]
        emitted = np.arange(width)[None] <= np.asarray(wanted.num_accepted)[:, None]
        np.testing.assert_array_equal(
            np.where(emitted, mixed.tokens[:, :width], 0)[there],
            np.where(emitted, wanted.tokens, 0)[there],
        )


@each
def test_a_node_below_the_depth_is_never_accepted(name):
    parents = (-1, 0, 1, 2, 3)
    rows = jnp.tile(jnp.array([parents], jnp.int32), (8, 1))
    certain = one_hot_log(jnp.zeros((8, 6), int), 4)
    tokens = jnp.zeros((8, 5), jnp.int32)
    verdict = _verify(
        verifiers.get(name)(), None, rows, tokens, None, certain, 2, len(parents)
    )
    assert (verdict.num_accepted == 2).all() and verdict.tokens.shape == (8, 3)


@each
def test_padding_is_never_accepted(name):
    parents = TREES["binary"]
    certain = one_hot_log(jnp.zeros((4, 7), int), 4)
    tokens = jnp.zeros((4, 6), jnp.int32)
    verdict = verify(
        name, parents, tokens, None, certain, drafted=jnp.array([6, 3, 1, 0])
    )
    assert verdict.num_accepted.tolist() == [2, 2, 1, 0]
    assert (last_token(verdict) == 0).all()


@each
def test_a_token_that_the_target_cannot_emit_is_never_kept(name):
    parents = TREES["binary"]
    tokens, log_q, _ = batch(parents)
    log_p = jnp.log(jnp.broadcast_to(jnp.array([0.0, 0.5, 0.25, 0.25]), (256, 7, 4)))
    verdict = verify(name, parents, tokens, log_q, log_p)
    emitted = np.arange(3)[None] <= np.asarray(verdict.num_accepted)[:, None]
    assert (np.where(emitted, verdict.tokens, 1) != 0).all()
    assert (np.asarray(tokens) == 0).any()


@each
@pytest.mark.full
def test_rows_do_not_depend_on_each_other(name):
    parents = TREES["mixed"]
    tokens, log_q, log_p = batch(parents, rows=6)
    keys, order = row_keys(jnp.arange(6)), jnp.array([4, 2, 0, 5, 3, 1])

    @jax.jit
    def go(rows):
        proposal = Proposal.tree(
            tokens[rows], log_q[rows], jnp.full(6, 5), parents, depth=2
        )
        return verifiers.get(name)()(keys[rows], proposal, log_p[rows])

    straight, shuffled = go(jnp.arange(6)), go(order)
    jax.tree.map(
        lambda a, b: np.testing.assert_array_equal(a[order], b), straight, shuffled
    )


@pytest.mark.parametrize("name", OUTCOMES)
def test_a_draft_of_nan_leaves_the_targets_law(name):
    parents, rows = TREES["one of three"], 20_000
    p = [0.2, 0.5, 0.3]
    log_p = jnp.broadcast_to(jnp.log(jnp.array(p)), (rows, 4, 3))
    tokens = jnp.ones((rows, 3), jnp.int32)
    log_q = jnp.full((rows, 3, 3), jnp.nan)
    verdict = verify(name, parents, tokens, log_q, log_p)
    counts = np.bincount(np.asarray(verdict.tokens)[:, 0], minlength=3)
    assert testing.chi_square(counts, p) > 1e-3
    assert testing.chi_square(counts, [0.25, 0.45, 0.3]) < 1e-6


def test_a_first_child_that_agrees_always_stays():
    """Drawn from p itself, at every depth; its siblings are then not looked at."""
    parents = (-1, -1, 0, 0, 2)
    _, _, log_p = batch(parents, rows=512)
    log_q = log_p[:, jnp.array([0, 0, 1, 1, 3])]
    tokens = jax.random.categorical(jax.random.key(7), log_q).astype(jnp.int32)
    verdict = verify("rejection", parents, tokens, log_q, log_p)
    assert (verdict.num_accepted == 3).all()
    assert (verdict.path == jnp.array([[0, 2, 4]])).all()


@pytest.mark.full
class TestTypical:
    """Cai et al., Medusa, arXiv 2401.10774, section 2.3.1."""

    def go(self, p, tokens, parents, epsilon=0.3, delta=0.09):
        log_p = jnp.log(jnp.asarray([p], jnp.float32))
        tokens = jnp.asarray([tokens], jnp.int32)
        depth = max(len(path(parents, n)) for n in range(len(parents)))
        proposal = Proposal.tree(
            tokens, None, jnp.array([len(parents)]), parents, depth
        )
        verifier = verifiers.Typical(epsilon, delta)
        verdict = verifier(row_keys(jnp.arange(1)), proposal, log_p)
        count = int(verdict.num_accepted[0])
        return verdict.path[0, :count].tolist(), int(last_token(verdict)[0])

    def test_the_longest_path_stays_and_the_arg_max_follows(self):
        flat, sure = [0.4, 0.35, 0.25], [0.9, 0.06, 0.04]
        # Of the root's children both may stay, but only the second goes on.
        p = [flat, sure, flat, flat, sure]
        assert self.go(p, [0, 1, 2, 2], (-1, -1, 0, 1)) == ([1, 3], 0)
        # The negative control: were the first's child likely, its path is likelier.
        assert self.go(p, [0, 1, 0, 2], (-1, -1, 0, 1)) == ([0, 2], 0)

    def test_the_threshold(self):
        p = np.array([0.5, 0.4, 0.06, 0.04])
        entropy = -(p * np.log(p)).sum()
        for epsilon, delta in ((0.3, 0.09), (0.05, 1.0), (0.45, 1.0), (1.0, 1.0)):
            for token in range(4):
                stays = p[token] > min(epsilon, delta * np.exp(-entropy))
                found, last = self.go([p] * 3, [token] * 2, (-1, -1), epsilon, delta)
                assert (found, last) == ([0] if stays else [], 0)

    def test_greedy_at_temperature_0(self):
        certain = [1.0, 0.0, 0.0]
        assert self.go([certain] * 4, [1, 0, 0], (-1, -1, 1)) == ([1, 2], 0)


@pytest.mark.parametrize(
    "name", [name for name in verifiers.names() if not verifiers.get(name).trees]
)
def test_verifiers_of_chains_refuse_a_tree(name):
    tokens, log_q, log_p = batch(TREES["mixed"], rows=2)
    with pytest.raises(ValueError, match="takes chains of drafts only, got a tree"):
        verify(name, TREES["mixed"], tokens, log_q, log_p)
