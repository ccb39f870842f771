"""Prompts: from a file, a data set, or the set that comes with the package."""

import functools
import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from specjax.core import near
from specjax.data._rows import PACKAGED, Row, read_rows

# Looked for in this order where no field is named.
FIELDS = ("prompt", "question", "text", "messages", "conversations", "turns")

T = TypeVar("T")

Message = Mapping[str, str]  # {"role": "user", "content": "..."}


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
        source: `packaged`; a `.jsonl` file, a `.json` array of objects or texts, a
            `.csv` file with a header (lists in it as JSON), a `.parquet` file, a `.txt`
            file (one prompt a line); a folder that `Dataset.save_to_disk` wrote; or a
            data set's id on the Hugging Face hub.
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
    found = functools.partial(_prompts, field=field)
    return load_rows(found, "prompt", source, split, subset, limit)


def load_rows(
    make: Callable[[Iterator[Row]], Iterator[T]],
    what: str,
    source: str | os.PathLike,
    split: str | None,
    subset: str | None,
    limit: int | None,
) -> list[T]:
    """What is made of the first rows of a source: at least one, at most `limit`.

    Raises:
        ValueError: a limit below 1, or there is none; says `what`.
    """
    if limit is not None and limit < 1:
        raise ValueError(f"limit must be at least 1 {what} or None, got {limit}")
    source = os.fspath(source)
    rows = read_rows(source, split, subset, limit)
    made = list(itertools.islice(make(rows), limit))
    if not made:
        raise ValueError(f"{source} holds no {what}s")
    return made


def _prompts(rows: Iterator[Row], field: str | None) -> Iterator[Prompt]:
    for where, row in rows:
        field = field or find_field(where, row, FIELDS, "field")
        messages = read_messages(where, row, field)
        while messages and messages[-1]["role"] == "assistant":
            messages.pop()
        if not messages or not messages[-1]["content"].strip():
            raise ValueError(f"{where}, field {field!r}: the prompt is empty")
        yield Prompt(tuple(messages), read_category(row))


def find_field(
    where: str, row: Mapping[str, Any], known: Sequence[str], argument: str
) -> str:
    """The first of the known fields that a row has."""
    found = next((name for name in known if name in row), None)
    if found is None:
        raise ValueError(
            f"{where}: none of the fields {', '.join(known)}; name one with "
            f"{argument}=..., there are {', '.join(row) or 'none'}"
        )
    return found


def read_category(row: Mapping[str, Any]) -> str:
    """What kind of prompt it is, if the row says so."""
    category = row.get("category")
    return category if isinstance(category, str) else ""


def read_messages(where: str, row: Mapping[str, Any], field: str) -> list[Message]:
    """The conversation that a field's value stands for.

    Raises:
        ValueError: there is no such field, or it holds something else.
    """
    if field not in row:
        raise ValueError(f"{where}: unknown field {field!r}; {near(field, row)}")
    where, value = f"{where}, field {field!r}", row[field]
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if isinstance(value, Sequence) and value and isinstance(value[0], str):
        return [{"role": "user", "content": value[0]}]
    if isinstance(value, Sequence) and all(isinstance(m, Mapping) for m in value):
        return [_message(where, m) for m in value]
    raise ValueError(
        f"{where}: expected a text, a list of messages or a list of texts, "
        f"got {str(value)[:40]!r}"
    )


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
