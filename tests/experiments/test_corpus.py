"""What a run reads: texts, prompts, and answers that came with them."""

import json

import numpy as np
import pytest

from experiments import _corpus
from experiments._distillspec_config import Config, Data
from specjax.data import train_bpe

TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}] {{ m.content }}<end>{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer():
    made = train_bpe(["two and two"], vocab_size=264, special_tokens=("<end>",))
    made.chat_template = TEMPLATE
    return made


@pytest.fixture
def sums(tmp_path):
    rows = [
        {"question": f"{a} + {b}?", "answer": f"{a} and {b} make {a + b}."}
        for a in range(8)
        for b in range(5)
    ]
    path = tmp_path / "sums.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def settings(**fields):
    fields = {"length": 64, "prompt_length": 40, "held_out": 0.2} | fields
    return Config(data=Data(**fields))


@pytest.mark.parametrize("chat", [True, False])
def test_given_answers_are_what_is_learnt(tokenizer, sums, chat):
    ask = settings(prompts=sums, answers="given", chat=chat)
    corpus = _corpus.read_prompts(ask, tokenizer)
    batch = corpus.sequences.batch(np.arange(len(corpus.train_prompts)))
    assert len(batch.tokens) == len(corpus.train_prompts)
    assert 0 < len(corpus.held_out_prompts) < 20
    for row, prompt in enumerate(corpus.train_prompts):
        assert batch.prompt_length[row] == len(prompt)
        assert batch.tokens[row, : len(prompt)].tolist() == prompt
        learnt = tokenizer.decode(batch.tokens[row][batch.mask[row]])
        asked = tokenizer.decode(prompt)
        a, b = (int(x) for x in asked.split("] ")[chat].split("?")[0].split(" + "))
        assert learnt.strip() == f"{a} and {b} make {a + b}.<end>"
    # Held-out questions are those of a run that draws the answers.
    drawn = _corpus.read_prompts(settings(prompts=sums, chat=chat), tokenizer)
    assert drawn.train is None
    assert drawn.train_prompts == corpus.train_prompts
    assert drawn.held_out_prompts == corpus.held_out_prompts
    # How each answer really goes on is known where answers are given.
    for prompt, answer in zip(
        corpus.held_out_prompts, corpus.held_out_references, strict=True
    ):
        a, b = tokenizer.decode(prompt).split("] ")[chat].split("?")[0].split(" + ")
        assert tokenizer.decode(answer).strip().startswith(f"{a} and {b} make ")
    assert drawn.held_out_references == []


def test_held_out_prompts_may_come_from_a_file_of_their_own(tokenizer, sums, tmp_path):
    path = tmp_path / "other.jsonl"
    others = [{"question": "1 + 2?", "answer": "3"}, {"question": "9 + 9?"}]
    path.write_text("".join(json.dumps(row) + "\n" for row in others))
    ask = settings(prompts=sums, held_out_prompts=str(path), max_prompts=7)
    corpus = _corpus.read_prompts(ask, tokenizer)
    asked = [tokenizer.decode(p) for p in corpus.held_out_prompts]
    assert ["1 + 2?" in asked[0], "9 + 9?" in asked[1], len(asked)] == [True, True, 2]
    assert len(corpus.train_prompts) == 7
    # What is measured on is never trained on.
    ask = settings(prompts=sums, held_out_prompts=str(path))
    corpus = _corpus.read_prompts(ask, tokenizer)
    assert len(corpus.train_prompts) == 39
    assert corpus.held_out_prompts[0] not in corpus.train_prompts


def test_what_is_too_long_is_left_out_and_counted(tokenizer, sums, capsys):
    def read(**fields):
        ask = settings(prompts=sums, answers="given", **fields)
        return _corpus.read_prompts(ask, tokenizer)

    whole = read()
    length = int(whole.sequences.length.max())
    few = read(length=length - 1, prompt_length=26)
    number = int((whole.sequences.length == length).sum())
    assert len(few.sequences.tokens) == len(whole.sequences.tokens) - number > 0
    said = capsys.readouterr().out
    assert f"{number} conversations longer than data.length={length - 1}" in said
    with pytest.raises(ValueError, match="exceed 10 tokens"):
        read(prompt_length=10)


def test_a_long_text_is_cut_so_that_some_is_held_out(tokenizer, tmp_path):
    text = "".join(f"{n} and {n} make {2 * n}.\n" for n in range(4000))
    (tmp_path / "sums.txt").write_text(text)
    ask = settings(text=str(tmp_path / "sums.txt"))
    documents = _corpus.read_documents(ask)
    assert len(documents) > 20
    assert "".join(d.text for d in documents) == text
    folder = tmp_path / "folder"
    folder.mkdir()
    for n in range(30):
        (folder / f"{n}.txt").write_text(f"{n} and {n}.")
    assert len(_corpus.read_documents(settings(text=str(folder)))) == 30


def test_settings_that_contradict_are_refused(sums):
    with pytest.raises(ValueError, match=r"data\.prompts or data\.text, not both"):
        settings(prompts=sums, text="a.txt")
    with pytest.raises(ValueError, match=r"data\.answers=given needs data\.prompts"):
        settings(answers="given")
