"""Prompts: from a file, a data set, or the set that comes with the package."""

import importlib.resources
import itertools
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specjax.core import near

PACKAGED = "packaged"
# Looked for in this order where no field is named.
FIELDS = ("prompt", "question", "text", "messages", "conversations", "turns")
_FILE_TYPES = (".jsonl", ".txt", ".parquet")

Message = Mapping[str, str]  # {"role": "user", "content": "..."}
Row = tuple[str, Mapping[str, Any]]  # where it stands, for errors, and what it holds


@dataclass(frozen=True)
class Prompt:
    """What a model is asked: a conversation that ends where the model is to speak.

    Attributes:
        messages: each with a `role` and a `content`.
        category: what kind of prompt it is; empty if nobody said.
    """

    messages: tuple[Message, ...]
    category: str = ""

    @classmethod
    def of(cls, text: str, category: str = "") -> "Prompt":
        """A prompt of one user message."""
        return cls(({"role": "user", "content": text},), category)

    @property
    def text(self) -> str:
        """The last message."""
        return self.messages[-1]["content"]


def packaged_prompts(split: str = "train") -> list[Prompt]:
    """The prompts that come with specjax: a few hundred, of eleven kinds.

    Args:
        split: `train` or `eval`; no prompt is in both.

    Raises:
        ValueError: another split.
    """
    return load_prompts(PACKAGED, split=split)


def load_prompts(
    source: str | os.PathLike,
    *,
    field: str | None = None,
    split: str | None = None,
    subset: str | None = None,
    limit: int | None = None,
) -> list[Prompt]:
    """Reads prompts.

    A field may hold a text, a list of messages (`role` and `content`, or `from` and
    `value`; what the assistant says last is left out, as the model is to say it), or a
    list of texts, the user's turns, of which the first is taken.

    Args:
        source: `packaged`; a `.jsonl`, `.parquet` or `.txt` file (one prompt a line);
            or a data set's id on the Hugging Face hub.
        field: the field with the prompt; None: the first there is of `prompt`,
            `question`, `text`, `messages`, `conversations` and `turns`.
        split: of a data set (default: `train`); of a file, the rows whose field
            `split` says so (default: all rows).
        subset: the data set's configuration, if it has several.
        limit: stop after so many prompts.

    Returns:
        At least one prompt, in the order of the source.

    Raises:
        FileNotFoundError: the file is missing.
        ValueError: no prompt, an unknown field, or a row that cannot be read; the
            message names file and line.

    Example:
        >>> load_prompts("packaged", split="eval", limit=1)[0].messages[0]["role"]
        'user'
    """
    if limit is not None and limit < 1:
        raise ValueError(f"limit must be at least 1 prompt or None, got {limit}")
    source = os.fspath(source)
    rows = _rows(source, split, subset, limit)
    prompts = list(itertools.islice(_prompts(rows, field), limit))
    if not prompts:
        raise ValueError(f"{source} holds no prompts")
    return prompts


def _rows(
    source: str, split: str | None, subset: str | None, limit: int | None
) -> Iterator[Row]:
    if source == PACKAGED:
        file = importlib.resources.files("specjax.data") / "chat_prompts.jsonl"
        text = file.read_text(encoding="utf-8")
        return _of_split(_json_rows("chat_prompts.jsonl", text), split or "train")
    path = Path(source).expanduser()
    if path.is_file():
        return _of_split(_file_rows(path), split)
    if path.is_dir():
        raise ValueError(
            f"{source} is a folder; name a file, one of " + ", ".join(_FILE_TYPES)
        )
    is_id = re.fullmatch(r"[\w.-]+(/[\w.-]+)?", source)
    if path.suffix in (*_FILE_TYPES, ".json") or not is_id:
        raise FileNotFoundError(f"the prompt file {source} does not exist")
    return _data_set_rows(source, split or "train", subset, limit)


