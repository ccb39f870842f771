"""Relation-based terms against float64 oracles, closed forms, and what they refuse."""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import distill
from specjax.core import LMOutput
from specjax.distill import Batch

pytestmark = pytest.mark.full

PAIR = (("layers.0", "layers.0"),)


def output(**features):
    named = {name.replace("_", "."): x for name, x in features.items()}
    return LMOutput(jnp.zeros(()), jnp.zeros(()), named)


def rows(*vectors):
    """Rows of two tokens whose second one counts: pooled, these vectors."""
    x = np.asarray(vectors, np.float32)
    return output(layers_0=np.stack([np.full_like(x, 9), x], axis=1))


def batch_of(number, empty=0):
    length = [2] * (number - empty) + [0] * empty
    return Batch.of(np.zeros((number, 2)), length=length)


@functools.partial(jax.jit, static_argnums=0)
def mean(term, student, teacher, batch):
    total = term.per_batch((), student, teacher, batch)
    return total / jnp.maximum(jnp.sum(term.mask(batch)), 1)


def huber(x):
    return 0.5 * x * x if abs(x) < 1 else abs(x) - 0.5


def relations(vectors):
    """Distances over their mean, and cosines at the middle row."""
    pairs = list(itertools.permutations(range(len(vectors)), 2))
    distance = {(i, j): np.linalg.norm(vectors[i] - vectors[j]) for i, j in pairs}
    mean = np.mean(list(distance.values()))
    cosine = {
        (i, j, k): (vectors[i] - vectors[j])
        @ (vectors[k] - vectors[j])
        / distance[i, j]
        / distance[k, j]
        for i, j, k in itertools.permutations(range(len(vectors)), 3)
    }
    return {pair: d / mean for pair, d in distance.items()}, cosine


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_relational_kd_equals_a_float64_oracle(pooling):
    rng = np.random.default_rng(0)
    u, v = rng.normal(size=(5, 7, 4)), rng.normal(size=(5, 7, 6))
    batch = Batch.of(np.zeros((5, 7)), length=[7, 4, 0, 6, 3], prompt_length=2)
    counted = [np.flatnonzero(row) for row in batch.mask if row.any()]
    pooled = [
        [
            np.mean(x[row, tokens if pooling == "mean" else tokens[-1:]], axis=0)
            for row, tokens in zip([0, 1, 3, 4], counted, strict=True)
        ]
        for x in (u, v)
    ]
    ours, theirs = (relations(x) for x in pooled)
    distance, angle = (
        np.mean([huber(a[key] - b[key]) for key in a])
        for a, b in zip(ours, theirs, strict=True)
    )
    student, teacher = (output(layers_0=x.astype(np.float32)) for x in (u, v))
    for weights in ((1, 2), (0.5, 0), (0, 3)):
        term = distill.RelationalKD(PAIR, *weights, pooling=pooling)
        expected = weights[0] * distance + weights[1] * angle
        found = mean(term, student, teacher, batch)
        assert found == pytest.approx(expected, rel=1e-5)


def test_relations_on_a_line_by_hand():
    """Distances 1, 2, 3 against 1, 1, 2, over their means of 2 and 4/3."""
    student, teacher = rows([0.0], [1.0], [3.0]), rows([0.0], [1.0], [2.0])
    distance = distill.RelationalKD(PAIR, 1, 0)
    expected = np.mean([huber(1 / 2 - 3 / 4), huber(1 - 3 / 4), huber(3 / 2 - 3 / 2)])
    assert mean(distance, student, teacher, batch_of(3)) == pytest.approx(expected)
    # On a line every cosine is 1 or -1, and here they are the same ones.
    angle = distill.RelationalKD(PAIR, 0, 1)
    assert mean(angle, student, teacher, batch_of(3)) == pytest.approx(0, abs=1e-12)
    # A right angle at the row between: cosines 0, cos 45, cos 45 for -1, 1, 1.
    corner = rows([0.0, 0.0], [1.0, 0.0], [1.0, 1.0])
    line = rows([0.0], [1.0], [2.0])
    half = math.sqrt(0.5)
    expected = np.mean([huber(1.0), huber(1 - half), huber(1 - half)])
    found = mean(angle, corner, line, batch_of(3))
    assert found == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    "number, distance, angle", [(1, False, False), (2, False, False), (3, True, True)]
)
def test_a_few_rows_have_few_relations(number, distance, angle):
    """Two rows have one distance, which is its own mean: the same in any model."""
    rng = np.random.default_rng(1)
    u, v = rng.normal(size=(2, number + 1, 3))
    batch = batch_of(number + 1, empty=1)
    for weights, some in (((1, 0), distance), ((0, 1), angle)):
        term = distill.RelationalKD(PAIR, *weights)
        assert (mean(term, rows(*u), rows(*v), batch) > 1e-6) == some


