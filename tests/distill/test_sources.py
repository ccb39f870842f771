"""Data policies: who wrote which rows, and what counts in them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import Sampling, distill
from specjax.decoding import decode
from specjax.distill import (
    Batch,
    FixedCorpus,
    Mixture,
    Models,
    Policy,
    StudentGenerated,
)
from specjax.ops import fold
from tests.marks import sampled

PROMPT, NEW = 5, 7
ROLLOUT = StudentGenerated(PROMPT, NEW)
KEY = jax.random.key(7)


@pytest.fixture
def draw(toys):
    """What a source draws, jitted, for rows of the toy corpus."""
    run = jax.jit(
        lambda source, student, teacher, key, keys, batch: source.draw(
            key,
            keys,
            batch,
            Models(Policy(student, toys.draft), Policy(teacher, toys.target)),
            source.memory(),
        )[0],
        static_argnums=0,
    )

    def drawn(source, batch=None, key=KEY):
        batch = (
            Batch.of(toys.corpus(rows=6), prompt_length=3) if batch is None else batch
        )
        keys = jax.random.split(key, batch.tokens.shape[0])
        return run(source, toys.draft_params, toys.target_params, key, keys, batch)

    return drawn


def test_rollouts_are_what_the_decoding_loop_writes(toys, draw):
    batch = Batch.of(toys.corpus(rows=6), prompt_length=[1, 2, 3, 4, 5, 9])
    drawn = draw(StudentGenerated(PROMPT, NEW, Sampling(temperature=0.7)), batch)
    prompt_length = np.minimum(batch.prompt_length, PROMPT)
    out = jax.jit(
        lambda params, keys: decode(
            toys.draft,
            params,
            batch.tokens[:, :PROMPT],
            prompt_length,
            keys,
            max_new_tokens=NEW,
            sampling=Sampling(temperature=0.7),
        )
    )(toys.draft_params, fold(jax.random.split(KEY, 6), 0))
    for row, prompt in enumerate(prompt_length):
        end = prompt + NEW
        assert int(out.length[row]) == end
        assert drawn.tokens[row, :end].tolist() == out.tokens[row, :end].tolist()
        assert (
            drawn.tokens[row, :prompt].tolist() == batch.tokens[row, :prompt].tolist()
        )
        assert np.flatnonzero(drawn.mask[row]).tolist() == list(range(prompt, end))
    assert drawn.on_policy.all()


def test_a_rollout_counts_the_end_of_text_and_nothing_after(draw):
    """https://github.com/huggingface/trl/pull/6357"""
    eos = 3
    drawn = draw(StudentGenerated(PROMPT, 9, eos_ids=(eos, 8)))
    ended = 0
    for tokens, mask in zip(drawn.tokens, drawn.mask, strict=True):
        new = np.asarray(tokens)[np.asarray(mask)]
        assert not np.isin(new[:-1], [eos, 8]).any()
        ended += int(new[-1] in (eos, 8) and len(new) < 9)
    assert ended  # some rows ended early, so the test tests something


def test_denominators_count_generated_tokens(toys, step_of):
    """https://github.com/huggingface/trl/pull/6006"""
    step = step_of(source=StudentGenerated(PROMPT, 9, eos_ids=(3, 8)))
    state = step.init(jax.random.key(0), toys.draft_params)
    # The data set's own mask is empty: only what is generated can count.
    batch = Batch.of(toys.corpus(), length=4, prompt_length=4)
    assert not batch.mask.any()
    _, sums = step.gradients(state, batch, toys.target_params)
    counts = sums.as_dict()
    assert 4 <= counts["on_policy_tokens"] == counts["tokens"] < 36


