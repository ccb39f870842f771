import json
from collections import Counter

import pytest

from specjax.data import Prompt, load_prompts, packaged_prompts


def write_jsonl(path, *rows):
    text = "".join(json.dumps(r, ensure_ascii=False) + "\n" for r in rows)
    path.write_text(text, encoding="utf-8")
    return path


def test_the_packaged_prompts_are_many_varied_and_split():
    train, held_out = packaged_prompts("train"), packaged_prompts("eval")
    texts = [p.text for p in train + held_out]
    assert len(texts) >= 320
    assert len(set(texts)) == len(texts)
    assert 0.10 < len(held_out) / len(texts) < 0.15
    kinds = Counter(p.category for p in train)
    assert len(kinds) == 11
    assert set(kinds) == {p.category for p in held_out}
    assert max(map(len, texts)) < 400


def test_no_two_packaged_prompts_are_alike():
    words = [
        frozenset(p.text.lower().split())
        for split in ("train", "eval")
        for p in packaged_prompts(split)
    ]
    for i, a in enumerate(words):
        assert not [b for b in words[:i] if len(a & b) > 0.5 * len(a | b)]


def test_an_unknown_packaged_split_names_the_others():
    with pytest.raises(ValueError, match="unknown split 'evl'; did you mean 'eval'"):
        packaged_prompts("evl")


@pytest.mark.parametrize("field", ["prompt", "question", "text"])
def test_jsonl_finds_the_usual_fields(tmp_path, field):
    path = write_jsonl(
        tmp_path / "a.jsonl", {"id": 1, field: "Why?"}, {field: "é\u2028"}
    )
    assert load_prompts(path) == [Prompt.of("Why?"), Prompt.of("é\u2028")]


def test_jsonl_takes_a_named_field_a_category_and_a_limit(tmp_path):
    rows = [{"prompt": "no", "ask": f"{i}", "category": "c"} for i in range(3)]
    path = write_jsonl(tmp_path / "a.jsonl", *rows)
    prompts = load_prompts(path, field="ask", limit=2)
    assert prompts == [Prompt.of("0", "c"), Prompt.of("1", "c")]


def test_a_conversation_ends_where_the_model_is_to_speak(tmp_path):
    said = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": "Why?"},
        {"role": "assistant", "content": "Because."},
    ]
    path = write_jsonl(tmp_path / "a.jsonl", {"messages": said})
    assert load_prompts(path) == [Prompt(tuple(said[:4]))]
    other = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]
    path = write_jsonl(tmp_path / "b.jsonl", {"conversations": other})
    assert load_prompts(path) == [Prompt.of("Hi")]
    path = write_jsonl(tmp_path / "c.jsonl", {"turns": ["Hi", "Again"]})
    assert load_prompts(path) == [Prompt.of("Hi")]


def test_text_files_hold_a_prompt_a_line(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("one\n\n  two \r\nthree")
    assert [p.text for p in load_prompts(path)] == ["one", "two", "three"]


def test_a_file_is_split_by_its_own_field(tmp_path):
    rows = [{"prompt": s, "split": s} for s in ("train", "eval", "train")]
    path = write_jsonl(tmp_path / "a.jsonl", *rows)
    assert len(load_prompts(path)) == 3
    assert len(load_prompts(path, split="train")) == 2
    with pytest.raises(ValueError, match="unknown split 'test'; known: eval, train"):
        load_prompts(path, split="test")
    path = write_jsonl(tmp_path / "b.jsonl", {"prompt": "x"})
    with pytest.raises(ValueError, match="line 1 has no field 'split'"):
        load_prompts(path, split="train")


def test_parquet(tmp_path):
    import datasets

    path = tmp_path / "a.parquet"
    said = [{"role": "user", "content": "Hi"}]
    datasets.Dataset.from_list(
        [{"question": "one", "chat": said}, {"question": "two", "chat": said}]
    ).to_parquet(path)
    assert [p.text for p in load_prompts(path)] == ["one", "two"]
    assert [p.text for p in load_prompts(path, field="chat")] == ["Hi", "Hi"]
    assert [p.text for p in load_prompts(path, limit=1)] == ["one"]
    with pytest.raises(ValueError, match=r"a\.parquet, row 1: unknown field 'quest'"):
        load_prompts(path, field="quest")
    path.write_bytes(b"no")
    with pytest.raises(ValueError, match="cannot be read as Parquet"):
        load_prompts(path)


def test_a_stream_that_breaks_off_says_so(monkeypatch):
    import datasets

    def rows():
        yield {"prompt": "one"}
        raise ConnectionError("gone")

    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: rows())
    with pytest.raises(ValueError, match=r"owner/name is neither .*: gone"):
        load_prompts("owner/name")
    assert load_prompts("owner/name", limit=1) == [Prompt.of("one")]


def test_a_saved_data_set(tmp_path):
    import datasets

    rows = [{"question": "one", "split": "a"}, {"question": "two", "split": "b"}]
    one = datasets.Dataset.from_list(rows)
    one.save_to_disk(tmp_path / "one")
    assert [p.text for p in load_prompts(tmp_path / "one")] == ["one", "two"]
    assert [p.text for p in load_prompts(tmp_path / "one", split="b")] == ["two"]
    both = datasets.DatasetDict(train=one.select([0]), test=one.select([1]))
    both.save_to_disk(tmp_path / "both")
    assert [p.text for p in load_prompts(tmp_path / "both")] == ["one"]
    assert [p.text for p in load_prompts(tmp_path / "both", split="test")] == ["two"]
    with pytest.raises(ValueError, match="unknown split 'tset'; did you mean 'test'"):
        load_prompts(tmp_path / "both", split="tset")
    (tmp_path / "one" / "state.json").write_text("{")
    with pytest.raises(ValueError, match="one cannot be read as a saved data set"):
        load_prompts(tmp_path / "one")