def test_rows_that_are_equal_have_finite_gradients():
    """sqrt has an infinite slope at 0, and the direction of rounding is noise."""
    vectors = jnp.asarray([[1.0, 2.0], [1.0, 2.0], [0.0, 1.0], [3.0, 1.0]])
    teacher = rows([0.0, 0.0], [1.0, 0.0], [1.0, 1.0], [1.0, 1.0])
    term = distill.RelationalKD(PAIR)

    @jax.jit
    @jax.value_and_grad
    def loss(x):
        student = output(layers_0=jnp.stack([x, x], axis=1))
        return term.per_batch((), student, teacher, batch_of(4))

    value, gradient = loss(vectors)
    assert value > 0 and np.isfinite(gradient).all() and gradient.any()
    near, of_near = loss(vectors.at[0].mul(1 + 1e-6))
    assert near == pytest.approx(float(value), rel=1e-5)
    np.testing.assert_allclose(of_near, gradient, rtol=1e-4, atol=1e-5)
    value, gradient = loss(jnp.ones((4, 2)))  # no two differ
    assert value > 0 and not gradient.any()


def test_relational_kd_is_over_a_micro_batch(toys, step_of):
    """Exact for accumulate=1; otherwise the mean of the parts, weighted by tokens."""
    term = distill.RelationalKD()
    batch = Batch.of(toys.corpus(rows=8), length=[20, 5] * 4, prompt_length=2)

    def loss(batch, accumulate):
        step = step_of(objective=term, accumulate=accumulate)
        state = step.init(jax.random.key(0), toys.draft_params)
        _, sums = step.gradients(state, batch, toys.target_params)
        return float(sums.mean_loss)

    halves = [jax.tree.map(lambda x, n=n: x[n::2], batch) for n in (0, 1)]
    parts = [loss(half, 1) * half.mask.sum() for half in halves]
    expected = sum(parts) / batch.mask.sum()
    assert loss(batch, 2) == pytest.approx(expected, rel=1e-5)
    assert abs(loss(batch, 1) / expected - 1) > 1e-3


def log_softmax(x):
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def minilm_oracle(u, v, heads, mask):
    """The mean over counted tokens and relation heads of KL(teacher || student)."""
    found = []
    for b, t in np.argwhere(mask):
        for head in range(heads):
            laws = []
            for x in (v, u):
                x = x.reshape(*x.shape[:2], -1)
                size = x.shape[-1] // heads
                x = x[b, : t + 1, head * size : (head + 1) * size]
                laws.append(log_softmax(x @ x[t] / math.sqrt(size)))
            found.append(np.sum(np.exp(laws[0]) * (laws[0] - laws[1])))
    return np.mean(found)


@pytest.mark.parametrize("heads", [1, 2, 4])
@pytest.mark.parametrize("relations", [("query", "key", "value"), ("value",)])
def test_minilm_equals_a_float64_oracle(heads, relations):
    """Heads of other numbers and sizes, grouped: widths 12 and 8, 8 and 4."""
    rng = np.random.default_rng(2)
    shapes = {
        "query": ((3, 4), (2, 4)),
        "key": ((4, 2), (1, 4)),
        "value": ((4, 2),) * 2,
    }
    batch = Batch.of(np.zeros((3, 6)), length=[6, 4, 0], prompt_length=2)
    student, teacher, expected = {}, {}, 0.0
    for part in relations:
        u, v = (rng.normal(size=(3, 6, *shape)) for shape in shapes[part])
        student[f"layers_0_{part}"] = u.astype(np.float32)
        teacher[f"layers_0_{part}"] = v.astype(np.float32)
        expected += minilm_oracle(u, v, heads, batch.mask)
    for chunk in (None, 4):  # 6 tokens: the last chunk is padded
        term = distill.MiniLMv2(PAIR, heads, relations, chunk)
        found = mean(term, output(**student), output(**teacher), batch)
        assert found == pytest.approx(expected, rel=1e-5)
    swapped = mean(term, output(**teacher), output(**student), batch)
    assert abs(swapped / found - 1) > 1e-3


