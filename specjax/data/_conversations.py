"""Conversations with their answers, from files and data sets: text to learn from."""

import functools
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from specjax.data._chat import chat_example, text_prompts
from specjax.data._completions import Example
from specjax.data._prompts import (
    FIELDS,
    Message,
    Prompt,
    find_field,
    load_rows,
    read_category,
    read_messages,
)
from specjax.data._rows import Row

# Looked for in this order where a row's conversation has no answer in it.
ANSWERS = ("answer", "completion", "response", "output")


@dataclass(frozen=True)
class Conversation:
    """A conversation that ends with what the assistant says.

    Attributes:
        messages: each with a `role` and a `content`.
        category: what kind of prompt it is; empty if nobody said.
    """

    messages: tuple[Message, ...]
    category: str = ""

    @property
    def prompt(self) -> Prompt:
        """All but the last answer."""
        return Prompt(self.messages[:-1], self.category)


def load_conversations(
    source: str | os.PathLike,
    *,
    field: str | None = None,
    answer: str | None = None,
    split: str | None = None,
    subset: str | None = None,
    limit: int | None = None,
) -> list[Conversation]:
    """Reads prompts with their answers, from what `load_prompts` reads.

    The answers are those in a list of messages that ends with one. Any other row holds
    its answer in a field of its own, a text or a list of messages, as in GSM8K's
    `question` and `answer`; without such a field, what comes behind the last answer in
    the list is left out.

    Args:
        source: as in `load_prompts`.
        field: as in `load_prompts`.
        answer: the field with the answer, which takes the place of one in the list;
            None: where it is needed, the first there is of `answer`, `completion`,
            `response` and `output`.
        split: as in `load_prompts`.
        subset: as in `load_prompts`.
        limit: stop after so many conversations.

    Returns:
        At least one conversation, in the order of the source.

    Raises:
        FileNotFoundError: the file is missing.
        ValueError: no conversation, an unknown field, an empty prompt or answer, or a
            row that cannot be read; the message names file and line.
    """
    found = functools.partial(_conversations, field=field, answer=answer)
    return load_rows(found, "conversation", source, split, subset, limit)


def chat_examples(
    tokenizer: PreTrainedTokenizerBase,
    conversations: Sequence[Conversation],
    options: Mapping[str, Any] | None = None,
) -> list[Example]:
    """Each conversation by the tokeniser's chat template, see `chat_example`.

    `pad_examples` brings them to one shape, and says what to do with long ones.
    """
    return [chat_example(tokenizer, c.messages, options) for c in conversations]


def text_examples(
    tokenizer: PreTrainedTokenizerBase,
    conversations: Sequence[Conversation],
    *,
    separator: str = "\n",
    eos_token_id: int | None = None,
) -> list[Example]:
    """The last prompt and its answer as plain text, for a model without a chat form.

    The prompt has the ids that `text_prompts` gives it, so that rollouts start from
    what was trained on. The loss is on separator, answer and end of text.

    Args:
        tokenizer: any tokeniser.
        conversations: what to encode.
        separator: what stands between prompt and answer.
        eos_token_id: what ends an answer; None: the tokeniser's end of text.

    Raises:
        ValueError: there is no end of text.
    """
    eos = tokenizer.eos_token_id if eos_token_id is None else eos_token_id
    if eos is None:
        raise ValueError(
            "the tokeniser has no end of text: give eos_token_id=, or the model never "
            "learns to stop"
        )
    prompts = text_prompts(tokenizer, [c.prompt for c in conversations]).tokens
    examples = []
    for prompt, conversation in zip(prompts, conversations, strict=True):
        asked = conversation.prompt.text
        said = separator + conversation.messages[-1]["content"]
        answer = [*_continuation(tokenizer, prompt, asked, said), eos]
        mask = [False] * len(prompt) + [True] * len(answer)
        examples.append(Example([*prompt, *answer], mask))
    return examples


def _continuation(
    tokenizer: PreTrainedTokenizerBase, prompt: list[int], asked: str, said: str
) -> list[int]:
    """Ids of what was said: as they stand in the whole text, if that keeps the prompt.

    By itself a text may begin otherwise: some tokenisers put a space before it.
    """
    whole = text_prompts(tokenizer, [asked + said]).tokens[0]
    if whole[: len(prompt)] == prompt:
        return whole[len(prompt) :]
    return tokenizer(said, add_special_tokens=False, verbose=False)["input_ids"]


def _conversations(
    rows: Iterator[Row], field: str | None, answer: str | None
) -> Iterator[Conversation]:
    for where, row in rows:
        field = field or find_field(where, row, FIELDS, "field")
        messages, place = read_messages(where, row, field), field
        ends = bool(messages) and messages[-1]["role"] == "assistant"
        if answer is not None or (not ends and any(name in row for name in ANSWERS)):
            place = answer or find_field(where, row, ANSWERS, "answer")
            while messages and messages[-1]["role"] == "assistant":
                messages.pop()
            messages += _answer(where, row, place)
        elif not any(m["role"] == "assistant" for m in messages):
            find_field(where, row, ANSWERS, "answer")  # says which fields there are
        while messages and messages[-1]["role"] != "assistant":
            messages.pop()
        if not messages or not messages[-1]["content"].strip():
            raise ValueError(f"{where}, field {place!r}: the answer is empty")
        if not any(m["content"].strip() for m in messages[:-1]):
            raise ValueError(f"{where}, field {field!r}: the prompt is empty")
        yield Conversation(tuple(messages), read_category(row))


def _answer(where: str, row: Mapping[str, Any], field: str) -> list[Message]:
    """What an answer's field says; a bare text is the assistant's."""
    messages = read_messages(where, row, field)
    if isinstance(row[field], str):
        return [{"role": "assistant", "content": row[field]}]
    return messages
