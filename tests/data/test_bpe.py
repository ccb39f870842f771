import os

import numpy as np
import pytest

from specjax.data import encode, standard_library, train_bpe

TEXTS = ["to be or not to be, that is the question", "def f(x):\n    return x + 1\n"]


@pytest.fixture(scope="module")
def tokenizer():
    return train_bpe(TEXTS * 20, vocab_size=280)


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "  two  spaces , n't . !",
        "héllo 世界 \U0001f600 e\u0301 \u200b\ufeff",
        "\x00\x01\r\n\t\x7f",
        "before <|endoftext|> behind",
        "".join(map(chr, range(1, 0x500))),
    ],
)
def test_decoding_gives_the_text_back(tokenizer, text):
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert tokenizer.decode(encode(tokenizer, [text])[0]) == text


def test_special_tokens_come_first_and_are_never_added(tokenizer):
    assert tokenizer.eos_token_id == tokenizer.pad_token_id == 0
    assert len(tokenizer) == 280
    assert 0 not in tokenizer(TEXTS[0])["input_ids"]
    two = train_bpe(TEXTS, 300, special_tokens=("<eos>", "<sep>"))
    assert two.convert_tokens_to_ids(["<eos>", "<sep>"]) == [0, 1]
    assert two("a<sep>")["input_ids"][-1] == 1


def test_training_is_deterministic_and_compresses():
    texts = [d.text for d in standard_library(max_chars=200_000)]
    first, second = (train_bpe(texts, 512) for _ in range(2))
    assert first.get_vocab() == second.get_vocab()
    num_tokens = sum(map(len, encode(first, texts)))
    assert num_tokens < 0.5 * sum(map(len, texts))
    sampled = train_bpe(texts, 512, max_chars=50_000)
    assert sampled.decode(sampled(texts[0])["input_ids"]) == texts[0]


def test_encode_takes_pieces_of_any_number(tokenizer):
    texts = [f"text {i}" for i in range(600)]
    arrays = encode(tokenizer, texts)
    assert len(arrays) == 600
    assert all(a.dtype == np.int32 for a in arrays)
    assert [tokenizer.decode(a) for a in arrays] == texts
    assert encode(tokenizer, []) == []


def test_a_saved_tokenizer_comes_back_the_same(tokenizer, tmp_path):
    from transformers import AutoTokenizer

    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    text = "to be  , n't <|endoftext|> 世"
    assert loaded(text)["input_ids"] == tokenizer(text)["input_ids"]
    assert loaded.decode(loaded(text)["input_ids"]) == text
    assert loaded.eos_token_id == 0


def test_parallelism_is_off_behind_us_but_the_user_is_obeyed(tokenizer, monkeypatch):
    monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
    encode(tokenizer, TEXTS)
    assert os.environ["TOKENIZERS_PARALLELISM"] == "off"
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "true")
    encode(tokenizer, TEXTS)
    assert os.environ["TOKENIZERS_PARALLELISM"] == "true"


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"vocab_size": 256}, "vocab_size must be at least 257"),
        ({"special_tokens": ()}, "special_tokens must be one or more different"),
        ({"special_tokens": ("a", "a")}, "special_tokens must be one or more"),
        ({"texts": []}, "texts must hold some text"),
        ({"texts": ["", ""]}, "texts must hold some text"),
    ],
)
def test_bad_arguments(kwargs, message):
    with pytest.raises(ValueError, match=message):
        train_bpe(**{"texts": TEXTS} | kwargs)