def _file_rows(path: Path) -> Iterator[Row]:
    if path.suffix == ".parquet":
        return _parquet_rows(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not a text in UTF-8") from None
    if path.suffix == ".jsonl":
        return _json_rows(str(path), text)
    if path.suffix == ".txt":
        return _text_rows(str(path), text)
    raise ValueError(
        f"{path}: prompts are read from " + ", ".join(_FILE_TYPES) + " files"
    )


def _text_rows(name: str, text: str) -> Iterator[Row]:
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            yield f"{name}, line {number}", {"text": line.strip()}


def _json_rows(name: str, text: str) -> Iterator[Row]:
    # Not splitlines: a JSON text may hold other line separators than \n.
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        where = f"{name}, line {number}"
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(
                f"{where} is not JSON: {error.msg} at character {error.pos + 1}"
            ) from None
        if not isinstance(row, dict):
            raise ValueError(f"{where}: expected an object, got {line.strip()[:40]}")
        yield where, row


def _parquet_rows(path: Path) -> Iterator[Row]:
    import datasets  # slow to import, and most runs do not need it

    try:
        # Streaming leaves no copy in the user's cache.
        rows = datasets.load_dataset(
            "parquet", data_files=str(path), split="train", streaming=True
        )
        for number, row in enumerate(rows, 1):
            yield f"{path}, row {number}", row
    except Exception as error:
        raise ValueError(f"{path} cannot be read as Parquet: {error}") from error


def _data_set_rows(
    source: str, split: str, subset: str | None, limit: int | None
) -> Iterator[Row]:
    import datasets

    try:
        rows = datasets.load_dataset(
            source, subset, split=split, streaming=limit is not None
        )
    except Exception as error:
        raise ValueError(
            f"{source} is neither a file here nor a data set that could be loaded: "
            f"{error}"
        ) from error
    for number, row in enumerate(rows, 1):
        yield f"{source}, row {number}", row


def _of_split(rows: Iterator[Row], split: str | None) -> Iterator[Row]:
    if split is None:
        yield from rows
        return
    found, seen = False, set()
    for where, row in rows:
        if "split" not in row:
            raise ValueError(f"{where} has no field 'split' to choose {split!r} by")
        seen.add(str(row["split"]))
        if row["split"] == split:
            found = True
            yield where, row
    if seen and not found:
        raise ValueError(f"unknown split {split!r}; {near(split, seen)}")


def _prompts(rows: Iterator[Row], field: str | None) -> Iterator[Prompt]:
    for where, row in rows:
        if field is None:
            field = next((name for name in FIELDS if name in row), None)
            if field is None:
                raise ValueError(
                    f"{where}: none of the fields {', '.join(FIELDS)}; name one with "
                    f"field=..., there are {', '.join(row) or 'none'}"
                )
        if field not in row:
            raise ValueError(f"{where}: unknown field {field!r}; {near(field, row)}")
        category = row.get("category")
        yield Prompt(
            _messages(f"{where}, field {field!r}", row[field]),
            category if isinstance(category, str) else "",
        )


def _messages(where: str, value: Any) -> tuple[Message, ...]:
    """The conversation that a field's value stands for, up to the model's turn."""
    if isinstance(value, str):
        messages = [{"role": "user", "content": value}]
    elif isinstance(value, Sequence) and value and isinstance(value[0], str):
        messages = [{"role": "user", "content": value[0]}]
    elif isinstance(value, Sequence) and all(isinstance(m, Mapping) for m in value):
        messages = [_message(where, m) for m in value]
    else:
        raise ValueError(
            f"{where}: expected a text, a list of messages or a list of texts, "
            f"got {str(value)[:40]!r}"
        )
    while messages and messages[-1]["role"] == "assistant":
        messages.pop()
    if not messages or not messages[-1]["content"].strip():
        raise ValueError(f"{where}: the prompt is empty")
    return tuple(messages)


def _message(where: str, message: Mapping[str, Any]) -> Message:
    role = message.get("role", message.get("from"))
    content = message.get("content", message.get("value"))
    if not isinstance(role, str) or not isinstance(content, str):
        raise ValueError(
            f"{where}: a message needs a text as role and one as content, "
            f"got the fields {', '.join(message)}"
        )
    role = {"human": "user", "gpt": "assistant"}.get(role, role)
    return {"role": role, "content": content}
