"""From conversations to token ids, with one begin of text, and which ids were said.

Everything that reads a prompt goes through here: training, rollouts, evaluation and the
command line see the same ids.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from specjax.data._completions import Example
from specjax.data._prompts import Message, Prompt


@dataclass(frozen=True)
class EncodedPrompts:
    """Token ids of prompts, and which of the prompts they are.

    Attributes:
        tokens: the ids of each prompt that stayed.
        kept: its place among the prompts that came in.
        num_dropped: how many were too long.
    """

    tokens: list[list[int]]
    kept: list[int]
    num_dropped: int


def chat_prompts(
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt | str],
    *,
    max_length: int | None = None,
    overlong: str = "raise",
    options: Mapping[str, Any] | None = None,
) -> EncodedPrompts:
    """Renders prompts by the tokeniser's chat template, up to the model's turn.

    The template alone decides about special tokens: the tokeniser adds none, so that a
    template that begins with the begin of text does not end up with two of them.

    Args:
        tokenizer: one with a chat template.
        prompts: prompts, or texts that are one user message each.
        max_length: the most tokens a prompt may have; None: any number.
        overlong: `raise` a ValueError for a longer one, or `drop` it.
        options: variables of the template, such as `{"enable_thinking": False}`.

    Returns:
        The ids, and what was dropped.

    Raises:
        ValueError: no chat template, an over-long prompt, or none left.
    """
    rendered = [
        render(tokenizer, _prompt(p).messages, options=options) for p in prompts
    ]
    encoded = [_ids(tokenizer, text) for text in rendered]
    return _select(encoded, max_length, overlong)


def text_prompts(
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt | str],
    *,
    max_length: int | None = None,
    overlong: str = "raise",
) -> EncodedPrompts:
    """Encodes the last message of prompts as plain text to continue.

    The tokeniser adds its begin of text, if it has such a habit, unless the text begins
    with it already.

    Args:
        tokenizer: any tokeniser.
        prompts: as in `chat_prompts`.
        max_length: as in `chat_prompts`.
        overlong: as in `chat_prompts`.

    Returns:
        The ids, and what was dropped.

    Raises:
        ValueError: an over-long prompt, or none left.
    """
    texts = [_prompt(p).text for p in prompts]
    encoded = [_ids(tokenizer, text, special=True) for text in texts]
    return _select(encoded, max_length, overlong)


def render(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    *,
    add_generation_prompt: bool = True,
    options: Mapping[str, Any] | None = None,
) -> str:
    """The text of a conversation by the tokeniser's chat template."""
    if not tokenizer.chat_template:
        raise ValueError(
            "the tokeniser has no chat template: encode the prompts as plain text, or "
            "use an instruction-tuned model's tokeniser"
        )
    return tokenizer.apply_chat_template(  # pyright: ignore[reportReturnType]
        [dict(message) for message in messages],
        tokenize=False,
        add_generation_prompt=add_generation_prompt,
        **(options or {}),
    )


def chat_example(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    options: Mapping[str, Any] | None = None,
) -> Example:
    """A whole conversation to train on: the loss is on what the assistant says.

    What it says ends with its end of turn; the template's headers are not part of it.
    Where it starts and ends is found by rendering the conversation up to each turn, so
    that the template needs no marks of its own.

    Args:
        tokenizer: a fast one, with a chat template.
        messages: the conversation, with at least one assistant message.
        options: variables of the template.

    Returns:
        The ids of the conversation, and which of them the assistant said.

    Raises:
        ValueError: nothing said, or a template that renders a turn differently once
            others follow.
    """
    whole = render(tokenizer, messages, add_generation_prompt=False, options=options)
    spans = []
    for turn, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = render(tokenizer, messages[:turn], options=options)
        through = render(
            tokenizer,
            messages[: turn + 1],
            add_generation_prompt=False,
            options=options,
        )
        if not (whole.startswith(through) and through.startswith(before)):
            raise ValueError(
                f"the chat template renders message {turn} differently once others "
                "follow: train on one answer at a time"
            )
        spans.append((len(before), len(through)))
    if not spans:
        raise ValueError("the conversation has no assistant message to learn from")
    encoded = tokenizer(
        whole, add_special_tokens=False, return_offsets_mapping=True, verbose=False
    )
    tokens, offsets = encoded["input_ids"], encoded["offset_mapping"]
    mask = [False] * len(tokens)
    for start, end in spans:
        inside = [i for i, (a, b) in enumerate(offsets) if a >= start and b <= end]
        for i in _until_end_of_turn(tokenizer, tokens, inside):
            mask[i] = True
    return Example(tokens, mask)


def _until_end_of_turn(
    tokenizer: PreTrainedTokenizerBase, tokens: list[int], turn: list[int]
) -> list[int]:
    """Drops the white space that a template puts behind its end of turn."""
    special = set(tokenizer.all_special_ids)
    special |= {i for i, t in tokenizer.added_tokens_decoder.items() if t.special}
    ends = [place for place, i in enumerate(turn) if tokens[i] in special]
    if not ends:
        return turn
    behind = tokenizer.decode([tokens[i] for i in turn[ends[-1] + 1 :]])
    return turn if str(behind).strip() else turn[: ends[-1] + 1]


def _prompt(prompt: Prompt | str) -> Prompt:
    return Prompt.of(prompt) if isinstance(prompt, str) else prompt


def _ids(
    tokenizer: PreTrainedTokenizerBase, text: str, special: bool = False
) -> list[int]:
    bos = tokenizer.bos_token
    special = special and not (bos and text.startswith(str(bos)))
    return tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"]


def _select(
    encoded: list[list[int]], max_length: int | None, overlong: str
) -> EncodedPrompts:
    if overlong not in ("raise", "drop"):
        raise ValueError(f"overlong must be 'raise' or 'drop', got {overlong!r}")
    too_long = [
        i
        for i, t in enumerate(encoded)
        if max_length is not None and len(t) > max_length
    ]
    if too_long and overlong == "raise":
        raise ValueError(
            f"{len(too_long)} of {len(encoded)} prompts have more than "
            f"{max_length} tokens (prompt {too_long[0]}: "
            f"{len(encoded[too_long[0]])}); allow more, or drop them"
        )
    if encoded and len(too_long) == len(encoded):
        raise ValueError(f"all {len(encoded)} prompts exceed {max_length} tokens")
    dropped = set(too_long)
    kept = [i for i in range(len(encoded)) if i not in dropped]
    return EncodedPrompts([encoded[i] for i in kept], kept, len(too_long))
