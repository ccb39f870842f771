"""Comparing tokenisers, and the bytes of tokens."""

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from specjax.core import Checkpoint
from specjax.io import check_same_tokenizer, token_bytes


def words(*tokens):
    backend = Tokenizer(models.WordLevel({t: i for i, t in enumerate(tokens)}, "<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")


def checkpoint(tokenizer, source=""):
    return Checkpoint(model=None, params=None, tokenizer=tokenizer, source=source)


def test_equal_tokenizers_pass_and_so_does_none():
    one, other = words("<unk>", "a", "b"), words("<unk>", "a", "b")
    check_same_tokenizer(checkpoint(one), checkpoint(other))
    check_same_tokenizer(checkpoint(one), checkpoint(None))
    check_same_tokenizer(checkpoint(None), checkpoint(None))


def test_permuted_ids_of_equal_number_are_refused():
    """https://github.com/huggingface/trl/issues/4562: a teacher was fed the student's
    ids; https://github.com/ggml-org/llama.cpp/pull/3812 compares the maps."""
    target = checkpoint(words("<unk>", "a", "b", "c"), "big")
    draft = checkpoint(words("<unk>", "a", "c", "b"), "small")
    message = (
        r"2 tokens differ: 'b' has id 2 in the target \(big\) and id 3 in the draft "
        r"\(small\)"
    )
    with pytest.raises(ValueError, match=message):
        check_same_tokenizer(target, draft)


def test_a_token_that_one_side_lacks_is_named():
    target, draft = words("<unk>", "a", "b"), words("<unk>", "a")
    with pytest.raises(ValueError, match=r"'b' has id 2 in the target .* no id in the"):
        check_same_tokenizer(checkpoint(target), checkpoint(draft))


TEXTS = ["the cat sat", " leading", "déjà vu 日本語 🙂\n\ttab", "a\x00b", "x" * 9]


@pytest.mark.parametrize("text", TEXTS)
def test_bytes_of_tokens_join_to_the_text(tokenizer, text):
    table = token_bytes(tokenizer, len(tokenizer) + 4)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert b"".join(table[i] for i in ids) == text.encode()
    assert len(table) == len(tokenizer) + 4
    assert table[-1] == table[tokenizer.eos_token_id] == b""


def test_bytes_of_added_tokens_are_their_text(tokenizer):
    from copy import deepcopy

    grown = deepcopy(tokenizer)
    grown.add_tokens(["Ġé<tool>"])
    grown.add_tokens(["<secret>"], special_tokens=True)
    table = token_bytes(grown, len(grown))
    assert table[-2:] == ["Ġé<tool>".encode(), b""]


def test_a_smaller_model_vocabulary_cuts_the_table(tokenizer):
    assert len(token_bytes(tokenizer, 10)) == 10


def test_bytes_of_words():
    assert token_bytes(words("<unk>", "a"), 3) == [b"", b" a", b""]


def test_an_unknown_decoder_is_refused():
    tokenizer = words("<unk>", "a")
    tokenizer.backend_tokenizer.decoder = decoders.WordPiece()
    with pytest.raises(ValueError, match="got a decoder of WordPiece"):
        token_bytes(tokenizer, 2)
    with pytest.raises(ValueError, match="PreTrainedTokenizerFast, got object"):
        token_bytes(object(), 2)