def test_a_json_array_holds_objects_or_texts(tmp_path):
    path = tmp_path / "a.json"
    path.write_text(json.dumps([{"prompt": "one\u2028", "category": "c"}], indent=1))
    assert load_prompts(path) == [Prompt.of("one\u2028", "c")]
    path.write_text('["one", "two"]')
    assert [p.text for p in load_prompts(path)] == ["one", "two"]


def test_csv_has_a_header_and_holds_lists_as_json(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text('\ufeffid,question\r\n1,"a, ""b""\nc"\r\n\r\n2,é\r\n')
    assert [p.text for p in load_prompts(path)] == ['a, "b"\nc', "é"]
    path.write_text('turns,category\n"[""Hi"", ""Again""]",chat\n')
    assert load_prompts(path) == [Prompt.of("Hi", "chat")]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.json", "", r"a\.json holds no prompts"),
        ("a.json", "[]", r"a\.json holds no prompts"),
        ("a.json", '[{"a"', r"a\.json is not JSON: Expecting .* at character 6"),
        ("a.json", '{"prompt": "x"}', "expected a JSON array of objects, .*a .jsonl"),
        (
            "a.json",
            '[{"prompt": "x"}, 3]',
            "row 2: expected an object or a text, got 3",
        ),
        ("a.json", '[{"q": "x"}]', "row 1: none of the fields prompt, .*there are q$"),
        ("a.csv", "", r"a\.csv holds no prompts"),
        ("a.csv", "prompt\n", r"a\.csv holds no prompts"),
        ("a.csv", "id,prompt\n1,x\n2\n", "row 2 has 1 cells, its header 2"),
        ("a.csv", "id,prompt\n1,x,y\n", "row 1 has 3 cells, its header 2"),
        ("a.csv", 'prompt\n"x\n', r"a\.csv, line 2 is not CSV: unexpected end"),
        ("a.csv", "messages\nHi\n", "row 1, field 'messages' is not JSON"),
    ],
)
def test_a_bad_array_or_table_says_what_is_wrong(tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=message) as error:
        load_prompts(tmp_path / name)
    assert name in str(error.value)


def test_a_data_set_of_the_hub(monkeypatch):
    import datasets

    calls = []

    def load_dataset(*args, **kwargs):
        calls.append((args, kwargs))
        if args[0] == "no/such":
            raise ConnectionError("offline")
        return [{"prompt": "one"}, {"prompt": "two"}]

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert len(load_prompts("owner/name", subset="main", split="test")) == 2
    assert load_prompts("owner/name", limit=1) == [Prompt.of("one")]
    assert calls == [
        (("owner/name", "main"), {"split": "test", "streaming": False}),
        (("owner/name", None), {"split": "train", "streaming": True}),
    ]
    with pytest.raises(
        ValueError, match=r"neither a file here nor a data set.*offline"
    ):
        load_prompts("no/such")


@pytest.mark.parametrize(
    ("text", "field", "message"),
    [
        ("", None, r"a\.jsonl holds no prompts"),
        ("\n\n", None, r"a\.jsonl holds no prompts"),
        ('{"a": 1}\n', None, r"line 1: none of the fields prompt, .*there are a$"),
        ('{"prompt": "x"}\n', "promt", "unknown field 'promt'; did you mean 'prompt'"),
        ('{"prompt": "x"}\n\n{"q": "y"}', None, "line 3: unknown field 'prompt'"),
        ('{"prompt": "x"}\n{"prompt": \n', None, r"a\.jsonl, line 2 is not JSON: Exp"),
        ('["x"]', None, r"line 1: expected an object, got \[\"x\"\]"),
        ('{"prompt": 3}', None, "line 1, field 'prompt': expected a text"),
        ('{"prompt": " "}', None, "line 1, field 'prompt': the prompt is empty"),
        ('{"prompt": [{"role": "user"}]}', None, "a message needs a text as role"),
        (
            '{"messages": [{"role": "assistant", "content": "x"}]}',
            None,
            "field 'messages': the prompt is empty",
        ),
        ('{"messages": []}', None, "field 'messages': the prompt is empty"),
    ],
)
def test_a_bad_file_says_what_is_wrong_and_where(tmp_path, text, field, message):
    path = tmp_path / "a.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=message) as error:
        load_prompts(path, field=field)
    assert "a.jsonl" in str(error.value)


def test_a_source_that_is_no_file_says_so(tmp_path):
    for missing in (tmp_path / "a.jsonl", "a.txt", "some/deep/path", "~/x.parquet"):
        with pytest.raises(
            FileNotFoundError, match=r"the prompt file .* does not exist"
        ):
            load_prompts(missing)
    with pytest.raises(ValueError, match=r"is a folder, and not one .* name a file"):
        load_prompts(tmp_path)
    (tmp_path / "a.xml").write_text("a,b")
    with pytest.raises(ValueError, match=r"read from \.jsonl, .*, \.parquet files"):
        load_prompts(tmp_path / "a.xml")
    (tmp_path / "b.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="is not a text in UTF-8"):
        load_prompts(tmp_path / "b.txt")
    with pytest.raises(ValueError, match="limit must be at least 1"):
        load_prompts("packaged", limit=0)
