import json

import pytest
from tokenizers import processors

from specjax.data import (
    Conversation,
    Document,
    chat_examples,
    chat_prompts,
    load_conversations,
    load_documents,
    pad_examples,
    text_examples,
    text_prompts,
    train_bpe,
)

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
EOS = 2  # <|im_end|>, which pads too


def make_tokenizer(template=CHATML, prepends_bos=False):
    tokenizer = train_bpe(
        ["a question and its answer, user and assistant"],
        vocab_size=270,
        special_tokens=("<s>", "<|im_start|>", "<|im_end|>"),
    )
    tokenizer.eos_token = tokenizer.pad_token = "<|im_end|>"
    if prepends_bos:
        tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 0)]
        )
    tokenizer.chat_template = template
    return tokenizer


def said(*contents):
    roles = ("user", "assistant") * len(contents)
    rows = zip(roles, contents, strict=False)
    return [{"role": r, "content": c} for r, c in rows]


def pair(question, answer, category=""):
    return Conversation(tuple(said(question, answer)), category)


def write(path, *rows):
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return path


@pytest.mark.parametrize(
    ("prompt", "answer"),
    [
        ("question", "answer"),
        ("prompt", "completion"),
        ("prompt", "response"),
        ("text", "output"),
    ],
)
def test_an_answer_stands_in_a_field_of_its_own(tmp_path, prompt, answer):
    row = {"id": 1, prompt: "2 + 2?", answer: "It is\n#### 4", "category": "maths"}
    path = write(tmp_path / "a.jsonl", row)
    [found] = load_conversations(path)
    assert found == pair("2 + 2?", "It is\n#### 4", "maths")
    assert found.prompt.text == "2 + 2?"
    assert load_conversations(path, field=prompt, answer=answer) == [found]


def test_an_answer_stands_in_the_conversation(tmp_path):
    talk = said("Hi", "Yo", "Why?", "So")
    path = write(tmp_path / "a.jsonl", {"messages": talk, "answer": "not this"})
    assert load_conversations(path) == [Conversation(tuple(talk))]
    path = write(tmp_path / "b.jsonl", {"messages": [*talk, *said("And?")]})
    assert load_conversations(path) == [Conversation(tuple(talk))]
    # A prompt and a completion that are lists of messages both.
    path = write(tmp_path / "c.jsonl", {"prompt": talk[:3], "completion": talk[3:]})
    assert load_conversations(path) == [Conversation(tuple(talk))]
    # A field that is named takes the place of what the list ends with.
    path = write(tmp_path / "d.jsonl", {"messages": talk, "better": "Thus"})
    [found] = load_conversations(path, answer="better")
    assert [m["content"] for m in found.messages] == ["Hi", "Yo", "Why?", "Thus"]


def test_conversations_come_from_tables_too(tmp_path):
    import datasets

    rows = [{"question": "one", "answer": "1"}, {"question": "two", "answer": "2"}]
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "a.parquet")
    (tmp_path / "a.json").write_text(json.dumps(rows))
    (tmp_path / "a.csv").write_text("question,answer\none,1\ntwo,2\n")
    expected = [pair("one", "1"), pair("two", "2")]
    for name in ("a.parquet", "a.json", "a.csv"):
        assert load_conversations(tmp_path / name) == expected
        assert load_conversations(tmp_path / name, limit=1) == expected[:1]


@pytest.mark.parametrize(
    ("row", "options", "message"),
    [
        (None, {}, "a.jsonl holds no conversations"),
        ({"question": "x"}, {}, "line 1: none of the fields answer, .*are question$"),
        ({"turns": ["x", "y"]}, {}, "line 1: none of the fields answer, .*are turns$"),
        ({"question": "x", "answer": " "}, {}, "field 'answer': the answer is empty"),
        ({"question": " ", "answer": "x"}, {}, "field 'question': the prompt is empty"),
        ({"messages": said("x", " ")}, {}, "field 'messages': the answer is empty"),
        ({"messages": said("", "x")}, {}, "field 'messages': the prompt is empty"),
        ({"question": "x", "answer": 3}, {}, "field 'answer': expected a text"),
        (
            {"question": "x", "answer": "y"},
            {"answer": "anser"},
            "unknown field 'anser'; did you mean 'answer'",
        ),
        ({"question": "x"}, {"limit": 0}, "limit must be at least 1"),
    ],
)
def test_a_row_without_question_or_answer_is_refused(tmp_path, row, options, message):
    path = write(tmp_path / "a.jsonl", *([] if row is None else [row]))
    with pytest.raises(ValueError, match=message):
        load_conversations(path, **options)


