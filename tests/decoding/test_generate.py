"""generate(): batches, seeds, limits, reasons, log-probabilities, and every refusal."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import drafters, generate, verifiers
from specjax.core import Checkpoint, Sampling
from specjax.decoding import bucket, prepare
from specjax.ops import warp
from specjax.testing import TabularLM, greedy_reference, reference_logits
from tests.decoding.conftest import sharp, small_model
from tests.marks import sampled

GREEDY = Sampling(temperature=0.0)
RAGGED = [(1, 40), (5, 36), (9, 30), (16, 20), (17, 24)]  # prompt, new tokens
FILTERED = Sampling(1.2, top_k=10, top_p=0.9, min_p=0.02)


@pytest.fixture(scope="module")
def two_model(similar):
    return drafters.TwoModel(similar, gamma=4)


@pytest.fixture(scope="module")
def ragged():
    rng = np.random.default_rng(3)
    return [rng.integers(0, 64, length).tolist() for length, _ in RAGGED]


@pytest.mark.parametrize("temperature", sampled([0.0, 0.8], 0.8))
def test_each_row_of_a_ragged_batch_is_its_solo_run(
    target, two_model, ragged, temperature
):
    """https://github.com/huggingface/transformers/issues/32165"""
    limits, seeds = [n for _, n in RAGGED], [11, 5, 99, 2**31, 7]
    settings = dict(drafter=two_model, sampling=Sampling(temperature))
    # One row ends early: on a token of its own.
    first = generate(target, ragged, max_new_tokens=limits, seed=seeds, **settings)
    eos = [first.tokens[2][4]]
    settings["eos_token_ids"] = eos
    batch = generate(target, ragged, max_new_tokens=limits, seed=seeds, **settings)
    assert len(batch.tokens[2]) <= 5 and batch.finish_reasons[2] == "eos"
    assert len({*map(len, batch.tokens)}) > 2
    for row, prompt in enumerate(ragged):
        solo = generate(
            target, [prompt], max_new_tokens=limits[row], seed=[seeds[row]], **settings
        )
        assert solo.tokens[0] == batch.tokens[row]
        assert solo.finish_reasons[0] == batch.finish_reasons[row]
        np.testing.assert_allclose(solo.log_probs[0], batch.log_probs[row], atol=2e-5)
        if temperature == 0:
            text = greedy_reference(target.model, target.params, prompt, limits[row])
            assert batch.tokens[row] == text[: len(batch.tokens[row])]


def test_a_rows_output_does_not_depend_on_its_neighbours(target, two_model, prompts):
    settings = dict(drafter=two_model, sampling=Sampling(0.9), max_new_tokens=24)
    straight = generate(target, prompts, seed=list(range(9)), **settings)
    order = [4, 8, 0, 2, 7, 1, 6, 3, 5]
    other = generate(target, [prompts[i] for i in order], seed=order, **settings)
    assert other.tokens == [straight.tokens[i] for i in order]
    # A single seed counts up from row to row; another seed gives another text.
    assert generate(target, prompts, seed=0, **settings).tokens == straight.tokens
    numpy_seed = generate(target, prompts, seed=np.int64(0), **settings)
    assert numpy_seed.tokens == straight.tokens
    assert generate(target, prompts, seed=100, **settings).tokens != straight.tokens


@pytest.mark.parametrize("sampling", sampled([Sampling(0.8), FILTERED], FILTERED))
@pytest.mark.full
def test_log_probs_are_the_targets_after_sampling(target, two_model, prompts, sampling):
    """Recomputed without a cache, for drafts, corrections and bonus tokens alike."""
    out = generate(
        target, prompts, drafter=two_model, sampling=sampling, max_new_tokens=24
    )
    assert 0 < out.stats.acceptance_rate < 1
    for prompt, tokens, log_probs in zip(
        prompts, out.tokens, out.log_probs, strict=True
    ):
        raw = reference_logits(target.model, target.params, [*prompt, *tokens])
        law = np.asarray(warp(jnp.asarray(raw[len(prompt) - 1 : -1]), sampling))
        expected = law[np.arange(len(tokens)), tokens]
        np.testing.assert_allclose(log_probs, expected, atol=3e-5)


@pytest.mark.parametrize("temperature", sampled([0.0, 0.7, 1.0], 0.0, 1.0))
@pytest.mark.parametrize(
    "filters",
    [{}, dict(top_k=5, top_p=0.8, min_p=0.01)],
    ids=["bare", "filtered"],
)
def test_the_target_as_its_own_draft_is_always_right(
    target, prompts, temperature, filters
):
    """https://github.com/vllm-project/vllm/issues/40149"""
    out = generate(
        target,
        prompts,
        drafter=drafters.TwoModel(target, gamma=4),
        sampling=Sampling(temperature, **filters),
        max_new_tokens=25,  # five full rounds
    )
    assert out.stats.acceptance_rate == 1.0
    assert out.stats.block_efficiency == 5.0
    assert out.stats.acceptance_by_position == [1.0] * 4