@pytest.mark.full
def test_no_gradient_flows_through_the_sampling(toys, step_of, draw):
    """The gradient is that of the same sequences given as data."""
    step = step_of(source=ROLLOUT)
    state = step.init(jax.random.key(0), toys.draft_params)
    batch = Batch.of(toys.corpus(), prompt_length=3)
    gradient, sums = step.gradients(state, batch, toys.target_params)

    step_key, rows_key = jax.random.split(jax.random.fold_in(state.key, state.step))
    keys = jax.vmap(jax.random.fold_in, (None, 0))(rows_key, jnp.arange(4))
    student = Policy(toys.draft_params, toys.draft)
    drawn, _ = ROLLOUT.draw(step_key, keys, batch, Models(student), ())
    as_data, data_sums = step_of().gradients(state, drawn, toys.target_params)
    assert float(sums.mean_loss) == pytest.approx(float(data_sums.mean_loss), rel=1e-6)
    for a, b in zip(jax.tree.leaves(gradient), jax.tree.leaves(as_data), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("per", ["row", "step"])
@pytest.mark.full
def test_rollouts_do_not_depend_on_the_split_into_micro_batches(toys, step_of, per):
    """https://github.com/huggingface/trl/issues/4719"""
    batch = Batch.of(toys.corpus(rows=8), prompt_length=3)
    source = Mixture(
        FixedCorpus(), StudentGenerated(PROMPT, NEW, eos_ids=(3,)), per=per
    )
    results = []
    for accumulate in (1, 4):
        step = step_of(source=source, accumulate=accumulate)
        state = step.init(jax.random.key(1), toys.draft_params)
        gradient, sums = step.gradients(state, batch, toys.target_params)
        results.append((gradient, sums.as_dict()))
    (whole, counts), (split, split_counts) = results
    assert counts["on_policy_tokens"] == split_counts["on_policy_tokens"]
    assert counts["tokens"] == split_counts["tokens"]
    for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(split), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


def test_the_same_sequence_is_masked_alike_whoever_wrote_it(draw):
    """https://github.com/modelscope/ms-swift/issues/6857"""
    drawn = jax.device_get(draw(ROLLOUT))
    length = drawn.mask.shape[1] - drawn.mask[:, ::-1].argmax(1)
    as_data = Batch.of(drawn.tokens, length=length, prompt_length=drawn.prompt_length)
    assert (as_data.mask == drawn.mask).all()


@pytest.mark.full
def test_every_step_draws_afresh(toys, step_of):
    step = step_of(source=ROLLOUT, optimizer=distill.make_optimizer(learning_rate=1e-9))
    state = step.init(jax.random.key(0), toys.draft_params)
    batch = Batch.of(toys.corpus(), prompt_length=3)
    losses = set()
    for _ in range(3):
        state, sums = step(state, batch, toys.target_params)
        losses.add(float(sums.mean_loss))
    assert len(losses) == 3


def test_a_coin_a_step_takes_all_rows_or_none(draw):
    source = Mixture(FixedCorpus(), ROLLOUT, fraction=0.5, per="step")
    kinds = [
        np.asarray(draw(source, key=jax.random.key(i)).on_policy) for i in range(12)
    ]
    assert all(kind.all() or not kind.any() for kind in kinds)
    assert 1 < sum(kind.all() for kind in kinds) < 11


def test_a_coin_a_row_takes_its_share(draw):
    source = Mixture(FixedCorpus(), ROLLOUT, fraction=0.25, per="row")
    drawn = [draw(source, key=jax.random.key(i)).on_policy for i in range(20)]
    assert 0.15 < np.mean(drawn) < 0.36
    assert any(0 < row.sum() < 6 for row in map(np.asarray, drawn))


def test_a_split_takes_an_exact_share_and_keeps_the_order(toys, draw):
    batch = Batch.of(toys.corpus(rows=6), prompt_length=3)
    drawn = draw(Mixture(FixedCorpus(), ROLLOUT, fraction=0.5, per="split"), batch)
    assert np.asarray(drawn.on_policy).tolist() == [False, True] * 3
    for row in range(6):
        assert drawn.tokens[row, :3].tolist() == batch.tokens[row, :3].tolist()
        if not drawn.on_policy[row]:
            assert drawn.tokens[row].tolist() == batch.tokens[row].tolist()
            assert drawn.mask[row].tolist() == batch.mask[row].tolist()
        else:
            assert int(drawn.mask[row].sum()) == NEW


@pytest.mark.parametrize("per", sampled(["split", "row", "step"], "split"))
@pytest.mark.parametrize("fraction", [0.0, 1.0])
def test_the_ends_of_a_mixture_are_its_parts(draw, fraction, per):
    drawn = draw(Mixture(FixedCorpus(), ROLLOUT, fraction=fraction, per=per))
    assert np.asarray(drawn.on_policy).tolist() == [bool(fraction)] * 6
    assert drawn.tokens.shape == (6, 20)


@pytest.mark.full
def test_samples_of_the_target_are_labels(toys, draw):
    """Sequence-level distillation trains on them, so they are not on-policy."""
    drawn = draw(distill.TargetGenerated(PROMPT, NEW))
    assert not drawn.on_policy.any()
    assert (np.asarray(drawn.mask).sum(1) == NEW).all()
    student = draw(ROLLOUT)
    assert (drawn.tokens != student.tokens).any()
    with pytest.raises(ValueError, match="needs a teacher"):
        models = Models(Policy(toys.draft_params, toys.draft))
        distill.TargetGenerated(2, 2).draw(KEY, KEY[None], None, models, ())


def test_a_row_without_a_prompt_counts_nothing(toys, draw):
    drawn = draw(ROLLOUT, Batch.of(toys.corpus(rows=2), length=[0, 9], prompt_length=3))
    assert np.asarray(drawn.mask).sum(1).tolist() == [0, NEW]


def test_sources_by_name():
    names = {"fixed", "mixture", "student", "target", "teacher_mixed"}
    assert set(distill.source_names()) == names
    assert distill.get_source("student")(4, 8) == StudentGenerated(4, 8)
    with pytest.raises(ValueError, match="did you mean 'student'"):
        distill.get_source("studnt")


@pytest.mark.parametrize(
    "make, match",
    [
        (lambda: StudentGenerated(0, 4), "prompt_size must be"),
        (lambda: StudentGenerated(4, 0), "max_new_tokens must be"),
        (lambda: Mixture(FixedCorpus(), ROLLOUT, fraction=1.5), "fraction must be"),
        (lambda: Mixture(FixedCorpus(), ROLLOUT, per="rows"), "did you mean 'row'"),
    ],
)
def test_wrong_settings_are_refused(make, match):
    with pytest.raises(ValueError, match=match):
        make()


def test_a_prompt_wider_than_the_corpus_is_refused(draw):
    with pytest.raises(ValueError, match="at most the corpus width 20, got 30"):
        draw(StudentGenerated(30, 4))