@pytest.mark.parametrize("prepends_bos", [False, True])
@pytest.mark.parametrize("renders_bos", [False, True])
def test_training_and_rollouts_read_the_same_prompt_ids(prepends_bos, renders_bos):
    """One begin of text at most, in examples as in prompts.

    https://github.com/OpenRLHF/OpenRLHF/issues/393
    """
    template = ("{{ bos_token }}" if renders_bos else "") + CHATML
    tokenizer = make_tokenizer(template, prepends_bos)
    talks = [pair("Hi", "Yo"), Conversation(tuple(said("a", "b", "c", "d")))]
    for encode, prompts, bos in (
        (chat_examples, chat_prompts, renders_bos),
        (text_examples, text_prompts, prepends_bos),
    ):
        asked = prompts(tokenizer, [c.prompt for c in talks]).tokens
        for example, prompt in zip(encode(tokenizer, talks), asked, strict=True):
            assert list(example.tokens[: len(prompt)]) == prompt
            assert list(example.tokens).count(0) == bos
            assert not any(example.mask[:1]) and example.mask[len(prompt)]


def test_the_end_of_text_is_learnt_where_padding_has_its_id():
    """https://github.com/huggingface/trl/pull/6357"""
    tokenizer = make_tokenizer()
    talks = [pair("Hi", "Yo"), pair("A longer question?", "A longer answer.")]
    for examples in (chat_examples(tokenizer, talks), text_examples(tokenizer, talks)):
        width = max(len(e.tokens) for e in examples)
        padded = pad_examples(examples, width, tokenizer.pad_token_id)
        for row in range(2):
            learnt = padded.tokens[row][padded.mask[row]].tolist()
            assert learnt[-1] == EOS and EOS not in learnt[:-1]
            assert not padded.mask[row, padded.lengths[row] :].any()
            start = padded.prompt_lengths[row]
            assert not padded.mask[row, :start].any()
            text = tokenizer.decode(padded.tokens[row, start : padded.lengths[row] - 1])
            assert text.strip().startswith(talks[row].messages[-1]["content"])


def test_an_answer_to_plain_text_is_what_stands_behind_it():
    tokenizer = make_tokenizer()
    [example] = text_examples(tokenizer, [pair("Hi", "Yo")], separator=" => ")
    assert tokenizer.decode(example.tokens) == "Hi => Yo<|im_end|>"
    learnt = [t for t, m in zip(example.tokens, example.mask, strict=True) if m]
    assert tokenizer.decode(learnt) == " => Yo<|im_end|>"
    [example] = text_examples(tokenizer, [pair("Hi", "Yo")], eos_token_id=7)
    assert example.tokens[-1] == 7
    tokenizer.eos_token = None
    with pytest.raises(ValueError, match="has no end of text: give eos_token_id="):
        text_examples(tokenizer, [pair("Hi", "Yo")])


def test_a_merge_across_the_border_does_not_change_the_prompt():
    tokenizer = train_bpe(["ab ab ab ab"], vocab_size=260, special_tokens=("<s>",))
    assert len(tokenizer("ab")["input_ids"]) == 1
    [example] = text_examples(tokenizer, [pair("a", "b")], separator="")
    assert tokenizer.convert_ids_to_tokens(example.tokens) == ["a", "b", "<s>"]
    assert example.mask == [False, True, True]


def test_documents_come_from_rows_and_text_files(tmp_path):
    path = write(tmp_path / "a.jsonl", {"text": "one"}, {"text": " "}, {"text": "two"})
    assert load_documents(path) == [
        Document("a.jsonl:1", "one"),
        Document("a.jsonl:3", "two"),
    ]
    assert len(load_documents(path, max_chars=3)) == 1
    (tmp_path / "a.txt").write_text("one\n\ntwo\n")
    [whole] = load_documents(tmp_path / "a.txt")
    assert whole == Document("a.txt:1", "one\n\ntwo\n")
    with pytest.raises(ValueError, match="unknown field 'txet'; did you mean 'text'"):
        load_documents(path, field="txet")
    for name, text in (("b.txt", ""), ("b.jsonl", "")):
        (tmp_path / name).write_text(text)
        with pytest.raises(ValueError, match=rf"{name} holds no text in UTF-8"):
            load_documents(tmp_path / name)
    with pytest.raises(ValueError, match="none of the fields text, content"):
        load_documents(write(tmp_path / "c.jsonl", {"q": "x"}))
    with pytest.raises(ValueError, match="field 'text': expected a text, got '3'"):
        load_documents(write(tmp_path / "d.jsonl", {"text": 3}))
    with pytest.raises(FileNotFoundError, match="does not exist"):
        load_documents(tmp_path / "no.jsonl")