def test_top_k_of_one_is_greedy(target, two_model, prompts, greedy):
    """https://github.com/vllm-project/vllm/issues/40149"""
    out = generate(
        target,
        prompts,
        drafter=two_model,
        sampling=Sampling(1.0, top_k=1, top_p=1.0, min_p=0.0),
        max_new_tokens=24,
    )
    assert out.tokens == [text[:24] for text in greedy]


@pytest.mark.full
def test_lenience_strays_no_further_than_it_says(target, two_model, prompts, greedy):
    """Greedy: each token has at least l times the raw probability of the best."""
    rates = []
    for lenience in (1.0, 0.3, 1e-6):
        out = generate(
            target,
            prompts,
            drafter=two_model,
            sampling=GREEDY,
            max_new_tokens=24,
            verifier=verifiers.Lenience(lenience),
        )
        rates.append(out.stats.acceptance_rate)
        if lenience == 1.0:
            assert out.tokens == [text[:24] for text in greedy]
        worst = 0.0
        for prompt, tokens in zip(prompts, out.tokens, strict=True):
            raw = reference_logits(target.model, target.params, [*prompt, *tokens])
            raw = raw[len(prompt) - 1 : -1]
            gap = raw.max(-1) - raw[np.arange(24), tokens]
            worst = max(worst, gap.max())
        assert worst <= -np.log(lenience) + 1e-4
        assert (worst > 0.1) == (lenience < 1)
    assert rates[0] < rates[1] < rates[2]


@pytest.mark.full
def test_statistics_of_cut_blocks(target, prompts, greedy):
    """https://github.com/vllm-project/vllm/issues/56101

    An end of text inside the block, a limit inside the block, and no drafts at all.
    """
    own = drafters.TwoModel(target, gamma=8)
    settings = dict(sampling=GREEDY)
    eos = greedy[3][2]
    out = generate(
        target, prompts, drafter=own, max_new_tokens=24, eos_token_ids=[eos], **settings
    )
    stats = out.stats
    np.testing.assert_array_equal(stats.emitted, [len(row) for row in out.tokens])
    ended = greedy[3].index(eos) + 1
    assert stats.emitted[3] == ended <= 3
    assert stats.rounds[3] == 1 and stats.drafted[3] == 8
    assert stats.accepted[3] == stats.evaluated[3] == ended
    assert stats.block_efficiency == stats.emitted.sum() / stats.rounds.sum()

    limits = [12] * 8 + [24]
    out = generate(target, prompts, drafter=own, max_new_tokens=limits, **settings)
    rows = jax.tree.map(lambda x: x[:8], out.stats)
    assert (rows.rounds == 2).all()  # 9 and 3
    assert (rows.drafted == 16).all()
    assert (rows.evaluated == 8 + 3).all() and (rows.accepted == 11).all()
    assert rows.acceptance_rate == 1.0 and rows.block_efficiency == 6.0

    out = generate(target, prompts, max_new_tokens=24, **settings)
    assert out.stats.drafted.sum() == 0 and np.isnan(out.stats.acceptance_rate)
    assert (out.stats.rounds == 24).all() and out.stats.block_efficiency == 1.0
    assert out.stats.as_dict()["acceptance_rate"] is None


def test_one_limit_a_row(target, two_model, prompts, greedy):
    limits = [1, 2, 3, 5, 8, 13, 21, 4, 24]
    out = generate(
        target, prompts, drafter=two_model, sampling=GREEDY, max_new_tokens=limits
    )
    assert out.tokens == [
        text[:limit] for text, limit in zip(greedy, limits, strict=True)
    ]
    np.testing.assert_array_equal(out.stats.emitted, limits)


def test_the_models_context_ends_a_row(target, similar):
    """A draft block that runs past the context is cut, not clamped."""
    prompts = [list(range(n)) for n in (63, 60, 20)]
    out = generate(
        target,
        prompts,
        drafter=drafters.TwoModel(similar, gamma=4),
        sampling=GREEDY,
        max_new_tokens=[10, 40, 40],
    )
    assert [len(row) for row in out.tokens] == [1, 4, 40]
    assert out.finish_reasons == ["context", "context", "length"]
    for prompt, tokens in zip(prompts, out.tokens, strict=True):
        assert tokens == greedy_reference(
            target.model, target.params, prompt, len(tokens)
        )


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.full
def test_a_draft_block_longer_than_the_whole_row(rows):
    model = TabularLM(4)
    table = Checkpoint(model, model.init(jax.random.key(0)))
    drafter = drafters.PromptLookup(gamma=20)
    prompts = [[1, 2, 1]] * rows
    out = generate(table, prompts, drafter=drafter, sampling=GREEDY, max_new_tokens=6)
    assert out.tokens == [greedy_reference(model, table.params, prompts[0], 6)] * rows


