"""Drafts whose head lacks most ids: output is the target's, whatever they lack."""

import dataclasses

import jax
import numpy as np
import pytest

from specjax import drafters, generate
from specjax.core import Checkpoint, Sampling
from specjax.models import CausalLM, ModelConfig, reduce_head
from specjax.testing import (
    TabularLM,
    enumerate_verifier,
    greedy_reference,
    next_token_laws,
    rejection_outcomes,
    sequence_law,
)

WARM = Sampling(0.8)
PROMPT = [1, 2, 0]


def small(vocab_size, seed, ids=None):
    config = ModelConfig(
        vocab_size=vocab_size,
        hidden_size=16,
        intermediate_size=16,
        num_layers=1,
        num_heads=2,
        num_kv_heads=1,
        head_dim=8,
        max_position_embeddings=64,
        tie_word_embeddings=False,
    )
    params = jax.jit(CausalLM(config).init)(jax.random.key(seed))
    # Larger than fresh weights: laws that depend on the context.
    params = jax.tree.map(lambda x: 12 * x if x.ndim == 2 else x, params)
    if ids is not None:
        config, params = reduce_head(config, params, ids)
    return Checkpoint(CausalLM(config), params, config=config)


def test_the_law_of_the_output_is_exactly_the_targets():
    """Every chain of drafts, every outcome; two of four ids have no row."""
    table = TabularLM(4, order=2)
    target = table.init(jax.random.key(0))
    draft = small(4, 1, ids=[0, 2])
    q = next_token_laws(draft.model, draft.params, PROMPT, 4, WARM)
    assert q(())[1] == q(())[3] == 0 and q(())[0] > 0
    p = next_token_laws(table, target, PROMPT, 4, WARM)
    law = enumerate_verifier(rejection_outcomes, q, p, gamma=2, num_tokens=2)
    exact = sequence_law(table, target, PROMPT, 2, WARM)
    found = np.zeros_like(exact)
    for tokens, chance in law.items():
        found[tokens] += chance
    np.testing.assert_allclose(found, exact, atol=1e-6)
    outside = exact.sum() - exact[np.ix_([0, 2], [0, 2])].sum()
    assert outside > 0.2, "the target must want what the draft cannot write"

    def masked(tokens):  # a control: a target that is masked as well
        inside = np.array(p(tokens)) * [1, 0, 1, 0]
        return (inside / inside.sum()).tolist()

    law = enumerate_verifier(rejection_outcomes, q, masked, gamma=2, num_tokens=2)
    assert abs(sum(law.values()) - 1) < 1e-6
    assert max(abs(law.get(i, 0) - exact[i]) for i in np.ndindex(4, 4)) > 0.05


@pytest.fixture(scope="module")
def target():
    return small(48, 0)


@pytest.fixture(scope="module")
def greedy(target):
    prompts = [np.random.default_rng(n).integers(0, 48, n + 1).tolist() for n in (0, 4)]
    return prompts, [
        greedy_reference(target.model, target.params, prompt, 20) for prompt in prompts
    ]


@pytest.mark.full
def test_greedy_text_goes_through_ids_that_the_draft_lacks(target, greedy):
    """The target itself with every other id it uses: right there, silent elsewhere."""
    prompts, texts = greedy
    used = sorted({token for text in texts for token in text})
    ids = used[::2]
    assert all(0 < np.isin(text, ids).mean() < 1 for text in texts)
    config, params = reduce_head(target.config, target.params, ids)
    draft = Checkpoint(CausalLM(config), params, config=config)
    out = generate(
        target,
        prompts,
        drafter=drafters.TwoModel(draft, gamma=3),
        sampling=Sampling(0.0),
        max_new_tokens=20,
    )
    assert out.tokens == texts
    assert 0 < out.stats.acceptance_rate < 1


class _Tokenizer:
    def __init__(self, vocab):
        self._vocab = vocab

    def get_vocab(self):
        return self._vocab


def test_another_tokeniser_is_refused_by_its_first_token(target):
    """A head of known ids does not make two tokenisers one."""
    ours = {chr(97 + n): n for n in range(4)}
    theirs = {**ours, "b": 2, "c": 1}
    draft = dataclasses.replace(
        small(4, 1, ids=[0, 3]), tokenizer=_Tokenizer(theirs), source="folder/draft"
    )
    target = dataclasses.replace(target, tokenizer=_Tokenizer(ours))
    message = (
        r"2 tokens differ: 'b' has id 1 in the target \(unnamed\) and id 2 in the "
        r"draft \(folder/draft\)"
    )
    with pytest.raises(ValueError, match=message):
        drafters.TwoModel(draft).bind(target, 16)
    same = dataclasses.replace(draft, tokenizer=_Tokenizer(dict(ours)))
    drafters.TwoModel(same).bind(target, 16)