def test_minilm_of_two_tokens_by_hand():
    """A token that has only itself to look at has no choice; the next has two."""
    value = np.zeros((1, 2, 1, 1), np.float32)
    u, v = value.copy(), value.copy()
    v[0, 1] = math.sqrt(math.log(3))  # the second looks at itself with odds 3 to 1
    batch = Batch.of(np.zeros((1, 2)))
    term = distill.MiniLMv2(PAIR, 1, ("value",))
    found = mean(term, output(layers_0_value=u), output(layers_0_value=v), batch)
    expected = 0.75 * math.log(0.75 / 0.5) + 0.25 * math.log(0.25 / 0.5)
    assert found == pytest.approx(expected, rel=1e-5)


def test_whole_relations_are_never_alive():
    """No array of the compiled gradient holds `[B, A, T, T]`, of any relation."""
    batch = Batch.of(np.zeros((2, 256)))
    x = jax.ShapeDtypeStruct((2, 256, 4, 16), jnp.float32)
    features = {f"layers_0_{part}": x for part in ("query", "key", "value")}
    whole = 2 * 8 * 256 * 256 * 4

    def temporary(chunk):
        term = distill.MiniLMv2(PAIR, 8, chunk=chunk)

        def loss(u, v):
            return term.per_batch((), output(**u), output(**v), batch)

        compiled = jax.jit(jax.grad(loss)).lower(features, features).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporary(16) < whole < temporary(None) / 2


def test_equal_relations_lose_nothing(toys, step_of):
    step = step_of(student=toys.draft, teacher=toys.draft, objective=distill.MiniLMv2())
    state = step.init(jax.random.key(0), toys.draft_params)
    gradient, sums = step.gradients(state, Batch.of(toys.corpus()), toys.draft_params)
    assert float(sums.mean_loss) == pytest.approx(0, abs=1e-6)
    assert all(np.abs(x).max() < 1e-5 for x in jax.tree.leaves(gradient))


def test_relation_heads_are_the_teachers_unless_given(toys):
    bound = distill.MiniLMv2().bind(toys.draft, toys.target)
    assert bound.relation_heads == toys.target.config.num_heads
    assert bound.layers == (("layers.0", "layers.1"),)
    assert bound.features()[1] == tuple(
        f"layers.1.{part}" for part in ("query", "key", "value")
    )


@pytest.mark.parametrize(
    "make, match",
    [
        (lambda: distill.RelationalKD(pooling="first"), "unknown pooling 'first'"),
        (lambda: distill.RelationalKD(angle_weight=-1), "must be >= 0"),
        (lambda: distill.RelationalKD(PAIR, 0, 0), "one of them above 0, got 0 and 0"),
        (lambda: distill.MiniLMv2(relation_heads=0), "relation_heads must be at least"),
        (lambda: distill.MiniLMv2(chunk=0), "chunk must be at least 1 or None, got 0"),
        (lambda: distill.MiniLMv2(relations=("querry",)), "must be some of .*querry"),
        (lambda: distill.MiniLMv2(relations=()), "must be some of"),
        (lambda: distill.MiniLMv2(relations=("key", "key")), "must be some of"),
    ],
)
def test_wrong_settings_are_refused(make, match):
    with pytest.raises(ValueError, match=match):
        make()


@pytest.mark.parametrize(
    "term, match",
    [
        (
            distill.MiniLMv2(relation_heads=3),
            "relation_heads=3 must divide .* the student's layers.0.query: 8, .* "
            "the teacher's layers.1.value: 4; choose one of 1, 2, 4",
        ),
        (
            distill.MiniLMv2([["layers.0", "layers.2"]]),
            "the teacher, of 2 layers, has no layer 'layers.2'; did you mean 'layers",
        ),
        (distill.MiniLMv2([["embedding", "layers.0"]]), "no layer 'embedding'"),
        (distill.RelationalKD([["layer.0", "layers.0"]]), "has no layer 'layer.0'"),
    ],
)
def test_what_does_not_fit_the_models_is_refused(step_of, term, match):
    with pytest.raises(ValueError, match=match):
        step_of(objective=term)