def test_buckets_share_shapes():
    sizes = [bucket(n) for n in (1, 16, 17, 24, 25, 32, 33, 48, 49, 64, 65, 96, 97)]
    assert sizes == [16, 16, 24, 24, 32, 32, 48, 48, 64, 64, 96, 96, 128]
    assert all(n <= bucket(n) < max(17, 1.5 * n + 1) for n in range(1, 3000))


def test_nothing_is_compiled_again(target, two_model, prompts, caplog):
    """https://github.com/sgl-project/sglang-jax/pull/1188

    Over 100 rounds: other prompt lengths in the same bucket, other temperatures, seeds,
    ends of text and limits, and whatever number of drafts is accepted.
    """
    rng, rounds = np.random.default_rng(5), 0

    def call(number):
        lengths = rng.integers(1, 17, 9)
        out = generate(
            target,
            [rng.integers(0, 64, n).tolist() for n in lengths],
            drafter=two_model,
            sampling=Sampling(float(rng.uniform(0, 1.5))),
            seed=int(rng.integers(1000)),
            eos_token_ids=rng.integers(0, 64, number % 4).tolist(),
            # 33 to 48 tokens in all: one bucket
            max_new_tokens=[int(rng.integers(33, 49) - n) for n in lengths],
        )
        return int(np.asarray(out.stats.rounds).max())

    call(0)
    with jax.log_compiles(), caplog.at_level("WARNING"):
        for number in range(8):
            rounds += call(number)
        compiled = [r for r in caplog.messages if "Compiling" in r]
        assert compiled == [] and rounds >= 100
        # The negative control: another shape is seen.
        generate(target, prompts[:2], sampling=GREEDY, max_new_tokens=2)
    assert any("Compiling" in r for r in caplog.messages)


LONG = list(range(64)) * 2


@pytest.mark.parametrize(
    "prompts,settings,message",
    [
        ("text", {}, "prompts must be a list, got one string"),
        ([], {}, "at least one prompt, got an empty list"),
        ([[1], []], {}, "prompt 1 is empty"),
        (["text"], {}, "prompt 0 is a text, but this target has no tokenizer"),
        ([[1, 64]], {}, "prompt 0 holds the token id 64, outside the vocabulary of 64"),
        ([[1, -2]], {}, "prompt 0 holds the token id -2"),
        ([[1, None]], {}, "prompt 0 must be a text or a list of token ids"),
        ([3], {}, "prompt 0 must be a text or a list of token ids"),
        ([[1], LONG], {}, "prompt 1 has 128 tokens, but the model's context is 64"),
        ([[1]], dict(max_new_tokens=0), "max_new_tokens must be a whole number >= 1"),
        ([[1]], dict(max_new_tokens=1.5), "max_new_tokens must be a whole number >= 1"),
        (
            [[1]],
            dict(max_new_tokens=[1, 2]),
            "max_new_tokens must be one number or one",
        ),
        ([[1]], dict(max_new_tokens=[True]), "max_new_tokens must be a whole number"),
        ([[1]], dict(seed=[-1]), "seed must be a whole number >= 0, got -1"),
        ([[1]], dict(seed=-1), "seed must be a whole number >= 0, got -1"),
        ([[1]], dict(seed=0.5), "seed must be a whole number >= 0"),
        ([[1]], dict(seed=[1, 2]), "seed must be one number or one a prompt"),
        ([[1]], dict(eos_token_ids=[64]), "eos_token_ids must be in the vocabulary of"),
        ([[1]], dict(eos_token_ids=[-1]), "eos_token_ids must be in the vocabulary of"),
        ([[1]], dict(eos_token_ids=3), "eos_token_ids must be a list"),
        ([[1]], dict(stop=[""]), "stop must be non-empty strings, got ''"),
        ([[1]], dict(stop=[3]), "stop must be non-empty strings, got 3"),
        ([[1]], dict(stop="x"), "stop strings need a tokenizer"),
        (
            [[1]],
            dict(verifier="rejektion"),
            "unknown verifier 'rejektion'; did you mean",
        ),
        ([[1]], dict(drafter="two_model"), "drafter must be"),
        ([[1]], dict(drafter=drafters.PromptLookup), "drafter must be"),
        ([[1]], dict(sampling=0.8), "sampling must be"),
    ],
    ids=str,
)
def test_what_cannot_be_used_is_refused_with_a_reason(
    target, prompts, settings, message
):
    with pytest.raises(ValueError, match=message):
        prepare(target, prompts, **settings)


def test_a_draft_that_reads_less_than_a_row_may_need(target):
    model = small_model(max_position_embeddings=32)
    short = Checkpoint(model, sharp(model, 1))
    with pytest.raises(
        ValueError, match="draft reads at most 32 tokens, but a row may"
    ):
        prepare(target, [[1, 2]], drafter=drafters.TwoModel(short), max_new_tokens=31)
    prepare(target, [[1, 2]], drafter=drafters.TwoModel(short), max_new_tokens=30)
