"""A draft with another tokeniser: which tokens both have, and how others are read."""

import jax
import numpy as np
import pytest

from specjax import generate
from specjax.core import Checkpoint, Sampling
from specjax.data import train_bpe
from specjax.drafters import TwoModel
from specjax.io import share_vocabulary
from specjax.models import IntersectedModel, VocabularyMap
from specjax.testing import (
    TabularLM,
    enumerate_verifier,
    greedy_reference,
    next_token_laws,
    rejection_outcomes,
    sequence_law,
)
from tests.io.test_tokenizer import words

TEXT = ["One day the sky was blue, the next day the sky was grey.\n"] * 20
OTHER = ["What the cat saw was a bluebird, and the next was a greyhound.\n"] * 20


def table(size, seed, tokenizer=None, eos=()):
    model = TabularLM(size, order=2 if size < 10 else 1)
    return Checkpoint(
        model, model.init(jax.random.key(seed)), tokenizer, eos_token_ids=eos
    )


@pytest.fixture(scope="module")
def tokenizers():
    return train_bpe(TEXT, 290), train_bpe(OTHER, 300, ("<end>", "<other>"))


def test_shared_tokens_mean_the_same_text_and_others_end_alike(tokenizers):
    ours, theirs = tokenizers
    # Models have more ids than their tokenisers: padding.
    target, draft = table(292, 0, ours, (0,)), table(301, 1, theirs, (0,))
    shared = share_vocabulary(target, draft)
    assert isinstance(shared.model, IntersectedModel)
    assert shared.params is draft.params and shared.tokenizer is ours
    assert shared.model.vocab_size == 292
    ids, read = shared.model.ids.shared, shared.model.ids.readable
    pieces = ours.convert_ids_to_tokens(list(range(len(ours))))
    other = theirs.get_vocab()
    for token, piece in enumerate(pieces[1:], 1):
        if piece in other:
            assert ids[token] == read[token] == other[piece]
        else:
            assert ids[token] == -1
            ends = [
                other[piece[i:]] for i in range(1, len(piece)) if piece[i:] in other
            ]
            assert read[token] == ends[0]  # the longest
    assert 256 < (ids >= 0).sum() < len(ours)  # all bytes, some words, not all
    # Ends of text stand for each other; padding is never drafted and read as one.
    assert ids[0] == other["<end>"] == 0
    assert (ids[len(ours) :] == -1).all() and (read[len(ours) :] == 0).all()


def test_the_law_is_the_drafts_over_what_both_have():
    """Ids differ, "c" is the target's alone and "x" the draft's."""
    target = table(4, 0, words("<unk>", "a", "b", "c"))
    draft = table(5, 1, words("<unk>", "x", "b", "y", "a"))
    shared = share_vocabulary(target, draft)
    assert shared.model.ids.shared.tolist() == [0, 4, 2, -1]
    q = next_token_laws(shared.model, shared.params, [1, 2], 1, Sampling(0.7))(())
    own = next_token_laws(draft.model, draft.params, [4, 2], 1, Sampling(0.7))(())
    kept = np.array([own[0], own[4], own[2], 0.0])
    np.testing.assert_allclose(q, kept / kept.sum(), atol=1e-6)


def test_output_follows_the_target_exactly_whatever_the_draft_lacks():
    target = table(4, 0, words("<unk>", "a", "b", "c"))
    shared = share_vocabulary(target, table(3, 1, words("b", "<unk>", "z")))
    q = next_token_laws(shared.model, shared.params, [1, 2], 4, Sampling(0.8))
    p = next_token_laws(target.model, target.params, [1, 2], 4, Sampling(0.8))
    assert q(())[1] == q(())[3] == 0  # neither "a" nor "c"
    law = enumerate_verifier(rejection_outcomes, q, p, gamma=2, num_tokens=2)
    exact = sequence_law(target.model, target.params, [1, 2], 2, Sampling(0.8))
    found = np.zeros_like(exact)
    for tokens, chance in law.items():
        found[tokens] += chance
    np.testing.assert_allclose(found, exact, atol=1e-6)


@pytest.mark.full
def test_two_model_drafts_with_another_tokeniser_when_asked_to(tokenizers):
    target, draft = table(290, 0, tokenizers[0]), table(300, 1, tokenizers[1])
    with pytest.raises(ValueError, match="need the same tokeniser"):
        TwoModel(draft).bind(target, 16)
    out = generate(
        target,
        [[5, 6, 7]],
        drafter=TwoModel(draft, gamma=2, vocabulary="intersection"),
        sampling=Sampling(temperature=0.0),
        max_new_tokens=8,
    )
    expected = greedy_reference(target.model, target.params, [5, 6, 7], 8)
    assert out.tokens == [expected] and out.stats.drafted.sum() > 0


def test_what_cannot_be_matched_is_refused():
    one, other = table(2, 0, words("<unk>", "a")), table(2, 1, words("<no>", "b"))
    with pytest.raises(ValueError, match="share none of 2 tokens"):
        share_vocabulary(one, other)
    with pytest.raises(ValueError, match=r"the draft \(unnamed\) has no tokeniser"):
        TwoModel(table(2, 1), vocabulary="intersection").bind(one, 16)
    with pytest.raises(ValueError, match=r"the target \(unnamed\) has no tokeniser"):
        share_vocabulary(table(2, 1), one)
    with pytest.raises(ValueError, match="'same' or 'intersection', got 'union'"):
        TwoModel(one, vocabulary="union")
    with pytest.raises(ValueError, match="readable without -1"):
        VocabularyMap([0, 1], [0, -1])


def test_maps_are_compared_by_what_they_say():
    one, same = VocabularyMap([1, -1], [1, 0]), VocabularyMap([1, -1], [1, 0])
    assert one == same and hash(one) == hash(same)
    assert one != VocabularyMap([1, -1], [1, 1])
